//! Tests of `gap` alone: threads, thread blocks, chunks, LUTs.

use df11::{
    Error, Result,
    hazmat::{
        bf16,
        gap::{
            BITSTREAM, CODEBOOK, EncodedTensor, GAPS, GapGeometry, OUTPUT_OFFSETS, PortionEncoder,
            PortionInput, PortionOutput, encode_tensor,
        },
        huffman::{CodeLengths, Histogram, read_codebook},
    },
};
use proptest::prelude::*;

use super::{every_pattern, normal, place, weights_of, witness};

const WHOLE: usize = usize::MAX;

/// Encodes weights, and has all readers agree on them.
fn check(weights: &[u8], geometry: GapGeometry) -> EncodedTensor {
    let tensor = encode_tensor(weights, geometry, WHOLE).unwrap();
    let (sizes, (arrays, parameters)) = (tensor.sizes, witness::of(&tensor));
    assert_eq!(arrays.map(|array| array.len() as u64), sizes.array_lengths());
    assert!(df11_reference::decode_gap(arrays, parameters).unwrap() == weights, "{geometry:?}");
    assert_eq!(witness::verify_gap(arrays, parameters), Ok(()), "{geometry:?}");
    assert!(tensor.decode(0..sizes.elements()).unwrap() == weights, "{geometry:?}");
    for each in [1, 3, 1000] {
        verify(&tensor, each).unwrap();
    }
    tensor
}

/// Verifies some thread blocks at a time.
fn verify(tensor: &EncodedTensor, each: usize) -> Result<()> {
    let offsets = tensor.arrays[OUTPUT_OFFSETS].as_chunks().0;
    let ends = offsets.iter().map(|offset| u64::from_le_bytes(*offset)).step_by(each);
    witness::verify(tensor, ends.chain([tensor.sizes.elements()]))
}

fn geometries() -> impl Iterator<Item = GapGeometry> {
    [8, 16, 32, 64]
        .into_iter()
        .flat_map(|bytes| [64, 1024].map(|threads| GapGeometry::new(bytes, threads).unwrap()))
}

