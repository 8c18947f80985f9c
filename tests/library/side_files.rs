//! Side files beside the containers of a folder: what is recorded comes back or is refused, and
//! what is not recorded takes nobody's place.

use std::{
    fs,
    path::{Path, PathBuf},
};

use df11::{
    CompressOptions, DecompressOptions, Dtype, Error, Level, Restored, Source, compress, convert,
    decompress, hazmat::demo,
};
use tempfile::TempDir;

use crate::{
    container::{self, Item, Model, normal_weights, weights_file},
    files::{check_error, files},
};

/// The first weights file of the checkpoint.
const FIRST: &str = "model-00001-of-00002.safetensors";
const CONFIG: &str = "{\n  \"model_type\": \"llama\"\n}\n";

/// A checkpoint with a marked configuration, and the folder of containers made of it.
struct Fixture {
    folder: TempDir,
    model: PathBuf,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = demo::tiny_checkpoint(folder.path()).unwrap();
        fs::write(source.join("config.json"), CONFIG).unwrap();
        fs::create_dir(source.join("tokenizer")).unwrap();
        fs::write(source.join("tokenizer/vocab.txt"), "a\nb\n").unwrap();
        let model = folder.path().join("containers");
        compress(&Source::open(&source).unwrap(), &model, &CompressOptions::default(), &())
            .unwrap();
        Self { folder, model }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn open(&self) -> df11::Model {
        df11::open(&self.model).unwrap()
    }

    fn restore(&self, keep_changed: bool) -> df11::Result<Restored> {
        let options = DecompressOptions::new().keep_changed(keep_changed);
        decompress(&self.open(), &self.path("restored"), &options, &())
    }

    fn restored(&self, name: &str) -> Vec<u8> {
        fs::read(self.path("restored").join(name)).unwrap()
    }

    /// Nothing reads the folder any more as if it were whole.
    fn is_refused(&self, name: &str) {
        let named = |error: Error| match &error {
            Error::Corrupt { place, remedy: Some(remedy), .. } => {
                assert!(place.contains(name) && remedy.contains("--keep-changed"), "{error}");
            }
            _ => panic!("{error:?}"),
        };
        named(self.restore(false).expect_err(name));
        assert!(!self.path("restored").exists());
        named(self.open().verify(Level::Full, &()).expect_err(name));
        let out = self.path("converted.df11");
        named(convert(&self.open(), &out, &CompressOptions::default(), &()).expect_err(name));
        assert!(!out.exists());
    }
}

#[test]
fn what_is_recorded_comes_back() {
    let fixture = Fixture::new();
    assert!(fixture.open().verify(Level::Full, &()).unwrap().unchecked.is_empty());
    let restored = fixture.restore(false).unwrap();
    let original = files(&fixture.path("model"));
    assert!(files(&fixture.path("restored")) == original);
    assert_eq!(restored.files, original.len() as u64);
    assert!(restored.changed.is_empty() && restored.missing.is_empty());
    assert!(restored.unchecked.is_empty() && restored.left_out.is_empty());
}

#[test]
fn a_stray_weights_file_replaces_nothing() {
    let fixture = Fixture::new();
    let weights = fs::read(fixture.path("model").join(FIRST)).unwrap();
    // Loaders take the second one for the whole model, where it is there.
    let strays = [FIRST, "model.safetensors"];
    for stray in strays {
        fs::write(fixture.model.join(stray), "stray").unwrap();
    }
    let restored = fixture.restore(false).unwrap();
    assert!(fixture.restored(FIRST) == weights);
    let left_out: Vec<&str> = restored.left_out.iter().map(|file| &*file.path).collect();
    assert_eq!(left_out, strays);
    assert!(restored.unchecked.is_empty() && !fixture.path("restored/model.safetensors").exists());
}

