//! A small writer of containers, made from the specification for tests: it shares no code with the
//! decoder but CRC-32.
#![allow(dead_code)]

use std::collections::BTreeMap;

use df11_reference::crc32;

pub const NONE: u64 = u64::MAX;
/// Record sizes of the lists of a directory, in their order.
const RECORDS: [usize; 8] = [80, 16, 32, 200, 24, 4, 32, 1];
pub const FILES: usize = 0;
pub const BLOCKS: usize = 1;
pub const SECTIONS: usize = 2;
pub const TENSORS: usize = 3;
pub const ARRAYS: usize = 4;
pub const CHECKSUMS: usize = 5;
pub const METADATA: usize = 6;
pub const TEXT: usize = 7;

/// An array with the kind of the section that holds it.
pub type Stored = (u32, Vec<u8>);

#[derive(Clone)]
pub struct File {
    pub kind: u32,
    pub path: &'static str,
    pub length: u64,
    pub arrays: Vec<Stored>,
}

#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: u32,
    pub encoding: u32,
    pub block: u64,
    pub file: u64,
    pub file_offset: u64,
    pub shape: Vec<u64>,
    pub arrays: Vec<Stored>,
    pub parameters: Vec<u64>,
}

#[derive(Clone, Default)]
pub struct Model {
    pub files: Vec<File>,
    pub blocks: Vec<&'static str>,
    pub tensors: Vec<Tensor>,
}

/// The codes of all exponents as strings of bits, by the algorithm of RFC 1951, section 3.2.2.
pub fn codes(lengths: &[u8; 256]) -> Vec<Vec<bool>> {
    let mut count = [0u32; 18];
    lengths.iter().filter(|&&l| l > 0).for_each(|&l| count[usize::from(l)] += 1);
    let mut next = [0u32; 18];
    for length in 1..=16 {
        next[length] = (next[length - 1] + count[length - 1]) << 1;
    }
    let code = |&length: &u8| {
        let code = next[usize::from(length)];
        next[usize::from(length)] += u32::from(length > 0);
        (0..length).rev().map(|bit| code >> bit & 1 == 1).collect()
    };
    lengths.iter().map(code).collect()
}

/// The LUTs, entry by entry, by comparing bits.
pub fn luts(lengths: &[u8; 256]) -> Vec<u8> {
    let codes = codes(lengths);
    let lut = |prefix: &[bool]| -> Vec<u16> {
        let entry = |index: u32| {
            let mut bits = prefix.to_vec();
            bits.extend((0..8).map(|bit| index >> bit & 1 == 1));
            let exponent = codes.iter().position(|code| !code.is_empty() && bits.starts_with(code));
            exponent.map_or(0, |exponent| (codes[exponent].len() * 256 + exponent) as u16)
        };
        (0..256).map(entry).collect()
    };
    let mut luts = vec![lut(&[])];
    for index in 0..256 {
        let bits: Vec<bool> = (0..8).map(|bit| index >> bit & 1 == 1).collect();
        if codes.iter().any(|code| code.len() > 8 && code.starts_with(&bits)) {
            luts[0][index] = luts.len() as u16;
            luts.push(lut(&bits));
        }
    }
    luts.concat().into_iter().flat_map(u16::to_le_bytes).collect()
}

/// Arrays and parameters of the gap encoding, in the order of section 6.
pub fn encode(weights: &[u16], lengths: &[u8; 256], t: u64, b: u64) -> ([Vec<u8>; 5], [u64; 3]) {
    let codes = codes(lengths);
    let (mut bits, mut boundaries) = (Vec::new(), Vec::new());
    for weight in weights {
        boundaries.push(bits.len() as u64);
        bits.extend(&codes[usize::from(weight >> 7 & 0xFF)]);
    }
    let bit_count = bits.len() as u64;
    boundaries.push(bit_count);
    let threads = bit_count.div_ceil(8 * t);
    let first_at = |bit: u64| boundaries.partition_point(|&boundary| boundary < bit);
    let gaps: Vec<u64> =
        (0..threads).map(|i| boundaries[first_at(8 * t * i)] - 8 * t * i).collect();
    let gaps = gaps
        .chunks(2)
        .map(|pair| (pair[0] | pair.get(1).map_or(0, |gap| gap << 4)) as u8)
        .collect();
    let mut offsets: Vec<u64> =
        (0..threads.div_ceil(b)).map(|i| first_at(8 * t * b * i) as u64).collect();
    offsets.push(weights.len() as u64);
    bits.resize((threads * t * 8) as usize, false);
    let byte = |bits: &[bool]| bits.iter().rev().fold(0, |byte, &bit| byte << 1 | u8::from(bit));
    let arrays = [
        [&lengths[..], &luts(lengths)].concat(),
        gaps,
        offsets.into_iter().flat_map(u64::to_le_bytes).collect(),
        bits.chunks(8).map(byte).collect(),
        weights.iter().map(|weight| (weight >> 8 & 0x80 | weight & 0x7F) as u8).collect(),
    ];
    (arrays, [t, b, bit_count])
}

