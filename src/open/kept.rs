//! Chunks that came over a network, kept for a while.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use crate::parallel;

/// Chunks from beyond a network that the containers of a folder keep together, at least.
const KEPT_CHUNKS: usize = 64;

/// The chunks of some containers that were read last: container, chunk and bytes.
#[derive(Default)]
pub(super) struct KeptChunks(Mutex<VecDeque<(PathBuf, usize, Arc<Vec<u8>>)>>);

impl KeptChunks {
    pub(super) fn find(&self, path: &Path, chunk: usize) -> Option<Arc<Vec<u8>>> {
        let chunks = parallel::lock(&self.0);
        let mut found = chunks.iter().filter(|(of, at, _)| *at == chunk && of == path);
        found.next().map(|(.., bytes)| Arc::clone(bytes))
    }

    pub(super) fn add(&self, path: &Path, chunk: usize, bytes: &Arc<Vec<u8>>) {
        let mut chunks = parallel::lock(&self.0);
        if chunks.len() >= KEPT_CHUNKS.max(4 * rayon::current_num_threads()) {
            chunks.pop_front();
        }
        chunks.push_back((path.to_owned(), chunk, Arc::clone(bytes)));
    }
}
