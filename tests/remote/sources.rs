//! Models that are compressed from behind HTTP.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use df11::{
    CompressOptions, Error, Observer, Sources, Stage, compress_all,
    hazmat::demo,
    source::{FetchedSource, WantedFiles},
};

use crate::{
    files::files,
    server::{Answer, Server},
};

/// Counts what is fetched, and stops after so many bytes.
struct Watch {
    begun: AtomicU64,
    done: AtomicU64,
    stop: u64,
}

impl Watch {
    fn new(stop: u64) -> Self {
        Self { begun: AtomicU64::new(0), done: AtomicU64::new(0), stop }
    }
}

impl Observer for Watch {
    fn begin(&self, bytes: u64) {
        self.begun.fetch_add(bytes, Ordering::Relaxed);
    }

    fn enter(&self, stage: Stage) {
        assert_eq!(stage, Stage::Fetch);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.done.load(Ordering::Relaxed) >= self.stop
    }
}

/// A checkpoint of two shards on a disk, and behind HTTP in `hub/m`.
fn served() -> (tempfile::TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let source = demo::tiny_checkpoint(folder.path()).unwrap();
    fs::write(source.join("pytorch_model.bin"), "another format").unwrap();
    let all = files(&source).into_iter().map(|(path, bytes)| (format!("hub/m/{path}"), bytes));
    let server = Server::new(all.collect());
    (folder, server)
}

fn fetch(url: &str, wanted: WantedFiles<'_>) -> df11::Result<FetchedSource> {
    Ok(FetchedSource::fetch(url, wanted, &())?.expect("it is no container"))
}

fn compressed(source: &Path, out: &Path) -> BTreeMap<String, Vec<u8>> {
    let sources = Sources::open(source, None).unwrap();
    compress_all(&sources, out, &CompressOptions::new(), &()).unwrap();
    if out.is_dir() { files(out) } else { [(String::new(), fs::read(out).unwrap())].into() }
}

#[test]
fn a_folder_gives_the_containers_of_its_files() {
    let (folder, server) = served();
    let watch = Watch::new(u64::MAX);
    let wanted = WantedFiles::Variant(None);
    let fetched = FetchedSource::fetch(&server.url("hub/m"), wanted, &watch).unwrap().unwrap();
    assert!(fetched.path().ends_with("m"), "{:?}", fetched.path());
    let [note] = &fetched.notes().collect::<Vec<_>>()[..] else { panic!("one note") };
    assert!(note.contains("tokenizer.json"), "{note}");
    let near = compressed(&folder.path().join("model"), &folder.path().join("near"));
    assert_eq!(compressed(fetched.path(), &folder.path().join("far")), near);
    let weights = files(&folder.path().join("model")).into_iter();
    let weights = weights.filter(|(path, _)| path.ends_with(".safetensors"));
    let bytes: usize = weights.map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(watch.begun.into_inner(), bytes as u64);
    assert_eq!(watch.done.into_inner(), bytes as u64);
    let place = fetched.path().to_owned();
    drop(fetched);
    assert!(!place.exists() && !place.parent().unwrap().exists());
}

#[test]
fn one_file_and_the_headers_alone() {
    let (folder, server) = served();
    let url = server.url("hub/m/model-00001-of-00002.safetensors");
    let fetched = fetch(&url, WantedFiles::Variant(None)).unwrap();
    let near = folder.path().join("model/model-00001-of-00002.safetensors");
    assert_eq!(fs::read(fetched.path()).unwrap(), fs::read(near).unwrap());
    assert_eq!(fetched.path().file_name().unwrap(), "model-00001-of-00002.safetensors");
    server.requests();
    let headers = fetch(&server.url("hub/m"), WantedFiles::Headers).unwrap();
    let sent: u64 = server.requests().iter().map(|request| request.sent).sum();
    let shapes = |path: &Path| -> Vec<_> {
        let sources = Sources::open(path, None).unwrap();
        let files = sources.components()[0].model.weights.iter();
        files.flat_map(|file| file.tensors.clone()).collect()
    };
    assert_eq!(shapes(headers.path()), shapes(&folder.path().join("model")));
    let whole: usize = files(&folder.path().join("model")).values().map(Vec::len).sum();
    assert!(sent < whole as u64 / 2, "{sent} of {whole}");
}

#[test]
fn containers_are_no_source() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(demo::tiny_container(folder.path()).unwrap()).unwrap();
    let server = Server::new([("m/model.df11".to_owned(), bytes)].into());
    for name in ["m", "m/model.df11"] {
        let found = FetchedSource::fetch(&server.url(name), WantedFiles::Headers, &()).unwrap();
        assert!(found.is_none(), "{name}");
    }
    let text = fetch(&server.url("other"), WantedFiles::Headers).unwrap_err().to_string();
    assert!(text.contains("other/model.safetensors") && text.contains("check its name"), "{text}");
}

/// Nothing stays of what was fetched before, whatever ends it.
#[test]
fn faults_are_repaired_or_named_and_nothing_stays() {
    let (folder, server) = served();
    let url = server.url("hub/m");
    server.answer(|request| match request.number % 3 {
        0 => Answer::Status(503),
        1 if request.range.is_some() => Answer::Cut(3000),
        _ => Answer::Right,
    });
    let fetched = fetch(&url, WantedFiles::Variant(None)).unwrap();
    for (path, bytes) in files(&folder.path().join("model")) {
        if path != "pytorch_model.bin" {
            assert_eq!(fs::read(fetched.path().join(&path)).unwrap(), bytes, "{path}");
        }
    }
    server.answer(|request| match &request.range {
        Some(range) if range.end > 4096 => Answer::Changed,
        _ => Answer::Right,
    });
    let text = fetch(&url, WantedFiles::Variant(None)).unwrap_err().to_string();
    assert!(text.contains("m/model-0000") && text.contains("was changed"), "{text}");
    server.answer(|_| Answer::Right);
    let error = FetchedSource::fetch(&url, WantedFiles::Variant(None), &Watch::new(1)).unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error}");
}
