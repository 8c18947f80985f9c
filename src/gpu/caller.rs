//! Matrices in memory of the caller: their arrays on the way to it, and their decode tables.
#![expect(unsafe_code, reason = "device addresses, each with its proof")]

use std::sync::atomic::AtomicBool;

use cudarc::driver::sys::CUdeviceptr;
use rayon::prelude::*;

use super::{
    Device,
    coding::KernelEncoding,
    memory::Buffer,
    task::TableTask,
    upload::{Delivery, Origin, default_readers, upload},
};
use crate::{
    Error, Model, Result,
    open::Tiles,
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
        KernelEncoding::Tile.table_bytes()
    }

    /// Builds the decode tables of tensors in tiles, and waits. Any content of a codebook is safe.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a misaligned address; [`Error::Gpu`].
    ///
    /// # Safety
    /// Codebooks and tables are memory of this device, and nobody else uses the tables meanwhile.
    pub unsafe fn build_tables(&self, tables: &[TableAddresses]) -> Result<()> {
        let misaligned =
            |at: &TableAddresses| !at.codebook.is_multiple_of(2) || !at.table.is_multiple_of(16);
        if tables.iter().any(misaligned) {
            let problem = "a codebook or a decode table is misaligned";
            return Err(Error::parameter(problem, "begin each on a multiple of 256"));
        }
        if tables.is_empty() {
            return Ok(());
        }
        let task = |&TableAddresses { codebook, codebook_bytes, table }: &TableAddresses| {
            TableTask { codebook, table, codebook_bytes }
        };
        let tasks: Vec<TableTask> = tables.iter().map(task).collect();
        let tasks = Buffer::of(self.copies(), &tasks)?;
        self.kernels().build_tables(KernelEncoding::Tile, self.copies(), &tasks)
    }
}

impl Model {
    /// Copies the four arrays of BF16 matrices in tiles of 32 x 256 to device memory of the caller,
    /// each array to its address, in the order of [`Tiles::array`]. Checksums, codebooks and
    /// offsets are checked. Done when it returns.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a tensor that is none or does not exist; [`Error::Corrupt`],
    /// [`Error::Io`], [`Error::Gpu`], [`Error::Cancelled`].
    ///
    /// # Safety
    /// Each address has device memory for its array
    /// ([`Tiles::array_lengths`]), which nobody else uses meanwhile.
    pub unsafe fn upload_arrays(
        &self,
        device: &Device,
        wanted: &[(&str, [CUdeviceptr; 4])],
        observer: &dyn Observer,
    ) -> Result<()> {
        let find = |&(name, to): &(&str, [CUdeviceptr; 4])| {
            let tiles = Tiles::of(&self.tensor(name)?)?;
            tiles.map(|tiles| (tiles, to)).ok_or_else(|| no_matrix(name))
        };
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
        let stop = AtomicBool::new(false);
        // SAFETY: the caller's promise.
        unsafe { upload(device, &deliveries, default_readers(), &stop, observer) }?;
        // Also the chunks of which other arrays have the rest.
        found.par_iter().try_for_each(|(tiles, _)| tiles.check())
    }
}

fn no_matrix(name: &str) -> Error {
    let problem = format!("there is no BF16 matrix {name:?} in tiles of 32 x 256");
    Error::parameter(problem, "ask Tiles::of first")
}
