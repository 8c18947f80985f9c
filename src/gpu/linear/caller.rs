//! Matrices in memory of the caller: as stored, with the decode tables that they need, and in the
//! fast layout, which is made there of BF16 weights.
#![expect(unsafe_code, reason = "device addresses and launches, each with its proof")]

use std::{ops::Range, sync::Arc};

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{
    fast::{FastArrays, Packer, Strips},
    matrix::{Matrix, StoredArrays, within},
    task::{STRIP_ROWS, fast_bytes, good_exceptions},
};
use crate::{
    Result,
    gpu::{
        device::Device,
        fault::refuse,
        launches::OUTPUT_ALIGNMENT,
        memory::Buffer,
        task::{KernelEncoding, TableAddresses, TileAddresses},
    },
};

impl Device {
    /// Bytes of the decode table of a tensor in tiles.
    pub const fn table_bytes() -> u64 {
        KernelEncoding::Tile.table_bytes()
    }

    /// Builds the decode tables of tensors in tiles, and waits. Any content of a codebook is safe.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for a misaligned address;
    /// [`Error::Gpu`](crate::Error::Gpu).
    ///
    /// # Safety
    /// Codebooks and tables are memory of this device, and nobody else uses the tables meanwhile.
    pub unsafe fn build_tables(&self, tables: &[TableAddresses]) -> Result<()> {
        let misaligned =
            |at: &TableAddresses| !at.codebook.is_multiple_of(2) || !at.table.is_multiple_of(16);
        if tables.iter().any(misaligned) {
            let problem = "a codebook or a decode table is misaligned";
            return refuse(problem, "begin each on a multiple of 256");
        }
        if tables.is_empty() {
            return Ok(());
        }
        let tasks = Buffer::of(self.copies(), tables)?;
        self.kernels().build_tables(KernelEncoding::Tile, self.copies(), &tasks)
    }
}

impl Matrix {
    /// A matrix of these rows and columns in memory that the caller keeps, as it is stored. Waits
    /// for nothing.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for a misaligned address, no rows or columns,
    /// columns that are no multiple of 8, or more than 2^32 - 1 of either.
    ///
    /// # Safety
    /// In memory that the device reads (pinned memory of the host too): the arrays of a matrix of
    /// this shape ([`Arrays`](crate::encoding::tile::Arrays) tells their lengths), of any content,
    /// and its table. They live as long as this matrix, what is made of it, and the work that uses
    /// them.
    pub unsafe fn of_tiles(device: &Device, shape: (u64, u64), at: TileAddresses) -> Result<Self> {
        check_shape(shape)?;
        let TileAddresses { records, bitstream, bitstream_bytes, plane, table, .. } = at;
        if !(records | bitstream | bitstream_bytes | plane | table).is_multiple_of(OUTPUT_ALIGNMENT)
        {
            let remedy = format!("begin each on a multiple of {OUTPUT_ALIGNMENT}");
            return refuse("an array is misaligned", remedy);
        }
        Ok(Self::stored(Arc::default(), StoredArrays::new(device, shape, at, None)))
    }

    /// Likewise in the fast layout: `strips` of [`Matrix::fast_bytes`], then where its exceptions
    /// are, of 4 bytes each, and how many.
    ///
    /// # Errors
    /// As [`Matrix::of_tiles`], and for 2^32 weights or more.
    ///
    /// # Safety
    /// As [`Matrix::of_tiles`].
    pub unsafe fn of_fast(
        device: &Device,
        shape: (u64, u64),
        strips: CUdeviceptr,
        (entries, exceptions): (CUdeviceptr, u64),
    ) -> Result<Self> {
        check_shape(shape)?;
        if !(strips | entries).is_multiple_of(OUTPUT_ALIGNMENT)
            || u32::try_from(shape.0 * shape.1).is_err()
        {
            let problem = format!("{} x {} weights, or misaligned arrays", shape.0, shape.1);
            return refuse(problem, "cut it into fewer rows, and begin arrays on multiples of 16");
        }
        let strips = Strips { rows: shape.0, columns: shape.1, address: strips };
        let device = device.clone();
        let arrays = FastArrays { device, strips, entries, exceptions, _memory: None };
        Ok(Self::fast(Arc::default(), &Arc::new(arrays)))
    }
}

