//! The identity of a model (spec/format.md, section 8).

use super::{
    Directory,
    records::{FILE_WEIGHTS, FileRecord},
};

/// An original file as the identity sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IdentifiedFile<'a> {
    /// Its path.
    pub path: &'a str,
    /// Whether it is a weights file.
    pub is_weights: bool,
    /// Its length in bytes.
    pub length: u64,
    /// Its BLAKE3 hash.
    pub hash: [u8; 32],
}

impl<'a> IdentifiedFile<'a> {
    /// The files of a directory, in its order.
    pub fn of(directory: &'a Directory) -> impl Iterator<Item = Self> {
        let file = |file: &FileRecord| Self {
            path: directory.file_path(file),
            is_weights: file.kind == FILE_WEIGHTS,
            length: file.length.get(),
            hash: file.hash,
        };
        directory.files.iter().map(file)
    }
}

/// The hash by which the shards of a model know each other: over all original files, weights and
/// side files alike, wherever they are stored. They come in any order.
pub fn identity<'a>(files: impl Iterator<Item = IdentifiedFile<'a>>) -> [u8; 32] {
    let mut files: Vec<_> = files.collect();
    files.sort_unstable();
    let mut hasher = blake3::Hasher::new();
    for file in files {
        hasher.update(&[u8::from(file.is_weights)]);
        hasher.update(&(file.path.len() as u64).to_le_bytes());
        hasher.update(file.path.as_bytes());
        hasher.update(&file.length.to_le_bytes());
        hasher.update(&file.hash);
    }
    *hasher.finalize().as_bytes()
}
