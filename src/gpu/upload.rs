//! Brings sections and arrays to a GPU: threads fill pinned buffers and start the copies.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::{num::NonZero, ops::Range};

use cudarc::driver::sys::CUdeviceptr;
use rayon::prelude::*;

use super::{device::Device, fault::OrFault, pinned::Pinned};
use crate::open::{Cpu, Decoder, Shard, Tiles};
use crate::progress::{Observer, Stage, advance};
use crate::{Error, Model, Result, constants::CHECKSUM_CHUNK_BYTES, parallel};

/// Bytes of one pinned buffer, several checksum chunks. The fastest of 1, 2, 4 and 8 MiB
/// (benches/record/2026-11-20-loader-h200.md).
pub(super) const PIECE_BYTES: u64 = 4 * CHECKSUM_CHUNK_BYTES;
/// Buffers per reader: one is filled while the other one travels.
pub(super) const BUFFERS: usize = 2;
/// More readers than these slow each other down.
const MAX_READERS: usize = 12;

/// A section or an array that goes to the device as it is, or a tensor that is decoded before, by
/// its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Section(usize),
    Array(usize),
    Decoded(usize),
}

/// A section, an array or a tensor, and its device address.
pub(super) struct Delivery<'m> {
    pub(super) shard: &'m Shard,
    pub(super) from: Origin,
    pub(super) to: CUdeviceptr,
}

/// Rows and columns of a matrix in tiles, as [`Tiles::cut`] takes them, and the device address and
/// length of each array.
#[derive(Clone, Debug)]
pub struct CutArrays<'n> {
    /// The name of the tensor.
    pub name: &'n str,
    /// Rows of the matrix.
    pub rows: Range<u64>,
    /// Columns of the matrix.
    pub columns: Range<u64>,
    /// In the order of [`Tiles::array`].
    pub to: [(CUdeviceptr, u64); 4],
}

/// Readers per GPU: one per core for all GPUs together, but no more than help.
pub(super) fn readers_each(gpus: usize) -> NonZero<usize> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    NonZero::new(cores.min(MAX_READERS) / gpus.max(1)).unwrap_or(NonZero::<usize>::MIN)
}

fn pieces<'d>(deliveries: &'d [Delivery<'d>]) -> Vec<(&'d Delivery<'d>, Range<u64>)> {
    let cut = |of: &'d Delivery<'d>| {
        let directory = of.shard.directory();
        let length = match of.from {
            Origin::Section(section) => directory.sections[section].length.get(),
            Origin::Array(array) => directory.arrays[array].length.get(),
            Origin::Decoded(tensor) => of.shard.tensor_at(tensor).byte_length().unwrap_or(0),
        };
        parallel::cut(0..length, PIECE_BYTES, 1).map(move |range| (of, range))
    };
    deliveries.iter().flat_map(cut).collect()
}

impl Delivery<'_> {
    fn read(&self, range: &Range<u64>, out: &mut [u8]) -> Result<()> {
        match self.from {
            Origin::Section(section) => self.shard.read_chunks(section, range.clone(), out),
            Origin::Array(array) => self.shard.read_array_part(array, range, range, out),
            Origin::Decoded(tensor) => {
                Cpu.prepare(self.shard.tensor_at(tensor))?.read(range.clone(), out)
            }
        }
    }
}

/// Copies sections and arrays to the device, checks checksums on the way, and waits.
/// [`Shard::check_array`] checks chunks that also hold parts of other arrays, once those parts are
/// read. `stop` ends the upload early; a failure sets it. `count_bytes` gets the number of bytes
/// copied; its error ends the upload too.
///
/// # Safety
/// Each delivery goes to device memory with room for it.
#[expect(unsafe_code, reason = "device addresses")]
pub(super) unsafe fn upload(
    device: &Device,
    deliveries: &[Delivery<'_>],
    readers: NonZero<usize>,
    stop: &AtomicBool,
    count_bytes: &(dyn Fn(u64) -> Result<()> + Sync),
) -> Result<()> {
    let pieces = pieces(deliveries);
    let next = AtomicUsize::new(0);
    // One reader takes pieces until none are left.
    let carry = |ring: &mut Ring| -> Result<()> {
        for at in (0..BUFFERS).cycle() {
            let Some((of, range)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Cancelled);
            }
            let (buffer, count) = (&mut ring[at], (range.end - range.start) as usize);
            of.read(range, &mut buffer.bytes()?[..count])?;
            // SAFETY: the address lies in the memory that the caller promises, which is not freed
            // before this returns, and it synchronises the stream first.
            unsafe { buffer.copy(count, of.to + range.start, device.copies()) }?;
            count_bytes(count as u64)?;
        }
        Ok(())
    };
    read(device, readers.get().min(pieces.len()), stop, carry)
}

/// Runs readers on threads, each with a ring, and waits for them and their copies. A failure of one
/// sets `stop`, which the others look for.
fn read(
    device: &Device,
    readers: usize,
    stop: &AtomicBool,
    carry: impl Fn(&mut Ring) -> Result<()> + Sync,
) -> Result<()> {
    let rings = rings(device, readers)?;
    let reader = |mut ring: Ring| {
        let result = carry(&mut ring);
        if result.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        result.map(|()| device.spare_buffers().extend(ring))
    };
    let result = thread::scope(|scope| {
        let reader = &reader;
        join_all(rings.into_iter().map(|ring| scope.spawn(move || reader(ring))).collect())
    });
    // Waits after a failure too: no copy may still write to memory that is freed.
    device.copies().synchronize().or_fault("copying to the GPU")?;
    result
}

