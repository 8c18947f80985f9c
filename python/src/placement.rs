//! The placement of a model's blocks as the caller requests it.

use std::collections::{HashMap, HashSet};

use df11::Error;
use df11::gpu::{Placement, Plan};
use pyo3::{intern, prelude::*};

/// A place, as Python names it.
pub(crate) fn placement(
    py: Python<'_>,
    device: usize,
    streamed: bool,
) -> PyResult<Bound<'_, PyAny>> {
    py.import(intern!(py, "df11._report"))?.getattr("Placement")?.call1((device, streamed))
}

/// The argument `blocks`: the names of those that are loaded, or where each of them lies.
#[derive(FromPyObject)]
pub(crate) enum BlocksArgument {
    Placed(HashMap<String, (usize, bool)>),
    Named(Vec<String>),
}

impl BlocksArgument {
    /// The names of the blocks that are loaded.
    fn names(&self) -> HashSet<&str> {
        match self {
            Self::Placed(placed) => placed.keys().map(String::as_str).collect(),
            Self::Named(named) => named.iter().map(String::as_str).collect(),
        }
    }
}

/// More GPUs are a mistake.
const MAX_GPUS: usize = 1024;

/// Options of a plan, as a caller gives them.
pub(crate) struct PlanRequest {
    pub(crate) memory: Option<Vec<u64>>,
    pub(crate) streamed: bool,
    pub(crate) blocks: Option<BlocksArgument>,
}

impl PlanRequest {
    /// The number of GPUs that it names.
    pub(crate) fn devices(&self) -> usize {
        match (&self.memory, &self.blocks) {
            (Some(memory), _) => memory.len(),
            (None, Some(BlocksArgument::Placed(placed))) => {
                let last = placed.values().map(|(device, _)| *device).max();
                last.map_or(1, |last| last.saturating_add(1).min(MAX_GPUS))
            }
            (None, _) => 1,
        }
    }

    pub(crate) fn plan(&self, model: &df11::Model, devices: usize) -> df11::Result<Plan> {
        let Self { memory, streamed, blocks } = self;
        let names = blocks.as_ref().map(BlocksArgument::names);
        if let Some(name) = names.iter().flatten().find(|name| model.block(name).is_err()) {
            let problem = format!("there is no block {name:?}");
            return Err(Error::parameter(problem, "name those of Model.blocks"));
        }
        let is_loaded = |block: df11::Block<'_>| {
            names.as_ref().is_none_or(|names| names.contains(block.name()))
        };
        match (memory, blocks) {
            (Some(_), Some(BlocksArgument::Placed(_))) => Err(Error::parameter(
                "memory and places of blocks are both given",
                "give one of them",
            )),
            (None, Some(BlocksArgument::Placed(_))) if *streamed => {
                let remedy = "say of each block whether it is streamed";
                Err(Error::parameter("streamed and places of blocks are both given", remedy))
            }
            (Some(_), _) if *streamed => {
                let remedy = "give one: memory streams what does not fit";
                Err(Error::parameter("memory and streamed are both given", remedy))
            }
            (Some(memory), _) => Plan::fit_some(model, memory, is_loaded),
            (None, Some(BlocksArgument::Placed(placed))) => Plan::of(model, devices, |block| {
                let &(device, streamed) = placed.get(block.name())?;
                Some(Placement { device, streamed })
            }),
            (None, _) => Plan::of(model, 1, |block| {
                is_loaded(block).then_some(Placement { device: 0, streamed: *streamed })
            }),
        }
    }
}

/// A number, or a sequence of them.
#[derive(FromPyObject)]
pub(crate) enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

impl<T> OneOrMore<T> {
    pub(crate) fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::More(more) => more,
        }
    }
}
