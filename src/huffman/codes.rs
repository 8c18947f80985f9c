//! Canonical codes, as RFC 1951 section 3.2.2 assigns them: shorter codes first, then by symbol.

use super::CodeLengths;
use crate::constants::SYMBOLS;

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

#[cfg(test)]
mod tests {
    use super::*;

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
