//! The committed corpus, as an ordinary test: each input of each target, without a fuzzer.

use std::{fs, panic, path::Path};

use df11_fuzz::targets;

/// Runs what is in `corpus/NAME`, which is at least as much as when this was written.
fn replay(name: &str, least: usize, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut inputs: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
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

/// A test for each target, and how many inputs it has at least.
macro_rules! replay {
    ($($target:ident: $least:literal,)*) => {
        $(
            #[test]
            fn $target() {
                replay(stringify!($target), $least, targets::$target::run);
            }
        )*
    };
}

replay! {
    decode_vs_reference: 124,
    import_raw: 263,
    import_structured: 440,
    open_raw: 56,
    open_structured: 646,
    roundtrip: 284,
    safetensors_in: 576,
    tiles_vs_reference: 287,
}
