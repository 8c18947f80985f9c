//! The fast layout: matrices in it, and packing of BF16 rows into it, some strips at a time.
#![expect(unsafe_code, reason = "launches and copies, each with its proof")]

use std::ops::Range;

use cudarc::driver::{CudaStream, result, sys::CUdeviceptr};

use super::task::{
    ENTRY_BYTES, HEAD_BYTES, PackTask, STRIP_ROWS, TILE_BYTES, TILE_COLUMNS, UnpackTask,
    fast_bytes, strip_bytes, strip_head_bytes, strip_patch_bytes,
};
use crate::gpu::{device::Device, fault::OrFault, memory::Buffer, status::Status};
use crate::{Result, constants::ARRAY_ALIGNMENT, open::Rect};

/// The place of a matrix: memory of [`fast_bytes`] with the data of all strips, then their patches,
/// then their heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strips {
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) address: CUdeviceptr,
}

impl Strips {
    fn strips(&self) -> u64 {
        self.rows.div_ceil(STRIP_ROWS)
    }

    /// The device address of the patches of a strip.
    pub(super) fn patches(&self, strip: u64) -> CUdeviceptr {
        let first = self.address + self.strips() * strip_bytes(self.columns);
        first + strip * strip_patch_bytes(self.columns)
    }

    /// The device addresses of data and heads, from a tile of a strip on.
    pub(super) fn from(&self, strip: u64, tile: u64) -> (CUdeviceptr, CUdeviceptr) {
        let heads = self.patches(self.strips());
        (
            self.address + strip * strip_bytes(self.columns) + tile * TILE_BYTES,
            heads + strip * strip_head_bytes(self.columns) + tile * HEAD_BYTES,
        )
    }
}

/// A whole matrix in the fast layout. It keeps nothing of the model.
#[derive(Debug)]
pub(in crate::gpu) struct FastArrays {
    pub(super) device: Device,
    pub(super) strips: Strips,
    /// Device address of its exceptions, and the number of weights that no code expresses.
    pub(super) entries: CUdeviceptr,
    pub(super) exceptions: u64,
    /// Memory of strips and exceptions; `None` if the caller keeps them.
    pub(super) _memory: Option<[Buffer; 2]>,
}

impl FastArrays {
    pub(super) fn bytes(&self) -> u64 {
        fast_bytes(self.strips.rows, self.strips.columns) + ENTRY_BYTES * self.exceptions
    }

    /// Whether one launch decodes a part of the matrix's bytes.
    pub(in crate::gpu) fn takes(&self, part: &Rect) -> bool {
        part.is_run() || part.width == 2 * self.strips.columns
    }

    /// Puts the decoding of a part that it [takes](Self::takes) on the stream, dense.
    ///
    /// # Safety
    /// `output` is device memory with room for the part, and nothing else uses it until the stream
    /// has done this; `self` and the status live as long. The stream is of the matrix's context.
    pub(in crate::gpu) unsafe fn decode(
        &self,
        part: &Rect,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let Strips { rows, columns, .. } = self.strips;
        let elements = part.elements(2);
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
        let (data, heads) = self.strips.from(0, 0);
        // No truncation: a matrix in the fast layout has fewer than 2^32 weights.
        let task = UnpackTask {
            data,
            heads,
            entries: self.entries,
            entry_count: self.exceptions,
            output: output.wrapping_sub(2 * place),
            pitch,
            element_begin: elements.start,
            element_end: elements.end,
            rows: rows as u32,
            columns: columns as u32,
            column_begin: wanted.start as u32,
            column_end: wanted.end as u32,
            first_strip: strips.start as u32,
            first_tile: tiles.start as u32,
            across: across as u32,
            tiles: ((strips.end - strips.start) * across) as u32,
            status: status.device_pointer(),
        };
        // SAFETY: the arrays have these strips and columns; the output is the caller's promise.
        unsafe { self.device.linear_kernels()?.unpack(stream, &task) }
    }
}

/// Packs one matrix after the other, some strips at a time. Has room for a matrix's exceptions
/// until they are counted, and keeps those of finished matrices.
#[derive(Debug)]
pub(super) struct Packer {
    device: Device,
    room: Buffer,
    /// The number of exceptions so far.
    total: Buffer,
    /// Allocations, each for the exceptions of several matrices.
    pub(super) kept: Vec<Buffer>,
    /// Bytes used of the last one.
    taken: u64,
}

/// Exceptions of several matrices are allocated together, because the driver is slower than the
/// GPU.
const KEPT_BYTES: u64 = 1 << 20;

impl Packer {
    /// Makes a packer for at most `most` exceptions of a matrix, in memory of its own.
    pub(super) fn new(device: &Device, most: u64) -> Result<Self> {
        let mut memory = device.allocate(Self::bytes(most), "exceptions")?;
        Ok(Self::within(device, most, &mut memory))
    }