#[test]
fn a_folder_with_the_name_of_a_file_replaces_nothing() {
    let fixture = Fixture::new();
    fs::create_dir(fixture.model.join(FIRST)).unwrap();
    fs::write(fixture.model.join(FIRST).join("config.json"), "stray").unwrap();
    let restored = fixture.restore(false).unwrap();
    assert!(fixture.path("restored").join(FIRST).is_file());
    assert_eq!(restored.left_out[0].path, format!("{FIRST}/config.json"));
}

#[test]
fn a_changed_or_missing_side_file_is_refused_or_named() {
    let vocab = "tokenizer/vocab.txt";
    for (name, from, to) in [(vocab, "b", "c"), ("config.json", "llama", "lama"), (vocab, "b", "")]
    {
        let fixture = Fixture::new();
        let path = fixture.model.join(name);
        let is_missing = to.is_empty();
        if is_missing {
            fs::remove_file(&path).unwrap();
        } else {
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(text.contains("quant_method"), name == "config.json");
            fs::write(&path, text.replace(from, to)).unwrap();
        }
        fixture.is_refused(name);
        let Restored { changed, missing, .. } = fixture.restore(true).unwrap();
        let (found, none) = if is_missing { (missing, changed) } else { (changed, missing) };
        assert_eq!((found, none.len()), (vec![name.to_owned()], 0), "{name}");
        assert_eq!(fixture.path("restored").join(name).exists(), !is_missing);
        if name == vocab {
            assert_eq!(fixture.restored("config.json"), CONFIG.as_bytes());
            assert!(is_missing || fixture.restored(vocab) == b"a\nc\n");
        }
    }
}

/// Neither the link nor a folder on its path may lead to somebody else's file.
#[cfg(unix)]
#[test]
fn a_changed_side_file_is_not_taken_from_elsewhere() {
    for name in ["tokenizer/vocab.txt", "tokenizer"] {
        let fixture = Fixture::new();
        let elsewhere = fixture.path("elsewhere");
        fs::rename(fixture.model.join(name), &elsewhere).unwrap();
        let file = if elsewhere.is_dir() { elsewhere.join("vocab.txt") } else { elsewhere.clone() };
        fs::write(file, "secret").unwrap();
        std::os::unix::fs::symlink(&elsewhere, fixture.model.join(name)).unwrap();
        let refused = fixture.restore(true).map_err(|error| error.to_string()).unwrap_err();
        assert!(refused.contains("leads out of the folder"), "{refused}");
        assert!(!fixture.path("restored").exists());
    }
}

#[test]
fn a_configuration_without_its_mark_is_the_original() {
    let fixture = Fixture::new();
    fs::write(fixture.model.join("config.json"), CONFIG).unwrap();
    fixture.open().verify(Level::Full, &()).unwrap();
    fixture.restore(false).unwrap();
    assert_eq!(fixture.restored("config.json"), CONFIG.as_bytes());
}

/// Containers beside which a link leads nowhere are still opened; the link is left out and named.
#[cfg(unix)]
#[test]
fn a_link_that_leads_nowhere_hides_no_container() {
    let fixture = Fixture::new();
    for name in ["lost.json", "lost.safetensors.index.json"] {
        std::os::unix::fs::symlink("nowhere", fixture.model.join(name)).unwrap();
    }
    let left_out = fixture.restore(false).unwrap().left_out;
    let paths: Vec<&str> = left_out.iter().map(|file| &*file.path).collect();
    assert!(
        paths.contains(&"lost.json") && paths.contains(&"lost.safetensors.index.json"),
        "{paths:?}"
    );
}

#[test]
fn an_added_file_is_unchecked() {
    let fixture = Fixture::new();
    let files = fixture.restore(false).unwrap().files;
    fs::remove_dir_all(fixture.path("restored")).unwrap();
    fs::write(fixture.model.join("notes.md"), "mine").unwrap();
    let restored = fixture.restore(false).unwrap();
    assert_eq!((restored.files, &*restored.unchecked), (files, &["notes.md".to_owned()][..]));
    assert_eq!(fixture.restored("notes.md"), b"mine");
    // Files that are not recorded are no part of the model, in any form.
    let out = fixture.path("converted.df11");
    let report = convert(&fixture.open(), &out, &CompressOptions::default(), &()).unwrap();
    assert!(report.left_out.iter().any(|file| file.path == "notes.md"), "{:?}", report.left_out);
    assert_eq!(df11::open(out).unwrap().identity(), fixture.open().identity());
}

