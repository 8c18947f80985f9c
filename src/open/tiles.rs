//! Matrices in tiles as they are stored: their arrays, for kernels and bindings.

use std::{borrow::Cow, ops::Range};

use super::Tensor;
use crate::{
    Result,
    encoding::tile::{self, OwnedArrays, Sizes},
    format::Coded,
};

/// A BF16 matrix of a container in tiles of 32 x 256, and its four arrays: codebook, records,
/// bitstream, plane. Of an alias those of its target. Cheap to make.
#[derive(Clone, Debug)]
pub struct Tiles<'m> {
    /// That has the arrays.
    target: Tensor<'m>,
    sizes: Sizes,
}

impl<'m> Tiles<'m> {
    /// Of a tensor, if it is such a matrix.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if its record contradicts itself.
    pub fn of(tensor: &Tensor<'m>) -> Result<Option<Self>> {
        let target = tensor.target();
        let Some(Coded::Tile(sizes)) = target.coded()? else { return Ok(None) };
        let is_matrix = sizes.geometry().is_matrix_of(&tensor.shape());
        Ok(is_matrix.then_some(Self { target, sizes }))
    }

    /// Its rows and columns. Columns are the last dimension or the product of some last ones.
    pub fn shape(&self) -> (u64, u64) {
        let geometry = self.sizes.geometry();
        (geometry.rows(), geometry.columns())
    }

    /// The lengths of its arrays, in bytes.
    pub fn array_lengths(&self) -> [u64; 4] {
        let directory = self.target.shard().directory();
        self.arrays().map(|array| directory.arrays[array].length.get())
    }

    /// One of its arrays, checked against its checksums. If the container is mapped into memory, it
    /// is the mapping's.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if a checksum differs;
    /// [`Error::Io`](crate::Error::Io).
    ///
    /// # Panics
    /// For an index from 4 on.
    pub fn array(&self, index: usize) -> Result<Cow<'m, [u8]>> {
        self.target.shard().read_whole_array(self.arrays()[index])
    }

    /// All four in the mapping of the container, unread and unchecked ([`check`](Self::check)
    /// checks them); `None` if it is not mapped.
    pub fn views(&self) -> Option<[&'m [u8]; 4]> {
        let [codebook, records, bitstream, plane] =
            self.arrays().map(|array| self.target.shard().view_array(array));
        Some([codebook?, records?, bitstream?, plane?])
    }

    /// The most bytes of its bitstream that a tile takes; reads its records.
    ///
    /// # Errors
    /// As [`array`](Self::array).
    pub fn staged_bytes(&self) -> Result<u32> {
        // No truncation: it is less than a tile has at most.
        Ok(tile::staged_bytes(&self.array(1)?) as u32)
    }

    /// Checks what kernels rely on: the checksums of its arrays, its codebook, and that the offsets
    /// of its tiles ascend.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt); [`Error::Io`](crate::Error::Io).
    pub fn check(&self) -> Result<()> {
        self.arrays().into_iter().try_for_each(|array| self.target.shard().check_array(array))?;
        let (codebook, records) = (self.array(0)?, self.array(1)?);
        tile::Codebook::from_bytes(&codebook)
            .and_then(|_| tile::check_offsets(&self.sizes, &records))
            .map_err(|error| self.target.locate(error))
    }

    /// Some of its rows and columns as a matrix of its own: rows from a multiple of 32 to one or to
    /// the end, columns likewise of 256. Decodes nothing, and reads only the chunks of 1 MiB that
    /// hold some of it, whose checksums are checked.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for other rows or columns;
    /// [`Error::Corrupt`](crate::Error::Corrupt), [`Error::Io`](crate::Error::Io).
    pub fn cut(&self, rows: Range<u64>, columns: Range<u64>) -> Result<OwnedArrays> {
        let (codebook, records) = (self.array(0)?, self.array(1)?);
        let read =
            |array: usize, range| self.target.shard().read_array(self.arrays()[array], range);
        tile::cut(&self.sizes, (&codebook, &records), rows, columns, read)
            .map_err(|error| self.target.locate(error))
    }

    /// Their indices in the directory.
    fn arrays(&self) -> [usize; 4] {
        let first = self.target.record().array_range().start;
        [0, 1, 2, 3].map(|at| first + at)
    }

    /// The tensor that has the arrays.
    #[cfg(feature = "cudarc")]
    pub(crate) fn target(&self) -> &Tensor<'m> {
        &self.target
    }
}
