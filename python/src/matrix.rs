//! Matrices in memory of other libraries, on the CPU and on GPUs.
#![expect(unsafe_code, reason = "memory and streams of other libraries")]

use std::{ops::Range, sync::Arc};

use df11::gpu::{Choices, Device, ExpertDecoder, Indices, Matrix as GpuMatrix};
use df11::hazmat::gpu::{TileAddresses, Visit};
use df11::hazmat::tile::{Arrays, FloatSplit, TileGeometry, TileSizes};
use df11::{Dtype, Error};
use pyo3::{exceptions::PyIndexError, prelude::*};

use crate::context::{Gpu, OnGpu};
use crate::work::{self, OrRaise};

/// A matrix that the caller holds. Owns nothing.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct Matrix {
    part: Part,
    place: Place,
}

enum Place {
    /// Addresses and lengths of the arrays of the part, in the memory of the process.
    Host([(usize, usize); 4]),
    /// All of the part.
    Gpu(Arc<Gpu>, GpuMatrix),
}

/// The number of the kind of matrices in the fast layout. Number 0 is tiles of BF16, and the
/// numbers after this one are tiles of [`FLOATS`]. Saved tensors have these numbers.
const FAST: u64 = 1;

/// Other floats than BF16 in tiles, in the order of their kinds: dtype, and zero bits.
const FLOATS: [(Dtype, u64); 7] = [
    (Dtype::F8_E4M3, 0),
    (Dtype::F8_E5M2, 0),
    (Dtype::F16, 0),
    (Dtype::BF16, 4),
    (Dtype::F32, 0),
    (Dtype::F32, 13),
    (Dtype::F32, 16),
];

/// The dtypes of all kinds, by number.
pub(crate) fn dtypes() -> Vec<&'static str> {
    let floats = FLOATS.iter().map(|(dtype, _)| dtype.name());
    ["BF16", "BF16"].into_iter().chain(floats).collect()
}

/// How weights of a kind are split; `None` for a number of no kind.
pub(crate) fn split_of(kind: u64) -> Option<FloatSplit> {
    let Some(float) = kind.checked_sub(FAST + 1) else { return Some(FloatSplit::BF16) };
    let &(dtype, zero_bits) = FLOATS.get(usize::try_from(float).ok()?)?;
    FloatSplit::of(dtype, zero_bits)
}

/// The kind of tiles whose weights are split like this; `None` for a split without a kind.
pub(crate) fn kind_of(split: FloatSplit) -> Option<u64> {
    (0..=FAST + FLOATS.len() as u64).find(|&kind| split_of(kind) == Some(split))
}

/// A matrix of some kind, and a window of it: eight numbers.
struct Part {
    is_fast: bool,
    split: FloatSplit,
    rows: u64,
    columns: u64,
    staged_bytes: u32,
    row_range: Range<u64>,
    column_range: Range<u64>,
}

impl Part {
    fn new(numbers: &[u64]) -> df11::Result<Self> {
        let refuse = |problem: String| {
            Err(Error::parameter(problem, "pass eight numbers that fit each other"))
        };
        let &[kind, rows, columns, staged, r0, r1, c0, c1] = numbers else {
            return refuse(format!("{} numbers of a part", numbers.len()));
        };
        let Ok(staged_bytes) = u32::try_from(staged) else {
            return refuse(format!("{staged} staged bytes"));
        };
        let window = format_args!("{r0}..{r1} x {c0}..{c1} of {rows} x {columns}");
        let Some(split) = split_of(kind) else {
            return refuse(format!("{window} of kind {kind}"));
        };
        if r0 >= r1 || r1 > rows || c0 >= c1 || c1 > columns {
            return refuse(window.to_string());
        }
        let (is_fast, row_range, column_range) = (kind == FAST, r0..r1, c0..c1);
        Ok(Self { is_fast, split, rows, columns, staged_bytes, row_range, column_range })
    }

