//! The plane of other floats than BF16: the kept bits of units, and weights joined from them.
//!
//! ```text
//! unit     w0 w1 w2 w3 w4 w5 w6 w7     eight weights of a row
//! plane    | kept bits of w0 | of w1 | ... | of w7 |     whole bytes
//! ```
//! Exponents come as those of BF16 do: placed in words of 16 bits, of a tile row by row.

use super::geometry::{Tile, UNIT};
use crate::{
    bf16,
    float::{Float, FloatSplit, with_float},
};

/// Packs the kept bits of a tile's weights.
pub(super) fn pack<F: Float>(tile: Tile, weights: &[u8], mut plane: &mut [u8]) {
    let each = F::SPLIT.bytes();
    tile.units().for_each(|(_, unit)| {
        let packed = F::pack(F::load(&weights[each * unit.at..each * (unit.at + unit.count)]));
        let bytes = F::SPLIT.plane_bytes(unit.count as u64) as usize;
        let own = plane.split_off_mut(..bytes).expect("the plane has room for a tile");
        own.copy_from_slice(&packed[..bytes]);
    });
}

/// Joins the placed exponents of a tile, whose rows follow each other, with their kept bits:
/// weights to `out`, whose rows are this many weights apart. Returns whether all exponents are
/// such as the dtype has.
pub(super) fn join(
    split: FloatSplit,
    tile: Tile,
    placed: &[u8],
    plane: &[u8],
    (out, pitch): (&mut [u8], usize),
) -> bool {
    with_float!(split, F => join_units::<F>(tile, placed, plane, (out, pitch)))
}

fn join_units<F: Float>(
    tile: Tile,
    placed: &[u8],
    mut plane: &[u8],
    (out, pitch): (&mut [u8], usize),
) -> bool {
    let each = F::SPLIT.bytes();
    let seen = placed[..2 * tile.elements()].as_chunks::<2>().0;
    let seen = seen.iter().fold(0, |seen, &word| seen | u16::from_le_bytes(word));
    let tile = Tile { stride: tile.width, ..tile };
    tile.units().for_each(|(_, unit)| {
        let bytes = F::SPLIT.plane_bytes(unit.count as u64) as usize;
        let kept = F::unpack(plane.split_off(..bytes).unwrap_or_default());
        let at = each * (unit.row * pitch + unit.column);
        let placed = &placed[2 * unit.at..2 * (unit.at + unit.count)];
        let out = &mut out[at..at + each * unit.count];
        if let Some(placed) = placed.first_chunk() {
            out[..each * UNIT].copy_from_slice(&join_unit::<F>(placed, kept)[..each * UNIT]);
            return;
        }
        let mut whole = [0; 2 * UNIT];
        whole[..placed.len()].copy_from_slice(placed);
        out.copy_from_slice(&join_unit::<F>(&whole, kept)[..out.len()]);
    });
    u32::from(bf16::exponent(seen)) >> F::SPLIT.exponent_bits() == 0
}

#[inline]
fn join_unit<F: Float>(placed: &[u8; 2 * UNIT], kept: [u32; UNIT]) -> [u8; 4 * UNIT] {
    let placed = placed.as_chunks::<2>().0;
    F::store(std::array::from_fn(|at| {
        let exponent = bf16::exponent(u16::from_le_bytes(placed[at]));
        F::SPLIT.weight(exponent, kept[at])
    }))
}

/// Whether the bits after the last weight of a unit are zero, in the plane of a tile.
pub(super) fn ends_with_zeros(split: FloatSplit, tile: Tile, plane: &[u8]) -> bool {
    let mut end = 0;
    tile.units().all(|(_, unit)| {
        let bits = unit.count as u64 * u64::from(split.kept_bits());
        end += bits.div_ceil(8) as usize;
        bits.is_multiple_of(8) || plane[end - 1] >> (bits % 8) == 0
    })
}
