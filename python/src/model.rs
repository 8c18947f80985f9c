//! Models and their blocks: opens and describes them.

use std::{env, ffi::OsString, path::PathBuf, sync::Arc};

use df11::hazmat::{ReadAhead as Announced, Shard, Tiles, format::records::FILE_WEIGHTS, shown};
use df11::{Observer, OpenOptions};
use pyo3::types::{PyBool, PyDict, PyMappingProxy, PyTuple};
use pyo3::{IntoPyObjectExt, exceptions::PyKeyError, intern, prelude::*, sync::PyOnceLock};
use rayon::prelude::*;

use crate::gpu::{self, DeviceModel};
use crate::placement::{BlocksArgument, OneOrMore, PlanRequest, placement};
use crate::work::{self, OrRaise};
use crate::write::{DeviceChoice, Verifier};
use crate::{
    memory::{self, Output},
    tensor::Tensor,
};

/// An open model: one container, or all shards of a folder.
#[pyclass(frozen, mapping, module = "df11")]
pub(crate) struct Model {
    pub(crate) inner: Arc<df11::Model>,
    path: PathBuf,
    /// Made on first use.
    tensors: PyOnceLock<Py<PyMappingProxy>>,
}

/// Bytes on their way from a network, until this is dropped.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct ReadAhead {
    _bytes: Announced,
}

/// As for the command.
const DEFAULT_CACHE_BYTES: u64 = 64 << 30;

/// Maps and validates a container or a folder of shards, and loads it onto a GPU if one is named.
#[pyfunction]
#[pyo3(signature = (
    path, *, device=None, memory_map=None, checksums=true, in_memory=false, base=None, cache=None,
    cache_bytes=DEFAULT_CACHE_BYTES
))]
#[expect(clippy::too_many_arguments, reason = "as many as Python's function has")]
pub(crate) fn open<'py>(
    py: Python<'py>,
    path: PathBuf,
    device: Option<Bound<'py, PyAny>>,
    memory_map: Option<bool>,
    checksums: bool,
    in_memory: bool,
    base: Option<PathBuf>,
    cache: Option<PathBuf>,
    cache_bytes: u64,
) -> PyResult<Bound<'py, PyAny>> {
    let ordinal = device.as_ref().map(gpu::ordinal_of).transpose()?.flatten();
    let memory_map =
        memory_map.unwrap_or_else(|| env::var_os("DF11_MEMORY_MAP") != Some("0".into()));
    let options = OpenOptions::new().memory_map(memory_map).checksums(checksums);
    let options =
        cache.into_iter().fold(options, |options, cache| options.cache(cache, cache_bytes));
    let options = base.into_iter().fold(options.in_memory(in_memory), OpenOptions::base);
    let inner = Arc::new(work::briefly(py, || options.open(&path))?);
    let Some(ordinal) = ordinal else {
        return Model { inner, path, tensors: PyOnceLock::new() }.into_bound_py_any(py);
    };
    let wanted = PlanRequest { memory: None, streamed: false, blocks: None };
    gpu::load(py, &inner, OneOrMore::One(ordinal), &wanted, None)?.into_bound_py_any(py)
}

/// Fetches the side files of a folder in a store, and `others` beside them, into a local folder.
#[pyfunction]
pub(crate) fn fetch_side_files(
    py: Python<'_>,
    name: &str,
    folder: PathBuf,
    others: Vec<String>,
) -> PyResult<()> {
    work::briefly(py, || OpenOptions::new().fetch_side_files(name, &folder, &others))
}

/// Tells where blocks would go.
#[pyfunction]
#[pyo3(signature = (model, memory=None, *, streamed=false, blocks=None))]
pub(crate) fn plan<'py>(
    py: Python<'py>,
    model: &Bound<'py, Model>,
    memory: Option<OneOrMore<u64>>,
    streamed: bool,
    blocks: Option<BlocksArgument>,
) -> PyResult<Bound<'py, PyAny>> {
    let model = &model.get().inner;
    let wanted = PlanRequest { memory: memory.map(OneOrMore::into_vec), streamed, blocks };
    let devices = wanted.devices();
    let plan = wanted.plan(model, devices).or_raise(py)?;
    let placements = PyDict::new(py);
    for (block, place) in model.blocks().zip(plan.placements()) {
        let Some(place) = place else { continue };
        placements.set_item(block.name(), placement(py, place.device, place.streamed)?)?;
    }
    let class = py.import(intern!(py, "df11._report"))?.getattr("Plan")?;
    class.call1((placements, PyTuple::new(py, plan.device_bytes())?, plan.host_bytes()))
}

impl Model {
    fn all_tensors(&self, py: Python<'_>) -> PyResult<&Py<PyMappingProxy>> {
        self.tensors.get_or_try_init(py, || {
            let all = PyDict::new(py);
            for tensor in self.inner.tensors() {
                all.set_item(tensor.name(), Tensor::new(&self.inner, &tensor))?;
            }
            Ok(PyMappingProxy::new(py, all.as_mapping()).unbind())
        })
    }

