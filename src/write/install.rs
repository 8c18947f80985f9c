//! The last step of a save into a folder that may hold other files: new files get their names there
//! one by one, because the folder cannot be exchanged as a whole.
//!
//! First one rename makes them [`PENDING`]: from then on the new output is complete, and until it
//! is installed, opening the folder is refused. A run that is killed before the rename leaves the
//! earlier output; after a later kill, [`SaveTarget::lock`] finishes the save.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use super::replace::earlier_containers;
use crate::{
    Error, OpenOptions, Result,
    io::read_regular,
    paths::{ADDED, PENDING, check_path, is_container},
    platform,
    source::MAX_SIDE_BYTES,
    temporary::{lock_folder, renaming, sync_folder, wait_for_folder},
};

/// Where a temporary folder has the new files: in a folder in this one, of any name.
const FILES: &str = "files";
/// Where it has what they replace.
const ASIDE: &str = "aside";
/// In [`PENDING`]: a JSON list of the files that go.
const STALE: &str = ".stale";

/// A folder into which one process at a time saves, where the file system has locks.
#[derive(Debug)]
pub struct SaveTarget {
    folder: PathBuf,
    _lock: Option<File>,
}

impl SaveTarget {
    /// Waits until no other process saves there, and finishes a save that was interrupted.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Parameter`] if a folder has the name of a file.
    pub fn lock(folder: &Path) -> Result<Self> {
        let target = Self { folder: folder.to_owned(), _lock: wait_for_folder(folder) };
        target.finish()?;
        Ok(target)
    }

    /// Gives all files in `stage/files/NAME` their names in the folder, in the place of what has
    /// these, of an earlier output's containers, and of the weights beside them. `stage` is a
    /// temporary folder of this folder, `names` are the model's containers, of which those stay
    /// that are not new, and `identity` is the model's. If one file cannot have its name, all is as
    /// it was.
    ///
    /// # Errors
    /// [`Error::Parameter`] as by [`earlier_containers`], if a folder has the name of a file, and
    /// if a container that stays is another model's by now; [`Error::Io`].
    pub fn install(&self, stage: &Path, names: &BTreeSet<String>, identity: &str) -> Result<()> {
        let staged = stage.join(FILES);
        let new = files_of(&staged)?;
        let is_new = |name: &String| new.iter().any(|(path, _)| path == name);
        self.check_staying(names.iter().filter(|name| !is_new(name)), identity)?;
        let known = names.iter().chain(new.iter().map(|(path, _)| path)).cloned().collect();
        let mut gone = earlier_containers(&self.folder, &known, identity)?;
        gone.push(ADDED.to_owned());
        gone.retain(|path| !known.contains(path) && exists(&self.folder.join(path)));
        self.drop_spellings(&mut gone, &known);
        for path in new.iter().map(|(path, _)| path).chain(&gone) {
            self.check_place(path)?;
        }
        make_last(&staged, &gone)?;
        let pending = self.folder.join(PENDING);
        rename(&staged, &pending)?;
        let _lock = lock_folder(&pending);
        let mut done = Vec::new();
        let moved = self.exchange(&gone, &stage.join(ASIDE), &mut done);
        if let Err(error) = moved {
            for (from, to) in done.iter().rev() {
                rename(to, from)?;
            }
            rename(&pending, &staged)?;
            return Err(error);
        }
        rename(&pending, &staged)?;
        sync_folder(&self.folder)
    }

    /// Leaves out names that are other spellings of a known one on this disk, which may fold case:
    /// a save that is finished later would remove the new file by the old name.
    fn drop_spellings(&self, gone: &mut Vec<String>, known: &BTreeSet<String>) {
        let real = |path: &String| {
            let place = self.folder.join(path);
            place.canonicalize().ok().filter(|_| !place.is_symlink())
        };
        let here: BTreeSet<_> = known.iter().filter_map(real).collect();
        gone.retain(|path| real(path).is_none_or(|place| !here.contains(&place)));
    }

