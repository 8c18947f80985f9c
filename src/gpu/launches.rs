//! What decodes a set of tensors or rows of them: tasks, made once, launched often.

use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{self, CUdeviceptr, CUmemorytype, CUresult};

use super::fault::{OrFault, refuse};
use super::stored::{Addresses, Stored};
use super::task::{DecodeTask, KERNELS};
use super::{device::Device, linear::fast::FastArrays, module::DecodeLaunch, status::Status};
use crate::Result;
use crate::open::{Rect, Slice};

/// The alignment that the kernels need, of the output and of each tensor in it.
pub(super) const OUTPUT_ALIGNMENT: u64 = 16;

/// The tasks of some launches, still on the host.
#[derive(Debug, Default)]
pub(super) struct ProgramDraft {
    /// For each decode kernel.
    parts: [KernelTasks; KERNELS],
    /// Without those of decode kernels.
    launches: Launches,
}

/// A part of a matrix in the fast layout, which a launch of its own decodes.
#[derive(Debug)]
struct Unpack {
    arrays: Arc<FastArrays>,
    part: Rect,
    to: u64,
}

/// What one launch decodes.
#[derive(Debug, Default)]
struct KernelTasks {
    tasks: Vec<DecodeTask>,
    units: u64,
    /// Shared memory that a warp needs for some task, besides what it always takes.
    staged_bytes: u32,
}

/// Stored bytes that are decoded by copying: rows that are dense in the output.
#[derive(Debug)]
struct Copy {
    from: CUdeviceptr,
    to: u64,
    /// Of a row, in bytes.
    width: u64,
    rows: u64,
    /// Bytes from one row to the next where they are stored.
    pitch: u64,
}

impl ProgramDraft {
    /// Adds a slice of a tensor's bytes, which goes to `to` of the output.
    pub(super) fn add(
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
            match tensor {
                _ if let Some(arrays) = fast => {
                    let arrays = Arc::clone(arrays);
                    self.launches.unpacks.push(Unpack { arrays, part: part.clone(), to });
                }
                Stored::Empty => {}
                Stored::Raw(array) => {
                    let Rect { rows, columns, width: pitch } = &part;
                    let from = addresses.array(*array) + rows.start * pitch + columns.start;
                    let (rows, width) = (rows.end - rows.start, columns.end - columns.start);
                    self.launches.copies.push(Copy { from, to, width, rows, pitch: *pitch });
                }
                Stored::Coded(coded) => {
                    let launch = &mut self.parts[coded.kernel()];
                    let (task, units) = coded.task(&part, to, launch.units, addresses)?;
                    launch.tasks.push(task);
                    launch.units += units;
                    launch.staged_bytes = launch.staged_bytes.max(coded.staged_bytes);
                }
            }
            to += part.bytes();
        }
        Ok(())
    }

    /// Appends the tasks to those that go to the device together.
    pub(super) fn finish(self, device: &Device, tasks: &mut Vec<DecodeTask>) -> Result<Launches> {
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
pub(super) struct Launches {
    kernels: Vec<DecodeLaunch>,
    copies: Vec<Copy>,
    unpacks: Vec<Unpack>,
    /// Of the output.
    pub(super) bytes: u64,
}

impl Launches {
    /// Puts everything on the stream.
    ///
    /// # Safety
    /// `tasks` is the device address of the tasks that [`ProgramDraft::finish`] appended to.
    /// `output` is device memory of [`Launches::bytes`] that nobody else uses until the stream has
    /// done this; the tasks, the sections and tables that they were made of, and the status word
    /// live as long. The stream belongs to the device's context, which the caller has checked.
    #[expect(unsafe_code, reason = "launches")]
    pub(super) unsafe fn run(
        &self,
        device: &Device,
        tasks: CUdeviceptr,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        if !output.is_multiple_of(OUTPUT_ALIGNMENT) {
            let problem = format!("the output's address is no multiple of {OUTPUT_ALIGNMENT}");
            return refuse(problem, "start it on 256 bytes, as the driver's allocations do");
        }
        device.context().bind_to_thread().or_fault("using the GPU")?;
        for launch in &self.kernels {
            // SAFETY: the tasks were made from a layout whose arrays are there in the sizes it
            // gives, with ranges within it; outputs and lives are the caller's promise. The
            // alignment is checked here, and of what lies in the output by who placed it: tensors
            // of blocks start on multiples of 256, coded pieces of programs on multiples of
            // `OUTPUT_ALIGNMENT`.
            unsafe {
                device.kernels().decode(stream, launch, tasks, output, status.device_pointer())
            }?;
        }
        for copy in &self.copies {
            // SAFETY: the source, device memory or mapped host memory, holds the rows (the
            // directory's validation compared the sizes), and the output as many bytes.
            unsafe { copy.run(output, stream) }.result().or_fault("copying on the GPU")?;
        }
        for Unpack { arrays, part, to } in &self.unpacks {
            // SAFETY: the output has room for each part; what is alive is the caller's promise, and
            // `self` keeps the arrays.
            unsafe { arrays.decode(part, output + to, stream, status) }?;
        }
        Ok(())
    }
}

impl Copy {
    /// Puts it on the stream.
    ///
    /// # Safety
    /// Source and output have the bytes.
    #[expect(unsafe_code, reason = "copies")]
    unsafe fn run(&self, output: CUdeviceptr, stream: &CudaStream) -> CUresult {
        let (to, width) = (output + self.to, self.width as usize);
        if self.rows == 1 {
            // SAFETY: the caller's promise.
            return unsafe { sys::cuMemcpyAsync(to, self.from, width, stream.cu_stream()) };
        }
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            srcHost: null(),
            srcDevice: self.from,
            srcArray: null_mut(),
            srcPitch: self.pitch as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            dstHost: null_mut(),
            dstDevice: to,
            dstArray: null_mut(),
            dstPitch: width,
            WidthInBytes: width,
            Height: self.rows as usize,
        };
        // SAFETY: the caller's promise; the driver has read the numbers when the call returns.
        unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, stream.cu_stream()) }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::transmute;

    use super::{Addresses, ProgramDraft, Slice, Stored};
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
        assert_eq!(draft.parts.each_ref().map(|part| part.tasks.len()), [2, 0, 1, 0, 2]);
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
        let copy = &draft.launches.copies[0];
        assert_eq!((copy.from, copy.to, copy.width), (4104, bytes, 16));
    }
}
