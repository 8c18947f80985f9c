//! The plan of a container: with the first pass done, every array has its size and so its place.
//! What is left to do is listed as jobs that touch disjoint bytes.

use std::{collections::BTreeMap, ops::Range};

use super::{
    analysis::FileAnalysis,
    coding::Coding,
    fingerprint::{Fingerprint, Shared},
    input::{Side, Weights},
    planned::{self, PlannedTensor},
    sections::ArrayLayout,
};
use crate::{
    Error, Result,
    constants::{ARRAY_ALIGNMENT, HEADER_BYTES, MAX_DIRECTORY_BYTES, MAX_FILES, MAX_FOLDERS, NONE},
    format::{
        Directory,
        records::{
            BlockRecord, FILE_BESIDE, FILE_SIDE, FILE_WEIGHTS, FileRecord, MetadataRecord,
            SECTION_PREFIX, SECTION_SIDE,
        },
    },
    paths::PathTree,
    source::SourceTensor,
};

/// What goes into one container.
#[derive(Clone, Copy)]
pub(super) struct Contents<'a> {
    /// Weights files, ascending by path.
    pub(super) weights: &'a [Weights<'a>],
    /// Side files that are stored, ascending by path.
    pub(super) side: &'a [Side<'a>],
    /// Side files that lie beside the container, likewise.
    pub(super) beside: &'a [Side<'a>],
    /// Keys and values for runtimes; nothing in a shard that is not the first.
    pub(super) metadata: Option<&'a BTreeMap<String, String>>,
    /// For each weights file and each of its tensors, the index of its block in `block_names`.
    pub(super) blocks: &'a [Vec<usize>],
    /// Names of all blocks of the model, in order.
    pub(super) block_names: &'a [String],
}

/// Where everything goes.
pub(super) struct ContainerPlan<'a> {
    /// Complete except for checksums, and which shard of which model it is.
    pub(super) directory: Directory,
    pub(super) directory_offset: u64,
    pub(super) jobs: Vec<Job<'a>>,
    /// The tensors that jobs read.
    pub(super) reads: Vec<Read<'a>>,
    /// Bytes of tensors for which there is nothing to do.
    pub(super) alias_bytes: u64,
    /// Exponent entropy of coded tensors, in bits.
    pub(super) entropy_bits: f64,
}

/// A tensor that is read again in the second pass.
pub(super) struct Read<'a> {
    pub(super) file: &'a Weights<'a>,
    pub(super) tensor: &'a SourceTensor,
    /// What the first pass has read.
    pub(super) fingerprint: Fingerprint,
    /// What the second pass has read.
    pub(super) seen: Shared,
}

