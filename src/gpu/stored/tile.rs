//! A `tile` tensor as a GPU needs it.

use std::ops::Range;

use super::{Addresses, ArrayPlace, CodedTensor, whole_array};
use crate::{
    Error, Result, Tensor,
    encoding::{
        stored::ReadArrays as _,
        tile::{self, Codebook, Sizes, stored as arrays},
    },
    gpu::{
        coding::{KernelEncoding, TILE_KERNEL},
        needs::TensorId,
        task::{Task, TileArrays, TileSource, TileTask, Tiles},
    },
    open::Rect,
};

#[derive(Debug)]
pub(in crate::gpu) struct StoredTile {
    id: TensorId,
    sizes: Sizes,
    records: ArrayPlace,
    bitstream: ArrayPlace,
    plane: ArrayPlace,
    codebook: Box<[u8]>,
    staged_bytes: u32,
}

impl StoredTile {
    pub(super) fn read(
        tensor: &Tensor<'_>,
        id: TensorId,
        sizes: Sizes,
        validate: bool,
    ) -> Result<Self> {
        let codebook = whole_array(tensor, arrays::CODEBOOK, sizes.codebook_bytes())?;
        // Not kept: the tiles of a range follow from its numbers.
        let records = tensor.arrays().read(arrays::RECORDS, 0..sizes.records_bytes())?;
        if validate {
            let checked =
                Codebook::from_bytes(&codebook).and_then(|_| tile::check_offsets(&sizes, &records));
            checked.map_err(|error| tensor.locate(error))?;
        }
        let [records_place, bitstream, plane] = [arrays::RECORDS, arrays::BITSTREAM, arrays::PLANE]
            .map(|array| ArrayPlace::of(tensor, id.0, array));
        Ok(Self {
            id,
            sizes,
            records: records_place,
            bitstream,
            plane,
            staged_bytes: tile::staged_bytes(&records) as u32,
            codebook: codebook.into_owned().into(),
        })
    }

    /// As [`StoredGap::of`], of one row of tiles.
    #[cfg(test)]
    pub(in crate::gpu) fn of(weights: &[u8]) -> Self {
        let geometry = tile::Geometry::vector(weights.len() as u64 / 2).unwrap();
        let tensor = tile::encode_tensor(weights, geometry).unwrap();
        let place = |section| ArrayPlace { section: (0, section), offset: 256 };
        Self {
            id: (0, 1),
            sizes: tensor.sizes,
            records: place(0),
            bitstream: place(1),
            plane: place(2),
            staged_bytes: tile::staged_bytes(&tensor.records) as u32,
            codebook: tensor.codebook.into(),
        }
    }
}

impl StoredTile {
    pub(in crate::gpu) fn arrays(&self, addresses: &dyn Addresses) -> TileArrays {
        TileArrays {
            records: addresses.array(self.records),
            bitstream: addresses.array(self.bitstream),
            plane: addresses.array(self.plane),
            table: addresses.table(self.id),
        }
    }

    pub(in crate::gpu) fn id(&self) -> TensorId {
        self.id
    }

    /// Its tiles, and the sizes of its arrays.
    pub(in crate::gpu) fn sizes(&self) -> &Sizes {
        &self.sizes
    }
}

impl CodedTensor for StoredTile {
    fn coding(&self) -> KernelEncoding {
        KernelEncoding::Tile
    }

    fn kernel(&self) -> usize {
        TILE_KERNEL
    }

    fn codebook(&self) -> &[u8] {
        &self.codebook
    }

    fn staged_bytes(&self) -> u32 {
        self.staged_bytes
    }

    fn as_tile(&self) -> Option<&StoredTile> {
        Some(self)
    }

    fn takes(&self, rect: &Rect) -> bool {
        rect.is_run() || self.has_rows_of(rect.width)
    }

    fn task(
        &self,
        rect: &Rect,
        output: u64,
        first_unit: u64,
        addresses: &dyn Addresses,
    ) -> Result<(Task, u64)> {
        let (geometry, elements) = (self.sizes.geometry(), rect.elements());
        // As wide as the kernel shall take the matrix for, and which columns are wanted.
        let (columns, wanted) =
            if self.has_rows_of(rect.width) && !(self.is_vector() && rect.is_run()) {
                (rect.width / 2, rect.columns.start / 2..rect.columns.end / 2)
            } else {
                (geometry.columns(), 0..geometry.columns())
            };
        let tiles = self.tiles(&elements, &wanted)?;
        let most = u64::from(u32::MAX);
        let end = first_unit + tiles.count();
        if end > most {
            return Err(Error::limit("tiles of one launch on the GPU", end, most));
        }
        let source = TileSource {
            arrays: self.arrays(addresses),
            bits_bytes: self.sizes.bitstream_bytes(),
            rows: geometry.elements() / columns,
            columns,
            tiles_across: if self.is_vector() { 0 } else { geometry.strip_tiles() },
        };
        let task = TileTask::new(&source, &elements, &wanted, &tiles, output, first_unit);
        Ok((task.into(), tiles.count()))
    }
}

impl StoredTile {
    fn is_vector(&self) -> bool {
        self.sizes.geometry().tile_rows() == 1
    }

    /// Whether columns of rows of this many bytes can be decoded: those of its matrix, or any of a
    /// vector whose indices the kernel can divide.
    fn has_rows_of(&self, width: u64) -> bool {
        if self.is_vector() {
            u32::try_from(self.sizes.elements()).is_ok()
        } else {
            width == 2 * self.sizes.geometry().columns()
        }
    }

    /// The tiles that hold a range of elements, and of it some columns. Those of a vector are all
    /// in one row.
    fn tiles(&self, elements: &Range<u64>, columns: &Range<u64>) -> Result<Tiles> {
        let strips = self.sizes.strips_of(elements)?;
        if self.is_vector() {
            return Ok(Tiles { rows: 0..1, columns: strips });
        }
        let each = self.sizes.geometry().tile_columns();
        Ok(Tiles { rows: strips, columns: columns.start / each..columns.end.div_ceil(each) })
    }
}
