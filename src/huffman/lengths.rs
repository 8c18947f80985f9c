//! Code lengths, the authority from which every table is derived.

use super::{Histogram, package_merge};
use crate::constants::{CODE_LENGTHS_BYTES, MAX_CODE_LENGTH, SYMBOLS};
use crate::{Error, Result};

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
    /// A function of the counts alone: ties are broken as the package-merge module documents.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the histogram is empty.
    pub fn from_histogram(histogram: &Histogram) -> Result<Self> {
        Self::with_limit(histogram, MAX_CODE_LENGTH)
    }

    /// As [`from_histogram`](Self::from_histogram), with codes of at most `limit` bits.
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
        let lengths = package_merge::code_lengths(&histogram.counts().map(u128::from), limit);
        Ok(Self { lengths: std::array::from_fn(|symbol| lengths[symbol]) })
    }

    /// Reads and checks stored lengths, one byte an exponent.
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
        let space = 1u32 << MAX_CODE_LENGTH;
        let kraft: u32 =
            lengths.iter().filter(|&&length| length > 0).map(|&length| space >> length).sum();
        // Half the code space is either one code of one bit, or several longer ones that leave a
        // hole.
        let one_symbol = lengths.iter().filter(|&&length| length > 0).eq([&1]);
        if kraft == space || one_symbol {
            Ok(Self { lengths })
        } else {
            Err(corrupt(0, "the code lengths do not fill the code space exactly"))
        }
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
                return Err(Error::parameter(
                    problem,
                    "make the code from the histogram of the whole tensor",
                ));
            }
            bits = count
                .checked_mul(u64::from(length))
                .and_then(|product| bits.checked_add(product))
                .ok_or_else(|| Error::limit("a tensor's bits", u64::MAX, u64::MAX - 1))?;
        }
        Ok(bits)
    }
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
}
