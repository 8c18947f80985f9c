//! The identity of a model (spec/format.md, section 8).

/// The hash by which the shards of a model know each other: over path, length in bytes and hash of every weights file of the
/// model, ascending by path.
pub fn identity<'a>(weights: impl Iterator<Item = (&'a str, u64, [u8; 32])>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for (path, length, hash) in weights {
        hasher.update(&(path.len() as u64).to_le_bytes());
        hasher.update(path.as_bytes());
        hasher.update(&length.to_le_bytes());
        hasher.update(&hash);
    }
    *hasher.finalize().as_bytes()
}
