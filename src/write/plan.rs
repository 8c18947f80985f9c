//! The plan of a container, made after the first pass: it says which tensors are coded, raw, or
//! aliases of others, and gives every array its size and place.

use std::{
    collections::{BTreeMap, HashMap},
    sync::atomic::{AtomicU64, Ordering},
};

use zerocopy::little_endian::U64;

use super::{
    analysis::{FileAnalysis, TensorAnalysis},
    coding::Coding,
    input::{Side, Weights, changed},
};
use crate::{
    Dtype, Error, Result,
    constants::{
        ARRAY_ALIGNMENT, HEAD_BYTES, HEADER_BYTES, MAX_ALIASES, MAX_DIRECTORY_BYTES,
        MAX_FILE_BYTES, MAX_FILES, MAX_FOLDERS, NONE, SECTION_ALIGNMENT, align,
    },
    format::{
        Directory,
        records::{
            ArrayRecord, BlockRecord, ENCODING_ALIAS, ENCODING_RAW, FILE_BESIDE, FILE_SIDE,
            FILE_WEIGHTS, FileRecord, MetadataRecord, SECTION_PREFIX, SECTION_RAW, SECTION_SIDE,
            SectionRecord, TensorRecord,
        },
    },
    paths::PathTree,
    source::SourceTensor,
};

/// Smaller tensors are stored again if they occur again: an alias would save little and tie
/// their blocks together.
const MIN_ALIAS_BYTES: u64 = 64 << 10;

/// Bytes of a part of a tensor that is stored raw.
pub(super) const RAW_PART_BYTES: u64 = 1 << 20;

/// Contents of one container.
#[derive(Clone, Copy)]
pub(super) struct Contents<'a> {
    /// Weights files, ascending by path.
    pub(super) weights: &'a [Weights<'a>],
    /// Side files, ascending by path.
    pub(super) side: &'a [Side<'a>],
    /// Whether they are stored, and do not lie beside it.
    pub(super) stores_side: bool,
    /// Keys and values for runtimes; nothing in a shard that is not the first.
    pub(super) metadata: Option<&'a BTreeMap<String, String>>,
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
        let mut tensors = list(contents.weights, analyses);
        let mut blocks: Vec<usize> = tensors.iter().map(|tensor| tensor.block).collect();
        blocks.sort_unstable();
        blocks.dedup();
        let mut records = Records::default();
        records.add_files(contents, analyses)?;
        for &block in &blocks {
            let [name_offset, name_length] = records.add_text(&contents.block_names[block]);
            records.directory.blocks.push(BlockRecord { name_offset, name_length });
        }
        for tensor in &mut tensors {
            let block = blocks.partition_point(|&block| block < tensor.block);
            records.add_tensor(tensor, block as u64);
        }
        for (key, value) in contents.metadata.into_iter().flatten() {
            let [key_offset, key_length] = records.add_text(key);
            let [value_offset, value_length] = records.add_text(value);
            let record = MetadataRecord { key_offset, key_length, value_offset, value_length };
            records.directory.metadata.push(record);
        }
        let (directory, directory_offset) = records.place()?;
        let files = directory.files.len() as u64;
        Error::check_limit("the number of files of one container", files, MAX_FILES)?;
        let tree = PathTree::new(directory.files.iter().map(|file| directory.file_path(file)));
        let what = "the number of folders of the files of one container";
        Error::check_limit(what, tree.folders(), MAX_FOLDERS)?;
        let plan = Self { directory, directory_offset, tensors };
        let length = plan.file_length() - directory_offset;
        Error::check_limit("the directory's length in bytes", length, MAX_DIRECTORY_BYTES)?;
        Ok(plan)
    }

    /// The length of the container, in bytes.
    pub(super) fn file_length(&self) -> u64 {
        let checksums = 4 * self.directory.chunk_count();
        let directory = self.directory.to_bytes().len() as u64 + checksums;
        self.directory_offset + directory.next_multiple_of(ARRAY_ALIGNMENT) + HEADER_BYTES
    }
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
            let is_stored = contents.stores_side;
            let (kind, bytes) = if is_stored { (FILE_SIDE, file.length) } else { (FILE_BESIDE, 0) };
            self.add_file(kind, &file.path, file.length, file.read(|_| Ok(()))?, bytes);
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

#[derive(Clone, Copy)]
pub(super) enum PlannedEncoding<'a> {
    /// Alias of the tensor at this index.
    Alias(usize),
    Raw,
    Coded(&'a Coding),
}