    /// Moves what is in the way aside, and pending files to their places.
    fn exchange(
        &self,
        stale: &[String],
        aside: &Path,
        done: &mut Vec<(PathBuf, PathBuf)>,
    ) -> Result<()> {
        sync_folder(&self.folder)?;
        let new = files_of(&self.folder.join(PENDING))?;
        let stale = stale.iter().map(|path| (path, None));
        for (path, file) in stale.chain(new.iter().map(|(path, file)| (path, Some(file)))) {
            let place = self.folder.join(path);
            if exists(&place) {
                move_file(&place, &aside.join(path), done)?;
            }
            if let Some(file) = file {
                move_file(file, &place, done)?;
            }
        }
        self.sync(new.iter().map(|(path, _)| path))
    }

    /// Goes on where another run was killed.
    fn finish(&self) -> Result<()> {
        let pending = self.folder.join(PENDING);
        if !exists(&pending) {
            return Ok(());
        }
        Error::unless(is_folder(&pending), || {
            let problem = format!("{} is no folder, so no save left it there", pending.display());
            Error::parameter(problem, "remove it")
        })?;
        for path in stale_of(&pending)?.iter().filter(|&path| may_be_stale(path)) {
            self.check_place(path)?;
            match fs::remove_file(self.folder.join(path)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    let error = platform::explain_use(error);
                    return Err(Error::io("removing", self.folder.join(path), error));
                }
                _ => {}
            }
        }
        let new = files_of(&pending)?;
        for (path, file) in &new {
            self.check_place(path)?;
            move_file(file, &self.folder.join(path), &mut Vec::new())?;
        }
        self.sync(new.iter().map(|(path, _)| path))?;
        fs::remove_dir_all(&pending).map_err(|error| Error::io("removing", &pending, error))?;
        sync_folder(&self.folder)
    }

    /// Refuses files for containers that another save has replaced since this one began.
    fn check_staying<'a>(
        &self,
        names: impl Iterator<Item = &'a String>,
        identity: &str,
    ) -> Result<()> {
        for place in names.map(|name| self.folder.join(name)) {
            let found = OpenOptions::new().memory_map(false).open(&place)?;
            Error::unless(found.identity().to_hex().as_str() == identity, || {
                let problem =
                    format!("{} was replaced by another model's meanwhile", place.display());
                Error::parameter(problem, "save again")
            })?;
        }
        Ok(())
    }

    /// Refuses a place that is a folder's, or lies outside: a folder on its way is a link.
    fn check_place(&self, path: &str) -> Result<()> {
        check_path(path)?;
        let place = self.folder.join(path);
        Error::unless(!is_folder(&place), || {
            let problem =
                format!("{} is a folder, and a file of the model has its name", place.display());
            Error::parameter(problem, "choose another output, or move that folder away first")
        })?;
        let above = place.ancestors().skip(1).take_while(|&above| above != self.folder);
        let link = above.into_iter().find(|above| above.is_symlink());
        link.map_or(Ok(()), |link| {
            let problem =
                format!("{} is a link, and a folder of the model has its name", link.display());
            Err(Error::parameter(problem, "choose another output, or remove the link"))
        })
    }

    /// Makes the names of files last.
    fn sync<'a>(&self, paths: impl Iterator<Item = &'a String>) -> Result<()> {
        let folders: BTreeSet<_> =
            paths.filter_map(|path| Some(self.folder.join(path).parent()?.to_owned())).collect();
        folders.iter().map(PathBuf::as_path).chain([&*self.folder]).try_for_each(sync_folder)
    }
}

/// The files in the one folder in `files`, ascending by their paths in it.
fn files_of(files: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for folder in entries(files)?.into_iter().map(|entry| entry.path()).filter(|it| is_folder(it)) {
        list(&folder, "", &mut found)?;
    }
    found.sort();
    Ok(found)
}

