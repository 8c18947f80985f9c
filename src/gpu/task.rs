//! What the host hands to the kernels: the mirror of `kernels/gap_task.cuh`. Sizes are compared with the kernels' when they are loaded.

use zerocopy::{Immutable, IntoBytes};

/// One tensor, or a range of its elements, to decode. Pointers are device addresses.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct GapTask {
    pub(super) gaps: u64,
    pub(super) output_offsets: u64,
    pub(super) bitstream: u64,
    pub(super) plane: u64,
    pub(super) table: u64,
    /// Of `element_begin`, counted from the launch's output.
    pub(super) output: u64,
    pub(super) elements: u64,
    pub(super) bit_count: u64,
    pub(super) element_begin: u64,
    pub(super) element_end: u64,
    pub(super) first_thread_block: u64,
    pub(super) thread_blocks: u64,
    pub(super) first_unit: u64,
    pub(super) threads_per_block: u32,
    pub(super) reserved: u32,
    pub(super) reserved2: [u64; 2],
}

/// Where the code lengths of a tensor are and where its decode table goes.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct GapTableTask {
    pub(super) lengths: u64,
    pub(super) table: u64,
}

/// Bytes of a decode table.
pub(super) const TABLE_BYTES: u64 = 16_880;

/// The bits of the status word, with what they say.
pub(super) const PROBLEMS: [(u32, &str); 4] = [
    (1, "bits that are no code"),
    (2, "a thread that does not end where the next one starts"),
    (4, "a thread block with another number of codes than its output offsets say"),
    (8, "output offsets that do not hold the elements asked for"),
];
