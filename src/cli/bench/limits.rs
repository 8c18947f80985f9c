//! What the machine can do at most: copy, checksum and hash memory.

use std::{hint::black_box, sync::Mutex};

use df11::Source;
use rayon::prelude::*;

use super::job::Job;
use crate::cli::Failure;

/// Larger than the caches of most machines.
const BYTES: usize = 128 << 20;
/// Bytes that a thread takes at a time; as large as a chunk of a section.
const PIECE: usize = 1 << 20;

pub(super) const COPY: &str = "memory copy";
pub(super) const CHECKSUM: &str = "CRC-32";
pub(super) const HASH: &str = "BLAKE3";

/// Jobs over bytes of the source, as many as there are up to a limit.
pub(super) fn all(source: &Source) -> Result<Vec<Job<'static>>, Failure> {
    let bytes = std::sync::Arc::new(sample(source)?);
    let length = bytes.len() as u64;
    let target = Mutex::new(vec![0u8; bytes.len()]);
    let (for_copy, for_checksum, for_hash) = (bytes.clone(), bytes.clone(), bytes);
    Ok(vec![
        Job::new(COPY, length, None, move || {
            let mut target = target.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let pairs = target.par_chunks_mut(PIECE).zip(for_copy.par_chunks(PIECE));
            pairs.for_each(|(to, from)| to.copy_from_slice(from));
            black_box(&*target);
            Ok(())
        }),
        Job::new(CHECKSUM, length, None, move || {
            let sum =
                for_checksum.par_chunks(PIECE).map(crc32fast::hash).reduce(|| 0, |a, b| a ^ b);
            black_box(sum);
            Ok(())
        }),
        Job::new(HASH, length, None, move || {
            let mut hasher = blake3::Hasher::new();
            if rayon::current_num_threads() == 1 {
                hasher.update(&for_hash);
            } else {
                hasher.update_rayon(&for_hash);
            }
            black_box(hasher.finalize());
            Ok(())
        }),
    ])
}

fn sample(source: &Source) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    for file in &source.weights {
        let length = (file.length as usize).min(BYTES - bytes.len());
        let start = bytes.len();
        bytes.resize(start + length, 0);
        file.read_exact_at(0, &mut bytes[start..])?;
    }
    Ok(bytes)
}
