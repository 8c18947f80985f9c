//! The arrays of a matrix in the fast layout, in device memory, and slices of them.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::task::{
    ENTRY_BYTES, HEAD_BYTES, LinearMatrix, STRIP_ROWS, TILE_BYTES, TILE_COLUMNS, UnpackTask,
    strip_bytes, strip_head_bytes,
};
use crate::{
    Result,
    gpu::{Device, Status, memory::Region},
    open::Rect,
};

/// A whole matrix in the fast layout. It keeps nothing of the model.
#[derive(Debug)]
pub(in crate::gpu) struct FastArrays {
    pub(super) device: Device,
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// The device address of data of all strips, then their heads.
    strips: CUdeviceptr,
    /// That of its exceptions.
    entries: CUdeviceptr,
    exceptions: u64,
    /// Both, unless the caller keeps them.
    _memory: Option<[Region; 2]>,
}

impl FastArrays {
    pub(super) fn new(
        device: Device,
        (rows, columns): (u64, u64),
        strips: Region,
        entries: Region,
    ) -> Self {
        let exceptions = entries.bytes() / ENTRY_BYTES;
        let (at, entries_at) = (strips.pointer(), entries.pointer());
        let kept = Some([strips, entries]);
        Self { device, rows, columns, strips: at, entries: entries_at, exceptions, _memory: kept }
    }

    /// In memory that the caller keeps.
    pub(super) fn of_caller(
        device: Device,
        (rows, columns): (u64, u64),
        strips: CUdeviceptr,
        (entries, exceptions): (CUdeviceptr, u64),
    ) -> Self {
        Self { device, rows, columns, strips, entries, exceptions, _memory: None }
    }

    /// Device memory of the strips of a matrix, in bytes.
    pub(in crate::gpu) const fn strips_bytes(rows: u64, columns: u64) -> u64 {
        rows.div_ceil(STRIP_ROWS) * (strip_bytes(columns) + strip_head_bytes(columns))
    }

    pub(in crate::gpu) fn bytes(&self) -> u64 {
        Self::strips_bytes(self.rows, self.columns) + ENTRY_BYTES * self.exceptions
    }

    /// Weights that no code expresses.
    pub(super) fn exceptions(&self) -> u64 {
        self.exceptions
    }

    /// Whether one launch decodes a part of the matrix's bytes.
    pub(in crate::gpu) fn takes(&self, part: &Rect) -> bool {
        part.is_run() || part.width == 2 * self.columns
    }

    /// Puts the decoding of a part that it [takes](Self::takes) on the stream, dense.
    ///
    /// # Safety
    /// `output` is device memory with room for the part, and nobody else uses it until the stream
    /// has done this; `self` and the status live as long. The stream belongs to the device's
    /// context.
    pub(in crate::gpu) unsafe fn decode(
        &self,
        part: &Rect,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let columns = self.columns;
        let elements = part.elements();
        let wanted = if part.width == 2 * columns {
            part.columns.start / 2..part.columns.end / 2
        } else {
            0..columns
        };
        let pitch = wanted.end - wanted.start;
        let place = elements.start / columns * pitch + elements.start % columns;
        let strip_elements = STRIP_ROWS * columns;
        let strips = elements.start / strip_elements..elements.end.div_ceil(strip_elements);
        let tiles = wanted.start / TILE_COLUMNS..wanted.end.div_ceil(TILE_COLUMNS);
        let across = tiles.end - tiles.start;
        let Places { data, heads } = Places::new(self.strips, self.rows, columns, 0);
        // No truncation: a matrix in the fast layout has fewer than 2^32 weights.
        let task = UnpackTask {
            data,
            heads,
            entries: self.entries,
            entry_count: self.exceptions(),
            output: output.wrapping_sub(2 * place),
            pitch,
            element_begin: elements.start,
            element_end: elements.end,
            rows: self.rows as u32,
            columns: columns as u32,
            column_begin: wanted.start as u32,
            column_end: wanted.end as u32,
            first_strip: strips.start as u32,
            first_tile: tiles.start as u32,
            across: across as u32,
            tiles: ((strips.end - strips.start) * across) as u32,
            status: status.device_pointer(),
        };
        // SAFETY: the arrays were made for as many strips and columns; the output is the caller's
        // promise.
        unsafe { self.device.linear_kernels()?.unpack(stream, &task) }
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
    /// All of them.
    pub(super) fn of(arrays: Arc<FastArrays>) -> Self {
        let (rows, columns) = (0..arrays.rows, 0..arrays.columns);
        Self { arrays, rows, columns }
    }

    pub(super) fn row_count(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    pub(super) fn column_count(&self) -> u64 {
        self.columns.end - self.columns.start
    }

    fn places(&self) -> Places {
        let FastArrays { strips, rows, columns, .. } = &*self.arrays;
        let strip = Places::new(*strips, *rows, *columns, self.rows.start / STRIP_ROWS);
        strip.at_tile(self.columns.start / TILE_COLUMNS)
    }

    /// For a launch.
    pub(super) fn matrix(&self) -> LinearMatrix {
        let Places { data, heads } = self.places();
        LinearMatrix {
            data,
            index: heads,
            rest: self.arrays.entries,
            rest_count: self.arrays.exceptions(),
            rows: self.row_count() as u32,
            whole_columns: self.arrays.columns as u32,
            first_column: self.columns.start as u32,
            ..LinearMatrix::default()
        }
    }

    /// As a part of the whole matrix.
    fn part(&self, rows: &Range<u64>, columns: &Range<u64>) -> Rect {
        let bytes =
            2 * (self.columns.start + columns.start)..2 * (self.columns.start + columns.end);
        let rows = self.rows.start + rows.start..self.rows.start + rows.end;
        Rect { rows, columns: bytes, width: 2 * self.arrays.columns }
    }

    /// Puts the decoding of some of its rows and columns on the stream, dense.
    ///
    /// # Safety
    /// As [`FastArrays::decode`].
    pub(super) unsafe fn decode(
        &self,
        (rows, columns): (&Range<u64>, &Range<u64>),
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.arrays.decode(&self.part(rows, columns), output, stream, status) }
    }
}

/// Device addresses of data and heads, from a tile of a strip on.
pub(super) struct Places {
    pub(super) data: CUdeviceptr,
    pub(super) heads: CUdeviceptr,
}

impl Places {
    /// From a strip on, in memory of [`FastArrays::strips_bytes`].
    pub(super) fn new(strips: CUdeviceptr, rows: u64, columns: u64, strip: u64) -> Self {
        let heads = strips + rows.div_ceil(STRIP_ROWS) * strip_bytes(columns);
        Self {
            data: strips + strip * strip_bytes(columns),
            heads: heads + strip * strip_head_bytes(columns),
        }
    }

    fn at_tile(self, tile: u64) -> Self {
        Self { data: self.data + tile * TILE_BYTES, heads: self.heads + tile * HEAD_BYTES }
    }
}