    /// Arrays of a part in the memory of the process.
    fn arrays(&self, places: &[(usize, usize); 4]) -> df11::Result<Arrays<'_>> {
        let view = |(address, length): (usize, usize)| -> &[u8] {
            if length == 0 {
                return &[];
            }
            // SAFETY: the contract of `Matrix` in `_native.pyi`: the caller's arrays lie there,
            // with these lengths, and live during each call; `on_host` has refused the address 0.
            // Bytes may be anything.
            unsafe { std::slice::from_raw_parts(address as *const u8, length) }
        };
        Arrays::new(self.rows, self.columns, self.split, places.map(view))
    }

    fn row_count(&self) -> u64 {
        self.row_range.end - self.row_range.start
    }

    fn column_count(&self) -> u64 {
        self.column_range.end - self.column_range.start
    }

    /// Bytes of this many decoded weights.
    fn bytes(&self, weights: u64) -> u64 {
        self.split.bytes() as u64 * weights
    }
}

#[pymethods]
impl Matrix {
    #[new]
    fn new(
        py: Python<'_>,
        device: Option<usize>,
        part: Vec<u64>,
        pointers: Vec<u64>,
        lengths: Vec<u64>,
    ) -> PyResult<Self> {
        let new = || {
            let part = Part::new(&part)?;
            let place = match device {
                None => on_host(&part, &pointers, &lengths)?,
                Some(ordinal) => {
                    let gpu = Gpu::kept(ordinal)?;
                    let matrix = on_device(&gpu.device, &part, &pointers, &lengths)?;
                    Place::Gpu(gpu, matrix)
                }
            };
            Ok(Self { part, place })
        };
        new().or_raise(py)
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.part.row_count()
    }

    #[getter]
    fn columns(&self) -> u64 {
        self.part.column_count()
    }

    #[pyo3(signature = (output, stream=0))]
    fn decode(&self, py: Python<'_>, output: u64, stream: usize) -> PyResult<()> {
        let (rows, columns) = (self.part.row_range.clone(), self.part.column_range.clone());
        match &self.place {
            Place::Host(arrays) => work::briefly(py, || {
                let bytes = self.part.bytes(self.part.row_count() * self.part.column_count());
                check_output(output)?;
                // SAFETY: the method's contract, which python/df11/_native.pyi states.
                let out = unsafe { output_bytes(output, bytes) };
                self.part.arrays(arrays)?.decode(rows, columns, out)
            }),
            Place::Gpu(gpu, whole) => {
                gpu.raise_told(py)?;
                // SAFETY: the method's contract.
                let on = unsafe { gpu.on(stream) };
                let slice = (rows, columns);
                // SAFETY: the method's contract.
                unsafe { whole.decode_slice_into_raw(slice, output, &on.stream, on.status) }
                    .or_raise(py)
            }
        }
    }

    #[pyo3(signature = (indices, count, wide, output, stream=0))]
    fn gather(
        &self,
        py: Python<'_>,
        indices: u64,
        count: usize,
        wide: bool,
        output: u64,
        stream: usize,
    ) -> PyResult<()> {
        match &self.place {
            Place::Host(arrays) => {
                // SAFETY: the method's contract: as many indices lie there.
                let all = unsafe { host_indices(indices, count, wide) };
                let rows = self.part.row_count();
                if let Some(index) = all.iter().find(|&&index| index >= rows) {
                    let problem = format!("row {} of {rows}", index.cast_signed());
                    return Err(PyIndexError::new_err(problem));
                }
                work::briefly(py, || {
                    let rows: Vec<u64> =
                        all.iter().map(|index| self.part.row_range.start + index).collect();
                    let bytes = self.part.bytes(rows.len() as u64 * self.part.column_count());
                    check_output(output)?;
                    // SAFETY: the method's contract: a row for each index.
                    let out = unsafe { output_bytes(output, bytes) };
                    self.part.arrays(arrays)?.gather(&rows, self.part.column_range.clone(), out)
                })
            }
            Place::Gpu(gpu, _) => {
                let indices = if wide { Indices::I64(indices) } else { Indices::U32(indices) };
                let window = self.window().or_raise(py)?;
                let output = (output, self.part.column_count());
                gpu.raise_told(py)?;
                // SAFETY: the method's contract.
                let on = unsafe { gpu.on(stream) };
                // SAFETY: the method's contract.
                unsafe { window.gather(indices, count as u64, output, &on.stream, on.status) }
                    .or_raise(py)
            }
        }
    }
}

impl Matrix {
    /// The GPU on which it lies, and all of its part there.
    fn on_gpu(&self) -> df11::Result<(&Arc<Gpu>, &GpuMatrix)> {
        match &self.place {
            Place::Host(_) => Err(Error::parameter("a matrix lies on the CPU", "decode it there")),
            Place::Gpu(gpu, whole) => Ok((gpu, whole)),
        }
    }

