//! What one GPU holds of a model.

use std::{
    collections::HashMap,
    iter,
    sync::{Arc, atomic::AtomicBool},
};

use cudarc::driver::sys::CUdeviceptr;
use rayon::prelude::*;

use super::{
    Device,
    coding::KernelEncoding,
    distribution::SLOTS,
    host_section::HostSection,
    linear::{self, FastArrays, FastLoad, Outcome, Residence, Wanted},
    memory::{Buffer, Region},
    needs::{
        self, ArrayId, FastMatrix, FastNeeds, Needs, SectionId, TensorId, arrays_bytes,
        section_bytes,
    },
    placement::Plan,
    stored::{Addresses, ArrayPlace, CodedTensor, Tensors},
    streamer::{Streamer, Transfer},
    tables::{Tables, allocate_tables, build_tables},
    upload::{self, Delivery, Origin},
};
use crate::{
    Model, Result,
    progress::{Observer, advance},
};

/// Sections and decode tables of one GPU.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) device: Device,
    /// For each streamed block, by its index in the model, its turn.
    turns: HashMap<usize, usize>,
    /// For each turn, where the sections of its block lie in a slot, in bytes from the slot's
    /// start.
    places: Vec<Vec<(SectionId, u64)>>,
    pub(super) streamer: Option<Streamer>,
    /// Sections, arrays, decode tables, and what matrices in the fast layout take.
    memory: Vec<Arc<Buffer>>,
    /// Where matrices go that are to be in the fast layout.
    wanted: Vec<(FastMatrix, Region)>,
    addresses: Map,
}

/// Where sections are read from without a slot: in device memory, or on the host in place.
#[derive(Debug, Default)]
struct Map {
    sections: HashMap<SectionId, CUdeviceptr>,
    /// Arrays whose sections are not there.
    arrays: HashMap<ArrayPlace, HeldArray>,
    tables: Tables,
    /// Matrices of which nothing else is there.
    fast: HashMap<TensorId, Arc<FastArrays>>,
}

/// An array in device memory.
#[derive(Clone, Copy, Debug)]
struct HeldArray {
    /// Its index in its shard.
    index: usize,
    address: CUdeviceptr,
}

/// The same, except for what lies in a slot.
pub(super) struct SlotMap<'p> {
    part: &'p Part,
    sections: HashMap<SectionId, CUdeviceptr>,
}

impl Addresses for Part {
    fn array(&self, place: ArrayPlace) -> CUdeviceptr {
        let alone = self.addresses.arrays.get(&place).map(|array| array.address);
        alone.unwrap_or_else(|| self.addresses.sections[&place.section] + place.offset)
    }

    fn table(&self, tensor: TensorId) -> CUdeviceptr {
        self.addresses.tables[&tensor]
    }

    fn fast(&self, tensor: TensorId) -> Option<&Arc<FastArrays>> {
        self.addresses.fast.get(&tensor)
    }
}

impl Addresses for SlotMap<'_> {
    fn array(&self, place: ArrayPlace) -> CUdeviceptr {
        let section = self.sections.get(&place.section);
        section.map_or_else(|| self.part.array(place), |address| address + place.offset)
    }

    fn table(&self, tensor: TensorId) -> CUdeviceptr {
        self.part.table(tensor)
    }
}

impl Part {
    /// Device memory for the blocks that a plan places on its GPU of this index, of any content
    /// yet.
    pub(super) fn new(
        model: &Model,
        needs: &[Needs],
        plan: &Plan,
        index: usize,
        device: &Device,
    ) -> Result<Self> {
        let [resident, streamed] =
            [false, true].map(|streamed| plan.blocks_on(index, streamed).collect::<Vec<_>>());
        let places = streamed.iter().map(|&block| slot_places(model, &needs[block])).collect();
        let turns = streamed.iter().enumerate().map(|(turn, &block)| (block, turn)).collect();
        let (fast, stored): (Vec<usize>, Vec<usize>) =
            resident.into_iter().partition(|&block| plan.residences()[block] == Residence::Fast);
        let sections = stored.iter().flat_map(|&block| needs[block].sections.iter().copied());
        let sections: Vec<SectionId> = sections.collect();
        let bytes = sections.iter().map(|&section| section_bytes(model, section)).sum();
        let memory = device.allocate(bytes, "the model")?;
        let mut next = memory.pointer();
        let mut addresses = Map::default();
        for section in sections {
            addresses.sections.insert(section, next);
            next += section_bytes(model, section);
        }
        let mut part = Self {
            device: device.clone(),
            turns,
            places,
            streamer: None,
            memory: vec![Arc::new(memory)],
            wanted: Vec::new(),
            addresses,
        };
        let coded =
            stored.iter().chain(&streamed).flat_map(|&block| needs[block].coded.iter().copied());
        part.hold_tables(coded)?;
        let fast: Vec<&FastNeeds> =
            fast.iter().filter_map(|&block| needs[block].fast.as_ref()).collect();
        part.hold_arrays(model, fast.iter().flat_map(|fast| fast.arrays.iter().copied()))?;
        part.hold_tables(fast.iter().flat_map(|fast| fast.coded.iter().copied()))?;
        part.hold_matrices(fast.iter().flat_map(|fast| fast.matrices.iter().copied()))?;
        Ok(part)
    }

