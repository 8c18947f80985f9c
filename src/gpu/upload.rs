//! Sections on their way to a GPU, where they stay: reader threads fill pinned buffers and start
//! the copies.

use std::{
    num::NonZero,
    ops::Range,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{Device, fault::OrFault, pinned::Pinned};
use crate::{
    Error, Result,
    constants::CHECKSUM_CHUNK_BYTES,
    open::Shard,
    parallel,
    progress::{Observer, advance},
};

/// Bytes that one pinned buffer holds: some checksum chunks. The fastest of 1, 2, 4 and 8 MiB
/// (benches/record/2026-11-20-loader-h200.md).
pub(super) const PIECE_BYTES: u64 = 4 * CHECKSUM_CHUNK_BYTES;
/// Buffers of each reader: one is filled while the other one travels.
pub(super) const BUFFERS: usize = 2;
/// More readers than these slow each other down.
const MAX_READERS: usize = 12;

/// What goes to the device as it is, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Section(usize),
    Array(usize),
}

/// A section or an array, and the device address where it goes.
pub(super) struct Delivery<'m> {
    pub(super) shard: &'m Shard,
    pub(super) from: Origin,
    pub(super) to: CUdeviceptr,
}

/// Part of one, and its device address.
struct UploadPiece<'m> {
    shard: &'m Shard,
    from: Origin,
    range: Range<u64>,
    to: CUdeviceptr,
}

/// A reader for each core, as far as they help.
pub(super) fn default_readers() -> NonZero<usize> {
    let cores = thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    cores.min(NonZero::new(MAX_READERS).expect("more than none"))
}

fn pieces<'m>(deliveries: &[Delivery<'m>]) -> Vec<UploadPiece<'m>> {
    let cut = |delivery: &Delivery<'m>| {
        let &Delivery { shard, from, to } = delivery;
        let directory = shard.directory();
        let length = match from {
            Origin::Section(section) => directory.sections[section].length.get(),
            Origin::Array(array) => directory.arrays[array].length.get(),
        };
        parallel::cut(0..length, PIECE_BYTES, 1).map(move |range| UploadPiece {
            shard,
            from,
            to: to + range.start,
            range,
        })
    };
    deliveries.iter().flat_map(cut).collect()
}

impl UploadPiece<'_> {
    /// Reads it, checking its checksums.
    fn read(&self, out: &mut [u8]) -> Result<()> {
        match self.from {
            Origin::Section(section) => self.shard.read_chunks(section, self.range.clone(), out),
            Origin::Array(array) => {
                self.shard.read_array_part(array, &self.range, &self.range, out)
            }
        }
    }
}

