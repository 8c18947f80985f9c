//! A model's entry in the cache of the Hugging Face Hub. One of its snapshots is the model.
//!
//! ```text
//! models--org--name/
//!   blobs/                  contents, by their hashes
//!   refs/main               the commit that a branch names
//!   snapshots/COMMIT/       the model: links to blobs
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    Error, Result,
    io::read_regular,
    paths::{check_path, hub_home, path_variable},
};

/// The longest file of `refs/` that is read, in bytes; it holds the hash of a commit.
const MAX_REF_BYTES: u64 = 1024;

/// The place of a requested model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Located {
    /// A file or folder.
    pub path: PathBuf,
    /// The repository of the Hub that it is from, as `org/name`, if that is known.
    pub repository: Option<String>,
    /// Whether the caller named the repository, and not a path.
    pub by_name: bool,
}

/// Finds a model by its path, or by the name of a repository (`org/name`, or `org/name@revision`)
/// in the cache of the Hub, which is where `HF_HUB_CACHE` or `HF_HOME` say.
///
/// # Errors
/// [`Error::Parameter`] for a repository that is not in the cache, and for a revision that is a
/// path out of it.
pub fn locate(path: &Path) -> Result<Located> {
    let by_path = |repository| Located { path: path.to_owned(), repository, by_name: false };
    if path.exists() {
        return Ok(by_path(path.canonicalize().ok().and_then(|path| repository_of(&path))));
    }
    let (Some(text), Some(cache)) = (path.to_str(), folder(path_variable)) else {
        return Ok(by_path(None));
    };
    let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
    if !is_repository(name) {
        return Ok(by_path(None));
    }
    if check_path(revision).is_err() {
        let problem = format!("{text}: {revision:?} is not a revision of a repository");
        return Err(Error::parameter(problem, "name a branch, a tag or a commit after the @"));
    }
    let entry = cache.join(format!("models--{}", name.replace('/', "--")));
    if let Some(path) = entry.is_dir().then(|| of_revision(&entry, revision, text)).transpose()? {
        return Ok(Located { path, repository: Some(name.to_owned()), by_name: true });
    }
    // A name in a folder that exists is more likely a path with a mistake.
    let is_path =
        Path::new(name).parent().is_some_and(|parent| parent != Path::new("") && parent.exists());
    if is_path || !name.contains('/') {
        return Ok(by_path(None));
    }
    let problem = format!(
        "{text} is neither a path here nor a model in the Hugging Face cache ({})",
        cache.display()
    );
    Err(Error::parameter(problem, format!("fetch it: {}", fetch(name, revision))))
}

fn fetch(name: &str, revision: &str) -> String {
    let revision =
        if revision == "main" { String::new() } else { format!(" --revision {revision}") };
    format!("hf download {name}{revision}")
}

/// The part of an entry that is a revision.
fn of_revision(entry: &Path, revision: &str, text: &str) -> Result<PathBuf> {
    if revision == "main" {
        return Ok(entry.to_owned());
    }
    of_commits(entry, revision).ok_or_else(|| {
        let name = text.split('@').next().unwrap_or(text);
        let problem =
            format!("the Hugging Face cache has another revision of {name}, and not {revision}");
        Error::parameter(problem, format!("fetch it: {}", fetch(name, revision)))
    })
}

/// The snapshot of a revision of a repository in the cache, if it is there; perhaps not all of it.
#[cfg(feature = "remote")]
pub(super) fn snapshot_of(name: &str, revision: &str) -> Option<PathBuf> {
    let cache = folder(path_variable)?;
    let entry = cache.join(format!("models--{}", name.replace('/', "--")));
    of_commits(&entry, revision)
}

fn of_commits(entry: &Path, revision: &str) -> Option<PathBuf> {
    let commits = commit_of(entry, revision).into_iter().chain(as_commit(revision));
    let mut paths = commits.map(|commit| entry.join("snapshots").join(commit));
    paths.find(|path| path.is_dir())
}

/// The commit that a file of `refs/` names; None if there is no such file, or it holds anything
/// else.
fn commit_of(root: &Path, reference: &str) -> Option<String> {
    let bytes = read_regular(&root.join("refs").join(reference), MAX_REF_BYTES).ok()?;
    as_commit(std::str::from_utf8(&bytes).ok()?.trim())
}

/// The name of a snapshot, if this is one and no path.
fn as_commit(name: &str) -> Option<String> {
    let is_name = check_path(name).is_ok() && !name.contains(['/', '.']);
    is_name.then(|| name.to_owned())
}

