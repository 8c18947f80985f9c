//! A matrix on a GPU, or a slice of one, in either residence. Its memory belongs to a model or to
//! the caller.
#![expect(unsafe_code, reason = "addresses of the caller, each with its proof")]

use std::{fmt::Display, ops::Range, sync::Arc};

use cudarc::driver::sys::CUdeviceptr;

use super::crossover::with_exceptions;
use super::fast::{FastArrays, Strips};
use super::task::{self, LinearMatrix, STRIP_ROWS, TILE_COLUMNS, tiles_across};
use crate::encoding::tile::{RECORD_BYTES, TileSizes};
use crate::gpu::task::{
    TILE_TABLE_BYTES, TableAddresses, TileAddresses, TileSource, TileTask, kernel_of,
};
use crate::gpu::{
    device::Device, fault::refuse, model::GpuModel, needs::Residence, part::DevicePart,
    program::OUTPUT_ALIGNMENT,
};
use crate::{Dtype, Error, Result, float::FloatSplit};

/// A matrix, or a slice of one, that stays compressed in the memory of one GPU.
/// [`Linear`](super::Linear) multiplies by BF16 weights; matrices of other floats, which only
/// `Matrix::of_tiles` makes, can only be decoded.
///
/// [`GpuModel::matrix`](crate::gpu::GpuModel::matrix) makes it. Rows and columns are those of W in
/// the product `y = x Wᵀ`: x has as many columns as W, and y as many columns as W has rows. It
/// keeps what it reads alive: the whole model, or the arrays of the fast layout. `Send` and `Sync`;
/// clones are cheap.
///
/// # The transposed product
///
/// Gradients need `g W`, and a BLAS library multiplies many rows of x faster: for both, decode W to
/// a temporary, row by row, and then multiply. One temporary, as large as the largest matrix, is
/// enough for all: work on a stream comes after earlier work there. To use less memory, decode some
/// [`rows`](Matrix::rows) at a time and add up `g[:, rows] W[rows, :]`.
///
/// ```no_run
/// # use df11::gpu::{Matrix, Status, cudarc::driver::{CudaStream, sys::CUdeviceptr}};
/// # fn gemm(_: CUdeviceptr, _: &Matrix) {}
/// # fn products(matrices: &[Matrix], temporary: CUdeviceptr, stream: &CudaStream, status: &Status)
/// #     -> df11::Result<()> {
/// for matrix in matrices {
///     // SAFETY: the temporary is as large as the largest; all live until the check.
///     unsafe { matrix.decode_into_raw(temporary, stream, status) }?;
///     // On the same stream. g (m x rows) and W (rows x columns) are row-major, which BLAS takes
///     // for their transposes: cublasGemmEx(N, N, columns, m, rows, W, columns, g, rows, product,
///     // columns).
///     gemm(temporary, matrix);
/// }
/// status.check(stream)
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Matrix {
    pub(super) name: Arc<str>,
    /// Arrays of the whole matrix.
    pub(super) arrays: MatrixArrays,
    /// Its rows in that matrix: from a multiple of 32 to another one or to the last row.
    pub(super) rows: Range<u64>,
    /// Its columns in that matrix: from a multiple of 256 to another one or to the last column.
    pub(super) columns: Range<u64>,
}

#[derive(Clone, Debug)]
pub(super) enum MatrixArrays {
    Stored(StoredArrays),
    Fast(Arc<FastArrays>),
}

/// The arrays of a matrix in tiles of 32 x 256, wherever they lie.
#[derive(Clone, Debug)]
pub(super) struct StoredArrays {
    pub(super) device: Device,
    pub(super) source: TileSource,
    _part: Option<Arc<DevicePart>>,
}

