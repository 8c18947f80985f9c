//! Kernels that multiply 17 to 64 rows of x by matrices in tiles as stored, which they decode to
//! shared memory. They run only on compute capability 9.0.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use cudarc::driver::{CudaFunction, CudaStream};
use zerocopy::FromBytes;

use super::multiply::{allow_max_shared, run};
use super::split::BLOCKS;
use super::task::{STRIP_ROWS, Tile64Launch, tiles_across};
use crate::Result;
use crate::gpu::module::{Kernels, Module, config};

/// Fewest stages of decoded weights per block: one is filled while another is multiplied.
const MIN_STAGES: u32 = 2;

/// Strips per group of a matrix as stored that is multiplied by more than
/// [`ROWS`](super::task::ROWS) rows of x.
const GROUP_STRIPS: u64 = 8;
/// Tiles of each strip that a block decodes at once.
const ROUND_TILES: u64 = 2;

/// How blocks share a matrix as stored for more than [`ROWS`](super::task::ROWS) rows of x, by its
/// shape alone: `RoundSplit` of the kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounds {
    /// Number of items, each some consecutive rounds of the groups; at most
    /// [`MATRIX_COUNTERS`](super::split::MATRIX_COUNTERS).
    pub(super) items: u64,
    /// Number of places for sums that meet in memory.
    pub(super) places: u64,
}

impl Rounds {
    pub(super) const fn new(rows: u64, columns: u64) -> Self {
        let groups = rows.div_ceil(GROUP_STRIPS * STRIP_ROWS);
        let rounds = groups * tiles_across(columns).div_ceil(ROUND_TILES);
        let items = rounds.div_ceil(rounds.div_ceil(BLOCKS));
        Self { items, places: items + if groups < items { groups } else { items } }
    }

    /// Items and places of matrices together.
    pub(super) fn sum(all: impl Iterator<Item = Self>) -> Self {
        all.fold(Self { items: 0, places: 0 }, |sum, one| Self {
            items: sum.items + one.items,
            places: sum.places + one.places,
        })
    }

    /// Bytes per place, with this many rows of x.
    pub(super) const fn place_bytes(rows: u64) -> u64 {
        GROUP_STRIPS * STRIP_ROWS * TILE64_CLASSES[class_of(rows)] * 4
    }
}

/// Most rows of x of each kernel for matrices as stored, above [`ROWS`](super::task::ROWS).
pub(super) const TILE64_CLASSES: [u64; 2] = [32, 64];

/// The index in [`TILE64_CLASSES`] for a number of rows.
const fn class_of(rows: u64) -> usize {
    if rows <= TILE64_CLASSES[0] { 0 } else { 1 }
}

/// Shared memory that blocks need, in bytes, and their numbers of threads, slots and stages.
#[derive(Clone, Copy, Debug, FromBytes)]
#[repr(C)]
pub struct Tile64Demand {
    threads: u32,
    /// For every block.
    fixed: u32,
    /// Per stage, for each of [`TILE64_CLASSES`].
    stages: [u32; 2],
    /// Per row of x of the kernel.
    row: u32,
    /// Number of tiles whose bits a block holds at once.
    slots: u32,
    /// Bytes per slot, besides those bits.
    slot: u32,
    /// Most stages.
    max_stages: u32,
}

impl Tile64Demand {
    /// The number of stages and the dynamic shared memory of a block: as many stages as leave room
    /// for the largest tile, at least `MIN_STAGES`. If the largest tile then lacks room, it is
    /// read from where it lies, slowly.
    pub fn block(self, x_rows: u32, staged: u32, room: u32) -> (u32, u32) {
        let class = class_of(x_rows.into());
        let fixed = self.fixed + TILE64_CLASSES[class] as u32 * self.row;
        let with = |stages| {
            let fixed = fixed + stages * self.stages[class];
            (stages, fixed + self.slots * (self.slot + staged))
        };
        let mut all = (MIN_STAGES..=self.max_stages).rev().map(with);
        let fitting = all.find(|&(_, shared)| shared <= room);
        let (count, shared) = fitting.unwrap_or_else(|| with(MIN_STAGES));
        (count, shared.min(room))
    }
}

