//! The arrays of a matrix in the fast layout, in device memory, and slices of them.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::task::{
    ENTRY_BYTES, HEAD_BYTES, LinearMatrix, STRIP_ROWS, TILE_BYTES, TILE_COLUMNS, UnpackTask, strip_bytes,
    strip_head_bytes,
};
use crate::{
    Result,
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
}

/// Some of its rows, from a multiple of 32 on, and of its columns, from a multiple of 256 on.
#[derive(Clone, Debug)]
pub(super) struct FastSlice {
    pub(super) arrays: Arc<FastArrays>,
    pub(super) rows: Range<u64>,
    pub(super) columns: Range<u64>,
}

impl FastSlice {
    pub(super) fn of(arrays: FastArrays) -> Self {
        let (rows, columns) = (0..arrays.rows, 0..arrays.columns);
        Self { arrays: Arc::new(arrays), rows, columns }
    }

    pub(super) fn row_count(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    pub(super) fn column_count(&self) -> u64 {
        self.columns.end - self.columns.start
    }

    fn places(&self) -> Places {
        let FastArrays { strips, rows, columns, .. } = &*self.arrays;
        let strip = Places::new(strips.pointer(), *rows, *columns, self.rows.start / STRIP_ROWS);
        strip.from_tile(self.columns.start / TILE_COLUMNS)
    }

    /// For a launch.
    pub(super) fn matrix(&self) -> LinearMatrix {
        let Places { data, heads } = self.places();
        LinearMatrix {
            data,
            index: heads,
            rest: self.arrays.entries.pointer(),
            rest_count: self.arrays.exceptions(),
            rows: self.row_count() as u32,
            whole_columns: self.arrays.columns as u32,
            first_column: self.columns.start as u32,
            ..LinearMatrix::default()
        }
    }

    /// Puts its decoding on the stream.
    ///
    /// # Safety
    /// `output` is device memory with room for it, and nobody else uses it until the stream has done
    /// this; `self` and the status live as long. The stream belongs to the device's context.
    pub(super) unsafe fn decode(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let Places { data, heads } = self.places();
        let task = UnpackTask {
            data,
            heads,
            entries: self.arrays.entries.pointer(),
            entry_count: self.arrays.exceptions(),
            output,
            pitch: self.column_count(),
            rows: self.row_count() as u32,
            columns: self.column_count() as u32,
            whole_columns: self.arrays.columns as u32,
            reserved: [0; 3],
            status: status.device_pointer(),
        };
        // SAFETY: the arrays were made for as many strips and columns, of which these are some; the
        // output is the caller's promise.
        unsafe { self.arrays.device.linear_kernels()?.unpack(stream, &task) }
    }
}

/// Device addresses of data and heads, from a tile of a strip on.
pub(super) struct Places {
    pub(super) data: CUdeviceptr,
    pub(super) heads: CUdeviceptr,
}

impl Places {
    /// From a strip on, in the memory of [`FastArrays::allocate`].
    pub(super) fn new(strips: CUdeviceptr, rows: u64, columns: u64, strip: u64) -> Self {
        let heads = strips + rows.div_ceil(STRIP_ROWS) * strip_bytes(columns);
        Self { data: strips + strip * strip_bytes(columns), heads: heads + strip * strip_head_bytes(columns) }
    }

    fn from_tile(self, tile: u64) -> Self {
        Self { data: self.data + tile * TILE_BYTES, heads: self.heads + tile * HEAD_BYTES }
    }
}
