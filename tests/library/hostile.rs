//! Containers that were cut, damaged, forged or mixed up: a typed error or the right bytes, never a
//! panic, never wrong weights; from this crate and from the reference decoder.

use std::{fs, ops::Range, path::Path, sync::Arc};

use df11::{Dtype, Error, Level, OpenOptions, hazmat::histogram};
use rayon::prelude::*;

use crate::{
    container::{Draft, Item, Model, normal_weights, open, parse},
    files::check_error,
};

/// All encodings, and a side file; weights in a gap array, or in tiles, whole and partial ones.
fn samples() -> [Model; 2] {
    let gap = Item::gap("coded", &[70, 10], normal_weights(700, 3), (8, 64));
    let matrix = Item::tile("coded", &[70, 16], normal_weights(70 * 16, 3), (256, 16));
    let vector = Item::tile("vector", &[77], normal_weights(77, 5), (8192, 77));
    [model(&gap, None), model(&matrix, Some(vector))]
}

fn sample() -> Model {
    let [gap, _] = samples();
    gap
}

fn model(coded: &Item, other: Option<Item>) -> Model {
    let raw = Item::raw("raw", Dtype::F32, &[2, 3], (0..24).collect());
    let none = Item::raw("none", Dtype::BF16, &[7, 0], vec![]);
    let items: Vec<Item> =
        [coded.clone(), coded.alias("tied"), raw, none].into_iter().chain(other).collect();
    Model::new(&items, &[("config.json", b"{}\n"), ("empty", b"")])
}

/// The result of the reference decoder: each tensor that decodes.
fn reference(bytes: &[u8]) -> df11_reference::Result<Vec<Option<Vec<u8>>>> {
    let container = df11_reference::Container::open(bytes)?;
    Ok((0..container.tensors().len()).map(|tensor| container.decode(tensor).ok()).collect())
}

/// The reference decoder opens the container, and no tensor that it decodes is wrong.
fn check_reference(bytes: &[u8], is_right: impl Fn(&[u8], &[u8]) -> bool, original: &Model) {
    let tensors = reference(bytes).unwrap();
    for (tensor, expected) in tensors.iter().zip(&original.tensors) {
        assert!(tensor.as_ref().is_none_or(|bytes| is_right(bytes, &expected.data)));
    }
}

fn is_typed(error: &Error) -> bool {
    matches!(error, Error::Corrupt { .. } | Error::Limit { .. } | Error::Unsupported { .. })
}

/// Every tensor decodes to its bytes, or fails with a typed error.
fn check_tensors(model: &df11::Model, original: &Model, what: &str) {
    for (tensor, expected) in model.tensors().zip(&original.tensors) {
        match tensor.decode::<u8>() {
            Ok(bytes) => {
                assert!(bytes == expected.data, "{what}: wrong bytes of {:?}", tensor.name());
            }
            Err(error) => assert!(is_typed(&error), "{what}: {error:?}"),
        }
    }
}

#[test]
fn every_truncation_is_an_error() {
    for bytes in samples().map(|sample| sample.build()) {
        (0..bytes.len()).into_par_iter().for_each(|length| {
            let error = open(bytes[..length].to_vec()).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{length} bytes: {error:?}");
            let error = reference(&bytes[..length]).unwrap_err();
            assert_eq!(error.kind, df11_reference::Kind::Corrupt, "{length} bytes: {error:?}");
        });
    }
}

#[test]
fn every_flipped_bit_is_found_and_no_weight_is_wrong() {
    samples().iter().for_each(flip_every_bit);
}

fn flip_every_bit(original: &Model) {
    let bytes = original.build();
    let stored: Vec<Range<usize>> = parse(&bytes)
        .directory
        .sections
        .iter()
        .map(|section| section.offset.get() as usize..section.end() as usize)
        .collect();
    (0..bytes.len()).into_par_iter().for_each_init(
        || Arc::<[u8]>::from(&bytes[..]),
        |flipped, byte| {
            let is_stored = stored.iter().any(|range| range.contains(&byte));
            for bit in 0..8 {
                Arc::get_mut(flipped).unwrap()[byte] ^= 1 << bit;
                match open(Arc::clone(flipped)) {
                    Err(error) => assert!(is_typed(&error), "byte {byte}, bit {bit}: {error:?}"),
                    Ok(model) => {
                        if is_stored || byte % 97 == bit {
                            check_tensors(&model, original, &format!("byte {byte}, bit {bit}"));
                        }
                        if is_stored {
                            check_reference(flipped, |bytes, expected| bytes == expected, original);
                        }
                        // Outside sections only zeros are left to find.
                        let level = if is_stored { Level::Full } else { Level::Structure };
                        let error = model.verify(level, &()).unwrap_err();
                        let is_corrupt = matches!(error, Error::Corrupt { .. });
                        assert!(is_corrupt, "byte {byte}, bit {bit}: {error:?}");
                    }
                }
                Arc::get_mut(flipped).unwrap()[byte] ^= 1 << bit;
            }
        },
    );
}

