//! The Huffman code: the length of each exponent's code, by package-merge, and its bits.
//!
//! Every table is derived from the lengths. Codes are canonical, as RFC 1951 section 3.2.2 assigns
//! them: shorter codes first, then by symbol.

use std::ops::Add;

use super::histogram::Histogram;
use crate::{
    Error, Result,
    constants::{CODE_LENGTHS_BYTES, MAX_CODE_LENGTH, SYMBOLS},
};

/// The code length of each exponent, in bits; 0 for an exponent without a code.
///
/// Always a usable code: lengths of at most [`MAX_CODE_LENGTH`] that fill the code space exactly
/// (Kraft's sum is 1), or a single exponent of length 1, whose code is the bit 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeLengths {
    lengths: [u8; SYMBOLS],
}

impl CodeLengths {
    /// The lengths that give these weights the fewest bits, with codes of at most
    /// [`MAX_CODE_LENGTH`] bits.
    ///
    /// A function of the counts alone: of equally common exponents the lower one has the longer
    /// code.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the histogram is empty.
    pub fn from_histogram(histogram: &Histogram) -> Result<Self> {
        Self::with_limit(histogram, MAX_CODE_LENGTH)
    }

    /// Like [`from_histogram`](Self::from_histogram), with codes of at most `limit` bits.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the histogram is empty, or where `limit` is not in 1..=16 or has too
    /// few codes for the exponents that occur.
    pub fn with_limit(histogram: &Histogram, limit: u8) -> Result<Self> {
        let used = histogram.used();
        if used == 0 {
            return Err(Error::parameter("a tensor without elements has no code", "store it raw"));
        }
        if !(1..=MAX_CODE_LENGTH).contains(&limit) || used > 1 << limit {
            return Err(Error::parameter(
                format!("{used} exponents do not fit codes of at most {limit} bits"),
                "allow 8 to 16 bits",
            ));
        }
        // Sums of up to 16 × 256 counts: beyond u64 for counts that no tensor has, but exact all
        // the same.
        let lengths = package_merge(&histogram.counts().map(u128::from), limit);
        Ok(Self { lengths: std::array::from_fn(|symbol| lengths[symbol]) })
    }

    /// Reads and checks stored lengths, one byte per exponent.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the byte at fault: not 256 bytes, a length above 16, or lengths that
    /// are no complete code.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let corrupt = |offset, problem: &str| Error::corrupt("code lengths", offset, problem);
        let lengths: [u8; CODE_LENGTHS_BYTES] =
            bytes.try_into().map_err(|_| corrupt(bytes.len() as u64, "must be 256 bytes"))?;
        if let Some(at) = lengths.iter().position(|&length| length > MAX_CODE_LENGTH) {
            return Err(corrupt(at as u64, "a code length exceeds 16 bits"));
        }
        if !is_complete(lengths.into_iter().filter(|&length| length > 0)) {
            return Err(corrupt(0, "the code lengths do not fill the code space exactly"));
        }
        Ok(Self { lengths })
    }

    /// The lengths, indexed by exponent; also the stored form.
    pub const fn as_bytes(&self) -> &[u8; CODE_LENGTHS_BYTES] {
        &self.lengths
    }

    /// The code length of an exponent, in bits; 0 if it has no code.
    #[inline]
    pub const fn get(&self, exponent: u8) -> u8 {
        self.lengths[exponent as usize]
    }

    /// The bits that the weights of this histogram take.
    ///
    /// # Errors
    /// [`Error::Parameter`] if an exponent occurs that has no code; [`Error::Limit`] if the sum
    /// exceeds 2^64 − 1.
    pub fn bits(&self, histogram: &Histogram) -> Result<u64> {
        let mut bits = 0u64;
        for (exponent, (&count, &length)) in
            histogram.counts().iter().zip(&self.lengths).enumerate()
        {
            if count > 0 && length == 0 {
                let problem = format!("the exponent {exponent} has no code");
                let remedy = "make the code from the histogram of the whole tensor";
                return Err(Error::parameter(problem, remedy));
            }
            bits = count
                .checked_mul(u64::from(length))
                .and_then(|product| bits.checked_add(product))
                .ok_or_else(|| Error::overflow("a tensor's bits"))?;
        }
        Ok(bits)
    }
}

/// The code of an exponent, ready to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Code {
    /// The code's bits with its first (most significant) bit lowest, as streams are written least
    /// significant bit first.
    pub bits: u16,
    /// The number of bits, 1..=16; 0 for an exponent without a code.
    pub length: u8,
}

