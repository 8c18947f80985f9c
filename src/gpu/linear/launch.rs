//! What one kernel multiplies by: up to eight matrices of one residence.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::{
    LinearInput, LinearOutput, Matrix, Residence,
    decoded::Rounds,
    kernels::LinearKernels,
    map::map_of,
    split::{
        Bands, COUNTERS, LARGE_PARTIAL_BYTES, Large, MATRIX_COUNTERS, Split, WIDE_CLASSES, Wide,
    },
    task::{LinearLaunch, LinearMatrix, MATRICES, PARTIAL_BYTES, ROWS},
    tiles::Staged,
};
use crate::{Result, gpu::Status};

/// Bytes of counters, with which a workspace begins: the same for all products, so that they can
/// share one.
const COUNTER_BYTES: u64 = (4 * COUNTERS).next_multiple_of(256);

/// The most rows of x that are multiplied without [`Large`] launches.
const WIDE_ROWS: u64 = WIDE_CLASSES[WIDE_CLASSES.len() - 1];

#[derive(Debug)]
pub(super) struct Launch {
    /// The most rows of x at once.
    most_rows: u64,
    /// Of matrices as stored.
    staged: Option<Staged>,
    /// Which of the matrices, in the order of the launch.
    order: Vec<usize>,
    /// Without what a call brings; `counters` counts from the workspace, modulo 2^64.
    arguments: LinearLaunch,
    /// Items whose sums meet in the workspace.
    partials: u64,
    /// Clusters for more than [`ROWS`] rows of x.
    wide_items: u64,
    /// Items for more than [`ROWS`] rows of x by matrices as stored, and places for their sums.
    rounds: Rounds,
    /// Rows of each matrix, in the order of the launch.
    rows: Vec<u64>,
}

impl Launch {
    /// As many as these matrices need.
    pub(super) fn all(kernels: &LinearKernels, matrices: &[Matrix]) -> Vec<Self> {
        let mut launches = Vec::new();
        for residence in [Residence::Stored, Residence::Fast] {
            let all = (0..matrices.len()).filter(|&at| matrices[at].residence() == residence);
            for order in all.collect::<Vec<_>>().chunks(MATRICES) {
                launches.push(Self::new(kernels, order, matrices));
            }
        }
        launches
    }

    fn new(kernels: &LinearKernels, order: &[usize], matrices: &[Matrix]) -> Self {
        let largest = order.iter().filter_map(|&at| matrices[at].staged_bytes()).max();
        let staged = largest.map(Staged);
        let most_rows = kernels.most_rows(staged);
        let shape = |at: usize| (matrices[at].row_count(), matrices[at].column_count());
        let split = |at: usize| Split::new(shape(at).0, shape(at).1);
        // Kernels number the counters by strips, and use those of tails alone: numbers start so far
        // before the workspace that the tail of each matrix has its counters there.
        let before = order.iter().map(|&at| split(at).whole_strips).max().unwrap_or(0);
        let rows: Vec<_> = order.iter().map(|&at| shape(at).0).collect();
        let wide = Wide::new(&rows, shape(order[0]).1, kernels.processors());
        let mut arguments = LinearLaunch {
            wide_parts: wide.parts,
            wide_strips: wide.strips as u32,
            columns: matrices[order[0]].column_count() as u32,
            matrix_count: order.len() as u32,
            counters: (4 * before).wrapping_neg(),
            ..LinearLaunch::default()
        };
        let (mut partials, mut rounds) = (0, Rounds { items: 0, places: 0 });
        for ((number, task), &at) in (0..).zip(&mut arguments.matrices).zip(order) {
            let split = split(at);
            // No overflow: a matrix has at most 2^27 strips, and few more items.
            *task = LinearMatrix {
                whole_strips: split.whole_strips as u32,
                slices: split.slices as u32,
                first_item: arguments.items,
                first_strip: (before - split.whole_strips + number * MATRIX_COUNTERS) as u32,
                first_partial: partials as u32,
                ..matrices[at].task()
            };
            arguments.items += split.items() as u32;
            partials += split.partials();
            let Rounds { items, places } = Rounds::new(shape(at).0, shape(at).1);
            (rounds.items, rounds.places) = (rounds.items + items, rounds.places + places);
        }
        let (order, wide_items) = (order.to_vec(), wide.items);
        Self { most_rows, staged, order, arguments, partials, wide_items, rounds, rows }
    }

