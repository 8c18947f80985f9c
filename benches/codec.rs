//! The speed of the codec on one thread, in memory, in bytes of BF16: `cargo bench --bench codec`.

use std::hint::black_box;

use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
    measurement::WallTime,
};
use df11::half::bf16;
use df11::hazmat::delta::{self, Codebook, Differences, Encoder, WithBase, segment_elements};
use df11::hazmat::gap::{self, GapGeometry, PortionEncoder, PortionInput, PortionOutput};
use df11::hazmat::huffman::{Histogram, read_codebook};
use df11::hazmat::stored::{CodedSizes, EncodedTensor, ReadArrays, Scratch};
use df11::hazmat::tile;

#[path = "support/normal.rs"]
mod normal;

const ROWS: usize = 4096;
const COLUMNS: usize = 4096;
const CHUNK: usize = 1 << 19;

fn codec(criterion: &mut Criterion) {
    let sets = [
        ("normal", normal::weights(1, ROWS, COLUMNS, |_| 0.02)),
        ("rows", normal::weights(1, ROWS, COLUMNS, normal::row_sigma)),
    ];
    for (name, weights) in &sets {
        bench(criterion, name, weights);
        bench_tile(criterion, name, weights);
    }
    bench_delta(criterion, &sets[0].1);
}

/// Differences of fine-tunes from a base.
fn bench_delta(criterion: &mut Criterion, base: &[u8]) {
    let mut group = criterion.benchmark_group("delta");
    group.throughput(Throughput::Bytes(base.len() as u64)).sample_size(20);
    let shape = [ROWS as u64, COLUMNS as u64];
    for (name, size) in [("dense 1e-3", 2e-5), ("dense 1e-2", 2e-4), ("dense 1e-1", 2e-3)] {
        let weights = changed(base, size);
        let mut differences = Differences::default();
        differences.add(base, &weights);
        group.bench_function(BenchmarkId::new("count", name), |bencher| {
            bencher.iter(|| Differences::default().add(black_box(base), &weights));
        });
        let mut encoder = Encoder::new(&Codebook::new(&differences));
        let (each, mut output) = (2 * segment_elements(&shape) as usize, Vec::new());
        group.bench_function(BenchmarkId::new("encode", name), |bencher| {
            bencher.iter(|| {
                for (base, weights) in base.chunks(each).zip(weights.chunks(each)) {
                    output.clear();
                    encoder.encode_segment(base, weights, &mut output).expect("it encodes");
                }
            });
        });
        let tensor = delta::encode_tensor(base, &weights, &shape).expect("the weights encode");
        let arrays = WithBase { arrays: tensor.views(), base };
        bench_decoding(&mut group, name, &tensor.sizes, &arrays, &weights);
    }
}

/// Weights that differ from these by normal amounts of this deviation.
fn changed(base: &[u8], size: f32) -> Vec<u8> {
    let mut random = normal::Random(2);
    let change = |bytes: &[u8; 2]| {
        let weight = bf16::from_le_bytes(*bytes).to_f32() + size * random.normal_pair().0;
        bf16::from_f32(weight).to_le_bytes()
    };
    base.as_chunks().0.iter().flat_map(change).collect()
}

fn bench_tile(criterion: &mut Criterion, name: &str, weights: &[u8]) {
    let mut group = criterion.benchmark_group("tile");
    group.throughput(Throughput::Bytes(weights.len() as u64)).sample_size(20);
    let mut histogram = tile::PairHistogram::default();
    histogram.add(weights);
    group.bench_function(BenchmarkId::new("histogram", name), |bencher| {
        bencher.iter(|| {
            let mut histogram = tile::PairHistogram::default();
            histogram.add(black_box(weights));
            histogram
        });
    });
    let codebook = tile::Codebook::from_histogram(&histogram).expect("there are weights");
    group.bench_function(BenchmarkId::new("codebook", name), |bencher| {
        bencher.iter(|| tile::Codebook::from_histogram(black_box(&histogram)));
    });

    let geometry =
        tile::TileGeometry::choose(&[ROWS as u64, COLUMNS as u64]).expect("there are weights");
    let encoder = tile::Encoder::new(&codebook, geometry);
    let strips: Vec<&[u8]> = weights.chunks(2 * geometry.strip_elements() as usize).collect();
    group.bench_function(BenchmarkId::new("strip_bytes", name), |bencher| {
        bencher.iter(|| {
            let bytes =
                (0..).zip(&strips).map(|(strip, weights)| encoder.strip_bytes(strip, weights));
            bytes.sum::<df11::Result<u64>>().expect("every pair has bits")
        });
    });
    let mut output = tile::EncodedStrips::default();
    group.bench_function(BenchmarkId::new("encode", name), |bencher| {
        bencher.iter(|| {
            let mut first_byte = 0;
            for (strip, weights) in (0..).zip(&strips) {
                output.clear();
                encoder
                    .encode_strip(strip, weights, first_byte, &mut output)
                    .expect("the strip encodes");
                black_box(&output);
                first_byte += output.bitstream.len() as u64;
            }
        });
    });

    let tensor = tile::encode_tensor(weights, geometry).expect("the weights encode");
    bench_reading(&mut group, name, &tensor, weights);
}

