//! Section 3: shards, text and paths, files.

use df11::{
    Dtype,
    hazmat::format::{Directory, records::SECTION_SIDE},
};

use super::{HUGE, Vectors, plain};
use crate::{
    container::{File, Item, Model, with_length},
    vectors::valid::many_files,
};

pub(super) fn make(to: &mut Vectors) {
    shards(to);
    names(to);
    metadata(to);
    paths(to);
    files(to);
    files_beside(to);
}

fn shards(to: &mut Vectors) {
    to.of(&plain()).directories(&[
        ("shard-count-limit", |d| d.shard.shard_count = 100_001.into()),
        ("shard-count-zero", |d| d.shard.shard_count = 0.into()),
        ("shard-index", |d| (d.shard.shard_index, d.shard.shard_count) = (2.into(), 2.into())),
        ("checksums-missing", |d| d.checksums.truncate(2)),
        ("checksums-left-over", |d| d.checksums.push(0.into())),
    ]);
    to.of(&plain()).models(&[("side-file-in-later-shard", |model| model.shard = (1, 2))]);
    let mut later = plain();
    later.files.truncate(1);
    later.shard = (1, 2);
    to.of(&later).models(&[
        ("beside-in-later-shard", |model| model.files.push(File::beside("config.json", b"{}"))),
        ("metadata-in-later-shard", |model| {
            model.metadata = vec![(b"a.b".into(), b"v".into())];
        }),
    ]);
}

/// Names and paths that lie back to back, of these lengths.
fn place_text(directory: &mut Directory) {
    let mut offset = 0;
    let mut next = |length: u64| {
        offset += length;
        (offset - length).into()
    };
    directory.files.iter_mut().for_each(|file| file.path_offset = next(file.path_length.get()));
    directory.blocks.iter_mut().for_each(|block| block.name_offset = next(block.name_length.get()));
    for tensor in &mut directory.tensors {
        tensor.name_offset = next(tensor.name_length.get());
    }
}

fn names(to: &mut Vectors) {
    to.of(&plain()).models(&[
        ("name-empty", |model| model.tensors[0].name.clear()),
        ("name-limit", |model| model.tensors[1].name = vec![b'n'; 4097]),
        ("name-nul", |model| model.tensors[1].name = b"b\0c".into()),
        ("name-not-utf8", |model| model.tensors[1].name = b"b\xFFc".into()),
        // An overlong `/`.
        ("name-overlong", |model| model.tensors[1].name = b"b\xC0\xAFc".into()),
        ("name-surrogate", |model| model.tensors[1].name = b"b\xED\xA0\x80c".into()),
        ("names-equal", |model| model.tensors[1].name = b"a".into()),
        ("names-unsorted", |model| model.tensors[1].name = b"A".into()),
        ("block-name-empty", |model| model.blocks[0] = b"".into()),
        ("block-name-limit", |model| model.blocks[0] = vec![b'n'; 4097]),
        ("block-name-not-utf8", |model| model.blocks[0] = b"b\xFFc".into()),
        ("block-names-equal", |model| model.blocks.push(model.blocks[0].clone())),
    ]);
    to.of(&plain()).directories(&[
        ("name-length-overflow", |d| d.tensors[1].name_length = HUGE.into()),
        ("name-past-text", |d| d.tensors[1].name_length = 300.into()),
        ("name-offset-overflow", |d| d.tensors[1].name_offset = HUGE.into()),
        ("name-cut-in-character", |d| {
            d.text = d.text.strip_suffix("abé".as_bytes()).unwrap().to_vec();
            d.text.extend("éb".as_bytes());
            d.tensors[1].name_length = 2.into();
            place_text(d);
        }),
        ("names-overlap", |d| {
            d.text.remove(0);
            d.files[0].path_length -= 1;
            place_text(d);
            d.tensors[1].name_offset -= 1;
        }),
        ("text-left-over", |d| d.text.push(b'x')),
        ("text-first", |d| {
            d.text.insert(0, b'x');
            place_text(d);
            d.files.iter_mut().for_each(|file| file.path_offset += 1);
            d.blocks.iter_mut().for_each(|block| block.name_offset += 1);
            d.tensors.iter_mut().for_each(|tensor| tensor.name_offset += 1);
        }),
    ]);
}

/// Keys and values, which stand in text too.
type Entries<'a> = &'a [(&'a [u8], &'a [u8])];

fn metadata(to: &mut Vectors) {
    let value = vec![b'v'; 65_536];
    let long = [&b"a."[..], &[b'k'; 254]].concat();
    let keys: Vec<String> = (0..16).map(|at| format!("a.{at:02}")).collect();
    let much: Vec<(&[u8], &[u8])> = keys.iter().map(|key| (key.as_bytes(), &value[..])).collect();
    let rows: [(&str, Entries<'_>); 8] = [
        ("key-empty", &[(b"", b"x")]),
        ("key-limit", &[(&long, b"x")]),
        ("value-limit", &[(b"a.b", &[&value[..], b"v"].concat())]),
        ("limit", &much),
        ("unsorted", &[(b"b.b", b""), (b"a.b", b"")]),
        ("equal", &[(b"a.b", b"1"), (b"a.b", b"2")]),
        ("nul", &[(b"a.b", b"1\x002")]),
        ("not-utf8", &[(b"a.b", b"\xFF")]),
    ];
    let of = |entries: Entries<'_>| {
        let metadata = entries.iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect();
        Model { metadata, ..plain() }
    };
    for (name, entries) in rows {
        to.invalid(&format!("metadata-{name}"), of(entries).build());
    }
    to.of(&of(&[(b"a.b", b"v")])).directories(&[("metadata-order", |d| {
        d.metadata[0].value_offset = d.metadata[0].key_offset;
        d.metadata[0].key_offset += 1;
    })]);
}

