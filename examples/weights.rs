//! Writes a large seeded checkpoint for benchmarks:
//! `cargo run --release --example weights -- OUT SET [MATRICES]`.
//!
//! OUT becomes a safetensors file with MATRICES (7) BF16 matrices of 4096×4096. SET is `normal`,
//! all weights drawn from N(0, 0.02²), or `rows`, with scales that differ by matrix and by row, as
//! in trained models.

use std::{collections::HashMap, env, path::Path, process::ExitCode};

use safetensors::{
    Dtype,
    tensor::{TensorView, serialize_to_file},
};

#[path = "../benches/support/normal.rs"]
mod normal;

const ROWS: usize = 4096;
const COLUMNS: usize = 4096;

fn matrix(set: &str, index: usize) -> Vec<u8> {
    let seed = 1 + index as u64;
    if set == "normal" {
        normal::weights(seed, ROWS, COLUMNS, |_| 0.02)
    } else {
        let scale = 2f32.powf(index as f32 / 2.0 - 1.5);
        normal::weights(seed, ROWS, COLUMNS, |row| scale * normal::row_sigma(row))
    }
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
    let matrices: Vec<Vec<u8>> = (0..count).map(|index| matrix(set, index)).collect();
    let views: HashMap<String, TensorView<'_>> = matrices
        .iter()
        .enumerate()
        .map(|(index, bytes)| {
            let view = TensorView::new(Dtype::BF16, vec![ROWS, COLUMNS], bytes)
                .expect("the bytes fit the shape");
            (format!("layers.{index}.weight"), view)
        })
        .collect();
    serialize_to_file(views, None, Path::new(out)).expect("the output can be written");
    ExitCode::SUCCESS
}
