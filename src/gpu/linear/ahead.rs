//! What a product brings to the L2 cache for the product after it.
//!
//! Between two products of a model run small kernels, which leave memory idle. So a launch ends by
//! asking for the weights that the next product reads first. Which one that is, the launches before
//! have shown: a model multiplies in the same order again and again. It is a hint, of which no
//! output depends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::split::Few;
use super::task::{AHEAD, LinearAhead, LinearMatrix, STRIP_ROWS, strip_bytes};

/// Bytes of the next product, at most; L2 holds 50 MB.
const BYTES: u64 = 8 << 20;
/// Of which addresses and sizes are multiples.
const ALIGNMENT: u64 = 16;

type Hint = [LinearAhead; AHEAD];

/// The hint of one prepared launch: what the product after it read first when it last ran.
#[derive(Debug, Default)]
pub(super) struct Ahead(Mutex<Hint>);

/// The launch that ran last on a GPU.
#[derive(Debug, Default)]
pub(super) struct Last(Mutex<Option<Arc<Ahead>>>);

impl Last {
    /// `this` runs now, and reads `first` first: what it is to bring for the product after it.
    pub(super) fn follow(&self, this: &Arc<Ahead>, first: Hint) -> Hint {
        if let Some(before) = lock(&self.0).replace(Arc::clone(this)) {
            *lock(&before.0) = first;
        }
        *lock(&this.0)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a launch reads first: the beginnings of all splits of all strips of its first matrices.
pub(super) fn read_first(matrices: &[LinearMatrix], few: &Few) -> Hint {
    let mut hint = Hint::default();
    let pieces = |(matrix, splits): (&LinearMatrix, u64)| {
        u64::from(matrix.rows).div_ceil(STRIP_ROWS) * splits
    };
    let all = || matrices.iter().zip(few.matrices.iter().map(|few| few.splits)).take(AHEAD);
    let each = BYTES / all().map(pieces).sum::<u64>().max(1);
    for (ahead, (matrix, splits)) in hint.iter_mut().zip(all()) {
        let pitch = strip_bytes(matrix.whole_columns.into()) / splits;
        *ahead = LinearAhead {
            data: matrix.data,
            pitch: pitch - pitch % ALIGNMENT,
            // A matrix has at most 2^27 strips, of a launch's 2^6 splits; only few of both occur.
            pieces: pieces((matrix, splits)).try_into().unwrap_or(0),
            bytes: (each.min(pitch) / ALIGNMENT * ALIGNMENT) as u32,
        };
    }
    hint
}
