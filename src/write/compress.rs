//! Compression of a model: the two passes over each weights file, and the finished containers.

use std::path::Path;

use super::{
    analysis::{self, FileAnalysis},
    config, encode,
    folder::OutputFolder,
    input::{Input, Side},
    outline::{self, Draft},
    output::Output,
    plan::{Contents, Plan},
    report::Report,
};
use crate::{
    Error, Model, OpenOptions, Result,
    encoding::gap::Geometry,
    format,
    open::{Cpu, Level},
    progress::{Observer, Stage},
    source::{self, Source, WeightsFile},
};

/// Decoded bytes from which on a block stands for itself; no layer of a model that is worth compressing is smaller.
const MIN_BLOCK_BYTES: u64 = 64 << 10;

/// How BF16 tensors are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Huffman-coded exponents with a gap array (spec, section 6.3), where that is smaller than raw.
    Gap(Geometry),
    /// Huffman-coded pairs of exponents in tiles (spec, section 6.4), where that is smaller than raw: smaller than `gap`, and faster on a GPU.
    #[default]
    Tile,
    /// As they are.
    Raw,
}

impl Layout {
    /// [`Layout::Gap`] with the geometry that decodes fastest.
    pub fn gap() -> Self {
        Self::Gap(Geometry::default())
    }
}

/// Choices of [`compress`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CompressOptions {
    /// How BF16 tensors are stored.
    pub layout: Layout,
    /// Replace an output that exists.
    pub overwrite: bool,
    /// Decode everything again before the output gets its name, and compare all hashes.
    pub verify: bool,
}

impl Default for CompressOptions {
    fn default() -> Self {
        Self { layout: Layout::default(), overwrite: false, verify: true }
    }
}

