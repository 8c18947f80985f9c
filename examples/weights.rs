//! Writes a large seeded checkpoint for benchmarks:
//! `cargo run --release --example weights -- OUT SET [MATRICES]`.
//!
//! OUT becomes a safetensors file with MATRICES (7) BF16 matrices of 4096×4096. SET is `normal`,
//! all weights drawn from N(0, 0.02²), or `rows`, with scales that differ by matrix and by row, as
//! in trained models.

use std::{env, path::Path, process::ExitCode};

use df11::{
    Dtype,
    hazmat::demo::{DemoTensor, write_tensors},
};

#[path = "../benches/support/normal.rs"]
mod normal;

const ROWS: usize = 4096;
const COLUMNS: usize = 4096;

fn matrix(set: &str, index: usize) -> DemoTensor {
    let seed = 1 + index as u64;
    let bytes = if set == "normal" {
        normal::weights(seed, ROWS, COLUMNS, |_| 0.02)
    } else {
        let scale = 2f32.powf(index as f32 / 2.0 - 1.5);
        normal::weights(seed, ROWS, COLUMNS, |row| scale * normal::row_sigma(row))
    };
    let (name, shape) = (format!("layers.{index}.weight"), vec![ROWS as u64, COLUMNS as u64]);
    DemoTensor { name, dtype: Dtype::BF16, shape, bytes }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (out, set) = match &arguments[..] {
        [out, set, ..] if set == "normal" || set == "rows" => (out, set),
        _ => {
            eprintln!("usage: weights OUT normal|rows [MATRICES]");
            return ExitCode::from(2);
        }
    };
    let count = arguments
        .get(2)
        .map_or(Ok(7), |count| count.parse::<usize>())
        .expect("a number of matrices");
    let mut matrices: Vec<DemoTensor> = (0..count).map(|index| matrix(set, index)).collect();
    write_tensors(Path::new(out), &mut matrices).expect("the output can be written");
    ExitCode::SUCCESS
}
