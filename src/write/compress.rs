//! Compresses a model, or the components of a pipeline, into one container or a folder.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

use super::{
    analysis::{self, FileAnalysis},
    base::{check_single, recorded},
    card,
    encode::{ContainerOutput, encode},
    folder::{OutputFolder, check_outputs, shard_paths, write_side_files},
    input::Input,
    options::{CompressOptions, Layout, check_key, check_metadata},
    plan::{ContainerPlan, Contents},
    report::Report,
    spill::Spill,
};
use crate::{
    Error, Model, OpenOptions, Result,
    format::{self, IdentifiedFile, directory::ShardRecord},
    open::{Base, Cpu, Level, Models, beside::card_path, list_of_components},
    paths::{RENAME, check_nameable, is_container, is_pipeline_list},
    progress::{Observer, Stage},
    source::{Component, Source, Sources},
    temporary::{TemporaryFile, check_absent, check_file, file_beside, parent_of, rename_file},
};

/// Compresses a model. An output whose name ends in `.df11` is one container with the side files
/// inside. Any other output is a folder with a container for each weights file, and the side files
/// beside them; a line in config.json names this compression for transformers, and
/// [`decompress`](super::decompress) removes it again. [`group()`](crate::hazmat::group::group())
/// groups tensors into blocks; consecutive blocks that are all smaller than 64 KiB are joined.
///
/// Works on all threads of the current rayon pool; the result is the same for any number of them.
/// Memory is at most 32 MiB, 6 MiB per thread, and 0.02 % of the model (the work list and the
/// directory), whatever the size of its tensors. With [`Layout::Tile`](crate::Layout::Tile) a
/// thread also holds strips of 32 rows: 0.25 KiB for each column of the widest matrix if that is
/// more (32 MiB for 131,072 columns; a matrix with more than 262,144 columns is cut as a vector).
/// The output appears under its name when it is complete; after a failure no partial output
/// remains.
///
/// # Errors
/// [`Error::Parameter`] if the output exists (or something takes its name meanwhile), holds files
/// that are not from an earlier output, or the source changes meanwhile; [`Error::Io`] if reading
/// or writing fails; [`Error::Cancelled`]; [`Error::Corrupt`] if verification finds a difference
/// (then memory or disk are failing, or this crate has a bug).
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let model = df11::hazmat::demo::tiny_checkpoint(folder.path())?;
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
    let input = Component::new("", Input::of_source(source, out)?);
    Ok(write(vec![input], out, options, observer)?.remove(0))
}

/// Like [`compress`], for all models at a path. The components of a pipeline go into one folder,
/// each as if compressed into its subfolder. Files that belong to no component keep their places,
/// and `pipeline.df11` records them and lists the components. Returns a report for each, in the
/// order of [`Sources::components`].
///
/// # Errors
/// Like [`compress`]; [`Error::Parameter`] if the output for a pipeline is a single container.
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::hazmat::demo::tiny_checkpoint(folder.path())?;
/// # let out = folder.path().join("out");
/// let sources = df11::Sources::open(&path, None)?;
/// let reports = df11::compress_all(&sources, &out, &df11::CompressOptions::default(), &())?;
/// for (component, report) in sources.components().iter().zip(&reports) {
///     println!("{}: {:.1} %", component.folder, 100.0 * report.ratio());
/// }
/// println!("{} bytes in all", df11::Report::sum(&reports).stored_bytes);
/// # Ok(())
/// # }
/// ```
pub fn compress_all(
    sources: &Sources,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Report>> {
    let inputs = sources.components().iter().map(|component| {
        let input = Input::of_source(&component.model, out)?;
        Ok(Component::new(component.folder.as_str(), input))
    });
    write(inputs.collect::<Result<_>>()?, out, options, observer)
}

/// Stores a model in another layout. The output is byte for byte what
/// [`decompress`](super::decompress) followed by [`compress`] would make, without the files in
/// between. `out` is as for [`compress`]; its form alone decides whether side files are inside the
/// container or beside it.
///
/// Weights are decoded whenever compression reads them: three times, or four times for large
/// tensors with [`Layout::Tile`](crate::Layout::Tile). Decoded weights are compared with the
/// container's hashes. Memory is as for [`compress`], plus some 3 MiB per thread for decoding.
///
/// # Errors
/// Like [`compress`], [`Error::Corrupt`] if the model is damaged, and [`Error::Parameter`] if
/// shards are missing.
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
/// let options = df11::CompressOptions::new().layout(df11::Layout::Tile);
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
    check_outside(model, out)?;
    let input = Component::new("", Input::of_model(model, out)?);
    Ok(write(vec![input], out, options, observer)?.remove(0))
}

