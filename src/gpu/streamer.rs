//! Streamed blocks: copied from pinned host memory into two slots on the GPU, ahead of their use.
//!
//! `Schedule` decides the order of copies, and needs no GPU for that. Events order copies and
//! kernels, so the host never waits. A slot holds the block that is decoded next, so three kinds of
//! work read streamed tensors in place, over the bus: captured CUDA graphs, a few rows, and
//! programs whose tensors are in several blocks.
#![expect(unsafe_code, reason = "copies to the device, each with its proof")]

use std::sync::{Arc, Mutex};
use std::{collections::HashMap, mem};

use cudarc::driver::{CudaEvent, CudaStream, result, sys::CUdeviceptr};

use super::{
    device::Device, distribution::SLOTS, fault::OrFault, memory::Buffer, needs::SectionId,
    pinned::HostSection,
};
use crate::{Error, Result, parallel};

/// A section to be copied into a slot.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) id: SectionId,
    pub(super) section: Arc<HostSection>,
    /// Its place, in bytes from the slot's start.
    pub(super) to: u64,
}

/// The slots of one GPU, and the blocks that go through them.
#[derive(Debug)]
pub(super) struct Streamer {
    /// Parts of one allocation, each as large as the largest block.
    slots: Vec<Buffer>,
    /// Transfers of each streamed block, in the order in which blocks are used.
    blocks: Vec<Vec<Transfer>>,
    copies: Arc<CudaStream>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    schedule: Schedule,
    /// For each slot: done when the last copy into it is done.
    filled: [CudaEvent; SLOTS],
    /// For each slot: done when all work so far that reads it is done.
    used: [CudaEvent; SLOTS],
}

impl Streamer {
    /// `slot_bytes`: size of the largest block.
    pub(super) fn new(
        device: &Device,
        blocks: Vec<Vec<Transfer>>,
        slot_bytes: u64,
    ) -> Result<Self> {
        let count = SLOTS.min(blocks.len()) as u64;
        let memory = device.allocate(count * slot_bytes, "the slots of streamed blocks")?;
        let slots = (0..count).map(|at| memory.part(at * slot_bytes, slot_bytes)).collect();
        let events = || Ok::<_, Error>([device.new_event()?, device.new_event()?]);
        let state =
            State { schedule: Schedule::new(blocks.len()), filled: events()?, used: events()? };
        Ok(Self { slots, blocks, copies: device.new_stream()?, state: Mutex::new(state) })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.slots.iter().map(Buffer::bytes).sum()
    }

    /// For each slot, the addresses of a block's sections when the slot holds the block.
    pub(super) fn in_slots(
        &self,
        block: usize,
    ) -> impl Iterator<Item = HashMap<SectionId, CUdeviceptr>> {
        self.slots.iter().map(move |slot| {
            let place = |transfer: &Transfer| (transfer.id, slot.pointer() + transfer.to);
            self.blocks[block].iter().map(place).collect()
        })
    }

    /// Tells `decode` the slot of a block, so that it puts work on the stream that reads the block
    /// there; then starts to copy the next block.
    pub(super) fn with_block(
        &self,
        block: usize,
        stream: &CudaStream,
        decode: impl FnOnce(usize) -> Result<()>,
    ) -> Result<()> {
        let action = "ordering copies and kernels";
        let mut state = parallel::lock(&self.state);
        // After a failure the content of the slots is unknown.
        let mut schedule = mem::replace(&mut state.schedule, Schedule::new(self.blocks.len()));
        let step = schedule.take(block);
        if step.fill {
            self.fill(&state, step.slot, block)?;
        }
        stream.wait(&state.filled[step.slot]).or_fault(action)?;
        // When the event below is done, other streams have read the slot too.
        stream.wait(&state.used[step.slot]).or_fault(action)?;
        decode(step.slot)?;
        state.used[step.slot].record(stream).or_fault(action)?;
        if let Some((slot, next)) = step.ahead {
            self.fill(&state, slot, next)?;
        }
        state.schedule = schedule;
        Ok(())
    }

