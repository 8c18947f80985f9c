//! A tensor's code, in either encoding: what the plan asks it for.

use super::{gap, tile};
use crate::{
    format::{Coded, section_of},
    huffman,
};

/// How a tensor would be coded, with the size of everything and the place of each portion.
#[derive(Debug)]
pub(super) enum Coding {
    Gap(Box<gap::GapCoding>),
    Tile(tile::TileCoding),
}

impl Coding {
    /// The encoding and its parameters, as the tensor's record has them; section kind and length in
    /// bytes of each array, of which the first is the codebook.
    pub(super) fn stored(&self) -> (u32, [u64; 4], Vec<(u32, u64)>) {
        let sizes = match self {
            Self::Gap(coding) => Coded::Gap(coding.sizes),
            Self::Tile(coding) => Coded::Tile(coding.sizes),
        };
        let [first, second, third] = sizes.parameters();
        let arrays = sizes.arrays().into_iter();
        let arrays = arrays.map(|(kind, length)| (section_of(kind), length)).collect();
        (sizes.encoding(), [first, second, third, 0], arrays)
    }

    /// The bytes of the codebook.
    pub(super) fn codebook(&self) -> Vec<u8> {
        match self {
            Self::Gap(coding) => huffman::codebook(&coding.lengths),
            Self::Tile(coding) => coding.codebook.clone(),
        }
    }

    /// Parts that are encoded alone, numbered in order.
    pub(super) fn portion_count(&self) -> usize {
        match self {
            Self::Gap(coding) => coding.portion_bits.len() - 1,
            Self::Tile(coding) => coding.portion_count(),
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
