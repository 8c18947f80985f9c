//! Decodes matrices to memory: whole ones, slices, and rows by their indices on the device.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ops::Range;

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::kernels::gather_blocks;
use super::matrix::{Matrix, MatrixArrays, shift, within};
use super::task::GatherTask;
use crate::gpu::status::{Status, check_contexts};
use crate::gpu::task::{FEW_TASKS, TileTask, kernel_of};
use crate::gpu::{fault::refuse, program::check_output};
use crate::{Error, Result, open::Rect};

/// The place of row indices in device memory.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Indices {
    /// Unsigned 32-bit indices at this device address, a multiple of 4.
    U32(CUdeviceptr),
    /// Signed 64-bit indices at this device address, a multiple of 8.
    I64(CUdeviceptr),
}

impl Indices {
    /// Their address, the bytes of one, and 1 for the wide ones, as tasks have it.
    pub(super) const fn place(self) -> (CUdeviceptr, u64, u32) {
        match self {
            Self::U32(address) => (address, 4, 0),
            Self::I64(address) => (address, 8, 1),
        }
    }
}

impl Matrix {
    /// Number of its decoded bytes.
    pub fn decoded_bytes(&self) -> u64 {
        self.split().bytes() as u64 * self.row_count() * self.column_count()
    }

    /// Puts its decoding on a stream, to a device address: row by row, dense. Neither allocates nor
    /// waits, and can be captured in a graph. For transposed products, and for
    /// [`Linear::crossover_rows`](super::Linear::crossover_rows) rows of x or more.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the output is not a multiple of 16, or the stream or the status is
    /// not of the matrix's device; [`Error::Gpu`].
    ///
    /// # Safety
    /// `output` has [`Matrix::decoded_bytes`] of memory that the device may write, and nothing else
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

    /// Decodes any of its rows and columns like [`Matrix::decode_into_raw`], row by row, dense.
    /// Fastest at multiples of 32 rows and 256 columns, and if a row of the slice has a multiple of
    /// 8 weights.
    ///
    /// # Errors
    /// Same as [`Matrix::decode_into_raw`], and [`Error::Parameter`] for no or missing rows or
    /// columns.
    ///
    /// # Safety
    /// Same as [`Matrix::decode_into_raw`], with memory for the slice.
    pub unsafe fn decode_slice_into_raw(
        &self,
        (rows, columns): (Range<u64>, Range<u64>),
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        self.check_slice(&rows, &columns, output)?;
        check_contexts(self.device(), stream, status)?;
        // SAFETY: the caller's promise.
        unsafe { self.decode(&rows, &columns, output, stream, status) }
    }

    /// Puts the decoding of some of its rows and columns, which exist, on the stream, dense.
    ///
    /// # Safety
    /// Same as [`Matrix::decode_slice_into_raw`], which has checked the arguments.
    pub(super) unsafe fn decode(
        &self,
        rows: &Range<u64>,
        columns: &Range<u64>,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let (rows, columns) = (shift(rows, self.rows.start), shift(columns, self.columns.start));
        match &self.arrays {
            MatrixArrays::Stored(stored) => {
                let (task, status) = (stored.task(&rows, &columns, 0, 0), status.device_pointer());
                let (kernels, staged) =
                    (stored.device.kernels(), stored.source.arrays.staged_bytes);
                let kernel = kernel_of(stored.source.split);
                // SAFETY: the matrix or the caller keeps the task's arrays; the caller promises the
                // rest.
                unsafe { kernels.decode_few(stream, kernel, &[task], staged, output, status) }
            }
            MatrixArrays::Fast(fast) => {
                let columns = 2 * columns.start..2 * columns.end;
                let part = Rect { rows, columns, width: 2 * fast.strips.columns };
                // SAFETY: the caller's promise; the matrix keeps arrays that the caller does not.
                unsafe { fast.decode(&part, output, stream, status) }
            }
        }
    }

