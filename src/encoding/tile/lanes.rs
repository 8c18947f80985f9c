//! Decodes lanes: one look-up per pair, several lanes in turns.
//!
//! A look-up waits for the one before it, so lanes take turns. If codes are short, one load of bits
//! serves two units of a lane. The pairs of two units rarely have more bits than a load; if they
//! do, the lane is decoded again unit by unit. With per-row scales that would happen about once in
//! eight times, so there a load serves one unit. An entry of the table is stored unchanged: it has
//! the exponents where their weights have them, and lengths are summed from the stored entries. The
//! number of instructions limits the speed, at some five per cycle: for two units 5.8 per pair in
//! the look-ups and 2.5 for the lengths.
//!
//! Measured on one Zen 5 core (virtual, shared), in GB of BF16 per second of verification in cache,
//! for N(0, 0.02²); chosen: 8.4.
//!
//! | rejected | GB/s |
//! |---|---|
//! | a load for each unit (of all codes) | 7.9 |
//! | two units a load of all codes | 8.4, but per-row scales are 5 to 8 % slower |
//! | a table of 16-bit pairs, and the zeros above a bit set above the load tell the length | 7.3 |
//! | such a bit, but entries as they are now | 7.5: plain x86-64 has no good instruction for it |
//! | lengths summed in registers, 8 or 4 lanes | 7.4, 7.3: there are too few |
//! | lengths summed by 32-bit loads, joined to vectors that wait for the stores | 7.2 |
//! | two entries joined to one store | 7.1 |
//! | the turns of all 32 lanes in one function, a load for each unit | 6.9 |
//!
//! ```text
//! entry of the table, indexed by the next 12 bits
//!   bits 0..4    length of the code, 1..=12; 0 with OTHER
//!   bits 7..15   exponent of the pair's first weight, where it stands in it
//!   bit  15      OTHER: the code of the escape, or none
//!   bits 23..31  exponent of its second weight
//! ```

use super::{
    codebook::{Codebook, ESCAPE},
    geometry::{LANES, MAX_CODE_BITS, MAX_LANE_BITS, MAX_TILE_BYTES, UNIT, VALUE_BITS},
};
use crate::huffman::{Code, bits::PEEK_BITS};

const ENTRIES: usize = 1 << MAX_CODE_BITS;
const ENTRY_BYTES: usize = 4;
const OTHER: u32 = 1 << 15;
/// Above any length: entries shift by their low 6 bits, and 8 lengths have 7 bits together.
const LENGTH_END: u32 = 1 << 6;
const LENGTHS_END: u8 = 1 << 7;
/// Codes of at most this many bits on average, if the code suits its pairs, are decoded by two
/// units a load.
const SHORT_BITS: usize = 6;
/// Pairs of a unit.
const UNIT_PAIRS: usize = UNIT / 2;
const _: () = assert!(UNIT_PAIRS * MAX_CODE_BITS as usize <= PEEK_BITS);
const _: () = assert!(2 * UNIT_PAIRS * (MAX_CODE_BITS as usize) < LENGTHS_END as usize);

/// Lanes decoded in turns.
const TURNS: usize = 8;

/// The exponents of a unit where they stand in its weights; its other bits are anything.
pub(super) type Placed = [u8; UNIT_PAIRS * ENTRY_BYTES];

/// Two units of each lane.
pub(super) type Step = [[Placed; 2]; LANES];

/// The decoder's table of a code, 16 KiB.
#[derive(Clone, Debug)]
pub(super) struct Lookup {
    entries: Box<[u32; ENTRIES]>,
    /// The code of the escape.
    escape: Option<Code>,
    /// Whether one load holds the pairs of two units, as a rule.
    is_short: bool,
    codebook: Codebook,
}

/// A stretch of bits has no code at a bit, or an escaped pair that has a code.
#[derive(Clone, Copy, Debug)]
pub(super) struct Misread {
    /// The bit, from the start of the tile.
    pub(super) bit: usize,
    pub(super) problem: &'static str,
}

impl Lookup {
    pub(super) fn new(codebook: &Codebook) -> Self {
        let mut entries = Box::new([OTHER; ENTRIES]);
        let (mut escape, mut bits) = (None, 0);
        for (value, code) in codebook.codes() {
            if value == ESCAPE {
                escape = Some(code);
                continue;
            }
            let entry = place(value as u16) | u32::from(code.length);
            entries
                .iter_mut()
                .skip(usize::from(code.bits))
                .step_by(1 << code.length)
                .for_each(|slot| *slot = entry);
            bits += usize::from(code.length) << (MAX_CODE_BITS - code.length);
        }
        let is_short = bits <= SHORT_BITS * ENTRIES;
        Self { entries, escape, is_short, codebook: codebook.clone() }
    }

