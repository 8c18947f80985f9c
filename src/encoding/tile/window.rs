//! The bits of one tile, where every read is within bounds.
//!
//! Q: Why a copy, of some 3 KiB a tile? It comes in one pass from start to end, as memory likes it,
//! while lanes are read from 32 places; reads need no comparison, since every masked position is
//! inside; and the end of the bitstream is like any other place.

use super::{MAX_LANE_BITS, MAX_TILE_BYTES};

/// Bytes of a load.
const LOAD: usize = 8;
/// Bytes at which a load may start.
const BYTES: usize = 1 << 14;
/// Bytes that are taken after a tile: no lane is read farther than its longest pairs and a load
/// after its start.
const BEHIND: usize = MAX_LANE_BITS / 8 + LOAD;
const _: () = assert!(MAX_TILE_BYTES + BEHIND <= BYTES);

/// A tile's bits and what follows them.
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

    /// The next bits from a bit position: at least [`PEEK_BITS`](crate::huffman::bits::PEEK_BITS),
    /// and zeros above. Of a position outside some bits.
    #[inline]
    pub(super) fn peek(&self, bit: usize) -> u64 {
        let at = bit / 8 % BYTES;
        u64::from_le_bytes(self.bytes[at..at + LOAD].try_into().expect("8 bytes")) >> (bit % 8)
    }
}
