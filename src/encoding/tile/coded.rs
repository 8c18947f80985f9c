//! Decodes one tile: decodes and checks its lanes, and stages them to be joined with the plane.
//!
//! A regular tile's exponents are decoded lane by lane, and stored row by row:
//!
//! ```text
//! step    two units of each lane, 512 weights, in the order of the plane
//! band    | step 0: l0 l0 | l1 l1 | .. | l31 l31 | step 1: .. |     being decoded
//! band    | row 0: l0 l1 l2 l3 l0 l1 l2 l3 of step 0, of step 1, .. | row 1: .. |
//! ```
//! Q: Why is each band staged? Weights mostly go to memory that is not cached; rows are stored
//! there while the core decodes the next ones.
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
//! | the plane not looked at [`Ahead`] | 0.89 | 0.95 |
//! | the bits of the next tile not looked at ahead | 1.03 | 1.03 |

use std::hint::black_box;

use super::{
    geometry::{BAND_ROWS, LANE_UNITS, LANES, Places, RECORD_BYTES, Tile, UNIT},
    lanes::{Lookup, Misread, Placed, Step, Window},
    plane::{BandBuffer, LaneUnits, Seen, put_partial, step_plane},
    record::Lengths,
};
use crate::{Error, Result, bf16, float::Float};

/// A tile with its bits.
pub(super) struct CodedTile<'a> {
    pub(super) tile: Tile,
    pub(super) lengths: Lengths,
    /// Where its lanes start in the stream, and the last one ends.
    pub(super) starts: [usize; LANES + 1],
    /// Bits from the tile's first on.
    pub(super) window: &'a Window,
    /// Bytes of the bitstream after the tile.
    pub(super) rest: &'a [u8],
    /// The index of its record.
    pub(super) index: u64,
    /// Its first byte in the bitstream array.
    pub(super) byte: u64,
}