    /// The entry for a stream whose next bits are `bits`.
    #[inline]
    fn get(&self, bits: u64) -> u32 {
        self.entries[bits as usize % ENTRIES]
    }

    /// Decodes half of the next two units of all lanes, each from its bit on, and moves after it:
    /// those of half the lanes, or one of each.
    #[inline]
    pub(super) fn half_step<const VERIFY: bool>(
        &self,
        window: &Window,
        bits: &mut [usize; LANES],
        step: &mut Step,
        half: usize,
    ) -> Result<(), Misread> {
        let mut turns =
            bits.as_chunks_mut::<TURNS>().0.iter_mut().zip(step.as_chunks_mut::<TURNS>().0);
        if self.is_short {
            let turns = turns.skip(half * LANES / TURNS / 2).take(LANES / TURNS / 2);
            return turns
                .into_iter()
                .try_for_each(|(bits, lanes)| self.units::<0, 2, VERIFY>(window, bits, lanes));
        }
        if half == 0 {
            turns.try_for_each(|(bits, lanes)| self.units::<0, 1, VERIFY>(window, bits, lanes))
        } else {
            turns.try_for_each(|(bits, lanes)| self.units::<1, 1, VERIFY>(window, bits, lanes))
        }
    }

    /// Decodes `UNITS` of the two units, from number `FIRST` on.
    #[inline]
    fn units<const FIRST: usize, const UNITS: usize, const VERIFY: bool>(
        &self,
        window: &Window,
        bits: &mut [usize; TURNS],
        lanes: &mut [[Placed; 2]; TURNS],
    ) -> Result<(), Misread> {
        look_up::<FIRST, UNITS>(&self.entries, window, bits, lanes);
        for (bit, lane) in bits.iter_mut().zip(lanes) {
            let units = &mut lane[FIRST..FIRST + UNITS];
            let length = units.iter().map(length).fold(0, u8::wrapping_add) % LENGTHS_END;
            // If a pair has more bits than the load has left, the sum of all is too large as well,
            // with any entry in its place.
            if is_other(&units[UNITS - 1]) || (UNITS > 1 && usize::from(length) > PEEK_BITS) {
                units.iter_mut().try_for_each(|unit| self.unit::<VERIFY>(window, bit, unit))?;
            } else {
                *bit += usize::from(length);
            }
        }
        Ok(())
    }

    /// Decodes `pairs` pairs of one lane from a bit on, as many as its units hold; the bit after
    /// them.
    pub(super) fn lane<const VERIFY: bool>(
        &self,
        window: &Window,
        mut bit: usize,
        pairs: usize,
        units: &mut [Placed],
    ) -> Result<usize, Misread> {
        let (whole, rest) = units.split_at_mut(pairs / UNIT_PAIRS);
        for unit in whole {
            self.unit::<VERIFY>(window, &mut bit, unit)?;
        }
        let rest = rest.as_flattened_mut().as_chunks_mut::<ENTRY_BYTES>().0;
        for pair in rest.iter_mut().take(pairs % UNIT_PAIRS) {
            *pair = self.pair::<VERIFY>(window, &mut bit)?;
        }
        Ok(bit)
    }

    /// Decodes a unit and moves after it.
    #[inline(never)]
    fn unit<const VERIFY: bool>(
        &self,
        window: &Window,
        bit: &mut usize,
        unit: &mut Placed,
    ) -> Result<(), Misread> {
        let mut bits = window.peek(*bit);
        for pair in unit.as_chunks_mut::<ENTRY_BYTES>().0 {
            let entry = self.get(bits);
            bits >>= entry % LENGTH_END;
            *bit += (entry % LENGTH_END) as usize;
            *pair = entry.to_le_bytes();
        }
        if !is_other(unit) {
            return Ok(());
        }
        let pairs = unit.as_chunks_mut::<ENTRY_BYTES>().0.iter_mut();
        for pair in pairs.skip_while(|pair| u32::from_le_bytes(**pair) & OTHER == 0) {
            *pair = self.pair::<VERIFY>(window, bit)?;
        }
        Ok(())
    }

