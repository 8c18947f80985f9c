//! Writes the test vectors of the format that are missing, and their manifest; checks that the
//! others are as they were.
//!
//! Vectors of a released version never change: a new rule is a new file. One that is not released
//! yet is remade by deleting it first.

#[path = "../tests/support/container.rs"]
mod container;
#[path = "../tests/support/vectors/mod.rs"]
mod vectors;

use std::{fs, io, path::Path, process::ExitCode};

fn main() -> io::Result<ExitCode> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/vectors");
    let vectors = vectors::all();
    let (mut written, mut changed) = (0, 0);
    for vector in &vectors {
        let path = folder.join(&vector.row.file);
        if path.exists() {
            if vectors::read(&path)? != vector.bytes {
                println!("{} would change; give the new one another name", vector.row.file);
                changed += 1;
            }
        } else {
            fs::create_dir_all(path.parent().unwrap_or(&folder))?;
            fs::write(&path, vector.stored())?;
            written += 1;
        }
    }
    if changed == 0 {
        fs::write(folder.join("manifest.json"), vectors::manifest(&vectors))?;
    }
    println!("{} vectors: {written} written, {changed} would change", vectors.len());
    Ok(if changed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