/// Flipped bits in the sections, under right checksums: only hashes can tell.
#[test]
fn forged_content_never_panics_and_never_verifies() {
    samples().iter().for_each(forge_content);
}

fn forge_content(original: &Model) {
    let draft = parse(&original.build());
    let bits: Vec<(usize, usize)> = draft
        .contents
        .iter()
        .enumerate()
        .flat_map(|(section, content)| {
            (0..8 * content.len()).step_by(3).map(move |bit| (section, bit))
        })
        .collect();
    bits.into_par_iter().for_each(|(section, bit)| {
        let mut draft = draft.clone();
        draft.contents[section][bit / 8] ^= 1 << (bit % 8);
        draft.repair_checksums();
        let bytes = draft.pack();
        check_reference(&bytes, |bytes, expected| bytes.len() == expected.len(), original);
        let model = open(bytes).unwrap();
        for (tensor, expected) in model.tensors().zip(&original.tensors) {
            match tensor.decode::<u8>() {
                Ok(bytes) => assert_eq!(bytes.len(), expected.data.len()),
                Err(error) => assert!(matches!(error, Error::Corrupt { .. }), "{error:?}"),
            }
            let shape = tensor.shape();
            let mut row = vec![0; tensor.byte_length().unwrap() as usize / shape[0] as usize];
            let _ =
                tensor.slice(&[shape[0] - 1..shape[0]]).and_then(|last| last.decode_into(&mut row));
        }
        assert!(model.verify(Level::Full, &()).is_err(), "section {section}, bit {bit}");
    });
}

/// In a section with two chunks, one damaged, tensors of the other one still decode.
#[test]
fn a_wrong_chunk_is_found_by_whoever_reads_it() {
    let data = (0..0x0010_0400u32).map(|at| (at >> 7) as u8).collect();
    let both = Item::raw("both", Dtype::U8, &[0x0010_0400], data);
    let second = Item::raw("second", Dtype::U8, &[3], vec![1, 2, 3]);
    let original = Model::new(&[both, second], &[]);
    for (byte, wrong) in [(5, [true, false]), (0x0010_0005, [true, true])] {
        let mut draft = original.draft();
        draft.contents[0][byte] ^= 1;
        let bytes = draft.pack();
        let found: Vec<bool> = reference(&bytes).unwrap().iter().map(Option::is_none).collect();
        assert_eq!(found, wrong, "the reference, byte {byte}");
        let model = open(bytes).unwrap();
        let found = model.tensors().map(|tensor| tensor.decode::<u8>().is_err());
        assert_eq!(found.collect::<Vec<_>>(), wrong, "byte {byte}");
    }
}

/// Every eight bytes of the directory at the values where rules and arithmetic turn, under right
/// checksums. This crate and the reference decoder agree on what opens.
#[test]
fn forged_directories_never_panic() {
    for sample in samples() {
        forge_directory(&sample.draft());
    }
}

fn forge_directory(draft: &Draft) {
    let length = draft.directory.to_bytes().len();
    #[rustfmt::skip]
    let values = [
        0, 1, 2, 255, 4097, 1 << 20, 1 << 31, 1 << 32, 1 << 63,
        u64::MAX - 255, u64::MAX - 1, u64::MAX,
    ];
    (0..length - 8).into_par_iter().step_by(4).for_each(|at| {
        for value in values {
            check_forged(draft, at, value);
        }
    });
}

fn check_forged(draft: &Draft, at: usize, value: u64) {
    let bytes =
        draft.pack_with(|directory| directory[at..at + 8].copy_from_slice(&value.to_le_bytes()));
    let reference = reference(&bytes).map(drop);
    match open(bytes) {
        Ok(model) => {
            assert!(reference.is_ok(), "{at}, {value}: only df11 opens it: {reference:?}");
            for tensor in model.tensors() {
                let _ = tensor.decode::<u8>();
            }
            for block in model.blocks() {
                let _ = block.layout();
            }
            let _ = model.verify(Level::Full, &());
        }
        Err(error) => {
            assert!(is_typed(&error), "{at}, {value}: {error:?}");
            assert!(reference.is_err(), "{at}, {value}: only the reference opens it: {error:?}");
        }
    }
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_an_io_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sample.df11");
    fs::write(&path, sample().build()).unwrap();
    let model = OpenOptions::new().memory_map(false).open(&path).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5000).unwrap();
    for tensor in model.tensors().filter(|tensor| tensor.elements() > 0) {
        check_error(tensor.decode::<u8>(), "Io", "");
    }
}

/// The parts of a model, each in a file of its own below `folder`, with these shard indices and
/// tensor names.
fn write_shards(folder: &Path, shards: &[(u64, &str, &str)], count: u64) {
    for (at, (index, file, tensor)) in shards.iter().enumerate() {
        let item = Item::raw(tensor, Dtype::U8, &[3], vec![1, 2, 3]);
        let mut model = Model::new(&[item.in_file(file)], &[]);
        model.shard = (*index, count);
        model.identity = [7; 32];
        fs::write(folder.join(format!("{at}.df11")), model.build()).unwrap();
    }
}

