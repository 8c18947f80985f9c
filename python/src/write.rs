//! Compression, decompression and verification.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use df11::gpu::{Device, GpuDecoder};
use df11::hazmat::{
    Cpu, Decoder, Destination, SaveTarget, check_replaceable, is_far, is_small, remove_leftovers,
    shown,
};
use df11::source::{FetchedSource, WantedFiles};
use df11::{
    CompressOptions, DecompressOptions, Error, Layout, Level, Model, Observer, OpenOptions, Report,
    Sources, Verification,
};
use pyo3::types::{PyDict, PyTuple};
use pyo3::{intern, prelude::*};

use crate::work::{self, OrRaise, unknown_word};

fn layout_of(py: Python<'_>, name: Option<&str>) -> PyResult<Layout> {
    match name {
        None => Ok(Layout::default()),
        Some("gap") => Ok(Layout::gap()),
        Some("tile") => Ok(Layout::Tile),
        Some("raw") => Ok(Layout::Raw),
        Some(name) => Err(unknown_word(py, "the layout", name, "tile, gap or raw")),
    }
}

/// Opens models that are read from end to end: a file that shrinks meanwhile is an error then, and
/// not the end of the process.
fn open_to_stream(path: &Path, base: Option<PathBuf>) -> df11::Result<df11::Models> {
    let options = OpenOptions::new().memory_map(false);
    base.into_iter().fold(options, OpenOptions::base).open_all(path)
}

/// Compresses a model.
#[pyfunction]
#[pyo3(signature = (
    source, out, *, layout=None, verify=true, overwrite=false, base=None, progress=None
))]
#[expect(clippy::too_many_arguments, reason = "as many as Python's function has")]
pub(crate) fn compress<'py>(
    py: Python<'py>,
    source: PathBuf,
    out: PathBuf,
    layout: Option<&str>,
    verify: bool,
    overwrite: bool,
    base: Option<PathBuf>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let options = CompressOptions::new().layout(layout_of(py, layout)?);
    let options = options.verify(verify).overwrite(overwrite);
    let options = base.into_iter().fold(options, CompressOptions::base);
    reported(py, progress, |observer| {
        let destination = Destination::of(&out)?;
        let fetched = fetched(&source, observer)?;
        let source = fetched.as_ref().map_or(&*source, FetchedSource::path);
        let opened = Sources::open(source, None)?;
        prepare(overwrite, source, destination.path(), "df11")?;
        let reports = df11::compress_all(&opened, destination.path(), &options, observer)?;
        destination.publish(observer)?;
        Ok(reports)
    })
}

/// Fetches a source that is in a store, and removes it when the result is dropped. `None` for a
/// source on this machine.
fn fetched(source: &Path, observer: &dyn Observer) -> df11::Result<Option<FetchedSource>> {
    let Some(name) = source.to_str().filter(|_| is_far(source)) else { return Ok(None) };
    let fetched = FetchedSource::fetch(name, WantedFiles::Variant(None), observer)?;
    fetched.map(Some).ok_or_else(|| {
        let problem = format!("{} is already compressed", shown(source).display());
        Error::parameter(problem, "df11.convert stores it in another layout")
    })
}

/// Removes what killed runs left beside an output; checks that what has its name may be replaced,
/// if it shall.
fn prepare(overwrite: bool, source: &Path, out: &Path, suffix: &str) -> df11::Result<()> {
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty());
    // A folder that cannot be listed fails where it is written to.
    let _ = remove_leftovers(parent.unwrap_or(Path::new(".")));
    if overwrite { check_replaceable(source, out, suffix) } else { Ok(()) }
}

/// Stores a model in another layout.
#[pyfunction]
#[pyo3(signature = (
    source, out, *, layout=None, verify=true, overwrite=false, base=None, progress=None
))]
#[expect(clippy::too_many_arguments, reason = "as many as Python's function has")]
pub(crate) fn convert<'py>(
    py: Python<'py>,
    source: PathBuf,
    out: PathBuf,
    layout: Option<&str>,
    verify: bool,
    overwrite: bool,
    base: Option<PathBuf>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let options = CompressOptions::new().layout(layout_of(py, layout)?);
    let options = options.verify(verify).overwrite(overwrite);
    reported(py, progress, |observer| {
        let opened = open_to_stream(&source, base)?;
        let destination = Destination::of(&out)?;
        prepare(overwrite, &source, destination.path(), "df11")?;
        let reports = df11::convert_all(&opened, destination.path(), &options, observer)?;
        destination.publish(observer)?;
        Ok(reports)
    })
}

