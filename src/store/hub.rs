//! Repositories of the Hugging Face Hub: `hf://org/name@revision/path → https://…/resolve/COMMIT/`.

use std::{env, fs};

use serde::Deserialize;

use crate::{
    Error, Result,
    paths::{check_path, hub_home, path_variable},
};

/// Where the Hub is, unless `HF_ENDPOINT` says.
const ENDPOINT: &str = "https://huggingface.co";
/// The longest answer about a repository, in bytes; each file takes some hundred.
pub(super) const MAX_ANSWER_BYTES: u64 = 64 << 20;

/// A repository, or a file or folder of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Repository {
    pub(crate) name: String,
    pub(crate) revision: String,
    /// The file or folder; empty for all.
    pub(crate) path: String,
}

/// The Hub's answer about a revision.
#[derive(Deserialize)]
pub(super) struct Revision {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Repository {
    /// Parses what follows `hf://`.
    ///
    /// # Errors
    /// [`Error::Parameter`] for what names no repository.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let (owner, rest) = text.split_once('/').unwrap_or((text, ""));
        let end = rest.find(['/', '@']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let (revision, path) = match rest.strip_prefix('@') {
            Some(rest) => split_revision(rest),
            None => ("main".to_owned(), rest),
        };
        let path = path.trim_matches('/');
        let is_word = |word: &str| {
            let is_char = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
            !word.is_empty() && !word.starts_with('.') && word.chars().all(is_char)
        };
        let is_path = path.is_empty() || check_path(path).is_ok();
        if !is_word(owner) || !is_word(name) || check_path(&revision).is_err() || !is_path {
            let problem = format!("hf://{text} names no repository of the Hub");
            let remedy = "write it as hf://org/name, hf://org/name@revision or \
                          hf://org/name@revision/path, with %2F for each / of the revision";
            return Err(Error::parameter(problem, remedy));
        }
        let name = format!("{owner}/{name}");
        Ok(Self { name, revision, path: path.to_owned() })
    }

    /// The URL that answers with a [`Revision`].
    pub(super) fn api(&self) -> String {
        let revision = self.revision.replace('/', "%2F");
        format!("{}/api/models/{}/revision/{revision}", endpoint(), self.name)
    }

    /// The URL of the files of a commit.
    pub(super) fn files(&self, revision: &Revision) -> String {
        format!("{}/{}/resolve/{}", endpoint(), self.name, revision.sha)
    }
}

impl Revision {
    /// # Errors
    /// [`Error::Corrupt`] for what is no such answer.
    pub(super) fn parse(bytes: &[u8], name: &str) -> Result<Self> {
        let wrong = |problem: String| Error::corrupt(name, 0, problem);
        let found: Self = serde_json::from_slice(bytes)
            .map_err(|error| wrong(format!("the Hub's answer is not understood: {error}")))?;
        let is_commit = !found.sha.is_empty() && found.sha.bytes().all(|b| b.is_ascii_hexdigit());
        Error::unless(is_commit, || wrong("the Hub names no commit".to_owned()))?;
        Ok(found)
    }

    /// The paths of all files.
    pub(super) fn paths(&self) -> impl Iterator<Item = &str> {
        let paths = self.siblings.iter().map(|sibling| &*sibling.rfilename);
        paths.filter(|path| check_path(path).is_ok())
    }
}

/// A revision, and what follows it. Its slashes are written as `%2F`, except in what the Hub itself
/// names: `refs/pr/1`, `refs/convert/name`.
fn split_revision(text: &str) -> (String, &str) {
    let own = ["refs/pr/", "refs/convert/"].into_iter().find(|start| text.starts_with(start));
    let start = own.map_or(0, str::len);
    let end = text[start..].find('/').map_or(text.len(), |at| start + at);
    (text[..end].replace("%2F", "/").replace("%2f", "/"), &text[end..])
}

fn endpoint() -> String {
    let endpoint = env::var("HF_ENDPOINT").unwrap_or_default();
    let endpoint = if endpoint.is_empty() { ENDPOINT } else { &endpoint };
    endpoint.trim_end_matches('/').to_owned()
}

/// The token of `HF_TOKEN`, or of the login below `HF_TOKEN_PATH`, `HF_HOME` or the home folder.
pub(super) fn token() -> Option<String> {
    if let Some(token) = env::var("HF_TOKEN").ok().filter(|token| !token.is_empty()) {
        return Some(token);
    }
    let path =
        path_variable("HF_TOKEN_PATH").or_else(|| Some(hub_home(path_variable)?.join("token")))?;
    let token = fs::read_to_string(path).ok()?.trim().to_owned();
    (!token.is_empty()).then_some(token)
}

/// Refuses to ask the Hub where `HF_HUB_OFFLINE` forbids it.
///
/// # Errors
/// [`Error::Parameter`].
pub(super) fn check_online() -> Result<()> {
    let value = env::var("HF_HUB_OFFLINE").unwrap_or_default().to_ascii_uppercase();
    Error::unless(!matches!(&*value, "1" | "ON" | "YES" | "TRUE"), || {
        Error::parameter("HF_HUB_OFFLINE forbids to ask the Hub", "unset it, or name a local path")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_repositories() {
        let found = Repository::parse("org/name@v1/sub/x.df11").unwrap();
        let of = |name: &str, revision: &str, path: &str| Repository {
            name: name.to_owned(),
            revision: revision.to_owned(),
            path: path.to_owned(),
        };
        assert_eq!(found, of("org/name", "v1", "sub/x.df11"));
        for (text, revision, path) in [
            ("org/name/", "main", ""),
            ("org/name@feature%2Fx/sub", "feature/x", "sub"),
            ("org/name@refs/pr/1", "refs/pr/1", ""),
            ("org/name@refs%2Fpr%2F1/sub/y@z.df11", "refs/pr/1", "sub/y@z.df11"),
            ("org/name/sub@x", "main", "sub@x"),
        ] {
            assert_eq!(Repository::parse(text).unwrap(), of("org/name", revision, path), "{text}");
        }
        assert!(of("org/name", "feature/x", "").api().ends_with("/revision/feature%2Fx"));
        for wrong in ["", "org", "org/", "/name", "org/na me", "org/name@", "org/name/../x"] {
            assert!(Repository::parse(wrong).is_err(), "{wrong}");
        }
    }
}
