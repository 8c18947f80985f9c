//! The tensors of a model: the block of each, and which of them are coded, raw, or aliases of
//! others.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{
    analysis::{FileAnalysis, TensorAnalysis},
    coding::Coding,
    input::{Weights, changed},
};
use crate::{
    Dtype, Error,
    constants::{ARRAY_ALIGNMENT, MAX_ALIASES},
    format::{
        records::{ENCODING_ALIAS, ENCODING_RAW, SECTION_RAW},
        section_of,
    },
    source::{
        SourceTensor,
        group::{self, GroupedBlock},
    },
};

/// Decoded bytes from which on a block stands for itself; no layer of a model that is worth
/// compressing is smaller.
const MIN_BLOCK_BYTES: u64 = 64 << 10;

/// Smaller tensors are stored again where they occur again: an alias would save little and tie
/// their blocks together.
const MIN_ALIAS_BYTES: u64 = 64 << 10;

/// Bytes of a part of a tensor that is stored raw.
pub(super) const RAW_PART_BYTES: u64 = 1 << 20;

/// Which block each tensor belongs to.
pub(super) struct Blocks {
    /// For each weights file, the block of each tensor.
    pub(super) of_tensors: Vec<Vec<usize>>,
    pub(super) names: Vec<String>,
}

impl Blocks {
    /// Groups the tensors of all weights files.
    pub(super) fn new(weights: &[Weights<'_>]) -> Self {
        let items: Vec<_> = weights
            .iter()
            .flat_map(|weights| &weights.file.tensors)
            .map(group::Item::from)
            .collect();
        let (mut of_items, mut names) = (vec![0; items.len()], Vec::new());
        for (block, group) in join_small(group::group(&items), &items).into_iter().enumerate() {
            group.tensors.iter().for_each(|&index| of_items[index] = block);
            names.push(group.name);
        }
        let mut of_items = of_items.into_iter();
        let mut next = |count| of_items.by_ref().take(count).collect();
        let of_tensors = weights.iter().map(|weights| next(weights.file.tensors.len())).collect();
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

#[derive(Clone, Copy)]
pub(super) enum PlannedEncoding<'a> {
    /// Of the tensor at this index.
    Alias(usize),
    Raw,
    Coded(&'a Coding),
}

/// A tensor of a container, its block, and how it is stored.
pub(super) struct PlannedTensor<'a> {
    pub(super) file_index: usize,
    pub(super) file: &'a Weights<'a>,
    pub(super) tensor: &'a SourceTensor,
    pub(super) analysis: &'a TensorAnalysis,
    /// Index in the model's block names.
    pub(super) block: usize,
    pub(super) encoding: PlannedEncoding<'a>,
    /// Index of its first array, when it has its place.
    pub(super) first_array: usize,
    /// The fingerprint of what the second pass has read.
    pub(super) seen: AtomicU64,
}

/// All tensors of weights files, ascending by name, with the blocks of each file's tensors.
pub(super) fn list<'a>(
    weights: &'a [Weights<'a>],
    blocks: &[Vec<usize>],
    analyses: &'a [FileAnalysis],
) -> Vec<PlannedTensor<'a>> {
    let mut tensors = Vec::new();
    for (file_index, (file, analysis)) in weights.iter().zip(analyses).enumerate() {
        let of_file = file.file.tensors.iter().zip(&analysis.tensors).zip(&blocks[file_index]);
        tensors.extend(of_file.map(|((tensor, analysis), &block)| PlannedTensor {
            file_index,
            file,
            tensor,
            analysis,
            block,
            encoding: choose(tensor, analysis),
            first_array: 0,
            seen: AtomicU64::new(0),
        }));
    }
    tensors.sort_unstable_by(|a, b| a.tensor.name.cmp(&b.tensor.name));
    find_aliases(&mut tensors);
    tensors
}

/// Coded, if that makes the tensor smaller, with all its alignment.
fn choose<'a>(tensor: &SourceTensor, analysis: &'a TensorAnalysis) -> PlannedEncoding<'a> {
    let aligned = |bytes: u64| bytes.next_multiple_of(ARRAY_ALIGNMENT);
    let is_smaller = |coding: &&Coding| {
        let arrays = coding.sizes.arrays().into_iter();
        arrays.map(|(_, bytes)| aligned(bytes)).sum::<u64>() < aligned(tensor.length)
    };
    analysis.coding.as_ref().filter(is_smaller).map_or(PlannedEncoding::Raw, PlannedEncoding::Coded)
}

