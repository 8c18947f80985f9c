//! `df11 decompress`: the original files, byte for byte.

use std::{path::PathBuf, time::Instant};

use clap::Args;
use df11::{
    DecompressOptions, Model, Restored, decompress, open::Purpose, source::LeftOut, write::check_replaceable,
};
use serde_json::json;

use super::{
    Answer, Failure, Session,
    compress::left_out_json,
    device::{DecodedBy, DeviceArgs},
    session::{Threads, open_to_stream},
    text,
};

const AFTER_HELP: &str = "\
Examples:
  df11 decompress Llama-3.1-8B.df11 -o Llama-3.1-8B     the folder as it was
  df11 decompress model.df11 -o model.safetensors       where the model was one file

Every file that the containers record is compared with the hash of the original before it gets its name. Others that lie \
beside them are copied, and named as unchecked.";

/// Give back the original files, byte for byte
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Decompress {
    /// A container, or a folder with all shards of a model
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// Output: *.safetensors is one file, anything else a folder
    #[arg(short, long, value_name = "OUT")]
    out: PathBuf,
    /// Replace an earlier output
    #[arg(long)]
    force: bool,
    /// Copy side files that were changed since, and go without missing ones, instead of failing
    #[arg(long)]
    keep_changed: bool,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    threads: Threads,
}

impl Decompress {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let start = Instant::now();
        let model = open_to_stream(&self.source)?;
        if self.force {
            check_replaceable(&self.source, &self.out, "safetensors")?;
        }
        let removed = Session::tidy(&self.out);
        let (restored, device) = self.threads.run(|| self.restore(&model, session))?;
        let (bytes, seconds) = (restored.bytes, start.elapsed().as_secs_f64());
        let mut text = format!(
            "{}\n  restored  {} in {}, {}; {}\n  device    {}",
            text::printable(&self.out.display().to_string()),
            text::bytes(bytes),
            text::duration(seconds),
            text::rate(bytes, seconds),
            proof(&restored),
            device.text()
        );
        text.push_str(&exceptions(&restored));
        let json = json!({
            "command": "decompress",
            "source": self.source.to_string_lossy(),
            "output": self.out.to_string_lossy(),
            "bytes": bytes,
            "files": restored.files,
            "changed": restored.changed,
            "missing": restored.missing,
            "unchecked": restored.unchecked,
            "left_out": left_out_json(&restored.left_out),
            "seconds": seconds,
            "bytes_per_second": text::per_second(bytes, seconds),
            "device": device.json(),
        });
        let mut answer = Answer { text, json };
        removed.add_to(&mut answer);
        Ok(answer)
    }

    /// What was written, and what has decoded.
    fn restore(&self, model: &Model, session: &Session) -> Result<(Restored, DecodedBy), Failure> {
        let (overwrite, keep_changed) = (self.force, self.keep_changed);
        let mut options = DecompressOptions { overwrite, keep_changed, ..DecompressOptions::default() };
        // Before a GPU is started for nothing.
        options.check(model, &self.out)?;
        let chosen = self.device.choose(model, Some(Purpose::Restore), session)?;
        options.decoder = chosen.decoder();
        let restored = decompress(model, &self.out, &options, &session.progress())?;
        Ok((restored, chosen.device))
    }
}

/// What the hashes have proved, and of which files.
fn proof(restored: &Restored) -> String {
    let others = [&restored.changed, &restored.missing, &restored.unchecked];
    if others.iter().all(|paths| paths.is_empty()) {
        return "every file has the hash of the original".to_owned();
    }
    format!(
        "{} have the hash of the original; the others are named below",
        text::count(restored.files, "file")
    )
}

/// A line for each file that is no proven original.
fn exceptions(restored: &Restored) -> String {
    let lines = [
        ("changed  ", &restored.changed),
        ("missing  ", &restored.missing),
        ("unchecked", &restored.unchecked),
    ];
    let mut out = String::new();
    for (what, paths) in lines {
        out.extend(paths.iter().map(|path| format!("\n  {what} {}", text::printable(path))));
    }
    let left_out = restored.left_out.iter().map(|LeftOut { path, reason }| {
        format!("\n  left out  {}: {}", text::printable(path), text::printable(reason))
    });
    out.extend(left_out);
    out
}
