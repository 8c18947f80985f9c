//! The codec against a naive decoder, for many distributions, sizes, chunkings and ranges, and
//! against hostile arrays.

#[path = "../benches/support/normal.rs"]
mod normal;

use df11::hazmat::gap::{
    ChunkEncoder, ChunkInput, ChunkOutput, EncodedTensor, GapDecoder, Geometry, encode_tensor,
};
use df11::hazmat::huffman::{CodeLengths, Histogram, Luts, read_codebook, verify_codebook};
use df11::{Error, hazmat::bf16};
use normal::Random;
use proptest::prelude::*;

const WHOLE: usize = usize::MAX;

fn weights_of(exponents: impl IntoIterator<Item = u8>, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    exponents
        .into_iter()
        .flat_map(|exponent| bf16::weight(exponent, random.next() as u8).to_le_bytes())
        .collect()
}

/// Decodes code by code and finds every boundary, straight from the definitions.
fn check_by_definition(weights: &[u8], tensor: &EncodedTensor) {
    let lengths = &tensor.codebook[..256];
    // Canonical codes, as numbers written most significant bit first.
    let mut codes = Vec::new();
    let mut next = 0u32;
    for length in 1..=16u8 {
        for symbol in (0..256usize).filter(|&symbol| lengths[symbol] == length) {
            codes.push((length, next, symbol as u8));
            next += 1;
        }
        next <<= 1;
    }
    let layout = &tensor.layout;
    let bit_at = |bit: u64| u32::from(tensor.bitstream[(bit / 8) as usize] >> (bit % 8) & 1);
    let (mut bit, mut boundaries) = (0, vec![0]);
    for (weight, &plane) in weights.chunks(2).zip(&tensor.plane) {
        let (mut code, mut length) = (0, 0);
        let symbol = loop {
            code = code << 1 | bit_at(bit);
            length += 1;
            bit += 1;
            if let Some(found) = codes.iter().find(|found| (found.0, found.1) == (length, code)) {
                break found.2;
            }
        };
        assert_eq!(bf16::weight(symbol, plane).to_le_bytes(), weight);
        boundaries.push(bit);
    }
    assert_eq!(bit, layout.bit_count());
    assert!((bit..8 * tensor.bitstream.len() as u64).all(|bit| bit_at(bit) == 0));
    let geometry = layout.geometry();
    let threads = bit.div_ceil(geometry.thread_bits());
    assert_eq!(tensor.bitstream.len() as u64, threads * u64::from(geometry.bytes_per_thread()));
    let gap = |thread: u64| {
        let start = thread * geometry.thread_bits();
        let boundary = boundaries[boundaries.partition_point(|&boundary| boundary < start)];
        (boundary - start) as u8
    };
    let gaps: Vec<u8> = (0..threads)
        .step_by(2)
        .map(|thread| gap(thread) | if thread + 1 < threads { gap(thread + 1) << 4 } else { 0 })
        .collect();
    assert_eq!(tensor.gaps, gaps);
    let blocks = threads.div_ceil(u64::from(geometry.threads_per_block()));
    let offsets: Vec<u8> = (0..=blocks)
        .map(|block| if block == blocks { u64::MAX } else { block * geometry.thread_block_bits() })
        .map(|start| {
            boundaries[..boundaries.len() - 1].partition_point(|&boundary| boundary < start) as u64
        })
        .flat_map(u64::to_le_bytes)
        .collect();
    assert_eq!(tensor.output_offsets, offsets);
}

fn verify(tensor: &EncodedTensor, blocks_a_span: u64) -> df11::Result<()> {
    verify_codebook(&tensor.codebook)?;
    let decoder = GapDecoder::new(&read_codebook(&tensor.codebook)?, &tensor.layout);
    let blocks = tensor.layout.thread_block_count();
    for start in (0..blocks).step_by(blocks_a_span as usize) {
        let span =
            tensor.arrays().span(&tensor.layout, start..(start + blocks_a_span).min(blocks))?;
        decoder.verify_index(&span)?;
    }
    Ok(())
}

fn check(weights: &[u8], geometry: Geometry) -> EncodedTensor {
    let tensor = encode_tensor(weights, geometry, WHOLE).unwrap();
    check_by_definition(weights, &tensor);
    assert_eq!(tensor.decode(0..tensor.layout.elements()).unwrap(), weights);
    for blocks in [1, 3, 1000] {
        verify(&tensor, blocks).unwrap();
    }
    tensor
}

