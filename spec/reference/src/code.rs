//! Bits, canonical prefix codes read bit by bit, and weights (6.3, 6.4).

use crate::record::item;
use crate::{Result, require};

/// A code as a binary tree: the root is node 1, bit `b` leads from node `n` to node `2n + b`. A
/// leaf holds a symbol and the length of its code.
pub(crate) type Tree = Vec<Option<(u32, u32)>>;

/// The tree of the code with these lengths, of at most `most` bits, and symbols (*Code*).
pub(crate) fn tree(mut codes: Vec<(u32, u32)>, most: u32) -> Result<Tree> {
    codes.sort_unstable();
    require(codes.iter().all(|&(length, _)| length <= most), "6: a code is too long")?;
    let sum: u64 = codes.iter().map(|&(length, _)| 1 << (most - length)).sum();
    let single = codes.len() == 1 && codes[0].0 == 1;
    require(sum == 1 << most || single, "6: the code lengths make no complete code")?;
    let mut nodes = vec![None; 2 << codes[codes.len() - 1].0];
    let (mut next, mut before) = (0, 0);
    for (length, symbol) in codes {
        next <<= length - before;
        nodes[1 << length | next] = Some((symbol, length));
        (next, before) = (next + 1, length);
    }
    Ok(nodes)
}

/// A number of `count` bits that begins with its least significant one (*Bit order*).
pub(crate) fn number(bytes: &[u8], position: u64, count: u64) -> Result<u64> {
    (position..position + count)
        .rev()
        .try_fold(0, |number, at| Ok(number << 1 | u64::from(item(bytes, at / 8)? >> (at % 8) & 1)))
}

/// Reads a symbol, bit by bit, and moves `position` past its code.
pub(crate) fn symbol(tree: &Tree, bitstream: &[u8], position: &mut u64) -> Result<u32> {
    let mut node = 1;
    loop {
        node = 2 * node + number(bitstream, *position, 1)?;
        *position += 1;
        require(node < tree.len() as u64, "6: no code matches")?;
        if let Some((symbol, _)) = tree[node as usize] {
            return Ok(symbol);
        }
    }
}

/// The weight of an exponent and a sign/mantissa byte.
pub(crate) fn weight(exponent: u8, sign_mantissa: u8) -> [u8; 2] {
    [exponent << 7 | sign_mantissa & 0x7F, sign_mantissa & 0x80 | exponent >> 1]
}
