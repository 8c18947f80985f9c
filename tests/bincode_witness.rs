//! The directory is what bincode's legacy configuration (fixed-width little-endian integers, u64
//! lengths) reads and writes. bincode is unmaintained, and here only as a witness that the layout
//! is nothing of our own.

#[path = "support/container.rs"]
mod container;

use container::{Item, Model, normal_weights};
use df11::{Dtype, hazmat::format::Directory};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
struct WitnessDirectory {
    shard_index: u64,
    shard_count: u64,
    identity: [u8; 32],
    files: Vec<WitnessFile>,
    blocks: Vec<(u64, u64)>,
    sections: Vec<WitnessSection>,
    tensors: Vec<WitnessTensor>,
    arrays: Vec<(u64, u64, u64)>,
    checksums: Vec<u32>,
    metadata: Vec<(u64, u64, u64, u64)>,
    text: Vec<u8>,
}

#[derive(Debug, Serialize, Deserialize)]
struct WitnessFile {
    kind: u32,
    reserved: u32,
    path_offset: u64,
    path_length: u64,
    length: u64,
    hash: [u8; 32],
    first_array: u64,
    array_count: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct WitnessSection {
    kind: u32,
    reserved: u32,
    block: u64,
    offset: u64,
    length: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct WitnessTensor {
    name_offset: u64,
    name_length: u64,
    dtype: u32,
    encoding: WitnessEncoding,
    block: u64,
    file: u64,
    file_offset: u64,
    dimension_count: u64,
    shape: [u64; 8],
    first_array: u64,
    array_count: u64,
    parameters: [u64; 4],
    hash: [u8; 32],
}

/// bincode writes the variant's index, as a u32.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum WitnessEncoding {
    Alias,
    Raw,
    Gap,
}

#[test]
fn bincode_reads_and_writes_the_directory() {
    let coded = Item::gap("w", &[30, 10], normal_weights(300, 1), (8, 64));
    let raw = Item::raw("b", Dtype::F32, &[2], (0..8).collect());
    let mut model =
        Model::new(&[coded.clone(), coded.alias("tied"), raw], &[("config.json", b"{}")]);
    model.metadata = vec![(b"tool.key".to_vec(), b"value".to_vec())];
    let draft = model.draft();
    let bytes = draft.directory.to_bytes();

    let legacy = bincode::config::legacy();
    let (witness, read): (WitnessDirectory, usize) =
        bincode::serde::decode_from_slice(&bytes, legacy).unwrap();
    assert_eq!(read, bytes.len());
    assert_eq!(witness.tensors.len(), 3);
    assert_eq!(witness.tensors[0].shape, [2, 0, 0, 0, 0, 0, 0, 0]);
    let encodings = witness.tensors.iter().map(|tensor| &tensor.encoding);
    assert!(encodings.eq([&WitnessEncoding::Raw, &WitnessEncoding::Alias, &WitnessEncoding::Gap]));
    assert_eq!(witness.text, draft.directory.text);

    let written = bincode::serde::encode_to_vec(&witness, legacy).unwrap();
    assert_eq!(written, bytes);
    let container = draft.pack();
    let offset = container::header(&container).directory_offset.get();
    assert_eq!(Directory::parse(&written, offset).unwrap(), draft.directory);
}
