//! The record of a tile: where its bits start, and the length of each lane.
//!
//! ```text
//! bytes 0..8   offset, 48 bits; least, 13 bits; shift, 3 bits
//! bytes 8..32  excess of lane 0 .. 31, 6 bits each: four lanes in three bytes
//! ```

use super::geometry::{LANES, MAX_LANE_BITS, MAX_TILE_BYTES, RECORD_BYTES};

const OFFSET_BITS: u32 = 48;
const MIN_BITS: u32 = 13;
const SHIFT_BITS: u32 = 3;
const EXCESS_BITS: u32 = 6;
const MAX_EXCESS: usize = (1 << EXCESS_BITS) - 1;
const _: () = assert!(OFFSET_BITS + MIN_BITS + SHIFT_BITS == u64::BITS);
const _: () = assert!(MAX_LANE_BITS < 1 << MIN_BITS);

/// Where the tile's bits start.
pub(super) fn offset(record: &[u8; RECORD_BYTES]) -> u64 {
    head(record) % (1 << OFFSET_BITS)
}

/// Lets the tile's bits start elsewhere: below 2^48.
pub(super) fn set_offset(record: &mut [u8; RECORD_BYTES], offset: u64) {
    let lengths = head(record) >> OFFSET_BITS << OFFSET_BITS;
    record[..8].copy_from_slice(&(lengths | offset).to_le_bytes());
}

fn head(record: &[u8; RECORD_BYTES]) -> u64 {
    u64::from_le_bytes(*record.first_chunk().expect("a record has 32 bytes"))
}

/// The lengths of a tile's lanes, as its record states them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lengths {
    least: u16,
    shift: u8,
    excess: [u8; LANES],
}

impl Lengths {
    /// The writer's rule: the shortest lane's bits, and the least shift with which all lengths can
    /// be written.
    pub(super) fn of(bits: &[usize; LANES]) -> Self {
        let least = bits.iter().copied().min().unwrap_or(0);
        let most = bits.iter().copied().max().unwrap_or(0) - least;
        let shift = (0..1 << SHIFT_BITS)
            .find(|&shift| most.div_ceil(1 << shift) <= MAX_EXCESS)
            .unwrap_or(0);
        let excess = bits.map(|bits| (bits - least).div_ceil(1 << shift) as u8);
        Self { least: least as u16, shift, excess }
    }

    /// Reads the lengths of a record.
    pub(super) fn read(record: &[u8; RECORD_BYTES]) -> Self {
        let head = head(record);
        let mut excess = [0; LANES];
        for (four, bytes) in
            excess.as_chunks_mut::<4>().0.iter_mut().zip(record[8..].as_chunks::<3>().0)
        {
            let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]);
            *four =
                [0, 1, 2, 3].map(|lane| (bits >> (EXCESS_BITS * lane)) as u8 & MAX_EXCESS as u8);
        }
        let least = (head >> OFFSET_BITS) as u16 % (1 << MIN_BITS);
        Self { least, shift: (head >> (OFFSET_BITS + MIN_BITS)) as u8, excess }
    }

    /// The record with these lengths.
    pub(super) fn write(&self, offset: u64) -> [u8; RECORD_BYTES] {
        let mut record = [0; RECORD_BYTES];
        let head = offset
            | u64::from(self.least) << OFFSET_BITS
            | u64::from(self.shift) << (OFFSET_BITS + MIN_BITS);
        record[..8].copy_from_slice(&head.to_le_bytes());
        for (four, bytes) in
            self.excess.as_chunks::<4>().0.iter().zip(record[8..].as_chunks_mut::<3>().0)
        {
            let bits =
                four.iter().rev().fold(0, |bits, &excess| bits << EXCESS_BITS | u32::from(excess));
            bytes.copy_from_slice(&bits.to_le_bytes()[..3]);
        }
        record
    }

    /// The bits of each lane.
    pub(super) fn lanes(&self) -> [usize; LANES] {
        self.excess.map(|excess| usize::from(self.least) + (usize::from(excess) << self.shift))
    }

    /// A lane is longer than its pairs by fewer bits than this.
    pub(super) const fn step(&self) -> usize {
        1 << self.shift
    }
}

/// The record after the last tile.
pub(super) fn last(bit_count: u64) -> [u8; RECORD_BYTES] {
    Lengths { least: 0, shift: 0, excess: [0; LANES] }.write(bit_count)
}

/// A GPU copies this many bytes at once, from multiples of as many.
const COPY_BYTES: u64 = 16;
/// The most bytes of the bitstream that a tile touches, in copies of 16.
const MAX_STAGED: u64 = (MAX_TILE_BYTES as u64).next_multiple_of(COPY_BYTES) + COPY_BYTES;

/// The most bytes of its bitstream that a tile of the tensor takes, from the 16 bytes that hold its
/// first bit to those with its last one. Records that contradict themselves give some number that
/// no valid ones exceed.
pub(crate) fn staged_bytes(records: &[u8]) -> u32 {
    let records = records.as_chunks::<RECORD_BYTES>().0;
    let tile = |pair: &[[u8; RECORD_BYTES]]| {
        let (start, end) = (offset(&pair[0]) / 8, offset(&pair[1]).div_ceil(8));
        let first = start / COPY_BYTES * COPY_BYTES;
        end.saturating_sub(first).next_multiple_of(COPY_BYTES)
    };
    // No truncation: no tile has 2^32 bytes.
    records.windows(2).map(tile).max().unwrap_or(0).min(MAX_STAGED) as u32
}

/// Makes offsets count from a bit of the bitstream on: for records that travel with a part of it.
/// Offsets before that bit become 0, which kernels notice.
#[cfg(feature = "cudarc")]
pub(crate) fn rebase(records: &mut [u8], first_bit: u64) {
    for record in records.as_chunks_mut::<RECORD_BYTES>().0 {
        set_offset(record, offset(record).saturating_sub(first_bit));
    }
}

#[cfg(test)]
mod tests {
    use super::{COPY_BYTES, MAX_STAGED, last, staged_bytes};

    fn records(offsets: &[u64]) -> Vec<u8> {
        offsets.iter().flat_map(|&offset| last(offset)).collect()
    }

    #[test]
    fn staging_counts_copies() {
        assert_eq!(staged_bytes(&records(&[0, 8])), COPY_BYTES as u32);
        assert_eq!(staged_bytes(&records(&[120, 136])), 2 * COPY_BYTES as u32);
        assert_eq!(staged_bytes(&records(&[0, 128, 8 * 1000])), 1008 - 16);
        assert_eq!(staged_bytes(&records(&[0, 1 << 47, 5])), MAX_STAGED as u32);
        assert_eq!(staged_bytes(&[]), 0);
    }
}
