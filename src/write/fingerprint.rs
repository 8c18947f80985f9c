//! Fingerprints of tensors, which prove that the second pass reads the same bytes as the first.

/// Computes what bytes of a tensor, from `offset` on, add to its fingerprint. A number for each 16
/// bytes mixes them with their place; exclusive or joins all numbers, so that parts come in any
/// order. Fingerprints take far less time than hashes, and prove nothing against a writer who wants
/// to keep them; verification compares hashes.
pub(super) fn fingerprint(offset: u64, bytes: &[u8]) -> u64 {
    assert!(offset.is_multiple_of(16), "parts are cut at multiples of 16 bytes");
    let mix = |place: u64, bytes: &[u8; 16]| {
        let pair = u128::from_le_bytes(*bytes);
        let low = pair as u64 ^ place.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let product = u128::from(low) * u128::from((pair >> 64) as u64 ^ 0xA076_1D64_78BD_642F);
        product as u64 ^ (product >> 64) as u64
    };
    let (pairs, tail) = bytes.as_chunks();
    let mut last = [0; 16];
    last[..tail.len()].copy_from_slice(tail);
    let first = offset / 16 + 1;
    let end = if tail.is_empty() { 0 } else { mix(first + pairs.len() as u64, &last) };
    (first..).zip(pairs).fold(end, |sum, (place, pair)| sum ^ mix(place, pair))
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
