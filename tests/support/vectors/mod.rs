//! The test vectors of the format: small containers, each with what a reader must make of it. The
//! manifest's fields are explained in spec/vectors/README.md.
#![allow(dead_code, reason = "test and example each need another part")]

mod edges;
mod invalid;
mod tile;
mod valid;

use std::{collections::BTreeMap, fmt::Write, io::Read, path::Path};

use df11::hazmat::format::records::{FILE_SIDE, FILE_WEIGHTS};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::container::{Model, Tensor};

/// What writes the vectors.
pub(crate) const COMMAND: &str = "cargo run --release --example vectors";

/// Larger containers are stored compressed: most of their bytes are zeros.
const PLAIN_BYTES: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) version: String,
    pub(crate) vectors: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) file: String,
    /// Of the container, decompressed.
    pub sha256: String,
    pub(crate) expect: Expect,
    /// Where an invalid one fails.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) level: Option<String>,
    /// What verification of a valid one gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) result: Option<String>,
    pub(crate) about: String,
    /// Hashes of the decoded bytes of all tensors that decode.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) tensors: BTreeMap<String, String>,
    /// Hashes of all files that can be restored.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) files: BTreeMap<String, String>,
}

/// `valid`, the kind of an error, or kinds of which one is right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Expect {
    One(String),
    AnyOf(Vec<String>),
}

impl Expect {
    pub(crate) fn is_valid(&self) -> bool {
        *self == Self::One("valid".into())
    }

    pub(crate) fn allows(&self, kind: &str) -> bool {
        match self {
            Self::One(one) => one == kind,
            Self::AnyOf(any) => any.iter().any(|one| one == kind),
        }
    }
}

/// A vector and its row.
pub(crate) struct Vector {
    pub(crate) row: Row,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

impl Vector {
    fn new(folder: &str, name: &str, expect: Expect, about: &str, bytes: Vec<u8>) -> Self {
        let compressed = if bytes.len() > PLAIN_BYTES { ".gz" } else { "" };
        let row = Row {
            file: format!("{folder}/{name}.df11{compressed}"),
            sha256: sha256(&bytes),
            expect,
            level: None,
            result: None,
            about: about.into(),
            tensors: BTreeMap::new(),
            files: BTreeMap::new(),
        };
        Self { row, bytes }
    }

    /// A valid container of this model, all of whose tensors decode but those for which
    /// `unsupported` holds.
    fn valid(
        name: &str,
        about: &str,
        model: &Model,
        bytes: Vec<u8>,
        unsupported: impl Fn(&Tensor) -> bool,
    ) -> Self {
        let mut vector = Self::new("valid", name, Expect::One("valid".into()), about, bytes);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let decodable = model.tensors.iter().filter(|tensor| !unsupported(tensor));
        vector.row.tensors =
            decodable.map(|tensor| (text(&tensor.name), sha256(&tensor.data))).collect();
        let blocked = |file: usize| {
            model.tensors.iter().any(|tensor| tensor.file == file as u64 && unsupported(tensor))
        };
        let restorable = model.files.iter().enumerate().filter(|&(index, file)| match file.kind {
            FILE_WEIGHTS => !blocked(index),
            kind => kind == FILE_SIDE,
        });
        vector.row.files =
            restorable.map(|(_, file)| (text(&file.path), sha256(&file.content))).collect();
        let is_whole = model.shard.1 == 1
            && vector.row.tensors.len() == model.tensors.len()
            && vector.row.files.len() == model.files.len();
        vector.row.result = Some(if is_whole { "good" } else { "incomplete" }.into());
        vector
    }

    /// One that is Corrupt, found at this level at the latest.
    fn invalid(name: &str, level: &str, about: &str, bytes: Vec<u8>) -> Self {
        let expect = Expect::One("Corrupt".into());
        let mut vector = Self::new("invalid", name, expect, about, bytes);
        vector.row.level = Some(level.into());
        vector
    }

    /// The same, with other kinds of errors, of which any one is right.
    fn expecting(mut self, kinds: &[&str]) -> Self {
        self.row.expect = match kinds {
            [kind] => Expect::One((*kind).into()),
            kinds => Expect::AnyOf(kinds.iter().map(|&kind| kind.into()).collect()),
        };
        self
    }

    /// The bytes as stored.
    pub(crate) fn stored(&self) -> Vec<u8> {
        if self.bytes.len() <= PLAIN_BYTES {
            return self.bytes.clone();
        }
        let mut encoder = flate2::GzBuilder::new().write(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut encoder, &self.bytes).unwrap();
        encoder.finish().unwrap()
    }
}

/// The container in a stored vector.
pub(crate) fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let stored = std::fs::read(path)?;
    if path.extension().is_none_or(|extension| extension != "gz") {
        return Ok(stored);
    }
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(&stored[..]).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// All vectors, made afresh.
pub(crate) fn all() -> Vec<Vector> {
    let mut vectors = valid::vectors();
    vectors.extend(tile::vectors());
    vectors.extend(invalid::vectors());
    vectors
}

pub(crate) fn manifest(vectors: &[Vector]) -> String {
    let manifest = Manifest {
        version: "1.0".into(),
        vectors: vectors.iter().map(|vector| vector.row.clone()).collect(),
    };
    serde_json::to_string_pretty(&manifest).unwrap() + "\n"
}
