//! Whole containers: right ones, cut ones, and hostile ones.

mod common;

use common::*;
use df11_reference::Kind::{Corrupt, Limit, Unsupported};
use df11_reference::{Container, Kind};

/// A weights file, two side files, one of them empty, and tensors in all encodings, with their
/// bytes.
fn sample() -> (Model, Vec<Vec<u8>>) {
    let weights: Vec<u16> = (0..700).map(|i: u16| i.wrapping_mul(40503)).collect();
    let weights = weights.iter().map(|w| w & 0x807F | (120 + w % 17) << 7).collect::<Vec<_>>();
    let tied = Tensor {
        encoding: 0,
        file_offset: 1416,
        arrays: vec![],
        ..gap_tensor("b", &weights, &ladder(), 0)
    };
    let tied = Tensor { parameters: vec![0], ..tied };
    let prefix = (6, [&8u64.to_le_bytes()[..], b"{     }\n"].concat());
    let floats: Vec<u8> = (0..24).collect();
    let model = Model {
        files: vec![
            File { kind: 0, path: "part/model.safetensors", length: 2840, arrays: vec![prefix] },
            File { kind: 1, path: "config.json", length: 2, arrays: vec![(7, b"{}".to_vec())] },
            File { kind: 1, path: "empty", length: 0, arrays: vec![] },
        ],
        blocks: vec!["layers.0"],
        tensors: vec![
            gap_tensor("a", &weights, &ladder(), 16),
            tied,
            raw_tensor("c", 18, &[2, 3], &floats, 2816),
            raw_tensor("d", 15, &[7, 0], &[], 2816),
        ],
    };
    (model, vec![bytes(&weights), bytes(&weights), floats, vec![]])
}

fn open_kind(container: &[u8]) -> Option<Kind> {
    Container::open(container).err().map(|error| error.kind)
}

/// Decodes each tensor.
fn use_all(container: &Container) -> Vec<Option<Vec<u8>>> {
    (0..container.tensors().len()).map(|tensor| container.decode(tensor).ok()).collect()
}

#[test]
fn a_container_comes_back() {
    let (model, tensors) = sample();
    let bytes = model.build();
    let container = Container::open(&bytes).unwrap();
    for (i, (info, expected)) in container.tensors().zip(&tensors).enumerate() {
        assert_eq!(info.name, &*model.tensors[i].name);
        assert_eq!(
            (info.dtype, info.encoding),
            (model.tensors[i].dtype, model.tensors[i].encoding)
        );
        assert_eq!((info.shape, info.hash), (&*model.tensors[i].shape, &[9; 32]));
        assert_eq!(&container.decode(i).unwrap(), expected);
    }
    assert_eq!(container.decode(4).unwrap_err().kind, Corrupt);
}

#[test]
fn an_empty_container_opens() {
    let bytes = Model::default().build();
    Container::open(&bytes).unwrap();
    assert_eq!(bytes.len(), 4096 + 256 + 64);
}

#[test]
fn every_truncation_is_corrupt() {
    let bytes = sample().0.build();
    for length in 0..bytes.len() {
        assert_eq!(open_kind(&bytes[..length]), Some(Corrupt), "{length} bytes");
    }
    assert_eq!(open_kind(&[&bytes[..], &[0]].concat()), Some(Corrupt));
}