#[test]
fn a_container_without_its_folder_says_what_it_cannot_check() {
    let fixture = Fixture::new();
    let alone = fixture.path("alone");
    fs::create_dir(&alone).unwrap();
    let source = fixture.path("model").join(FIRST);
    fs::copy(source, alone.join("model.safetensors")).unwrap();
    fs::write(alone.join("config.json"), CONFIG).unwrap();
    let out = fixture.path("one-shard");
    compress(&Source::open(&alone).unwrap(), &out, &CompressOptions::default(), &()).unwrap();
    let model = df11::open(out.join("model.df11")).unwrap();
    let found = model.verify(Level::Full, &()).unwrap();
    assert!(
        found.unchecked.iter().any(|what| what.contains("side files")),
        "{:?}",
        found.unchecked
    );
    let out = fixture.path("x.df11");
    check_error(convert(&model, &out, &CompressOptions::default(), &()), "Parameter", "");
}

#[test]
fn the_identity_is_that_of_all_files_in_every_form() {
    let fixture = Fixture::new();
    let identity = fixture.open().identity();
    let one = fixture.path("one.df11");
    convert(&fixture.open(), &one, &CompressOptions::default(), &()).unwrap();
    assert_eq!(df11::open(&one).unwrap().identity(), identity);
    let source = fixture.path("model");
    fs::write(source.join("config.json"), CONFIG.replace("llama", "lama")).unwrap();
    let other = fixture.path("other.df11");
    compress(&Source::open(&source).unwrap(), &other, &CompressOptions::default(), &()).unwrap();
    assert_ne!(df11::open(&other).unwrap().identity(), identity, "a side file is part of it");
}

/// A container with this side file, converted to a folder.
fn converted(side: &str) -> df11::Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let items = [Item::raw("w", Dtype::U8, &[3], vec![1, 2, 3])];
    fs::write(folder.path().join("one.df11"), Model::new(&items, &[(side, b"{}")]).build())
        .unwrap();
    let model = df11::open(folder.path().join("one.df11")).unwrap();
    let out = folder.path().join("out");
    let done = convert(&model, &out, &CompressOptions::default(), &());
    assert_eq!(out.exists(), done.is_ok());
    done.map(drop)
}

#[test]
fn a_side_file_never_takes_the_place_of_a_shard() {
    converted("config.json").unwrap();
    for side in ["model.df11", "model.df11/config.json", "other.df11", "a/b.df11"] {
        let error = converted(side).unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }), "{side}: {error:?}");
    }
}

#[test]
fn shards_whose_files_exclude_each_other_are_refused() {
    let write = |folder: &Path, index: u64, file: &str, side: &[(&str, &[u8])]| {
        let item = Item::raw(&format!("w{index}"), Dtype::U8, &[3], vec![1, 2, 3]);
        let model = Model::new(&[item.in_file(file)], side);
        let model = Model { shard: (index, 2), identity: [7; 32], ..model };
        fs::write(folder.join(format!("{index}.df11")), model.build()).unwrap();
    };
    for (first, second, side) in [
        ("x.safetensors", "y.safetensors", "y.safetensors"),
        ("x.safetensors", "y/z.safetensors", "y"),
        ("x.safetensors", "y", "y/config.json"),
        ("x", "x/y.safetensors", "config.json"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), 0, first, &[(side, b"{}")]);
        write(folder.path(), 1, second, &[]);
        let error = df11::open(folder.path()).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{second}, {side}: {error:?}");
    }
}

