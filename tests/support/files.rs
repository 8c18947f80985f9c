//! Files of a folder, hashes, and errors.
#![allow(dead_code, reason = "each user needs another part")]

use std::{collections::BTreeMap, fs, io::Read as _, path::Path};

use sha2::{Digest as _, Sha256};

/// All files below a folder with their contents, by path.
pub(crate) fn files(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let names = path.strip_prefix(root).unwrap().iter();
                let names: Vec<&str> = names.map(|name| name.to_str().unwrap()).collect();
                found.insert(names.join("/"), fs::read(&path).unwrap());
            }
        }
    }
    found
}

pub(crate) fn sha256(bytes: impl AsRef<[u8]>) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// The container of a test vector, such as `valid/names`.
pub(crate) fn vector(name: &str) -> Vec<u8> {
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/vectors");
    let file = fs::File::open(vectors.join(format!("{name}.df11.gz"))).unwrap();
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Checks the kind of an error, and that its one line has these words.
#[track_caller]
pub(crate) fn check_error<T>(result: df11::Result<T>, kind: &str, part: &str) {
    let error = result.err().expect("an error");
    let line = error.to_string();
    assert!(format!("{error:?}").starts_with(&format!("{kind} {{")), "no {kind}: {error:?}");
    assert!(line.contains(part) && !line.contains('\n'), "{part:?} in {line}");
}
