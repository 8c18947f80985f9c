//! A regular tile on its way out: exponents come lane by lane, and leave row by row, joined with
//! their plane.
//!
//! ```text
//! step    two units of each lane, 512 weights, in the order of the plane
//! band    | step 0: l0 l0 | l1 l1 | .. | l31 l31 | step 1: .. |     being decoded
//! band    | row 0: l0 l1 l2 l3 l0 l1 l2 l3 of step 0, of step 1, .. | row 1: .. |
//! ```
//! Q: Why not at once? Weights go to memory that is not cached, mostly: rows are stored there while
//! the core decodes.
//!
//! Measured on one Zen 5 core (virtual, shared) against the decoder of `gap` in the same process,
//! 2048 × 4096 weights of N(0, 0.02²): into 16 MiB, and into 1 MiB again and again. Chosen: 1.03 to
//! 1.09, and 1.08 times its rate.
//!
//! | rejected | 16 MiB | 1 MiB |
//! |---|---|---|
//! | lanes put as they are decoded, eight at a time, the plane ordered before | 0.86 | 0.83 |
//! | a whole tile staged, joined step by step, and put at once | 0.93 | 1.04 |
//! | the same, and its lines of the output looked at before | 0.96 | 0.96 |
//! | steps joined where they are staged, then put by rows | 0.93 | 0.98 |
//! | the plane not looked at [ahead](super::ahead) | 0.89 | 0.95 |
//! | the bits of the next tile not looked at ahead | 1.03 | 1.03 |

use std::ops::Range;

use super::geometry::{Places, ROW_LANES};
use super::lanes::{Placed, Step};
use super::{LANES, UNIT};

/// Bytes of a unit's weights.
const UNIT_BYTES: usize = 2 * UNIT;
/// Bytes of the weights that four lanes have side by side.
const RUN_BYTES: usize = ROW_LANES * UNIT_BYTES;
/// Bytes of a step's plane.
const STEP_PLANE: usize = 2 * UNIT * LANES;
/// Rows of a band, each of four lanes.
pub(super) const ROWS: usize = LANES / ROW_LANES;
/// Steps of a whole narrow tile's band, and the weights of its rows that a step has.
const STEPS: usize = 4;
const PAIR: usize = 2 * UNIT * ROW_LANES;
/// Where a weight has its exponent.
const EXPONENT: u16 = 0x7F80;

/// Two bands of a tile, 8 KiB.
#[repr(align(64))]
pub(super) struct Stage {
    bands: [[Step; STEPS]; 2],
}

impl Stage {
    pub(super) const fn new() -> Self {
        Self { bands: [[[[[0; UNIT_BYTES]; 2]; LANES]; STEPS]; 2] }
    }

    /// The place of a step; the band two before has it no longer.
    #[inline]
    pub(super) fn step(&mut self, band: usize, k: usize) -> &mut Step {
        &mut self.bands[band % 2][k]
    }

    /// Puts some rows of a band to their places, joined with the tile's plane.
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
        let signs =
            &plane.as_chunks::<STEP_PLANE>().0[band * places.pairs..(band + 1) * places.pairs];
        for row in rows {
            let weights = &mut weights[2 * (band * places.band + row * places.group)..];
            // Whole narrow tiles, by a loop whose end is known.
            match (<&[_; STEPS]>::try_from(steps), <&[_; STEPS]>::try_from(signs), places.pair) {
                (Ok(steps), Ok(signs), PAIR) => put_row(steps, signs, row, PAIR, weights),
                _ => put_row(steps, signs, row, places.pair, weights),
            }
        }
    }
}

#[inline]
fn put_row(
    steps: &[Step],
    signs: &[[u8; STEP_PLANE]],
    row: usize,
    pair: usize,
    weights: &mut [u8],
) {
    for (k, (step, plane)) in steps.iter().zip(signs).enumerate() {
        let lanes = &step.as_chunks::<ROW_LANES>().0[row];
        let planes =
            &plane.as_chunks::<UNIT>().0.as_chunks::<2>().0.as_chunks::<ROW_LANES>().0[row];
        for half in 0..2 {
            let at = (2 * k + half) * pair;
            let units = weights[at..at + RUN_BYTES].as_chunks_mut::<UNIT_BYTES>().0;
            for ((unit, lane), plane) in units.iter_mut().zip(lanes).zip(planes) {
                *unit = join_unit(&lane[half], &plane[half]);
            }
        }
    }
}

/// Eight weights of their placed exponents and their plane, byte by byte: a vector of 16, in which
/// each byte of the plane stands twice. In words the compiler made vectors only of references; of
/// bytes it makes them of either.
#[inline]
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "by value, a tile takes 7 % more instructions"
)]
fn join_unit(placed: &Placed, plane: &[u8; UNIT]) -> [u8; UNIT_BYTES] {
    const EXPONENTS: [u8; 2] = EXPONENT.to_le_bytes();
    std::array::from_fn(|at| placed[at] & EXPONENTS[at % 2] | plane[at / 2] & !EXPONENTS[at % 2])
}

/// A weight of its placed exponent and its plane byte.
#[inline]
pub(super) fn join(placed: [u8; 2], plane: u8) -> [u8; 2] {
    let twice = u16::from_le_bytes([plane; 2]);
    (u16::from_le_bytes(placed) & EXPONENT | twice & !EXPONENT).to_le_bytes()
}