impl CodedTile<'_> {
    /// Decodes the tile to `weights`, where its first weight comes first and rows are this many
    /// weights apart.
    pub(super) fn decode<F: Float>(
        &self,
        lookup: &Lookup,
        stage: &mut BandBuffer,
        plane: &[u8],
        weights: &mut [u8],
        stride: usize,
    ) -> Result<()> {
        let tile = Tile { stride, ..self.tile };
        let seen = if let Some(places) = tile.places() {
            self.regular::<F>(lookup, places, stage, plane, weights)?
        } else {
            let mut lanes = [[[0; 2 * UNIT]; LANE_UNITS]; LANES];
            self.partial::<false>(lookup, &mut lanes)?;
            put_partial::<F>(tile, &lanes, plane, weights)
        };
        Error::unless(seen.suits::<F>(), || {
            self.bad_bits(0, "a weight has an exponent that its dtype has not")
        })
    }

    /// Checks all that is to be checked of a tile.
    pub(super) fn verify(&self, lookup: &Lookup, stage: &mut BandBuffer) -> Result<()> {
        let ends = match self.tile.places() {
            Some(places) => self.regular_ends(lookup, places, stage)?,
            None => self.partial::<true>(lookup, &mut [[[0; 2 * UNIT]; LANE_UNITS]; LANES])?,
        };
        let bits = std::array::from_fn(|lane| ends[lane] - self.starts[lane]);
        Error::unless(Lengths::of(&bits) == self.lengths, || {
            let problem = "the lengths of the lanes are not those of the writer's rule";
            Error::corrupt("records", self.index * RECORD_BYTES as u64, problem)
        })?;
        let tile_end = self.starts[LANES].next_multiple_of(8);
        let nexts = self.starts[1..LANES].iter().copied().chain([tile_end]);
        for (mut bit, next) in ends.into_iter().zip(nexts) {
            while bit < next {
                let wanted = (next - bit).min(32);
                if !self.window.peek(bit).is_multiple_of(1 << wanted) {
                    return Err(self.bad_bits(bit, "the bits after a lane's pairs are not zero"));
                }
                bit += wanted;
            }
        }
        Ok(())
    }

    /// Decodes a tile in which every lane has as many units: rows of one band are put while the
    /// next one is decoded.
    fn regular<F: Float>(
        &self,
        lookup: &Lookup,
        places: Places,
        stage: &mut BandBuffer,
        plane: &[u8],
        weights: &mut [u8],
    ) -> Result<Seen> {
        let (mut bits, mut seen) = (*self.lane_starts(), Seen::default());
        let mut ahead = Ahead::new(plane, self.rest);
        let parts = 2 * places.pairs;
        for band in 0..places.bands {
            for part in 0..parts {
                self.half_step::<false>(lookup, &mut bits, stage.step(band, part / 2), part % 2)?;
                if part % 2 == 1 {
                    stage.end_step::<F>(band, part / 2, &mut seen);
                }
                ahead.look::<F>(band * parts + part);
                if band > 0 {
                    let rows = BAND_ROWS * part / parts..BAND_ROWS * (part + 1) / parts;
                    stage.put::<F>(places, (band - 1, rows), plane, weights);
                }
            }
        }
        stage.put::<F>(places, (places.bands - 1, 0..BAND_ROWS), plane, weights);
        ahead.finish();
        self.check_ends(&bits)?;
        Ok(seen)
    }

    /// Where the pairs of all lanes of such a tile end.
    fn regular_ends(
        &self,
        lookup: &Lookup,
        places: Places,
        stage: &mut BandBuffer,
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
        lookup.half_step::<VERIFY>(self.window, bits, step, half).map_err(|at| self.misread(at))
    }

    fn lane_starts(&self) -> &[usize; LANES] {
        self.starts.first_chunk().expect("there is one more")
    }

    /// Decodes any tile, lane by lane; where the pairs of all lanes end.
    fn partial<const VERIFY: bool>(
        &self,
        lookup: &Lookup,
        lanes: &mut LaneUnits,
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
                .map_err(|at| self.misread(at))?;
        }
        self.check_ends(&ends)?;
        match odd {
            Some((lane, end)) if !is_twice(&lanes[lane], end) => {
                let problem = "the only exponent of the last pair does not stand there twice";
                Err(self.bad_bits(ends[lane], problem))
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

    fn bad_bits(&self, bit: usize, problem: &str) -> Error {
        Error::corrupt("bitstream", self.byte + bit as u64 / 8, problem)
    }

    fn misread(&self, at: Misread) -> Error {
        self.bad_bits(at.bit, at.problem)
    }
}

/// Whether the last of a lane's pairs is one exponent twice.
fn is_twice(lane: &[Placed; LANE_UNITS], pairs: usize) -> bool {
    let weights = lane.as_flattened().as_chunks::<2>().0;
    let exponent = |at: usize| bf16::exponent(u16::from_le_bytes(weights[at]));
    exponent(2 * pairs - 2) == exponent(2 * pairs - 1)
}

/// Bytes of the following bits that are looked at meanwhile: in all those of 4 bits per weight.
const AHEAD_STREAM: usize = 128;
const LINE: usize = 64;

/// Bytes that are looked at before they are needed.
///
/// Q: Why is this fast? Plane and bits come from memory, and the core fetches ahead what is read
/// from start to end at an even pace. Neither is: rows take the plane in four places each, and a
/// tile's bits are copied at once. So between look-ups one byte of each of some lines is read, in
/// order; what it is does not matter.
struct Ahead<'a> {
    plane: &'a [u8],
    /// The bits after the tile.
    stream: &'a [u8],
    seen: u8,
}

impl<'a> Ahead<'a> {
    const fn new(plane: &'a [u8], stream: &'a [u8]) -> Self {
        Self { plane, stream, seen: 0 }
    }

    /// Looks at the next lines: the plane of this half step, and as large a part of the following
    /// bits as of the tile.
    #[inline]
    fn look<F: Float>(&mut self, half_step: usize) {
        let bytes = step_plane::<F>() / 2;
        if let Some(plane) = self.plane.get(half_step * bytes..(half_step + 1) * bytes) {
            self.seen |= plane.iter().step_by(LINE).fold(0, |seen, byte| seen | byte);
        }
        if let Some(stream) =
            self.stream.get(half_step * AHEAD_STREAM..(half_step + 1) * AHEAD_STREAM)
        {
            self.seen |= stream[0] | stream[LINE];
        }
    }

    /// Pretends that what was seen matters, or nothing would be read.
    fn finish(self) {
        black_box(self.seen);
    }
}