/// Compresses a model. An output whose name ends in `.df11` is one container with the side files inside; any other is a folder with
/// a container for each weights file, and the side files beside them, where transformers' config.json gets a line that names this
/// compression and that [`decompress`](super::decompress) takes out again. Tensors are grouped into blocks by [`source::group()`]; of blocks
/// in a row that are all smaller than 64 KiB, several become one.
///
/// Works on all threads of the current rayon pool; the result is the same for any number of them. Memory is at most 32 MiB, 6 MiB a
/// thread, and 0.02 % of the model (the work list and the directory), whatever the size of its tensors. With [`Layout::Tile`] a thread also holds
/// strips of 32 rows: 0.25 KiB for each column of the widest matrix if that is more (32 MiB where it has 131,072; with more than 262,144 columns a
/// matrix is cut as a vector).
/// The output appears under its name when it is whole; whatever fails before leaves nothing behind.
///
/// # Errors
/// [`Error::Parameter`] where the output exists or the source changes meanwhile; [`Error::Io`] where reading or writing
/// fails; [`Error::Cancelled`]; [`Error::Corrupt`] where verification finds a difference (then memory or disk are
/// failing, or this crate has a bug).
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let model = df11::demo::tiny_checkpoint(folder.path())?;
/// # let out = folder.path().join("model.df11");
/// let source = df11::Source::open(&model)?;
/// let report = df11::compress(&source, &out, &df11::CompressOptions::default(), &())?;
/// println!("{} of {} bytes", report.stored_bytes, report.source_bytes);
/// # Ok(())
/// # }
/// ```
pub fn compress(
    source: &Source,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Report> {
    check_absent(out, options.overwrite)?;
    write(&Input::of_source(source), out, options, observer)
}

/// Writes what another layout would have made of the same checkpoint: the same files, names and hashes, byte for byte what [`compress`] makes of
/// what [`decompress`](super::decompress) gives, without those files in between. `out` is as for [`compress`]; side files go into the container or
/// beside it as its form asks for, whatever the form of `model`.
///
/// Weights are decoded where compression reads them, three times (with [`Layout::Tile`] large tensors four times), and what is decoded is compared
/// with the container's hashes. Memory is as for [`compress`], and some 3 MiB a thread for decoding.
///
/// # Errors
/// As [`compress`], [`Error::Corrupt`] where the model is damaged, and [`Error::Parameter`] where shards are missing.
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::demo::tiny_container(folder.path())?;
/// let mut options = df11::CompressOptions::default();
/// options.layout = df11::Layout::Tile;
/// let (tile, back) = (folder.path().join("tile.df11"), folder.path().join("back.df11"));
/// df11::convert(&df11::open(&path)?, &tile, &options, &())?;
/// df11::convert(&df11::open(&tile)?, &back, &df11::CompressOptions::default(), &())?;
/// assert!(std::fs::read(path).unwrap() == std::fs::read(back).unwrap());
/// # Ok(())
/// # }
/// ```
pub fn convert(
    model: &Model,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Report> {
    check_absent(out, options.overwrite)?;
    write(&Input::of_model(model)?, out, options, observer)
}

fn write(
    input: &Input<'_>,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Report> {
    let passes = if options.verify { 3 } else { 2 };
    observer.begin(passes * input.tensor_bytes());
    let compressor = Compressor::new(input, options.layout, observer);
    if is_single(out) { compressor.single(out, options) } else { compressor.folder(out, options) }
}

/// What [`compress`] would make, without making it: the first pass alone, and exact sizes.
///
/// # Errors
/// As [`compress`], but for writing.
pub fn estimate(source: &Source, out: &Path, layout: Layout, observer: &dyn Observer) -> Result<Estimate> {
    let input = Input::of_source(source);
    observer.begin(input.tensor_bytes());
    let compressor = Compressor::new(&input, layout, observer);
    compressor.estimate(out, |shard| compressor.analyse(shard))
}

/// As [`estimate`], but no weight is read, so that the safetensors headers alone need to be there: codes are assumed to take
/// `exponent_bits` bits a weight (2.6 to 2.7 in trained models), and no tensor equals another one. Some milliseconds.
///
/// # Errors
/// As [`estimate`], and [`Error::Parameter`] where the bits are not within 1 to 8.
pub fn estimate_headers(source: &Source, out: &Path, layout: Layout, exponent_bits: f64) -> Result<Estimate> {
    if !(1.0..=8.0).contains(&exponent_bits) {
        let problem = format!("{exponent_bits} bits for the code of an exponent");
        return Err(Error::parameter(problem, "name some from 1 to 8; trained models have 2.6 to 2.7"));
    }
    let input = Input::of_source(source);
    let compressor = Compressor::new(&input, layout, &());
    let mut estimate = compressor.estimate(out, |shard| {
        let files = shard.weights.iter().map(|&file| &input.weights[file]);
        files.map(|file| analysis::assume(file, layout, exponent_bits)).collect()
    })?;
    let note = format!("no weight was read: codes of {exponent_bits} bits a weight are assumed");
    estimate.report.notes.push(note);
    Ok(estimate)
}

/// What compression would make.
#[derive(Debug)]
pub struct Estimate {
    /// Its sizes.
    pub report: Report,
    /// What opening its output would give, without arrays: for what asks directories alone, as `gpu::Plan` does. Decoding finds damage.
    pub outline: Model,
}

/// Joins blocks in a row that are all small, until they have [`MIN_BLOCK_BYTES`] together; the first one gives the name. The
/// sections of a block take up to five pages, which a model of many tiny modules would otherwise mostly consist of.
fn join_small(groups: Vec<source::Block>, items: &[source::Item<'_>]) -> Vec<source::Block> {
    let mut joined: Vec<source::Block> = Vec::with_capacity(groups.len());
    let mut before = MIN_BLOCK_BYTES;
    for group in groups {
        let bytes: u64 = group.tensors.iter().map(|&index| items[index].bytes).sum();
        match joined.last_mut() {
            Some(last) if before < MIN_BLOCK_BYTES && bytes < MIN_BLOCK_BYTES => {
                last.tensors.extend(group.tensors);
                before += bytes;
            }
            _ => {
                joined.push(group);
                before = bytes;
            }
        }
    }
    joined
}

/// Whether an output is one container, by its name.
fn is_single(out: &Path) -> bool {
    out.extension().is_some_and(|extension| extension == "df11")
}

/// Refuses an output that exists.
pub(super) fn check_absent(out: &Path, overwrite: bool) -> Result<()> {
    if !overwrite && out.symlink_metadata().is_ok() {
        let problem = format!("{} exists", out.display());
        return Err(Error::parameter(problem, "choose another output, or replace it with --force"));
    }
    Ok(())
}

/// The weights files, by index, and the side files of one container.
struct ShardSource<'a> {
    weights: Vec<usize>,
    side: &'a [Side<'a>],
}

struct Compressor<'a> {
    input: &'a Input<'a>,
    layout: Layout,
    observer: &'a dyn Observer,
    /// For each weights file, the block of each tensor.
    blocks: Vec<Vec<usize>>,
    block_names: Vec<String>,
}

impl<'a> Compressor<'a> {
    fn new(input: &'a Input<'a>, layout: Layout, observer: &'a dyn Observer) -> Self {
        let files: Vec<&WeightsFile> = input.weights.iter().map(|weights| &*weights.file).collect();
        let tensors: Vec<_> = files
            .iter()
            .enumerate()
            .flat_map(|(file, weights)| (0..weights.tensors.len()).map(move |tensor| (file, tensor)))
            .collect();
        let items: Vec<_> =
            tensors.iter().map(|&(file, tensor)| source::Item::from(&files[file].tensors[tensor])).collect();
        let groups = join_small(source::group(&items), &items);
        let mut blocks: Vec<Vec<usize>> =
            files.iter().map(|weights| vec![0; weights.tensors.len()]).collect();
        let mut block_names = Vec::with_capacity(groups.len());
        for (block, group) in groups.into_iter().enumerate() {
            for index in group.tensors {
                let (file, tensor) = tensors[index];
                blocks[file][tensor] = block;
            }
            block_names.push(group.name);
        }
        Self { input, layout, observer, blocks, block_names }
    }

