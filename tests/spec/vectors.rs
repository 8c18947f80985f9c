//! The test vectors of the format: they are as they were, and this crate and the reference decoder
//! make of each what its row says. The Python reader is checked by `spec/python/check_vectors.py`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use df11::{Error, Level, OpenOptions, hazmat::format::records::FILE_BESIDE};

use super::{
    container,
    vectors::{self, COMMAND, Manifest, Row, Vectors, sha256},
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/vectors")
}

fn manifest() -> Manifest {
    serde_json::from_str(&fs::read_to_string(folder().join("manifest.json")).unwrap()).unwrap()
}

/// All vectors with their rows.
fn stored() -> impl Iterator<Item = (Row, Vec<u8>)> {
    manifest().vectors.into_iter().map(|row| {
        let bytes = vectors::read(&folder().join(&row.file)).unwrap_or_else(|error| {
            panic!("spec/vectors/{}: {error}; `{COMMAND}` makes it", row.file)
        });
        assert_eq!(sha256(&bytes), row.sha256, "spec/vectors/{} changed; restore it", row.file);
        (row, bytes)
    })
}

#[test]
fn every_vector_is_there_and_as_it_was() {
    let (made, manifest) = (Vectors::all(), manifest());
    let rows = made.rows(&manifest.vectors);
    for (row, bytes) in stored() {
        assert!(
            bytes == made.bytes(&row),
            "spec/vectors/{} is stale: its maker makes something else. Give what is new another \
             name; delete an unreleased file that is to change. Then `{COMMAND}`",
            row.file
        );
        assert_eq!(row.expect.is_valid(), row.file.starts_with("valid/"), "{}", row.file);
    }
    assert_eq!(rows, manifest.vectors, "manifest.json is stale; `{COMMAND}` renews it");
    let names: BTreeSet<&str> = rows.iter().map(|row| &*row.file).collect();
    for sub in ["valid", "invalid"] {
        for entry in fs::read_dir(folder().join(sub)).unwrap() {
            let file = format!("{sub}/{}", entry.unwrap().file_name().into_string().unwrap());
            assert!(names.contains(&*file), "spec/vectors/{file} is in no row; delete it");
        }
    }
    let invalid = rows.iter().filter(|row| !row.expect.is_valid()).count();
    assert!(invalid >= 40 && rows.len() - invalid >= 20, "{invalid} of {}", rows.len());
}

/// The base model of a vector, if a reader gets one.
fn base_of(row: &Row) -> Option<Vec<u8>> {
    let read = |base: &String| vectors::read(&folder().join(base)).unwrap();
    row.base.as_ref().map(read)
}

/// The first problem that a reader finds: the level, and the kinds of errors there.
struct Failure {
    level: &'static str,
    kinds: Vec<String>,
    text: String,
}

fn kind(error: &Error) -> String {
    match error {
        Error::Corrupt { .. } => "Corrupt",
        Error::Limit { .. } => "Limit",
        Error::Unsupported { .. } | Error::NoBase { .. } => "Unsupported",
        other => panic!("{other:?} is no judgement of a file"),
    }
    .into()
}

fn failure(level: &'static str, errors: &[Error]) -> Failure {
    Failure { level, kinds: errors.iter().map(kind).collect(), text: format!("{errors:?}") }
}

/// Decoded bytes of tensors by name.
type Decoded = BTreeMap<String, Vec<u8>>;

/// The parts of a container that are right.
struct Found {
    decoded: Decoded,
    /// The result of verification, if it was verified.
    result: Option<&'static str>,
}

/// Opens, loads and verifies.
fn read(bytes: &[u8], base: Option<&[u8]>, memory: bool) -> Result<Found, Failure> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vector.df11");
    let mut options = OpenOptions::new().memory_map(false);
    if let Some(base) = base {
        let path = folder.path().join("base.df11");
        fs::write(&path, base).unwrap();
        options = options.base(path);
    }
    let opened = if memory {
        options.open_readers(vec![("memory".into(), Box::new(bytes.to_vec()))])
    } else {
        fs::write(&path, bytes).unwrap();
        options.open(path)
    };
    let no_base = |error: &Error| matches!(error, Error::NoBase { .. });
    let opened = match opened {
        // Another base than the one it needs.
        Err(error) if no_base(&error) => container::open(bytes.to_vec()),
        opened => opened,
    };
    let model = opened.map_err(|error| failure("open", &[error]))?;
    let (mut decoded, mut errors) = (Decoded::new(), Vec::new());
    for tensor in model.tensors() {
        match tensor.decode::<u8>() {
            Ok(bytes) => drop(decoded.insert(tensor.name().into(), bytes)),
            Err(error) => errors.push(error),
        }
    }
    if errors.iter().any(|error| kind(error) != "Unsupported") {
        return Err(failure("load", &errors));
    }
    let verified = model.verify(Level::Full, &()).map_err(|error| failure("verify", &[error]))?;
    let result = if verified.unchecked.is_empty() { "good" } else { "incomplete" };
    Ok(Found { decoded, result: Some(result) })
}

