//! `df11 estimate`: the sizes that compression would give.

use std::{path::PathBuf, time::Instant};

use clap::Args;
use df11::Source;
use serde_json::json;

use super::{
    Answer, Failure, Session,
    compress::{LayoutArgs, default_out, report_json, report_text},
    session::Threads,
    text,
};

const AFTER_HELP: &str = "\
Examples:
  df11 estimate Llama-3.1-8B
  df11 estimate --layout tile Llama-3.1-8B
  df11 estimate --layout gap --bytes-per-thread 8 model.safetensors";

/// Tell the exact sizes that compress would give, and write nothing
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Estimate {
    /// A safetensors file, or the folder of a model
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// The output that is meant; *.df11 is one file, anything else a folder
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    threads: Threads,
}

impl Estimate {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        estimate(session, &self.source, self.out.clone(), self.layout, self.threads)
    }
}

/// The work of `estimate`, and of `compress --dry-run`.
pub(super) fn estimate(
    session: &Session,
    path: &std::path::Path,
    out: Option<PathBuf>,
    layout: LayoutArgs,
    threads: Threads,
) -> Result<Answer, Failure> {
    let layout = layout.layout()?;
    let out = out.map_or_else(|| default_out(path), Ok)?;
    let start = Instant::now();
    let source = Source::open(path).map_err(Failure::Other)?;
    let progress = session.progress();
    let report = threads.run(|| df11::estimate(&source, &out, layout, &progress).map_err(Failure::Other))?;
    drop(progress);
    let seconds = start.elapsed().as_secs_f64();
    let text = format!(
        "{} (estimated, nothing written)\n{}\n  time      {}, {}",
        text::printable(&out.display().to_string()),
        report_text(&report),
        text::duration(seconds),
        text::rate(report.source_bytes, seconds)
    );
    let mut json = report_json("estimate", path, &out, &report, seconds);
    json["written"] = json!(false);
    Ok(Answer { text, json })
}