    /// The window as a matrix on its GPU, which begins and ends between tiles.
    pub(crate) fn window(&self) -> df11::Result<GpuMatrix> {
        let (_, whole) = self.on_gpu()?;
        whole.rows(self.part.row_range.clone())?.columns(self.part.column_range.clone())
    }

    /// The GPU of the first of some matrices, all of which lie on GPUs.
    pub(crate) fn gpu_of<'m>(matrices: &'m [PyRef<'_, Self>]) -> df11::Result<&'m Arc<Gpu>> {
        let gpus = matrices.iter().map(|matrix| Ok(matrix.on_gpu()?.0));
        let gpus = gpus.collect::<df11::Result<Vec<_>>>()?;
        let first = gpus.first().copied();
        first.ok_or_else(|| Error::parameter("there is no matrix", "name one or more"))
    }
}

/// Decodes experts that a router on the GPU has chosen.
#[pyclass(frozen, module = "df11._native")]
pub(crate) struct Experts {
    gpu: Arc<Gpu>,
    inner: OnGpu<ExpertDecoder>,
}

#[pymethods]
impl Experts {
    #[new]
    fn new(py: Python<'_>, matrices: Vec<(PyRef<'_, Matrix>, u32)>) -> PyResult<Self> {
        let (matrices, experts): (Vec<_>, Vec<_>) = matrices.into_iter().unzip();
        let gpu = Matrix::gpu_of(&matrices).or_raise(py)?;
        let _visit = Visit::new();
        let windows = matrices.iter().map(|matrix| matrix.window()).zip(experts);
        let windows = windows.map(|(window, expert)| Ok((window?, expert)));
        let windows = windows.collect::<df11::Result<Vec<_>>>();
        let inner = windows.and_then(|windows| ExpertDecoder::new(&windows)).or_raise(py)?;
        Ok(Self { gpu: Arc::clone(gpu), inner: OnGpu::new(inner) })
    }

    #[pyo3(signature = (output, stream, ids=None, map=None))]
    fn decode(
        &self,
        py: Python<'_>,
        output: u64,
        stream: usize,
        ids: Option<(u64, u64, bool)>,
        map: Option<(u64, u64)>,
    ) -> PyResult<()> {
        let choices = ids.map(|(ids, count, wide)| {
            let ids = if wide { Indices::I64(ids) } else { Indices::U32(ids) };
            let (map, length) = map.unwrap_or_default();
            Choices::new(ids, count).mapped(map, length)
        });
        self.gpu.raise_told(py)?;
        // SAFETY: the method's contract, which python/df11/_native.pyi states.
        let on = unsafe { self.gpu.on(stream) };
        // SAFETY: as above.
        unsafe { self.inner.decode_into_raw(choices, output, &on.stream, on.status) }.or_raise(py)
    }
}

/// Decodes several matrices of one GPU.
#[pyfunction]
pub(crate) fn decode_all(
    py: Python<'_>,
    matrices: Vec<PyRef<'_, Matrix>>,
    outputs: Vec<u64>,
    stream: usize,
) -> PyResult<()> {
    let gpu = Matrix::gpu_of(&matrices).or_raise(py)?;
    if outputs.len() != matrices.len() {
        let problem = "as many outputs as matrices are needed";
        return Err(Error::parameter(problem, "name one for each")).or_raise(py);
    }
    let (mut windows, mut others) = (Vec::new(), Vec::new());
    for (matrix, &output) in matrices.iter().zip(&outputs) {
        match matrix.window() {
            Ok(window) => windows.push((window, output)),
            // It begins or ends within a tile.
            Err(Error::Parameter { .. }) => others.push((matrix, output)),
            Err(error) => return Err(error).or_raise(py),
        }
    }
    let all: Vec<_> = windows.iter().map(|(window, output)| (window, *output)).collect();
    gpu.raise_told(py)?;
    // SAFETY: the function's contract, which python/df11/_native.pyi states.
    let on = unsafe { gpu.on(stream) };
    // SAFETY: as above.
    unsafe { GpuMatrix::decode_all_into_raw(&all, &on.stream, on.status) }.or_raise(py)?;
    others.into_iter().try_for_each(|(matrix, output)| matrix.decode(py, output, stream))
}

