//! The rules of the directory (spec/format.md, sections 3 to 6), each checked once, in linear time.

use std::{collections::HashSet, ops::RangeInclusive};

use zerocopy::little_endian::U64;

use super::{
    directory::{Directory, ShardRecord},
    records::{
        ArrayRecord, BlockRecord, FILE_BESIDE, FILE_SIDE, FILE_WEIGHTS, FileRecord, MetadataRecord,
        SECTION_SKIPPABLE, SectionRecord, TensorRecord, section_name,
    },
};
use crate::{
    Error, Result,
    constants::{
        MAX_FILES, MAX_FOLDERS, MAX_KEY_BYTES, MAX_METADATA_BYTES, MAX_NAME_BYTES, MAX_SHARDS,
        MAX_VALUE_BYTES,
    },
    paths::{PathTree, check_path, ends_as_container},
};

/// Where the first record of each list lies in the directory, for error messages.
pub(super) struct Places {
    pub(super) files: usize,
    pub(super) blocks: usize,
    pub(super) sections: usize,
    pub(super) tensors: usize,
    pub(super) arrays: usize,
    pub(super) checksums: usize,
    pub(super) metadata: usize,
    pub(super) text: usize,
}

impl Places {
    fn of(directory: &Directory) -> Self {
        // Each list is a count and its records.
        let mut end = size_of::<ShardRecord>();
        let mut next = |bytes: usize| {
            let start = end + size_of::<u64>();
            end = start + bytes;
            start
        };
        Self {
            files: next(size_of_val(&*directory.files)),
            blocks: next(size_of_val(&*directory.blocks)),
            sections: next(size_of_val(&*directory.sections)),
            tensors: next(size_of_val(&*directory.tensors)),
            arrays: next(size_of_val(&*directory.arrays)),
            checksums: next(size_of_val(&*directory.checksums)),
            metadata: next(size_of_val(&*directory.metadata)),
            text: next(size_of_val(&*directory.text)),
        }
    }
}

/// Checks everything that the directory says about itself.
pub(super) fn validate(directory: &Directory, directory_offset: u64) -> Result<()> {
    let check = Check { directory, places: Places::of(directory) };
    check.kinds()?;
    check.shard()?;
    check.text()?;
    check.metadata()?;
    check.files()?;
    check.blocks()?;
    check.sections(directory_offset)?;
    check.arrays()?;
    check.tensors()?;
    check.checksums()
}

pub(super) struct Check<'a> {
    pub(super) directory: &'a Directory,
    pub(super) places: Places,
}

pub(super) fn corrupt(offset: usize, problem: impl std::fmt::Display) -> Error {
    Error::corrupt("directory", offset as u64, problem)
}

/// A rule about the bytes of the directory from here on.
pub(super) fn require(holds: bool, offset: usize, problem: impl std::fmt::Display) -> Result<()> {
    if holds { Ok(()) } else { Err(corrupt(offset, problem)) }
}

