//! PTX text as statements: names, registers and labels are still text. Covers what NVRTC writes for
//! the kernels and what their inline assembly adds (PTX ISA 8.8, sections 4 to 5).

use std::collections::HashMap;

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// A register, label, symbol or special register, after scopes have been told apart.
    Name(String),
    /// An integer, or the bits of an f32.
    Number(u64),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `(a, b)`: arguments of a call.
    Group(Vec<Operand>),
    /// `[base+offset]`, with the coordinates of a tensor copy.
    Address(Box<Operand>, i64, Vec<Operand>),
}

/// One instruction.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    /// The predicate register, and whether it is negated.
    pub(crate) guard: Option<(String, bool)>,
    /// `ld.global.u32` as `ld`, `global`, `u32`.
    pub(crate) opcode: Vec<String>,
    pub(crate) operands: Vec<Operand>,
    /// The line of the file, from 1.
    pub(crate) line: usize,
}

/// A variable of a function or module: its size and alignment in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) space: String,
    pub(crate) bytes: usize,
    pub(crate) align: usize,
    /// Initial bytes; the rest is zeros.
    pub(crate) initial: Vec<u8>,
}

#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) is_entry: bool,
    /// Blocks of a cluster, if the kernel says it (`.reqnctapercluster`).
    pub(crate) cluster: Option<u32>,
    pub(crate) parameters: Vec<Variable>,
    pub(crate) results: Vec<Variable>,
    /// `.shared`, `.local` and `.param` variables of the body.
    pub(crate) variables: Vec<Variable>,
    pub(crate) body: Vec<Statement>,
    /// Places of labels in `body`.
    pub(crate) labels: HashMap<String, usize>,
}

/// A module as written.
#[derive(Default)]
pub(crate) struct Module {
    pub(crate) functions: Vec<Function>,
    pub(crate) variables: Vec<Variable>,
}

struct Reader<'t> {
    text: &'t [u8],
    at: usize,
    line: usize,
    /// Names of inner scopes, each with what it stands for.
    scopes: Vec<HashMap<String, String>>,
    scope_count: usize,
}

/// Reads a module. Panics with the line on what it does not know.
pub(crate) fn parse(text: &str) -> Module {
    let mut reader =
        Reader { text: text.as_bytes(), at: 0, line: 1, scopes: Vec::new(), scope_count: 0 };
    let mut module = Module::default();
    while reader.skip_blank() {
        reader.read_item(&mut module);
    }
    module
}

