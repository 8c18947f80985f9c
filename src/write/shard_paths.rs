//! Where the containers of a model go in a folder.

use std::collections::BTreeMap;

use super::input::Input;
use crate::{
    Error, Result,
    paths::{PIPELINE, PathTree, ends_as_container, shard_path},
};

/// Where the container of each weights file goes in a folder; of a pipeline's files without
/// weights, where their one container goes.
///
/// # Errors
/// [`Error::Parameter`] if two would have one path, or there is none.
pub(super) fn shard_paths(input: &Input<'_>, in_pipeline: bool) -> Result<Vec<String>> {
    if input.weights.is_empty() {
        let problem = "the model has no weights file, so a folder would hold nothing";
        let remedy = "write one file: give the output a name that ends in .df11";
        let alone = || Error::parameter(problem, remedy);
        return in_pipeline.then(|| vec![PIPELINE.to_owned()]).ok_or_else(alone);
    }
    let mut owners = BTreeMap::new();
    let mut paths = Vec::new();
    for file in input.weights.iter().map(|weights| &weights.file.path) {
        let path = shard_path(file);
        if let Some(other) = owners.insert(path.clone(), file) {
            let problem =
                format!("the containers of {other:?} and {file:?} would both be {path:?}");
            let remedy =
                "make one file with -o NAME.df11, which keeps all names, or rename one of them";
            return Err(Error::parameter(problem, remedy));
        }
        paths.push(path);
    }
    Ok(paths)
}

/// Refuses files of which one would take the place of another in a folder of containers.
pub(super) fn check_outputs(input: &Input<'_>, shards: &[String]) -> Result<()> {
    let remedy = "write one file: give the output a name that ends in .df11";
    if let Some(hidden) =
        shards.iter().find(|path| path.split('/').any(|name| name.starts_with('.')))
    {
        let problem =
            format!("{hidden:?} would be hidden, and hidden files of a folder are not opened");
        return Err(Error::parameter(problem, remedy));
    }
    // Whatever ends so is a shard to whoever opens the folder.
    if let Some(side) = input.side.iter().find(|side| ends_as_container(&side.path)) {
        let problem = format!("the side file {:?} would be taken for a container", side.path);
        return Err(Error::parameter(problem, remedy));
    }
    let side = input.side.iter().map(|side| &*side.path);
    match PathTree::new(shards.iter().map(String::as_str).chain(side)).clash() {
        None => Ok(()),
        Some((first, second)) => {
            let problem = format!("the folder cannot hold both {first:?} and {second:?}");
            Err(Error::parameter(problem, remedy))
        }
    }
}