impl GpuModel {
    /// A BF16 matrix as stored, to multiply by without decoding: it must be in tiles of 32 x 256,
    /// and resident. A tensor with more than two dimensions gives the matrix as which it is stored.
    /// Takes 128 bytes of device memory for a task, and waits for their upload; the first call for
    /// a device loads the kernels that multiply.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the model has no such tensor, or if it has
    /// another form, is streamed, or is not loaded; [`Error::Limit`](crate::Error::Limit) for 2^32
    /// or more rows or columns; [`Error::Gpu`](crate::Error::Gpu).
    pub fn matrix(&self, tensor: &str) -> Result<Matrix> {
        let (entry, block) = self.inner.tensor(tensor)?;
        let part = &block.program.part;
        let coded = entry.stored.coded();
        if let Some(arrays) = coded.and_then(|coded| part.held.fast.get(&coded.id)) {
            return Ok(Matrix::fast(tensor.into(), arrays));
        }
        let no = |problem: &str, remedy| refuse(format!("tensor {tensor:?} {problem}"), remedy);
        if entry.dtype != Dtype::BF16 {
            return no("has no BF16 elements", "multiply by what GpuModel::program decodes");
        }
        if block.program.is_streamed() {
            return no("is streamed from the host", "load its block resident (LoadOptions::plan)");
        }
        let bf16 = |sizes: &&TileSizes| sizes.split() == FloatSplit::BF16;
        let tiles = coded.and_then(|coded| Some((coded, coded.tile_sizes().filter(bf16)?)));
        let Some((coded, sizes)) = tiles else {
            return no("is not stored in tiles", "convert the container to the tile layout");
        };
        let geometry = sizes.geometry();
        if !geometry.is_matrix_of(&entry.shape) {
            return no(
                "is not stored in tiles of 32 rows and 256 columns of its own",
                "decode it with GpuModel::program and multiply then",
            );
        }
        let (rows, columns) = (geometry.rows(), geometry.columns());
        for count in [rows, columns] {
            let what = format_args!("rows or columns of matrix {tensor:?} on the GPU");
            Error::check_limit(what, count, u32::MAX.into())?;
        }
        let at = coded.tile_addresses(sizes, &part.in_place());
        let keep = Some(Arc::clone(part));
        let source = StoredArrays::source((rows, columns), FloatSplit::BF16, at);
        Ok(Matrix::stored(tensor.into(), &part.device, source, keep))
    }
}

impl Matrix {
    /// A matrix as stored, with these rows and columns, whose weights are split like this, in
    /// memory that the caller keeps. Does not wait.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for a misaligned address, no rows or columns,
    /// columns that are not a multiple of 8, or more than 2^32 - 1 of either.
    ///
    /// # Safety
    /// In memory that the device reads (also pinned host memory): the arrays of a matrix of this
    /// shape ([`Arrays`](crate::encoding::tile::Arrays) gives their lengths), with any content, and
    /// its table, built for this split. They live as long as this matrix, what is made of it, and
    /// the work that uses them.
    pub unsafe fn of_tiles(
        device: &Device,
        shape: (u64, u64),
        split: FloatSplit,
        at: TileAddresses,
    ) -> Result<Self> {
        check_shape(shape)?;
        let TileAddresses { records, bitstream, bitstream_bytes, plane, table, .. } = at;
        if !(records | bitstream | bitstream_bytes | plane | table).is_multiple_of(OUTPUT_ALIGNMENT)
        {
            let remedy = format!("begin each on a multiple of {OUTPUT_ALIGNMENT}");
            return refuse("an array is misaligned", remedy);
        }
        let source = StoredArrays::source(shape, split, at);
        Ok(Self::stored(Arc::default(), device, source, None))
    }

