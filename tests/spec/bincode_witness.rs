//! The directory is what bincode's legacy configuration (fixed-width little-endian integers, u64
//! lengths) reads and writes. bincode is unmaintained, and here only as a witness that the layout
//! is nothing of our own.

use df11::{Dtype, hazmat::format::Directory};
use serde::{Deserialize, Serialize};

use super::container::{self, Item, Model, normal_weights};

type Hash = [u8; 32];
/// Kind and reserved; path; length, hash; arrays.
type File = (u32, u32, (u64, u64), u64, Hash, (u64, u64));
/// Kind and reserved; block; offset and length.
type Section = (u32, u32, u64, (u64, u64));
/// Name; dtype and encoding; block; place in a file; shape; arrays; parameters; hash.
type Tensor =
    ((u64, u64), u32, Encoding, u64, (u64, u64), (u64, [u64; 8]), (u64, u64), [u64; 4], Hash);
/// Index and count of the shard, identity; files, blocks, sections, tensors, arrays, checksums,
/// metadata, text.
type Witness = (
    (u64, u64, Hash),
    Vec<File>,
    Vec<(u64, u64)>,
    Vec<Section>,
    Vec<Tensor>,
    Vec<(u64, u64, u64)>,
    Vec<u32>,
    Vec<(u64, u64, u64, u64)>,
    Vec<u8>,
);

/// bincode writes the variant's index, as a u32.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Encoding {
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
    let (witness, read): (Witness, usize) =
        bincode::serde::decode_from_slice(&bytes, legacy).unwrap();
    assert_eq!(read, bytes.len());
    let (tensors, text) = (&witness.4, &witness.8);
    assert_eq!(tensors[0].5, (1, [2, 0, 0, 0, 0, 0, 0, 0]));
    let encodings = tensors.iter().map(|tensor| &tensor.2);
    assert!(encodings.eq([&Encoding::Raw, &Encoding::Alias, &Encoding::Gap]));
    assert_eq!(*text, draft.directory.text);

    let written = bincode::serde::encode_to_vec(&witness, legacy).unwrap();
    assert_eq!(written, bytes);
    let container = draft.pack();
    let offset = container::header(&container).directory_offset.get();
    assert_eq!(Directory::parse(&written, offset).unwrap(), draft.directory);
}
