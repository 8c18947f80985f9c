//! The rules of the directory (spec/format.md, sections 3 to 6), each checked once, in linear time.

use std::collections::HashSet;

use zerocopy::little_endian::U64;

use super::{
    directory::{Directory, Places, chunk_count},
    records::{
        ArrayRecord, BlockRecord, ENCODING_ALIAS, ENCODING_GAP, ENCODING_RAW, FILE_SIDE, FILE_WEIGHTS,
        FileRecord, SECTION_BITSTREAM, SECTION_CODEBOOK, SECTION_INDEX, SECTION_PLANE, SECTION_PREFIX,
        SECTION_RAW, SECTION_SIDE, SECTION_SKIPPABLE, SectionRecord, TensorRecord, section_name,
    },
};
use crate::{
    Dtype, Error, Result,
    constants::{
        ARRAY_ALIGNMENT, HEAD_BYTES, MAX_DIMENSIONS, MAX_NAME_BYTES, MAX_SHARDS, NONE, SECTION_ALIGNMENT,
        align,
    },
    dtype::elements,
    encoding::gap::{Geometry, Layout},
    paths::check_path,
};

/// Checks everything that the directory says about itself.
pub(super) fn validate(directory: &Directory, places: Places, directory_offset: u64) -> Result<()> {
    let check = Check { directory, places };
    check.kinds()?;
    check.shard()?;
    check.text()?;
    check.files()?;
    check.blocks()?;
    check.sections(directory_offset)?;
    check.arrays()?;
    check.tensors()?;
    check.checksums()
}

struct Check<'a> {
    directory: &'a Directory,
    places: Places,
}

fn corrupt(offset: usize, problem: impl std::fmt::Display) -> Error {
    Error::corrupt("directory", offset as u64, problem)
}

fn overflow(what: &str) -> Error {
    Error::limit(what, u64::MAX, u64::MAX - 1)
}

