//! One tile: its lanes decoded, checked, and merged with its plane.

use std::borrow::Cow;

use super::geometry::{Places, ROW_LANES, Tile};
use super::lanes::{Lookup, NoCode};
use super::record::Lengths;
use super::{LANE_UNITS, LANES, RECORD_BYTES, UNIT};
use crate::huffman::bits::peek;
use crate::{Error, Result, bf16};

/// Lanes decoded in turns, a part of the tile; see [`super::lanes`] for the choice.
const TURNS: usize = 8;
/// Something of each weight of some lanes: unit by unit, in these lane by lane.
type Units<const N: usize> = [[[u8; UNIT]; N]; LANE_UNITS];

/// A tile with its bits.
pub(super) struct Coded<'a> {
    pub(super) tile: Tile,
    pub(super) lengths: Lengths,
    /// Where its lanes start in the stream, and the last one ends.
    pub(super) starts: [usize; LANES + 1],
    /// Bits from the tile's first on, with [`READ_BYTES`](super::lanes::READ_BYTES) behind the last one.
    pub(super) stream: Cow<'a, [u8]>,
    /// The index of its record.
    pub(super) index: u64,
    /// Its first byte in the bitstream array.
    pub(super) byte: u64,
}

impl Coded<'_> {
    /// The same tile where its rows follow each other without others between.
    pub(super) fn alone(&self) -> Coded<'_> {
        let tile = Tile { stride: self.tile.width, ..self.tile };
        Coded { tile, stream: Cow::Borrowed(&self.stream), ..*self }
    }

    /// Decodes the tile to `weights`, where its first weight comes first and rows are its stride apart.
    pub(super) fn decode(&self, lookup: &Lookup, plane: &[u8], weights: &mut [u8]) -> Result<()> {
        if let Some(places) = self.tile.places() {
            let mut ordered = [[[0; UNIT]; LANES]; LANE_UNITS];
            order(plane, &mut ordered);
            self.regular::<false>(lookup, places, |first, units| {
                merge(units, first, places, &ordered, weights);
            })?;
            return Ok(());
        }
        let mut lanes = [[[[0; UNIT]]; LANE_UNITS]; LANES];
        self.partial::<false>(lookup, &mut lanes)?;
        self.merge_partial(&lanes, plane, weights);
        Ok(())
    }

    /// Checks all that is to be checked of a tile.
    pub(super) fn verify(&self, lookup: &Lookup) -> Result<()> {
        let ends = match self.tile.places() {
            Some(places) => self.regular::<true>(lookup, places, |_, _| ())?,
            None => self.partial::<true>(lookup, &mut [[[[0; UNIT]]; LANE_UNITS]; LANES])?,
        };
        let bits = std::array::from_fn(|lane| ends[lane] - self.starts[lane]);
        if Lengths::of(&bits) != self.lengths {
            let problem = "the lengths of the lanes are not those of the writer's rule";
            return Err(Error::corrupt("records", self.index * RECORD_BYTES as u64, problem));
        }
        let tile_end = self.starts[LANES].next_multiple_of(8);
        let nexts = self.starts[1..LANES].iter().copied().chain([tile_end]);
        for (mut bit, next) in ends.into_iter().zip(nexts) {
            while bit < next {
                let wanted = (next - bit).min(32);
                if !peek(&self.stream, bit).is_multiple_of(1 << wanted) {
                    return Err(self.bad_bits(bit, "the bits behind a lane's pairs are not zero"));
                }
                bit += wanted;
            }
        }
        Ok(())
    }

    /// Decodes a tile in which every lane has as many units. Hands on the exponents of some lanes with the number
    /// of the first; where the pairs of all end.
    fn regular<const VERIFY: bool>(
        &self,
        lookup: &Lookup,
        places: Places,
        mut hand: impl FnMut(usize, &[[[u8; UNIT]; TURNS]]),
    ) -> Result<[usize; LANES]> {
        let mut units: Units<TURNS> = [[[0; UNIT]; TURNS]; LANE_UNITS];
        let units = &mut units[..2 * places.steps()];
        let mut ends = [0; LANES];
        let starts = self.starts.as_chunks::<TURNS>().0;
        for (part, (starts, ends)) in starts.iter().zip(ends.as_chunks_mut::<TURNS>().0).enumerate() {
            *ends =
                lookup.lanes::<TURNS, VERIFY>(&self.stream, *starts, units).map_err(|at| self.no_code(at))?;
            hand(TURNS * part, units);
        }
        self.check_ends(&ends)?;
        Ok(ends)
    }

    /// Decodes any tile, lane by lane; where the pairs of all lanes end.
    fn partial<const VERIFY: bool>(
        &self,
        lookup: &Lookup,
        lanes: &mut [Units<1>; LANES],
    ) -> Result<[usize; LANES]> {
        let mut ends = [0; LANES];
        let mut pairs = [0; LANES];
        let mut odd = None;
        for (band, k) in self.tile.steps() {
            for (lane, pairs) in pairs.iter_mut().enumerate() {
                for unit in [2 * k, 2 * k + 1].into_iter().filter_map(|j| self.tile.unit(band, j, lane)) {
                    *pairs += unit.count.div_ceil(2);
                    if unit.count % 2 == 1 {
                        odd = Some((lane, *pairs));
                    }
                }
            }
        }
        for (lane, exponents) in lanes.iter_mut().enumerate() {
            ends[lane] = lookup
                .lane::<VERIFY>(&self.stream, self.starts[lane], pairs[lane], exponents)
                .map_err(|at| self.no_code(at))?;
        }
        self.check_ends(&ends)?;
        match odd {
            Some((lane, end)) if !is_twice(&lanes[lane], end) => {
                Err(self
                    .bad_bits(ends[lane], "the only exponent of the last pair does not stand there twice"))
            }
            _ => Ok(ends),
        }
    }

    /// Checks that the pairs of each lane ended where they should.
    fn check_ends(&self, ends: &[usize; LANES]) -> Result<()> {
        for (&end, &next) in ends.iter().zip(&self.starts[1..]) {
            if next.checked_sub(end).is_none_or(|rest| rest >= self.lengths.step()) {
                return Err(self.bad_bits(end, "the pairs of a lane do not end with it"));
            }
        }
        Ok(())
    }

    fn merge_partial(&self, lanes: &[Units<1>; LANES], plane: &[u8], weights: &mut [u8]) {
        let mut taken = [0; LANES];
        let mut rest = plane;
        for (band, k) in self.tile.steps() {
            for (lane, taken) in taken.iter_mut().enumerate() {
                for unit in [2 * k, 2 * k + 1].into_iter().filter_map(|j| self.tile.unit(band, j, lane)) {
                    let plane = rest.split_off(..unit.count).unwrap_or_default();
                    let weights = &mut weights[2 * unit.at..2 * (unit.at + unit.count)];
                    bf16::merge(
                        &lanes[lane].as_flattened().as_flattened()[*taken..*taken + unit.count],
                        plane,
                        weights,
                    );
                    *taken += unit.count;
                }
            }
        }
    }

    fn bad_bits(&self, bit: usize, problem: &str) -> Error {
        Error::corrupt("bitstream", self.byte + bit as u64 / 8, problem)
    }

    fn no_code(&self, at: NoCode) -> Error {
        self.bad_bits(at.bit, at.problem)
    }
}

