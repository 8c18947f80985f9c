//! Canonical codes, as RFC 1951 section 3.2.2 assigns them: shorter codes first, then by symbol.

use super::CodeLengths;
use crate::constants::{MAX_CODE_LENGTH, SYMBOLS};

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
        let mut codes = [Code::default(); SYMBOLS];
        let mut next = 0u32;
        for length in 1..=MAX_CODE_LENGTH {
            for (code, _) in
                codes.iter_mut().zip(lengths.as_bytes()).filter(|(_, of)| **of == length)
            {
                let bits = (next as u16).reverse_bits() >> (u16::BITS - u32::from(length));
                *code = Code { bits, length };
                next += 1;
            }
            next <<= 1;
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
