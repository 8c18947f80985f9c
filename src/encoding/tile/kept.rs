//! The plane of other floats than BF16: the kept bits of units, and weights joined from them.
//!
//! ```text
//! unit     w0 w1 w2 w3 w4 w5 w6 w7     eight weights of a row
//! plane    | kept bits of w0 | of w1 | ... | of w7 |     whole bytes
//! ```
//! Exponents come as those of BF16 do: placed in words of 16 bits, of a tile row by row.

use super::geometry::{STEP_UNITS, Tile, UNIT};
use crate::{
    bf16,
    float::{Float, FloatSplit, MAX_KEPT_BYTES, MAX_UNIT_BYTES, with_float},
};

/// Packs the kept bits of a tile's weights.
pub(super) fn pack<F: Float>(tile: Tile, weights: &[u8], mut plane: &mut [u8]) {
    let each = F::SPLIT.bytes();
    if let Some(places) = tile.places() {
        let bytes = F::SPLIT.kept_bits() as usize;
        for (at, plane) in places.iter().zip(plane.chunks_exact_mut(STEP_UNITS * bytes)) {
            for (unit, own) in plane.chunks_exact_mut(bytes).enumerate() {
                let at = each * (at + places.unit(unit));
                F::pack(&weights[at..at + each * UNIT], own);
            }
        }
        return;
    }
    tile.units().for_each(|(_, unit)| {
        let weights = &weights[each * unit.at..each * (unit.at + unit.count)];
        let (mut whole, mut packed) = ([0; MAX_UNIT_BYTES], [0; MAX_KEPT_BYTES]);
        whole[..weights.len()].copy_from_slice(weights);
        F::pack(&whole[..each * UNIT], &mut packed);
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
    let kept_bytes = F::SPLIT.kept_bits() as usize;
    let whole = F::SPLIT.plane_bytes(tile.elements() as u64) as usize;
    assert!(plane.len() >= whole, "the plane has all weights of the tile");
    let tile = Tile { stride: tile.width, ..tile };
    let both = tile.places().zip(Tile { stride: pitch, ..tile }.places());
    if let Some((from, to)) = both {
        let steps = from.iter().zip(to.iter()).zip(plane.chunks_exact(STEP_UNITS * kept_bytes));
        for ((first, first_out), plane) in steps {
            for (unit, kept) in plane.chunks_exact(kept_bytes).enumerate() {
                let placed = placed[2 * (first + from.unit(unit))..].first_chunk();
                let placed = placed.expect("a unit's exponents");
                let at = each * (first_out + to.unit(unit));
                F::join(placed, kept, &mut out[at..at + each * UNIT]);
            }
        }
    } else {
        tile.units().for_each(|(_, unit)| {
            let bytes = F::SPLIT.plane_bytes(unit.count as u64) as usize;
            let (mut kept, mut whole) = ([0; MAX_KEPT_BYTES], [0; 2 * UNIT]);
            let mut joined = [0; MAX_UNIT_BYTES];
            kept[..bytes].copy_from_slice(plane.split_off(..bytes).unwrap_or_default());
            let placed = &placed[2 * unit.at..2 * (unit.at + unit.count)];
            whole[..placed.len()].copy_from_slice(placed);
            F::join(&whole, &kept[..kept_bytes], &mut joined[..each * UNIT]);
            let at = each * (unit.row * pitch + unit.column);
            let out = &mut out[at..at + each * unit.count];
            out.copy_from_slice(&joined[..out.len()]);
        });
    }
    u32::from(bf16::exponent(seen)) >> F::SPLIT.exponent_bits() == 0
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