fn paths(to: &mut Vectors) {
    let long = [&b"a/"[..], &[b'p'; 256]].concat();
    let components = ["a"; 33].join("/");
    let paths: [(&str, &[u8]); 19] = [
        ("parent", b"../config.json"),
        ("parent-inside", b"a/../config.json"),
        ("parent-last", b"a/.."),
        ("absolute", b"/config.json"),
        ("empty", b""),
        ("empty-component", b"a//config.json"),
        ("trailing-slash", b"config/"),
        ("dot", b"./config.json"),
        // Some systems take it for a slash, and a colon for a drive or a stream.
        ("backslash", b"a\\config.json"),
        ("colon", b"c:config.json"),
        ("control", b"config\n.json"),
        ("delete", b"config\x7F.json"),
        ("control-80", b"config\xC2\x80.json"),
        ("control-9f", b"config\xC2\x9F.json"),
        ("of-weights", b"model.safetensors"),
        ("in-a-file", b"model.safetensors/config.json"),
        ("limit", &[b'p'; 4097]),
        ("component-limit", &long),
        ("components-limit", components.as_bytes()),
    ];
    for (name, path) in paths {
        let mut model = plain();
        model.files[1].path = path.into();
        to.invalid(&format!("path-{name}"), model.build());
    }
    to.of(&plain()).models(&[
        ("paths-equal", |model| {
            model.files[1].path = b"a".into();
            model.files.push(File::side("a", b"xyz"));
        }),
        ("paths-unsorted", |model| {
            model.files[1].path = b"b".into();
            model.files.push(File::side("a", b"xyz"));
        }),
        ("path-folder-apart", |model| {
            model.files[1].path = b"a".into();
            model.files.extend([File::side("a-b", b"x"), File::side("a/b", b"y")]);
        }),
    ]);
}

fn files(to: &mut Vectors) {
    to.of(&plain()).models(&[
        ("files-side-first", |model| {
            model.files.swap(0, 1);
            model.tensors.iter_mut().for_each(|tensor| tensor.file = 1);
        }),
        // Only that kind may have such a path.
        ("file-kind-before-corrupt", |model| {
            (model.files[1].path, model.files[1].kind) = (b"../x".into(), 3);
        }),
        ("side-file-without-array", |model| {
            model.files.push(File { arrays: vec![], ..File::side("more.json", b"{}") });
        }),
        ("weights-file-without-prefix", |model| model.files[0].arrays.clear()),
        ("weights-file-two-arrays", |model| {
            let stored = model.files[0].arrays[0].clone();
            model.files[0].arrays.push(stored);
        }),
        ("prefix-longer-than-file", |model| {
            *model = Model::new(&[Item::raw("x", Dtype::U8, &[0], vec![])], &[]);
            (model.tensors, model.blocks) = (vec![], vec![]);
            model.set_prefix(with_length("{}"));
            model.files[0].length -= 1;
        }),
        ("prefix-in-side-section", |model| model.files[0].arrays[0].0 = SECTION_SIDE),
    ]);
    to.of(&plain()).directories(&[
        ("file-kind", |d| d.files[1].kind = 3.into()),
        ("file-reserved", |d| d.files[0].reserved = 1.into()),
        ("side-file-length", |d| d.files[1].length += 1),
        ("side-file-shorter", |d| d.files[1].length -= 1),
        ("empty-side-file-with-array", |d| d.files[1].length = 0.into()),
        ("first-array-of-file", |d| d.files[1].first_array += 1),
    ]);
}

/// Side files beside the container, and how many files and folders there may be.
fn files_beside(to: &mut Vectors) {
    let mut with = |name: &str, files: Vec<File>| {
        let mut model = plain();
        model.files.truncate(1);
        model.files.extend(files);
        model.identity = model.identity_of_files();
        to.invalid(name, model.build());
    };
    let stored = vec![(SECTION_SIDE, b"{}".to_vec())];
    let with_array = File { arrays: stored, ..File::beside("config.json", b"{}") };
    with("beside-with-array", vec![with_array]);
    // The name of a shard.
    with("beside-container", vec![File::beside("other.df11", b"{}")]);
    with("beside-first", vec![File::beside("a", b"1"), File::side("b", b"2")]);
    with("beside-twice", vec![File::side("a", b"1"), File::beside("a", b"1")]);
    with("beside-in-a-file", vec![File::side("a", b"1"), File::beside("a/b", b"1")]);
    with("files-limit", (0..10_000).map(|at| File::unread(&format!("{at:04}"))).collect());
    let deep = |at| File::unread(&format!("{at:03}/{}/x", ["f"; 30].join("/")));
    with("folders-limit", (0..323).map(deep).collect());
    to.invalid("folders-limit-exact", many_files(10_001).build());
}