/// A weights file whose tensors are all equal: what a bomb of aliases would be made of.
#[test]
fn equal_tensors_are_stored_again_after_fifteen_aliases() {
    let folder = tempfile::tempdir().unwrap();
    let weights = normal_weights(256 * 256, 1);
    let item =
        |at| Item::raw(&format!("model.w.{at:02}"), Dtype::BF16, &[256, 256], weights.clone());
    let source = folder.path().join("equal.safetensors");
    fs::write(&source, weights_file(&(0..40).map(item).collect::<Vec<_>>())).unwrap();
    let out = folder.path().join("equal.df11");
    let report =
        compress(&Source::open(&source).unwrap(), &out, &CompressOptions::default(), &()).unwrap();
    assert_eq!((report.coded_tensors, report.alias_tensors), (3, 37));
    let (stored, restored) =
        (fs::metadata(&out).unwrap().len(), fs::metadata(&source).unwrap().len());
    assert!(restored < 32 * stored, "{restored} of {stored}");
}

/// The most that a container restores to: raw weights of one byte stored for one decoded would be
/// less.
#[test]
fn no_container_restores_to_32_times_its_length() {
    let coded =
        Item::gap("a", &[65_536], container::weights(std::iter::repeat_n(127, 65_536)), (64, 1024));
    let aliases = (0..15).map(|at| coded.alias(&format!("b{at:02}")));
    let items: Vec<Item> = [coded.clone()].into_iter().chain(aliases).collect();
    let bytes = Model::new(&items, &[]).build();
    let original = Model::new(&items, &[]).files[0].length;
    assert!(original > 20 * bytes.len() as u64 && original < 32 * bytes.len() as u64, "{original}");
    container::open(bytes).unwrap().verify(Level::Full, &()).unwrap();
}

#[test]
fn metadata_are_kept_and_converted() {
    let folder = tempfile::tempdir().unwrap();
    let source = demo::tiny_checkpoint(folder.path()).unwrap();
    let key = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let metadata = [key("tool.b", "2"), key("tool.a", "ключ\n")];
    let options = CompressOptions::new().metadata(metadata.into());
    let out = folder.path().join("folder");
    compress(&Source::open(&source).unwrap(), &out, &options, &()).unwrap();
    let one = folder.path().join("one.df11");
    let options = options.metadata([key("tool.b", "3")].into());
    let model = df11::open(out).unwrap();
    convert(&model, &one, &options, &()).unwrap();
    let found = df11::open(&one).unwrap();
    assert_eq!(found.metadata().collect::<Vec<_>>(), [("tool.a", "ключ\n"), ("tool.b", "3")]);
    assert_eq!(found.metadata_value("tool.b"), Some("3"));
    assert_eq!((found.metadata_value("tool"), found.identity()), (None, model.identity()));
}

#[test]
fn metadata_that_the_format_has_no_place_for_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = Source::open(&demo::tiny_checkpoint(folder.path()).unwrap()).unwrap();
    let refused = |entries: &[(&str, &str)]| {
        let options = CompressOptions::new()
            .metadata(entries.iter().map(|&(key, value)| (key.into(), value.into())).collect());
        let out = folder.path().join("x.df11");
        let error = compress(&source, &out, &options, &()).unwrap_err();
        assert!(!out.exists());
        error
    };
    for key in ["plain", ".a", "a.", "a.\0", ""] {
        assert!(matches!(refused(&[(key, "")]), Error::Parameter { .. }), "{key:?}");
    }
    assert!(matches!(refused(&[("a.b", "\0")]), Error::Parameter { .. }));
    let (long, value) = (format!("a.{}", "k".repeat(254)), "v".repeat(65_536));
    assert!(matches!(refused(&[(&long, "")]), Error::Limit { limit: 255, .. }));
    assert!(matches!(
        refused(&[("a.b", &(value.clone() + "v"))]),
        Error::Limit { limit: 65_536, .. }
    ));
    let keys: Vec<String> = (0..16).map(|at| format!("a.{at:02}")).collect();
    let much: Vec<(&str, &str)> = keys.iter().map(|key| (&**key, &*value)).collect();
    assert!(matches!(refused(&much), Error::Limit { limit: 1_048_576, .. }));
}
