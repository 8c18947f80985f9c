//! `df11 verify`: checks that every bit is there.

use std::{path::PathBuf, slice, time::Instant};

use clap::{Args, ValueEnum};
use df11::{Error, Level, Model, Models, Verification, source::Component};
use serde_json::{Value, json};

use super::{
    answer::{Answer, Failure},
    containers::container_bytes,
    device::{DecodedBy, DeviceArgs},
    reports::{component_name, of_component},
    session::{BaseArg, Session, Threads, open_to_stream},
    text,
};

const AFTER_HELP: &str = "\
Examples:
  df11 verify Llama-3.1-8B.df11
  df11 verify --level checksums Llama-3.1-8B-df11/ && echo good
  df11 verify --device gpu Llama-3.1-8B.df11  check that a GPU decodes every bit

Exit code 1 means that a container is damaged; 2 that some of it could not be checked, or that \
shards are missing.";

/// Check that every bit is there
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Verify {
    /// A container, or the folder of a model or pipeline
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// How much to check
    #[arg(long, value_enum, default_value_t = LevelName::Full)]
    level: LevelName,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    base: BaseArg,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Clone, Copy, ValueEnum)]
enum LevelName {
    /// The directory, headers and padding; takes milliseconds
    Structure,
    /// Also the checksums of all stored bytes
    Checksums,
    /// Also the codes, indexes, and the hashes of all decoded tensors and original files
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

    /// Its name on the command line.
    fn name(self) -> String {
        self.to_possible_value().expect("none is skipped").get_name().to_owned()
    }
}

/// Result for one model.
struct Verified<'m> {
    component: &'m Component<Model>,
    verification: Verification,
    /// The device that decoded.
    device: Option<DecodedBy>,
    seconds: f64,
}

impl Verified<'_> {
    /// Sentences on what could not be checked, with paths relative to the folder of all models.
    fn unchecked(&self) -> Vec<String> {
        self.verification.unchecked.iter().map(|what| self.component.sentence(what)).collect()
    }
}

