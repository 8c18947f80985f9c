//! Prints what the parameters of the `gap` encoding cost: bits per weight by code limit and by
//! geometry.
//!
//! `cargo run --release --example bits_per_weight` takes some seconds: 117 million weights of a
//! 28672 × 4096 matrix, once drawn from N(0, 0.02²) and once with a scale for each row.

use df11::hazmat::gap::{GapGeometry, GapSizes};
use df11::hazmat::huffman::{CodeLengths, Histogram, codebook};

#[path = "../benches/support/normal.rs"]
mod normal;

const ROWS: usize = 28_672;
const COLUMNS: usize = 4096;

fn main() -> df11::Result<()> {
    print(&histogram(|_| 0.02), "N(0, 0.02²)")?;
    print(&histogram(normal::row_sigma), "per-row scales")
}

/// Counted in strips, so that the matrix never stands in memory whole.
fn histogram(sigma: impl Fn(usize) -> f32) -> Histogram {
    let mut histogram = Histogram::default();
    for strip in 0..ROWS / 1024 {
        let weights = normal::weights(strip as u64, 1024, COLUMNS, |row| sigma(1024 * strip + row));
        histogram.count(&weights);
    }
    histogram
}

#[allow(clippy::cast_precision_loss, reason = "figures to read")]
fn print(histogram: &Histogram, name: &str) -> df11::Result<()> {
    let weights = histogram.total() as f64;
    println!(
        "\n{name}: {weights} weights, {} exponents, entropy {:.4} bits",
        histogram.used(),
        histogram.entropy()
    );
    println!("\n| codes of at most | exponent bits per weight |\n|---|---|");
    for limit in 8..=16 {
        let bits = CodeLengths::with_limit(histogram, limit)?.bits(histogram)?;
        println!("| {limit} bits | {:.4} |", bits as f64 / weights);
    }
    let lengths = CodeLengths::from_histogram(histogram)?;
    println!(
        "\n| bytes per thread | threads per thread block | gaps | output offsets | all arrays \
        |\n|---|---|---|---|---|"
    );
    for bytes_per_thread in [8, 16, 32, 64] {
        for threads_per_block in [128, 256, 512] {
            let layout = GapSizes::new(
                GapGeometry::new(bytes_per_thread, threads_per_block)?,
                histogram.total(),
                lengths.bits(histogram)?,
                codebook(&lengths).len() as u64,
            )?;
            let bits = |bytes: u64| 8.0 * bytes as f64 / weights;
            let [_, gaps, offsets, ..] = layout.array_lengths().map(bits);
            let all = bits(layout.array_lengths().iter().sum());
            println!(
                "| {bytes_per_thread} | {threads_per_block} | {gaps:.4} | {offsets:.4} | {all:.4} |"
            );
        }
    }
    Ok(())
}
