//! Do both passes read the same? Sums of a tensor's bytes that take far less time than hashes, and
//! that parts read in any order make together.
//!
//! A tensor is a sequence of 64-bit words `w(i)`, each mixed with its own upper half. Its
//! fingerprint is `sum of w(i)` and `sum of i × w(i)`, modulo 2^64: no change of one word keeps
//! them, and any other one by chance alone. They prove nothing against a writer who wants to keep
//! them; verification compares hashes.

use std::sync::atomic::{AtomicU64, Ordering};

const WORD_BYTES: usize = 8;
/// Words that are summed side by side, for vector registers.
const LANES: usize = 8;

/// The fingerprint of a tensor, or of a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fingerprint {
    sum: u64,
    /// Of each word times its index in the tensor.
    weighted: u64,
}

impl Fingerprint {
    /// Of bytes that start at this byte of their tensor, a multiple of 8. So must be their end,
    /// unless it is the tensor's.
    pub(super) fn of(offset: u64, bytes: &[u8]) -> Self {
        assert!(offset.is_multiple_of(WORD_BYTES as u64), "parts start with a word");
        let (words, tail) = bytes.as_chunks::<WORD_BYTES>();
        let (rows, words) = words.as_chunks::<LANES>();
        // Of each lane, the sum of its words, and that of these sums after each row: the sum of
        // its words, each times the number of rows from it to the end.
        let (mut sums, mut weights) = ([0u64; LANES], [0u64; LANES]);
        for row in rows {
            for lane in 0..LANES {
                sums[lane] = sums[lane].wrapping_add(mix(row[lane]));
                weights[lane] = weights[lane].wrapping_add(sums[lane]);
            }
        }
        let first = offset / WORD_BYTES as u64;
        let mut found = Self::default();
        for lane in 0..LANES {
            // Row `r` of `n` was counted `n − r` times; its index is `first + LANES × r + lane`.
            let rows_sum = (rows.len() as u64).wrapping_mul(sums[lane]).wrapping_sub(weights[lane]);
            let start = first.wrapping_add(lane as u64);
            found.sum = found.sum.wrapping_add(sums[lane]);
            found.weighted = found
                .weighted
                .wrapping_add(rows_sum.wrapping_mul(LANES as u64))
                .wrapping_add(start.wrapping_mul(sums[lane]));
        }
        let first = first.wrapping_add((rows.len() * LANES) as u64);
        let mut padded = [0; WORD_BYTES];
        padded[..tail.len()].copy_from_slice(tail);
        // A tail of no bytes is a word of zero, which adds nothing.
        for (index, &word) in (first..).zip(words.iter().chain([&padded])) {
            let word = mix(word);
            found.add(Self { sum: word, weighted: index.wrapping_mul(word) });
        }
        found
    }

    /// Takes another part of the same tensor.
    pub(super) fn add(&mut self, part: Self) {
        self.sum = self.sum.wrapping_add(part.sum);
        self.weighted = self.weighted.wrapping_add(part.weighted);
    }
}

/// So that a change of the highest bit alone, the sign of a weight, is one of other bits too.
fn mix(word: [u8; WORD_BYTES]) -> u64 {
    let word = u64::from_le_bytes(word);
    word ^ word >> 32
}

/// A fingerprint to which threads add parts.
#[derive(Debug, Default)]
pub(super) struct Shared {
    sum: AtomicU64,
    weighted: AtomicU64,
}

impl Shared {
    pub(super) fn add(&self, part: Fingerprint) {
        self.sum.fetch_add(part.sum, Ordering::Relaxed);
        self.weighted.fetch_add(part.weighted, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Fingerprint {
        Fingerprint {
            sum: self.sum.load(Ordering::Relaxed),
            weighted: self.weighted.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(length: usize) -> Vec<u8> {
        (0..length).map(|i| (i * i * 31 % 251) as u8).collect()
    }

    #[test]
    fn it_is_the_two_sums_however_it_is_cut() {
        // Nothing, part of a word, words, rows with and without a rest.
        for length in [0, 1, 8, 63, 64, 65, 640, 1003] {
            let bytes = bytes(length);
            let mut expected = Fingerprint::default();
            for (index, word) in (0u64..).zip(bytes.chunks(8)) {
                let mut padded = [0; 8];
                padded[..word.len()].copy_from_slice(word);
                let word = mix(padded);
                expected.add(Fingerprint { sum: word, weighted: index.wrapping_mul(word) });
            }
            for cut in [8, 16, 72, 128, 200] {
                let shared = Shared::default();
                let parts = bytes.chunks(cut).enumerate();
                parts
                    .rev()
                    .for_each(|(i, part)| shared.add(Fingerprint::of((i * cut) as u64, part)));
                assert_eq!(shared.get(), expected, "{length} {cut}");
            }
        }
    }

    #[test]
    fn changes_show() {
        let before = bytes(1000);
        let first = Fingerprint::of(0, &before);
        for at in 0..before.len() {
            let mut after = before.clone();
            after[at] ^= 0x80;
            assert_ne!(Fingerprint::of(0, &after), first, "{at}");
            // The sign of another weight too, in the same place of a word.
            after[(at + 128) % 1000] ^= 0x80;
            assert_ne!(Fingerprint::of(0, &after), first, "{at}");
        }
        let mut swapped = before.clone();
        swapped[..16].rotate_left(8);
        assert_ne!(Fingerprint::of(0, &swapped), first);
    }
}