/// A tensor of a container, its block, and how it is stored.
pub(super) struct PlannedTensor<'a> {
    file_index: usize,
    pub(super) file: &'a Weights<'a>,
    pub(super) tensor: &'a SourceTensor,
    analysis: &'a TensorAnalysis,
    /// Index in the model's block names.
    block: usize,
    pub(super) encoding: PlannedEncoding<'a>,
    /// Index of its first array, when it has its place.
    pub(super) first_array: usize,
    /// The fingerprint of what the second pass has read.
    pub(super) seen: AtomicU64,
}

/// All tensors of weights files, ascending by name.
fn list<'a>(weights: &'a [Weights<'a>], analyses: &'a [FileAnalysis]) -> Vec<PlannedTensor<'a>> {
    let mut tensors = Vec::new();
    for (file_index, (file, analysis)) in weights.iter().zip(analyses).enumerate() {
        let of_file = file.file.tensors.iter().zip(&analysis.tensors).zip(&file.blocks);
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
    let whole = tensor.length.next_multiple_of(ARRAY_ALIGNMENT);
    let is_smaller = |coding: &&Coding| coding.bytes() < whole;
    analysis.coding.as_ref().filter(is_smaller).map_or(PlannedEncoding::Raw, PlannedEncoding::Coded)
}

/// Hash, dtype and shape, which make two tensors equal.
type Content<'a> = ([u8; 32], Dtype, &'a [u64]);

/// Makes aliases of tensors that equal an earlier one.
///
/// An alias lies in its target's block, so that decoding a block needs no other one. Other blocks
/// stay the same: a tensor becomes an alias only if its target is in the same block, if its own
/// block holds nothing else (a tied head), or if loaders pass over its file. A target has at most
/// [`MAX_ALIASES`]; the next equal tensor is stored again, and is a target itself.
fn find_aliases(tensors: &mut [PlannedTensor<'_>]) {
    let mut sizes: HashMap<usize, usize> = HashMap::new();
    for tensor in tensors.iter() {
        *sizes.entry(tensor.block).or_default() += 1;
    }
    // The target is the equal tensor whose block comes first, and the first by name in it.
    let mut order: Vec<usize> =
        (0..tensors.len()).filter(|&i| tensors[i].tensor.length >= MIN_ALIAS_BYTES).collect();
    order.sort_by_key(|&i| {
        let PlannedTensor { file, block, .. } = &tensors[i];
        (file.is_other, sizes[block] == 1, *block, i)
    });
    // Targets of the same content, and how many aliases each has.
    let mut targets: HashMap<Content<'_>, Vec<(usize, u64)>> = HashMap::new();
    for i in order {
        let PlannedTensor { tensor, analysis, block, file, .. } = &tensors[i];
        let equals = targets.entry((analysis.hash, tensor.dtype, &tensor.shape)).or_default();
        let moves = file.is_other || sizes[block] == 1;
        let fits = |&&mut (target, aliases): &&mut (usize, u64)| {
            aliases < MAX_ALIASES && (moves || tensors[target].block == *block)
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
    fn stored(&self) -> (u32, [u64; 4], Vec<(u32, u64)>) {
        match self.encoding {
            PlannedEncoding::Alias(target) => (ENCODING_ALIAS, [target as u64, 0, 0, 0], vec![]),
            PlannedEncoding::Raw if self.tensor.length == 0 => (ENCODING_RAW, [0; 4], vec![]),
            PlannedEncoding::Raw => (ENCODING_RAW, [0; 4], vec![(SECTION_RAW, self.tensor.length)]),
            PlannedEncoding::Coded(coding) => {
                (coding.sizes.encoding(), coding.sizes.parameters(), coding.sizes.arrays())
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

    /// Whether the second pass, if it reads the tensor, has read all of it, and what the first has.
    pub(super) fn is_as_analysed(&self) -> bool {
        let is_read = match self.encoding {
            PlannedEncoding::Alias(_) => false,
            PlannedEncoding::Raw => true,
            PlannedEncoding::Coded(coding) => coding.spilled.is_empty(),
        };
        !is_read || self.seen.load(Ordering::Relaxed) == self.analysis.fingerprint
    }

    /// The error for weights that are not those of the first pass.
    pub(super) fn changed(&self) -> Error {
        changed(format_args!("{}: tensor {:?}", self.file.file.path, self.tensor.name))
    }
}
