//! Input: single files and folders. The fuzz target `safetensors_in` shows that the verdict on any
//! header agrees with the safetensors crate.

use std::{fs, path::Path, sync::Arc};

use df11::{Dtype, Error, Result, Source, source::WeightsFile};

use crate::files::check_error;

fn file(json: &str, data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.resize(bytes.len() + data, 0x5a);
    bytes
}

fn parse(bytes: Vec<u8>) -> Result<WeightsFile> {
    WeightsFile::parse("x.safetensors", Arc::new(bytes))
}

fn entry(name: &str, shape: &str, from: u64, to: u64) -> String {
    format!(r#""{name}":{{"dtype":"BF16","shape":{shape},"data_offsets":[{from},{to}]}}"#)
}

fn one(name: &str) -> Vec<u8> {
    file(&format!("{{{}}}", entry(name, "[1]", 0, 2)), 2)
}

#[test]
fn tensors_come_in_the_order_of_their_data() {
    let json = format!(
        "{{{},\"__metadata__\":{{\"format\":\"pt\"}},{},{},{}}}   ",
        entry("b", "[2,1]", 2, 6),
        entry("../a", "[]", 0, 2),
        entry("z", "[0,7]", 6, 6),
        entry("é", "[3,0]", 6, 6)
    );
    let weights = parse(file(&json, 6)).unwrap();
    let start = 8 + json.len() as u64;
    let found: Vec<_> =
        weights.tensors.iter().map(|t| (t.name.as_str(), t.offset - start, t.length)).collect();
    assert_eq!(found, [("../a", 0, 2), ("b", 2, 4), ("z", 6, 0), ("é", 6, 0)]);
    assert_eq!(
        (weights.tensors[1].dtype, &weights.tensors[1].shape[..]),
        (Dtype::BF16, &[2, 1][..])
    );
    assert_eq!((weights.prefix.len() as u64, weights.length), (start, start + 6));
    let mut data = [0; 6];
    weights.read_exact_at(start, &mut data).unwrap();
    assert_eq!(data, [0x5a; 6]);
    check_error(weights.read_exact_at(start + 1, &mut data), "Io", "x.safetensors");
}

#[test]
fn files_without_tensors_are_valid() {
    for json in ["{}", "{}  \n", r#"{"__metadata__":{}}"#, r#"{"__metadata__":null}"#] {
        assert!(parse(file(json, 0)).unwrap().tensors.is_empty());
    }
    check_error(parse(Vec::new()), "Corrupt", "truncated: 0 of at least 8 bytes");
    check_error(parse(vec![0; 8]), "Corrupt", "x.safetensors, byte 8");
}

#[test]
fn every_truncation_and_extension_is_found() {
    let whole = one("a");
    for length in 0..whole.len() {
        check_error(parse(whole[..length].to_vec()), "Corrupt", "download the file again");
    }
    let mut longer = whole;
    longer.push(0);
    check_error(parse(longer), "Corrupt", "1 bytes follow the last tensor");
}

/// Messages for some inputs of the fuzz target.
#[test]
fn contradictions_are_corrupt() {
    let a = entry("a", "[1]", 0, 2);
    check_error(parse(file(&format!("{{{a},{a}}}"), 2)), "Corrupt", "occurs twice");
    let hole = format!("{{{a},{}}}", entry("b", "[1]", 4, 6));
    check_error(parse(file(&hole, 6)), "Corrupt", "x.safetensors");
    for json in ["", "[]", "null", "{", "{}x", "{}\0", r#"{"a":1}"#, r#"{"a":{"dtype":"BF16"}}"#] {
        check_error(parse(file(json, 0)), "Corrupt", "not a valid safetensors header");
    }
    let json = r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#;
    check_error(parse(file(json, 1)), "Corrupt", "x.safetensors");
    let mut bytes = file("{\"a\": \"?\"}", 0);
    bytes[15] = 0xff;
    check_error(parse(bytes), "Corrupt", "byte 15: the header is not UTF-8");
    let deep = format!("{}{}", r#"{"a":"#.repeat(50_000), "[".repeat(50_000));
    check_error(parse(file(&deep, 0)), "Corrupt", "recursion limit");
}

#[test]
fn limits_are_told_apart() {
    let long = |length| file(&format!("{{{}}}", entry(&"n".repeat(length), "[1]", 0, 2)), 2);
    parse(long(4096)).unwrap();
    check_error(parse(long(4097)), "Limit", "4097");
    let shaped = |shape| file(&format!("{{{}}}", entry("a", shape, 0, 2)), 2);
    parse(shaped("[1,1,1,1,1,1,1,1]")).unwrap();
    check_error(parse(shaped("[1,1,1,1,1,1,1,1,1]")), "Limit", "dimensions");
    for shape in ["[9223372036854775808,4,0]", "[0,9223372036854775808,4]", "[9223372036854775808]"]
    {
        check_error(
            parse(file(&format!("{{{}}}", entry("a", shape, 0, 0)), 0)),
            "Limit",
            "x.safetensors",
        );
    }
    for header in [100_000_001_u64, u64::MAX] {
        check_error(parse(header.to_le_bytes().to_vec()), "Limit", "100000000");
        let with = |first| [&header.to_le_bytes()[..], &[first]].concat();
        check_error(parse(with(b'{')), "Limit", "100000000");
        check_error(
            parse(with(b' ')),
            "Corrupt",
            "x.safetensors, byte 8: this is not a safetensors file; name one",
        );
    }
    check_error(
        parse(100_000_000_u64.to_le_bytes().to_vec()),
        "Corrupt",
        "8 of at least 100000008 bytes",
    );
}

#[test]
fn what_a_container_cannot_hold_is_unsupported() {
    check_error(parse(one("a\\u0000b")), "Unsupported", "rename");
    check_error(parse(one("")), "Unsupported", "rename");
    let json = r#"{"a":{"dtype":"F7","shape":[1],"data_offsets":[0,2]}}"#;
    check_error(parse(file(json, 2)), "Unsupported", "the dtype \"F7\" of tensor \"a\"");
    check_error(
        parse(b"version https://git-lfs.github.com/spec/v1".to_vec()),
        "Corrupt",
        "git lfs pull",
    );
}

/// Writes files into a fresh folder, and with it those above.
fn folder(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, bytes) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    folder
}

fn index(entries: &[(&str, &str)]) -> Vec<u8> {
    let entries: Vec<_> =
        entries.iter().map(|(tensor, file)| format!("{tensor:?}:{file:?}")).collect();
    format!(r#"{{"metadata":{{"total_size":4}},"weight_map":{{{}}}}}"#, entries.join(","))
        .into_bytes()
}

fn paths(source: &Source) -> (Vec<&str>, Vec<&str>, Vec<(&str, &str)>) {
    let left_out = source.left_out.iter().map(|left| (left.path.as_str(), left.reason.as_str()));
    (
        source.weights.iter().map(|file| file.path.as_str()).collect(),
        source.side.iter().map(|file| file.path.as_str()).collect(),
        left_out.collect(),
    )
}

#[test]
fn a_folder_without_an_index_gives_all_its_files() {
    let folder = folder(&[
        ("z.safetensors", one("z")),
        ("unet/a.safetensors", one("a")),
        ("unet.safetensors", one("u")),
        ("unet/config.json", b"{}".to_vec()),
        ("README.md", Vec::new()),
        ("pytorch_model.bin", Vec::new()),
        ("old/model.GGUF", Vec::new()),
        (".git/a.safetensors", one("a")),
        (".env", b"secret".to_vec()),
    ]);
    let source = Source::open(folder.path()).unwrap();
    let (weights, side, left_out) = paths(&source);
    // Bytewise: `.` comes before `/`.
    assert_eq!(weights, ["unet.safetensors", "unet/a.safetensors", "z.safetensors"]);
    assert_eq!(side, ["README.md", "unet/config.json"]);
    let other = "weights in another format";
    let expected = [
        (".env", "hidden"),
        (".git", "hidden"),
        ("old/model.GGUF", other),
        ("pytorch_model.bin", other),
    ];
    assert_eq!(left_out, expected);
    assert_eq!(source.side[1].length, 2);
    assert_eq!(fs::read(&source.side[1].file).unwrap(), b"{}");
}

#[test]
fn an_index_says_which_files_count() {
    let folder = folder(&[
        (
            "model.safetensors.index.json",
            index(&[("a", "m-1.safetensors"), ("b", "m-2.safetensors")]),
        ),
        ("m-1.safetensors", one("a")),
        ("m-2.safetensors", one("b")),
        ("consolidated.safetensors", one("a")),
        ("consolidated.safetensors.index.json", index(&[("a", "consolidated.safetensors")])),
        ("vae/d.safetensors.index.json", index(&[("c", "d-1.safetensors")])),
        ("vae/d-1.safetensors", one("c")),
        ("vae/d.fp16.safetensors", one("c")),
        ("clip/e.safetensors", one("e")),
    ]);
    let source = Source::open(folder.path()).unwrap();
    let (weights, side, left_out) = paths(&source);
    assert_eq!(
        weights,
        ["clip/e.safetensors", "m-1.safetensors", "m-2.safetensors", "vae/d-1.safetensors"]
    );
    assert_eq!(side.len(), 3);
    let expected = [
        ("consolidated.safetensors", "not named by model.safetensors.index.json"),
        ("vae/d.fp16.safetensors", "not named by vae/d.safetensors.index.json"),
    ];
    assert_eq!(left_out, expected);
}

#[test]
fn an_index_that_disagrees_with_its_folder_is_an_error() {
    let name = "model.safetensors.index.json";
    let open =
        |index: Vec<u8>| Source::open(folder(&[(name, index), ("m.safetensors", one("a"))]).path());
    open(index(&[("a", "m.safetensors")])).unwrap();
    check_error(
        open(index(&[("a", "n.safetensors")])),
        "Parameter",
        "names n.safetensors, which is missing",
    );
    check_error(open(index(&[("b", "m.safetensors")])), "Corrupt", "no such tensor");
    for escape in
        ["../m.safetensors", "/m.safetensors", "x/../m.safetensors", "", "x\\m.safetensors"]
    {
        check_error(open(index(&[("a", escape)])), "Corrupt", "not a path inside its folder");
    }
    check_error(open(b"{}".to_vec()), "Corrupt", "not a sharding index");
    check_error(
        open(br#"{"weight_map":{"a":"x","a":"m.safetensors"}}"#.to_vec()),
        "Corrupt",
        "occurs twice",
    );
    check_error(open(index(&[])), "Parameter", "no safetensors");
    let two = [("a.safetensors.index.json", index(&[])), ("b.safetensors.index.json", index(&[]))];
    check_error(Source::open(folder(&two).path()), "Parameter", "divide the same folder");
}

#[test]
fn what_is_no_source_is_the_callers_mistake() {
    check_error(Source::open(folder(&[]).path()), "Parameter", "holds no safetensors");
    check_error(
        Source::open(folder(&[("a.txt", Vec::new())]).path()),
        "Parameter",
        "holds no safetensors",
    );
    let twice = folder(&[("x/a.safetensors", one("a")), ("y/a.safetensors", one("a"))]);
    check_error(
        Source::open(twice.path()),
        "Parameter",
        "x/a.safetensors and y/a.safetensors both have",
    );
    check_error(Source::open(&twice.path().join("z")), "Io", "open");
    let files = folder(&[
        ("a.gguf", Vec::new()),
        ("m.safetensors.index.json", index(&[])),
        ("a.safetensors", one("a")),
    ]);
    check_error(Source::open(&files.path().join("a.gguf")), "Parameter", "convert");
    check_error(
        Source::open(&files.path().join("m.safetensors.index.json")),
        "Parameter",
        "folder",
    );
    let source = Source::open(&files.path().join("a.safetensors")).unwrap();
    assert_eq!(paths(&source), (vec!["a.safetensors"], vec![], vec![]));
}

#[test]
fn large_side_files_are_left_out_unread() {
    let folder = folder(&[("a.safetensors", one("a"))]);
    for (name, length) in [("fits.dat", 256 << 20), ("large.dat", (256 << 20) + 1)] {
        fs::File::create(folder.path().join(name)).unwrap().set_len(length).unwrap();
    }
    let source = Source::open(folder.path()).unwrap();
    let (_, side, left_out) = paths(&source);
    assert_eq!((side, left_out), (vec!["fits.dat"], vec![("large.dat", "larger than 256 MiB")]));
}

#[cfg(target_os = "linux")]
#[test]
fn links_to_files_are_followed_and_others_are_not() {
    use std::os::unix::{ffi::OsStrExt, fs::symlink};
    // Links as in the cache of the Hub.
    let cache = tempfile::tempdir().unwrap();
    let entry = cache.path().join("models--org--name");
    let (blobs, snapshot) = (entry.join("blobs"), entry.join("snapshots/abc"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(blobs.join("1"), one("a")).unwrap();
    fs::write(blobs.join("2"), "{}").unwrap();
    let at = |name: &str| snapshot.join(name);
    fs::write(at("odd\\name"), "").unwrap();
    symlink(blobs.join("1"), at("a.safetensors")).unwrap();
    symlink(blobs.join("2"), at("config.json")).unwrap();
    symlink(&snapshot, at("circle")).unwrap();
    fs::write(snapshot.join(Path::new(std::ffi::OsStr::from_bytes(b"\xff"))), "").unwrap();
    let source = Source::open(&snapshot).unwrap();
    let (weights, side, left_out) = paths(&source);
    assert_eq!((weights, side), (vec!["a.safetensors"], vec!["config.json"]));
    let expected = [
        ("circle", "a link to a folder"),
        ("odd\\name", "its name is not portable"),
        ("\u{fffd}", "its name is not portable"),
    ];
    assert_eq!(left_out, expected);
    // Blobs of another repository are none of this one's.
    let other = cache.path().join("models--org--other/blobs");
    fs::create_dir_all(&other).unwrap();
    fs::write(other.join("3"), "{}").unwrap();
    symlink(other.join("3"), at("x.json")).unwrap();
    check_error(Source::open(&snapshot), "Parameter", "out of the folder");
    fs::remove_file(at("x.json")).unwrap();
    for name in ["b.safetensors", "model.safetensors.index.json", "lost.json"] {
        symlink("nowhere", at(name)).unwrap();
        check_error(Source::open(&snapshot), "Parameter", "cannot be read");
        fs::remove_file(at(name)).unwrap();
    }
}

/// An input that would exceed a limit of the format is refused by its name.
#[test]
fn too_many_folders_are_refused() {
    // In memory folders are made faster than on a disk.
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let folder = folder.unwrap();
    let root = df11::hazmat::demo::tiny_checkpoint(folder.path()).unwrap();
    for at in 0..345 {
        let deep = root.join(format!("{at}/{}", ["f"; 29].join("/")));
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("x"), "").unwrap();
    }
    let out = folder.path().join("out.df11");
    let source = Source::open(&root).unwrap();
    let error = df11::compress(&source, &out, &df11::CompressOptions::default(), &()).unwrap_err();
    assert!(matches!(error, Error::Limit { value: 10_350, limit: 10_000, .. }), "{error:?}");
    assert!(error.to_string().contains("folders") && !out.exists());
}