    fn shards(&self, single: bool) -> Vec<ShardSource<'a>> {
        let files = 0..self.input.weights.len();
        if single {
            vec![ShardSource { weights: files.collect(), side: &self.input.side }]
        } else {
            files.map(|file| ShardSource { weights: vec![file], side: &[] }).collect()
        }
    }

    fn analyse(&self, shard: &ShardSource<'_>) -> Result<Vec<FileAnalysis>> {
        self.observer.enter(Stage::Analyse);
        let weights = shard.weights.iter().map(|&file| &self.input.weights[file]);
        weights.map(|file| analysis::analyse(file, self.layout, self.observer)).collect()
    }

    fn contents<'b>(&'b self, shard: &ShardSource<'b>, analyses: &'b [FileAnalysis]) -> Result<Contents<'b>> {
        let files = shard.weights.iter().map(|&file| &self.input.weights[file]);
        let side = shard.side.iter().map(|file| Ok((file, file.hash()?)));
        Ok(Contents {
            weights: files.zip(analyses).collect(),
            side: side.collect::<Result<_>>()?,
            blocks: shard.weights.iter().map(|&file| self.blocks[file].clone()).collect(),
            block_names: &self.block_names,
        })
    }

    fn estimate(
        &self,
        out: &Path,
        analyse: impl Fn(&ShardSource<'_>) -> Result<Vec<FileAnalysis>>,
    ) -> Result<Estimate> {
        let mut report = Report::new(self.input);
        let single = is_single(out);
        let mut drafts = Vec::new();
        for shard in self.shards(single) {
            let analyses = analyse(&shard)?;
            let plan = Plan::new(&self.contents(&shard, &analyses)?)?;
            report.add(&plan, plan.file_length());
            let file = &self.input.weights[shard.weights[0]].file;
            drafts.push(Draft::new(if single { out.to_owned() } else { out.join(shard_path(file)) }, plan));
        }
        Ok(Estimate { report, outline: outline::open(drafts)? })
    }

    /// Both passes over one shard; the container lacks its directory still.
    fn write(&self, shard: &ShardSource<'_>, path: &Path, report: &mut Report) -> Result<Output> {
        let analyses = self.analyse(shard)?;
        let mut plan = Plan::new(&self.contents(shard, &analyses)?)?;
        report.add(&plan, plan.file_length());
        let output = Output::create(path, &mut plan)?;
        self.observer.enter(Stage::Encode);
        encode::encode(&plan, &output, self.observer)?;
        self.observer.advance(plan.alias_bytes);
        Ok(output)
    }

    fn single(&self, out: &Path, options: &CompressOptions) -> Result<Report> {
        let mut report = Report::new(self.input);
        let mut output = self.write(&self.shards(true)[0], out, &mut report)?;
        let identity = format::identity(output.weights());
        output.seal(0, 1, identity)?;
        if options.verify {
            self.verify(output.temporary_path()).map_err(|error| error.in_file(out))?;
        }
        output.finish()?;
        Ok(report)
    }

    fn folder(&self, out: &Path, options: &CompressOptions) -> Result<Report> {
        let mut report = Report::new(self.input);
        let folder = OutputFolder::create(out)?;
        let mut outputs = Vec::new();
        for (shard, file) in self.shards(false).iter().zip(&self.input.weights) {
            outputs.push(self.write(shard, &folder.path_of(&shard_path(&file.file))?, &mut report)?);
        }
        let identity = format::identity(outputs.iter().flat_map(Output::weights));
        let count = outputs.len() as u64;
        for (index, mut output) in outputs.into_iter().enumerate() {
            output.seal(index as u64, count, identity)?;
            output.finish()?;
        }
        config::write_side_files(self.input, &folder)?;
        if options.verify {
            self.verify(folder.path())?;
        }
        folder.finish()?;
        Ok(report)
    }

    fn verify(&self, path: &Path) -> Result<()> {
        self.observer.enter(Stage::Verify);
        // Read, not mapped: pages of a mapping would count as this process's memory.
        OpenOptions::new()
            .memory_map(false)
            .open(path)?
            .verify_stage(Level::Full, &Cpu, self.observer)
            .map(drop)
    }
}

/// Where a weights file's container goes in a folder.
fn shard_path(file: &WeightsFile) -> String {
    let stem = file.path.strip_suffix(".safetensors").unwrap_or(&file.path);
    format!("{stem}.df11")
}
