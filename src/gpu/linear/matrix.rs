//! A matrix of a model on a GPU, or a slice of one, in either form of residence.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{fmt::Display, ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{
    fast::{FastArrays, FastSlice},
    packer::Outcome,
    stored::TileMatrix,
    task::{LinearMatrix, STRIP_ROWS, TILE_COLUMNS, good_exceptions},
    transcode,
};
use crate::{
    Dtype, Error, Result,
    gpu::{
        Device, Status,
        launches::OUTPUT_ALIGNMENT,
        loaded::Inner,
        route::check_contexts,
        stored::{Addresses as _, CodedTensor},
        task::{FEW_TASKS, TileArrays, TileTask},
    },
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
    Stored(TileMatrix),
    Fast(FastSlice),
}

impl Form {
    /// All of a matrix in the fast layout.
    fn fast(arrays: &Arc<FastArrays>) -> Self {
        Self::Fast(FastSlice::of(Arc::clone(arrays)))
    }
}

/// Where the arrays of a matrix in tiles lie in memory that the caller keeps: device addresses.
#[derive(Clone, Copy, Debug)]
pub struct TileAddresses {
    /// Of the records, a multiple of 16.
    pub records: CUdeviceptr,
    /// Of the bitstream, a multiple of 16.
    pub bitstream: CUdeviceptr,
    /// Its bytes, a multiple of 16.
    pub bitstream_bytes: u64,
    /// Of the plane, a multiple of 16.
    pub plane: CUdeviceptr,
    /// Of the decode table that [`Device::build_tables`] made, a multiple of 16.
    pub table: CUdeviceptr,
    /// The most bytes of the bitstream that a tile takes
    /// ([`Arrays::staged_bytes`](crate::encoding::tile::Arrays::staged_bytes)). With less, decoding
    /// is not right, and sets the status.
    pub staged_bytes: u32,
}

impl Matrix {
    pub(in crate::gpu) fn stored(model: &Arc<Inner>, name: &str) -> Result<Self> {
        let entry = model.entry(name)?;
        let block = model.block(entry.block);
        let tile = entry.stored.coded().and_then(CodedTensor::as_tile);
        if let Some(arrays) = tile.and_then(|tile| model.part(block.part).0.fast(tile.id())) {
            return Ok(Self { name: name.into(), form: Form::fast(arrays) });
        }
        let refuse = |problem: &str, remedy: &str| {
            Err(Error::parameter(format!("tensor {name:?} {problem}"), remedy))
        };
        if entry.dtype != Dtype::BF16 {
            return refuse("has no BF16 elements", "multiply by what GpuModel::program decodes");
        }
        if block.route.turn().is_some() {
            return refuse(
                "is streamed from the host",
                "load its block resident (LoadOptions::plan)",
            );
        }
        let Some(geometry) = tile.map(|tile| tile.sizes().geometry()) else {
            return refuse("is not stored in tiles", "convert the container to the tile layout");
        };
        let (rows, columns) = (geometry.rows(), geometry.columns());
        if !geometry.is_matrix_of(&entry.shape) {
            return refuse(
                "is not stored in tiles of 32 rows and 256 columns of its own",
                "decode it with GpuModel::program and multiply then",
            );
        }
        let most = u64::from(u32::MAX);
        if let Some(many) = [rows, columns].into_iter().find(|&count| count > most) {
            return Err(Error::limit(
                format!("rows or columns of matrix {name:?} on the GPU"),
                many,
                most,
            ));
        }
        let (part, tile) = (model.part(block.part).0, tile.expect("it has a geometry"));
        let sizes = (tile.arrays(part), tile.sizes().bitstream_bytes(), tile.staged_bytes());
        let whole = TileMatrix::new(&part.device, (rows, columns), sizes, Some(Arc::clone(model)));
        Ok(Self { name: name.into(), form: Form::Stored(whole) })
    }

    /// A matrix of these rows and columns in memory that the caller keeps, as it is stored. Waits
    /// for nothing.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a misaligned address, no rows or columns, columns that are no
    /// multiple of 8, or more than 2^32 - 1 of either.
    ///
    /// # Safety
    /// In memory that the device reads (pinned memory of the host too): the arrays of a matrix of
    /// this shape ([`Arrays`](crate::encoding::tile::Arrays) tells their lengths), of any content,
    /// and its table. They live as long as this matrix, what is made of it, and the work that uses
    /// them.
    pub unsafe fn of_tiles(device: &Device, shape: (u64, u64), at: TileAddresses) -> Result<Self> {
        check_shape(shape)?;
        let TileAddresses { records, bitstream, bitstream_bytes, plane, table, staged_bytes } = at;
        if !(records | bitstream | bitstream_bytes | plane | table).is_multiple_of(OUTPUT_ALIGNMENT)
        {
            let problem = "an array is misaligned";
            return Err(Error::parameter(
                problem,
                format!("begin each on a multiple of {OUTPUT_ALIGNMENT}"),
            ));
        }
        let arrays = TileArrays { records, bitstream, plane, table };
        let whole = TileMatrix::new(device, shape, (arrays, bitstream_bytes, staged_bytes), None);
        Ok(Self { name: Arc::default(), form: Form::Stored(whole) })
    }

