//! The arrays of a matrix in the fast layout, in device memory.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ops::Range;

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::kernels::gather_blocks;
use super::task::{
    ENTRY_BYTES, GatherTask, LinearMatrix, STRIP_ROWS, UnpackTask, strip_bytes, strip_head_bytes,
};
use crate::{
    Error, Result,
    gpu::{Device, Status, memory::Buffer},
};

/// A whole matrix in the fast layout. It keeps nothing of the model.
#[derive(Debug)]
pub(super) struct FastArrays {
    pub(super) device: Device,
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// Data of all strips, then their heads.
    pub(super) strips: Buffer,
    pub(super) entries: Buffer,
}

impl FastArrays {
    /// Device memory for strips, of any content yet.
    pub(super) fn allocate(device: &Device, rows: u64, columns: u64) -> Result<Buffer> {
        let bytes = rows.div_ceil(STRIP_ROWS) * (strip_bytes(columns) + strip_head_bytes(columns));
        device.allocate(bytes, "a matrix in the fast layout")
    }

    pub(super) fn bytes(&self) -> u64 {
        self.strips.bytes() + self.entries.bytes()
    }

    /// Weights that no code expresses.
    pub(super) fn exceptions(&self) -> u64 {
        self.entries.bytes() / ENTRY_BYTES
    }

    fn places(&self, strip: u64) -> Places {
        Places::new(self.strips.pointer(), self.rows, self.columns, strip)
    }

    /// Rows from a multiple of 32 on, for a launch.
    pub(super) fn matrix(&self, rows: &Range<u64>) -> LinearMatrix {
        let Places { data, heads } = self.places(rows.start / STRIP_ROWS);
        LinearMatrix {
            data,
            index: heads,
            rest: self.entries.pointer(),
            rest_count: self.exceptions(),
            rows: (rows.end - rows.start) as u32,
            whole_columns: self.columns as u32,
            ..LinearMatrix::default()
        }
    }

    /// Puts the decoding of rows from a multiple of 32 on the stream.
    ///
    /// # Safety
    /// `output` is device memory with room for the rows, and nobody else uses it until the stream
    /// has done this; `self` and the status live as long. The stream belongs to the device's
    /// context.
    pub(super) unsafe fn decode(
        &self,
        rows: &Range<u64>,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let Places { data, heads } = self.places(rows.start / STRIP_ROWS);
        let task = UnpackTask {
            data,
            heads,
            entries: self.entries.pointer(),
            entry_count: self.exceptions(),
            output,
            pitch: self.columns,
            rows: (rows.end - rows.start) as u32,
            columns: self.columns as u32,
            whole_columns: self.columns as u32,
            reserved: [0; 3],
            status: status.device_pointer(),
        };
        // SAFETY: the arrays were made for as many strips and columns; the output is the caller's
        // promise.
        unsafe { self.device.linear_kernels()?.unpack(stream, &task) }
    }
}

/// Where the indices of rows lie in device memory.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Indices {
    /// Unsigned, of 32 bits each, from this device address on, a multiple of 4.
    U32(CUdeviceptr),
    /// Of 64 bits each, from this device address on, a multiple of 8.
    I64(CUdeviceptr),
}

impl FastArrays {
    /// Puts the decoding of some of these rows on the stream.
    ///
    /// # Safety
    /// As [`Matrix::gather`](super::Matrix::gather), which has checked the arguments.
    pub(super) unsafe fn gather(
        &self,
        rows: &Range<u64>,
        (indices, count): (Indices, u64),
        (output, pitch): (CUdeviceptr, u64),
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let Some(blocks) = gather_blocks(count, self.columns) else {
            let problem = format!("{count} indices are more than one launch decodes");
            return Err(Error::parameter(problem, "gather fewer rows at once"));
        };
        let Places { data, heads } = self.places(rows.start / STRIP_ROWS);
        let (indices, wide) = match indices {
            Indices::U32(address) => (address, 0),
            Indices::I64(address) => (address, 1),
        };
        let task = GatherTask {
            data,
            index: heads,
            rest: self.entries.pointer(),
            table: 0,
            rest_count: self.exceptions(),
            indices,
            output,
            pitch,
            rows: (rows.end - rows.start) as u32,
            columns: self.columns as u32,
            count: count as u32,
            wide,
            whole_columns: self.columns as u32,
            first_column: 0,
            status: status.device_pointer(),
        };
        // SAFETY: the arrays were made for as many strips and columns; indices of other rows are
        // not followed; the rest is the caller's promise.
        unsafe { self.device.linear_kernels()?.gather(stream, &task, blocks) }
    }
}

/// Device addresses of data and heads from a strip on.
pub(super) struct Places {
    pub(super) data: CUdeviceptr,
    pub(super) heads: CUdeviceptr,
}

impl Places {
    /// In the memory of [`FastArrays::allocate`].
    pub(super) fn new(strips: CUdeviceptr, rows: u64, columns: u64, strip: u64) -> Self {
        let heads = strips + rows.div_ceil(STRIP_ROWS) * strip_bytes(columns);
        Self { data: strips + strip * strip_bytes(columns), heads: heads + strip * strip_head_bytes(columns) }
    }
}
