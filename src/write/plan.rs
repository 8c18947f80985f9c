//! The plan of a container: with the first pass done, every array has its size and so its place. What is left to do
//! is listed as jobs that touch disjoint bytes.

use std::collections::{BTreeMap, HashMap};

use super::{
    analysis::{FileAnalysis, TensorAnalysis},
    arrays::ArrayLayout,
    coding::Coding,
    input::{Side, Weights},
};
use crate::{
    Dtype, Error, Result,
    constants::{ARRAY_ALIGNMENT, HEADER_BYTES, MAX_DIRECTORY_BYTES, NONE},
    format::{
        Directory,
        directory::{ShardRecord, chunk_count},
        records::{
            BlockRecord, ENCODING_ALIAS, ENCODING_RAW, FILE_SIDE, FILE_WEIGHTS, FileRecord, SECTION_PREFIX,
            SECTION_RAW, SECTION_SIDE, TensorRecord,
        },
    },
    source::SourceTensor,
};

/// Smaller tensors are stored again where they occur again: an alias would save little and tie their blocks together.
const MIN_ALIAS_BYTES: u64 = 64 << 10;

/// What goes into one container.
pub(super) struct Contents<'a> {
    /// Weights files, ascending by path, each with what the first pass found.
    pub(super) weights: Vec<(&'a Weights<'a>, &'a FileAnalysis)>,
    /// Side files, ascending by path, each with its hash.
    pub(super) side: Vec<(&'a Side<'a>, [u8; 32])>,
    /// For each weights file and each of its tensors, the index of its block in `block_names`.
    pub(super) blocks: Vec<Vec<usize>>,
    /// Names of all blocks of the model, in order.
    pub(super) block_names: &'a [String],
}

/// Where everything goes.
pub(super) struct Plan<'a> {
    /// Complete but for checksums and identity.
    pub(super) directory: Directory,
    pub(super) directory_offset: u64,
    pub(super) jobs: Vec<Job<'a>>,
    /// Bytes of tensors for which there is nothing to do.
    pub(super) alias_bytes: u64,
    /// Exponent entropy of coded tensors, in bits.
    pub(super) entropy_bits: f64,
}

/// Bytes to produce. Any job may run at any time, on any thread.
pub(super) enum Job<'a> {
    /// Bytes that are known already.
    Bytes { array: usize, bytes: Vec<u8> },
    /// The prefix of a weights file.
    Prefix { array: usize, file: &'a Weights<'a> },
    /// A piece of a tensor that is stored raw; offset and length count from the tensor's start.
    Raw { array: usize, file: &'a Weights<'a>, tensor: &'a SourceTensor, offset: u64, length: u64 },
    /// A side file.
    Side { array: usize, file: &'a Side<'a> },
    /// A chunk of a tensor that is coded; its arrays start at `first_array`.
    Chunk {
        first_array: usize,
        file: &'a Weights<'a>,
        tensor: &'a SourceTensor,
        coding: &'a Coding,
        chunk: usize,
    },
}

/// Bytes of one raw job.
const RAW_JOB_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy)]
enum Encoding<'a> {
    /// Of the tensor at this index.
    Alias(usize),
    Raw,
    Coded(&'a Coding),
}

struct PlannedTensor<'a> {
    name: &'a str,
    file_index: usize,
    file: &'a Weights<'a>,
    tensor: &'a SourceTensor,
    analysis: &'a TensorAnalysis,
    /// Index in the model's block names.
    block: usize,
    encoding: Encoding<'a>,
}

impl<'a> Plan<'a> {
    /// Lays out a container.
    pub(super) fn new(contents: &Contents<'a>) -> Result<Self> {
        let mut tensors = list(contents);
        find_aliases(&mut tensors);
        let blocks = used_blocks(&tensors);
        let mut layout = ArrayLayout::default();
        let mut text = Vec::new();
        let files = file_records(contents, &mut layout, &mut text);
        let block_records =
            blocks.keys().map(|&block| named(&mut text, &contents.block_names[block])).collect();
        let mut jobs = file_jobs(contents);
        let records = tensors
            .iter()
            .map(|tensor| tensor.record(blocks[&tensor.block], &mut layout, &mut text, &mut jobs))
            .collect();
        let (sections, arrays, directory_offset) = layout.place()?;
        let shard = ShardRecord { shard_index: 0.into(), shard_count: 1.into(), identity: [0; 32] };
        let directory = Directory {
            shard,
            files,
            blocks: block_records,
            sections,
            tensors: records,
            arrays,
            checksums: Vec::new(),
            text,
        };
        let plan = Self {
            directory,
            directory_offset,
            jobs,
            alias_bytes: tensors.iter().map(PlannedTensor::alias_bytes).sum(),
            entropy_bits: tensors.iter().map(PlannedTensor::entropy_bits).sum(),
        };
        plan.check_limits()?;
        Ok(plan)
    }

