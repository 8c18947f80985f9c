//! A warp: 32 threads, each at its own instruction. Those at the lowest one go on, together.

use std::collections::VecDeque;

use crate::program::Entry;

pub(crate) const LANES: usize = 32;
pub(crate) type Mask = u32;

/// A copy that a thread asked for with `cp.async`.
pub(crate) struct ThreadCopy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: u32,
    /// The rest becomes zeros.
    pub(crate) kept: u32,
}

#[derive(Default)]
pub(crate) struct Thread {
    pub(crate) returns: Vec<u32>,
    /// Groups of copies that are on their way, and those of the group that is not closed.
    pub(crate) groups: VecDeque<Vec<ThreadCopy>>,
    pub(crate) open_group: Vec<ThreadCopy>,
}

pub(crate) struct Warp {
    /// Number in the block.
    pub(crate) number: usize,
    pub(crate) threads: Vec<Thread>,
    /// The instruction at which each thread is.
    pub(crate) places: [u32; LANES],
    /// Threads that have not ended.
    pub(crate) live: Mask,
    pub(crate) registers: Vec<[u64; LANES]>,
    pub(crate) private: Vec<u8>,
    /// The barrier at which it waits, and the generation that must end.
    pub(crate) meeting: Option<(u64, u64)>,
    /// How often it has arrived at the cluster's barrier.
    pub(crate) cluster_arrivals: u64,
}

impl Warp {
    pub(crate) fn new(number: usize, threads: usize, entry: &Entry) -> Self {
        Self {
            number,
            threads: (0..LANES).map(|_| Thread::default()).collect(),
            places: [entry.start; LANES],
            live: if threads >= LANES { u32::MAX } else { (1 << threads) - 1 },
            registers: vec![[0; LANES]; entry.registers],
            private: vec![0; entry.private * LANES],
            meeting: None,
            cluster_arrivals: 0,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.live == 0
    }

    /// The threads among these that are at the lowest instruction, and its place.
    pub(crate) fn lowest(&self, among: Mask) -> Option<(u32, Mask)> {
        if among == 0 {
            return None;
        }
        let is_among = |lane: usize| among >> lane & 1 == 1;
        let place = |lane: usize| if is_among(lane) { self.places[lane] } else { u32::MAX };
        let lowest = (0..LANES).map(place).min()?;
        let bit = |lane: usize| Mask::from(place(lane) == lowest) << lane;
        Some((lowest, (0..LANES).map(bit).fold(0, |mask, bit| mask | bit)))
    }

    pub(crate) fn step(&mut self, mask: Mask) {
        for lane in lanes(mask) {
            self.places[lane] += 1;
        }
    }
}

pub(crate) fn lanes(mask: Mask) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}
