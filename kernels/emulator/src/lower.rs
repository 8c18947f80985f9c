//! From statements to instructions: names become registers and addresses.

use std::{collections::HashMap, sync::Arc};

use crate::{
    parse::{Function, Module, Operand, Statement, Variable, bytes_of},
    program::{
        Address, Entry, Instruction, Operation, PARAMETERS, PRIVATE, Program, SHARED, SHARED_FIRST,
        Source, Special,
    },
    scalar::{self, Binary, Unary},
};

pub(crate) struct Builder<'m> {
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

/// The meanings of names in one function.
pub(crate) struct Names {
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
        for function in &called {
            builder.reserve(function);
        }
        for function in &called {
            builder.build(function);
        }
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
    pub(crate) fn place(&mut self, variable: &Variable) -> u32 {
        self.private = align(self.private, variable.align.max(8));
        let place = self.private as u32;
        self.private += variable.bytes;
        place
    }

    /// Places of a function's private variables.
    pub(crate) fn reserve(&mut self, function: &Function) {
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

    pub(crate) fn build(&mut self, function: &Function) -> Option<Entry> {
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
        // Variables of the module and of called functions come first, at the same places in all
        // kernels that use some.
        let shared = |variables: &[Variable]| -> Vec<Variable> {
            let those = variables.iter().filter(|one| one.space == ".shared" && one.bytes > 0);
            those.cloned().collect()
        };
        let mut variables = shared(&self.module.variables);
        let called = self.module.functions.iter().filter(|one| !one.is_entry);
        variables.extend(called.flat_map(|one| shared(&one.variables)));
        if !self.mentions(function, &variables) {
            variables.clear();
        }
        if function.is_entry {
            variables.extend(shared(&function.variables));
        }
        let mut first = SHARED_FIRST as usize;
        for variable in variables {
            first = align(first, variable.align);
            symbols.insert(variable.name, first as u64);
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

    /// Whether the function or one that it calls names one of these.
    pub(crate) fn mentions(&self, function: &Function, variables: &[Variable]) -> bool {
        let operands = function.body.iter().flat_map(|statement| &statement.operands);
        operands
            .filter_map(|operand| {
                let inner = if let Operand::Address(base, ..) = operand { base } else { operand };
                if let Operand::Name(name) = inner { Some(name) } else { None }
            })
            .any(|name| {
                let mut called = self.module.functions.iter();
                variables.iter().any(|one| one.name == *name)
                    || called
                        .find(|one| one.name == *name)
                        .is_some_and(|one| self.mentions(one, variables))
            })
    }

    pub(crate) fn register(&mut self, names: &Names, name: &str) -> u32 {
        let key = format!("{}/{name}", names.function);
        let next = self.count;
        let found = *self.registers.entry(key).or_insert(next);
        self.count += u32::from(found == next);
        found
    }

    pub(crate) fn source(&mut self, names: &Names, operand: &Operand) -> Source {
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

    pub(crate) fn address(&mut self, names: &Names, operand: &Operand) -> Address {
        match operand {
            Operand::Address(base, offset, _) => {
                Address { base: self.source(names, base), offset: *offset }
            }
            other => panic!("{other:?} is no address"),
        }
    }

    pub(crate) fn target(&mut self, names: &Names, operand: &Operand) -> u32 {
        match operand {
            Operand::Name(name) => self.register(names, name),
            other => panic!("{other:?} is no register"),
        }
    }

    pub(crate) fn targets(&mut self, names: &Names, operand: &Operand) -> Vec<u32> {
        match operand {
            Operand::Vector(all) => all.iter().map(|one| self.target(names, one)).collect(),
            one => vec![self.target(names, one)],
        }
    }

    pub(crate) fn sources(&mut self, names: &Names, operand: &Operand) -> Vec<Source> {
        match operand {
            Operand::Vector(all) => all.iter().map(|one| self.source(names, one)).collect(),
            one => vec![self.source(names, one)],
        }
    }

    pub(crate) fn lower(
        &mut self,
        names: &Names,
        said: &Statement,
        jumps: &mut Vec<(usize, String)>,
    ) {
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
    pub(crate) fn call(&mut self, names: &Names, said: &Statement) {
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

    pub(crate) fn operation(&mut self, names: &Names, said: &Statement) -> Operation {
        let parts: Vec<&str> = said.opcode.iter().map(String::as_str).collect();
        let of = *parts.last().expect("an opcode");
        let given = &said.operands;
        let unknown = || -> ! { panic!("line {}: {} is not known", said.line, parts.join(".")) };
        match parts.as_slice() {
            ["bra" | "griddepcontrol" | "membar" | "fence" | "prefetch" | "setmaxnreg", ..] => {
                Operation::Nothing
            }
            ["cp", "async", "bulk", "prefetch", ..]
            | ["wgmma", "fence" | "commit_group" | "wait_group", ..] => Operation::Nothing,
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
            ["bar" | "barrier" | "mbarrier", ..] => self.barrier(names, said, &parts),
            ["cp", ..] => self.copy(names, said, &parts),
            ["shfl" | "vote" | "redux" | "elect" | "mapa", ..] => {
                self.exchange(names, said, &parts)
            }
            ["ldmatrix" | "movmatrix" | "mma" | "wgmma", ..] => self.matrices(names, said, &parts),
            [name, middle @ .., _] => {
                let middle: Vec<&str> =
                    middle.iter().copied().filter(|part| *part != "lo").collect();
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

    pub(crate) fn values<const N: usize>(
        &mut self,
        names: &Names,
        given: &[Operand],
    ) -> [Source; N] {
        std::array::from_fn(|at| self.source(names, &given[at]))
    }

    pub(crate) fn unary(&mut self, names: &Names, said: &Statement, function: Unary) -> Operation {
        let [a] = self.values(names, &said.operands[1..]);
        Operation::Unary(self.target(names, &said.operands[0]), a, function)
    }

    pub(crate) fn binary(
        &mut self,
        names: &Names,
        said: &Statement,
        function: Binary,
    ) -> Operation {
        let [a, b] = self.values(names, &said.operands[1..]);
        Operation::Binary(self.target(names, &said.operands[0]), a, b, function)
    }

    pub(crate) fn movement(&mut self, names: &Names, said: &Statement, of: &str) -> Operation {
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
}
