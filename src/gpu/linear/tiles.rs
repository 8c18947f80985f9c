//! Kernels that multiply by matrices in tiles as stored, and gather their rows.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use cudarc::driver::{CudaFunction, CudaStream};
use zerocopy::FromBytes;

use super::multiply::{allow_max_shared, run};
use super::task::{ROWS, ROWS_8, Tile16, Tile16Launch};
use crate::Result;
use crate::gpu::fit::LANES;
use crate::gpu::module::{Kernels, Module, config};

/// Decoding warps come in groups of this size, which exchange registers with the others. With less
/// than one group memory is idle, so stages rather hold less than some tiles have.
const WARP_GROUP: u32 = 4;
/// Fewest bytes of a tile's bits that a stage holds, if the tile has as many: most of a common
/// tile.
const MIN_STAGE_BYTES: u32 = 2048;
/// The stages of a block together take a multiple of this many bytes.
const STAGE_UNIT: u32 = 16;

/// The kernel `tile_2`, for one or two rows of x; its blocks hold all of x in shared memory.
#[derive(Clone, Copy, Debug, FromBytes)]
#[repr(C)]
pub struct Tile2 {
    /// Most warps that decode; 0 if there is no such kernel.
    warps: u32,
    /// Most rows of x.
    rows: u32,
    /// A row of x takes a multiple of `unit` bytes, and `after` more.
    unit: u32,
    after: u32,
}

impl Tile2 {
    /// Bytes of x; `None` if there are more rows than the kernel takes, or x takes too much.
    fn bytes(self, x_rows: u32, columns: u32) -> Option<u32> {
        (x_rows <= self.rows).then_some(())?;
        let row = columns.checked_mul(2)?.checked_next_multiple_of(self.unit)?;
        row.checked_add(self.after)?.checked_mul(x_rows)
    }

    /// Returns the block if it has room for all warps and the largest tile; otherwise others are
    /// faster.
    fn shape(
        self,
        needs: TileDemand,
        x_rows: u32,
        columns: u32,
        staged: u32,
        work: BlockWork,
        room: u32,
    ) -> Option<BlockShape> {
        let bytes = self.bytes(x_rows, columns)?;
        let needs = TileDemand { max_warps: self.warps, ..needs };
        let shape = needs.shape(x_rows, staged, work, room.checked_sub(bytes)?)?;
        (shape.warps == self.warps && needs.holds(shape, x_rows, staged))
            .then_some(BlockShape { shared: shape.shared + bytes, ..shape })
    }
}

/// Shared memory that blocks need, in bytes, and their numbers of warps, stages and tables.
#[derive(Clone, Copy, Debug, FromBytes)]
#[repr(C)]
pub struct TileDemand {
    /// Warps that bring tiles to the others and add their sums.
    helpers: u32,
    /// Most warps that decode.
    max_warps: u32,
    table: u32,
    /// Bytes per row of x, and per item whose sums are in flight at once.
    row: u32,
    /// Bytes per warp, besides the bits of tiles.
    warp: u32,
    /// Number of tiles whose bits a warp holds at once.
    stages: u32,
    /// Most items whose sums are in flight at once.
    max_sets: u32,
    /// Additional bytes per warp, with more than [`ROWS_8`] rows of x.
    max_warp: u32,
    /// Most decode tables at once.
    max_tables: u32,
}

/// Most items and matrices that a block of a launch has.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BlockWork {
    /// Number of items.
    pub items: u32,
    /// Number of matrices.
    pub matrices: u32,
}

/// How a block multiplies by matrices as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct BlockShape {
    /// Warps that decode.
    pub warps: u32,
    /// Decode tables at once.
    pub tables: u32,
    /// Items whose sums are in flight at once.
    pub sets: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Bytes of `shared` for each of a warp's stages.
    pub slot: u32,
}