    /// Bytes of memory that [`Packer::within`] takes.
    pub(super) const fn bytes(most: u64) -> u64 {
        ARRAY_ALIGNMENT + (most * ENTRY_BYTES).next_multiple_of(ARRAY_ALIGNMENT)
    }

    /// Makes a packer for at most `most` exceptions of a matrix, in `memory`.
    pub(super) fn within(device: &Device, most: u64, memory: &mut Buffer) -> Self {
        let (total, room) = (memory.take(size_of::<u32>() as u64), memory.take(most * ENTRY_BYTES));
        Self { device: device.clone(), room, total, kept: Vec::new(), taken: 0 }
    }

    /// Puts the reset of the counter on the stream, for the next matrix.
    pub(super) fn begin(&self, stream: &CudaStream) -> Result<()> {
        let (total, bytes) = (self.total.pointer(), self.total.bytes() as usize);
        // SAFETY: `self` keeps the word. Freeing it waits for the context.
        let cleared = unsafe { result::memset_d8_async(total, 0, bytes, stream.cu_stream()) };
        cleared.or_fault("clearing device memory")
    }

    pub(super) fn capacity(&self) -> u64 {
        self.room.bytes() / ENTRY_BYTES
    }

    /// Memory for this many bytes that are kept; `together` with those of other matrices.
    fn keep(&mut self, bytes: u64, together: bool) -> Result<Buffer> {
        if self.kept.last().is_none_or(|last| bytes > last.bytes() - self.taken) {
            let room = if together { bytes.max(KEPT_BYTES) } else { bytes };
            self.kept.push(self.device.allocate(room, "exceptions")?);
            self.taken = 0;
        }
        let last = &self.kept[self.kept.len() - 1];
        let region = last.part(self.taken, bytes);
        self.taken = last.bytes().min(self.taken + bytes.next_multiple_of(ARRAY_ALIGNMENT));
        Ok(region)
    }

    /// Waits, and returns the number of the matrix's exceptions so far.
    pub(super) fn count(&self, stream: &CudaStream) -> Result<u64> {
        Ok(self.total.read_word(stream)?.into())
    }

    /// Puts the copy of this many exceptions to a device address on the stream.
    ///
    /// # Safety
    /// There is room for them, and `self` has as many; both live until the stream is done.
    pub(super) unsafe fn copy(
        &self,
        count: u64,
        to: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let (from, bytes) = (self.room.pointer(), (count * ENTRY_BYTES) as usize);
        // SAFETY: the caller's promise.
        let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) };
        copied.or_fault("copying on the GPU")
    }

    /// Puts the packing of some rows on the stream: whole strips, in order; the last one may be
    /// partial.
    ///
    /// # Safety
    /// `weights` is device memory that holds the rows, dense, when the stream reaches this; it, the
    /// strips and `self` live until the stream is done. The matrix has [begun](Self::begin), and no
    /// other one begins before [`Packer::finish`].
    pub(super) unsafe fn pack(
        &self,
        strips: &Strips,
        rows: &Range<u64>,
        weights: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<()> {
        let (data, heads) = strips.from(rows.start / STRIP_ROWS, 0);
        let task = PackTask {
            weights,
            pitch: strips.columns,
            rows: (rows.end - rows.start) as u32,
            columns: strips.columns as u32,
            heads,
            data,
            entries: self.room.pointer(),
            capacity: self.capacity(),
            total: self.total.pointer(),
            patches: strips.patches(rows.start / STRIP_ROWS),
        };
        // SAFETY: data and heads have room for all strips of the matrix, some of which these are;
        // exceptions past the capacity are not written; the rest is the caller's promise.
        unsafe { self.device.linear_kernels()?.pack(stream, &task) }
    }

    /// Waits, and keeps the matrix's exceptions, `together` with those of other matrices; or
    /// returns their number if they are more than `most`. Later work on the stream may be of
    /// another matrix. `memory`: that of the matrix.
    pub(super) fn finish(
        &mut self,
        strips: Strips,
        memory: Buffer,
        most: u64,
        together: bool,
        stream: &CudaStream,
    ) -> Result<Result<FastArrays, u64>> {
        assert_eq!(memory.pointer(), strips.address, "the memory of the matrix");
        let exceptions = self.count(stream)?;
        if exceptions > most.min(self.capacity()) {
            return Ok(Err(exceptions));
        }
        let kept = self.keep(exceptions * ENTRY_BYTES, together)?;
        let (device, entries) = (self.device.clone(), kept.pointer());
        // SAFETY: there are as many bytes. Freeing them waits for the context.
        unsafe { self.copy(exceptions, entries, stream) }?;
        let memory = Some([memory, kept]);
        Ok(Ok(FastArrays { device, strips, entries, exceptions, _memory: memory }))
    }
}
