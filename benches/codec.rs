//! The speed of the codec on one thread, in memory, in bytes of BF16: `cargo bench --bench codec`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use df11::hazmat::gap::{
    GapDecoder, Geometry, PortionEncoder, PortionInput, PortionOutput, encode_tensor,
};
use df11::hazmat::huffman::{Histogram, read_codebook};
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
    let mut histogram = tile::PairHistogram::new();
    histogram.add(weights);
    group.bench_function(BenchmarkId::new("histogram", name), |bencher| {
        bencher.iter(|| {
            let mut histogram = tile::PairHistogram::new();
            histogram.add(black_box(weights));
            histogram
        });
    });
    let codebook = tile::Codebook::from_histogram(&histogram).expect("there are weights");
    group.bench_function(BenchmarkId::new("codebook", name), |bencher| {
        bencher.iter(|| tile::Codebook::from_histogram(black_box(&histogram)));
    });

    let geometry =
        tile::Geometry::choose(&[ROWS as u64, COLUMNS as u64]).expect("there are weights");
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
    let decoder = tile::TileDecoder::new(&codebook, &tensor.sizes);
    let span = tensor.span(0..tensor.sizes.strip_count()).expect("the span exists");
    let mut output = vec![0; weights.len()];
    decoder.decode_strips(&span, 0..tensor.sizes.elements(), &mut output).expect("it decodes");
    assert!(output == weights);
    group.bench_function(BenchmarkId::new("decode", name), |bencher| {
        bencher.iter(|| {
            decoder
                .decode_strips(&span, 0..tensor.sizes.elements(), &mut output)
                .expect("it decodes");
        });
    });
    group.bench_function(BenchmarkId::new("verify", name), |bencher| {
        bencher.iter(|| decoder.verify_strips(&span).expect("it is valid"));
    });
}

fn bench(criterion: &mut Criterion, name: &str, weights: &[u8]) {
    let mut group = criterion.benchmark_group("codec");
    group.throughput(Throughput::Bytes(weights.len() as u64)).sample_size(20);
    group.bench_function(BenchmarkId::new("histogram", name), |bencher| {
        bencher.iter(|| Histogram::of(black_box(weights)));
    });

    let geometry = Geometry::default();
    let tensor = encode_tensor(weights, geometry, CHUNK).expect("the weights encode");
    let lengths = read_codebook(&tensor.codebook).expect("the codebook is valid");
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
                black_box(output.bitstream().bytes);
            }
        });
    });

    let decoder = GapDecoder::new(&lengths, &tensor.sizes);
    let span = tensor.span(0..tensor.sizes.thread_block_count()).expect("the span exists");
    let mut output = vec![0; weights.len()];
    decoder
        .decode(&span, 0..tensor.sizes.elements(), &tensor.plane, &mut output)
        .expect("it decodes");
    assert!(output == weights);
    group.bench_function(BenchmarkId::new("decode", name), |bencher| {
        bencher.iter(|| {
            decoder
                .decode(&span, 0..tensor.sizes.elements(), &tensor.plane, &mut output)
                .expect("it decodes");
        });
    });
    group.bench_function(BenchmarkId::new("verify_index", name), |bencher| {
        bencher.iter(|| decoder.verify_index(&span).expect("the index is right"));
    });
}

criterion_group!(benches, codec);
criterion_main!(benches);
