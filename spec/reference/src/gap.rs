//! The gap encoding (6.3).

use crate::Kind::Corrupt;
use crate::record::{Field, item, slice};
use crate::{Error, Result};

const MAX_CODE_LENGTH: u8 = 16;

/// The code of each exponent (6.3, *Code*) in the lowest bits; 0 for exponents that do not occur.
///
/// # Errors
/// Corrupt if the lengths make no complete code.
pub fn canonical_codes(lengths: &[u8; 256]) -> Result<[u16; 256]> {
    Corrupt.unless(
        lengths.iter().all(|&length| length <= MAX_CODE_LENGTH),
        "6.3: a code length exceeds 16",
    )?;
    let used = lengths.iter().filter(|&&length| length > 0);
    let sum: u32 = used.clone().map(|length| 1 << (MAX_CODE_LENGTH - length)).sum();
    let single = used.count() == 1 && sum == 1 << 15;
    Corrupt.unless(sum == 1 << 16 || single, "6.3: the code lengths make no complete code")?;
    let (mut codes, mut next) = ([0; 256], 0u32);
    for length in 1..=MAX_CODE_LENGTH {
        next <<= 1;
        for (code, _) in codes.iter_mut().zip(lengths).filter(|(_, l)| **l == length) {
            *code = next as u16;
            next += 1;
        }
    }
    Ok(codes)
}

/// The codes as a binary tree: the root is node 1, bit `b` leads from node `n` to node `2n + b`. A
/// leaf holds `length × 256 + exponent`, every other node 0.
fn tree(lengths: &[u8; 256]) -> Result<Vec<u16>> {
    let mut nodes = vec![0; 2 << MAX_CODE_LENGTH];
    for (exponent, (&length, code)) in (0..).zip(lengths.iter().zip(canonical_codes(lengths)?)) {
        if length > 0 {
            nodes[1 << length | usize::from(code)] = u16::from(length) << 8 | exponent;
        }
    }
    Ok(nodes)
}

/// Follows up to eight bits, the least significant first, to a leaf or else to the node after the
/// eighth.
fn descend(nodes: &[u16], mut node: usize, bits: u8) -> (u16, usize) {
    for i in 0..8 {
        node = 2 * node + usize::from(bits >> i & 1);
        if let Some(&leaf @ 1..) = nodes.get(node) {
            return (leaf, node);
        }
    }
    (0, node)
}

/// The LUTs that follow from the code lengths (6.3, *LUTs*), as stored; none if the lengths make no
/// complete code.
#[must_use]
pub fn luts(lengths: &[u8; 256]) -> Vec<u8> {
    let Ok(nodes) = tree(lengths) else { return Vec::new() };
    let (mut first, mut further) = ([0; 256], Vec::<[u16; 256]>::new());
    for (entry, index) in first.iter_mut().zip(0..=255) {
        let (leaf, node) = descend(&nodes, 1, index);
        let lut = std::array::from_fn(|bits| descend(&nodes, node, bits as u8).0);
        *entry = leaf;
        if leaf == 0 && lut != [0; 256] {
            further.push(lut);
            *entry = further.len() as u16;
        }
    }
    std::iter::once(first).chain(further).flatten().flat_map(u16::to_le_bytes).collect()
}

/// The lengths that a tensor's arrays must have (6.3), given that of its codebook.
pub(crate) fn array_lengths(
    codebook: u64,
    elements: u64,
    parameters: [u64; 3],
) -> Result<[u64; 5]> {
    let [bytes_per_thread, threads_per_block, bit_count] = parameters;
    Corrupt.unless([8, 16, 32, 64].contains(&bytes_per_thread), "6.3: bytes_per_thread")?;
    Corrupt
        .unless([64, 128, 256, 512, 1024].contains(&threads_per_block), "6.3: threads_per_block")?;
    // The arrays are no longer than the file, hence far below this.
    Corrupt.unless((1..1 << 59).contains(&elements), "6.3: elements")?;
    Corrupt.unless((elements..=elements * 16).contains(&bit_count), "6.3: bit_count")?;
    let luts = codebook.saturating_sub(256) / 512;
    Corrupt.unless(
        (1..=128).contains(&luts) && codebook == 256 + 512 * luts,
        "6.3: length of codebook",
    )?;
    let threads = bit_count.div_ceil(8 * bytes_per_thread);
    let output_offsets = 8 * (threads.div_ceil(threads_per_block) + 1);
    Ok([codebook, threads.div_ceil(2), output_offsets, bytes_per_thread * threads, elements])
}

