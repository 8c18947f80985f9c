//! What goes in comes out: any weights, in any geometry and any chunking, and any small model through files.
#![no_main]

use df11::{
    bf16,
    encoding::gap::{EncodedTensor, encode_tensor},
    huffman::verify_codebook,
};
use df11_fuzz::{bytes::Bytes, tensors};
use libfuzzer_sys::fuzz_target;

/// The most weights of an input that is encoded in tiny chunks.
const MOST_CHUNKS: usize = 300;

fuzz_target!(init: df11_fuzz::start(), |data: &[u8]| {
    let mut bytes = Bytes(data);
    codec(&mut bytes);
});

fn codec(bytes: &mut Bytes<'_>) {
    let geometry = tensors::geometry(bytes);
    let chunk = 1 + usize::from(bytes.u16());
    let raw = bytes.u8() % 4 == 0;
    let cuts: [u64; 2] = [bytes.u32().into(), bytes.u32().into()];
    let weights = if raw && bytes.0.len() >= 2 {
        bytes.0[..bytes.0.len() / 2 * 2].to_vec()
    } else {
        tensors::weights(bytes, 1 << 16)
    };
    let count = weights.len() as u64 / 2;
    let chunk = chunk.max(weights.len() / 2 / MOST_CHUNKS);

    let encoded = encode_tensor(&weights, geometry, chunk).expect("weights encode");
    let whole = encode_tensor(&weights, geometry, weights.len()).expect("weights encode");
    assert!(encoded == whole, "chunks change the result");
    assert!(encoded.decode(0..count).expect("what was encoded decodes") == weights);
    let (start, end) = (cuts[0] % count, cuts[1] % (count + 1));
    let range = start.min(end)..start.max(end).max(start + 1);
    let part = encoded.decode(range.clone()).expect("any range decodes");
    assert!(part == weights[2 * range.start as usize..2 * range.end as usize]);
    verify_codebook(&encoded.codebook).expect("the LUTs follow from the code lengths");
    witness(&encoded, &weights);
}

/// The reference decoder finds the same weights, and an index and LUTs as the format asks for.
fn witness(encoded: &EncodedTensor, weights: &[u8]) {
    let EncodedTensor { layout, codebook, gaps, output_offsets, bitstream, plane } = encoded;
    let geometry = layout.geometry();
    let parameters =
        [geometry.bytes_per_thread().into(), geometry.threads_per_block().into(), layout.bit_count()];
    let arrays = [&codebook[..], gaps, output_offsets, bitstream, plane];
    df11_reference::verify_gap(arrays, parameters).expect("the reference accepts every array");
    assert!(df11_reference::decode_gap(arrays, parameters).expect("the reference decodes") == weights);
    assert!(weights.chunks_exact(2).zip(plane).all(|(weight, &plane)| {
        bf16::plane_byte(u16::from_le_bytes([weight[0], weight[1]])) == plane
    }));
}