fn check_shape((rows, columns): (u64, u64)) -> Result<()> {
    let most = u64::from(u32::MAX);
    if rows == 0 || rows > most || columns == 0 || columns > most || !columns.is_multiple_of(8) {
        let problem =
            format!("{rows} x {columns} weights are no matrix of 32-bit numbers in tiles");
        return refuse(problem, "columns are a multiple of 8");
    }
    Ok(())
}

/// Makes a matrix in the fast layout of BF16 weights, some rows at a time, in memory of the caller:
/// the same bytes in every run.
///
/// Device memory of its own: 4 bytes for each exception that is good, one of 256 weights.
#[derive(Debug)]
pub struct FastPacker {
    strips: Strips,
    packer: Packer,
}

impl FastPacker {
    /// For a matrix of these rows and columns at `strips`, a multiple of 16. Puts the counter's
    /// beginning on the stream.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for no weights or 2^32 and more, or a
    /// misaligned address; [`Error::Gpu`](crate::Error::Gpu).
    ///
    /// # Safety
    /// `strips` has [`Matrix::fast_bytes`] of device memory, which nobody else uses until the last
    /// work of this value is done.
    pub unsafe fn new(
        device: &Device,
        (rows, columns): (u64, u64),
        strips: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<Self> {
        let weights = rows.checked_mul(columns).and_then(|weights| u32::try_from(weights).ok());
        let Some(weights) = weights.filter(|&weights| weights > 0 && strips.is_multiple_of(16))
        else {
            let problem = format!("{rows} x {columns} weights cannot be packed at {strips:#x}");
            return refuse(problem, "take fewer rows, and memory that begins on 256 bytes");
        };
        let packer = Packer::new(device, good_exceptions(weights.into()))?;
        packer.begin(stream)?;
        Ok(Self { strips: Strips { rows, columns, address: strips }, packer })
    }

    /// Puts the packing of some rows on the stream: they follow those before, and end on a multiple
    /// of 32 or with the last one.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for other rows;
    /// [`Error::Gpu`](crate::Error::Gpu).
    ///
    /// # Safety
    /// `weights` is device memory with the rows, row by row, dense, when the stream comes to it;
    /// that and `self` live until then.
    pub unsafe fn pack(
        &self,
        rows: Range<u64>,
        weights: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<()> {
        let rows = within(&rows, self.strips.rows, STRIP_ROWS, "rows")?;
        // SAFETY: the caller's promise.
        unsafe { self.packer.pack(&self.strips, &rows, weights, stream) }
    }

    /// Waits for all rows; how many exceptions there are, if they are no more than
    /// [`Matrix::good_exceptions`].
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn exceptions(&self, stream: &CudaStream) -> Result<Option<u64>> {
        let count = self.packer.count(stream)?;
        Ok(Some(count).filter(|&count| count <= self.packer.capacity()))
    }

    /// Puts the copying of this many exceptions on the stream.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for more than there can be;
    /// [`Error::Gpu`](crate::Error::Gpu).
    ///
    /// # Safety
    /// `to` is device memory of 4 bytes for each; that and `self` live until the stream is done.
    pub unsafe fn take(&self, exceptions: u64, to: CUdeviceptr, stream: &CudaStream) -> Result<()> {
        if exceptions > self.packer.capacity() {
            let problem = format!("{exceptions} exceptions");
            return refuse(problem, "take as many as FastPacker::exceptions says");
        }
        // SAFETY: the caller's promise.
        unsafe { self.packer.copy(exceptions, to, stream) }
    }

    /// Bytes that the matrix takes, except its exceptions.
    pub const fn bytes(&self) -> u64 {
        fast_bytes(self.strips.rows, self.strips.columns)
    }
}
