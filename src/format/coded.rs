//! The encodings that code weights: which there are, and the rules that all share (spec/format.md,
//! section 6).

use std::ops::Deref;

use zerocopy::little_endian::U64;

use super::{
    Directory,
    records::{
        ENCODING_GAP, ENCODING_TILE, SECTION_BITSTREAM, SECTION_CODEBOOK, SECTION_INDEX,
        SECTION_PLANE, TensorRecord,
    },
};
use crate::{
    Result, dtype,
    encoding::{
        gap::GapSizes,
        stored::{ArrayKind, CodedSizes},
        tile,
    },
};

/// The sizes of a coded tensor, in any of the encodings.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Coded {
    Gap(GapSizes),
    Tile(tile::Sizes),
}

impl Deref for Coded {
    type Target = dyn CodedSizes;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Gap(sizes) => sizes,
            Self::Tile(sizes) => sizes,
        }
    }
}

impl Coded {
    /// Whether tensors of the encoding with this number are coded.
    pub(crate) fn is_coded(encoding: u32) -> bool {
        [ENCODING_GAP, ENCODING_TILE].contains(&encoding)
    }

    /// What the record of a BF16 tensor with a shape that exists says; `None` if it is not coded.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) and [`Error::Limit`](crate::Error::Limit) if no
    /// such tensor can be.
    pub(crate) fn of(directory: &Directory, tensor: &TensorRecord) -> Result<Option<Self>> {
        let encoding = tensor.encoding.get();
        if !Self::is_coded(encoding) {
            return Ok(None);
        }
        let [parameters @ .., _] = tensor.parameters.map(U64::get);
        let elements = dtype::elements(&tensor.dimensions())?;
        let codebook = directory.arrays[tensor.array_range()].first();
        let codebook = codebook.map_or(0, |array| array.length.get());
        Ok(match encoding {
            ENCODING_GAP => Some(Self::Gap(GapSizes::of_record(parameters, elements, codebook)?)),
            ENCODING_TILE => {
                Some(Self::Tile(tile::Sizes::of_record(parameters, elements, codebook)?))
            }
            _ => None,
        })
    }

    /// Its number.
    pub(crate) fn encoding(&self) -> u32 {
        match self {
            Self::Gap(_) => ENCODING_GAP,
            Self::Tile(_) => ENCODING_TILE,
        }
    }
}

/// The kind of section in which such an array lies.
pub(crate) const fn section_of(kind: ArrayKind) -> u32 {
    match kind {
        ArrayKind::Codebook => SECTION_CODEBOOK,
        ArrayKind::Index => SECTION_INDEX,
        ArrayKind::Bitstream => SECTION_BITSTREAM,
        ArrayKind::Plane => SECTION_PLANE,
    }
}
