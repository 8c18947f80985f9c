//! A program decodes tensors of one GPU, or slices of them, to places in one output. Its tasks are
//! made once, and run on the caller's stream any number of times.
//!
//! A decode has one launch for each kernel that its tensors need: one of `gap` for each number of
//! bytes per thread, one of `tile`, one for each other float, and one that unpacks the fast layout.
//! A coded tensor names the kernel that decodes it, its table and its task (`stored::CodedTensor`).
//! `fit` chooses a launch's warps by the shared memory that its largest tile needs. Loading makes a
//! program for each block, and for a streamed block one for each slot; callers make others from
//! `Piece`s.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use std::ptr::{null, null_mut};
use std::{iter, sync::Arc};

use cudarc::driver::sys::{self, CUdeviceptr, CUmemorytype, CUresult};
use cudarc::driver::{CudaStream, CudaViewMut, DevicePtrMut, DeviceSlice};

use super::fault::{OrFault, refuse};
use super::status::{Status, check_contexts};
use super::stored::{Addresses, Stored};
use super::task::{DecodeTask, KERNELS};
use super::{
    device::Device, driver::capture_of, linear::fast::FastArrays, memory::Buffer,
    module::DecodeLaunch, part::DevicePart,
};
use crate::Result;
use crate::open::{Rect, Slice};

/// Alignment of the output, and of each tensor in it, that the kernels need.
pub(super) const OUTPUT_ALIGNMENT: u64 = 16;

/// Refuses an output at an address where the kernels cannot store.
pub(super) fn check_output(output: CUdeviceptr) -> Result<()> {
    if output.is_multiple_of(OUTPUT_ALIGNMENT) {
        return Ok(());
    }
    let problem = format!("the output's address is not a multiple of {OUTPUT_ALIGNMENT}");
    refuse(problem, "start it on 256 bytes, as the driver's allocations do")
}

/// A slice of a tensor's bytes, and its place in the output.
#[derive(Debug)]
pub(super) struct Cut<'s> {
    pub(super) stored: &'s Stored,
    pub(super) slice: Slice,
    pub(super) to: u64,
}

/// Tensors of a model on one GPU, or slices of them, ready to be decoded to chosen places of one
/// output. Keeps alive what it reads.
///
/// [`GpuModel::program`](super::GpuModel::program) and [`GpuModel::rows`](super::GpuModel::rows)
/// make it.
#[derive(Debug)]
pub struct GpuProgram {
    /// First the launches that read sections where they lie: in device memory, or on the host, over
    /// the bus. Then those that read each slot of the streamed block with `turn`; captured graphs
    /// do not use these, because a slot belongs to the next decode.
    launches: Vec<Launches>,
    /// The turn of the streamed block through whose slots it decodes, if there is one.
    pub(super) turn: Option<usize>,
    pub(super) tasks: Buffer,
    pub(super) part: Arc<DevicePart>,
}

impl GpuProgram {
    /// Prepares decoding of tensors of a part; with `turn`, all belong to the streamed block of
    /// that turn.
    pub(super) fn new(
        part: &Arc<DevicePart>,
        turn: Option<usize>,
        cuts: &[Cut<'_>],
    ) -> Result<Self> {
        let mut tasks = Vec::new();
        let launches = |addresses: Addresses<'_>| {
            let mut draft = ProgramDraft::default();
            for cut in cuts {
                draft.add(cut.stored, &cut.slice, cut.to, &addresses)?;
            }
            draft.finish(&part.device, &mut tasks)
        };
        let in_slots = turn.into_iter().flat_map(|turn| part.in_slots(turn));
        let all = iter::once(part.in_place()).chain(in_slots);
        let launches = all.map(launches).collect::<Result<_>>()?;
        let tasks = Buffer::of(part.device.copies(), &tasks)?;
        Ok(Self { launches, turn, tasks, part: Arc::clone(part) })
    }

    /// The GPU on which it decodes.
    pub fn device(&self) -> &Device {
        &self.part.device
    }

    /// Bytes of the output, up to the end of the last piece.
    pub fn bytes(&self) -> u64 {
        self.launches[0].bytes
    }

    /// Whether it decodes tensors of a streamed block from slots, into which the next such block is
    /// copied meanwhile.
    pub fn is_streamed(&self) -> bool {
        self.turn.is_some()
    }

