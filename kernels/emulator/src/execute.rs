//! Executes instructions: their effects on a warp, its block and memory.

use std::sync::Arc;

use crate::{
    block::Barrier,
    machine::{Fault, Machine, outside},
    program::{
        Address, Combine, Instruction, Operation, PARAMETERS, PRIVATE, SHARED, Source, Space,
        Special,
    },
    scalar,
    warp::{LANES, Mask, ThreadCopy, Warp, lanes},
};

/// How the threads go on.
pub(crate) enum Flow {
    Next,
    /// These alone; others are at the instruction still.
    NextOf(Mask),
    /// They have been sent somewhere.
    Gone,
    /// Others of the warp must come first.
    Held,
    /// Other warps must.
    Waits,
    /// Others may run first.
    Rests,
}

pub(crate) type Result<T> = std::result::Result<T, Fault>;

/// Where a delivery to another block of the cluster goes, in an address of shared memory.
const RANK_SHIFT: u32 = 24;

impl Machine<'_> {
    /// Runs a warp for some instructions, until it has to wait.
    pub(crate) fn run_warp(&mut self, block: usize, number: usize, turns: usize) -> Result<()> {
        let mut warp = self.blocks[block].warps.swap_remove(number);
        let result = self.take_turns(block, &mut warp, turns);
        let warps = &mut self.blocks[block].warps;
        warps.push(warp);
        let last = warps.len() - 1;
        warps.swap(number, last);
        result
    }

    pub(crate) fn take_turns(&mut self, block: usize, warp: &mut Warp, turns: usize) -> Result<()> {
        let program = Arc::clone(&self.launch.program);
        let mut held = 0;
        for _ in 0..turns {
            let Some((place, mask)) = warp.lowest(warp.live & !held) else { return Ok(()) };
            let instruction = &program.code[place as usize];
            self.instructions += 1;
            let active = active(warp, instruction, mask);
            let flow = if active == 0 {
                Flow::Next
            } else {
                let mut step = Step { machine: self, block, warp, mask, active };
                step.execute(&instruction.operation).map_err(|Fault(problem)| {
                    let index = self.blocks[block].index;
                    let (name, line) = (&self.launch.name, instruction.line);
                    Fault(format!("{name}, line {line}, block {index}: {problem}"))
                })?
            };
            match flow {
                Flow::Next => warp.step(mask),
                Flow::NextOf(some) => warp.step(some | mask & !active),
                Flow::Gone => warp.step(mask & !active),
                Flow::Held => {
                    held |= mask;
                    continue;
                }
                Flow::Waits => return Ok(()),
                Flow::Rests => {
                    warp.step(mask);
                    return Ok(());
                }
            }
            held = 0;
        }
        Ok(())
    }
}

fn active(warp: &Warp, instruction: &Instruction, mask: Mask) -> Mask {
    let Some((register, negated)) = instruction.guard else { return mask };
    let values = &warp.registers[register as usize];
    lanes(mask)
        .filter(|&lane| (values[lane] & 1 == 1) != negated)
        .fold(0, |all, lane| all | 1 << lane)
}

/// One instruction of a warp. `active`: those of `mask` whose guard holds.
pub(crate) struct Step<'s, 'l> {
    pub(crate) machine: &'s mut Machine<'l>,
    pub(crate) block: usize,
    pub(crate) warp: &'s mut Warp,
    pub(crate) mask: Mask,
    pub(crate) active: Mask,
}

impl Step<'_, '_> {
    pub(crate) fn value(&self, source: Source, lane: usize) -> u64 {
        match source {
            Source::Register(register) => self.warp.registers[register as usize][lane],
            Source::Value(value) => value,
            Source::Special(special) => self.special(special, lane),
        }
    }

    pub(crate) fn special(&self, special: Special, lane: usize) -> u64 {
        let launch = self.machine.launch;
        match special {
            Special::Thread => (self.warp.number * LANES + lane) as u64,
            Special::Threads => launch.threads.into(),
            Special::Block => self.machine.blocks[self.block].index.into(),
            Special::Blocks => launch.blocks.into(),
            Special::ClusterBlocks => launch.cluster.into(),
            Special::DynamicShared => launch.dynamic_shared.into(),
            Special::DynamicSharedFirst => self.machine.dynamic_first,
        }
    }

