//! The part of a model that one GPU holds.

use std::collections::HashMap;
use std::sync::{Arc, atomic::AtomicBool};

use cudarc::driver::sys::CUdeviceptr;
use rayon::prelude::*;

use super::linear::arrival::{FastLoad, FastRequest, load_fast};
use super::linear::task::fast_bytes;
use super::needs::{
    self, ArrayId, Footprint, Needs, SectionId, TensorId, array_bytes, decoded_length,
};
use super::stored::{Addresses, Held, Tensors};
use super::streamer::{Streamer, Transfer};
use super::task::{KERNELS, TILE_TABLE_BYTES, TableAddresses};
use super::upload::{Delivery, Origin, upload};
use super::{device::Device, memory::Buffer, pinned::HostSection, placement::Plan};
use crate::{Error, Model, Result};

/// Alignment of codebooks while tables are made.
const CODEBOOK_ALIGNMENT: usize = 16;
const MODEL: &str = "the model";
const TABLES: &str = "the model's decode tables";

/// Sections and decode tables of one GPU.
#[derive(Debug)]
pub(super) struct DevicePart {
    pub(super) device: Device,
    /// Indices of the streamed blocks in the model, in the order of their turns.
    turns: Vec<usize>,
    pub(super) streamer: Option<Streamer>,
    /// Memory of sections, arrays, decode tables, and matrices in the fast layout.
    memory: Vec<Buffer>,
    /// Matrices that become fast, and their places.
    wanted: Vec<(TensorId, Buffer)>,
    pub(super) held: Held,
}

impl DevicePart {
    /// Allocates device memory for the blocks that a plan places on GPU `index`; it is still empty.
    pub(super) fn new(needs: &[Needs], plan: &Plan, index: usize, device: &Device) -> Result<Self> {
        let turns: Vec<usize> = plan.blocks_on(index, true).collect();
        let lying = |block: usize| needs[block].footprint(plan.residences()[block]);
        let resident: Vec<&Footprint> = plan.blocks_on(index, false).map(lying).collect();
        let streamed = turns.iter().map(|&block| lying(block));
        let all = resident.iter().copied().chain(streamed);
        let mut memory = Vec::new();
        let mut reserve = |what, things| hold(device, what, things, &mut memory);
        let sections = resident.iter().flat_map(|block| &block.sections).collect();
        let arrays = resident.iter().flat_map(|block| &block.arrays).collect();
        let tables = all.flat_map(|block| &block.tables).collect();
        let held = Held {
            sections: addresses(reserve(MODEL, sections)?),
            arrays: addresses(reserve(MODEL, arrays)?),
            tables: addresses(reserve(TABLES, tables)?),
            ..Held::default()
        };
        let matrices = resident.iter().flat_map(|block| &block.matrices).collect();
        let wanted = reserve("the model in the fast layout", matrices)?;
        Ok(Self { device: device.clone(), turns, streamer: None, memory, wanted, held })
    }

    /// The turn of a block, by its index in the model; `None` if it is resident.
    pub(super) fn turn(&self, block: usize) -> Option<usize> {
        self.turns.iter().position(|&other| other == block)
    }

    pub(super) fn bytes(&self) -> u64 {
        let memory: u64 = self.memory.iter().map(Buffer::bytes).sum();
        memory + self.streamer.as_ref().map_or(0, Streamer::bytes)
    }

