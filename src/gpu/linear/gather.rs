//! Rows of a matrix by their indices on the device.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{
    Matrix,
    kernels::gather_blocks,
    task::{GatherTask, LinearMatrix},
};
use crate::{
    Error, Result,
    gpu::{Status, route::check_contexts},
};

/// Where the indices of rows lie in device memory.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Indices {
    /// Unsigned, of 32 bits each, from this device address on, a multiple of 4.
    U32(CUdeviceptr),
    /// Of 64 bits each, from this device address on, a multiple of 8.
    I64(CUdeviceptr),
}

impl Matrix {
    /// Puts the decoding of `count` rows on a stream, by their indices in device memory: an
    /// embedding's. Row i of the output is row `indices[i]`, with `pitch` elements from one to the
    /// next; of an index that names no row it is zeros, and the status is set. Only tiles' parts of
    /// these rows are read. Neither allocates nor waits, and can be captured in a graph.
    ///
    /// # Errors
    /// [`Error::Parameter`] for rows that overlap, a misaligned address, more indices than 2^32 - 1
    /// indices or 2^34 tiles that rows cross, and a stream or status of another device;
    /// [`Error::Gpu`].
    ///
    /// # Safety
    /// In memory of the device: `indices` has `count` of them, and `output` room for as many rows.
    /// Until the work is done nobody else uses the output or changes the indices; until then, and
    /// until the last replay of a graph that captured it, all that, this matrix and the status
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
        let (address, bytes, wide) = match indices {
            Indices::U32(address) => (address, 4, 0),
            Indices::I64(address) => (address, 8, 1),
        };
        if !address.is_multiple_of(bytes) || !output.is_multiple_of(2) {
            let problem = "the indices or the output are misaligned";
            return Err(Error::parameter(
                problem,
                "begin each on a multiple of an element's bytes",
            ));
        }
        if count > 1 && pitch < self.column_count() {
            let problem = "rows of the output would overlap";
            return Err(Error::parameter(problem, "pitches count elements, not bytes"));
        }
        let Some(blocks) = gather_blocks(count, self.column_count()) else {
            let problem = format!("{count} indices are more than one launch decodes");
            return Err(Error::parameter(problem, "gather fewer rows at once"));
        };
        if count == 0 {
            return Ok(());
        }
        let LinearMatrix { data, index, rest, table, rest_count, .. } = self.task();
        let LinearMatrix { rows, whole_columns, first_column, .. } = self.task();
        let task = GatherTask {
            data,
            index,
            rest,
            table,
            rest_count,
            indices: address,
            output,
            pitch,
            rows,
            columns: self.column_count() as u32,
            count: count as u32,
            wide,
            whole_columns,
            first_column,
            status: status.device_pointer(),
        };
        let kernels = self.device().linear_kernels()?;
        // SAFETY: the arrays are those of the matrix, which keeps them; indices of other rows are
        // not followed; the rest is the caller's promise.
        unsafe { kernels.gather(self.residence(), stream, &task, blocks) }
    }
}
