//! Containers that every reader must reject, each for one reason; all checksums are right unless they are the reason.

use df11::{
    Dtype,
    constants::{MAX_DIRECTORY_BYTES, NONE},
    format::{
        Header,
        records::{
            SECTION_CODEBOOK, SECTION_PLANE, SECTION_RAW, SECTION_SIDE, SECTION_SKIPPABLE, TensorRecord,
        },
    },
};
use zerocopy::IntoBytes;

use super::Vector;
use crate::container::{
    Draft, File, Item, Model, Tensor, header, normal_weights, put_header, weights, with_header, with_length,
};

const CORRUPT: &[&str] = &["Corrupt"];
const LIMIT: &[&str] = &["Limit"];
const UNSUPPORTED: &[&str] = &["Unsupported"];
/// Where arithmetic overflows, a reader has the choice.
const OVERFLOW: &[&str] = &["Limit", "Corrupt"];
const HUGE: u64 = u64::MAX;

pub(super) fn vectors() -> Vec<Vector> {
    [
        frame(),
        lists(),
        text(),
        files(),
        sections(),
        tensors(),
        arrays(),
        aliases(),
        encodings(),
        index(),
        codes(),
        content(),
        weights_files(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn open(name: &str, kinds: &[&str], about: &str, bytes: Vec<u8>) -> Vector {
    Vector::invalid(name, "open", kinds, about, bytes)
}

/// Two raw tensors and a side file, in three sections.
fn plain() -> Model {
    let items = [
        Item::raw("a", Dtype::U8, &[5], vec![1, 2, 3, 4, 5]),
        Item::raw("bé", Dtype::F32, &[2], (10..18).collect()),
    ];
    Model::new(&items, &[("config.json", b"{}\n")])
}

/// A coded tensor of three thread blocks and an odd number of threads, and one stored raw.
fn coded() -> Model {
    let odd = |count: &usize| {
        let bits = crate::container::encode(&normal_weights(*count, 21), 8, 64).1[2];
        bits.div_ceil(64) % 2 == 1 && !bits.is_multiple_of(64)
    };
    let count = (4500..).find(odd).unwrap();
    let weights = normal_weights(count, 21);
    Model::new(
        &[Item::gap("w", &[count as u64], weights, (8, 64)), Item::raw("x", Dtype::U8, &[3], vec![7; 3])],
        &[],
    )
}

fn edited(edit: impl FnOnce(&mut Draft)) -> Vec<u8> {
    edited_of(&plain(), edit)
}

fn edited_of(model: &Model, edit: impl FnOnce(&mut Draft)) -> Vec<u8> {
    let mut draft = model.draft();
    edit(&mut draft);
    draft.pack()
}

/// The model edited, with hashes that fit.
fn remade(mut model: Model, edit: impl FnOnce(&mut Model)) -> Vec<u8> {
    edit(&mut model);
    model.build()
}

fn frame() -> Vec<Vector> {
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
    unfinished[..64].copy_from_slice(Header::incomplete().as_bytes());
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
        open("newer-major", UNSUPPORTED, "major version 2", head(&|header| header.version_major = 2.into())),
        open("newer-major-other-layout", UNSUPPORTED, "major version 2 with another header", newer),
        open("newer-major-short", UNSUPPORTED, "major version 2 in 100 bytes", {
            let mut bytes = good[..100].to_vec();
            bytes[8] = 2;
            bytes
        }),
        open("version-zero", UNSUPPORTED, "major version 0", head(&|header| header.version_major = 0.into())),
        open("short", CORRUPT, "100 bytes of a container", good[..100].to_vec()),
        open("truncated", CORRUPT, "cut before the directory", good[..directory].to_vec()),
        open("truncated-by-one", CORRUPT, "the last byte is missing", good[..good.len() - 1].to_vec()),
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
            "directory-offset-overflow",
            OVERFLOW,
            "directory_offset + directory_length exceeds 2^64",
            head(&|header| header.directory_offset = (HUGE - 4095).into()),
        ),
        open("head-not-zero", CORRUPT, "a byte of the head after the header", flipped(4095)),
        open("footer", CORRUPT, "a footer with other features, and a right checksum", other_footer),
        open("footer-space", CORRUPT, "a byte between directory and footer", space),
        open("directory-checksum", CORRUPT, "a flipped bit in the directory", flipped(directory + 20)),
    ]
}

/// Lists whose counts lead outside.
fn lists() -> Vec<Vector> {
    let draft = plain().draft();
    let directory = &draft.directory;
    let lists = [
        ("files", 80, directory.files.len()),
        ("blocks", 16, directory.blocks.len()),
        ("sections", 32, directory.sections.len()),
        ("tensors", 200, directory.tensors.len()),
        ("arrays", 24, directory.arrays.len()),
        ("checksums", 4, directory.checksums.len()),
        ("text", 1, directory.text.len()),
    ];
    let mut vectors = Vec::new();
    let mut at = 48;
    for (name, size, count) in lists {
        let counted =
            |value: u64| draft.pack_with(|bytes| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes()));
        // count × size is a little more than 2^64, so that it wraps to what is there.
        let wrapping = (1u128 << 64).div_ceil(size) as u64 + count as u64;
        let (value, about) = if size > 1 {
            (wrapping, format!("a count of {name} whose size in bytes wraps around 2^64 (CVE-2024-21802)"))
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

fn text() -> Vec<Vector> {
    let named = |name: &[u8]| remade(plain(), |model| model.tensors[1].name = name.into());
    let last_length = |length: u64| edited(|draft| draft.directory.tensors[1].name_length = length.into());
    let long = vec![b'n'; 4097];
    vec![
        open(
            "name-empty",
            CORRUPT,
            "a tensor without a name",
            remade(plain(), |model| model.tensors[0].name.clear()),
        ),
        open("name-limit", LIMIT, "a name of 4097 bytes", named(&long)),
        open("name-length-overflow", LIMIT, "name_length 2^64 - 1", last_length(HUGE)),
        open("name-past-text", CORRUPT, "name_length beyond text", last_length(300)),
        open("name-nul", CORRUPT, "a NUL in a name", named(b"b\0c")),
        open("name-not-utf8", CORRUPT, "a byte that no UTF-8 text has", named(b"b\xFFc")),
        open("name-overlong", CORRUPT, "an overlong form of `/`", named(b"b\xC0\xAFc")),
        open("name-surrogate", CORRUPT, "a surrogate in UTF-8", named(b"b\xED\xA0\x80c")),
        open(
            "name-cut-in-character",
            CORRUPT,
            "names cut within a character, while the text is UTF-8",
            edited(|draft| {
                draft.directory.text = draft.directory.text.strip_suffix("abé".as_bytes()).unwrap().to_vec();
                draft.directory.text.extend("éb".as_bytes());
                draft.directory.tensors[1].name_length = 2.into();
                draft.place_text();
            }),
        ),
        open(
            "names-overlap",
            CORRUPT,
            "two names share bytes of text",
            edited(|draft| {
                draft.directory.text.remove(0);
                draft.directory.files[0].path_length =
                    (draft.directory.files[0].path_length.get() - 1).into();
                draft.place_text();
                let shared = draft.directory.tensors[1].name_offset.get() - 1;
                draft.directory.tensors[1].name_offset = shared.into();
            }),
        ),
        open(
            "name-offset-overflow",
            CORRUPT,
            "name_offset 2^64 - 1",
            edited(|draft| {
                draft.directory.tensors[1].name_offset = HUGE.into();
            }),
        ),
        open(
            "text-left-over",
            CORRUPT,
            "text after the last name",
            edited(|draft| draft.directory.text.push(b'x')),
        ),
        open(
            "text-first",
            CORRUPT,
            "text before the first path",
            edited(|draft| {
                draft.directory.text.insert(0, b'x');
                draft.place_text();
                let directory = &mut draft.directory;
                directory.files.iter_mut().for_each(|file| file.path_offset += 1);
                directory.blocks.iter_mut().for_each(|block| block.name_offset += 1);
                directory.tensors.iter_mut().for_each(|tensor| tensor.name_offset += 1);
            }),
        ),
        open("names-equal", CORRUPT, "two tensors with one name", named(b"a")),
        open("names-unsorted", CORRUPT, "tensors that do not ascend by name", named(b"A")),
        open(
            "block-names-equal",
            CORRUPT,
            "two blocks with one name",
            remade(plain(), |model| {
                model.blocks.push(model.blocks[0].clone());
            }),
        ),
    ]
}

fn files() -> Vec<Vector> {
    let path = |name: &str, about: &str, path: &str| {
        let bytes = remade(plain(), |model| model.files[1].path = path.into());
        open(&format!("path-{name}"), CORRUPT, about, bytes)
    };
    let file = |edit: &dyn Fn(&mut Draft)| edited(edit);
    let mut vectors = vec![
        path("parent", "a path out of the folder", "../config.json"),
        path("parent-inside", "`..` within a path", "a/../config.json"),
        path("parent-last", "`..` at the end", "a/.."),
        path("absolute", "a path from the root", "/config.json"),
        path("empty-component", "two slashes", "a//config.json"),
        path("trailing-slash", "a path that ends in a slash", "config/"),
        path("dot", "a component `.`", "./config.json"),
        path("backslash", "a backslash, which some systems take for a slash", "a\\config.json"),
        path("colon", "a colon, which some systems take for a drive or a stream", "c:config.json"),
        path("control", "a control character", "config\n.json"),
        path("of-weights", "a side file with the path of a weights file", "model.safetensors"),
        path("in-a-file", "a path below that of another file", "model.safetensors/config.json"),
        open(
            "path-limit",
            LIMIT,
            "a path of 4097 bytes",
            remade(plain(), |model| model.files[1].path = vec![b'p'; 4097]),
        ),
        open("path-empty", CORRUPT, "an empty path", remade(plain(), |model| model.files[1].path.clear())),
    ];
    let two_sides = |first: &str, second: &str| {
        remade(plain(), |model| {
            model.files[1].path = first.into();
            let file = File::side(second, b"xyz");
            model.files.push(file);
        })
    };
    vectors.extend([
        open("paths-equal", CORRUPT, "two side files with one path", two_sides("a", "a")),
        open("paths-unsorted", CORRUPT, "side files that do not ascend by path", two_sides("b", "a")),
        open("path-folder-apart", CORRUPT, "a path below that of another file, with one between", {
            remade(plain(), |model| {
                model.files[1].path = b"a".into();
                model.files.extend([File::side("a-b", b"x"), File::side("a/b", b"y")]);
            })
        }),
        open(
            "files-side-first",
            CORRUPT,
            "a side file before a weights file",
            remade(plain(), |model| {
                model.files.swap(0, 1);
                model.tensors.iter_mut().for_each(|tensor| tensor.file = 1);
            }),
        ),
        open(
            "file-kind",
            UNSUPPORTED,
            "an unknown kind of file",
            file(&|draft| draft.directory.files[1].kind = 2.into()),
        ),
        open(
            "file-kind-before-corrupt",
            UNSUPPORTED,
            "an unknown kind of file, with a path that only it may have",
            {
                let mut model = plain();
                model.files[1].path = b"../x".into();
                edited_of(&model, |draft| draft.directory.files[1].kind = 2.into())
            },
        ),
        open(
            "file-reserved",
            CORRUPT,
            "reserved is not zero",
            file(&|draft| draft.directory.files[0].reserved = 1.into()),
        ),
        open(
            "side-file-length",
            CORRUPT,
            "a side file longer than its array",
            file(&|draft| {
                draft.directory.files[1].length += 1;
            }),
        ),
        open(
            "side-file-shorter",
            CORRUPT,
            "a side file shorter than its array",
            file(&|draft| {
                draft.directory.files[1].length -= 1;
            }),
        ),
        open(
            "empty-side-file-with-array",
            CORRUPT,
            "a side file of length 0 with an array",
            file(&|draft| {
                draft.directory.files[1].length = 0.into();
            }),
        ),
        open(
            "side-file-without-array",
            CORRUPT,
            "a side file of some length without an array",
            remade(plain(), |model| {
                model.files.push(File { arrays: vec![], ..File::side("more.json", b"{}") });
            }),
        ),
        open(
            "weights-file-without-prefix",
            CORRUPT,
            "a weights file without an array",
            remade(plain(), |model| {
                model.files[0].arrays.clear();
            }),
        ),
        open(
            "weights-file-two-arrays",
            CORRUPT,
            "a weights file with two arrays",
            remade(plain(), |model| {
                let stored = model.files[0].arrays[0].clone();
                model.files[0].arrays.push(stored);
            }),
        ),
        open("prefix-longer-than-file", CORRUPT, "a prefix longer than its file, which has no tensors", {
            let mut model = Model::new(&[Item::raw("x", Dtype::U8, &[0], vec![])], &[]);
            (model.tensors, model.blocks) = (vec![], vec![]);
            model.files[0].arrays[0].1 = with_length("{}");
            model.refresh();
            model.files[0].length -= 1;
            model.build()
        }),
        open(
            "prefix-in-side-section",
            CORRUPT,
            "a prefix in the side section",
            remade(plain(), |model| {
                model.files[0].arrays[0].0 = SECTION_SIDE;
            }),
        ),
    ]);
    vectors
}

fn sections() -> Vec<Vector> {
    // Sections: raw in block 0, prefix, side.
    let section = |edit: &dyn Fn(&mut Draft)| edited(edit);
    let extra = |block: u64, kind: u32, bytes: &[u8]| {
        remade(plain(), |model| model.extra_sections.push((block, kind, bytes.into())))
    };
    vec![
        open(
            "section-kind",
            UNSUPPORTED,
            "an unknown kind of section that must not be skipped",
            extra(0, 8, b"new"),
        ),
        open("section-kind-zero", UNSUPPORTED, "section kind 0", extra(0, 0, b"new")),
        open(
            "section-kind-last",
            UNSUPPORTED,
            "section kind 2^31 - 1",
            extra(NONE, SECTION_SKIPPABLE - 1, b"new"),
        ),
        open(
            "section-kind-before-corrupt",
            UNSUPPORTED,
            "an unknown kind of section and sections out of order",
            {
                section(&|draft| {
                    draft.directory.sections[0].kind = 9.into();
                    draft.directory.sections[1].block = 0.into();
                })
            },
        ),
        open(
            "section-reserved",
            CORRUPT,
            "reserved is not zero",
            section(&|draft| {
                draft.directory.sections[0].reserved = 1.into();
            }),
        ),
        open(
            "section-without-arrays",
            CORRUPT,
            "a section of a known kind without arrays",
            extra(0, SECTION_PLANE, b"plane"),
        ),
        open(
            "section-longer",
            CORRUPT,
            "a section longer than its arrays",
            section(&|draft| {
                draft.contents[0].push(0);
                draft.directory.sections[0].length += 1;
                draft.repair_checksums();
            }),
        ),
        open(
            "section-shorter",
            CORRUPT,
            "a section shorter than its arrays",
            section(&|draft| {
                draft.directory.sections[0].length -= 1;
            }),
        ),
        open("section-empty", CORRUPT, "a section of no bytes", {
            let mut draft = remade_draft(|model| model.extra_sections.push((0, SECTION_SKIPPABLE, vec![1])));
            let at = draft.directory.sections.iter().position(|s| s.kind == SECTION_SKIPPABLE).unwrap();
            draft.contents[at].clear();
            draft.directory.sections[at].length = 0.into();
            for section in &mut draft.directory.sections[at + 1..] {
                section.offset -= 4096;
            }
            draft.repair_checksums();
            draft.pack()
        }),
        open(
            "sections-unsorted",
            CORRUPT,
            "a side section before the prefix section",
            section(&|draft| {
                let sections = &mut draft.directory.sections;
                (sections[1].kind, sections[2].kind) = (sections[2].kind, sections[1].kind);
                draft.directory.arrays[0].section = 2.into();
                draft.directory.arrays[1].section = 1.into();
                let lengths = [draft.contents[2].clone(), draft.contents[1].clone()];
                for (at, content) in (1..).zip(lengths) {
                    draft.directory.sections[at].length = (content.len() as u64).into();
                    draft.contents[at] = content;
                }
                draft.repair_checksums();
            }),
        ),
        open("sections-twice", CORRUPT, "two sections of one kind in a block", {
            let mut draft = remade_draft(|model| model.extra_sections.push((0, SECTION_SKIPPABLE, vec![1])));
            let at = draft.directory.sections.iter().position(|s| s.kind == SECTION_SKIPPABLE).unwrap();
            draft.directory.sections[at].kind = SECTION_RAW.into();
            let last = draft.directory.arrays.len() - 1;
            draft.directory.arrays[last].section = (at as u64).into();
            draft.directory.arrays[last].offset = 0.into();
            draft.contents[at - 1].truncate(5);
            draft.directory.sections[at - 1].length = 5.into();
            draft.contents[at] = (10..18).collect();
            draft.directory.sections[at].length = 8.into();
            draft.repair_checksums();
            draft.pack()
        }),
        open(
            "sections-overlap",
            CORRUPT,
            "two sections in one place",
            section(&|draft| {
                draft.directory.sections[1].offset = draft.directory.sections[0].offset;
            }),
        ),
        open(
            "section-hole",
            CORRUPT,
            "4096 bytes between two sections that no section needs",
            section(&|draft| {
                draft.contents[0].resize(4097, 0);
                draft.directory.sections[1].offset += 4096;
                draft.directory.sections[2].offset += 4096;
            }),
        ),
        open(
            "section-unaligned",
            CORRUPT,
            "a section that starts off a multiple of 4096",
            section(&|draft| {
                draft.directory.sections[2].offset += 256;
            }),
        ),
        open(
            "section-in-head",
            CORRUPT,
            "a section within the head",
            section(&|draft| {
                draft.directory.sections[0].offset = 0.into();
            }),
        ),
        open(
            "section-past-file",
            CORRUPT,
            "offset + length beyond the file (CVE-2026-7482)",
            section(&|draft| {
                draft.directory.sections[2].length = (1 << 40).into();
                draft.directory.arrays[1].length = (1 << 40).into();
                draft.directory.files[1].length = (1 << 40).into();
            }),
        ),
        open(
            "section-length-overflow",
            OVERFLOW,
            "offset + length exceeds 2^64",
            section(&|draft| {
                draft.directory.sections[2].length = (HUGE - 100).into();
                draft.directory.arrays[1].length = (HUGE - 100).into();
                draft.directory.files[1].length = (HUGE - 100).into();
            }),
        ),
        open(
            "section-align-overflow",
            OVERFLOW,
            "a length that fits, and wraps to 0 when it is rounded up (CVE-2025-53630, CVE-2026-27940)",
            section(&|draft| {
                let length = HUGE - draft.directory.sections[2].offset.get() - 100;
                draft.directory.sections[2].length = length.into();
                draft.directory.arrays[1].length = length.into();
                draft.directory.files[1].length = length.into();
            }),
        ),
        open(
            "section-without-block",
            CORRUPT,
            "a raw section that belongs to no block",
            section(&|draft| {
                draft.directory.sections[0].block = NONE.into();
            }),
        ),
        open("section-with-block", CORRUPT, "a side section that belongs to a block", {
            remade(plain(), |model| {
                model.files[1].arrays.clear();
                model.extra_sections.push((0, SECTION_SIDE, b"{}\n".into()));
            })
        }),
        open(
            "section-block",
            CORRUPT,
            "a section of a block that does not exist",
            section(&|draft| {
                draft.directory.sections[0].block = 1.into();
            }),
        ),
        open(
            "unknown-section-block",
            CORRUPT,
            "a section to skip, of a block that does not exist",
            extra(1, SECTION_SKIPPABLE, b"x"),
        ),
        open("directory-offset", CORRUPT, "the directory starts a page after the sections end", {
            let mut draft = plain().draft();
            draft.contents.push(vec![0; 1]);
            draft.pack()
        }),
    ]
}

fn remade_draft(edit: impl FnOnce(&mut Model)) -> Draft {
    let mut model = plain();
    edit(&mut model);
    model.draft()
}

fn tensors() -> Vec<Vector> {
    let first = |edit: &dyn Fn(&mut TensorRecord)| edited(|draft| edit(&mut draft.directory.tensors[0]));
    let shaped = |shape: &[u64]| remade(plain(), |model| model.tensors[0].shape = shape.into());
    vec![
        open(
            "dimensions-limit",
            LIMIT,
            "nine dimensions",
            first(&|tensor| tensor.dimension_count = 9.into()),
        ),
        open(
            "dimensions-huge",
            LIMIT,
            "2^64 - 1 dimensions",
            first(&|tensor| tensor.dimension_count = HUGE.into()),
        ),
        open(
            "shape-beyond",
            CORRUPT,
            "a dimension beyond dimension_count",
            first(&|tensor| tensor.shape[7] = 1.into()),
        ),
        open("shape-overflow", OVERFLOW, "dimensions 2^63 and 4", shaped(&[1 << 63, 4])),
        open("shape-overflow-zero", OVERFLOW, "dimensions 2^63, 4 and 0: the zero does not mend it", {
            remade(plain(), |model| {
                model.tensors[0].shape = vec![1 << 63, 4, 0];
                model.tensors[0].arrays.clear();
            })
        }),
        open("size-overflow-zero", OVERFLOW, "2^63 and 0 elements of 16 bits: the zero does not mend it", {
            remade(plain(), |model| {
                (model.tensors[0].dtype, model.tensors[0].shape) = (Dtype::BF16.id(), vec![1 << 63, 0]);
                model.tensors[0].arrays.clear();
            })
        }),
        open("size-overflow", OVERFLOW, "a size in bytes that wraps to 5 (CVE-2026-33298)", {
            remade(plain(), |model| {
                // 64-bit elements: 2^61 + 1 of them have 2^67 + 64 bits.
                model.tensors[1].dtype = Dtype::U64.id();
                model.tensors[1].shape = vec![(1 << 61) + 1];
            })
        }),
        open(
            "bits",
            CORRUPT,
            "three elements of four bits",
            remade(plain(), |model| {
                (model.tensors[0].dtype, model.tensors[0].shape) = (Dtype::F4.id(), vec![3]);
                model.tensors[0].arrays[0].1.truncate(2);
            }),
        ),
        open(
            "tensor-block",
            CORRUPT,
            "a block that does not exist",
            edited(|draft| {
                draft.directory.tensors[0].block = 1.into();
            }),
        ),
        open(
            "tensor-block-none",
            CORRUPT,
            "a tensor without a block",
            edited(|draft| {
                draft.directory.tensors[0].block = NONE.into();
            }),
        ),
        open("tensor-file", CORRUPT, "a file that does not exist", first(&|tensor| tensor.file = 2.into())),
        open(
            "tensor-in-side-file",
            CORRUPT,
            "a tensor of a side file",
            first(&|tensor| tensor.file = 1.into()),
        ),
        open(
            "tensor-past-file",
            CORRUPT,
            "a tensor that ends beyond its file",
            edited(|draft| {
                draft.directory.tensors[1].file_offset += 1;
            }),
        ),
        open(
            "tensor-offset-overflow",
            OVERFLOW,
            "file_offset + size exceeds 2^64",
            first(&|tensor| {
                tensor.file_offset = (HUGE - 2).into();
            }),
        ),
        open("empty-tensor-past-file", CORRUPT, "a tensor without bytes beyond its file", {
            let mut model = plain();
            model.tensors[0].shape = vec![0];
            model.tensors[0].arrays.clear();
            model.tensors[0].file_offset = model.files[0].length + 1;
            model.build()
        }),
        open(
            "unknown-dtype-past-file",
            CORRUPT,
            "a tensor of an unknown dtype that starts beyond its file",
            {
                let mut model = plain();
                model.tensors[0].dtype = 99;
                model.tensors[0].file_offset = model.files[0].length + 1;
                model.build()
            },
        ),
        open("unknown-encoding-arrays", CORRUPT, "an unknown encoding with an array of another block", {
            let mut model = plain();
            model.blocks.push(b"other".to_vec());
            model.tensors[0].encoding = 77;
            edited_of(&model, |draft| draft.directory.tensors[0].block = 1.into())
        }),
    ]
}

fn arrays() -> Vec<Vector> {
    // Arrays: prefix, side, a, b.
    let array = |edit: &dyn Fn(&mut Draft)| edited(edit);
    vec![
        open(
            "first-array",
            CORRUPT,
            "first_array skips an array",
            array(&|draft| {
                draft.directory.tensors[1].first_array += 1;
            }),
        ),
        open(
            "arrays-shared",
            CORRUPT,
            "two tensors with one array",
            array(&|draft| {
                draft.directory.tensors[1].first_array -= 1;
            }),
        ),
        open(
            "array-count-overflow",
            OVERFLOW,
            "first_array + array_count exceeds 2^64",
            array(&|draft| {
                draft.directory.tensors[1].array_count = HUGE.into();
            }),
        ),
        open(
            "array-count",
            CORRUPT,
            "more arrays than there are",
            array(&|draft| {
                draft.directory.tensors[1].array_count = 2.into();
            }),
        ),
        open(
            "arrays-left-over",
            CORRUPT,
            "an array that belongs to nobody",
            array(&|draft| {
                let array = draft.directory.arrays[1];
                draft.directory.arrays.push(array);
            }),
        ),
        open(
            "array-section",
            CORRUPT,
            "an array of a section that does not exist",
            array(&|draft| {
                draft.directory.arrays[3].section = 3.into();
            }),
        ),
        open(
            "array-section-huge",
            CORRUPT,
            "an array of section 2^64 - 1",
            array(&|draft| {
                draft.directory.arrays[3].section = HUGE.into();
            }),
        ),
        open(
            "arrays-overlap",
            CORRUPT,
            "an array on another",
            array(&|draft| {
                draft.directory.arrays[3].offset = 0.into();
            }),
        ),
        open(
            "array-hole",
            CORRUPT,
            "256 bytes between two arrays that no array needs",
            array(&|draft| {
                draft.contents[0].splice(256..256, [0; 256]);
                draft.directory.sections[0].length += 256;
                draft.directory.arrays[3].offset += 256;
                draft.repair_checksums();
            }),
        ),
        open(
            "array-unaligned",
            CORRUPT,
            "an array off a multiple of 256",
            array(&|draft| {
                draft.contents[0].insert(256, 0);
                draft.directory.sections[0].length += 1;
                draft.directory.arrays[3].offset += 1;
                draft.repair_checksums();
            }),
        ),
        open("array-empty", CORRUPT, "an array of no bytes", {
            let mut model = plain();
            model.tensors[1].shape = vec![0];
            let mut draft = model.draft();
            draft.directory.arrays[3].length = 0.into();
            draft.contents[0].truncate(256);
            draft.directory.sections[0].length = 256.into();
            draft.repair_checksums();
            draft.pack()
        }),
        open(
            "array-past-section",
            CORRUPT,
            "an array that ends beyond its section",
            array(&|draft| {
                draft.directory.arrays[3].length += 1;
                draft.directory.tensors[1].dtype = Dtype::U8.id().into();
                draft.directory.tensors[1].shape[0] = 9.into();
                draft.directory.files[0].length += 1;
            }),
        ),
        open(
            "array-length-overflow",
            OVERFLOW,
            "the end of an array exceeds 2^64",
            array(&|draft| {
                draft.directory.arrays[3].length = (HUGE - 1).into();
            }),
        ),
        open("array-of-other-block", CORRUPT, "an array in a section of another block", {
            let items = [
                Item::raw("a", Dtype::U8, &[5], vec![1; 5]).in_block("0"),
                Item::raw("b", Dtype::U8, &[5], vec![2; 5]).in_block("1"),
            ];
            edited_of(&Model::new(&items, &[]), |draft| draft.directory.tensors[1].block = 0.into())
        }),
        open(
            "array-in-prefix-section",
            CORRUPT,
            "a tensor's array in the prefix section",
            array(&|draft| {
                // The bytes of b go behind the prefix.
                let prefix = draft.contents[1].len().next_multiple_of(256);
                draft.contents[1].resize(prefix, 0);
                draft.contents[1].extend(10..18);
                draft.contents[0].truncate(5);
                draft.directory.sections[0].length = 5.into();
                draft.directory.sections[1].length = (prefix as u64 + 8).into();
                draft.directory.arrays[3].section = 1.into();
                draft.directory.arrays[3].offset = (prefix as u64).into();
                draft.repair_checksums();
            }),
        ),
        open(
            "raw-in-plane-section",
            CORRUPT,
            "a raw tensor in the plane section",
            remade(plain(), |model| {
                model.tensors[1].arrays[0].0 = SECTION_PLANE;
            }),
        ),
    ]
}

fn aliases() -> Vec<Vector> {
    let base = || {
        let a = Item::raw("a", Dtype::U8, &[6], vec![1, 2, 3, 4, 5, 6]);
        let other = Item::raw("c", Dtype::U8, &[6], vec![9; 6]).in_block("other");
        Model::new(&[a.clone(), a.alias("b"), other], &[])
    };
    let alias = |edit: &dyn Fn(&mut Tensor)| remade(base(), |model| edit(model.tensor("b")));
    vec![
        open("alias-to-itself", CORRUPT, "an alias of itself", alias(&|tensor| tensor.parameters[0] = 1)),
        open(
            "alias-to-alias",
            CORRUPT,
            "an alias of an alias",
            remade(base(), |model| {
                let b = model.tensor("b").clone();
                *model.tensor("a") = Tensor { name: b"a".into(), parameters: [1, 0, 0, 0], ..b };
            }),
        ),
        open(
            "alias-to-nothing",
            CORRUPT,
            "a target that does not exist",
            alias(&|tensor| tensor.parameters[0] = 3),
        ),
        open("alias-to-huge", CORRUPT, "target 2^64 - 1", alias(&|tensor| tensor.parameters[0] = HUGE)),
        open("alias-shape", CORRUPT, "a target of another shape", alias(&|tensor| tensor.shape = vec![2, 3])),
        open(
            "alias-dtype",
            CORRUPT,
            "a target of another dtype",
            alias(&|tensor| tensor.dtype = Dtype::I8.id()),
        ),
        open("alias-block", CORRUPT, "a target in another block", alias(&|tensor| tensor.block = 1)),
        open("alias-hash", CORRUPT, "a target of another hash", alias(&|tensor| tensor.hash[0] ^= 1)),
        open(
            "alias-array",
            CORRUPT,
            "an alias with an array",
            alias(&|tensor| {
                tensor.arrays = vec![(SECTION_RAW, tensor.data.clone())];
            }),
        ),
        open("alias-parameter", CORRUPT, "an unused parameter", alias(&|tensor| tensor.parameters[1] = 1)),
    ]
}

fn encodings() -> Vec<Vector> {
    let first = |edit: &dyn Fn(&mut Tensor)| remade(plain(), |model| edit(model.tensor("a")));
    let gap = |edit: &dyn Fn(&mut Tensor)| remade(coded(), |model| edit(model.tensor("w")));
    let elements = coded().tensors[0].shape[0];
    let parameter = |at: usize, value: u64| gap(&|tensor| tensor.parameters[at] = value);
    vec![
        open(
            "raw-shorter",
            CORRUPT,
            "an array shorter than the tensor",
            first(&|tensor| tensor.arrays[0].1.truncate(4)),
        ),
        open(
            "raw-longer",
            CORRUPT,
            "an array longer than the tensor",
            first(&|tensor| tensor.arrays[0].1.push(0)),
        ),
        open(
            "raw-without-array",
            CORRUPT,
            "a tensor with elements and without an array",
            first(&|tensor| tensor.arrays.clear()),
        ),
        open(
            "raw-two-arrays",
            CORRUPT,
            "two arrays",
            first(&|tensor| {
                tensor.arrays = vec![(SECTION_RAW, vec![1, 2]), (SECTION_RAW, vec![3, 4, 5])];
            }),
        ),
        open(
            "raw-empty-with-array",
            CORRUPT,
            "a tensor without elements and with an array",
            first(&|tensor| tensor.shape = vec![0]),
        ),
        open(
            "raw-parameter",
            CORRUPT,
            "a parameter that raw does not name",
            first(&|tensor| tensor.parameters[3] = 1),
        ),
        open("gap-dtype", CORRUPT, "gap for F16", gap(&|tensor| tensor.dtype = Dtype::F16.id())),
        open(
            "gap-empty",
            CORRUPT,
            "gap for a tensor without elements",
            gap(&|tensor| tensor.shape = vec![0]),
        ),
        open("gap-arrays", CORRUPT, "gap with four arrays", gap(&|tensor| drop(tensor.arrays.remove(2)))),
        open(
            "gap-array-order",
            CORRUPT,
            "output offsets before gaps",
            gap(&|tensor| tensor.arrays.swap(1, 2)),
        ),
        open(
            "gap-section",
            CORRUPT,
            "output offsets in the codebook section",
            gap(&|tensor| {
                tensor.arrays[2].0 = SECTION_CODEBOOK;
            }),
        ),
        open("gap-bytes-per-thread", CORRUPT, "24 bytes a thread", parameter(0, 24)),
        open("gap-bytes-per-thread-zero", CORRUPT, "no bytes a thread", parameter(0, 0)),
        open("gap-bytes-per-thread-wide", CORRUPT, "2^32 + 8 bytes a thread", parameter(0, (1 << 32) + 8)),
        open("gap-threads-per-block", CORRUPT, "65 threads a block", parameter(1, 65)),
        open("gap-threads-per-block-zero", CORRUPT, "no threads a block", parameter(1, 0)),
        open("gap-parameter", CORRUPT, "a parameter that gap does not name", parameter(3, 1)),
        open("gap-bit-count-small", CORRUPT, "fewer bits than elements", parameter(2, elements - 1)),
        open("gap-bit-count-large", CORRUPT, "more than 16 bits an element", parameter(2, 16 * elements + 1)),
        open("gap-bit-count-huge", CORRUPT, "bit_count 2^64 - 1", parameter(2, HUGE)),
        open("gap-bit-count-threads", CORRUPT, "bits for one thread more than the bitstream has", {
            let threads = coded().tensors[0].arrays[3].1.len() as u64 / 8;
            parameter(2, 64 * threads + 1)
        }),
        open("gap-elements-overflow", OVERFLOW, "2^60 elements, whose bits exceed 2^64", {
            remade(coded(), |model| {
                model.tensor("w").shape = vec![1 << 60];
                model.files[0].length = 1 << 62;
            })
        }),
        open(
            "gap-codebook-without-luts",
            CORRUPT,
            "a codebook of code lengths alone",
            gap(&|tensor| {
                tensor.arrays[0].1.truncate(256);
            }),
        ),
        open(
            "gap-codebook-length",
            CORRUPT,
            "a codebook with half a LUT",
            gap(&|tensor| {
                tensor.arrays[0].1.truncate(512);
            }),
        ),
        open(
            "gap-codebook-luts",
            CORRUPT,
            "129 LUTs",
            gap(&|tensor| tensor.arrays[0].1.resize(256 + 512 * 129, 0)),
        ),
        open(
            "gap-gaps-length",
            CORRUPT,
            "a byte of gaps too many",
            gap(&|tensor| tensor.arrays[1].1.push(0)),
        ),
        open(
            "gap-offsets-length",
            CORRUPT,
            "an output offset too many",
            gap(&|tensor| {
                tensor.arrays[2].1.extend([0; 8]);
            }),
        ),
        open(
            "gap-bitstream-length",
            CORRUPT,
            "a thread of bitstream too many",
            gap(&|tensor| {
                tensor.arrays[3].1.extend([0; 8]);
            }),
        ),
        open(
            "gap-plane-length",
            CORRUPT,
            "a byte of plane too few",
            gap(&|tensor| tensor.arrays[4].1.truncate(elements as usize - 1)),
        ),
    ]
}

/// The coded model with the arrays of its tensor edited: codebook, gaps, output offsets, bitstream, plane.
fn recoded(
    level: &str,
    name: &str,
    about: &str,
    edit: impl FnOnce(&mut [Vec<u8>; 5], &mut [u64; 4]),
) -> Vector {
    let mut model = coded();
    let tensor = model.tensor("w");
    let mut arrays: [Vec<u8>; 5] = std::array::from_fn(|at| tensor.arrays[at].1.clone());
    edit(&mut arrays, &mut tensor.parameters);
    for (stored, array) in tensor.arrays.iter_mut().zip(arrays) {
        stored.1 = array;
    }
    Vector::invalid(name, level, CORRUPT, about, model.build())
}

fn put(array: &mut [u8], index: usize, value: u64) {
    array[8 * index..8 * index + 8].copy_from_slice(&value.to_le_bytes());
}

fn get(array: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(array[8 * index..8 * index + 8].try_into().unwrap())
}

fn index() -> Vec<Vector> {
    let last = |array: &Vec<u8>| array.len() / 8 - 1;
    vec![
        recoded("load", "offsets-start", "output offsets that do not start at 0", |arrays, _| {
            put(&mut arrays[2], 0, 1)
        }),
        recoded("load", "offsets-descend", "output offsets that descend", |arrays, _| {
            let second = get(&arrays[2], 2);
            put(&mut arrays[2], 1, second + 1);
        }),
        recoded("load", "offsets-end", "output offsets that end after the elements", |arrays, _| {
            let at = last(&arrays[2]);
            let end = get(&arrays[2], at);
            put(&mut arrays[2], at, end + 1);
        }),
        recoded("load", "offsets-end-early", "output offsets that end before the elements", |arrays, _| {
            let at = last(&arrays[2]);
            let end = get(&arrays[2], at);
            put(&mut arrays[2], at, end - 1);
        }),
        recoded("load", "offsets-huge", "an output offset of 2^64 - 1", |arrays, _| {
            put(&mut arrays[2], 1, HUGE)
        }),
        recoded("load", "offset-inside", "an inner output offset that is one too small", |arrays, _| {
            let first = get(&arrays[2], 1);
            put(&mut arrays[2], 1, first - 1);
        }),
        recoded("load", "gap-first", "gap(0) is 1", |arrays, _| arrays[1][0] |= 1),
        recoded(
            "load",
            "gap-of-thread-block",
            "a thread block that does not end where the next one starts",
            |arrays, _| {
                arrays[1][32] = arrays[1][32] & 0xF0 | (arrays[1][32] & 15) + 1;
            },
        ),
        recoded("verify", "gap-inside", "a wrong gap within a thread block", |arrays, _| {
            let gap = arrays[1][5] & 15;
            arrays[1][5] = arrays[1][5] & 0xF0 | (gap + 1);
        }),
        recoded("verify", "gap-unused-half", "the half byte after the last gap is not zero", |arrays, _| {
            *arrays[1].last_mut().unwrap() |= 0x10;
        }),
        recoded("load", "bit-count", "bit_count is one more than the codes have", |_, parameters| {
            parameters[2] += 1
        }),
        recoded("load", "bit-count-less", "bit_count ends within the last code", |_, parameters| {
            parameters[2] -= 1
        }),
        recoded("verify", "bits-after-end", "a bit after bit_count", |arrays, parameters| {
            arrays[3][(parameters[2] / 8) as usize] |= 1 << (parameters[2] % 8);
        }),
        recoded("verify", "bits-at-end", "the last bit of the bitstream, after bit_count", |arrays, _| {
            *arrays[3].last_mut().unwrap() |= 0x80;
        }),
        both_wrong(),
    ]
}

/// The weights are right, the index is not: each code has 8 bits, and a thread block starts one code late by its gap
/// and output offset alike.
fn both_wrong() -> Vector {
    let mut model =
        Model::new(&[Item::gap("w", &[1000], weights((0..1000).map(|at| at as u8)), (8, 64))], &[]);
    let tensor = model.tensor("w");
    tensor.arrays[1].1[32] += 8;
    put(&mut tensor.arrays[2].1, 1, 513);
    let about = "gap and output offset of a thread block skip a code, which the one before decodes";
    Vector::invalid("offset-and-gap", "verify", CORRUPT, about, model.build())
}

fn codes() -> Vec<Vector> {
    let lengths = |name: &str, about: &str, edit: &dyn Fn(&mut [u8])| {
        recoded("load", name, about, |arrays, _| edit(&mut arrays[0][..256]))
    };
    let unused = coded().tensors[0].arrays[0].1.iter().position(|&length| length == 0).unwrap();
    let shortest = coded().tensors[0].arrays[0].1[..256].iter().position(|&length| length == 1).unwrap();
    let single = |edit: &dyn Fn(&mut Tensor)| {
        let mut model = Model::new(&[Item::gap("w", &[100], weights(vec![127; 100]), (8, 64))], &[]);
        edit(model.tensor("w"));
        model.build()
    };
    let load = |name: &str, about: &str, bytes| Vector::invalid(name, "load", CORRUPT, about, bytes);
    vec![
        lengths("lengths-too-many", "code lengths whose codes do not fit", &|lengths| lengths[unused] = 3),
        lengths("lengths-too-few", "code lengths that leave codes unused", &|lengths| lengths[shortest] = 2),
        lengths("lengths-limit", "a code length of 17", &|lengths| lengths[unused] = 17),
        lengths("lengths-255", "a code length of 255", &|lengths| lengths[unused] = 255),
        lengths("lengths-none", "no code at all", &|lengths| lengths.fill(0)),
        load(
            "single-length",
            "a single exponent with a code of two bits",
            single(&|tensor| tensor.arrays[0].1[127] = 2),
        ),
        load("no-code", "a bit that starts no code", single(&|tensor| tensor.arrays[3].1[4] = 1)),
        recoded(
            "verify",
            "lut-entry",
            "a LUT entry that does not follow from the code lengths",
            |arrays, _| {
                arrays[0][256 + 2 * 200] ^= 1;
            },
        ),
        Vector::invalid(
            "lut-unused",
            "verify",
            CORRUPT,
            "a LUT entry that no code reaches and that is not 0",
            { single(&|tensor| tensor.arrays[0].1[256 + 2] = 1) },
        ),
        Vector::invalid("lut-more", "verify", CORRUPT, "more LUTs than follow from the code lengths", {
            remade(coded(), |model| model.tensor("w").arrays[0].1.extend([0; 512]))
        }),
        Vector::invalid("lut-fewer", "verify", CORRUPT, "fewer LUTs than follow from the code lengths", {
            remade(coded(), |model| {
                let codebook = &mut model.tensor("w").arrays[0].1;
                let short = codebook.len() - 512;
                assert!(short > 256, "there are several LUTs");
                codebook.truncate(short);
            })
        }),
    ]
}

/// Bytes whose checksums or hashes are wrong, and bytes that must be zero.
fn content() -> Vec<Vector> {
    let invalid =
        |name: &str, level: &str, about: &str, bytes| Vector::invalid(name, level, CORRUPT, about, bytes);
    // Sections of the plain model: raw in block 0, prefix, side.
    let flipped = |model: &Model, section: usize, byte: usize| {
        edited_of(model, |draft| draft.contents[section][byte] ^= 1)
    };
    let coded = coded();
    let padding = |section: usize, byte: usize| {
        let mut bytes = plain().build();
        let offset = plain().draft().directory.sections[section].offset.get() as usize;
        assert_eq!(bytes[offset + byte], 0);
        bytes[offset + byte] = 1;
        bytes
    };
    let mut skippable = plain();
    skippable.extra_sections.push((NONE, u32::MAX, b"new".to_vec()));
    vec![
        invalid("checksum-raw", "load", "a wrong byte of a raw tensor", flipped(&plain(), 0, 0)),
        invalid("checksum-codebook", "load", "a wrong byte of a codebook", flipped(&coded, 0, 0)),
        invalid("checksum-index", "load", "a wrong byte of a gap", flipped(&coded, 1, 3)),
        invalid("checksum-bitstream", "load", "a wrong byte of a bitstream", flipped(&coded, 2, 700)),
        invalid("checksum-plane", "load", "a wrong byte of a plane", flipped(&coded, 3, 700)),
        invalid("checksum-prefix", "verify", "a wrong byte of a prefix", flipped(&plain(), 1, 9)),
        invalid("checksum-side", "verify", "a wrong byte of a side file", flipped(&plain(), 2, 0)),
        invalid("checksum-unknown", "verify", "a wrong byte of a section to skip", flipped(&skippable, 3, 0)),
        invalid("zeros-between-arrays", "verify", "a byte between two arrays, under a right checksum", {
            edited(|draft| {
                draft.contents[0][255] = 1;
                draft.repair_checksums();
            })
        }),
        invalid("zeros-between-sections", "verify", "a byte between two sections", padding(0, 4095)),
        invalid(
            "zeros-before-directory",
            "verify",
            "a byte between the last section and the directory",
            padding(2, 3),
        ),
        invalid(
            "hash-of-tensor",
            "verify",
            "another hash of a tensor",
            edited(|draft| {
                draft.directory.tensors[0].hash[31] ^= 1;
            }),
        ),
        invalid("hash-of-coded-tensor", "verify", "a coded tensor of other weights than its hash says", {
            remade(coded.clone(), |model| model.tensor("w").arrays[4].1[100] ^= 0x80)
        }),
        invalid("hash-of-empty-tensor", "verify", "another hash of a tensor without bytes", {
            let items = [Item::raw("x", Dtype::U8, &[0], vec![])];
            remade(Model::new(&items, &[]), |model| model.tensors[0].hash[0] ^= 1)
        }),
        invalid(
            "hash-of-weights-file",
            "verify",
            "another hash of a weights file",
            remade(plain(), |model| {
                model.files[0].hash[0] ^= 1;
                model.identity = model.identity_of_files();
            }),
        ),
        invalid(
            "hash-of-side-file",
            "verify",
            "another hash of a side file",
            edited(|draft| {
                draft.directory.files[1].hash[0] ^= 1;
            }),
        ),
        invalid("identity", "verify", "another identity", remade(plain(), |model| model.identity[0] ^= 1)),
    ]
}

/// Section 7.
fn weights_files() -> Vec<Vector> {
    let items = || {
        vec![
            Item::raw("a", Dtype::U8, &[4], vec![1, 2, 3, 4]),
            Item::raw("b", Dtype::U8, &[4], vec![5, 6, 7, 8]),
            Item::raw("none", Dtype::U8, &[0], vec![]),
        ]
    };
    let invalid = |name: &str, about: &str, bytes| Vector::invalid(name, "verify", CORRUPT, about, bytes);
    // The directory of one model, the prefix of another; hashes and identity fit.
    let other_prefix = |prefix: Vec<u8>| {
        let mut model = Model::new(&items(), &[]);
        let shift = prefix.len() as u64;
        let before = model.files[0].arrays[0].1.len() as u64;
        model.files[0].arrays[0].1 = prefix;
        model.tensors.iter_mut().for_each(|tensor| tensor.file_offset = tensor.file_offset + shift - before);
        model.refresh();
        model.build()
    };
    let header_of = |edit: &dyn Fn(&mut Vec<Item>)| {
        let mut items = items();
        edit(&mut items);
        other_prefix(crate::container::prefix(items.iter()))
    };
    let moved = |at: usize, by: i64| {
        edited_of(&Model::new(&items(), &[]), |draft| {
            let tensor = &mut draft.directory.tensors[at];
            tensor.file_offset = tensor.file_offset.get().wrapping_add_signed(by).into();
        })
    };
    let whole = crate::container::prefix(items().iter());
    let mut wrong_length = whole.clone();
    wrong_length[0] -= 8;
    vec![
        invalid("tensors-overlap", "two tensors of a file share a byte", moved(1, -1)),
        invalid("tensor-in-prefix", "a tensor that starts within the prefix", moved(0, -1)),
        invalid("empty-tensor-in-prefix", "a tensor without bytes within the prefix", moved(2, -9)),
        invalid("tensors-leave-hole", "bytes of a file that no tensor has", {
            remade(Model::new(&items(), &[]), |model| {
                model.files[0].length += 1;
                model.tensors[1].file_offset += 1;
                model.identity = model.identity_of_files();
            })
        }),
        invalid("tensors-end-early", "bytes at the end of a file that no tensor has", {
            remade(Model::new(&items(), &[]), |model| {
                model.files[0].length = 1 << 62;
                model.identity = model.identity_of_files();
            })
        }),
        invalid("tensors-swapped", "a directory with two tensors of one size in each other's places", {
            remade(Model::new(&items(), &[]), |model| {
                let [first, second] = [0, 1].map(|at| model.tensors[at].file_offset);
                (model.tensors[0].file_offset, model.tensors[1].file_offset) = (second, first);
                model.refresh();
            })
        }),
        invalid("prefix-name", "another name in the header", header_of(&|items| items[1].name = "B".into())),
        invalid(
            "prefix-dtype",
            "another dtype in the header",
            header_of(&|items| items[1].dtype.1 = "I8".into()),
        ),
        invalid(
            "prefix-shape",
            "another shape in the header",
            header_of(&|items| items[1].shape = vec![2, 2]),
        ),
        invalid("prefix-order", "other data_offsets in the header", header_of(&|items| items.swap(0, 1))),
        invalid(
            "prefix-tensor-missing",
            "a tensor that is not in the header",
            header_of(&|items| drop(items.pop())),
        ),
        invalid(
            "prefix-tensor-more",
            "a tensor that is only in the header",
            header_of(&|items| {
                items.push(Item::raw("more", Dtype::U8, &[0], vec![]));
            }),
        ),
        invalid(
            "prefix-length",
            "a prefix with a length of its own that is too small",
            other_prefix(wrong_length),
        ),
        invalid("prefix-no-json", "a prefix that is no JSON", other_prefix(with_length("{\"a\":"))),
        invalid("prefix-empty", "a prefix of four bytes", other_prefix(vec![0; 4])),
        invalid("prefix-duplicate-key", "a header with one tensor twice", {
            let json = std::str::from_utf8(&whole[8..]).unwrap().trim_end();
            let again = r#","a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
            other_prefix(with_length(&(json.strip_suffix('}').unwrap().to_owned() + again)))
        }),
    ]
}