    pub(crate) fn set(&mut self, register: u32, lane: usize, value: u64) {
        self.warp.registers[register as usize][lane] = value;
    }

    /// A value that all active threads have alike.
    pub(crate) fn common(&self, source: Source) -> u64 {
        self.value(source, self.active.trailing_zeros() as usize)
    }

    pub(crate) fn address(&self, address: Address, lane: usize) -> u64 {
        self.value(address.base, lane).wrapping_add_signed(address.offset)
    }

    pub(crate) fn shared_address(&self, address: Address, lane: usize) -> u64 {
        self.address(address, lane) & 0xFFFF_FFFF
    }

    pub(crate) fn each(&mut self, to: u32, mut function: impl FnMut(&Self, usize) -> u64) {
        for lane in lanes(self.active) {
            let value = function(self, lane);
            self.set(to, lane, value);
        }
    }

    #[expect(clippy::too_many_lines, reason = "a table")]
    pub(crate) fn execute(&mut self, operation: &Operation) -> Result<Flow> {
        match operation {
            Operation::Nothing => {}
            Operation::Rest => return Ok(Flow::Rests),
            &Operation::Unary(to, a, function) => {
                self.each(to, |step, lane| function(step.value(a, lane)));
            }
            &Operation::Binary(to, a, b, function) => {
                self.each(to, |step, lane| function(step.value(a, lane), step.value(b, lane)));
            }
            &Operation::Ternary(to, a, b, c, function) => self.each(to, |step, lane| {
                function(step.value(a, lane), step.value(b, lane), step.value(c, lane))
            }),
            &Operation::Select(to, a, b, c) => self.each(to, |step, lane| {
                step.value(if step.value(c, lane) & 1 == 1 { a } else { b }, lane)
            }),
            &Operation::LookUp(to, [a, b, c], table) => self.each(to, |step, lane| {
                let [a, b, c] = [a, b, c].map(|source| step.value(source, lane));
                scalar::look_up(a, b, c, table)
            }),
            &Operation::InsertBits(to, sources, width) => self.each(to, |step, lane| {
                let [a, b, start, length] = sources.map(|source| step.value(source, lane));
                scalar::insert_bits(a, b, start, length, width)
            }),
            Operation::Join(to, from, bits) => self.each(*to, |step, lane| {
                let parts = from.iter().enumerate();
                let mask = (1_u64 << bits) - 1;
                parts.fold(0, |word, (at, &part)| {
                    word | (step.value(part, lane) & mask) << (bits * at as u32)
                })
            }),
            Operation::Split(to, from, bits) => {
                for (at, &to) in to.iter().enumerate() {
                    let mask = (1_u64 << bits) - 1;
                    self.each(to, |step, lane| {
                        step.value(*from, lane) >> (bits * at as u32) & mask
                    });
                }
            }
            Operation::Load { space, to, from, bytes, signed } => {
                return self.load(*space, to, *from, *bytes as usize, *signed);
            }
            Operation::Store { space, to, from, bytes } => {
                return self.store(*space, *to, from, *bytes as usize);
            }
            &Operation::Atomic { space, old, to, value, combine } => {
                return self.atomic(space, old, to, value, combine);
            }
            &Operation::Jump(place) => return Ok(self.jump(place)),
            &Operation::Call(place) => return Ok(self.call(place)),
            Operation::CopyPrivate(copies) => self.copy_private(copies),
            Operation::Return => return Ok(self.leave()),
            &Operation::Shuffle { .. }
            | &Operation::Vote { .. }
            | &Operation::Reduce { .. }
            | &Operation::Elect { .. }
            | &Operation::MeetWarp(_) => return Ok(self.exchange(operation)),
            &Operation::Meet { barrier, threads, waits } => {
                return self.meet(barrier, threads, waits);
            }
            Operation::ArriveAtCluster => return Ok(self.arrive_at_cluster()),
            Operation::WaitForCluster => return Ok(self.wait_for_cluster()),
            &Operation::InitBarrier { barrier, count } => {
                for lane in lanes(self.active) {
                    let address = self.shared_address(barrier, lane) as u32;
                    let made = Barrier::new(self.value(count, lane) as u32);
                    self.machine.blocks[self.block].barriers.insert(address, made);
                }
            }
            &Operation::Arrive { barrier, expected } => {
                for lane in lanes(self.active) {
                    let bytes = expected.map_or(0, |bytes| self.value(bytes, lane));
                    self.arrive(self.shared_address(barrier, lane), bytes as u32)?;
                }
            }
            &Operation::TestBarrier { to, barrier, parity } => {
                return self.test_barrier(to, barrier, parity);
            }
            &Operation::MapToBlock { to, address, rank } => self.each(to, |step, lane| {
                let rank = step.value(rank, lane) + 1;
                step.value(address, lane) | rank << RANK_SHIFT
            }),
            &Operation::Copy { to, from, bytes, kept } => self.copy(to, from, bytes, kept)?,
            Operation::CommitCopies => {
                for lane in lanes(self.active) {
                    let thread = &mut self.warp.threads[lane];
                    thread.groups.push_back(std::mem::take(&mut thread.open_group));
                }
            }
            &Operation::WaitForCopies(left) => {
                for lane in lanes(self.active) {
                    while self.warp.threads[lane].groups.len() as u64 > left {
                        let group = self.warp.threads[lane].groups.pop_front();
                        self.finish_copies(group.into_iter().flatten(), lane)?;
                    }
                }
            }
            &Operation::ArriveWithCopies(barrier) => {
                for lane in lanes(self.active) {
                    let thread = &mut self.warp.threads[lane];
                    let mut all: Vec<ThreadCopy> = thread.groups.drain(..).flatten().collect();
                    all.append(&mut thread.open_group);
                    self.finish_copies(all, lane)?;
                    self.arrive(self.shared_address(barrier, lane), 0)?;
                }
            }
            &Operation::CopyBulk { to, from, bytes, barrier, blocks } => {
                self.copy_bulk(to, from, bytes, barrier, blocks)?;
            }
            Operation::CopyBox { to, map, place, barrier, blocks } => {
                self.copy_box(*to, *map, place, *barrier, *blocks)?;
            }
            Operation::LoadMatrices { .. }
            | Operation::Transpose { .. }
            | Operation::Multiply { .. }
            | Operation::MultiplyWide { .. } => return self.matrices(operation),
        }
        Ok(Flow::Next)
    }

