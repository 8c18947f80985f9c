//! Products with the experts of a mixture that a router on the device has chosen.
#![expect(unsafe_code, reason = "launches, each with its proof")]

use cudarc::driver::{CudaStream, sys::CUdeviceptr};

use super::launch::{LinearInput, LinearOutput};
use super::task::{GroupedLaunch, LinearMatrix, MAX_EXPERTS, MIN_CHUNK, STRIP_ROWS};
use super::{matrix::Matrix, product::check_pair};
use crate::Result;
use crate::gpu::status::{Status, check_contexts};
use crate::gpu::{device::Device, fault::refuse, memory::Buffer, needs::Residence};

/// Average slots per expert up to which blocks of 16 and of 64 places are the fastest
/// (`benches/record/2026-11-28-experts-h200.md`).
const MAX_SLOTS: [u64; 2] = [6, 48];

/// The rows of x that go to each expert, as a router leaves them in device memory.
///
/// There are two forms. [`Routing::new`] has *places*, sorted by expert: expert e has the places
/// from `offsets[e]` to before `offsets[e + 1]`. A place is a row of x to multiply, and a row of
/// the product. [`Routing::slots`] has *slots*: the experts that each row of x chose, in the order
/// of these rows. A slot is a row of the product. Addresses are of device memory, and multiples
/// of 4.
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    places: u64,
    /// Addresses of the places' rows of x, or of their slots; or 0.
    indices: CUdeviceptr,
    factors: CUdeviceptr,
    by: By,
}

#[derive(Clone, Copy, Debug)]
enum By {
    /// The address of the offsets.
    Offsets(CUdeviceptr),
    /// The address of the experts. `end`: that of the number of places, or 0 without blocks of
    /// `each` places.
    Slots { experts: CUdeviceptr, end: CUdeviceptr, slots: u64, share: u64, each: u64 },
}

impl Routing {
    /// `offsets`: address of a `u32` for each expert and one more, ascending, the last at most
    /// `places`. Place i has row i of x, unless [`Routing::rows`] says otherwise.
    pub const fn new(offsets: CUdeviceptr, places: u64) -> Self {
        Self { places, indices: 0, factors: 0, by: By::Offsets(offsets) }
    }

    /// Gives place i the row of x that the i-th `u32` from this address on names; address 0 means
    /// none. Slots already have rows, and are refused with others.
    #[must_use]
    pub const fn rows(self, indices: CUdeviceptr) -> Self {
        let by = match self.by {
            By::Slots { experts, slots, share, each, .. } => {
                By::Slots { experts, end: 0, slots, share, each }
            }
            by @ By::Offsets(_) => by,
        };
        Self { indices, by, ..self }
    }

    /// Slot s is row s / `share` of x times the expert that the s-th `u32` from `experts` on names.
    /// An expert is read again for each of its slots, unless they are sorted into
    /// [blocks](Self::in_blocks). Expert 2^32 - 1 (-1) is none, and its rows of the product are 0.
    pub const fn slots(experts: CUdeviceptr, slots: u64, share: u64) -> Self {
        let by = By::Slots { experts, end: 0, slots, share, each: 0 };
        Self { places: slots, indices: 0, factors: 0, by }
    }

    /// Sorts slots into blocks of `each` places of one expert, as many as
    /// [`GroupedLinear::block_places`] says: `experts` are then those of the blocks, and place i is
    /// the slot that the i-th `u32` from `indices` on names. Indices that are no slots pad the end
    /// of a block. `end`: address of the number of places that count, a `u32`; there is memory for
    /// `places`. vLLM's operator `moe_align_block_size` writes such lists.
    #[must_use]
    pub const fn in_blocks(
        self,
        each: u64,
        indices: CUdeviceptr,
        places: u64,
        end: CUdeviceptr,
    ) -> Self {
        let (experts, slots, share) = match self.by {
            By::Slots { experts, slots, share, .. } => (experts, slots, share),
            // `check` refuses a share of 0.
            By::Offsets(experts) => (experts, places, 0),
        };
        Self { places, indices, by: By::Slots { experts, end, slots, share, each }, ..self }
    }

    /// Multiplies row i of the product, before it is rounded, by the i-th `f32` from this address
    /// on; 0 is none.
    #[must_use]
    pub const fn factors(self, factors: CUdeviceptr) -> Self {
        Self { factors, ..self }
    }