/// Both kernels, in one context.
#[derive(Debug)]
pub(super) struct Tile64Kernels {
    /// One for each of [`TILE64_CLASSES`].
    kernels: Vec<CudaFunction>,
    needs: Tile64Demand,
    /// Dynamic shared memory that a block may have.
    room: u32,
    processors: u32,
}

impl Tile64Kernels {
    /// `None` if this GPU's code has no such kernels.
    pub(super) fn load(
        module: &Module<'_>,
        needs: Tile64Demand,
        others: &Kernels,
    ) -> Result<Option<Self>> {
        if needs.threads == 0 {
            return Ok(None);
        }
        let kernels = TILE64_CLASSES.map(|rows| module.function(&format!("tile_{rows}")));
        let kernels = kernels.into_iter().collect::<Result<Vec<_>>>()?;
        let room = allow_max_shared(&kernels.iter().collect::<Vec<_>>(), others)?;
        Ok(Some(Self { kernels, needs, room, processors: others.processors }))
    }

    /// Puts a product on the stream: `items` items of [`Rounds`].
    ///
    /// # Safety
    /// The launch is as `kernels/linear_task.cuh` asks, with matrices in tiles as stored and at
    /// most as many rows of x as the last of [`TILE64_CLASSES`]; all that it points to lives until
    /// the kernel is done.
    pub(super) unsafe fn multiply(
        &self,
        early: bool,
        staged: u32,
        stream: &CudaStream,
        items: u64,
        mut launch: Tile64Launch,
    ) -> Result<()> {
        let (count, shared) = self.needs.block(launch.x_rows, staged, self.room);
        launch.of.stages = count;
        let blocks = items.min(self.processors.into()) as u32;
        let config = config(blocks, self.needs.threads, shared);
        let kernel = &self.kernels[class_of(launch.x_rows.into())];
        // SAFETY: the caller's promise; the kernels' constants give threads and shared memory.
        unsafe { run(kernel, early, stream, config, &launch) }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::split::MATRIX_COUNTERS, Rounds, Tile64Demand};

    #[test]
    fn blocks_have_as_many_stages_as_leave_room_for_tiles() {
        let needs = Tile64Demand {
            threads: 768,
            fixed: 17_408,
            stages: [32_768, 16_384],
            row: 1024,
            slots: 32,
            slot: 320,
            max_stages: 4,
        };
        let room = 226 << 10;
        let shape = |x_rows, bytes| needs.block(x_rows, bytes, room);
        let with = |stages: u32, stage: u32, x_rows: u32, bytes: u32| {
            17_408 + stages * stage + x_rows * 1024 + 32 * (320 + bytes)
        };
        // Common weights, and larger tiles.
        assert_eq!(shape(17, 2704), (2, with(2, 32_768, 32, 2704)));
        assert_eq!(shape(33, 2704), (3, with(3, 16_384, 64, 2704)));
        assert_eq!(shape(64, 3200), (2, with(2, 16_384, 64, 3200)));
        assert_eq!(shape(32, 1704), (3, with(3, 32_768, 32, 1704)));
        // Yet larger ones: less room than they need.
        assert_eq!(shape(64, 4096), (2, room));
    }

    #[test]
    fn rounds_are_shared_out_in_few_items() {
        for rows in (1..200_000).step_by(3001) {
            for columns in (8..40_000).step_by(1016) {
                let Rounds { items, places } = Rounds::new(rows, columns);
                let rounds = rows.div_ceil(256) * columns.div_ceil(512);
                assert!((1..=MATRIX_COUNTERS.min(rounds)).contains(&items), "{rows} x {columns}");
                assert!((items + 1..=2 * items).contains(&places), "{rows} x {columns}");
            }
        }
        let of = |rows, columns| {
            let Rounds { items, places } = Rounds::new(rows, columns);
            [items, places]
        };
        assert_eq!([of(6144, 4096), of(4096, 4096), of(32, 8)], [[96, 120], [128, 144], [1, 2]]);
        assert_eq!([of(28_672, 4096), of(4096, 14_336)], [[128, 240], [112, 128]]);
    }
}
