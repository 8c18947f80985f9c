//! A matrix of a model on a GPU, or a slice of one, in either form of residence.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{fmt::Display, ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{
    fast::{FastArrays, FastSlice},
    packer::Outcome,
    task::{LinearMatrix, STRIP_ROWS, TILE_COLUMNS, good_exceptions, tiles_across},
    transcode,
};
use crate::{
    Dtype, Error, Result,
    encoding::tile::RECORD_BYTES,
    gpu::{
        Device, Status,
        launches::OUTPUT_ALIGNMENT,
        memory::Buffer,
        model::Inner,
        part::Part,
        route::{Cut, Ready, Route, check_contexts},
        stored::{Addresses as _, Coded, Stored, StoredTile, TileArrays},
    },
    open::Slice,
};

/// How a [`Matrix`] lies in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Residence {
    /// In the arrays of the container, about 10.6 bits a weight: the smallest.
    Stored,
    /// In the fast layout, about 12.1 bits a weight: the fastest to multiply by.
    Fast,
}

/// What [`Matrix::to_fast`] gives.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Transcoded {
    /// The same weights in the fast layout.
    Fast(Matrix),
    /// More exceptions than were allowed: the matrix stays as it is.
    TooManyExceptions {
        /// Weights whose exponent lies outside the 16 that the codes of its tile express.
        exceptions: u64,
        /// As many were allowed.
        most: u64,
    },
}

/// A BF16 matrix that stays compressed in the memory of one GPU, or a slice of one, for
/// [`Linear`](super::Linear).
///
/// From [`GpuModel::matrix`](crate::gpu::GpuModel::matrix). Rows and columns are those of W in `y =
/// x Wᵀ`, so that x has as many columns and y as many columns as W has rows. It keeps what it
/// reads: the whole model, or the arrays of the fast layout. `Send` and `Sync`; clones are cheap
/// and the same matrix.
///
/// # The transposed product
///
/// Gradients need `g W`, and many rows of x are multiplied faster by a library of BLAS: both decode
/// W to a temporary, row by row, and multiply then. One temporary is enough for all matrices, as
/// large as the largest; what is on a stream comes after what was there before. For less memory,
/// decode [`rows`](Matrix::rows) in turns and add up `g[:, rows] W[rows, :]`.
///
/// ```no_run
/// use df11::gpu::cudarc::driver::{DevicePtrMut, sys::CUdeviceptr};
/// use df11::gpu::{Device, LoadOptions, Matrix, Status};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # fn gemm(_: CUdeviceptr, _: &Matrix) {}
/// let device = Device::open(0)?;
/// let model = df11::open("model.df11")?.load(&device, &LoadOptions::default())?;
/// let names = ["gate", "up"].map(|part| format!("model.layers.0.mlp.{part}_proj.weight"));
/// let matrices = [model.matrix(&names[0])?, model.matrix(&names[1])?];
///
/// let (stream, status) = (device.context().new_stream()?, Status::new(&device)?);
/// let bytes = matrices.iter().map(Matrix::decoded_bytes).max().unwrap_or(0);
/// let mut temporary = stream.alloc_zeros::<u8>(bytes as usize)?;
/// {
///     let (weights, _written) = temporary.device_ptr_mut(&stream);
///     for matrix in &matrices {
///         // SAFETY: the temporary is as large as the largest; all live until the check.
///         unsafe { matrix.decode_into_raw(weights, &stream, &status) }?;
///         // On the same stream. g (m x rows) and W (rows x columns) are row-major, which BLAS
///         // takes for their transposes: cublasGemmEx(N, N, columns, m, rows, W, columns, g, rows,
///         // product, columns).
///         gemm(weights, matrix);
///     }
/// }
/// status.check(&stream)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Matrix {
    name: Arc<str>,
    form: Form,
}

#[derive(Clone, Debug)]
enum Form {
    Stored(Arc<StoredMatrix>),
    Fast(FastSlice),
}

impl Form {
    /// All of a matrix in the fast layout.
    fn fast(arrays: &Arc<FastArrays>) -> Self {
        Self::Fast(FastSlice::of(Arc::clone(arrays)))
    }
}