/// Whether the last of a lane's pairs is one exponent twice.
fn is_twice(lane: &Units<1>, pairs: usize) -> bool {
    let exponents = lane.as_flattened().as_flattened();
    exponents[2 * pairs - 2] == exponents[2 * pairs - 1]
}

/// Brings a plane into the order of the units, in one pass from its start to its end.
///
/// Apart from the merging, whose loads would wait for these stores, and would not be read ahead from memory.
fn order(plane: &[u8], ordered: &mut Units<LANES>) {
    let planes = plane.as_chunks::<{ 2 * UNIT * LANES }>().0;
    for (ordered, plane) in ordered.as_chunks_mut::<2>().0.iter_mut().zip(planes) {
        let [first, second] = ordered;
        let halves = plane.as_chunks::<UNIT>().0.as_chunks::<2>().0;
        for ((first, second), halves) in first.iter_mut().zip(second).zip(halves) {
            (*first, *second) = (halves[0], halves[1]);
        }
    }
}

/// Merges the lanes from `first` on with their plane: four lanes at a time, side by side in the output.
fn merge(
    units: &[[[u8; UNIT]; TURNS]],
    first: usize,
    places: Places,
    plane: &Units<LANES>,
    weights: &mut [u8],
) {
    const RUN: usize = UNIT * ROW_LANES;
    let steps = units.as_chunks::<2>().0.iter().zip(plane.as_chunks::<2>().0);
    for ((exponents, plane), at) in steps.zip(places.iter()) {
        for (half, (exponents, plane)) in exponents.iter().zip(plane).enumerate() {
            let runs = exponents.as_flattened().as_chunks::<RUN>().0.iter();
            let signs = plane[first..first + TURNS].as_flattened().as_chunks::<RUN>().0;
            for (group, (exponents, plane)) in runs.zip(signs).enumerate() {
                let at = 2 * (at + half * places.pair / 2 + (first / ROW_LANES + group) * places.group);
                bf16::merge(exponents, plane, &mut weights[at..at + 2 * RUN]);
            }
        }
    }
}
