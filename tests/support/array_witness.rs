//! The problems that verification must find in the arrays of a coded tensor, written anew from
//! spec/format.md: slow, and on top of the reference decoder.
#![allow(dead_code, unreachable_pub, reason = "each user needs another part")]

#[path = "tile_arrays.rs"]
#[allow(missing_docs, reason = "documented there, for tests")]
mod tile_arrays;

use df11::hazmat::stored::{CodedSizes, EncodedTensor, Scratch};
pub use tile_arrays::{Arrays, Split, codebook_of};
use tile_arrays::{Codebook, Pair, tiles, tiles_of};

/// The arrays of a tensor and its parameters, as readers find them.
pub fn of<S: CodedSizes, const N: usize>(tensor: &EncodedTensor<S, N>) -> ([&[u8]; N], [u64; 3]) {
    let [parameters @ .., _] = tensor.sizes.parameters();
    (tensor.views(), parameters)
}

/// Verifies a tensor by its own reader, in parts that end at these weights.
///
/// # Errors
/// The errors of the reader.
pub fn verify<S: CodedSizes, const N: usize>(
    tensor: &EncodedTensor<S, N>,
    ends: impl IntoIterator<Item = u64>,
) -> df11::Result<()> {
    let arrays = tensor.views();
    tensor.sizes.verify_codebook(&arrays)?;
    let decoder = tensor.sizes.prepare(&arrays)?;
    let mut start = 0;
    ends.into_iter().try_for_each(|end| {
        let part = start..end;
        start = end;
        if part.is_empty() {
            return Ok(());
        }
        decoder.verify(&arrays, part, &mut Scratch::default())
    })
}

/// The broken rule.
pub type Result = std::result::Result<(), &'static str>;

fn require(holds: bool, rule: &'static str) -> Result {
    if holds { Ok(()) } else { Err(rule) }
}

/// Checks the arrays of a `gap` tensor (section 6.3): all that the reference decoder checks, LUTs,
/// gaps, output offsets and the zeros from `bit_count` on.
///
/// # Errors
/// The first broken rule.
pub fn verify_gap(arrays: [&[u8]; 5], parameters: [u64; 3]) -> Result {
    let weights = df11_reference::decode_gap(arrays, parameters).map_err(|error| error.message)?;
    let [codebook, gaps, output_offsets, bitstream, _] = arrays;
    let (lengths, luts) = codebook.split_first_chunk::<256>().expect("the reference read them");
    require(luts == df11_reference::luts(lengths), "LUTs")?;
    let exponents = weights.chunks_exact(2).map(|weight| weight[1] << 1 | weight[0] >> 7);
    let (expected_gaps, expected_offsets) =
        index(exponents.map(|exponent| lengths[usize::from(exponent)]), parameters);
    require(gaps == expected_gaps, "gaps")?;
    require(output_offsets == expected_offsets, "output offsets")?;
    require(zeros_after(bitstream, parameters[2]), "zeros from bit_count on")
}

/// Checks the arrays of a `tile` tensor (section 6.4): all that the reference decoder checks and,
/// by coding its weights again, what is left to verification: zeros after lanes, tiles and
/// `bit_count`, no pair escaped that has a code, `least` and `shift`.
///
/// # Errors
/// The first broken rule.
pub fn verify_tile(arrays: [&[u8]; 4], parameters: [u64; 3]) -> Result {
    let weights = df11_reference::decode_tile(arrays, parameters).map_err(|error| error.message)?;
    let [codebook, records, bitstream, plane] = arrays;
    let [tile_columns, columns, bit_count] = parameters;
    let again = encode_tile(&weights, codebook, [tile_columns, columns], |_| false);
    require(plane == again.plane, "order of the plane")?;
    require(bit_count == again.parameters[2], "bits of lanes, or an escaped pair with a code")?;
    require(records == again.records, "records")?;
    require(
        bitstream == again.bitstream,
        "zeros after lanes, tiles and bit_count, or an escaped pair with a code",
    )
}

