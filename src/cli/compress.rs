//! `df11 compress`: a checkpoint becomes a container, or a folder of them. `df11 convert`: so does
//! a container in another layout.

use std::{collections::BTreeMap, path::PathBuf, time::Instant};

use clap::Args;
use df11::{
    Card, Error, Sources,
    hazmat::{check_replaceable, locate},
    is_compressed,
};

use super::{
    answer::{Answer, Failure},
    containers::{Task, Writing, compressed_already, default_out},
    estimate::EstimateArgs,
    session::{Session, Threads, open_to_stream},
};

const COMPRESS_HELP: &str = "\
Examples:
  df11 compress Llama-3.1-8B              the folder Llama-3.1-8B-df11, for transformers and vLLM
  df11 compress Llama-3.1-8B -o llama.df11    one self-contained file
  df11 compress model.safetensors         the file model.df11
  df11 compress Llama-3.1-8B --dry-run    the sizes alone
  df11 compress FLUX.1-dev                a diffusers pipeline, into the folder FLUX.1-dev-df11
  df11 compress Qwen/Qwen3-8B             from the cache of the Hub, where hf download puts it
  df11 compress Qwen3-8B-DF11             a checkpoint of the official DFloat11 package

The output gets its name when it is whole and verified. df11 decompress gives back the same \
files, byte for byte.

A pipeline is a folder with model_index.json. Each of its components with weights becomes what its \
folder alone would become, all other files are recorded in pipeline.df11, and df11 verify, \
inspect, convert and decompress take the whole.

A checkpoint of the official DFloat11 package is decoded on the way in, to its BF16 original, and \
its files become one; config.json must be there, beside a single file too. The package stores no \
shapes: they follow from biases, or from config.json. Matrices whose shape nothing tells get one \
dimension, and a note says which.";

const CONVERT_HELP: &str = "\
Examples:
  df11 convert Llama-3.1-8B.df11 -o gap.df11 --layout gap
  df11 convert Llama-3.1-8B-df11 -o Llama-3.1-8B.df11    a folder of shards to one file
  df11 convert Llama-3.1-8B.df11 -o Llama-3.1-8B-df11    or the other way

The output is what df11 compress would make of the original files, which are never written: the \
same names, hashes and side files.";

/// Compress a safetensors file, or the folder of a model or a pipeline
#[derive(Args)]
#[command(after_help = COMPRESS_HELP)]
pub(super) struct Compress {
    /// A safetensors file, the folder of a model or a pipeline, or a repository in the cache of the
    /// Hub
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// Output: *.df11 is one self-contained file, anything else a folder [default: the folder
    /// SRC-df11 beside a folder SRC, the file NAME.df11 beside NAME.safetensors]
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,
    /// Take the weights of a variant where it is there: fp16 is that of model.fp16.safetensors
    #[arg(long, value_name = "NAME")]
    variant: Option<String>,
    #[command(flatten)]
    writing: Writing,
    /// Write no model card (README.md, or DF11.md beside one of the model's own) into a folder
    #[arg(long, conflicts_with = "dry_run")]
    no_card: bool,
    /// Keep a value for other programs, which find it under this key: tool.setting=value. May be
    /// repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_and_value, conflicts_with = "dry_run")]
    metadata: Vec<(String, String)>,
    /// Tell the sizes and write nothing, as df11 estimate
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    threads: Threads,
}

impl Compress {
    /// The work of `--dry-run`.
    fn estimate(&self) -> EstimateArgs {
        EstimateArgs {
            source: self.source.clone(),
            out: self.out.clone(),
            variant: self.variant.clone(),
            layout: self.writing.layout,
            threads: self.threads,
            ..EstimateArgs::default()
        }
    }

    /// Values by key.
    fn metadata(&self) -> Result<BTreeMap<String, String>, Failure> {
        let mut metadata = BTreeMap::new();
        for (key, value) in &self.metadata {
            if metadata.insert(key.clone(), value.clone()).is_some() {
                let problem = format!("--metadata gives {key:?} two values");
                return Err(Error::parameter(problem, "give each key once").into());
            }
        }
        Ok(metadata)
    }

    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let place = locate(&self.source)?;
        if is_compressed(&place.path)? {
            let remedy =
                "its sizes are in df11 inspect, and df11 convert stores it in another layout";
            return Err(compressed_already(&self.source, remedy));
        }
        if self.dry_run {
            return self.estimate().of_source(&place, session);
        }
        let card = (!self.no_card).then(|| Card::new(place.repository.clone()));
        let options = self.writing.options()?.metadata(self.metadata()?).card(card);
        let start = Instant::now();
        let source = Sources::open(&place.path, self.variant.as_deref()).map_err(Failure::Other)?;
        let out = self.out.clone().map_or_else(|| default_out(&place), Ok)?;
        source.notes().for_each(|note| session.notice(note));
        if self.writing.force {
            check_replaceable(&place.path, &out, "df11")?;
        }
        let task = Task { verb: "compress", source: &self.source, out: &out, start };
        self.writing.run(&task, source.components(), self.threads, session, |observer| {
            let compressed = df11::compress_all(&source, &out, &options, observer);
            compressed.map_err(|error| {
                if is_of(&error, &source) { Failure::Other(error) } else { error.into() }
            })
        })
    }
}

fn key_and_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Whether an error is none of the container: all but what is corrupt, and that too if it is a
/// file of the source.
fn is_of(error: &Error, source: &Sources) -> bool {
    let Error::Corrupt { place, .. } = error else { return true };
    source.components().iter().flat_map(|component| &component.model.weights).any(|file| {
        place.strip_prefix(&file.path).is_some_and(|rest| rest.is_empty() || rest.starts_with(": "))
    })
}

/// Store a model in another layout, without its original files in between
#[derive(Args)]
#[command(after_help = CONVERT_HELP)]
pub(super) struct Convert {
    /// A container, or a folder with all shards of a model or a pipeline
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// Output: *.df11 is one self-contained file, anything else a folder
    #[arg(short, long, value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    writing: Writing,
    /// Write no model card into a folder
    #[arg(long)]
    no_card: bool,
    #[command(flatten)]
    threads: Threads,
}

impl Convert {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let card = (!self.no_card).then(Card::default);
        let options = self.writing.options()?.card(card);
        let start = Instant::now();
        let models = open_to_stream(&self.source)?;
        if self.writing.force {
            check_replaceable(&self.source, &self.out, "df11")?;
        }
        let task = Task { verb: "convert", source: &self.source, out: &self.out, start };
        self.writing.run(&task, models.components(), self.threads, session, |observer| {
            Ok(df11::convert_all(&models, &self.out, &options, observer)?)
        })
    }
}
