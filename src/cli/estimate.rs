//! `df11 estimate`: the sizes that compression would give, and which block would lie on which GPU.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args;
use df11::{
    Error, Model, OpenOptions, Sources, estimate_all,
    hazmat::{Located, locate},
    is_compressed,
};
use serde_json::{Value, json};

use super::{
    Answer, Failure, Session,
    containers::{LayoutArgs, compressed_already, default_out},
    session::Threads,
    sizes::{Sizes, container_bytes},
    text,
};

const AFTER_HELP: &str = "\
Examples:
  df11 estimate Llama-3.1-8B
  df11 estimate Llama-3.1-8B --layout gap
  df11 estimate Llama-3.1-405B --gpus 8x80GiB     which block would lie on which GPU
  df11 estimate Llama-3.1-405B --gpus 8x80GiB --exponent-bits 2.67    at once
  df11 estimate Llama-3.1-70B.df11 --gpus 24GiB,2x16GiB    of a container
  df11 estimate Llama-3.1-8B-df11 --gpus 16GB --residence auto    how much of it may lie in the \
  fast layout

--exponent-bits reads the headers of the files and no weight: files that are as long as they \
should be but empty will do.";

/// Tell the exact sizes that compress would give, and which GPUs hold them; write nothing
#[derive(Args, Default)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Estimate {
    /// A safetensors file, the folder of a model or a pipeline, or with --gpus a container or a
    /// folder of them
    #[arg(value_name = "SRC")]
    pub(super) source: PathBuf,
    /// The output that is meant; *.df11 is one file, anything else a folder
    #[arg(short, long, value_name = "OUT")]
    pub(super) out: Option<PathBuf>,
    /// Take the weights of a variant where it is there: fp16 is that of model.fp16.safetensors
    #[arg(long, value_name = "NAME")]
    pub(super) variant: Option<String>,
    #[command(flatten)]
    pub(super) layout: LayoutArgs,
    /// Place the blocks on GPUs with this memory: 80GiB, 8x80GiB, 24GiB,2x16GiB. 1 GB is 10^9 bytes
    /// and 1 GiB 2^30; a card that is sold with 80 GB has 80 GiB
    #[cfg(feature = "cudarc")]
    #[arg(long, value_name = "[N×]MEMORY,..")]
    pub(super) gpus: Option<super::gpus::Gpus>,
    /// With --gpus: how matrices lie on them
    #[cfg(feature = "cudarc")]
    #[arg(long, value_name = "RESIDENCE", requires = "gpus", default_value = "stored")]
    pub(super) residence: super::gpus::ResidenceArg,
    /// Read no weight, and take this for the bits of an exponent's code; trained models have 2.6 to
    /// 2.7
    #[arg(long, value_name = "BITS")]
    pub(super) exponent_bits: Option<f64>,
    #[command(flatten)]
    pub(super) threads: Threads,
}

impl Estimate {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let place = locate(&self.source)?;
        if is_compressed(&place.path)? {
            return self.place_compressed();
        }
        self.of_source(&place, session)
    }

    /// Of models that are not compressed yet.
    pub(super) fn of_source(&self, place: &Located, session: &Session) -> Result<Answer, Failure> {
        let layout = self.layout.layout()?;
        let start = Instant::now();
        let source = Sources::open(&place.path, self.variant.as_deref()).map_err(Failure::Other)?;
        self.check_places_one(&source)?;
        let out = self.out.clone().map_or_else(|| default_out(place, &source), Ok)?;
        source.notes().for_each(|note| session.notice(note));
        let progress = session.progress();
        let mut estimates = self.threads.run(|| {
            let estimates = estimate_all(&source, &out, layout, self.exponent_bits, &progress);
            estimates.map_err(Failure::Other)
        })?;
        drop(progress);
        let seconds = start.elapsed().as_secs_f64();
        let reports =
            estimates.iter_mut().map(|estimate| std::mem::take(&mut estimate.report)).collect();
        let sizes = Sizes::new(source.components(), reports);
        let mut answer = self.answer(&out, &sizes, seconds);
        self.place(|| estimates[0].outline(), &mut answer)?;
        Ok(answer)
    }

    fn answer(&self, out: &Path, sizes: &Sizes, seconds: f64) -> Answer {
        let mut text =
            format!("{} (estimated, nothing written)\n{}", text::path(out), sizes.text());
        if self.exponent_bits.is_none() {
            let rate = text::rate(sizes.total.source_bytes, seconds);
            text = format!("{text}\n  time      {}, {rate}", text::duration(seconds));
        }
        let mut json = sizes.json("estimate", &self.source, out, seconds);
        json["written"] = Value::Bool(false);
        Answer { text, json }
    }

    /// Components of a pipeline share the memory of a GPU, and nothing tells which are there
    /// together.
    fn check_places_one(&self, source: &Sources) -> Result<(), Failure> {
        if !self.places() || !source.is_pipeline() {
            return Ok(());
        }
        let problem = "--gpus takes one model, and this is a pipeline";
        Err(Error::parameter(problem, "name a component of it").into())
    }

    /// Whether blocks are to be placed on GPUs.
    #[cfg(feature = "cudarc")]
    const fn places(&self) -> bool {
        self.gpus.is_some()
    }

    #[cfg(not(feature = "cudarc"))]
    #[expect(clippy::unused_self, reason = "as with GPUs")]
    const fn places(&self) -> bool {
        false
    }

    /// A model that is compressed already has its sizes; only its placement is to be told.
    fn place_compressed(&self) -> Result<Answer, Failure> {
        #[cfg(feature = "cudarc")]
        let remedy =
            "say where its blocks are to go with --gpus alone, or look into it with df11 inspect";
        #[cfg(not(feature = "cudarc"))]
        let remedy = "look into it with df11 inspect";
        if !self.places() || self.exponent_bits.is_some() {
            return Err(compressed_already(&self.source, remedy));
        }
        let model = OpenOptions::new().open_all(&self.source)?.single("--gpus")?;
        let stored = container_bytes(&model);
        let text = format!("{}: {}", text::path(&self.source), text::bytes(stored));
        let source = self.source.to_string_lossy();
        let json = json!({ "command": "estimate", "source": source, "stored_bytes": stored });
        let mut answer = Answer { text, json };
        self.place(|| Ok(model), &mut answer)?;
        Ok(answer)
    }

    #[cfg(not(feature = "cudarc"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as with GPUs")]
    fn place(
        &self,
        _: impl FnOnce() -> df11::Result<Model>,
        _: &mut Answer,
    ) -> Result<(), Failure> {
        Ok(())
    }

    #[cfg(feature = "cudarc")]
    fn place(
        &self,
        model: impl FnOnce() -> df11::Result<Model>,
        answer: &mut Answer,
    ) -> Result<(), Failure> {
        let Some(gpus) = &self.gpus else { return Ok(()) };
        let placed = gpus.place(&model()?, self.residence.into())?;
        answer.text = format!("{}\n{}", answer.text, placed.text);
        answer.json["placement"] = placed.json;
        Ok(())
    }
}