    pub(super) fn deliveries<'m>(&self, model: &'m Model) -> Vec<Delivery<'m>> {
        let Held { sections, arrays, tables, .. } = &self.held;
        let sections = sections.iter().map(|(id, &to)| (id.0, Origin::Section(id.1), to));
        let arrays = arrays.iter().map(|(id, &to)| (id.0, Origin::Array(id.1), to));
        let decoded = tables.iter().filter(|(id, _)| decoded_length(model, **id).is_some());
        let decoded = decoded.map(|(id, &to)| (id.0, Origin::Decoded(id.1), to));
        let delivery = |(shard, from, to)| Delivery { shard: &model.shards()[shard], from, to };
        let mut deliveries: Vec<_> = sections.chain(arrays).chain(decoded).map(delivery).collect();
        // Ordered by address, which is mostly the order in the files.
        deliveries.sort_by_key(|delivery| delivery.to);
        deliveries
    }

    /// Loads the matrices of blocks that a plan wants in the fast layout. A matrix with too many
    /// exceptions is loaded as it is stored.
    pub(super) fn make_fast(&mut self, load: &FastLoad<'_>) -> Result<()> {
        let matrices = std::mem::take(&mut self.wanted);
        if matrices.is_empty() {
            return Ok(());
        }
        // Lives until the matrices are loaded.
        let mut until_then = Vec::new();
        let tables: Vec<_> = matrices.iter().map(|&(id, _)| (id, TILE_TABLE_BYTES)).collect();
        let tables = hold(&self.device, TABLES, tables.iter().collect(), &mut until_then)?;
        let tables = addresses(tables);
        build_tables(&self.device, &tables, load.stored)?;
        let wanted = matrices.iter().map(|&(id, ref place)| {
            let coded = load.stored[&id].coded().expect("a matrix is coded");
            let sizes = coded.tile_sizes().expect("a matrix has tiles");
            FastRequest {
                id,
                tensor: load.model.tensor_at(id),
                sizes,
                staged_bytes: coded.staged_bytes,
                table: tables[&id],
                strips: place
                    .part(0, fast_bytes(sizes.geometry().rows(), sizes.geometry().columns())),
            }
        });
        let wanted: Vec<_> = wanted.collect();
        let outcomes = load_fast(&self.device, &wanted, load, &mut self.memory)?;
        drop(until_then);
        let (mut tables, mut deliveries) = (HashMap::new(), Vec::new());
        for ((id, place), outcome) in matrices.iter().zip(outcomes) {
            if let Some(arrays) = outcome {
                self.held.fast.insert(*id, Arc::new(arrays));
                continue;
            }
            let mut next = place.pointer();
            for (shard, array) in needs::arrays_of(load.model, *id) {
                self.held.arrays.insert((shard, array), next);
                let (of, from) = (&load.model.shards()[shard], Origin::Array(array));
                deliveries.push(Delivery { shard: of, from, to: next });
                next += array_bytes(load.model, (shard, array));
            }
            tables.insert(*id, next);
        }
        // Their bytes are counted already.
        let stop = AtomicBool::new(false);
        let count = |_| if load.observer.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) };
        // SAFETY: the addresses are those of arrays in memory that `self` keeps, with room for all
        // of a matrix as it is stored.
        #[expect(unsafe_code, reason = "device addresses")]
        unsafe { upload(&self.device, &deliveries, load.readers, &stop, &count) }?;
        build_tables(&self.device, &tables, load.stored)?;
        self.held.tables.extend(tables);
        Ok(())
    }

    /// Checks what reading arrays one by one left unchecked: chunks of which nobody has read the
    /// rest. Call it after all arrays are loaded.
    pub(super) fn check_arrays(&self, model: &Model) -> Result<()> {
        let fast = self.held.fast.keys().flat_map(|&id| needs::arrays_of(model, id));
        let arrays: Vec<ArrayId> = self.held.arrays.keys().copied().chain(fast).collect();
        arrays.par_iter().try_for_each(|&(shard, array)| model.shards()[shard].check_array(array))
    }

    /// Makes the slots for its streamed blocks, which come from these sections.
    pub(super) fn make_streamer(
        &mut self,
        needs: &[Needs],
        host: &HashMap<SectionId, Arc<HostSection>>,
    ) -> Result<()> {
        if self.turns.is_empty() {
            return Ok(());
        }
        let (mut blocks, mut slot_bytes) = (Vec::with_capacity(self.turns.len()), 0);
        for &block in &self.turns {
            let (mut transfers, mut to) = (Vec::new(), 0);
            for &(id, bytes) in &needs[block].stored.sections {
                let section = Arc::clone(&host[&id]);
                let address = section.device_pointer(self.device.context())?;
                self.held.sections.insert(id, address);
                transfers.push(Transfer { id, section, to });
                to += bytes;
            }
            blocks.push(transfers);
            slot_bytes = slot_bytes.max(to);
        }
        self.streamer = Some(Streamer::new(&self.device, blocks, slot_bytes)?);
        Ok(())
    }

    /// Addresses of everything as it lies, streamed blocks on the host.
    pub(super) fn in_place(&self) -> Addresses<'_> {
        Addresses { held: &self.held, slot: HashMap::new() }
    }

    /// For each slot, the addresses when it holds the block of this turn.
    pub(super) fn in_slots(&self, turn: usize) -> impl Iterator<Item = Addresses<'_>> {
        let slots = self.streamer.iter().flat_map(move |streamer| streamer.in_slots(turn));
        slots.map(|slot| Addresses { held: &self.held, slot })
    }
}

/// Allocates device memory for items of these sizes at once, keeps it in `memory`, and returns the
/// place of each.
fn hold(
    device: &Device,
    what: &str,
    things: Vec<&(TensorId, u64)>,
    memory: &mut Vec<Buffer>,
) -> Result<Vec<(TensorId, Buffer)>> {
    if things.is_empty() {
        return Ok(Vec::new());
    }
    let bytes = things.iter().map(|(_, bytes)| bytes).sum();
    let (buffer, mut next) = (device.allocate(bytes, what)?, 0);
    memory.push(buffer.clone());
    let place = |&(id, bytes): &(TensorId, u64)| {
        let place = buffer.part(next, bytes);
        next += bytes;
        (id, place)
    };
    Ok(things.into_iter().map(place).collect())
}

fn addresses(placed: Vec<(TensorId, Buffer)>) -> HashMap<TensorId, CUdeviceptr> {
    placed.into_iter().map(|(id, place)| (id, place.pointer())).collect()
}

/// Builds the decode tables of tensors at these device addresses, and waits.
pub(super) fn build_tables(
    device: &Device,
    tables: &HashMap<TensorId, CUdeviceptr>,
    stored: &Tensors,
) -> Result<()> {
    let stream = device.copies();
    let (mut codebooks, mut tasks) = (Vec::new(), <[Vec<TableAddresses>; KERNELS]>::default());
    for (tensor, &table) in tables {
        // Tensors that the host decodes are among them and have no table.
        let Some(coded) = stored[tensor].coded() else { continue };
        let (codebook, codebook_bytes) = (codebooks.len() as u64, coded.codebook.len() as u64);
        tasks[coded.kernel()].push(TableAddresses { codebook, table, codebook_bytes });
        codebooks.extend(&coded.codebook);
        codebooks.resize(codebooks.len().next_multiple_of(CODEBOOK_ALIGNMENT), 0);
    }
    if codebooks.is_empty() {
        return Ok(());
    }
    let codebooks = Buffer::of(stream, &codebooks)?;
    for (kernel, mut tasks) in tasks.into_iter().enumerate() {
        for task in &mut tasks {
            task.codebook += codebooks.pointer();
        }
        device.kernels().build_tables(kernel, stream, &tasks)?;
    }
    Ok(())
}
