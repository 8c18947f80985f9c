//! Section 3: text, files and their paths.

use df11::{Dtype, hazmat::format::records::SECTION_SIDE};

use super::{CORRUPT, HUGE, LIMIT, UNSUPPORTED, edited, edited_of, open, plain, remade};
use crate::container::{Draft, File, Item, Model, with_length};
use crate::vectors::Vector;

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn text() -> Vec<Vector> {
    let named = |name: &[u8]| remade(plain(), |model| model.tensors[1].name = name.into());
    let last_length =
        |length: u64| edited(|draft| draft.directory.tensors[1].name_length = length.into());
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
                draft.directory.text =
                    draft.directory.text.strip_suffix("abé".as_bytes()).unwrap().to_vec();
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

/// Metadata, which stands in text too.
pub(super) fn metadata() -> Vec<Vector> {
    let entries = |entries: &[(&[u8], &[u8])]| {
        let entries = entries.iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect();
        remade(plain(), |model| model.metadata = entries)
    };
    let value = vec![b'v'; 65_536];
    let keys: Vec<String> = (0..16).map(|at| format!("a.{at:02}")).collect();
    let much: Vec<(&[u8], &[u8])> = keys.iter().map(|key| (key.as_bytes(), &value[..])).collect();
    let long = [&b"a."[..], &[b'k'; 254]].concat();
    vec![
        open("metadata-key-empty", CORRUPT, "a key without bytes", entries(&[(b"", b"x")])),
        open("metadata-key-limit", LIMIT, "a key of 256 bytes", entries(&[(&long, b"x")])),
        open("metadata-value-limit", LIMIT, "a value of 65537 bytes", {
            entries(&[(b"a.b", &[&value[..], b"v"].concat())])
        }),
        open(
            "metadata-limit",
            LIMIT,
            "keys and values of more than 1 MiB together",
            entries(&much),
        ),
        open(
            "metadata-unsorted",
            CORRUPT,
            "keys that do not ascend",
            entries(&[(b"b.b", b""), (b"a.b", b"")]),
        ),
        open(
            "metadata-equal",
            CORRUPT,
            "one key twice",
            entries(&[(b"a.b", b"1"), (b"a.b", b"2")]),
        ),
        open("metadata-nul", CORRUPT, "a NUL in a value", entries(&[(b"a.b", b"1\x002")])),
        open(
            "metadata-not-utf8",
            CORRUPT,
            "a value that is not UTF-8",
            entries(&[(b"a.b", b"\xFF")]),
        ),
        open("metadata-order", CORRUPT, "a value whose text stands before its key's", {
            let mut model = plain();
            model.metadata = vec![(b"a.b".to_vec(), b"v".to_vec())];
            edited_of(&model, |draft| {
                let entry = &mut draft.directory.metadata[0];
                entry.value_offset = entry.key_offset;
                entry.key_offset += 1;
            })
        }),
        open("metadata-in-later-shard", CORRUPT, "metadata in a shard that is not the first", {
            remade(without_side_files(), |model| {
                model.shard = (1, 2);
                model.metadata = vec![(b"a.b".to_vec(), b"v".to_vec())];
            })
        }),
    ]
}

fn without_side_files() -> Model {
    let mut model = plain();
    model.files.truncate(1);
    model
}

/// Side files beside the container, and how many files and folders there may be.
pub(super) fn beside() -> Vec<Vector> {
    let with = |files: &[File]| {
        remade(without_side_files(), |model| {
            model.files.extend(files.iter().cloned());
            model.identity = model.identity_of_files();
        })
    };
    let stored = vec![(SECTION_SIDE, b"{}".to_vec())];
    let none = |path: &str| File { hash: [0; 32], ..File::beside(path, b"") };
    let many: Vec<File> = (0..10_000).map(|at| none(&format!("{at:04}"))).collect();
    let deep =
        |at: usize| none(&[format!("{at:03}").as_str(), &["f"; 30].join("/"), "x"].join("/"));
    let folders: Vec<File> = (0..323).map(deep).collect();
    vec![
        open("beside-with-array", CORRUPT, "a side file beside the container, with an array", {
            with(&[File { arrays: stored, ..File::beside("config.json", b"{}") }])
        }),
        open(
            "beside-container",
            CORRUPT,
            "a side file beside the container, with the name of a shard",
            with(&[File::beside("other.df11", b"{}")]),
        ),
        open(
            "beside-first",
            CORRUPT,
            "a side file beside the container, before one that is stored",
            with(&[File::beside("a", b"1"), File::side("b", b"2")]),
        ),
        open("beside-twice", CORRUPT, "one path stored, and beside the container too", {
            with(&[File::side("a", b"1"), File::beside("a", b"1")])
        }),
        open(
            "beside-in-a-file",
            CORRUPT,
            "a path beside the container, below that of a stored file",
            with(&[File::side("a", b"1"), File::beside("a/b", b"1")]),
        ),
        open(
            "side-file-in-later-shard",
            CORRUPT,
            "a side file in a shard that is not the first",
            remade(plain(), |model| model.shard = (1, 2)),
        ),
        open("beside-in-later-shard", CORRUPT, "the same, beside the container", {
            remade(without_side_files(), |model| {
                model.files.push(File::beside("config.json", b"{}"));
                model.shard = (1, 2);
            })
        }),
        open("files-limit", LIMIT, "10001 files", with(&many)),
        open("folders-limit", LIMIT, "10013 folders", with(&folders)),
    ]
}

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn files() -> Vec<Vector> {
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
        open("path-component-limit", LIMIT, "a component of 256 bytes", {
            remade(plain(), |model| model.files[1].path = [&b"a/"[..], &[b'p'; 256]].concat())
        }),
        open("path-components-limit", LIMIT, "33 components", {
            remade(plain(), |model| model.files[1].path = ["a"; 33].join("/").into())
        }),
        open(
            "path-empty",
            CORRUPT,
            "an empty path",
            remade(plain(), |model| model.files[1].path.clear()),
        ),
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
        open(
            "paths-unsorted",
            CORRUPT,
            "side files that do not ascend by path",
            two_sides("b", "a"),
        ),
        open(
            "path-folder-apart",
            CORRUPT,
            "a path below that of another file, with one between",
            {
                remade(plain(), |model| {
                    model.files[1].path = b"a".into();
                    model.files.extend([File::side("a-b", b"x"), File::side("a/b", b"y")]);
                })
            },
        ),
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
            file(&|draft| draft.directory.files[1].kind = 3.into()),
        ),
        open(
            "file-kind-before-corrupt",
            UNSUPPORTED,
            "an unknown kind of file, with a path that only it may have",
            {
                let mut model = plain();
                model.files[1].path = b"../x".into();
                edited_of(&model, |draft| draft.directory.files[1].kind = 3.into())
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
        open(
            "prefix-longer-than-file",
            CORRUPT,
            "a prefix longer than its file, which has no tensors",
            {
                let mut model = Model::new(&[Item::raw("x", Dtype::U8, &[0], vec![])], &[]);
                (model.tensors, model.blocks) = (vec![], vec![]);
                model.files[0].arrays[0].1 = with_length("{}");
                model.refresh();
                model.files[0].length -= 1;
                model.build()
            },
        ),
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