    /// Decodes a pair and moves after it. With `VERIFY`, one that is escaped must have no code.
    fn pair<const VERIFY: bool>(
        &self,
        window: &Window,
        bit: &mut usize,
    ) -> Result<[u8; ENTRY_BYTES], Misread> {
        let bits = window.peek(*bit);
        let entry = self.get(bits);
        if entry & OTHER == 0 {
            *bit += (entry % LENGTH_END) as usize;
            return Ok(entry.to_le_bytes());
        }
        let misread = |problem| Misread { bit: *bit, problem };
        // Other entries are all the escape's, but in a code of a single pair.
        let escape =
            self.escape.filter(|escape| bits % (1 << escape.length) == u64::from(escape.bits));
        let escape = escape.ok_or(misread("there is no such code"))?;
        let pair = (bits >> escape.length) as u16;
        if VERIFY && self.codebook.contains(pair) {
            return Err(misread("an escaped pair has a code"));
        }
        *bit += usize::from(escape.length + VALUE_BITS);
        Ok(place(pair).to_le_bytes())
    }
}

/// The hot loop: finds the entries of one or two units of each lane, with one load a lane.
///
/// Kept apart, or the compiler runs out of registers for it.
#[inline(never)]
fn look_up<const FIRST: usize, const UNITS: usize>(
    entries: &[u32; ENTRIES],
    window: &Window,
    bits: &[usize; TURNS],
    lanes: &mut [[Placed; 2]; TURNS],
) {
    let mut words = [0; TURNS];
    for (word, bit) in words.iter_mut().zip(bits) {
        *word = window.peek(*bit);
    }
    for turn in 0..UNITS * UNIT_PAIRS {
        for (word, lane) in words.iter_mut().zip(&mut *lanes) {
            let entry = entries[*word as usize % ENTRIES];
            *word >>= entry % LENGTH_END;
            let at = FIRST * UNIT_PAIRS + turn;
            lane.as_flattened_mut()[ENTRY_BYTES * at..ENTRY_BYTES * (at + 1)]
                .copy_from_slice(&entry.to_le_bytes());
        }
    }
}

/// The bits of a unit's pairs, modulo [`LENGTHS_END`]: byte by byte, see the table of the rejected.
#[inline]
fn length(unit: &Placed) -> u8 {
    unit[0].wrapping_add(unit[4]).wrapping_add(unit[8]).wrapping_add(unit[12])
}

/// Whether a unit met an entry with [`OTHER`]: it consumes nothing, so it repeats itself.
#[inline]
fn is_other(unit: &Placed) -> bool {
    unit[13] >= (OTHER >> 8) as u8
}

/// The exponents of a pair where they stand in two weights.
const fn place(pair: u16) -> u32 {
    let [first, second] = pair.to_le_bytes();
    (first as u32) << 7 | (second as u32) << 23
}

/// Bytes of a load.
const LOAD: usize = 8;
/// Bytes at which a load may start.
const BYTES: usize = 1 << 14;
/// Bytes that are taken after a tile: no lane is read farther than its longest pairs and a load
/// after its start.
const BEHIND: usize = MAX_LANE_BITS / 8 + LOAD;
const _: () = assert!(MAX_TILE_BYTES + BEHIND <= BYTES);

/// A tile's bits and what follows them, where every read is within bounds.
///
/// Q: Why a copy, of some 3 KiB per tile? It comes in one pass from start to end, as memory likes
/// it, while lanes are read from 32 places; reads need no comparison, since every masked position
/// is inside; and the end of the bitstream is like any other place.
#[repr(align(64))]
pub(super) struct Window {
    bytes: [u8; BYTES + LOAD],
}

impl Window {
    #[allow(clippy::large_stack_arrays, reason = "one a call, and a load more than 16 KiB")]
    pub(super) const fn new() -> Self {
        Self { bytes: [0; BYTES + LOAD] }
    }

    /// Takes a tile of at most [`MAX_TILE_BYTES`] with the bytes after it; where the stream has
    /// ended, zeros.
    pub(super) fn take(&mut self, stream: &[u8], tile_bytes: usize) {
        let end = tile_bytes + BEHIND;
        let held = end.min(stream.len());
        self.bytes[..held].copy_from_slice(&stream[..held]);
        self.bytes[held..end].fill(0);
    }

    /// The next bits from a bit position: at least [`PEEK_BITS`], and zeros above. A position
    /// outside the window gives some bits.
    #[inline]
    pub(super) fn peek(&self, bit: usize) -> u64 {
        let at = bit / 8 % BYTES;
        u64::from_le_bytes(self.bytes[at..at + LOAD].try_into().expect("8 bytes")) >> (bit % 8)
    }
}
