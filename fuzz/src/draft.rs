//! A container taken apart, to be changed and put together again with all checksums right.

#[path = "../../tests/support/tree.rs"]
#[allow(missing_docs, reason = "documented there, for tests")]
mod tree;

use df11::hazmat::{
    constants::{ARRAY_ALIGNMENT, CHECKSUM_CHUNK_BYTES, HEADER_BYTES},
    format::{
        Directory, Header,
        records::{
            ArrayRecord, BlockRecord, ENCODING_ALIAS, FileRecord, MetadataRecord, SectionRecord,
            TensorRecord,
        },
    },
};
use tree::{Array, Owner, Tree};
use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes,
    little_endian::{U32, U64},
};

use crate::bytes::{self, Bytes, at};

/// Values at which checks tend to break.
#[rustfmt::skip]
const VALUES: &[u64] = &[
    0, 1, 2, 3, 7, 8, 15, 16, 17, 22, 23, 64, 255, 256, 257, 4095, 4096, 4097, 1 << 20,
    (1 << 20) + 1, 1 << 28, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 57, 1 << 58, 1 << 59, 1 << 60,
    1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, u64::MAX - 4095, u64::MAX - 255, u64::MAX - 7,
    u64::MAX - 1, u64::MAX,
];

/// Names and paths at which checks tend to break.
#[rustfmt::skip]
const NAMES: &[&[u8]] = &[
    b"", b"a", b"a/b", b"..", b"../a", b"a/../b", b"a//b", b"/a", b"a/", b".", b"a\\b", b"a:b",
    b"a\0b", b"a\x1Fb", b"a\x7Fb", b"a\xC2\x80b", b"\xFF", b"\xED\xA0\x80", b"\xC0\x80",
    b"config.json", b"config.json/x", b"a.safetensors", b"a.safetensors/x", b"head", b"w",
    b"\xC3\xA4", b"zzz",
];

/// A container as a tree, to be changed.
#[derive(Clone)]
pub struct Draft {
    tree: Tree,
    /// Bytes after the last array of the sections of this kind.
    trailing: Option<(u32, u8)>,
}

impl Draft {
    /// Takes a valid container apart.
    pub fn new(container: &[u8]) -> Self {
        Self { tree: Tree::parse(container), trailing: None }
    }

    /// One change that leaves offsets and lengths consistent.
    pub fn change(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.u8() % 8 {
            0 | 1 => self.change_tensor(bytes),
            2 | 3 => change_arrays(&mut self.tree.tensors, bytes),
            4 => self.change_file(bytes),
            5 => self.change_blocks(bytes),
            6 => self.change_tensors(bytes),
            _ => match bytes.u8() % 4 {
                0 => self.tree.shard.shard_index = bytes.pick(VALUES).into(),
                1 => self.tree.shard.shard_count = bytes.pick(VALUES).into(),
                2 => self.trailing = Some((bytes.u8().into(), bytes.u8())),
                _ => change_arrays(&mut self.tree.files, bytes),
            },
        }
    }

    fn change_tensor(&mut self, bytes: &mut Bytes<'_>) {
        let choice = bytes.u8();
        let tensor = at(&mut self.tree.tensors, choice);
        let Some(Owner { record, name, arrays }) = tensor else { return };
        match bytes.u8() % 8 {
            0 => record.dtype = u32::from(bytes.u8() % 25).into(),
            1 => {
                record.encoding = u32::from(bytes.u8() % 4).into();
                if bytes.u8().is_multiple_of(2) {
                    arrays.clear();
                }
            }
            2 => nudge(&mut record.shape[bytes.index(8)], bytes),
            3 => record.dimension_count = u64::from(bytes.u8() % 10).into(),
            4 => nudge(&mut record.parameters[bytes.index(4)], bytes),
            5 => nudge(&mut record.file_offset, bytes),
            6 => {
                let block = u64::from(bytes.u8() % 5);
                record.block = block.into();
                for array in arrays {
                    array.block = block;
                }
            }
            _ => change_name(name, bytes),
        }
    }

    fn change_file(&mut self, bytes: &mut Bytes<'_>) {
        let choice = bytes.u8();
        match (bytes.u8() % 6, at(&mut self.tree.files, choice)) {
            (0, Some(file)) => change_name(&mut file.name, bytes),
            (1, Some(file)) => nudge(&mut file.record.length, bytes),
            (2, Some(file)) => file.record.kind = u32::from(bytes.u8() % 3).into(),
            (0..=2, None) => {}
            (3, _) => {
                let mut record = FileRecord::new_zeroed();
                record.kind = 1.into();
                let content = bytes.run(usize::from(choice % 16)).to_vec();
                record.length = (content.len() as u64).into();
                let mut arrays = vec![Array { kind: 7, block: u64::MAX, bytes: content }];
                arrays.retain(|array| !array.bytes.is_empty());
                self.tree.files.push(Owner { record, name: bytes.pick(NAMES).to_vec(), arrays });
            }
            (4, _) => change_list(&mut self.tree.files, bytes),
            _ => {
                self.tree.files.sort_by(|a, b| {
                    (a.record.kind.get(), &a.name).cmp(&(b.record.kind.get(), &b.name))
                });
            }
        }
    }

