//! The plan of a container: with the first pass done, every array has its size and so its place.

use std::collections::{BTreeMap, HashMap};

use zerocopy::little_endian::U64;

use super::{
    analysis::FileAnalysis,
    input::{Side, Weights},
    tensors::{self, PlannedTensor},
};
use crate::{
    Error, Result,
    constants::{
        ARRAY_ALIGNMENT, HEAD_BYTES, HEADER_BYTES, MAX_DIRECTORY_BYTES, MAX_FILE_BYTES, MAX_FILES,
        MAX_FOLDERS, NONE, SECTION_ALIGNMENT, align,
    },
    format::{
        Directory,
        records::{
            ArrayRecord, BlockRecord, FILE_BESIDE, FILE_SIDE, FILE_WEIGHTS, FileRecord,
            MetadataRecord, SECTION_PREFIX, SECTION_SIDE, SectionRecord, TensorRecord,
        },
    },
    paths::PathTree,
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
    /// In the order of the directory.
    pub(super) tensors: Vec<PlannedTensor<'a>>,
}

impl<'a> ContainerPlan<'a> {
    /// Lays out a container, given what the first pass found out about each weights file.
    pub(super) fn new(contents: &Contents<'a>, analyses: &'a [FileAnalysis]) -> Result<Self> {
        let mut tensors = tensors::list(contents.weights, contents.blocks, analyses);
        let blocks = used_blocks(&tensors);
        let mut records = Records::default();
        records.add_files(contents, analyses)?;
        for &block in blocks.keys() {
            let [name_offset, name_length] = records.add_text(&contents.block_names[block]);
            records.directory.blocks.push(BlockRecord { name_offset, name_length });
        }
        for tensor in &mut tensors {
            records.add_tensor(tensor, blocks[&tensor.block]);
        }
        for (key, value) in contents.metadata.into_iter().flatten() {
            let [key_offset, key_length] = records.add_text(key);
            let [value_offset, value_length] = records.add_text(value);
            let record = MetadataRecord { key_offset, key_length, value_offset, value_length };
            records.directory.metadata.push(record);
        }
        let (directory, directory_offset) = records.place()?;
        let plan = Self { directory, directory_offset, tensors };
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
    for (index, block) in (0..).zip(blocks.values_mut()) {
        *block = index;
    }
    blocks
}

/// The records of a directory while they are being made. Arrays are packed into sections, and
/// sections into the container (spec/format.md, sections 2 and 3).
#[derive(Default)]
struct Records {
    /// Without arrays and sections.
    directory: Directory,
    /// Block and section kind, offset in the section, length, of each array.
    arrays: Vec<((u64, u32), u64, u64)>,
    /// The end of the last array of each section; in the order of sections.
    ends: BTreeMap<(u64, u32), u64>,
}

impl Records {
    /// Adds a string to the directory's text; its offset and length there.
    fn add_text(&mut self, string: &str) -> [U64; 2] {
        let offset = self.directory.text.len() as u64;
        self.directory.text.extend_from_slice(string.as_bytes());
        [offset, string.len() as u64].map(U64::new)
    }

    fn add_files(&mut self, contents: &Contents<'_>, analyses: &[FileAnalysis]) -> Result<()> {
        for (weights, analysis) in contents.weights.iter().zip(analyses) {
            let file = &weights.file;
            let stored = file.prefix.len() as u64;
            self.add_file(FILE_WEIGHTS, &file.path, file.length, analysis.hash, stored);
        }
        for file in contents.side {
            let hash = file.read(|_| Ok(()))?;
            self.add_file(FILE_SIDE, &file.path, file.length, hash, file.length);
        }
        for file in contents.beside {
            self.add_file(FILE_BESIDE, &file.path, file.length, file.read(|_| Ok(()))?, 0);
        }
        Ok(())
    }

    fn add_file(&mut self, kind: u32, path: &str, length: u64, hash: [u8; 32], stored: u64) {
        let [path_offset, path_length] = self.add_text(path);
        let section = if kind == FILE_WEIGHTS { SECTION_PREFIX } else { SECTION_SIDE };
        let first_array = self.add_arrays(NONE, &[(section, stored)]);
        self.directory.files.push(FileRecord {
            kind: kind.into(),
            reserved: 0.into(),
            path_offset,
            path_length,
            length: length.into(),
            hash,
            first_array: first_array.into(),
            array_count: u64::from(stored > 0).into(),
        });
    }

    /// Adds a tensor of this block, and tells it where its arrays are.
    fn add_tensor(&mut self, planned: &mut PlannedTensor<'_>, block: u64) {
        let tensor = planned.tensor;
        let [name_offset, name_length] = self.add_text(&tensor.name);
        let mut shape = [0.into(); 8];
        for (field, &dimension) in shape.iter_mut().zip(&tensor.shape) {
            *field = dimension.into();
        }
        let (encoding, parameters, arrays) = planned.stored();
        let first_array = self.add_arrays(block, &arrays);
        planned.first_array = first_array as usize;
        self.directory.tensors.push(TensorRecord {
            name_offset,
            name_length,
            dtype: tensor.dtype.id().into(),
            encoding: encoding.into(),
            block: block.into(),
            file: (planned.file_index as u64).into(),
            file_offset: tensor.offset.into(),
            dimension_count: (tensor.shape.len() as u64).into(),
            shape,
            first_array: first_array.into(),
            array_count: (arrays.len() as u64).into(),
            parameters: parameters.map(Into::into),
            hash: planned.analysis.hash,
        });
    }

    /// Adds arrays of one record, without those of no bytes; returns the index of the first.
    fn add_arrays(&mut self, block: u64, arrays: &[(u32, u64)]) -> u64 {
        let first = self.arrays.len() as u64;
        for &(kind, length) in arrays.iter().filter(|&&(_, length)| length > 0) {
            let end = self.ends.entry((block, kind)).or_default();
            let offset = end.next_multiple_of(ARRAY_ALIGNMENT);
            *end = offset + length;
            self.arrays.push(((block, kind), offset, length));
        }
        first
    }

    /// Places the sections in the file; returns the directory, and where it starts.
    fn place(self) -> Result<(Directory, u64)> {
        let mut sections = Vec::with_capacity(self.ends.len());
        let mut indices = HashMap::new();
        let mut offset = HEAD_BYTES;
        for (&(block, kind), &length) in &self.ends {
            indices.insert((block, kind), sections.len() as u64);
            sections.push(SectionRecord {
                kind: kind.into(),
                reserved: 0.into(),
                block: block.into(),
                offset: offset.into(),
                length: length.into(),
            });
            let end = offset.checked_add(length).and_then(|end| align(end, SECTION_ALIGNMENT));
            let what = "the container's length in bytes";
            offset = end.ok_or_else(|| Error::limit(what, u64::MAX, MAX_FILE_BYTES))?;
        }
        let arrays = self.arrays.into_iter().map(|(section, offset, length)| ArrayRecord {
            section: indices[&section].into(),
            offset: offset.into(),
            length: length.into(),
        });
        Ok((Directory { sections, arrays: arrays.collect(), ..self.directory }, offset))
    }
}
