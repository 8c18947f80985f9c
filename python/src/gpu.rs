//! Models on GPUs.
#![expect(unsafe_code, reason = "streams and addresses of other libraries")]

use std::{slice, sync::Arc};

use df11::gpu::{Device, GpuBlock, GpuModel, GpuProgram, LoadOptions, Piece};
use df11::{Error, hazmat::gpu::Visit};
use pyo3::{exceptions::PyKeyError, prelude::*, types::PyDict};

use crate::context::{Gpu, OnGpu};
use crate::memory;
use crate::placement::{OneOrMore, PlanRequest, placement};
use crate::work::{self, OrRaise};

/// The GPUs that the driver shows.
#[pyfunction]
pub(crate) fn devices(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    // Why there are none, `Model.load` says.
    let all = py.detach(df11::gpu::devices).unwrap_or_default();
    let told = all.into_iter().map(|info| {
        let told = PyDict::new(py);
        told.set_item("ordinal", info.ordinal)?;
        told.set_item("name", info.name)?;
        told.set_item("total_memory", info.total_memory)?;
        told.set_item("compute_capability", info.compute_capability)?;
        told.set_item("driver", info.driver)?;
        Ok(told)
    });
    told.collect()
}

/// The GPU that a device names, as PyTorch does: a number, `cuda`, `cuda:1`, or a `torch.device`;
/// none for `cpu`.
pub(crate) fn ordinal_of(device: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    if let Ok(ordinal) = device.extract() {
        return Ok(Some(ordinal));
    }
    let name = device.str()?.to_string();
    match name.as_str() {
        "cpu" => return Ok(None),
        "cuda" => return Ok(Some(0)),
        _ => {}
    }
    let ordinal = name.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    let problem = || format!("device {name:?} is no GPU");
    let remedy = "name cuda, cuda:1 or another number, or leave device out";
    ordinal.map(Some).ok_or_else(|| Error::parameter(problem(), remedy)).or_raise(device.py())
}

/// Loads a model onto GPUs.
pub(crate) fn load(
    py: Python<'_>,
    model: &df11::Model,
    devices: OneOrMore<usize>,
    wanted: &PlanRequest,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<DeviceModel> {
    let ordinals = devices.into_vec();
    let loaded = work::watched(py, progress, |observer| {
        let mut options = LoadOptions::new();
        let PlanRequest { memory, streamed, blocks } = wanted;
        // Several GPUs of which nothing is said share the model by what is free on them.
        if ordinals.len() < 2 || memory.is_some() || *streamed || blocks.is_some() {
            options = options.plan(wanted.plan(model, ordinals.len())?);
        }
        let gpus = ordinals.iter().map(|&ordinal| Gpu::open(ordinal));
        let gpus = gpus.collect::<df11::Result<Vec<_>>>()?;
        let devices: Vec<Device> = gpus.iter().map(|gpu| gpu.device.clone()).collect();
        Ok(OnGpu::new(Loaded { model: model.load_on(&devices, &options, observer)?, gpus }))
    })?;
    Ok(DeviceModel { loaded: Arc::new(loaded) })
}

/// A loaded model with all that decoding takes.
struct Loaded {
    model: GpuModel,
    gpus: Vec<Gpu>,
}

impl Loaded {
    /// The one that a device of the model is.
    fn gpu(&self, device: &Device) -> &Gpu {
        let ordinal = device.info().ordinal;
        self.gpus.iter().find(|gpu| gpu.ordinal() == ordinal).expect("one of the model's")
    }
}

/// A model whose blocks lie compressed on GPUs.
#[pyclass(frozen, module = "df11")]
pub(crate) struct DeviceModel {
    loaded: Arc<OnGpu<Loaded>>,
}

#[pymethods]
impl DeviceModel {
    #[getter]
    fn devices(&self) -> Vec<usize> {
        self.loaded.gpus.iter().map(Gpu::ordinal).collect()
    }

    #[getter]
    fn device_bytes(&self) -> u64 {
        self.loaded.model.device_bytes()
    }

    #[getter]
    fn host_bytes(&self) -> u64 {
        self.loaded.model.plan().host_bytes()
    }

    #[getter]
    fn copied_bytes(&self) -> u64 {
        self.loaded.model.copied_bytes()
    }

    #[getter]
    fn largest_block_bytes(&self) -> u64 {
        self.loaded.model.largest_block_bytes()
    }

    #[getter]
    fn blocks(&self) -> Vec<DeviceBlock> {
        self.loaded.model.blocks().map(|block| self.named(block.name())).collect()
    }

    fn block(&self, name: &str) -> PyResult<DeviceBlock> {
        // Why there is none, the error says.
        let found = self.loaded.model.block(name);
        found.map_err(|error| PyKeyError::new_err(error.to_string()))?;
        Ok(self.named(name))
    }

    #[getter]
    fn placements<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let placements = PyDict::new(py);
        for block in self.loaded.model.blocks() {
            let place = placement(py, block.device().info().ordinal, block.is_streamed())?;
            placements.set_item(block.name(), place)?;
        }
        Ok(placements)
    }

    fn program(&self, py: Python<'_>, pieces: Vec<PieceArgument>) -> PyResult<Program> {
        let pieces: Vec<Piece<'_>> = pieces.iter().map(PieceArgument::piece).collect();
        let program = || {
            let _visit = Visit::new();
            self.loaded.model.program(&pieces)
        };
        let program = OnGpu::new(py.detach(program).or_raise(py)?);
        Ok(Program { program, loaded: Arc::clone(&self.loaded) })
    }

    #[pyo3(signature = (stream=0, device=None))]
    fn check(&self, py: Python<'_>, stream: usize, device: Option<usize>) -> PyResult<()> {
        let gpus = self.gpus_of(stream, device).or_raise(py)?;
        let check = |gpu: &Gpu| {
            // SAFETY: the method's contract, which python/df11/_native.pyi states.
            let on = unsafe { gpu.on(stream) };
            on.status.check(&on.stream)
        };
        py.detach(|| gpus.iter().try_for_each(check)).or_raise(py)
    }

    fn __repr__(&self) -> String {
        let blocks = self.loaded.model.blocks().len();
        format!("<df11.DeviceModel of {blocks} blocks on GPU {:?}>", self.devices())
    }
}

