//! One tile: its lanes decoded, checked, and merged with its plane.

use super::ahead::Ahead;
use super::geometry::{Places, Tile};
use super::lanes::{Lookup, NoCode, Placed, Step};
use super::record::Lengths;
use super::stage::{self, ROWS, Stage};
use super::window::Window;
use super::{LANE_UNITS, LANES, RECORD_BYTES, UNIT};
use crate::{Error, Result, bf16};

/// The units of each lane of a tile.
type Units = [[Placed; LANE_UNITS]; LANES];

/// A tile with its bits.
pub(super) struct CodedTile<'a> {
    pub(super) tile: Tile,
    pub(super) lengths: Lengths,
    /// Where its lanes start in the stream, and the last one ends.
    pub(super) starts: [usize; LANES + 1],
    /// Bits from the tile's first on.
    pub(super) window: &'a Window,
    /// What follows the tile in the bitstream.
    pub(super) behind: &'a [u8],
    /// The index of its record.
    pub(super) index: u64,
    /// Its first byte in the bitstream array.
    pub(super) byte: u64,
}

impl CodedTile<'_> {
    /// The same tile where its rows go this many weights apart.
    pub(super) fn with_stride(&self, stride: usize) -> CodedTile<'_> {
        CodedTile { tile: Tile { stride, ..self.tile }, ..*self }
    }

    /// Decodes the tile to `weights`, where its first weight comes first and rows are its stride
    /// apart.
    pub(super) fn decode(
        &self,
        lookup: &Lookup,
        stage: &mut Stage,
        plane: &[u8],
        weights: &mut [u8],
    ) -> Result<()> {
        if let Some(places) = self.tile.places() {
            return self.regular(lookup, places, stage, plane, weights);
        }
        let mut lanes = [[[0; 2 * UNIT]; LANE_UNITS]; LANES];
        self.partial::<false>(lookup, &mut lanes)?;
        self.merge_partial(&lanes, plane, weights);
        Ok(())
    }

    /// Checks all that is to be checked of a tile.
    pub(super) fn verify(&self, lookup: &Lookup, stage: &mut Stage) -> Result<()> {
        let ends = match self.tile.places() {
            Some(places) => self.regular_ends(lookup, places, stage)?,
            None => self.partial::<true>(lookup, &mut [[[0; 2 * UNIT]; LANE_UNITS]; LANES])?,
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
                if !self.window.peek(bit).is_multiple_of(1 << wanted) {
                    return Err(self.bad_bits(bit, "the bits behind a lane's pairs are not zero"));
                }
                bit += wanted;
            }
        }
        Ok(())
    }

    /// Decodes a tile in which every lane has as many units: rows of one band are put while the
    /// next one is decoded.
    fn regular(
        &self,
        lookup: &Lookup,
        places: Places,
        stage: &mut Stage,
        plane: &[u8],
        weights: &mut [u8],
    ) -> Result<()> {
        let mut bits = *self.lane_starts();
        let mut ahead = Ahead::new(plane, self.behind);
        let parts = 2 * places.pairs;
        for band in 0..places.bands {
            for part in 0..parts {
                self.half_step::<false>(lookup, &mut bits, stage.step(band, part / 2), part % 2)?;
                ahead.look(band * parts + part);
                if band > 0 {
                    let rows = ROWS * part / parts..ROWS * (part + 1) / parts;
                    stage.put(places, band - 1, rows, plane, weights);
                }
            }
        }
        stage.put(places, places.bands - 1, 0..ROWS, plane, weights);
        ahead.finish();
        self.check_ends(&bits)
    }

    /// Where the pairs of all lanes of such a tile end.
    fn regular_ends(
        &self,
        lookup: &Lookup,
        places: Places,
        stage: &mut Stage,
    ) -> Result<[usize; LANES]> {
        let mut bits = *self.lane_starts();
        for part in 0..2 * places.steps() {
            self.half_step::<true>(lookup, &mut bits, stage.step(0, 0), part % 2)?;
        }
        self.check_ends(&bits)?;
        Ok(bits)
    }

    /// Decodes half of the next two units of each lane.
    #[inline]
    fn half_step<const VERIFY: bool>(
        &self,
        lookup: &Lookup,
        bits: &mut [usize; LANES],
        step: &mut Step,
        half: usize,
    ) -> Result<()> {
        lookup.half_step::<VERIFY>(self.window, bits, step, half).map_err(|at| self.no_code(at))
    }

    fn lane_starts(&self) -> &[usize; LANES] {
        self.starts.first_chunk().expect("there is one more")
    }

    /// Decodes any tile, lane by lane; where the pairs of all lanes end.
    fn partial<const VERIFY: bool>(
        &self,
        lookup: &Lookup,
        lanes: &mut Units,
    ) -> Result<[usize; LANES]> {
        let mut ends = [0; LANES];
        let mut pairs = [0; LANES];
        let mut odd = None;
        self.tile.units().for_each(|(lane, unit)| {
            pairs[lane] += unit.count.div_ceil(2);
            if unit.count % 2 == 1 {
                odd = Some((lane, pairs[lane]));
            }
        });
        for (lane, exponents) in lanes.iter_mut().enumerate() {
            ends[lane] = lookup
                .lane::<VERIFY>(self.window, self.starts[lane], pairs[lane], exponents)
                .map_err(|at| self.no_code(at))?;
        }
        self.check_ends(&ends)?;
        match odd {
            Some((lane, end)) if !is_twice(&lanes[lane], end) => Err(self.bad_bits(
                ends[lane],
                "the only exponent of the last pair does not stand there twice",
            )),
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

    fn merge_partial(&self, lanes: &Units, plane: &[u8], weights: &mut [u8]) {
        let mut taken = [0; LANES];
        let mut rest = plane;
        self.tile.units().for_each(|(lane, unit)| {
            let plane = rest.split_off(..unit.count).unwrap_or_default();
            let placed = lanes[lane].as_flattened().as_chunks::<2>().0[taken[lane]..].iter();
            let weights = weights[2 * unit.at..2 * (unit.at + unit.count)].as_chunks_mut::<2>().0;
            for ((weight, placed), plane) in weights.iter_mut().zip(placed).zip(plane) {
                *weight = stage::join(*placed, *plane);
            }
            taken[lane] += unit.count;
        });
    }

    fn bad_bits(&self, bit: usize, problem: &str) -> Error {
        Error::corrupt("bitstream", self.byte + bit as u64 / 8, problem)
    }

    fn no_code(&self, at: NoCode) -> Error {
        self.bad_bits(at.bit, at.problem)
    }
}

/// Whether the last of a lane's pairs is one exponent twice.
fn is_twice(lane: &[Placed; LANE_UNITS], pairs: usize) -> bool {
    let weights = lane.as_flattened().as_chunks::<2>().0;
    let exponent = |at: usize| bf16::exponent(u16::from_le_bytes(weights[at]));
    exponent(2 * pairs - 2) == exponent(2 * pairs - 1)
}
