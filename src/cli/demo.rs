//! `df11 demo`: compresses and restores a generated model, and proves that every bit comes back.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use df11::{
    Card, CompressOptions, DecompressOptions, Encoding, Error, Level, Model, Report, Source,
    Tensor,
    hazmat::{Decoder, demo, histogram},
    source::{SourceTensor, WeightsFile},
};
use serde_json::json;

use super::{
    answer::{Answer, Failure},
    containers::add_loading,
    device::{DecodedBy, DeviceArgs},
    figures::{self, BlockFigures, has_weights},
    measure::timed,
    session::{Session, Threads, check_interrupted, temporary_folder},
    text,
};

const AFTER_HELP: &str = "\
Makes a checkpoint like those on Hugging Face (two shards, grouped-query attention, a tied head, \
some tensors that are not BF16), compresses it, decodes every block (on a GPU if there is one), \
verifies it, restores the files, and compares everything bit for bit. Exit code 1 means that a \
bit differs.

Examples:
  df11 demo
  df11 demo --keep demo    keep the model and its compressed folder in demo";

/// Make a model, compress it, and prove that every bit comes back
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Demo {
    /// Keep all files in this folder, which must be new or empty
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Seed of the weights
    #[arg(long, default_value_t = 11)]
    seed: u64,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    threads: Threads,
}

impl Demo {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let temporary;
        let folder = if let Some(folder) = &self.keep {
            make_empty(folder)?;
            folder.as_path()
        } else {
            temporary = temporary_folder(&std::env::temp_dir())?;
            temporary.path()
        };
        self.threads.run(|| {
            let mut answer = demonstrate(folder, self.seed, self.device, session)?;
            if self.keep.is_some() {
                add_folder(&mut answer, folder)?;
            } else {
                answer.text.push_str("\n\nThe files are deleted; --keep FOLDER keeps them.");
            }
            Ok(answer)
        })
    }
}

/// Adds the folder that transformers loads, and ends the answer with what a person can do next.
fn add_folder(answer: &mut Answer, kept: &Path) -> Result<(), Failure> {
    let folder = kept.join("model-df11");
    let options = CompressOptions::new().card(Some(Card::default()));
    df11::convert(&df11::open(kept.join("model.df11"))?, &folder, &options, &())?;
    let path = text::argument(&folder);
    let next = format!("\n\nGo on with:\n  df11 inspect {path}\n  df11 verify {path}");
    answer.text.push_str(&next);
    add_loading(answer, &folder);
    Ok(())
}

fn make_empty(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(|error| Error::io("creating", folder, error))?;
    let mut entries = fs::read_dir(folder).map_err(|error| Error::io("listing", folder, error))?;
    if entries.next().is_some() {
        let problem = format!("{} is not empty", folder.display());
        return Err(Error::parameter(problem, "name a folder that does not exist yet").into());
    }
    Ok(())
}

fn demonstrate(
    folder: &Path,
    seed: u64,
    device: DeviceArgs,
    session: &Session,
) -> Result<Answer, Failure> {
    let (container, restored) = (folder.join("model.df11"), folder.join("restored"));
    let (checkpoint, seconds) = timed(|| demo::checkpoint(folder, demo::DEMO, seed))?;
    let source = Source::open(&checkpoint).map_err(Failure::Other)?;
    let bytes = source.weights.iter().map(|file| file.length).sum();
    let mut steps = vec![("make", bytes, seconds)];
    check_interrupted()?;

    let options = CompressOptions::new().verify(false);
    let (report, seconds) =
        timed(|| df11::compress(&source, &container, &options, &session.progress()))?;
    steps.push(("compress", bytes, seconds));

    let (model, seconds) = timed(|| df11::open(&container))?;
    steps.push(("open", 0, seconds));
    let (chosen, seconds) = timed(|| device.choose(&model, false, session))?;
    let decoder = &*chosen.decoder;
    if chosen.device.is_gpu() {
        steps.push(("start, load", report.stored_bytes, seconds));
    }
    let (total, seconds) = compare_blocks(&model, &source, decoder)?;
    steps.push(("decode", total, seconds));

    let (verification, seconds) =
        timed(|| model.verify_with(Level::Full, decoder, &session.progress()))?;
    steps.push(("verify", bytes, seconds));

    let options = DecompressOptions::new();
    let (written, seconds) =
        timed(|| df11::decompress(&model, &restored, &options, &session.progress()))?;
    steps.push(("decompress", written.bytes, seconds));
    let (tensors, files) = (verification.tensors, compare_folders(&checkpoint, &restored)?);
    let outcome = Outcome { seed, tensors, files, folder, device: &chosen.device, report, steps };
    outcome.answer(&model, &source)
}

/// Outcome of the demo: counts that were found equal, sizes and times.
struct Outcome<'a> {
    seed: u64,
    tensors: u64,
    files: u64,
    folder: &'a Path,
    device: &'a DecodedBy,
    report: Report,
    /// Names, bytes and seconds of what was done.
    steps: Vec<(&'static str, u64, f64)>,
}

