//! Sections 2 and 3: header, footer, checksums, zeros, hashes, and lists that lead outside.

use df11::{
    Dtype,
    hazmat::{
        constants::{MAX_DIRECTORY_BYTES, NONE},
        format::Header,
    },
};
use zerocopy::IntoBytes;

use super::{Edits, HUGE, Vectors, gap::coded, plain, shorten, with_section};
use crate::container::{Item, Model, header, put_header, with_header};

pub(super) fn make(to: &mut Vectors) {
    headers(to);
    ends(to);
    lists(to);
    checksums(to);
    hashes(to);
}

/// Headers under a right checksum.
const HEADERS: Edits<'_, Header> = &[
    ("magic", |header| header.magic[5] = b'\n'),
    ("newer-major", |header| header.version_major = 2.into()),
    ("version-zero", |header| header.version_major = 0.into()),
    ("state", |header| header.state = 2.into()),
    ("incompatible-feature", |header| header.incompatible_features = (1 << 40).into()),
    ("file-length", |header| header.file_length += 1),
    ("file-length-limit", |header| header.file_length = (1 << 63).into()),
    ("directory-length-limit", |header| header.directory_length = (MAX_DIRECTORY_BYTES + 1).into()),
    ("directory-length", |header| header.directory_length -= 256),
    ("directory-in-head", |header| header.directory_offset = 0.into()),
    ("directory-unaligned", |header| header.directory_offset += 8),
    ("directory-past-end", |header| header.directory_offset = (1 << 40).into()),
    ("directory-offset-half", |header| header.directory_offset = (1 << 63).into()),
    ("directory-offset-overflow", |header| header.directory_offset = (HUGE - 4095).into()),
];

fn headers(to: &mut Vectors) {
    let good = plain().build();
    for (name, edit) in HEADERS {
        to.invalid(name, with_header(&good, edit));
    }
    let mut checksum = header(&good);
    checksum.header_checksum = 0.into();
    to.invalid("header-checksum", put_header(&good, &checksum));
    let mut newer = with_header(&good, |header| header.version_major = 2.into());
    newer[20..4096].fill(0xEE);
    to.invalid("newer-major-other-layout", newer);
}

/// Bytes that are cut, added or changed.
fn ends(to: &mut Vectors) {
    let good = plain().build();
    let directory = header(&good).directory_offset.get() as usize;
    let footer = good.len() - 64;
    assert_eq!(good[footer - 1], 0);
    to.invalid("empty", vec![]);
    to.invalid("short", good[..100].to_vec());
    to.invalid("truncated", good[..directory].to_vec());
    to.invalid("truncated-by-one", good[..good.len() - 1].to_vec());
    to.invalid("trailing-byte", [&good[..], &[0]].concat());
    let mut edited = |name: &str, edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        edit(&mut bytes);
        to.invalid(name, bytes);
    };
    edited("newer-major-short", &|bytes| {
        bytes.truncate(100);
        bytes[8] = 2;
    });
    edited("truncated-to-zeros", &|bytes| bytes[8192..].fill(0));
    edited("incomplete", &|bytes| bytes[..64].copy_from_slice(Header::unfinished().as_bytes()));
    edited("head-not-zero", &|bytes| bytes[4095] ^= 1);
    edited("footer", &|bytes| {
        let copy = with_header(bytes, |header| header.compatible_features = 1.into());
        bytes[footer..].copy_from_slice(&copy[footer..]);
    });
    edited("footer-space", &|bytes| bytes[footer - 1] = 1);
    edited("directory-checksum", &|bytes| bytes[directory + 20] ^= 1);
}