/// Checks the arrays of a `float` tensor of so many elements of a dtype, by its id (section 6.5):
/// as [`verify_tile`], and the zeros after the last weight of a unit.
///
/// # Errors
/// The first broken rule.
pub fn verify_float(arrays: [&[u8]; 4], parameters: [u64; 4], dtype: u32, elements: u64) -> Result {
    let weights = df11_reference::decode_float(arrays, parameters, dtype, elements);
    let weights = weights.map_err(|error| error.message)?;
    let [codebook, records, bitstream, plane] = arrays;
    let [tile_columns, columns, bit_count, zero_bits] = parameters;
    let columns = (tile_columns as usize, columns as usize);
    let tiles = tiles_of(&weights, Split::of(dtype, zero_bits), columns.0, columns.1);
    let again = Arrays::with(&tiles, columns.0, columns.1, &Codebook::from_bytes(codebook));
    require(plane == again.plane, "order of the plane, or zeros after a unit's last weight")?;
    require(bit_count == again.parameters[2], "bits of lanes, or an escaped pair with a code")?;
    require(records == again.records, "records")?;
    require(bitstream == again.bitstream, "zeros, or an escaped pair with a code")
}

/// Whether all bits from `bit` on are zero.
pub fn zeros_after(bitstream: &[u8], bit: u64) -> bool {
    (bit..8 * bitstream.len() as u64).all(|bit| bitstream[(bit / 8) as usize] >> (bit % 8) & 1 == 0)
}

/// Gaps and output offsets of a tensor whose codes have these lengths.
fn index(code_lengths: impl Iterator<Item = u8>, parameters: [u64; 3]) -> (Vec<u8>, Vec<u8>) {
    let [bytes_per_thread, threads_per_block, bit_count] = parameters;
    let threads = bit_count.div_ceil(8 * bytes_per_thread);
    let (mut gaps, mut output_offsets) = (vec![0; threads.div_ceil(2) as usize], Vec::new());
    let (mut position, mut element, mut thread) = (0, 0u64, 0);
    for length in code_lengths.chain([0]) {
        // `position` is a boundary: for the threads that start at or before it, and after the last
        // one, the first.
        while thread < threads && 8 * bytes_per_thread * thread <= position {
            let gap = (position - 8 * bytes_per_thread * thread) as u8;
            gaps[(thread / 2) as usize] |= gap << (thread % 2 * 4);
            if thread.is_multiple_of(threads_per_block) {
                output_offsets.extend(element.to_le_bytes());
            }
            thread += 1;
        }
        (position, element) = (position + u64::from(length), element + 1);
    }
    output_offsets.extend((element - 1).to_le_bytes());
    (gaps, output_offsets)
}

/// Codes weights (little-endian) as `tile` with a codebook that has a code for each pair, or an
/// escape. The rules of section 6.4 leave one way to do so: a tensor is valid if and only if it
/// decodes, and its weights, coded again, are its arrays.
///
/// `tile_columns` and `columns` are those of a valid tensor. Also escapes the pairs with a code
/// that `escaped` names by their number in the order of the bitstream: what results decodes and
/// does not verify.
pub fn encode_tile(
    weights: &[u8],
    codebook: &[u8],
    [tile_columns, columns]: [u64; 2],
    escaped: impl Fn(u64) -> bool,
) -> Arrays {
    let (tile_columns, columns) = (tile_columns as usize, columns as usize);
    let mut tiles = tiles(weights, tile_columns, columns);
    let pairs = tiles.iter_mut().flat_map(|tile| tile.lanes.iter_mut().flatten());
    for (pair, _) in pairs.zip(0..).filter(|&(_, number)| escaped(number)) {
        *pair = Pair::Escaped(pair.value());
    }
    Arrays::with(&tiles, tile_columns, columns, &Codebook::from_bytes(codebook))
}