#[test]
fn shards_that_belong_together_open_together() {
    let folder = tempfile::tempdir().unwrap();
    write_shards(folder.path(), &[(1, "b.safetensors", "b"), (0, "a.safetensors", "a")], 2);
    let model = df11::open(folder.path()).unwrap();
    assert!(model.is_complete());
    assert_eq!(model.tensor("b").unwrap().decode::<u8>().unwrap(), [1, 2, 3]);
    let blocks: Vec<_> = model.blocks().map(|block| block.tensors().len()).collect();
    assert_eq!(blocks, [2], "blocks of one name are one block");
    // The identity was made up.
    assert!(matches!(model.verify(Level::Full, &()), Err(Error::Corrupt { .. })));
}

/// The problem, the first shard, an edit of the second, and whether containers are damaged.
type Row = (&'static str, (u64, &'static str, &'static str), fn(&mut Draft), bool);

#[test]
fn shards_that_do_not_belong_together_are_refused() {
    let refused = |shards: &[(u64, &str, &str)], edit: fn(&mut Draft)| {
        let folder = tempfile::tempdir().unwrap();
        write_shards(folder.path(), shards, 2);
        let path = folder.path().join("1.df11");
        let mut draft = parse(&fs::read(&path).unwrap());
        edit(&mut draft);
        fs::write(&path, draft.pack()).unwrap();
        df11::open(folder.path()).unwrap_err()
    };
    let (a, b) = ((0, "a.safetensors", "a"), (1, "b.safetensors", "b"));
    let rows: [Row; 5] = [
        ("identities", a, |draft| draft.directory.shard.identity[0] ^= 1, false),
        ("counts", a, |draft| draft.directory.shard.shard_count = 3.into(), false),
        ("indices", (1, "a.safetensors", "a"), |_| {}, false),
        ("tensors", (0, "a.safetensors", "b"), |_| {}, true),
        ("paths", (0, "b.safetensors", "a"), |_| {}, true),
    ];
    for (what, first, edit, is_corrupt) in rows {
        match refused(&[first, b], edit) {
            Error::Corrupt { .. } if is_corrupt => {}
            Error::Parameter { .. } if !is_corrupt => {}
            error => panic!("{what}: {error:?}"),
        }
    }
}

#[test]
fn lengths_that_a_directory_claims_do_not_overflow_when_added_up() {
    let items = [("a", "a.safetensors"), ("b", "b.safetensors")]
        .map(|(name, file)| Item::raw(name, Dtype::U8, &[1], vec![1]).in_file(file));
    let mut draft = Model::new(&items, &[]).draft();
    draft.directory.files.iter_mut().for_each(|file| file.length = u64::MAX.into());
    let model = open(draft.pack()).unwrap();
    // Tensors that do not cover a file need no decoding to be found.
    for level in [Level::Structure, Level::Checksums, Level::Full] {
        assert!(matches!(model.verify(level, &()), Err(Error::Corrupt { .. })), "{level:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let options = df11::DecompressOptions::default();
    let restored = df11::decompress(&model, &folder.path().join("out"), &options, &());
    assert!(matches!(restored, Err(Error::Corrupt { .. })));
}

/// Tensors with a dtype or an encoding of a later version.
#[test]
fn what_is_unknown_is_told_and_nothing_is_made_of_it() {
    let weights = |name: &str| Item::raw(name, Dtype::BF16, &[2], vec![2; 4]);
    let none = Item::raw("none", Dtype::BF16, &[0, 3], vec![]);
    let of_dtype = Item { dtype: (77, "XF16".into()), ..weights("dtype") };
    let mut sample = Model::new(&[of_dtype, weights("encoding")], &[]);
    sample.tensor("encoding").encoding = 77;
    let model = sample.open();
    let tensor = model.tensor("dtype").unwrap();
    assert!(matches!(tensor.byte_length(), Err(Error::Unsupported { .. })));
    // The dtype is unknown, with any encoding.
    for result in [tensor.check_known(), tensor.decode::<u8>().map(drop)] {
        check_error(result, "Unsupported", "dtype 77 is not supported");
    }
    let tensor = model.tensor("encoding").unwrap();
    assert!(matches!(tensor.decode::<half::bf16>(), Err(Error::Unsupported { .. })));
    assert!(matches!(histogram(&tensor), Err(Error::Unsupported { .. })));
    // Every level compares them with the header; their bytes cannot be compared.
    for level in [Level::Structure, Level::Checksums, Level::Full] {
        let found = model.verify(level, &()).unwrap();
        assert_eq!(found.unchecked.is_empty(), level < Level::Full, "{:?}", found.unchecked);
    }
    // A tensor without bytes is never read.
    let mut sample = Model::new(&[none], &[]);
    sample.tensor("none").encoding = 77;
    let found = sample.open().verify(Level::Full, &()).unwrap().unchecked;
    assert!(found.iter().any(|what| what.contains("none")), "{found:?}");
}
