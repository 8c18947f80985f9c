//! Matrices on their way from containers to the fast layout, of which nothing else is ever on the
//! GPU.
//!
//! ```text
//! container → pinned buffer → slot: task, records, plane, bits → weights → packed strips
//!   readers, any order          one copy for some strips          one after the other, in order
//! ```
//!
//! Device memory besides the result: two slots for each reader, decoded weights of one slot,
//! exceptions of one matrix, and decode tables; less than 256 MB.
#![expect(unsafe_code, reason = "copies and launches, each with its proof")]

use std::{
    collections::BTreeMap,
    num::NonZero,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
};

use cudarc::driver::{CudaEvent, CudaStream, sys::CUdeviceptr};
use zerocopy::IntoBytes;

use super::{
    packer::{Entries, Outcome, Packer},
    task::{ENTRY_BYTES, STRIP_ROWS, good_exceptions},
};
use crate::{
    Model, Result, Tensor,
    constants::ARRAY_ALIGNMENT,
    encoding::tile::{self, Sizes},
    format::Coded,
    gpu::{
        Device, Status,
        coding::TILE_KERNEL,
        fault::OrFault,
        memory::{Buffer, Region},
        module::Launch,
        pinned::Pinned,
        stored::{CodedTensor, StoredTile, Tensors},
        task::{Task, TileArrays, TileSource, TileTask, Tiles},
        upload::{BUFFERS, PIECE_BYTES, Ring, rings},
    },
    parallel,
    progress::{Observer, advance},
};

/// Slots for each reader: one is read for, in the other strips that arrived before others wait.
const SLOTS: usize = 2;
/// Where an array begins in a slot, and the slot's first one.
const PLACE: u64 = 256;
/// Bits are copied to shared memory by this many bytes.
const COPY_BYTES: u64 = 16;
/// The most columns of a matrix that becomes fast while it is loaded. With more, a strip might not
/// fit a slot.
const MOST_COLUMNS: u64 = 1 << 16;

/// What all matrices of a load have in common.
pub(in crate::gpu) struct FastLoad<'l> {
    pub(in crate::gpu) model: &'l Model,
    pub(in crate::gpu) stored: &'l Tensors,
    pub(in crate::gpu) readers: NonZero<usize>,
    pub(in crate::gpu) observer: &'l dyn Observer,
}

/// A matrix that shall be fast.
pub(in crate::gpu) struct Wanted<'m> {
    pub(in crate::gpu) tensor: Tensor<'m>,
    pub(in crate::gpu) stored: &'m StoredTile,
    /// The device address of its decode table.
    pub(in crate::gpu) table: CUdeviceptr,
    /// Where it goes: memory of [`FastArrays::strips_bytes`](super::FastArrays::strips_bytes).
    pub(in crate::gpu) strips: Region,
}

/// The sizes of a tensor that becomes fast while it is loaded, if it has not too many exceptions.
pub(in crate::gpu) fn fast_sizes(tensor: &Tensor<'_>) -> Result<Option<Sizes>> {
    let Some(Coded::Tile(sizes)) = tensor.coded()? else { return Ok(None) };
    let geometry = sizes.geometry();
    let is_matrix = geometry.is_matrix_of(&tensor.shape())
        && geometry.columns() <= MOST_COLUMNS
        && u32::try_from(geometry.elements()).is_ok();
    Ok(is_matrix.then_some(sizes))
}

/// Device memory of as many exceptions of a matrix as are good.
pub(in crate::gpu) fn most_exceptions_bytes(sizes: &Sizes) -> u64 {
    (ENTRY_BYTES * good_exceptions(sizes.elements())).next_multiple_of(ARRAY_ALIGNMENT)
}

/// Some strips of a matrix, as they travel.
struct Job {
    /// Its index among those wanted.
    matrix: usize,
    strips: Range<u64>,
    /// Bytes of the arrays.
    records: Range<u64>,
    plane: Range<u64>,
    bits: Range<u64>,
    is_last: bool,
}

/// Where what a job takes lies in its slot, in bytes from the slot's start.
struct SlotLayout {
    records: Range<u64>,
    plane: Range<u64>,
    bits: Range<u64>,
    /// Of the bitstream, where the slot's part begins.
    first_bits: u64,
}

impl Job {
    fn layout(&self) -> SlotLayout {
        let after = |end: u64, bytes: u64| {
            let start = end.next_multiple_of(PLACE);
            start..start + bytes
        };
        let first_bits = self.bits.start / COPY_BYTES * COPY_BYTES;
        let records = after(size_of::<Task>() as u64, self.records.end - self.records.start);
        let plane = after(records.end, self.plane.end - self.plane.start);
        let bits = after(plane.end, self.bits.end.next_multiple_of(COPY_BYTES) - first_bits);
        SlotLayout { records, plane, bits, first_bits }
    }

