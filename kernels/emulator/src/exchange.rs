//! Exchanges between threads of a warp, a block and a cluster.

use crate::{
    execute::{Flow, Result, Step, combined},
    machine::Fault,
    program::{Address, Operation, Shuffle, Source, Vote},
    warp::{LANES, Mask, lanes},
};

impl Step<'_, '_> {
    // ---- threads of a warp

    /// The live threads that the mask names, if all of them are here.
    pub(crate) fn meeting_of(&self, mask: Source) -> Option<Mask> {
        let wanted = self.common(mask) as Mask & self.warp.live;
        (self.active & wanted == wanted).then_some(wanted)
    }

    pub(crate) fn exchange(&mut self, operation: &Operation) -> Flow {
        let (Operation::Shuffle { mask, .. }
        | Operation::Vote { mask, .. }
        | Operation::Reduce { mask, .. }
        | Operation::Elect { mask, .. }
        | Operation::MeetWarp(mask)) = *operation
        else {
            unreachable!("an exchange")
        };
        let Some(here) = self.meeting_of(mask) else { return Flow::Held };
        match *operation {
            Operation::Shuffle { how, to, valid, from, by, clamp, .. } => {
                let values: [u64; LANES] = std::array::from_fn(|lane| self.value(from, lane));
                for lane in lanes(here) {
                    let (by, clamp) = (self.value(by, lane) as usize, self.value(clamp, lane));
                    let (source, is_valid) = shuffled(how, lane, by, clamp);
                    self.set(to, lane, values[source]);
                    self.set(valid, lane, is_valid.into());
                }
            }
            Operation::Vote { how, to, from, .. } => {
                let ballot = lanes(here).filter(|&lane| self.value(from, lane) & 1 == 1);
                let ballot = ballot.fold(0, |all: Mask, lane| all | 1 << lane);
                let result = match how {
                    Vote::Ballot => ballot.into(),
                    Vote::Any => u64::from(ballot != 0),
                    Vote::All => u64::from(ballot == here),
                };
                lanes(here).for_each(|lane| self.set(to, lane, result));
            }
            Operation::Reduce { combine, to, from, .. } => {
                let values = lanes(here).map(|lane| self.value(from, lane) as u32);
                let result = values.reduce(|a, b| combined(combine, a, b)).unwrap_or(0);
                lanes(here).for_each(|lane| self.set(to, lane, result.into()));
            }
            Operation::Elect { to, .. } => {
                let first = here.trailing_zeros() as usize;
                lanes(here).for_each(|lane| self.set(to, lane, u64::from(lane == first)));
            }
            _ => {}
        }
        Flow::NextOf(here)
    }

    // ---- threads of a block

    pub(crate) fn meet(
        &mut self,
        barrier: Source,
        threads: Option<Source>,
        waits: bool,
    ) -> Result<Flow> {
        if self.active != self.warp.live {
            return Ok(Flow::Held);
        }
        let number = self.common(barrier);
        let of_block = self.machine.launch.threads.div_ceil(LANES as u32) * LANES as u32;
        let wanted = threads.map_or(of_block, |threads| self.common(threads) as u32);
        let block = &mut self.machine.blocks[self.block];
        let meeting = block.meetings.entry(number).or_default();
        if let Some((_, generation)) = self.warp.meeting {
            if meeting.generation == generation {
                return Ok(Flow::Waits);
            }
            self.warp.meeting = None;
            return Ok(Flow::Next);
        }
        meeting.arrived += LANES as u32;
        if meeting.arrived > wanted || number > 15 {
            let problem = format!("{} threads of {wanted} at barrier {number}", meeting.arrived);
            return Err(Fault(problem));
        }
        let generation = meeting.generation;
        if meeting.arrived == wanted {
            meeting.arrived = 0;
            meeting.generation += 1;
        }
        self.machine.note_progress();
        if !waits {
            return Ok(Flow::Next);
        }
        self.warp.meeting = Some((number, generation));
        Ok(Flow::Waits)
    }

    pub(crate) fn cluster(&self) -> usize {
        self.machine.blocks[self.block].cluster
    }

    pub(crate) fn arrive_at_cluster(&mut self) -> Flow {
        if self.active != self.warp.live {
            return Flow::Held;
        }
        self.warp.cluster_arrivals += 1;
        *self.machine.cluster_arrivals.entry(self.cluster()).or_default() += 1;
        self.machine.note_progress();
        Flow::Next
    }

    pub(crate) fn wait_for_cluster(&mut self) -> Flow {
        if self.active != self.warp.live {
            return Flow::Held;
        }
        let launch = self.machine.launch;
        let warps = u64::from(launch.cluster * launch.threads.div_ceil(LANES as u32));
        let arrived = self.machine.cluster_arrivals.get(&self.cluster()).copied().unwrap_or(0);
        if arrived < self.warp.cluster_arrivals * warps { Flow::Waits } else { Flow::Next }
    }

    pub(crate) fn arrive(&mut self, address: u64, bytes: u32) -> Result<()> {
        let (block, address) = self.block_of(address);
        let barrier = self.machine.blocks[block].barriers.get_mut(&(address as u32));
        let barrier = barrier.ok_or_else(|| Fault(format!("no barrier at {address:#x}")))?;
        if !barrier.arrive(bytes) {
            let state = barrier.describe();
            return Err(Fault(format!("one arrival too many at {address:#x}: {state}")));
        }
        self.machine.note_progress();
        Ok(())
    }

    /// A phase of this parity has ended, and the one after it has not.
    pub(crate) fn test_barrier(
        &mut self,
        to: u32,
        barrier: Address,
        parity: Source,
    ) -> Result<Flow> {
        let mut is_done = true;
        for lane in lanes(self.active) {
            let address = self.shared_address(barrier, lane) as u32;
            let found = self.machine.blocks[self.block].barriers.get(&address);
            let found = found.ok_or_else(|| Fault(format!("no barrier at {address:#x}")))?;
            let done = found.phase & 1 != self.value(parity, lane) & 1;
            is_done &= done;
            self.set(to, lane, done.into());
        }
        Ok(if is_done { Flow::Next } else { Flow::Rests })
    }
}

/// The lane whose value a thread gets, and whether the requested lane exists (PTX ISA, 9.7.9.6).
fn shuffled(how: Shuffle, lane: usize, by: usize, clamp: u64) -> (usize, bool) {
    let (segment, bound) = (clamp as usize >> 8 & 31, clamp as usize & 31);
    let last = lane & segment | bound & !segment;
    let (source, is_valid) = match how {
        Shuffle::Up => (lane.wrapping_sub(by), lane >= by && lane - by >= last),
        Shuffle::Down => (lane + by, lane + by <= last),
        Shuffle::Butterfly => (lane ^ by, lane ^ by <= last),
        Shuffle::Index => {
            let source = lane & segment | by & !segment & 31;
            (source, source <= last)
        }
    };
    (if is_valid { source } else { lane }, is_valid)
}
