//! A module ready to run: instructions with numbered registers and resolved addresses.
//!
//! No kernel is recursive, so each register and each private variable of a function that is called
//! has one place in every thread; those of kernels come after them. All functions' instructions are
//! in one list, and a jump is a place in it.

use std::{collections::HashMap, sync::Arc};

use crate::scalar::{Binary, Ternary, Unary};

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

/// The effect of an instruction. `u32` fields are registers unless they say otherwise.
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
    Load {
        space: Space,
        to: Vec<u32>,
        from: Address,
        bytes: u32,
        signed: bool,
    },
    Store {
        space: Space,
        to: Address,
        from: Vec<Source>,
        bytes: u32,
    },
    Atomic {
        space: Space,
        old: u32,
        to: Address,
        value: Source,
        combine: Combine,
    },
    Jump(u32),
    Call(u32),
    /// Bytes of private memory: from, to, how many.
    CopyPrivate(Vec<(u32, u32, u32)>),
    Return,
    Shuffle {
        how: Shuffle,
        to: u32,
        valid: u32,
        from: Source,
        by: Source,
        clamp: Source,
        mask: Source,
    },
    Vote {
        how: Vote,
        to: u32,
        from: Source,
        mask: Source,
    },
    Reduce {
        combine: Combine,
        to: u32,
        from: Source,
        mask: Source,
    },
    Elect {
        to: u32,
        mask: Source,
    },
    MeetWarp(Source),
    /// A barrier of the block, for so many threads (all if none are named).
    Meet {
        barrier: Source,
        threads: Option<Source>,
        waits: bool,
    },
    ArriveAtCluster,
    WaitForCluster,
    InitBarrier {
        barrier: Address,
        count: Source,
    },
    Arrive {
        barrier: Address,
        expected: Option<Source>,
    },
    TestBarrier {
        to: u32,
        barrier: Address,
        parity: Source,
    },
    MapToBlock {
        to: u32,
        address: Source,
        rank: Source,
    },
    Copy {
        to: Address,
        from: Address,
        bytes: u32,
        kept: Source,
    },
    CommitCopies,
    WaitForCopies(u64),
    ArriveWithCopies(Address),
    CopyBulk {
        to: Address,
        from: Address,
        bytes: Source,
        barrier: Address,
        blocks: Option<Source>,
    },
    CopyBox {
        to: Address,
        map: Address,
        place: Vec<Source>,
        barrier: Address,
        blocks: Option<Source>,
    },
    LoadMatrices {
        to: Vec<u32>,
        from: Address,
    },
    Transpose {
        to: u32,
        from: Source,
    },
    /// 16 x 8 sums += 16 x 16 by 16 x 8.
    Multiply {
        sums: Vec<u32>,
        a: Vec<u32>,
        b: Vec<u32>,
    },
    /// A warp's 16 rows of 64, by `sums / 4` times 8 columns; `a` in registers or described.
    MultiplyWide {
        sums: Vec<u32>,
        a: Vec<Source>,
        b: Source,
    },
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
