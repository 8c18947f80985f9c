//! What decodes a set of tensors or a range of rows: tables of tasks in device memory, made once, launched any number of times.

use std::ops::Range;

use cudarc::driver::{CudaStream, result, sys::CUdeviceptr};

use super::{Device, Status, fault::OrFault, memory::Buffer, module::Launch, task::GapTask};
use crate::{Error, Result, constants::GAP_BYTES_PER_THREAD, encoding::gap::Layout};

/// The output's alignment that the kernels need.
const OUTPUT_ALIGNMENT: u64 = 16;

/// The arrays of a tensor in device memory.
#[derive(Clone, Debug)]
pub(super) enum Resident {
    /// No bytes.
    Empty,
    /// The bytes themselves.
    Raw { bytes: CUdeviceptr },
    /// The arrays of the `gap` encoding.
    Gap(Box<ResidentGap>),
}

#[derive(Clone, Debug)]
pub(super) struct ResidentGap {
    pub(super) layout: Layout,
    pub(super) gaps: CUdeviceptr,
    pub(super) output_offsets: CUdeviceptr,
    pub(super) bitstream: CUdeviceptr,
    pub(super) plane: CUdeviceptr,
    pub(super) table: CUdeviceptr,
    /// On the host, to find the thread blocks of a range.
    pub(super) host_offsets: Box<[u8]>,
}

impl ResidentGap {
    /// The task that decodes a range of elements to `output`.
    fn task(&self, elements: &Range<u64>, output: u64) -> Result<GapTask> {
        let thread_blocks = self.layout.thread_blocks_of(&self.host_offsets, elements)?;
        if thread_blocks.end > u64::from(u32::MAX) {
            return Err(Error::limit(
                "thread blocks of a tensor on the GPU",
                thread_blocks.end,
                u32::MAX.into(),
            ));
        }
        Ok(GapTask {
            gaps: self.gaps,
            output_offsets: self.output_offsets,
            bitstream: self.bitstream,
            plane: self.plane,
            table: self.table,
            output,
            elements: self.layout.elements(),
            bit_count: self.layout.bit_count(),
            element_begin: elements.start,
            element_end: elements.end,
            first_thread_block: thread_blocks.start,
            thread_blocks: thread_blocks.end - thread_blocks.start,
            threads_per_block: self.layout.geometry().threads_per_block(),
            ..GapTask::default()
        })
    }

    fn kernel(&self) -> usize {
        let bytes = self.layout.geometry().bytes_per_thread();
        GAP_BYTES_PER_THREAD.iter().position(|&known| known == bytes).expect("geometries are checked")
    }
}

/// The tasks of a plan, still on the host.
#[derive(Debug, Default)]
pub(super) struct Draft {
    /// For each of [`GAP_BYTES_PER_THREAD`].
    tasks: [Vec<GapTask>; GAP_BYTES_PER_THREAD.len()],
    copies: Vec<Copy>,
    bytes: u64,
}

/// Stored bytes that are decoded by copying.
#[derive(Debug)]
struct Copy {
    from: CUdeviceptr,
    to: u64,
    bytes: u64,
}

impl Draft {
    /// Adds a range of a tensor's bytes, which goes to `to` of the output.
    pub(super) fn add(&mut self, tensor: &Resident, range: &Range<u64>, to: u64) -> Result<()> {
        self.bytes = self.bytes.max(to + range.end - range.start);
        match tensor {
            _ if range.is_empty() => {}
            Resident::Empty => {}
            Resident::Raw { bytes } => {
                self.copies.push(Copy { from: bytes + range.start, to, bytes: range.end - range.start });
            }
            Resident::Gap(gap) => {
                let mut task = gap.task(&(range.start / 2..range.end / 2), to)?;
                let tasks = &mut self.tasks[gap.kernel()];
                task.first_unit = tasks.last().map_or(0, |last| last.first_unit + last.thread_blocks);
                tasks.push(task);
            }
        }
        Ok(())
    }

