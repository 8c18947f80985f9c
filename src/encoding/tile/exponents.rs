//! The weights of a tile, apart into the exponents of its lanes and its plane.

use super::geometry::{Places, ROW_LANES, Tile};
use super::{LANE_UNITS, LANES, UNIT};
use crate::bf16;

/// Pairs of a whole unit.
const UNIT_PAIRS: usize = UNIT / 2;
/// Weights that four lanes have side by side.
const RUN: usize = UNIT * ROW_LANES;
/// Something of each weight of a tile: unit by unit, in these lane by lane.
type Units = [[[u8; UNIT]; LANES]; LANE_UNITS];

/// The exponents of a tile, and how many pairs a lane has.
pub(super) struct Exponents {
    units: Units,
    pairs: [usize; LANES],
}

impl Exponents {
    pub(super) const fn new() -> Self {
        Self { units: [[[0; UNIT]; LANES]; LANE_UNITS], pairs: [0; LANES] }
    }

    /// The exponents of a lane's whole units.
    #[inline]
    pub(super) fn whole(&self, lane: usize) -> impl Iterator<Item = u64> {
        let units = self.units[..self.pairs[lane] / UNIT_PAIRS].iter();
        units.map(move |lanes| u64::from_le_bytes(lanes[lane]))
    }

    /// A lane's pairs after its whole units.
    pub(super) fn rest(&self, lane: usize) -> impl Iterator<Item = u16> {
        let (whole, rest) = (self.pairs[lane] / UNIT_PAIRS, self.pairs[lane] % UNIT_PAIRS);
        let unit = self.units.get(whole).map(|lanes| lanes[lane]).unwrap_or_default();
        (0..rest).map(move |pair| u16::from_le_bytes([unit[2 * pair], unit[2 * pair + 1]]))
    }

    /// Splits the weights of a tile of a strip; without a plane, takes their exponents only.
    pub(super) fn take(&mut self, tile: &Tile, weights: &[u8], plane: &mut [u8]) {
        let weights = &weights[2 * tile.first..];
        match tile.places() {
            Some(places) => {
                self.pairs = [2 * UNIT_PAIRS * places.steps(); LANES];
                if plane.is_empty() {
                    self.take_exponents(places, weights);
                } else {
                    self.take_both(places, weights, plane);
                }
            }
            None => self.take_any(tile, weights, plane),
        }
    }

    /// The exponents of a tile in which every lane has as many units, by runs of four lanes.
    fn take_exponents(&mut self, places: Places, weights: &[u8]) {
        for (units, at) in self.units.as_chunks_mut::<2>().0.iter_mut().zip(places.iter()) {
            for (half, units) in units.iter_mut().enumerate() {
                let runs = units.as_flattened_mut().as_chunks_mut::<RUN>().0;
                for (group, run) in runs.iter_mut().enumerate() {
                    let at = 2 * (at + half * places.pair / 2 + group * places.group);
                    let words = weights[at..at + 2 * RUN].as_chunks::<2>().0;
                    for (exponent, word) in run.iter_mut().zip(words) {
                        *exponent = bf16::exponent(u16::from_le_bytes(*word));
                    }
                }
            }
        }
    }

    /// The same with the plane, whose order has two units of a lane side by side.
    fn take_both(&mut self, places: Places, weights: &[u8], plane: &mut [u8]) {
        let steps = self.units.as_chunks_mut::<2>().0.iter_mut().zip(places.iter());
        for ((units, at), plane) in steps.zip(plane.as_chunks_mut::<{ 2 * UNIT * LANES }>().0) {
            let mut ordered = [[[0; UNIT]; LANES]; 2];
            for (half, (units, ordered)) in units.iter_mut().zip(&mut ordered).enumerate() {
                let runs = units.as_flattened_mut().as_chunks_mut::<RUN>().0.iter_mut();
                let runs =
                    runs.zip(ordered.as_flattened_mut().as_chunks_mut::<RUN>().0).enumerate();
                for (group, (exponents, plane)) in runs {
                    let at = 2 * (at + half * places.pair / 2 + group * places.group);
                    bf16::split(&weights[at..at + 2 * RUN], exponents, plane);
                }
            }
            for (lane, plane) in plane.as_chunks_mut::<{ 2 * UNIT }>().0.iter_mut().enumerate() {
                plane[..UNIT].copy_from_slice(&ordered[0][lane]);
                plane[UNIT..].copy_from_slice(&ordered[1][lane]);
            }
        }
    }

    fn take_any(&mut self, tile: &Tile, weights: &[u8], plane: &mut [u8]) {
        self.pairs = [0; LANES];
        let mut plane = plane.iter_mut();
        tile.units().for_each(|(lane, unit)| {
            let exponents = &mut self.units[self.pairs[lane] / UNIT_PAIRS][lane];
            let words = weights[2 * unit.at..2 * (unit.at + unit.count)].as_chunks::<2>().0;
            for (exponent, word) in exponents.iter_mut().zip(words) {
                let word = u16::from_le_bytes(*word);
                *exponent = bf16::exponent(word);
                if let Some(plane) = plane.next() {
                    *plane = bf16::plane_byte(word);
                }
            }
            if unit.count % 2 == 1 {
                exponents[unit.count] = exponents[unit.count - 1];
            }
            self.pairs[lane] += unit.count.div_ceil(2);
        });
    }
}