impl Reader<'_> {
    fn fail(&self, problem: &str) -> ! {
        let end = self.text.len().min(self.at + 60);
        let near = String::from_utf8_lossy(&self.text[self.at.min(end)..end]);
        panic!("PTX line {}: {problem} near {near:?}", self.line)
    }

    /// Skips blanks and comments; false at the end.
    fn skip_blank(&mut self) -> bool {
        while let Some(&byte) = self.text.get(self.at) {
            if self.text[self.at..].starts_with(b"//") {
                while self.text.get(self.at).is_some_and(|&byte| byte != b'\n') {
                    self.at += 1;
                }
            } else if byte.is_ascii_whitespace() {
                self.line += usize::from(byte == b'\n');
                self.at += 1;
            } else {
                return true;
            }
        }
        false
    }

    fn peek(&mut self) -> u8 {
        if self.skip_blank() { self.text[self.at] } else { self.fail("the file ends") }
    }

    fn takes(&mut self, byte: u8) -> bool {
        let found = self.peek() == byte;
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) {
        if !self.takes(byte) {
            self.fail(&format!("no {:?}", char::from(byte)));
        }
    }

    /// Letters, digits and `_ $ % . :`; a colon that does not follow another one ends a label.
    fn word(&mut self) -> String {
        self.peek();
        let start = self.at;
        while let Some(&byte) = self.text.get(self.at) {
            let is_double = self.text[self.at..].starts_with(b"::");
            if is_double {
                self.at += 2;
            } else if byte.is_ascii_alphanumeric() || b"_$%.".contains(&byte) {
                self.at += 1;
            } else {
                break;
            }
        }
        if start == self.at {
            self.fail("no word");
        }
        String::from_utf8_lossy(&self.text[start..self.at]).into_owned()
    }

    fn skip_to_line_end(&mut self) {
        while self.text.get(self.at).is_some_and(|&byte| byte != b'\n') {
            self.at += 1;
        }
    }

    fn read_item(&mut self, module: &mut Module) {
        let mut word = self.word();
        while [".visible", ".extern", ".weak"].contains(&word.as_str()) {
            word = self.word();
        }
        match word.as_str() {
            ".version" | ".target" | ".address_size" => self.skip_to_line_end(),
            ".entry" | ".func" => {
                if let Some(function) = self.function(word == ".entry") {
                    module.functions.push(function);
                }
            }
            ".const" | ".global" | ".shared" => {
                let variable = self.variable(&word);
                self.expect(b';');
                module.variables.push(variable);
            }
            _ => self.fail("an unknown directive"),
        }
    }

    /// `.align 4 .b8 name[12] = {...}`, after the space.
    fn variable(&mut self, space: &str) -> Variable {
        let (mut align, mut size, mut word) = (1, 1, self.word());
        loop {
            if word == ".align" {
                align = self.number() as usize;
            } else if let Some(of) = word.strip_prefix('.') {
                size = bytes_of(of);
                align = align.max(size);
            } else {
                break;
            }
            word = self.word();
        }
        let mut count = 1;
        if self.takes(b'[') {
            count = if self.peek() == b']' { 0 } else { self.number() as usize };
            self.expect(b']');
        }
        let mut initial = Vec::new();
        if self.peek() == b'=' {
            self.at += 1;
            let is_list = self.takes(b'{');
            loop {
                let value = self.number();
                initial.extend_from_slice(&value.to_le_bytes()[..size]);
                if !(is_list && self.takes(b',')) {
                    break;
                }
            }
            if is_list {
                self.expect(b'}');
            }
        }
        Variable { name: word, space: space.into(), bytes: size * count, align, initial }
    }

    fn parameters(&mut self) -> Vec<Variable> {
        let mut found = Vec::new();
        self.expect(b'(');
        while !self.takes(b')') {
            let space = self.word();
            found.push(self.variable(&space));
            self.takes(b',');
        }
        found
    }

    /// None for a declaration.
    fn function(&mut self, is_entry: bool) -> Option<Function> {
        let results = if self.peek() == b'(' { self.parameters() } else { Vec::new() };
        let name = self.word();
        let parameters = if self.peek() == b'(' { self.parameters() } else { Vec::new() };
        let mut cluster = None;
        while self.peek() == b'.' {
            if self.word() == ".reqnctapercluster" {
                cluster = Some(self.number() as u32);
            }
            self.skip_to_line_end();
        }
        if self.takes(b';') {
            return None;
        }
        self.expect(b'{');
        let mut function = Function {
            name,
            is_entry,
            cluster,
            parameters,
            results,
            variables: Vec::new(),
            body: Vec::new(),
            labels: HashMap::new(),
        };
        self.scopes = vec![HashMap::new()];
        while !self.scopes.is_empty() {
            self.read_line(&mut function);
        }
        Some(function)
    }

    fn read_line(&mut self, function: &mut Function) {
        match self.peek() {
            b'{' => {
                self.at += 1;
                let labels = self.labels_of_scope();
                self.scope_count += 1;
                let number = self.scope_count;
                let names =
                    labels.into_iter().map(|name| (name.clone(), format!("{name}@{number}")));
                self.scopes.push(names.collect());
            }
            b'}' => {
                self.at += 1;
                self.scopes.pop();
            }
            b'.' => self.directive(function),
            b';' => self.at += 1,
            b'@' => {
                self.at += 1;
                let negated = self.takes(b'!');
                let register = self.word();
                let guard = Some((self.scoped(&register), negated));
                self.instruction(function, guard);
            }
            _ => {
                let (at, line) = (self.at, self.line);
                let word = self.word();
                if self.peek() == b':' {
                    self.at += 1;
                    let label = self.scoped(&word);
                    function.labels.insert(label, function.body.len());
                } else {
                    (self.at, self.line) = (at, line);
                    self.instruction(function, None);
                }
            }
        }
    }

    /// Labels that stand in the scope which begins here: jumps may come before them.
    fn labels_of_scope(&self) -> Vec<String> {
        let rest = &self.text[self.at..];
        let end = rest.iter().position(|&byte| byte == b'}').unwrap_or(rest.len());
        let text = String::from_utf8_lossy(&rest[..end]);
        let lines = text.split(['\n', ';']);
        let labels = lines.filter_map(|line| line.trim().split_once(':'));
        let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_uppercase());
        labels.map(|(name, _)| name.to_owned()).filter(|name| is_name(name)).collect()
    }

    fn directive(&mut self, function: &mut Function) {
        let word = self.word();
        match word.as_str() {
            ".reg" => {
                self.word();
                loop {
                    let name = self.word();
                    if self.takes(b'<') {
                        self.number();
                        self.expect(b'>');
                    } else {
                        self.declare(&name);
                    }
                    if !self.takes(b',') {
                        break;
                    }
                }
            }
            ".param" | ".shared" | ".local" => {
                let mut variable = self.variable(&word);
                if word == ".param" {
                    self.declare(&variable.name);
                    variable.name = self.scoped(&variable.name);
                }
                function.variables.push(variable);
            }
            ".loc" | ".pragma" => return self.skip_to_line_end(),
            _ => self.fail("an unknown directive"),
        }
        self.expect(b';');
    }

    /// Gives a name of an inner scope one of its own.
    fn declare(&mut self, name: &str) {
        let number = self.scope_count;
        if self.scopes.len() > 1 {
            let last = self.scopes.last_mut().expect("there are two");
            last.insert(name.to_owned(), format!("{name}@{number}"));
        }
    }

    fn scoped(&self, name: &str) -> String {
        let found = self.scopes.iter().rev().find_map(|scope| scope.get(name));
        found.cloned().unwrap_or_else(|| name.to_owned())
    }

    fn instruction(&mut self, function: &mut Function, guard: Option<(String, bool)>) {
        let line = self.line;
        let opcode = self.word().split('.').map(str::to_owned).collect();
        let mut operands = Vec::new();
        while !self.takes(b';') {
            operands.push(self.operand());
            // `%r1|%p1` names two results.
            let _ = self.takes(b',') || self.takes(b'|');
        }
        function.body.push(Statement { guard, opcode, operands, line });
    }

    fn list(&mut self, end: u8) -> Vec<Operand> {
        let mut found = Vec::new();
        self.at += 1;
        while !self.takes(end) {
            found.push(self.operand());
            self.takes(b',');
        }
        found
    }

    fn operand(&mut self) -> Operand {
        match self.peek() {
            b'{' => Operand::Vector(self.list(b'}')),
            b'(' => Operand::Group(self.list(b')')),
            b'[' => {
                self.at += 1;
                let base = self.operand();
                let mut offset = 0;
                if self.takes(b'+') {
                    offset = self.number().cast_signed();
                }
                let coordinates = if self.takes(b',') { vec![self.operand()] } else { Vec::new() };
                self.expect(b']');
                Operand::Address(Box::new(base), offset, coordinates)
            }
            b'-' | b'0'..=b'9' => Operand::Number(self.number()),
            _ => {
                let word = self.word();
                Operand::Name(self.scoped(&word))
            }
        }
    }

    fn number(&mut self) -> u64 {
        let negative = self.takes(b'-');
        let word = self.word();
        let parse = |digits: &str, radix| u64::from_str_radix(digits, radix).ok();
        let value = if let Some(digits) = word.strip_prefix("0x").or(word.strip_prefix("0f")) {
            parse(digits, 16)
        } else {
            parse(&word, 10)
        };
        let value = value.unwrap_or_else(|| self.fail("no number"));
        if negative { value.wrapping_neg() } else { value }
    }
}

/// Bytes of a type: `u32`, `b8`, `pred`.
pub(crate) fn bytes_of(of: &str) -> usize {
    match of.trim_start_matches(|letter: char| letter.is_ascii_alphabetic()) {
        "8" => 1,
        "16" => 2,
        "32" => 4,
        "64" => 8,
        _ => panic!("{of} is no type of memory"),
    }
}