    /// Starts to copy a block into a slot, once nothing reads the slot any more.
    fn fill(&self, state: &State, slot: usize, block: usize) -> Result<()> {
        let action = "copying to the GPU";
        self.copies.wait(&state.used[slot]).or_fault(action)?;
        for transfer in &self.blocks[block] {
            let to = self.slots[slot].pointer() + transfer.to;
            // SAFETY: the slot holds every block, and is freed after the context is idle. The
            // source is pinned, and kept by `self` until `slots`, dropped before it, has waited for
            // the context.
            let copied = unsafe {
                result::memcpy_htod_async(to, transfer.section.bytes(), self.copies.cu_stream())
            };
            copied.or_fault(action)?;
        }
        state.filled[slot].record(&self.copies).or_fault(action)
    }
}

/// Blocks that the slots hold, or will hold when the copies started so far are done. Blocks are
/// numbered in the order of their use, which starts again after the last one.
#[derive(Clone, Debug)]
struct Schedule {
    blocks: usize,
    holds: [Option<usize>; SLOTS],
    /// The slot from which a block was last decoded.
    last: usize,
}

/// One use of a block: its slot, and the copies that go with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SlotStep {
    slot: usize,
    /// Whether the block must be copied into it first.
    fill: bool,
    /// A slot to copy another block into, after everything that still reads it, and that block.
    ahead: Option<(usize, usize)>,
}

impl Schedule {
    fn new(blocks: usize) -> Self {
        Self { blocks, holds: [None; SLOTS], last: SLOTS - 1 }
    }

    fn take(&mut self, block: usize) -> SlotStep {
        let held = self.holds.iter().position(|&held| held == Some(block));
        // The previous block may still be read from its slot; the one before that is done soonest.
        let slot = held.unwrap_or((self.last + 1) % SLOTS);
        self.holds[slot] = Some(block);
        self.last = slot;
        let next = (block + 1) % self.blocks;
        let ahead = (!self.holds.contains(&Some(next))).then(|| {
            let other = (slot + 1) % SLOTS;
            self.holds[other] = Some(next);
            (other, next)
        });
        SlotStep { slot, fill: held.is_none(), ahead }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{SLOTS, Schedule, SlotStep};

    #[test]
    fn blocks_in_order_are_copied_once_each_and_ahead() {
        let mut schedule = Schedule::new(3);
        assert_eq!(schedule.take(0), SlotStep { slot: 0, fill: true, ahead: Some((1, 1)) });
        assert_eq!(schedule.take(1), SlotStep { slot: 1, fill: false, ahead: Some((0, 2)) });
        assert_eq!(schedule.take(2), SlotStep { slot: 0, fill: false, ahead: Some((1, 0)) });
        assert_eq!(schedule.take(0), SlotStep { slot: 1, fill: false, ahead: Some((0, 1)) });
    }

    #[test]
    fn few_blocks_stay_where_they_are() {
        let mut one = Schedule::new(1);
        assert_eq!(one.take(0), SlotStep { slot: 0, fill: true, ahead: None });
        assert_eq!(one.take(0), SlotStep { slot: 0, fill: false, ahead: None });
        let mut two = Schedule::new(2);
        assert_eq!(two.take(0).ahead, Some((1, 1)));
        (0..6).for_each(|block| {
            assert!(matches!(two.take(block % 2), SlotStep { fill: false, ahead: None, .. }));
        });
    }

    proptest! {
        /// In any order of use, a block is decoded from the slot that was last filled with it, and
        /// copies ahead go into another slot than the one in use.
        #[test]
        fn any_order_reads_what_was_copied(
            count in 1usize..6,
            uses in prop::collection::vec(0usize..6, 1..200),
        ) {
            let mut schedule = Schedule::new(count);
            let mut content = [None; SLOTS];
            for block in uses.into_iter().map(|block| block % count) {
                let step = schedule.take(block);
                if step.fill {
                    content[step.slot] = Some(block);
                }
                prop_assert_eq!(content[step.slot], Some(block));
                if let Some((slot, next)) = step.ahead {
                    prop_assert!(slot != step.slot && next == (block + 1) % count);
                    content[slot] = Some(next);
                }
                prop_assert!(count == 1 || content.contains(&Some((block + 1) % count)));
            }
        }
    }
}
