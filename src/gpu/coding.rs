//! The encodings that kernels decode, by number: which decode tables they take, and which kernels.

use crate::{Encoding, constants::GAP_BYTES_PER_THREAD};

/// An encoding with kernels of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum KernelEncoding {
    Gap,
    Tile,
}

/// All of them.
pub(super) const CODINGS: [KernelEncoding; 2] = [KernelEncoding::Gap, KernelEncoding::Tile];

/// Decode kernels: those of `gap`, one for each number of bytes a thread, then that of `tile`.
pub(super) const KERNELS: usize = TILE_KERNEL + 1;
/// The number of the decode kernel of `tile`.
pub(super) const TILE_KERNEL: usize = GAP_BYTES_PER_THREAD.len();

impl KernelEncoding {
    /// `None` for tensors that no kernel decodes.
    pub(super) fn of(encoding: Encoding) -> Option<Self> {
        match encoding {
            Encoding::Gap => Some(Self::Gap),
            Encoding::Tile => Some(Self::Tile),
            _ => None,
        }
    }

    /// Bytes of a decode table, a multiple of 16.
    pub(super) const fn table_bytes(self) -> u64 {
        match self {
            Self::Gap => 16_880,
            Self::Tile => 16_384,
        }
    }
}