    /// Its records, without the one that the next job has, too.
    fn counted_records(&self) -> Range<u64> {
        let both = if self.is_last { 0 } else { tile::RECORD_BYTES as u64 };
        self.records.start..self.records.end - both
    }

    /// Bytes of the container.
    fn bytes(&self) -> u64 {
        let all = [self.counted_records(), self.plane.clone(), self.bits.clone()];
        all.into_iter().map(|range| range.end - range.start).sum()
    }

    fn rows(&self, sizes: &Sizes) -> Range<u64> {
        self.strips.start * STRIP_ROWS..sizes.geometry().rows().min(self.strips.end * STRIP_ROWS)
    }
}

/// Cuts a matrix into jobs that fit a slot; none if a strip does not.
fn cut(matrix: usize, wanted: &Wanted<'_>) -> Result<Option<Vec<Job>>> {
    let sizes = wanted.stored.sizes();
    let array = wanted.tensor.record().array_range().start + 1;
    let records = wanted.tensor.shard().read_array(array, 0..sizes.records_bytes())?;
    let job = |strips: Range<u64>| -> Result<Job> {
        let of = sizes.records_of(&strips)?;
        let bits = sizes.bitstream_of(&records[of.start as usize..of.end as usize], &strips);
        let is_last = strips.end == sizes.strip_count();
        let bits = bits.map_err(|error| wanted.tensor.locate(error))?;
        Ok(Job { matrix, plane: sizes.plane_of(&strips)?, records: of, bits, strips, is_last })
    };
    let (mut jobs, mut next) = (Vec::new(), 0);
    while next < sizes.strip_count() {
        let mut best = job(next..next + 1)?;
        if best.layout().bits.end > PIECE_BYTES {
            return Ok(None);
        }
        while best.strips.end < sizes.strip_count() {
            let more = job(next..best.strips.end + 1)?;
            if more.layout().bits.end > PIECE_BYTES {
                break;
            }
            best = more;
        }
        next = best.strips.end;
        jobs.push(best);
    }
    Ok(Some(jobs))
}

impl Wanted<'_> {
    /// Reads a job's part of the arrays into a buffer, as it shall lie in the slot at this device
    /// address; its bytes.
    fn fill(&self, job: &Job, slot: CUdeviceptr, out: &mut [u8]) -> Result<usize> {
        let layout = job.layout();
        let array = self.tensor.record().array_range().start;
        let place = |range: &Range<u64>| range.start as usize..range.end as usize;
        let read = |array, range: &Range<u64>, counted: &Range<u64>, to: &mut [u8]| {
            self.tensor.shard().read_array_part(array, range, counted, to)
        };
        out[..size_of::<Task>()].copy_from_slice(self.task(job, &layout, slot).as_bytes());
        let records = &mut out[place(&layout.records)];
        read(array + 1, &job.records, &job.counted_records(), records)?;
        tile::rebase(records, 8 * layout.first_bits);
        let bits = layout.first_bits..layout.first_bits + (layout.bits.end - layout.bits.start);
        read(array + 2, &bits, &job.bits, &mut out[place(&layout.bits)])?;
        read(array + 3, &job.plane, &job.plane, &mut out[place(&layout.plane)])?;
        Ok(layout.bits.end as usize)
    }

    /// Decodes a job's strips, which are a tensor of their own in the slot.
    fn task(&self, job: &Job, layout: &SlotLayout, slot: CUdeviceptr) -> Task {
        let sizes = self.stored.sizes();
        let (rows, columns) = (job.rows(sizes), sizes.geometry().columns());
        let rows = rows.end - rows.start;
        let across = sizes.geometry().strip_tiles();
        let source = TileSource {
            arrays: TileArrays {
                records: slot + layout.records.start,
                bitstream: slot + layout.bits.start,
                plane: slot + layout.plane.start,
                table: self.table,
            },
            bits_bytes: layout.bits.end - layout.bits.start,
            rows,
            columns,
            tiles_across: across,
        };
        let tiles = Tiles { rows: 0..job.strips.end - job.strips.start, columns: 0..across };
        TileTask::new(&source, &(0..rows * columns), &(0..columns), &tiles, 0, 0).into()
    }
}

