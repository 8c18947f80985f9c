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

use super::geometry::{Places, ROW_LANES};
use super::lanes::Placed;
use super::{LANE_UNITS, LANES, UNIT};

/// Bytes of a unit's weights.
const UNIT_BYTES: usize = 2 * UNIT;
/// Bytes of the weights that four lanes have side by side.
const RUN_BYTES: usize = ROW_LANES * UNIT_BYTES;
/// Bytes of a step's plane.
const STEP_PLANE: usize = 2 * UNIT * LANES;

/// Two units of each lane.
pub(super) type Step = [[Placed; 2]; LANES];

/// A whole tile, 16 KiB.
pub(super) struct Stage {
    pub(super) steps: [Step; LANE_UNITS / 2],
}

impl Stage {
    pub(super) const fn new() -> Self {
        Self { steps: [[[[0; UNIT_BYTES]; 2]; LANES]; LANE_UNITS / 2] }
    }

    /// Joins a step with the tile's plane.
    #[inline]
    pub(super) fn join(&mut self, step: usize, plane: &[u8]) {
        let plane = &plane.as_chunks::<STEP_PLANE>().0[step];
        let weights = self.steps[step].as_flattened_mut().as_flattened_mut().as_chunks_mut::<2>().0;
        for (weight, plane) in weights.iter_mut().zip(plane) {
            *weight = join(*weight, *plane);
        }
    }

    /// Puts the joined steps to their places: row by row in a narrow tile.
    pub(super) fn put(&self, places: Places, weights: &mut [u8]) {
        for (band, steps) in self.steps[..places.steps()].chunks(places.pairs).enumerate() {
            for group in 0..LANES / ROW_LANES {
                for (k, step) in steps.iter().enumerate() {
                    let lanes = &step.as_chunks::<ROW_LANES>().0[group];
                    let at = 2 * (band * places.band + group * places.group + k * places.pair);
                    for (half, at) in [at, at + places.pair].into_iter().enumerate() {
                        let units = weights[at..at + RUN_BYTES].as_chunks_mut::<UNIT_BYTES>().0;
                        for (unit, lane) in units.iter_mut().zip(lanes) {
                            *unit = lane[half];
                        }
                    }
                }
            }
        }
    }
}

/// A weight, of its exponent in its place and its plane byte.
#[inline]
pub(super) fn join(placed: [u8; 2], plane: u8) -> [u8; 2] {
    const EXPONENT: u16 = 0x7F80;
    let twice = u16::from_le_bytes([plane; 2]);
    (u16::from_le_bytes(placed) & EXPONENT | twice & !EXPONENT).to_le_bytes()
}