/// The codes of all exponents.
#[derive(Clone, Debug)]
pub struct Codes {
    codes: [Code; SYMBOLS],
}

impl Codes {
    /// Assigns the codes, in some hundred steps.
    pub fn new(lengths: &CodeLengths) -> Self {
        let all = (0..=255).map(|symbol| (symbol, lengths.get(symbol)));
        let mut symbols: Vec<(u8, u8)> = all.filter(|&(_, length)| length > 0).collect();
        symbols.sort_by_key(|&(_, length)| length);
        let mut codes = [Code::default(); SYMBOLS];
        for (symbol, code) in assign(symbols.into_iter()) {
            codes[usize::from(symbol)] = code;
        }
        Self { codes }
    }

    /// The code of an exponent.
    #[inline]
    pub const fn get(&self, exponent: u8) -> Code {
        self.codes[exponent as usize]
    }

    /// The exponents that have a code, ascending, each with its code.
    pub fn used(&self) -> impl Iterator<Item = (u8, Code)> + Clone + '_ {
        (0..=255).map(|symbol| (symbol, self.get(symbol))).filter(|(_, code)| code.length > 0)
    }
}

/// Whether codes of these lengths, 1..=16, fill the code space exactly (Kraft's sum is 1), or are
/// one code of one bit. Half the space is either that or several longer codes that leave a hole.
pub(crate) fn is_complete(lengths: impl Iterator<Item = u8> + Clone) -> bool {
    let space = 1u64 << MAX_CODE_LENGTH;
    lengths.clone().map(|length| space >> length).sum::<u64>() == space || lengths.eq([1])
}

/// Gives symbols their codes; they come with their lengths, in the order of their codes.
pub(crate) fn assign<S>(symbols: impl Iterator<Item = (S, u8)>) -> impl Iterator<Item = (S, Code)> {
    let (mut next, mut before) = (0u32, 0);
    symbols.map(move |(symbol, length)| {
        next <<= length - before;
        before = length;
        let bits = (next as u16).reverse_bits() >> (u16::BITS - u32::from(length));
        next += 1;
        (symbol, Code { bits, length })
    })
}

/// Optimal code lengths of at most `limit` bits for these counts (L. L. Larmore, D. S. Hirschberg,
/// "A fast algorithm for optimal length-limited Huffman codes", J. ACM 37(3), 1990); 0 for symbols
/// that do not occur, 1 for a symbol that occurs alone.
///
/// Each level's list holds the symbols, by ascending count, merged with the packages: pairs of
/// neighbours in the list of the level below. The `2n − 2` lightest items of the top list,
/// unpacked, hold each symbol as often as its code has bits.
///
/// Ties: symbols of equal count stand in ascending order (so the lower symbol gets the longer
/// code), and a symbol stands before a package of equal weight. With that the lengths are a
/// function of the counts alone.
///
/// `2^limit` must be at least the number of symbols that occur, and `limit` times the sum of all
/// counts must fit their type. Costs O(symbols × limit): some microseconds for 256 symbols, some
/// 100 for 4096.
pub(crate) fn package_merge<T: Copy + Ord + Default + Add<Output = T>>(
    counts: &[T],
    limit: u8,
) -> Vec<u8> {
    let mut lengths = vec![0; counts.len()];
    let mut symbols: Vec<usize> =
        (0..counts.len()).filter(|&symbol| counts[symbol] > T::default()).collect();
    symbols.sort_by_key(|&symbol| counts[symbol]);
    if let [only] = symbols[..] {
        lengths[only] = 1;
    }
    if symbols.len() < 2 {
        return lengths;
    }
    let leaves: Vec<T> = symbols.iter().map(|&symbol| counts[symbol]).collect();
    let (mut list, mut levels) = (leaves.clone(), vec![vec![true; leaves.len()]]);
    for _ in 1..limit {
        let mut level = Vec::with_capacity(2 * leaves.len());
        list = merged(&leaves, &list, |is_leaf| level.push(is_leaf));
        levels.push(level);
    }
    let mut wanted = 2 * symbols.len() - 2;
    for is_leaf in levels.iter().rev() {
        let chosen = is_leaf[..wanted].iter().filter(|&&leaf| leaf).count();
        for &symbol in &symbols[..chosen] {
            lengths[symbol] += 1;
        }
        wanted = 2 * (wanted - chosen);
    }
    lengths
}

