//! Decides which earlier outputs may be replaced if the user allows it: people mistype, and keep
//! their own files in output folders.
//!
//! A folder may be replaced if each file in it is known: the new output has the same path, or the
//! file is a shard of the one model in the folder, or a side file that this model names. This is
//! checked at the start, and again before the folders are exchanged.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use crate::{
    Error, Model, OpenOptions, Result,
    format::{
        Directory,
        records::{FILE_BESIDE, FILE_WEIGHTS},
    },
    open::{
        beside::{self, Beside, is_card},
        listed_components,
    },
    paths::{PIPELINE, has_extension, is_container, is_pipeline_list, shard_path},
    source::{HIDDEN, walk},
};

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

/// Refuses to replace a folder with a file that is not known as one of an earlier output: one of
/// these paths, which the new output has too, or, of containers, a shard of the one model that lies
/// there, or a side file that this names.
pub(super) fn check_earlier(folder: &Path, paths: &BTreeSet<String>) -> Result<()> {
    if folder.symlink_metadata().is_err() {
        return Ok(());
    }
    let mut entries = BTreeMap::new();
    list(folder, "", &mut entries)?;
    if let Some((path, _)) = entries.iter().find(|&(_, is_regular)| !is_regular) {
        return in_the_way(folder, path, ": it is neither a file nor a folder");
    }
    let has_containers = paths.iter().any(is_container);
    let containers = entries.keys().filter(|path| has_containers && is_container(path));
    let recorded = recognise(folder, paths, &containers.map(String::as_str).collect::<Vec<_>>())?;
    let is_known =
        |path: &String| paths.contains(path) || recorded.contains(path) || is_card(folder, path);
    match entries.keys().find(|path| !is_known(path)) {
        Some(path) => in_the_way(folder, path, ""),
        None => Ok(()),
    }
}

/// The containers in a folder that go when a model takes their place: those of an earlier output,
/// except `names`, which are all of the model's. Hidden ones do not count, nor do those of other
/// models in subfolders, unless they would be opened together with `names`. `identity` is the
/// model's. The cost grows with the files in the folder and the directories of its containers.
///
/// # Errors
/// [`Error::Parameter`] if a container is not known as one of an earlier output, or the folder is
/// that of a pipeline, or of a component for which its pipeline lists another model; [`Error::Io`].
pub fn earlier_containers(
    folder: &Path,
    names: &BTreeSet<String>,
    identity: &str,
) -> Result<Vec<String>> {
    check_component(folder, identity)?;
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let (found, left_out) = walk(folder)?;
    let paths = found.iter().map(|file| &file.path);
    let lost = left_out.iter().filter(|other| other.reason != HIDDEN).map(|other| &other.path);
    let all = paths.chain(lost).filter(|path| is_container(path)).map(String::as_str);
    let mut all: Vec<&str> = all.collect();
    if all.iter().any(|path| is_pipeline_list(path)) {
        in_the_way(folder, PIPELINE, ": it lists a pipeline's components, and this is one model")?;
    }
    // A model whose containers lie directly in the folder is opened without its subfolders.
    if !names.iter().any(|path| is_container(path) && path.contains('/')) {
        let earlier = OpenOptions::new().memory_map(false).open(folder).ok();
        let paths =
            |model: &Model| model.shards().iter().map(|one| one.path().to_owned()).collect();
        let earlier: BTreeSet<PathBuf> = earlier.as_ref().map(paths).unwrap_or_default();
        all.retain(|path| !path.contains('/') || earlier.contains(&folder.join(path)));
    }
    let others = all.iter().filter(|&&path| !names.contains(path));
    let others: Vec<String> = others.map(|&path| path.to_owned()).collect();
    if others.is_empty() {
        return Ok(others);
    }
    let recorded = recognise(folder, names, &all)?;
    match others.iter().find(|path| !recorded.contains(*path)) {
        Some(path) => in_the_way(folder, path, "").map(|()| others.clone()),
        None => Ok(others),
    }
}

/// Refuses another model than the one that the pipeline around a folder lists.
fn check_component(folder: &Path, identity: &str) -> Result<()> {
    let (Some(parent), Some(name)) = (folder.parent(), folder.file_name()) else { return Ok(()) };
    match listed_in(parent).get(&*name.to_string_lossy()) {
        Some(listed) if listed != identity => {
            let why = format!(": it lists another model as {}", name.display());
            in_the_way(parent, PIPELINE, &why)
        }
        _ => Ok(()),
    }
}

/// Finds out what the containers of an earlier output record: themselves, and the side files beside
/// them.
fn recognise(
    folder: &Path,
    paths: &BTreeSet<String>,
    containers: &[&str],
) -> Result<BTreeSet<String>> {
    let (listed, mut recorded) = (listed_in(folder), BTreeSet::new());
    for (part, containers) in parts(containers) {
        let listed = listed.get(part.trim_end_matches('/')).map(String::as_str);
        let (mut shards, mut model_of_all) = (BTreeSet::new(), None);
        for path in containers {
            // One that is damaged, or newer, is known by its name alone.
            let Ok(model) = OpenOptions::new().memory_map(false).open(folder.join(path)) else {
                continue;
            };
            let directory = model.shards()[0].directory();
            let same = (model.identity(), model.shard_count());
            // It may as well be one by itself that somebody keeps in a folder.
            let is_alone = same.1 == 1 && directory.files.len() == 1;
            if !is_shard_of_folder(directory, &path[part.len()..])
                || (listed.is_some() && listed != Some(model.identity().to_hex().as_str()))
                || (listed.is_none() && is_alone && !paths.contains(path))
                || *model_of_all.get_or_insert(same) != same
                || !shards.insert(directory.shard.shard_index.get())
            {
                let why = ": it is no shard of the model beside it";
                in_the_way(folder, path, why)?;
            }
            recorded.insert(path.to_owned());
            for file in model.files_beside() {
                // One that was edited since is nobody's to delete.
                let found = beside::find(&folder.join(part), file)?;
                if matches!(found, Beside::Original(_) | Beside::Marked(_)) {
                    recorded.insert(format!("{part}{}", file.path()));
                }
            }
        }
    }
    Ok(recorded)
}

fn in_the_way(folder: &Path, path: &str, why: &str) -> Result<()> {
    let place = folder.join(path);
    let problem = format!("{} is not part of an earlier output{why}", place.display());
    Err(Error::parameter(problem, "choose another output, or move that file away first"))
}

/// The components that an output lists; none if it is no pipeline.
pub(super) fn listed_in(folder: &Path) -> BTreeMap<String, String> {
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
/// files beside it; or none, if it lists the components of a pipeline.
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

/// All that is in a folder and its subfolders, hidden files too, except the folders themselves; and
/// whether it is a regular file.
fn list(folder: &Path, prefix: &str, entries: &mut BTreeMap<String, bool>) -> Result<()> {
    let listing = |error| Error::io("listing", folder, error);
    for entry in fs::read_dir(folder).map_err(listing)? {
        let entry = entry.map_err(listing)?;
        let kind = entry.file_type().map_err(listing)?;
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if kind.is_dir() {
            list(&entry.path(), &format!("{path}/"), entries)?;
        } else {
            entries.insert(path, kind.is_file());
        }
    }
    Ok(())
}
