//! What may be replaced on a person's word: an earlier output. People mistype, and keep files where
//! outputs are.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use crate::{
    Error, OpenOptions, Result,
    format::{
        Directory,
        records::{FILE_BESIDE, FILE_WEIGHTS},
    },
    open::{
        beside::{self, Beside, is_card},
        listed_components,
    },
    paths::{PIPELINE, has_extension, is_container, shard_path},
};

const REMEDY: &str = "choose another output, or move that file away first";

/// Refuses an output that would delete the source, or that is of another kind than what it would
/// replace. For callers that let people replace outputs; that nothing is lost which is no earlier
/// output, [`compress`](super::compress()) and the like check themselves.
///
/// # Errors
/// [`Error::Parameter`].
pub fn check_replaceable(source: &Path, out: &Path, extension: &str) -> Result<()> {
    let (Ok(source), Ok(target)) = (source.canonicalize(), out.canonicalize()) else {
        return Ok(());
    };
    if source.starts_with(&target) {
        let problem = format!("{} is the source or holds it", out.display());
        return Err(Error::parameter(problem, "choose another output"));
    }
    let single = has_extension(out, extension);
    if target.is_dir() == single {
        let (there, wanted) = if single { ("folder", "file") } else { ("file", "folder") };
        let problem = format!("{} is a {there}, and the output would be a {wanted}", out.display());
        return Err(Error::parameter(problem, "choose another output"));
    }
    Ok(())
}

/// What an earlier output consists of: files that the new one has too and, of containers, the
/// shards of one model and the side files that these name.
#[derive(Debug)]
pub(super) struct Earlier {
    /// Paths in the new output.
    paths: BTreeSet<String>,
}

struct FolderEntry {
    path: String,
    is_regular: bool,
}

impl Earlier {
    /// The earlier output of one that has files of these paths.
    pub(super) fn of(paths: impl IntoIterator<Item = String>) -> Self {
        Self { paths: paths.into_iter().collect() }
    }

    /// Refuses a folder that has a file which is not known.
    ///
    /// # Errors
    /// [`Error::Parameter`] with the file; [`Error::Io`].
    pub(super) fn check(&self, folder: &Path) -> Result<()> {
        if folder.symlink_metadata().is_err() {
            return Ok(());
        }
        let mut entries = Vec::new();
        list(folder, "", &mut entries)?;
        if let Some(entry) = entries.iter().find(|entry| !entry.is_regular) {
            return in_the_way(folder, &entry.path, ": it is neither a file nor a folder");
        }
        let mut containers: Vec<&str> = Vec::new();
        if self.paths.iter().any(is_container) {
            containers
                .extend(entries.iter().map(|entry| &*entry.path).filter(|path| is_container(path)));
        }
        let mut recorded = BTreeSet::new();
        let listed = listed_in(folder);
        for (part, containers) in parts(&containers) {
            let identity = listed.get(part.trim_end_matches('/')).map(String::as_str);
            self.recognise(folder, part, identity, &containers, &mut recorded)?;
        }
        let known = |path: &String| {
            self.paths.contains(path) || recorded.contains(path) || is_card(folder, path)
        };
        match entries.iter().find(|entry| !known(&entry.path)) {
            Some(entry) => in_the_way(folder, &entry.path, ""),
            None => Ok(()),
        }
    }

    /// Finds out what the containers of one model record, which lie in the folder `part` (with a
    /// `/` at its end) of an output: themselves, and the side files beside them. `listed` is the
    /// identity of a component.
    fn recognise(
        &self,
        folder: &Path,
        part: &str,
        listed: Option<&str>,
        containers: &[&str],
        recorded: &mut BTreeSet<String>,
    ) -> Result<()> {
        let root = folder.join(part);
        let (mut shards, mut model_of_all) = (BTreeSet::new(), None);
        for path in containers {
            // One that is damaged, or newer, is known by its name alone.
            let Ok(model) = OpenOptions::new().memory_map(false).open(folder.join(path)) else {
                continue;
            };
            let directory = model.shards()[0].directory();
            let same = (model.identity(), model.shard_count());
            if !is_shard_of_folder(directory, &path[part.len()..])
                || (listed.is_some() && listed != Some(model.identity().to_hex().as_str()))
                || (listed.is_none() && may_be_alone(directory) && !self.paths.contains(*path))
                || *model_of_all.get_or_insert(same) != same
                || !shards.insert(directory.shard.shard_index.get())
            {
                let why = ": it is no shard of the model whose containers are beside it";
                return in_the_way(folder, path, why);
            }
            recorded.insert((*path).to_owned());
            for file in model.files_beside() {
                // One that was edited since is nobody's to delete.
                let found = beside::find(&root, file)?;
                if matches!(found, Beside::Original(_) | Beside::Marked(_)) {
                    recorded.insert(format!("{part}{}", file.path()));
                }
            }
        }
        Ok(())
    }
}

fn in_the_way(folder: &Path, path: &str, why: &str) -> Result<()> {
    let place = folder.join(path);
    let problem = format!("{} is not part of an earlier output{why}", place.display());
    Err(Error::parameter(problem, REMEDY))
}

/// The components that an output lists; none if it is no pipeline.
fn listed_in(folder: &Path) -> BTreeMap<String, String> {
    let list = OpenOptions::new().memory_map(false).open(folder.join(PIPELINE));
    let listed = list.ok().and_then(|list| listed_components(list.shards()[0].directory()).ok()?);
    listed.unwrap_or_default()
}

/// The containers of each model of an output, by the folder of the model: those of a pipeline lie
/// in folders of their own.
fn parts<'a>(containers: &[&'a str]) -> BTreeMap<&'a str, Vec<&'a str>> {
    let is_pipeline = containers.contains(&PIPELINE);
    let mut parts = BTreeMap::<&str, Vec<&str>>::new();
    for path in containers {
        let end = path.find('/').filter(|_| is_pipeline).map_or(0, |slash| slash + 1);
        parts.entry(&path[..end]).or_default().push(path);
    }
    parts
}

/// Whether a container is what the writer of a folder puts at this path: one weights file, and side
/// files beside it; or none, where it lists the components of a pipeline.
fn is_shard_of_folder(directory: &Directory, path: &str) -> bool {
    let mut stored = directory.files.iter().filter(|file| file.kind != FILE_BESIDE);
    match (stored.next(), stored.next()) {
        (Some(file), None) => {
            file.kind == FILE_WEIGHTS && shard_path(directory.file_path(file)) == path
        }
        (None, _) => path == PIPELINE && matches!(listed_components(directory), Ok(Some(_))),
        _ => false,
    }
}

/// Whether a container may as well be one by itself that somebody keeps in a folder.
fn may_be_alone(directory: &Directory) -> bool {
    directory.shard.shard_count == 1 && directory.files.len() == 1
}

/// All that is in a folder and its subfolders, hidden files too, except the folders themselves.
fn list(folder: &Path, prefix: &str, entries: &mut Vec<FolderEntry>) -> Result<()> {
    let listing = |error| Error::io("listing", folder, error);
    for entry in fs::read_dir(folder).map_err(listing)? {
        let entry = entry.map_err(listing)?;
        let kind = entry.file_type().map_err(listing)?;
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if kind.is_dir() {
            list(&entry.path(), &format!("{path}/"), entries)?;
        } else {
            entries.push(FolderEntry { path, is_regular: kind.is_file() });
        }
    }
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(())
}