impl TileDemand {
    /// The block for some rows of x, in so much shared memory, and whether its kernel is `tile_2`.
    /// `staged`: most bytes of bitstream that a tile takes. `None` if common tiles do not fit.
    pub fn plan(
        self,
        tile_2: Option<Tile2>,
        (x_rows, columns): (u32, u32),
        staged: u32,
        work: BlockWork,
        room: u32,
    ) -> Option<(bool, BlockShape)> {
        let tile_2 = tile_2.filter(|tile_2| tile_2.warps > 0);
        let tile_2 =
            tile_2.and_then(|tile_2| tile_2.shape(self, x_rows, columns, staged, work, room));
        let others = || Some((false, self.shape(x_rows, staged, work, room)?));
        tile_2.map(|shape| (true, shape)).or_else(others)
    }

    /// Keeps sums of several items in flight, so that warps need not wait for each other, and
    /// tables of several matrices, so that no warp waits for one, unless warps or stages would have
    /// less room. `None` if common tiles do not fit.
    fn shape(self, x_rows: u32, staged: u32, work: BlockWork, room: u32) -> Option<BlockShape> {
        let one = self.shape_of((1, 1), x_rows, staged, room)?;
        let or = |other: BlockShape, tables, sets| {
            let shape = self.shape_of((tables, sets), x_rows, staged, room);
            let holds = |shape: &BlockShape| self.holds(*shape, x_rows, staged);
            shape.filter(|shape| shape.warps == one.warps && holds(shape)).unwrap_or(other)
        };
        let with_sets = |shape: BlockShape| or(shape, shape.tables, self.max_sets.min(work.items));
        let with_tables = |shape: BlockShape| {
            // A power of two, as the kernels require.
            let wanted = self.max_tables.min(work.matrices).min(work.items).next_power_of_two();
            let two = or(shape, wanted.min(2), shape.sets);
            or(two, wanted, shape.sets)
        };
        // With one table, an item of another matrix waits for the item before it; if every item has
        // another matrix, more sums are useless.
        let tables_first = work.items <= work.matrices;
        Some(if tables_first { with_sets(with_tables(one)) } else { with_tables(with_sets(one)) })
    }

    /// Fits as many warps as possible into `room`. Stages may be smaller than the largest tile: the
    /// rest is then read from where it lies, slowly. `None` if stages were too small for common
    /// tiles.
    fn shape_of(self, most: (u32, u32), x_rows: u32, staged: u32, room: u32) -> Option<BlockShape> {
        let (tables, sets) = most;
        let fixed = self.fixed(tables, sets, x_rows);
        let free = room.checked_sub(fixed)? / STAGE_UNIT * STAGE_UNIT;
        let each = self.of_warp(x_rows, staged);
        let warps = (free / each / WARP_GROUP * WARP_GROUP).clamp(WARP_GROUP, self.max_warps);
        let left = free.min(warps * each);
        let slot = (left / warps).saturating_sub(self.x_of_warp(x_rows)) / self.stages / 16 * 16;
        let least = self.of_warp(x_rows, staged.min(MIN_STAGE_BYTES));
        let shape = BlockShape { warps, tables, sets, shared: fixed + left, slot };
        (free >= warps * least).then_some(shape)
    }

    /// Whether stages hold the largest tile.
    fn holds(self, shape: BlockShape, x_rows: u32, staged: u32) -> bool {
        let BlockShape { warps, tables, sets, shared, .. } = shape;
        shared == self.fixed(tables, sets, x_rows) + warps * self.of_warp(x_rows, staged)
    }

    fn fixed(self, tables: u32, sets: u32, x_rows: u32) -> u32 {
        tables * self.table + sets * self.row * x_rows
    }

    /// Bytes of a warp whose stages have this many bytes each.
    fn of_warp(self, x_rows: u32, bytes: u32) -> u32 {
        self.warp + self.x_of_warp(x_rows) + self.stages * bytes
    }

    /// Bytes of x that a warp has in shared memory.
    fn x_of_warp(self, x_rows: u32) -> u32 {
        if u64::from(x_rows) <= ROWS_8 { 0 } else { self.max_warp }
    }
}

