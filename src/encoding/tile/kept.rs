//! Joins the plane of floats other than BF16 with exponents.
//!
//! ```text
//! unit     w0 w1 w2 w3 w4 w5 w6 w7     eight weights of a row
//! plane    | kept bits of w0 | of w1 | ... | of w7 |     whole bytes
//! ```
//! Exponents arrive as those of BF16 do: in words of 16 bits, row by row of a tile.

use super::geometry::{GROUP_UNITS, LANES, ROW_LANES, RUN, Tile, UNIT};
use crate::{
    bf16,
    float::{Float, FloatSplit, MAX_KEPT_BYTES, MAX_UNIT_BYTES, with_float},
};

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
        let planes = plane.chunks_exact(GROUP_UNITS * kept_bytes);
        let steps = from.iter().zip(to.iter());
        let groups = steps.flat_map(|step| (0..LANES / ROW_LANES).map(move |group| (step, group)));
        for (((first, first_out), group), plane) in groups.zip(planes) {
            for half in 0..2 {
                let at = 2 * (first + from.run(group, half));
                let placed = placed[at..at + 2 * RUN].as_chunks().0.iter();
                let at = each * (first_out + to.run(group, half));
                let units = out[at..at + each * RUN].chunks_exact_mut(each * UNIT);
                for (lane, (placed, unit)) in placed.zip(units).enumerate() {
                    F::join(placed, &plane[kept_bytes * (2 * lane + half)..][..kept_bytes], unit);
                }
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
