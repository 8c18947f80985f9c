//! A tensor's code, in either encoding: what the plan asks it for.

use super::{gap, tile};
use crate::{
    format::records::{
        ENCODING_GAP, ENCODING_TILE, SECTION_BITSTREAM, SECTION_CODEBOOK, SECTION_INDEX,
        SECTION_PLANE,
    },
    huffman,
};

/// How a tensor would be coded, with the size of everything and the place of each chunk.
#[derive(Debug)]
pub(super) enum Coding {
    Gap(Box<gap::GapCoding>),
    Tile(tile::TileCoding),
}

impl Coding {
    /// Section kind and length in bytes of each array; the first is the codebook.
    pub(super) fn arrays(&self) -> Vec<(u32, u64)> {
        match self {
            Self::Gap(coding) => vec![
                (SECTION_CODEBOOK, coding.layout.codebook_bytes()),
                (SECTION_INDEX, coding.layout.gaps_bytes()),
                (SECTION_INDEX, coding.layout.output_offsets_bytes()),
                (SECTION_BITSTREAM, coding.layout.bitstream_bytes()),
                (SECTION_PLANE, coding.layout.plane_bytes()),
            ],
            Self::Tile(coding) => vec![
                (SECTION_CODEBOOK, coding.sizes.codebook_bytes()),
                (SECTION_INDEX, coding.sizes.records_bytes()),
                (SECTION_BITSTREAM, coding.sizes.bitstream_bytes()),
                (SECTION_PLANE, coding.sizes.plane_bytes()),
            ],
        }
    }

    /// The encoding and its parameters, as the tensor's record has them.
    pub(super) fn parameters(&self) -> (u32, [u64; 4]) {
        match self {
            Self::Gap(coding) => {
                let geometry = coding.layout.geometry();
                let (bytes, threads) = (geometry.bytes_per_thread(), geometry.threads_per_block());
                (ENCODING_GAP, [bytes.into(), threads.into(), coding.layout.bit_count(), 0])
            }
            Self::Tile(coding) => {
                let geometry = coding.sizes.geometry();
                (
                    ENCODING_TILE,
                    [geometry.tile_columns(), geometry.columns(), coding.sizes.bit_count(), 0],
                )
            }
        }
    }

    /// The bytes of the codebook.
    pub(super) fn codebook(&self) -> Vec<u8> {
        match self {
            Self::Gap(coding) => huffman::codebook(&coding.lengths),
            Self::Tile(coding) => coding.codebook.clone(),
        }
    }

    /// Parts that are encoded alone, numbered in order.
    pub(super) fn chunk_count(&self) -> usize {
        match self {
            Self::Gap(coding) => coding.chunk_bits.len() - 1,
            Self::Tile(coding) => coding.chunk_count(),
        }
    }

    /// Entropy of the single exponents, in bits.
    pub(super) fn entropy_bits(&self) -> f64 {
        match self {
            Self::Gap(coding) => coding.entropy_bits,
            Self::Tile(coding) => coding.entropy_bits,
        }
    }
}
