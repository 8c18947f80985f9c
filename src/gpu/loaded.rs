//! What of a model is loaded: its blocks and tensors by name, and the part of each GPU.

use std::{collections::HashMap, sync::Arc};

use super::{Plan, memory::Buffer, part::Part, route::Route, stored::Stored};
use crate::{BlockLayout, Dtype, Error, Result, open::none_such};

/// What the model has, by name; `None` for what the plan left out.
pub(super) type Names<T> = HashMap<String, Option<T>>;

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) plan: Plan,
    /// Those that are loaded.
    pub(super) blocks: Vec<BlockEntry>,
    pub(super) block_names: Names<usize>,
    pub(super) tensors: Names<TensorEntry>,
    pub(super) parts: Vec<Part>,
    /// For each part, the tasks of all blocks.
    pub(super) tasks: Vec<Buffer>,
    pub(super) copied_bytes: u64,
}

#[derive(Debug)]
pub(super) struct BlockEntry {
    pub(super) name: String,
    pub(super) tensors: Vec<String>,
    pub(super) layout: BlockLayout,
    pub(super) part: usize,
    pub(super) route: Route,
}

#[derive(Debug)]
pub(super) struct TensorEntry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: u64,
    /// The index of its block among those that are loaded.
    pub(super) block: usize,
    pub(super) stored: Arc<Stored>,
}

impl Inner {
    pub(super) fn part(&self, index: usize) -> (&Part, &Buffer) {
        (&self.parts[index], &self.tasks[index])
    }

    pub(super) fn block(&self, index: usize) -> &BlockEntry {
        &self.blocks[index]
    }

    pub(super) fn block_named(&self, name: &str) -> Result<&BlockEntry> {
        Ok(self.block(*find(&self.block_names, "block", name)?.1))
    }

    pub(super) fn entry(&self, tensor: &str) -> Result<&TensorEntry> {
        Ok(self.tensor(tensor)?.1)
    }

    /// The tensor with this name, and the name as long as it lives.
    pub(super) fn tensor(&self, name: &str) -> Result<(&str, &TensorEntry)> {
        find(&self.tensors, "tensor", name)
    }

    /// A tensor of a block that is loaded.
    pub(super) fn own_tensor(&self, name: &str) -> (&str, &TensorEntry) {
        self.tensor(name).expect("blocks name their own tensors")
    }
}

fn find<'m, T>(all: &'m Names<T>, what: &str, name: &str) -> Result<(&'m str, &'m T)> {
    match all.get_key_value(name) {
        Some((name, Some(found))) => Ok((name, found)),
        Some((_, None)) => {
            let problem = format!("{what} {name:?} is not loaded: the plan leaves its block out");
            Err(Error::parameter(problem, "load the model by a plan that places that block"))
        }
        None => Err(none_such(what, name)),
    }
}
