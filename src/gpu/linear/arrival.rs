//! Loads matrices from containers into the fast layout; their stored arrays do not stay on the GPU.
//!
//! ```text
//! container → pinned buffer → slot: task, records, plane, bits → weights → packed strips
//!   readers, any order          one copy for some strips          one after the other, in order
//! ```
//!
//! Device memory besides the result: two slots per reader, the decoded weights of one slot, the
//! exceptions of one matrix, and decode tables; less than 256 MB.
#![expect(unsafe_code, reason = "copies and launches, each with its proof")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::{collections::BTreeMap, num::NonZero, ops::Range, thread};

use cudarc::driver::{CudaEvent, CudaStream, sys::CUdeviceptr};
use zerocopy::{IntoBytes, transmute};

use super::fast::{FastArrays, Packer, Strips};
use super::task::{STRIP_ROWS, good_exceptions};
use crate::encoding::stored::CodedSizes;
use crate::encoding::tile::{self, TileSizes};
use crate::gpu::needs::{TensorId, array_length, arrays_of};
use crate::gpu::stored::Tensors;
use crate::gpu::task::{DecodeTask, TileAddresses, TileSource, TileTask, kernel_of};
use crate::gpu::upload::{BUFFERS, PIECE_BYTES, Ring, rings};
use crate::gpu::{
    device::Device, fault::OrFault, memory::Buffer, module::DecodeLaunch, pinned::Pinned,
    status::Status,
};
use crate::progress::{Observer, advance};
use crate::{Error, Model, Result, Tensor, constants::ARRAY_ALIGNMENT, parallel};

/// Slots per reader: one is being filled while strips in the other wait for those before them.
const SLOTS: usize = 2;
/// Alignment of arrays in a slot, and place of the first one.
const PLACE: u64 = 256;
/// Bits are copied to shared memory in units of this many bytes.
const COPY_BYTES: u64 = 16;

/// Data that all matrices of a load share.
pub(in crate::gpu) struct FastLoad<'l> {
    pub(in crate::gpu) model: &'l Model,
    pub(in crate::gpu) stored: &'l Tensors,
    pub(in crate::gpu) readers: NonZero<usize>,
    pub(in crate::gpu) observer: &'l dyn Observer,
}

pub(in crate::gpu) struct FastRequest<'m> {
    pub(in crate::gpu) tensor: Tensor<'m>,
    pub(in crate::gpu) id: TensorId,
    pub(in crate::gpu) sizes: &'m TileSizes,
    pub(in crate::gpu) staged_bytes: u32,
    pub(in crate::gpu) table: CUdeviceptr,
    /// Its destination: memory of [`fast_bytes`](super::task::fast_bytes).
    pub(in crate::gpu) strips: Buffer,
}

/// Some strips of a matrix on their way to the GPU: a job.
struct StripBatch {
    /// The index of its matrix among those wanted.
    matrix: usize,
    strips: Range<u64>,
    /// Byte ranges in the arrays.
    records: Range<u64>,
    plane: Range<u64>,
    bits: Range<u64>,
    is_last: bool,
}

/// Places of a job's data in its slot, in bytes from the slot's start.
struct SlotLayout {
    records: Range<u64>,
    plane: Range<u64>,
    bits: Range<u64>,
    /// First byte of the bitstream that the slot holds.
    first_bits: u64,
}

impl StripBatch {
    fn layout(&self) -> SlotLayout {
        let after = |end: u64, bytes: u64| {
            let start = end.next_multiple_of(PLACE);
            start..start + bytes
        };
        let first_bits = self.bits.start / COPY_BYTES * COPY_BYTES;
        let records = after(size_of::<DecodeTask>() as u64, self.records.end - self.records.start);
        let plane = after(records.end, self.plane.end - self.plane.start);
        let bits = after(plane.end, self.bits.end.next_multiple_of(COPY_BYTES) - first_bits);
        SlotLayout { records, plane, bits, first_bits }
    }

    /// Its records, without the one that it shares with the next job.
    fn counted_records(&self) -> Range<u64> {
        let both = if self.is_last { 0 } else { tile::RECORD_BYTES as u64 };
        self.records.start..self.records.end - both
    }

