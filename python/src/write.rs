//! Compression and back.

use std::path::{Path, PathBuf};

use df11::{
    CompressOptions, DecompressOptions, Layout, Observer, OpenOptions, Report, Sources,
    hazmat::check_replaceable,
};
use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::work::{self, unknown_word};

fn layout_of(py: Python<'_>, name: Option<&str>) -> PyResult<Layout> {
    match name {
        None => Ok(Layout::default()),
        Some("gap") => Ok(Layout::gap()),
        Some("tile") => Ok(Layout::Tile),
        Some("raw") => Ok(Layout::Raw),
        Some(name) => Err(unknown_word(py, "the layout", name, "gap, tile or raw")),
    }
}

/// Opens models that are read from end to end: a file that shrinks meanwhile is an error then, and
/// not the end of the process.
pub(crate) fn open_to_stream(path: &Path) -> df11::Result<df11::Models> {
    OpenOptions::new().memory_map(false).open_all(path)
}

/// Compresses a model.
#[pyfunction]
#[pyo3(signature = (source, out, *, layout=None, verify=true, overwrite=false, progress=None))]
pub(crate) fn compress<'py>(
    py: Python<'py>,
    source: PathBuf,
    out: PathBuf,
    layout: Option<&str>,
    verify: bool,
    overwrite: bool,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let layout = layout_of(py, layout)?;
    let options = CompressOptions::new().layout(layout).verify(verify).overwrite(overwrite);
    reported(py, progress, |observer| {
        let opened = Sources::open(&source, None)?;
        if overwrite {
            check_replaceable(&source, &out, "df11")?;
        }
        df11::compress_all(&opened, &out, &options, observer)
    })
}

/// Stores a model in another layout.
#[pyfunction]
#[pyo3(signature = (source, out, *, layout=None, verify=true, overwrite=false, progress=None))]
pub(crate) fn convert<'py>(
    py: Python<'py>,
    source: PathBuf,
    out: PathBuf,
    layout: Option<&str>,
    verify: bool,
    overwrite: bool,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let layout = layout_of(py, layout)?;
    let options = CompressOptions::new().layout(layout).verify(verify).overwrite(overwrite);
    reported(py, progress, |observer| {
        let opened = open_to_stream(&source)?;
        if overwrite {
            check_replaceable(&source, &out, "df11")?;
        }
        df11::convert_all(&opened, &out, &options, observer)
    })
}

/// The sizes that compression would give.
#[pyfunction]
#[pyo3(signature = (source, out=None, *, layout=None, progress=None))]
pub(crate) fn estimate<'py>(
    py: Python<'py>,
    source: PathBuf,
    out: Option<PathBuf>,
    layout: Option<&str>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let layout = layout_of(py, layout)?;
    reported(py, progress, |observer| {
        let opened = Sources::open(&source, None)?;
        let default = if opened.is_pipeline() { "model" } else { "model.df11" };
        let out = out.unwrap_or_else(|| default.into());
        let estimates = df11::estimate_all(&opened, &out, layout, None, observer)?;
        Ok(estimates.into_iter().map(|estimate| estimate.report).collect())
    })
}

/// Gives back the original files.
#[pyfunction]
#[pyo3(signature = (source, out, *, overwrite=false, progress=None))]
pub(crate) fn decompress(
    py: Python<'_>,
    source: PathBuf,
    out: PathBuf,
    overwrite: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    work::watched(py, progress, |observer| {
        let models = open_to_stream(&source)?;
        let options = DecompressOptions::new().overwrite(overwrite);
        if overwrite {
            check_replaceable(&source, &out, "safetensors")?;
        }
        let restored = df11::decompress_all(&models, &out, &options, observer)?;
        Ok(restored.iter().map(|each| each.bytes).sum())
    })
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
