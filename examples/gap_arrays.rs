//! Dumps `gap` tensors for the kernel bench:
//! `cargo run --release --no-default-features --example gap_arrays -- OUT block T B [T B ..]`, or
//! `.. OUT edges`.
//!
//! `block` writes the seven matrices of a Llama-3.1-8B block, N(0, 0.02²): `OUT/weights.bf16` once,
//! and `OUT/block-T-B.gap` for each geometry. `edges` writes small tensors of awkward shapes and
//! codes to `OUT/edges.gap`. See `kernels/bench/dump.hpp` for the format.

use std::{env, fs, path::Path};

use df11::hazmat::gap::{EncodedTensor, GapGeometry, encode_tensor};
use rayon::prelude::*;

#[path = "../benches/support/normal.rs"]
mod normal;

const SHAPES: [(usize, usize); 7] = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
];
const CHUNK: usize = 1 << 20;

/// One tensor: eight u64, the code lengths, the other arrays, and for `edges` the weights.
fn record(tensor: &EncodedTensor, weights: &[u8]) -> Vec<u8> {
    let geometry = tensor.sizes.geometry();
    let [codebook, gaps, output_offsets, bitstream, plane] = tensor.views();
    let mut bytes = Vec::new();
    for number in [
        u64::from(geometry.bytes_per_thread()),
        u64::from(geometry.threads_per_block()),
        tensor.sizes.elements(),
        tensor.sizes.bit_count(),
        gaps.len() as u64,
        output_offsets.len() as u64,
        bitstream.len() as u64,
        weights.len() as u64,
    ] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    for array in [&codebook[..256], gaps, output_offsets, bitstream, plane, weights] {
        bytes.extend_from_slice(array);
    }
    bytes
}

fn block(out: &Path, geometries: &[GapGeometry]) {
    let matrix =
        |(index, &(rows, columns))| normal::weights(1 + index as u64, rows, columns, |_| 0.02);
    let matrices: Vec<Vec<u8>> = SHAPES.par_iter().enumerate().map(matrix).collect();
    fs::write(out.join("weights.bf16"), matrices.concat()).expect("the output can be written");
    geometries.par_iter().for_each(|&geometry| {
        let encode = |matrix| encode_tensor(matrix, geometry, CHUNK).expect("it encodes");
        let records: Vec<u8> =
            matrices.iter().flat_map(|matrix| record(&encode(matrix), &[])).collect();
        let (bytes, threads) = (geometry.bytes_per_thread(), geometry.threads_per_block());
        let file = out.join(format!("block-{bytes}-{threads}.gap"));
        fs::write(file, records).expect("the output can be written");
    });
}

fn edges() -> Vec<u8> {
    let bytes = |weights: &[u16]| {
        weights.iter().flat_map(|weight| weight.to_le_bytes()).collect::<Vec<u8>>()
    };
    let mut random = normal::Random(7);
    let mut draw = |count: usize, exponent: &dyn Fn(u64) -> u64| -> Vec<u16> {
        (0..count)
            .map(|_| {
                let word = random.next();
                (word as u16 & 0x807F) | (exponent(word >> 16) as u16 & 0xFF) << 7
            })
            .collect()
    };
    let mut tensors: Vec<Vec<u8>> = Vec::new();
    // All patterns, in order and shuffled by an odd multiplier.
    tensors.push(bytes(&(0..=u16::MAX).collect::<Vec<_>>()));
    tensors.push(bytes(&(0..=u16::MAX).map(|index| index.wrapping_mul(40503)).collect::<Vec<_>>()));
    for count in [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 100, 1000, 12_345, 300_000] {
        tensors.push(
            normal::weights(count as u64, 1, count + count % 2, |_| 0.02)[..2 * count].to_vec(),
        );
        // One exponent: one-bit codes.
        tensors.push(bytes(&draw(count, &|_| 200)));
        // Halving probabilities: codes up to 16 bits.
        tensors.push(bytes(&draw(count, &|word| 100 + u64::from(word.trailing_zeros().min(40)))));
        // Equal probabilities: 8 bits each.
        tensors.push(bytes(&draw(count, &|word| word)));
        // One or two bits a code, with rare long ones.
        tensors.push(bytes(&draw(count, &|word| if word % 64 == 0 { word >> 8 } else { 127 })));
    }
    let mut records = Vec::new();
    for weights in &tensors {
        for t in [8, 16, 32, 64] {
            for b in [64, 128, 256, 512, 1024] {
                if weights.len() > 100_000 && b != 128 && b != 64 {
                    continue;
                }
                let geometry = GapGeometry::new(t, b).expect("a valid geometry");
                let tensor = encode_tensor(weights, geometry, CHUNK).expect("it encodes");
                records.extend(record(&tensor, weights));
            }
        }
    }
    records
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let out = Path::new(&arguments[0]);
    if arguments[1] == "edges" {
        fs::write(out.join("edges.gap"), edges()).expect("the output can be written");
        return;
    }
    let numbers: Vec<u32> =
        arguments[2..].iter().map(|number| number.parse().expect("a number")).collect();
    let geometries: Vec<GapGeometry> = numbers
        .chunks(2)
        .map(|pair| GapGeometry::new(pair[0], pair[1]).expect("a valid geometry"))
        .collect();
    block(out, &geometries);
}