/// The bits that symbols of these counts, in ascending order, take with the lengths of
/// [`package_merge`]: the weight of all chosen items.
pub(crate) fn least_bits(counts: &[u64], limit: u8) -> u64 {
    let mut list = counts.to_vec();
    if counts.len() < 2 {
        return list.iter().sum();
    }
    for _ in 1..limit {
        list = merged(counts, &list, |_| ());
    }
    list[..2 * counts.len() - 2].iter().sum()
}

/// The list of a level, from that of the level below; tells of each item whether it is a symbol
/// (the others are packages).
fn merged<T: Copy + Ord + Add<Output = T>>(
    leaves: &[T],
    below: &[T],
    mut tell: impl FnMut(bool),
) -> Vec<T> {
    let packages: Vec<T> = below.as_chunks::<2>().0.iter().map(|&[a, b]| a + b).collect();
    let (mut leaves, mut packages) = (leaves, &packages[..]);
    let mut merged = Vec::with_capacity(leaves.len() + packages.len());
    while let (&[leaf, ..], &[package, ..]) = (leaves, packages) {
        // Which one is next cannot be predicted, and is no branch; of equals it is the leaf.
        let is_leaf = leaf <= package;
        merged.push(if is_leaf { leaf } else { package });
        leaves = &leaves[usize::from(is_leaf)..];
        packages = &packages[usize::from(!is_leaf)..];
        tell(is_leaf);
    }
    for _ in leaves {
        tell(true);
    }
    for _ in packages {
        tell(false);
    }
    merged.extend(leaves.iter().chain(packages));
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(used: &[(usize, u8)]) -> Vec<u8> {
        let mut bytes = vec![0; 256];
        for &(symbol, length) in used {
            bytes[symbol] = length;
        }
        bytes
    }

    #[test]
    fn stored_lengths_must_be_a_complete_code() {
        assert!(CodeLengths::from_bytes(&vec![8; 256]).is_ok());
        let one_symbol = lengths(&[(7, 1)]);
        assert_eq!(CodeLengths::from_bytes(&one_symbol).unwrap().as_bytes()[..], one_symbol);
        assert!(CodeLengths::from_bytes(&lengths(&[(0, 1), (9, 2), (255, 2)])).is_ok());
        for bad in [
            vec![0; 256],
            vec![8; 255],
            vec![7; 256],
            lengths(&[(7, 2)]),
            lengths(&[(7, 2), (8, 2)]),
            lengths(&[(0, 1), (1, 17)]),
            lengths(&[(0, 1), (1, 2)]),
            lengths(&[(0, 1), (1, 1), (2, 1)]),
        ] {
            assert!(matches!(CodeLengths::from_bytes(&bad), Err(Error::Corrupt { .. })));
        }
    }

    #[test]
    fn fibonacci_counts_reach_the_limit() {
        let mut counts = [0; 256];
        let (mut a, mut b) = (1, 1);
        for count in &mut counts[..40] {
            *count = a;
            (a, b) = (b, a + b);
        }
        let code = CodeLengths::from_histogram(&counts.into()).unwrap();
        assert_eq!(code.as_bytes().iter().max(), Some(&16));
        assert_eq!(CodeLengths::from_bytes(code.as_bytes()).unwrap(), code);
    }

    #[test]
    fn equal_counts_give_the_lower_symbol_the_longer_code() {
        let mut counts = [0; 256];
        counts[3..6].fill(u64::MAX);
        let code = CodeLengths::from_histogram(&counts.into()).unwrap();
        assert_eq!(code.as_bytes()[3..6], [2, 2, 1]);
        assert!(matches!(code.bits(&counts.into()), Err(Error::Limit { .. })));
        assert!(CodeLengths::with_limit(&counts.into(), 1).is_err());
        assert!(CodeLengths::from_histogram(&Histogram::default()).is_err());
    }

    #[test]
    fn the_example_of_rfc_1951() {
        // Section 3.2.2: lengths (3, 3, 3, 3, 3, 2, 4, 4) give 010, 011, 100, 101, 110, 00, 1110,
        // 1111.
        let mut lengths = [0; 256];
        lengths[..8].copy_from_slice(&[3, 3, 3, 3, 3, 2, 4, 4]);
        let codes = Codes::new(&CodeLengths::from_bytes(&lengths).unwrap());
        let bits: Vec<u16> = codes.used().map(|(_, code)| code.bits).collect();
        assert_eq!(bits, [0b010, 0b110, 0b001, 0b101, 0b011, 0b00, 0b0111, 0b1111]);
    }
}
