//! The gap encoding (6.3).

use crate::Kind::Corrupt;
use crate::Result;
use crate::record::{Field, add, item, mul, slice};

const MAX_CODE_LENGTH: u8 = 16;

/// The code of each exponent (6.3, *Code*) in the lowest bits; 0 for exponents that do not occur.
///
/// # Errors
/// Corrupt if the lengths make no complete code.
pub fn canonical_codes(lengths: &[u8; 256]) -> Result<[u16; 256]> {
    Corrupt
        .unless(lengths.iter().all(|&length| length <= MAX_CODE_LENGTH), "6.3: a code length exceeds 16")?;
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

/// The codes as a binary tree: the root is node 1, bit `b` leads from node `n` to node `2n + b`. A leaf holds
/// `length × 256 + exponent`, every other node 0.
fn tree(lengths: &[u8; 256]) -> Result<Vec<u16>> {
    let mut nodes = vec![0; 2 << MAX_CODE_LENGTH];
    for (exponent, (&length, code)) in (0..).zip(lengths.iter().zip(canonical_codes(lengths)?)) {
        if length > 0 {
            nodes[1 << length | usize::from(code)] = u16::from(length) << 8 | exponent;
        }
    }
    Ok(nodes)
}

/// Follows up to eight bits, the least significant first, to a leaf or else to the node behind the eighth.
fn descend(nodes: &[u16], mut node: usize, bits: u8) -> (u16, usize) {
    for i in 0..8 {
        node = 2 * node + usize::from(bits >> i & 1);
        if let Some(&leaf @ 1..) = nodes.get(node) {
            return (leaf, node);
        }
    }
    (0, node)
}

/// The LUTs that follow from the code lengths (6.3, *LUTs*), as stored; none if the lengths make no complete code.
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

/// The counts of threads and of thread blocks (6.3).
fn counts([bytes_per_thread, threads_per_block, bit_count]: [u64; 3]) -> Result<(u64, u64)> {
    Corrupt.unless([8, 16, 32, 64].contains(&bytes_per_thread), "6.3: bytes_per_thread")?;
    Corrupt.unless([64, 128, 256, 512, 1024].contains(&threads_per_block), "6.3: threads_per_block")?;
    let threads = bit_count.div_ceil(8 * bytes_per_thread);
    Ok((threads, threads.div_ceil(threads_per_block)))
}

/// The rules on parameters and lengths of arrays (6.3).
pub(crate) fn check_lengths(elements: u64, lengths: [u64; 5], parameters: [u64; 3]) -> Result<()> {
    let [codebook, gaps, output_offsets, bitstream, plane] = lengths;
    let (threads, thread_blocks) = counts(parameters)?;
    let bits = elements..=mul(elements, MAX_CODE_LENGTH.into())?;
    Corrupt.unless(elements > 0 && bits.contains(&parameters[2]), "6.3: elements or bit_count")?;
    let luts = codebook.saturating_sub(256) / 512;
    Corrupt.unless((1..=128).contains(&luts) && codebook == 256 + 512 * luts, "6.3: length of codebook")?;
    Corrupt.unless(gaps == threads.div_ceil(2), "6.3: length of gaps")?;
    Corrupt.unless(output_offsets == 8 * (thread_blocks + 1), "6.3: length of output_offsets")?;
    Corrupt.unless(bitstream == mul(parameters[0], threads)?, "6.3: length of bitstream")?;
    Corrupt.unless(plane == elements, "6.3: length of plane")
}

/// The bit at a position (6.3, *Bit order*).
fn bit(bitstream: &[u8], position: u64) -> Result<u8> {
    Ok(item(bitstream, position / 8)? >> (position % 8) & 1)
}

/// The bit at which the first code of a thread starts (6.3, *Gaps*).
fn start(gaps: &[u8], bytes_per_thread: u64, thread: u64) -> Result<u64> {
    let gap = item(gaps, thread / 2)? >> (thread % 2 * 4) & 15;
    add(mul(8 * bytes_per_thread, thread)?, gap.into())
}

/// Reads one code, bit by bit, and moves `position` behind it.
fn exponent(nodes: &[u16], bitstream: &[u8], position: &mut u64) -> Result<u8> {
    let mut node = 1;
    for _ in 0..MAX_CODE_LENGTH {
        node = 2 * node + usize::from(bit(bitstream, *position)?);
        *position += 1;
        if let Some(&leaf @ 1..) = nodes.get(node) {
            return Ok(leaf as u8);
        }
    }
    Err(Corrupt.error("6.3: no code matches"))
}

/// Decodes a tensor: `arrays` and `parameters` are those of section 6, in its order; the plane has a byte for each
/// element. Returns the weights, little-endian. Of the gaps it checks those with which thread blocks start, of the
/// codebook the code lengths; [`verify_gap`] checks the rest.
///
/// # Errors
/// Corrupt where a rule of *Decoding* is broken, or a parameter or the length of an array is wrong.
pub fn decode_gap(arrays: [&[u8]; 5], parameters: [u64; 3]) -> Result<Vec<u8>> {
    let [mut codebook, gaps, mut output_offsets, bitstream, plane] = arrays;
    let [bytes_per_thread, threads_per_block, bit_count] = parameters;
    check_lengths(plane.len() as u64, arrays.map(|array| array.len() as u64), parameters)?;
    let nodes = tree(&Field::read(&mut codebook)?)?;
    Corrupt.unless(u64::read(&mut output_offsets)? == 0, "6.3: output offsets do not start at 0")?;
    Corrupt.unless(start(gaps, bytes_per_thread, 0)? == 0, "6.3: the first code does not start at bit 0")?;
    let (mut position, mut element, mut weights) = (0, 0, Vec::with_capacity(2 * plane.len()));
    for next_thread_block in 1..=counts(parameters)?.1 {
        let next_element = u64::read(&mut output_offsets)?;
        Corrupt.unless(element <= next_element, "6.3: output offsets descend")?;
        for &sign_mantissa in slice(plane, element, next_element - element)? {
            let (sign, mantissa) = (u16::from(sign_mantissa & 0x80) << 8, u16::from(sign_mantissa & 0x7F));
            let exponent = u16::from(exponent(&nodes, bitstream, &mut position)?) << 7;
            weights.extend((sign | exponent | mantissa).to_le_bytes());
        }
        let end = match output_offsets {
            [] => bit_count,
            _ => start(gaps, bytes_per_thread, mul(threads_per_block, next_thread_block)?)?,
        };
        Corrupt.unless(position == end, "6.3: a thread block does not end where the next one starts")?;
        element = next_element;
    }
    Corrupt
        .unless(element == plane.len() as u64, "6.3: output offsets do not end at the number of elements")?;
    Ok(weights)
}

/// Gaps and output offsets of a tensor whose codes have these lengths (6.3).
fn index(code_lengths: impl Iterator<Item = u8>, parameters: [u64; 3]) -> Result<(Vec<u8>, Vec<u8>)> {
    let (threads, _) = counts(parameters)?;
    let (mut gaps, mut output_offsets) = (vec![0; threads.div_ceil(2) as usize], Vec::new());
    let (mut position, mut element, mut thread) = (0, 0u64, 0);
    for length in code_lengths.chain([0]) {
        // `position` is a boundary: for the threads that start at or before it, and after the last one, the first.
        while thread < threads && mul(8 * parameters[0], thread)? <= position {
            gaps[(thread / 2) as usize] |=
                ((position - 8 * parameters[0] * thread) as u8) << (thread % 2 * 4);
            if thread % parameters[1] == 0 {
                output_offsets.extend(element.to_le_bytes());
            }
            thread += 1;
        }
        (position, element) = (position + u64::from(length), element + 1);
    }
    output_offsets.extend((element - 1).to_le_bytes());
    Ok((gaps, output_offsets))
}

/// Checks all that 6.3 says of a tensor: beyond [`decode_gap`] LUTs, gaps, output offsets, zeros after bit_count.
///
/// # Errors
/// Those of [`decode_gap`], and Corrupt where something differs from what the weights and code lengths give.
pub fn verify_gap(arrays: [&[u8]; 5], parameters: [u64; 3]) -> Result<()> {
    let weights = decode_gap(arrays, parameters)?;
    let [mut codebook, gaps, output_offsets, bitstream, _] = arrays;
    let lengths = <[u8; 256]>::read(&mut codebook)?;
    Corrupt.unless(codebook == luts(&lengths), "6.3: LUTs do not follow from the code lengths")?;
    let exponents = weights.chunks_exact(2).map(|w| w[1] << 1 | w[0] >> 7);
    let expected = index(exponents.map(|exponent| lengths[usize::from(exponent)]), parameters)?;
    Corrupt.unless(gaps == expected.0, "6.3: a gap is wrong")?;
    Corrupt.unless(output_offsets == expected.1, "6.3: an output offset is wrong")?;
    for position in parameters[2]..8 * bitstream.len() as u64 {
        Corrupt.unless(bit(bitstream, position)? == 0, "6.3: a bit from bit_count on is not zero")?;
    }
    Ok(())
}