    /// The most rows of x at once.
    pub(super) fn most_rows(&self) -> u64 {
        self.most_rows
    }

    /// Of a workspace for up to this many rows of x.
    pub(super) fn workspace_bytes(&self, rows: u64) -> u64 {
        // Kernels for up to `WIDE_ROWS` need none, of the fast layout; but it may be used for fewer
        // rows.
        let few = if rows == 0 { 0 } else { self.partials * PARTIAL_BYTES };
        let is_large = rows.min(self.most_rows) > WIDE_ROWS;
        let columns = self.arguments.columns.into();
        let large = || Large::most_items(&self.rows, columns, rows.min(self.most_rows));
        let items = if is_large { large() } else { 0 };
        let is_decoded = self.staged.is_some() && rows.min(self.most_rows) > ROWS;
        let decoded = if is_decoded { self.rounds.places * Rounds::place_bytes(rows) } else { 0 };
        match few.max(decoded).max(items * LARGE_PARTIAL_BYTES) {
            0 => 0,
            partials => COUNTER_BYTES + partials,
        }
    }

    /// Puts it on the stream, for no more rows than [`Launch::most_rows`]; the product of the
    /// first one is row `first` of the outputs.
    ///
    /// # Safety
    /// As [`Linear::multiply`](super::Linear::multiply), which has checked the arguments and keeps
    /// the matrices.
    pub(super) unsafe fn run(
        &self,
        kernels: &LinearKernels,
        x: LinearInput,
        (outputs, first): (&[LinearOutput], u64),
        workspace: CUdeviceptr,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        let mut arguments = self.arguments;
        (arguments.x, arguments.x_pitch, arguments.x_rows) = (x.pointer, x.pitch, x.rows as u32);
        arguments.partials = workspace + COUNTER_BYTES;
        arguments.status = status.device_pointer();
        for (matrix, &at) in arguments.matrices.iter_mut().zip(&self.order) {
            let LinearOutput { pointer, pitch, bias } = outputs[at];
            (matrix.y, matrix.y_pitch, matrix.bias) = (pointer + 2 * first * pitch, pitch, bias);
        }
        if x.rows <= ROWS {
            arguments.counters = arguments.counters.wrapping_add(workspace);
            // SAFETY: arrays, columns and items are those of matrices that the caller keeps;
            // counters are zero, since kernels leave them so; the rest is the caller's promise.
            return unsafe { kernels.multiply(self.staged, stream, &arguments) };
        }
        if let Some(staged) = self.staged {
            arguments.counters = workspace;
            // SAFETY: as above; each matrix has as many counters as `COUNTERS` says.
            return unsafe {
                kernels.multiply_decoded(staged, stream, self.rounds.items, &arguments)
            };
        }
        let bands = Bands::new(x.rows);
        let box_rows = if x.rows <= WIDE_ROWS { x.rows } else { bands.rows };
        if let Some(map) = map_of(x, arguments.columns, box_rows as u32)? {
            (arguments.x_map, arguments.x_mapped) = (map, 1);
        }
        if x.rows <= WIDE_ROWS {
            // SAFETY: as above; the kernel needs no workspace.
            return unsafe { kernels.multiply_wide(stream, self.wide_items, &arguments) };
        }
        arguments.counters = workspace;
        for Large { matrices: (first, end), items } in
            Large::all(&self.rows, arguments.columns.into(), bands)
        {
            let mut part = arguments;
            part.matrices[..end - first].copy_from_slice(&arguments.matrices[first..end]);
            (part.matrix_count, part.items) = ((end - first) as u32, items as u32);
            // SAFETY: as above; one launch after the other has the workspace.
            unsafe { kernels.multiply_large(stream, bands, &part) }?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{COUNTER_BYTES, COUNTERS};

    #[test]
    fn all_counters_lie_before_the_sums() {
        assert!(COUNTER_BYTES >= 4 * COUNTERS && COUNTER_BYTES.is_multiple_of(256));
    }
}