#[test]
fn every_pattern_in_every_geometry() {
    geometries().for_each(|geometry| drop(check(&every_pattern(), geometry)));
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
fn counts_around_threads_and_thread_blocks() {
    let geometry = GapGeometry::new(8, 64).unwrap();
    // Equiprobable exponents have 8 bits each: 8 a thread, 512 a thread block.
    for count in [256, 504, 511, 512, 513, 520, 1023, 1024, 1025, 16_384, 16_385, 33_000] {
        check(&weights_of((0..=255).cycle().take(count), 6), geometry);
    }
    let normal = normal::weights(7, 1, 40_000, |_| 0.02);
    for count in (1..300).chain([16_383, 16_384, 16_387, 40_000]) {
        check(&normal[..2 * count], geometry);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

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

/// Errors say which array is wrong; which rule is checked when, the test vectors show.
#[test]
fn errors_name_the_array() {
    let weights = normal::weights(13, 1, 30_000, |_| 0.02);
    let good = encode_tensor(&weights, GapGeometry::new(8, 64).unwrap(), WHOLE).unwrap();
    let damaged = |damage: &dyn Fn(&mut EncodedTensor)| {
        let mut bad = good.clone();
        damage(&mut bad);
        bad
    };
    assert_ne!(good.sizes.bit_count() % 64, 0);
    let bad = damaged(&|bad| *bad.arrays[BITSTREAM].last_mut().unwrap() |= 0x80);
    assert_eq!(place(bad.decode(0..30_000)), "bitstream");
    assert_eq!(place(verify(&bad, 3)), "bitstream");

    // An index that leaves out the first weight, and agrees with itself.
    let bad = damaged(&|bad| {
        let first = bf16::exponent(u16::from_le_bytes([weights[0], weights[1]]));
        bad.arrays[GAPS][0] |= bad.arrays[CODEBOOK][usize::from(first)];
        bad.arrays[OUTPUT_OFFSETS][0] = 1;
    });
    assert_eq!(place(bad.decode(1..2)), "output offsets");
    assert_eq!(place(verify(&bad, 3)), "output offsets");

    // A gap inside a thread block, which decoding does not use.
    let bad = damaged(&|bad| bad.arrays[GAPS][5] ^= 0x10);
    assert_eq!(bad.decode(0..30_000).unwrap(), weights);
    assert_eq!(place(verify(&bad, 1)), "gaps");
}

#[test]
fn a_changed_source_is_noticed() {
    let weights = normal::weights(8, 1, 1 << 16, |_| 0.02);
    let histogram = Histogram::of(&weights);
    let lengths = CodeLengths::from_histogram(&histogram).unwrap();
    let tensor = encode_tensor(&weights, GapGeometry::default(), WHOLE).unwrap();
    let encoder = PortionEncoder::new(&lengths, &tensor.sizes);
    let mut output = PortionOutput::default();
    let encode = |weights: &[u8], output: &mut PortionOutput| {
        let end_bit = tensor.sizes.bit_count();
        let input =
            PortionInput { weights, elements: 1 << 16, first_element: 0, start_bit: 0, end_bit };
        encoder.encode(&input, output)
    };
    encode(&weights, &mut output).unwrap();
    assert_eq!(output.parts()[2], (BITSTREAM, 0, &*tensor.arrays[BITSTREAM]));
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
    assert_eq!(output.parts()[2], (BITSTREAM, 0, &*tensor.arrays[BITSTREAM]));
}

#[test]
fn an_exponent_without_a_code_is_noticed_where_the_bits_agree() {
    // Lengths 1, 2, 3, 3. One weight loses its code, another one's becomes longer by as much.
    for count in [800, 40_000] {
        let exponents: Vec<u8> = (0..count).map(|at| [1, 1, 1, 1, 2, 2, 3, 4][at % 8]).collect();
        let tensor = encode_tensor(
            &weights_of(exponents.iter().copied(), 12),
            GapGeometry::default(),
            WHOLE,
        )
        .unwrap();
        let encoder =
            PortionEncoder::new(&read_codebook(&tensor.arrays[CODEBOOK]).unwrap(), &tensor.sizes);
        // Code by code, one bit is lost; in pairs of codes, those of both.
        for (lost, longer, now) in
            [(0, 1, 2), (1, 8, 2), (count - 8, 0, 2), (0, 8, 3), (count - 7, 8, 3)]
        {
            let mut changed = exponents.clone();
            (changed[lost], changed[longer]) = (200, now);
            let (weights, end_bit) = (weights_of(changed, 12), tensor.sizes.bit_count());
            let input = PortionInput {
                weights: &weights,
                elements: count,
                first_element: 0,
                start_bit: 0,
                end_bit,
            };
            assert!(encoder.encode(&input, &mut PortionOutput::default()).is_err());
        }
    }
}

#[test]
fn impossible_requests_are_the_callers_fault() {
    let weights = normal::weights(10, 1, 1 << 15, |_| 0.02);
    let tensor = encode_tensor(&weights, GapGeometry::default(), WHOLE).unwrap();
    let parameter = |result: Result<()>| assert!(matches!(result, Err(Error::Parameter { .. })));
    parameter(tensor.decode(5..5).map(drop));
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    parameter(tensor.decode(10..5).map(drop));
    parameter(tensor.decode(0..u64::MAX).map(drop));
    parameter(tensor.decode(0..(1 << 15) + 1).map(drop));
    parameter(GapGeometry::new(12, 64).map(drop));
    parameter(encode_tensor(&[], GapGeometry::default(), 1).map(drop));
    let mut short = tensor.clone();
    short.arrays[BITSTREAM].truncate(100);
    parameter(short.decode(0..1 << 15).map(drop));
}
