//! For each GPU that was measured: the number of rows of x from which it is faster to decode a
//! matrix to memory and then multiply with a BLAS library.
//!
//! These commands measure them, on these and other GPUs:
//!
//! ```text
//! nvcc … kernels/bench/linear_bench.cu          # as kernels/bench/README.md says
//! linear_bench crossover 5
//! ```

use cudarc::driver::{CudaContext, sys::CUdevice_attribute as Attribute};

use crate::Result;
use crate::gpu::fault::OrFault;

/// A GPU: its compute capability, major and minor, and the width of its memory bus in bits. GPUs
/// with the same chip differ in memory.
type Gpu = ((i32, i32), i32);

const H100: Gpu = ((9, 0), 5120);
/// The driver counts these of its six stacks' 6,144 bits.
const H200: Gpu = ((9, 0), 6016);

/// Based on times in `benches/record/` (2026-11-22-linear-*, 2026-11-23-linear*, *tile-kernel*,
/// *residence*) for the four matrices there: of our products, of cuBLASLt's, and of decoding. In
/// microseconds:
///
/// ```text
/// rows of x              16     32     64    128    256    512      decode, then cuBLASLt
/// H200, stored          172    180    211                            204 + 118
/// H200, fast             99    103    110    134    207    365       248 + 303 for 512 rows
/// H100, stored          174    188    218                            300 + 164
/// H100, fast            121    132    136    148    208    358       327 + 300 for 512 rows
/// ```
///
/// As stored, a launch takes 64 rows. On the H100 two of them take 436, and more than decoding
/// first in a decode step: with 128 rows, 0.385 of BF16's speed instead of 0.525. On the H200 they
/// take more than decoding and cuBLASLt. So on any GPU one launch is the limit.
///
/// In the fast layout a launch takes 3072 rows, and more rows take several. On the H100 3072 rows
/// take 2021, and 2420 decoded. Decoding first takes 3044 with 4096 rows, 3415 with 4608, 4329 with
/// 6144, 5678 with 8192 (`benches/record/2026-11-28-many-rows-h100.md`). By the times of single
/// launches, 1342 with 2048 rows there and 622 with 1024 (2026-11-26-exact-order-wide.md), several
/// take 2643, at most 3363, 4042 and 5384. Launches were not timed one after the other, and more
/// rows not at all. On the H200 3072 rows take 2174, and 2355 decoded; 4096 take 2925 and 3035, but
/// FLUX.1's six matrices 3223 and 3190 (`benches/record/2026-11-29-many-rows-h200.md`).
const KNOWN: [(Gpu, [u64; 2]); 2] = [(H100, [65, 8193]), (H200, [65, 3073])];

/// Estimates by bytes alone for a GPU that nobody has measured: decoding reads 11 or 12 bits per
/// weight and writes 16, and BLAS reads these again, which costs as much as three launches of 16
/// rows or more.
const OTHERS: [u64; 2] = [49; 2];

/// The fewest rows of x for which decoding is faster on this GPU: for matrices as stored, and for
/// those in the fast layout.
pub(super) fn crossover(context: &CudaContext) -> Result<[u64; 2]> {
    let action = "asking for a GPU's properties";
    let capability = context.compute_capability().or_fault(action)?;
    let bus = Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH;
    let gpu = (capability, context.attribute(bus).or_fault(action)?);
    let known = KNOWN.iter().find(|&&(known, _)| known == gpu);
    Ok(known.map_or(OTHERS, |&(_, crossover)| crossover))
}

/// One of this many weights may be an exception without an effect on the choice.
const FEW: u64 = 4096;

/// The fewest rows of x for which decoding is faster, `rows` without exceptions, for a matrix in
/// the fast layout. Each exception costs a product time for each band of rows of x, and decoding
/// costs it once. On an H200, decoding is faster from some 500 rows on with one exception for 2,048
/// weights, from 250 with one for 1,024, and from 120 with one for 512
/// (`benches/record/2026-11-30-exceptions-h200.md`).
pub(super) fn with_exceptions(rows: u64, weights: u64, exceptions: u64) -> u64 {
    if exceptions <= weights / FEW {
        return rows;
    }
    rows.min(weights / exceptions / 4).max(1)
}

#[cfg(test)]
mod tests {
    use super::{KNOWN, OTHERS, with_exceptions};
    use crate::gpu::linear::tile64::TILE64_CLASSES;

    /// As stored, more rows take several launches, each of which decodes all weights again.
    #[test]
    fn no_more_rows_than_a_launch_takes_are_multiplied_as_stored() {
        let most = TILE64_CLASSES[TILE64_CLASSES.len() - 1];
        for [rows, _] in KNOWN.map(|(_, rows)| rows).into_iter().chain([OTHERS]) {
            assert!(rows <= most + 1, "{rows} rows as stored");
        }
    }

    #[test]
    fn more_exceptions_are_decoded_from_fewer_rows_on() {
        const WEIGHTS: u64 = 4096 * 4096;
        let of = |every: u64| with_exceptions(3073, WEIGHTS, WEIGHTS / every);
        assert_eq!([16_384, 4096, 4095, 1024, 256].map(of), [3073, 3073, 1023, 256, 64]);
        assert_eq!(with_exceptions(3073, WEIGHTS, WEIGHTS), 1);
    }
}
