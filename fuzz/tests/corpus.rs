//! The committed corpus, as an ordinary test: each input of each target, without a fuzzer.

use std::{
    fs::{self, File},
    io::Read,
    panic,
    path::{Path, PathBuf},
    process::Command,
};

use df11_fuzz::targets;
use tar::Archive;

fn in_this_crate(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The inputs of one target in `corpus.tar`, each with its name.
fn inputs(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let mut archive = Archive::new(File::open(in_this_crate("corpus.tar")).unwrap());
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (entry.path().unwrap().into_owned(), bytes)
    });
    entries.filter(|(path, _)| path.starts_with(target)).collect()
}

/// Runs the inputs of a target, of which there are at least as many as when this was written.
fn replay(target: &str, least: usize, run: fn(&[u8])) {
    let inputs = inputs(target);
    assert!(inputs.len() >= least, "{} inputs", inputs.len());
    for (name, bytes) in inputs {
        if let Err(panic) = panic::catch_unwind(|| run(&bytes)) {
            eprintln!("corpus.tar: {}", name.display());
            panic::resume_unwind(panic);
        }
    }
}

#[test]
fn unpacking_and_packing_gives_the_committed_archive() {
    let folder = tempfile::tempdir().unwrap();
    let [corpus, packed] = ["corpus", "packed.tar"].map(|name| folder.path().join(name));
    let archive = |arguments: &[&Path]| {
        let status = Command::new(in_this_crate("archive")).args(arguments).status().unwrap();
        assert!(status.success());
    };
    archive(&["unpack".as_ref(), &corpus]);
    archive(&["pack".as_ref(), &corpus, &packed]);
    assert!(fs::read(packed).unwrap() == fs::read(in_this_crate("corpus.tar")).unwrap());
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
    deltas_vs_reference: 78,
    import_raw: 263,
    import_structured: 440,
    open_raw: 56,
    open_structured: 646,
    roundtrip: 284,
    safetensors_in: 576,
    tiles_vs_reference: 287,
}
