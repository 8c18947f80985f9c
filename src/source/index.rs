//! The sharding index of a Hugging Face folder: `{"metadata": …, "weight_map": {tensor: file}}`.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde::Deserialize;

use super::{
    safetensors::WeightsFile,
    unique, variant,
    walk::{Found, MAX_SIDE_BYTES},
};
use crate::{
    Error, Result,
    io::read_regular,
    paths::{check_path, folder_of},
};

/// How the name of an index ends.
const SUFFIX: &str = ".safetensors.index.json";
/// The index that counts where a folder has several: the one that the transformers library looks
/// for.
const DEFAULT: &str = "model.safetensors.index.json";

/// Whether a path is that of an index, also of a variant.
pub(super) fn is_index(path: &str) -> bool {
    path.ends_with(SUFFIX) || variant::is_index(path)
}

/// An index, with every path relative to the source.
pub(super) struct Index {
    pub(super) path: String,
    /// File → the tensors that it must hold.
    pub(super) files: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
struct Json {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads and validates an index; the cost grows with its length.
    pub(super) fn read(found: &Found) -> Result<Self> {
        let what = format_args!("{}: its length in bytes", found.path);
        Error::check_limit(what, found.length, MAX_SIDE_BYTES)?;
        let bytes = read_regular(&found.file)?;
        let invalid =
            |error| Error::corrupt(&found.path, 0, format!("not a sharding index: {error}"));
        let json: Json = unique::from_slice(&bytes).map_err(invalid)?;
        let mut files = BTreeMap::<String, Vec<String>>::new();
        for (tensor, file) in json.weight_map {
            if check_path(&file).is_err() {
                let problem =
                    format!("it places a tensor in {file:?}, which is no path inside its folder");
                return Err(Error::corrupt(&found.path, 0, problem));
            }
            files.entry(format!("{}{file}", folder_of(&found.path))).or_default().push(tensor);
        }
        Ok(Self { path: found.path.clone(), files })
    }

    /// Checks that each file holds what the index places in it.
    pub(super) fn check(&self, weights: &[WeightsFile]) -> Result<()> {
        for (path, tensors) in &self.files {
            let Some(file) = weights.iter().find(|file| file.path == *path) else { continue };
            let names: HashSet<_> =
                file.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            if let Some(tensor) = tensors.iter().find(|tensor| !names.contains(tensor.as_str())) {
                let problem = format!("it places {tensor:?} in {path}, which has no such tensor");
                return Err(Error::corrupt(&self.path, 0, problem).remedied("download both again"));
            }
        }
        Ok(())
    }

    /// Checks that the folder has every file that the index names.
    pub(super) fn check_files(&self, present: &BTreeSet<&str>) -> Result<()> {
        let missing = self.files.keys().find(|file| !present.contains(file.as_str()));
        let Some(file) = missing else { return Ok(()) };
        let problem = format!("{} names {file}, which is missing", self.path);
        let remedy = "download the missing file, or name a single file instead of the folder";
        Err(Error::parameter(problem, remedy))
    }
}

/// The index that counts for each folder that has one, keyed by the folder with its trailing `/`.
pub(super) fn read_all(found: &[Found]) -> Result<BTreeMap<String, Index>> {
    let mut candidates = BTreeMap::<&str, Vec<&Found>>::new();
    for file in found.iter().filter(|file| is_index(&file.path)) {
        candidates.entry(folder_of(&file.path)).or_default().push(file);
    }
    let choose = |(folder, files): (&str, Vec<&Found>)| {
        let chosen = match files[..] {
            [only] => Some(only),
            _ => files.iter().copied().find(|file| file.path[folder.len()..] == *DEFAULT),
        };
        let chosen = chosen.ok_or_else(|| {
            let problem = format!("{} and {} divide the same folder", files[0].path, files[1].path);
            let remedy = "move one of them, and the files that it names, to a folder of its own";
            Error::parameter(problem, remedy)
        })?;
        Ok((folder.to_owned(), Index::read(chosen)?))
    };
    candidates.into_iter().map(choose).collect()
}

/// Weights files that the indexes of a folder name. Indexes that cannot be read name none.
pub(crate) fn named_files(found: &[Found]) -> BTreeSet<String> {
    let indexes = found.iter().filter(|file| is_index(&file.path));
    indexes
        .filter_map(|file| Index::read(file).ok())
        .flat_map(|index| index.files.into_keys())
        .collect()
}
