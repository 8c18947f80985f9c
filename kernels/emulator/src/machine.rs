//! A launch: blocks that are resident at once, whose warps take turns in a random order, so that
//! every run tries another interleaving.

use std::{collections::HashMap, fmt::Write as _, sync::Arc};

use crate::{
    block::{Block, Delivery, Origin},
    memory::Allocations,
    program::{Entry, Program, SHARED_FIRST},
    warp::{LANES, Warp},
};

/// Shared memory before a kernel writes it, and where a copy will come.
const POISON: u8 = 0xA5;
/// Rounds in which every warp waits in vain after which a launch hangs.
const PATIENCE: u64 = 20_000;

/// One launch of a kernel.
pub(crate) struct Launch {
    pub(crate) program: Arc<Program>,
    pub(crate) entry: Arc<Entry>,
    pub(crate) name: String,
    pub(crate) parameters: Vec<u8>,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) cluster: u32,
    pub(crate) dynamic_shared: u32,
    /// Blocks that run at once.
    pub(crate) resident: u32,
    pub(crate) seed: u64,
}

pub(crate) struct Machine<'l> {
    pub(crate) launch: &'l Launch,
    pub(crate) allocations: Allocations,
    pub(crate) blocks: Vec<Block>,
    pub(crate) deliveries: Vec<Delivery>,
    /// By the first block of a cluster: arrivals of warps at its barrier.
    pub(crate) cluster_arrivals: HashMap<usize, u64>,
    pub(crate) dynamic_first: u64,
    random: u64,
    /// Whether anything has happened that somebody may wait for.
    has_progressed: bool,
    pub(crate) instructions: u64,
}

/// Why a kernel cannot go on.
#[derive(Debug)]
pub(crate) struct Fault(pub(crate) String);

/// Runs it; how many instructions of warps that took.
pub(crate) fn run(launch: &Launch) -> Result<u64, Fault> {
    let first = (SHARED_FIRST as usize + launch.entry.static_shared).next_multiple_of(16);
    let mut machine = Machine {
        launch,
        allocations: Allocations::now(),
        blocks: Vec::new(),
        deliveries: Vec::new(),
        cluster_arrivals: HashMap::new(),
        dynamic_first: first as u64,
        random: launch.seed,
        has_progressed: false,
        instructions: 0,
    };
    let at_once = (launch.resident / launch.cluster).max(1) * launch.cluster;
    let mut next = 0;
    while next < launch.blocks {
        let end = launch.blocks.min(next + at_once);
        machine.begin(next, end);
        next = end;
        machine.finish()?;
    }
    Ok(machine.instructions)
}

