//! What one GPU holds of a model.

use std::{collections::HashMap, sync::Arc};

use cudarc::driver::sys::CUdeviceptr;

use super::{
    Device,
    coding::{CODINGS, Coding},
    host_section::HostSection,
    memory::Buffer,
    needs::{Needs, SectionId, TensorId, section_bytes},
    placement::{Plan, SLOTS},
    stored::{Addresses, Stored},
    streamer::{Streamer, Transfer},
    task::TableTask,
    upload::Delivery,
};
use crate::{Model, Result};

/// Where a codebook begins, while tables are made.
const CODEBOOK_ALIGNMENT: usize = 16;

/// Sections and decode tables of one GPU.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) device: Device,
    /// For each streamed block, by its index in the model, its turn.
    turns: HashMap<usize, usize>,
    /// For each turn, where the sections of its block lie in a slot, in bytes from the slot's start.
    places: Vec<Vec<(SectionId, u64)>>,
    pub(super) streamer: Option<Streamer>,
    sections: Buffer,
    tables: Buffer,
    addresses: Map,
}

/// Where sections are read from without a slot: in device memory, or on the host in place.
#[derive(Debug, Default)]
struct Map {
    sections: HashMap<SectionId, CUdeviceptr>,
    tables: HashMap<TensorId, CUdeviceptr>,
}

/// The same, but for what lies in a slot.
pub(super) struct SlotMap<'p> {
    part: &'p Part,
    sections: HashMap<SectionId, CUdeviceptr>,
}

impl Addresses for Part {
    fn section(&self, section: SectionId) -> CUdeviceptr {
        self.addresses.sections[&section]
    }

    fn table(&self, tensor: TensorId) -> CUdeviceptr {
        self.addresses.tables[&tensor]
    }
}

impl Addresses for SlotMap<'_> {
    fn section(&self, section: SectionId) -> CUdeviceptr {
        self.sections.get(&section).copied().unwrap_or_else(|| self.part.section(section))
    }

    fn table(&self, tensor: TensorId) -> CUdeviceptr {
        self.part.table(tensor)
    }
}

impl Part {
    /// Device memory for the blocks that a plan places on its GPU of this index, of any content yet.
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
        let mine = resident.iter().chain(&streamed);
        let coded: Vec<(TensorId, Coding)> =
            mine.flat_map(|&block| needs[block].coded.iter().copied()).collect();
        let resident = resident.iter().flat_map(|&block| needs[block].sections.iter().copied());
        let resident: Vec<SectionId> = resident.collect();
        let bytes = resident.iter().map(|&section| section_bytes(model, section)).sum();
        let sections = device.allocate(bytes, "the model")?;
        let tables = device.allocate(
            coded.iter().map(|(_, coding)| coding.table_bytes()).sum(),
            "the model's decode tables",
        )?;
        let mut addresses = Map::default();
        let mut next = sections.pointer();
        for section in resident {
            addresses.sections.insert(section, next);
            next += section_bytes(model, section);
        }
        let mut next = tables.pointer();
        for (tensor, coding) in coded {
            addresses.tables.insert(tensor, next);
            next += coding.table_bytes();
        }
        let device = device.clone();
        Ok(Self { device, turns, places, streamer: None, sections, tables, addresses })
    }

    /// When a block has its turn, by its index in the model; `None` for one that is resident.
    pub(super) fn turn(&self, block: usize) -> Option<usize> {
        self.turns.get(&block).copied()
    }

    /// Device memory that it holds, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.sections.bytes() + self.tables.bytes() + self.streamer.as_ref().map_or(0, Streamer::bytes)
    }

    /// What is to be copied to its device memory.
    pub(super) fn deliveries<'m>(&self, model: &'m Model) -> Vec<Delivery<'m>> {
        let all = self.addresses.sections.iter();
        let deliver = |(&(shard, section), &to)| Delivery { shard: &model.shards()[shard], section, to };
        let mut deliveries: Vec<_> = all.map(deliver).collect();
        // In the order of the addresses, which is that of the files.
        deliveries.sort_by_key(|delivery| delivery.to);
        deliveries
    }

    /// Builds the decode tables, and waits.
    pub(super) fn build_tables(&self, stored: &HashMap<TensorId, Arc<Stored>>) -> Result<()> {
        let stream = self.device.copies();
        for coding in CODINGS {
            let (mut codebooks, mut tasks) = (Vec::new(), Vec::new());
            for (tensor, &table) in &self.addresses.tables {
                let coded = stored[tensor].coded().expect("coded tensors have tables");
                if coded.coding() != coding {
                    continue;
                }
                let (codebook, bytes) = (codebooks.len() as u64, coded.codebook().len() as u64);
                tasks.push(TableTask { codebook, table, codebook_bytes: bytes });
                codebooks.extend(coded.codebook());
                codebooks.resize(codebooks.len().next_multiple_of(CODEBOOK_ALIGNMENT), 0);
            }
            if tasks.is_empty() {
                continue;
            }
            let codebooks = Buffer::of(stream, &codebooks)?;
            for task in &mut tasks {
                task.codebook += codebooks.pointer();
            }
            let tasks = Buffer::of(stream, &tasks)?;
            self.device.kernels().build_tables(coding, stream, &tasks)?;
        }
        Ok(())
    }

    /// Makes the slots for its streamed blocks, which come from these sections.
    pub(super) fn stream(&mut self, host: &HashMap<SectionId, Arc<HostSection>>) -> Result<()> {
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

/// Where the sections of a streamed block lie in its slot, in bytes from the slot's start.
fn slot_places(model: &Model, block: &Needs) -> Vec<(SectionId, u64)> {
    let place = |end: &mut u64, &section: &SectionId| {
        let start = *end;
        *end += section_bytes(model, section);
        Some((section, start))
    };
    block.sections.iter().scan(0, place).collect()
}
