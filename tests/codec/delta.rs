//! Differences from a base, in segments, which only `delta` has.

use std::ops::Range;

use df11::{
    Error,
    hazmat::delta::{
        self, BITSTREAM, CODEBOOK, Codebook, DeltaSizes, Differences, RECORDS, WithBase,
        segment_elements,
    },
    hazmat::stored::{CodedSizes, EncodedTensor, Scratch},
};

use super::{every_pattern, normal, place};

type Encoded = EncodedTensor<DeltaSizes, 3>;

/// A fine-tune: `steps` times each weight changes by a normal amount of this relative size, and is
/// rounded.
fn tuned(base: &[u8], size: f32, steps: usize) -> Vec<u8> {
    let mut random = normal::Random(3);
    let change = |bytes: &[u8; 2]| {
        let mut weight = half::bf16::from_le_bytes(*bytes);
        for _ in 0..steps {
            let by = 0.02 * size * random.normal_pair().0;
            weight = half::bf16::from_f32(weight.to_f32() + by);
        }
        weight.to_le_bytes()
    };
    base.as_chunks().0.iter().flat_map(change).collect()
}

fn decode(encoded: &Encoded, base: &[u8], range: Range<u64>) -> df11::Result<Vec<u8>> {
    let arrays = WithBase { arrays: encoded.views(), base };
    let mut out = vec![0; 2 * (range.end - range.start) as usize];
    let decoder = encoded.sizes.prepare(&arrays)?;
    decoder.decode(&arrays, range, &mut Scratch::default(), &mut out)?;
    Ok(out)
}

/// Encodes weights, and has this crate and the reference agree on them, whole and in parts. Returns
/// the bits of a weight.
fn check(base: &[u8], weights: &[u8], shape: &[u64]) -> f64 {
    let encoded = delta::encode_tensor(base, weights, shape).unwrap();
    let count = encoded.sizes.elements();
    let again = df11_reference::decode_delta(encoded.views(), base, shape).unwrap();
    assert!(again == weights, "{shape:?}");
    let each = segment_elements(shape);
    for range in [0..count, count / 3..count - count / 5, count - 1..count, each / 2..count] {
        if range.start < range.end {
            let wanted = &weights[2 * range.start as usize..2 * range.end as usize];
            assert!(decode(&encoded, base, range).unwrap() == wanted, "{shape:?}");
        }
    }
    let bytes: usize = encoded.arrays.iter().map(Vec::len).sum();
    8.0 * bytes as f64 / count as f64
}

#[test]
fn fine_tunes_come_back_in_the_size_of_the_study() {
    let base = normal::weights(1, 1024, 2048, |_| 0.02);
    let shape = [1024, 2048];
    // The entropy of the differences, given the exponent of the base, was 0.96, 2.21 and 3.86 for
    // dense changes, and 0.28 and 0.85 for 30 rounded steps.
    for (size, steps, most) in
        [(1e-3, 1, 0.99), (3e-3, 1, 2.25), (1e-2, 1, 3.93), (1e-4, 30, 0.31), (3e-4, 30, 0.89)]
    {
        let bits = check(&base, &tuned(&base, size, steps), &shape);
        assert!(bits < most, "{size}, {steps} steps: {bits}");
    }
    assert!(check(&base, &base, &shape) < 0.004);
}

#[test]
fn every_pattern_and_length_comes_back() {
    let all = every_pattern();
    let ordered: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    check(&ordered, &all, &[256, 256]);
    check(&all, &ordered, &[1 << 16]);
    for length in (1..40).chain([1023, 1024, 1025, 4097]) {
        let bytes = 2 * length as usize;
        check(&all[..bytes], &ordered[..bytes], &[length]);
    }
}

#[test]
fn segments_are_whole_strips() {
    for (shape, wanted) in [
        (&[][..], 1 << 18),
        (&[5], 160 * 1639),
        (&[1 << 20], 1 << 18),
        (&[4096, 4096], 1 << 18),
        (&[4096, 14336], 32 * 14336),
        (&[128, 7, 896], 28672 * 10),
        (&[64, 3, 7, 7], 32 * 147 * 56),
        (&[4, 1 << 18], 1 << 23),
        (&[4, (1 << 18) + 1], 1 << 18),
    ] {
        assert_eq!(segment_elements(shape), wanted, "{shape:?}");
    }
}

fn sample() -> (Vec<u8>, Encoded) {
    let base = normal::weights(4, 600, 1000, |_| 0.02);
    let weights = tuned(&base, 1e-1, 1);
    let encoded = delta::encode_tensor(&base, &weights, &[600, 1000]).unwrap();
    (base, encoded)
}

/// Whatever bytes there are, decoding ends and stays within its memory. What it accepts, so does
/// the reference, with the same weights.
#[test]
fn damage_is_an_error_or_other_weights() {
    let (base, encoded) = sample();
    let count = encoded.sizes.elements();
    let mut random = normal::Random(9);
    let mut refused = 0;
    for array in [CODEBOOK, RECORDS, BITSTREAM] {
        for _ in 0..24 {
            let mut damaged = encoded.clone();
            let at = random.next() as usize % damaged.arrays[array].len();
            damaged.arrays[array][at] ^= 1 << (random.next() % 8);
            let ours = decode(&damaged, &base, 0..count);
            let theirs = df11_reference::decode_delta(damaged.views(), &base, &[600, 1000]);
            assert_eq!(ours.is_ok(), theirs.is_ok(), "array {array}, byte {at}: {ours:?}");
            assert!(ours.as_ref().ok() == theirs.as_ref().ok());
            refused += u32::from(ours.is_err());
        }
    }
    assert!(refused > 40, "{refused}");
}

#[test]
fn a_truncated_bitstream_is_refused() {
    let (base, encoded) = sample();
    let mut cut = encoded.clone();
    cut.arrays[BITSTREAM].truncate(1000);
    assert!(decode(&cut, &base, 0..cut.sizes.elements()).is_err());
    let mut short = encoded;
    short.arrays[RECORDS][8] ^= 4;
    assert_eq!(place(decode(&short, &base, 0..short.sizes.elements())), "bitstream");
}

#[test]
fn arrays_need_their_base() {
    let (base, encoded) = sample();
    let without = encoded.sizes.prepare(&encoded.views());
    assert!(matches!(without.map(drop), Err(Error::NoBase { .. })));
    let short = decode(&encoded, &base[..100], 0..encoded.sizes.elements());
    assert!(matches!(short, Err(Error::Parameter { .. })));
}

#[test]
fn counts_in_any_order_make_one_code() {
    let base = normal::weights(4, 64, 1000, |_| 0.02);
    let weights = tuned(&base, 1e-2, 1);
    let count = |parts: [Range<usize>; 2]| {
        let mut sum = Differences::default();
        for part in parts {
            let mut differences = Differences::default();
            differences.add(&base[part.clone()], &weights[part]);
            sum.merge(&differences);
        }
        Codebook::new(&sum)
    };
    let (middle, end) = (2 * 777, base.len());
    assert_eq!(count([0..middle, middle..end]), count([middle..end, 0..middle]));
}