fn list(folder: &Path, prefix: &str, found: &mut Vec<(String, PathBuf)>) -> Result<()> {
    for entry in entries(folder)? {
        let path = entry.path();
        let name = entry.file_name().into_string().map_err(|_| {
            let problem = format!("the name of {} is no UTF-8", path.display());
            Error::parameter(problem, "rename it")
        })?;
        if is_folder(&path) {
            list(&path, &format!("{prefix}{name}/"), found)?;
        } else {
            found.push((format!("{prefix}{name}"), path));
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<fs::DirEntry>> {
    let listed = fs::read_dir(folder).and_then(Iterator::collect);
    listed.map_err(|error| Error::io("listing", folder, error))
}

/// Writes which files go, and makes all that is in `staged` last.
fn make_last(staged: &Path, stale: &[String]) -> Result<()> {
    let list = staged.join(STALE);
    fs::write(&list, serde_json::json!(stale).to_string())
        .map_err(|error| Error::io("writing", &list, error))?;
    let mut folders = BTreeSet::from([staged.to_owned()]);
    for path in files_of(staged)?.into_iter().map(|(_, path)| path).chain([list]) {
        // A link's target is no file of this output.
        if !path.is_symlink() {
            platform::sync_file(&path).map_err(|error| Error::io("syncing", &path, error))?;
        }
        folders.extend(path.parent().map(Path::to_owned));
    }
    folders.iter().try_for_each(|folder| sync_folder(folder))
}

/// The list that [`make_last`] wrote; it goes last, so without it nothing is left to do.
fn stale_of(pending: &Path) -> Result<Vec<String>> {
    let path = pending.join(STALE);
    if !exists(&path) {
        return Ok(Vec::new());
    }
    serde_json::from_slice(&read_regular(&path, MAX_SIDE_BYTES)?)
        .map_err(|error| Error::corrupt("list", 0, error.to_string()).in_file(&path))
}

/// Whether a file may go because another model is saved, whatever a list says.
fn may_be_stale(path: &str) -> bool {
    is_container(path) || path == ADDED
}

/// Whether it is a folder, and no link to one.
fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| found.is_dir())
}

fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn move_file(from: &Path, to: &Path, done: &mut Vec<(PathBuf, PathBuf)>) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).map_err(|error| Error::io("creating", folder, error))?;
    }
    rename(from, to)?;
    done.push((from.to_owned(), to.to_owned()));
    Ok(())
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|error| renaming(to, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CompressOptions, Source, compress, demo};

    /// An earlier output has the shards `MODEL-….df11`, and the new one `model-….df11`.
    #[test]
    fn another_spelling_of_a_name_is_replaced_and_not_removed() {
        let place = tempfile::tempdir().unwrap();
        let make = |source: &Path, out: &Path| {
            let (source, options) = (Source::open(source).unwrap(), CompressOptions::new());
            compress(&source, out, &options, &()).unwrap();
        };
        let earlier = demo::tiny_checkpoint(&place.path().join("earlier")).unwrap();
        for (name, path) in files_of(earlier.parent().unwrap()).unwrap() {
            if name.ends_with(".index.json") {
                let index = fs::read_to_string(&path).unwrap().replace("model-", "MODEL-");
                fs::write(&path, index).unwrap();
            } else {
                let (other, spelled) =
                    (path.with_file_name("other"), name.replace("model-", "MODEL-"));
                fs::rename(&path, &other).unwrap();
                fs::rename(&other, path.with_file_name(spelled)).unwrap();
            }
        }
        let (folder, stage) =
            (place.path().join("out"), place.path().join("out/.df11-aB3dEf.part"));
        make(&earlier, &folder);
        let new = demo::checkpoint(&place.path().join("new"), demo::TINY, 5).unwrap();
        fs::create_dir_all(stage.join(FILES)).unwrap();
        make(&new, &stage.join(FILES).join("out"));
        let identity = |folder: &Path| crate::open(folder).unwrap().identity().to_hex().to_string();
        let wanted = identity(&stage.join(FILES).join("out"));
        let (at, spelled) = (|name: &str| folder.join(name), "MODEL-00001-of-00002.df11");
        let folds = at("Model-00001-Of-00002.df11").exists();
        assert!(at(spelled).exists());
        let target = SaveTarget::lock(&folder).unwrap();
        target.install(&stage, &BTreeSet::new(), &wanted).unwrap();
        let gone = stale_of(&stage.join(FILES)).unwrap();
        assert_eq!(gone.contains(&spelled.to_owned()), !folds, "{gone:?}");
        assert_eq!(at(spelled).exists(), folds);
        assert_eq!(identity(&folder), wanted);
    }
}
