//! `df11 verify`: is every bit there?

use std::{path::PathBuf, time::Instant};

use clap::{Args, ValueEnum};
use df11::{
    Error, Level, Model,
    open::{Purpose, Verification},
};
use serde_json::json;

use super::{
    Answer, Failure, Session,
    device::{DecodedBy, DeviceArgs},
    session::{Threads, open_to_stream},
    text,
};

const AFTER_HELP: &str = "\
Examples:
  df11 verify Llama-3.1-8B.df11
  df11 verify --level checksums Llama-3.1-8B-df11/ && echo good
  df11 verify --device gpu Llama-3.1-8B.df11    that a GPU decodes every bit

Exit code 1 says that the container is damaged, 2 that it, or some of it, could not be checked, or that a folder lacks
shards.";

/// Check a container, or all shards of a folder
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Verify {
    /// A container, or a folder of shards
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// How much is checked
    #[arg(long, value_enum, default_value_t = LevelName::Full)]
    level: LevelName,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Clone, Copy, ValueEnum)]
enum LevelName {
    /// Directory, prefixes and padding; takes milliseconds
    Structure,
    /// The checksums of all stored bytes too
    Checksums,
    /// Everything: LUTs, indexes, and the hashes of all decoded tensors and original files
    Full,
}

impl LevelName {
    const fn level(self) -> Level {
        match self {
            Self::Structure => Level::Structure,
            Self::Checksums => Level::Checksums,
            Self::Full => Level::Full,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Structure => "structure",
            Self::Checksums => "checksums",
            Self::Full => "full",
        }
    }
}

impl Verify {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let start = Instant::now();
        let model = open_to_stream(&self.source).map_err(failed)?;
        let (found, device) = self.threads.run(|| self.check(&model, session))?;
        let answer = self.answer(&model, &found, device.as_ref(), start.elapsed().as_secs_f64());
        // A folder is to hold a model; a container alone is a shard that was asked for.
        if model.folder().is_some() && !model.is_complete() {
            return Err(self.incomplete(&model, answer));
        }
        Ok(answer)
    }

    /// What was found, and what has decoded.
    fn check(&self, model: &Model, session: &Session) -> Result<(Verification, Option<DecodedBy>), Failure> {
        let level = self.level.level();
        if level < Level::Full {
            if self.device.is_gpu() {
                let problem = format!("the level {} decodes nothing", self.level.name());
                return Err(Error::parameter(problem, "leave out --device, or verify in full").into());
            }
            return Ok((model.verify(level, &session.progress()).map_err(failed)?, None));
        }
        let chosen = self.device.choose(model, Some(Purpose::Verify), session)?;
        let found = model.verify_with(level, chosen.decoder(), &session.progress()).map_err(failed)?;
        Ok((found, Some(chosen.device)))
    }

    /// What is there is good, and this is missing.
    fn incomplete(&self, model: &Model, answer: Answer) -> Failure {
        let (shards, count) = (model.missing_shards(), model.shard_count());
        let files = model.missing_files().unwrap_or_default();
        let mut json = answer.json;
        json["good"] = false.into();
        json["missing_shards"] = json!(shards);
        json["missing_files"] = json!(files);
        let numbers: Vec<String> = shards.iter().map(|index| (index + 1).to_string()).collect();
        let noun = if shards.len() == 1 { "shard" } else { "shards" };
        let mut problem = format!(
            "{} is incomplete: {noun} {} of {count} {} missing",
            self.source.display(),
            some(&numbers),
            if shards.len() == 1 { "is" } else { "are" }
        );
        if !files.is_empty() {
            problem = format!("{problem} (with {})", some(&files));
        }
        Failure::Incomplete(format!("{problem}, and what is there is good; fetch the rest"), json)
    }

    fn answer(
        &self,
        model: &Model,
        found: &Verification,
        device: Option<&DecodedBy>,
        seconds: f64,
    ) -> Answer {
        let lengths = model.shards().iter().map(df11::open::Shard::file_length);
        let stored = lengths.fold(0, u64::saturating_add);
        let what = match self.level {
            LevelName::Structure => "structure is valid; weights were not read".to_owned(),
            LevelName::Checksums => format!("all checksums match, {}", text::bytes(stored)),
            LevelName::Full => format!(
                "{} ({}) and {} have the hashes of the originals",
                text::count(found.tensors, "tensor"),
                text::bytes(found.bytes),
                text::count(found.files, "file")
            ),
        };
        let is_good = found.unchecked.is_empty();
        let result = match (is_good, self.level) {
            (true, LevelName::Full) => "good       all bits are there: ",
            (true, _) => "good       ",
            (false, _) => "incomplete not everything could be checked; ",
        };
        let mut text = format!(
            "{}\n  {result}{what}\n  time       {}",
            text::printable(&self.source.display().to_string()),
            text::duration(seconds)
        );
        if let Some(device) = device {
            text.push_str("\n  device     ");
            text.push_str(&device.text());
        }
        for unchecked in &found.unchecked {
            text.push_str("\n  unchecked  ");
            text.push_str(&text::printable(unchecked));
        }
        let json = json!({
            "command": "verify",
            "source": self.source.to_string_lossy(),
            "level": self.level.name(),
            "good": is_good,
            "complete": model.is_complete(),
            "tensors": found.tensors,
            "files": found.files,
            "bytes": found.bytes,
            "stored_bytes": stored,
            "unchecked": found.unchecked,
            "device": device.map(DecodedBy::json),
            "seconds": seconds,
        });
        Answer { text, json }
    }
}

/// The first of some names, and how many more there are.
fn some(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN { format!("{shown} and {} more", names.len() - SHOWN) } else { shown }
}

/// A container beyond a limit of the format breaks its rules as well.
fn failed(error: Error) -> Failure {
    match error {
        error @ Error::Limit { .. } => Failure::Check(error),
        error => error.into(),
    }
}