/// Rows and columns of a tensor in tiles of 32 x 256.
#[derive(Debug)]
pub(super) struct StoredMatrix {
    model: Arc<Inner>,
    part: usize,
    stored: Arc<Stored>,
    /// From a multiple of 32 on, to one or to the end.
    rows: Range<u64>,
    /// Likewise of 256.
    columns: Range<u64>,
    /// Decodes it.
    route: Route,
    tasks: Buffer,
}

impl Matrix {
    pub(in crate::gpu) fn stored(model: &Arc<Inner>, name: &str) -> Result<Self> {
        let entry = model.entry(name)?;
        let block = model.block(entry.block);
        let tile = entry.stored.coded().and_then(Coded::as_tile);
        if let Some(arrays) = tile.and_then(|tile| model.part(block.part).0.fast(tile.id())) {
            return Ok(Self { name: name.into(), form: Form::fast(arrays) });
        }
        let refuse =
            |problem: &str, remedy: &str| Err(Error::parameter(format!("tensor {name:?} {problem}"), remedy));
        if entry.dtype != Dtype::BF16 {
            return refuse("has no BF16 elements", "multiply by what GpuModel::program decodes");
        }
        if block.route.turn().is_some() {
            return refuse("is streamed from the host", "load its block resident (LoadOptions::plan)");
        }
        let Some(geometry) = tile.map(|tile| tile.sizes().geometry()) else {
            return refuse("is not stored in tiles", "convert the container to the tile layout");
        };
        let (rows, columns) = (geometry.rows(), geometry.columns());
        if geometry.tile_columns() != TILE_COLUMNS || !has_rows_of(&entry.shape, columns) {
            return refuse(
                "is not stored in tiles of 32 rows and 256 columns of its own",
                "decode it with GpuModel::program and multiply then",
            );
        }
        let most = u64::from(u32::MAX);
        if let Some(many) = [rows, columns].into_iter().find(|&count| count > most) {
            return Err(Error::limit(format!("rows or columns of matrix {name:?} on the GPU"), many, most));
        }
        let whole = StoredMatrix::new(model, block.part, &entry.stored, 0..rows, 0..columns)?;
        Ok(Self { name: name.into(), form: Form::Stored(Arc::new(whole)) })
    }

    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of its rows.
    pub fn row_count(&self) -> u64 {
        match &self.form {
            Form::Stored(stored) => stored.row_count(),
            Form::Fast(fast) => fast.row_count(),
        }
    }

    /// The number of its columns.
    pub fn column_count(&self) -> u64 {
        match &self.form {
            Form::Stored(stored) => stored.column_count(),
            Form::Fast(fast) => fast.column_count(),
        }
    }

    /// How it lies in device memory.
    pub fn residence(&self) -> Residence {
        match self.form {
            Form::Stored(_) => Residence::Stored,
            Form::Fast(_) => Residence::Fast,
        }
    }

    /// The GPU on which it lies.
    pub fn device(&self) -> &Device {
        match &self.form {
            Form::Stored(stored) => &stored.part().device,
            Form::Fast(fast) => &fast.arrays.device,
        }
    }

    /// Device memory of the arrays that it reads, in bytes; a slice answers for the matrix that it
    /// is cut from. As stored they are part of
    /// [`GpuModel::device_bytes`](crate::gpu::GpuModel::device_bytes), in the fast layout they are
    /// not.
    pub fn device_bytes(&self) -> u64 {
        match &self.form {
            Form::Stored(stored) => stored.bytes(),
            Form::Fast(fast) => fast.arrays.bytes(),
        }
    }

    /// Weights of the fast layout that its codes do not express; a slice answers for the matrix
    /// that it is cut from. None as stored.
    pub fn exceptions(&self) -> Option<u64> {
        match &self.form {
            Form::Stored(_) => None,
            Form::Fast(fast) => Some(fast.arrays.exceptions()),
        }
    }

