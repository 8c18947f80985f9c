//! A block: the memory, barriers and pending copies that its threads share.

use std::collections::HashMap;

use crate::{map::TensorMap, program::SHARED_FIRST, warp::Warp};

/// A barrier that counts threads, and starts again when all have come.
#[derive(Default)]
pub(crate) struct Meeting {
    pub(crate) arrived: u32,
    pub(crate) generation: u64,
}

/// An mbarrier (PTX ISA, 9.7.13.15): a phase ends when no arrival and no byte is pending.
pub(crate) struct Barrier {
    expected: u32,
    pending: u32,
    bytes: i64,
    pub(crate) phase: u64,
}

impl Barrier {
    pub(crate) fn new(expected: u32) -> Self {
        Self { expected, pending: expected, bytes: 0, phase: 0 }
    }

    /// A thread arrives, and expects so many bytes more. False if the phase has all its arrivals.
    pub(crate) fn arrive(&mut self, bytes: u32) -> bool {
        if self.pending == 0 {
            return false;
        }
        self.bytes += i64::from(bytes);
        self.pending -= 1;
        self.end_phase();
        true
    }

    pub(crate) fn complete(&mut self, bytes: u32) {
        self.bytes -= i64::from(bytes);
        self.end_phase();
    }

    fn end_phase(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.pending = self.expected;
            self.phase += 1;
        }
    }

    pub(crate) fn describe(&self) -> String {
        let Self { expected, pending, bytes, phase } = self;
        format!("phase {phase}, {pending} of {expected} arrivals and {bytes} bytes pending")
    }
}

/// A copy by the copy engine, which comes at any time after it was asked for.
pub(crate) struct Delivery {
    pub(crate) from: Origin,
    /// Places in the shared memory of these blocks, counted in the resident ones.
    pub(crate) blocks: Vec<usize>,
    pub(crate) to: u32,
    pub(crate) bytes: u32,
    pub(crate) barrier: u32,
}

pub(crate) enum Origin {
    Memory(u64),
    /// And the first element of the box in each dimension.
    Box(TensorMap, Vec<i64>),
}

pub(crate) struct Block {
    pub(crate) index: u32,
    /// Its cluster's first block among the resident ones.
    pub(crate) cluster: usize,
    pub(crate) shared: Vec<u8>,
    pub(crate) warps: Vec<Warp>,
    pub(crate) meetings: HashMap<u64, Meeting>,
    pub(crate) barriers: HashMap<u32, Barrier>,
}

impl Block {
    /// Bytes of shared memory, if they exist.
    pub(crate) fn bytes(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let from = usize::try_from(address.checked_sub(SHARED_FIRST)?).ok()?;
        self.shared.get_mut(from..from.checked_add(bytes)?)
    }
}