    /// Bytes of the container that it reads.
    fn bytes(&self) -> u64 {
        let all = [self.counted_records(), self.plane.clone(), self.bits.clone()];
        all.into_iter().map(|range| range.end - range.start).sum()
    }

    fn rows(&self, sizes: &TileSizes) -> Range<u64> {
        self.strips.start * STRIP_ROWS..sizes.geometry().rows().min(self.strips.end * STRIP_ROWS)
    }
}

/// Cuts a matrix into jobs that fit a slot; `None` if a strip does not.
fn cut(matrix: usize, wanted: &FastRequest<'_>) -> Result<Option<Vec<StripBatch>>> {
    let sizes = wanted.sizes;
    let records = sizes.read_whole(&wanted.tensor, tile::RECORDS)?;
    let job = |strips: Range<u64>| -> Result<StripBatch> {
        let of = sizes.records_of(&strips)?;
        let bits = sizes.bitstream_of(&records[of.start as usize..of.end as usize], &strips);
        let is_last = strips.end == sizes.geometry().strip_count();
        let bits = bits.map_err(|error| wanted.tensor.locate(error))?;
        let plane = sizes.plane_of(&strips)?;
        Ok(StripBatch { matrix, plane, records: of, bits, strips, is_last })
    };
    let (mut jobs, mut next) = (Vec::new(), 0);
    while next < sizes.geometry().strip_count() {
        let mut best = None;
        for end in next + 1..=sizes.geometry().strip_count() {
            let more = job(next..end)?;
            if more.layout().bits.end > PIECE_BYTES {
                break;
            }
            best = Some(more);
        }
        let Some(best) = best else { return Ok(None) };
        next = best.strips.end;
        jobs.push(best);
    }
    Ok(Some(jobs))
}

impl FastRequest<'_> {
    /// Reads a job's part of the arrays into a buffer, laid out as in the slot; returns its bytes.
    fn fill(&self, job: &StripBatch, slot: CUdeviceptr, out: &mut [u8]) -> Result<usize> {
        let layout = job.layout();
        let array = self.tensor.record().array_range().start;
        let place = |range: &Range<u64>| range.start as usize..range.end as usize;
        let read = |array, range: &Range<u64>, counted: &Range<u64>, to: &mut [u8]| {
            self.tensor.shard().read_array_part(array, range, counted, to)
        };
        out[..size_of::<DecodeTask>()].copy_from_slice(self.task(job, &layout, slot).as_bytes());
        let records = &mut out[place(&layout.records)];
        read(array + 1, &job.records, &job.counted_records(), records)?;
        tile::rebase(records, 8 * layout.first_bits);
        let bits = layout.first_bits..layout.first_bits + (layout.bits.end - layout.bits.start);
        read(array + 2, &bits, &job.bits, &mut out[place(&layout.bits)])?;
        read(array + 3, &job.plane, &job.plane, &mut out[place(&layout.plane)])?;
        Ok(layout.bits.end as usize)
    }

    /// Makes the task that decodes a job's strips, which are a tensor of their own in the slot.
    fn task(&self, job: &StripBatch, layout: &SlotLayout, slot: CUdeviceptr) -> DecodeTask {
        let sizes = self.sizes;
        let (rows, columns) = (job.rows(sizes), sizes.geometry().columns());
        let rows = rows.end - rows.start;
        let source = TileSource {
            arrays: TileAddresses {
                records: slot + layout.records.start,
                bitstream: slot + layout.bits.start,
                bitstream_bytes: layout.bits.end - layout.bits.start,
                plane: slot + layout.plane.start,
                table: self.table,
                staged_bytes: self.staged_bytes,
            },
            rows,
            columns,
            tiles_across: sizes.geometry().strip_tiles(),
            split: sizes.split(),
        };
        transmute!(TileTask::new(&source, &(0..rows * columns), &(0..columns), 0, 0))
    }
}

/// A place on the device where strips arrive.
struct Slot {
    address: CUdeviceptr,
    /// Done when the last copy into it is done.
    filled: CudaEvent,
    /// Done when the decoding from it is done.
    used: CudaEvent,
}

