//! A module ready to run: instructions with numbered registers and resolved addresses.
//!
//! No kernel is recursive, so each register and each private variable of a function that is called
//! has one place in every thread; those of kernels come after them. All functions' instructions are
//! in one list, and a jump is a place in it.

use std::{collections::HashMap, sync::Arc};

use crate::parse::{Function, Module, Operand, Statement, Variable, bytes_of};
use crate::scalar::{self, Binary, Ternary, Unary};

/// Where shared memory of a block begins: low addresses are the system's.
pub(crate) const SHARED_FIRST: u64 = 1024;
/// Windows of generic addresses, above those of a process.
pub(crate) const PARAMETERS: u64 = 0x7D << 56;
pub(crate) const PRIVATE: u64 = 0x7E << 56;
pub(crate) const SHARED: u64 = 0x7F << 56;

/// Where a value comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    Register(u32),
    Value(u64),
    Special(Special),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Special {
    Thread,
    Threads,
    Block,
    Blocks,
    ClusterBlocks,
    DynamicShared,
    /// The address of the first byte of it.
    DynamicSharedFirst,
}

/// A base and bytes to add.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) base: Source,
    pub(crate) offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Shared,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Combine {
    Add,
    Or,
    Max,
    Exchange,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Vote {
    Ballot,
    Any,
    All,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// What an instruction does. `u32` are registers where nothing else is said.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Nothing,
    /// Lets other warps run.
    Rest,
    Unary(u32, Source, Unary),
    Binary(u32, Source, Source, Binary),
    Ternary(u32, Source, Source, Source, Ternary),
    Select(u32, Source, Source, Source),
    LookUp(u32, [Source; 3], u64),
    InsertBits(u32, [Source; 4], u64),
    /// Parts of a word, each of so many bits.
    Join(u32, Vec<Source>, u32),
    Split(Vec<u32>, Source, u32),
    Load { space: Space, to: Vec<u32>, from: Address, bytes: u32, signed: bool },
    Store { space: Space, to: Address, from: Vec<Source>, bytes: u32 },
    Atomic { space: Space, old: u32, to: Address, value: Source, combine: Combine },
    Jump(u32),
    Call(u32),
    /// Bytes of private memory: from, to, how many.
    CopyPrivate(Vec<(u32, u32, u32)>),
    Return,
    Shuffle { how: Shuffle, to: u32, valid: u32, from: Source, by: Source, clamp: Source, mask: Source },
    Vote { how: Vote, to: u32, from: Source, mask: Source },
    Reduce { combine: Combine, to: u32, from: Source, mask: Source },
    Elect { to: u32, mask: Source },
    MeetWarp(Source),
    /// A barrier of the block, for so many threads (all if none are named).
    Meet { barrier: Source, threads: Option<Source>, waits: bool },
    ArriveAtCluster,
    WaitForCluster,
    InitBarrier { barrier: Address, count: Source },
    Arrive { barrier: Address, expected: Option<Source> },
    TestBarrier { to: u32, barrier: Address, parity: Source },
    MapToBlock { to: u32, address: Source, rank: Source },
    Copy { to: Address, from: Address, bytes: u32, kept: Source },
    CommitCopies,
    WaitForCopies(u64),
    ArriveWithCopies(Address),
    CopyBulk { to: Address, from: Address, bytes: Source, barrier: Address, blocks: Option<Source> },
    CopyBox { to: Address, map: Address, place: Vec<Source>, barrier: Address },
    LoadMatrices { to: Vec<u32>, from: Address },
    Transpose { to: u32, from: Source },
    /// 16 x 8 sums += 16 x 16 by 16 x 8.
    Multiply { sums: Vec<u32>, a: Vec<u32>, b: Vec<u32> },
    /// A warp's 16 rows of 64, by `sums / 4` times 8 columns; `a` in registers or described.
    MultiplyWide { sums: Vec<u32>, a: Vec<Source>, b: Source },
}

#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    pub(crate) guard: Option<(u32, bool)>,
    pub(crate) operation: Operation,
    pub(crate) line: usize,
}

pub(crate) struct Entry {
    pub(crate) start: u32,
    pub(crate) parameters: Vec<(usize, usize)>,
    pub(crate) parameter_bytes: usize,
    pub(crate) static_shared: usize,
    pub(crate) cluster: Option<u32>,
    pub(crate) registers: usize,
    /// Bytes of private memory of a thread.
    pub(crate) private: usize,
}