/// The sizes that compression would give.
#[pyfunction]
#[pyo3(signature = (source, out=None, *, layout=None, base=None, progress=None))]
pub(crate) fn estimate<'py>(
    py: Python<'py>,
    source: PathBuf,
    out: Option<PathBuf>,
    layout: Option<&str>,
    base: Option<PathBuf>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let options = CompressOptions::new().layout(layout_of(py, layout)?);
    let options = base.into_iter().fold(options, CompressOptions::base);
    reported(py, progress, |observer| {
        let fetched = fetched(&source, observer)?;
        let source = fetched.as_ref().map_or(&*source, FetchedSource::path);
        let opened = Sources::open(source, None)?;
        let default = if opened.is_pipeline() { "model" } else { "model.df11" };
        let out = out.unwrap_or_else(|| default.into());
        let estimates = df11::estimate_all(&opened, &out, &options, None, observer)?;
        Ok(estimates.into_iter().map(|estimate| estimate.report).collect())
    })
}

/// Gives back the original files.
#[pyfunction]
#[pyo3(signature = (source, out, *, overwrite=false, base=None, progress=None))]
pub(crate) fn decompress(
    py: Python<'_>,
    source: PathBuf,
    out: PathBuf,
    overwrite: bool,
    base: Option<PathBuf>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    work::watched(py, progress, |observer| {
        let models = open_to_stream(&source, base)?;
        let options = DecompressOptions::new().overwrite(overwrite);
        prepare(overwrite, &source, &out, "safetensors")?;
        let restored = df11::decompress_all(&models, &out, &options, observer)?;
        Ok(restored.iter().map(|each| each.bytes).sum())
    })
}

/// Gives the files of a save their names in its folder.
#[pyfunction]
pub(crate) fn install(
    py: Python<'_>,
    stage: PathBuf,
    folder: PathBuf,
    names: BTreeSet<String>,
    identity: String,
) -> PyResult<()> {
    // Waits, which threads of the pool must not.
    let target = py.detach(|| SaveTarget::lock(&folder)).or_raise(py)?;
    work::briefly(py, || target.install(&stage, &names, &identity))
}

/// The hashes of the tensors of a safetensors file.
#[pyfunction]
pub(crate) fn tensor_hashes(py: Python<'_>, file: PathBuf) -> PyResult<BTreeMap<String, String>> {
    work::briefly(py, || df11::hazmat::tensor_hashes(&file))
}

/// Does work that makes a report of each model, and tells Python their sum.
fn reported<'py>(
    py: Python<'py>,
    progress: Option<&Bound<'py, PyAny>>,
    work: impl FnOnce(&dyn Observer) -> df11::Result<Vec<Report>> + Send,
) -> PyResult<Bound<'py, PyAny>> {
    let report = Report::sum(&work::watched(py, progress, work)?);
    let fields = PyDict::new(py);
    for (name, number) in [
        ("source_bytes", report.source_bytes),
        ("side_bytes", report.side_bytes),
        ("stored_bytes", report.stored_bytes),
        ("stored_side_bytes", report.stored_side_bytes),
        ("shards", report.shards),
        ("blocks", report.blocks),
        ("coded_tensors", report.coded_tensors),
        ("delta_tensors", report.delta_tensors),
        ("raw_tensors", report.raw_tensors),
        ("alias_tensors", report.alias_tensors),
        ("coded_weights", report.coded_weights),
        ("coded_bytes", report.coded_bytes),
    ] {
        fields.set_item(name, number)?;
    }
    fields.set_item("entropy_bits", report.entropy_bits)?;
    let left_out = report.left_out.into_iter().map(|left_out| (left_out.path, left_out.reason));
    fields.set_item("left_out", PyTuple::new(py, left_out.collect::<Vec<_>>())?)?;
    fields.set_item("notes", PyTuple::new(py, report.notes)?)?;
    py.import(intern!(py, "df11._report"))?.getattr("Report")?.call((), Some(&fields))
}