/// A job whose copy has started: its index, and its slot.
type Arrival = Result<(usize, usize)>;

/// Data that the readers share.
struct Transit<'u> {
    device: &'u Device,
    matrices: &'u [FastRequest<'u>],
    jobs: Vec<StripBatch>,
    next: AtomicUsize,
    slots: Vec<Slot>,
    free: Mutex<Receiver<usize>>,
    observer: &'u dyn Observer,
}

impl Transit<'_> {
    /// Runs one reader: it takes jobs while there are some and somebody wants them; returns its
    /// buffers.
    fn run(&self, mut ring: Ring, arrived: &Sender<Arrival>) -> Ring {
        let mut at = 0;
        // Takes a slot before a job, so that the first of all jobs that have not arrived has a
        // slot.
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

    /// Reads a job's bytes and starts to copy them into a slot, after the decoding from it.
    fn send(&self, job: &StripBatch, slot: usize, buffer: &mut Pinned) -> Result<()> {
        let Slot { address, filled, used } = &self.slots[slot];
        let stream = self.device.copies();
        let count = self.matrices[job.matrix].fill(job, *address, buffer.bytes()?)?;
        let action = "ordering copies and kernels";
        stream.wait(used).or_fault(action)?;
        // SAFETY: a slot has room for every job, and only its owner copies into it; freeing waits.
        unsafe { buffer.copy(count, *address, stream) }?;
        filled.record(stream).or_fault(action)?;
        advance(self.observer, job.bytes())
    }
}

/// Decodes and packs jobs as they arrive.
struct Packing<'u> {
    transit: &'u Transit<'u>,
    stream: Arc<CudaStream>,
    weights: Buffer,
    packer: Packer,
    status: Status,
}

impl Packing<'_> {
    /// Takes all jobs in order, and gives each slot back as soon as others may be copied into it.
    /// Returns the matrices that became fast.
    fn run(
        &mut self,
        arrivals: &Receiver<Arrival>,
        free: &Sender<usize>,
    ) -> Result<Vec<Option<FastArrays>>> {
        let Transit { jobs, matrices, .. } = self.transit;
        let (mut early, mut next) = (BTreeMap::new(), 0);
        let mut outcomes: Vec<_> = matrices.iter().map(|_| None).collect();
        while next < jobs.len() {
            // A reader sends its failure before it ends.
            let Ok(arrival) = arrivals.recv() else { return Err(Error::Cancelled) };
            let (number, slot) = arrival?;
            early.insert(number, slot);
            while let Some(slot) = early.remove(&next) {
                if let Some(arrays) = self.take(&jobs[next], slot, free)? {
                    outcomes[jobs[next].matrix] = Some(arrays);
                }
                next += 1;
            }
        }
        self.status.check(&self.stream)?;
        Ok(outcomes)
    }

    /// Puts the decoding and packing of one job on the stream; waits after the last one of a
    /// matrix.
    fn take(
        &mut self,
        job: &StripBatch,
        slot: usize,
        free: &Sender<usize>,
    ) -> Result<Option<FastArrays>> {
        let wanted = &self.transit.matrices[job.matrix];
        let (sizes, action) = (wanted.sizes, "ordering copies and kernels");
        let (geometry, weights) = (sizes.geometry(), self.weights.pointer());
        let (rows, columns) = (geometry.rows(), geometry.columns());
        let strips = Strips { rows, columns, address: wanted.strips.pointer() };
        if job.strips.start == 0 {
            self.packer.begin(&self.stream)?;
        }
        let (kernels, kernel) = (self.transit.device.kernels(), kernel_of(sizes.split()));
        let launch = DecodeLaunch {
            kernel,
            fit: kernels.fit(kernel, wanted.staged_bytes)?,
            first_task: 0,
            task_count: 1,
            unit_count: (job.strips.end - job.strips.start) * geometry.strip_tiles(),
        };
        let Slot { address, filled, used } = &self.transit.slots[slot];
        self.stream.wait(filled).or_fault(action)?;
        let status = self.status.device_pointer();
        // SAFETY: the slot begins with the task of its arrays, which have the sizes that the task
        // says; `weights` has room for the largest job, and only this stream uses it. All of it is
        // freed after the context is idle.
        unsafe { kernels.decode(&self.stream, &launch, *address, weights, status) }?;
        used.record(&self.stream).or_fault(action)?;
        // Readers that have ended want no slot.
        free.send(slot).ok();
        // SAFETY: the decoding on the same stream has written the weights; jobs come in order, and
        // one matrix after the other.
        unsafe { self.packer.pack(&strips, &job.rows(sizes), weights, &self.stream) }?;
        if !job.is_last {
            return Ok(None);
        }
        let most = good_exceptions(sizes.elements());
        let memory = wanted.strips.clone();
        Ok(self.packer.finish(strips, memory, most, true, &self.stream)?.ok())
    }
}

