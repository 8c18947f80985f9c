//! How the blocks of a decode kernel fill a multiprocessor: GPUs differ in shared memory, so that the number of a block's warps is
//! chosen when the kernels are loaded.

use crate::Result;

/// Threads of a warp.
pub(super) const LANES: u32 = 32;

/// What a decode kernel asks of shared memory, in bytes, and what it bears.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    /// Of a block, whatever its warps.
    pub(super) block: u32,
    pub(super) warp: u32,
    /// The most warps of a block.
    pub(super) most_warps: u32,
}

/// How a decode kernel fills a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    /// Warps of a block.
    pub(super) warps: u32,
    /// Blocks that run at once.
    pub(super) blocks: u32,
}

impl Demand {
    /// Shared memory of a block of this many warps.
    pub(super) fn with(self, warps: u32) -> u32 {
        self.block + warps * self.warp
    }

    /// The fit with most warps at once; of equal ones that with the largest blocks, which keep fewer tables. None where no warp fits.
    ///
    /// `room` is the shared memory that a block may have, `resident` tells how many blocks of so many warps a multiprocessor runs at once.
    pub(super) fn fill(self, room: u32, resident: impl Fn(u32) -> Result<u32>) -> Result<Option<Fit>> {
        let fits = (1..=self.most_warps).filter(|&warps| self.with(warps) <= room).map(|warps| {
            // A multiprocessor has as much as one block may have and 1 KiB, so that this changes nothing but for tests of a small room.
            let blocks = resident(warps)?.min(room / self.with(warps));
            Ok(Fit { warps, blocks })
        });
        let fits = fits.collect::<Result<Vec<_>>>()?;
        Ok(fits.into_iter().filter(|fit| fit.blocks > 0).max_by_key(|fit| fit.warps * fit.blocks))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{Demand, Fit, LANES};
    use crate::constants::GAP_BYTES_PER_THREAD;

    /// What kernels/build.py noted of the module that is loaded.
    fn manifest() -> Value {
        let text = include_str!("../../kernels/ptx/manifest.json");
        serde_json::from_str::<Value>(text).unwrap()["modules"]["gap.ptx"].clone()
    }

    fn number(value: &Value) -> u32 {
        value.as_u64().unwrap() as u32
    }

    /// A kind of GPU: what ptxas said of a target that its code is like, and its multiprocessor.
    struct Processor {
        target: &'static str,
        /// Shared memory that a block may have.
        room: u32,
        warps: u32,
    }

    /// How the kernels fit, by the rules of the occupancy calculator.
    fn fits(processor: &Processor) -> [Option<Fit>; GAP_BYTES_PER_THREAD.len()] {
        let manifest = manifest();
        let mut index = 4;
        GAP_BYTES_PER_THREAD.map(|bytes| {
            let taken = &manifest["resources"][processor.target][format!("df11_gap_decode_{bytes}")];
            let [warp, most_warps] = [index, index + 4].map(|at| number(&manifest["constants"][at]));
            index += 1;
            let needs = Demand { block: number(&taken["static_shared"]), warp, most_warps };
            let registers = number(&taken["registers"]).next_multiple_of(8) * LANES;
            let resident = |warps| {
                let shared = (processor.room + 1024) / (needs.with(warps) + 1024).next_multiple_of(128);
                Ok(shared.min(65_536 / (warps * registers)).min(processor.warps / warps))
            };
            needs.fill(processor.room, resident).unwrap()
        })
    }

    fn expected(fits: [(u32, u32); 4]) -> [Option<Fit>; 4] {
        fits.map(|(warps, blocks)| Some(Fit { warps, blocks }))
    }

    #[test]
    fn every_kernel_fits_every_gpu_since_ampere() {
        // Compute capability 9.0, the figures of kernels/gap.cu.
        let hopper = Processor { target: "sm_90", room: 227 << 10, warps: 64 };
        assert_eq!(fits(&hopper), expected([(16, 2), (16, 2), (12, 2), (12, 1)]));
        // 8.0.
        let ampere = Processor { target: "sm_80", room: 163 << 10, warps: 64 };
        assert_eq!(fits(&ampere), expected([(16, 2), (16, 2), (8, 2), (9, 1)]));
        // 8.6, 8.9 and 12.0.
        let consumer = Processor { target: "sm_80", room: 99 << 10, warps: 48 };
        assert_eq!(fits(&consumer), expected([(16, 2), (16, 1), (10, 1), (5, 1)]));
    }

    #[test]
    fn a_kernel_that_fits_nowhere_has_no_fit() {
        let tiny = Processor { target: "sm_80", room: 20_000, warps: 48 };
        assert_eq!(fits(&tiny), [Some(Fit { warps: 1, blocks: 1 }), None, None, None]);
    }
}
