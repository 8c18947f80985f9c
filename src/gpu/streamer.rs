//! Streamed blocks: copied from pinned host memory into slots on the GPU, ahead of their use,
//! without a wait of the host.
#![expect(unsafe_code, reason = "copies to the device, each with its proof")]

use std::sync::{Arc, Mutex};

use cudarc::driver::{CudaEvent, CudaStream, result, sys::CUdeviceptr};

use super::{
    Device, distribution::SLOTS, fault::OrFault, host_section::HostSection, memory::Buffer,
    schedule::Schedule,
};
use crate::{Result, parallel};

/// A section on its way into a slot.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) section: Arc<HostSection>,
    /// Where it goes, in bytes from the slot's start.
    pub(super) to: u64,
}

/// The slots of one GPU, and what goes through them.
#[derive(Debug)]
pub(super) struct Streamer {
    slots: Buffer,
    slot_bytes: u64,
    /// For each streamed block, in the order in which they are used.
    blocks: Vec<Vec<Transfer>>,
    copies: Arc<CudaStream>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    schedule: Schedule,
    /// For each slot: the last copy into it is done.
    filled: [CudaEvent; SLOTS],
    /// For each slot: all that was to read it so far is done.
    used: [CudaEvent; SLOTS],
}

impl Streamer {
    /// Allocates slots that hold any of the blocks.
    pub(super) fn new(device: &Device, blocks: Vec<Vec<Transfer>>) -> Result<Self> {
        let end = |transfer: &Transfer| transfer.to + transfer.section.bytes().len() as u64;
        let largest = blocks.iter().flatten().map(end).max().unwrap_or(0);
        let slot_bytes = largest.next_multiple_of(crate::constants::SECTION_ALIGNMENT);
        let slots = device.allocate(
            slot_bytes * SLOTS.min(blocks.len()) as u64,
            "the slots of streamed blocks",
        )?;
        let events = || Ok::<_, crate::Error>([device.new_event()?, device.new_event()?]);
        let state =
            State { schedule: Schedule::new(blocks.len()), filled: events()?, used: events()? };
        let copies = device.new_stream()?;
        Ok(Self { slots, slot_bytes, blocks, copies, state: Mutex::new(state) })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.slots.bytes()
    }

    /// The device address of a slot.
    pub(super) fn slot(&self, slot: usize) -> CUdeviceptr {
        self.slots.pointer() + slot as u64 * self.slot_bytes
    }

    /// Lets `decode` put work on the stream that reads a block from the slot which it is told;
    /// starts to copy the block that follows.
    pub(super) fn with_block(
        &self,
        block: usize,
        stream: &CudaStream,
        decode: impl FnOnce(usize) -> Result<()>,
    ) -> Result<()> {
        let mut state = parallel::lock(&self.state);
        let result = self.step(&mut state, block, stream, decode);
        if result.is_err() {
            state.schedule.forget();
        }
        result
    }

    fn step(
        &self,
        state: &mut State,
        block: usize,
        stream: &CudaStream,
        decode: impl FnOnce(usize) -> Result<()>,
    ) -> Result<()> {
        let action = "ordering copies and kernels";
        let step = state.schedule.take(block);
        if step.fill {
            self.fill(state, step.slot, block)?;
        }
        stream.wait(&state.filled[step.slot]).or_fault(action)?;
        // Also what other streams read from the slot is done when the event below is.
        stream.wait(&state.used[step.slot]).or_fault(action)?;
        decode(step.slot)?;
        state.used[step.slot].record(stream).or_fault(action)?;
        match step.ahead {
            Some((slot, next)) => self.fill(state, slot, next),
            None => Ok(()),
        }
    }

    /// Starts to copy a block into a slot, once nothing reads that any more.
    fn fill(&self, state: &State, slot: usize, block: usize) -> Result<()> {
        let action = "copying to the GPU";
        self.copies.wait(&state.used[slot]).or_fault(action)?;
        for transfer in &self.blocks[block] {
            let to = self.slot(slot) + transfer.to;
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
