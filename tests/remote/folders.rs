//! Folders behind HTTP: their shards and side files.

use std::{
    fs,
    time::{Duration, Instant},
};

use df11::{
    CompressOptions, DecompressOptions, Error, Level, OpenOptions, Source, compress, decompress,
    decompress_all, hazmat::demo,
};

use crate::{
    files::files,
    patient,
    server::{Answer, Request, Server},
};

/// A checkpoint of two shards with its side files, compressed, behind HTTP.
fn served() -> (tempfile::TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let source = demo::tiny_checkpoint(folder.path()).unwrap();
    let out = folder.path().join("out");
    compress(&Source::open(&source).unwrap(), &out, &CompressOptions::new(), &()).unwrap();
    let all = files(&out).into_iter().map(|(path, bytes)| (format!("hub/m/{path}"), bytes));
    let server = Server::new(all.collect());
    (folder, server)
}

#[test]
fn a_folder_is_found_by_its_index_and_comes_back_whole() {
    let (folder, server) = served();
    let model = patient().open(server.url("hub/m/")).unwrap();
    assert_eq!((model.shards().len(), model.is_complete()), (2, true));
    assert!(server.requests().len() <= 1 + 2 * 2);
    let found = model.verify(Level::Full, &()).unwrap();
    assert!(found.unchecked.is_empty(), "{:?}", found.unchecked);
    let restored = folder.path().join("restored");
    decompress(&model, &restored, &DecompressOptions::new(), &()).unwrap();
    assert_eq!(files(&restored), files(&folder.path().join("model")));
}

#[test]
fn a_folder_in_memory_needs_no_server() {
    let (_folder, server) = served();
    let model = patient().in_memory(true).open(server.url("hub/m")).unwrap();
    assert_eq!(model.shards().len(), 2);
    assert!(model.shards().iter().all(|shard| shard.mapping().unwrap().is_some()));
    server.answer(|_| Answer::Status(500));
    for tensor in model.tensors() {
        tensor.decode::<u8>().unwrap();
    }
}

#[test]
fn nothing_whole_is_fetched_if_a_directory_fails() {
    let (_folder, server) = served();
    server.answer(
        |request| {
            if request.path.contains("00002") { Answer::Status(403) } else { Answer::Right }
        },
    );
    let text = patient().in_memory(true).open(server.url("hub/m")).unwrap_err().to_string();
    assert!(text.contains("00002") && text.contains("access is denied"), "{text}");
    // The head of a container, and its directory.
    assert!(server.requests().len() <= 1 + 2 * 2);
}

/// Longer than a test takes, and shorter than the patience of users.
const LONG: Duration = Duration::from_secs(20);

#[test]
fn a_directory_that_fails_ends_the_others() {
    let (_folder, server) = served();
    server.answer(|request| match &*request.path {
        path if path.contains("00001") => Answer::Late(LONG),
        path if path.contains("00002") => Answer::Status(403),
        _ => Answer::Right,
    });
    let start = Instant::now();
    let text = df11::open(server.url("hub/m")).unwrap_err().to_string();
    assert!(text.contains("00002") && text.contains("access is denied"), "{text}");
    assert!(start.elapsed() < LONG / 4, "{:?}", start.elapsed());
}

#[test]
fn a_container_that_fails_ends_the_others() {
    let (_folder, server) = served();
    let is_opening = |request: &Request| request.number < 1 + 2 * 2;
    server.answer(move |request| match &*request.path {
        _ if is_opening(request) => Answer::Right,
        path if path.contains("00001") => Answer::Late(LONG),
        _ => Answer::Status(403),
    });
    let start = Instant::now();
    let model = OpenOptions::new().in_memory(true).open(server.url("hub/m")).unwrap();
    for tensor in model.tensors() {
        let text = tensor.decode::<u8>().unwrap_err().to_string();
        assert!(text.contains("00002") && text.contains("access is denied"), "{text}");
    }
    assert!(start.elapsed() < LONG / 4, "{:?}", start.elapsed());
}

#[test]
fn all_models_of_a_folder_are_the_one() {
    let (folder, server) = served();
    let models = patient().open_all(server.url("hub/m")).unwrap();
    models.check_complete().unwrap();
    let restored = folder.path().join("restored");
    decompress_all(&models, &restored, &DecompressOptions::new(), &()).unwrap();
    assert_eq!(files(&restored), files(&folder.path().join("model")));
}

#[test]
fn a_folder_without_an_index_has_one_container() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(demo::tiny_container(folder.path()).unwrap()).unwrap();
    let server = Server::new([("m/model.df11".to_owned(), bytes)].into());
    let model = patient().open(server.url("m")).unwrap();
    assert_eq!(model.shards().len(), 1);
    let text = patient().open(server.url("other")).unwrap_err().to_string();
    assert!(text.contains("other/model.df11") && text.contains("check its name"), "{text}");
}

#[test]
fn an_index_cannot_name_any_number_of_containers() {
    let files = (0..100_001).map(|at| format!(r#""{at}":"{at}.safetensors""#));
    let index = format!(r#"{{"weight_map":{{{}}}}}"#, files.collect::<Vec<_>>().join(","));
    let path = "m/model.safetensors.index.json".to_owned();
    let server = Server::new([(path, index.into_bytes())].into());
    let error = patient().open(server.url("m")).unwrap_err();
    assert!(matches!(error, Error::Limit { value: 100_001, limit: 100_000, .. }), "{error}");
    assert_eq!(server.requests().len(), 1);
}
