//! The committed corpus, as an ordinary test: each input of each target, without a fuzzer.

use std::{fs, panic, path::Path};

use df11_fuzz::targets;

/// Runs what is in `corpus/NAME`, which is at least as much as when this was written.
fn replay(name: &str, least: usize, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut inputs: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() >= least, "{} inputs", inputs.len());
    for input in inputs {
        let bytes = fs::read(&input).unwrap();
        if let Err(panic) = panic::catch_unwind(|| run(&bytes)) {
            eprintln!("{}", input.display());
            panic::resume_unwind(panic);
        }
    }
}

#[test]
fn decode_vs_reference() {
    replay("decode_vs_reference", 124, targets::decode_vs_reference::run);
}

#[test]
fn import_raw() {
    replay("import_raw", 263, targets::import_raw::run);
}

#[test]
fn import_structured() {
    replay("import_structured", 440, targets::import_structured::run);
}

#[test]
fn open_raw() {
    replay("open_raw", 56, targets::open_raw::run);
}

#[test]
fn open_structured() {
    replay("open_structured", 646, targets::open_structured::run);
}

#[test]
fn roundtrip() {
    replay("roundtrip", 284, targets::roundtrip::run);
}

#[test]
fn safetensors_in() {
    replay("safetensors_in", 576, targets::safetensors_in::run);
}

#[test]
fn tiles_vs_reference() {
    replay("tiles_vs_reference", 287, targets::tiles_vs_reference::run);
}
