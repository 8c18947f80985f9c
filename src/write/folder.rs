//! A folder of outputs: where containers and side files go, and the temporary folder that becomes
//! the real one when it is complete.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use super::{
    input::{Input, Side},
    replace::check_earlier,
};
use crate::{
    Error, Result,
    open::beside::mark,
    paths::{
        PIPELINE, PathTree, check_path, configs, ends_as_container, is_pipeline_list, shard_path,
    },
    platform,
    source::Component,
    temporary::{
        TemporaryFolder, aside_of, folder_beside, lock_folder, rename_folder, renaming,
        sync_folder, sync_parent,
    },
};

/// Where the container of each weights file goes in a folder; of a pipeline's files without
/// weights, where their one container goes.
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
    // One by which a folder is known as a pipeline's.
    let named = shards.iter().find(|path| !input.weights.is_empty() && is_pipeline_list(path));
    if let Some(path) = named {
        let problem = format!("{path:?} would be taken for the list of a pipeline's components");
        return Err(Error::parameter(problem, remedy));
    }
    // Readers of the folder take every file with this ending for a shard.
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

/// Puts the side files of a model beside its containers, each configuration with its mark.
pub(super) fn write_side_files(
    component: &Component<Input<'_>>,
    folder: &mut OutputFolder,
) -> Result<()> {
    let Input { weights, side, .. } = &component.model;
    let weights = weights.iter().map(|weights| weights.file.path.as_str());
    let configs = configs(weights, side.iter().map(|side| side.path.as_str()));
    for side in side {
        folder.copy_marked(side, &configs, &component.path_of(&side.path))?;
    }
    Ok(())
}

/// A folder being filled. Dropped before [`OutputFolder::finish`], it leaves nothing behind.
#[derive(Debug)]
pub(super) struct OutputFolder {
    temporary: TemporaryFolder,
    path: PathBuf,
    /// Paths of the new output, by which an earlier one is known and may be replaced; `None` if
    /// nothing may be.
    earlier: Option<BTreeSet<String>>,
    /// The folders in it.
    made: BTreeSet<PathBuf>,
}

impl OutputFolder {
    /// Creates the temporary folder beside `path`. A folder named `path` is replaced in the end
    /// if it is an earlier output with files of these paths.
    pub(super) fn create(path: &Path, earlier: Option<BTreeSet<String>>) -> Result<Self> {
        if path.file_name().is_none() {
            let problem = format!("{} names no folder", path.display());
            return Err(Error::parameter(problem, "give the output a name"));
        }
        if let Some(earlier) = &earlier {
            check_earlier(path, earlier)?;
        }
        Ok(Self {
            temporary: folder_beside(path)?,
            path: path.to_owned(),
            earlier,
            made: BTreeSet::new(),
        })
    }

    /// Where the folder is until it is finished.
    pub(super) fn path(&self) -> &Path {
        self.temporary.folder.path()
    }

    /// Creates a file, and the folder in which it lies.
    pub(super) fn create_file(&mut self, relative: &str) -> Result<(File, PathBuf)> {
        check_path(relative)?;
        let mut folder = PathBuf::new();
        let names: Vec<&str> = relative.split('/').collect();
        for name in &names[..names.len() - 1] {
            folder.push(name);
            if self.made.contains(&folder) {
                continue;
            }
            let path = self.path().join(&folder);
            fs::create_dir(&path).map_err(|error| creating(relative, &path, error))?;
            self.made.insert(folder.clone());
        }
        let path = self.path().join(relative);
        let file = File::create_new(&path).map_err(|error| creating(relative, &path, error))?;
        Ok((file, path))
    }

    pub(super) fn write(&mut self, bytes: &[u8], relative: &str) -> Result<()> {
        let (mut file, path) = self.create_file(relative)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(|error| Error::io("writing", path, error))
    }