    /// Device memory for matrices that are to be in the fast layout, of any content yet.
    fn hold_matrices(&mut self, matrices: impl Iterator<Item = FastMatrix> + Clone) -> Result<()> {
        let bytes = matrices.clone().map(|matrix| matrix.place_bytes).sum();
        if bytes == 0 {
            return Ok(());
        }
        let (memory, mut next) =
            (Arc::new(self.device.allocate(bytes, "the model in the fast layout")?), 0);
        for matrix in matrices {
            self.wanted.push((matrix, Region::within(&memory, next, matrix.place_bytes)));
            next += matrix.place_bytes;
        }
        self.memory.push(memory);
        Ok(())
    }

    /// Device memory for arrays whose sections are not there, of any content yet.
    fn hold_arrays(
        &mut self,
        model: &Model,
        arrays: impl Iterator<Item = ArrayId> + Clone,
    ) -> Result<()> {
        let bytes = arrays_bytes(model, arrays.clone());
        if bytes == 0 {
            return Ok(());
        }
        let memory = Arc::new(self.device.allocate(bytes, "the model")?);
        self.place_arrays(model, memory.pointer(), arrays);
        self.memory.push(memory);
        Ok(())
    }

    /// Puts arrays to a device address; the end of the last one.
    fn place_arrays(
        &mut self,
        model: &Model,
        mut next: CUdeviceptr,
        arrays: impl Iterator<Item = ArrayId>,
    ) -> CUdeviceptr {
        for array in arrays {
            let place = ArrayPlace::of_array(&model.shards()[array.0], array);
            self.addresses.arrays.insert(place, HeldArray { index: array.1, address: next });
            next += arrays_bytes(model, iter::once(array));
        }
        next
    }

    /// Device memory for decode tables, likewise.
    fn hold_tables(
        &mut self,
        coded: impl Iterator<Item = (TensorId, KernelEncoding)>,
    ) -> Result<()> {
        if let Some((memory, tables)) = allocate_tables(&self.device, coded)? {
            self.addresses.tables.extend(tables);
            self.memory.push(Arc::new(memory));
        }
        Ok(())
    }

    /// When a block has its turn, by its index in the model; `None` for one that is resident.
    pub(super) fn turn(&self, block: usize) -> Option<usize> {
        self.turns.get(&block).copied()
    }