/// Like [`convert`], of all models at a path; see [`compress_all`].
///
/// # Errors
/// Like [`convert`] and [`compress_all`], and [`Error::Parameter`] if components are missing.
pub fn convert_all(
    models: &Models,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Report>> {
    models.check_complete()?;
    let inputs = models.components().iter().map(|component| {
        check_outside(&component.model, out)?;
        let input = Input::of_model(&component.model, out)?;
        Ok(Component::new(component.folder.as_str(), input))
    });
    write(inputs.collect::<Result<_>>()?, out, options, observer)
}

/// Writes one model, or the components of a pipeline, of which the last one has no weights.
fn write(
    mut inputs: Vec<Component<Input<'_>>>,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Report>> {
    check_absent(out, options.overwrite)?;
    let base = open_base(&mut inputs, out, options)?;
    let passes = if options.verify { 2 } else { 1 };
    let mut bytes = 0;
    options.metadata.keys().try_for_each(|key| check_key(key))?;
    for Component { model, .. } in &mut inputs {
        model.metadata.extend(options.metadata.clone());
        check_metadata(&model.metadata)?;
        bytes += analysis::bytes(&model.weights, options.layout, base.as_ref(), passes);
    }
    observer.begin(bytes);
    if !is_container(out) {
        return write_folder(inputs, out, options, base.as_ref(), observer);
    }
    let [input] = &inputs[..] else {
        let problem = "a pipeline is several models, and one container holds one";
        let remedy = "name a folder as output: a name that does not end in .df11";
        return Err(Error::parameter(problem, remedy));
    };
    check_name(out)?;
    let (layout, base) = (options.layout, base.as_ref());
    let compressor = Compressor { component: input, layout, base, observer };
    Ok(vec![compressor.single(out, options)?])
}

/// Opens the base that the options name, and records where it is.
pub(super) fn open_base(
    inputs: &mut [Component<Input<'_>>],
    out: &Path,
    options: &CompressOptions,
) -> Result<Option<Base>> {
    check_single(options.base.as_ref(), inputs.len())?;
    let Some(path) = &options.base else { return Ok(None) };
    // Read, not mapped: see `verify`.
    let base = Base::open(path, &OpenOptions::new().memory_map(false))?;
    inputs[0].model.metadata.extend([recorded(path, &base, out)?]);
    Ok(Some(base))
}

/// Refuses a container whose name would make its folder look like a pipeline's.
fn check_name(out: &Path) -> Result<()> {
    let name = out.file_name().and_then(|name| name.to_str());
    Error::unless(!name.is_some_and(is_pipeline_list), || {
        let problem = format!("{} would list the components of a pipeline", out.display());
        Error::parameter(problem, "choose another name")
    })
}

fn write_folder(
    inputs: Vec<Component<Input<'_>>>,
    out: &Path,
    options: &CompressOptions,
    base: Option<&Base>,
    observer: &dyn Observer,
) -> Result<Vec<Report>> {
    let is_pipeline = inputs.len() > 1;
    let (mut paths, mut all_shards) = (BTreeSet::new(), Vec::new());
    for input in &inputs {
        let shards = shard_paths(&input.model, is_pipeline)?;
        check_outputs(&input.model, &shards)?;
        let side = input.model.side.iter().map(|side| &side.path);
        paths.extend(side.chain(&shards).map(|path| input.path_of(path)));
        all_shards.push(shards);
    }
    paths.iter().try_for_each(|path| check_nameable(path, RENAME))?;
    let card = options.card.as_ref().zip(card_path(&paths));
    let mut folder = OutputFolder::create(out, options.overwrite.then_some(paths))?;
    let (mut reports, mut identities) = (Vec::new(), BTreeMap::new());
    for (mut component, shards) in inputs.into_iter().zip(all_shards) {
        if is_pipeline && component.folder.is_empty() {
            component.model.metadata.extend([list_of_components(&identities)]);
            check_metadata(&component.model.metadata)?;
        }
        let (component, layout) = (&component, options.layout);
        let compressor = Compressor { component, layout, base, observer };
        let (report, identity) = compressor.folder(&mut folder, &shards, options)?;
        reports.push(report);
        let identity = blake3::Hash::from_bytes(identity).to_hex().to_string();
        identities.insert(component.folder.clone(), identity);
    }
    if let (Some((card, path)), Some(identity)) = (card, identities.get("")) {
        card::write(&mut folder, out, path, card, &reports, identity)?;
    }
    folder.finish()?;
    Ok(reports)
}

/// Refuses an output inside the folder of a model, where it would be taken for one of the model's
/// shards.
fn check_outside(model: &Model, out: &Path) -> Result<()> {
    let folder = model.folder().map(Path::canonicalize);
    if let (Some(Ok(folder)), Ok(parent)) = (folder, parent_of(out).canonicalize())
        && parent.starts_with(&folder)
    {
        let problem = format!("{} lies in the folder that is converted", out.display());
        return Err(Error::parameter(problem, "choose an output outside of it"));
    }
    Ok(())
}

/// One compression, from the input to the parts of each container.
pub(super) struct Compressor<'a> {
    pub(super) component: &'a Component<Input<'a>>,
    pub(super) layout: Layout,
    pub(super) base: Option<&'a Base>,
    pub(super) observer: &'a dyn Observer,
}

impl Compressor<'_> {
    /// Contents of each container: of one, or of one for each weights file.
    pub(super) fn shards(&self, single: bool) -> Vec<Contents<'_>> {
        let Input { weights, side, metadata, block_names, .. } = &self.component.model;
        let shard = |files: Range<usize>| {
            // The first one also has what belongs to no weights file.
            let is_first = files.start == 0;
            Contents {
                weights: &weights[files],
                side: if is_first { side } else { &[] },
                stores_side: single,
                metadata: is_first.then_some(metadata),
                block_names,
            }
        };
        match weights.len() {
            count if single || count == 0 => vec![shard(0..count)],
            count => (0..count).map(|file| shard(file..file + 1)).collect(),
        }
    }

    /// First pass over one shard.
    pub(super) fn analyse(
        &self,
        shard: &Contents<'_>,
        spill: Option<&Spill>,
    ) -> Result<Vec<FileAnalysis>> {
        self.observer.enter(Stage::Analyse);
        let weights = shard.weights.iter();
        let base = self.base.map(|base| (base, spill));
        let analyse = |file| analysis::analyse(file, self.layout, base, self.observer);
        weights.map(analyse).collect()
    }

    /// Both passes over one shard; the container still lacks its directory.
    fn write(
        &self,
        shard: &Contents<'_>,
        (file, path): (File, PathBuf),
        report: &mut Report,
    ) -> Result<ContainerOutput> {
        let spill = self.base.map(|_| Spill::beside(&path)).transpose()?;
        let analyses = self.analyse(shard, spill.as_ref())?;
        let mut plan = ContainerPlan::new(shard, &analyses)?;
        report.add(&plan);
        let output = ContainerOutput::new(file, path, &mut plan)?;
        self.observer.enter(Stage::Encode);
        encode(shard, &plan, (&output, spill.as_ref()), self.observer)?;
        Ok(output)
    }

    fn single(&self, out: &Path, options: &CompressOptions) -> Result<Report> {
        check_file(out)?;
        let mut report = Report::new(self.component, true);
        let TemporaryFile { file, lock } = file_beside(out)?;
        let (file, temporary) = file.into_parts();
        let mut output = self.write(&self.shards(true)[0], (file, out.to_owned()), &mut report)?;
        let identity = format::identity(IdentifiedFile::of(&output.directory));
        output.seal(ShardRecord::new(0, 1, identity))?;
        if options.verify {
            self.verify(&temporary, 1, options).map_err(|error| error.in_file(out))?;
        }
        let file = NamedTempFile::from_parts(output.into_file(), temporary);
        rename_file(TemporaryFile { file, lock }, out, options.overwrite)?;
        Ok(report)
    }

    /// Fills a folder, or a component's part of one, with containers of these paths. Returns the
    /// model's identity too.
    fn folder(
        &self,
        folder: &mut OutputFolder,
        paths: &[String],
        options: &CompressOptions,
    ) -> Result<(Report, [u8; 32])> {
        let component = self.component;
        let mut report = Report::new(component, false);
        let mut outputs = Vec::new();
        for (shard, path) in self.shards(false).iter().zip(paths) {
            let file = folder.create_file(&component.path_of(path))?;
            let mut output = self.write(shard, file, &mut report)?;
            output.close();
            outputs.push(output);
        }
        let files = outputs.iter().flat_map(|output| IdentifiedFile::of(&output.directory));
        let identity = format::identity(files);
        let count = outputs.len() as u64;
        for (index, mut output) in (0..).zip(outputs) {
            output.seal(ShardRecord::new(index, count, identity))?;
        }
        write_side_files(component, folder)?;
        if options.verify {
            self.verify(&folder.path().join(&component.folder), count, options)?;
        }
        Ok((report, identity))
    }

    /// Decodes and compares all, and counts what is there against what went in: shards, files and
    /// tensors.
    fn verify(&self, path: &Path, shards: u64, options: &CompressOptions) -> Result<()> {
        self.observer.enter(Stage::Verify);
        // Read, not mapped: pages of a mapping would count as this process's memory.
        let mut opening = OpenOptions::new().memory_map(false);
        if let Some(base) = &options.base {
            opening = opening.base(base);
        }
        let models = opening.open_all(path)?;
        // In a pipeline, this verifies what belongs to no component; the components were verified
        // when they were written.
        let model = &models.components().last().expect("a model").model;
        let found = model.verify_stage(Level::Full, &Cpu, self.observer)?;
        let Input { weights, side, .. } = &self.component.model;
        let tensors: u64 = weights.iter().map(|weights| weights.file.tensors.len() as u64).sum();
        let files = (weights.len() + side.len()) as u64;
        let wanted = [shards, files, tensors];
        let there = [model.shards().len() as u64, found.files, found.tensors];
        Error::unless(there == wanted && found.unchecked.is_empty(), || {
            let problem = format!("{there:?} shards, files and tensors are there, not {wanted:?}");
            Error::corrupt("directory", 0, problem).in_file(path)
        })
    }
}