    /// A matrix in the fast layout, with these rows and columns, in memory that the caller keeps:
    /// `strips` of [`Matrix::fast_bytes`], and the address and number of its exceptions, of 4 bytes
    /// each.
    ///
    /// # Errors
    /// Same as [`Matrix::of_tiles`]; also for 2^32 weights or more, or more than 2^29 columns.
    ///
    /// # Safety
    /// Same as [`Matrix::of_tiles`].
    pub unsafe fn of_fast(
        device: &Device,
        shape: (u64, u64),
        strips: CUdeviceptr,
        (entries, exceptions): (CUdeviceptr, u64),
    ) -> Result<Self> {
        check_shape(shape)?;
        if !(strips | entries).is_multiple_of(OUTPUT_ALIGNMENT)
            || u32::try_from(shape.0 * shape.1).is_err()
            || shape.1 > task::MAX_COLUMNS
        {
            let problem = format!("{} x {} weights, or misaligned arrays", shape.0, shape.1);
            return refuse(problem, "cut it into fewer rows, and begin arrays on multiples of 16");
        }
        let strips = Strips { rows: shape.0, columns: shape.1, address: strips };
        let device = device.clone();
        let arrays = FastArrays { device, strips, entries, exceptions, _memory: None };
        Ok(Self::fast(Arc::default(), &Arc::new(arrays)))
    }

    /// `part` keeps the arrays, unless the caller does.
    fn stored(
        name: Arc<str>,
        device: &Device,
        source: TileSource,
        part: Option<Arc<DevicePart>>,
    ) -> Self {
        let TileSource { rows, columns, .. } = source;
        let arrays = StoredArrays { device: device.clone(), source, _part: part };
        Self { name, arrays: MatrixArrays::Stored(arrays), rows: 0..rows, columns: 0..columns }
    }

    pub(super) fn fast(name: Arc<str>, arrays: &Arc<FastArrays>) -> Self {
        let Strips { rows, columns, .. } = arrays.strips;
        let arrays = MatrixArrays::Fast(Arc::clone(arrays));
        Self { name, arrays, rows: 0..rows, columns: 0..columns }
    }

