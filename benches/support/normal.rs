#![allow(
    dead_code,
    clippy::cast_precision_loss,
    reason = "shared by benches, examples and tests, each of which uses a part"
)]

//! Seeded BF16 weights: `SplitMix64` (G. L. Steele, D. Lea, C. H. Flood, "Fast splittable
//! pseudorandom number generators", OOPSLA 2014) and the Box–Muller transform.

/// A stream of pseudorandom numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// Two independent draws from N(0, 1).
    pub(crate) fn normal_pair(&mut self) -> (f32, f32) {
        // 24 random bits each; the first is never 0, whose logarithm is infinite.
        let unit = |word: u64| ((word >> 40) + 1) as f32 / (1u64 << 24) as f32;
        let (radius, angle) = (unit(self.next()), unit(self.next()));
        let radius = (-2.0 * radius.ln()).sqrt();
        let (sine, cosine) = (std::f32::consts::TAU * angle).sin_cos();
        (radius * sine, radius * cosine)
    }
}

/// `rows × columns` little-endian BF16 weights drawn from N(0, σ²) with the σ that `sigma` gives
/// for each row; `columns` is even.
pub(crate) fn weights(
    seed: u64,
    rows: usize,
    columns: usize,
    sigma: impl Fn(usize) -> f32,
) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes = Vec::with_capacity(2 * rows * columns);
    for row in 0..rows {
        let sigma = sigma(row);
        for _ in 0..columns / 2 {
            let (a, b) = random.normal_pair();
            bytes.extend_from_slice(&half::bf16::from_f32(sigma * a).to_le_bytes());
            bytes.extend_from_slice(&half::bf16::from_f32(sigma * b).to_le_bytes());
        }
    }
    bytes
}

/// Standard deviations that differ from row to row, 0.005 to 0.14.
pub(crate) fn row_sigma(row: usize) -> f32 {
    0.005 * 2f32.powf((row % 97) as f32 / 20.0)
}