impl Machine<'_> {
    fn begin(&mut self, first: u32, end: u32) {
        let launch = self.launch;
        let bytes = self.dynamic_first - SHARED_FIRST + u64::from(launch.dynamic_shared);
        let warps = (launch.threads as usize).div_ceil(LANES);
        self.cluster_arrivals.clear();
        self.blocks.clear();
        for index in first..end {
            let warp = |number| {
                let threads = launch.threads as usize - number * LANES;
                Warp::new(number, threads, &launch.entry)
            };
            let place = self.blocks.len();
            self.blocks.push(Block {
                index,
                cluster: place - place % launch.cluster as usize,
                shared: vec![POISON; bytes as usize],
                warps: (0..warps).map(warp).collect(),
                meetings: HashMap::new(),
                barriers: HashMap::new(),
            });
        }
    }

    /// Runs the resident blocks to their end.
    fn finish(&mut self) -> Result<(), Fault> {
        let mut left: Vec<(usize, usize)> = Vec::new();
        for (place, block) in self.blocks.iter().enumerate() {
            left.extend((0..block.warps.len()).map(|warp| (place, warp)));
        }
        let (mut awake, mut rounds) = (left.clone(), 0);
        while !left.is_empty() {
            // Who waited in vain comes again when something has happened.
            if awake.is_empty() || self.has_progressed {
                rounds = if self.has_progressed { 0 } else { rounds + 1 };
                self.has_progressed = false;
                awake.clone_from(&left);
            }
            if rounds > PATIENCE {
                return Err(self.hang(&left));
            }
            let at = self.choose(awake.len());
            let (block, warp) = awake.swap_remove(at);
            let turns = 1 + self.choose(300);
            self.run_warp(block, warp, turns)?;
            if self.blocks[block].warps[warp].is_done() {
                left.retain(|&one| one != (block, warp));
                self.has_progressed = true;
            }
            self.deliver_some(rounds)?;
        }
        if let Some(delivery) = self.deliveries.first() {
            let problem =
                format!("a copy to shared {:#x} comes after its block's end", delivery.to);
            return Err(Fault(problem));
        }
        Ok(())
    }

    pub(crate) fn choose(&mut self, among: usize) -> usize {
        // xorshift64*
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let high = self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        high as usize % among
    }

    pub(crate) fn note_progress(&mut self) {
        self.has_progressed = true;
    }

    fn deliver_some(&mut self, rounds: u64) -> Result<(), Fault> {
        let is_slow = rounds == 0 && self.choose(4) != 0;
        if self.deliveries.is_empty() || is_slow {
            return Ok(());
        }
        let at = self.choose(self.deliveries.len());
        let delivery = self.deliveries.swap_remove(at);
        self.deliver(&delivery)
    }

    /// Asks for a copy. What is at its place until it comes is of no use.
    pub(crate) fn ask(&mut self, delivery: Delivery) -> Result<(), Fault> {
        let (to, bytes) = (u64::from(delivery.to), delivery.bytes as usize);
        if to % 16 != 0 || bytes % 16 != 0 {
            return Err(Fault(format!("a copy of {bytes} bytes to {to:#x} is not aligned")));
        }
        for &block in &delivery.blocks {
            let there = self.blocks[block].bytes(to, bytes);
            there.ok_or_else(|| outside(to, bytes))?.fill(POISON);
        }
        self.deliveries.push(delivery);
        Ok(())
    }

    fn deliver(&mut self, delivery: &Delivery) -> Result<(), Fault> {
        let bytes = match &delivery.from {
            Origin::Memory(from) => {
                if from % 16 != 0 {
                    return Err(Fault(format!("a copy from {from:#x} is not aligned")));
                }
                self.global(*from, u64::from(delivery.bytes))?.to_vec()
            }
            Origin::Box(map, place) => map.take(place, delivery.to, |address, bytes| {
                self.global(address, bytes).map(|bytes| bytes.to_vec())
            })?,
        };
        if bytes.len() != delivery.bytes as usize {
            return Err(Fault("a box has another size".into()));
        }
        for &place in &delivery.blocks {
            let block = &mut self.blocks[place];
            let to = block.bytes(delivery.to.into(), bytes.len());
            to.ok_or_else(|| outside(delivery.to.into(), bytes.len()))?.copy_from_slice(&bytes);
            let barrier = block.barriers.get_mut(&delivery.barrier);
            let problem = || Fault(format!("no barrier at {:#x}", delivery.barrier));
            barrier.ok_or_else(problem)?.complete(delivery.bytes);
        }
        self.note_progress();
        Ok(())
    }

    /// Bytes of device memory.
    #[expect(unsafe_code, reason = "device memory is the process's")]
    pub(crate) fn global(&mut self, address: u64, bytes: u64) -> Result<&mut [u8], Fault> {
        if !self.allocations.have(address, bytes) {
            return Err(Fault(format!("{bytes} bytes at {address:#x} were not allocated")));
        }
        // SAFETY: they lie in an allocation, which lives as long as the launch, and one thread runs
        // all of it.
        Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes as usize) })
    }

    /// Where everybody waits.
    fn hang(&self, left: &[(usize, usize)]) -> Fault {
        let mut text = format!("{} hangs:", self.launch.name);
        for &(place, number) in left.iter().take(80) {
            let block = &self.blocks[place];
            let warp = &block.warps[number];
            let mut among = warp.live;
            while let Some((place, mask)) = warp.lowest(among) {
                among &= !mask;
                let line = self.launch.program.code[place as usize].line;
                let index = block.index;
                let _ = write!(text, "\n  block {index} warp {number} {mask:08x}: line {line}");
            }
        }
        for block in &self.blocks {
            let mut barriers: Vec<_> = block.barriers.iter().collect();
            barriers.sort_by_key(|(address, _)| **address);
            for (address, barrier) in barriers {
                let (index, state) = (block.index, barrier.describe());
                let _ = write!(text, "\n  block {index} {address:#x}: {state}");
            }
        }
        Fault(text)
    }
}

pub(crate) fn outside(address: u64, bytes: usize) -> Fault {
    Fault(format!("{bytes} bytes at shared {address:#x} are not the block's"))
}