    // ---- control

    pub(crate) fn jump(&mut self, place: u32) -> Flow {
        for lane in lanes(self.active) {
            self.warp.places[lane] = place;
        }
        Flow::Gone
    }

    pub(crate) fn call(&mut self, place: u32) -> Flow {
        for lane in lanes(self.active) {
            let next = self.warp.places[lane] + 1;
            self.warp.threads[lane].returns.push(next);
        }
        self.jump(place)
    }

    pub(crate) fn leave(&mut self) -> Flow {
        for lane in lanes(self.active) {
            match self.warp.threads[lane].returns.pop() {
                Some(place) => self.warp.places[lane] = place,
                None => self.warp.live &= !(1 << lane),
            }
        }
        Flow::Gone
    }

    pub(crate) fn private_place(&self, lane: usize, offset: usize) -> usize {
        lane * self.machine.launch.entry.private + offset
    }

    pub(crate) fn copy_private(&mut self, copies: &[(u32, u32, u32)]) {
        for lane in lanes(self.active) {
            for &(from, to, bytes) in copies {
                let [from, to] = [from, to].map(|at| self.private_place(lane, at as usize));
                self.warp.private.copy_within(from..from + bytes as usize, to);
            }
        }
    }

    // ---- memory

    pub(crate) fn bytes(
        &mut self,
        space: Space,
        address: u64,
        lane: usize,
        count: usize,
    ) -> Result<&mut [u8]> {
        if !address.is_multiple_of(count as u64) {
            return Err(Fault(format!("{count} bytes at {address:#x} are not aligned")));
        }
        let offset = address & 0x00FF_FFFF_FFFF_FFFF;
        match (space, address - offset) {
            (Space::Shared, _) => self.shared(address, count),
            (Space::Generic, SHARED) => self.shared(offset, count),
            (Space::Generic, PRIVATE) => {
                let place = self.private_place(lane, offset as usize);
                Ok(&mut self.warp.private[place..place + count])
            }
            (Space::Generic, PARAMETERS) => Err(Fault("parameters are only read".into())),
            _ => self.machine.global(address, count as u64),
        }
    }

