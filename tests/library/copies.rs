//! Copies of open models: what was opened, whatever became of the files; and the containers that
//! another model in their folder replaces.

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use df11::{
    CompressOptions, DecompressOptions, Dtype, Error, Level, Model, OpenOptions, Source, Sources,
    compress, compress_all, decompress_all,
    hazmat::{copy, demo, earlier_containers},
    source::LeftOut,
};
use tempfile::TempDir;

use crate::{
    container::{Item, normal_weights, weights_file},
    files::files,
};

const FIRST: &str = "model-00001-of-00002.df11";
const SECOND: &str = "model-00002-of-00002.df11";

struct Fixture {
    folder: TempDir,
    model: PathBuf,
}

impl Fixture {
    /// A folder of two containers with side files.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = demo::tiny_checkpoint(folder.path()).unwrap();
        fs::write(source.join("config.json"), "{\"model_type\": \"llama\"}").unwrap();
        fs::create_dir(source.join("tokenizer")).unwrap();
        fs::write(source.join("tokenizer/vocab.txt"), "a\nb\n").unwrap();
        let model = folder.path().join("containers");
        compress_to(&source, &model);
        Self { folder, model }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn open(&self) -> Model {
        df11::open(&self.model).unwrap()
    }

    /// A weights file of a model of its own.
    fn other(&self, folder: &str, name: &str) -> PathBuf {
        let item = Item::raw("other", Dtype::BF16, &[64, 64], normal_weights(4096, 7));
        fs::create_dir_all(self.path(folder)).unwrap();
        let file = self.path(folder).join(name);
        fs::write(&file, weights_file(&[item])).unwrap();
        file
    }
}

fn paths(model: &Model) -> Vec<PathBuf> {
    model.shards().iter().map(|shard| shard.path().to_owned()).collect()
}

fn compress_to(source: &Path, out: &Path) {
    let source = Source::open(source).unwrap();
    compress(&source, out, &CompressOptions::default(), &()).unwrap();
}

fn copied(model: &Model, beside: &Path, out: &Path) -> df11::Result<Vec<String>> {
    copy(model, Some(beside), out, true, &())
}

#[test]
fn what_was_opened_is_copied() {
    let fixture = Fixture::new();
    let (model, expected) = (fixture.open(), files(&fixture.model));
    let changed = copied(&model, &fixture.model, &fixture.path("copy")).unwrap();
    assert!(changed.is_empty() && files(&fixture.path("copy")) == expected);
    assert!(matches!(
        copied(&model, &fixture.model, &fixture.path("copy")),
        Err(Error::Exists { .. })
    ));
    // Another model takes the folder's name; Windows renames none with an open file.
    if cfg!(windows) {
        return;
    }
    fs::rename(&fixture.model, fixture.path("elsewhere")).unwrap();
    fixture.other("other", "model-00001-of-00002.safetensors");
    compress_to(&fixture.path("other"), &fixture.model);
    copied(&model, &fixture.path("elsewhere"), &fixture.path("again")).unwrap();
    assert!(files(&fixture.path("again")) == expected);
    // Side files alone.
    copy(&model, Some(&fixture.path("elsewhere")), &fixture.path("side"), false, &()).unwrap();
    let side: Vec<String> = files(&fixture.path("side")).into_keys().collect();
    assert!(side.contains(&"tokenizer/vocab.txt".to_owned()), "{side:?}");
    assert!(!side.iter().any(|path| path.contains(".df11")), "{side:?}");
}

#[test]
fn what_was_overwritten_is_not_copied() {
    let fixture = Fixture::new();
    let model = fixture.open();
    let path = model.shards()[0].path().to_owned();
    let half = fs::metadata(&path).unwrap().len() / 2;
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(half)).unwrap();
    file.write_all(&[0x5a; 512]).unwrap();
    let error = copied(&model, &fixture.model, &fixture.path("copy")).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    let names: BTreeSet<_> = fs::read_dir(fixture.folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(!names.iter().any(|name| name == "copy" || name.as_encoded_bytes()[0] == b'.'));
}