/// Loads matrices in the fast layout, and waits; skips a matrix with too many exceptions or too
/// large strips. `kept` gets the allocations of exceptions. Every run gives the same bytes.
pub(in crate::gpu) fn load_fast(
    device: &Device,
    matrices: &[FastRequest<'_>],
    load: &FastLoad<'_>,
    kept: &mut Vec<Buffer>,
) -> Result<Vec<Option<FastArrays>>> {
    let mut jobs = Vec::new();
    for (matrix, wanted) in matrices.iter().enumerate() {
        if let Some(cut) = cut(matrix, wanted)? {
            jobs.extend(cut);
        } else {
            let arrays = arrays_of(load.model, wanted.id);
            advance(load.observer, arrays.map(|array| array_length(load.model, array)).sum())?;
        }
    }
    let count = load.readers.get().min(jobs.len());
    let rings = rings(device, count)?;
    let slot_bytes = (SLOTS * count) as u64 * PIECE_BYTES;
    let weights = |job: &StripBatch| {
        let sizes = matrices[job.matrix].sizes;
        let rows = job.rows(sizes);
        (rows.end - rows.start) * sizes.geometry().columns()
    };
    let weight_bytes = 2 * jobs.iter().map(weights).max().unwrap_or(0);
    let most = matrices.iter().map(|wanted| good_exceptions(wanted.sizes.elements())).max();
    let most = most.unwrap_or(0);
    // One allocation: freeing each takes the driver longer than the GPU has work for meanwhile.
    let bytes = slot_bytes + weight_bytes.next_multiple_of(ARRAY_ALIGNMENT) + Packer::bytes(most);
    let mut memory = device.allocate(bytes, "matrices that arrive")?;
    let addresses = memory.take(slot_bytes).pointer();
    let slot = |at| {
        let (filled, used) = (device.new_event()?, device.new_event()?);
        Ok(Slot { address: addresses + at as u64 * PIECE_BYTES, filled, used })
    };
    let slots = (0..SLOTS * count).map(slot).collect::<Result<Vec<_>>>()?;
    let (arrived, arrivals) = mpsc::channel();
    let (free, taken) = mpsc::channel();
    (0..slots.len()).for_each(|slot| free.send(slot).expect("the receiver is here"));
    let (next, taken) = (AtomicUsize::new(0), Mutex::new(taken));
    let observer = load.observer;
    let transit = &Transit { device, matrices, jobs, next, slots, free: taken, observer };
    let mut packing = Packing {
        transit,
        stream: device.new_stream()?,
        weights: memory.take(weight_bytes),
        packer: Packer::within(device, most, &mut memory),
        status: Status::new(device)?,
    };
    let result = thread::scope(|scope| {
        let spawn = |ring| {
            let arrived = arrived.clone();
            scope.spawn(move || transit.run(ring, &arrived))
        };
        let threads: Vec<_> = rings.into_iter().map(spawn).collect();
        drop(arrived);
        let result = packing.run(&arrivals, &free);
        // Threads that wait for a slot or send wait no longer.
        drop((free, arrivals));
        for thread in threads {
            device.spare_buffers().extend(thread.join().expect("a reader does not panic"));
        }
        result
    });
    // Waits after a failure too: no copy may still write to memory that is freed.
    let action = "copying to the GPU";
    let done = device.copies().synchronize().and(packing.stream.synchronize());
    let outcomes = result?;
    done.or_fault(action)?;
    kept.extend(packing.packer.kept);
    Ok(outcomes)
}
