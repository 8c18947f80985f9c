//! What fuzzing found, each case in its smallest form.

use df11::{
    Error, Level, Model, OpenOptions, Result, Source, compress,
    hazmat::{
        code_lengths,
        format::{Directory, Header},
        gap::{EncodedTensor, GapSizes, Geometry, encode_tensor},
        histogram,
        huffman::verify_codebook,
    },
};
use zerocopy::IntoBytes;

/// A container of two files and three small tensors in one of them, all raw, after `edit` of its
/// directory and its bytes before that.
fn edited(edit: impl FnOnce(&mut Directory, &mut Vec<u8>)) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |dtype, shape: &[usize], data| {
        safetensors::tensor::TensorView::new(dtype, shape.to_vec(), data).unwrap()
    };
    let tensors = [
        ("layer.a", tensor(safetensors::Dtype::U8, &[5], &[1; 5])),
        ("layer.b", tensor(safetensors::Dtype::BF16, &[2], &[2; 4])),
        ("layer.none", tensor(safetensors::Dtype::BF16, &[0, 3], &[])),
    ];
    let source = folder.path().join("model");
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("a.safetensors"), safetensors::serialize(tensors, None).unwrap())
        .unwrap();
    let none: [(&str, safetensors::tensor::TensorView<'_>); 0] = [];
    std::fs::write(source.join("b.safetensors"), safetensors::serialize(none, None).unwrap())
        .unwrap();
    let out = folder.path().join("model.df11");
    compress(&Source::open(&source).unwrap(), &out, &df11::CompressOptions::default(), &())
        .unwrap();
    let mut contents = std::fs::read(out).unwrap();

    let header = Header::parse(contents.first_chunk().unwrap()).unwrap();
    let start = header.directory_offset.get();
    let end = (start + header.directory_length.get()) as usize;
    let mut directory = Directory::parse(&contents[start as usize..end], start).unwrap();
    contents.truncate(start as usize);
    edit(&mut directory, &mut contents);
    let mut checksums = directory.sections.iter().map(|section| {
        let section = &contents[section.offset.get() as usize..section.end() as usize];
        df11_reference::crc32(section).into()
    });
    directory.checksums.fill_with(|| checksums.next().unwrap());
    drop(checksums);
    let directory = directory.to_bytes();
    let header = Header::complete(start, &directory).unwrap();
    contents.extend_from_slice(&directory);
    contents.resize(contents.len().next_multiple_of(256), 0);
    contents.extend_from_slice(header.as_bytes());
    contents[..64].copy_from_slice(header.as_bytes());
    contents
}

fn open(container: Vec<u8>) -> Result<Model> {
    OpenOptions::new().open_readers(vec![("model.df11".into(), Box::new(container))])
}

const UNKNOWN: u32 = 77;

#[test]
fn an_unknown_encoding_is_refused_before_anything_of_its_size_is_allocated() {
    let model = open(edited(|directory, _| {
        directory.files[0].length = (1 << 62).into();
        for tensor in &mut directory.tensors[..2] {
            tensor.encoding = UNKNOWN.into();
            tensor.dtype = df11::Dtype::BF16.id().into();
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
    let model = open(edited(|directory, _| {
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
        edited(move |directory, _| {
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
    assert!(matches!(open(change(df11::Dtype::BF16.id())), Err(Error::Limit { .. })));
    // The place in the file is a rule for every tensor.
    let outside = edited(|directory, _| {
        directory.tensors[2].dtype = UNKNOWN.into();
        directory.tensors[2].file_offset = (directory.files[0].length.get() + 1).into();
    });
    assert!(matches!(open(outside), Err(Error::Corrupt { .. })));
}

#[test]
fn verification_names_what_it_does_not_know() {
    // A tensor without bytes is never read.
    let encoding = edited(|directory, _| directory.tensors[2].encoding = UNKNOWN.into());
    let found = open(encoding).unwrap().verify(Level::Full, &()).unwrap();
    assert!(
        found.unchecked.iter().any(|what| what.contains("layer.none")),
        "{:?}",
        found.unchecked
    );
    // A dtype of a later version stands in the original header too.
    let dtype = edited(|directory, contents| {
        directory.tensors[1].dtype = UNKNOWN.into();
        let at = contents.windows(4).position(|window| window == b"BF16").unwrap();
        contents[at..at + 4].copy_from_slice(b"XF16");
        let at = contents.windows(4).position(|window| window == b"BF16").unwrap();
        contents[at..at + 4].copy_from_slice(b"XF16");
        directory.tensors[2].dtype = UNKNOWN.into();
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

#[test]
fn no_thread_block_is_left_out() {
    let (mut tensor, _) = several_thread_blocks();
    // The codes of thread block 1 belong to no weight.
    let count = entry(&tensor, 2) - entry(&tensor, 1);
    let blocks = tensor.sizes.thread_block_count() as usize;
    for block in 2..=blocks {
        let moved = (entry(&tensor, block) - count).to_le_bytes();
        tensor.output_offsets[8 * block..][..8].copy_from_slice(&moved);
    }
    let elements = tensor.sizes.elements() - count;
    tensor.plane.truncate(elements as usize);
    tensor.sizes = GapSizes::new(
        tensor.sizes.geometry(),
        elements,
        tensor.sizes.bit_count(),
        tensor.sizes.lut_count(),
    )
    .unwrap();
    let boundary = entry(&tensor, 1);
    for range in [0..elements, 0..boundary, boundary..elements, 0..1] {
        assert!(matches!(tensor.decode(range), Err(Error::Corrupt { .. })));
    }
}
