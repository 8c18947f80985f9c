//! How a model records its base: as a path relative to its own folder, or as the name of a Hub
//! repository. Both are hints; the hash in each tensor's record decides.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{model::Model, opening::containers, options::OpenOptions, shard::Shard};
use crate::{Error, paths::scheme_of, source::hub_cache::is_repository};

/// The key of the metadata that tells where the base was.
pub(crate) const BASE: &str = "df11.base";

/// The most folders that a path leads up: further up it would hold on no other machine, and might
/// lead anywhere.
pub(crate) const MAX_UPS: usize = 2;

/// The base of a model, by its metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordedBase {
    /// Its identity, in hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) identity: Option<String>,
    /// Its name on the Hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) repository: Option<String>,
    /// Its path, relative to the folder of the model or of the container, with `/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) path: Option<String>,
}

impl RecordedBase {
    /// Reads it from the first shard of a model.
    pub(super) fn of(shard: &Shard) -> Self {
        let value = shard.directory().metadata().find(|(key, _)| *key == BASE);
        value.and_then(|(_, value)| serde_json::from_str(value).ok()).unwrap_or_default()
    }

    /// Reads it from a model. If its first shard is not open, reads that in the same folder.
    pub(super) fn of_model(model: &Model, options: &OpenOptions) -> Self {
        let first = &model.shards()[0];
        if first.directory().shard.shard_index == 0 || first.is_far {
            return Self::of(first);
        }
        let folder = first.path().parent().map(containers);
        let beside = folder.and_then(Result::ok).unwrap_or_default().into_iter();
        let is_first = |shard: &Shard| {
            let (own, other) = (&first.directory().shard, &shard.directory().shard);
            other.identity == own.identity && other.shard_index == 0
        };
        let mut shards = beside.filter_map(|path| options.shard(&path).ok());
        shards.find(is_first).map_or_else(Self::default, |shard| Self::of(&shard))
    }

    /// As people call it.
    pub(crate) fn name(&self) -> Option<&str> {
        self.repository.as_deref().or_else(|| self.path.as_deref()?.rsplit('/').next())
    }

    /// The paths at which it may be: of a model in this folder, and in the cache of the Hub.
    /// Metadata name no other place, and none beyond a network but in the folder's own store.
    pub(super) fn places(&self, folder: Option<&Path>) -> impl Iterator<Item = PathBuf> {
        let path = self.path.as_deref().filter(|path| is_plain(path)).map(Path::new);
        let near = folder.zip(path).and_then(|(folder, path)| match folder.to_str() {
            Some(name) if scheme_of(name).is_some() => place_in_store(name, path),
            _ => Some(folder.join(path)).filter(|path| path.exists()),
        });
        let repository = self.repository.as_deref().filter(|name| is_repository(name));
        near.into_iter().chain(repository.map(PathBuf::from))
    }
}

/// A path from a folder of a store on. It stays in the bucket or on the server.
fn place_in_store(folder: &str, path: &Path) -> Option<PathBuf> {
    let (scheme, rest) = scheme_of(folder)?;
    let mut parts: Vec<&str> = rest.trim_end_matches('/').split('/').collect();
    for step in path.components() {
        match step {
            Component::Normal(name) => parts.push(name.to_str()?),
            _ if parts.len() > 1 => _ = parts.pop(),
            _ => return None,
        }
    }
    Some(format!("{scheme}://{}", parts.join("/")).into())
}

/// Whether a path of the metadata leads to a name nearby: below the model's folder, or beside it.
fn is_plain(path: &str) -> bool {
    let steps = || Path::new(path).components();
    let is_up = |step: &Component<'_>| *step == Component::ParentDir;
    let is_name = |step: &Component<'_>| matches!(step, Component::Normal(_));
    !path.contains(['\\', ':', '\0'])
        && steps().all(|step| is_name(&step) || is_up(&step))
        && steps().next_back().is_some_and(|step| is_name(&step))
        && steps().filter(is_up).count() <= MAX_UPS
}

/// Why there is no base.
#[derive(Clone, Debug, Default)]
pub(super) struct NoBase {
    pub(super) recorded: RecordedBase,
    /// The problem of a model that seemed to be it.
    pub(super) problem: Option<String>,
}

impl NoBase {
    /// The error of a tensor that needs it.
    pub(super) fn error(&self) -> Error {
        let name =
            self.recorded.name().map_or("another model".to_owned(), |name| format!("{name:?}"));
        let identity = self.recorded.identity.as_ref();
        let identity = identity.map_or(String::new(), |identity| format!(" ({identity:.16}…)"));
        let problem = self.problem.as_deref().unwrap_or("it is not here");
        let what = format!("this is stored as its difference from {name}{identity}, and {problem}");
        let remedy = "fetch that model, or name it as the base: --base in the command, base= in \
                      Python, OpenOptions::base in Rust";
        Error::no_base(what, remedy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(path: &str, repository: &str, folder: &str) -> Vec<PathBuf> {
        let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let (path, repository) = (some(path), some(repository));
        let recorded = RecordedBase { identity: None, repository, path };
        recorded.places(Some(Path::new(folder))).collect()
    }

    #[test]
    fn bases_are_looked_for_in_the_store_of_the_model_and_in_the_cache() {
        for (path, folder, found) in [
            ("../base", "s3://bucket/models/tune", "s3://bucket/models/base"),
            ("../base.df11", "https://host/tune/", "https://host/base.df11"),
            ("base", "hf://org/tune", "hf://org/tune/base"),
        ] {
            assert_eq!(places(path, "", folder), [PathBuf::from(found)], "{path}");
        }
        assert_eq!(places("", "org/name", "s3://bucket/tune"), [PathBuf::from("org/name")]);
    }

    #[test]
    fn metadata_lead_to_no_other_place() {
        let none: [PathBuf; 0] = [];
        for path in [
            "../../base",
            "..",
            "base/..",
            "../../../base",
            "/base",
            "s3://other/base",
            "..\\base",
            "a\0b",
        ] {
            assert_eq!(places(path, "", "s3://bucket/tune"), none, "{path}");
        }
        for name in ["s3://bucket/base", "http://host/base", "../base", "/base", "a/b/c"] {
            assert_eq!(places("", name, "s3://bucket/tune"), none, "{name}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("a/b/c/d")).unwrap();
        let found = |path, at| places(path, "", folder.path().join(at).to_str().unwrap()).len();
        assert_eq!((found("../../a", "a/b"), found("..", "a/b")), (1, 0));
        assert_eq!((found("../../../a", "a/b/c"), found("../../b", "a/b/c")), (0, 1));
    }
}