pub fn bytes(weights: &[u16]) -> Vec<u8> {
    weights.iter().flat_map(|weight| weight.to_le_bytes()).collect()
}

fn pad(bytes: &mut Vec<u8>, alignment: usize) {
    bytes.resize(bytes.len().next_multiple_of(alignment), 0);
}

fn put(record: &mut Vec<u8>, values: &[u64]) {
    values.iter().for_each(|value| record.extend(value.to_le_bytes()));
}

impl Model {
    pub fn build(&self) -> Vec<u8> {
        let mut sections: BTreeMap<(u64, u32), Vec<u8>> = BTreeMap::new();
        let files = self
            .files
            .iter()
            .flat_map(|f| f.arrays.iter().map(|(kind, bytes)| (NONE, *kind, bytes)));
        let tensors = self
            .tensors
            .iter()
            .flat_map(|t| t.arrays.iter().map(|(kind, bytes)| (t.block, *kind, bytes)));
        let stored: Vec<_> = files.chain(tensors).collect();
        let mut places = Vec::new();
        for (block, kind, bytes) in &stored {
            let section = sections.entry((*block, *kind)).or_default();
            pad(section, 256);
            places.push((section.len() as u64, bytes.len() as u64));
            section.extend(*bytes);
        }
        let mut file = vec![0; 4096];
        let mut lists: [Vec<u8>; 8] = Default::default();
        for (&(block, kind), section) in &sections {
            pad(&mut file, 4096);
            put(
                &mut lists[SECTIONS],
                &[u64::from(kind), block, file.len() as u64, section.len() as u64],
            );
            section
                .chunks(1 << 20)
                .for_each(|chunk| lists[CHECKSUMS].extend(crc32(chunk).to_le_bytes()));
            file.extend(section);
        }
        pad(&mut file, 4096);
        for ((block, kind, _), (offset, length)) in stored.iter().zip(places) {
            let section = sections.keys().position(|key| key == &(*block, *kind)).unwrap();
            put(&mut lists[ARRAYS], &[section as u64, offset, length]);
        }
        self.put_records(&mut lists);
        let offset = file.len();
        put(&mut file, &[0, 1]);
        file.extend([7; 32]);
        for (list, size) in lists.iter().zip(RECORDS) {
            put(&mut file, &[(list.len() / size) as u64]);
            file.extend(list);
        }
        seal(&mut file, offset);
        file
    }

    fn put_records(&self, lists: &mut [Vec<u8>; 8]) {
        let mut first_array = 0;
        for f in &self.files {
            let text = lists[TEXT].len() as u64;
            put(&mut lists[FILES], &[u64::from(f.kind), text, f.path.len() as u64, f.length]);
            lists[FILES].extend([8; 32]);
            put(&mut lists[FILES], &[first_array, f.arrays.len() as u64]);
            lists[TEXT].extend(f.path.bytes());
            first_array += f.arrays.len() as u64;
        }
        for block in &self.blocks {
            let text = lists[TEXT].len() as u64;
            put(&mut lists[BLOCKS], &[text, block.len() as u64]);
            lists[TEXT].extend(block.bytes());
        }
        for t in &self.tensors {
            let text = lists[TEXT].len() as u64;
            put(
                &mut lists[TENSORS],
                &[text, t.name.len() as u64, u64::from(t.dtype) | u64::from(t.encoding) << 32],
            );
            put(&mut lists[TENSORS], &[t.block, t.file, t.file_offset, t.shape.len() as u64]);
            put(&mut lists[TENSORS], &[&t.shape[..], &vec![0; 8 - t.shape.len()]].concat());
            put(&mut lists[TENSORS], &[first_array, t.arrays.len() as u64]);
            put(
                &mut lists[TENSORS],
                &[&t.parameters[..], &vec![0; 4 - t.parameters.len()]].concat(),
            );
            lists[TENSORS].extend([9; 32]);
            lists[TEXT].extend(t.name.bytes());
            first_array += t.arrays.len() as u64;
        }
    }
}