#[test]
fn a_changed_side_file_is_told() {
    let fixture = Fixture::new();
    fs::write(fixture.model.join("tokenizer/vocab.txt"), "c\n").unwrap();
    let changed = copied(&fixture.open(), &fixture.model, &fixture.path("copy")).unwrap();
    assert_eq!(changed, ["tokenizer/vocab.txt"]);
    assert_eq!(fs::read(fixture.path("copy/tokenizer/vocab.txt")).unwrap(), b"c\n");
}

#[cfg(unix)]
#[test]
fn a_link_out_of_the_folder_is_refused_and_one_inside_is_followed() {
    use std::os::unix::fs::symlink;

    let fixture = Fixture::new();
    let vocab = fixture.model.join("tokenizer/vocab.txt");
    let same = fixture.path("same.txt");
    fs::rename(&vocab, &same).unwrap();
    symlink(&same, &vocab).unwrap();
    let error = copied(&fixture.open(), &fixture.model, &fixture.path("copy")).unwrap_err();
    assert!(matches!(error, Error::Parameter { .. }) && error.to_string().contains("leads out"));
    fs::rename(&same, fixture.model.join("vocab")).unwrap();
    fs::remove_file(&vocab).unwrap();
    symlink("../vocab", &vocab).unwrap();
    copied(&fixture.open(), &fixture.model, &fixture.path("copy")).unwrap();
    assert_eq!(fs::read(fixture.path("copy/tokenizer/vocab.txt")).unwrap(), b"a\nb\n");
}