    /// Some of its rows, as a matrix of its own: from a multiple of 32 to one, or to the last row.
    /// Decodes and copies nothing; as stored it takes 128 bytes of device memory for a task, and
    /// waits for their upload.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other rows, or none; [`Error::Gpu`].
    pub fn rows(&self, rows: Range<u64>) -> Result<Self> {
        let inner = within(&rows, self.row_count(), STRIP_ROWS, format_args!("rows of {:?}", self.name))?;
        let form = match &self.form {
            Form::Stored(stored) => {
                let rows = shift(&inner, stored.rows.start);
                Form::Stored(Arc::new(stored.cut(rows, stored.columns.clone())?))
            }
            Form::Fast(fast) => {
                Form::Fast(FastSlice { rows: shift(&inner, fast.rows.start), ..fast.clone() })
            }
        };
        Ok(Self { name: Arc::clone(&self.name), form })
    }

    /// All its rows in this many equal parts, in order, each a matrix of its own as of
    /// [`Matrix::rows`]: the experts of a tensor that holds all, for
    /// [`GroupedLinear`](super::GroupedLinear), or a GPU's share each.
    ///
    /// # Errors
    /// [`Error::Parameter`] if parts of equal size would not begin on multiples of 32;
    /// [`Error::Gpu`].
    pub fn split_rows(&self, parts: u64) -> Result<Vec<Self>> {
        let rows = self.row_count();
        let each = rows.checked_div(parts).filter(|each| each * parts == rows && *each > 0);
        let Some(each) = each else {
            let problem = format!("{rows} rows of {:?} are not {parts} parts of equal size", self.name);
            return Err(Error::parameter(problem, "take as many parts as divide the rows"));
        };
        (0..parts).map(|part| self.rows(part * each..(part + 1) * each)).collect()
    }

    /// Some of its columns, as a matrix of its own: from a multiple of 256 to one, or to the last
    /// column. Costs as [`Matrix::rows`].
    ///
    /// # Errors
    /// [`Error::Parameter`] for other columns, or none; [`Error::Gpu`].
    pub fn columns(&self, columns: Range<u64>) -> Result<Self> {
        let what = format_args!("columns of {:?}", self.name);
        let inner = within(&columns, self.column_count(), TILE_COLUMNS, what)?;
        let form = match &self.form {
            Form::Stored(stored) => {
                let columns = shift(&inner, stored.columns.start);
                Form::Stored(Arc::new(stored.cut(stored.rows.clone(), columns)?))
            }
            Form::Fast(fast) => {
                Form::Fast(FastSlice { columns: shift(&inner, fast.columns.start), ..fast.clone() })
            }
        };
        Ok(Self { name: Arc::clone(&self.name), form })
    }

    /// The same weights in the fast layout, in device memory of their own: made on the GPU, the
    /// same bytes in every run. Waits until that is done. `most_exceptions`: 4 bytes each;
    /// [`Matrix::good_exceptions`] is a good number.
    ///
    /// Device memory meanwhile: besides the result, decoded weights of some strips (at most 64 MB),
    /// and 4 bytes for each of `most_exceptions`. What is fast already comes back as it is.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a matrix of more than 2^20 columns or 2^32 weights or more;
    /// [`Error::Corrupt`] if the stored weights contradict themselves; [`Error::Gpu`].
    pub fn to_fast(&self, most_exceptions: u64) -> Result<Transcoded> {
        let Form::Stored(stored) = &self.form else { return Ok(Transcoded::Fast(self.clone())) };
        Ok(match transcode::transcode(stored, most_exceptions)? {
            Outcome::Fast(arrays) => {
                Transcoded::Fast(Self { name: Arc::clone(&self.name), form: Form::fast(&Arc::new(arrays)) })
            }
            Outcome::TooMany(exceptions) => {
                Transcoded::TooManyExceptions { exceptions, most: most_exceptions }
            }
            Outcome::TooWide => {
                let (name, rows, columns) = (&self.name, self.row_count(), self.column_count());
                let problem =
                    format!("{name:?} has {rows} x {columns} weights, too many to be transcoded at once");
                let remedy = "take fewer of its rows or columns, or multiply as stored";
                return Err(Error::parameter(problem, remedy));
            }
        })
    }

