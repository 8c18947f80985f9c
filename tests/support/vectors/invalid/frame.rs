//! Sections 2 and 3: header, footer, lengths, and lists that lead outside.

use df11::hazmat::{constants::MAX_DIRECTORY_BYTES, format::Header};
use zerocopy::IntoBytes;

use super::{CORRUPT, HUGE, LIMIT, OVERFLOW, UNSUPPORTED, edited, open, plain};
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
    let head = |edit: &dyn Fn(&mut Header)| with_header(&good, edit);
    let directory = header(&good).directory_offset.get() as usize;
    let footer = good.len() - 64;
    let mut unfinished = good.clone();
    unfinished[..64].copy_from_slice(Header::unfinished().as_bytes());
    let mut newer = head(&|header| header.version_major = 2.into());
    newer[20..4096].fill(0xEE);
    let mut zeros = good.clone();
    zeros[8192..].fill(0);
    let mut other_footer = good.clone();
    let copy = head(&|header| header.compatible_features = 1.into());
    other_footer[footer..].copy_from_slice(&copy[footer..]);
    let mut space = good.clone();
    assert_eq!(space[footer - 1], 0);
    space[footer - 1] = 1;
    let mut checksum = header(&good);
    checksum.header_checksum = 0.into();
    vec![
        open("empty", CORRUPT, "no bytes", vec![]),
        open("magic", CORRUPT, "another magic", head(&|header| header.magic[5] = b'\n')),
        open(
            "newer-major",
            UNSUPPORTED,
            "major version 2",
            head(&|header| header.version_major = 2.into()),
        ),
        open("newer-major-other-layout", UNSUPPORTED, "major version 2 with another header", newer),
        open("newer-major-short", UNSUPPORTED, "major version 2 in 100 bytes", {
            let mut bytes = good[..100].to_vec();
            bytes[8] = 2;
            bytes
        }),
        open(
            "version-zero",
            UNSUPPORTED,
            "major version 0",
            head(&|header| header.version_major = 0.into()),
        ),
        open("short", CORRUPT, "100 bytes of a container", good[..100].to_vec()),
        open("truncated", CORRUPT, "cut before the directory", good[..directory].to_vec()),
        open(
            "truncated-by-one",
            CORRUPT,
            "the last byte is missing",
            good[..good.len() - 1].to_vec(),
        ),
        open("truncated-to-zeros", CORRUPT, "of full length, with zeros from a section on", zeros),
        open("trailing-byte", CORRUPT, "a byte follows the footer", [&good[..], &[0]].concat()),
        open("header-checksum", CORRUPT, "a wrong header_checksum", put_header(&good, &checksum)),
        open("incomplete", CORRUPT, "a file that was never finished", unfinished),
        open("state", CORRUPT, "state 2", head(&|header| header.state = 2.into())),
        open(
            "incompatible-feature",
            UNSUPPORTED,
            "a feature without which the file cannot be read",
            head(&|header| header.incompatible_features = (1 << 40).into()),
        ),
        open("file-length", CORRUPT, "file_length is one too much", {
            let length = header(&good).file_length.get() + 1;
            head(&|header| header.file_length = length.into())
        }),
        open(
            "file-length-limit",
            LIMIT,
            "file_length 2^63",
            head(&|header| header.file_length = (1 << 63).into()),
        ),
        open(
            "directory-length-limit",
            LIMIT,
            "directory_length above 256 MiB",
            head(&|header| header.directory_length = (MAX_DIRECTORY_BYTES + 1).into()),
        ),
        open(
            "directory-length",
            CORRUPT,
            "directory_length leaves 256 bytes before the footer",
            head(&|header| header.directory_length = (header.directory_length.get() - 256).into()),
        ),
        open(
            "directory-in-head",
            CORRUPT,
            "directory_offset 0",
            head(&|header| header.directory_offset = 0.into()),
        ),
        open(
            "directory-unaligned",
            CORRUPT,
            "directory_offset is no multiple of 4096",
            head(&|header| header.directory_offset = (header.directory_offset.get() + 8).into()),
        ),
        open(
            "directory-past-end",
            CORRUPT,
            "directory_offset 2^40",
            head(&|header| header.directory_offset = (1 << 40).into()),
        ),
        open(
            "directory-offset-half",
            CORRUPT,
            "directory_offset 2^63, with which nothing overflows",
            head(&|header| header.directory_offset = (1 << 63).into()),
        ),
        open(
            "directory-offset-overflow",
            OVERFLOW,
            "directory_offset + directory_length exceeds 2^64",
            head(&|header| header.directory_offset = (HUGE - 4095).into()),
        ),
        open("head-not-zero", CORRUPT, "a byte of the head after the header", flipped(4095)),
        open("footer", CORRUPT, "a footer with other features, and a right checksum", other_footer),
        open("footer-space", CORRUPT, "a byte between directory and footer", space),
        open(
            "directory-checksum",
            CORRUPT,
            "a flipped bit in the directory",
            flipped(directory + 20),
        ),
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
        vectors.push(open(&format!("count-of-{name}"), CORRUPT, &about, counted(value)));
        let most = counted(1 << 40);
        let about = format!("a count of {name} of 2^40: more than there is room for");
        vectors.push(open(&format!("count-of-{name}-large"), CORRUPT, &about, most));
        at += 8 + size as usize * count;
    }
    let shard = |index: u64, count: u64| {
        edited(|draft| {
            draft.directory.shard.shard_index = index.into();
            draft.directory.shard.shard_count = count.into();
        })
    };
    vectors.extend([
        open(
            "directory-left-over",
            CORRUPT,
            "a byte after the last list",
            draft.pack_with(|bytes| bytes.push(0)),
        ),
        open(
            "directory-cut",
            CORRUPT,
            "the directory ends within the text",
            draft.pack_with(|bytes| bytes.truncate(bytes.len() - 1)),
        ),
        open("directory-empty", CORRUPT, "a directory of no bytes", draft.pack_with(Vec::clear)),
        open("shard-count-limit", LIMIT, "shard_count 100001", shard(0, 100_001)),
        open("shard-count-zero", CORRUPT, "shard_count 0", shard(0, 0)),
        open("shard-index", CORRUPT, "shard 2 of 2, counted from 0", shard(2, 2)),
        open(
            "checksums-missing",
            CORRUPT,
            "a checksum too few",
            edited(|draft| draft.directory.checksums.truncate(2)),
        ),
        open(
            "checksums-left-over",
            CORRUPT,
            "a checksum too many",
            edited(|draft| {
                draft.directory.checksums.push(0.into());
            }),
        ),
    ]);
    vectors
}
