//! Fetched chunks, kept in memory for a while.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use crate::parallel;

/// Chunks from beyond a network that the containers of a folder keep together, at least.
const KEPT_CHUNKS: usize = 64;

struct KeptChunk {
    container: PathBuf,
    number: usize,
    bytes: Arc<Vec<u8>>,
}

/// The chunks of some containers that were read last.
#[derive(Default)]
pub(super) struct KeptChunks(Mutex<VecDeque<KeptChunk>>);

impl KeptChunks {
    pub(super) fn find(&self, container: &Path, number: usize) -> Option<Arc<Vec<u8>>> {
        let chunks = parallel::lock(&self.0);
        let mut all = chunks.iter();
        let found = all.find(|chunk| chunk.number == number && chunk.container == container)?;
        Some(Arc::clone(&found.bytes))
    }

    pub(super) fn add(&self, container: &Path, number: usize, bytes: &Arc<Vec<u8>>) {
        let mut chunks = parallel::lock(&self.0);
        if chunks.len() >= KEPT_CHUNKS.max(4 * rayon::current_num_threads()) {
            chunks.pop_front();
        }
        let (container, bytes) = (container.to_owned(), Arc::clone(bytes));
        chunks.push_back(KeptChunk { container, number, bytes });
    }
}