fn geometries() -> impl Iterator<Item = Geometry> {
    [8, 16, 32, 64]
        .into_iter()
        .flat_map(|bytes| [64, 1024].map(|threads| Geometry::new(bytes, threads).unwrap()))
}

#[test]
fn every_pattern_in_every_geometry() {
    let weights: Vec<u8> =
        (0..=u16::MAX).flat_map(|word| word.wrapping_mul(40503).to_le_bytes()).collect();
    geometries().for_each(|geometry| drop(check(&weights, geometry)));
}

#[test]
fn few_exponents() {
    for geometry in geometries() {
        for count in [1, 2, 63, 64, 65, 127, 128, 4097, 20_000, 70_001] {
            check(&weights_of(std::iter::repeat_n(255, count), 1), geometry);
            check(&weights_of((0..count).map(|at| if at % 3 == 0 { 0 } else { 129 }), 2), geometry);
        }
    }
}

#[test]
fn lengths_up_to_the_limit() {
    // Fibonacci counts make the deepest codes; shuffled, and in order so that long codes stand
    // together.
    let mut exponents: Vec<u8> = Vec::new();
    let (mut a, mut b) = (1, 1);
    for symbol in 0..23 {
        exponents.extend(std::iter::repeat_n(symbol * 11, a));
        (a, b) = (b, a + b);
    }
    let tensor = check(&weights_of(exponents.iter().copied(), 3), Geometry::default());
    assert_eq!(tensor.codebook[..256].iter().max(), Some(&16));
    let mut random = Random(4);
    for at in (1..exponents.len()).rev() {
        exponents.swap(at, (random.next() % (at as u64 + 1)) as usize);
    }
    check(&weights_of(exponents, 5), Geometry::new(8, 64).unwrap());
}

#[test]
fn counts_around_threads_and_thread_blocks() {
    let geometry = Geometry::new(8, 64).unwrap();
    // Equiprobable exponents have 8 bits each: 8 a thread, 512 a thread block.
    for count in [256, 504, 511, 512, 513, 520, 1023, 1024, 1025, 16_384, 16_385, 33_000] {
        check(&weights_of((0..=255).cycle().take(count), 6), geometry);
    }
    let normal = normal::weights(7, 1, 40_000, |_| 0.02);
    for count in (1..300).chain([16_383, 16_384, 16_387, 40_000]) {
        check(&normal[..2 * count], geometry);
    }
}

#[test]
fn a_last_thread_block_in_which_no_code_starts() {
    let geometry = Geometry::new(8, 64).unwrap();
    let normal = normal::weights(11, 1, 20_000, |_| 0.02);
    let mut found = 0;
    for count in (1500..1700).chain(19_000..19_400) {
        let tensor = encode_tensor(&normal[..2 * count], geometry, WHOLE).unwrap();
        let entries = tensor.output_offsets.as_chunks::<8>().0;
        if entries[entries.len() - 1] == entries[entries.len() - 2] {
            found += 1;
            check(&normal[..2 * count], geometry);
            let last = count as u64 - 1;
            assert_eq!(tensor.decode(last..last + 1).unwrap(), normal[2 * count - 2..2 * count]);
        }
    }
    // Such a tensor may be rare, but then the numbers above must change.
    assert!(found > 0);
}

fn exponents() -> impl Strategy<Value = Vec<u8>> {
    let skewed =
        (1u32..40, 0u8..=255, 1usize..40_000, any::<u64>()).prop_map(|(skew, top, count, seed)| {
            let mut random = Random(seed);
            // Geometric: each exponent 2^(skew/10) times rarer than the one above it.
            let mut draw = || ((random.next() | 1 << 20).leading_zeros() * 10 / skew) as u8;
            (0..count).map(|_| top.wrapping_sub(draw())).collect()
        });
    prop_oneof![3 => skewed, 1 => prop::collection::vec(any::<u8>(), 1..3000)]
}