pub(crate) struct Program {
    pub(crate) code: Vec<Instruction>,
    pub(crate) entries: HashMap<String, Arc<Entry>>,
    pub(crate) constants: HashMap<String, Vec<u8>>,
}

struct Builder<'m> {
    module: &'m Module,
    code: Vec<Instruction>,
    registers: HashMap<String, u32>,
    count: u32,
    private: usize,
    /// Places of the parameters, results and variables of functions that are called, and their
    /// bytes.
    frames: HashMap<String, Vec<(String, u32, u32)>>,
    starts: HashMap<String, u32>,
    calls: Vec<(usize, String)>,
}

/// What names stand for in one function.
struct Names {
    function: String,
    symbols: HashMap<String, u64>,
}

impl Program {
    pub(crate) fn new(module: &Module) -> Self {
        let mut builder = Builder {
            module,
            code: Vec::new(),
            registers: HashMap::new(),
            count: 0,
            private: 0,
            frames: HashMap::new(),
            starts: HashMap::new(),
            calls: Vec::new(),
        };
        let (kernels, called): (Vec<_>, Vec<_>) =
            module.functions.iter().partition(|function| function.is_entry);
        called.iter().for_each(|function| builder.reserve(function));
        called.iter().for_each(|function| drop(builder.build(function)));
        let mut entries = HashMap::new();
        let (registers, private) = (builder.count, builder.private);
        for kernel in kernels {
            (builder.count, builder.private) = (registers, private);
            builder.reserve(kernel);
            if let Some(entry) = builder.build(kernel) {
                entries.insert(kernel.name.clone(), Arc::new(entry));
            }
        }
        for (place, name) in std::mem::take(&mut builder.calls) {
            builder.code[place].operation = Operation::Call(builder.starts[&name]);
        }
        let constants = module.variables.iter().filter(|variable| variable.space == ".const");
        let bytes = |variable: &Variable| {
            let mut bytes = variable.initial.clone();
            bytes.resize(variable.bytes, 0);
            bytes
        };
        Self {
            constants: constants.map(|one| (one.name.clone(), bytes(one))).collect(),
            entries,
            code: builder.code,
        }
    }
}

fn align(value: usize, to: usize) -> usize {
    value.next_multiple_of(to)
}