    /// The length of the container, in bytes.
    pub(super) fn file_length(&self) -> u64 {
        let chunks: u64 =
            self.directory.sections.iter().map(|section| chunk_count(section.length.get())).sum();
        let directory = self.directory.to_bytes().len() as u64 + 4 * chunks;
        self.directory_offset + directory.next_multiple_of(ARRAY_ALIGNMENT) + HEADER_BYTES
    }

    fn check_limits(&self) -> Result<()> {
        let length = self.file_length() - self.directory_offset;
        if length > MAX_DIRECTORY_BYTES {
            return Err(Error::limit("the directory's length in bytes", length, MAX_DIRECTORY_BYTES));
        }
        Ok(())
    }
}

/// All tensors, ascending by name.
fn list<'a>(contents: &Contents<'a>) -> Vec<PlannedTensor<'a>> {
    let mut tensors: Vec<PlannedTensor<'a>> = contents
        .weights
        .iter()
        .zip(&contents.blocks)
        .enumerate()
        .flat_map(|(file_index, (&(file, analysis), blocks))| {
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

/// Coded, where that makes the tensor smaller, with all its alignment.
fn choose<'a>(tensor: &SourceTensor, analysis: &'a TensorAnalysis) -> Encoding<'a> {
    let aligned = |bytes: u64| bytes.next_multiple_of(ARRAY_ALIGNMENT);
    match &analysis.coding {
        Some(coding)
            if coding.arrays().iter().map(|&(_, bytes)| aligned(bytes)).sum::<u64>()
                < aligned(tensor.length) =>
        {
            Encoding::Coded(coding)
        }
        _ => Encoding::Raw,
    }
}

/// What makes two tensors equal: hash, dtype, shape.
type Content<'a> = ([u8; 32], Dtype, &'a [u64]);

/// Makes aliases of tensors that equal an earlier one.
///
/// An alias lies in its target's block, so that decoding a block needs no other one. To leave the other blocks as they are, a tensor becomes
/// an alias only where its target is in the same block, or where it is all that its own block holds (a tied head).
fn find_aliases(tensors: &mut [PlannedTensor<'_>]) {
    let mut sizes: HashMap<usize, usize> = HashMap::new();
    for tensor in tensors.iter() {
        *sizes.entry(tensor.block).or_default() += 1;
    }
    // The target is the equal tensor whose block comes first, and the first by name in it.
    let mut order: Vec<usize> =
        (0..tensors.len()).filter(|&i| tensors[i].tensor.length >= MIN_ALIAS_BYTES).collect();
    order.sort_by_key(|&i| (sizes[&tensors[i].block] == 1, tensors[i].block, i));
    let mut targets: HashMap<Content<'_>, Vec<usize>> = HashMap::new();
    for i in order {
        let tensor = &tensors[i];
        let equals =
            targets.entry((tensor.analysis.hash, tensor.tensor.dtype, &tensor.tensor.shape)).or_default();
        let alone = sizes[&tensor.block] == 1;
        let target = equals.iter().copied().find(|&target| alone || tensors[target].block == tensor.block);
        match target {
            Some(target) => {
                tensors[i].block = tensors[target].block;
                tensors[i].encoding = Encoding::Alias(target);
            }
            None => equals.push(i),
        }
    }
}

/// The blocks that have a tensor in this container, with their indices in it.
fn used_blocks(tensors: &[PlannedTensor<'_>]) -> BTreeMap<usize, u64> {
    let mut blocks: BTreeMap<usize, u64> = tensors.iter().map(|tensor| (tensor.block, 0)).collect();
    for (index, (_, block)) in blocks.iter_mut().enumerate() {
        *block = index as u64;
    }
    blocks
}

fn add_text(text: &mut Vec<u8>, string: &str) -> (u64, u64) {
    let offset = text.len() as u64;
    text.extend_from_slice(string.as_bytes());
    (offset, string.len() as u64)
}

fn named(text: &mut Vec<u8>, name: &str) -> BlockRecord {
    let (offset, length) = add_text(text, name);
    BlockRecord { name_offset: offset.into(), name_length: length.into() }
}

fn file_records(contents: &Contents<'_>, layout: &mut ArrayLayout, text: &mut Vec<u8>) -> Vec<FileRecord> {
    let mut records = Vec::new();
    let mut add = |kind: u32, path: &str, length: u64, hash: [u8; 32], stored: u64| {
        let (path_offset, path_length) = add_text(text, path);
        let section = if kind == FILE_WEIGHTS { SECTION_PREFIX } else { SECTION_SIDE };
        let first_array = layout.add(NONE, &[(section, stored)]);
        records.push(FileRecord {
            kind: kind.into(),
            reserved: 0.into(),
            path_offset: path_offset.into(),
            path_length: path_length.into(),
            length: length.into(),
            hash,
            first_array: first_array.into(),
            array_count: u64::from(stored > 0).into(),
        });
    };
    for (file, analysis) in &contents.weights {
        let file = &file.file;
        add(FILE_WEIGHTS, &file.path, file.length, analysis.hash, file.prefix.len() as u64);
    }
    for (file, hash) in &contents.side {
        add(FILE_SIDE, &file.path, file.length, *hash, file.length);
    }
    records
}

/// The jobs of the files' arrays; they are the first arrays of the container.
fn file_jobs<'a>(contents: &Contents<'a>) -> Vec<Job<'a>> {
    let prefixes = contents.weights.iter().enumerate().map(|(array, &(file, _))| Job::Prefix { array, file });
    let side = contents.side.iter().map(|&(file, _)| file).filter(|file| file.length > 0);
    let first = contents.weights.len();
    let side = side.enumerate().map(|(i, file)| Job::Side { array: first + i, file });
    prefixes.chain(side).collect()
}