#[test]
fn only_an_earlier_outputs_containers_are_replaced() {
    let fixture = Fixture::new();
    let identity = fixture.open().identity().to_string();
    let earlier = |folder: &Path, names: &[&str]| {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        earlier_containers(folder, &names, &identity)
    };
    let refused = |folder: &Path, names: &[&str], words: &str| {
        let error = earlier(folder, names).unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let (first, second) = (FIRST, SECOND);
    assert!(earlier(&fixture.path("nothing"), &[]).unwrap().is_empty());
    assert_eq!(earlier(&fixture.model, &["model.df11"]).unwrap(), [first, second]);
    assert_eq!(earlier(&fixture.model, &[first]).unwrap(), [second]);
    assert!(earlier(&fixture.model, &[first, second]).unwrap().is_empty());
    // One that somebody keeps there, one that is damaged, and hidden ones.
    let lone = fixture.other("other", "lone.safetensors");
    fs::create_dir(fixture.model.join(".hidden")).unwrap();
    compress_to(&lone, &fixture.model.join(".hidden/lone.df11"));
    assert_eq!(earlier(&fixture.model, &[first]).unwrap(), [second]);
    compress_to(&lone, &fixture.model.join("lone.df11"));
    refused(&fixture.model, &[first], "lone.df11 is not part of an earlier output");
    fs::write(fixture.model.join("lone.df11"), "damaged").unwrap();
    refused(&fixture.model, &[first], "lone.df11 is not part of an earlier output");
}

#[test]
fn other_models_in_subfolders_stay() {
    let fixture = Fixture::new();
    let (identity, expected) = (fixture.open().identity(), paths(&fixture.open()));
    let lone = fixture.other("other", "lone.safetensors");
    fs::create_dir(fixture.model.join("checkpoint")).unwrap();
    let checkpoint = fixture.model.join("checkpoint/lone.df11");
    compress_to(&lone, &checkpoint);
    // A complete model is opened without them, also if they are its own.
    assert_eq!(fixture.open().identity(), identity);
    fs::copy(fixture.model.join(FIRST), fixture.model.join("checkpoint/first.df11")).unwrap();
    assert_eq!(paths(&fixture.open()), expected);
    let earlier = |names: &[&str]| {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        earlier_containers(&fixture.model, &names, &identity.to_string())
    };
    assert_eq!(earlier(&["model.df11"]).unwrap(), [FIRST, SECOND]);
    let told = |left_out: &[LeftOut]| {
        let reason = |path| left_out.iter().find(|file| file.path == path).unwrap().reason.clone();
        assert_eq!(reason("checkpoint/lone.df11"), "a container of another model");
    };
    let models = OpenOptions::new().open_all(&fixture.model).unwrap();
    let restored =
        decompress_all(&models, &fixture.path("back"), &DecompressOptions::default(), &()).unwrap();
    told(&restored[0].left_out);
    // Containers that are opened together with them would be mixed up.
    for names in [&["a/model.df11"][..], &["model.df11", "a/more.df11"]] {
        let error = earlier(names).unwrap_err();
        assert!(error.to_string().contains("checkpoint/"), "{error}");
    }
    fs::rename(fixture.model.join(FIRST), fixture.path("first")).unwrap();
    let error = df11::open(&fixture.model).unwrap_err();
    assert!(error.to_string().contains("belong to different models"), "{error}");
    fs::remove_file(&checkpoint).unwrap();
    assert_eq!(fixture.open().identity(), identity, "the shard in the subfolder is its own");
    assert!(fixture.open().is_complete());
}

#[test]
fn a_folder_that_lost_its_containers_takes_none_of_a_checkpoint() {
    let fixture = Fixture::new();
    let checkpoint = fixture.model.join("checkpoint-1");
    fs::create_dir(&checkpoint).unwrap();
    compress_to(&fixture.other("other", "model.safetensors"), &checkpoint.join("model.df11"));
    assert_eq!(fixture.open().shards().len(), 2);
    for name in [FIRST, SECOND] {
        fs::remove_file(fixture.model.join(name)).unwrap();
    }
    // Without a config it is no folder of a model.
    assert_eq!(fixture.open().shards().len(), 1);
    fs::copy(fixture.model.join("config.json"), checkpoint.join("config.json")).unwrap();
    let error = df11::open(&fixture.model).unwrap_err().to_string();
    assert!(error.contains("holds no container of its own"), "{error}");
    assert_eq!(df11::open(&checkpoint).unwrap().shards().len(), 1);
    fs::remove_file(fixture.model.join("config.json")).unwrap();
    assert_eq!(fixture.open().shards().len(), 1, "a folder above models");
}

#[test]
fn a_pipeline_keeps_the_components_that_it_lists() {
    let fixture = Fixture::new();
    fixture.other("pipe/unet", "diffusion.safetensors");
    fs::write(fixture.path("pipe/model_index.json"), "{}").unwrap();
    let sources = Sources::open(&fixture.path("pipe"), None).unwrap();
    let out = fixture.path("pipe-df11");
    compress_all(&sources, &out, &CompressOptions::default(), &()).unwrap();
    let unet = df11::open(out.join("unet")).unwrap().identity().to_string();
    let names: BTreeSet<String> = ["diffusion.df11".to_owned()].into();
    assert!(earlier_containers(&out.join("unet"), &names, &unet).unwrap().is_empty());
    for (folder, identity, words) in [
        (out.join("unet"), "other", "lists another model as unet"),
        (out, &*unet, "this is one model"),
    ] {
        let error = earlier_containers(&folder, &names, identity).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn weights_beside_containers_are_none_of_theirs() {
    let fixture = Fixture::new();
    let added = fixture.other("containers", "df11.safetensors");
    fixture.open().verify(Level::Structure, &()).unwrap();
    let found = fixture.open().verify(Level::Full, &()).unwrap();
    assert!(found.unchecked.iter().any(|what| what.contains("df11.safetensors")), "{found:?}");
    let held = fixture.open().tensors().next().unwrap().name().to_owned();
    let item = Item::raw(&held, Dtype::BF16, &[64, 64], normal_weights(4096, 7));
    fs::write(&added, weights_file(&[item])).unwrap();
    for content in [fs::read(&added).unwrap(), b"damaged".to_vec()] {
        fs::write(&added, content).unwrap();
        for level in [Level::Structure, Level::Full] {
            let error = fixture.open().verify(level, &()).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
            let place = added.display().to_string();
            assert!(error.to_string().starts_with(&place), "{error}");
            assert!(error.to_string().contains("remove the file"), "{error}");
        }
    }
    fs::remove_file(&added).unwrap();
    fs::create_dir(&added).unwrap();
    let error = fixture.open().verify(Level::Structure, &()).unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
}