impl Builder<'_> {
    fn place(&mut self, variable: &Variable) -> u32 {
        self.private = align(self.private, variable.align.max(8));
        let place = self.private as u32;
        self.private += variable.bytes;
        place
    }

    /// Places of a function's private variables.
    fn reserve(&mut self, function: &Function) {
        let mut all: Vec<&Variable> = function.results.iter().collect();
        if !function.is_entry {
            all.extend(&function.parameters);
        }
        all.extend(function.variables.iter().filter(|one| one.space != ".shared"));
        let mut frame = Vec::new();
        for variable in all {
            let place = self.place(variable);
            frame.push((variable.name.clone(), place, variable.bytes as u32));
        }
        self.frames.insert(function.name.clone(), frame);
    }

    fn build(&mut self, function: &Function) -> Option<Entry> {
        let mut symbols = HashMap::new();
        for (name, place, _) in &self.frames[&function.name] {
            symbols.insert(name.clone(), PRIVATE + u64::from(*place));
        }
        let mut parameters = Vec::new();
        let mut parameter_bytes = 0;
        if function.is_entry {
            for parameter in &function.parameters {
                parameter_bytes = align(parameter_bytes, parameter.align);
                symbols.insert(parameter.name.clone(), PARAMETERS + parameter_bytes as u64);
                parameters.push((parameter_bytes, parameter.bytes));
                parameter_bytes += parameter.bytes;
            }
        }
        let module = &self.module.variables;
        let shared = module.iter().chain(&function.variables).filter(|one| one.space == ".shared");
        let mut first = SHARED_FIRST as usize;
        for variable in shared.filter(|one| one.bytes > 0) {
            first = align(first, variable.align);
            symbols.insert(variable.name.clone(), first as u64);
            first += variable.bytes;
        }
        let names = Names { function: function.name.clone(), symbols };
        let start = self.code.len() as u32;
        self.starts.insert(function.name.clone(), start);
        let mut places = Vec::with_capacity(function.body.len() + 1);
        let mut jumps = Vec::new();
        for statement in &function.body {
            places.push(self.code.len() as u32);
            self.lower(&names, statement, &mut jumps);
        }
        places.push(self.code.len() as u32);
        for (place, label) in jumps {
            let target = function.labels.get(&label).unwrap_or_else(|| panic!("no label {label}"));
            self.code[place].operation = Operation::Jump(places[*target]);
        }
        function.is_entry.then(|| Entry {
            start,
            parameters,
            parameter_bytes,
            static_shared: first - SHARED_FIRST as usize,
            cluster: function.cluster,
            registers: self.count as usize,
            private: self.private,
        })
    }

    fn register(&mut self, names: &Names, name: &str) -> u32 {
        let key = format!("{}/{name}", names.function);
        let next = self.count;
        let found = *self.registers.entry(key).or_insert(next);
        self.count += u32::from(found == next);
        found
    }

    fn source(&mut self, names: &Names, operand: &Operand) -> Source {
        let name = match operand {
            Operand::Number(value) => return Source::Value(*value),
            Operand::Name(name) => name,
            other => panic!("{other:?} is no value"),
        };
        let special = match name.as_str() {
            "%tid.x" => Special::Thread,
            "%ntid.x" => Special::Threads,
            "%ctaid.x" => Special::Block,
            "%nctaid.x" => Special::Blocks,
            "%cluster_nctaid.x" => Special::ClusterBlocks,
            "%dynamic_smem_size" => Special::DynamicShared,
            _ => {
                if let Some(&address) = names.symbols.get(name) {
                    return Source::Value(address);
                }
                let is_symbol = self.module.variables.iter().any(|one| one.name == *name);
                if !is_symbol {
                    return Source::Register(self.register(names, name));
                }
                Special::DynamicSharedFirst
            }
        };
        Source::Special(special)
    }

    fn address(&mut self, names: &Names, operand: &Operand) -> Address {
        match operand {
            Operand::Address(base, offset, _) => {
                Address { base: self.source(names, base), offset: *offset }
            }
            other => panic!("{other:?} is no address"),
        }
    }

    fn target(&mut self, names: &Names, operand: &Operand) -> u32 {
        match operand {
            Operand::Name(name) => self.register(names, name),
            other => panic!("{other:?} is no register"),
        }
    }

    fn targets(&mut self, names: &Names, operand: &Operand) -> Vec<u32> {
        match operand {
            Operand::Vector(all) => all.iter().map(|one| self.target(names, one)).collect(),
            one => vec![self.target(names, one)],
        }
    }

    fn sources(&mut self, names: &Names, operand: &Operand) -> Vec<Source> {
        match operand {
            Operand::Vector(all) => all.iter().map(|one| self.source(names, one)).collect(),
            one => vec![self.source(names, one)],
        }
    }

    fn lower(&mut self, names: &Names, said: &Statement, jumps: &mut Vec<(usize, String)>) {
        let guard = said.guard.as_ref();
        let guard = guard.map(|(name, negated)| (self.register(names, name), *negated));
        if said.opcode[0] == "call" {
            return self.call(names, said);
        }
        if said.opcode[0] == "bra" {
            let Operand::Name(label) = &said.operands[0] else { panic!("bra without a label") };
            jumps.push((self.code.len(), label.clone()));
        }
        let operation = self.operation(names, said);
        self.code.push(Instruction { guard, operation, line: said.line });
    }

    /// Arguments go to where the function has its parameters, results come back.
    fn call(&mut self, names: &Names, said: &Statement) {
        let groups: Vec<&Vec<Operand>> = said
            .operands
            .iter()
            .filter_map(|operand| match operand {
                Operand::Group(all) => Some(all),
                _ => None,
            })
            .collect();
        let name = said.operands.iter().find_map(|operand| match operand {
            Operand::Name(name) => Some(name.clone()),
            _ => None,
        });
        let name = name.expect("a call has a name");
        let starts_with_results = matches!(said.operands[0], Operand::Group(_));
        let results = if starts_with_results { groups[0].as_slice() } else { &[] };
        let at = usize::from(starts_with_results);
        let arguments = groups.get(at).map_or(&[][..], |group| group.as_slice());
        let frame = self.frames[&name].clone();
        let place = |operand: &Operand| match operand {
            Operand::Name(name) => (names.symbols[name] - PRIVATE) as u32,
            other => panic!("{other:?} is no variable"),
        };
        let (back, there) = frame.split_at(results.len());
        let there = arguments.iter().zip(there).map(|(from, to)| (place(from), to.1, to.2));
        let back = results.iter().zip(back).map(|(to, from)| (from.1, place(to), from.2));
        let (there, back) = (there.collect(), back.collect());
        let line = said.line;
        let mut push = |operation| self.code.push(Instruction { guard: None, operation, line });
        push(Operation::CopyPrivate(there));
        push(Operation::Nothing);
        push(Operation::CopyPrivate(back));
        self.calls.push((self.code.len() - 2, name));
    }

    fn operation(&mut self, names: &Names, said: &Statement) -> Operation {
        let parts: Vec<&str> = said.opcode.iter().map(String::as_str).collect();
        let of = *parts.last().expect("an opcode");
        let given = &said.operands;
        let unknown = || -> ! { panic!("line {}: {} is not known", said.line, parts.join(".")) };
        match parts.as_slice() {
            ["bra", ..] | ["griddepcontrol" | "membar" | "fence" | "prefetch" | "setmaxnreg", ..] => {
                Operation::Nothing
            }
            ["cp", "async", "bulk", "prefetch", ..] => Operation::Nothing,
            ["wgmma", "fence" | "commit_group" | "wait_group", ..] => Operation::Nothing,
            ["createpolicy", ..] => {
                Operation::Unary(self.target(names, &given[0]), Source::Value(0), |a| a)
            }
            ["nanosleep", _] => Operation::Rest,
            ["ret"] => Operation::Return,
            ["mov", _] => self.movement(names, said, of),
            // Shared memory is a window of generic addresses; the others are one space.
            ["cvta", "shared", _] => self.unary(names, said, |a| a + SHARED),
            ["cvta", "to", "shared", _] => self.unary(names, said, |a| a - SHARED),
            ["cvta", ..] => self.unary(names, said, |a| a),
            ["cvt", "rn", "bf16x2", "f32"] => self.binary(names, said, scalar::pack_bf16),
            ["cvt", rest @ ..] => {
                let convert = scalar::convert(rest).unwrap_or_else(|| unknown());
                self.unary(names, said, convert)
            }
            ["selp", _] => {
                let [a, b, c] = self.values(names, &given[1..]);
                Operation::Select(self.target(names, &given[0]), a, b, c)
            }
            ["lop3", _] => {
                let [a, b, c, table] = self.values(names, &given[1..]);
                let Source::Value(table) = table else { unknown() };
                Operation::LookUp(self.target(names, &given[0]), [a, b, c], table)
            }
            ["bfi", _] => {
                let values = self.values(names, &given[1..]);
                let width = 8 * bytes_of(of) as u64;
                Operation::InsertBits(self.target(names, &given[0]), values, width)
            }
            ["setp", compare, _] => {
                let compare = scalar::binary(compare, of).unwrap_or_else(|| unknown());
                self.binary(names, said, compare)
            }
            ["mul", "wide", _] => self.binary(names, said, scalar::wide(of)),
            ["ld" | "st" | "atom" | "red", ..] => self.memory(names, said, &parts),
            ["bar", ..] | ["barrier", ..] | ["mbarrier", ..] => self.barrier(names, said, &parts),
            ["cp", ..] => self.copy(names, said, &parts),
            ["shfl" | "vote" | "redux" | "elect", ..] | ["mapa", ..] => {
                self.exchange(names, said, &parts)
            }
            ["ldmatrix" | "movmatrix" | "mma" | "wgmma", ..] => self.matrices(names, said, &parts),
            [name, middle @ .., _] => {
                let middle: Vec<&str> = middle.iter().copied().filter(|part| *part != "lo").collect();
                let plain = [&[*name], middle.as_slice()].concat().join(".");
                let long = parts[..parts.len() - 1].join(".");
                if let Some(function) = scalar::unary(&plain, of) {
                    self.unary(names, said, function)
                } else if let Some(function) = scalar::ternary(&long, of) {
                    let [a, b, c] = self.values(names, &given[1..]);
                    Operation::Ternary(self.target(names, &given[0]), a, b, c, function)
                } else if let Some(function) = scalar::binary(&plain, of) {
                    self.binary(names, said, function)
                } else {
                    unknown()
                }
            }
            _ => unknown(),
        }
    }

    fn values<const N: usize>(&mut self, names: &Names, given: &[Operand]) -> [Source; N] {
        std::array::from_fn(|at| self.source(names, &given[at]))
    }

    fn unary(&mut self, names: &Names, said: &Statement, function: Unary) -> Operation {
        let [a] = self.values(names, &said.operands[1..]);
        Operation::Unary(self.target(names, &said.operands[0]), a, function)
    }

    fn binary(&mut self, names: &Names, said: &Statement, function: Binary) -> Operation {
        let [a, b] = self.values(names, &said.operands[1..]);
        Operation::Binary(self.target(names, &said.operands[0]), a, b, function)
    }

    fn movement(&mut self, names: &Names, said: &Statement, of: &str) -> Operation {
        let [to, from] = [&said.operands[0], &said.operands[1]];
        match (to, from) {
            (Operand::Vector(all), _) => {
                let bits = 8 * (bytes_of(of) / all.len()) as u32;
                let to = self.targets(names, to);
                Operation::Split(to, self.source(names, from), bits)
            }
            (_, Operand::Vector(all)) => {
                let bits = 8 * (bytes_of(of) / all.len()) as u32;
                let from = self.sources(names, from);
                Operation::Join(self.target(names, to), from, bits)
            }
            _ => {
                let function: Unary = match of {
                    "pred" => |a| scalar::masked("pred", a),
                    "u16" | "b16" => |a| a & 0xFFFF,
                    "u64" | "b64" | "s64" => |a| a,
                    _ => |a| a & 0xFFFF_FFFF,
                };
                self.unary(names, said, function)
            }
        }
    }

    fn memory(&mut self, names: &Names, said: &Statement, parts: &[&str]) -> Operation {
        let of = *parts.last().expect("an opcode");
        let space = if parts[1..].iter().any(|part| part.starts_with("shared")) {
            Space::Shared
        } else {
            Space::Generic
        };
        let given = &said.operands;
        match parts[0] {
            "ld" => Operation::Load {
                space,
                to: self.targets(names, &given[0]),
                from: self.address(names, &given[1]),
                bytes: bytes_of(of) as u32,
                signed: of.starts_with('s'),
            },
            "st" => Operation::Store {
                space,
                to: self.address(names, &given[0]),
                from: self.sources(names, &given[1]),
                bytes: bytes_of(of) as u32,
            },
            _ => {
                let [value] = self.values(names, &given[2..]);
                Operation::Atomic {
                    space,
                    old: self.target(names, &given[0]),
                    to: self.address(names, &given[1]),
                    value,
                    combine: combine_of(parts),
                }
            }
        }
    }

    fn barrier(&mut self, names: &Names, said: &Statement, parts: &[&str]) -> Operation {
        let given = &said.operands;
        match parts {
            ["bar", "warp", "sync"] => Operation::MeetWarp(self.source(names, &given[0])),
            ["bar", how, ..] => Operation::Meet {
                barrier: self.source(names, &given[0]),
                threads: given.get(1).map(|operand| self.source(names, operand)),
                waits: *how == "sync",
            },
            ["barrier", "cluster", "arrive", ..] => Operation::ArriveAtCluster,
            ["barrier", "cluster", "wait", ..] => Operation::WaitForCluster,
            ["mbarrier", "init", ..] => Operation::InitBarrier {
                barrier: self.address(names, &given[0]),
                count: self.source(names, &given[1]),
            },
            ["mbarrier", "arrive", ..] => Operation::Arrive {
                barrier: self.address(names, &given[1]),
                expected: given.get(2).map(|operand| self.source(names, operand)),
            },
            ["mbarrier", "try_wait" | "test_wait", "parity", ..] => Operation::TestBarrier {
                to: self.target(names, &given[0]),
                barrier: self.address(names, &given[1]),
                parity: self.source(names, &given[2]),
            },
            _ => panic!("line {}: {} is not known", said.line, parts.join(".")),
        }
    }

    fn copy(&mut self, names: &Names, said: &Statement, parts: &[&str]) -> Operation {
        let given = &said.operands;
        match parts {
            ["cp", "async", "commit_group"] => Operation::CommitCopies,
            ["cp", "async", "wait_group"] => match given[0] {
                Operand::Number(count) => Operation::WaitForCopies(count),
                _ => panic!("line {}: a count", said.line),
            },
            ["cp", "async", "mbarrier", ..] => {
                Operation::ArriveWithCopies(self.address(names, &given[0]))
            }
            ["cp", "async", "bulk", "tensor", ..] => {
                let Operand::Address(_, _, place) = &given[1] else { panic!("a map") };
                Operation::CopyBox {
                    to: self.address(names, &given[0]),
                    map: self.address(names, &given[1]),
                    place: self.sources(names, &place[0]),
                    barrier: self.address(names, &given[2]),
                }
            }
            ["cp", "async", "bulk", ..] => Operation::CopyBulk {
                to: self.address(names, &given[0]),
                from: self.address(names, &given[1]),
                bytes: self.source(names, &given[2]),
                barrier: self.address(names, &given[3]),
                blocks: parts
                    .iter()
                    .any(|part| part.starts_with("multicast"))
                    .then(|| self.source(names, &given[4])),
            },
            _ => {
                let Operand::Number(bytes) = given[2] else { panic!("line {}: bytes", said.line) };
                let kept = given.get(3).map(|operand| self.source(names, operand));
                Operation::Copy {
                    to: self.address(names, &given[0]),
                    from: self.address(names, &given[1]),
                    bytes: bytes as u32,
                    kept: kept.unwrap_or(Source::Value(bytes)),
                }
            }
        }
    }

    fn exchange(&mut self, names: &Names, said: &Statement, parts: &[&str]) -> Operation {
        let given = &said.operands;
        let to = self.target(names, &given[0]);
        match parts {
            ["shfl", "sync", how, _] => {
                let [from, by, clamp, mask] = self.values(names, &given[2..]);
                let how = match *how {
                    "up" => Shuffle::Up,
                    "down" => Shuffle::Down,
                    "bfly" => Shuffle::Butterfly,
                    _ => Shuffle::Index,
                };
                let valid = self.target(names, &given[1]);
                Operation::Shuffle { how, to, valid, from, by, clamp, mask }
            }
            ["vote", "sync", how, _] => {
                let [from, mask] = self.values(names, &given[1..]);
                let how = match *how {
                    "ballot" => Vote::Ballot,
                    "any" => Vote::Any,
                    _ => Vote::All,
                };
                Operation::Vote { how, to, from, mask }
            }
            ["redux", ..] => {
                let [from, mask] = self.values(names, &given[1..]);
                Operation::Reduce { combine: combine_of(parts), to, from, mask }
            }
            ["mapa", ..] => {
                let [address, rank] = self.values(names, &given[1..]);
                Operation::MapToBlock { to, address, rank }
            }
            _ => Operation::Elect {
                to: self.target(names, &given[1]),
                mask: self.source(names, &given[2]),
            },
        }
    }

    fn matrices(&mut self, names: &Names, said: &Statement, parts: &[&str]) -> Operation {
        let given = &said.operands;
        match parts[0] {
            "ldmatrix" => Operation::LoadMatrices {
                to: self.targets(names, &given[0]),
                from: self.address(names, &given[1]),
            },
            "movmatrix" => Operation::Transpose {
                to: self.target(names, &given[0]),
                from: self.source(names, &given[1]),
            },
            "mma" => Operation::Multiply {
                sums: self.targets(names, &given[0]),
                a: self.targets(names, &given[1]),
                b: self.targets(names, &given[2]),
            },
            _ => Operation::MultiplyWide {
                sums: self.targets(names, &given[0]),
                a: self.sources(names, &given[1]),
                b: self.source(names, &given[2]),
            },
        }
    }
}

fn combine_of(parts: &[&str]) -> Combine {
    let has = |name: &str| parts.contains(&name);
    if has("add") {
        Combine::Add
    } else if has("or") {
        Combine::Or
    } else if has("max") {
        Combine::Max
    } else if has("exch") {
        Combine::Exchange
    } else {
        panic!("{} is not known", parts.join("."))
    }
}
