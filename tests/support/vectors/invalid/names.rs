//! Section 3: text, files and their paths.

use df11::{Dtype, hazmat::format::records::SECTION_SIDE};

use super::{HUGE, LIMIT, UNSUPPORTED, edited_of, of_draft, of_model, open, plain, remade};
use crate::container::{File, Item, Model, with_length};
use crate::vectors::Vector;

pub(super) fn text() -> Vec<Vector> {
    let named = |name: &str, about: &str, text: &[u8]| {
        of_model(name, about, |model| model.tensors[1].name = text.into())
    };
    let last_length = |name: &str, about: &str, length: u64| {
        of_draft(name, about, |draft| draft.directory.tensors[1].name_length = length.into())
    };
    let long = vec![b'n'; 4097];
    vec![
        of_model("name-empty", "a tensor without a name", |model| model.tensors[0].name.clear()),
        named("name-limit", "a name of 4097 bytes", &long).expecting(LIMIT),
        last_length("name-length-overflow", "name_length 2^64 - 1", HUGE).expecting(LIMIT),
        last_length("name-past-text", "name_length beyond text", 300),
        named("name-nul", "a NUL in a name", b"b\0c"),
        named("name-not-utf8", "a byte that no UTF-8 text has", b"b\xFFc"),
        named("name-overlong", "an overlong form of `/`", b"b\xC0\xAFc"),
        named("name-surrogate", "a surrogate in UTF-8", b"b\xED\xA0\x80c"),
        of_draft(
            "name-cut-in-character",
            "names cut within a character, while the text is UTF-8",
            |draft| {
                draft.directory.text =
                    draft.directory.text.strip_suffix("abé".as_bytes()).unwrap().to_vec();
                draft.directory.text.extend("éb".as_bytes());
                draft.directory.tensors[1].name_length = 2.into();
                draft.place_text();
            },
        ),
        of_draft("names-overlap", "two names share bytes of text", |draft| {
            draft.directory.text.remove(0);
            draft.directory.files[0].path_length =
                (draft.directory.files[0].path_length.get() - 1).into();
            draft.place_text();
            let shared = draft.directory.tensors[1].name_offset.get() - 1;
            draft.directory.tensors[1].name_offset = shared.into();
        }),
        of_draft("name-offset-overflow", "name_offset 2^64 - 1", |draft| {
            draft.directory.tensors[1].name_offset = HUGE.into();
        }),
        of_draft("text-left-over", "text after the last name", |draft| {
            draft.directory.text.push(b'x');
        }),
        of_draft("text-first", "text before the first path", |draft| {
            draft.directory.text.insert(0, b'x');
            draft.place_text();
            let directory = &mut draft.directory;
            directory.files.iter_mut().for_each(|file| file.path_offset += 1);
            directory.blocks.iter_mut().for_each(|block| block.name_offset += 1);
            directory.tensors.iter_mut().for_each(|tensor| tensor.name_offset += 1);
        }),
        named("names-equal", "two tensors with one name", b"a"),
        named("names-unsorted", "tensors that do not ascend by name", b"A"),
        of_model("block-names-equal", "two blocks with one name", |model| {
            model.blocks.push(model.blocks[0].clone());
        }),
    ]
}

