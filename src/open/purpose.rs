//! When a GPU is worth its start.

use super::Model;
use crate::Encoding;

/// What decoded bytes are for, which tells whether a GPU is sooner done with them than the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be compared with hashes.
    Verify,
    /// To be written to files.
    Restore,
}

impl Purpose {
    /// Coded bytes a thread below which the CPU is sooner done. An H200's host needed 0.35 s to
    /// start the GPU and to end, and then verified 2.9 GB/s with 2 threads and 9.8 with 16, where
    /// the CPU did 1.3 and 6.7. What restores waits for the files it writes: they took 2 GB/s from
    /// either. To be measured again with `benches/gpu_commands.py` where a GPU starts or loads
    /// faster.
    const fn small_bytes(self) -> u64 {
        match self {
            Self::Verify => 400_000_000,
            Self::Restore => 1_200_000_000,
        }
    }

    /// Whether the threads of the current rayon pool have decoded the model before a GPU has
    /// started. Nobody then needs to look for one, which takes time too. The cost grows with the
    /// number of tensors.
    pub fn is_small(self, model: &Model) -> bool {
        let is_coded = |encoding| matches!(encoding, Encoding::Gap | Encoding::Tile);
        let coded = model.tensors().filter(|tensor| is_coded(tensor.encoding()));
        let bytes =
            coded.filter_map(|tensor| tensor.byte_length().ok()).fold(0, u64::saturating_add);
        bytes < self.small_bytes().saturating_mul(rayon::current_num_threads() as u64)
    }
}