/// Puts padding, footer and header around a directory from `offset` to the end of `file`.
fn seal(file: &mut Vec<u8>, offset: usize) {
    let mut header = vec![0xDF, 0x44, 0x46, 0x31, 0x31, 0x0D, 0x0A, 0x1A, 1, 0, 0, 0, 1, 0, 0, 0];
    let length = file.len() - offset;
    let checksum = crc32(&file[offset..]);
    pad(file, 256);
    put(&mut header, &[0, 0, file.len() as u64 + 64, offset as u64, length as u64]);
    header.extend(checksum.to_le_bytes());
    header.extend(crc32(&header).to_le_bytes());
    file[..64].copy_from_slice(&header);
    file.extend(header);
}

pub fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
}

pub fn directory_offset(container: &[u8]) -> usize {
    u64_at(container, 40) as usize
}

/// The container with an edited directory, and all checksums of the frame made right.
pub fn edited(container: &[u8], edit: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let (offset, length) = (directory_offset(container), u64_at(container, 48) as usize);
    let mut directory = container[offset..offset + length].to_vec();
    edit(&mut directory);
    let mut file = [&container[..offset], &directory].concat();
    seal(&mut file, offset);
    file
}

/// The container with another header, of which the checksum is right, and its footer.
pub fn with_header(container: &[u8], edit: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut file = container.to_vec();
    edit(&mut file[..60]);
    let checksum = crc32(&file[..60]);
    file[60..64].copy_from_slice(&checksum.to_le_bytes());
    let footer = file.len() - 64;
    file.copy_within(..64, footer);
    file
}

/// Where a field of a record is in a directory.
pub fn field(directory: &[u8], list: usize, record: usize, offset: usize) -> usize {
    let start =
        RECORDS[..list].iter().fold(48, |at, size| at + 8 + u64_at(directory, at) as usize * size);
    start + 8 + record * RECORDS[list] + offset
}

/// The container with one u64 of its directory replaced.
pub fn set(container: &[u8], list: usize, record: usize, offset: usize, value: u64) -> Vec<u8> {
    edited(container, |directory| {
        let at = field(directory, list, record, offset);
        directory[at..at + 8].copy_from_slice(&value.to_le_bytes());
    })
}

/// Where the sections of a container are in the file.
pub fn sections(container: &[u8]) -> Vec<std::ops::Range<usize>> {
    let directory = &container[directory_offset(container)..];
    let count = u64_at(directory, field(directory, SECTIONS, 0, 0) - 8) as usize;
    let number = |i, offset| u64_at(directory, field(directory, SECTIONS, i, offset)) as usize;
    (0..count).map(|i| number(i, 16)..number(i, 16) + number(i, 24)).collect()
}

/// Makes the checksums of all sections right, and the frame.
pub fn resealed(container: &[u8]) -> Vec<u8> {
    let chunks = sections(container).into_iter().flat_map(|range| container[range].chunks(1 << 20));
    let checksums: Vec<u8> = chunks.flat_map(|chunk| crc32(chunk).to_le_bytes()).collect();
    edited(container, |directory| {
        let at = field(directory, CHECKSUMS, 0, 0);
        directory[at..at + checksums.len()].copy_from_slice(&checksums);
    })
}

/// Code lengths from pairs of exponent and length.
pub fn lengths(pairs: impl IntoIterator<Item = (u8, u8)>) -> [u8; 256] {
    let mut lengths = [0; 256];
    pairs.into_iter().for_each(|(exponent, length)| lengths[usize::from(exponent)] = length);
    lengths
}

/// Lengths 1, 2, ... 15, 16, 16: the longest code there may be.
pub fn ladder() -> [u8; 256] {
    lengths((0..17).map(|i| (120 + i, (i + 1).min(16))))
}

pub fn gap_tensor(name: &str, weights: &[u16], lengths: &[u8; 256], file_offset: u64) -> Tensor {
    let (arrays, parameters) = encode(weights, lengths, 8, 64);
    Tensor {
        name: name.into(),
        dtype: 15,
        encoding: 2,
        block: 0,
        file: 0,
        file_offset,
        shape: vec![weights.len() as u64],
        arrays: [1, 2, 2, 3, 4].into_iter().zip(arrays).collect(),
        parameters: parameters.to_vec(),
    }
}

pub fn raw_tensor(name: &str, dtype: u32, shape: &[u64], bytes: &[u8], file_offset: u64) -> Tensor {
    let arrays = if bytes.is_empty() { vec![] } else { vec![(5, bytes.to_vec())] };
    let (shape, parameters) = (shape.to_vec(), vec![]);
    Tensor {
        name: name.into(),
        dtype,
        encoding: 1,
        block: 0,
        file: 0,
        file_offset,
        shape,
        arrays,
        parameters,
    }
}