impl<'a> PlannedTensor<'a> {
    fn record(
        &self,
        block: u64,
        layout: &mut ArrayLayout,
        text: &mut Vec<u8>,
        jobs: &mut Vec<Job<'a>>,
    ) -> TensorRecord {
        let (name_offset, name_length) = add_text(text, self.name);
        let mut shape = [0.into(); 8];
        for (field, &dimension) in shape.iter_mut().zip(&self.tensor.shape) {
            *field = dimension.into();
        }
        let arrays = self.arrays();
        let first_array = layout.add(block, &arrays);
        self.add_jobs(first_array as usize, jobs);
        let (encoding, parameters) = self.parameters();
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

    fn alias_bytes(&self) -> u64 {
        if matches!(self.encoding, Encoding::Alias(_)) { self.tensor.length } else { 0 }
    }

    fn entropy_bits(&self) -> f64 {
        match self.encoding {
            Encoding::Coded(coding) => coding.entropy_bits(),
            _ => 0.0,
        }
    }

    /// Section kind and length in bytes of each array.
    fn arrays(&self) -> Vec<(u32, u64)> {
        match self.encoding {
            Encoding::Alias(_) => Vec::new(),
            Encoding::Raw if self.tensor.length == 0 => Vec::new(),
            Encoding::Raw => vec![(SECTION_RAW, self.tensor.length)],
            Encoding::Coded(coding) => coding.arrays(),
        }
    }

    fn parameters(&self) -> (u32, [u64; 4]) {
        match self.encoding {
            Encoding::Alias(target) => (ENCODING_ALIAS, [target as u64, 0, 0, 0]),
            Encoding::Raw => (ENCODING_RAW, [0; 4]),
            Encoding::Coded(coding) => coding.parameters(),
        }
    }

    fn add_jobs(&self, first_array: usize, jobs: &mut Vec<Job<'a>>) {
        let (file, tensor) = (self.file, self.tensor);
        match self.encoding {
            Encoding::Alias(_) => {}
            Encoding::Raw => {
                let mut offset = 0;
                while offset < tensor.length {
                    let length = RAW_JOB_BYTES.min(tensor.length - offset);
                    jobs.push(Job::Raw { array: first_array, file, tensor, offset, length });
                    offset += length;
                }
            }
            Encoding::Coded(coding) => {
                jobs.push(Job::Bytes { array: first_array, bytes: coding.codebook() });
                let chunks = 0..coding.chunk_count();
                jobs.extend(chunks.map(|chunk| Job::Chunk { first_array, file, tensor, coding, chunk }));
            }
        }
    }
}