/// The bit at which the first code of a thread starts (6.3, *Gaps*).
fn start(gaps: &[u8], bytes_per_thread: u64, thread: u64) -> Result<u64> {
    let gap = item(gaps, thread / 2)? >> (thread % 2 * 4) & 15;
    Ok(8 * bytes_per_thread * thread + u64::from(gap))
}

/// Reads one code, bit by bit (6.3, *Bit order*), and moves `position` past it.
fn exponent(nodes: &[u16], bitstream: &[u8], position: &mut u64) -> Result<u8> {
    let mut node = 1;
    for _ in 0..MAX_CODE_LENGTH {
        let bit = item(bitstream, *position / 8)? >> (*position % 8) & 1;
        node = 2 * node + usize::from(bit);
        *position += 1;
        if let Some(&leaf @ 1..) = nodes.get(node) {
            return Ok(leaf as u8);
        }
    }
    Err(Error { kind: Corrupt, message: "6.3: no code matches" })
}

/// Decodes a tensor: `arrays` and `parameters` are those of section 6, in its order; the plane has
/// a byte for each element. Returns the weights, little-endian. Threads are not started at their
/// gaps, but thread blocks are.
///
/// # Errors
/// Corrupt where a rule of *Decoding* is broken, or a parameter or the length of an array is wrong.
pub fn decode_gap(arrays: [&[u8]; 5], parameters: [u64; 3]) -> Result<Vec<u8>> {
    let [mut codebook, gaps, mut output_offsets, bitstream, plane] = arrays;
    let [bytes_per_thread, threads_per_block, bit_count] = parameters;
    let lengths = array_lengths(codebook.len() as u64, plane.len() as u64, parameters)?;
    Corrupt.unless(arrays.map(|array| array.len() as u64) == lengths, "6.3: length of an array")?;
    let nodes = tree(&Field::read(&mut codebook)?)?;
    Corrupt
        .unless(u64::read(&mut output_offsets)? == 0, "6.3: output offsets do not start at 0")?;
    Corrupt.unless(start(gaps, bytes_per_thread, 0)? == 0, "6.3: gap(0) is not 0")?;
    let (mut position, mut element, mut thread) = (0, 0, 0);
    let mut weights = Vec::with_capacity(2 * plane.len());
    while !output_offsets.is_empty() {
        let next_element = u64::read(&mut output_offsets)?;
        Corrupt.unless(element <= next_element, "6.3: output offsets descend")?;
        for &sign_mantissa in slice(plane, element, next_element - element)? {
            let (sign, mantissa) =
                (u16::from(sign_mantissa & 0x80) << 8, u16::from(sign_mantissa & 0x7F));
            let exponent = u16::from(exponent(&nodes, bitstream, &mut position)?) << 7;
            weights.extend((sign | exponent | mantissa).to_le_bytes());
        }
        (element, thread) = (next_element, thread + threads_per_block);
        let last = output_offsets.is_empty();
        let end = if last { bit_count } else { start(gaps, bytes_per_thread, thread)? };
        Corrupt.unless(
            position == end,
            "6.3: a thread block does not end where the next one starts",
        )?;
    }
    Corrupt
        .unless(element == plane.len() as u64, "6.3: output offsets do not end at the elements")?;
    Ok(weights)
}