    /// Copies a side file; if it is a configuration, with its mark.
    pub(super) fn copy_marked(
        &mut self,
        side: &Side<'_>,
        configs: &BTreeSet<&str>,
        relative: &str,
    ) -> Result<()> {
        if !configs.contains(side.path.as_str()) {
            return self.copy(side, relative);
        }
        let config = side.bytes()?;
        self.write(mark(&config).as_deref().unwrap_or(&config), relative)
    }

    /// Copies a side file, whose hash is compared if it is known.
    pub(super) fn copy(&mut self, side: &Side<'_>, relative: &str) -> Result<()> {
        let (mut file, path) = self.create_file(relative)?;
        let writing = |error| Error::io("writing", &path, error);
        side.read(|bytes| file.write_all(bytes).map_err(writing))?;
        file.sync_all().map_err(writing)
    }

    /// Gives the folder its name, in place of an earlier output.
    pub(super) fn finish(self) -> Result<()> {
        for folder in self.made.iter().map(PathBuf::as_path).chain([Path::new("")]) {
            sync_folder(&self.path().join(folder))?;
        }
        let Some(earlier) = self.earlier.as_ref().filter(|_| self.path.symlink_metadata().is_ok())
        else {
            rename_folder(self.path(), &self.path).map_err(|error| renaming(&self.path, error))?;
            return self.keep();
        };
        check_earlier(&self.path, earlier)?;
        // No other run shall take it for a leftover while it has a temporary name.
        let _lock = lock_folder(&self.path);
        match platform::exchange(self.path(), &self.path) {
            // Under the temporary name is now what was replaced, which is dropped with it.
            Some(result) => {
                result.map_err(|error| renaming(&self.path, error))?;
                let synced = sync_parent(&self.path);
                if synced.is_err() {
                    let _ = self.temporary.folder.keep();
                }
                synced
            }
            None => self.move_aside(),
        }
    }

    /// Exchanges the folders in two steps. One of the two is whole at every moment. If it cannot
    /// get its name, the error says where it lies.
    fn move_aside(self) -> Result<()> {
        let aside = aside_of(&self.path)?;
        let old = aside.folder.path().join("old");
        rename_folder(&self.path, &old).map_err(|error| renaming(&self.path, error))?;
        let Err(error) = rename_folder(self.path(), &self.path) else { return self.keep() };
        if rename_folder(&old, &self.path).is_ok() {
            return Err(renaming(&self.path, error));
        }
        let (old, new) = (aside.folder.keep().join("old"), self.temporary.folder.keep());
        let context = format!(
            "renaming to {} (it has no output now: the earlier one is {}, and the new one, whole, \
            {})",
            self.path.display(),
            old.display(),
            new.display()
        );
        Err(Error::Io { context, source: error })
    }

    fn keep(self) -> Result<()> {
        let _ = self.temporary.folder.keep();
        sync_parent(&self.path)
    }
}

/// The error of a file or folder that cannot be made. All names of an output are different, so that
/// one which exists is another name to this disk.
fn creating(relative: &str, path: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
            let problem = format!(
                "this disk takes {relative:?} for another name of a file or folder that is there"
            );
            let remedy = "write to a disk that distinguishes names by case and by Unicode form";
            Error::parameter(problem, remedy)
        }
        _ => Error::io("creating", path, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that folds names finds what is there under another name, as here under the same.
    #[test]
    fn a_name_that_is_there_already_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let mut folder = OutputFolder::create(&place.path().join("out"), None).unwrap();
        let refused = |result: Result<()>| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Parameter { .. }), "{error}");
            assert!(error.to_string().contains("another name"), "{error}");
        };
        folder.write(b"lower", "a/config.json").unwrap();
        folder.write(b"more", "a/more.json").unwrap();
        refused(folder.write(b"upper", "a/config.json"));
        fs::create_dir(folder.path().join("B")).unwrap();
        refused(folder.write(b"x", "B/x"));
        refused(folder.write(b"x", "a/config.json/x"));
        assert_eq!(fs::read(folder.path().join("a/config.json")).unwrap(), b"lower");
        folder.finish().unwrap();
        assert!(place.path().join("out/a/more.json").is_file());
    }
}
