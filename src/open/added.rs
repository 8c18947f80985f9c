//! Weights that a folder's containers lack, such as a new head, in a safetensors file with a fixed
//! name beside them. The file's metadata have the identity of its model and the hash of each
//! tensor, which verification checks.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;

use super::{model::Model, original::hash_tensor};
use crate::{Error, Result, paths::ADDED, source::WeightsFile};

/// The key of the metadata for the identity of the containers, in hexadecimal digits.
const IDENTITY: &str = "df11.identity";
/// The key for hashes: a JSON object of names and hashes in hexadecimal digits.
const HASHES: &str = "df11.hashes";

/// The BLAKE3 hashes of the tensors of a safetensors file, by name. Reads it once, in 4 MiB.
///
/// # Errors
/// Like [`WeightsFile::open`].
pub fn tensor_hashes(file: &Path) -> Result<BTreeMap<String, String>> {
    let name = file.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    hashes(&WeightsFile::open(file, &name)?)
}

fn hashes(file: &WeightsFile) -> Result<BTreeMap<String, String>> {
    let tensors = file.tensors.iter();
    tensors.map(|one| Ok((one.name.clone(), hash_tensor(file, one)?.to_string()))).collect()
}

/// Tensors and bytes that were compared, and what could not be.
#[derive(Default)]
pub(super) struct Compared {
    pub(super) tensors: u64,
    pub(super) bytes: u64,
    pub(super) unchecked: Option<String>,
}

/// Verifies the file beside a model's containers, if anything has its name: it holds none of their
/// tensors and, if `is_full`, is as it was written.
pub(super) fn verify(model: &Model, is_full: bool) -> Result<Compared> {
    let none = Compared::default();
    let Some(path) = model.folder().map(|folder| folder.join(ADDED)) else { return Ok(none) };
    if path.symlink_metadata().is_err() {
        return Ok(none);
    }
    let remedied = |error: Error| {
        error.remedied("remove the file, or write the folder again with save_pretrained")
    };
    let name = path.display().to_string();
    let file = WeightsFile::open(&path, &name).map_err(remedied)?;
    let wrong = |problem: String| Err(remedied(Error::corrupt(&name, 0, problem)));
    if let Some(tensor) = file.tensors.iter().find(|tensor| model.tensor(&tensor.name).is_ok()) {
        return wrong(format!("it has a tensor {:?}, and so have the containers", tensor.name));
    }
    if !is_full {
        return Ok(none);
    }
    let Some((identity, recorded)) = recorded(&file) else {
        let unchecked = format!("the weights in {ADDED}, which have no recorded hash");
        return Ok(Compared { unchecked: Some(unchecked), ..none });
    };
    if identity != model.identity().to_hex().as_str() {
        return wrong("it belongs to another model".to_owned());
    }
    if hashes(&file)? != recorded {
        return wrong("a tensor has another hash than is recorded".to_owned());
    }
    let bytes = file.tensors.iter().map(|tensor| tensor.length).sum();
    Ok(Compared { tensors: recorded.len() as u64, bytes, unchecked: None })
}

/// The identity and the hashes that the metadata record.
fn recorded(file: &WeightsFile) -> Option<(String, BTreeMap<String, String>)> {
    let header: Value = serde_json::from_slice(file.prefix.get(size_of::<u64>()..)?).ok()?;
    let metadata = header.get("__metadata__")?;
    let (identity, hashes) = (metadata.get(IDENTITY)?.as_str()?, metadata.get(HASHES)?.as_str()?);
    Some((identity.to_owned(), serde_json::from_str(hashes).ok()?))
}
