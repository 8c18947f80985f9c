//! A matrix on its way from BF16 to the fast layout: some strips at a time, in order.
#![expect(unsafe_code, reason = "launches and copies, each with its proof")]

use std::ops::Range;

use cudarc::driver::{CudaStream, result, sys::CUdeviceptr};

use super::{
    fast::{FastArrays, Places},
    task::{ENTRY_BYTES, PackTask, STRIP_ROWS},
};
use crate::{
    Result,
    gpu::{Device, fault::OrFault, memory::Buffer},
};

/// What becomes of a matrix that was to be fast.
#[derive(Debug)]
pub(in crate::gpu) enum Outcome {
    Fast(FastArrays),
    /// It has so many exceptions.
    TooMany(u64),
    /// A strip of it is more than is decoded at once.
    TooWide,
}

/// Room for exceptions until they are counted, for one matrix after the other.
#[derive(Debug)]
pub(super) struct Entries {
    entries: Buffer,
    /// How many there are so far.
    total: Buffer,
}

impl Entries {
    /// For at most so many.
    pub(super) fn new(device: &Device, most: u64) -> Result<Self> {
        let total = device.allocate(size_of::<u32>() as u64, "a counter of exceptions")?;
        Ok(Self { entries: device.allocate(most * ENTRY_BYTES, "exceptions")?, total })
    }

    fn capacity(&self) -> u64 {
        self.entries.bytes() / ENTRY_BYTES
    }
}

/// A matrix of which some strips are packed.
#[derive(Debug)]
pub(super) struct Packer {
    device: Device,
    rows: u64,
    columns: u64,
    strips: Buffer,
}

impl Packer {
    /// Allocates the matrix, and puts the counter's beginning on the stream.
    pub(super) fn new(
        device: &Device,
        (rows, columns): (u64, u64),
        entries: &Entries,
        stream: &CudaStream,
    ) -> Result<Self> {
        let strips = FastArrays::allocate(device, rows, columns)?;
        let (total, bytes) = (entries.total.pointer(), entries.total.bytes() as usize);
        // SAFETY: the word is the caller's, who keeps it until the stream is done.
        let cleared = unsafe { result::memset_d8_async(total, 0, bytes, stream.cu_stream()) };
        cleared.or_fault("clearing device memory")?;
        Ok(Self { device: device.clone(), rows, columns, strips })
    }

    /// Puts the packing of some rows on the stream: whole strips that follow those before, or the last ones.
    ///
    /// # Safety
    /// `weights` is device memory with the rows, dense, when the stream comes to it; that, `self` and `entries`
    /// live until the stream is done, and no other matrix uses `entries` before [`Packer::finish`].
    pub(super) unsafe fn pack(
        &self,
        rows: &Range<u64>,
        weights: CUdeviceptr,
        entries: &Entries,
        stream: &CudaStream,
    ) -> Result<()> {
        let strip = rows.start / STRIP_ROWS;
        let places = Places::new(self.strips.pointer(), self.rows, self.columns, strip);
        let task = PackTask {
            weights,
            pitch: self.columns,
            rows: (rows.end - rows.start) as u32,
            columns: self.columns as u32,
            heads: places.heads,
            data: places.data,
            entries: entries.entries.pointer(),
            capacity: entries.capacity(),
            total: entries.total.pointer(),
            reserved: 0,
        };
        // SAFETY: data and heads have room for all strips of the matrix, of which these are some; exceptions
        // that do not fit the capacity are not written; the rest is the caller's promise.
        unsafe { self.device.linear_kernels()?.pack(stream, &task) }
    }

    /// Waits, and keeps the exceptions that there are, if they are no more than `most`. What is put on the
    /// stream afterwards may use `entries` anew.
    pub(super) fn finish(self, entries: &Entries, most: u64, stream: &CudaStream) -> Result<Outcome> {
        let mut total = [0_u32];
        entries.total.read(stream, &mut total)?;
        let total = u64::from(total[0]);
        if total > most.min(entries.capacity()) {
            return Ok(Outcome::TooMany(total));
        }
        let kept = self.device.allocate(total * ENTRY_BYTES, "exceptions")?;
        if total > 0 {
            let (to, from, bytes) = (kept.pointer(), entries.entries.pointer(), kept.bytes() as usize);
            // SAFETY: both have as many bytes. Freeing either waits for the context.
            let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) };
            copied.or_fault("copying on the GPU")?;
        }
        let Self { device, rows, columns, strips } = self;
        Ok(Outcome::Fast(FastArrays { device, rows, columns, strips, entries: kept }))
    }
}
