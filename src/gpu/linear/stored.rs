//! Rows and columns of a matrix in tiles of 32 x 256, wherever its arrays lie.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::{ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::task::{LinearMatrix, STRIP_ROWS, TILE_COLUMNS, tiles_across};
use crate::{
    Result,
    encoding::tile::RECORD_BYTES,
    gpu::{
        Device, Status,
        coding::KernelEncoding,
        loaded::Inner,
        task::{TileArrays, TileSource, TileTask, Tiles},
    },
};

/// A matrix, or a slice of it.
#[derive(Clone, Debug)]
pub(super) struct TileMatrix {
    pub(super) device: Device,
    /// Of the whole matrix, as what follows.
    pub(super) source: TileSource,
    /// What the largest tile takes of the bitstream.
    pub(super) staged_bytes: u32,
    /// From a multiple of 32 on, to one or to the end.
    pub(super) rows: Range<u64>,
    /// Likewise of 256.
    pub(super) columns: Range<u64>,
    /// Keeps the arrays, unless the caller does.
    pub(super) _model: Option<Arc<Inner>>,
}

impl TileMatrix {
    /// All of a matrix whose tiles take at most `staged_bytes` of its bitstream.
    pub(super) fn new(
        device: &Device,
        (rows, columns): (u64, u64),
        (arrays, bits_bytes, staged_bytes): (TileArrays, u64, u32),
        model: Option<Arc<Inner>>,
    ) -> Self {
        let source =
            TileSource { arrays, bits_bytes, rows, columns, tiles_across: tiles_across(columns) };
        let device = device.clone();
        Self { device, source, staged_bytes, rows: 0..rows, columns: 0..columns, _model: model }
    }

    /// Of the whole matrix, except its codebook.
    pub(super) fn bytes(&self) -> u64 {
        let TileSource { rows, columns, bits_bytes, tiles_across, .. } = self.source;
        let records = (rows.div_ceil(STRIP_ROWS) * tiles_across + 1) * RECORD_BYTES as u64;
        records + bits_bytes + rows * columns + KernelEncoding::Tile.table_bytes()
    }

    /// For a launch.
    pub(super) fn matrix(&self) -> LinearMatrix {
        let TileSource { arrays, bits_bytes, columns, tiles_across, .. } = self.source;
        let strips = self.rows.start / STRIP_ROWS;
        LinearMatrix {
            data: arrays.plane + self.rows.start * columns,
            index: arrays.records + strips * tiles_across * RECORD_BYTES as u64,
            rest: arrays.bitstream,
            table: arrays.table,
            rest_count: bits_bytes,
            rows: (self.rows.end - self.rows.start) as u32,
            whole_columns: columns as u32,
            first_column: self.columns.start as u32,
            ..LinearMatrix::default()
        }
    }

    /// Decodes some of its rows and columns, which exist, to `output` of the launch's, dense; all
    /// tasks before have this many tiles.
    pub(super) fn task(
        &self,
        (rows, columns): (&Range<u64>, &Range<u64>),
        output: u64,
        first_unit: u64,
    ) -> TileTask {
        let [rows, columns] = [(rows, self.rows.start), (columns, self.columns.start)]
            .map(|(range, first)| range.start + first..range.end + first);
        let tiles = Tiles {
            rows: rows.start / STRIP_ROWS..rows.end.div_ceil(STRIP_ROWS),
            columns: columns.start / TILE_COLUMNS..columns.end.div_ceil(TILE_COLUMNS),
        };
        let width = self.source.columns;
        let elements = rows.start * width + columns.start..(rows.end - 1) * width + columns.end;
        TileTask::new(&self.source, &elements, &columns, &tiles, output, first_unit)
    }

    /// Puts the decoding of some of its rows and columns on the stream, dense.
    ///
    /// # Safety
    /// `output` has room for them, and nobody else uses it until the stream has done this; the
    /// arrays, `self` and the status live as long. The stream belongs to the device's context, and
    /// `output` is a multiple of 16.
    pub(super) unsafe fn decode(
        &self,
        part: (&Range<u64>, &Range<u64>),
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let (task, status) = (self.task(part, 0, 0), status.device_pointer());
        // SAFETY: the task is of arrays that whoever made `self` vouches for; the rest is the
        // caller's promise.
        unsafe {
            self.device.kernels().decode_few(stream, &[task], self.staged_bytes, output, status)
        }
    }
}
