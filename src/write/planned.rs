//! The tensors of a plan: which of them are coded, raw, or aliases of others, and what each adds to
//! the container.

use std::collections::HashMap;

use super::{
    analysis::{FileAnalysis, TensorAnalysis},
    coding::Coding,
    fingerprint::Shared,
    input::Weights,
    plan::{Contents, Job, Read, add_text},
    sections::ArrayLayout,
};
use crate::{
    Dtype,
    constants::{ARRAY_ALIGNMENT, MAX_ALIASES},
    format::records::{ENCODING_ALIAS, ENCODING_RAW, SECTION_RAW, TensorRecord},
    parallel,
    source::SourceTensor,
};

/// Smaller tensors are stored again where they occur again: an alias would save little and tie
/// their blocks together.
const MIN_ALIAS_BYTES: u64 = 64 << 10;

/// Bytes of one raw job.
const RAW_JOB_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy)]
enum PlannedEncoding<'a> {
    /// Of the tensor at this index.
    Alias(usize),
    Raw,
    Coded(&'a Coding),
}

/// A tensor, its block, and how it is stored.
pub(super) struct PlannedTensor<'a> {
    name: &'a str,
    file_index: usize,
    file: &'a Weights<'a>,
    tensor: &'a SourceTensor,
    analysis: &'a TensorAnalysis,
    /// Index in the model's block names.
    pub(super) block: usize,
    encoding: PlannedEncoding<'a>,
}

/// All tensors, ascending by name.
pub(super) fn list<'a>(
    contents: &Contents<'a>,
    analyses: &'a [FileAnalysis],
) -> Vec<PlannedTensor<'a>> {
    let mut tensors: Vec<PlannedTensor<'a>> = contents
        .weights
        .iter()
        .zip(analyses)
        .zip(contents.blocks)
        .enumerate()
        .flat_map(|(file_index, ((file, analysis), blocks))| {
            file.file.tensors.iter().zip(&analysis.tensors).zip(blocks).map(
                move |((tensor, analysis), &block)| PlannedTensor {
                    name: &tensor.name,
                    file_index,
                    file,
                    tensor,
                    analysis,
                    block,
                    encoding: choose(tensor, analysis),
                },
            )
        })
        .collect();
    tensors.sort_unstable_by(|a, b| a.name.as_bytes().cmp(b.name.as_bytes()));
    tensors
}

/// Coded, if that makes the tensor smaller, with all its alignment.
fn choose<'a>(tensor: &SourceTensor, analysis: &'a TensorAnalysis) -> PlannedEncoding<'a> {
    let aligned = |bytes: u64| bytes.next_multiple_of(ARRAY_ALIGNMENT);
    let is_smaller = |coding: &&Coding| {
        let (.., arrays) = coding.stored();
        arrays.iter().map(|&(_, bytes)| aligned(bytes)).sum::<u64>() < aligned(tensor.length)
    };
    let coding = analysis.coding.as_ref().filter(is_smaller);
    coding.map_or(PlannedEncoding::Raw, PlannedEncoding::Coded)
}

/// What makes two tensors equal: hash, dtype, shape.
type Content<'a> = ([u8; 32], Dtype, &'a [u64]);

/// Makes aliases of tensors that equal an earlier one.
///
/// An alias lies in its target's block, so that decoding a block needs no other one. To leave the
/// other blocks as they are, a tensor becomes an alias only where its target is in the same block,
/// or where it is all that its own block holds (a tied head). A target has at most [`MAX_ALIASES`];
/// the next equal tensor is stored again, and is a target itself.
pub(super) fn find_aliases(tensors: &mut [PlannedTensor<'_>]) {
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
        let tensor = &tensors[i];
        let equals = targets
            .entry((tensor.analysis.hash, tensor.tensor.dtype, &tensor.tensor.shape))
            .or_default();
        let alone = sizes[&tensor.block] == 1;
        let fits = |&&mut (target, aliases): &&mut (usize, u64)| {
            aliases < MAX_ALIASES && (alone || tensors[target].block == tensor.block)
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

impl<'a> PlannedTensor<'a> {
    pub(super) fn record(
        &self,
        block: u64,
        layout: &mut ArrayLayout,
        text: &mut Vec<u8>,
    ) -> TensorRecord {
        let (name_offset, name_length) = add_text(text, self.name);
        let mut shape = [0.into(); 8];
        for (field, &dimension) in shape.iter_mut().zip(&self.tensor.shape) {
            *field = dimension.into();
        }
        let (encoding, parameters, arrays) = self.stored();
        let first_array = layout.add(block, &arrays);
        TensorRecord {
            name_offset: name_offset.into(),
            name_length: name_length.into(),
            dtype: self.tensor.dtype.id().into(),
            encoding: encoding.into(),
            block: block.into(),
            file: (self.file_index as u64).into(),
            file_offset: self.tensor.offset.into(),
            dimension_count: (self.tensor.shape.len() as u64).into(),
            shape,
            first_array: first_array.into(),
            array_count: (arrays.len() as u64).into(),
            parameters: parameters.map(Into::into),
            hash: self.analysis.hash,
        }
    }

    pub(super) fn alias_bytes(&self) -> u64 {
        if matches!(self.encoding, PlannedEncoding::Alias(_)) { self.tensor.length } else { 0 }
    }

    pub(super) fn entropy_bits(&self) -> f64 {
        match self.encoding {
            PlannedEncoding::Coded(coding) => coding.entropy_bits(),
            _ => 0.0,
        }
    }

    /// The encoding and its parameters, as the tensor's record has them; section kind and length in
    /// bytes of each array.
    fn stored(&self) -> (u32, [u64; 4], Vec<(u32, u64)>) {
        match self.encoding {
            PlannedEncoding::Alias(target) => (ENCODING_ALIAS, [target as u64, 0, 0, 0], vec![]),
            PlannedEncoding::Raw if self.tensor.length == 0 => (ENCODING_RAW, [0; 4], vec![]),
            PlannedEncoding::Raw => (ENCODING_RAW, [0; 4], vec![(SECTION_RAW, self.tensor.length)]),
            PlannedEncoding::Coded(coding) => coding.stored(),
        }
    }

    /// Adds what is to be done for its arrays, of which the first has this index.
    pub(super) fn add_jobs(
        &self,
        first_array: usize,
        jobs: &mut Vec<Job<'a>>,
        reads: &mut Vec<Read<'a>>,
    ) {
        let (file, tensor, read) = (self.file, self.tensor, reads.len());
        match self.encoding {
            PlannedEncoding::Alias(_) => return,
            PlannedEncoding::Raw => {
                let parts = parallel::cut(0..tensor.length, RAW_JOB_BYTES, 1);
                jobs.extend(parts.map(|range| Job::Raw { array: first_array, read, range }));
            }
            PlannedEncoding::Coded(coding) => {
                jobs.push(Job::Codebook { array: first_array, coding });
                let portions = 0..coding.portion_count();
                jobs.extend(portions.map(|portion| Job::Portion {
                    first_array,
                    read,
                    coding,
                    portion,
                }));
            }
        }
        let fingerprint = self.analysis.fingerprint;
        reads.push(Read { file, tensor, fingerprint, seen: Shared::default() });
    }
}
