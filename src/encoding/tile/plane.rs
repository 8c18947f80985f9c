//! Joins the plane of a tile with its exponents, and stores the weights row by row.
//!
//! ```text
//! unit     w0 w1 w2 w3 w4 w5 w6 w7     eight weights of a row
//! plane    | kept bits of w0 | of w1 | ... | of w7 |     whole bytes; one each in BF16
//! ```

use std::ops::Range;

use super::{
    geometry::{BAND_ROWS, LANE_UNITS, LANES, Places, ROW_LANES, Tile, UNIT},
    lanes::{Placed, Step},
};
use crate::{
    bf16,
    float::{Float, FloatSplit, MAX_KEPT_BYTES, MAX_UNIT_BYTES, bare_exponents},
};

/// Steps of a whole narrow tile's band, and the weights of its rows that a step has.
const STEPS: usize = 4;
const PAIR: usize = 2 * UNIT * ROW_LANES;

/// The units of each lane of a tile.
pub(super) type LaneUnits = [[Placed; LANE_UNITS]; LANES];

/// The bits that some placed unit has.
#[derive(Clone, Copy, Default)]
pub(super) struct Seen(Placed);

impl Seen {
    #[inline]
    pub(super) fn add(&mut self, placed: &Placed) {
        self.0.iter_mut().zip(placed).for_each(|(seen, byte)| *seen |= byte);
    }

    /// Whether all exponents are such as the dtype has.
    pub(super) fn suits<F: Float>(self) -> bool {
        let words = self.0.as_chunks().0.iter().map(|word| u16::from_le_bytes(*word));
        let seen = words.fold(0, |seen, word| seen | bf16::exponent(word));
        u32::from(seen) >> F::SPLIT.exponent_bits() == 0
    }
}

/// The exponents of two units of each lane, a byte each.
type BareStep = [[[u8; UNIT]; 2]; LANES];

/// Two bands of a tile, 12 KiB.
#[repr(align(64))]
pub(super) struct BandBuffer {
    bands: [[Step; STEPS]; 2],
    /// Their bare exponents, from which weights of one byte are joined.
    ///
    /// Q: Why not from the steps? In a plain loop from memory to memory, the compiler makes bytes
    /// of 16 words by one instruction; in the loop that joins, by some forty.
    bare: [[BareStep; STEPS]; 2],
}

impl BandBuffer {
    pub(super) const fn new() -> Self {
        let bare = [[[[[0; UNIT]; 2]; LANES]; STEPS]; 2];
        Self { bands: [[[[[0; 2 * UNIT]; 2]; LANES]; STEPS]; 2], bare }
    }

    /// The place of a step; the band two before has it no longer.
    #[inline]
    pub(super) fn step(&mut self, band: usize, k: usize) -> &mut Step {
        &mut self.bands[band % 2][k]
    }

    /// Looks at the exponents of a step once they are decoded.
    #[inline]
    pub(super) fn end_step<F: Float>(&mut self, band: usize, k: usize, seen: &mut Seen) {
        let step = self.bands[band % 2][k].as_flattened();
        if F::SPLIT.exponent_bits() < u8::BITS {
            for placed in step {
                seen.add(placed);
            }
        }
        if F::SPLIT.bytes() == 1 {
            let bare = self.bare[band % 2][k].as_flattened_mut().as_flattened_mut();
            bare_exponents(step.as_flattened(), bare);
        }
    }

    /// Puts some rows of a band to their places, joined with the tile's plane.
    #[inline]
    pub(super) fn put<F: Float>(
        &self,
        places: Places,
        (band, rows): (usize, Range<usize>),
        plane: &[u8],
        weights: &mut [u8],
    ) {
        let bare = &self.bare[band % 2];
        let steps = &self.bands[band % 2][..places.pairs];
        let plane = &plane[band * places.pairs * step_plane::<F>()..];
        for row in rows {
            let at = band * places.band + row * places.group;
            let weights = &mut weights[F::SPLIT.bytes() * at..];
            // Whole narrow tiles, by a loop whose end is known.
            match (<&[_; STEPS]>::try_from(steps), places.pair) {
                (Ok(steps), PAIR) => put_row::<F>((steps, bare), plane, row, PAIR, weights),
                _ => put_row::<F>((steps, bare), plane, row, places.pair, weights),
            }
        }
    }
}

/// Bytes of a step's plane.
pub(super) const fn step_plane<F: Float>() -> usize {
    2 * LANES * F::SPLIT.kept_bits() as usize
}

#[inline]
fn put_row<F: Float>(
    (steps, bare): (&[Step], &[BareStep; STEPS]),
    plane: &[u8],
    row: usize,
    pair: usize,
    weights: &mut [u8],
) {
    let each = F::SPLIT.bytes();
    let rows = steps.iter().zip(bare).zip(plane.chunks_exact(step_plane::<F>()));
    for (k, ((step, bare), plane)) in rows.enumerate() {
        let placed = &step.as_chunks::<ROW_LANES>().0[row];
        let bare = &bare.as_chunks::<ROW_LANES>().0[row];
        let group_plane = step_plane::<F>() / BAND_ROWS;
        let planes = &plane[row * group_plane..][..group_plane];
        for half in 0..2 {
            let at = each * (2 * k + half) * pair / 2;
            let units = weights[at..at + each * ROW_LANES * UNIT].chunks_exact_mut(each * UNIT);
            for (lane, unit) in units.enumerate() {
                let exponents: &[u8] =
                    if each == 1 { &bare[lane][half] } else { &placed[lane][half] };
                F::join(exponents, planes, 2 * lane + half, unit);
            }
        }
    }
}

/// Joins the lanes of any tile with its plane.
pub(super) fn put_partial<F: Float>(
    tile: Tile,
    lanes: &LaneUnits,
    mut plane: &[u8],
    weights: &mut [u8],
) -> Seen {
    let (mut taken, mut seen) = ([0; LANES], Seen::default());
    tile.units().for_each(|(lane, unit)| {
        let bytes = F::SPLIT.plane_bytes(unit.count as u64) as usize;
        let (mut placed, mut kept) = ([0; 2 * UNIT], [0; MAX_KEPT_BYTES]);
        let own = &lanes[lane].as_flattened()[2 * taken[lane]..2 * (taken[lane] + unit.count)];
        placed[..own.len()].copy_from_slice(own);
        kept[..bytes].copy_from_slice(plane.split_off(..bytes).unwrap_or_default());
        let (mut joined, each) = ([0; MAX_UNIT_BYTES], F::SPLIT.bytes());
        let mut bare = [0; UNIT];
        bare_exponents(&placed, &mut bare);
        let exponents: &[u8] = if each == 1 { &bare } else { &placed };
        F::join(exponents, &kept, 0, &mut joined[..each * UNIT]);
        let own = each * unit.at..each * (unit.at + unit.count);
        weights[own.clone()].copy_from_slice(&joined[..own.len()]);
        seen.add(&placed);
        taken[lane] += unit.count;
    });
    seen
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
