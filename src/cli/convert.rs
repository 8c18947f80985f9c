//! `df11 convert`: a container in another layout.

use std::{path::PathBuf, time::Instant};

use clap::Args;
use df11::{Card, CompressOptions, convert_all, hazmat::check_replaceable};

use super::{
    Answer, Failure, Session,
    containers::{self, LayoutArgs, Verification},
    session::{Threads, open_to_stream},
    sizes::Sizes,
};

const AFTER_HELP: &str = "\
Examples:
  df11 convert Llama-3.1-8B.df11 gap.df11 --layout gap
  df11 convert Llama-3.1-8B-df11 Llama-3.1-8B.df11    a folder of shards to one file
  df11 convert Llama-3.1-8B.df11 Llama-3.1-8B-df11    or the other way

The output is what df11 compress would make of the original files, which are never written: the \
same names, hashes and side files.";

/// Store a model in another layout, without its original files in between
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Convert {
    /// A container, or a folder with all shards of a model or a pipeline
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
    /// Write no model card into a folder
    #[arg(long)]
    no_card: bool,
    #[command(flatten)]
    threads: Threads,
}

impl Convert {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let (layout, verify) = (self.layout.layout()?, self.verification.is_wanted());
        let options = CompressOptions::new()
            .layout(layout)
            .overwrite(self.force)
            .verify(verify)
            .card((!self.no_card).then(Card::default));
        let start = Instant::now();
        let models = open_to_stream(&self.source)?;
        if self.force {
            check_replaceable(&self.source, &self.out, "df11")?;
        }
        let removed = Session::tidy(&self.out);
        let progress = session.progress();
        let reports =
            self.threads.run(|| Ok(convert_all(&models, &self.out, &options, &progress)?))?;
        drop(progress);
        let seconds = start.elapsed().as_secs_f64();
        let sizes = Sizes::new(models.components(), reports);
        let json = sizes.json("convert", &self.source, &self.out, seconds);
        Ok(containers::answer(json, &sizes, &self.out, seconds, verify, &removed))
    }
}