    fn change_blocks(&mut self, bytes: &mut Bytes<'_>) {
        let (choice, blocks) = (bytes.u8(), &mut self.tree.blocks);
        match bytes.u8() % 3 {
            0 => blocks.push(bytes.pick(NAMES).to_vec()),
            1 => change_list(blocks, bytes),
            _ => at(blocks, choice).into_iter().for_each(|block| change_name(block, bytes)),
        }
    }

    fn change_tensors(&mut self, bytes: &mut Bytes<'_>) {
        let choice = bytes.u8();
        match bytes.u8() % 4 {
            0 => change_list(&mut self.tree.tensors, bytes),
            1 => self.tree.tensors.sort_by(|a, b| a.name.cmp(&b.name)),
            _ if self.tree.tensors.is_empty() => {}
            // An alias of a tensor, beside it.
            2 => {
                let index = usize::from(choice) % self.tree.tensors.len();
                let mut alias = self.tree.tensors[index].clone();
                alias.name.push(b'0' + bytes.u8() % 3);
                alias.arrays.clear();
                alias.record.encoding = ENCODING_ALIAS.into();
                alias.record.parameters = [(index as u64).into(), 0.into(), 0.into(), 0.into()];
                self.tree.tensors.insert(index + 1, alias);
            }
            // What an encoding or dtype of a later version may look like, or one of tiles without
            // arrays of tiles.
            _ => {
                let index = usize::from(choice) % self.tree.tensors.len();
                let tensor = &mut self.tree.tensors[index];
                tensor.record.encoding = (3 + u32::from(bytes.u8() % 2)).into();
                tensor.record.dtype = (15 + 8 * u32::from(bytes.u8() % 2)).into();
                nudge(&mut tensor.record.shape[0], bytes);
                if bytes.u8().is_multiple_of(2) {
                    tensor.arrays.clear();
                }
            }
        }
    }

    /// The container, with the rest of the fuzzer's bytes as changes that leave nothing consistent
    /// but, in the end, the checksums.
    pub fn render(&self, bytes: &mut Bytes<'_>) -> Vec<u8> {
        let (mut directory, contents) = self.tree.lay_out(|kind, section| {
            if let Some((_, length)) = self.trailing.filter(|&(of, _)| kind % 256 == of) {
                section.resize(section.len() + usize::from(length), 7);
            }
        });
        let mut frame = Frame { repair: true, ..Frame::default() };
        bytes::change(bytes, 16, |bytes| match bytes.u8() % 16 {
            0..=2 => change_record(&mut directory.tensors, TensorRecord::FIELDS, bytes),
            3 => change_record(&mut directory.files, FileRecord::FIELDS, bytes),
            4 | 5 => change_record(&mut directory.sections, SectionRecord::FIELDS, bytes),
            6 | 7 => change_record(&mut directory.arrays, ArrayRecord::FIELDS, bytes),
            8 => change_record(&mut directory.blocks, BlockRecord::FIELDS, bytes),
            9 => match bytes.u8() % 7 {
                0 => change_list(&mut directory.tensors, bytes),
                1 => change_list(&mut directory.files, bytes),
                2 => change_list(&mut directory.sections, bytes),
                3 => change_list(&mut directory.arrays, bytes),
                4 => change_list(&mut directory.metadata, bytes),
                5 => change_record(&mut directory.metadata, MetadataRecord::FIELDS, bytes),
                _ => change_list(&mut directory.blocks, bytes),
            },
            10 => frame.directory.push((bytes.u16(), bytes.u8())),
            11 => {
                let field = HEADER_FIELDS[bytes.index(HEADER_FIELDS.len())];
                frame.header.push((field, bytes.take()));
            }
            12 => frame.repair = bytes.u8().is_multiple_of(2),
            _ => frame.pokes.push((bytes.u32(), bytes.u8())),
        });
        frame.finish(directory, tree::join(&contents))
    }
}

/// Another value for a field: a nearby or a special one.
fn number(bytes: &mut Bytes<'_>, before: u64) -> u64 {
    match bytes.u8() % 4 {
        0 => before.wrapping_add(u64::from(bytes.u8())).wrapping_sub(128),
        1 => bytes.pick(VALUES),
        2 => bytes.u16().into(),
        _ => before.wrapping_add(bytes.pick(VALUES)),
    }
}

fn nudge(field: &mut U64, bytes: &mut Bytes<'_>) {
    *field = number(bytes, field.get()).into();
}

