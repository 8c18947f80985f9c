//! What fuzzing found, each case in its smallest form.

#[path = "support/container.rs"]
mod container;

use container::{Draft, Item, Model, open};
use df11::{
    Dtype, Error, Level,
    hazmat::{
        code_lengths,
        gap::{EncodedTensor, GapSizes, Geometry, encode_tensor},
        histogram,
        huffman::verify_codebook,
    },
};

/// A container of two files, with three small tensors in the first one, all raw; edited.
fn edited(edit: impl FnOnce(&mut Draft)) -> Vec<u8> {
    let items = [
        Item::raw("layer.a", Dtype::U8, &[5], vec![1; 5]).in_file("a.safetensors"),
        Item::raw("layer.b", Dtype::BF16, &[2], vec![2; 4]).in_file("a.safetensors"),
        Item::raw("layer.none", Dtype::BF16, &[0, 3], vec![]).in_file("a.safetensors"),
        Item::raw("other", Dtype::U8, &[1], vec![3]).in_file("b.safetensors"),
    ];
    let mut draft = Model::new(&items, &[]).draft();
    edit(&mut draft);
    draft.repair_checksums();
    draft.pack()
}

const UNKNOWN: u32 = 77;

#[test]
fn an_unknown_encoding_is_refused_before_anything_of_its_size_is_allocated() {
    let model = open(edited(|Draft { directory, .. }| {
        directory.files[0].length = (1 << 62).into();
        for tensor in &mut directory.tensors[..2] {
            tensor.encoding = UNKNOWN.into();
            tensor.dtype = Dtype::BF16.id().into();
            tensor.shape[0] = (1 << 59).into();
        }
    }));
    let model = model.unwrap();
    let tensor = model.tensor("layer.b").unwrap();
    assert!(matches!(tensor.decode::<u8>(), Err(Error::Unsupported { .. })));
    assert!(matches!(tensor.decode::<half::bf16>(), Err(Error::Unsupported { .. })));
    assert!(matches!(histogram(&tensor), Err(Error::Unsupported { .. })));
}

#[test]
fn lengths_that_a_directory_claims_do_not_overflow_when_added_up() {
    let model = open(edited(|Draft { directory, .. }| {
        directory.files[0].length = u64::MAX.into();
        directory.files[1].length = u64::MAX.into();
    }));
    let model = model.unwrap();
    assert!(matches!(model.verify(Level::Full, &()), Err(Error::Corrupt { .. })));
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let options = df11::DecompressOptions::default();
    assert!(matches!(df11::decompress(&model, &out, &options, &()), Err(Error::Corrupt { .. })));
}

#[test]
fn only_a_known_dtype_gives_a_shape_a_meaning() {
    let shape = [1u64 << 40, 1 << 40, 0, 0, 0, 0, 0, 0].map(u64::into);
    let change = |dtype: u32| {
        edited(move |Draft { directory, .. }| {
            let tensor = &mut directory.tensors[2];
            (tensor.dtype, tensor.dimension_count, tensor.shape) = (dtype.into(), 3.into(), shape);
        })
    };
    let model = open(change(UNKNOWN)).unwrap();
    let tensor = model.tensor("layer.none").unwrap();
    assert!(matches!(tensor.byte_length(), Err(Error::Unsupported { .. })));
    // What is not known is the dtype, whatever the encoding.
    for error in [tensor.check_known().unwrap_err(), tensor.decode::<u8>().unwrap_err()] {
        assert!(error.to_string().contains("dtype 77 is not supported"), "{error}");
    }
    assert!(code_lengths(&tensor).unwrap().is_none());
    assert!(matches!(open(change(Dtype::BF16.id())), Err(Error::Limit { .. })));
    // The place in the file is a rule for every tensor.
    let outside = edited(|Draft { directory, .. }| {
        directory.tensors[2].dtype = UNKNOWN.into();
        directory.tensors[2].file_offset = (directory.files[0].length.get() + 1).into();
    });
    assert!(matches!(open(outside), Err(Error::Corrupt { .. })));
}

