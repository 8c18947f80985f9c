//! A regular tile on its way out: exponents come lane by lane, are joined with the plane, and put to their places.
//!
//! ```text
//! step    two units of each lane, 512 weights: as the plane has them
//! stage   | step 0: l0 l0 | l1 l1 | .. | l31 l31 | step 1: ..
//! ```
//! A step is joined while the next one is decoded, the plane being read from start to end; the tile is put at once, row by row.
//!
//! Measured on one Zen 5 core (virtual, shared), GB of BF16 a second of decoding 2048 × 4096 weights of N(0, 0.02²) in cache, and into 16 MiB
//! that are not; chosen: 7.1, 4.1.
//!
//! | rejected | GB/s |
//! |---|---|
//! | units put in their lanes' order, and the plane ordered before (what was here) | 5.8, 3.7 |
//! | steps joined and put at once | 5.2, 3.0 |
//! | four steps put at once | 6.7, 3.9 (with a load a unit, as in the following; the choice then makes 6.9, 4.2) |
//! | a row of the four steps before with each half step | 6.3, 4.4 |
//! | lines of the output loaded before they are written | 6.5, 4.4 |

use std::ops::Range;

use super::geometry::{Places, ROW_LANES};
use super::lanes::Step;
use super::{LANES, UNIT};

/// Bytes of a unit's weights.
const UNIT_BYTES: usize = 2 * UNIT;
/// Bytes of the weights that four lanes have side by side.
const RUN_BYTES: usize = ROW_LANES * UNIT_BYTES;
/// Weights of a row of a narrow tile's step.
const PAIR: usize = 2 * UNIT * ROW_LANES;
/// Bytes of a step's plane.
const STEP_PLANE: usize = 2 * UNIT * LANES;

/// Rows of a band, each of four lanes.
pub(super) const ROWS: usize = LANES / ROW_LANES;

/// Steps of a whole tile's band.
const STEPS: usize = 4;

/// Two bands of a tile, 8 KiB.
#[repr(align(64))]
pub(super) struct Stage {
    bands: [[Step; STEPS]; 2],
}

impl Stage {
    pub(super) const fn new() -> Self {
        Self { bands: [[[[[0; UNIT_BYTES]; 2]; LANES]; STEPS]; 2] }
    }

    #[inline]
    pub(super) fn step(&mut self, band: usize, k: usize) -> &mut Step {
        &mut self.bands[band % 2][k]
    }

    /// Joins some rows of a band with the tile's plane, in their places.
    #[inline]
    pub(super) fn put(
        &self,
        places: Places,
        band: usize,
        rows: Range<usize>,
        plane: &[u8],
        weights: &mut [u8],
    ) {
        let steps = &self.bands[band % 2][..places.pairs];
        let planes = &plane.as_chunks::<STEP_PLANE>().0[band * places.pairs..(band + 1) * places.pairs];
        for row in rows {
            let weights = &mut weights[2 * (band * places.band + row * places.group)..];
            // Whole tiles, in a loop without an end to find.
            match (<&[Step; 4]>::try_from(steps), <&[[u8; STEP_PLANE]; 4]>::try_from(planes), places.pair) {
                (Ok(steps), Ok(planes), PAIR) => put_row(steps, planes, row, PAIR, weights),
                _ => put_row(steps, planes, row, places.pair, weights),
            }
        }
    }
}

#[inline]
fn put_row(steps: &[Step], planes: &[[u8; STEP_PLANE]], row: usize, pair: usize, weights: &mut [u8]) {
    for (k, (step, plane)) in steps.iter().zip(planes).enumerate() {
        let lanes = &step.as_chunks::<ROW_LANES>().0[row];
        let planes = &plane.as_chunks::<UNIT_BYTES>().0.as_chunks::<ROW_LANES>().0[row];
        for half in 0..2 {
            let at = (2 * k + half) * pair;
            let units = weights[at..at + RUN_BYTES].as_chunks_mut::<UNIT_BYTES>().0;
            for ((unit, lane), plane) in units.iter_mut().zip(lanes).zip(planes) {
                *unit = join_unit(&lane[half], &plane.as_chunks::<UNIT>().0[half]);
            }
        }
    }
}

#[inline]
fn join_unit(placed: &[u8; UNIT_BYTES], plane: &[u8; UNIT]) -> [u8; UNIT_BYTES] {
    const EXPONENT: u16 = 0x7F80;
    let e: [u16; UNIT] = std::array::from_fn(|i| u16::from_le_bytes([placed[2 * i], placed[2 * i + 1]]));
    let w: [u16; UNIT] = std::array::from_fn(|i| {
        e[i] & EXPONENT | (u16::from(plane[i]) | u16::from(plane[i]) << 8) & !EXPONENT
    });
    let mut out = [0; UNIT_BYTES];
    for i in 0..UNIT {
        [out[2 * i], out[2 * i + 1]] = w[i].to_le_bytes();
    }
    out
}

/// A weight, of its exponent in its place and its plane byte.
#[inline]
pub(super) fn join(placed: [u8; 2], plane: u8) -> [u8; 2] {
    const EXPONENT: u16 = 0x7F80;
    let twice = u16::from_le_bytes([plane; 2]);
    (u16::from_le_bytes(placed) & EXPONENT | twice & !EXPONENT).to_le_bytes()
}

#[inline]
pub(super) fn touch(plane: &[u8], at: usize) -> u8 {
    plane.get(at..at + 256).map_or(0, |plane| plane[0] | plane[64] | plane[128] | plane[192])
}
