//! The speed of the codec on one thread, in memory, in bytes of BF16: `cargo bench --bench codec`.

use std::hint::black_box;

use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
    measurement::WallTime,
};
use df11::hazmat::gap::{self, GapGeometry, PortionEncoder, PortionInput, PortionOutput};
use df11::hazmat::huffman::{Histogram, read_codebook};
use df11::hazmat::stored::{CodedSizes, EncodedTensor, Scratch};
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
    let decoder = tensor.sizes.prepare(&arrays).expect("the codebook is valid");
    let (all, mut scratch) = (0..weights.len() as u64 / 2, Scratch::default());
    let mut output = vec![0; weights.len()];
    decoder.decode(&arrays, all.clone(), &mut scratch, &mut output).expect("it decodes");
    assert!(output == weights);
    group.bench_function(BenchmarkId::new("decode", name), |bencher| {
        bencher.iter(|| {
            decoder.decode(&arrays, all.clone(), &mut scratch, &mut output).expect("it decodes");
        });
    });
    group.bench_function(BenchmarkId::new("verify", name), |bencher| {
        bencher.iter(|| decoder.verify(&arrays, all.clone(), &mut scratch).expect("it is valid"));
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