impl DeviceModel {
    fn named(&self, name: &str) -> DeviceBlock {
        DeviceBlock { name: name.to_owned(), loaded: Arc::clone(&self.loaded) }
    }

    /// GPUs to which a stream may belong: the one that is named, or all if it is the default
    /// stream, which every device has.
    fn gpus_of(&self, stream: usize, device: Option<usize>) -> df11::Result<&[Gpu]> {
        let gpus = &self.loaded.gpus;
        match device {
            Some(device) => {
                let found = gpus.iter().find(|gpu| gpu.ordinal() == device).map(slice::from_ref);
                let problem = || format!("the model does not lie on GPU {device}");
                let remedy = || format!("it lies on {:?}", self.devices());
                found.ok_or_else(|| Error::parameter(problem(), remedy()))
            }
            None if stream == 0 || gpus.len() == 1 => Ok(gpus),
            None => Err(Error::parameter(
                "the model lies on several GPUs, and a stream belongs to one",
                "name its device",
            )),
        }
    }
}

/// A tensor's name, its offset in the output; a range of rows or of each first dimension, or none.
#[derive(FromPyObject)]
enum PieceArgument {
    Whole(String, u64),
    Slice(String, u64, Vec<(u64, u64)>),
    Rows(String, u64, u64, u64),
}

impl PieceArgument {
    fn piece(&self) -> Piece<'_> {
        match self {
            Self::Whole(name, offset) => Piece::new(name, *offset),
            Self::Slice(name, offset, ranges) => {
                let ranges: Vec<_> = ranges.iter().map(|&(start, stop)| start..stop).collect();
                Piece::new(name, *offset).slice(&ranges)
            }
            &Self::Rows(ref name, offset, start, stop) => {
                Piece::new(name, offset).rows(start..stop)
            }
        }
    }
}

/// A block of a model on GPUs.
#[pyclass(frozen, module = "df11")]
pub(crate) struct DeviceBlock {
    #[pyo3(get)]
    name: String,
    loaded: Arc<OnGpu<Loaded>>,
}

impl DeviceBlock {
    fn view(&self) -> GpuBlock<'_> {
        self.loaded.model.block(&self.name).expect("a block of the model")
    }
}

#[pymethods]
impl DeviceBlock {
    #[getter]
    fn device(&self) -> usize {
        self.view().device().info().ordinal
    }

    #[getter]
    fn is_streamed(&self) -> bool {
        self.view().is_streamed()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.view().layout().bytes
    }

    #[getter]
    fn layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let view = self.view();
        memory::ranges(py, view.tensors().map(|tensor| tensor.name()), view.layout())
    }

    fn decode(&self, py: Python<'_>, pointer: u64, stream: usize) -> PyResult<()> {
        py.detach(|| {
            let block = self.view();
            // SAFETY: the method's contract, which python/df11/_native.pyi states.
            let on = unsafe { self.loaded.gpu(block.device()).on(stream) };
            // SAFETY: the same; the model lives as long as `self` and waits before it is freed.
            unsafe { block.decode_into_raw(pointer, &on.stream, on.status) }
        })
        .or_raise(py)
    }

    fn __repr__(&self) -> String {
        let place = if self.is_streamed() { "streamed to" } else { "on" };
        format!("<df11.DeviceBlock {:?} {place} GPU {}>", self.name, self.device())
    }
}

/// Tensors, or slices of them, to chosen places of one output.
#[pyclass(frozen, module = "df11")]
pub(crate) struct Program {
    program: OnGpu<GpuProgram>,
    loaded: Arc<OnGpu<Loaded>>,
}

#[pymethods]
impl Program {
    #[getter]
    fn device(&self) -> usize {
        self.program.device().info().ordinal
    }

    #[getter]
    fn is_streamed(&self) -> bool {
        self.program.is_streamed()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.program.bytes()
    }

    fn decode(&self, py: Python<'_>, pointer: u64, stream: usize) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: as in `DeviceBlock::decode`.
            let on = unsafe { self.loaded.gpu(self.program.device()).on(stream) };
            // SAFETY: as in `DeviceBlock::decode`.
            unsafe { self.program.decode_into_raw(pointer, &on.stream, on.status) }
        })
        .or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("<df11.Program of {} bytes on GPU {}>", self.nbytes(), self.device())
    }
}
