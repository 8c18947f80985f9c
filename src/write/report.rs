//! Sizes and counts in the result of compression.

use std::collections::BTreeMap;

use super::{
    input::Input,
    plan::{ContainerPlan, PlannedTensor},
};
use crate::{
    Dtype,
    constants::ARRAY_ALIGNMENT,
    format::{
        Coded,
        records::{ENCODING_ALIAS, ENCODING_DELTA, ENCODING_RAW},
    },
    source::{Component, LeftOut},
};

/// Sizes before and after compression.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// Bytes of the original weights files.
    pub source_bytes: u64,
    /// Bytes of the side files.
    pub side_bytes: u64,
    /// Bytes of all containers, side files in them included.
    pub stored_bytes: u64,
    /// Bytes of the side files that are in a container, before they were stored: all of a single
    /// container, none of a folder.
    pub stored_side_bytes: u64,
    /// The number of containers.
    pub shards: u64,
    /// The number of blocks, counted in each container.
    pub blocks: u64,
    /// The number of tensors with coded exponents.
    pub coded_tensors: u64,
    /// The number of tensors stored raw.
    pub raw_tensors: u64,
    /// Bytes of the tensors stored raw, by dtype.
    pub raw_bytes: BTreeMap<Dtype, u64>,
    /// The number of tensors stored as aliases.
    pub alias_tensors: u64,
    /// The number of those coded tensors that are stored as differences from a base.
    pub delta_tensors: u64,
    /// Weights in tensors stored as differences.
    pub delta_weights: u64,
    /// Bytes of the arrays of tensors stored as differences.
    pub delta_bytes: u64,
    /// Weights in coded tensors.
    pub coded_weights: u64,
    /// Bytes of the arrays of coded tensors, with their alignment.
    pub coded_bytes: u64,
    /// Sum of each coded tensor's own exponent entropy times its weights, in bits.
    pub entropy_bits: f64,
    /// Uncoded bits of coded tensors: 8 of each BF16 weight.
    pub kept_bits: u64,
    /// Bytes of the coded tensors before compression.
    pub coded_source_bytes: u64,
    /// Files that were found and are not part of the output; relative to the folder of all models.
    pub left_out: Vec<LeftOut>,
    /// Notes for the user on how the weights were read, a sentence each.
    pub notes: Vec<String>,
}

impl Report {
    /// Starts the report on a folder, or on a `single` container with its side files inside.
    pub(super) fn new(component: &Component<Input<'_>>, single: bool) -> Self {
        let input = &component.model;
        let left_out = |file: &LeftOut| LeftOut {
            path: component.path_of(&file.path),
            reason: file.reason.clone(),
        };
        let side_bytes = input.side.iter().map(|file| file.length).sum();
        Self {
            source_bytes: input.weights.iter().map(|weights| weights.file.length).sum(),
            side_bytes,
            stored_side_bytes: if single { side_bytes } else { 0 },
            left_out: input.left_out.iter().map(left_out).collect(),
            notes: input.notes.clone(),
            ..Self::default()
        }
    }

    pub(super) fn add(&mut self, plan: &ContainerPlan<'_>) {
        let directory = &plan.directory;
        self.stored_bytes += plan.file_length();
        self.shards += 1;
        self.blocks += directory.blocks.len() as u64;
        self.entropy_bits += plan.tensors.iter().map(PlannedTensor::entropy_bits).sum::<f64>();
        for tensor in &directory.tensors {
            let arrays = directory.arrays[tensor.array_range()].iter();
            let lengths = arrays.map(|array| array.length.get());
            match tensor.encoding.get() {
                ENCODING_ALIAS => self.alias_tensors += 1,
                ENCODING_RAW => {
                    self.raw_tensors += 1;
                    if let Some(dtype) = Dtype::from_id(tensor.dtype.get()) {
                        *self.raw_bytes.entry(dtype).or_default() += lengths.sum::<u64>();
                    }
                }
                _ => {
                    self.coded_tensors += 1;
                    let weights = tensor.dimensions().iter().product::<u64>();
                    let split = Coded::split(tensor).expect("a coded tensor has a split");
                    self.coded_weights += weights;
                    if tensor.encoding == ENCODING_DELTA {
                        self.delta_tensors += 1;
                        self.delta_weights += weights;
                        self.delta_bytes += lengths.clone().sum::<u64>();
                    } else {
                        self.kept_bits += weights * u64::from(split.kept_bits());
                    }
                    self.coded_source_bytes += weights * split.bytes() as u64;
                    let aligned = lengths.map(|length| length.next_multiple_of(ARRAY_ALIGNMENT));
                    self.coded_bytes += aligned.sum::<u64>();
                }
            }
        }
    }

    /// The report of several models together.
    pub fn sum(reports: &[Self]) -> Self {
        let mut sum = Self::default();
        for one in reports {
            sum.source_bytes += one.source_bytes;
            sum.side_bytes += one.side_bytes;
            sum.stored_bytes += one.stored_bytes;
            sum.stored_side_bytes += one.stored_side_bytes;
            sum.shards += one.shards;
            sum.blocks += one.blocks;
            sum.coded_tensors += one.coded_tensors;
            sum.raw_tensors += one.raw_tensors;
            for (dtype, bytes) in &one.raw_bytes {
                *sum.raw_bytes.entry(*dtype).or_default() += bytes;
            }
            sum.alias_tensors += one.alias_tensors;
            sum.delta_tensors += one.delta_tensors;
            sum.delta_weights += one.delta_weights;
            sum.delta_bytes += one.delta_bytes;
            sum.coded_weights += one.coded_weights;
            sum.coded_bytes += one.coded_bytes;
            sum.entropy_bits += one.entropy_bits;
            sum.kept_bits += one.kept_bits;
            sum.coded_source_bytes += one.coded_source_bytes;
            sum.left_out.extend(one.left_out.iter().cloned());
            sum.notes.extend(one.notes.iter().cloned());
        }
        sum
    }

    /// Bytes of the original files that the containers hold: weights files, and side files where
    /// they are inside.
    pub fn original_bytes(&self) -> u64 {
        self.source_bytes + self.stored_side_bytes
    }

    /// Stored size as a fraction of the size of the same original files.
    pub fn ratio(&self) -> f64 {
        self.stored_bytes as f64 / self.original_bytes().max(1) as f64
    }

    /// Bits per weight over all coded tensors.
    pub fn bits_per_weight(&self) -> f64 {
        8.0 * self.coded_bytes as f64 / self.coded_weights.max(1) as f64
    }

    /// Bits per weight that coded tensors had before compression: 16 for BF16.
    pub fn source_bits_per_weight(&self) -> f64 {
        8.0 * self.coded_source_bytes as f64 / self.coded_weights.max(1) as f64
    }

    /// The fewest bits per weight that are possible with one code per tensor: the uncoded bits plus
    /// the entropy.
    pub fn entropy_limit(&self) -> f64 {
        (self.kept_bits as f64 + self.entropy_bits) / self.coded_weights.max(1) as f64
    }

    /// Exponent entropy in bits per weight over all coded tensors, each with its own distribution.
    pub fn entropy(&self) -> f64 {
        self.entropy_bits / self.coded_weights.max(1) as f64
    }
}
