//! File names and what they mean, the rules for the paths in a container (those of shards and side
//! files, relative to the model's folder), and paths in the environment.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    env,
    path::{Path, PathBuf},
};

use crate::{
    Error, Result,
    constants::{MAX_COMPONENT_BYTES, MAX_NAME_BYTES, MAX_PATH_COMPONENTS},
    platform,
};

/// Checks that a path is relative, `/`-separated and cannot leave the folder it is joined to.
///
/// Components are neither empty nor `.` nor `..`; control characters, backslashes and colons are
/// forbidden, since some systems read them as something else than part of a name. Cost: one pass.
///
/// # Errors
/// [`Error::Limit`] if the path is longer than [`MAX_NAME_BYTES`], has more than
/// [`MAX_PATH_COMPONENTS`] components or one of more than [`MAX_COMPONENT_BYTES`];
/// [`Error::Corrupt`] if it breaks another rule, with the offset of the offending byte in the path.
pub fn check_path(path: &str) -> Result<()> {
    Error::check_limit("the length of a path in bytes", path.len() as u64, MAX_NAME_BYTES)?;
    let corrupt = |offset: usize, problem: &str| {
        Err(Error::corrupt(format!("path {path:?}"), offset as u64, problem))
    };
    if let Some((offset, _)) =
        path.char_indices().find(|&(_, c)| matches!(c, '\\' | ':') || c.is_control())
    {
        return corrupt(offset, "a backslash, a colon or a control character");
    }
    let mut offset = 0;
    for component in path.split('/') {
        match component {
            "" => return corrupt(offset, "an empty component"),
            "." | ".." => return corrupt(offset, "a `.` or `..` component"),
            _ => offset += component.len() + 1,
        }
    }
    let count = path.split('/').count() as u64;
    let what = format_args!("the number of components of path {path:?}");
    Error::check_limit(what, count, MAX_PATH_COMPONENTS)?;
    let longest = path.split('/').map(str::len).max().unwrap_or(0) as u64;
    let what = format_args!("the length in bytes of a component of path {path:?}");
    Error::check_limit(what, longest, MAX_COMPONENT_BYTES)
}

/// Refuses a path of which this system has no file. `remedy` says what to do.
///
/// # Errors
/// [`Error::Parameter`].
pub(crate) fn check_nameable(path: &str, remedy: &str) -> Result<()> {
    match path.split('/').find_map(platform::why_unnameable) {
        None => Ok(()),
        Some(why) => {
            let problem = format!("Windows has no file that is named {path:?}: {why}");
            Err(Error::parameter(problem, remedy))
        }
    }
}

/// The remedy for a name in a model.
pub(crate) const RENAME: &str = "rename it in the source, or use another system";

/// Schemes of names that are no paths: object stores, HTTP and the Hub.
const SCHEMES: [&str; 6] = ["s3", "gs", "az", "http", "https", "hf"];

/// The scheme of such a name, in any case, and what follows it.
pub(crate) fn scheme_of(name: &str) -> Option<(&str, &str)> {
    let is_known = |scheme: &str| SCHEMES.iter().any(|known| known.eq_ignore_ascii_case(scheme));
    name.split_once("://").filter(|(scheme, _)| is_known(scheme))
}

/// A path for messages. Of a name beyond a network it has neither user and password nor the query,
/// in which a signed URL has its signature.
pub fn shown(path: &Path) -> Cow<'_, Path> {
    match path.to_str().filter(|name| scheme_of(name).is_some()) {
        Some(name) => Cow::Owned(shown_name(name).into()),
        None => Cow::Borrowed(path),
    }
}