    /// Bytes of a matrix in the fast layout, except its exceptions.
    pub const fn fast_bytes(rows: u64, columns: u64) -> u64 {
        task::fast_bytes(rows, columns)
    }

    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number of rows.
    pub fn row_count(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    /// Its number of columns.
    pub fn column_count(&self) -> u64 {
        self.columns.end - self.columns.start
    }

    /// Its layout in device memory.
    pub fn residence(&self) -> Residence {
        match self.arrays {
            MatrixArrays::Stored(_) => Residence::Stored,
            MatrixArrays::Fast(_) => Residence::Fast,
        }
    }

    /// How its weights are split.
    pub(super) fn split(&self) -> FloatSplit {
        match &self.arrays {
            MatrixArrays::Stored(stored) => stored.source.split,
            MatrixArrays::Fast(_) => FloatSplit::BF16,
        }
    }

    /// Refuses floats other than BF16, for a kernel that reads only BF16.
    pub(super) fn check_bf16(&self) -> Result<()> {
        if self.split() == FloatSplit::BF16 {
            return Ok(());
        }
        let fast = if self.split().is_bf16() { ", or take the fast layout" } else { "" };
        let remedy = format!("decode the matrix, and use the result{fast}");
        refuse("the weights are not split like BF16 ones", remedy)
    }

    /// The GPU that holds it.
    pub fn device(&self) -> &Device {
        match &self.arrays {
            MatrixArrays::Stored(stored) => &stored.device,
            MatrixArrays::Fast(fast) => &fast.device,
        }
    }

    /// Device memory of the arrays that it reads, in bytes; for a slice, that of the whole matrix.
    /// Arrays as stored are part of [`GpuModel::device_bytes`](crate::gpu::GpuModel::device_bytes),
    /// those in the fast layout are not.
    pub fn device_bytes(&self) -> u64 {
        match &self.arrays {
            MatrixArrays::Stored(stored) => stored.bytes(),
            MatrixArrays::Fast(fast) => fast.bytes(),
        }
    }

    /// Number of exceptions in the fast layout (weights without a code); for a slice, that of the
    /// whole matrix. `None` as stored.
    pub fn exceptions(&self) -> Option<u64> {
        match &self.arrays {
            MatrixArrays::Stored(_) => None,
            MatrixArrays::Fast(fast) => Some(fast.exceptions),
        }
    }

    /// The fewest rows of x for which decoding it first is faster; `stored` and `fast` are those of
    /// its GPU.
    pub(super) fn crossover_rows(&self, [stored, fast]: [u64; 2]) -> u64 {
        match &self.arrays {
            MatrixArrays::Stored(_) => stored,
            MatrixArrays::Fast(arrays) => {
                let weights = arrays.strips.rows * arrays.strips.columns;
                with_exceptions(fast, weights, arrays.exceptions)
            }
        }
    }

    /// Some of its rows as a separate matrix: from a multiple of 32 to another one, or to the last
    /// row. Decodes and copies nothing, takes no device memory and does not wait.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other rows, or none.
    pub fn rows(&self, rows: Range<u64>) -> Result<Self> {
        let inner =
            within(&rows, self.row_count(), STRIP_ROWS, format_args!("rows of {:?}", self.name))?;
        Ok(Self { rows: shift(&inner, self.rows.start), ..self.clone() })
    }

    /// All its rows in this many equal parts, in order, each a separate matrix as from
    /// [`Matrix::rows`]: the experts of a tensor that holds all, for
    /// [`GroupedLinear`](super::GroupedLinear), or each GPU's share.
    ///
    /// # Errors
    /// [`Error::Parameter`] if equal parts would not begin on multiples of 32.
    pub fn split_rows(&self, parts: u64) -> Result<Vec<Self>> {
        let rows = self.row_count();
        let each = rows.checked_div(parts).filter(|each| each * parts == rows && *each > 0);
        let Some(each) = each else {
            let problem =
                format!("{rows} rows of {:?} are not {parts} parts of equal size", self.name);
            return refuse(problem, "take as many parts as divide the rows");
        };
        (0..parts).map(|part| self.rows(part * each..(part + 1) * each)).collect()
    }

    /// Some of its columns as a separate matrix: from a multiple of 256 to another one, or to the
    /// last column. Costs the same as [`Matrix::rows`].
    ///
    /// # Errors
    /// [`Error::Parameter`] for other columns, or none.
    pub fn columns(&self, columns: Range<u64>) -> Result<Self> {
        let what = format_args!("columns of {:?}", self.name);
        let inner = within(&columns, self.column_count(), TILE_COLUMNS, what)?;
        Ok(Self { columns: shift(&inner, self.columns.start), ..self.clone() })
    }

    /// Bytes of bitstream that the largest tile of its tensor takes, if it is as stored.
    pub(super) fn staged_bytes(&self) -> Option<u32> {
        match &self.arrays {
            MatrixArrays::Stored(stored) => Some(stored.source.arrays.staged_bytes),
            MatrixArrays::Fast(_) => None,
        }
    }

    pub(super) fn task(&self) -> LinearMatrix {
        let (strip, tile) = (self.rows.start / STRIP_ROWS, self.columns.start / TILE_COLUMNS);
        let first_column = self.columns.start as u32;
        match &self.arrays {
            MatrixArrays::Stored(stored) => {
                let TileSource { arrays, columns, tiles_across, .. } = stored.source;
                LinearMatrix {
                    data: arrays.plane + self.rows.start * columns,
                    index: arrays.records + strip * tiles_across * RECORD_BYTES as u64,
                    rest: arrays.bitstream,
                    table: arrays.table,
                    rest_count: arrays.bitstream_bytes,
                    whole_columns: columns as u32,
                    first_column,
                }
            }
            MatrixArrays::Fast(fast) => {
                let (data, index) = fast.strips.from(strip, tile);
                LinearMatrix {
                    data,
                    index,
                    rest: fast.entries,
                    table: fast.strips.patches(strip),
                    rest_count: fast.exceptions,
                    whole_columns: fast.strips.columns as u32,
                    first_column,
                }
            }
        }
    }
}

impl Device {
    /// Bytes of the decode table of a tensor in tiles.
    pub const fn table_bytes() -> u64 {
        TILE_TABLE_BYTES
    }