    /// Puts the decoding of all pieces on a stream, as
    /// [`GpuBlock::decode_into`](super::GpuBlock::decode_into) does for a block. Bytes between
    /// pieces do not change; if pieces overlap, the bytes there are those of any of them.
    ///
    /// # Errors
    /// Same as [`GpuBlock::decode_into`](super::GpuBlock::decode_into).
    pub fn decode_into(
        &self,
        output: &mut CudaViewMut<'_, u8>,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let bytes = self.bytes();
        if (output.len() as u64) < bytes {
            let problem = format!("the output has {} bytes of {bytes}", output.len());
            return refuse(problem, "ask for the size");
        }
        // Streams and buffers of two wrappers of one context do not wait for each other.
        if !Arc::ptr_eq(output.stream().context(), stream.context()) {
            let problem = "output and stream come from different contexts";
            return refuse(problem, "make both with Device::context of one device");
        }
        let (pointer, _record) = output.device_ptr_mut(stream);
        // SAFETY: the buffer has the size, and is borrowed until its events say that the work is
        // done. This value keeps the tasks and what they point to; all of it and the status wait
        // for the context before they are freed.
        unsafe { self.decode_into_raw(pointer, stream, status) }
    }

    /// Decodes like [`GpuBlock::decode_into_raw`](super::GpuBlock::decode_into_raw).
    ///
    /// # Errors
    /// Same as [`GpuBlock::decode_into_raw`](super::GpuBlock::decode_into_raw).
    ///
    /// # Safety
    /// Same as [`GpuBlock::decode_into_raw`](super::GpuBlock::decode_into_raw), with
    /// [`GpuProgram::bytes`] of output, and this value in place of the model.
    pub unsafe fn decode_into_raw(
        &self,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let Self { launches, turn, part, .. } = self;
        check_contexts(&part.device, stream, status)?;
        let (in_place, in_slots) = (&launches[0], &launches[1..]);
        // SAFETY: the caller's promise, and the check above.
        let run = |launches: &Launches| unsafe { self.run(launches, output, stream, status) };
        match (turn, &part.streamer) {
            (Some(turn), Some(streamer)) if capture_of(stream)?.is_none() => {
                streamer.with_block(*turn, stream, |slot| run(&in_slots[slot]))
            }
            _ => run(in_place),
        }
    }

    /// Puts some of its launches on the stream.
    ///
    /// # Safety
    /// Same as [`GpuProgram::decode_into_raw`], which has checked that the stream is of the
    /// device's context.
    unsafe fn run(
        &self,
        launches: &Launches,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let Self { part, tasks, .. } = self;
        check_output(output)?;
        part.device.context().bind_to_thread().or_fault("using the GPU")?;
        let (kernels, word) = (part.device.kernels(), status.device_pointer());
        for launch in &launches.kernels {
            // SAFETY: the tasks were made from a layout whose arrays exist in the sizes that it
            // gives, with ranges within it; the caller promises outputs and lifetimes. The
            // alignment is checked here, and, for each tensor in the output, by whoever placed it:
            // tensors of blocks start on multiples of 256, coded pieces of programs on multiples of
            // `OUTPUT_ALIGNMENT`.
            unsafe { kernels.decode(stream, launch, tasks.pointer(), output, word) }?;
        }
        for Direct { source, part, to } in &launches.direct {
            match source {
                // SAFETY: device memory or mapped host memory holds the rows (the directory's
                // validation compared the sizes), and the output has room for as many bytes.
                DirectSource::Raw(array) => unsafe { copy(*array, part, output + to, stream) }
                    .result()
                    .or_fault("copying on the GPU"),
                // SAFETY: the output has room for each part; the caller promises lifetimes, and
                // `self` keeps the arrays.
                DirectSource::Fast(arrays) => unsafe {
                    arrays.decode(part, output + to, stream, status)
                },
            }?;
        }
        Ok(())
    }
}

impl Cut<'_> {
    /// Checks that kernels can store what they decode at its place.
    pub(super) fn check(&self, tensor: &str) -> Result<()> {
        let Self { stored, slice, to } = self;
        let is_coded = stored.coded().is_some();
        if is_coded && !to.is_multiple_of(OUTPUT_ALIGNMENT) {
            let problem = format!("tensor {tensor:?} would go to byte {to} of the output");
            return refuse(problem, format!("choose a multiple of {OUTPUT_ALIGNMENT}"));
        }
        let row_bytes = |rect: Rect| rect.columns.end - rect.columns.start;
        let mut alone = slice.rects().filter(|rect| !stored.takes(rect)).map(row_bytes);
        if is_coded && alone.any(|bytes| !bytes.is_multiple_of(OUTPUT_ALIGNMENT)) {
            let problem = format!(
                "rows of a slice of tensor {tensor:?} would not begin on multiples of \
                {OUTPUT_ALIGNMENT} bytes"
            );
            let remedy = format!(
                "take columns of a multiple of {OUTPUT_ALIGNMENT} bytes, or convert the container \
                 to the tile layout"
            );
            return refuse(problem, remedy);
        }
        if to.checked_add(slice.bytes()).is_none() {
            let problem = format!("tensor {tensor:?} would end after byte 2^64 of the output");
            return refuse(problem, "choose a smaller offset");
        }
        Ok(())
    }
}