fn on_host(part: &Part, pointers: &[u64], lengths: &[u64]) -> df11::Result<Place> {
    if part.is_fast || pointers.len() < 4 || lengths.len() != pointers.len() {
        let problem = "on the CPU a matrix is in tiles as stored, of four arrays";
        return Err(Error::parameter(problem, "keep it stored, or load it onto a GPU"));
    }
    if pointers.iter().zip(lengths).any(|(&pointer, &length)| pointer == 0 && length > 0) {
        return Err(Error::parameter("an array has no memory", "load the weights again"));
    }
    let arrays = [0, 1, 2, 3].map(|at| (pointers[at] as usize, lengths[at] as usize));
    // Lengths are the caller's to get right, as on a GPU.
    let checked = part.arrays(&arrays).map(drop);
    let remedy = "pass the arrays of the part, as _native.pyi says";
    checked.map_err(|error| Error::parameter(error.to_string(), remedy))?;
    Ok(Place::Host(arrays))
}

fn on_device(
    device: &Device,
    part: &Part,
    pointers: &[u64],
    lengths: &[u64],
) -> df11::Result<GpuMatrix> {
    let refuse = |problem: String| {
        Err(Error::parameter(problem, "pass the arrays of the part, as _native.pyi says"))
    };
    let shape = (part.rows, part.columns);
    match (pointers, lengths) {
        (
            &[_, records, bitstream, plane, table],
            &[codebook_bytes, record_bytes, bitstream_bytes, plane_bytes, table_bytes],
        ) if !part.is_fast => {
            // The bit count, which is not known, may be as high as the bitstream is long.
            let bits = bitstream_bytes.saturating_mul(8);
            let sizes = part
                .rows
                .checked_mul(part.columns)
                .and_then(|elements| TileGeometry::new(256, part.columns, elements).ok())
                .and_then(|geometry| TileSizes::new(geometry, bits, codebook_bytes).ok());
            let expected = sizes
                .map(|sizes| sizes.split_as(part.split).array_lengths())
                .map(|[_, records, _, plane]| (records, plane, Device::table_bytes()));
            if expected != Some((record_bytes, plane_bytes, table_bytes)) {
                return refuse(format!("arrays of {lengths:?} bytes of {shape:?} weights"));
            }
            let staged_bytes = part.staged_bytes;
            let at =
                TileAddresses { records, bitstream, bitstream_bytes, plane, table, staged_bytes };
            // SAFETY: the contract of `Matrix` in `_native.pyi`; the lengths were compared.
            unsafe { GpuMatrix::of_tiles(device, shape, part.split, at) }
        }
        (&[strips, entries], &[strip_bytes, entry_bytes]) if part.is_fast => {
            if strip_bytes < GpuMatrix::fast_bytes(part.rows, part.columns)
                || !entry_bytes.is_multiple_of(4)
            {
                return refuse(format!("arrays of {lengths:?} bytes of {shape:?} weights"));
            }
            // SAFETY: as above.
            unsafe { GpuMatrix::of_fast(device, shape, strips, (entries, entry_bytes / 4)) }
        }
        _ => refuse(format!("{} arrays, {} lengths", pointers.len(), lengths.len())),
    }
}

fn check_output(address: u64) -> df11::Result<()> {
    let problem = "the output has no memory";
    if address == 0 { Err(Error::parameter(problem, "pass memory of the CPU")) } else { Ok(()) }
}

/// Memory of the caller.
///
/// # Safety
/// `bytes` bytes lie at `address`, and nobody else uses them while the result lives.
unsafe fn output_bytes<'a>(address: u64, bytes: u64) -> &'a mut [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes as usize) }
}

/// Indices, of which negative ones come out as large numbers.
///
/// # Safety
/// `count` indices lie at `address`, of 64 bits each if `wide`, else of 32.
unsafe fn host_indices(address: u64, count: usize, wide: bool) -> Vec<u64> {
    if count == 0 {
        return Vec::new();
    }
    if wide {
        // SAFETY: the caller's promise.
        return unsafe { std::slice::from_raw_parts(address as *const u64, count) }.to_vec();
    }
    // SAFETY: the caller's promise.
    let narrow = unsafe { std::slice::from_raw_parts(address as *const u32, count) };
    narrow.iter().map(|&index| index.into()).collect()
}