#[test]
fn verification_names_what_it_does_not_know() {
    // A tensor without bytes is never read.
    let encoding = edited(|Draft { directory, .. }| directory.tensors[2].encoding = UNKNOWN.into());
    let found = open(encoding).unwrap().verify(Level::Full, &()).unwrap();
    assert!(
        found.unchecked.iter().any(|what| what.contains("layer.none")),
        "{:?}",
        found.unchecked
    );
    // A dtype of a later version stands in the original header too.
    let dtype = edited(|Draft { directory, contents }| {
        let of = |content: &[u8]| content.windows(4).position(|window| window == b"BF16");
        for tensor in [1, 2] {
            directory.tensors[tensor].dtype = UNKNOWN.into();
            let prefixes = contents.iter_mut().find(|content| of(content).is_some()).unwrap();
            let at = of(prefixes).unwrap();
            prefixes[at..at + 4].copy_from_slice(b"XF16");
        }
    });
    // It is compared with the directory at every level; the bytes cannot be.
    for level in [Level::Structure, Level::Checksums, Level::Full] {
        let found = open(dtype.clone()).unwrap().verify(level, &()).unwrap();
        assert_eq!(found.unchecked.is_empty(), level < Level::Full, "{:?}", found.unchecked);
    }
}

/// A tensor of several thread blocks, and the first one after whose start a code reaches.
fn several_thread_blocks() -> (EncodedTensor, usize) {
    let weights: Vec<u8> = (0..20_000u32)
        .flat_map(|i| {
            df11::hazmat::bf16::weight(
                120 + (i.wrapping_mul(0x9E37_79B9) >> 24).trailing_zeros() as u8,
                0,
            )
            .to_le_bytes()
        })
        .collect();
    let tensor = encode_tensor(&weights, Geometry::new(8, 64).unwrap(), weights.len()).unwrap();
    let block = (1..tensor.sizes.thread_block_count() as usize)
        .find(|block| tensor.gaps[32 * block] & 15 > 0);
    (tensor, block.unwrap())
}

fn entry(tensor: &EncodedTensor, block: usize) -> u64 {
    u64::from_le_bytes(tensor.output_offsets[8 * block..][..8].try_into().unwrap())
}

/// The tensor up to the code that reaches into a thread block, of which it is all.
fn ending_in(tensor: &EncodedTensor, block: usize, extra_bits: u64) -> EncodedTensor {
    let mut tensor = tensor.clone();
    let (elements, gap) = (entry(&tensor, block), tensor.gaps[32 * block] & 15);
    let bits = 4096 * block as u64 + u64::from(gap);
    tensor.sizes = GapSizes::new(
        tensor.sizes.geometry(),
        elements,
        bits + extra_bits,
        tensor.sizes.lut_count(),
    )
    .unwrap();
    tensor.gaps.truncate(32 * block);
    tensor.gaps.push(gap);
    tensor.output_offsets.truncate(8 * (block + 1));
    tensor.output_offsets.extend(elements.to_le_bytes());
    tensor.bitstream.truncate(512 * block + 8);
    let last = &mut tensor.bitstream[512 * block..];
    let kept = u64::from_le_bytes((&*last).try_into().unwrap()) & ((1 << gap) - 1);
    last.copy_from_slice(&kept.to_le_bytes());
    tensor.plane.truncate(elements as usize);
    tensor
}

#[test]
fn a_last_thread_block_without_elements_is_checked() {
    let (tensor, block) = several_thread_blocks();
    let valid = ending_in(&tensor, block, 0);
    verify_codebook(&valid.codebook).unwrap();
    let elements = valid.sizes.elements();
    let weights = valid.decode(0..elements).unwrap();
    assert_eq!(weights, tensor.decode(0..elements).unwrap());
    assert_eq!(valid.decode(elements - 1..elements).unwrap(), weights[weights.len() - 2..]);
    // Its codes end before bit_count, and no thread block with elements tells.
    let late = ending_in(&tensor, block, 1);
    assert!(matches!(late.decode(0..elements), Err(Error::Corrupt { .. })));
    assert!(matches!(late.decode(elements - 1..elements), Err(Error::Corrupt { .. })));
}