    /// As [`Matrix::to_fast`] with [`Matrix::good_exceptions`], or itself as stored if it has more;
    /// [`Matrix::residence`] tells which.
    ///
    /// # Errors
    /// As [`Matrix::to_fast`].
    pub fn to_fast_or_stored(&self) -> Result<Self> {
        Ok(match self.to_fast(self.good_exceptions())? {
            Transcoded::Fast(fast) => fast,
            Transcoded::TooManyExceptions { .. } => self.clone(),
        })
    }

    /// As many exceptions as the fast layout bears well: one of 256 weights, which takes an eighth
    /// of a bit a weight.
    pub fn good_exceptions(&self) -> u64 {
        // No overflow: a tensor has less than 2^45 weights.
        good_exceptions(self.row_count() * self.column_count())
    }

    /// Bytes that it has when it is decoded.
    pub fn decoded_bytes(&self) -> u64 {
        2 * self.row_count() * self.column_count()
    }

    /// Puts its decoding on a stream, to a device address: row by row, dense. Neither allocates nor
    /// waits, and can be captured in a graph. For the transposed product, and from
    /// [`Linear::crossover_rows`](super::Linear::crossover_rows) rows of x on.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the output is no multiple of 16, or the stream or the status is not
    /// of the matrix's device; [`Error::Gpu`].
    ///
    /// # Safety
    /// `output` has [`Matrix::decoded_bytes`] of memory that the device may write, and nobody else
    /// uses it until the work is done. Until then, and until the last replay of a graph that
    /// captured it, this matrix and the status live.
    pub unsafe fn decode_into_raw(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        match &self.form {
            // SAFETY: the caller's promise; the matrix keeps tasks and model.
            Form::Stored(stored) => unsafe { stored.decode(output, stream, status) },
            Form::Fast(fast) => {
                check_contexts(&fast.arrays.device, stream, status)?;
                if !output.is_multiple_of(OUTPUT_ALIGNMENT) {
                    let problem = format!("the output's address is no multiple of {OUTPUT_ALIGNMENT}");
                    return Err(Error::parameter(problem, "start it on 256 bytes"));
                }
                // SAFETY: the caller's promise; the matrix keeps the arrays.
                unsafe { fast.decode(output, stream, status) }
            }
        }
    }

    /// As stored, what the largest tile of its tensor takes of the bitstream, in bytes.
    pub(super) fn staged_bytes(&self) -> Option<u32> {
        match &self.form {
            Form::Stored(stored) => Some(stored.tile().staged_bytes()),
            Form::Fast(_) => None,
        }
    }

    /// Its arrays for a launch.
    pub(super) fn task(&self) -> LinearMatrix {
        match &self.form {
            Form::Stored(stored) => stored.matrix(),
            Form::Fast(fast) => fast.matrix(),
        }
    }
}

/// Whether rows of so many elements are one or more of the innermost dimensions.
pub(super) fn has_rows_of(shape: &[u64], columns: u64) -> bool {
    let mut product = 1;
    shape.iter().rev().any(|size| {
        product *= size;
        product == columns
    })
}

/// The range, if it is not empty and begins and ends between strips or tiles.
fn within(range: &Range<u64>, count: u64, unit: u64, what: impl Display) -> Result<Range<u64>> {
    let Range { start, end } = *range;
    let ends = |at: u64| at.is_multiple_of(unit) || at == count;
    if start < end && end <= count && start.is_multiple_of(unit) && ends(end) {
        return Ok(range.clone());
    }
    let problem = format!("{start}..{end} of {count} {what} are no matrix");
    Err(Error::parameter(problem, format!("begin and end on multiples of {unit}, or end with the last one")))
}

fn shift(range: &Range<u64>, by: u64) -> Range<u64> {
    range.start + by..range.end + by
}

impl StoredMatrix {
    fn new(
        model: &Arc<Inner>,
        part: usize,
        stored: &Arc<Stored>,
        rows: Range<u64>,
        columns: Range<u64>,
    ) -> Result<Self> {
        let (on, mut tasks) = (model.part(part).0, Vec::new());
        let slice = slice_of(tile_of(stored), &rows, &columns)?;
        let route = Route::new(on, None, &[Cut { stored, slice, to: 0 }], &mut tasks)?;
        let tasks = Buffer::of(on.device.copies(), &tasks)?;
        let (model, stored) = (Arc::clone(model), Arc::clone(stored));
        Ok(Self { model, part, stored, rows, columns, route, tasks })
    }

