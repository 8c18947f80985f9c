//! Instructions of memory, barriers, copies and matrices.

use crate::{
    lower::{Builder, Names},
    parse::{Operand, Statement, bytes_of},
    program::{Combine, Operation, Shuffle, Source, Space, Vote},
};

impl Builder<'_> {
    pub(crate) fn memory(&mut self, names: &Names, said: &Statement, parts: &[&str]) -> Operation {
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

    pub(crate) fn barrier(&mut self, names: &Names, said: &Statement, parts: &[&str]) -> Operation {
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

    pub(crate) fn copy(&mut self, names: &Names, said: &Statement, parts: &[&str]) -> Operation {
        let given = &said.operands;
        let is_multicast = parts.iter().any(|part| part.starts_with("multicast"));
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
                    blocks: is_multicast.then(|| self.source(names, &given[3])),
                }
            }
            ["cp", "async", "bulk", ..] => Operation::CopyBulk {
                to: self.address(names, &given[0]),
                from: self.address(names, &given[1]),
                bytes: self.source(names, &given[2]),
                barrier: self.address(names, &given[3]),
                blocks: is_multicast.then(|| self.source(names, &given[4])),
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

    pub(crate) fn exchange(
        &mut self,
        names: &Names,
        said: &Statement,
        parts: &[&str],
    ) -> Operation {
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

    pub(crate) fn matrices(
        &mut self,
        names: &Names,
        said: &Statement,
        parts: &[&str],
    ) -> Operation {
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
