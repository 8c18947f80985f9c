//! Products of some rows of x with one or several matrices, prepared once and launched many times.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::launch::{Call, LinearInput, LinearOutput, ProductLaunch};
use super::{kernels::too_little_shared_memory, matrix::Matrix};
use crate::Result;
use crate::gpu::status::{Status, check_contexts};
use crate::gpu::{device::Device, fault::refuse};

const WORKSPACE_ALIGNMENT: u64 = 16;

/// Products `y = x Wᵀ (+ bias)` of the same rows of x with one matrix or several, prepared once and
/// run any number of times, on any streams.
///
/// Each matrix may be as stored or in the fast layout. x may have any number of rows; if necessary,
/// several launches multiply them. A launch takes 16 rows (fewer with matrices as stored if blocks
/// have little shared memory); with compute capability 9.0 it takes 64 rows with matrices as
/// stored, and 3072 with matrices in the fast layout. From [`Linear::crossover_rows`] on it is
/// faster to decode ([`Matrix::decode_into_raw`]) and multiply with a BLAS library.
///
/// Sums are f32, and each is rounded once. The bits of y are the same in every run. On one GPU, for
/// a row that is multiplied with up to 15 others at once, they depend only on the matrix, its
/// residence and the row of x. With more rows, they also depend on whether there are up to 32, 64,
/// 128, 192 or 256 rows, and above that on the number of 256s; each 3072 rows are multiplied
/// separately. If [`LinearOutput::splits`] sets the order of sums, the bits do not depend on the
/// number of rows. They never depend on other matrices. The product keeps its matrices alive.
///
/// `examples/gpu_mlp.rs` is an example; that of [`GroupedLinear`](super::GroupedLinear) shows x and
/// y.
#[derive(Debug)]
pub struct Linear {
    matrices: Vec<Matrix>,
    launches: Vec<ProductLaunch>,
    crossover_rows: u64,
}

impl Linear {
    /// Prepares the product with these matrices: one launch for up to eight of a residence. Takes
    /// no device memory.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if there is no matrix, if one has weights
    /// other than BF16, or if they differ in columns or GPU; [`Error::Gpu`](crate::Error::Gpu) if
    /// the GPU has too little shared memory for the kernels.
    pub fn new(matrices: &[Matrix]) -> Result<Self> {
        let Some(first) = matrices.first() else {
            return refuse("there is nothing to multiply by", "name one matrix or more");
        };
        let kernels = first.device().linear_kernels()?;
        for matrix in matrices {
            matrix.check_bf16()?;
            check_pair(first, matrix)?;
        }
        let launches = ProductLaunch::all(kernels, matrices);
        if launches.iter().any(|launch| launch.max_rows == 0) {
            return Err(too_little_shared_memory());
        }
        let crossover = matrices.iter().map(|matrix| matrix.crossover_rows(kernels.crossover));
        let crossover_rows = crossover.min().unwrap_or(1);
        Ok(Self { matrices: matrices.to_vec(), launches, crossover_rows })
    }

    /// Its matrices, in the order of the outputs.
    pub fn matrices(&self) -> &[Matrix] {
        &self.matrices
    }

    /// The GPU that holds them.
    pub fn device(&self) -> &Device {
        self.matrices[0].device()
    }

    /// The approximate number of rows of x from which it is faster to decode the matrices
    /// ([`Matrix::decode_into_raw`]) and multiply with a BLAS library. A table by GPU and
    /// residence, from times on an H100 and an H200; estimated for other GPUs. In the fast layout
    /// it is less if more than one of 4,096 weights is an [exception](Matrix::exceptions). For
    /// several matrices it is the smallest of their numbers. `linear_bench crossover` in
    /// `kernels/bench` measures it.
    pub fn crossover_rows(&self) -> u64 {
        self.crossover_rows
    }

    /// Whether [`Linear::multiply`] of this many rows of x accepts these numbers of splits, one for
    /// each matrix ([`LinearOutput::splits`]), and adds in their order. 0 is always accepted. This
    /// costs nothing, and depends only on the GPU, residences and shapes.
    pub fn keeps_order(&self, rows: u64, splits: &[u64]) -> bool {
        splits.len() == self.matrices.len()
            && self.launches.iter().all(|launch| launch.keeps_order(rows, splits))
    }

    /// Device memory that a call with up to this many rows of x needs besides x and y, in bytes; it
    /// may be 0. Up to 16 rows need at most 2.4 MB. With compute capability 9.0, other kernels
    /// multiply more rows: matrices as stored then need up to 8.7 MB each for 32 rows, and 17.4 MB
    /// for more; matrices in the fast layout need no more up to 128 rows, and then 393,216 bytes
    /// per multiprocessor (of at least 16), 51.9 MB, or less if they are small.
    pub fn workspace_bytes(&self, rows: u64) -> u64 {
        self.launches.iter().map(|launch| launch.workspace_bytes(rows)).max().unwrap_or(0)
    }