/// The argument `device`.
#[derive(FromPyObject)]
pub(crate) enum DeviceChoice {
    Number(usize),
    Word(String),
}

/// How a model is verified.
pub(crate) struct Verifier {
    level: Level,
    device: DeviceChoice,
}

/// Checks a container, or all models in a folder.
#[pyfunction]
#[pyo3(signature = (path, level="full", *, device=None, base=None, progress=None))]
pub(crate) fn verify<'py>(
    py: Python<'py>,
    path: PathBuf,
    level: &str,
    device: Option<DeviceChoice>,
    base: Option<PathBuf>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    Verifier::new(py, level, device)?.watched(py, progress, |check, observer| {
        let models = open_to_stream(&path, base)?;
        let mut all = Verification::default();
        for component in models.components() {
            let found = check.run(&component.model, observer)?;
            all.tensors += found.tensors;
            all.files += found.files;
            all.bytes = all.bytes.saturating_add(found.bytes);
            all.unchecked.extend(found.unchecked.iter().map(|what| component.sentence(what)));
        }
        all.unchecked.extend(
            models.missing().iter().map(|name| format!("component {name}, which is missing")),
        );
        Ok(all)
    })
}

impl Verifier {
    pub(crate) fn new(py: Python<'_>, level: &str, device: Option<DeviceChoice>) -> PyResult<Self> {
        let level = match level {
            "structure" => Level::Structure,
            "checksums" => Level::Checksums,
            "full" => Level::Full,
            _ => {
                let levels = "structure, checksums or full";
                return Err(unknown_word(py, "the level", level, levels));
            }
        };
        let device = device.unwrap_or_else(|| DeviceChoice::Word("auto".to_owned()));
        match &device {
            DeviceChoice::Word(word) if !["auto", "cpu", "gpu"].contains(&word.as_str()) => {
                let devices = "auto, cpu, gpu or the number of a GPU";
                Err(unknown_word(py, "the device", word, devices))
            }
            _ => Ok(Self { level, device }),
        }
    }

    /// Verifies, and tells Python what was found.
    pub(crate) fn watched<'py>(
        &self,
        py: Python<'py>,
        progress: Option<&Bound<'py, PyAny>>,
        verify: impl FnOnce(&Self, &dyn Observer) -> df11::Result<Verification> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let found = work::watched(py, progress, |observer| verify(self, observer))?;
        let class = py.import(intern!(py, "df11._report"))?.getattr("Verification")?;
        class.call1((found.tensors, found.files, found.bytes, PyTuple::new(py, &found.unchecked)?))
    }

    pub(crate) fn run(&self, model: &Model, observer: &dyn Observer) -> df11::Result<Verification> {
        if self.level < Level::Full {
            return model.verify(self.level, observer);
        }
        model.verify_with(self.level, &*self.decoder(model)?, observer)
    }

    /// A decoder for a model, which a GPU has loaded when this returns.
    fn decoder<'m>(&self, model: &'m Model) -> df11::Result<Box<dyn Decoder + 'm>> {
        let on = |device: df11::Result<Device>| -> df11::Result<Box<dyn Decoder + 'm>> {
            Ok(Box::new(GpuDecoder::fit(model, &device?)?))
        };
        let word = match &self.device {
            DeviceChoice::Number(ordinal) => return on(Device::open(*ordinal)),
            DeviceChoice::Word(word) => word.as_str(),
        };
        if word == "cpu" || word == "auto" && is_small(model) {
            return Ok(Box::new(Cpu));
        }
        match on(Device::first()) {
            // A fault of the container itself shows on either device.
            Err(Error::Gpu { .. } | Error::Unsupported { .. } | Error::Limit { .. })
                if word == "auto" =>
            {
                Ok(Box::new(Cpu))
            }
            answer => answer,
        }
    }
}
