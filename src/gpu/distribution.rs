//! Distributes blocks over GPUs: adds up the memory that blocks take on a GPU, and chooses the
//! blocks to stream.

use super::fault::refuse;
use super::needs::{Needs, Residence};
use super::task::DecodeTask;
use crate::{Error, Result};

/// Output buffers for which a plan leaves room on each GPU: one is used while the other is written.
/// [`GpuDecoder`](super::GpuDecoder) has as many: parts of one batch may belong to two blocks.
pub(super) const OUTPUTS: usize = 2;
/// Slots per GPU for streamed blocks: one is read while the other is filled.
pub(super) const SLOTS: usize = 2;
/// A block smaller than 1 / `SMALL` of the largest one is not worth streaming.
const SMALL: u64 = 64;

/// The place of a block: its GPU, and whether it is streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The index of its GPU among those of the plan.
    pub device: usize,
    /// Whether it stays pinned on the host and is copied into a slot on the GPU ahead of each use.
    pub streamed: bool,
}

/// Sums of the sizes of what one GPU holds.
#[derive(Clone, Copy, Default)]
pub(super) struct Tally {
    /// Bytes of resident blocks, of decode tables, and of tasks.
    held_bytes: u64,
    /// Bytes of the largest streamed block.
    slot_bytes: u64,
    streamed: usize,
    output_bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, block: &Needs, streamed: bool, residence: Residence) {
        let footprint = block.footprint(residence);
        // A streamed block is decoded from each slot, or in place.
        let places = if streamed { SLOTS as u64 + 1 } else { 1 };
        if streamed {
            self.slot_bytes = self.slot_bytes.max(footprint.bytes);
            self.streamed += 1;
        } else {
            self.held_bytes += footprint.bytes;
        }
        let task_bytes = block.tensors * places * size_of::<DecodeTask>() as u64;
        self.held_bytes += footprint.table_bytes() + task_bytes;
        self.output_bytes = self.output_bytes.max(block.decoded_bytes);
    }

    /// Counts the matrices of a resident block in the fast layout instead of as stored.
    pub(super) fn make_fast(&self, block: &Needs) -> Self {
        let [stored, fast] = [Residence::Stored, Residence::Fast].map(|residence| {
            let footprint = block.footprint(residence);
            footprint.bytes + footprint.table_bytes()
        });
        Self { held_bytes: self.held_bytes - stored + fast, ..*self }
    }

    pub(super) fn bytes(&self) -> u64 {
        let slots = self.slot_bytes * SLOTS.min(self.streamed) as u64;
        // The directory may give decoded tensors any size.
        (self.held_bytes + slots).saturating_add(self.output_bytes.saturating_mul(OUTPUTS as u64))
    }
}

/// Keeps all blocks resident, filling each GPU before the next one; `None` if they do not fit.
pub(super) fn fill(
    blocks: &[&Needs],
    memory: &[u64],
    residence: Residence,
) -> Option<Vec<Placement>> {
    let mut placements = Vec::with_capacity(blocks.len());
    for (device, &memory) in memory.iter().enumerate() {
        let mut tally = Tally::default();
        for block in &blocks[placements.len()..] {
            tally.add(block, false, residence);
            if tally.bytes() > memory {
                break;
            }
            placements.push(Placement { device, streamed: false });
        }
    }
    (placements.len() == blocks.len()).then_some(placements)
}

pub(super) fn too_large_to_be_fast(blocks: &[&Needs], memory: &[u64]) -> Error {
    let needed = tally(blocks, &vec![false; blocks.len()], Residence::Fast);
    let there = memory.iter().fold(0, |sum: u64, &one| sum.saturating_add(one));
    let model = format!("in the fast layout the model takes {needed} bytes on one GPU");
    let remedy = "prefer auto, which keeps the rest as stored, or plan for more memory";
    Error::parameter(format!("{model}, and the plan has {there}"), remedy)
}

/// Gives each GPU a run of blocks, in proportion to its memory, and streams some of them.
pub(super) fn stream(blocks: &[&Needs], memory: &[u64]) -> Result<Vec<Placement>> {
    let size =
        |block: &Needs| u128::from(block.stored.bytes) + u128::from(block.stored.table_bytes());
    let all: u128 = blocks.iter().map(|block| size(block)).sum();
    let total = memory.iter().copied().map(u128::from).sum::<u128>().max(1);
    let mut placements = Vec::with_capacity(blocks.len());
    let (mut bytes, mut share) = (0u128, 0u128);
    for (device, &memory_bytes) in memory.iter().enumerate() {
        share += u128::from(memory_bytes);
        // A block goes where its middle lies; the last GPU takes what is left.
        let is_mine = |block: &&&Needs| {
            let block = size(block);
            let mine = device + 1 == memory.len() || (2 * bytes + block) * total <= 2 * all * share;
            bytes += if mine { block } else { 0 };
            mine
        };
        let rest = &blocks[placements.len()..];
        let run = &rest[..rest.iter().take_while(is_mine).count()];
        let streamed = fewest_streamed(run, device, memory_bytes)?;
        placements.extend(streamed.into_iter().map(|streamed| Placement { device, streamed }));
    }
    Ok(placements)
}

fn tally(run: &[&Needs], streamed: &[bool], residence: Residence) -> u64 {
    let mut tally = Tally::default();
    let blocks = run.iter().zip(streamed);
    blocks.for_each(|(block, &streamed)| tally.add(block, streamed, residence));
    tally.bytes()
}

/// Chooses the streamed blocks of a run: the fewest with which it fits.
fn fewest_streamed(run: &[&Needs], device: usize, memory: u64) -> Result<Vec<bool>> {
    // More streamed parts take less memory, except for rounding: the search ends at a number that
    // fits.
    let takes = |streamed: &[bool]| tally(run, streamed, Residence::Stored);
    let (mut low, mut high) = (0, run.len());
    while low < high {
        let middle = low.midpoint(high);
        if takes(&spread(run, middle)) <= memory { high = middle } else { low = middle + 1 }
    }
    let streamed = spread(run, high);
    let needed = takes(&streamed);
    if needed <= memory {
        return Ok(streamed);
    }
    let problem = format!(
        "GPU {device} of the plan may use {memory} bytes, and streaming all its blocks takes \
        {needed}"
    );
    refuse(problem, "allow more memory, or use more GPUs")
}

/// Cuts a run's bytes into as many parts as it has blocks, and streams about `parts` of them,
/// spread evenly.
fn spread(run: &[&Needs], parts: usize) -> Vec<bool> {
    let smallest = run.iter().map(|block| block.stored.bytes).max().unwrap_or(0) / SMALL;
    // Bytes that should be streamed so far, minus those that are, times the number of blocks.
    // Containers are smaller than 2^63 bytes, so nothing overflows.
    let mut due = 0i128;
    let streamed = run.iter().map(|block| {
        let bytes = i128::from(block.stored.bytes);
        let whole = bytes * run.len() as i128;
        due += bytes * parts as i128;
        let streamed = parts == run.len() || (block.stored.bytes >= smallest && 2 * due > whole);
        due -= if streamed { whole } else { 0 };
        streamed
    });
    streamed.collect()
}