    /// Paths of original files of a kind, in the order of the shards.
    fn files(&self, weights: bool) -> Vec<String> {
        let directories = self.inner.shards().iter().map(Shard::directory);
        let paths = directories.flat_map(|directory| {
            let files = directory.files.iter();
            let files = files.filter(|file| (file.kind == FILE_WEIGHTS) == weights);
            files.map(|file| directory.file_path(file).to_owned())
        });
        paths.collect()
    }
}

#[pymethods]
impl Model {
    #[getter]
    fn path(&self) -> String {
        shown(&self.path).to_string_lossy().into_owned()
    }

    /// The path or name that opens it, with the signature that `path` does not show.
    #[getter]
    fn full_path(&self) -> OsString {
        self.path.clone().into_os_string()
    }

    /// Fetches tensors before they are read, in this order.
    fn read_ahead(&self, py: Python<'_>, names: Vec<String>) -> PyResult<ReadAhead> {
        let tensor =
            |name: &String| self.inner.tensor(name).map_err(|_| PyKeyError::new_err(name.clone()));
        let tensors = names.iter().map(tensor).collect::<PyResult<Vec<_>>>()?;
        Ok(ReadAhead { _bytes: py.detach(|| Announced::of(tensors)) })
    }

    #[getter]
    fn identity(&self) -> String {
        self.inner.identity().to_string()
    }

    #[getter]
    fn is_complete(&self) -> bool {
        self.inner.is_complete()
    }

    fn check_complete(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.check_complete().or_raise(py)
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u128> {
        // Nothing bounds the sum over tensors that cannot be decoded and over aliases.
        let lengths = self.inner.tensors().map(|tensor| tensor.byte_length().map(u128::from));
        lengths.sum::<df11::Result<u128>>().or_raise(py)
    }

    #[getter]
    fn stored_bytes(&self) -> u64 {
        self.inner.shards().iter().map(Shard::file_length).sum()
    }

    #[getter]
    fn mappings(&self) -> Vec<(usize, usize)> {
        let shards = self.inner.shards().iter();
        let place = |shard: &Shard| Some((shard.address()?, shard.file_length() as usize));
        shards.filter_map(place).collect()
    }

    #[getter]
    fn is_coming(&self) -> bool {
        self.inner.shards().iter().any(Shard::is_coming)
    }

    #[getter]
    fn shards<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let shards = self.inner.shards().iter().map(|shard| {
            let (told, record) = (PyDict::new(py), &shard.directory().shard);
            told.set_item("path", shard.path().to_string_lossy())?;
            told.set_item("index", record.shard_index.get())?;
            told.set_item("count", record.shard_count.get())?;
            told.set_item("bytes", shard.file_length())?;
            Ok(told)
        });
        shards.collect()
    }

    /// Paths of the containers in the folder of the model, in the order of the shards.
    #[getter]
    fn container_paths(&self) -> Vec<String> {
        let shards = self.inner.shards().iter();
        shards.map(|shard| df11::hazmat::container_path(&self.inner, shard)).collect()
    }

    #[getter]
    fn weights_files(&self) -> Vec<String> {
        self.files(true)
    }

    #[getter]
    fn side_files(&self) -> Vec<String> {
        self.files(false)
    }

    #[getter]
    fn blocks(&self) -> Vec<Block> {
        self.inner.blocks().map(|block| Block::new(&self.inner, &block)).collect()
    }

    fn weights_header(&self, py: Python<'_>, path: &str) -> PyResult<String> {
        let header = work::briefly(py, || self.inner.weights_header(path))?;
        Ok(String::from_utf8(header)?)
    }

    fn block(&self, name: &str) -> PyResult<Block> {
        let block = self.inner.block(name).map_err(|_| PyKeyError::new_err(name.to_owned()))?;
        Ok(Block::new(&self.inner, &block))
    }

    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMappingProxy>> {
        Ok(self.all_tensors(py)?.bind(py).clone())
    }

    fn __getitem__(&self, name: &str) -> PyResult<Tensor> {
        let tensor = self.inner.tensor(name).map_err(|_| PyKeyError::new_err(name.to_owned()))?;
        Ok(Tensor::new(&self.inner, &tensor))
    }

    fn check_tiles(&self, py: Python<'_>, names: Vec<String>) -> PyResult<()> {
        let tensor =
            |name: &String| self.inner.tensor(name).map_err(|_| PyKeyError::new_err(name.clone()));
        let tensors = names.iter().map(tensor).collect::<PyResult<Vec<_>>>()?;
        let check =
            |tensor: &_| Tiles::of(tensor)?.map_or(df11::Result::Ok(()), |tiles| tiles.check());
        work::briefly(py, || tensors.par_iter().try_for_each(check))
    }