/// Decodes and verifies all of a tensor.
fn bench_reading<S: CodedSizes, const N: usize>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    tensor: &EncodedTensor<S, N>,
    weights: &[u8],
) {
    let arrays = tensor.views();
    bench_decoding(group, name, &tensor.sizes, &arrays, weights);
    let decoder = tensor.sizes.prepare(&arrays).expect("the codebook is valid");
    let (all, mut scratch) = (0..weights.len() as u64 / 2, Scratch::default());
    group.bench_function(BenchmarkId::new("verify", name), |bencher| {
        bencher.iter(|| decoder.verify(&arrays, all.clone(), &mut scratch).expect("it is valid"));
    });
}

/// Decodes all of a tensor.
fn bench_decoding(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    sizes: &impl CodedSizes,
    arrays: &dyn ReadArrays<'_>,
    weights: &[u8],
) {
    let decoder = sizes.prepare(arrays).expect("the codebook is valid");
    let (all, mut scratch) = (0..weights.len() as u64 / 2, Scratch::default());
    let mut output = vec![0; weights.len()];
    decoder.decode(arrays, all.clone(), &mut scratch, &mut output).expect("it decodes");
    assert!(output == weights);
    group.bench_function(BenchmarkId::new("decode", name), |bencher| {
        bencher.iter(|| {
            decoder.decode(arrays, all.clone(), &mut scratch, &mut output).expect("it decodes");
        });
    });
}

fn bench(criterion: &mut Criterion, name: &str, weights: &[u8]) {
    let mut group = criterion.benchmark_group("codec");
    group.throughput(Throughput::Bytes(weights.len() as u64)).sample_size(20);
    group.bench_function(BenchmarkId::new("histogram", name), |bencher| {
        bencher.iter(|| Histogram::of(black_box(weights)));
    });

    let geometry = GapGeometry::default();
    let tensor = gap::encode_tensor(weights, geometry, CHUNK).expect("the weights encode");
    let lengths = read_codebook(&tensor.arrays[gap::CODEBOOK]).expect("the codebook is valid");
    let encoder = PortionEncoder::new(&lengths, &tensor.sizes);
    let mut start_bit = 0;
    let chunks: Vec<PortionInput> = (0..weights.len() / 2 / CHUNK)
        .map(|chunk| {
            let (from, to) = (2 * chunk * CHUNK, 2 * (chunk + 1) * CHUNK);
            let bits = lengths
                .bits(&Histogram::of(&weights[from..to]))
                .expect("every exponent has a code");
            let input = PortionInput {
                weights: &weights[from..(to + 2 * geometry.lookahead()).min(weights.len())],
                elements: CHUNK,
                first_element: (chunk * CHUNK) as u64,
                start_bit,
                end_bit: start_bit + bits,
            };
            start_bit = input.end_bit;
            input
        })
        .collect();
    let mut output = PortionOutput::default();
    group.bench_function(BenchmarkId::new("encode", name), |bencher| {
        bencher.iter(|| {
            for chunk in &chunks {
                encoder.encode(chunk, &mut output).expect("the chunk encodes");
                black_box(output.parts());
            }
        });
    });

    bench_reading(&mut group, name, &tensor, weights);
}

criterion_group!(benches, codec);
criterion_main!(benches);
