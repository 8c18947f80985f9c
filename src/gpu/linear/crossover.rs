//! From how many rows of x on it is faster to decode a matrix to memory and multiply then with a
//! library of BLAS, for each GPU that was at hand.
//!
//! The way to measure it, on these and others:
//!
//! ```text
//! nvcc … kernels/bench/linear_bench.cu          # as kernels/bench/README.md says
//! linear_bench crossover 5
//! ```

use cudarc::driver::{CudaContext, sys::CUdevice_attribute as Attribute};

use crate::Result;
use crate::gpu::fault::OrFault;

/// A GPU: its compute capability, major and minor, and the width of its memory's bus in bits. GPUs
/// of one chip differ by their memory.
type Gpu = ((i32, i32), i32);

const H100: Gpu = ((9, 0), 5120);
/// The driver counts these of the 6,144 bits of its six stacks.
const H200: Gpu = ((9, 0), 6016);

/// Put together from times in `benches/record/` (2026-11-22-linear-*, 2026-11-23-linear*,
/// *tile-kernel*, *residence*), for the four matrices there: those of our products and of
/// cuBLASLt's, and of decoding. In microseconds:
///
/// ```text
/// rows of x              16     32     64    128    256    512      decode, then cuBLASLt
/// H200, stored          172    180    211                            204 + 118
/// H200, fast             99    103    110    134    207    365       248 + 303 for 512 rows
/// H100, stored          174    188    218                            300 + 164
/// H100, fast            121    132    136    148    208    358       327 + 300 for 512 rows
/// ```
///
/// As stored a launch takes 64 rows. Two of them take 436 on the H100, and in a decode step more
/// than decoding first: with 128 rows 0.385 of BF16's speed instead of 0.525; on the H200 they take
/// more than decoding and cuBLASLt. So one launch is the most, on any GPU.
///
/// With the fast layout a launch takes 2048 rows. On the H200 1024 take 675, and 844 decoded; each
/// 512 more take 310 and 298, so that 2048 are still faster, too. On the H100 1024 take 685, and
/// 931 decoded; 2048 take 1345 and 1580
/// (`benches/record/2026-11-26-exact-order-wide.md`).
const KNOWN: [(Gpu, [u64; 2]); 2] = [(H100, [65, 2049]), (H200, [65, 2049])];

/// Estimates for a GPU that nobody has measured, by bytes alone: decoding reads 11 or 12 bits of a
/// weight, writes 16, and a BLAS reads them again, which is as much as three launches of 16 rows
/// and more.
const OTHERS: [u64; 2] = [49; 2];

/// The fewest rows of x for which decoding is faster on this GPU: of matrices as stored, and in the
/// fast layout.
pub(super) fn crossover(context: &CudaContext) -> Result<[u64; 2]> {
    let action = "asking for a GPU's properties";
    let capability = context.compute_capability().or_fault(action)?;
    let bus = Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH;
    let gpu = (capability, context.attribute(bus).or_fault(action)?);
    let known = KNOWN.iter().find(|&&(known, _)| known == gpu);
    Ok(known.map_or(OTHERS, |&(_, crossover)| crossover))
}

#[cfg(test)]
mod tests {
    use super::{KNOWN, OTHERS};
    use crate::gpu::linear::decoded::DECODED_CLASSES;
    use crate::gpu::linear::many::MANY_ROWS;

    /// More rows are several launches, each of which decodes all weights again.
    #[test]
    fn no_more_rows_than_a_launch_takes_are_multiplied_without_decoding() {
        let stored = DECODED_CLASSES[DECODED_CLASSES.len() - 1];
        for [stored_rows, fast_rows] in KNOWN.map(|(_, rows)| rows).into_iter().chain([OTHERS]) {
            assert!(stored_rows <= stored + 1, "{stored_rows} rows as stored");
            assert!(fast_rows <= MANY_ROWS + 1, "{fast_rows} rows in the fast layout");
        }
    }
}