impl Check<'_> {
    /// What only a newer reader can read is Unsupported, whatever else there is (step 10).
    fn kinds(&self) -> Result<()> {
        let unknown = |what: &str, kind: u32| {
            Err(Error::unsupported(format_args!("{what} kind {kind}"), "update df11 to read this file"))
        };
        for file in &self.directory.files {
            if !matches!(file.kind.get(), FILE_WEIGHTS | FILE_SIDE) {
                return unknown("file", file.kind.get());
            }
        }
        for section in &self.directory.sections {
            let kind = section.kind.get();
            if kind < SECTION_SKIPPABLE && section_name(kind).is_none() {
                return unknown("section", kind);
            }
        }
        Ok(())
    }

    fn file_at(&self, index: usize) -> usize {
        self.places.files + index * size_of::<FileRecord>()
    }

    fn block_at(&self, index: usize) -> usize {
        self.places.blocks + index * size_of::<BlockRecord>()
    }

    fn section_at(&self, index: usize) -> usize {
        self.places.sections + index * size_of::<SectionRecord>()
    }

    fn tensor_at(&self, index: usize) -> usize {
        self.places.tensors + index * size_of::<TensorRecord>()
    }

    fn array_at(&self, index: usize) -> usize {
        self.places.arrays + index * size_of::<ArrayRecord>()
    }

    fn tensor_corrupt(&self, index: usize, problem: impl std::fmt::Display) -> Error {
        let name = self.directory.tensor_name(&self.directory.tensors[index]);
        corrupt(self.tensor_at(index), format_args!("tensor {name:?}: {problem}"))
    }

    fn shard(&self) -> Result<()> {
        let (index, count) = (self.directory.shard.shard_index.get(), self.directory.shard.shard_count.get());
        if count > MAX_SHARDS {
            return Err(Error::limit("shard_count", count, MAX_SHARDS));
        }
        if index >= count {
            return Err(corrupt(0, format_args!("shard {index} of {count}")));
        }
        Ok(())
    }

    /// Names and paths lie back to back, are UTF-8 without NUL, and of legal length.
    fn text(&self) -> Result<()> {
        let directory = self.directory;
        let files = directory.files.iter().enumerate();
        let blocks = directory.blocks.iter().enumerate();
        let tensors = directory.tensors.iter().enumerate();
        let fields = files
            .map(|(i, file)| (self.file_at(i), file.path_offset, file.path_length))
            .chain(blocks.map(|(i, block)| (self.block_at(i), block.name_offset, block.name_length)))
            .chain(tensors.map(|(i, tensor)| (self.tensor_at(i), tensor.name_offset, tensor.name_length)));
        let mut position = 0;
        for (at, offset, length) in fields {
            position = self.name(at, offset, length, position)?;
        }
        if position == directory.text.len() {
            Ok(())
        } else {
            Err(corrupt(self.places.text + position, "text goes on after the last name"))
        }
    }

    fn name(&self, at: usize, offset: U64, length: U64, position: usize) -> Result<usize> {
        let length = length.get();
        if length > MAX_NAME_BYTES {
            return Err(Error::limit("a name's length in bytes", length, MAX_NAME_BYTES));
        }
        if length == 0 || offset.get() != position as u64 {
            return Err(corrupt(at, "a name is empty or does not follow the one before"));
        }
        let end = position + length as usize;
        let bytes =
            self.directory.text.get(position..end).ok_or_else(|| corrupt(at, "a name ends beyond text"))?;
        if std::str::from_utf8(bytes).is_err() || bytes.contains(&0) {
            return Err(corrupt(self.places.text + position, "a name is not UTF-8 without NUL"));
        }
        Ok(end)
    }

    fn files(&self) -> Result<()> {
        let directory = self.directory;
        let mut paths = HashSet::new();
        let mut before: Option<(u32, &str)> = None;
        for (i, file) in directory.files.iter().enumerate() {
            let (at, kind) = (self.file_at(i), file.kind.get());
            let path = directory.file_path(file);
            check_path(path).map_err(|error| corrupt(at, error))?;
            if before.is_some_and(|before| before >= (kind, path)) || !paths.insert(path) {
                return Err(corrupt(at, format_args!("path {path:?} is out of order")));
            }
            before = Some((kind, path));
            let empty = kind == FILE_SIDE && file.length.get() == 0;
            if file.reserved.get() != 0 || file.array_count.get() != u64::from(!empty) {
                return Err(corrupt(at, format_args!("file {path:?} has a wrong field")));
            }
        }
        self.folders()
    }

    /// No file has the path of a folder of another one. With `/` before all other characters, what is in a folder
    /// comes directly after a file of the folder's name.
    fn folders(&self) -> Result<()> {
        let directory = self.directory;
        let mut paths: Vec<&str> = directory.files.iter().map(|file| directory.file_path(file)).collect();
        let key = |byte: u8| if byte == b'/' { 0 } else { byte };
        paths.sort_unstable_by(|a, b| a.bytes().map(key).cmp(b.bytes().map(key)));
        for pair in paths.windows(2) {
            if pair[1].strip_prefix(pair[0]).is_some_and(|rest| rest.starts_with('/')) {
                let problem = format!("path {:?} lies in file {:?}", pair[1], pair[0]);
                return Err(corrupt(self.places.files, problem));
            }
        }
        Ok(())
    }

    fn blocks(&self) -> Result<()> {
        let mut names = HashSet::new();
        for (i, block) in self.directory.blocks.iter().enumerate() {
            let name = self.directory.block_name(block);
            if !names.insert(name) {
                return Err(corrupt(self.block_at(i), format_args!("two blocks are named {name:?}")));
            }
        }
        Ok(())
    }

    fn sections(&self, directory_offset: u64) -> Result<()> {
        let mut end = HEAD_BYTES;
        let mut before = None;
        for (i, section) in self.directory.sections.iter().enumerate() {
            let (at, kind, block) = (self.section_at(i), section.kind.get(), section.block.get());
            self.section_kind(at, kind, block)?;
            if before.is_some_and(|before| before >= (block, kind)) {
                return Err(corrupt(at, "sections are not ascending by block and kind"));
            }
            before = Some((block, kind));
            let start = align(end, SECTION_ALIGNMENT).ok_or_else(|| overflow("a section's end"))?;
            if section.reserved.get() != 0 || section.length.get() == 0 || section.offset.get() != start {
                let problem = format!("section {i} must start at {start} and have a length");
                return Err(corrupt(at, problem));
            }
            end = start.checked_add(section.length.get()).ok_or_else(|| overflow("a section's end"))?;
        }
        let start = align(end, SECTION_ALIGNMENT).ok_or_else(|| overflow("the last section's end"))?;
        if start == directory_offset {
            Ok(())
        } else {
            let problem =
                format!("the sections end at {start}, and the directory starts at {directory_offset}");
            Err(corrupt(self.places.sections, problem))
        }
    }

    fn section_kind(&self, at: usize, kind: u32, block: u64) -> Result<()> {
        let legal = match kind {
            SECTION_CODEBOOK..=SECTION_RAW => block < self.directory.blocks.len() as u64,
            SECTION_PREFIX | SECTION_SIDE => block == NONE,
            _ => block == NONE || block < self.directory.blocks.len() as u64,
        };
        if legal {
            Ok(())
        } else {
            Err(corrupt(at, format_args!("a section of kind {kind} in block {block}")))
        }
    }

    /// Arrays belong to records in order and are packed in their sections.
    fn arrays(&self) -> Result<()> {
        let directory = self.directory;
        let mut next = 0u64;
        let files = directory.files.iter().enumerate();
        let tensors = directory.tensors.iter().enumerate();
        let owners = files
            .map(|(i, file)| (self.file_at(i), file.first_array, file.array_count))
            .chain(tensors.map(|(i, tensor)| (self.tensor_at(i), tensor.first_array, tensor.array_count)));
        for (at, first, count) in owners {
            if first.get() != next {
                return Err(corrupt(at, format_args!("first_array must be {next}")));
            }
            next = next.checked_add(count.get()).ok_or_else(|| overflow("the count of arrays"))?;
        }
        if next != directory.arrays.len() as u64 {
            let problem = format!("records own {next} arrays, and there are {}", directory.arrays.len());
            return Err(corrupt(self.places.arrays, problem));
        }
        self.packing()?;
        self.owners()
    }

    fn packing(&self) -> Result<()> {
        let sections = &self.directory.sections;
        let mut ends: Vec<Option<u64>> = vec![None; sections.len()];
        for (i, array) in self.directory.arrays.iter().enumerate() {
            let at = self.array_at(i);
            let end = usize::try_from(array.section.get())
                .ok()
                .and_then(|section| ends.get_mut(section))
                .ok_or_else(|| corrupt(at, "an array is in no section"))?;
            let start = align(end.unwrap_or(0), ARRAY_ALIGNMENT).ok_or_else(|| overflow("an array's end"))?;
            if array.offset.get() != start || array.length.get() == 0 {
                return Err(corrupt(at, format_args!("an array must start at {start} and have a length")));
            }
            let stop = start.checked_add(array.length.get()).ok_or_else(|| overflow("an array's end"))?;
            *end = Some(stop);
        }
        for (i, (section, end)) in sections.iter().zip(ends).enumerate() {
            let (length, end) = (section.length.get(), end.unwrap_or(0));
            let known = section_name(section.kind.get()).is_some();
            if end > length || (known && end != length) {
                let problem = format!("section {i} has {length} bytes, and its arrays end at {end}");
                return Err(corrupt(self.section_at(i), problem));
            }
        }
        Ok(())
    }

    /// Every array lies in a section of its owner.
    fn owners(&self) -> Result<()> {
        let directory = self.directory;
        for (i, file) in directory.files.iter().enumerate() {
            let wanted = if file.kind.get() == FILE_WEIGHTS { SECTION_PREFIX } else { SECTION_SIDE };
            for array in &directory.arrays[file.array_range()] {
                if self.section_of(array).kind.get() != wanted || array.length.get() > file.length.get() {
                    return Err(corrupt(
                        self.file_at(i),
                        "a file's array is in the wrong section or too long",
                    ));
                }
                if wanted == SECTION_SIDE && array.length != file.length {
                    return Err(corrupt(self.file_at(i), "a side file's array has another length"));
                }
            }
        }
        for (i, tensor) in directory.tensors.iter().enumerate() {
            for array in &directory.arrays[tensor.array_range()] {
                if self.section_of(array).block != tensor.block {
                    return Err(self.tensor_corrupt(i, "an array is in a section of another block"));
                }
            }
        }
        Ok(())
    }

    /// The section of an array that `packing` accepted.
    fn section_of(&self, array: &ArrayRecord) -> &SectionRecord {
        &self.directory.sections[array.section.get() as usize]
    }

    fn tensors(&self) -> Result<()> {
        let mut before = None;
        for (i, tensor) in self.directory.tensors.iter().enumerate() {
            let name = self.directory.tensor_name(tensor);
            if before.is_some_and(|before| before >= name.as_bytes()) {
                return Err(self.tensor_corrupt(i, "names are not ascending"));
            }
            before = Some(name.as_bytes());
            self.tensor(i, tensor)?;
        }
        Ok(())
    }

    fn tensor(&self, i: usize, tensor: &TensorRecord) -> Result<()> {
        let dimensions = tensor.dimension_count.get();
        if dimensions > MAX_DIMENSIONS {
            return Err(Error::limit("a tensor's number of dimensions", dimensions, MAX_DIMENSIONS));
        }
        if tensor.shape[dimensions as usize..].iter().any(|&dimension| dimension != 0) {
            return Err(self.tensor_corrupt(i, "a dimension beyond dimension_count is not zero"));
        }
        if tensor.block.get() >= self.directory.blocks.len() as u64 {
            return Err(self.tensor_corrupt(i, "its block does not exist"));
        }
        let file = usize::try_from(tensor.file.get())
            .ok()
            .and_then(|file| self.directory.files.get(file))
            .filter(|file| file.kind.get() == FILE_WEIGHTS)
            .ok_or_else(|| self.tensor_corrupt(i, "its weights file does not exist"))?;
        let dtype = Dtype::from_id(tensor.dtype.get());
        let shape = tensor.dimensions();
        let bytes = match dtype.map(|dtype| dtype.bytes(&shape)) {
            // Nothing is known of the size of its elements.
            None => 0,
            Some(Err(Error::Parameter { problem, .. })) => return Err(self.tensor_corrupt(i, problem)),
            Some(bytes) => bytes?,
        };
        if tensor.file_offset.get().checked_add(bytes).is_none_or(|end| end > file.length.get()) {
            return Err(self.tensor_corrupt(i, "it ends beyond its weights file"));
        }
        let Some(dtype) = dtype else { return Ok(()) };
        match tensor.encoding.get() {
            ENCODING_ALIAS => self.alias(i, tensor),
            ENCODING_RAW => self.raw(i, tensor, bytes),
            ENCODING_GAP => self.gap(i, tensor, dtype, elements(&shape)?),
            _ => Ok(()),
        }
    }

    fn alias(&self, i: usize, tensor: &TensorRecord) -> Result<()> {
        self.parameters(i, tensor, 1)?;
        self.array_kinds(i, tensor, &[], &[])?;
        let target = usize::try_from(tensor.parameters[0].get())
            .ok()
            .and_then(|target| self.directory.tensors.get(target))
            .ok_or_else(|| self.tensor_corrupt(i, "the target of the alias does not exist"))?;
        let same = target.encoding.get() != ENCODING_ALIAS
            && target.block == tensor.block
            && target.dtype == tensor.dtype
            && target.dimension_count == tensor.dimension_count
            && target.shape == tensor.shape
            && target.hash == tensor.hash;
        if same { Ok(()) } else { Err(self.tensor_corrupt(i, "the target of the alias is not its equal")) }
    }

    fn raw(&self, i: usize, tensor: &TensorRecord, bytes: u64) -> Result<()> {
        self.parameters(i, tensor, 0)?;
        if bytes == 0 {
            self.array_kinds(i, tensor, &[], &[])
        } else {
            self.array_kinds(i, tensor, &[SECTION_RAW], &[bytes])
        }
    }

    fn gap(&self, i: usize, tensor: &TensorRecord, dtype: Dtype, count: u64) -> Result<()> {
        self.parameters(i, tensor, 3)?;
        if dtype != Dtype::BF16 || count == 0 {
            return Err(self.tensor_corrupt(i, "only BF16 tensors with elements can be gap-encoded"));
        }
        let [bytes_per_thread, threads_per_block, bit_count, _] = tensor.parameters.map(U64::get);
        let geometry = Geometry::from_parameters(bytes_per_thread, threads_per_block)
            .map_err(|error| self.tensor_corrupt(i, error))?;
        let codebook =
            self.directory.arrays[tensor.array_range()].first().map_or(0, |array| array.length.get());
        let layout = Layout::lut_count_of(codebook)
            .and_then(|lut_count| Layout::new(geometry, count, bit_count, lut_count))
            .map_err(|error| self.tensor_corrupt(i, error))?;
        self.array_kinds(
            i,
            tensor,
            &[SECTION_CODEBOOK, SECTION_INDEX, SECTION_INDEX, SECTION_BITSTREAM, SECTION_PLANE],
            &[
                codebook,
                layout.gaps_bytes(),
                layout.output_offsets_bytes(),
                layout.bitstream_bytes(),
                layout.plane_bytes(),
            ],
        )
    }

    /// The parameters from `used` on are zero.
    fn parameters(&self, i: usize, tensor: &TensorRecord, used: usize) -> Result<()> {
        if tensor.parameters[used..].iter().all(|&parameter| parameter == 0) {
            Ok(())
        } else {
            Err(self.tensor_corrupt(i, "an unused parameter is not zero"))
        }
    }

    /// The arrays are in sections of these kinds and have these lengths in bytes.
    fn array_kinds(&self, i: usize, tensor: &TensorRecord, kinds: &[u32], lengths: &[u64]) -> Result<()> {
        let arrays = &self.directory.arrays[tensor.array_range()];
        let right = arrays.len() == kinds.len()
            && arrays.iter().zip(kinds).all(|(array, &kind)| self.section_of(array).kind == kind)
            && arrays.iter().zip(lengths).all(|(array, &length)| array.length == length);
        if right { Ok(()) } else { Err(self.tensor_corrupt(i, "its arrays are not those of its encoding")) }
    }

    fn checksums(&self) -> Result<()> {
        let expected: u64 =
            self.directory.sections.iter().map(|section| chunk_count(section.length.get())).sum();
        if expected == self.directory.checksums.len() as u64 {
            Ok(())
        } else {
            let problem =
                format!("{} checksums, and the sections need {expected}", self.directory.checksums.len());
            Err(corrupt(self.places.checksums, problem))
        }
    }
}
