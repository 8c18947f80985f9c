//! The gap encoding (6.3).

use crate::code::{Tree, symbol, tree, weight};
use crate::record::{Field, item, slice};
use crate::{Result, require};

fn tree_of(lengths: &[u8; 256]) -> Result<Tree> {
    let codes = (0..).zip(lengths).filter(|&(_, &length)| length > 0);
    tree(codes.map(|(exponent, &length)| (length.into(), exponent)).collect(), 16)
}

/// The code of each exponent (6.3, *Code*) in the lowest bits; 0 for exponents that do not occur.
///
/// # Errors
/// Corrupt if the lengths make no complete code.
pub fn canonical_codes(lengths: &[u8; 256]) -> Result<[u16; 256]> {
    let mut codes = [0; 256];
    for (node, leaf) in tree_of(lengths)?.into_iter().enumerate() {
        if let Some((exponent, length)) = leaf {
            codes[exponent as usize] = (node - (1 << length)) as u16;
        }
    }
    Ok(codes)
}

/// Follows up to eight bits, the least significant first, to a leaf or else to the node after the
/// eighth. The entry of a LUT for the leaf, or 0.
fn descend(nodes: &Tree, mut node: usize, bits: usize) -> (u16, usize) {
    for i in 0..8 {
        node = 2 * node + (bits >> i & 1);
        if let Some(Some((exponent, length))) = nodes.get(node) {
            return ((length << 8 | exponent) as u16, node);
        }
    }
    (0, node)
}

/// The LUTs that follow from the code lengths (6.3, *LUTs*), as stored; none if the lengths make no
/// complete code.
#[must_use]
pub fn luts(lengths: &[u8; 256]) -> Vec<u8> {
    let Ok(nodes) = tree_of(lengths) else { return Vec::new() };
    let mut luts = vec![[0; 256]];
    for index in 0..256 {
        let (entry, node) = descend(&nodes, 1, index);
        let lut: [u16; 256] = std::array::from_fn(|bits| descend(&nodes, node, bits).0);
        luts[0][index] = entry;
        if entry == 0 && lut != [0; 256] {
            luts[0][index] = luts.len() as u16;
            luts.push(lut);
        }
    }
    luts.into_iter().flatten().flat_map(u16::to_le_bytes).collect()
}

/// The lengths that a tensor's arrays must have (6.3), given that of its codebook.
pub(crate) fn array_lengths(
    codebook: u64,
    elements: u64,
    parameters: [u64; 3],
) -> Result<[u64; 5]> {
    let [bytes_per_thread, threads_per_block, bit_count] = parameters;
    require([8, 16, 32, 64].contains(&bytes_per_thread), "6.3: bytes_per_thread")?;
    require([64, 128, 256, 512, 1024].contains(&threads_per_block), "6.3: threads_per_block")?;
    // The arrays are no longer than the file, hence far below this.
    require((1..1 << 59).contains(&elements), "6.3: elements")?;
    require((elements..=elements * 16).contains(&bit_count), "6.3: bit_count")?;
    let luts = codebook.saturating_sub(256) / 512;
    let right = (1..=128).contains(&luts) && codebook == 256 + 512 * luts;
    require(right, "6.3: length of codebook")?;
    let threads = bit_count.div_ceil(8 * bytes_per_thread);
    let output_offsets = 8 * (threads.div_ceil(threads_per_block) + 1);
    Ok([codebook, threads.div_ceil(2), output_offsets, bytes_per_thread * threads, elements])
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
    require(arrays.map(|array| array.len() as u64) == lengths, "6.3: length of an array")?;
    let tree = tree_of(&Field::read(&mut codebook)?)?;
    // Where the first code of a thread starts; an even one, as the first of a thread block is.
    let start =
        |thread| Ok(8 * bytes_per_thread * thread + u64::from(item(gaps, thread / 2)? & 15));
    require(u64::read(&mut output_offsets)? == 0, "6.3: output offsets do not start at 0")?;
    require(start(0)? == 0, "6.3: gap(0) is not 0")?;
    let (mut position, mut element, mut thread) = (0, 0, 0);
    let mut weights = Vec::with_capacity(2 * plane.len());
    while !output_offsets.is_empty() {
        let next_element = u64::read(&mut output_offsets)?;
        require(element <= next_element, "6.3: output offsets descend")?;
        for &sign_mantissa in slice(plane, element, next_element - element)? {
            let exponent = symbol(&tree, bitstream, &mut position)?;
            weights.extend(weight(exponent as u8, sign_mantissa));
        }
        (element, thread) = (next_element, thread + threads_per_block);
        let end = if output_offsets.is_empty() { bit_count } else { start(thread)? };
        require(position == end, "6.3: a thread block does not end where the next one starts")?;
    }
    require(element == plane.len() as u64, "6.3: output offsets do not end at the elements")?;
    Ok(weights)
}