/// Places on the device in which strips arrive.
struct Slots {
    memory: Region,
    /// For each slot: the last copy into it is done.
    filled: Vec<CudaEvent>,
    /// For each slot: what was decoded from it is done.
    used: Vec<CudaEvent>,
}

impl Slots {
    fn new(device: &Device, memory: Region) -> Result<Self> {
        let count = memory.bytes() / PIECE_BYTES;
        let events = || (0..count).map(|_| device.new_event()).collect::<Result<Vec<_>>>();
        Ok(Self { filled: events()?, used: events()?, memory })
    }

    fn count(&self) -> usize {
        self.used.len()
    }

    fn address(&self, slot: usize) -> CUdeviceptr {
        self.memory.pointer() + slot as u64 * PIECE_BYTES
    }
}

/// A job whose copy is on its way: its index, and its slot.
type Arrival = Result<(usize, usize)>;

/// What the readers share.
struct Readers<'u> {
    device: &'u Device,
    matrices: &'u [Wanted<'u>],
    jobs: &'u [Job],
    next: AtomicUsize,
    slots: &'u Slots,
    free: Mutex<Receiver<usize>>,
    observer: &'u dyn Observer,
}

impl Readers<'_> {
    /// One reader: takes jobs until there are no more, or nobody wants them; gives its buffers
    /// back.
    fn run(&self, mut ring: Ring, arrived: &Sender<Arrival>) -> Ring {
        let mut at = 0;
        // First a slot, then a job: so the first of all jobs that have not arrived has one.
        while let Some(slot) = self.free_slot() {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = self.jobs.get(number) else { break };
            let sent = self.send(job, slot, &mut ring[at]).map(|()| (number, slot));
            at = (at + 1) % BUFFERS;
            let failed = sent.is_err();
            if arrived.send(sent).is_err() || failed {
                break;
            }
        }
        ring
    }

    fn free_slot(&self) -> Option<usize> {
        parallel::lock(&self.free).recv().ok()
    }

    /// Reads a job's bytes and starts to copy them into a slot, after what is decoded from it.
    fn send(&self, job: &Job, slot: usize, buffer: &mut Pinned) -> Result<()> {
        let (address, stream) = (self.slots.address(slot), self.device.copies());
        let count = self.matrices[job.matrix].fill(job, address, buffer.bytes()?)?;
        let action = "ordering copies and kernels";
        stream.wait(&self.slots.used[slot]).or_fault(action)?;
        // SAFETY: a slot has room for every job, and only its owner copies into it. Freeing it
        // waits for the context.
        unsafe { buffer.copy(count, address, stream) }?;
        self.slots.filled[slot].record(stream).or_fault(action)?;
        advance(self.observer, job.bytes())
    }
}

/// Decodes and packs what has arrived.
struct Packing<'u> {
    device: &'u Device,
    matrices: &'u [Wanted<'u>],
    slots: &'u Slots,
    stream: Arc<CudaStream>,
    weights: Region,
    entries: Entries,
    status: Status,
    current: Option<Packer>,
}

impl Packing<'_> {
    /// All jobs, in their order; gives back slots as soon as others may be copied into them. For
    /// each matrix what became of it.
    fn run(
        &mut self,
        jobs: &[Job],
        arrivals: &Receiver<Arrival>,
        free: &Sender<usize>,
    ) -> Result<Vec<(usize, Outcome)>> {
        let (mut early, mut next, mut outcomes) = (BTreeMap::new(), 0, Vec::new());
        while next < jobs.len() {
            // All readers are gone only after one has sent its failure.
            let Ok(arrival) = arrivals.recv() else { return Err(crate::Error::Cancelled) };
            let (number, slot) = arrival?;
            early.insert(number, slot);
            while let Some(slot) = early.remove(&next) {
                outcomes.extend(self.take(&jobs[next], slot, free)?);
                next += 1;
            }
        }
        self.status.check(&self.stream)?;
        Ok(outcomes)
    }

    /// Puts the decoding and packing of one job on the stream; with the last of a matrix, waits.
    fn take(
        &mut self,
        job: &Job,
        slot: usize,
        free: &Sender<usize>,
    ) -> Result<Option<(usize, Outcome)>> {
        let wanted = &self.matrices[job.matrix];
        let (sizes, action) = (wanted.stored.sizes(), "ordering copies and kernels");
        let (geometry, weights) = (sizes.geometry(), self.weights.pointer());
        let packer = if let Some(packer) = self.current.take() {
            packer
        } else {
            let size = (geometry.rows(), geometry.columns());
            Packer::new(size, wanted.strips.pointer(), &self.entries, &self.stream)?
        };
        let kernels = self.device.kernels();
        let launch = Launch {
            kernel: TILE_KERNEL,
            shape: kernels.shape(TILE_KERNEL, wanted.stored.staged_bytes())?,
            first_task: 0,
            task_count: 1,
            unit_count: (job.strips.end - job.strips.start) * geometry.strip_tiles(),
        };
        self.stream.wait(&self.slots.filled[slot]).or_fault(action)?;
        let (task, status) = (self.slots.address(slot), self.status.device_pointer());
        // SAFETY: the slot begins with the task of its arrays, which have the sizes that it says;
        // `weights` has room for the largest job, and this stream alone uses it. All of it is freed
        // after the context is idle.
        unsafe { kernels.decode(&self.stream, &launch, task, weights, status) }?;
        self.slots.used[slot].record(&self.stream).or_fault(action)?;
        // Readers that are gone want no slot.
        free.send(slot).ok();
        // SAFETY: the weights are there, after the decoding on the same stream; jobs come in order,
        // and one matrix after the other.
        unsafe { packer.pack(&job.rows(sizes), weights, &self.entries, &self.stream) }?;
        if !job.is_last {
            self.current = Some(packer);
            return Ok(None);
        }
        let most = good_exceptions(sizes.elements());
        Ok(Some((
            job.matrix,
            packer.finish(wanted.strips.clone(), &mut self.entries, most, true, &self.stream)?,
        )))
    }
}

