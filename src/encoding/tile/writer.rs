//! Writes the bits of lanes, and joins them.

use super::MAX_LANE_BITS;
use super::exponents::Exponents;
use super::table::{self, Table};

/// The most bits that fit beside the up to 7 of a byte begun.
const MOST_BITS: usize = 56;

/// The end of a stretch of bits that is being written.
#[derive(Clone, Copy, Default)]
pub(super) struct End {
    /// The bits written, counted from the start of the buffer.
    bit: usize,
    /// The `bit % 8` bits of the byte begun.
    begun: u64,
}

impl End {
    /// Bytes that a buffer needs after its last bit.
    pub(super) const SLACK: usize = 8;

    /// Appends up to [`MOST_BITS`] bits, above which `bits` is zero.
    #[inline]
    fn push(&mut self, stream: &mut [u8], bits: u64, length: usize) {
        let held = self.bit % 8;
        self.begun |= bits << held;
        let at = self.bit / 8;
        stream[at..at + 8].copy_from_slice(&self.begun.to_le_bytes());
        self.bit += length;
        self.begun >>= (held + length) & !7;
    }

    /// Appends the bits of a lane.
    pub(super) fn copy(&mut self, stream: &mut [u8], lane: &LaneBuffer, bits: usize) {
        const STEP: usize = MOST_BITS / 8;
        let load =
            |at: usize| u64::from_le_bytes(lane.bytes[at..at + 8].try_into().expect("8 bytes"));
        let steps = bits / MOST_BITS;
        for step in 0..steps {
            self.push(stream, load(step * STEP) & ((1 << MOST_BITS) - 1), MOST_BITS);
        }
        let rest = bits % MOST_BITS;
        self.push(stream, load(steps * STEP) & ((1 << rest) - 1), rest);
    }

    /// Appends zeros.
    pub(super) fn skip(&mut self, stream: &mut [u8], mut bits: usize) {
        while bits > 0 {
            let length = bits.min(MOST_BITS);
            self.push(stream, 0, length);
            bits -= length;
        }
    }
}

/// The bits of one lane, from bit 0 on; after them stands anything.
pub(super) struct LaneBuffer {
    bytes: [u8; MAX_LANE_BITS / 8 + 2 * End::SLACK],
}

impl LaneBuffer {
    pub(super) const fn new() -> Self {
        Self { bytes: [0; MAX_LANE_BITS / 8 + 2 * End::SLACK] }
    }

    /// Writes the pairs of a lane; their bits, or `None` where one has no code.
    ///
    /// A whole unit at a time: four look-ups make one piece of bits. Only where escapes make it
    /// longer than a piece, pair by pair.
    pub(super) fn write(
        &mut self,
        table: &Table,
        exponents: &Exponents,
        lane: usize,
    ) -> Option<usize> {
        let mut end = End::default();
        for unit in exponents.whole(lane) {
            let entries = table.unit(unit);
            let length = table::length(entries.iter().sum());
            if length > MOST_BITS {
                end = self.push_pairs(end, &entries)?;
                continue;
            }
            let [a, b, c, d] = entries;
            let first = table::bits(a) | table::bits(b) << (a % 64);
            let second = table::bits(c) | table::bits(d) << (c % 64);
            end.push(&mut self.bytes, first | second << ((a + b) % 64), length);
        }
        for pair in exponents.rest(lane) {
            end = self.push_pairs(end, &[table.get(pair)])?;
        }
        Some(end.bit)
    }

    /// Pair by pair. The end comes and goes by value, or it would be in memory in the loop above
    /// too.
    #[inline(never)]
    fn push_pairs(&mut self, mut end: End, entries: &[u64]) -> Option<End> {
        for &entry in entries {
            if table::is_none(entry) {
                return None;
            }
            end.push(&mut self.bytes, table::bits(entry), table::length(entry));
        }
        Some(end)
    }
}
