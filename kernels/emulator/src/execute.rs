//! What instructions do to a warp, its block and memory.

use std::sync::Arc;

use crate::{
    block::{Barrier, Delivery, Meeting, Origin},
    machine::{Fault, Machine, outside},
    program::{
        Address, Combine, Instruction, Operation, PARAMETERS, PRIVATE, SHARED, Shuffle, Source,
        Space, Special, Vote,
    },
    scalar,
    warp::{LANES, Mask, ThreadCopy, Warp, lanes},
};

/// How the threads go on.
enum Flow {
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

type Result<T> = std::result::Result<T, Fault>;

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

    fn take_turns(&mut self, block: usize, warp: &mut Warp, turns: usize) -> Result<()> {
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
    lanes(mask).filter(|&lane| (values[lane] & 1 == 1) != negated).fold(0, |all, lane| all | 1 << lane)
}

/// One instruction of a warp. `active`: those of `mask` whose guard holds.
struct Step<'s, 'l> {
    machine: &'s mut Machine<'l>,
    block: usize,
    warp: &'s mut Warp,
    mask: Mask,
    active: Mask,
}

impl Step<'_, '_> {
    fn value(&self, source: Source, lane: usize) -> u64 {
        match source {
            Source::Register(register) => self.warp.registers[register as usize][lane],
            Source::Value(value) => value,
            Source::Special(special) => self.special(special, lane),
        }
    }

    fn special(&self, special: Special, lane: usize) -> u64 {
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

    fn set(&mut self, register: u32, lane: usize, value: u64) {
        self.warp.registers[register as usize][lane] = value;
    }

    /// A value that all active threads have alike.
    fn common(&self, source: Source) -> u64 {
        self.value(source, self.active.trailing_zeros() as usize)
    }

    fn address(&self, address: Address, lane: usize) -> u64 {
        self.value(address.base, lane).wrapping_add_signed(address.offset)
    }

    fn shared_address(&self, address: Address, lane: usize) -> u64 {
        self.address(address, lane) & 0xFFFF_FFFF
    }

    fn each(&mut self, to: u32, mut function: impl FnMut(&Self, usize) -> u64) {
        for lane in lanes(self.active) {
            let value = function(self, lane);
            self.set(to, lane, value);
        }
    }

    fn execute(&mut self, operation: &Operation) -> Result<Flow> {
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
            Operation::CopyBox { to, map, place, barrier } => {
                self.copy_box(*to, *map, place, *barrier)?;
            }
            Operation::LoadMatrices { .. }
            | Operation::Transpose { .. }
            | Operation::Multiply { .. }
            | Operation::MultiplyWide { .. } => return self.matrices(operation),
        }
        Ok(Flow::Next)
    }

    // ---- control

    fn jump(&mut self, place: u32) -> Flow {
        for lane in lanes(self.active) {
            self.warp.places[lane] = place;
        }
        Flow::Gone
    }

    fn call(&mut self, place: u32) -> Flow {
        for lane in lanes(self.active) {
            let next = self.warp.places[lane] + 1;
            self.warp.threads[lane].returns.push(next);
        }
        self.jump(place)
    }

    fn leave(&mut self) -> Flow {
        for lane in lanes(self.active) {
            match self.warp.threads[lane].returns.pop() {
                Some(place) => self.warp.places[lane] = place,
                None => self.warp.live &= !(1 << lane),
            }
        }
        Flow::Gone
    }

    fn private_place(&self, lane: usize, offset: usize) -> usize {
        lane * self.machine.launch.entry.private + offset
    }

    fn copy_private(&mut self, copies: &[(u32, u32, u32)]) {
        for lane in lanes(self.active) {
            for &(from, to, bytes) in copies {
                let [from, to] = [from, to].map(|at| self.private_place(lane, at as usize));
                self.warp.private.copy_within(from..from + bytes as usize, to);
            }
        }
    }

    // ---- memory