    /// Verifies the containers as they are open, and nothing beside them.
    fn verify_containers(&self, py: Python<'_>) -> PyResult<()> {
        let (model, quiet) = (&self.inner, PyBool::new(py, false).to_owned());
        let verify = |observer: &dyn Observer| df11::hazmat::verify_containers(model, observer);
        work::watched(py, Some(quiet.as_any()), verify).map(|_| ())
    }

    /// Writes the containers as they are open into a new folder, and side files.
    #[pyo3(signature = (out, beside=None, *, containers=true))]
    fn copy(
        &self,
        py: Python<'_>,
        out: PathBuf,
        beside: Option<PathBuf>,
        containers: bool,
    ) -> PyResult<Vec<String>> {
        let (model, quiet) = (&self.inner, PyBool::new(py, false).to_owned());
        work::watched(py, Some(quiet.as_any()), |observer| {
            df11::hazmat::copy(model, beside.as_deref(), &out, containers, observer)
        })
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        name.extract::<String>().is_ok_and(|name| self.inner.tensor(&name).is_ok())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.all_tensors(py)?.bind(py).as_any().try_iter()?.into_any())
    }

    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.all_tensors(py)?.bind(py).call_method0(intern!(py, "keys"))
    }

    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.all_tensors(py)?.bind(py).call_method0(intern!(py, "values"))
    }

    fn items<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.all_tensors(py)?.bind(py).call_method0(intern!(py, "items"))
    }

    #[pyo3(signature = (name, default=None))]
    fn get(
        &self,
        py: Python<'_>,
        name: &str,
        default: Option<Py<PyAny>>,
    ) -> PyResult<Option<Py<PyAny>>> {
        match self.inner.tensor(name) {
            Ok(tensor) => Ok(Some(Tensor::new(&self.inner, &tensor).into_py_any(py)?)),
            Err(_) => Ok(default),
        }
    }

    fn __len__(&self) -> usize {
        self.inner.shards().iter().map(|shard| shard.directory().tensors.len()).sum()
    }

    #[pyo3(signature = (level="full", *, device=None, progress=None))]
    fn verify<'py>(
        &self,
        py: Python<'py>,
        level: &str,
        device: Option<DeviceChoice>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Verifier::new(py, level, device)?
            .watched(py, progress, |check, observer| check.run(&self.inner, observer))
    }

    #[pyo3(
        signature = (
            devices=OneOrMore::One(0), memory=None, streamed=false, progress=None, blocks=None
        ),
        text_signature = "($self, devices=0, memory=None, streamed=False, progress=None, \
        blocks=None)"
    )]
    fn load(
        &self,
        py: Python<'_>,
        devices: OneOrMore<usize>,
        memory: Option<OneOrMore<u64>>,
        streamed: bool,
        progress: Option<&Bound<'_, PyAny>>,
        blocks: Option<BlocksArgument>,
    ) -> PyResult<DeviceModel> {
        let wanted = PlanRequest { memory: memory.map(OneOrMore::into_vec), streamed, blocks };
        gpu::load(py, &self.inner, devices, &wanted, progress)
    }

    /// Table that a notebook shows.
    fn _repr_html_(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        let py = slf.py();
        py.import(intern!(py, "df11._report"))?.call_method1(intern!(py, "model_table"), (slf,))
    }

    fn __repr__(&self) -> String {
        let (path, tensors, blocks) = (self.path(), self.__len__(), self.inner.blocks().len());
        format!("<df11.Model {path:?} of {tensors} tensors in {blocks} blocks>")
    }
}

/// The tensors that a model uses together.
#[pyclass(frozen, module = "df11")]
pub(crate) struct Block {
    model: Arc<df11::Model>,
    #[pyo3(get)]
    name: String,
}

impl Block {
    pub(crate) fn new(model: &Arc<df11::Model>, block: &df11::Block<'_>) -> Self {
        Self { model: Arc::clone(model), name: block.name().to_owned() }
    }

    fn view(&self) -> df11::Block<'_> {
        self.model.block(&self.name).expect("a block of the model")
    }
}

#[pymethods]
impl Block {
    #[getter]
    fn tensors(&self) -> Vec<Tensor> {
        self.view().tensors().map(|tensor| Tensor::new(&self.model, &tensor)).collect()
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.view().layout().or_raise(py)?.bytes)
    }

    #[getter]
    fn stored_bytes(&self) -> u64 {
        self.view().stored_bytes()
    }

    #[getter]
    fn layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let layout = self.view().layout().or_raise(py)?;
        memory::ranges(py, self.view().tensors().map(|tensor| tensor.name()), &layout)
    }

    fn decode_into(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut output = Output::new(buffer, self.nbytes(py)?)?;
        let bytes = output.bytes();
        work::briefly(py, || self.view().decode_into(bytes))
    }

    fn __repr__(&self) -> String {
        format!("<df11.Block {:?} of {} tensors>", self.name, self.view().tensors().len())
    }
}