    /// Likewise in the fast layout: `strips` of [`Matrix::fast_bytes`], then where its exceptions
    /// are, of 4 bytes each, and how many.
    ///
    /// # Errors
    /// As [`Matrix::of_tiles`], and for 2^32 weights or more.
    ///
    /// # Safety
    /// As [`Matrix::of_tiles`].
    pub unsafe fn of_fast(
        device: &Device,
        shape: (u64, u64),
        strips: CUdeviceptr,
        (entries, exceptions): (CUdeviceptr, u64),
    ) -> Result<Self> {
        check_shape(shape)?;
        if !(strips | entries).is_multiple_of(OUTPUT_ALIGNMENT)
            || u32::try_from(shape.0 * shape.1).is_err()
        {
            let problem = format!("{} x {} weights, or misaligned arrays", shape.0, shape.1);
            return Err(Error::parameter(
                problem,
                "cut it into fewer rows, and begin arrays on multiples of 16",
            ));
        }
        let arrays = FastArrays::of_caller(device.clone(), shape, strips, (entries, exceptions));
        Ok(Self { name: Arc::default(), form: Form::fast(&Arc::new(arrays)) })
    }

    /// Bytes of a matrix in the fast layout, except its exceptions.
    pub const fn fast_bytes(rows: u64, columns: u64) -> u64 {
        FastArrays::strips_bytes(rows, columns)
    }

    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of its rows.
    pub fn row_count(&self) -> u64 {
        match &self.form {
            Form::Stored(stored) => stored.rows.end - stored.rows.start,
            Form::Fast(fast) => fast.row_count(),
        }
    }

