//! The blocks of what is compressed.

use super::input::Input;
use crate::source::{
    WeightsFile,
    group::{self, GroupedBlock},
};

/// Decoded bytes from which on a block stands for itself; no layer of a model that is worth
/// compressing is smaller.
const MIN_BLOCK_BYTES: u64 = 64 << 10;

/// Which block each tensor belongs to.
pub(super) struct Blocks {
    /// For each weights file, the block of each tensor.
    pub(super) of_tensors: Vec<Vec<usize>>,
    pub(super) names: Vec<String>,
}

impl Blocks {
    /// Groups the tensors of all weights files.
    pub(super) fn new(input: &Input<'_>) -> Self {
        let files: Vec<&WeightsFile> = input.weights.iter().map(|weights| &*weights.file).collect();
        let tensors: Vec<_> = files
            .iter()
            .enumerate()
            .flat_map(|(file, weights)| {
                (0..weights.tensors.len()).map(move |tensor| (file, tensor))
            })
            .collect();
        let items: Vec<_> = tensors
            .iter()
            .map(|&(file, tensor)| group::Item::from(&files[file].tensors[tensor]))
            .collect();
        let groups = join_small(group::group(&items), &items);
        let mut of_tensors: Vec<Vec<usize>> =
            files.iter().map(|weights| vec![0; weights.tensors.len()]).collect();
        let mut names = Vec::with_capacity(groups.len());
        for (block, group) in groups.into_iter().enumerate() {
            for index in group.tensors {
                let (file, tensor) = tensors[index];
                of_tensors[file][tensor] = block;
            }
            names.push(group.name);
        }
        Self { of_tensors, names }
    }
}

/// Joins blocks in a row that are all small, until they have [`MIN_BLOCK_BYTES`] together; the
/// first one gives the name. The sections of a block take up to five pages, which a model of many
/// tiny modules would otherwise mostly consist of.
fn join_small(groups: Vec<GroupedBlock>, items: &[group::Item<'_>]) -> Vec<GroupedBlock> {
    let mut joined: Vec<GroupedBlock> = Vec::with_capacity(groups.len());
    let mut before = MIN_BLOCK_BYTES;
    for group in groups {
        let bytes: u64 = group.tensors.iter().map(|&index| items[index].bytes).sum();
        match joined.last_mut() {
            Some(last) if before < MIN_BLOCK_BYTES && bytes < MIN_BLOCK_BYTES => {
                last.tensors.extend(group.tensors);
                before += bytes;
            }
            _ => {
                joined.push(group);
                before = bytes;
            }
        }
    }
    joined
}
