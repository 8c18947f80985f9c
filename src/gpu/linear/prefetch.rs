//! Prefetches into the L2 cache: each product prefetches for the next one.
//!
//! Small kernels run between the products of a model, and memory is idle meanwhile. So a launch
//! ends with prefetches of the weights that the next product reads first. Earlier launches show
//! which product that is: a model multiplies in the same order again and again.
//!
//! A prefetch is a hint: no output depends on it. An H100 ignores a prefetch of memory that has
//! been freed meanwhile (measured; `python/tests/test_order_gpu.py` tests it), so a prefetch keeps
//! no memory alive.

use std::sync::{Arc, Mutex};

use super::split::{SPLIT_COLUMNS, split_blocks};
use super::task::{LinearMatrix, LinearPrefetch, PREFETCHES, STRIP_ROWS, strip_bytes};
use crate::parallel::lock;

/// Most bytes of the next product. L2 holds 50 MB; more than this gained nothing
/// (benches/record/2026-11-26-exact-order-few.md).
const BYTES: u64 = 8 << 20;
/// Addresses and sizes are multiples of this.
const ALIGNMENT: u64 = 16;
/// Most bytes of one prefetch: machine code keeps 16 bits of the number of aligned pieces.
const MAX_PIECE_BYTES: u64 = (1 << 20) - ALIGNMENT;

type Prefetches = [LinearPrefetch; PREFETCHES];

/// First reads of the product that followed a prepared launch when it last ran.
#[derive(Debug, Default)]
pub(super) struct NextReads(Mutex<Prefetches>);

/// The launch that ran last on a GPU.
#[derive(Debug, Default)]
pub(super) struct LastLaunch(Mutex<Option<Arc<NextReads>>>);

impl LastLaunch {
    /// Notes that a launch that first reads `first` runs now; returns what it is to prefetch.
    pub(super) fn follow(&self, this: &Arc<NextReads>, first: Prefetches) -> Prefetches {
        if let Some(before) = lock(&self.0).replace(Arc::clone(this)) {
            *lock(&before.0) = first;
        }
        *lock(&this.0)
    }
}

/// First reads of a launch by matrices with these rows and `columns` columns: the beginning of each
/// split of each strip of the first [`PREFETCHES`] matrices.
pub(super) fn first_reads(
    matrices: &[(LinearMatrix, u64)],
    columns: u64,
    splits: impl Iterator<Item = u64> + Clone,
) -> Prefetches {
    let mut reads = Prefetches::default();
    let splits = splits.map(|splits| splits.max(1));
    let all = || matrices.iter().zip(splits.clone()).take(PREFETCHES);
    let pieces = |rows: u64, splits| rows.div_ceil(STRIP_ROWS) * splits;
    let each = BYTES / all().map(|(&(_, rows), splits)| pieces(rows, splits)).sum::<u64>().max(1);
    for (read, (&(matrix, rows), splits)) in reads.iter_mut().zip(all()) {
        let split_pitch = strip_bytes(split_blocks(columns, splits) * SPLIT_COLUMNS);
        let last = strip_bytes(columns) - (splits - 1) * split_pitch;
        let bytes = each.min(split_pitch).min(last).min(MAX_PIECE_BYTES) / ALIGNMENT * ALIGNMENT;
        // No truncation: more pieces than fit have no bytes each.
        let pieces = if bytes > 0 { pieces(rows, splits) } else { 0 };
        *read = LinearPrefetch {
            data: matrix.data,
            strip_pitch: strip_bytes(matrix.whole_columns.into()),
            split_pitch: if splits > 1 { split_pitch as u32 } else { 0 },
            splits: splits as u32,
            pieces: pieces as u32,
            bytes: bytes as u32,
        };
    }
    reads
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{BYTES, LastLaunch, NextReads, Prefetches, first_reads};
    use crate::gpu::linear::task::{LinearMatrix, strip_bytes};

    fn reads(data: u64) -> Prefetches {
        let mut reads = Prefetches::default();
        reads[0].data = data;
        reads
    }

    #[test]
    fn a_launch_prefetches_what_came_after_it_last_time() {
        let last = LastLaunch::default();
        let launches: [Arc<NextReads>; 3] = Default::default();
        let run = |at: usize| last.follow(&launches[at], reads(at as u64 + 1))[0].data;
        assert_eq!([0, 1, 2].map(run), [0, 0, 0]);
        assert_eq!([0, 1, 2].map(run), [2, 3, 1]);
        // Another one in between.
        assert_eq!([0, 2].map(run), [2, 1]);
        assert_eq!(run(0), 3);
    }

    #[test]
    fn prefetches_stay_in_their_matrix() {
        // Rows, columns of the whole and of a slice, splits.
        for (rows, whole, columns, splits) in [
            (6144, 4096, 4096, 1),
            (4096, 4096, 4096, 5),
            (33, 25_600, 25_600, 10),
            (1, 8, 8, 1),
            (1000, 4104, 4104, 7),
            (32, 8192, 4096, 2),
            (5120, 25_600, 12_800, 5),
            (1 << 26, 64, 64, 1),
            (256, 25_600, 25_600, 1),
            (32, 65_536, 65_536, 1),
        ] {
            let matrix = LinearMatrix { whole_columns: whole, ..LinearMatrix::default() };
            let read = first_reads(&[(matrix, rows)], columns, [splits].into_iter())[0];
            let (pieces, bytes) = (u64::from(read.pieces), u64::from(read.bytes));
            assert!(pieces * bytes <= BYTES && bytes % 16 == 0, "{rows} x {columns}");
            assert!(bytes < 1 << 20, "{rows} x {columns}: {bytes}");
            assert_eq!(pieces > 0, bytes > 0, "{rows} x {columns}");
            let end = (splits - 1) * u64::from(read.split_pitch) + bytes;
            assert!(end <= strip_bytes(columns), "{rows} x {columns}: {end}");
            assert_eq!(read.strip_pitch, strip_bytes(whole.into()));
        }
    }
}