    /// Puts the decoding of several matrices of one GPU on a stream, each to its address, row by
    /// row, dense: one launch for up to eight neighbours as stored of one split, one for each other
    /// matrix.
    ///
    /// # Errors
    /// Same as [`Matrix::decode_into_raw`]; [`Error::Parameter`] for matrices of several GPUs.
    ///
    /// # Safety
    /// Same as [`Matrix::decode_into_raw`], for each.
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
                return refuse(problem, "decode those of each GPU by themselves");
            }
            match &matrix.arrays {
                MatrixArrays::Stored(arrays) => {
                    matrix.check_slice(&rows, &columns, output)?;
                    stored.push((arrays, &matrix.rows, &matrix.columns, output));
                }
                // SAFETY: the caller's promise.
                MatrixArrays::Fast(_) => unsafe { matrix.decode_into_raw(output, stream, status) }?,
            }
        }
        let alike = stored.chunk_by(|one, other| one.0.source.split == other.0.source.split);
        for few in alike.flat_map(|alike| alike.chunks(FEW_TASKS)) {
            let (device, kernel) = (&few[0].0.device, kernel_of(few[0].0.source.split));
            check_contexts(device, stream, status)?;
            let (mut tasks, mut units, mut staged) = (Vec::<TileTask>::new(), 0, 0);
            for (arrays, rows, columns, output) in few {
                let task = arrays.task(rows, columns, *output, units);
                units += u64::from(task.tiles);
                staged = staged.max(arrays.source.arrays.staged_bytes);
                tasks.push(task);
            }
            Error::check_limit("tiles of one launch on the GPU", units, u32::MAX.into())?;
            let (kernels, status) = (device.kernels(), status.device_pointer());
            // SAFETY: outputs of the tasks are absolute addresses; the rest is the caller's
            // promise.
            unsafe { kernels.decode_few(stream, kernel, &tasks, staged, 0, status) }?;
        }
        Ok(())
    }

    fn check_slice(
        &self,
        rows: &Range<u64>,
        columns: &Range<u64>,
        output: CUdeviceptr,
    ) -> Result<()> {
        check_output(output)?;
        within(rows, self.row_count(), 1, "rows")?;
        within(columns, self.column_count(), 1, "columns").map(drop)
    }

    /// Puts the decoding of `count` rows, an embedding's, on a stream by their indices in device
    /// memory. Row i of the output is row `indices[i]`, with `pitch` elements from one row to the
    /// next. An index that names no row gives zeros and sets the status. Reads only the tiles'
    /// parts of these rows. Neither allocates nor waits, and can be captured in a graph.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other weights than BF16, rows that overlap, a misaligned address,
    /// more than 2^32 - 1 indices or 2^34 tiles that rows cross, and a stream or status of another
    /// device; [`Error::Gpu`].
    ///
    /// # Safety
    /// In memory of the device, `indices` has `count` indices, and `output` has room for as many
    /// rows. Until the work is done nothing else uses the output or changes indices. Until then,
    /// and until the last replay of a graph that captured it, all that, this matrix and the status
    /// live.
    pub unsafe fn gather(
        &self,
        indices: Indices,
        count: u64,
        (output, pitch): (CUdeviceptr, u64),
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        check_contexts(self.device(), stream, status)?;
        self.check_bf16()?;
        let (address, bytes, wide) = indices.place();
        if !address.is_multiple_of(bytes) || !output.is_multiple_of(2) {
            let problem = "the indices or the output are misaligned";
            return refuse(problem, "begin each on a multiple of an element's bytes");
        }
        if count > 1 && pitch < self.column_count() {
            let problem = "rows of the output would overlap";
            return refuse(problem, "pitches count elements, not bytes");
        }
        let Some(blocks) = gather_blocks(count, self.column_count()) else {
            let problem = format!("{count} indices are more than one launch decodes");
            return refuse(problem, "gather fewer rows at once");
        };
        if count == 0 {
            return Ok(());
        }
        let task = GatherTask {
            matrix: self.task(),
            indices: address,
            output,
            pitch,
            status: status.device_pointer(),
            rows: self.row_count() as u32,
            columns: self.column_count() as u32,
            count: count as u32,
            wide,
        };
        let kernels = self.device().linear_kernels()?;
        // SAFETY: the matrix keeps the arrays; the kernel does not follow indices of other rows;
        // the rest is the caller's promise.
        unsafe { kernels.gather(self.residence(), stream, &task, blocks) }
    }
}