fn check_valid(row: &Row, Found { decoded, result }: &Found) {
    assert!(result.is_none() || *result == row.result.as_deref(), "{}: {result:?}", row.file);
    let found: BTreeMap<String, String> =
        decoded.iter().map(|(name, bytes)| (name.clone(), sha256(bytes))).collect();
    assert_eq!(found, row.tensors, "{}", row.file);
}

/// Compares a reader's verdict with the row. `is_in_time` says whether a level is right, and
/// `finds_all` whether the reader must find every problem.
fn judge(
    row: &Row,
    read: Result<Found, Failure>,
    is_in_time: impl Fn(&str, &str) -> bool,
    finds_all: bool,
) -> Option<String> {
    let level = row.level.as_deref().unwrap_or("verify");
    match read {
        Ok(found) if row.expect.is_valid() => check_valid(row, &found),
        Ok(_) if !finds_all && level == "verify" => {}
        Ok(_) => return Some(format!("{}: no error", row.file)),
        Err(failure) => {
            let is_right = failure.kinds.iter().any(|kind| row.expect.allows(kind));
            if !is_right || !is_in_time(failure.level, level) {
                let (file, expect, found) = (&row.file, &row.expect, failure.level);
                return Some(format!("{file} ({level}, {expect:?}): {found}: {}", failure.text));
            }
        }
    }
    None
}

/// Loading may check what only verification must.
#[test]
fn this_crate_reads_every_vector() {
    let in_time = |found: &str, must: &str| found == must || (found, must) == ("load", "verify");
    let problems: Vec<String> = stored()
        .flat_map(|(row, bytes)| {
            let base = base_of(&row);
            [true, false].map(|memory| (row.clone(), read(&bytes, base.as_deref(), memory)))
        })
        .filter_map(|(row, read)| judge(&row, read, in_time, true))
        .collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// The reference decoder opens and decodes; what only verification finds it does not see.
#[test]
fn the_reference_decoder_agrees() {
    let in_time = |found: &str, must: &str| found == must;
    let problems: Vec<String> = stored()
        .filter_map(|(row, bytes)| {
            let found = reference(&bytes, base_of(&row).as_deref());
            judge(&row, found, in_time, false)
        })
        .collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn original_files_come_back() {
    for (row, bytes) in stored().filter(|(row, _)| row.expect.is_valid() && !row.files.is_empty()) {
        let folder = tempfile::tempdir().unwrap();
        let mut options = OpenOptions::new();
        if let Some(base) = base_of(&row) {
            let path = folder.path().join("base.df11");
            fs::write(&path, base).unwrap();
            options = options.base(path);
        }
        let readers: Vec<(PathBuf, Box<dyn df11::ReadAt>)> =
            vec![("memory".into(), Box::new(bytes))];
        let model = options.open_readers(readers).unwrap();
        let out = folder.path().join("out");
        let directory = model.shards()[0].directory();
        let beside = directory.files.iter().any(|file| file.kind == FILE_BESIDE);
        let partial = !model.is_complete() || row.files.len() < directory.files.len();
        match df11::decompress(&model, &out, &df11::DecompressOptions::default(), &()) {
            Ok(_) => {
                for (path, hash) in &row.files {
                    assert_eq!(
                        sha256(&fs::read(out.join(path)).unwrap()),
                        *hash,
                        "{}: {path}",
                        row.file
                    );
                }
                assert!(!partial, "{}", row.file);
            }
            Err(Error::Unsupported { .. } | Error::Parameter { .. }) if partial => {
                assert!(!out.exists());
            }
            Err(Error::Corrupt { .. }) if beside => assert!(!out.exists()),
            // Names that Windows does not have.
            Err(Error::Parameter { .. })
                if cfg!(windows) && row.file.starts_with("valid/path-characters") =>
            {
                assert!(!out.exists());
            }
            // A longer path than the system takes.
            Err(Error::Io { .. }) if row.files.keys().any(|path| path.len() > 255) => {}
            Err(error) => panic!("{}: {error}", row.file),
        }
    }
}

fn reference(bytes: &[u8], base: Option<&[u8]>) -> Result<Found, Failure> {
    use df11_reference::{Container, Kind};
    let failure = |level, errors: &[df11_reference::Error]| Failure {
        level,
        kinds: errors.iter().map(|error| format!("{:?}", error.kind)).collect(),
        text: format!("{errors:?}"),
    };
    let container = Container::open(bytes).map_err(|error| failure("open", &[error]))?;
    let base = base.map(|base| Container::open(base).unwrap());
    let (mut decoded, mut errors) = (Decoded::new(), Vec::new());
    for (index, tensor) in container.tensors().enumerate() {
        match container.decode_with(index, base.as_ref()) {
            Ok(bytes) => drop(decoded.insert(tensor.name.to_owned(), bytes)),
            Err(error) => errors.push(error),
        }
    }
    if errors.iter().any(|error| error.kind != Kind::Unsupported) {
        return Err(failure("load", &errors));
    }
    Ok(Found { decoded, result: None })
}