/// Decodes every block, and compares each tensor with the bytes in the source. Returns bytes and
/// seconds of decoding alone.
fn compare_blocks(
    model: &Model,
    source: &Source,
    decoder: &dyn Decoder,
) -> Result<(u64, f64), Failure> {
    let originals: BTreeMap<&str, (&WeightsFile, &SourceTensor)> = source
        .weights
        .iter()
        .flat_map(|file| {
            file.tensors.iter().map(move |tensor| (tensor.name.as_str(), (file, tensor)))
        })
        .collect();
    let (mut found, mut bytes, mut seconds) = (0, 0, 0.0);
    let mut buffer = Vec::new();
    for block in model.blocks() {
        check_interrupted()?;
        let layout = block.layout()?;
        buffer.resize(layout.bytes as usize, 0);
        let ((), took) = timed(|| block.decode_with(decoder, &mut buffer))?;
        (bytes, seconds) = (bytes + layout.bytes, seconds + took);
        for (tensor, range) in block.tensors().zip(&layout.tensors) {
            let Some((file, original)) = originals.get(tensor.name()) else {
                return Err(Failure::Mismatch(format!(
                    "tensor {:?} was never there",
                    tensor.name()
                )));
            };
            let mut expected = vec![0; original.length as usize];
            file.read_exact_at(original.offset, &mut expected)?;
            if buffer[range.start as usize..range.end as usize] != expected {
                return Err(Failure::Mismatch(format!("tensor {:?} differs", tensor.name())));
            }
            found += 1;
        }
    }
    if found == originals.len() {
        return Ok((bytes, seconds));
    }
    Err(Failure::Mismatch(format!("{found} of {} tensors are there", originals.len())))
}

/// Compares all files of two folders without subfolders, byte by byte. Returns their number.
fn compare_folders(left: &Path, right: &Path) -> Result<u64, Failure> {
    let (names, others) = (names(left)?, names(right)?);
    if names != others {
        return Err(Failure::Mismatch(format!("the files are {others:?}, not {names:?}")));
    }
    let read = |path: PathBuf| fs::read(&path).map_err(|error| Error::io("reading", &path, error));
    for name in &names {
        if read(left.join(name))? != read(right.join(name))? {
            return Err(Failure::Mismatch(format!("file {} differs", name.display())));
        }
    }
    Ok(names.len() as u64)
}

fn names(folder: &Path) -> Result<BTreeSet<OsString>, Failure> {
    let listing = |error| Error::io("listing", folder, error);
    let entries = fs::read_dir(folder).map_err(listing)?;
    let names = entries.map(|entry| Ok(entry.map_err(listing)?.file_name()));
    names.collect()
}

impl Outcome<'_> {
    fn answer(&self, model: &Model, source: &Source) -> Result<Answer, Failure> {
        let (report, steps) = (&self.report, &self.steps);
        let measure =
            |tensor: &Tensor<'_>| has_weights(tensor).then(|| histogram(tensor)).transpose();
        let blocks = model.blocks().map(|block| BlockFigures::new(block, measure));
        let blocks = blocks.collect::<df11::Result<Vec<_>>>()?;
        // The tied head counts once, as it is stored.
        let own = model.tensors().filter(|tensor| tensor.encoding() != Encoding::Alias);
        let distinct = own.map(|tensor| tensor.byte_length().unwrap_or(0)).sum::<u64>();
        let row = |&(name, bytes, seconds): &(&str, u64, f64)| {
            let rate = if bytes == 0 { String::new() } else { text::rate(bytes, seconds) };
            [name.to_owned(), text::duration(seconds), rate]
        };
        let text = format!(
            "A model with seeded weights: {} of tensors, seed {}, {} threads, decoded by {}\n\n\
             {}\n\n\
             tensors    {} → a container of {} ({}), {:.2} bits per BF16 weight instead of 16\n\
             originals  {} in {}, where the tied head is stored twice\n\n{}\n\n\
             Every bit came back: {} tensors and {} files are the same as before.",
            text::bytes(distinct),
            self.seed,
            rayon::current_num_threads(),
            self.device.text(),
            figures::table(&blocks, &figures::total(&blocks)),
            text::bytes(distinct),
            text::bytes(report.stored_bytes),
            text::percent(report.stored_bytes as f64 / distinct as f64),
            report.bits_per_weight(),
            text::bytes(report.source_bytes),
            text::count(source.weights.len() as u64, "weights file"),
            text::table(["step", "time", "rate"], steps.iter().map(row)),
            self.tensors,
            self.files,
        );
        let step = |&(name, bytes, seconds): &(&str, u64, f64)| {
            let rate = text::per_second(bytes, seconds);
            json!({ "name": name, "bytes": bytes, "seconds": seconds, "bytes_per_second": rate })
        };
        let json = json!({
            "command": "demo",
            "seed": self.seed,
            "threads": rayon::current_num_threads(),
            "device": self.device.json(),
            "folder": self.folder.to_string_lossy(),
            "identical": true,
            "tensors": self.tensors,
            "files": self.files,
            "source_bytes": report.source_bytes,
            "distinct_bytes": distinct,
            "stored_bytes": report.stored_bytes,
            "ratio": report.stored_bytes as f64 / distinct as f64,
            "bits_per_weight": report.bits_per_weight(),
            "entropy_bits_per_weight": report.entropy(),
            "blocks": blocks.iter().map(BlockFigures::json).collect::<Vec<_>>(),
            "steps": steps.iter().map(step).collect::<Vec<_>>(),
        });
        Ok(Answer { text, json })
    }
}
