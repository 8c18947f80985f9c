//! `df11 estimate`: computes the sizes that compression would give, and the GPU on which each block
//! would be.

use std::{path::PathBuf, time::Instant};

use clap::Args;
use df11::{CompressOptions, estimate_all, hazmat::Located};
use serde_json::Value;

use super::{
    answer::{Answer, Failure},
    containers::{LayoutArgs, Selection, compressed_already},
    reports::{Reports, Task},
    session::{Session, Threads},
    text,
};
#[cfg(feature = "cudarc")]
use super::{
    containers::container_bytes,
    gpus::{Gpus, ResidenceArg},
};

const AFTER_HELP: &str = "\
Examples:
  df11 estimate Llama-3.1-8B
  df11 estimate Llama-3.1-8B --layout gap
  df11 estimate Llama-3.1-405B --gpus 8x80GiB      which block goes to which GPU
  df11 estimate Llama-3.1-405B --gpus 8x80GiB --exponent-bits 2.67      at once
  df11 estimate Llama-70B.df11 --gpus 24GiB,2x16GiB    of a compressed model
  df11 estimate Llama-3.1-8B-df11 --gpus 16GB --residence auto

With --exponent-bits, df11 reads only the headers of the files, so sparse files of the right \
length are enough.";

/// Show the exact sizes that compress would give, and how the model fits GPUs; write nothing
#[derive(Args, Default)]
#[command(after_help = AFTER_HELP)]
pub(super) struct EstimateArgs {
    /// A safetensors file, the folder of a model or pipeline, or with --gpus a compressed model;
    /// here, or in a store
    #[arg(value_name = "SRC")]
    pub(super) source: PathBuf,
    /// Output to estimate: one file if it ends in .df11, otherwise a folder
    #[arg(short, long, value_name = "OUT")]
    pub(super) out: Option<PathBuf>,
    #[command(flatten)]
    pub(super) selection: Selection,
    #[command(flatten)]
    pub(super) layout: LayoutArgs,
    /// Memory of the GPUs to place blocks on: 80GiB, 8x80GiB, 24GiB,2x16GiB. 1 GB is 10^9 bytes and
    /// 1 GiB 2^30; a card sold with 80 GB has 80 GiB
    #[cfg(feature = "cudarc")]
    #[arg(long, value_name = "[N×]MEMORY,..")]
    pub(super) gpus: Option<Gpus>,
    /// With --gpus: the layout of matrices in their memory
    #[cfg(feature = "cudarc")]
    #[arg(long, value_name = "RESIDENCE", requires = "gpus", default_value = "auto")]
    pub(super) residence: ResidenceArg,
    /// Estimate differences from this model, as compress --base stores them
    #[arg(long, value_name = "BASE", conflicts_with = "exponent_bits")]
    pub(super) base: Option<PathBuf>,
    /// Assume this many bits per exponent instead of reading the weights; trained models have 2.6
    /// to 2.7
    #[arg(long, value_name = "BITS")]
    pub(super) exponent_bits: Option<f64>,
    #[command(flatten)]
    pub(super) threads: Threads,
}

/// Remedy for a container that is compressed already.
#[cfg(feature = "cudarc")]
const REMEDY: &str = "give --gpus alone to place its blocks, or look into it with df11 inspect";
#[cfg(not(feature = "cudarc"))]
const REMEDY: &str = "look into it with df11 inspect";

impl EstimateArgs {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let headers_alone = self.exponent_bits.is_some();
        if let Some(found) = self.selection.find(&self.source, headers_alone, session)? {
            return self.of_source(&found.place, session);
        }
        #[cfg(feature = "cudarc")]
        if let (Some(gpus), None) = (&self.gpus, self.exponent_bits) {
            return self.place_compressed(gpus);
        }
        Err(compressed_already(&self.source, REMEDY))
    }

    /// Estimates models that are not compressed yet.
    pub(super) fn of_source(&self, place: &Located, session: &Session) -> Result<Answer, Failure> {
        let options = CompressOptions::new().layout(self.layout.layout()?);
        let options = self.base.iter().fold(options, CompressOptions::base);
        let start = Instant::now();
        let (source, out) = self.selection.open(place, self.out.as_ref())?;
        #[cfg(feature = "cudarc")]
        if self.gpus.is_some() && source.is_pipeline() {
            // Components share the memory of a GPU, and it is unknown which are loaded together.
            let problem = "--gpus takes one model, and this is a pipeline";
            return Err(df11::Error::parameter(problem, "name one of its components").into());
        }
        source.notes().for_each(|note| session.notice(note));
        let progress = session.progress();
        let mut estimates = self.threads.run(|| {
            let estimates = estimate_all(&source, &out, &options, self.exponent_bits, &progress);
            estimates.map_err(Failure::Other)
        })?;
        drop(progress);
        let reports = estimates.iter_mut().map(|each| std::mem::take(&mut each.report)).collect();
        let sizes = Reports::new(source.components(), reports);
        let task = Task { verb: "estimate", source: &self.source, out: &out, start };
        let seconds = start.elapsed().as_secs_f64();
        let mut text =
            format!("{} (estimated, nothing written)\n{}", text::path(&out), sizes.text());
        if self.exponent_bits.is_none() {
            let rate = text::rate(sizes.total.source_bytes, seconds);
            text = format!("{text}\n  time      {}, {rate}", text::duration(seconds));
        }
        let mut json = sizes.json(&task, seconds);
        json["written"] = Value::Bool(false);
        #[cfg_attr(not(feature = "cudarc"), expect(unused_mut, reason = "as with GPUs"))]
        let mut answer = Answer { text, json };
        #[cfg(feature = "cudarc")]
        if let Some(gpus) = &self.gpus {
            gpus.place(&estimates[0].outline()?, self.residence.into(), &mut answer)?;
        }
        Ok(answer)
    }
}

#[cfg(feature = "cudarc")]
impl EstimateArgs {
    /// For a model that is already compressed: its sizes are known, so only its placement is shown.
    fn place_compressed(&self, gpus: &Gpus) -> Result<Answer, Failure> {
        let model = df11::OpenOptions::new().open_all(&self.source)?.single("--gpus")?;
        let stored = container_bytes(&model);
        let text = format!("{}: {}", text::path(&self.source), text::bytes(stored));
        let source = text::path_field(&self.source);
        let json = serde_json::json!({
            "command": "estimate", "source": source, "stored_bytes": stored,
        });
        let mut answer = Answer { text, json };
        gpus.place(&model, self.residence.into(), &mut answer)?;
        Ok(answer)
    }
}