    /// Puts the tasks into device memory.
    pub(super) fn finish(self, device: &Device) -> Result<Plan> {
        let all = self.tasks.concat();
        let tasks = Buffer::of(device.context(), &all)?;
        let mut launches = Vec::new();
        let mut address = tasks.pointer();
        for (kernel, part) in self.tasks.iter().enumerate() {
            let Some(last) = part.last() else { continue };
            device.kernels().check(kernel)?;
            let unit_count = last.first_unit + last.thread_blocks;
            launches.push(Launch { kernel, tasks: address, task_count: part.len() as u32, unit_count });
            address += size_of_val(part.as_slice()) as u64;
        }
        Ok(Plan { _tasks: tasks, launches, copies: self.copies, bytes: self.bytes })
    }
}

/// Launches and copies that decode into any output.
#[derive(Debug)]
pub(super) struct Plan {
    /// What the launches point to.
    _tasks: Buffer,
    launches: Vec<Launch>,
    copies: Vec<Copy>,
    bytes: u64,
}

impl Plan {
    /// Bytes of the output.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Puts everything on the stream.
    ///
    /// # Safety
    /// `output` is device memory of [`Plan::bytes`] that nobody else uses until the stream has done this; the plan, the sections it was
    /// made of, and the status word live as long. The stream belongs to the device's context, which the caller has checked.
    #[expect(unsafe_code, reason = "launches")]
    pub(super) unsafe fn run(
        &self,
        device: &Device,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        if !output.is_multiple_of(OUTPUT_ALIGNMENT) {
            let problem = format!("the output's address is no multiple of {OUTPUT_ALIGNMENT}");
            return Err(Error::parameter(problem, "start it on 256 bytes, as the driver's allocations do"));
        }
        device.context().bind_to_thread().or_fault("using the GPU")?;
        for launch in &self.launches {
            // SAFETY: the tasks were made from a layout whose arrays are resident in the sizes it gives, with ranges within it; outputs
            // and lives are the caller's promise, the alignment is checked and tensors start on multiples of 256 (rows: at 0).
            unsafe { device.kernels().decode(stream, launch, output, status.device_pointer()) }?;
        }
        for copy in &self.copies {
            let (to, bytes) = (output + copy.to, copy.bytes as usize);
            // SAFETY: the source holds as many bytes (the directory's validation compared them), and so does the output.
            let copied = unsafe { result::memcpy_dtod_async(to, copy.from, bytes, stream.cu_stream()) };
            copied.or_fault("copying on the GPU")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Draft, Resident, ResidentGap};
    use crate::encoding::gap::{Geometry, encode_tensor};

    fn resident(weights: &[u8], bytes_per_thread: u32) -> Resident {
        let geometry = Geometry::new(bytes_per_thread, 64).unwrap();
        let tensor = encode_tensor(weights, geometry, 1000).unwrap();
        Resident::Gap(Box::new(ResidentGap {
            layout: tensor.layout,
            gaps: 256,
            output_offsets: 512,
            bitstream: 768,
            plane: 1024,
            table: 1280,
            host_offsets: tensor.output_offsets.into(),
        }))
    }

    #[test]
    fn tasks_of_one_kernel_share_its_units_in_order() {
        let weights: Vec<u8> =
            (0..60_000u32).flat_map(|at| ((at * at % 65_521) as u16).to_le_bytes()).collect();
        let bytes = weights.len() as u64;
        let mut draft = Draft::default();
        draft.add(&resident(&weights, 8), &(0..bytes), 0).unwrap();
        draft.add(&Resident::Raw { bytes: 4096 }, &(8..24), bytes).unwrap();
        draft.add(&resident(&weights, 32), &(0..bytes), bytes + 256).unwrap();
        draft.add(&resident(&weights, 8), &(40_000..50_000), 2 * bytes + 256).unwrap();
        draft.add(&resident(&weights, 8), &(70..70), 0).unwrap();
        assert_eq!(draft.bytes, 2 * bytes + 10_256);
        assert_eq!(draft.tasks.each_ref().map(Vec::len), [2, 0, 1, 0]);
        let [whole, part] = draft.tasks[0][..] else { unreachable!() };
        assert_eq!((whole.first_unit, part.first_unit), (0, whole.thread_blocks));
        assert_eq!((part.element_begin, part.element_end), (20_000, 25_000));
        assert!(part.first_thread_block > 0 && part.thread_blocks < whole.thread_blocks);
        assert_eq!((draft.copies[0].from, draft.copies[0].to, draft.copies[0].bytes), (4104, bytes, 16));
    }
}
