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

/// Copies arrays that [`Tiles::cut`] makes to the device, and waits.
///
/// # Safety
/// Each address has device memory of its length.
#[expect(unsafe_code, reason = "device addresses")]
unsafe fn upload_cuts(
    device: &Device,
    wanted: &[&(Tiles<'_>, &CutArrays<'_>)],
    stop: &AtomicBool,
    count_bytes: &(dyn Fn(u64) -> Result<()> + Sync),
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let carry = |ring: &mut Ring| -> Result<()> {
        let mut turn = 0;
        while let Some((tiles, cut)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
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
                    count_bytes(piece.len() as u64)?;
                }
            }
        }
        Ok(())
    };
    read(device, readers_each(1).get().min(wanted.len()), stop, carry)
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

impl CutArrays<'_> {
    fn is_whole(&self, tiles: &Tiles<'_>) -> bool {
        let ((rows, columns), lengths) = (tiles.shape(), self.to.map(|(_, length)| length));
        self.rows == (0..rows) && self.columns == (0..columns) && lengths == tiles.array_lengths()
    }
}

impl Model {
    /// Copies the four arrays of rows and columns of matrices in tiles to device memory of the
    /// caller. Checksums, codebooks and offsets are checked. Done when it returns. Whole matrices
    /// come first, and fastest; of the others, the arrays of as many are in host memory as there
    /// are cores, at most 12.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a tensor that does not exist or is not such a matrix, and for rows
    /// or columns that [`Tiles::cut`] does not take; [`Error::Corrupt`], also if an array has
    /// another length than was told; [`Error::Io`], [`Error::Gpu`], [`Error::Cancelled`].
    ///
    /// # Safety
    /// Each address has device memory of its length, which nothing else uses meanwhile.
    #[expect(unsafe_code, reason = "device addresses")]
    pub unsafe fn upload_arrays(
        &self,
        device: &Device,
        wanted: &[CutArrays<'_>],
        observer: &dyn Observer,
    ) -> Result<()> {
        observer.begin(wanted.iter().flat_map(|cut| cut.to).map(|(_, length)| length).sum());
        observer.enter(Stage::Load);
        let found = wanted.iter().map(|cut| Ok((self.tiles(cut.name)?, cut)));
        let found = found.collect::<Result<Vec<(Tiles<'_>, &CutArrays<'_>)>>>()?;
        let (whole, cuts): (Vec<_>, Vec<_>) =
            found.iter().partition(|(tiles, cut)| cut.is_whole(tiles));
        let arrays = whole.iter().flat_map(|(tiles, cut)| {
            let (shard, first) = (tiles.target().shard(), tiles.target().record().array_range());
            let delivery = |(array, &(to, _))| Delivery { shard, from: Origin::Array(array), to };
            first.zip(&cut.to).map(delivery)
        });
        let (stop, count) = (AtomicBool::new(false), |bytes| advance(observer, bytes));
        // SAFETY: the caller's promise.
        unsafe { upload(device, &arrays.collect::<Vec<_>>(), readers_each(1), &stop, &count) }?;
        // Checks also the chunks that other arrays share.
        whole.par_iter().try_for_each(|(tiles, _)| tiles.check())?;
        // SAFETY: the caller's promise.
        unsafe { upload_cuts(device, &cuts, &stop, &count) }
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
