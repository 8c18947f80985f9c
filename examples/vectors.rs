//! Writes missing test vectors of the format, and the fields of the manifest that follow from them;
//! checks that all others are unchanged.
//!
//! Vectors of a released version never change. A new rule needs a new file: write a row with file,
//! expect, level and about into the manifest. To remake a vector that is not released yet, delete
//! it first.

#[path = "../tests/support/container.rs"]
mod container;
#[path = "../tests/support/vectors/mod.rs"]
mod vectors;

use std::{fs, io, path::Path, process::ExitCode};

use vectors::{Manifest, Vectors};

fn main() -> io::Result<ExitCode> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/vectors");
    let vectors = Vectors::all();
    let mut manifest: Manifest = serde_json::from_slice(&fs::read(folder.join("manifest.json"))?)?;
    manifest.vectors = vectors.rows(&manifest.vectors);
    let (mut written, mut changed) = (0, 0);
    for row in &manifest.vectors {
        let (path, bytes) = (folder.join(&row.file), vectors.bytes(row));
        if !path.exists() {
            fs::write(&path, vectors::stored(bytes))?;
            written += 1;
        } else if vectors::read(&path)? != bytes {
            println!("{} would change; give the new one another name", row.file);
            changed += 1;
        }
    }
    if changed == 0 {
        let text = serde_json::to_string_pretty(&manifest)? + "\n";
        fs::write(folder.join("manifest.json"), text)?;
    }
    println!("{} vectors: {written} written, {changed} would change", manifest.vectors.len());
    Ok(if changed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
