//! A container as a tree: what belongs to a file or a tensor is in it, and offsets are not there.
#![allow(dead_code, unreachable_pub, reason = "each user needs another part")]

use std::collections::BTreeMap;

use df11::hazmat::{
    constants::{ARRAY_ALIGNMENT, HEAD_BYTES, SECTION_ALIGNMENT},
    format::{
        Directory, Header,
        directory::ShardRecord,
        records::{
            ArrayRecord, BlockRecord, FileRecord, MetadataRecord, SectionRecord, TensorRecord,
        },
    },
};
use zerocopy::little_endian::U64;

/// An array, and the block and kind of the section that holds it.
#[derive(Clone, Debug)]
pub struct Array {
    pub block: u64,
    pub kind: u32,
    pub bytes: Vec<u8>,
}

/// A file or a tensor, without the places of its name and arrays.
#[derive(Clone, Debug)]
pub struct Owner<R> {
    pub record: R,
    pub name: Vec<u8>,
    pub arrays: Vec<Array>,
}

#[derive(Clone, Debug)]
pub struct Tree {
    pub shard: ShardRecord,
    pub files: Vec<Owner<FileRecord>>,
    pub blocks: Vec<Vec<u8>>,
    pub tensors: Vec<Owner<TensorRecord>>,
    /// Keys and values.
    pub metadata: Vec<(Vec<u8>, Vec<u8>)>,
    /// Sections with bytes before those of arrays: block, kind, bytes.
    pub extra_sections: Vec<(u64, u32, Vec<u8>)>,
}

impl Tree {
    /// Takes a valid container apart.
    pub fn parse(container: &[u8]) -> Self {
        let header =
            Header::parse(container.first_chunk().expect("a header")).expect("a valid header");
        let start = header.directory_offset.get();
        let directory =
            &container[start as usize..(start + header.directory_length.get()) as usize];
        let directory = Directory::parse(directory, start).expect("a valid directory");
        let arrays = |range: std::ops::Range<usize>| {
            let array = |array: &ArrayRecord| {
                let section = &directory.sections[array.section.get() as usize];
                let at = (section.offset.get() + array.offset.get()) as usize;
                let bytes = container[at..at + array.length.get() as usize].to_vec();
                Array { block: section.block.get(), kind: section.kind.get(), bytes }
            };
            directory.arrays[range].iter().map(array).collect()
        };
        let files = directory.files.iter().map(|file| Owner {
            record: *file,
            name: directory.file_path(file).into(),
            arrays: arrays(file.array_range()),
        });
        let tensors = directory.tensors.iter().map(|tensor| Owner {
            record: *tensor,
            name: directory.tensor_name(tensor).into(),
            arrays: arrays(tensor.array_range()),
        });
        let blocks = directory.blocks.iter().map(|block| directory.block_name(block).into());
        Self {
            shard: directory.shard,
            files: files.collect(),
            blocks: blocks.collect(),
            tensors: tensors.collect(),
            metadata: directory.metadata().map(|(key, value)| (key.into(), value.into())).collect(),
            extra_sections: Vec::new(),
        }
    }

    /// Places arrays, sections and text. Returns the directory, without checksums, and the contents
    /// of the sections, of which `finish` sees each with its kind.
    pub fn lay_out(&self, finish: impl Fn(u32, &mut Vec<u8>)) -> (Directory, Vec<Vec<u8>>) {
        let mut sections: BTreeMap<(u64, u32), Vec<u8>> = BTreeMap::new();
        for (block, kind, bytes) in &self.extra_sections {
            sections.insert((*block, *kind), bytes.clone());
        }
        let mut places = Vec::new();
        let arrays = self.files.iter().flat_map(|file| &file.arrays);
        for array in arrays.chain(self.tensors.iter().flat_map(|tensor| &tensor.arrays)) {
            let key = (array.block, array.kind);
            let section = sections.entry(key).or_default();
            pad(section, ARRAY_ALIGNMENT);
            places.push((key, section.len() as u64, array.bytes.len() as u64));
            section.extend_from_slice(&array.bytes);
        }
        for (&(_, kind), section) in &mut sections {
            finish(kind, section);
        }
        let keys: Vec<_> = sections.keys().copied().collect();
        let arrays = places.iter().map(|(key, offset, length)| ArrayRecord {
            section: (keys.binary_search(key).expect("its section") as u64).into(),
            offset: (*offset).into(),
            length: (*length).into(),
        });
        let mut directory = Directory {
            shard: self.shard,
            files: Vec::new(),
            blocks: Vec::new(),
            sections: Vec::new(),
            tensors: Vec::new(),
            arrays: arrays.collect(),
            checksums: Vec::new(),
            metadata: Vec::new(),
            text: Vec::new(),
        };
        let mut offset = HEAD_BYTES;
        for (&(block, kind), section) in &sections {
            let length = section.len() as u64;
            directory.sections.push(SectionRecord {
                kind: kind.into(),
                reserved: 0.into(),
                block: block.into(),
                offset: offset.into(),
                length: length.into(),
            });
            offset = (offset + length).next_multiple_of(SECTION_ALIGNMENT);
        }
        self.number(&mut directory);
        (directory, sections.into_values().collect())
    }

    /// Fills in indexes of arrays and places of names.
    fn number(&self, directory: &mut Directory) {
        let mut next = 0u64;
        for file in &self.files {
            let mut record = file.record;
            (record.path_offset, record.path_length) = put(&mut directory.text, &file.name);
            (record.first_array, record.array_count) =
                (next.into(), (file.arrays.len() as u64).into());
            next += file.arrays.len() as u64;
            directory.files.push(record);
        }
        for block in &self.blocks {
            let (name_offset, name_length) = put(&mut directory.text, block);
            directory.blocks.push(BlockRecord { name_offset, name_length });
        }
        for tensor in &self.tensors {
            let mut record = tensor.record;
            (record.name_offset, record.name_length) = put(&mut directory.text, &tensor.name);
            (record.first_array, record.array_count) =
                (next.into(), (tensor.arrays.len() as u64).into());
            next += tensor.arrays.len() as u64;
            directory.tensors.push(record);
        }
        for (key, value) in &self.metadata {
            let (key_offset, key_length) = put(&mut directory.text, key);
            let (value_offset, value_length) = put(&mut directory.text, value);
            directory.metadata.push(MetadataRecord {
                key_offset,
                key_length,
                value_offset,
                value_length,
            });
        }
    }
}

fn put(text: &mut Vec<u8>, name: &[u8]) -> (U64, U64) {
    let offset = text.len() as u64;
    text.extend_from_slice(name);
    (offset.into(), (name.len() as u64).into())
}

/// Appends zeros up to a multiple of this many bytes.
pub fn pad(bytes: &mut Vec<u8>, alignment: u64) {
    bytes.resize(bytes.len().next_multiple_of(alignment as usize), 0);
}

/// The head, still zeros, and the sections, each at its place.
pub fn join(contents: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![0; HEAD_BYTES as usize];
    for content in contents {
        pad(&mut bytes, SECTION_ALIGNMENT);
        bytes.extend_from_slice(content);
    }
    pad(&mut bytes, SECTION_ALIGNMENT);
    bytes
}