/// What makes two tensors equal: hash, dtype, shape.
type Content<'a> = ([u8; 32], Dtype, &'a [u64]);

/// Makes aliases of tensors that equal an earlier one.
///
/// An alias lies in its target's block, so that decoding a block needs no other one. To leave the
/// other blocks as they are, a tensor becomes an alias only where its target is in the same block,
/// or where it is all that its own block holds (a tied head). A target has at most [`MAX_ALIASES`];
/// the next equal tensor is stored again, and is a target itself.
fn find_aliases(tensors: &mut [PlannedTensor<'_>]) {
    let mut sizes: HashMap<usize, usize> = HashMap::new();
    for tensor in tensors.iter() {
        *sizes.entry(tensor.block).or_default() += 1;
    }
    // The target is the equal tensor whose block comes first, and the first by name in it.
    let mut order: Vec<usize> =
        (0..tensors.len()).filter(|&i| tensors[i].tensor.length >= MIN_ALIAS_BYTES).collect();
    order.sort_by_key(|&i| (sizes[&tensors[i].block] == 1, tensors[i].block, i));
    // Targets of the same content, and how many aliases each has.
    let mut targets: HashMap<Content<'_>, Vec<(usize, u64)>> = HashMap::new();
    for i in order {
        let PlannedTensor { tensor, analysis, block, .. } = &tensors[i];
        let equals = targets.entry((analysis.hash, tensor.dtype, &tensor.shape)).or_default();
        let alone = sizes[block] == 1;
        let fits = |&&mut (target, aliases): &&mut (usize, u64)| {
            aliases < MAX_ALIASES && (alone || tensors[target].block == *block)
        };
        match equals.iter_mut().find(fits) {
            Some((target, aliases)) => {
                *aliases += 1;
                let target = *target;
                tensors[i].block = tensors[target].block;
                tensors[i].encoding = PlannedEncoding::Alias(target);
            }
            None => equals.push((i, 0)),
        }
    }
}

impl PlannedTensor<'_> {
    pub(super) fn entropy_bits(&self) -> f64 {
        match self.encoding {
            PlannedEncoding::Coded(coding) => coding.entropy_bits,
            _ => 0.0,
        }
    }

    /// The encoding and its parameters, as the tensor's record has them; section kind and length in
    /// bytes of each array.
    pub(super) fn stored(&self) -> (u32, [u64; 4], Vec<(u32, u64)>) {
        match self.encoding {
            PlannedEncoding::Alias(target) => (ENCODING_ALIAS, [target as u64, 0, 0, 0], vec![]),
            PlannedEncoding::Raw if self.tensor.length == 0 => (ENCODING_RAW, [0; 4], vec![]),
            PlannedEncoding::Raw => (ENCODING_RAW, [0; 4], vec![(SECTION_RAW, self.tensor.length)]),
            PlannedEncoding::Coded(coding) => {
                let [first, second, third] = coding.sizes.parameters();
                let arrays = coding.sizes.arrays().into_iter();
                let arrays = arrays.map(|(kind, length)| (section_of(kind), length)).collect();
                (coding.sizes.encoding(), [first, second, third, 0], arrays)
            }
        }
    }

    /// Parts that the second pass can do alone, on any thread.
    pub(super) fn part_count(&self) -> usize {
        match self.encoding {
            PlannedEncoding::Alias(_) => 1,
            PlannedEncoding::Raw => self.tensor.length.div_ceil(RAW_PART_BYTES) as usize,
            PlannedEncoding::Coded(coding) => coding.portion_count(),
        }
    }

    /// Whether the second pass has read all of it, and what the first has.
    pub(super) fn is_as_analysed(&self) -> bool {
        matches!(self.encoding, PlannedEncoding::Alias(_))
            || self.seen.load(Ordering::Relaxed) == self.analysis.fingerprint
    }

    /// The error for weights that are not those of the first pass.
    pub(super) fn changed(&self) -> Error {
        changed(format_args!("{}: tensor {:?}", self.file.file.path, self.tensor.name))
    }
}