pub(crate) fn shown_name(name: &str) -> String {
    let Some((scheme, rest)) = name.split_once("://") else { return name.to_owned() };
    let scheme = scheme.to_ascii_lowercase();
    if scheme.starts_with("http") {
        let bare = rest.split(['?', '#']).next().unwrap_or(rest);
        // A password can have a slash.
        let bare = bare.rsplit('@').next().unwrap_or(bare);
        return format!("{scheme}://{bare}");
    }
    let (root, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    // The @ of hf://org/name@revision is in the path.
    let root = root.rsplit('@').next().unwrap_or(root);
    format!("{scheme}://{root}{path}")
}

/// Whether it is a name beyond a network.
pub fn is_far(path: &Path) -> bool {
    path.to_str().is_some_and(|name| scheme_of(name).is_some())
}

/// The error of a name beyond a network in a build that reaches none.
#[cfg(not(feature = "remote"))]
pub(crate) fn no_stores(name: &str) -> Error {
    let scheme = scheme_of(name).map_or(name, |(scheme, _)| scheme);
    let what = format!("a name that begins with {scheme}://");
    Error::unsupported(what, "build df11 with its feature remote, or use local files")
}

/// Refuses a name beyond a network, for what reads or writes files.
///
/// # Errors
/// [`Error::Parameter`].
pub fn check_local(path: &Path) -> Result<()> {
    Error::unless(!is_far(path), || {
        let problem = format!("{} is not on this machine", shown(path).display());
        let remedy = "name a path; the tool of the store fetches a source and uploads an output";
        Error::parameter(problem, remedy)
    })
}

/// The folder of a path, with its trailing `/`; empty for what lies in none.
pub(crate) fn folder_of(path: &str) -> &str {
    path.rfind('/').map_or("", |slash| &path[..=slash])
}

/// Where a weights file's container goes in a folder.
pub(crate) fn shard_path(weights: &str) -> String {
    let stem = weights.strip_suffix(".safetensors").unwrap_or(weights);
    format!("{stem}.df11")
}

/// Paths in the order of a tree: what lies in a folder comes directly after a file with the
/// folder's name. Cost: one sort.
pub(crate) struct PathTree<'a>(Vec<&'a str>);

impl<'a> PathTree<'a> {
    pub(crate) fn new(paths: impl Iterator<Item = &'a str>) -> Self {
        let mut paths: Vec<&str> = paths.collect();
        // No path has a character below `/` that is legal in a name and sorts before it, once `/`
        // is 0.
        let key = |byte: u8| if byte == b'/' { 0 } else { byte };
        paths.sort_unstable_by(|a, b| a.bytes().map(key).cmp(b.bytes().map(key)));
        Self(paths)
    }

    /// Two paths that no folder can hold both: they are equal, or one lies in the other.
    pub(crate) fn clash(&self) -> Option<(&'a str, &'a str)> {
        let mut pairs = self.0.windows(2).map(|pair| (pair[0], pair[1]));
        pairs.find(|(first, second)| {
            second.strip_prefix(first).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }

    /// The number of folders that the paths name.
    pub(crate) fn folders(&self) -> u64 {
        let mut before = "";
        let mut count = 0;
        for path in &self.0 {
            let same = path.char_indices().zip(before.chars()).find(|((_, a), b)| a != b);
            let shared = same.map_or(path.len().min(before.len()), |((at, _), _)| at);
            count += path[shared..].matches('/').count() as u64;
            before = path;
        }
        count
    }
}

/// The file that transformers and diffusers read first.
pub(crate) const CONFIG: &str = "config.json";

/// The configurations of weights, given the paths of all files: for each weights file the nearest
/// one, in its folder or above, since an index may name weights in subfolders.
pub(crate) fn configs<'a>(
    weights: impl Iterator<Item = &'a str>,
    side: impl Iterator<Item = &'a str>,
) -> BTreeSet<&'a str> {
    let is_config = |path: &&str| path.strip_prefix(folder_of(path)) == Some(CONFIG);
    let all: BTreeSet<&str> = side.filter(is_config).collect();
    let nearest = |mut path: &'a str| {
        loop {
            let folder = folder_of(path);
            if let Some(config) = all.get(format!("{folder}{CONFIG}").as_str()) {
                return Some(*config);
            }
            path = folder.strip_suffix('/')?;
        }
    };
    weights.filter_map(nearest).collect()
}

/// The file by which diffusers knows the folder of a pipeline.
pub(crate) const MODEL_INDEX: &str = "model_index.json";

/// The container of a compressed pipeline that lists its components, and records all files that
/// belong to none of them.
pub(crate) const PIPELINE: &str = "pipeline.df11";

/// The file in which runtimes keep weights that the containers beside it lack.
pub(crate) const ADDED: &str = "df11.safetensors";

/// The subfolder in which a save keeps its new files, once they are complete, until each has its
/// name.
pub const PENDING: &str = ".df11-new";

/// Whether a folder would be taken for a pipeline's by a container of this path in it, on disks too
/// that fold names.
pub(crate) fn is_pipeline_list(path: &str) -> bool {
    path.eq_ignore_ascii_case(PIPELINE)
}

/// Whether a path is that of a container, or of an output that is to be one.
pub(crate) fn is_container(path: impl AsRef<Path>) -> bool {
    has_extension(path, "df11")
}

