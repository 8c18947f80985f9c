//! The rules of the directory (spec/format.md, sections 3 to 6), each checked once, in linear time.

use std::{collections::HashSet, ops::RangeInclusive};

use zerocopy::little_endian::U64;

use super::{
    directory::Directory,
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

/// Where a record lies in the directory, for error messages.
#[derive(Clone, Copy)]
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

/// Checks everything that the directory says about itself.
pub(super) fn validate(directory: &Directory, places: Places, directory_offset: u64) -> Result<()> {
    let check = Check { directory, places };
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

pub(super) fn overflow(what: &str) -> Error {
    Error::limit(what, u64::MAX, u64::MAX - 1)
}

impl Check<'_> {
    /// What only a newer reader can read is Unsupported, whatever else there is (step 10).
    fn kinds(&self) -> Result<()> {
        let unknown = |what: &str, kind: u32| {
            Err(Error::unsupported(
                format_args!("{what} kind {kind}"),
                "update df11 to read this file",
            ))
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

    pub(super) fn tensor_corrupt(&self, index: usize, problem: impl std::fmt::Display) -> Error {
        let name = self.directory.tensor_name(&self.directory.tensors[index]);
        corrupt(self.tensor_at(index), format_args!("tensor {name:?}: {problem}"))
    }

    fn shard(&self) -> Result<()> {
        let (index, count) =
            (self.directory.shard.shard_index.get(), self.directory.shard.shard_count.get());
        if count > MAX_SHARDS {
            return Err(Error::limit("shard_count", count, MAX_SHARDS));
        }
        if index >= count {
            return Err(corrupt(0, format_args!("shard {index} of {count}")));
        }
        let weights_alone = self.directory.files.iter().all(|file| file.kind == FILE_WEIGHTS);
        if index > 0 && !(weights_alone && self.directory.metadata.is_empty()) {
            return Err(corrupt(0, "side files or metadata in a shard that is not the first"));
        }
        Ok(())
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
        if position == directory.text.len() {
            Ok(())
        } else {
            Err(corrupt(self.places.text + position, "text goes on after the last name"))
        }
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
        if length > *lengths.end() {
            return Err(Error::limit(
                "the length in bytes of a name or value",
                length,
                *lengths.end(),
            ));
        }
        if length < *lengths.start() || offset.get() != position as u64 {
            return Err(corrupt(at, "a name is empty or does not follow the one before"));
        }
        let end = position + length as usize;
        let bytes = self
            .directory
            .text
            .get(position..end)
            .ok_or_else(|| corrupt(at, "a name ends beyond text"))?;
        if std::str::from_utf8(bytes).is_err() || bytes.contains(&0) {
            return Err(corrupt(self.places.text + position, "a name is not UTF-8 without NUL"));
        }
        Ok(end)
    }

    /// Keys ascend, and all entries together are small.
    fn metadata(&self) -> Result<()> {
        let mut bytes = 0;
        let mut before = None;
        for (i, (key, value)) in self.directory.metadata().enumerate() {
            if before.is_some_and(|before| before >= key) {
                return Err(corrupt(self.entry_at(i).0, "keys of metadata are not ascending"));
            }
            before = Some(key);
            bytes += (key.len() + value.len()) as u64;
        }
        if bytes > MAX_METADATA_BYTES {
            return Err(Error::limit(
                "the length of all metadata in bytes",
                bytes,
                MAX_METADATA_BYTES,
            ));
        }
        Ok(())
    }

    fn files(&self) -> Result<()> {
        let directory = self.directory;
        let count = directory.files.len() as u64;
        if count > MAX_FILES {
            return Err(Error::limit("the number of files", count, MAX_FILES));
        }
        let mut paths = HashSet::new();
        let mut before: Option<(u32, &str)> = None;
        for (i, file) in directory.files.iter().enumerate() {
            let (at, kind) = (self.file_at(i), file.kind.get());
            let path = directory.file_path(file);
            check_path(path).map_err(|error| match error {
                Error::Corrupt { .. } => corrupt(at, error),
                other => other,
            })?;
            if before.is_some_and(|before| before >= (kind, path)) || !paths.insert(path) {
                return Err(corrupt(at, format_args!("path {path:?} is out of order")));
            }
            before = Some((kind, path));
            let empty = kind == FILE_BESIDE || kind == FILE_SIDE && file.length.get() == 0;
            if file.reserved.get() != 0 || file.array_count.get() != u64::from(!empty) {
                return Err(corrupt(at, format_args!("file {path:?} has a wrong field")));
            }
            if kind == FILE_BESIDE && ends_as_container(path) {
                return Err(corrupt(
                    at,
                    format_args!("side file {path:?} would be taken for a shard"),
                ));
            }
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
        let count = tree.folders();
        if count > MAX_FOLDERS {
            return Err(Error::limit("the number of folders of all paths", count, MAX_FOLDERS));
        }
        Ok(())
    }

    fn blocks(&self) -> Result<()> {
        let mut names = HashSet::new();
        for (i, block) in self.directory.blocks.iter().enumerate() {
            let name = self.directory.block_name(block);
            if !names.insert(name) {
                return Err(corrupt(
                    self.block_at(i),
                    format_args!("two blocks are named {name:?}"),
                ));
            }
        }
        Ok(())
    }
}