/// Metadata, which stands in text too.
pub(super) fn metadata() -> Vec<Vector> {
    let entries = |name: &str, about: &str, entries: &[(&[u8], &[u8])]| {
        let entries = entries.iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect();
        of_model(name, about, |model| model.metadata = entries)
    };
    let value = vec![b'v'; 65_536];
    let keys: Vec<String> = (0..16).map(|at| format!("a.{at:02}")).collect();
    let much: Vec<(&[u8], &[u8])> = keys.iter().map(|key| (key.as_bytes(), &value[..])).collect();
    let long = [&b"a."[..], &[b'k'; 254]].concat();
    vec![
        entries("metadata-key-empty", "a key without bytes", &[(b"", b"x")]),
        entries("metadata-key-limit", "a key of 256 bytes", &[(&long, b"x")]).expecting(LIMIT),
        entries(
            "metadata-value-limit",
            "a value of 65537 bytes",
            &[(b"a.b", &[&value[..], b"v"].concat())],
        )
        .expecting(LIMIT),
        entries("metadata-limit", "keys and values of more than 1 MiB together", &much)
            .expecting(LIMIT),
        entries("metadata-unsorted", "keys that do not ascend", &[(b"b.b", b""), (b"a.b", b"")]),
        entries("metadata-equal", "one key twice", &[(b"a.b", b"1"), (b"a.b", b"2")]),
        entries("metadata-nul", "a NUL in a value", &[(b"a.b", b"1\x002")]),
        entries("metadata-not-utf8", "a value that is not UTF-8", &[(b"a.b", b"\xFF")]),
        open("metadata-order", "a value whose text stands before its key's", {
            let mut model = plain();
            model.metadata = vec![(b"a.b".to_vec(), b"v".to_vec())];
            edited_of(&model, |draft| {
                let entry = &mut draft.directory.metadata[0];
                entry.value_offset = entry.key_offset;
                entry.key_offset += 1;
            })
        }),
        open("metadata-in-later-shard", "metadata in a shard that is not the first", {
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
    let with = |name: &str, about: &str, files: &[File]| {
        let bytes = remade(without_side_files(), |model| {
            model.files.extend(files.iter().cloned());
            model.identity = model.identity_of_files();
        });
        open(name, about, bytes)
    };
    let stored = vec![(SECTION_SIDE, b"{}".to_vec())];
    let none = |path: &str| File { hash: [0; 32], ..File::beside(path, b"") };
    let many: Vec<File> = (0..10_000).map(|at| none(&format!("{at:04}"))).collect();
    let deep =
        |at: usize| none(&[format!("{at:03}").as_str(), &["f"; 30].join("/"), "x"].join("/"));
    let folders: Vec<File> = (0..323).map(deep).collect();
    vec![
        with(
            "beside-with-array",
            "a side file beside the container, with an array",
            &[File { arrays: stored, ..File::beside("config.json", b"{}") }],
        ),
        with(
            "beside-container",
            "a side file beside the container, with the name of a shard",
            &[File::beside("other.df11", b"{}")],
        ),
        with(
            "beside-first",
            "a side file beside the container, before one that is stored",
            &[File::beside("a", b"1"), File::side("b", b"2")],
        ),
        with(
            "beside-twice",
            "one path stored, and beside the container too",
            &[File::side("a", b"1"), File::beside("a", b"1")],
        ),
        with(
            "beside-in-a-file",
            "a path beside the container, below that of a stored file",
            &[File::side("a", b"1"), File::beside("a/b", b"1")],
        ),
        of_model(
            "side-file-in-later-shard",
            "a side file in a shard that is not the first",
            |model| model.shard = (1, 2),
        ),
        open("beside-in-later-shard", "the same, beside the container", {
            remade(without_side_files(), |model| {
                model.files.push(File::beside("config.json", b"{}"));
                model.shard = (1, 2);
            })
        }),
        with("files-limit", "10001 files", &many).expecting(LIMIT),
        with("folders-limit", "10013 folders", &folders).expecting(LIMIT),
    ]
}

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn files() -> Vec<Vector> {
    let path = |name: &str, about: &str, path: &str| {
        let name = format!("path-{name}");
        of_model(&name, about, |model| model.files[1].path = path.into())
    };
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
        of_model("path-limit", "a path of 4097 bytes", |model| {
            model.files[1].path = vec![b'p'; 4097];
        })
        .expecting(LIMIT),
        of_model("path-component-limit", "a component of 256 bytes", |model| {
            model.files[1].path = [&b"a/"[..], &[b'p'; 256]].concat();
        })
        .expecting(LIMIT),
        of_model("path-components-limit", "33 components", |model| {
            model.files[1].path = ["a"; 33].join("/").into();
        })
        .expecting(LIMIT),
        of_model("path-empty", "an empty path", |model| model.files[1].path.clear()),
    ];
    let two_sides = |name: &str, about: &str, first: &str, second: &str| {
        of_model(name, about, |model| {
            model.files[1].path = first.into();
            model.files.push(File::side(second, b"xyz"));
        })
    };
    vectors.extend([
        two_sides("paths-equal", "two side files with one path", "a", "a"),
        two_sides("paths-unsorted", "side files that do not ascend by path", "b", "a"),
        of_model(
            "path-folder-apart",
            "a path below that of another file, with one between",
            |model| {
                model.files[1].path = b"a".into();
                model.files.extend([File::side("a-b", b"x"), File::side("a/b", b"y")]);
            },
        ),
        of_model("files-side-first", "a side file before a weights file", |model| {
            model.files.swap(0, 1);
            model.tensors.iter_mut().for_each(|tensor| tensor.file = 1);
        }),
        of_draft("file-kind", "an unknown kind of file", |draft| {
            draft.directory.files[1].kind = 3.into();
        })
        .expecting(UNSUPPORTED),
        open(
            "file-kind-before-corrupt",
            "an unknown kind of file, with a path that only it may have",
            {
                let mut model = plain();
                model.files[1].path = b"../x".into();
                edited_of(&model, |draft| draft.directory.files[1].kind = 3.into())
            },
        )
        .expecting(UNSUPPORTED),
        of_draft("file-reserved", "reserved is not zero", |draft| {
            draft.directory.files[0].reserved = 1.into();
        }),
        of_draft("side-file-length", "a side file longer than its array", |draft| {
            draft.directory.files[1].length += 1;
        }),
        of_draft("side-file-shorter", "a side file shorter than its array", |draft| {
            draft.directory.files[1].length -= 1;
        }),
        of_draft("empty-side-file-with-array", "a side file of length 0 with an array", |draft| {
            draft.directory.files[1].length = 0.into();
        }),
        of_model(
            "side-file-without-array",
            "a side file of some length without an array",
            |model| {
                model.files.push(File { arrays: vec![], ..File::side("more.json", b"{}") });
            },
        ),
        of_model("weights-file-without-prefix", "a weights file without an array", |model| {
            model.files[0].arrays.clear();
        }),
        of_model("weights-file-two-arrays", "a weights file with two arrays", |model| {
            let stored = model.files[0].arrays[0].clone();
            model.files[0].arrays.push(stored);
        }),
        open("prefix-longer-than-file", "a prefix longer than its file, which has no tensors", {
            let mut model = Model::new(&[Item::raw("x", Dtype::U8, &[0], vec![])], &[]);
            (model.tensors, model.blocks) = (vec![], vec![]);
            model.files[0].arrays[0].1 = with_length("{}");
            model.refresh();
            model.files[0].length -= 1;
            model.build()
        }),
        of_model("prefix-in-side-section", "a prefix in the side section", |model| {
            model.files[0].arrays[0].0 = SECTION_SIDE;
        }),
    ]);
    vectors
}