/// Where the cache is, given the environment.
fn folder(get: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let cache = get("HF_HUB_CACHE").or_else(|| get("HUGGINGFACE_HUB_CACHE"));
    cache.or_else(|| Some(hub_home(get)?.join("hub")))
}

/// Whether text reads as the name of a repository.
pub(crate) fn is_repository(name: &str) -> bool {
    let is_word = |part: &str| {
        let is_known = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
        !part.is_empty()
            && part.chars().all(is_known)
            && !part.starts_with('.')
            && !part.contains("--")
    };
    let parts: Vec<&str> = name.split('/').collect();
    parts.len() <= 2 && parts.iter().all(|part| is_word(part))
}

/// The repository of a path in a cache.
fn repository_of(path: &Path) -> Option<String> {
    let mut names = path.iter().rev().filter_map(|name| name.to_str());
    let (org, name) = names.find_map(|name| name.strip_prefix("models--"))?.split_once("--")?;
    let repository = format!("{org}/{name}");
    is_repository(&repository).then_some(repository)
}

/// The snapshot of an entry's root, with a note: that of `refs/main`, else the only one; any other
/// folder as it is. An error if there are several snapshots and no `refs/main` among them, or none.
pub(super) fn snapshot(root: &Path) -> Result<(PathBuf, Option<String>)> {
    let snapshots = root.join("snapshots");
    if !root.join("blobs").is_dir() || !snapshots.is_dir() {
        return Ok((root.to_owned(), None));
    }
    let noted = |path: PathBuf| {
        let note = format!("the cache's snapshot {} was read", path.display());
        Ok((path, Some(note)))
    };
    let named = commit_of(root, "main").map(|commit| snapshots.join(commit));
    if let Some(path) = named.filter(|path| path.is_dir()) {
        return noted(path);
    }
    let listing = |error| Error::io("listing", &snapshots, error);
    let entries = fs::read_dir(&snapshots).map_err(listing)?.collect::<std::io::Result<Vec<_>>>();
    let mut folders: Vec<PathBuf> =
        entries.map_err(listing)?.iter().map(fs::DirEntry::path).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    let entry = format!("{} is an entry of the Hugging Face cache", root.display());
    match &folders[..] {
        [only] => noted(only.clone()),
        [] => {
            let problem = format!("{entry} without a snapshot");
            Err(Error::parameter(problem, "fetch the model with hf download"))
        }
        several => {
            let count = several.len();
            let problem =
                format!("{entry} with {count} snapshots, and refs/main names none of them");
            let all: Vec<_> = several.iter().map(|path| path.to_string_lossy()).collect();
            Err(Error::parameter(problem, format!("name one: {}", all.join(", "))))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{paths::not_empty, platform::HOME};

    #[test]
    fn the_environment_tells_where_the_cache_is() {
        let of = |variables: &[(&str, &str)]| {
            let variables: BTreeMap<_, _> = variables.iter().copied().collect();
            folder(|name| not_empty(variables.get(name).map(PathBuf::from)))
        };
        assert_eq!(of(&[]), None);
        for (variables, wanted) in [
            (&[(HOME, "/h")][..], "/h/.cache/huggingface/hub"),
            (&[(HOME, "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[(HOME, "/h"), ("HF_HOME", "/f")], "/f/hub"),
            (&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f")], "/c"),
            (&[("HF_HUB_CACHE", ""), ("HF_HOME", "/f")], "/f/hub"),
            (&[("HUGGINGFACE_HUB_CACHE", "/c"), ("HF_HOME", "/f")], "/c"),
        ] {
            assert_eq!(of(variables).as_deref(), Some(Path::new(wanted)));
        }
    }

    #[test]
    fn names_of_repositories() {
        for name in ["org/name", "meta-llama/Llama-3.1-8B", "gpt2", "a_b/c.d"] {
            assert!(is_repository(name), "{name}");
        }
        for name in ["", "/a", "a/", "a/b/c", "../a", "./a", "a b/c", "a--b/c", "~/a"] {
            assert!(!is_repository(name), "{name}");
        }
        let path = Path::new("/c/models--org--a-name/snapshots/0123");
        assert_eq!(repository_of(path).as_deref(), Some("org/a-name"));
        assert_eq!(repository_of(Path::new("/c/models--gpt2")), None);
        assert_eq!(repository_of(Path::new("/c/model")), None);
    }
}