    fn bytes(&mut self, space: Space, address: u64, lane: usize, count: usize) -> Result<&mut [u8]> {
        if address % count as u64 != 0 {
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
            (Space::Generic, PARAMETERS) => {
                Err(Fault("parameters are only read".into()))
            }
            _ => self.machine.global(address, count as u64),
        }
    }

    /// Shared memory of the block, or of another one of its cluster.
    fn shared(&mut self, address: u64, count: usize) -> Result<&mut [u8]> {
        let (block, address) = self.block_of(address & 0xFFFF_FFFF);
        self.machine.blocks[block].bytes(address, count).ok_or_else(|| outside(address, count))
    }

    fn block_of(&self, address: u64) -> (usize, u64) {
        match address >> RANK_SHIFT {
            0 => (self.block, address),
            rank => {
                let first = self.machine.blocks[self.block].cluster;
                (first + rank as usize - 1, address & ((1 << RANK_SHIFT) - 1))
            }
        }
    }

    fn load(&mut self, space: Space, to: &[u32], from: Address, bytes: usize, signed: bool) -> Result<Flow> {
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

    fn store(&mut self, space: Space, to: Address, from: &[Source], bytes: usize) -> Result<Flow> {
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

    fn atomic(&mut self, space: Space, old: u32, to: Address, value: Source, combine: Combine) -> Result<Flow> {
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

    // ---- threads of a warp

    /// Those that the mask names, if all of them that live are here.
    fn meeting_of(&self, mask: Source) -> Option<Mask> {
        let wanted = self.common(mask) as Mask & self.warp.live;
        (self.active & wanted == wanted).then_some(wanted)
    }

    fn exchange(&mut self, operation: &Operation) -> Flow {
        let mask = match *operation {
            Operation::Shuffle { mask, .. }
            | Operation::Vote { mask, .. }
            | Operation::Reduce { mask, .. }
            | Operation::Elect { mask, .. }
            | Operation::MeetWarp(mask) => mask,
            _ => unreachable!("an exchange"),
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

    fn meet(&mut self, barrier: Source, threads: Option<Source>, waits: bool) -> Result<Flow> {
        if self.active != self.warp.live {
            return Ok(Flow::Held);
        }
        let number = self.common(barrier);
        let of_block = self.machine.launch.threads.div_ceil(LANES as u32) * LANES as u32;
        let wanted = threads.map_or(of_block, |threads| self.common(threads) as u32);
        let block = &mut self.machine.blocks[self.block];
        let meeting = block.meetings.entry(number).or_insert_with(Meeting::default);
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

    fn cluster(&self) -> usize {
        self.machine.blocks[self.block].cluster
    }

    fn arrive_at_cluster(&mut self) -> Flow {
        if self.active != self.warp.live {
            return Flow::Held;
        }
        self.warp.cluster_arrivals += 1;
        *self.machine.cluster_arrivals.entry(self.cluster()).or_default() += 1;
        self.machine.note_progress();
        Flow::Next
    }

    fn wait_for_cluster(&mut self) -> Flow {
        if self.active != self.warp.live {
            return Flow::Held;
        }
        let launch = self.machine.launch;
        let warps = u64::from(launch.cluster * launch.threads.div_ceil(LANES as u32));
        let arrived = self.machine.cluster_arrivals.get(&self.cluster()).copied().unwrap_or(0);
        if arrived < self.warp.cluster_arrivals * warps { Flow::Waits } else { Flow::Next }
    }

    fn arrive(&mut self, address: u64, bytes: u32) -> Result<()> {
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
    fn test_barrier(&mut self, to: u32, barrier: Address, parity: Source) -> Result<Flow> {
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

    // ---- copies

    fn copy(&mut self, to: Address, from: Address, bytes: u32, kept: Source) -> Result<()> {
        let is_late = self.machine.choose(2) == 0;
        for lane in lanes(self.active) {
            let copy = ThreadCopy {
                to: self.shared_address(to, lane),
                from: self.address(from, lane),
                bytes,
                kept: self.value(kept, lane) as u32,
            };
            if is_late {
                self.warp.threads[lane].open_group.push(copy);
            } else {
                self.finish_copies([copy], lane)?;
            }
        }
        Ok(())
    }

    fn finish_copies(&mut self, copies: impl IntoIterator<Item = ThreadCopy>, lane: usize) -> Result<()> {
        for copy in copies {
            let mut bytes = vec![0; copy.bytes as usize];
            if copy.kept > copy.bytes {
                return Err(Fault(format!("{} bytes of {}", copy.kept, copy.bytes)));
            }
            let kept = copy.kept as usize;
            if kept > 0 {
                bytes[..kept].copy_from_slice(self.machine.global(copy.from, copy.kept.into())?);
            }
            self.bytes(Space::Shared, copy.to, lane, bytes.len())?.copy_from_slice(&bytes);
        }
        self.machine.note_progress();
        Ok(())
    }

    fn copy_bulk(&mut self, to: Address, from: Address, bytes: Source, barrier: Address, blocks: Option<Source>) -> Result<()> {
        let first = self.cluster();
        for lane in lanes(self.active) {
            let ranks = blocks.map(|mask| self.value(mask, lane) as Mask);
            let blocks = match ranks {
                Some(ranks) => lanes(ranks).map(|rank| first + rank).collect(),
                None => vec![self.block],
            };
            let delivery = Delivery {
                from: Origin::Memory(self.address(from, lane)),
                blocks,
                to: self.shared_address(to, lane) as u32,
                bytes: self.value(bytes, lane) as u32,
                barrier: self.shared_address(barrier, lane) as u32,
            };
            self.machine.ask(delivery)?;
        }
        Ok(())
    }

    fn copy_box(&mut self, to: Address, map: Address, place: &[Source], barrier: Address) -> Result<()> {
        for lane in lanes(self.active) {
            let map_address = self.address(map, lane);
            let place = place.iter().map(|&at| i64::from(self.value(at, lane) as i32)).collect();
            let found = self.map(map_address)?;
            let delivery = Delivery {
                bytes: found.box_bytes(),
                from: Origin::Box(found, place),
                blocks: vec![self.block],
                to: self.shared_address(to, lane) as u32,
                barrier: self.shared_address(barrier, lane) as u32,
            };
            self.machine.ask(delivery)?;
        }
        Ok(())
    }

    /// The tensor map there, in the parameters of the launch.
    fn map(&self, address: u64) -> Result<crate::map::TensorMap> {
        let place = address.wrapping_sub(PARAMETERS) as usize;
        let bytes = self.machine.launch.parameters.get(place..place.wrapping_add(128));
        crate::map::TensorMap::read(bytes.ok_or_else(|| Fault("a map that is no parameter".into()))?)
    }

    // ---- matrices of a whole warp

    fn matrices(&mut self, operation: &Operation) -> Result<Flow> {
        if self.active != u32::MAX {
            return if self.warp.live == u32::MAX && self.active == self.mask {
                Ok(Flow::Held)
            } else {
                Err(Fault("some threads of a warp alone".into()))
            };
        }
        match operation {
            Operation::LoadMatrices { to, from } => self.load_matrices(to, *from)?,
            Operation::Transpose { to, from } => {
                let values: [u64; LANES] = std::array::from_fn(|lane| self.value(*from, lane));
                let at = |row: usize, column: usize| {
                    values[row * 4 + column / 2] >> (16 * (column % 2)) & 0xFFFF
                };
                for lane in 0..LANES {
                    let (row, column) = (lane / 4, lane % 4 * 2);
                    self.set(*to, lane, at(column, row) | at(column + 1, row) << 16);
                }
            }
            Operation::Multiply { sums, a, b } => {
                let a: Vec<Source> = a.iter().map(|&one| Source::Register(one)).collect();
                let a = self.left(&a);
                let right = |step: &Self, k: usize, n: usize| {
                    let word = step.warp.registers[b[k / 8] as usize][n * 4 + k % 8 / 2];
                    scalar::widen((word >> (16 * (k % 2))) as u16)
                };
                self.add_products(sums, &a, right);
            }
            Operation::MultiplyWide { sums, a, b } => {
                let a = if let [described] = a.as_slice() {
                    self.described_left(self.value(*described, 0))?
                } else {
                    self.left(a)
                };
                let columns = sums.len() / 4 * 8;
                let b = self.described(self.value(*b, 0), columns)?;
                self.add_products(sums, &a, |_, k, n| b[n][k]);
            }
            _ => unreachable!("matrices"),
        }
        Ok(Flow::Next)
    }

    fn load_matrices(&mut self, to: &[u32], from: Address) -> Result<()> {
        for (matrix, &to) in to.iter().enumerate() {
            let mut rows = [[0_u8; 16]; 8];
            for (row, bytes) in rows.iter_mut().enumerate() {
                let address = self.shared_address(from, matrix * 8 + row);
                bytes.copy_from_slice(self.bytes(Space::Shared, address, 0, 16)?);
            }
            for lane in 0..LANES {
                let bytes = &rows[lane / 4][lane % 4 * 4..][..4];
                let word = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
                self.set(to, lane, word.into());
            }
        }
        Ok(())
    }

    /// 16 x 16 in the fragments of four words (PTX ISA, 9.7.14.5.8).
    fn left(&self, words: &[Source]) -> Vec<[f32; 16]> {
        let at = |row: usize, column: usize| {
            let word = row / 8 + column / 8 * 2;
            let lane = row % 8 * 4 + column % 8 / 2;
            scalar::widen((self.value(words[word], lane) >> (16 * (column % 2))) as u16)
        };
        (0..16).map(|row| std::array::from_fn(|column| at(row, column))).collect()
    }

    /// Rows of 16 columns that a descriptor tells: K-major, 128-byte swizzle.
    fn described(&mut self, described: u64, rows: usize) -> Result<Vec<[f32; 16]>> {
        let (first, pitch) = ((described & 0x3FFF) << 4, (described >> 32 & 0x3FFF) << 4);
        if described >> 62 != 1 {
            return Err(Fault("another swizzle".into()));
        }
        let mut found = vec![[0.0; 16]; rows];
        for (row, to) in found.iter_mut().enumerate() {
            let start = first + row as u64 / 8 * pitch + row as u64 % 8 * 128;
            for half in 0..2 {
                let place = start + 16 * half as u64;
                let place = place ^ (place >> 7 & 7) << 4;
                let bytes = self.shared(place, 16)?;
                for (at, pair) in bytes.chunks_exact(2).enumerate() {
                    to[8 * half + at] = scalar::widen(u16::from_le_bytes([pair[0], pair[1]]));
                }
            }
        }
        Ok(found)
    }

    /// The rows of 64 that this warp of a warpgroup has.
    fn described_left(&mut self, described: u64) -> Result<Vec<[f32; 16]>> {
        let all = self.described(described, 64)?;
        Ok(all[self.warp.number % 4 * 16..][..16].to_vec())
    }

    /// Adds 16 columns at once, in f64, and rounds.
    fn add_products(&mut self, sums: &[u32], a: &[[f32; 16]], b: impl Fn(&Self, usize, usize) -> f32) {
        for lane in 0..LANES {
            for (at, &sum) in sums.iter().enumerate() {
                let row = lane / 4 + at % 4 / 2 * 8;
                let column = at / 4 * 8 + lane % 4 * 2 + at % 2;
                let before = f32::from_bits(self.warp.registers[sum as usize][lane] as u32);
                let products = a[row].iter().enumerate();
                let products =
                    products.map(|(k, &a)| f64::from(a) * f64::from(b(self, k, column)));
                let after = products.fold(f64::from(before), |sum, product| sum + product);
                self.set(sum, lane, (after as f32).to_bits().into());
            }
        }
    }
}

fn combined(how: Combine, before: u32, value: u32) -> u32 {
    match how {
        Combine::Add => before.wrapping_add(value),
        Combine::Or => before | value,
        Combine::Max => before.max(value),
        Combine::Exchange => value,
    }
}

/// Whose value a thread gets, and whether the one that it asked for exists (PTX ISA, 9.7.9.6).
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