    /// The most rows of the product.
    const fn products(&self) -> u64 {
        match self.by {
            By::Offsets(_) => self.places,
            By::Slots { slots, .. } => slots,
        }
    }
}

/// Products `y[i] = x[rows[i]] Wᵀ` with the matrices of a mixture's experts, each place i with that
/// of its expert (a *grouped* product), prepared once and run any number of times, on any streams.
///
/// The routing is on the device: nothing waits for it, and only matrices of experts with places are
/// read. Sums are f32, and each is rounded once. On one GPU the bits of y depend on the matrix, the
/// row of x and the factor: they are the same in every run, whatever the other places are. The
/// product keeps its matrices alive.
///
/// ```no_run
/// use df11::gpu::cudarc::driver::{DevicePtr, DevicePtrMut};
/// use df11::gpu::{Device, GroupedLinear, LinearInput, LinearOutput, LoadOptions, Routing, Status};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(0)?;
/// let model = df11::open("model.df11")?.load(&device, &LoadOptions::default())?;
/// // [128, 768, 2048]: checkpoints store all experts as one tensor.
/// let all = model.matrix("model.layers.0.mlp.experts.up_proj")?.to_fast_or_stored()?;
/// let experts = GroupedLinear::new(&all.split_rows(128)?)?;
///
/// let (stream, status) = (device.context().new_stream()?, Status::new(&device)?);
/// // Two rows of x, four experts each: eight places, here of experts 0 to 7.
/// let x = stream.alloc_zeros::<u16>(2 * 2048)?;
/// let offsets: Vec<u32> = (0..=128).map(|expert: u32| expert.min(8)).collect();
/// let offsets = stream.clone_htod(&offsets)?;
/// let rows = stream.clone_htod(&[0u32, 1, 0, 1, 0, 1, 0, 1])?;
/// let mut y = stream.alloc_zeros::<u16>(8 * 768)?;
/// {
///     let (x, _read) = x.device_ptr(&stream);
///     let (offsets, _read) = offsets.device_ptr(&stream);
///     let (rows, _read) = rows.device_ptr(&stream);
///     let (y, _written) = y.device_ptr_mut(&stream);
///     let routing = Routing::new(offsets, 8).rows(rows);
///     let (x, y) = (LinearInput::new(x, 2, 2048), LinearOutput::new(y, 768));
///     // SAFETY: there are as many rows, offsets and places; all live until the check.
///     unsafe { experts.multiply(x, routing, y, &stream, &status) }?;
/// }
/// status.check(&stream)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct GroupedLinear {
    /// The experts, or one matrix whose parts they are.
    matrices: Vec<Matrix>,
    /// Device memory with the experts' arrays; none if experts are parts of one matrix.
    table: Option<Buffer>,
    /// Rows per expert.
    rows: u64,
    count: u64,
    keeps_order: bool,
    /// The places that a block may have.
    blocks: Vec<u64>,
}

impl GroupedLinear {
    /// Prepares the product with these matrices, in the fast layout and of one shape, in the order
    /// of the offsets: expert 0 first. Takes 48 bytes of device memory for each, and waits for
    /// their upload. [`Matrix::split_rows`] cuts one tensor of all experts into them.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if there are no matrices or more than 1,024,
    /// if one is as stored, or if they differ in shape or GPU; [`Error::Gpu`](crate::Error::Gpu) if
    /// the GPU has too little shared memory for the kernel, or the driver refuses.
    pub fn new(experts: &[Matrix]) -> Result<Self> {
        let Some(first) = experts.first().filter(|_| experts.len() <= MAX_EXPERTS) else {
            let problem = format!("{} experts to multiply by", experts.len());
            return refuse(problem, format!("name 1 to {MAX_EXPERTS}"));
        };
        let device = first.device();
        let (keeps_order, blocks) = device.linear_kernels()?.check_grouped()?;
        for expert in experts {
            check_pair(first, expert)?;
            let (rows, others, name) = (first.row_count(), expert.row_count(), expert.name());
            if rows != others {
                let problem = format!("{:?} has {rows} rows and {name:?} {others}", first.name());
                return refuse(problem, "group only matrices of one shape");
            }
            if expert.residence() != Residence::Fast {
                let problem = format!("no kernel multiplies by experts as stored, as {name:?} is");
                return refuse(problem, "make it fast (Matrix::to_fast), or decode it");
            }
        }
        let table: Vec<LinearMatrix> = experts.iter().map(Matrix::task).collect();
        let table = Buffer::of(device.copies(), &table)?;
        let (rows, count) = (first.row_count(), experts.len() as u64);
        let matrices = experts.to_vec();
        Ok(Self { matrices, table: Some(table), rows, count, keeps_order, blocks })
    }

