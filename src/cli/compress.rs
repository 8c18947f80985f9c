//! `df11 compress`: turns a checkpoint into a container, or a folder of containers. `df11 convert`:
//! does the same with an existing container, for example to change its layout.

use std::{collections::BTreeMap, path::PathBuf, time::Instant};

use clap::Args;
use df11::{
    Card, CompressOptions, Error, Sources,
    hazmat::{Destination, check_replaceable},
};

use super::{
    answer::{Answer, Failure},
    containers::{LocalSource, Selection, WriteRun, Writing, check_out, compressed_already},
    estimate::EstimateArgs,
    reports::Task,
    session::{BaseArg, Session, Threads, open_to_stream},
};

const COMPRESS_HELP: &str = "\
Examples:
  df11 compress Llama-3.1-8B                  to the folder Llama-3.1-8B-df11
  df11 compress Llama-3.1-8B -o llama.df11    to one self-contained file
  df11 compress model.safetensors             to the file model.df11
  df11 compress Llama-3.1-8B --dry-run        show the sizes, write nothing
  df11 compress FLUX.1-dev                    a diffusers pipeline
  df11 compress Qwen/Qwen3-8B                 from the Hugging Face cache
  df11 compress Qwen3-8B-DF11                 a checkpoint of DFloat11
  df11 compress tune --base Qwen/Qwen3-8B     a fine-tune, as its differences
  df11 compress s3://models/Qwen3-8B          from a store: gs, az, https, hf
  df11 compress Qwen3-8B -o s3://models/out   into a store: s3, gs or az

Transformers and vLLM load folders. The output gets its name after it has been verified. \
df11 decompress restores the same files, byte for byte.

A pipeline is a folder with model_index.json. Each component with weights is compressed as if it \
were alone, and pipeline.df11 records all other files. df11 verify, inspect, convert and \
decompress take the whole pipeline.

A checkpoint of the official DFloat11 package is decoded to its BF16 original while it is read, \
and its files become one. It needs its config.json, even for a single file. The package stores \
no shapes, so df11 finds them from biases or config.json. If it finds none for a matrix, the \
matrix gets one dimension, and a note names it.";

const CONVERT_HELP: &str = "\
Examples:
  df11 convert Llama-3.1-8B.df11 -o gap.df11 --layout gap
  df11 convert Llama-3.1-8B-df11 -o Llama-3.1-8B.df11    a folder to one file
  df11 convert Llama-3.1-8B.df11 -o Llama-3.1-8B-df11    one file to a folder

The output is the same as if df11 compress had made it from the original files: the same names, \
hashes and side files. The original files are not written. The output of a model that was \
compressed with --base stands alone.";

/// Compress a safetensors file, or the folder of a model or pipeline
#[derive(Args)]
#[command(after_help = COMPRESS_HELP)]
pub(super) struct Compress {
    /// A safetensors file, the folder of a model or pipeline, a repository in the Hugging Face
    /// cache, or the name of one in a store
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// Output: one self-contained file if it ends in .df11, otherwise a folder; here, or in an
    /// object store [default: SRC-df11 for a folder SRC, NAME.df11 for NAME.safetensors]
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    writing: Writing,
    /// Do not write a model card (README.md, or DF11.md if the model has a README.md) into a folder
    #[arg(long, conflicts_with = "dry_run")]
    no_card: bool,
    /// Store a value under a key for other programs, such as tool.setting=value; repeatable
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_and_value, conflicts_with = "dry_run")]
    metadata: Vec<(String, String)>,
    /// Store a fine-tune as its differences from this model, from which it was trained: a path, or
    /// a repository in the Hugging Face cache. Decoding needs this model too
    #[arg(long, value_name = "BASE")]
    base: Option<PathBuf>,
    /// Show the sizes and write nothing, as df11 estimate does
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
            selection: self.selection.clone(),
            layout: self.writing.layout,
            base: self.base.clone(),
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
        let Some(LocalSource { place, .. }) = &self.selection.find(&self.source, false, session)?
        else {
            let remedy =
                "df11 inspect shows its sizes, and df11 convert stores it in another layout";
            return Err(compressed_already(&self.source, remedy));
        };
        if self.dry_run {
            return self.estimate().of_source(place, session);
        }
        let card = (!self.no_card).then(|| Card::new(place.repository.clone()));
        let options = self.writing.options()?.metadata(self.metadata()?).card(card);
        let options = self.base.iter().fold(options, CompressOptions::base);
        let start = Instant::now();
        let (source, out) = self.selection.open(place, self.out.as_ref())?;
        source.notes().for_each(|note| session.notice(note));
        let destination = Destination::of(&out)?;
        if self.writing.force {
            check_replaceable(&place.path, destination.path(), "df11")?;
        }
        let task = Task { verb: "compress", source: &self.source, out: &out, start };
        let remedy = self.selection.remedy(&source);
        let run = WriteRun { task, destination, threads: self.threads, session, remedy };
        self.writing.run(run, source.components(), |out, observer| {
            let compressed = df11::compress_all(&source, out, &options, observer);
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

/// Whether the source, and not the container, causes an error: every error except Corrupt, and that
/// one if it names a file of the source.
fn is_of(error: &Error, source: &Sources) -> bool {
    let Error::Corrupt { place, .. } = error else { return true };
    source.components().iter().flat_map(|component| &component.model.weights).any(|file| {
        place.strip_prefix(&file.path).is_some_and(|rest| rest.is_empty() || rest.starts_with(": "))
    })
}

/// Change the layout of a compressed model, or turn a folder into one file and back
#[derive(Args)]
#[command(after_help = CONVERT_HELP)]
pub(super) struct Convert {
    /// A container, or a folder with all shards of a model or pipeline
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// Output: one self-contained file if it ends in .df11, otherwise a folder; here, or in an
    /// object store
    #[arg(short, long, value_name = "OUT")]
    out: PathBuf,
    #[command(flatten)]
    writing: Writing,
    /// Do not write a model card into a folder
    #[arg(long)]
    no_card: bool,
    #[command(flatten)]
    base: BaseArg,
    #[command(flatten)]
    threads: Threads,
}

impl Convert {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let card = (!self.no_card).then(Card::default);
        let options = self.writing.options()?.card(card);
        check_out(&self.out)?;
        let start = Instant::now();
        let models = open_to_stream(&self.source, &self.base)?;
        let destination = Destination::of(&self.out)?;
        if self.writing.force {
            check_replaceable(&self.source, destination.path(), "df11")?;
        }
        let task = Task { verb: "convert", source: &self.source, out: &self.out, start };
        let run = WriteRun { task, destination, threads: self.threads, session, remedy: "" };
        self.writing.run(run, models.components(), |out, observer| {
            Ok(df11::convert_all(&models, out, &options, observer)?)
        })
    }
}