#[test]
fn every_flipped_bit_is_found() {
    let (model, tensors) = sample();
    let mut bytes = model.build();
    let sections = sections(&bytes);
    for bit in 0..8 * bytes.len() {
        bytes[bit / 8] ^= 1 << (bit % 8);
        if (sections.iter().any(|section| section.contains(&(bit / 8))) || bit % 1009 == 0)
            && let Ok(container) = Container::open(&bytes)
        {
            let decoded = use_all(&container);
            let right =
                decoded.iter().zip(&tensors).all(|(d, t)| d.as_ref().is_none_or(|d| d == t));
            assert!(right, "bit {bit}");
        }
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Flipped bits in the sections, under right checksums.
#[test]
fn hostile_content_never_panics() {
    let (model, tensors) = sample();
    let bytes = model.build();
    for bit in sections(&bytes)
        .into_iter()
        .flat_map(|section| 8 * section.start..8 * section.end)
        .step_by(5)
    {
        let mut hostile = bytes.clone();
        hostile[bit / 8] ^= 1 << (bit % 8);
        let hostile = resealed(&hostile);
        let decoded = use_all(&Container::open(&hostile).unwrap());
        assert!(
            decoded
                .iter()
                .zip(&tensors)
                .all(|(d, t)| d.as_ref().is_none_or(|d| d.len() == t.len()))
        );
    }
}

/// Every u32 of the directory at the values where rules and arithmetic turn.
#[test]
fn hostile_directories_never_panic() {
    let bytes = sample().0.build();
    let length = u64_at(&bytes, 48) as usize;
    for at in (0..length - 8).step_by(4) {
        for value in [
            0,
            1,
            2,
            255,
            1 << 20,
            1 << 31,
            1 << 32,
            1 << 63,
            u64::MAX - 255,
            u64::MAX - 1,
            u64::MAX,
        ] {
            let hostile = edited(&bytes, |directory| {
                directory[at..at + 8].copy_from_slice(&u64::to_le_bytes(value));
            });
            if let Ok(container) = Container::open(&hostile) {
                use_all(&container);
            }
        }
    }
    for length in 0..length {
        assert!(open_kind(&edited(&bytes, |directory| directory.truncate(length))).is_some());
    }
}

#[test]
fn the_frame_is_checked_in_order() {
    let bytes = sample().0.build();
    let error = |bytes: &[u8]| Container::open(bytes).err().map(|error| error.to_string());
    for (at, value, expected) in [
        (0, 0, Some("Corrupt: 2: magic")),
        (8, 2, Some("Unsupported: 2: version_major")),
        (10, 9, None),
        (12, 0, Some("Corrupt: 2: state")),
        (12, 2, Some("Corrupt: 2: state")),
        (23, 128, Some("Unsupported: 2: incompatible_features")),
        (31, 128, None),
        (32, 1, Some("Corrupt: 2: file_length")),
        (39, 255, Some("Limit: 2: file_length exceeds MAX_FILE_BYTES")),
        (40, 1, Some("Corrupt: 2: directory_offset")),
        (41, 0, Some("Corrupt: 2: directory_offset")),
        (41, 0x70, Some("Corrupt: 2: place of the footer")),
        (47, 255, Some("Corrupt: 2: place of the footer")),
        (48, 1, Some("Corrupt: 2: padding is not zero")),
        (48, 255, Some("Corrupt: 2: directory_checksum")),
        (49, 0, Some("Corrupt: 2: place of the footer")),
        (52, 1, Some("Limit: 2: directory_length exceeds MAX_DIRECTORY_BYTES")),
        (56, 0, Some("Corrupt: 2: directory_checksum")),
    ] {
        let found = error(&with_header(&bytes, |header| header[at] = value));
        assert_eq!(found.as_deref(), expected, "byte {at}");
    }
    let footer = bytes.len() - 64;
    for (at, expected) in [
        (8, "Unsupported: 2: version_major"), // A newer header need not have this checksum.
        (16, "Corrupt: 2: header_checksum"),  // Features count only under a right checksum.
        (64, "Corrupt: 2: padding is not zero"),
        (footer - 1, "Corrupt: 2: padding is not zero"),
        (footer, "Corrupt: 2: footer"),
        (directory_offset(&bytes), "Corrupt: 2: directory_checksum"),
    ] {
        let mut bytes = bytes.clone();
        bytes[at] ^= 2;
        assert_eq!(error(&bytes).as_deref(), Some(expected), "byte {at}");
    }
    let shortest = error(&bytes[..4096 + 63]);
    assert_eq!(shortest.as_deref(), Some("Corrupt: 2: shorter than head and footer"));
}

#[test]
fn broken_rules_of_the_directory_are_named() {
    let bytes = sample().0.build();
    let huge = u64::MAX;
    for (list, record, offset, value, error) in [
        (FILES, 0, 0, 3, "Unsupported: 3, File: kind"),
        (FILES, 0, 0, 1 << 32, "Corrupt: 3, File: reserved"),
        (FILES, 0, 8, 1, "Corrupt: 3, Text: empty, or not back to back"),
        (FILES, 0, 16, 0, "Corrupt: 3, Text: empty, or not back to back"),
        (FILES, 0, 16, 4097, "Limit: 3: a name, path, key or value is too long"),
        (FILES, 0, 24, 2839, "Corrupt: 3, Tensor: ends outside its file"),
        (FILES, 1, 24, 3, "Corrupt: 3, 6: count of arrays, their sections or their lengths"),
        (FILES, 1, 64, 0, "Corrupt: 3, Array: first_array"),
        (FILES, 1, 72, huge, "Corrupt: 3, Array: first_array"),
        (FILES, 2, 24, 1, "Corrupt: 3, 6: count of arrays, their sections or their lengths"),
        (SECTIONS, 0, 0, 8, "Unsupported: 3, Section: kind"),
        (SECTIONS, 0, 0, 0, "Unsupported: 3, Section: kind"),
        (SECTIONS, 0, 0, 2, "Corrupt: 3, Section: order"),
        (SECTIONS, 0, 0, 3, "Corrupt: 3, Section: order"),
        (SECTIONS, 0, 0, 1 << 32 | 1, "Corrupt: 3, Section: reserved or length"),
        (SECTIONS, 0, 8, huge, "Corrupt: 3, Section: block"),
        (SECTIONS, 5, 8, 0, "Corrupt: 3, Section: block"),
        (SECTIONS, 0, 8, 1, "Corrupt: 3, Section: block"),
        (SECTIONS, 0, 16, 8192, "Corrupt: 2: place of a section"),
        (SECTIONS, 0, 24, huge, "Corrupt: 2: place of a section"),
        (SECTIONS, 0, 24, 0, "Corrupt: 3, Section: reserved or length"),
        (SECTIONS, 0, 24, 255, "Corrupt: 3, Array: length of the section"),
        (SECTIONS, 6, 24, 4097, "Corrupt: 2: place of the directory"),
        (TENSORS, 0, 24, 1, "Corrupt: an index, an offset or a count leads outside"),
        (TENSORS, 0, 32, 1, "Corrupt: 3, Tensor: file"),
        (TENSORS, 0, 32, huge, "Corrupt: an index, an offset or a count leads outside"),
        (TENSORS, 0, 40, huge, "Corrupt: 3, Tensor: ends outside its file"),
        (TENSORS, 0, 48, 9, "Limit: 3, Tensor: dimension_count exceeds MAX_DIMENSIONS"),
        (TENSORS, 0, 48, 0, "Corrupt: 3, Tensor: shape"),
        (TENSORS, 0, 56, huge, "Corrupt: 5: too many bits"),
        (TENSORS, 3, 56, 1 << 60, "Corrupt: 5: too many bits"),
        (TENSORS, 0, 56, 699, "Corrupt: 3, 6: count of arrays, their sections or their lengths"),
        (TENSORS, 0, 56, 1, "Corrupt: 6.3: bit_count"),
        (
            TENSORS,
            2,
            16,
            1 << 32 | 2,
            "Corrupt: 3, 6: count of arrays, their sections or their lengths",
        ),
        (TENSORS, 2, 16, 2 << 32 | 18, "Corrupt: 6.3: dtype"),
        (TENSORS, 3, 16, 2 << 32 | 15, "Corrupt: 6.3: bytes_per_thread"),
        (TENSORS, 0, 128, 4, "Corrupt: 3, Array: first_array"),
        (TENSORS, 3, 128, 1, "Corrupt: 3, Array: array_count"),
        (TENSORS, 0, 136, 24, "Corrupt: 6.3: bytes_per_thread"),
        (TENSORS, 0, 136, 16, "Corrupt: 3, 6: count of arrays, their sections or their lengths"),
        (TENSORS, 0, 144, 0, "Corrupt: 6.3: threads_per_block"),
        (TENSORS, 0, 144, 1024, "Corrupt: 3, 6: count of arrays, their sections or their lengths"),
        (TENSORS, 0, 152, huge, "Corrupt: 6.3: bit_count"),
        (TENSORS, 0, 160, 1, "Corrupt: 6: unused parameters"),
        (TENSORS, 1, 136, 1, "Corrupt: 6.1: target"),
        (TENSORS, 1, 136, 2, "Corrupt: 6.1: target"),
        (TENSORS, 1, 136, huge, "Corrupt: an index, an offset or a count leads outside"),
        (TENSORS, 1, 168, 0, "Corrupt: 6.1: target"),
        (TENSORS, 2, 136, 1, "Corrupt: 6: unused parameters"),
        (ARRAYS, 0, 0, 7, "Corrupt: an index, an offset or a count leads outside"),
        (ARRAYS, 0, 0, 0, "Corrupt: 3, Array: offset or length"),
        (ARRAYS, 0, 8, 256, "Corrupt: 3, Array: offset or length"),
        (ARRAYS, 0, 16, 0, "Corrupt: 3, Array: offset or length"),
        (ARRAYS, 0, 16, huge, "Corrupt: 3, Array: length of the section"),
    ] {
        let found = Container::open(&set(&bytes, list, record, offset, value)).unwrap_err();
        assert_eq!(found.to_string(), error, "list {list}, record {record}, offset {offset}");
    }
}

#[test]
fn broken_models_are_named() {
    let check = |error: &str, edit: fn(&mut Model)| {
        let mut model = sample().0;
        edit(&mut model);
        assert_eq!(Container::open(&model.build()).unwrap_err().to_string(), error);
    };
    let sections = "Corrupt: 3, 6: count of arrays, their sections or their lengths";
    check(sections, |m| m.files[0].arrays[0].0 = 7);
    check(sections, |m| m.files[1].arrays[0].0 = 6);
    check(sections, |m| m.files[0].arrays.push((6, vec![0])));
    check(sections, |m| m.tensors[0].arrays[2].0 = 1);
    check("Corrupt: 6.3: length of codebook", |m| m.tensors[0].arrays.swap(0, 1));
    check(sections, |m| m.tensors[1].arrays.push((5, vec![0])));
    check(sections, |m| m.tensors[2].arrays[0].0 = 4);
    check(sections, |m| m.tensors[3].arrays.push((5, vec![0])));
    check("Corrupt: 6.3: length of codebook", |m| drop(m.tensors[0].arrays[0].1.split_off(256)));
    check("Corrupt: 3, 6: count of arrays, their sections or their lengths", |m| {
        m.tensors[0].arrays[3].1.push(0)
    });
    check("Corrupt: 5: elements do not fill whole bytes", |m| {
        (m.tensors[2].dtype, m.tensors[2].shape[0]) = (2, 1)
    });
    check("Corrupt: 3, Section: block", |m| m.tensors[0].arrays[0].0 = 6);
    check("Corrupt: 1: a name or path is not UTF-8 without NUL", |m| m.blocks[0] = "a\0");
    let mut model = sample().0;
    model.blocks.push("other");
    let error = Container::open(&set(&model.build(), TENSORS, 2, 24, 1)).unwrap_err();
    assert_eq!(error.to_string(), "Corrupt: 3, Array: block");
}

#[test]
fn counts_and_shards_are_checked() {
    let bytes = sample().0.build();
    for list in FILES..=TEXT {
        for count in [0, 1 << 40, 1 << 61, u64::MAX] {
            if (list, count) == (METADATA, 0) {
                continue; // as it is
            }
            let hostile = edited(&bytes, |directory| {
                let at = field(directory, list, 0, 0) - 8;
                directory[at..at + 8].copy_from_slice(&u64::to_le_bytes(count));
            });
            assert!(open_kind(&hostile).is_some(), "list {list}, count {count}");
        }
    }
    let error = |bytes: &[u8]| Container::open(bytes).unwrap_err().to_string();
    let insert = |list: usize, size: usize| {
        error(&edited(&bytes, |directory| {
            let count = field(directory, list, 0, 0) - 8;
            let end = count + 8 + u64_at(directory, count) as usize * size;
            directory[count] += 1;
            directory.splice(end..end, vec![0; size]);
        }))
    };
    assert_eq!(insert(TEXT, 1), "Corrupt: 3, Text: some belongs to nobody");
    assert_eq!(insert(CHECKSUMS, 4), "Corrupt: 4: count of checksums");
    let huge = edited(&bytes, |directory| {
        let count = field(directory, TEXT, 0, 0) - 8;
        directory[count + 7] = 1;
    });
    assert_eq!(error(&huge), "Corrupt: 3: a list exceeds the directory");
    let mut alone = sample().0;
    alone.files.truncate(1);
    let alone = alone.build();
    let shards = |index: u64, count: u64| {
        open_kind(&edited(&alone, |directory| {
            directory[..8].copy_from_slice(&index.to_le_bytes());
            directory[8..16].copy_from_slice(&count.to_le_bytes());
        }))
    };
    assert_eq!(shards(99_999, 100_000), None);
    let later = edited(&bytes, |directory| (directory[0], directory[8]) = (1, 2));
    assert_eq!(error(&later), "Corrupt: 3: side files or metadata in a later shard");
    assert_eq!(shards(0, 100_001), Some(Limit));
    assert_eq!(shards(0, 0), Some(Corrupt));
    assert_eq!(shards(1, 1), Some(Corrupt));
    assert_eq!(open_kind(&edited(&bytes, |directory| directory.push(0))), Some(Corrupt));
}

#[test]
fn names_are_checked() {
    let paths =
        ["/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\\b", "c:a", "a\nb", "a\0b", "a\u{85}b"];
    for path in paths {
        let mut model = sample().0;
        model.files[0].path = path;
        assert_eq!(open_kind(&model.build()), Some(Corrupt), "{path:?}");
    }
    let mut model = sample().0;
    model.files[0].path = ".a/..b/c.../é";
    assert_eq!(open_kind(&model.build()), None);
    model.files[0].path = "config.json";
    assert_eq!(open_kind(&model.build()), Some(Corrupt), "one path, two kinds");
    let mut model = sample().0;
    model.files.swap(1, 2);
    assert_eq!(open_kind(&model.build()), Some(Corrupt), "order of files");
    let mut model = sample().0;
    model.blocks.push("layers.0");
    assert_eq!(open_kind(&model.build()), Some(Corrupt), "two blocks of one name");
    model.blocks[1] = "unused";
    assert_eq!(open_kind(&model.build()), None);
    model.tensors[1].name = "a".into();
    assert_eq!(open_kind(&model.build()), Some(Corrupt), "two tensors of one name");
    let bytes = sample().0.build();
    let split = edited(&bytes, |directory| *directory.last_mut().unwrap() = 0xC3);
    assert_eq!(open_kind(&split), Some(Corrupt), "half a character");
}

#[test]
fn unknown_tensors_are_unsupported_and_no_others() {
    let (mut model, expected) = sample();
    model.tensors[2].encoding = 77;
    model.tensors[2].parameters = vec![1, 2, 3, 4];
    let dtype = Tensor { dtype: 99, ..model.tensors[3].clone() };
    model.tensors.push(Tensor {
        name: "e".into(),
        encoding: 1,
        parameters: vec![u64::MAX],
        ..dtype
    });
    let bytes = model.build();
    let container = Container::open(&bytes).unwrap();
    assert_eq!(container.decode(0).unwrap(), expected[0]);
    assert_eq!(container.decode(1).unwrap(), expected[1]);
    for tensor in [2, 4] {
        assert_eq!(container.decode(tensor).unwrap_err().kind, Unsupported);
    }
}

#[test]
fn sections_of_high_kinds_are_ignored() {
    let mut model = sample().0;
    model.tensors[2].encoding = 77;
    model.tensors[2].arrays[0].0 = 1 << 31;
    let bytes = model.build();
    assert_eq!(open_kind(&bytes), None);
    assert_eq!(Container::open(&bytes).unwrap().decode(2).unwrap_err().kind, Unsupported);
    // The array of the tensor may leave the end of such a section to others.
    let shorter = edited(&bytes, |directory| {
        let last = u64_at(directory, field(directory, ARRAYS, 0, 0) - 8) as usize - 1;
        let at = field(directory, ARRAYS, last, 16);
        directory[at] -= 1;
    });
    assert_eq!(open_kind(&shorter), None);
}

#[test]
fn each_chunk_has_its_checksum() {
    let data: Vec<u8> = (0..3 << 20).map(|i: u32| (i >> 7) as u8).collect();
    let prefix =
        File { kind: 0, path: "m", length: 8 + data.len() as u64, arrays: vec![(6, vec![1; 8])] };
    let split = (3 << 19) + 1;
    let model = Model {
        files: vec![prefix],
        blocks: vec!["b"],
        tensors: vec![
            raw_tensor("x", 5, &[split as u64], &data[..split], 8),
            raw_tensor("y", 5, &[(data.len() - split) as u64], &data[split..], 8 + split as u64),
        ],
    };
    let mut bytes = model.build();
    assert_eq!(Container::open(&bytes).unwrap().decode(1).unwrap(), data[split..]);
    bytes[4096 + (5 << 19)] ^= 1;
    let container = Container::open(&bytes).unwrap();
    assert_eq!(container.decode(0).unwrap(), data[..split]);
    assert_eq!(container.decode(1).unwrap_err().kind, Corrupt);
    bytes[4096 + (3 << 19)] ^= 1;
    assert!(Container::open(&bytes).unwrap().decode(0).is_err());
}