/// Waits for threads; returns their first failure that is not merely the consequence of another
/// one.
pub(super) fn join_all(threads: Vec<ScopedJoinHandle<'_, Result<()>>>) -> Result<()> {
    let join = |thread: ScopedJoinHandle<'_, Result<()>>| thread.join().expect("it does not panic");
    parallel::first_cause(threads.into_iter().map(join)).map(drop)
}

pub(super) type Ring = [Pinned; BUFFERS];

/// Makes a ring for each reader from the buffers of earlier loads, and allocates missing ones.
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

impl Model {
    /// Copies the four arrays of matrices in tiles of 32 x 256 to device memory of the caller, each
    /// array to its address, in the order of [`Tiles::array`]. Checksums, codebooks and
    /// offsets are checked. Done when it returns.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a tensor that does not exist or is not such a matrix;
    /// [`Error::Corrupt`],
    /// [`Error::Io`], [`Error::Gpu`], [`Error::Cancelled`].
    ///
    /// # Safety
    /// Each address has device memory for its array
    /// ([`Tiles::array_lengths`]), which nothing else uses meanwhile.
    #[expect(unsafe_code, reason = "device addresses")]
    pub unsafe fn upload_arrays(
        &self,
        device: &Device,
        wanted: &[(&str, [CUdeviceptr; 4])],
        observer: &dyn Observer,
    ) -> Result<()> {
        let find = |&(name, to): &(&str, [CUdeviceptr; 4])| Ok((self.tiles(name)?, to));
        let found = wanted.iter().map(find).collect::<Result<Vec<_>>>()?;
        observer.begin(found.iter().flat_map(|(tiles, _)| tiles.array_lengths()).sum());
        observer.enter(Stage::Load);
        let mut deliveries = Vec::new();
        for (tiles, to) in &found {
            let tensor = tiles.target();
            let first = tensor.record().array_range().start;
            deliveries.extend(to.iter().zip(first..).map(|(&to, array)| Delivery {
                shard: tensor.shard(),
                from: Origin::Array(array),
                to,
            }));
        }
        let (stop, count) = (AtomicBool::new(false), |bytes| advance(observer, bytes));
        // SAFETY: the caller's promise.
        unsafe { upload(device, &deliveries, readers_each(1), &stop, &count) }?;
        // Checks also the chunks that other arrays share.
        found.par_iter().try_for_each(|(tiles, _)| tiles.check())
    }

    /// Copies arrays that [`Tiles::cut`] makes, as [`Model::upload_arrays`] copies whole ones. The
    /// arrays of as many matrices are in host memory as there are cores, at most 12.
    ///
    /// # Errors
    /// Same as [`Model::upload_arrays`]; [`Error::Parameter`] for other rows or columns;
    /// [`Error::Corrupt`] if an array has another length, as when the file has changed.
    ///
    /// # Safety
    /// Each address has device memory of its length, which nothing else uses meanwhile.
    #[expect(unsafe_code, reason = "device addresses")]
    pub unsafe fn upload_cuts(
        &self,
        device: &Device,
        wanted: &[CutArrays<'_>],
        observer: &dyn Observer,
    ) -> Result<()> {
        let find = |cut: &CutArrays<'_>| self.tiles(cut.name);
        let found = wanted.iter().map(find).collect::<Result<Vec<_>>>()?;
        let (stop, next) = (AtomicBool::new(false), AtomicUsize::new(0));
        let carry = |ring: &mut Ring| -> Result<()> {
            let mut turn = 0;
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some((tiles, cut)) = found.get(at).zip(wanted.get(at)) else { return Ok(()) };
                let arrays = tiles.cut(cut.rows.clone(), cut.columns.clone())?;
                for (array, (to, length)) in arrays.iter().zip(cut.to) {
                    Error::unless(array.len() as u64 == length, || {
                        let problem = format!("{} bytes of {length} that were told", array.len());
                        tiles.target().locate(Error::corrupt("a cut", 0, problem))
                    })?;
                    let starts = (to..).step_by(PIECE_BYTES as usize);
                    for (piece, to) in array.chunks(PIECE_BYTES as usize).zip(starts) {
                        if stop.load(Ordering::Relaxed) {
                            return Err(Error::Cancelled);
                        }
                        let buffer = &mut ring[turn % BUFFERS];
                        turn += 1;
                        buffer.bytes()?[..piece.len()].copy_from_slice(piece);
                        // SAFETY: as in `upload`.
                        unsafe { buffer.copy(piece.len(), to, device.copies()) }?;
                        advance(observer, piece.len() as u64)?;
                    }
                }
            }
        };
        read(device, readers_each(1).get().min(wanted.len()), &stop, carry)
    }

    fn tiles(&self, name: &str) -> Result<Tiles<'_>> {
        Tiles::of(&self.tensor(name)?)?.ok_or_else(|| {
            let problem = format!("there is no matrix {name:?} in tiles of 32 x 256");
            Error::parameter(problem, "ask Tiles::of first")
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::{Delivery, Origin, PIECE_BYTES, pieces};
    use crate::OpenOptions;

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
            .map(|section| Delivery { shard, from: Origin::Section(section), to: 0 })
            .collect();
        let mut ends = vec![0; count];
        for (of, range) in pieces(&deliveries) {
            let Origin::Section(section) = of.from else { unreachable!() };
            assert_eq!(range.start, ends[section]);
            assert!(range.start.is_multiple_of(PIECE_BYTES) && !range.is_empty());
            ends[section] = range.end;
        }
        for (end, section) in ends.iter().zip(&shard.directory().sections) {
            assert_eq!(*end, section.length.get());
        }
    }
}