/// The tasks of some launches, still on the host.
#[derive(Debug, Default)]
struct ProgramDraft {
    /// For each decode kernel.
    parts: [KernelTasks; KERNELS],
    /// Launches and copies besides those of decode kernels.
    launches: Launches,
}

/// A part of a tensor that is decoded without a task, dense in the output.
#[derive(Debug)]
struct Direct {
    source: DirectSource,
    part: Rect,
    to: u64,
}

#[derive(Debug)]
enum DirectSource {
    /// An array, which is copied.
    Raw(CUdeviceptr),
    /// A matrix in the fast layout, decoded by a launch of its own.
    Fast(Arc<FastArrays>),
}

/// Tasks that one launch decodes.
#[derive(Debug, Default)]
struct KernelTasks {
    tasks: Vec<DecodeTask>,
    units: u64,
    /// Most shared memory that a warp needs for a task, besides what it always takes.
    staged_bytes: u32,
}

impl ProgramDraft {
    /// Adds a slice of a tensor's bytes, which goes to byte `to` of the output.
    fn add(
        &mut self,
        tensor: &Stored,
        slice: &Slice,
        to: u64,
        addresses: &Addresses<'_>,
    ) -> Result<()> {
        self.launches.bytes = self.launches.bytes.max(to + slice.bytes());
        let mut to = to;
        let fast = tensor.coded().and_then(|coded| addresses.held.fast.get(&coded.id));
        let takes =
            |rect: &Rect| fast.map_or_else(|| tensor.takes(rect), |arrays| arrays.takes(rect));
        for part in slice.rects().flat_map(|rect| rect.split(takes)) {
            let source = match tensor {
                _ if let Some(arrays) = fast => Some(DirectSource::Fast(Arc::clone(arrays))),
                Stored::Empty => None,
                Stored::Raw(array) => Some(DirectSource::Raw(addresses.array(*array))),
                Stored::Decoded(id) => Some(DirectSource::Raw(addresses.held.tables[id])),
                Stored::Coded(coded) => {
                    let launch = &mut self.parts[coded.kernel()];
                    let (task, units) = coded.task(&part, to, launch.units, addresses)?;
                    launch.tasks.push(task);
                    launch.units += units;
                    launch.staged_bytes = launch.staged_bytes.max(coded.staged_bytes);
                    None
                }
            };
            let part_bytes = part.bytes();
            self.launches.direct.extend(source.map(|source| Direct { source, part, to }));
            to += part_bytes;
        }
        Ok(())
    }

    /// Appends its tasks to those that go to the device together.
    fn finish(self, device: &Device, tasks: &mut Vec<DecodeTask>) -> Result<Launches> {
        let Self { parts, mut launches } = self;
        let wanted = parts.into_iter().enumerate().filter(|(_, part)| !part.tasks.is_empty());
        for (kernel, part) in wanted {
            launches.kernels.push(DecodeLaunch {
                kernel,
                fit: device.kernels().fit(kernel, part.staged_bytes)?,
                first_task: tasks.len() as u64,
                task_count: part.tasks.len() as u32,
                unit_count: part.units,
            });
            tasks.extend(part.tasks);
        }
        Ok(launches)
    }
}

/// Launches and copies that decode into any output.
#[derive(Debug, Default)]
struct Launches {
    kernels: Vec<DecodeLaunch>,
    direct: Vec<Direct>,
    /// Bytes of the output.
    bytes: u64,
}

/// Puts the copy of a part of an array on the stream.
///
/// # Safety
/// The array has the part, and `to` has room for it.
unsafe fn copy(array: CUdeviceptr, part: &Rect, to: CUdeviceptr, stream: &CudaStream) -> CUresult {
    let Rect { rows, columns, width: pitch } = part;
    let from = array + rows.start * pitch + columns.start;
    let width = (columns.end - columns.start) as usize;
    if part.is_run() {
        // SAFETY: the caller's promise.
        return unsafe { sys::cuMemcpyAsync(to, from, width, stream.cu_stream()) };
    }
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        srcHost: null(),
        srcDevice: from,
        srcArray: null_mut(),
        srcPitch: *pitch as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        dstHost: null_mut(),
        dstDevice: to,
        dstArray: null_mut(),
        dstPitch: width,
        WidthInBytes: width,
        Height: (rows.end - rows.start) as usize,
    };
    // SAFETY: the caller's promise; the driver has read the numbers when the call returns.
    unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, stream.cu_stream()) }
}

