//! What verification of a `gap` tensor must find, on top of the reference decoder, which only decodes.

use df11_reference::{decode_gap, luts};

/// Checks LUTs, gaps, output offsets and the bits after bit_count against the decoded weights (spec/format.md, section 6.3).
///
/// # Errors
/// What is wrong.
pub fn verify_gap(arrays: [&[u8]; 5], parameters: [u64; 3]) -> Result<(), String> {
    let weights = decode_gap(arrays, parameters).map_err(|error| error.to_string())?;
    let [codebook, gaps, output_offsets, bitstream, _] = arrays;
    let [bytes_per_thread, threads_per_block, bit_count] = parameters;
    let (lengths, stored_luts) = codebook.split_first_chunk::<256>().ok_or("codebook")?;
    let (mut expected_gaps, mut expected_offsets) = (vec![0; gaps.len()], Vec::new());
    let (mut position, mut element) = (0, 0);
    for thread in 0..bit_count.div_ceil(8 * bytes_per_thread) {
        let first_bit = 8 * bytes_per_thread * thread;
        while position < first_bit {
            let exponent = weights[2 * element + 1] << 1 | weights[2 * element] >> 7;
            position += u64::from(lengths[usize::from(exponent)]);
            element += 1;
        }
        expected_gaps[(thread / 2) as usize] |= ((position - first_bit) as u8) << (thread % 2 * 4);
        if thread % threads_per_block == 0 {
            expected_offsets.extend((element as u64).to_le_bytes());
        }
    }
    expected_offsets.extend((weights.len() as u64 / 2).to_le_bytes());
    let (partial, rest) = bitstream[(bit_count / 8) as usize..].split_first().unwrap_or((&0, &[]));
    let zeros = partial >> (bit_count % 8) == 0 && rest.iter().all(|&byte| byte == 0);
    for (right, what) in [
        (stored_luts == luts(lengths), "LUTs"),
        (gaps == expected_gaps, "gaps"),
        (output_offsets == expected_offsets, "output offsets"),
        (zeros, "bits after bit_count"),
    ] {
        if !right {
            return Err(format!("{what} differ from what the codes give"));
        }
    }
    Ok(())
}