/// Lists whose counts lead outside.
fn lists(to: &mut Vectors) {
    let draft = plain().draft();
    let directory = &draft.directory;
    let lists = [
        ("files", 80, directory.files.len()),
        ("blocks", 16, directory.blocks.len()),
        ("sections", 32, directory.sections.len()),
        ("tensors", 200, directory.tensors.len()),
        ("arrays", 24, directory.arrays.len()),
        ("checksums", 4, directory.checksums.len()),
        ("metadata", 32, directory.metadata.len()),
        ("text", 1, directory.text.len()),
    ];
    let mut at = 48;
    for (name, size, count) in lists {
        let counted = |value: u64| {
            draft.pack_with(|bytes| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes()))
        };
        // count × size is a little more than 2^64, so that it wraps to what is there.
        let wrapping = (1u128 << 64).div_ceil(size) as u64 + count as u64;
        to.invalid(&format!("count-of-{name}"), counted(if size > 1 { wrapping } else { HUGE }));
        to.invalid(&format!("count-of-{name}-large"), counted(1 << 40));
        at += 8 + size as usize * count;
    }
    to.invalid("directory-left-over", draft.pack_with(|bytes| bytes.push(0)));
    to.invalid("directory-cut", draft.pack_with(|bytes| shorten(bytes, 1)));
    to.invalid("directory-empty", draft.pack_with(Vec::clear));
}

/// Checksums, and bytes that must be zero.
fn checksums(to: &mut Vectors) {
    let coded = coded();
    for (name, section, byte) in [
        ("checksum-codebook", 0, 0),
        ("checksum-index", 1, 3),
        ("checksum-bitstream", 2, 700),
        ("checksum-plane", 3, 700),
    ] {
        to.of(&coded).flipped(name, section, byte);
    }
    to.of(&plain()).flipped("checksum-raw", 0, 0);
    to.of(&plain()).flipped("checksum-prefix", 1, 9);
    to.of(&plain()).flipped("checksum-side", 2, 0);
    to.of(&with_section(plain(), NONE, u32::MAX, b"new")).flipped("checksum-unknown", 3, 0);
    to.of(&plain()).drafts(&[("zeros-between-arrays", |draft| draft.contents[0][255] = 1)]);
    let sections = plain().draft().directory.sections;
    for (name, section, byte) in
        [("zeros-between-sections", 0, 4095), ("zeros-before-directory", 2, 3)]
    {
        let (mut bytes, at) = (plain().build(), sections[section].offset.get() as usize + byte);
        assert_eq!(bytes[at], 0);
        bytes[at] = 1;
        to.invalid(name, bytes);
    }
    let mut unknown = plain();
    unknown.tensors[0].encoding = 77;
    unknown.tensors[0].arrays = vec![(u32::MAX, vec![1; 5]), (u32::MAX, vec![2; 5])];
    to.of(&unknown).drafts(&[("zeros-in-unknown-section", |draft| {
        let mut sections = draft.directory.sections.iter();
        let at = sections.position(|section| section.kind == u32::MAX).unwrap();
        draft.contents[at][100] = 1;
    })]);
}

/// Hashes, under right checksums.
fn hashes(to: &mut Vectors) {
    to.of(&plain())
        .directories(&[("hash-of-tensor", |directory| directory.tensors[0].hash[31] ^= 1)]);
    to.of(&coded()).tensors(&[("hash-of-coded-tensor", |tensor| tensor.array(4)[100] ^= 0x80)]);
    let empty = Model::new(&[Item::raw("x", Dtype::U8, &[0], vec![])], &[]);
    to.of(&empty).tensors(&[("hash-of-empty-tensor", |tensor| tensor.hash[0] ^= 1)]);
    to.of(&plain()).models(&[
        ("identity", |model| model.identity[0] ^= 1),
        ("identity-without-side-files", |model| {
            let side = model.files.pop();
            model.identity = model.identity_of_files();
            model.files.extend(side);
        }),
        ("hash-of-weights-file", |model| {
            model.files[0].hash[0] ^= 1;
            model.identity = model.identity_of_files();
        }),
        ("hash-of-side-file", |model| {
            model.files[1].hash[0] ^= 1;
            model.identity = model.identity_of_files();
        }),
    ]);
}
