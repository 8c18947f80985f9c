//! What a GPU must know of all records before it decodes: it takes a tile's bits whole into its
//! fastest memory.

use super::{MAX_TILE_BYTES, RECORD_BYTES, Sizes, record};
use crate::{Error, Result};

/// A GPU copies this many bytes at once, from multiples of as many.
const COPY_BYTES: u64 = 16;
/// The most bits of a tile, padding included.
const MAX_TILE_BITS: u64 = 8 * MAX_TILE_BYTES as u64;
/// The most bytes of the bitstream that a tile touches, in copies of 16.
const MAX_STAGED: u64 = (MAX_TILE_BITS / 8).next_multiple_of(COPY_BYTES) + COPY_BYTES;

/// The most bytes of its bitstream that a tile of the tensor takes, from the 16 bytes that hold its
/// first bit to those with its last one. Of records that contradict themselves some number that no
/// valid ones exceed.
pub(crate) fn staged_bytes(records: &[u8]) -> u64 {
    let records = records.as_chunks::<RECORD_BYTES>().0;
    let tile = |pair: &[[u8; RECORD_BYTES]]| {
        let (start, end) = (record::offset(&pair[0]) / 8, record::offset(&pair[1]).div_ceil(8));
        let first = start / COPY_BYTES * COPY_BYTES;
        end.saturating_sub(first).next_multiple_of(COPY_BYTES)
    };
    records.windows(2).map(tile).max().unwrap_or(0).min(MAX_STAGED)
}

/// Makes offsets count from a bit of the bitstream on: for records that travel with a part of it.
/// Those before that bit become 0, which kernels notice.
#[cfg(feature = "cudarc")]
pub(crate) fn rebase(records: &mut [u8], first_bit: u64) {
    for record in records.as_chunks_mut::<RECORD_BYTES>().0 {
        record::set_offset(record, record::offset(record).saturating_sub(first_bit));
    }
}

/// Checks all offsets.
///
/// # Errors
/// [`Error::Corrupt`] if they do not ascend from 0 to the bit count by whole bytes, where a tile
/// has more bits than any has, or the last record has another bit.
pub(crate) fn check_offsets(sizes: &Sizes, records: &[u8]) -> Result<()> {
    let corrupt = |at: usize, problem: &str| {
        Err(Error::corrupt("records", (at * RECORD_BYTES) as u64, problem))
    };
    let (records, rest) = records.as_chunks::<RECORD_BYTES>();
    if !rest.is_empty() || records.len() as u64 != sizes.tile_count() + 1 {
        return corrupt(records.len(), "must be one a tile, and one more");
    }
    if record::offset(&records[0]) != 0 {
        return corrupt(0, "offsets must start at 0");
    }
    for (at, pair) in records.windows(2).enumerate() {
        let (start, end) = (record::offset(&pair[0]), record::offset(&pair[1]));
        if !end.is_multiple_of(8) || end < start || end - start > MAX_TILE_BITS {
            return corrupt(
                at + 1,
                "offsets must ascend by whole bytes, and by no more than a tile's bits",
            );
        }
    }
    if records.last() != Some(&record::last(sizes.bit_count())) {
        return corrupt(records.len() - 1, "the last record must be the bit count alone");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{COPY_BYTES, MAX_STAGED, RECORD_BYTES, check_offsets, staged_bytes};
    use crate::encoding::tile::{Geometry, Sizes, record};

    fn records(offsets: &[u64]) -> Vec<u8> {
        offsets.iter().flat_map(|&offset| record::last(offset)).collect()
    }

    #[test]
    fn staging_counts_copies() {
        assert_eq!(staged_bytes(&records(&[0, 8])), COPY_BYTES);
        assert_eq!(staged_bytes(&records(&[120, 136])), 2 * COPY_BYTES);
        assert_eq!(staged_bytes(&records(&[0, 128, 8 * 1000])), 1008 - 16);
        assert_eq!(staged_bytes(&records(&[0, 1 << 47, 5])), MAX_STAGED);
        assert_eq!(staged_bytes(&[]), 0);
    }

    #[test]
    fn offsets_are_those_of_the_sizes() {
        let sizes =
            Sizes::new(Geometry::new(8192, 20_000, 20_000).unwrap(), 16_000, 26 + 4).unwrap();
        let right = [0, 4000, 8000, 16_000];
        check_offsets(&sizes, &records(&right)).unwrap();
        for (at, wrong) in [(0, 8), (1, 4001), (1, 9000), (2, 1 << 40), (3, 15_992)] {
            let mut offsets = right;
            offsets[at] = wrong;
            assert!(check_offsets(&sizes, &records(&offsets)).is_err(), "{offsets:?}");
        }
        let mut last = records(&right);
        last[3 * RECORD_BYTES + 31] = 1;
        assert!(check_offsets(&sizes, &last).is_err());
        assert!(check_offsets(&sizes, &last[..RECORD_BYTES * 3]).is_err());
    }
}