impl Verify {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let models = open_to_stream(&self.source, &self.base).map_err(failed)?;
        let check = |component| self.threads.run(|| self.check(component, session));
        let found = models.components().iter().map(check).collect::<Result<Vec<_>, _>>()?;
        self.check_complete(&models, self.answer(&models, &found))
    }

    fn check<'m>(
        &self,
        component: &'m Component<Model>,
        session: &Session,
    ) -> Result<Verified<'m>, Failure> {
        let (start, model, level) = (Instant::now(), &component.model, self.level.level());
        let done = |verification, device| {
            let seconds = start.elapsed().as_secs_f64();
            Verified { component, verification, device, seconds }
        };
        if level < Level::Full {
            if self.device.is_gpu() {
                let problem = format!("the level {} decodes nothing", self.level.name());
                return Err(Error::parameter(problem, "leave out --device or --level").into());
            }
            return Ok(done(model.verify(level, &session.progress()).map_err(failed)?, None));
        }
        let chosen = self.device.choose(model, true, session)?;
        let found =
            model.verify_with(level, &*chosen.decoder, &session.progress()).map_err(failed)?;
        Ok(done(found, Some(chosen.device)))
    }

    /// A folder must hold all shards of its models; a single container is verified as one shard.
    fn check_complete(&self, models: &Models, mut answer: Answer) -> Result<Answer, Failure> {
        let mut problems: Vec<String> = Vec::new();
        if !models.missing().is_empty() {
            problems.push(lacking("component", models.missing(), None));
        }
        for component in models.components() {
            let model = &component.model;
            if model.folder().is_none() || model.is_complete() {
                continue;
            }
            let (shards, files) =
                (model.missing_shards(), model.missing_files().unwrap_or_default());
            let numbers: Vec<String> = shards.iter().map(|index| (index + 1).to_string()).collect();
            let mut problem = lacking("shard", &numbers, Some(model.shard_count()));
            if !files.is_empty() {
                problem = format!("{problem} (with {})", some(&files));
            }
            if models.is_pipeline() {
                problem = format!("in {}, {problem}", component.folder);
            } else {
                answer.json["missing_shards"] = json!(shards);
                answer.json["missing_files"] = json!(files);
            }
            problems.push(problem);
        }
        if problems.is_empty() {
            return Ok(answer);
        }
        answer.json["good"] = false.into();
        let source = text::path(&self.source);
        let problem = format!("{source} is incomplete: {}", problems.join(", "));
        Err(Failure::Incomplete(
            format!("{problem}; the rest is good, so download the missing files"),
            answer.json,
        ))
    }

    fn answer(&self, models: &Models, found: &[Verified<'_>]) -> Answer {
        let json = self.json(models, found);
        let mut text = format!(
            "{}\n  {}\n  time       {}",
            text::path(&self.source),
            self.result(&json),
            text::duration(found.iter().map(|each| each.seconds).sum())
        );
        let device = found[0].device.iter().map(|device| ("device   ", device.text()));
        let unchecked = found.iter().flat_map(Verified::unchecked);
        let unchecked = unchecked.map(|what| ("unchecked", text::printable(&what)));
        text.extend(device.chain(unchecked).map(|(key, value)| format!("\n  {key}  {value}")));
        if models.is_pipeline() {
            text.push_str("\n\n");
            text.push_str(&table(found));
        }
        Answer { text, json }
    }

    /// The sentence about the parts that are right, from the same numbers as the document.
    fn result(&self, json: &Value) -> String {
        let number = |key: &str| json[key].as_u64().unwrap_or_default();
        let what = match self.level {
            LevelName::Structure => "structure is valid; weights were not read".to_owned(),
            LevelName::Checksums => {
                format!("all checksums match, {}", text::bytes(number("stored_bytes")))
            }
            LevelName::Full => format!(
                "{} ({}) and {} have the hashes of the originals",
                text::count(number("tensors"), "tensor"),
                text::bytes(number("bytes")),
                text::count(number("files"), "file")
            ),
        };
        let result = match (json["good"] == true, self.level) {
            (true, LevelName::Full) => "good       every bit is there: ",
            (true, _) => "good       ",
            (false, _) => "incomplete some of it could not be checked; ",
        };
        format!("{result}{what}")
    }

    fn json(&self, models: &Models, found: &[Verified<'_>]) -> Value {
        let mut json = document(found);
        json["command"] = json!("verify");
        json["source"] = json!(text::path_field(&self.source));
        json["level"] = json!(self.level.name());
        json["complete"] = json!(models.missing().is_empty() && json["complete"] == true);
        if models.is_pipeline() {
            json["missing_components"] = json!(models.missing());
            let each = |one: &Verified<'_>| {
                of_component(&one.component.folder, document(slice::from_ref(one)))
            };
            json["components"] = found.iter().map(each).collect();
        }
        json
    }
}

/// The document on one model, or on several together.
fn document(found: &[Verified<'_>]) -> Value {
    let sum =
        |value: fn(&Verified<'_>) -> u64| found.iter().map(value).fold(0, u64::saturating_add);
    json!({
        "good": found.iter().all(|each| each.verification.unchecked.is_empty()),
        "complete": found.iter().all(|each| each.component.model.is_complete()),
        "tensors": sum(|each| each.verification.tensors),
        "files": sum(|each| each.verification.files),
        "bytes": sum(|each| each.verification.bytes),
        "stored_bytes": sum(|each| container_bytes(&each.component.model)),
        "unchecked": found.iter().flat_map(Verified::unchecked).collect::<Vec<_>>(),
        "device": found[0].device.as_ref().map(DecodedBy::json),
        "seconds": found.iter().map(|each| each.seconds).sum::<f64>(),
    })
}

/// A line for each component.
fn table(found: &[Verified<'_>]) -> String {
    let row = |each: &Verified<'_>| {
        let verification = &each.verification;
        [
            format!("  {}", text::printable(component_name(&each.component.folder))),
            if verification.unchecked.is_empty() { "good" } else { "incomplete" }.to_owned(),
            verification.tensors.to_string(),
            verification.files.to_string(),
            text::bytes(container_bytes(&each.component.model)),
        ]
    };
    text::table(["  component", "result", "tensors", "files", "stored"], found.iter().map(row))
}

/// `shards 2, 3 of 5 are missing`.
fn lacking(noun: &str, names: &[String], count: Option<u64>) -> String {
    let (plural, verb) = if names.len() == 1 { ("", "is") } else { ("s", "are") };
    let of = count.map_or_else(String::new, |count| format!(" of {count}"));
    format!("{noun}{plural} {}{of} {verb} missing", some(names))
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