impl Check<'_> {
    /// What only a newer reader can read is Unsupported, whatever else there is (step 10).
    fn kinds(&self) -> Result<()> {
        let unknown = |what: &str, kind: u32| {
            let what = format_args!("{what} kind {kind}");
            Err(Error::unsupported(what, "update df11 to read this file"))
        };
        for file in &self.directory.files {
            if !matches!(file.kind.get(), FILE_WEIGHTS | FILE_SIDE | FILE_BESIDE) {
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

    pub(super) fn file_at(&self, index: usize) -> usize {
        self.places.files + index * size_of::<FileRecord>()
    }

    fn block_at(&self, index: usize) -> usize {
        self.places.blocks + index * size_of::<BlockRecord>()
    }

    pub(super) fn section_at(&self, index: usize) -> usize {
        self.places.sections + index * size_of::<SectionRecord>()
    }

    pub(super) fn tensor_at(&self, index: usize) -> usize {
        self.places.tensors + index * size_of::<TensorRecord>()
    }

    pub(super) fn array_at(&self, index: usize) -> usize {
        self.places.arrays + index * size_of::<ArrayRecord>()
    }

    /// Where an entry of the metadata lies, and where in it the fields of its value do.
    fn entry_at(&self, index: usize) -> (usize, usize) {
        let at = self.places.metadata + index * size_of::<MetadataRecord>();
        (at, at + std::mem::offset_of!(MetadataRecord, value_offset))
    }

    /// A rule about a tensor.
    pub(super) fn require(
        &self,
        index: usize,
        holds: bool,
        problem: impl std::fmt::Display,
    ) -> Result<()> {
        if holds { Ok(()) } else { Err(self.tensor_corrupt(index, problem)) }
    }

    pub(super) fn tensor_corrupt(&self, index: usize, problem: impl std::fmt::Display) -> Error {
        let name = self.directory.tensor_name(&self.directory.tensors[index]);
        corrupt(self.tensor_at(index), format_args!("tensor {name:?}: {problem}"))
    }

    fn shard(&self) -> Result<()> {
        let (index, count) =
            (self.directory.shard.shard_index.get(), self.directory.shard.shard_count.get());
        Error::check_limit("shard_count", count, MAX_SHARDS)?;
        require(index < count, 0, format_args!("shard {index} of {count}"))?;
        let weights_alone = self.directory.files.iter().all(|file| file.kind == FILE_WEIGHTS);
        require(
            index == 0 || weights_alone && self.directory.metadata.is_empty(),
            0,
            "side files or metadata in a shard that is not the first",
        )
    }

    /// Names, paths, keys and values lie back to back, are UTF-8 without NUL, and of legal length.
    fn text(&self) -> Result<()> {
        let directory = self.directory;
        let files = directory.files.iter().enumerate();
        let blocks = directory.blocks.iter().enumerate();
        let tensors = directory.tensors.iter().enumerate();
        let fields = files
            .map(|(i, file)| (self.file_at(i), file.path_offset, file.path_length))
            .chain(
                blocks.map(|(i, block)| (self.block_at(i), block.name_offset, block.name_length)),
            )
            .chain(
                tensors
                    .map(|(i, tensor)| (self.tensor_at(i), tensor.name_offset, tensor.name_length)),
            );
        let names = fields.map(|(at, offset, length)| (at, offset, length, 1..=MAX_NAME_BYTES));
        let entries = directory.metadata.iter().enumerate().flat_map(|(i, entry)| {
            let (at, value_at) = self.entry_at(i);
            let value = (value_at, entry.value_offset, entry.value_length, 0..=MAX_VALUE_BYTES);
            [(at, entry.key_offset, entry.key_length, 1..=MAX_KEY_BYTES), value]
        });
        let mut position = 0;
        for (at, offset, length, lengths) in names.chain(entries) {
            position = self.name(at, offset, length, &lengths, position)?;
        }
        let is_end = position == directory.text.len();
        require(is_end, self.places.text + position, "text goes on after the last name")
    }

    fn name(
        &self,
        at: usize,
        offset: U64,
        length: U64,
        lengths: &RangeInclusive<u64>,
        position: usize,
    ) -> Result<usize> {
        let length = length.get();
        Error::check_limit("the length in bytes of a name or value", length, *lengths.end())?;
        let follows = length >= *lengths.start() && offset.get() == position as u64;
        require(follows, at, "a name is empty or does not follow the one before")?;
        let end = position + length as usize;
        let bytes = self
            .directory
            .text
            .get(position..end)
            .ok_or_else(|| corrupt(at, "a name ends beyond text"))?;
        let is_text = std::str::from_utf8(bytes).is_ok() && !bytes.contains(&0);
        require(is_text, self.places.text + position, "a name is not UTF-8 without NUL")?;
        Ok(end)
    }

    /// Keys ascend, and all entries together are small.
    fn metadata(&self) -> Result<()> {
        let mut bytes = 0;
        let mut before = None;
        for (i, (key, value)) in self.directory.metadata().enumerate() {
            let ascends = before.is_none_or(|before| before < key);
            require(ascends, self.entry_at(i).0, "keys of metadata are not ascending")?;
            before = Some(key);
            bytes += (key.len() + value.len()) as u64;
        }
        Error::check_limit("the length of all metadata in bytes", bytes, MAX_METADATA_BYTES)
    }

    fn files(&self) -> Result<()> {
        let directory = self.directory;
        Error::check_limit("the number of files", directory.files.len() as u64, MAX_FILES)?;
        let mut paths = HashSet::new();
        let mut before: Option<(u32, &str)> = None;
        for (i, file) in directory.files.iter().enumerate() {
            let (at, kind) = (self.file_at(i), file.kind.get());
            let path = directory.file_path(file);
            check_path(path).map_err(|error| match error {
                Error::Corrupt { .. } => corrupt(at, error),
                other => other,
            })?;
            let ascends = before.is_none_or(|before| before < (kind, path)) && paths.insert(path);
            require(ascends, at, format_args!("path {path:?} is out of order"))?;
            before = Some((kind, path));
            let empty = kind == FILE_BESIDE || kind == FILE_SIDE && file.length.get() == 0;
            let right = file.reserved == 0 && file.array_count.get() == u64::from(!empty);
            require(right, at, format_args!("file {path:?} has a wrong field"))?;
            let is_shard = kind == FILE_BESIDE && ends_as_container(path);
            require(!is_shard, at, format_args!("side file {path:?} would be taken for a shard"))?;
        }
        self.folders()
    }

    /// No file has the path of a folder of another one, and folders are not too many.
    fn folders(&self) -> Result<()> {
        let directory = self.directory;
        let tree = PathTree::new(directory.files.iter().map(|file| directory.file_path(file)));
        if let Some((file, path)) = tree.clash() {
            let problem = format!("path {path:?} lies in file {file:?}");
            return Err(corrupt(self.places.files, problem));
        }
        Error::check_limit("the number of folders of all paths", tree.folders(), MAX_FOLDERS)
    }

    fn blocks(&self) -> Result<()> {
        let mut names = HashSet::new();
        for (i, block) in self.directory.blocks.iter().enumerate() {
            let name = self.directory.block_name(block);
            let problem = format_args!("two blocks are named {name:?}");
            require(names.insert(name), self.block_at(i), problem)?;
        }
        Ok(())
    }
}
