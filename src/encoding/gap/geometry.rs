//! How a bitstream is cut into threads and thread blocks.

use crate::constants::{
    GAP_BYTES_PER_THREAD, GAP_DEFAULT_BYTES_PER_THREAD, GAP_DEFAULT_THREADS_PER_BLOCK,
    GAP_THREADS_PER_BLOCK, GAP_THREADS_PER_BYTE,
};
use crate::{Error, Result};

/// The bitstream bytes of a thread and the threads of a thread block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    bytes_per_thread: u32,
    threads_per_block: u32,
}

impl Default for Geometry {
    fn default() -> Self {
        Self {
            bytes_per_thread: GAP_DEFAULT_BYTES_PER_THREAD,
            threads_per_block: GAP_DEFAULT_THREADS_PER_BLOCK,
        }
    }
}

impl Geometry {
    /// A geometry of 8, 16, 32 or 64 bytes a thread and 64, 128, 256, 512 or 1024 threads a thread
    /// block.
    ///
    /// # Errors
    /// [`Error::Parameter`] for any other numbers.
    pub fn new(bytes_per_thread: u32, threads_per_block: u32) -> Result<Self> {
        if GAP_BYTES_PER_THREAD.contains(&bytes_per_thread)
            && GAP_THREADS_PER_BLOCK.contains(&threads_per_block)
        {
            Ok(Self { bytes_per_thread, threads_per_block })
        } else {
            Err(Error::parameter(
                format!(
                    "no geometry has {bytes_per_thread} bytes a thread and {threads_per_block} \
                    threads a block"
                ),
                format!("choose from {GAP_BYTES_PER_THREAD:?} and {GAP_THREADS_PER_BLOCK:?}"),
            ))
        }
    }

    /// The geometry that the directory of a file states.
    ///
    /// # Errors
    /// [`Error::Parameter`] for numbers that [`new`](Self::new) refuses.
    pub fn from_parameters(bytes_per_thread: u64, threads_per_block: u64) -> Result<Self> {
        // Numbers beyond u32 are refused as 0 is.
        let narrow = |value: u64| u32::try_from(value).unwrap_or(0);
        Self::new(narrow(bytes_per_thread), narrow(threads_per_block))
    }

    /// Bitstream bytes a thread.
    pub const fn bytes_per_thread(self) -> u32 {
        self.bytes_per_thread
    }

    /// Threads a thread block.
    pub const fn threads_per_block(self) -> u32 {
        self.threads_per_block
    }

    /// Bits a thread.
    pub const fn thread_bits(self) -> u64 {
        8 * self.bytes_per_thread as u64
    }

    /// Bits a thread block.
    pub const fn thread_block_bits(self) -> u64 {
        self.thread_bits() * self.threads_per_block as u64
    }

    /// Bits of a couple: the threads whose gaps share a byte, which is what a portion owns whole.
    pub const fn couple_bits(self) -> u64 {
        GAP_THREADS_PER_BYTE * self.thread_bits()
    }

    /// The weights that an encoder must see after a portion: as many as a couple of one-bit codes
    /// holds, at most 1024.
    pub const fn lookahead(self) -> usize {
        self.couple_bits() as usize
    }
}