/// Whether a stored path would be taken for a container's, wherever it lies.
pub(crate) fn ends_as_container(path: &str) -> bool {
    path.as_bytes().ends_with(b".df11")
}

/// Whether a path is that of a safetensors file.
pub(crate) fn is_safetensors(path: impl AsRef<Path>) -> bool {
    has_extension(path, "safetensors")
}

/// Whether a path ends in this extension, without its dot.
pub(crate) fn has_extension(path: impl AsRef<Path>, extension: &str) -> bool {
    path.as_ref().extension().is_some_and(|found| found == extension)
}

/// The path that a variable of the environment has. If the one of the home folder is not set, the
/// system tells the folder.
pub(crate) fn path_variable(name: &str) -> Option<PathBuf> {
    let value = env::var_os(name).map(PathBuf::from);
    not_empty(value.or_else(|| if name == platform::HOME { env::home_dir() } else { None }))
}

/// The path, unless it is empty: an empty variable counts as none.
pub(crate) fn not_empty(path: Option<PathBuf>) -> Option<PathBuf> {
    path.filter(|path| !path.as_os_str().is_empty())
}

/// The folder of the Hub's client, with its cache and its token, given the environment.
pub(crate) fn hub_home(get: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    get("HF_HOME").or_else(|| {
        let caches = get("XDG_CACHE_HOME").or_else(|| Some(get(platform::HOME)?.join(".cache")));
        caches.map(|caches| caches.join("huggingface"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_inside_pass() {
        let (long, deep) = ("x".repeat(255), ["a"; 32].join("/"));
        for path in ["a", "a/b.json", "...", "..a/.b", "ünï/ço dé", &long, &deep] {
            check_path(path).unwrap();
        }
    }

    #[test]
    fn names_that_a_system_lacks_are_refused_there() {
        for (path, is_lacking) in
            [("a/aux.json", true), ("b./c", true), ("a/auxiliary.json", false)]
        {
            assert_eq!(
                check_nameable(path, RENAME).is_err(),
                is_lacking && cfg!(windows),
                "{path}"
            );
        }
    }

    #[test]
    fn paths_that_escape_fail_at_their_byte() {
        for (path, at) in [
            ("", 0),
            ("/a", 0),
            ("a/", 2),
            ("a//b", 2),
            (".", 0),
            ("a/..", 2),
            ("../a", 0),
            ("a/./b", 2),
            ("a\\b", 1),
            ("c:b", 1),
            ("a\0", 1),
            ("a\nb", 1),
            ("a\u{85}", 1),
        ] {
            match check_path(path) {
                Err(Error::Corrupt { offset, .. }) => assert_eq!(offset, at, "{path:?}"),
                other => panic!("{path:?}: {other:?}"),
            }
        }
        for (path, value) in [("x".repeat(4097), 4097), (format!("a/{}", "x".repeat(256)), 256)] {
            assert!(matches!(check_path(&path), Err(Error::Limit { value: v, .. }) if v == value));
        }
        let deep = ["a"; 33].join("/");
        assert!(matches!(check_path(&deep), Err(Error::Limit { value: 33, .. })));
    }

    #[test]
    fn a_configuration_is_the_nearest_of_its_weights() {
        let side = ["config.json", "te/config.json", "unet/a/config.json", "unet/x_config.json"];
        for (weights, expected) in [
            (&["te/model.safetensors"][..], &["te/config.json"][..]),
            (&["unet/a.safetensors", "te/b/c.safetensors"], &["config.json", "te/config.json"]),
            (&["model.safetensors"], &["config.json"]),
            (&["unet/a/b/c.safetensors"], &["unet/a/config.json"]),
            (&[], &[]),
        ] {
            let found: Vec<_> =
                configs(weights.iter().copied(), side.into_iter()).into_iter().collect();
            assert_eq!(found, expected, "{weights:?}");
        }
    }

    #[test]
    fn a_tree_finds_clashes_and_counts_folders() {
        let tree = |paths: &[&'static str]| {
            let tree = PathTree::new(paths.iter().copied());
            (tree.clash(), tree.folders())
        };
        assert_eq!(tree(&["b", "a/x", "a-b", "a/b/c", "a/b/d", "b.c/d"]), (None, 3));
        assert_eq!(tree(&["a/b", "a-b", "a"]), (Some(("a", "a/b")), 1));
        assert_eq!(tree(&["a/b", "c", "a/b"]), (Some(("a/b", "a/b")), 1));
        assert_eq!(tree(&["ab/c", "a/c", "a/b/c", "ab/d/e"]), (None, 4));
    }
}