/// Loads matrices in the fast layout, and waits; for each what became of it, and the allocations of
/// their exceptions. The same bytes in every run.
pub(in crate::gpu) fn upload(
    device: &Device,
    matrices: &[Wanted<'_>],
    load: &FastLoad<'_>,
) -> Result<(Vec<Outcome>, Vec<Arc<Buffer>>)> {
    let mut jobs = Vec::new();
    for (matrix, wanted) in matrices.iter().enumerate() {
        jobs.extend(cut(matrix, wanted)?.into_iter().flatten());
    }
    let count = load.readers.get().min(jobs.len());
    let rings = rings(device, count)?;
    let slot_bytes = (SLOTS * count) as u64 * PIECE_BYTES;
    let weight_bytes =
        2 * jobs.iter().map(|job| job.plane.end - job.plane.start).max().unwrap_or(0);
    let most =
        matrices.iter().map(|wanted| good_exceptions(wanted.stored.sizes().elements())).max();
    let most = most.unwrap_or(0);
    // One allocation: each takes the driver longer to free than the GPU has work for meanwhile.
    let bytes = slot_bytes + weight_bytes.next_multiple_of(ARRAY_ALIGNMENT) + Entries::bytes(most);
    let mut memory = Region::from(device.allocate(bytes, "matrices that arrive")?);
    let slots = Slots::new(device, memory.take(slot_bytes))?;
    let mut packing = Packing {
        device,
        matrices,
        slots: &slots,
        stream: device.new_stream()?,
        weights: memory.take(weight_bytes),
        entries: Entries::within(device, most, &mut memory),
        status: Status::new(device)?,
        current: None,
    };
    let (arrived, arrivals) = mpsc::channel();
    let (free, taken) = mpsc::channel();
    (0..slots.count()).for_each(|slot| free.send(slot).expect("the receiver is here"));
    let (next, taken) = (AtomicUsize::new(0), Mutex::new(taken));
    let observer = load.observer;
    let readers =
        Readers { device, matrices, jobs: &jobs, next, slots: &slots, free: taken, observer };
    let result = thread::scope(|scope| {
        let spawn = |ring| {
            let (readers, arrived) = (&readers, arrived.clone());
            scope.spawn(move || readers.run(ring, &arrived))
        };
        let threads: Vec<_> = rings.into_iter().map(spawn).collect();
        drop(arrived);
        let result = packing.run(&jobs, &arrivals, &free);
        // Whoever waits for a slot or sends waits no longer.
        drop((free, arrivals));
        for thread in threads {
            device.spare_buffers().extend(thread.join().expect("a reader does not panic"));
        }
        result
    });
    // Also after a failure: nothing may be on its way to memory that is freed.
    let action = "copying to the GPU";
    let done = device.copies().synchronize().and(packing.stream.synchronize());
    let packed = result?;
    done.or_fault(action)?;
    let mut outcomes: Vec<Outcome> = matrices.iter().map(|_| Outcome::TooWide).collect();
    for (matrix, outcome) in packed {
        outcomes[matrix] = outcome;
    }
    Ok((outcomes, packing.entries.into_kept()))
}
