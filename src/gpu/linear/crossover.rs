//! From how many rows of x on it is faster to decode a matrix to memory and multiply then with a
//! library of BLAS: measured, for each GPU that was at hand.
//!
//! The way to measure it on another one:
//!
//! ```text
//! nvcc … kernels/bench/linear_bench.cu          # as kernels/bench/README.md says
//! linear_bench crossover 5
//! ```

use super::Residence;

/// What is known of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gpu {
    /// Major and minor compute capability.
    pub(super) capability: (i32, i32),
    /// Width of its memory's bus: GPUs of one chip differ by their memory.
    pub(super) bus_bits: i32,
}

/// For matrices of each residence, the fewest rows for which decoding is faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Crossover {
    stored: u64,
    fast: u64,
}

const H100: Gpu = Gpu { capability: (9, 0), bus_bits: 5120 };
const H200: Gpu = Gpu { capability: (9, 0), bus_bits: 6144 };

const MEASURED: [(Gpu, Crossover); 2] =
    [(H100, Crossover { stored: 0, fast: 0 }), (H200, Crossover { stored: 0, fast: 0 })];

/// Of a GPU that nobody has measured, by bytes alone: decoding reads 11 or 12 bits of a weight,
/// writes 16, and a BLAS reads them again, which is as much as three launches of 16 rows and more.
const OTHERS: Crossover = Crossover { stored: 49, fast: 49 };

impl Crossover {
    pub(super) fn of(gpu: Gpu) -> Self {
        let known = MEASURED.iter().find(|&&(known, _)| known == gpu);
        known.map_or(OTHERS, |&(_, crossover)| crossover)
    }

    pub(super) fn rows(self, residence: Residence) -> u64 {
        match residence {
            Residence::Stored => self.stored,
            Residence::Fast => self.fast,
        }
    }
}
