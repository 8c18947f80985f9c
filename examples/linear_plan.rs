//! The planner of products as a library for C, which `kernels/bench/linear_bench.cu` links:
//! `cargo build --release --no-default-features --features cuda --example linear_plan`.
//! `kernels/bench/linear_host.hpp` declares these functions and structures.
#![expect(unsafe_code, reason = "functions that C++ finds by their names")]

use df11::hazmat::gpu::{BandPlan, BlockShape, BlockWork, Split, Tile2, Tile64Demand, TileDemand};

/// A product by matrices in the fast layout, and the GPU's multiprocessors.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BandProduct {
    rows: [u32; 8],
    splits: [u32; 8],
    matrices: u32,
    columns: u32,
    x_rows: u32,
    processors: u32,
}

/// A product by matrices as stored; `staged`: most bytes of bitstream that a tile takes; `room`:
/// bytes of dynamic shared memory.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TileProduct {
    x_rows: u32,
    columns: u32,
    staged: u32,
    room: u32,
}

/// A block, and 1 if its kernel is `tile_2`.
#[repr(C)]
pub struct TilePlan {
    is_tile_2: u32,
    shape: BlockShape,
}

/// Stages and bytes of shared memory of a block.
#[repr(C)]
pub struct Tile64Plan {
    stages: u32,
    shared: u32,
}

/// How blocks share a matrix for up to 16 rows of x: as items, some of them slices of strips.
#[repr(C)]
pub struct ItemsPlan {
    whole_strips: u32,
    slices: u32,
    items: u32,
    partials: u32,
}

/// Plans 17 or more rows by the fast layout.
// SAFETY: no other function has this name, nor one of those below.
#[unsafe(no_mangle)]
pub extern "C" fn df11_plan_bands(product: BandProduct) -> BandPlan {
    let wishes = product.rows.into_iter().zip(product.splits).take(product.matrices as usize);
    let wishes = wishes.map(|(rows, splits)| (rows.into(), splits.into()));
    BandPlan::new(wishes, product.columns.into(), product.x_rows.into(), product.processors.into())
}

/// Plans up to 16 rows.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn df11_plan_items(rows: u32, columns: u32) -> ItemsPlan {
    let split = Split::new(rows.into(), columns.into());
    ItemsPlan {
        whole_strips: split.whole_strips as u32,
        slices: split.slices as u32,
        items: split.items() as u32,
        partials: split.partials() as u32,
    }
}

/// Plans blocks for up to 16 rows by matrices as stored; no warps if they do not fit.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn df11_plan_tile(
    needs: TileDemand,
    tile_2: Tile2,
    work: BlockWork,
    product: TileProduct,
) -> TilePlan {
    let TileProduct { x_rows, columns, staged, room } = product;
    let plan = needs.plan(Some(tile_2), (x_rows, columns), staged, work, room);
    let none = BlockShape { warps: 0, tables: 0, sets: 0, shared: 0, slot: 0 };
    let (is_tile_2, shape) = plan.unwrap_or((false, none));
    TilePlan { is_tile_2: is_tile_2.into(), shape }
}

/// Plans blocks for more rows by matrices as stored.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn df11_plan_tile_64(needs: Tile64Demand, product: TileProduct) -> Tile64Plan {
    let (stages, shared) = needs.block(product.x_rows, product.staged, product.room);
    Tile64Plan { stages, shared }
}
