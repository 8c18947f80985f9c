//! Sections on their way to the device: reader threads fill pinned buffers and start the copies.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{Device, fault::OrFault, pinned::Pinned};
use crate::{
    Result,
    constants::{CHECKSUM_CHUNK_BYTES, SECTION_ALIGNMENT, align},
    open::Shard,
};

/// Bytes that one pinned buffer holds: some checksum chunks.
const PIECE_BYTES: u64 = 4 * CHECKSUM_CHUNK_BYTES;
/// Buffers of each reader: one is filled while the others travel.
const BUFFERS: usize = 3;

/// Where each section of one shard that belongs to a block lies in the model's device memory, in bytes from its start.
pub(super) struct Placement {
    /// For each section of the directory; `None` for those of no block.
    pub(super) offsets: Vec<Option<u64>>,
}

/// Places the sections of all shards one after the other; the bytes in all.
pub(super) fn place(shards: &[Shard]) -> (Vec<Placement>, u64) {
    let mut end = 0u64;
    let placements = shards.iter().map(|shard| {
        let sections = shard.directory().sections.iter().map(|section| {
            section.block_index()?;
            let start = end;
            // No overflow: the sections of a file lie one behind the other below 2^63, and no machine has files for more.
            end = align(start + section.length.get(), SECTION_ALIGNMENT)?;
            Some(start)
        });
        Placement { offsets: sections.collect() }
    });
    (placements.collect(), end)
}

/// Part of a section, and its device address.
struct Piece<'m> {
    shard: &'m Shard,
    section: usize,
    range: Range<u64>,
    to: CUdeviceptr,
}

fn pieces<'m>(shards: &'m [Shard], placements: &[Placement], base: CUdeviceptr) -> Vec<Piece<'m>> {
    let mut pieces = Vec::new();
    for (shard, placement) in shards.iter().zip(placements) {
        for (section, offset) in placement.offsets.iter().enumerate() {
            let Some(offset) = offset else { continue };
            let length = shard.directory().sections[section].length.get();
            pieces.extend((0..length).step_by(PIECE_BYTES as usize).map(|start| Piece {
                shard,
                section,
                range: start..length.min(start + PIECE_BYTES),
                to: base + offset + start,
            }));
        }
    }
    pieces
}

/// Copies all sections of blocks to the device, checking checksums on the way, and waits.
///
/// # Safety
/// `base` is device memory of as many bytes as [`place`] said.
#[expect(unsafe_code, reason = "device addresses")]
pub(super) unsafe fn upload(
    device: &Device,
    shards: &[Shard],
    placements: &[Placement],
    base: CUdeviceptr,
    readers: usize,
) -> Result<()> {
    let pieces = pieces(shards, placements, base);
    let next = AtomicUsize::new(0);
    let readers = readers.clamp(1, pieces.len().max(1));
    let result = thread::scope(|scope| {
        let threads: Vec<_> = (0..readers)
            .map(|reader| {
                let (pieces, next) = (&pieces, &next);
                scope.spawn(move || {
                    let result = carry(device, pieces, next, &device.streams()[reader % 2]);
                    if result.is_err() {
                        next.store(pieces.len(), Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        let results = threads.into_iter().map(|thread| thread.join().expect("a reader does not panic"));
        results.collect::<Vec<_>>().into_iter().collect()
    });
    // Also after a failure: nothing may be on its way to memory that is freed.
    for stream in device.streams() {
        stream.synchronize().or_fault("copying to the GPU")?;
    }
    result
}

/// One reader: takes pieces until there are no more.
fn carry(device: &Device, pieces: &[Piece<'_>], next: &AtomicUsize, stream: &CudaStream) -> Result<()> {
    let mut ring: Vec<Pinned> = Vec::with_capacity(BUFFERS);
    let mut at = 0;
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(piece) = pieces.get(index) else { break };
        if ring.len() < BUFFERS {
            let kept = device.staging().pop();
            let buffer = kept.map_or_else(|| Pinned::new(device.context(), PIECE_BYTES as usize), Ok)?;
            at = ring.len();
            ring.push(buffer);
        }
        let buffer = &mut ring[at];
        at = (at + 1) % BUFFERS;
        let count = (piece.range.end - piece.range.start) as usize;
        piece.shard.read_chunks(piece.section, piece.range.clone(), &mut buffer.bytes()?[..count])?;
        // SAFETY: `to` lies in the memory that the caller of `upload` promises, which is not freed before `upload` returns, and it
        // synchronises the streams first.
        #[expect(unsafe_code, reason = "a device address")]
        let copied = unsafe { buffer.copy(count, piece.to, stream) };
        copied?;
    }
    device.staging().append(&mut ring);
    Ok(())
}
