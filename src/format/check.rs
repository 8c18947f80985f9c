//! Checks shared by all rules of the directory, and the rules for its names, files and blocks
//! (spec/format.md, sections 3 and 8). Each rule is checked once, in linear time.

use std::{collections::HashSet, mem::offset_of, ops::RangeInclusive};

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

/// A list of the directory, and where it lies there.
#[derive(Clone, Copy)]
pub(super) struct RecordList<'a, T> {
    pub(super) start: usize,
    pub(super) records: &'a [T],
}

impl<'a, T> RecordList<'a, T> {
    /// The list that comes after what ends here: its count, and its records.
    fn after(end: &mut usize, records: &'a [T]) -> Self {
        let start = *end + size_of::<u64>();
        *end = start + size_of_val(records);
        Self { start, records }
    }

    /// Its records, each with the byte of the directory at which it starts.
    pub(super) fn iter(self) -> impl Iterator<Item = (usize, &'a T)> {
        (self.start..).step_by(size_of::<T>()).zip(self.records)
    }
}

/// A directory whose rules are checked.
pub(super) struct Check<'a> {
    pub(super) directory: &'a Directory,
    pub(super) files: RecordList<'a, FileRecord>,
    pub(super) blocks: RecordList<'a, BlockRecord>,
    pub(super) sections: RecordList<'a, SectionRecord>,
    pub(super) tensors: RecordList<'a, TensorRecord>,
    pub(super) arrays: RecordList<'a, ArrayRecord>,
    pub(super) checksums: RecordList<'a, zerocopy::little_endian::U32>,
    metadata: RecordList<'a, MetadataRecord>,
    text: RecordList<'a, u8>,
}

pub(super) fn corrupt(at: usize, problem: impl std::fmt::Display) -> Error {
    Error::corrupt("directory", at as u64, problem)
}

/// A rule about the bytes of the directory from here on.
pub(super) fn require(holds: bool, at: usize, problem: impl std::fmt::Display) -> Result<()> {
    Error::unless(holds, || corrupt(at, problem))
}

impl<'a> Check<'a> {
    pub(super) fn new(directory: &'a Directory) -> Self {
        let mut end = size_of::<ShardRecord>();
        Self {
            directory,
            files: RecordList::after(&mut end, &directory.files),
            blocks: RecordList::after(&mut end, &directory.blocks),
            sections: RecordList::after(&mut end, &directory.sections),
            tensors: RecordList::after(&mut end, &directory.tensors),
            arrays: RecordList::after(&mut end, &directory.arrays),
            checksums: RecordList::after(&mut end, &directory.checksums),
            metadata: RecordList::after(&mut end, &directory.metadata),
            text: RecordList::after(&mut end, &directory.text),
        }
    }

    /// Refuses as Unsupported what only a newer reader can read, whatever else there is (step 10).
    pub(super) fn kinds(&self) -> Result<()> {
        let unknown = |what: &str, kind: u32| {
            let what = format_args!("{what} kind {kind}");
            Err(Error::unsupported(what, "update df11 to read this file"))
        };
        for file in self.files.records {
            if !matches!(file.kind.get(), FILE_WEIGHTS | FILE_SIDE | FILE_BESIDE) {
                return unknown("file", file.kind.get());
            }
        }
        for section in self.sections.records {
            let kind = section.kind.get();
            if kind < SECTION_SKIPPABLE && section_name(kind).is_none() {
                return unknown("section", kind);
            }
        }
        Ok(())
    }

    pub(super) fn shard(&self) -> Result<()> {
        let shard = &self.directory.shard;
        let (index, count) = (shard.shard_index.get(), shard.shard_count.get());
        Error::check_limit("shard_count", count, MAX_SHARDS)?;
        require(index < count, 0, format_args!("shard {index} of {count}"))?;
        let weights_alone = self.files.records.iter().all(|file| file.kind == FILE_WEIGHTS);
        require(
            index == 0 || weights_alone && self.metadata.records.is_empty(),
            0,
            "side files or metadata in a shard that is not the first",
        )
    }

    /// Names, paths, keys and values lie back to back, are UTF-8 without NUL, and of legal length.
    pub(super) fn text(&self) -> Result<()> {
        let files = self.files.iter().map(|(at, file)| (at, file.path_offset, file.path_length));
        let blocks =
            self.blocks.iter().map(|(at, block)| (at, block.name_offset, block.name_length));
        let tensors =
            self.tensors.iter().map(|(at, tensor)| (at, tensor.name_offset, tensor.name_length));
        let names = files.chain(blocks).chain(tensors);
        let names = names.map(|(at, offset, length)| (at, offset, length, 1..=MAX_NAME_BYTES));
        let entries = self.metadata.iter().flat_map(|(at, entry)| {
            let value_at = at + offset_of!(MetadataRecord, value_offset);
            let value = (value_at, entry.value_offset, entry.value_length, 0..=MAX_VALUE_BYTES);
            [(at, entry.key_offset, entry.key_length, 1..=MAX_KEY_BYTES), value]
        });
        let mut position = 0;
        for (at, offset, length, lengths) in names.chain(entries) {
            position = self.name(at, offset, length, &lengths, position)?;
        }
        let is_end = position == self.text.records.len();
        require(is_end, self.text.start + position, "text goes on after the last name")
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
        let bytes = self.text.records.get(position..end);
        let bytes = bytes.ok_or_else(|| corrupt(at, "a name ends beyond text"))?;
        let is_text = std::str::from_utf8(bytes).is_ok() && !bytes.contains(&0);
        require(is_text, self.text.start + position, "a name is not UTF-8 without NUL")?;
        Ok(end)
    }

    /// Keys ascend, and all entries together are small.
    pub(super) fn metadata(&self) -> Result<()> {
        let mut bytes = 0;
        let mut before = None;
        for ((at, _), (key, value)) in self.metadata.iter().zip(self.directory.metadata()) {
            let ascends = before.is_none_or(|before| before < key);
            require(ascends, at, "keys of metadata are not ascending")?;
            before = Some(key);
            bytes += (key.len() + value.len()) as u64;
        }
        Error::check_limit("the length of all metadata in bytes", bytes, MAX_METADATA_BYTES)
    }

    pub(super) fn files(&self) -> Result<()> {
        let count = self.files.records.len() as u64;
        Error::check_limit("the number of files", count, MAX_FILES)?;
        let mut paths = HashSet::new();
        let mut before: Option<(u32, &str)> = None;
        for (at, file) in self.files.iter() {
            let (kind, path) = (file.kind.get(), self.directory.file_path(file));
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
        // No file has the path of a folder of another one, and folders are not too many.
        let tree = PathTree::new(paths.into_iter());
        if let Some((file, path)) = tree.clash() {
            let problem = format!("path {path:?} lies in file {file:?}");
            return Err(corrupt(self.files.start, problem));
        }
        Error::check_limit("the number of folders of all paths", tree.folders(), MAX_FOLDERS)
    }

    pub(super) fn blocks(&self) -> Result<()> {
        let mut names = HashSet::new();
        for (at, block) in self.blocks.iter() {
            let name = self.directory.block_name(block);
            require(names.insert(name), at, format_args!("two blocks are named {name:?}"))?;
        }
        Ok(())
    }
}