fn change_name(name: &mut Vec<u8>, bytes: &mut Bytes<'_>) {
    match bytes.u8() % 4 {
        0 => *name = bytes.pick(NAMES).to_vec(),
        1 => name.push(bytes.u8()),
        2 => name.resize(4094 + usize::from(bytes.u8() % 4), b'x'),
        _ => {
            if let Some(byte) = name.first_mut() {
                *byte ^= bytes.u8();
            }
        }
    }
}

fn change_list<T: Clone>(items: &mut Vec<T>, bytes: &mut Bytes<'_>) {
    if items.is_empty() {
        return;
    }
    let (a, b) = (bytes.index(items.len()), bytes.index(items.len()));
    match bytes.u8() % 3 {
        0 => items.swap(a, b),
        1 => items.insert(a, items[b].clone()),
        _ => {
            items.remove(a);
        }
    }
}

fn change_arrays<R>(owners: &mut [Owner<R>], bytes: &mut Bytes<'_>) {
    let owner = bytes.u8();
    let Some(Owner { arrays, .. }) = at(owners, owner) else { return };
    let (choice, change) = (bytes.u8(), bytes.u8() % 6);
    if change == 5 {
        return change_list(arrays, bytes);
    }
    let Some(array) = at(arrays, choice) else { return };
    match change {
        3 => bytes::resize(&mut array.bytes, bytes),
        4 => {
            array.kind = bytes.pick(&[1, 2, 3, 4, 5, 6, 7, 8, 1 << 31, u32::MAX]);
            array.block = bytes.pick(&[array.block, array.block, 0, 1, u64::MAX]);
        }
        _ if array.bytes.is_empty() => {}
        _ => {
            let at = bytes.u16() as usize % array.bytes.len();
            array.bytes[at] ^= bytes.u8();
        }
    }
}

fn change_record<R: IntoBytes + FromBytes + Immutable + Clone>(
    records: &mut [R],
    fields: &[(&str, usize, usize)],
    bytes: &mut Bytes<'_>,
) {
    let choice = bytes.u8();
    let (_, offset, size) = fields[bytes.index(fields.len())];
    if let Some(record) = at(records, choice) {
        // A field of many numbers is changed in one of them.
        change_field(record.as_mut_bytes(), (offset, size.min(8)), bytes);
    }
}

/// Offset and size of what can be changed in a header.
const HEADER_FIELDS: &[(usize, usize)] =
    &[(0, 8), (8, 2), (10, 2), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8), (48, 8), (56, 4)];

fn change_field(record: &mut [u8], (offset, size): (usize, usize), bytes: &mut Bytes<'_>) {
    let field = &mut record[offset..offset + size];
    let mut value = [0; 8];
    value[..size].copy_from_slice(field);
    let value = number(bytes, u64::from_le_bytes(value)).to_le_bytes();
    field.copy_from_slice(&value[..size]);
}

/// What becomes of a container after its directory's records.
#[derive(Default)]
struct Frame {
    /// Whether sections get the right checksums.
    repair: bool,
    /// Changed bytes of head and sections.
    pokes: Vec<(u32, u8)>,
    /// Changed bytes of the directory.
    directory: Vec<(u16, u8)>,
    /// Changed fields of the header, and the bytes that say how.
    header: Vec<((usize, usize), [u8; 4])>,
}

impl Frame {
    /// From the directory, and head and sections.
    fn finish(self, mut directory: Directory, mut contents: Vec<u8>) -> Vec<u8> {
        for (at, value) in self.pokes {
            let length = contents.len();
            contents[at as usize % length] ^= value;
        }
        for section in &directory.sections {
            let start = usize::try_from(section.offset.get()).unwrap_or(usize::MAX);
            let end = start.saturating_add(section.length.get() as usize);
            let chunks =
                contents.get(start..end).unwrap_or_default().chunks(CHECKSUM_CHUNK_BYTES as usize);
            let checksum = |chunk: &[u8]| if self.repair { crc32fast::hash(chunk) } else { 0 };
            directory.checksums.extend(chunks.map(|chunk| U32::new(checksum(chunk))));
        }
        let mut directory = directory.to_bytes();
        for (at, value) in self.directory {
            let length = directory.len();
            directory[usize::from(at) % length] ^= value;
        }
        let mut header =
            Header::complete(contents.len() as u64, &directory).expect("a small directory");
        for (field, how) in self.header {
            change_field(header.as_mut_bytes(), field, &mut Bytes(&how));
        }
        let header = header.sealed();
        contents.extend_from_slice(&directory);
        contents.resize(contents.len().next_multiple_of(ARRAY_ALIGNMENT as usize), 0);
        contents.extend_from_slice(header.as_bytes());
        // Bytes of the head that a poke changed stay so.
        contents[..HEADER_BYTES as usize].copy_from_slice(header.as_bytes());
        contents
    }
}
