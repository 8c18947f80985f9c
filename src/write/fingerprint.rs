//! Fingerprints of tensors, which prove that the second pass reads the same bytes as the first.

use crate::float::load;

/// Computes what bytes of a tensor, from `offset` on, add to its fingerprint. Each 8 bytes, and the
/// number of their place, make a product of two halves; exclusive or joins all products, so that
/// parts come in any order. Fingerprints take far less time than hashes. They miss a change of one
/// half of 8 bytes where the other half and the place make zero (once in 2^32), and prove nothing
/// against a writer who wants to keep them; verification compares hashes.
///
/// It is fast because products of 32 bits are vector instructions on any processor, and the numbers
/// of places are sums.
pub(super) fn fingerprint(offset: u64, bytes: &[u8]) -> u64 {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
    assert!(offset.is_multiple_of(8), "parts are cut at multiples of 8 bytes");
    let mix = |place: u64, word: u64| {
        let word = word.wrapping_add(place);
        (word & 0xFFFF_FFFF) * (word >> 32)
    };
    let mut place = (offset / 8 + 1).wrapping_mul(STEP);
    let (words, tail) = bytes.as_chunks();
    let sum = words.iter().fold(0, |sum, word| {
        let product = mix(place, u64::from_le_bytes(*word));
        place = place.wrapping_add(STEP);
        sum ^ product
    });
    if tail.is_empty() { sum } else { sum ^ mix(place, load(tail, 0)) }
}

#[cfg(test)]
mod tests {
    use super::fingerprint;

    fn bytes(length: usize) -> Vec<u8> {
        (0..length).map(|i| (i * i * 31 % 251) as u8).collect()
    }

    #[test]
    fn a_fingerprint_is_the_same_however_it_is_cut() {
        for length in [0, 1, 8, 16, 63, 64, 640, 1003] {
            let bytes = bytes(length);
            for cut in [16, 80, 208] {
                let parts = bytes.chunks(cut).enumerate();
                let parts = parts.map(|(i, part)| fingerprint((i * cut) as u64, part));
                assert_eq!(parts.fold(0, |sum, part| sum ^ part), fingerprint(0, &bytes));
            }
        }
    }

    #[test]
    fn changes_show() {
        let before = bytes(1003);
        let first = fingerprint(0, &before);
        for at in 0..before.len() {
            let mut after = before.clone();
            after[at] ^= 0x80;
            assert_ne!(fingerprint(0, &after), first, "{at}");
            // The sign of another weight too, at the same place of other bytes.
            after[(at + 160) % 1003] ^= 0x80;
            assert_ne!(fingerprint(0, &after), first, "{at}");
            after.clone_from(&before);
            after.swap(at, (at + 16) % 1003);
            assert!(after == before || fingerprint(0, &after) != first, "{at}");
        }
    }
}
