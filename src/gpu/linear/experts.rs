//! Decodes the matrices of a mixture's experts that a router on the device has chosen, for another
//! library's grouped product.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use cudarc::driver::{CudaStream, sys::CUdeviceptr};
use zerocopy::IntoBytes as _;

use super::decode::Indices;
use super::matrix::{Matrix, MatrixArrays};
use super::task::MAX_EXPERTS;
use crate::gpu::fault::refuse;
use crate::gpu::module::DecodeLaunch;
use crate::gpu::program::{OUTPUT_ALIGNMENT, check_output};
use crate::gpu::status::{Status, check_contexts};
use crate::gpu::task::{ChooseTask, DecodeTask, kernel_of};
use crate::gpu::{device::Device, memory::Buffer};
use crate::{Error, Result};

/// From this many choices for each expert on, a router has chosen nearly all: all are decoded.
const ALL_CHOICES: u64 = 8;

/// The experts that a router chose, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Choices {
    ids: Indices,
    count: u64,
    /// Address and length, or zeros.
    map: (CUdeviceptr, u64),
}

impl Choices {
    /// `count` numbers of experts, in any order. Numbers of no expert, such as -1, choose none.
    pub const fn new(ids: Indices, count: u64) -> Self {
        Self { ids, count, map: (0, 0) }
    }

    /// Takes id i as the number at place i of `count` numbers of 32 bits from this address on, a
    /// multiple of 4: a rank that holds some of the experts has their places there, and -1.
    #[must_use]
    pub const fn mapped(self, map: CUdeviceptr, count: u64) -> Self {
        Self { map: (map, count), ..self }
    }
}

/// Decodes the experts of a mixture that a router on the device has chosen, each to its place in
/// one output, and no others: experts in FP8, by which [`GroupedLinear`](super::GroupedLinear) does
/// not multiply. Keeps its matrices alive.
#[derive(Debug)]
pub struct ExpertDecoder {
    matrices: Vec<Matrix>,
    experts: u64,
    bytes: u64,
    launch: DecodeLaunch,
    /// Tasks; the expert of each; room for the numbers of a launch and chosen tasks.
    tasks: Buffer,
    of_tasks: Buffer,
    chosen: Buffer,
}

impl ExpertDecoder {
    /// Prepares decoding of matrices of one GPU, each with the number of its expert: matrix after
    /// matrix, row by row, dense. Takes 260 bytes of device memory for each, and waits for their
    /// upload. An expert may have several matrices.
    ///
    /// # Errors
    /// [`Error::Parameter`] for no matrices, experts from number 1,024 on, matrices of several
    /// GPUs, of other floats than one of 8 bits, or a matrix that would not begin on
    /// a multiple of 16 bytes; [`Error::Limit`] for 2^32 tiles or more; [`Error::Gpu`].
    pub fn new(matrices: &[(Matrix, u32)]) -> Result<Self> {
        let Some((first, _)) = matrices.first() else {
            return refuse("there are no experts", "name the matrices of each");
        };
        let (device, split) = (first.device(), first.split());
        let (mut tasks, mut units, mut bytes, mut staged) = (Vec::new(), 0, 0_u64, 0);
        for (matrix, expert) in matrices {
            let MatrixArrays::Stored(stored) = &matrix.arrays else {
                return refuse("experts in the fast layout", "multiply by them: GroupedLinear");
            };
            let other = !matrix.device().is(device) || matrix.split() != split;
            if other || split.bytes() != 1 || *expert as usize >= MAX_EXPERTS {
                let problem = format!("expert {expert}, {:?}", matrix.split());
                let remedy = "name up to 1,024 experts of one GPU, in one float of 8 bits";
                return refuse(problem, remedy);
            }
            if !bytes.is_multiple_of(OUTPUT_ALIGNMENT) {
                let problem = format!("a matrix would begin at byte {bytes} of the output");
                return refuse(problem, "decode matrices by themselves if their bytes are odd");
            }
            let task = stored.task(&matrix.rows, &matrix.columns, bytes, units);
            units += u64::from(task.tiles);
            bytes += matrix.decoded_bytes();
            staged = staged.max(stored.source.arrays.staged_bytes);
            tasks.push(task);
        }
        Error::check_limit("tiles of one launch on the GPU", units, u32::MAX.into())?;
        let (kernel, task_count) = (kernel_of(split), tasks.len() as u32);
        let fit = device.kernels().fit(kernel, staged)?;
        let launch = DecodeLaunch { kernel, fit, first_task: 0, task_count, unit_count: units };
        let of_tasks: Vec<u32> = matrices.iter().map(|(_, expert)| *expert).collect();
        let experts = of_tasks.iter().max().map_or(0, |&last| u64::from(last) + 1);
        let task_bytes = tasks.as_bytes().len() as u64;
        let room = Buffer::new(device.context(), task_bytes + size_of::<DecodeTask>() as u64)?;
        Ok(Self {
            matrices: matrices.iter().map(|(matrix, _)| matrix.clone()).collect(),
            experts,
            bytes,
            launch,
            tasks: Buffer::of(device.copies(), &tasks)?,
            of_tasks: Buffer::of(device.copies(), &of_tasks)?,
            chosen: room,
        })
    }

    /// Bytes of the output.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The GPU that holds the experts.
    pub fn device(&self) -> &Device {
        self.matrices[0].device()
    }

    /// Puts on a stream the decoding of the chosen experts, or of all. Bytes of other experts stay
    /// as they are, unless there are eight choices or more for each expert: then all are decoded.
    /// Neither allocates nor waits, and can be captured in a graph: a replay uses the choices at
    /// that time.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the output is not a multiple of 16, ids or a map are misaligned, or
    /// the stream or the status is not of the device; [`Error::Gpu`].
    ///
    /// # Safety
    /// In memory of the device, `output` has [`ExpertDecoder::bytes`], and ids and map are as
    /// [`Choices`] says. Until the work is done nothing else uses the output or changes ids and
    /// map, and no other stream runs a decoding of this value. Until then, and until the last
    /// replay of a graph that captured it, all that, this value and the status live.
    pub unsafe fn decode_into_raw(
        &self,
        choices: Option<Choices>,
        output: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        check_output(output)?;
        check_contexts(self.device(), stream, status)?;
        let (kernels, status) = (self.device().kernels(), status.device_pointer());
        let (mut launch, mut tasks) = (self.launch, self.tasks.pointer());
        if let Some(choices) = choices.filter(|one| one.count < ALL_CHOICES * self.experts) {
            let (ids, each, wide) = choices.ids.place();
            let (map, map_count) = choices.map;
            if !ids.is_multiple_of(each) || !map.is_multiple_of(4) {
                return refuse("ids or their map are misaligned", "begin each on its own bytes");
            }
            let task = ChooseTask {
                tasks,
                experts: self.of_tasks.pointer(),
                chosen: self.chosen.pointer(),
                ids,
                map,
                id_count: choices.count,
                map_count,
                task_count: launch.task_count,
                expert_count: self.experts as u32,
                wide,
            };
            // SAFETY: there are as many tasks, each with an expert of these, and room for all; the
            // caller promises the ids and the map.
            unsafe { kernels.choose(stream, &task) }?;
            tasks = self.chosen.pointer() + size_of::<DecodeTask>() as u64;
            launch.task_count = 0;
        }
        // SAFETY: the tasks are of this value's matrices, all or those that the kernel above
        // copies; the output has their places; the rest is the caller's promise.
        unsafe { kernels.decode(stream, &launch, tasks, output, status) }
    }
}