/// All kernels for tiles, in one context.
#[derive(Debug)]
pub(super) struct TileKernels {
    tile_2: Option<(CudaFunction, Tile2)>,
    tile_8: CudaFunction,
    tile_16: CudaFunction,
    pub(super) gather: CudaFunction,
    needs: TileDemand,
    /// Dynamic shared memory that a block may have.
    room: u32,
    pub(super) processors: u32,
}

impl TileKernels {
    pub(super) fn load(
        module: &Module<'_>,
        needs: TileDemand,
        tile_2: Tile2,
        others: &Kernels,
    ) -> Result<Self> {
        let [tile_8, tile_16] = [module.function("tile_8")?, module.function("tile_16")?];
        let gather = module.function("tile_gather")?;
        let of_tile_2 = (tile_2.warps > 0).then(|| module.function("tile_2")).transpose()?;
        let all: Vec<&CudaFunction> = [&tile_8, &tile_16].into_iter().chain(&of_tile_2).collect();
        let room = allow_max_shared(&all, others)?;
        let tile_2 = of_tile_2.map(|function| (function, tile_2));
        Ok(Self { tile_2, tile_8, tile_16, gather, needs, room, processors: others.processors })
    }

    /// The most rows of x at once: fewer than [`ROWS`] if blocks have little shared memory, 0 if
    /// they have too little.
    pub(super) fn max_rows(&self, staged: u32) -> u64 {
        let one = BlockWork { items: 1, matrices: 1 };
        let fits = |&rows: &u64| self.needs.shape(rows as u32, staged, one, self.room).is_some();
        (1..=ROWS).take_while(fits).last().unwrap_or(0)
    }

    /// Puts a product on the stream.
    ///
    /// # Safety
    /// The launch is as `kernels/linear_task.cuh` asks, with matrices in tiles as stored and 1 to
    /// [`max_rows`](Self::max_rows) rows of x; all that it points to lives until the kernel is
    /// done.
    pub(super) unsafe fn multiply(
        &self,
        early: bool,
        staged: u32,
        stream: &CudaStream,
        mut launch: Tile16Launch,
    ) -> Result<()> {
        let Tile16Launch { x_rows, columns, matrix_count: matrices, .. } = launch;
        let items = launch.of.items;
        let (needs, room) = (self.needs, self.room);
        let work = BlockWork { items: items.div_ceil(self.processors), matrices };
        let tile_2 = self.tile_2.as_ref();
        let demand = tile_2.map(|&(_, demand)| demand);
        let plan = needs.plan(demand, (x_rows, columns), staged, work, room);
        let (is_tile_2, shape) = plan.expect("max_rows says how many rows fit");
        let function = match tile_2.filter(|_| is_tile_2) {
            Some((function, _)) => function,
            None if u64::from(x_rows) <= ROWS_8 => &self.tile_8,
            None => &self.tile_16,
        };
        let BlockShape { tables, sets, slot: slot_bytes, .. } = shape;
        launch.of = Tile16 { sets, tables, slot_bytes, ..launch.of };
        let threads = (needs.helpers + shape.warps) * LANES;
        let config = config(items.min(self.processors), threads, shape.shared);
        // SAFETY: the caller's promise; the kernels' constants give threads and shared memory.
        unsafe { run(function, early, stream, config, &launch) }
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockWork, Tile2, TileDemand};

    const NEEDS: TileDemand = TileDemand {
        helpers: 4,
        max_warps: 16,
        table: 16_384,
        row: 2048,
        warp: 640,
        stages: 2,
        max_sets: 2,
        max_warp: 3072,
        max_tables: 4,
    };

