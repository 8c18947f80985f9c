//! `df11 decompress`: the original files, byte for byte.

use std::{path::PathBuf, time::Instant};

use clap::Args;
use df11::{DecompressOptions, decompress};
use serde_json::json;

use super::{
    Answer, Failure, Session, replace,
    session::{Threads, open_to_stream},
    text,
};

const AFTER_HELP: &str = "\
Examples:
  df11 decompress Llama-3.1-8B.df11 -o Llama-3.1-8B     the folder as it was
  df11 decompress model.df11 -o model.safetensors       where the model was one file

Every file is compared with the hash of the original before it gets its name.";

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
    #[command(flatten)]
    threads: Threads,
}

impl Decompress {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let start = Instant::now();
        let model = open_to_stream(&self.source)?;
        if self.force {
            replace::check(&self.source, &self.out, "safetensors")?;
        }
        let mut options = DecompressOptions::default();
        options.overwrite = self.force;
        let progress = session.progress();
        let bytes = self.threads.run(|| Ok(decompress(&model, &self.out, &options, &progress)?))?;
        drop(progress);
        let seconds = start.elapsed().as_secs_f64();
        let text = format!(
            "{}\n  restored  {} in {}, {}; every file has the hash of the original",
            text::printable(&self.out.display().to_string()),
            text::bytes(bytes),
            text::duration(seconds),
            text::rate(bytes, seconds)
        );
        let json = json!({
            "command": "decompress",
            "source": self.source.to_string_lossy(),
            "output": self.out.to_string_lossy(),
            "bytes": bytes,
            "seconds": seconds,
            "bytes_per_second": text::per_second(bytes, seconds),
        });
        Ok(Answer { text, json })
    }
}
