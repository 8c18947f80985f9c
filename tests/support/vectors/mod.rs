//! The test vectors of the format: small containers. How each is made stands here; what is special
//! about it, and what a reader must make of it, in the manifest, whose fields are explained in
//! spec/vectors/README.md.
#![allow(dead_code, reason = "test and example each need another part")]

mod delta;
mod float;
mod invalid;
mod tile;
mod valid;

use std::{collections::BTreeMap, fs, io::Read, path::Path};

use df11::{
    Dtype,
    hazmat::format::records::{
        ENCODING_ALIAS, ENCODING_DELTA, ENCODING_FLOAT, ENCODING_GAP, ENCODING_RAW, ENCODING_TILE,
        FILE_SIDE, FILE_WEIGHTS,
    },
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::container::{Item, Model, Tensor};

/// The command that writes the vectors.
pub(crate) const COMMAND: &str = "cargo run --release --example vectors";

/// Larger containers are stored compressed: most of their bytes are zeros.
const PLAIN_BYTES: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) version: String,
    pub(crate) vectors: Vec<Row>,
}

/// A vector's row: file, expect, level and about are written by hand, the rest by the command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) file: String,
    /// SHA-256 of the decompressed container.
    #[serde(default)]
    pub(crate) sha256: String,
    pub(crate) expect: Expect,
    /// The level at which an invalid vector fails.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) level: Option<String>,
    /// The result of verifying a valid vector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) result: Option<String>,
    pub(crate) about: String,
    /// The vector that a reader is given as the base model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<String>,
    /// Hashes of the decoded bytes of all tensors that decode.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) tensors: BTreeMap<String, String>,
    /// Hashes of all files that can be restored.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) files: BTreeMap<String, String>,
}

impl Row {
    /// The path without extensions, such as `valid/smallest`.
    fn name(&self) -> &str {
        self.file.split(".df11").next().unwrap_or_default()
    }
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
        self.allows("valid")
    }

    pub(crate) fn allows(&self, kind: &str) -> bool {
        match self {
            Self::One(one) => one == kind,
            Self::AnyOf(any) => any.iter().any(|one| one == kind),
        }
    }
}

/// A container and its row of the manifest.
pub(crate) struct Vector {
    pub(crate) bytes: Vec<u8>,
    result: Option<String>,
    tensors: BTreeMap<String, String>,
    files: BTreeMap<String, String>,
}

/// All vectors by their paths without extensions.
#[derive(Default)]
pub(crate) struct Vectors(pub(crate) BTreeMap<String, Vector>);

pub(crate) fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

impl Vectors {
    /// All of them, made afresh.
    pub(crate) fn all() -> Self {
        let mut vectors = Self::default();
        valid::make(&mut vectors);
        tile::make(&mut vectors);
        float::make(&mut vectors);
        delta::make(&mut vectors);
        invalid::make(&mut vectors);
        vectors
    }

    fn add(&mut self, name: &str, vector: Vector) {
        assert!(self.0.insert(name.into(), vector).is_none(), "{name} twice");
    }

    fn invalid(&mut self, name: &str, bytes: Vec<u8>) {
        let (tensors, files) = (BTreeMap::new(), BTreeMap::new());
        self.add(&format!("invalid/{name}"), Vector { bytes, result: None, tensors, files });
    }

    /// A valid container of these items.
    fn items(&mut self, name: &str, items: &[Item]) {
        self.valid(name, &Model::new(items, &[]));
    }

    /// A valid container of this model.
    fn valid(&mut self, name: &str, model: &Model) {
        self.valid_as(name, model, model.build());
    }

    /// A valid container of this model, in these bytes.
    fn valid_as(&mut self, name: &str, model: &Model, bytes: Vec<u8>) {
        self.add_valid(name, model, bytes, false);
    }

    /// A valid container of this model; its row names its base.
    fn with_base(&mut self, name: &str, model: &Model) {
        self.add_valid(name, model, model.build(), true);
    }

    /// A valid container of this model, whose base readers do not get.
    fn without_base(&mut self, name: &str, model: &Model) {
        self.add_valid(name, model, model.build(), false);
    }

    fn add_valid(&mut self, name: &str, model: &Model, bytes: Vec<u8>, has_base: bool) {
        let is_known = |tensor: &&Tensor| is_known(model, tensor, has_base);
        let hashed =
            |name: &[u8], data: &[u8]| (String::from_utf8(name.to_vec()).unwrap(), sha256(data));
        let decodable = model.tensors.iter().filter(is_known);
        let tensors: BTreeMap<_, _> =
            decodable.map(|tensor| hashed(&tensor.name, &tensor.data)).collect();
        let blocked = |file: usize| {
            model.tensors.iter().any(|tensor| tensor.file == file as u64 && !is_known(&tensor))
        };
        let restorable = model.files.iter().enumerate().filter(|&(index, file)| match file.kind {
            FILE_WEIGHTS => !blocked(index),
            kind => kind == FILE_SIDE,
        });
        let files: BTreeMap<_, _> =
            restorable.map(|(_, file)| hashed(&file.path, &file.content)).collect();
        let is_whole = model.shard.1 == 1
            && tensors.len() == model.tensors.len()
            && files.len() == model.files.len();
        let result = Some(if is_whole { "good" } else { "incomplete" }.into());
        self.add(&format!("valid/{name}"), Vector { bytes, result, tensors, files });
    }

    /// The rows with all that follows from the vectors. Panics if a row lacks its vector, or a
    /// vector its row.
    pub(crate) fn rows(&self, told: &[Row]) -> Vec<Row> {
        let renewed = |row: &Row| {
            let name = row.name();
            let made = self.0.get(name);
            let made = made.unwrap_or_else(|| panic!("nothing makes {name}; delete its row"));
            let compressed = if made.bytes.len() > PLAIN_BYTES { ".gz" } else { "" };
            Row {
                file: format!("{name}.df11{compressed}"),
                sha256: sha256(&made.bytes),
                result: made.result.clone(),
                tensors: made.tensors.clone(),
                files: made.files.clone(),
                ..row.clone()
            }
        };
        for name in self.0.keys() {
            let rows = told.iter().filter(|row| row.name() == name).count();
            assert!(rows == 1, "{rows} rows of {name}: write one with file, expect, level, about");
        }
        told.iter().map(renewed).collect()
    }

    pub(crate) fn bytes(&self, row: &Row) -> &[u8] {
        &self.0[row.name()].bytes
    }
}

/// Whether every reader decodes a tensor, given its base or not.
fn is_known(model: &Model, tensor: &Tensor, has_base: bool) -> bool {
    Dtype::from_id(tensor.dtype).is_some()
        && match tensor.encoding {
            ENCODING_ALIAS => {
                is_known(model, &model.tensors[tensor.parameters[0] as usize], has_base)
            }
            ENCODING_DELTA => has_base,
            encoding => {
                [ENCODING_RAW, ENCODING_GAP, ENCODING_TILE, ENCODING_FLOAT].contains(&encoding)
            }
        }
}

/// The bytes as stored.
pub(crate) fn stored(bytes: &[u8]) -> Vec<u8> {
    if bytes.len() <= PLAIN_BYTES {
        return bytes.to_vec();
    }
    let mut encoder = flate2::GzBuilder::new().write(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut encoder, bytes).unwrap();
    encoder.finish().unwrap()
}

/// The container in a stored vector.
pub(crate) fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let stored = fs::read(path)?;
    if path.extension().is_none_or(|extension| extension != "gz") {
        return Ok(stored);
    }
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(&stored[..]).read_to_end(&mut bytes)?;
    Ok(bytes)
}