    fn cut(&self, rows: Range<u64>, columns: Range<u64>) -> Result<Self> {
        Self::new(&self.model, self.part, &self.stored, rows, columns)
    }

    pub(super) fn row_count(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    pub(super) fn column_count(&self) -> u64 {
        self.columns.end - self.columns.start
    }

    pub(super) fn part(&self) -> &Part {
        self.model.part(self.part).0
    }

    fn tile(&self) -> &StoredTile {
        tile_of(&self.stored)
    }

    /// Of all its tensor.
    fn bytes(&self) -> u64 {
        let sizes = self.tile().sizes();
        sizes.records_bytes()
            + sizes.bitstream_bytes()
            + sizes.elements()
            + self.tile().coding().table_bytes()
            + self.tasks.bytes()
    }

    /// For a launch.
    fn matrix(&self) -> LinearMatrix {
        let (sizes, arrays) = (self.tile().sizes(), self.tile().arrays(self.part()));
        let (TileArrays { records, bitstream, plane, table }, columns) = (arrays, sizes.geometry().columns());
        let strips = self.rows.start / STRIP_ROWS;
        LinearMatrix {
            data: plane + self.rows.start * columns,
            index: records + strips * tiles_across(columns) * RECORD_BYTES as u64,
            rest: bitstream,
            table,
            rest_count: sizes.bitstream_bytes(),
            rows: self.row_count() as u32,
            whole_columns: columns as u32,
            first_column: self.columns.start as u32,
            ..LinearMatrix::default()
        }
    }

    /// The part of a decoding of some of its rows, counted from its first one, dense.
    pub(super) fn cut_of(&self, rows: &Range<u64>) -> Result<Cut<'_>> {
        let slice = slice_of(self.tile(), &shift(rows, self.rows.start), &self.columns)?;
        Ok(Cut { stored: &self.stored, slice, to: 0 })
    }

    /// # Safety
    /// As [`Matrix::decode_into_raw`].
    unsafe fn decode(&self, output: CUdeviceptr, stream: &CudaStream, status: &Status) -> Result<()> {
        let ready = Ready { route: &self.route, part: self.part(), tasks: self.tasks.pointer() };
        // SAFETY: the caller's promise; `self` keeps route, tasks and model.
        unsafe { ready.decode_into_raw(output, stream, status) }
    }
}

fn tile_of(stored: &Stored) -> &StoredTile {
    stored.coded().and_then(Coded::as_tile).expect("matrices are made of tiles")
}

/// Of the matrix as which the tensor is stored.
fn slice_of(tile: &StoredTile, rows: &Range<u64>, columns: &Range<u64>) -> Result<Slice> {
    let geometry = tile.sizes().geometry();
    let shape = [geometry.rows(), geometry.columns()];
    Slice::new("matrix", Dtype::BF16, &shape, &[rows.clone(), columns.clone()])
}

#[cfg(test)]
mod tests {
    use super::{has_rows_of, within};

    #[test]
    fn slices_begin_and_end_between_strips() {
        let good = |start, end| within(&(start..end), 100, 32, "rows").is_ok();
        assert!(good(0, 100) && good(32, 64) && good(96, 100) && good(0, 32));
        assert!(!good(0, 33) && !good(1, 32) && !good(64, 64) && !good(96, 128) && !good(64, 32));
        let error = within(&(3..9), 100, 32, "rows of \"w\"").unwrap_err().to_string();
        assert!(error.contains("3..9 of 100 rows of \"w\"") && error.contains("multiples of 32"), "{error}");
    }

    #[test]
    fn rows_are_innermost_dimensions() {
        assert!(has_rows_of(&[7, 96, 264], 264) && has_rows_of(&[7, 96, 264], 96 * 264));
        assert!(!has_rows_of(&[70, 1304], 2 * 1304) && !has_rows_of(&[70, 1304], 652));
    }
}