    #[test]
    fn one_or_two_rows_of_x_are_in_shared_memory_if_there_is_room() {
        let tile_2 = Tile2 { warps: 20, rows: 2, unit: 128, after: 64 };
        let shape = |tile_2: Tile2, x_rows, columns, bytes, room| {
            let work = BlockWork { items: 7, matrices: 1 };
            let shape = tile_2.shape(NEEDS, x_rows, columns, bytes, work, room)?;
            Some((shape.warps, shape.sets, shape.shared))
        };
        let (room, warp) = (226 << 10, 640 + 2 * 2704);
        let of =
            |x_rows, x: u32| Some((20, 2, 16_384 + x_rows * 2 * 2048 + 20 * warp + x_rows * x));
        assert_eq!(shape(tile_2, 1, 4096, 2704, room), of(1, 8192 + 64));
        assert_eq!(shape(tile_2, 2, 4096, 2704, room), of(2, 8192 + 64));
        // A row of 8 columns takes 128 bytes and 64.
        assert_eq!(shape(tile_2, 1, 4104, 2704, room), of(1, 8192 + 128 + 64));
        // More rows than it takes; x or tiles for which there is no room.
        assert_eq!(shape(tile_2, 3, 4096, 2704, room), None);
        assert_eq!(shape(tile_2, 2, 28_672, 2704, room), None);
        assert_eq!(shape(tile_2, 1, u32::MAX, 2704, room), None);
        assert_eq!(shape(tile_2, 1, 4096, 8192, room), None);
        assert_eq!(shape(tile_2, 1, 4096, 2704, 98 << 10), None);
    }

    #[test]
    fn blocks_have_as_many_warps_as_fit() {
        let needs = NEEDS;
        let shape_of = |needs: TileDemand, x_rows, bytes, items, room| {
            let shape = needs.shape(x_rows, bytes, BlockWork { items, matrices: 1 }, room)?;
            assert_eq!(shape.tables, 1);
            Some((shape.warps, shape.sets, shape.shared))
        };
        let shape = |x_rows, bytes, items| shape_of(needs, x_rows, bytes, items, 226 << 10);
        // Common weights, compute capability 9.0.
        let (table, warp) = (16_384, 640 + 2 * 2704);
        assert_eq!(shape(8, 2704, 7), Some((16, 2, table + 32_768 + 16 * warp)));
        assert_eq!(shape(16, 2704, 7), Some((16, 2, table + 65_536 + 16 * (3072 + warp))));
        // Blocks of one item; larger tiles: sums of one item; yet larger ones: fewer warps.
        assert_eq!(shape(16, 2704, 1), Some((16, 1, table + 32_768 + 16 * (3072 + warp))));
        assert_eq!(shape(16, 3840, 7), Some((16, 1, table + 32_768 + 16 * (3712 + 2 * 3840))));
        assert_eq!(shape(16, 4096, 7), Some((12, 2, table + 65_536 + 12 * (3712 + 2 * 4096))));
        // Several matrices: as many tables as fit, if blocks have several items.
        let tables = |x_rows, items, matrices| {
            let work = BlockWork { items, matrices };
            let shape = needs.shape(x_rows, 2704, work, 226 << 10).expect("there is room");
            (shape.tables, shape.sets, shape.shared)
        };
        assert_eq!(tables(8, 7, 3), (4, 2, 4 * table + 32_768 + 16 * warp));
        assert_eq!(tables(8, 7, 2), (2, 2, 2 * table + 32_768 + 16 * warp));
        assert_eq!(tables(8, 1, 3), (1, 1, table + 16_384 + 16 * warp));
        // Room for either: sums, unless each item has another matrix.
        assert_eq!(tables(16, 7, 2), (1, 2, table + 65_536 + 16 * (3072 + warp)));
        assert_eq!(tables(16, 3, 3), (2, 1, 2 * table + 32_768 + 16 * (3072 + warp)));
        // Less shared memory, as compute capability 8.6 has it.
        let (needs, room) = (TileDemand { max_warps: 12, max_warp: 0, ..needs }, 98 << 10);
        let shape = |x_rows, bytes| shape_of(needs, x_rows, bytes, 7, room);
        assert_eq!(shape(1, 2704), Some((12, 2, table + 4096 + 12 * warp)));
        assert_eq!(shape(16, 2704), Some((8, 1, table + 32_768 + 8 * warp)));
        // Four warps, with stages that hold less than the largest tiles.
        assert_eq!(shape(8, 14_864), Some((4, 1, room)));
        // Too many rows for so little.
        assert_eq!(shape(40, 2704), None);
    }
}
