//! Matrices in memory of the caller: their arrays on the way to it, and their decode tables.
#![expect(unsafe_code, reason = "device addresses and calls of the driver, each with its proof")]

use std::{ffi::c_void, sync::Arc, sync::atomic::AtomicBool};

use cudarc::driver::{
    CudaContext,
    sys::{self, CUdeviceptr},
};
use rayon::prelude::*;

use super::{
    Device,
    coding::Coding,
    fault::OrFault,
    memory::Buffer,
    task::TableTask,
    upload::{Delivery, Origin, default_readers, upload},
};
use crate::{
    Error, Model, Result, Tensor,
    encoding::tile::Arrays,
    progress::{Observer, Stage},
};

/// A decode table and the codebook that it is made of: device addresses.
#[derive(Clone, Copy, Debug)]
pub struct TableAddresses {
    /// Of the codebook, a multiple of 2.
    pub codebook: CUdeviceptr,
    /// Its bytes.
    pub codebook_bytes: u64,
    /// Of [`Device::table_bytes`], a multiple of 16.
    pub table: CUdeviceptr,
}

impl Device {
    /// Bytes of the decode table of a tensor in tiles.
    pub const fn table_bytes() -> u64 {
        Coding::Tile.table_bytes()
    }

    /// Builds the decode tables of tensors in tiles, and waits. Any content of a codebook is safe.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a misaligned address; [`Error::Gpu`].
    ///
    /// # Safety
    /// Codebooks and tables are memory of this device, and nobody else uses the tables meanwhile.
    pub unsafe fn build_tables(&self, tables: &[TableAddresses]) -> Result<()> {
        let misaligned = |at: &TableAddresses| !at.codebook.is_multiple_of(2) || !at.table.is_multiple_of(16);
        if tables.iter().any(misaligned) {
            let problem = "a codebook or a decode table is misaligned";
            return Err(Error::parameter(problem, "begin each on a multiple of 256"));
        }
        if tables.is_empty() {
            return Ok(());
        }
        let task = |&TableAddresses { codebook, codebook_bytes, table }: &TableAddresses| TableTask {
            codebook,
            table,
            codebook_bytes,
        };
        let tasks: Vec<TableTask> = tables.iter().map(task).collect();
        let tasks = Buffer::of(self.copies(), &tasks)?;
        self.kernels().build_tables(Coding::Tile, self.copies(), &tasks)
    }

    /// Pins memory of the host, so that kernels of all GPUs read it over the bus.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses: the memory shares a page with some that is pinned, or is no ordinary memory.
    ///
    /// # Safety
    /// The memory is there until the result is dropped, and until all work that reads it is done.
    pub unsafe fn pin(&self, address: *mut c_void, bytes: usize) -> Result<PinnedRange> {
        let action = "pinning memory of the host";
        let context = Arc::clone(self.context());
        context.bind_to_thread().or_fault(action)?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's promise; `Drop` unregisters it.
        let answer = unsafe { sys::cuMemHostRegister_v2(address, bytes, flags) };
        answer.result().or_fault(action)?;
        Ok(PinnedRange { address: address as usize, context })
    }
}

/// Memory of the host that [`Device::pin`] pinned, until this is dropped.
#[derive(Debug)]
pub struct PinnedRange {
    address: usize,
    context: Arc<CudaContext>,
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        self.context.bind_to_thread().ok();
        // SAFETY: `pin` registered it, and its caller's promise says that nothing reads it any more.
        let _ = unsafe { sys::cuMemHostUnregister(self.address as *mut c_void) };
    }
}

impl Model {
    /// Copies the four arrays of BF16 matrices in tiles of 32 x 256 to device memory of the caller, each array to its address, in the
    /// order of [`Tensor::tile_array`]. Checksums, codebooks and offsets are checked. Done when it returns.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a tensor that is none or does not exist; [`Error::Corrupt`], [`Error::Io`], [`Error::Gpu`],
    /// [`Error::Cancelled`].
    ///
    /// # Safety
    /// Each address has device memory for its array ([`Tensor::tile_array_lengths`]), which nobody else uses meanwhile.
    pub unsafe fn upload_arrays(
        &self,
        device: &Device,
        wanted: &[(&str, [CUdeviceptr; 4])],
        observer: &dyn Observer,
    ) -> Result<()> {
        let find = |&(name, to): &(&str, [CUdeviceptr; 4])| {
            let tensor = self.tensor(name).map(|tensor| tensor.target());
            let tensor = tensor.ok_or_else(|| no_matrix(name))?;
            tensor.tile_shape()?.map(|shape| (tensor, shape, to)).ok_or_else(|| no_matrix(name))
        };
        let found = wanted.iter().map(find).collect::<Result<Vec<_>>>()?;
        observer.begin(found.iter().flat_map(|(tensor, ..)| tensor.tile_array_lengths()).sum());
        observer.enter(Stage::Load);
        let mut deliveries = Vec::new();
        for (tensor, _, to) in &found {
            let first = tensor.record().array_range().start;
            deliveries.extend(to.iter().zip(first..).map(|(&to, array)| Delivery {
                shard: tensor.shard(),
                from: Origin::Array(array),
                to,
            }));
        }
        let stop = AtomicBool::new(false);
        // SAFETY: the caller's promise.
        unsafe { upload(device, &deliveries, default_readers(), &stop, observer) }?;
        found.par_iter().try_for_each(|(tensor, shape, _)| check(tensor, *shape))
    }
}

fn no_matrix(name: &str) -> Error {
    let problem = format!("there is no BF16 matrix {name:?} in tiles of 32 x 256");
    Error::parameter(problem, "ask Tensor::tile_shape first")
}

/// What kernels rely on, and the chunks of which other arrays have the rest.
fn check(tensor: &Tensor<'_>, (rows, columns): (u64, u64)) -> Result<()> {
    let first = tensor.record().array_range().start;
    (first..first + 4).try_for_each(|array| tensor.shard().check_array(array))?;
    let [a, b, c, d] = [0, 1, 2, 3].map(|array| tensor.tile_array(array));
    let arrays = [a?, b?, c?, d?];
    let checked = Arrays::new(rows, columns, arrays.each_ref().map(|array| &**array));
    checked.and_then(|arrays| arrays.check()).map_err(|error| tensor.locate(error))
}