    /// Prepares the product with equal parts of the rows of one matrix in the fast layout, in
    /// order. Takes no device memory, and does not wait.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for no parts or more than 1,024, parts that do
    /// not begin on multiples of 32, a slice of columns, or a matrix as stored;
    /// [`Error::Gpu`](crate::Error::Gpu) if the GPU has too little shared memory for the kernel.
    pub fn of_parts(matrix: &Matrix, count: u64) -> Result<Self> {
        if count > MAX_EXPERTS as u64 || matrix.residence() != Residence::Fast {
            let problem = format!("{count} experts, {:?}", matrix.residence());
            return refuse(problem, format!("take 1 to {MAX_EXPERTS}, in the fast layout"));
        }
        let (keeps_order, blocks) = matrix.device().linear_kernels()?.check_grouped()?;
        let all = matrix.row_count();
        let rows = all.checked_div(count).filter(|&rows| rows > 0 && rows * count == all);
        let Some(rows) = rows.filter(|rows| count == 1 || rows.is_multiple_of(STRIP_ROWS)) else {
            let problem = format!("{all} rows are not {count} experts");
            return refuse(problem, "take as many as begin on multiples of 32 rows");
        };
        let matrices = vec![matrix.clone()];
        Ok(Self { matrices, table: None, rows, count, keeps_order, blocks })
    }

    /// The number of experts.
    pub fn experts(&self) -> u64 {
        self.count
    }

    /// Whether each product is one chain of tensor-core products of 16 columns, first to last, from
    /// an f32 zero, rounded once: the order of one split ([`LinearOutput::splits`]). True with
    /// compute capability 9.0.
    pub fn keeps_order(&self) -> bool {
        self.keeps_order
    }

    /// The rows and columns of an expert's matrix.
    pub fn shape(&self) -> (u64, u64) {
        (self.rows, self.matrices[0].column_count())
    }

    /// The places of a block ([`Routing::in_blocks`]) that are fastest for this many slots: 16, 64
    /// or 128, or 8 without compute capability 9.0. All give the same bits.
    pub fn block_places(&self, slots: u64) -> u64 {
        let average = slots.div_ceil(self.count);
        let smaller = MAX_SLOTS.iter().filter(|&&most| average > most).count();
        self.blocks[smaller.min(self.blocks.len() - 1)]
    }

    /// The GPU that holds them.
    pub fn device(&self) -> &Device {
        self.matrices[0].device()
    }