fn geometry() -> impl Strategy<Value = Geometry> {
    (prop::sample::select(vec![8, 16, 32, 64]), prop::sample::select(vec![64, 128, 256, 512, 1024]))
        .prop_map(|(bytes, threads)| Geometry::new(bytes, threads).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_tensor_comes_back(exponents in exponents(), geometry in geometry(), seed: u64) {
        check(&weights_of(exponents, seed), geometry);
    }

    #[test]
    fn chunks_do_not_change_the_bytes(exponents in exponents(), geometry in geometry(), chunk in 1usize..9000) {
        let weights = weights_of(exponents, 1);
        let chunk = if weights.len() > 10_000 { chunk.max(8) } else { chunk };
        let whole = encode_tensor(&weights, geometry, WHOLE).unwrap();
        prop_assert!(encode_tensor(&weights, geometry, chunk).unwrap() == whole);
    }

    #[test]
    fn any_range_is_a_slice_of_the_whole(exponents in exponents(), geometry in geometry(), a: usize, b: usize) {
        let weights = weights_of(exponents, 2);
        let count = weights.len() / 2;
        let (a, b) = (a % count, b % count);
        let (start, end) = (a.min(b), a.max(b) + 1);
        let tensor = encode_tensor(&weights, geometry, WHOLE).unwrap();
        prop_assert!(tensor.decode(start as u64..end as u64).unwrap() == weights[2 * start..2 * end]);
    }

    #[test]
    fn lengths_are_optimal(counts in prop::collection::vec(1u64..2000, 2..60), limit in 6u8..=16) {
        let mut histogram = [0; 256];
        histogram[256 - counts.len()..].copy_from_slice(&counts);
        let histogram = Histogram::from(histogram);
        let lengths = CodeLengths::with_limit(&histogram, limit).unwrap();
        prop_assert!(lengths.as_bytes().iter().all(|&length| length <= limit));
        prop_assert_eq!(CodeLengths::from_bytes(lengths.as_bytes()).unwrap(), lengths.clone());
        prop_assert_eq!(lengths.bits(&histogram).unwrap(), optimal_bits(&counts, limit));
    }

    /// Arbitrary damage: an error, or weights that the damaged arrays do stand for; never a panic.
    #[test]
    fn damage_is_harmless(
        exponents in exponents(), geometry in geometry(), range in any::<(usize, usize)>(),
        hits in prop::collection::vec((0u8..4, any::<usize>(), any::<u8>()), 1..6),
    ) {
        let weights = weights_of(exponents, 3);
        let mut tensor = encode_tensor(&weights, geometry, WHOLE).unwrap();
        for (array, at, value) in hits {
            let array = match array {
                0 => &mut tensor.gaps,
                1 => &mut tensor.output_offsets,
                2 => &mut tensor.bitstream,
                _ => &mut tensor.plane,
            };
            let at = at % array.len();
            array[at] ^= value;
        }
        let count = weights.len() / 2;
        let start = range.0 % count;
        let end = start + 1 + range.1 % (count - start);
        only_corrupt(tensor.decode(0..count as u64));
        only_corrupt(tensor.decode(start as u64..end as u64));
        if verify(&tensor, 2).is_ok() {
            let decoded = tensor.decode(0..count as u64).unwrap();
            let again = encode_tensor(&decoded, geometry, WHOLE).unwrap();
            // A tensor that verifies and has the optimal code is the only one for its weights.
            if again.codebook == tensor.codebook {
                prop_assert!(again == tensor);
            }
        }
    }

    #[test]
    fn noise_is_harmless(exponents in exponents(), geometry in geometry(), seed: u64, keep: bool) {
        let mut tensor = encode_tensor(&weights_of(exponents, 4), geometry, WHOLE).unwrap();
        let mut random = Random(seed);
        tensor.bitstream.fill_with(|| random.next() as u8);
        if !keep {
            tensor.gaps.fill_with(|| random.next() as u8);
            tensor.output_offsets.fill_with(|| random.next() as u8);
        }
        only_corrupt(tensor.decode(0..tensor.layout.elements()));
        only_corrupt(verify(&tensor, 1));
    }

    #[test]
    fn noise_as_a_codebook_is_harmless(bytes in prop::collection::vec(0u8..18, 256..2000)) {
        only_corrupt(read_codebook(&bytes));
        only_corrupt(verify_codebook(&bytes));
    }
}

fn only_corrupt<T>(result: df11::Result<T>) {
    if let Err(error) = result {
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}

/// The least bits of any prefix code with this limit, by dynamic programming over the numbers of
/// leaves and inner nodes on each level: an algorithm that shares nothing with package-merge.
fn optimal_bits(counts: &[u64], limit: u8) -> u64 {
    let mut sorted = counts.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let n = sorted.len();
    let tail: Vec<u64> = (0..=n).map(|placed| sorted[placed..].iter().sum()).collect();
    // best[placed][nodes]: the least cost with `placed` commonest symbols placed and `nodes` nodes
    // open on this level.
    let mut best = vec![vec![u64::MAX; 2 * n + 1]; n + 1];
    best[0][1] = 0;
    let mut least = u64::MAX;
    for _ in 0..limit {
        let mut next = vec![vec![u64::MAX; 2 * n + 1]; n + 1];
        for placed in 0..n {
            let reached = best[placed].iter().copied().enumerate().skip(1).take(n);
            for (open, cost) in reached.filter(|&(_, cost)| cost < u64::MAX) {
                // Every symbol not yet placed becomes one bit longer.
                let cost = cost + tail[placed];
                let nodes = (2 * open).min(2 * n);
                for leaves in 0..=nodes.min(n - placed) {
                    if placed + leaves == n {
                        least = least.min(cost);
                    } else if nodes > leaves {
                        let inner = (nodes - leaves).min(n);
                        let slot = &mut next[placed + leaves][inner];
                        *slot = (*slot).min(cost);
                    }
                }
            }
        }
        best = next;
    }
    least
}

fn corrupt<T: std::fmt::Debug>(result: &df11::Result<T>, place: &str) {
    let Err(Error::Corrupt { place: found, .. }) = result else { panic!("{result:?}") };
    assert_eq!(found, place);
}

#[test]
fn each_rule_of_the_index_is_checked() {
    let weights = normal::weights(13, 1, 30_000, |_| 0.02);
    let geometry = Geometry::new(8, 64).unwrap();
    let good = encode_tensor(&weights, geometry, WHOLE).unwrap();
    let all = 0..good.layout.elements();

    // A bit of padding.
    assert_ne!(good.layout.bit_count() % 64, 0);
    let mut bad = good.clone();
    *bad.bitstream.last_mut().unwrap() |= 0x80;
    corrupt(&bad.decode(all.clone()), "bitstream");
    corrupt(&verify(&bad, 3), "bitstream");

    // An index that leaves out the first weight, and agrees with itself.
    let mut bad = good.clone();
    let first = bf16::exponent(u16::from_le_bytes([weights[0], weights[1]]));
    bad.gaps[0] |= bad.codebook[usize::from(first)];
    bad.output_offsets[0] = 1;
    corrupt(&bad.decode(1..2), "output offsets");
    corrupt(&verify(&bad, 3), "output offsets");

    // The same for a later thread block: decoding succeeds, verification does not.
    let entry = u64::from_le_bytes(*good.output_offsets[8..].first_chunk().unwrap());
    let at = 2 * entry as usize;
    let length = good.codebook
        [usize::from(bf16::exponent(u16::from_le_bytes([weights[at], weights[at + 1]])))];
    let mut bad = good.clone();
    bad.gaps[32] += length;
    bad.output_offsets[8..16].copy_from_slice(&(entry + 1).to_le_bytes());
    assert_eq!(bad.decode(all.clone()).unwrap(), weights);
    corrupt(&verify(&bad, 1), "gaps");

    // A gap inside a thread block, and offsets that descend or exceed the tensor.
    let mut bad = good.clone();
    bad.gaps[5] ^= 0x10;
    assert_eq!(bad.decode(all.clone()).unwrap(), weights);
    corrupt(&verify(&bad, 1), "gaps");
    for (at, value) in
        [(0, 1), (8, 0), (8, u64::MAX), (16, 1 << 40), (good.output_offsets.len() - 8, 29_999)]
    {
        let mut bad = good.clone();
        bad.output_offsets[at..at + 8].copy_from_slice(&u64::to_le_bytes(value));
        assert!(verify(&bad, 2).is_err());
    }
}

#[test]
fn a_changed_source_is_noticed() {
    let weights = normal::weights(8, 1, 1 << 16, |_| 0.02);
    let histogram = Histogram::of(&weights);
    let lengths = CodeLengths::from_histogram(&histogram).unwrap();
    let tensor = encode_tensor(&weights, Geometry::default(), WHOLE).unwrap();
    let encoder = ChunkEncoder::new(&lengths, &tensor.layout);
    let mut output = ChunkOutput::default();
    let encode = |weights: &[u8], output: &mut ChunkOutput| {
        let end_bit = tensor.layout.bit_count();
        let input =
            ChunkInput { weights, elements: 1 << 16, first_element: 0, start_bit: 0, end_bit };
        encoder.encode(&input, output)
    };
    encode(&weights, &mut output).unwrap();
    assert_eq!(output.bitstream().bytes, tensor.bitstream);
    for at in [1, 1001, 70_001, 2 * (1 << 16) - 1] {
        for flip in [0x7F, 0x01, 0x40] {
            let mut changed = weights.clone();
            changed[at] ^= flip;
            let length =
                |word: &[u8]| lengths.get(bf16::exponent(u16::from_le_bytes([word[0], word[1]])));
            let (old, new) = (length(&weights[at - 1..]), length(&changed[at - 1..]));
            assert_eq!(encode(&changed, &mut output).is_err(), old != new);
        }
    }
    // Much longer, much shorter, and without codes.
    for exponent in [100, 120, 255] {
        assert!(
            encode(&weights_of(std::iter::repeat_n(exponent, 1 << 16), 9), &mut output).is_err()
        );
    }
    encode(&weights, &mut output).unwrap();
    assert_eq!(output.bitstream().bytes, tensor.bitstream);
}

#[test]
fn an_exponent_without_a_code_is_noticed_where_the_bits_agree() {
    // Lengths 1, 2, 3, 3. One weight loses its code, another one's becomes longer by as much.
    for count in [800, 40_000] {
        let exponents: Vec<u8> = (0..count).map(|at| [1, 1, 1, 1, 2, 2, 3, 4][at % 8]).collect();
        let tensor =
            encode_tensor(&weights_of(exponents.iter().copied(), 12), Geometry::default(), WHOLE)
                .unwrap();
        let encoder = ChunkEncoder::new(&read_codebook(&tensor.codebook).unwrap(), &tensor.layout);
        // Code by code, one bit is lost; in pairs of codes, those of both.
        for (lost, longer, now) in
            [(0, 1, 2), (1, 8, 2), (count - 8, 0, 2), (0, 8, 3), (count - 7, 8, 3)]
        {
            let mut changed = exponents.clone();
            (changed[lost], changed[longer]) = (200, now);
            let (weights, end_bit) = (weights_of(changed, 12), tensor.layout.bit_count());
            let input = ChunkInput {
                weights: &weights,
                elements: count,
                first_element: 0,
                start_bit: 0,
                end_bit,
            };
            assert!(encoder.encode(&input, &mut ChunkOutput::default()).is_err());
        }
    }
}

#[test]
fn impossible_requests_are_the_callers_fault() {
    let weights = normal::weights(10, 1, 1 << 15, |_| 0.02);
    let tensor = encode_tensor(&weights, Geometry::default(), WHOLE).unwrap();
    let (layout, arrays) = (&tensor.layout, tensor.arrays());
    let parameter =
        |result: df11::Result<()>| assert!(matches!(result, Err(Error::Parameter { .. })));
    parameter(arrays.span(layout, 0..0).map(drop));
    parameter(arrays.span(layout, 0..layout.thread_block_count() + 1).map(drop));
    parameter(tensor.decode(5..5).map(drop));
    parameter(tensor.decode(0..(1 << 15) + 1).map(drop));
    parameter(Geometry::new(12, 64).map(drop));
    parameter(encode_tensor(&[], Geometry::default(), 1).map(drop));
    let decoder = GapDecoder::new(&read_codebook(&tensor.codebook).unwrap(), layout);
    let span = arrays.span(layout, 0..1).unwrap();
    parameter(decoder.decode(&span, 0..10, &tensor.plane[..10], &mut [0; 19]));
    parameter(decoder.decode(&span, 0..10, &tensor.plane[..9], &mut [0; 18]));
    // Weights that exist, but not in this span: what the index led to is at fault.
    assert!(matches!(
        decoder.decode(&span, 20_000..20_001, &[0], &mut [0; 2]),
        Err(Error::Corrupt { .. })
    ));
    let mut short = span.clone();
    short.bitstream = &short.bitstream[1..];
    parameter(decoder.verify_index(&short));
}

#[test]
fn luts_agree_with_the_codes() {
    let counts: [u64; 256] = std::array::from_fn(|symbol| 1 + (symbol as u64).pow(5));
    let lengths = CodeLengths::from_histogram(&counts.into()).unwrap();
    let luts = Luts::new(&lengths);
    let codes = df11::hazmat::huffman::Codes::new(&lengths);
    for bits in 0..=u16::MAX {
        let (symbol, length) = luts.find(bits).unwrap();
        let code = codes.get(symbol);
        assert_eq!(
            (length, u32::from(bits) & ((1 << length) - 1)),
            (code.length, u32::from(code.bits))
        );
    }
}