    /// Device memory that it holds, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let memory: u64 = self.memory.iter().map(|buffer| buffer.bytes()).sum();
        memory + self.streamer.as_ref().map_or(0, Streamer::bytes)
    }

    /// What is to be copied to its device memory.
    pub(super) fn deliveries<'m>(&self, model: &'m Model) -> Vec<Delivery<'m>> {
        let deliver = |shard: usize, from, to| Delivery { shard: &model.shards()[shard], from, to };
        let sections = self.addresses.sections.iter();
        let sections =
            sections.map(|(&(shard, section), &to)| deliver(shard, Origin::Section(section), to));
        let arrays = self.addresses.arrays.iter();
        let arrays = arrays.map(|(place, array)| {
            deliver(place.section.0, Origin::Array(array.index), array.address)
        });
        let mut deliveries: Vec<_> = sections.chain(arrays).collect();
        // In the order of the addresses, which is mostly that of the files.
        deliveries.sort_by_key(|delivery| delivery.to);
        deliveries
    }

    /// Builds the decode tables, and waits.
    pub(super) fn build_tables(&self, stored: &Tensors) -> Result<()> {
        build_tables(&self.device, &self.addresses.tables, stored)
    }

    /// Loads the matrices of blocks that a plan wants in the fast layout. One with too many
    /// exceptions is loaded as it is stored.
    pub(super) fn make_fast(&mut self, load: &FastLoad<'_>) -> Result<()> {
        let matrices = std::mem::take(&mut self.wanted);
        let coded = matrices.iter().map(|(matrix, _)| (matrix.id, KernelEncoding::Tile));
        let Some((memory, tables)) = allocate_tables(&self.device, coded)? else { return Ok(()) };
        build_tables(&self.device, &tables, load.stored)?;
        let wanted = matrices.iter().map(|(matrix, place)| Wanted {
            tensor: load.model.tensor_at(matrix.id),
            stored: load.stored[&matrix.id]
                .coded()
                .and_then(CodedTensor::as_tile)
                .expect("a matrix has tiles"),
            table: tables[&matrix.id],
            strips: place.first(matrix.strips_bytes),
        });
        let (outcomes, kept) = linear::upload(&self.device, &wanted.collect::<Vec<_>>(), load)?;
        drop(memory);
        self.memory.extend(kept);
        let mut left = Vec::new();
        for ((matrix, place), outcome) in matrices.iter().zip(outcomes) {
            match outcome {
                Outcome::Fast(arrays) => {
                    drop(self.addresses.fast.insert(matrix.id, Arc::new(arrays)));
                }
                Outcome::TooMany(_) => left.push((matrix.id, place)),
                Outcome::TooWide => {
                    let arrays = needs::arrays_of_id(load.model, matrix.id);
                    advance(
                        load.observer,
                        arrays.map(|array| needs::array_length(load.model, array)).sum(),
                    )?;
                    left.push((matrix.id, place));
                }
            }
        }
        self.load_stored(load, &left)
    }

    /// Checks what reading arrays one by one has not: chunks of which nobody has read the rest.
    /// After all of them were loaded.
    pub(super) fn check_arrays(&self, model: &Model) -> Result<()> {
        let held = self.addresses.arrays.iter().map(|(place, held)| (place.section.0, held.index));
        let fast = self.addresses.fast.keys().flat_map(|&id| needs::arrays_of_id(model, id));
        let arrays: Vec<ArrayId> = held.chain(fast).collect();
        arrays.par_iter().try_for_each(|&(shard, array)| model.shards()[shard].check_array(array))
    }

    /// Loads matrices as they are stored, where they were to be in the fast layout.
    fn load_stored(&mut self, load: &FastLoad<'_>, matrices: &[(TensorId, &Region)]) -> Result<()> {
        if matrices.is_empty() {
            return Ok(());
        }
        let (mut tables, mut deliveries) = (Tables::new(), Vec::new());
        for &(id, place) in matrices {
            let arrays: Vec<ArrayId> = needs::arrays_of_id(load.model, id).collect();
            let table = self.place_arrays(load.model, place.pointer(), arrays.iter().copied());
            tables.insert(id, table);
            for (shard, array) in arrays {
                let shard = &load.model.shards()[shard];
                let held = self.addresses.arrays[&ArrayPlace::of_array(shard, (id.0, array))];
                deliveries.push(Delivery { shard, from: Origin::Array(array), to: held.address });
            }
        }
        // Their bytes are counted already.
        let (stop, observer) = (AtomicBool::new(false), Uncounted(load.observer));
        // SAFETY: the addresses are those of arrays in memory that `self` keeps, with room for all
        // of a matrix as it is stored.
        #[expect(unsafe_code, reason = "device addresses")]
        unsafe { upload::upload(&self.device, &deliveries, load.readers, &stop, &observer) }?;
        build_tables(&self.device, &tables, load.stored)?;
        self.addresses.tables.extend(tables);
        Ok(())
    }

    /// Makes the slots for its streamed blocks, which come from these sections.
    pub(super) fn make_streamer(
        &mut self,
        host: &HashMap<SectionId, Arc<HostSection>>,
    ) -> Result<()> {
        if self.turns.is_empty() {
            return Ok(());
        }
        let mut blocks = Vec::with_capacity(self.places.len());
        for places in &self.places {
            for (section, _) in places {
                let address = host[section].device_pointer(&self.device)?;
                self.addresses.sections.insert(*section, address);
            }
            let transfer = |&(section, to)| Transfer { section: Arc::clone(&host[&section]), to };
            blocks.push(places.iter().map(transfer).collect());
        }
        self.streamer = Some(Streamer::new(&self.device, blocks)?);
        Ok(())
    }

    /// For each slot, the addresses when the block of this turn lies in it.
    pub(super) fn slot_maps(&self, turn: usize) -> Vec<SlotMap<'_>> {
        let Some(streamer) = &self.streamer else { return Vec::new() };
        let map = |slot| {
            let address = |&(section, to)| (section, streamer.slot(slot) + to);
            SlotMap { part: self, sections: self.places[turn].iter().map(address).collect() }
        };
        (0..SLOTS.min(self.turns.len())).map(map).collect()
    }
}

/// Cancels as another observer, and does not count.
struct Uncounted<'o>(&'o dyn Observer);

impl Observer for Uncounted<'_> {
    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }
}

/// Where the sections of a streamed block lie in its slot, in bytes from the slot's start.
fn slot_places(model: &Model, block: &Needs) -> Vec<(SectionId, u64)> {
    let place = |end: &mut u64, &section: &SectionId| {
        let start = *end;
        *end += section_bytes(model, section);
        Some((section, start))
    };
    block.sections.iter().scan(0, place).collect()
}
