//! `df11 decompress`: the original files, byte for byte.

use std::{path::PathBuf, time::Instant};

use clap::Args;
use df11::{DecompressOptions, Model, decompress, open::Purpose, write::check_replaceable};
use serde_json::json;

use super::{
    Answer, Failure, Session,
    device::{DecodedBy, DeviceArgs},
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
        let (bytes, device) = self.threads.run(|| self.restore(&model, session))?;
        let seconds = start.elapsed().as_secs_f64();
        let text = format!(
            "{}\n  restored  {} in {}, {}; every file has the hash of the original\n  device    {}",
            text::printable(&self.out.display().to_string()),
            text::bytes(bytes),
            text::duration(seconds),
            text::rate(bytes, seconds),
            device.text()
        );
        let json = json!({
            "command": "decompress",
            "source": self.source.to_string_lossy(),
            "output": self.out.to_string_lossy(),
            "bytes": bytes,
            "seconds": seconds,
            "bytes_per_second": text::per_second(bytes, seconds),
            "device": device.json(),
        });
        let mut answer = Answer { text, json };
        removed.add_to(&mut answer);
        Ok(answer)
    }

    /// The bytes written, and what has decoded.
    fn restore(&self, model: &Model, session: &Session) -> Result<(u64, DecodedBy), Failure> {
        let mut options = DecompressOptions { overwrite: self.force, ..DecompressOptions::default() };
        // Before a GPU is started for nothing.
        options.check(model, &self.out)?;
        let chosen = self.device.choose(model, Some(Purpose::Restore), session)?;
        options.decoder = chosen.decoder();
        let bytes = decompress(model, &self.out, &options, &session.progress())?;
        Ok((bytes, chosen.device))
    }
}
