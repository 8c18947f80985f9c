//! Fits the thread blocks of a decode kernel to a multiprocessor. GPUs differ in shared memory, so
//! the number of warps per thread block is chosen when the kernels are loaded.

use std::cmp::Reverse;

use crate::Result;

/// Threads per warp.
pub(super) const LANES: u32 = 32;

/// Shared memory that a decode kernel needs, in bytes, and its numbers of warps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    /// Bytes per thread block, for any number of warps.
    pub(super) thread_block: u32,
    pub(super) warp: u32,
    pub(super) max_warps: u32,
    /// Among equal fits, the one with about this many warps per thread block is best.
    pub(super) good_warps: u32,
}

/// How a decode kernel fills a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    pub(super) warps: u32,
    /// Thread blocks that a multiprocessor runs at once.
    pub(super) thread_blocks: u32,
    /// Dynamic shared memory per thread block, in bytes.
    pub(super) shared: u32,
}

impl Demand {
    /// Shared memory of a thread block with this many warps.
    pub(super) fn with(self, warps: u32) -> u32 {
        self.thread_block + warps * self.warp
    }

    /// Finds the fit with most warps at once; among equal ones, the one with about `good_warps` per
    /// thread block. `None` if no warp fits.
    ///
    /// `room` is the shared memory that a thread block may have. `resident` tells how many thread
    /// blocks with this many warps a multiprocessor runs at once.
    pub(super) fn fill(
        self,
        room: u32,
        resident: impl Fn(u32) -> Result<u32>,
    ) -> Result<Option<Fit>> {
        let fits = (1..=self.max_warps).filter(|&warps| self.with(warps) <= room).map(|warps| {
            // A multiprocessor has 1 KiB more than a thread block may have, so this changes nothing
            // except in tests with little room.
            let thread_blocks = resident(warps)?.min(room / self.with(warps));
            Ok(Fit { warps, thread_blocks, shared: warps * self.warp })
        });
        let fits = fits.collect::<Result<Vec<_>>>()?;
        let best = |fit: &Fit| {
            (fit.warps * fit.thread_blocks, Reverse(fit.warps.abs_diff(self.good_warps)), fit.warps)
        };
        Ok(fits.into_iter().filter(|fit| fit.thread_blocks > 0).max_by_key(best))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{Demand, LANES};
    use crate::constants::GAP_BYTES_PER_THREAD;
    use crate::gpu::module::DEMANDS;
    use crate::gpu::task::{FLOATS, KERNELS};

    /// Bytes of bitstream that the largest tile of common weights takes.
    const STAGED: u32 = 2704;

    fn number(value: &Value) -> u32 {
        value.as_u64().unwrap() as u32
    }

    /// A kind of GPU: the target of ptxas with similar code, and its multiprocessor.
    struct Processor {
        target: &'static str,
        /// Shared memory that a thread block may have.
        room: u32,
        warps: u32,
    }

    /// How a kernel fits, by the rules of the occupancy calculator.
    fn fit(
        processor: &Processor,
        taken: &Value,
        [warp, max_warps, good_warps]: [u32; 3],
    ) -> Option<(u32, u32)> {
        let needs =
            Demand { thread_block: number(&taken["static_shared"]), warp, max_warps, good_warps };
        let registers = number(&taken["registers"]).next_multiple_of(8) * LANES;
        let resident = |warps| {
            let shared = (processor.room + 1024) / (needs.with(warps) + 1024).next_multiple_of(128);
            Ok(shared.min(65_536 / (warps * registers)).min(processor.warps / warps))
        };
        needs.fill(processor.room, resident).unwrap().map(|fit| (fit.warps, fit.thread_blocks))
    }

    /// How all kernels fit, by what kernels/build.py noted of each.
    fn fits(processor: &Processor) -> [Option<(u32, u32)>; KERNELS] {
        let manifest = include_str!("../../kernels/ptx/manifest.json");
        let manifest: Value = serde_json::from_str(manifest).unwrap();
        let gap = GAP_BYTES_PER_THREAD.map(|bytes| ("gap", format!("decode_{bytes}"), 0));
        let floats = FLOATS.map(|(_, name)| ("float", format!("decode_{name}"), STAGED));
        let all = gap.into_iter().chain([("tile", "decode".to_owned(), STAGED)]).chain(floats);
        let fits = all.zip(DEMANDS).map(|((module, kernel, staged), [warp, most, good])| {
            let resources = &manifest["modules"][format!("{module}.ptx")]["resources"];
            let taken = &resources[processor.target][format!("df11_{module}_{kernel}")];
            fit(processor, taken, [warp + staged, most, good])
        });
        fits.collect::<Vec<_>>().try_into().unwrap()
    }

    #[test]
    fn every_kernel_fits_every_gpu_since_ampere() {
        // Fits of the kernels of `gap`, of `tile`, and of F32 with more than 8 kept bits; the other
        // floats fit like `tile`.
        let check =
            |processor: &Processor, [gap @ .., tile, wide]: [(u32, u32); 6]| {
                let floats = FLOATS.map(|(split, _)| {
                    if split.bytes() == 4 && split.kept_bits() > 8 { wide } else { tile }
                });
                let expected = gap.into_iter().chain([tile]).chain(floats).map(Some);
                assert_eq!(fits(processor).to_vec(), expected.collect::<Vec<_>>());
            };
        // Compute capability 9.0, the figures of kernels/*.cu.
        let hopper = Processor { target: "sm_90", room: 227 << 10, warps: 64 };
        check(&hopper, [(16, 2), (16, 2), (12, 2), (12, 1), (8, 3), (7, 3)]);
        // 8.0.
        let ampere = Processor { target: "sm_80", room: 163 << 10, warps: 64 };
        check(&ampere, [(16, 2), (16, 2), (8, 2), (9, 1), (12, 2), (7, 3)]);
        // 8.6, 8.9 and 12.0.
        let consumer = Processor { target: "sm_80", room: 99 << 10, warps: 48 };
        check(&consumer, [(16, 2), (16, 1), (10, 1), (5, 1), (24, 1), (20, 1)]);
    }

    #[test]
    fn a_kernel_that_fits_nowhere_has_no_fit() {
        let tiny = Processor { target: "sm_80", room: 20_000, warps: 48 };
        let mut expected = [None; KERNELS];
        expected[0] = Some((1, 1));
        assert_eq!(fits(&tiny), expected);
    }
}
