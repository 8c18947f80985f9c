//! A matrix on its way from BF16 to the fast layout: some strips at a time, in order.
#![expect(unsafe_code, reason = "launches and copies, each with its proof")]

use std::{ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, result, sys::CUdeviceptr};

use super::{
    fast::{FastArrays, Places},
    task::{ENTRY_BYTES, PackTask, STRIP_ROWS},
};
use crate::{
    Result,
    constants::ARRAY_ALIGNMENT,
    gpu::{
        Device,
        fault::OrFault,
        memory::{Buffer, Region},
    },
};

/// What becomes of a matrix that was to be fast.
#[derive(Debug)]
pub(in crate::gpu) enum Outcome {
    Fast(FastArrays),
    /// It has this many exceptions.
    TooMany(u64),
    /// A strip of it is more than is decoded at once.
    TooWide,
}

/// Room for exceptions until they are counted, for one matrix after the other, and what is kept of
/// them.
#[derive(Debug)]
pub(super) struct Entries {
    device: Device,
    room: Region,
    /// How many there are so far.
    total: Region,
    /// Allocations for those of several matrices.
    kept: Vec<Arc<Buffer>>,
    /// How many bytes of the last one are taken.
    taken: u64,
}

/// Exceptions of several matrices are allocated together, since the driver takes longer than the
/// GPU.
const KEPT_BYTES: u64 = 1 << 20;

impl Entries {
    /// For at most this many of a matrix, in memory of their own.
    pub(super) fn new(device: &Device, most: u64) -> Result<Self> {
        let memory = device.allocate(Self::bytes(most), "exceptions")?;
        Ok(Self::within(device, most, &mut memory.into()))
    }

    /// What [`Entries::within`] takes.
    pub(super) const fn bytes(most: u64) -> u64 {
        ARRAY_ALIGNMENT + (most * ENTRY_BYTES).next_multiple_of(ARRAY_ALIGNMENT)
    }

    /// For at most this many of a matrix.
    pub(super) fn within(device: &Device, most: u64, memory: &mut Region) -> Self {
        let (total, room) = (memory.take(size_of::<u32>() as u64), memory.take(most * ENTRY_BYTES));
        Self { device: device.clone(), room, total, kept: Vec::new(), taken: 0 }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.room.bytes() / ENTRY_BYTES
    }

    /// Memory for this many bytes that are kept; `together` with others.
    fn keep(&mut self, bytes: u64, together: bool) -> Result<Region> {
        if self.kept.last().is_none_or(|last| bytes > last.bytes() - self.taken) {
            let room = if together { bytes.max(KEPT_BYTES) } else { bytes };
            self.kept.push(Arc::new(self.device.allocate(room, "exceptions")?));
            self.taken = 0;
        }
        let last = &self.kept[self.kept.len() - 1];
        let region = Region::within(last, self.taken, bytes);
        self.taken = last.bytes().min(self.taken + bytes.next_multiple_of(ARRAY_ALIGNMENT));
        Ok(region)
    }

    /// How many there are of the matrix so far; waits.
    pub(super) fn count(&self, stream: &CudaStream) -> Result<u64> {
        let mut total = [0_u32];
        self.total.read(stream, &mut total)?;
        Ok(total[0].into())
    }

    /// Puts the copying of this many to a device address on the stream.
    ///
    /// # Safety
    /// There is room for them, and no less in `self`; both live until the stream is done.
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

    /// The allocations of all that is kept.
    pub(super) fn into_kept(self) -> Vec<Arc<Buffer>> {
        self.kept
    }
}

/// A matrix of which some strips are packed.
#[derive(Debug)]
pub(super) struct Packer {
    device: Device,
    rows: u64,
    columns: u64,
    /// The device address of the matrix.
    strips: CUdeviceptr,
}

impl Packer {
    /// For a matrix at this device address, in memory of [`FastArrays::strips_bytes`]. Puts the
    /// counter's beginning on the stream.
    pub(super) fn new(
        (rows, columns): (u64, u64),
        strips: CUdeviceptr,
        entries: &Entries,
        stream: &CudaStream,
    ) -> Result<Self> {
        let (total, bytes) = (entries.total.pointer(), entries.total.bytes() as usize);
        // SAFETY: the word is the caller's, who keeps it until the stream is done.
        let cleared = unsafe { result::memset_d8_async(total, 0, bytes, stream.cu_stream()) };
        cleared.or_fault("clearing device memory")?;
        Ok(Self { device: entries.device.clone(), rows, columns, strips })
    }

    /// Puts the packing of some rows on the stream: whole strips that follow those before, or the
    /// last ones.
    ///
    /// # Safety
    /// `weights` is device memory with the rows, dense, when the stream comes to it; that, `self`
    /// and `entries` live until the stream is done, and no other matrix uses `entries` before
    /// [`Packer::finish`].
    pub(super) unsafe fn pack(
        &self,
        rows: &Range<u64>,
        weights: CUdeviceptr,
        entries: &Entries,
        stream: &CudaStream,
    ) -> Result<()> {
        let strip = rows.start / STRIP_ROWS;
        let places = Places::new(self.strips, self.rows, self.columns, strip);
        let task = PackTask {
            weights,
            pitch: self.columns,
            rows: (rows.end - rows.start) as u32,
            columns: self.columns as u32,
            heads: places.heads,
            data: places.data,
            entries: entries.room.pointer(),
            capacity: entries.capacity(),
            total: entries.total.pointer(),
            reserved: 0,
        };
        // SAFETY: data and heads have room for all strips of the matrix, of which these are some;
        // exceptions that do not fit the capacity are not written; the rest is the caller's
        // promise.
        unsafe { self.device.linear_kernels()?.pack(stream, &task) }
    }

    /// Waits, and keeps the exceptions that there are, if they are no more than `most`; `together`
    /// with those of other matrices. What is put on the stream afterwards may use `entries` anew.
    /// `strips`: where the matrix is.
    pub(super) fn finish(
        self,
        strips: Region,
        entries: &mut Entries,
        most: u64,
        together: bool,
        stream: &CudaStream,
    ) -> Result<Outcome> {
        assert_eq!(strips.pointer(), self.strips, "the memory of the matrix");
        let total = entries.count(stream)?;
        if total > most.min(entries.capacity()) {
            return Ok(Outcome::TooMany(total));
        }
        let kept = entries.keep(total * ENTRY_BYTES, together)?;
        // SAFETY: there are as many bytes. Freeing them waits for the context.
        unsafe { entries.copy(total, kept.pointer(), stream) }?;
        let Self { device, rows, columns, .. } = self;
        Ok(Outcome::Fast(FastArrays::new(device, (rows, columns), strips, kept)))
    }
}
