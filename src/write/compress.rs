//! Compression of models, one or the components of a pipeline, into one container or a folder.

use std::{collections::BTreeMap, path::Path};

use super::{
    analysis, card,
    compressor::Compressor,
    folder::OutputFolder,
    input::Input,
    options::{CompressOptions, check_metadata},
    rename::check_absent,
    replace::Earlier,
    report::Report,
    shard_paths::{check_outputs, shard_paths},
    temporary::parent_of,
};
use crate::{
    Error, Model, Result,
    open::{Models, card::card_path, list_of_components},
    paths::is_container,
    progress::Observer,
    source::{Component, Source, Sources},
};

/// Compresses a model. An output whose name ends in `.df11` is one container with the side files
/// inside; any other is a folder with a container for each weights file, and the side files beside
/// them, where transformers' config.json gets a line that names this compression and that
/// [`decompress`](super::decompress) takes out again. Tensors are grouped into blocks by
/// [`group()`](crate::hazmat::group::group()); of blocks in a row that are all smaller than 64 KiB,
/// several become one.
///
/// Works on all threads of the current rayon pool; the result is the same for any number of them.
/// Memory is at most 32 MiB, 6 MiB a thread, and 0.02 % of the model (the work list and the
/// directory), whatever the size of its tensors. With [`Layout::Tile`](crate::Layout::Tile) a
/// thread also holds strips of 32 rows: 0.25 KiB for each column of the widest matrix if that is
/// more (32 MiB where it has 131,072; with more than 262,144 columns a matrix is cut as a vector).
/// The output appears under its name when it is whole; whatever fails before leaves nothing behind.
///
/// # Errors
/// [`Error::Parameter`] if the output exists (or something takes its name meanwhile), holds files
/// that are no earlier output, or the source changes meanwhile; [`Error::Io`] if reading or writing
/// fails; [`Error::Cancelled`]; [`Error::Corrupt`] if verification finds a difference (then memory
/// or disk are failing, or this crate has a bug).
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
    Ok(one(write(vec![alone(Input::of_source(source))], out, options, observer)?))
}

/// As [`compress`], of all models at a path. Those of a pipeline go into one folder, each as if it
/// had been compressed into its subfolder; files that belong to none lie where they did and are
/// recorded in `pipeline.df11`, which lists the components too. Returns a report for each, in the
/// order of [`Sources::components`].
///
/// # Errors
/// As [`compress`], and [`Error::Parameter`] if a pipeline is to become a single container.
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
        let input = Input::of_source(&component.model);
        Component::new(component.folder.as_str(), input)
    });
    write(inputs.collect(), out, options, observer)
}

/// Writes what another layout would have made of the same checkpoint: the same files, names and
/// hashes, byte for byte what [`compress`] makes of what [`decompress`](super::decompress) gives,
/// without those files in between. `out` is as for [`compress`]; side files go into the container
/// or beside it as its form asks for, whatever the form of `model`.
///
/// Weights are decoded where compression reads them, three times (with
/// [`Layout::Tile`](crate::Layout::Tile) large tensors four times), and what is decoded is compared
/// with the container's hashes. Memory is as for [`compress`], and some 3 MiB a thread for
/// decoding.
///
/// # Errors
/// As [`compress`], [`Error::Corrupt`] if the model is damaged, and [`Error::Parameter`] if shards
/// are missing.
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
    Ok(one(write(vec![alone(Input::of_model(model)?)], out, options, observer)?))
}

/// As [`convert`], of all models at a path; see [`compress_all`].
///
/// # Errors
/// As [`convert`] and [`compress_all`], and [`Error::Parameter`] if components are missing.
pub fn convert_all(
    models: &Models,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Report>> {
    models.check_complete()?;
    let inputs = models.components().iter().map(|component| {
        check_outside(&component.model, out)?;
        Ok(Component::new(component.folder.as_str(), Input::of_model(&component.model)?))
    });
    write(inputs.collect::<Result<_>>()?, out, options, observer)
}

fn alone(input: Input<'_>) -> Component<Input<'_>> {
    Component::new("", input)
}

fn one(reports: Vec<Report>) -> Report {
    reports.into_iter().next().expect("a report for each model")
}

/// Writes one model, or the components of a pipeline, of which the last one has no weights.
fn write(
    mut inputs: Vec<Component<Input<'_>>>,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Report>> {
    check_absent(out, options.overwrite)?;
    let passes = if options.verify { 2 } else { 1 };
    let mut bytes = 0;
    for Component { model, .. } in &mut inputs {
        model.add_options(options)?;
        bytes += analysis::bytes(&model.weights, options.layout) + passes * model.tensor_bytes();
    }
    observer.begin(bytes);
    if !is_container(out) {
        return write_folder(inputs, out, options, observer);
    }
    let [input] = &inputs[..] else {
        let problem = "a pipeline is several models, and one container holds one";
        let remedy = "name a folder as output: a name that does not end in .df11";
        return Err(Error::parameter(problem, remedy));
    };
    Ok(vec![Compressor::new(&input.model, options.layout, observer).single(out, options)?])
}

/// Fills a folder with the containers and side files of all models.
fn write_folder(
    inputs: Vec<Component<Input<'_>>>,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Report>> {
    let is_pipeline = inputs.len() > 1;
    let mut paths = Vec::new();
    for input in &inputs {
        let shards = shard_paths(&input.model, is_pipeline)?;
        check_outputs(&input.model, &shards)?;
        let side = input.model.side.iter().map(|side| side.path.clone());
        paths.extend(side.chain(shards).map(|path| input.path_of(&path)));
    }
    let earlier = options.overwrite.then(|| Earlier::of(paths));
    let folder = OutputFolder::create(out, earlier)?;
    let own =
        inputs.iter().filter(|input| input.folder.is_empty()).flat_map(|input| &input.model.side);
    let own: Vec<String> = own.map(|side| side.path.clone()).collect();
    let (mut reports, mut identities) = (Vec::new(), BTreeMap::new());
    for Component { folder: name, model: mut input } in inputs {
        if is_pipeline && name.is_empty() {
            input.metadata.extend([list_of_components(&identities)]);
            check_metadata(&input.metadata)?;
        }
        let compressor = Compressor::new(&input, options.layout, observer);
        let (report, identity) = compressor.folder(&folder.part(&name), options, is_pipeline)?;
        reports.push(report.of_component(&name));
        identities.insert(name, blake3::Hash::from_bytes(identity).to_hex().to_string());
    }
    let card = options.card.as_ref().zip(card_path(&own));
    if let (Some((card, path)), Some(identity)) = (card, identities.get("")) {
        card::write(&folder, out, path, card, &reports, identity)?;
    }
    folder.finish()?;
    Ok(reports)
}

/// Refuses an output inside the folder of a model, whose shards it would be taken for.
fn check_outside(model: &Model, out: &Path) -> Result<()> {
    let (Some(Ok(folder)), Ok(parent)) =
        (model.folder().map(Path::canonicalize), parent_of(out).canonicalize())
    else {
        return Ok(());
    };
    if !parent.starts_with(&folder) {
        return Ok(());
    }
    let problem = format!("{} lies in the folder that is converted", out.display());
    Err(Error::parameter(problem, "choose an output outside of it"))
}