    /// Shared memory of the block, or of another one of its cluster.
    pub(crate) fn shared(&mut self, address: u64, count: usize) -> Result<&mut [u8]> {
        let (block, address) = self.block_of(address & 0xFFFF_FFFF);
        self.machine.blocks[block].bytes(address, count).ok_or_else(|| outside(address, count))
    }

    pub(crate) fn block_of(&self, address: u64) -> (usize, u64) {
        match address >> RANK_SHIFT {
            0 => (self.block, address),
            rank => {
                let first = self.machine.blocks[self.block].cluster;
                (first + rank as usize - 1, address & ((1 << RANK_SHIFT) - 1))
            }
        }
    }

    pub(crate) fn load(
        &mut self,
        space: Space,
        to: &[u32],
        from: Address,
        bytes: usize,
        signed: bool,
    ) -> Result<Flow> {
        let all = bytes * to.len();
        let launch = self.machine.launch;
        for lane in lanes(self.active) {
            let address = self.address(from, lane);
            let mut values = [0_u8; 16];
            if space == Space::Generic && address >> 56 == PARAMETERS >> 56 {
                let place = (address - PARAMETERS) as usize;
                let found = launch.parameters.get(place..place + all);
                let problem = || Fault(format!("{all} bytes of parameters at {place}"));
                values[..all].copy_from_slice(found.ok_or_else(problem)?);
            } else {
                let address = if space == Space::Shared { address & 0xFFFF_FFFF } else { address };
                values[..all].copy_from_slice(self.bytes(space, address, lane, all)?);
            }
            for (&to, value) in to.iter().zip(values.chunks_exact(bytes)) {
                let mut word = [0; 8];
                word[..bytes].copy_from_slice(value);
                let value = u64::from_le_bytes(word);
                let shift = 64 - 8 * bytes as u32;
                let signed_value = ((value << shift).cast_signed() >> shift).cast_unsigned();
                self.set(to, lane, if signed { signed_value & 0xFFFF_FFFF } else { value });
            }
        }
        Ok(Flow::Next)
    }

    pub(crate) fn store(
        &mut self,
        space: Space,
        to: Address,
        from: &[Source],
        bytes: usize,
    ) -> Result<Flow> {
        let all = bytes * from.len();
        for lane in lanes(self.active) {
            let mut values = [0_u8; 16];
            for (&from, place) in from.iter().zip(values.chunks_exact_mut(bytes)) {
                place.copy_from_slice(&self.value(from, lane).to_le_bytes()[..bytes]);
            }
            let address = self.address(to, lane);
            let address = if space == Space::Shared { address & 0xFFFF_FFFF } else { address };
            self.bytes(space, address, lane, all)?.copy_from_slice(&values[..all]);
        }
        self.machine.note_progress();
        Ok(Flow::Next)
    }

    pub(crate) fn atomic(
        &mut self,
        space: Space,
        old: u32,
        to: Address,
        value: Source,
        combine: Combine,
    ) -> Result<Flow> {
        for lane in lanes(self.active) {
            let address = self.address(to, lane);
            let address = if space == Space::Shared { address & 0xFFFF_FFFF } else { address };
            let value = self.value(value, lane) as u32;
            let place = self.bytes(space, address, lane, 4)?;
            let before = u32::from_le_bytes(place.try_into().expect("four bytes"));
            place.copy_from_slice(&combined(combine, before, value).to_le_bytes());
            self.set(old, lane, before.into());
        }
        self.machine.note_progress();
        Ok(Flow::Next)
    }
}

pub(crate) fn combined(how: Combine, before: u32, value: u32) -> u32 {
    match how {
        Combine::Add => before.wrapping_add(value),
        Combine::Or => before | value,
        Combine::Max => before.max(value),
        Combine::Exchange => value,
    }
}
