//! `df11 convert`: a container in another layout.

use std::{path::PathBuf, time::Instant};

use clap::Args;
use df11::{CompressOptions, convert, write::check_replaceable};
use serde_json::json;

use super::{
    Answer, Failure, Session,
    compress::{LayoutArgs, Verification, report_json, result_text},
    session::{Threads, open_to_stream},
};

const AFTER_HELP: &str = "\
Examples:
  df11 convert Llama-3.1-8B.df11 gap.df11 --layout gap
  df11 convert Llama-3.1-8B-df11 Llama-3.1-8B.df11    a folder of shards to one file
  df11 convert Llama-3.1-8B.df11 Llama-3.1-8B-df11    or the other way

The output is what df11 compress would make of the original files, which are never written: the same names, hashes and \
side files.";

/// Store a model in another layout, without its original files in between
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Convert {
    /// A container, or a folder with all shards of a model
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// Output: *.df11 is one self-contained file, anything else a folder
    #[arg(value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    verification: Verification,
    /// Replace an earlier output
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    threads: Threads,
}

impl Convert {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let (layout, verify) = (self.layout.layout()?, self.verification.is_wanted());
        let options = CompressOptions { layout, overwrite: self.force, verify, ..CompressOptions::default() };
        let start = Instant::now();
        let model = open_to_stream(&self.source)?;
        if self.force {
            check_replaceable(&self.source, &self.out, "df11")?;
        }
        let removed = Session::tidy(&self.out);
        let progress = session.progress();
        let report = self.threads.run(|| Ok(convert(&model, &self.out, &options, &progress)?))?;
        drop(progress);
        let seconds = start.elapsed().as_secs_f64();
        let mut json = report_json("convert", &self.source, &self.out, &report, seconds);
        json["written"] = json!(true);
        json["verified"] = json!(options.verify);
        let mut answer = Answer { text: result_text(&self.out, &report, seconds, options.verify), json };
        removed.add_to(&mut answer);
        Ok(answer)
    }
}