    /// Builds the decode tables of tensors in tiles whose weights are split like this, and waits.
    /// Any content of a codebook is safe.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for a misaligned address;
    /// [`Error::Gpu`](crate::Error::Gpu).
    ///
    /// # Safety
    /// Codebooks and tables are memory of this device, and nothing else uses the tables meanwhile.
    pub unsafe fn build_tables(&self, split: FloatSplit, tables: &[TableAddresses]) -> Result<()> {
        let misaligned =
            |at: &TableAddresses| !at.codebook.is_multiple_of(2) || !at.table.is_multiple_of(16);
        if tables.iter().any(misaligned) {
            let problem = "a codebook or a decode table is misaligned";
            return refuse(problem, "begin each on a multiple of 256");
        }
        self.kernels().build_tables(kernel_of(split), self.copies(), tables)
    }
}

impl StoredArrays {
    fn source((rows, columns): (u64, u64), split: FloatSplit, arrays: TileAddresses) -> TileSource {
        let tiles_across = tiles_across(columns);
        TileSource { arrays, rows, columns, tiles_across, split }
    }

    /// Device memory of the whole matrix, except its codebook, in bytes.
    fn bytes(&self) -> u64 {
        let TileSource { arrays, rows, columns, tiles_across, split } = self.source;
        let records = (rows.div_ceil(STRIP_ROWS) * tiles_across + 1) * RECORD_BYTES as u64;
        records + arrays.bitstream_bytes + split.plane_bytes(rows * columns) + TILE_TABLE_BYTES
    }

    /// A task that decodes some rows and columns of the whole matrix to `output` of the launch's,
    /// dense, after tasks with this many tiles.
    pub(super) fn task(
        &self,
        rows: &Range<u64>,
        columns: &Range<u64>,
        output: u64,
        first_unit: u64,
    ) -> TileTask {
        let width = self.source.columns;
        let elements = rows.start * width + columns.start..(rows.end - 1) * width + columns.end;
        TileTask::new(&self.source, &elements, columns, output, first_unit)
    }
}

fn check_shape((rows, columns): (u64, u64)) -> Result<()> {
    let most = u64::from(u32::MAX);
    if rows == 0 || rows > most || columns == 0 || columns > most || !columns.is_multiple_of(8) {
        let problem =
            format!("{rows} x {columns} weights are not a matrix of 32-bit numbers in tiles");
        return refuse(problem, "columns are a multiple of 8");
    }
    Ok(())
}

/// Returns the range if it is not empty and begins and ends between strips or tiles.
pub(super) fn within(
    range: &Range<u64>,
    count: u64,
    unit: u64,
    what: impl Display,
) -> Result<Range<u64>> {
    let Range { start, end } = *range;
    let ends = |at: u64| at.is_multiple_of(unit) || at == count;
    if start < end && end <= count && start.is_multiple_of(unit) && ends(end) {
        return Ok(range.clone());
    }
    let problem = format!("{start}..{end} of {count} {what} are not a matrix");
    refuse(problem, format!("begin and end on multiples of {unit}, or end with the last one"))
}

pub(super) fn shift(range: &Range<u64>, by: u64) -> Range<u64> {
    range.start + by..range.end + by
}

#[cfg(test)]
mod tests {
    use super::within;

    #[test]
    fn slices_begin_and_end_between_strips() {
        let good = |start, end| within(&(start..end), 100, 32, "rows").is_ok();
        assert!(good(0, 100) && good(32, 64) && good(96, 100) && good(0, 32));
        assert!(!good(0, 33) && !good(1, 32) && !good(64, 64) && !good(96, 128) && !good(64, 32));
        let error = within(&(3..9), 100, 32, "rows of \"w\"").unwrap_err().to_string();
        assert!(
            error.contains("3..9 of 100 rows of \"w\"") && error.contains("multiples of 32"),
            "{error}"
        );
    }
}
