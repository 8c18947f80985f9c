//! Streams of bits, least significant bit of each byte first (RFC 1951 section 3.1.1).

/// The number of bits that [`peek`] and [`peek_at_end`] return at least.
pub(crate) const PEEK_BITS: usize = 57;

/// The next bits of a stream from a bit position, with one unaligned load: at least [`PEEK_BITS`],
/// and zeros above.
///
/// # Panics
/// If fewer than 8 bytes follow.
#[inline]
pub(crate) fn peek(stream: &[u8], bit: usize) -> u64 {
    // A range of known length is one comparison; `first_chunk` of the rest would be two.
    let at = bit / 8;
    u64::from_le_bytes(stream[at..at + 8].try_into().expect("8 bytes")) >> (bit % 8)
}

/// Like [`peek`], anywhere: after the end of the stream follow zeros.
pub(crate) fn peek_at_end(stream: &[u8], bit: usize) -> u64 {
    let rest = stream.get(bit / 8..).unwrap_or_default();
    let mut bytes = [0; 8];
    let held = rest.len().min(8);
    bytes[..held].copy_from_slice(&rest[..held]);
    u64::from_le_bytes(bytes) >> (bit % 8)
}

/// Whether every bit from a position to the end of the stream is zero.
pub(crate) fn is_zero_from(stream: &[u8], bit: usize) -> bool {
    let rest = stream.get(bit / 8..).unwrap_or_default();
    rest.split_first()
        .is_none_or(|(first, rest)| first >> (bit % 8) == 0 && rest.iter().all(|&byte| byte == 0))
}

/// The most bits that [`End::push`] appends: those that fit beside the up to 7 of a byte begun.
pub(crate) const PUSH_BITS: usize = 56;

/// The end of a stream that is being written.
#[derive(Clone, Copy, Default)]
pub(crate) struct End {
    /// The bits written, counted from the start of the buffer.
    pub(crate) bit: usize,
    /// The `bit % 8` bits of the byte begun.
    pub(crate) begun: u64,
}

impl End {
    /// Bytes that a buffer needs after its last bit.
    pub(crate) const SLACK: usize = 8;

    /// Appends up to [`PUSH_BITS`] bits, above which `bits` is zero; `None` if the buffer is full.
    #[inline]
    pub(crate) fn push(&mut self, stream: &mut [u8], bits: u64, length: usize) -> Option<()> {
        let held = self.bit % 8;
        self.begun |= bits << held;
        let at = self.bit / 8;
        stream.get_mut(at..at + 8)?.copy_from_slice(&self.begun.to_le_bytes());
        self.bit += length;
        self.begun >>= (held + length) & !7;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peeks_agree() {
        let stream: Vec<u8> = (0..32u8).map(|byte| byte.wrapping_mul(57)).collect();
        for bit in 0..=24 * 8 {
            assert_eq!(peek(&stream, bit), peek_at_end(&stream, bit));
        }
        assert_eq!(peek_at_end(&stream, 31 * 8 + 4), u64::from(stream[31] >> 4));
        assert_eq!(peek_at_end(&stream, 1 << 40), 0);
        assert!(is_zero_from(&[0xFF, 0x0F, 0], 12));
        assert!(!is_zero_from(&[0xFF, 0x0F, 0], 11));
        assert!(is_zero_from(&[], 0));
    }
}
