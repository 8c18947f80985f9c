//! Sections 2 and 3: header, footer, lengths, and lists that lead outside.

use df11::hazmat::{constants::MAX_DIRECTORY_BYTES, format::Header};
use zerocopy::IntoBytes;

use super::{HUGE, LIMIT, OVERFLOW, UNSUPPORTED, of_draft, open, plain};
use crate::container::{header, put_header, with_header};
use crate::vectors::Vector;

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn frame() -> Vec<Vector> {
    let good = plain().build();
    let flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    let header_of = |edit: &dyn Fn(&mut Header)| with_header(&good, edit);
    let head =
        |name: &str, about: &str, edit: &dyn Fn(&mut Header)| open(name, about, header_of(edit));
    let directory = header(&good).directory_offset.get() as usize;
    let footer = good.len() - 64;
    let mut unfinished = good.clone();
    unfinished[..64].copy_from_slice(Header::unfinished().as_bytes());
    let mut newer = header_of(&|header| header.version_major = 2.into());
    newer[20..4096].fill(0xEE);
    let mut zeros = good.clone();
    zeros[8192..].fill(0);
    let mut other_footer = good.clone();
    let copy = header_of(&|header| header.compatible_features = 1.into());
    other_footer[footer..].copy_from_slice(&copy[footer..]);
    let mut space = good.clone();
    assert_eq!(space[footer - 1], 0);
    space[footer - 1] = 1;
    let mut checksum = header(&good);
    checksum.header_checksum = 0.into();
    vec![
        open("empty", "no bytes", vec![]),
        head("magic", "another magic", &|header| header.magic[5] = b'\n'),
        head("newer-major", "major version 2", &|header| header.version_major = 2.into())
            .expecting(UNSUPPORTED),
        open("newer-major-other-layout", "major version 2 with another header", newer)
            .expecting(UNSUPPORTED),
        open("newer-major-short", "major version 2 in 100 bytes", {
            let mut bytes = good[..100].to_vec();
            bytes[8] = 2;
            bytes
        })
        .expecting(UNSUPPORTED),
        head("version-zero", "major version 0", &|header| header.version_major = 0.into())
            .expecting(UNSUPPORTED),
        open("short", "100 bytes of a container", good[..100].to_vec()),
        open("truncated", "cut before the directory", good[..directory].to_vec()),
        open("truncated-by-one", "the last byte is missing", good[..good.len() - 1].to_vec()),
        open("truncated-to-zeros", "of full length, with zeros from a section on", zeros),
        open("trailing-byte", "a byte follows the footer", [&good[..], &[0]].concat()),
        open("header-checksum", "a wrong header_checksum", put_header(&good, &checksum)),
        open("incomplete", "a file that was never finished", unfinished),
        head("state", "state 2", &|header| header.state = 2.into()),
        head(
            "incompatible-feature",
            "a feature without which the file cannot be read",
            &|header| header.incompatible_features = (1 << 40).into(),
        )
        .expecting(UNSUPPORTED),
        open("file-length", "file_length is one too much", {
            let length = header(&good).file_length.get() + 1;
            header_of(&|header| header.file_length = length.into())
        }),
        head("file-length-limit", "file_length 2^63", &|header| {
            header.file_length = (1 << 63).into();
        })
        .expecting(LIMIT),
        head("directory-length-limit", "directory_length above 256 MiB", &|header| {
            header.directory_length = (MAX_DIRECTORY_BYTES + 1).into();
        })
        .expecting(LIMIT),
        head(
            "directory-length",
            "directory_length leaves 256 bytes before the footer",
            &|header| header.directory_length = (header.directory_length.get() - 256).into(),
        ),
        head("directory-in-head", "directory_offset 0", &|header| {
            header.directory_offset = 0.into();
        }),
        head("directory-unaligned", "directory_offset is no multiple of 4096", &|header| {
            header.directory_offset = (header.directory_offset.get() + 8).into();
        }),
        head("directory-past-end", "directory_offset 2^40", &|header| {
            header.directory_offset = (1 << 40).into();
        }),
        head(
            "directory-offset-half",
            "directory_offset 2^63, with which nothing overflows",
            &|header| header.directory_offset = (1 << 63).into(),
        ),
        head(
            "directory-offset-overflow",
            "directory_offset + directory_length exceeds 2^64",
            &|header| header.directory_offset = (HUGE - 4095).into(),
        )
        .expecting(OVERFLOW),
        open("head-not-zero", "a byte of the head after the header", flipped(4095)),
        open("footer", "a footer with other features, and a right checksum", other_footer),
        open("footer-space", "a byte between directory and footer", space),
        open("directory-checksum", "a flipped bit in the directory", flipped(directory + 20)),
    ]
}

/// Lists whose counts lead outside.
pub(super) fn lists() -> Vec<Vector> {
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
    let mut vectors = Vec::new();
    let mut at = 48;
    for (name, size, count) in lists {
        let counted = |value: u64| {
            draft.pack_with(|bytes| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes()))
        };
        // count × size is a little more than 2^64, so that it wraps to what is there.
        let wrapping = (1u128 << 64).div_ceil(size) as u64 + count as u64;
        let (value, about) = if size > 1 {
            (
                wrapping,
                format!("a count of {name} whose size in bytes wraps around 2^64 (CVE-2024-21802)"),
            )
        } else {
            (HUGE, format!("a count of {name} of 2^64 - 1"))
        };
        vectors.push(open(&format!("count-of-{name}"), &about, counted(value)));
        let most = counted(1 << 40);
        let about = format!("a count of {name} of 2^40: more than there is room for");
        vectors.push(open(&format!("count-of-{name}-large"), &about, most));
        at += 8 + size as usize * count;
    }
    let shard = |name: &str, about: &str, index: u64, count: u64| {
        of_draft(name, about, |draft| {
            draft.directory.shard.shard_index = index.into();
            draft.directory.shard.shard_count = count.into();
        })
    };
    vectors.extend([
        open(
            "directory-left-over",
            "a byte after the last list",
            draft.pack_with(|bytes| bytes.push(0)),
        ),
        open(
            "directory-cut",
            "the directory ends within the text",
            draft.pack_with(|bytes| bytes.truncate(bytes.len() - 1)),
        ),
        open("directory-empty", "a directory of no bytes", draft.pack_with(Vec::clear)),
        shard("shard-count-limit", "shard_count 100001", 0, 100_001).expecting(LIMIT),
        shard("shard-count-zero", "shard_count 0", 0, 0),
        shard("shard-index", "shard 2 of 2, counted from 0", 2, 2),
        of_draft("checksums-missing", "a checksum too few", |draft| {
            draft.directory.checksums.truncate(2);
        }),
        of_draft("checksums-left-over", "a checksum too many", |draft| {
            draft.directory.checksums.push(0.into());
        }),
    ]);
    vectors
}