    /// Puts the products on a stream: y has a row for each place or slot. Neither allocates nor
    /// waits, and can be captured in a graph: a replay uses the offsets and rows at that time. An
    /// expert's matrix is read once for each block of its places, of as many as
    /// [`block_places`](Self::block_places) says; experts without places cost nothing. Rows of y
    /// without a place stay as they are. Starts early and lets the next launch start early like
    /// [`Linear::multiply`](super::Linear::multiply), but waits before it reads anything.
    ///
    /// Offsets that descend or exceed the places, rows that x does not have, experts that do not
    /// exist, padding before a slot of its block, blocks with only padding, and contradictions in
    /// stored data set `status`; rows of y are then undefined.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if places or slots are without rows of x, rows
    /// would overlap, an address is misaligned, y has a bias, the stream or the status is of
    /// another device, or there are 2^31 / (experts × rows of a matrix / 256) places or more;
    /// [`Error::Gpu`](crate::Error::Gpu) if the driver refuses.
    ///
    /// # Safety
    /// In memory of the device: `x` has its rows of as many elements as the matrices have columns;
    /// `y` has room for as many rows as there are places or slots, of as many elements as a matrix
    /// has rows; `routing` has an offset for each expert and one more, and a row for each place if
    /// it names any; or an expert for each slot or block, an index for each place, and the number
    /// of places; and a factor for each row of y if it names any. Until the work is done nothing
    /// else uses y or changes the rest; until then, and until the last replay of a graph that
    /// captured it, all that and this value live.
    pub unsafe fn multiply(
        &self,
        x: LinearInput,
        routing: Routing,
        y: LinearOutput,
        stream: &CudaStream,
        status: &Status,
    ) -> Result<()> {
        self.check(&x, &routing, &y)?;
        check_contexts(self.device(), stream, status)?;
        if routing.places == 0 {
            return Ok(());
        }
        let first = &self.matrices[0];
        let (matrices, whole) = match &self.table {
            Some(table) => (table.pointer(), LinearMatrix::default()),
            None => (0, first.task()),
        };
        let (offsets, blocks, end, slots, share, each) = match routing.by {
            By::Offsets(offsets) => (offsets, 0, 0, 0, 1, self.block_places(routing.places)),
            By::Slots { experts, end, slots, share, each } => {
                let each = if end == 0 { self.blocks[0] } else { each };
                (0, experts, end, slots, share, each)
            }
        };
        let launch = GroupedLaunch {
            x: x.pointer,
            x_pitch: x.pitch,
            x_index: routing.indices,
            offsets,
            blocks,
            end,
            factors: routing.factors,
            matrices,
            y: y.pointer,
            y_pitch: y.pitch,
            status: status.device_pointer(),
            x_rows: x.rows as u32,
            columns: first.column_count() as u32,
            rows: self.rows as u32,
            places: routing.places as u32,
            experts: self.count as u32,
            slots: slots as u32,
            share: share as u32,
            reserved: 0,
            whole,
        };
        // SAFETY: `self` keeps the arrays of as many matrices, all with these rows and columns;
        // counts are at most what `check` allows; the kernel follows neither offsets nor indices
        // out of x and y; the rest is the caller's promise.
        unsafe { self.device().linear_kernels()?.multiply_grouped(stream, each, &launch) }
    }

    fn check(&self, x: &LinearInput, routing: &Routing, y: &LinearOutput) -> Result<()> {
        let Routing { places, indices, factors, by } = *routing;
        let columns = self.matrices[0].column_count();
        // The kernel counts its items in 32 bits, whatever the offsets say.
        let strips = self.rows.div_ceil(STRIP_ROWS);
        let batches = match by {
            By::Slots { end: 0, .. } => places,
            _ => places.div_ceil(MIN_CHUNK).saturating_mul(self.count),
        };
        let items = batches.saturating_mul(strips);
        let rows_of_y = routing.products();
        if items >= 1 << 31
            || [x.rows, rows_of_y, places].iter().any(|&n| u32::try_from(n).is_err())
        {
            let problem = format!("{places} places, {rows_of_y} products, {} rows of x", x.rows);
            return refuse(problem, "multiply fewer at once");
        }
        let addresses = match by {
            By::Offsets(offsets) => {
                if places > 0 && x.rows == 0 || indices == 0 && places > x.rows {
                    let problem = format!("{places} places have rows of x, which has {}", x.rows);
                    return refuse(problem, "name a row of x for each place (Routing::rows)");
                }
                offsets
            }
            By::Slots { experts, end, slots, share, each } => {
                if slots.div_ceil(share.max(1)) > x.rows || !(1..1 << 32).contains(&share) {
                    let problem = format!("{slots} slots, {share} per row of {} of x", x.rows);
                    return refuse(problem, "give x a row for every `share` slots");
                }
                if (indices == 0) != (end == 0) || (each == 0) != (end == 0) {
                    let problem = "blocks without indices or their number, or rows of slots";
                    return refuse(problem, "use Routing::in_blocks, and no rows");
                }
                if end != 0 && !self.blocks.contains(&each) {
                    let problem = format!("blocks of {each} places");
                    return refuse(problem, "take as many as GroupedLinear::block_places says");
                }
                experts | end
            }
        };
        if x.rows > 1 && x.pitch < columns || rows_of_y > 1 && y.pitch < self.rows {
            return refuse("rows of x or y would overlap", "pitches count elements, not bytes");
        }
        let words = addresses | indices | factors;
        if !(x.pointer | y.pointer).is_multiple_of(2) || !words.is_multiple_of(4) {
            let problem = "x, y or an address of the routing is misaligned";
            return refuse(problem, "BF16 needs multiples of 2 bytes, u32 and f32 of 4");
        }
        if y.bias != 0 {
            return refuse("grouped products add no bias", "add it to y");
        }
        Ok(())
    }
}
