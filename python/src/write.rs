//! Compression and back.

use std::path::PathBuf;

use df11::{CompressOptions, DecompressOptions, Layout, Source, open::Purpose, write::check_replaceable};
use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::{
    device::{Argument, Choice},
    error::unknown_word,
    model::open_to_stream,
    work,
};

fn layout_of(py: Python<'_>, name: Option<&str>) -> PyResult<Layout> {
    match name {
        None => Ok(Layout::default()),
        Some("gap") => Ok(Layout::gap()),
        Some("tile") => Ok(Layout::Tile),
        Some("raw") => Ok(Layout::Raw),
        Some(name) => Err(unknown_word(py, "the layout", name, "gap, tile or raw")),
    }
}

fn options(py: Python<'_>, layout: Option<&str>, verify: bool, overwrite: bool) -> PyResult<CompressOptions> {
    let mut options = CompressOptions::default();
    options.layout = layout_of(py, layout)?;
    (options.verify, options.overwrite) = (verify, overwrite);
    Ok(options)
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
    let options = options(py, layout, verify, overwrite)?;
    let done = work::watched(py, progress, |observer| {
        let opened = Source::open(&source)?;
        if overwrite {
            check_replaceable(&source, &out, "df11")?;
        }
        df11::compress(&opened, &out, &options, observer)
    })?;
    report(py, done)
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
    let options = options(py, layout, verify, overwrite)?;
    let done = work::watched(py, progress, |observer| {
        let model = open_to_stream(&source)?;
        if overwrite {
            check_replaceable(&source, &out, "df11")?;
        }
        df11::convert(&model, &out, &options, observer)
    })?;
    report(py, done)
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
    let out = out.unwrap_or_else(|| "model.df11".into());
    let done = work::watched(py, progress, |observer| {
        df11::estimate(&Source::open(&source)?, &out, layout, observer)
    })?;
    report(py, done.report)
}

/// Gives back the original files.
#[pyfunction]
#[pyo3(signature = (source, out, *, overwrite=false, device=None, progress=None))]
pub(crate) fn decompress(
    py: Python<'_>,
    source: PathBuf,
    out: PathBuf,
    overwrite: bool,
    device: Option<Argument>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let choice = device.map_or(Ok(Choice::Auto), |device| Choice::new(py, &device))?;
    work::watched(py, progress, |observer| {
        let model = open_to_stream(&source)?;
        let mut options = DecompressOptions::default();
        options.overwrite = overwrite;
        if overwrite {
            check_replaceable(&source, &out, "safetensors")?;
        }
        // Before a GPU is started for nothing.
        options.check(&model, &out)?;
        let decoder = choice.decoder(&model, Purpose::Restore)?;
        options.decoder = &*decoder;
        Ok(df11::decompress(&model, &out, &options, observer)?.bytes)
    })
}

fn report(py: Python<'_>, report: df11::Report) -> PyResult<Bound<'_, PyAny>> {
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