/// Bytes to produce, of tensors by their index in [`ContainerPlan::reads`]. Any job may run at any
/// time, on any thread.
pub(super) enum Job<'a> {
    /// The codebook of a tensor that is coded.
    Codebook { array: usize, coding: &'a Coding },
    /// The prefix of a weights file.
    Prefix { array: usize, file: &'a Weights<'a> },
    /// A piece of a tensor that is stored raw: these of the tensor's bytes.
    Raw { array: usize, read: usize, range: Range<u64> },
    /// A side file that is stored.
    Side { array: usize, file: &'a Side<'a> },
    /// A portion of a tensor that is coded; its arrays start at `first_array`.
    Portion { first_array: usize, read: usize, coding: &'a Coding, portion: usize },
}

impl<'a> ContainerPlan<'a> {
    /// Lays out a container, given what the first pass found out about each weights file.
    pub(super) fn new(contents: &Contents<'a>, analyses: &'a [FileAnalysis]) -> Result<Self> {
        let mut tensors = planned::list(contents, analyses);
        planned::find_aliases(&mut tensors);
        let blocks = used_blocks(&tensors);
        let mut layout = ArrayLayout::default();
        let mut text = Vec::new();
        let files = file_records(contents, analyses, &mut layout, &mut text)?;
        let block_records =
            blocks.keys().map(|&block| named(&mut text, &contents.block_names[block])).collect();
        let (mut jobs, mut reads) = (file_jobs(contents), Vec::new());
        let records = tensors
            .iter()
            .map(|tensor| {
                let record = tensor.record(blocks[&tensor.block], &mut layout, &mut text);
                tensor.add_jobs(record.first_array.get() as usize, &mut jobs, &mut reads);
                record
            })
            .collect();
        let metadata = metadata_records(contents, &mut text);
        let (sections, arrays, directory_offset) = layout.place()?;
        let directory = Directory {
            files,
            blocks: block_records,
            sections,
            tensors: records,
            arrays,
            metadata,
            text,
            ..Directory::default()
        };
        let plan = Self {
            directory,
            directory_offset,
            jobs,
            reads,
            alias_bytes: tensors.iter().map(PlannedTensor::alias_bytes).sum(),
            entropy_bits: tensors.iter().map(PlannedTensor::entropy_bits).sum(),
        };
        plan.check_limits()?;
        Ok(plan)
    }

    /// The length of the container, in bytes.
    pub(super) fn file_length(&self) -> u64 {
        let checksums = 4 * self.directory.chunk_count();
        let directory = self.directory.to_bytes().len() as u64 + checksums;
        self.directory_offset + directory.next_multiple_of(ARRAY_ALIGNMENT) + HEADER_BYTES
    }

    fn check_limits(&self) -> Result<()> {
        let length = self.file_length() - self.directory_offset;
        Error::check_limit("the directory's length in bytes", length, MAX_DIRECTORY_BYTES)?;
        let directory = &self.directory;
        let files = directory.files.len() as u64;
        Error::check_limit("the number of files of one container", files, MAX_FILES)?;
        let tree = PathTree::new(directory.files.iter().map(|file| directory.file_path(file)));
        let what = "the number of folders of the files of one container";
        Error::check_limit(what, tree.folders(), MAX_FOLDERS)
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

/// Adds a string to the text of a directory; its offset and length there.
pub(super) fn add_text(text: &mut Vec<u8>, string: &str) -> (u64, u64) {
    let offset = text.len() as u64;
    text.extend_from_slice(string.as_bytes());
    (offset, string.len() as u64)
}

fn named(text: &mut Vec<u8>, name: &str) -> BlockRecord {
    let (offset, length) = add_text(text, name);
    BlockRecord { name_offset: offset.into(), name_length: length.into() }
}

fn file_records(
    contents: &Contents<'_>,
    analyses: &[FileAnalysis],
    layout: &mut ArrayLayout,
    text: &mut Vec<u8>,
) -> Result<Vec<FileRecord>> {
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
    for (weights, analysis) in contents.weights.iter().zip(analyses) {
        let file = &weights.file;
        add(FILE_WEIGHTS, &file.path, file.length, analysis.hash, file.prefix.len() as u64);
    }
    for file in contents.side {
        add(FILE_SIDE, &file.path, file.length, file.hash()?, file.length);
    }
    for file in contents.beside {
        add(FILE_BESIDE, &file.path, file.length, file.hash()?, 0);
    }
    Ok(records)
}

fn metadata_records(contents: &Contents<'_>, text: &mut Vec<u8>) -> Vec<MetadataRecord> {
    let entries = contents.metadata.into_iter().flatten();
    let records = entries.map(|(key, value)| {
        let ((key_offset, key_length), (value_offset, value_length)) =
            (add_text(text, key), add_text(text, value));
        MetadataRecord {
            key_offset: key_offset.into(),
            key_length: key_length.into(),
            value_offset: value_offset.into(),
            value_length: value_length.into(),
        }
    });
    records.collect()
}

/// The jobs of the files' arrays; they are the first arrays of the container.
fn file_jobs<'a>(contents: &Contents<'a>) -> Vec<Job<'a>> {
    let prefixes = (0..).zip(contents.weights).map(|(array, file)| Job::Prefix { array, file });
    let side = contents.side.iter().filter(|file| file.length > 0);
    let side = (contents.weights.len()..).zip(side).map(|(array, file)| Job::Side { array, file });
    prefixes.chain(side).collect()
}