#[cfg(test)]
mod tests {
    use zerocopy::transmute;

    use super::{Addresses, Direct, DirectSource, ProgramDraft, Slice, Stored};
    use crate::gpu::{
        stored::{Held, samples},
        task::{GapTask, TILE_KERNEL, TileTask},
    };

    #[test]
    fn tasks_of_one_kernel_share_its_units_in_order() {
        let weights: Vec<u8> =
            (0..60_000u32).flat_map(|at| ((at * at % 65_521) as u16).to_le_bytes()).collect();
        let held = Held {
            sections: (0..4).map(|section| ((0, section), section as u64 * 4096)).collect(),
            tables: [((0, 0), 77), ((0, 1), 77)].into(),
            ..Held::default()
        };
        let at = &Addresses { held: &held, slot: [].into() };
        let coded = |bytes_per_thread| samples::gap(&weights, bytes_per_thread);
        let tiles = samples::tile(&weights);
        let bytes = weights.len() as u64;
        let mut draft = ProgramDraft::default();
        draft.add(&coded(8), &Slice::of_bytes(0..bytes), 0, at).unwrap();
        draft.add(&samples::raw_at(1, 0), &Slice::of_bytes(8..24), bytes, at).unwrap();
        draft.add(&coded(32), &Slice::of_bytes(0..bytes), bytes + 256, at).unwrap();
        draft.add(&coded(8), &Slice::of_bytes(40_000..50_000), 2 * bytes + 256, at).unwrap();
        draft.add(&coded(8), &Slice::of_bytes(70..70), 0, at).unwrap();
        draft.add(&tiles, &Slice::of_bytes(0..bytes), 0, at).unwrap();
        draft.add(&tiles, &Slice::of_bytes(40_000..50_000), 0, at).unwrap();
        draft.add(&Stored::Empty, &Slice::of_bytes(0..0), 0, at).unwrap();
        assert_eq!(draft.launches.bytes, 2 * bytes + 10_256);
        let tasks = draft.parts.each_ref().map(|part| part.tasks.len());
        assert_eq!(tasks[..=TILE_KERNEL], [2, 0, 1, 0, 2]);
        assert!(tasks[TILE_KERNEL + 1..].iter().all(|&count| count == 0));
        let [whole, part] = draft.parts[0].tasks[..] else { unreachable!() };
        let [whole, part]: [GapTask; 2] = [transmute!(whole), transmute!(part)];
        assert_eq!((whole.first_unit, part.first_unit), (0, whole.thread_blocks));
        assert_eq!((whole.gaps, whole.output_offsets), (256, 4096 + 256));
        assert_eq!(
            (whole.bitstream, whole.plane, whole.table),
            (2 * 4096 + 256, 3 * 4096 + 256, 77)
        );
        assert_eq!((part.element_begin, part.element_end), (20_000, 25_000));
        assert!(part.first_thread_block > 0 && part.thread_blocks < whole.thread_blocks);
        let tiles = &draft.parts[TILE_KERNEL];
        let [whole, part] = tiles.tasks[..] else { unreachable!() };
        let [whole, part]: [TileTask; 2] = [transmute!(whole), transmute!(part)];
        assert_eq!((whole.tiles, part.first_unit, tiles.units), (8, 8, 10));
        assert_eq!((whole.records, whole.bits, whole.plane), (256, 4096 + 256, 2 * 4096 + 256));
        assert_eq!(
            (part.first_row, part.first_column, part.tiles, part.across, part.tiles_across),
            (0, 2, 2, 2, 0)
        );
        assert_eq!((part.element_begin, part.element_end, part.columns), (20_000, 25_000, 60_000));
        assert_eq!(
            (part.column_begin, part.column_end, part.pitch, part.rows),
            (0, 60_000, 60_000, 1)
        );
        assert_eq!(part.output, 40_000u64.wrapping_neg());
        assert!(tiles.staged_bytes > 1000);
        let Direct { source: DirectSource::Raw(array), part, to } = &draft.launches.direct[0]
        else {
            unreachable!()
        };
        assert_eq!((array, to, &part.columns), (&4096, &bytes, &(8..24)));
    }
}