    /// Puts the products on a stream, each to its output. Neither allocates on the GPU nor waits,
    /// and can be captured in a graph. Without rows there is no work. Contradictions in stored data
    /// set `status`, and outputs are then undefined. Products of up to 32 rows with the caller's
    /// splits do not detect contradictions in the fast layout, which is made in GPU memory and
    /// never read from a file.
    ///
    /// With compute capability 9.0 and a driver of CUDA 12.3 or newer, a launch begins while the
    /// previous kernel on the stream ends (programmatic stream serialization). It then reads the
    /// matrices, which were complete when [`GpuModel::matrix`](crate::gpu::GpuModel::matrix) or
    /// [`Matrix::to_fast`] returned; it waits for that kernel before it reads x or a bias, or
    /// writes. It also lets the next launch begin early. A kernel of the caller that has the
    /// attribute must wait (`griddepcontrol.wait`) before it reads y or writes x, and may rely on
    /// writes from before this launch; any other kernel waits by itself.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the number of outputs is not that of
    /// matrices, no kernel adds in the order of the splits ([`Linear::keeps_order`]), rows overlap,
    /// an address is misaligned, or the stream or the status is of another device;
    /// [`Error::Gpu`](crate::Error::Gpu) if the driver refuses.
    ///
    /// # Safety
    /// In memory of the device: `x` has its rows of as many elements as the matrices have columns;
    /// each output has room for as many rows of as many elements as its matrix has rows, and its
    /// bias has as many elements. `workspace` has [`Linear::workspace_bytes`] for as many rows; it
    /// was filled with zeros once, and since then only calls of [`Linear::multiply`], of any
    /// `Linear`, have written to it, one after the other (on one stream, or ordered by events).
    /// Until the work is done nothing else uses outputs and workspace or changes the rest; until
    /// then, and until the last replay of a graph that captured it, all that and this value live.
    pub unsafe fn multiply(
        &self,
        x: LinearInput,
        outputs: &[LinearOutput],
        workspace: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        self.check(&x, outputs, workspace)?;
        check_contexts(self.device(), stream, status)?;
        if x.rows == 0 {
            return Ok(());
        }
        let kernels = self.device().linear_kernels()?;
        for launch in &self.launches {
            let most = launch.max_rows;
            for first in (0..x.rows).step_by(most as usize) {
                let pointer = x.pointer + 2 * first * x.pitch;
                let x = LinearInput { pointer, rows: most.min(x.rows - first), ..x };
                let call = Call { x, outputs, first, workspace, stream, status };
                // SAFETY: `self` keeps the matrices, and `check` saw pitches and addresses; the
                // rest is the caller's promise.
                unsafe { launch.run(kernels, &call) }?;
            }
        }
        Ok(())
    }

    fn check(
        &self,
        x: &LinearInput,
        outputs: &[LinearOutput],
        workspace: CUdeviceptr,
    ) -> Result<()> {
        if outputs.len() != self.matrices.len() {
            let problem = format!("{} outputs for {} matrices", outputs.len(), self.matrices.len());
            return refuse(problem, "give one for each matrix, in their order");
        }
        let splits: Vec<_> = outputs.iter().map(|output| output.splits).collect();
        if !self.keeps_order(x.rows, &splits) {
            let problem =
                format!("no kernel adds {} rows in the order of {splits:?} splits", x.rows);
            return refuse(
                problem,
                "ask Linear::keeps_order first; decode the matrices, or pass 0",
            );
        }
        let least = |pitch, columns| pitch >= columns || x.rows < 2;
        let rows = self.matrices.iter().map(Matrix::row_count);
        if !least(x.pitch, self.matrices[0].column_count())
            || !outputs.iter().zip(rows).all(|(y, rows)| least(y.pitch, rows))
        {
            return refuse("rows of x or y would overlap", "pitches count elements, not bytes");
        }
        let halves = outputs.iter().fold(x.pointer, |all, y| all | y.pointer | y.bias);
        if !halves.is_multiple_of(2) || !workspace.is_multiple_of(WORKSPACE_ALIGNMENT) {
            let problem = "x, y, a bias or the workspace is misaligned";
            return refuse(problem, "BF16 needs multiples of 2 bytes, a workspace of 16");
        }
        Ok(())
    }
}

/// Checks that two matrices can be multiplied by the same x.
pub(super) fn check_pair(first: &Matrix, other: &Matrix) -> Result<()> {
    let (name, columns) = (other.name(), other.column_count());
    if columns != first.column_count() {
        let problem = format!(
            "{:?} has {} columns and {name:?} {columns}",
            first.name(),
            first.column_count()
        );
        return refuse(problem, "multiply only by matrices that share x");
    }
    if !other.device().is(first.device()) {
        let problem = format!("{:?} and {name:?} lie on different GPUs", first.name());
        return refuse(problem, "prepare a product for each GPU");
    }
    Ok(())
}
