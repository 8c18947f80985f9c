//! How large a model must be for a GPU to be worth its start.

use super::Model;

/// Coded bytes a thread below which the CPU has verified a model sooner than a GPU. An H200's host
/// needed 0.35 s to start the GPU and to end, and then verified 2.9 GB/s with 2 threads and 9.8
/// with 16, and the CPU did 1.3 and 6.7. To be measured again with `benches/gpu_commands.py` if a
/// GPU starts or loads faster.
const SMALL_BYTES: u64 = 400_000_000;

/// Whether the threads of the current rayon pool have verified a model before a GPU has started.
/// Nobody then needs to look for one, which takes time too. The cost grows with the number of
/// tensors.
pub fn is_small(model: &Model) -> bool {
    let coded = model.tensors().filter(|tensor| matches!(tensor.coded(), Ok(Some(_))));
    let bytes = coded.filter_map(|tensor| tensor.byte_length().ok()).fold(0, u64::saturating_add);
    bytes < SMALL_BYTES.saturating_mul(rayon::current_num_threads() as u64)
}
