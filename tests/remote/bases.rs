//! Fine-tunes and bases behind HTTP: found beside each other, or named.

use std::{fs, path::Path};

use df11::{CompressOptions, Error, Level, OpenOptions, Report, Source, compress};

use crate::{
    container::{Item, weights_file},
    files::files,
    patient,
    server::Server,
};

fn write(folder: &Path, items: &[Item]) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("model.safetensors"), weights_file(items)).unwrap();
}

/// A base and a fine-tune of it, as differences, behind HTTP in `m/base` and `m/tune`; and on a
/// disk.
fn served() -> (tempfile::TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut items = vec![Item::normal(&[300, 200], 1)];
    write(&path("files"), &items);
    items[0].data.chunks_mut(34).for_each(|part| part[0] ^= 1);
    write(&path("tune-files"), &items);
    let into = |from: &str, out: &str, options: &CompressOptions| -> Report {
        compress(&Source::open(&path(from)).unwrap(), &path(out), options, &()).unwrap()
    };
    into("files", "m/base", &CompressOptions::new());
    let report = into("tune-files", "m/tune", &CompressOptions::new().base(path("m/base")));
    assert_eq!(report.delta_tensors, 1);
    let server =
        Server::new(files(&path("m")).into_iter().map(|(p, b)| (format!("m/{p}"), b)).collect());
    (folder, server)
}

fn check(name: &str, options: &OpenOptions) {
    let found = options.open(name).unwrap().verify(Level::Full, &()).unwrap();
    assert_eq!(found.unchecked, [""; 0]);
}

#[test]
fn a_base_beside_the_fine_tune_is_found_in_its_store() {
    let (_folder, server) = served();
    check(&server.url("m/tune"), &patient());
    assert!(server.requests().iter().any(|request| request.path.contains("m/base/model.df11")));
}

#[test]
fn a_base_in_a_store_serves_a_fine_tune_on_a_disk() {
    let (folder, server) = served();
    let tune = folder.path().join("m/tune");
    fs::remove_dir_all(folder.path().join("m/base")).unwrap();
    let error = df11::open(&tune).unwrap().verify(Level::Full, &()).unwrap();
    assert_eq!(error.unchecked.len(), 1);
    check(tune.to_str().unwrap(), &patient().base(server.url("m/base")));
    // The other way round, and a fine-tune that is compressed against a base in a store.
    let source = Source::open(&folder.path().join("tune-files")).unwrap();
    let options = CompressOptions::new().base(server.url("m/base"));
    let out = folder.path().join("new.df11");
    assert_eq!(compress(&source, &out, &options, &()).unwrap().delta_tensors, 1);
    check(&server.url("m/tune"), &patient().base(folder.path().join("files")));
    let none = df11::open(&out).unwrap();
    let error = none.tensors().next().unwrap().check_known().unwrap_err();
    assert!(
        matches!(error, Error::NoBase { .. }) && error.to_string().contains(r#""base""#),
        "{error}"
    );
}

#[test]
fn a_store_without_the_base_is_said_to_lack_it() {
    let (folder, _) = served();
    let own = files(&folder.path().join("m/tune")).into_iter();
    let server = Server::new(own.map(|(p, b)| (format!("m/tune/{p}"), b)).collect());
    let model = patient().open(server.url("m/tune")).unwrap();
    let error = model.tensors().next().unwrap().check_known().unwrap_err().to_string();
    assert!(error.contains(r#""base""#) && error.contains("--base"), "{error}");
}