/// Copies sections and arrays to the device, checking checksums on the way, and waits. Of chunks of
/// which other arrays have the rest, [`Shard::check_array`] tells once those were read. `stop` ends
/// it early, and is set where it fails; so does the observer.
///
/// # Safety
/// Each delivery goes to device memory with room for it.
#[expect(unsafe_code, reason = "device addresses")]
pub(super) unsafe fn upload(
    device: &Device,
    deliveries: &[Delivery<'_>],
    readers: NonZero<usize>,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<()> {
    let pieces = pieces(deliveries);
    let next = AtomicUsize::new(0);
    let readers = readers.get().min(pieces.len());
    let rings = rings(device, readers)?;
    let stream = device.copies();
    let result = thread::scope(|scope| {
        let threads: Vec<_> = rings
            .into_iter()
            .map(|ring| {
                let (pieces, next) = (&pieces, &next);
                scope.spawn(move || {
                    let result = carry(pieces, next, stop, ring, stream, observer);
                    if result.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    result.map(|ring| device.spare_buffers().extend(ring))
                })
            })
            .collect();
        let results =
            threads.into_iter().map(|thread| thread.join().expect("a reader does not panic"));
        first_cause(results)
    });
    // Also after a failure: nothing may be on its way to memory that is freed.
    stream.synchronize().or_fault("copying to the GPU")?;
    result
}

/// The first failure that is not merely the consequence of another one.
pub(super) fn first_cause(results: impl Iterator<Item = Result<()>>) -> Result<()> {
    let mut first = Ok(());
    for result in results.collect::<Vec<_>>() {
        if matches!(first, Ok(()) | Err(Error::Cancelled)) && result.is_err() {
            first = result;
        }
    }
    first
}

/// The buffers of one reader.
pub(super) type Ring = [Pinned; BUFFERS];

/// A ring for each reader: what is kept from loads before, and what is missing.
pub(super) fn rings(device: &Device, readers: usize) -> Result<Vec<Ring>> {
    let mut buffers: Vec<Pinned> = {
        let mut kept = device.spare_buffers();
        let from = kept.len().saturating_sub(readers * BUFFERS);
        kept.split_off(from)
    };
    let missing = readers * BUFFERS - buffers.len();
    buffers.extend(Pinned::several(device.context(), missing, PIECE_BYTES as usize)?);
    let mut buffers = buffers.into_iter();
    let ring = || std::array::from_fn(|_| buffers.next().expect("as many as counted"));
    Ok(std::iter::repeat_with(ring).take(readers).collect())
}

/// One reader: takes pieces until there are no more; gives its buffers back.
fn carry(
    pieces: &[UploadPiece<'_>],
    next: &AtomicUsize,
    stop: &AtomicBool,
    mut ring: Ring,
    stream: &CudaStream,
    observer: &dyn Observer,
) -> Result<Ring> {
    let mut at = 0;
    while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Cancelled);
        }
        let buffer = &mut ring[at];
        at = (at + 1) % BUFFERS;
        let count = (piece.range.end - piece.range.start) as usize;
        piece.read(&mut buffer.bytes()?[..count])?;
        // SAFETY: `to` lies in the memory that the caller of `upload` promises, which is not freed
        // before `upload` returns, and it synchronises the stream first.
        #[expect(unsafe_code, reason = "a device address")]
        let copied = unsafe { buffer.copy(count, piece.to, stream) };
        copied?;
        advance(observer, count as u64)?;
    }
    Ok(ring)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::{Delivery, Origin, PIECE_BYTES, first_cause, pieces};
    use crate::{Error, OpenOptions};

    #[test]
    fn pieces_cover_sections_at_chunks() {
        let folder = tempfile::tempdir().unwrap();
        let path = crate::demo::tiny_container(folder.path()).unwrap();
        let bytes = std::fs::read(path).unwrap();
        let model = OpenOptions::new()
            .open_readers(vec![(PathBuf::from("tiny"), Box::new(bytes))])
            .unwrap();
        let shard = &model.shards()[0];
        let count = shard.directory().sections.len();
        let deliveries: Vec<Delivery<'_>> = (0..count)
            .map(|section| Delivery {
                shard,
                from: Origin::Section(section),
                to: (section as u64) << 40,
            })
            .collect();
        let mut ends = vec![0; count];
        for piece in pieces(&deliveries) {
            let Origin::Section(section) = piece.from else { unreachable!() };
            assert_eq!(piece.range.start, ends[section]);
            assert!(piece.range.start.is_multiple_of(PIECE_BYTES) && !piece.range.is_empty());
            assert_eq!(piece.to, ((section as u64) << 40) + piece.range.start);
            ends[section] = piece.range.end;
        }
        for (end, section) in ends.iter().zip(&shard.directory().sections) {
            assert_eq!(*end, section.length.get());
        }
    }

    #[test]
    fn the_cause_is_reported_and_not_its_consequences() {
        let results = [
            Ok(()),
            Err(Error::Cancelled),
            Err(Error::corrupt("x", 0, "y")),
            Err(Error::Cancelled),
        ];
        assert!(matches!(first_cause(results.into_iter()), Err(Error::Corrupt { .. })));
        assert!(first_cause([Ok(()), Ok(())].into_iter()).is_ok());
        assert!(matches!(first_cause([Err(Error::Cancelled)].into_iter()), Err(Error::Cancelled)));
    }
}