    /// The number of its columns.
    pub fn column_count(&self) -> u64 {
        match &self.form {
            Form::Stored(stored) => stored.columns.end - stored.columns.start,
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
            Form::Stored(stored) => &stored.device,
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
    /// Decodes and copies nothing, takes no device memory and waits for nothing.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other rows, or none.
    pub fn rows(&self, rows: Range<u64>) -> Result<Self> {
        let inner =
            within(&rows, self.row_count(), STRIP_ROWS, format_args!("rows of {:?}", self.name))?;
        let form = match &self.form {
            Form::Stored(stored) => Form::Stored(TileMatrix {
                rows: shift(&inner, stored.rows.start),
                ..stored.clone()
            }),
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
    /// [`Error::Parameter`] if parts of equal size would not begin on multiples of 32.
    pub fn split_rows(&self, parts: u64) -> Result<Vec<Self>> {
        let rows = self.row_count();
        let each = rows.checked_div(parts).filter(|each| each * parts == rows && *each > 0);
        let Some(each) = each else {
            let problem =
                format!("{rows} rows of {:?} are not {parts} parts of equal size", self.name);
            return Err(Error::parameter(problem, "take as many parts as divide the rows"));
        };
        (0..parts).map(|part| self.rows(part * each..(part + 1) * each)).collect()
    }

    /// Some of its columns, as a matrix of its own: from a multiple of 256 to one, or to the last
    /// column. Costs as [`Matrix::rows`].
    ///
    /// # Errors
    /// [`Error::Parameter`] for other columns, or none.
    pub fn columns(&self, columns: Range<u64>) -> Result<Self> {
        let what = format_args!("columns of {:?}", self.name);
        let inner = within(&columns, self.column_count(), TILE_COLUMNS, what)?;
        let form = match &self.form {
            Form::Stored(stored) => Form::Stored(TileMatrix {
                columns: shift(&inner, stored.columns.start),
                ..stored.clone()
            }),
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
            Outcome::Fast(arrays) => Transcoded::Fast(Self {
                name: Arc::clone(&self.name),
                form: Form::fast(&Arc::new(arrays)),
            }),
            Outcome::TooMany(exceptions) => {
                Transcoded::TooManyExceptions { exceptions, most: most_exceptions }
            }
            Outcome::TooWide => {
                let (name, rows, columns) = (&self.name, self.row_count(), self.column_count());
                let problem = format!(
                    "{name:?} has {rows} x {columns} weights, too many to be transcoded at once"
                );
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
        let (rows, columns) = (0..self.row_count(), 0..self.column_count());
        // SAFETY: the caller's promise.
        unsafe { self.decode_slice_into_raw((rows, columns), output, stream, status) }
    }

    /// As [`Matrix::decode_into_raw`], of any of its rows and columns, row by row, dense. Fastest
    /// at multiples of 32 rows and 256 columns, and if a row of the slice has a multiple of 8
    /// weights.
    ///
    /// # Errors
    /// As [`Matrix::decode_into_raw`], and [`Error::Parameter`] for rows or columns that do not
    /// exist, or none.
    ///
    /// # Safety
    /// As [`Matrix::decode_into_raw`], with memory for the slice.
    pub unsafe fn decode_slice_into_raw(
        &self,
        (rows, columns): (Range<u64>, Range<u64>),
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        self.check_slice(&rows, &columns, output)?;
        check_contexts(self.device(), stream, status)?;
        let part = (&rows, &columns);
        match &self.form {
            // SAFETY: the caller's promise; the matrix keeps what is its model's.
            Form::Stored(stored) => unsafe { stored.decode(part, output, stream, status) },
            // SAFETY: the caller's promise; the matrix keeps the arrays that are not the caller's.
            Form::Fast(fast) => unsafe { fast.decode(part, output, stream, status) },
        }
    }

    /// Puts the decoding of several matrices of one GPU on a stream, each to its address, row by
    /// row, dense: up to eight as stored by one launch, others by one each.
    ///
    /// # Errors
    /// As [`Matrix::decode_into_raw`]; [`Error::Parameter`] for matrices of several GPUs.
    ///
    /// # Safety
    /// As [`Matrix::decode_into_raw`], of each.
    pub unsafe fn decode_all_into_raw(
        all: &[(&Self, CUdeviceptr)],
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let mut stored = Vec::new();
        for &(matrix, output) in all {
            let (rows, columns) = (0..matrix.row_count(), 0..matrix.column_count());
            if !matrix.device().is(all[0].0.device()) {
                let problem = "the matrices lie on different GPUs";
                return Err(Error::parameter(problem, "decode those of each GPU by themselves"));
            }
            match &matrix.form {
                Form::Stored(tiles) => {
                    matrix.check_slice(&rows, &columns, output)?;
                    stored.push((tiles, rows, columns, output));
                }
                // SAFETY: the caller's promise.
                Form::Fast(_) => unsafe { matrix.decode_into_raw(output, stream, status) }?,
            }
        }
        for few in stored.chunks(FEW_TASKS) {
            let device = &few[0].0.device;
            check_contexts(device, stream, status)?;
            let (mut tasks, mut units) = (Vec::<TileTask>::new(), 0);
            for (tiles, rows, columns, output) in few {
                let task = tiles.task((rows, columns), *output, units);
                units += u64::from(task.tiles);
                tasks.push(task);
            }
            let staged = few.iter().map(|(tiles, ..)| tiles.staged_bytes).max().unwrap_or(0);
            if u32::try_from(units).is_err() {
                return Err(Error::limit("tiles of one launch on the GPU", units, u32::MAX.into()));
            }
            // SAFETY: outputs are the tasks' own, absolute ones; the rest is the caller's promise.
            unsafe {
                device.kernels().decode_few(stream, &tasks, staged, 0, status.device_pointer())
            }?;
        }
        Ok(())
    }

    fn check_slice(
        &self,
        rows: &Range<u64>,
        columns: &Range<u64>,
        output: CUdeviceptr,
    ) -> Result<()> {
        if !output.is_multiple_of(OUTPUT_ALIGNMENT) {
            let problem = format!("the output's address is no multiple of {OUTPUT_ALIGNMENT}");
            return Err(Error::parameter(problem, "start it on 256 bytes"));
        }
        within(rows, self.row_count(), 1, "rows")?;
        within(columns, self.column_count(), 1, "columns").map(drop)
    }

    /// As stored, what the largest tile of its tensor takes of the bitstream, in bytes.
    pub(super) fn staged_bytes(&self) -> Option<u32> {
        match &self.form {
            Form::Stored(stored) => Some(stored.staged_bytes),
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

/// The range, if it is not empty and begins and ends between strips or tiles.
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
    let problem = format!("{start}..{end} of {count} {what} are no matrix");
    Err(Error::parameter(
        problem,
        format!("begin and end on multiples of {unit}, or end with the last one"),
    ))
}

fn shift(range: &Range<u64>, by: u64) -> Range<u64> {
    range.start + by..range.end + by
}

fn check_shape((rows, columns): (u64, u64)) -> Result<()> {
    let most = u64::from(u32::MAX);
    if rows == 0 || rows > most || columns == 0 || columns > most || !columns.is_multiple_of(8) {
        let problem =
            format!("{rows} x {columns} weights are no matrix of 32-bit numbers in tiles");
        return Err(Error::parameter(problem, "columns are a multiple of 8"));
    }
    Ok(())
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
