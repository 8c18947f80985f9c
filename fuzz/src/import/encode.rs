//! One block as the official package codes it, with any prefix code, written from its layout alone.

use std::collections::BTreeMap;

/// The arrays of a block.
#[derive(Clone, Debug)]
pub struct Arrays {
    /// `encoded_exponent`.
    pub codes: Vec<u8>,
    /// `sign_mantissa`.
    pub plane: Vec<u8>,
    /// `luts`.
    pub luts: Vec<u8>,
    /// `output_positions`, little-endian u32.
    pub positions: Vec<u8>,
    /// `gaps`.
    pub gaps: Vec<u8>,
}

/// How long codes are, the more frequent an exponent the shorter.
#[derive(Clone, Copy, Debug)]
pub enum Lengths {
    /// All as long, 8 bits at most.
    Equal,
    /// 1, 2, 3, .. bits, up to 32.
    Unary,
    /// 2, 4, 6, .. bits, up to 32.
    Steep,
}

/// Bits, the first of a byte being its most significant one.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    count: u64,
}

impl Bits {
    fn push(&mut self, value: u64, bits: u8) {
        for bit in (0..bits).rev() {
            if self.count.is_multiple_of(8) {
                self.bytes.push(0);
            }
            let last = self.bytes.len() - 1;
            self.bytes[last] |= ((value >> bit & 1) as u8) << (7 - self.count % 8);
            self.count += 1;
        }
    }
}

/// The smallest number that leads to another table.
const FIRST_POINTER: u8 = 240;

/// The code of each exponent that occurs: its bits and their number.
type Codes = BTreeMap<u8, (u64, u8)>;

fn codes(exponents: &[u8], lengths: Lengths) -> Codes {
    let mut counts = BTreeMap::<u8, u64>::new();
    for &exponent in exponents {
        *counts.entry(exponent).or_default() += 1;
    }
    let mut order: Vec<u8> = counts.keys().copied().collect();
    order.sort_by_key(|exponent| std::cmp::Reverse(counts[exponent]));
    let equal = order.len().next_power_of_two().trailing_zeros().max(1) as u8;
    let length = |rank: usize| match lengths {
        Lengths::Equal => equal,
        // 256 codes of 32 bits have room beside 24 of 1 to 24 bits, and beside 12 of 2 to 24.
        Lengths::Unary if rank < 24 => rank as u8 + 1,
        Lengths::Steep if rank < 12 => 2 * rank as u8 + 2,
        _ => 32,
    };
    let (mut codes, mut next, mut before) = (Codes::new(), 0, 0);
    for (rank, &exponent) in order.iter().enumerate() {
        let length = length(rank);
        next <<= length - before;
        codes.insert(exponent, (next, length));
        (next, before) = (next + 1, length);
    }
    codes
}

/// Rows of 256: look-up tables, then code lengths.
fn luts(codes: &Codes, filler: u8) -> Vec<u8> {
    // The bytes before the last one of each code, for each of which there is a table; shorter ones
    // first.
    let mut prefixes: Vec<(u8, u64)> = vec![(0, 0)];
    for &(code, length) in codes.values() {
        let levels = (length - 1) / 8;
        prefixes.extend((1..=levels).map(|level| (level, code >> (length - 8 * level))));
    }
    prefixes.sort_unstable();
    prefixes.dedup();
    let index =
        |level: u8, prefix: u64| prefixes.binary_search(&(level, prefix)).expect("a prefix");
    let mut rows = vec![[None; 256]; prefixes.len()];
    let mut lengths = [0; 256];
    for (row, &(level, prefix)) in prefixes.iter().enumerate().skip(1) {
        rows[index(level - 1, prefix >> 8)][(prefix & 255) as usize] = Some((256 - row) as u8);
    }
    for (&exponent, &(code, length)) in codes {
        let level = (length - 1) / 8;
        let rest = length - 8 * level;
        let first = (code & ((1 << rest) - 1)) << (8 - rest);
        let row = index(level, code >> rest);
        rows[row][first as usize..][..1 << (8 - rest)].fill(Some(exponent));
        lengths[usize::from(exponent)] = length;
    }
    let mut before = 0;
    let entry = |entry: Option<u8>| {
        before = entry.unwrap_or(if filler < FIRST_POINTER { filler } else { before });
        before
    };
    rows.into_iter().flatten().map(entry).chain(lengths).collect()
}

/// Codes weights (little-endian), at least one. `filler` stands in entries of the tables that no
/// code reaches; if it would be a pointer, they repeat the entry before them, as the package has
/// it.
pub fn encode(weights: &[u8], lengths: Lengths, threads: u64, filler: u8) -> Arrays {
    let weights = weights.as_chunks::<2>().0;
    let exponents: Vec<u8> = weights.iter().map(|[low, high]| high << 1 | low >> 7).collect();
    let plane = weights.iter().map(|[low, high]| high & 0x80 | low & 0x7F).collect();
    let codes = codes(&exponents, lengths);
    let mut stream = Bits::default();
    let mut starts = Vec::new();
    for exponent in &exponents {
        let (code, length) = codes[exponent];
        starts.push(stream.count);
        stream.push(code, length);
    }
    let blocks = (stream.bytes.len() as u64).div_ceil(8 * threads);
    let (mut gaps, mut positions) = (Bits::default(), Vec::new());
    for thread in 0..threads * blocks {
        let first = starts.partition_point(|&start| start < 64 * thread);
        let gap = starts.get(first).filter(|&&start| start < 64 * (thread + 1));
        gaps.push(gap.map_or(0, |start| start - 64 * thread), 5);
        if thread.is_multiple_of(threads) {
            positions.extend((first as u32).to_le_bytes());
        }
    }
    positions.extend((exponents.len() as u32).to_le_bytes());
    Arrays { codes: stream.bytes, plane, luts: luts(&codes, filler), positions, gaps: gaps.bytes }
}
