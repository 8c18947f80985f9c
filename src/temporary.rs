//! Outputs under temporary names, in use or left over: hidden names beside the output, each with a
//! lock that the operating system releases when the process ends, however it ends. This module also
//! makes the last step of every output: the rename to its own name, which nothing else may have,
//! synced to disk.
//!
//! No rename replaces anything unless the caller allows it: if something takes the output's name
//! meanwhile, it stays and the run fails. A folder that may be replaced is exchanged with the new
//! one in one step. If the file system cannot do that, the folder is moved aside first; if that
//! cannot be undone, both stay and the error says where. A killed run leaves a temporary name
//! without a lock: the command removes it and says so, and `df11 doctor` lists it. An earlier
//! output that was moved aside is listed and never removed. Temporary folders of the Python package
//! have such names too.
//!
//! | name | what it is |
//! |---|---|
//! | `.df11-XXXXXX.part` | an output that is not whole yet, or one that was replaced |
//! | `.df11-old.XXXXXX` | an earlier output while another takes its name; may be the only copy |
//! | `.df11-new` | what a save installs in the folder that it is in; may be the only copy |

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile, PersistError, TempDir};

use crate::{
    Error, Result,
    error::io_remedied,
    paths::{PENDING, check_local, check_nameable},
    platform,
};

/// Not named after the output, whose name may be as long as the file system allows.
const PREFIX: &str = ".df11-";
const SUFFIX: &str = ".part";
const ASIDE: &str = ".df11-old.";
/// Letters and digits of a name that are drawn.
const DRAWN: usize = 6;
/// A temporary file is made again where another run takes it for a leftover before it is locked.
const ATTEMPTS: usize = 16;

/// A temporary folder that is in use until this is dropped, and with it the folder.
#[derive(Debug)]
pub struct TemporaryFolder {
    pub(crate) folder: TempDir,
    _lock: Option<File>,
}

/// A temporary file that is in use until this is dropped, and with it the file.
#[derive(Debug)]
pub(crate) struct TemporaryFile {
    pub(crate) file: NamedTempFile,
    /// Held at least as long as the file has its temporary name.
    pub(crate) lock: Option<File>,
}

impl TemporaryFolder {
    /// Makes a folder in `parent` that this user alone may enter.
    ///
    /// # Errors
    /// [`Error::Io`] if `parent` cannot be written.
    pub fn new_in(parent: &Path) -> Result<Self> {
        locked_folder(parent, &builder(0o700))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A temporary file in the folder of `path`; deleted when dropped.
pub(crate) fn file_beside(path: &Path) -> Result<TemporaryFile> {
    let folder = parent_of(path);
    let make = || builder(0o666).tempfile_in(platform::long(folder));
    let (file, lock) = locked("file", folder, make, |file| file.as_file().try_clone())?;
    Ok(TemporaryFile { file, lock })
}

/// A temporary folder in the folder of `path`; deleted with all that is in it when dropped.
pub(crate) fn folder_beside(path: &Path) -> Result<TemporaryFolder> {
    locked_folder(parent_of(path), &builder(0o777))
}

/// A temporary folder, in the system's one, for files that come from a store or go there. Removes
/// first what killed runs left there.
#[cfg(feature = "remote")]
pub(crate) fn folder_for_fetched() -> Result<TemporaryFolder> {
    let parent = std::env::temp_dir();
    // A folder that cannot be listed may be one that can be written.
    let _ = remove_leftovers(&parent);
    TemporaryFolder::new_in(&parent)
}

/// A temporary folder for what has the output's name, while another output takes it.
pub(crate) fn aside_of(path: &Path) -> Result<TemporaryFolder> {
    locked_folder(parent_of(path), Builder::new().prefix(ASIDE).rand_bytes(DRAWN))
}

fn locked_folder(parent: &Path, builder: &Builder<'_, '_>) -> Result<TemporaryFolder> {
    let make = || builder.tempdir_in(platform::long(parent));
    let open = |folder: &TempDir| platform::open_folder(folder.path());
    let (folder, lock) = locked("folder", parent, make, open)?;
    Ok(TemporaryFolder { folder, _lock: lock })
}

/// Temporary files are private by default, but one that becomes a result is as accessible as any
/// new file: `mode`, reduced by the process's umask.
fn builder(mode: u32) -> Builder<'static, 'static> {
    let mut builder = Builder::new();
    builder.prefix(PREFIX).suffix(SUFFIX).rand_bytes(DRAWN);
    platform::make_accessible(&mut builder, mode);
    builder
}

/// Makes something temporary and locks it, in a folder that is made if it is missing. Another run
/// may take it for a leftover between the two; then it is made again.
fn locked<T: AsRef<Path>>(
    what: &str,
    folder: &Path,
    make: impl Fn() -> io::Result<T>,
    open: impl Fn(&T) -> io::Result<File>,
) -> Result<(T, Option<File>)> {
    let creating = |error| Error::io(&format!("creating a {what} in"), folder, error);
    let make = || match make() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(folder).map_err(not_a_folder).and_then(|()| make())
        }
        result => result,
    };
    for _ in 0..ATTEMPTS {
        let new = make().map_err(creating)?;
        let path = new.as_ref();
        let lock = open(&new).and_then(|handle| platform::lock(handle, path));
        match lock {
            // Another run has it, or has removed it before it was opened or locked.
            Ok(None) => {}
            _ if !platform::is_there(path) => {}
            // Nothing is ever taken for a leftover where there are no locks.
            lock => return Ok((new, lock.ok().flatten())),
        }
    }
    Err(creating(io_remedied(
        io::ErrorKind::Other,
        "other runs remove the files of this one; run it again",
    )))
}

/// The error of a folder that cannot be made: only what is no folder is in the way.
fn not_a_folder(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::AlreadyExists => io::ErrorKind::NotADirectory.into(),
        _ => error,
    }
}

/// Keeps other runs from taking a folder for a leftover, if the file system has locks.
pub(crate) fn lock_folder(path: &Path) -> Option<File> {
    platform::lock(platform::open_folder(path).ok()?, path).ok()?
}

/// Locks a folder as soon as nobody else has its lock, if the file system has locks.
pub(crate) fn wait_for_folder(path: &Path) -> Option<File> {
    platform::wait_for_lock(platform::open_folder(path).ok()?, path).ok()
}

pub(crate) fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file or folder left behind by a run that was killed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leftover {
    /// Where it is.
    pub path: PathBuf,
    /// Bytes of the files in it, or its own.
    pub bytes: u64,
    /// Whether it holds an output that may be the only copy; such a one is never removed.
    pub is_output: bool,
}

/// Lists files and folders in a folder that killed runs left: those with the name of a temporary of
/// this crate whose lock no process holds. Subfolders are not searched. On file systems without
/// locks none is found.
///
/// # Errors
/// [`Error::Io`] if the folder cannot be listed.
pub fn leftovers(folder: &Path) -> Result<Vec<Leftover>> {
    Ok(find(folder)?.into_iter().map(|(leftover, _)| leftover).collect())
}

/// Removes what killed runs left in a folder, except outputs. Returns what was removed.
///
/// # Errors
/// Like [`leftovers`]; what cannot be removed stays, and [`leftovers`] finds it again.
pub fn remove_leftovers(folder: &Path) -> Result<Vec<Leftover>> {
    let mut removed = Vec::new();
    for (leftover, _lock) in find(folder)?.into_iter().filter(|(leftover, _)| !leftover.is_output) {
        let path = &leftover.path;
        let result = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        if result.is_ok() {
            removed.push(leftover);
        }
    }
    Ok(removed)
}

/// Leftovers with their locks, ascending by path.
fn find(folder: &Path) -> Result<Vec<(Leftover, File)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| Error::io("listing", folder, error))? {
        let entry = entry.map_err(|error| Error::io("listing", folder, error))?;
        let Some(is_output) = entry.file_name().to_str().and_then(kind_of) else { continue };
        // Another run may end, or remove it, at the same time.
        if let Some((bytes, lock)) = examine(&entry) {
            found.push((Leftover { path: entry.path(), bytes, is_output }, lock));
        }
    }
    found.sort_by(|(a, _), (b, _)| a.path.cmp(&b.path));
    Ok(found)
}

/// Whether a name is that of a whole output, if it is that of anything temporary.
fn kind_of(name: &str) -> Option<bool> {
    let drawn =
        |name: &str| name.len() == DRAWN && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if name == PENDING || name.strip_prefix(ASIDE).is_some_and(drawn) {
        return Some(true);
    }
    let part = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    drawn(part).then_some(false)
}

/// Whether a folder has the name of a temporary one.
pub(crate) fn is_temporary(folder: &Path) -> bool {
    folder.file_name().and_then(|name| name.to_str()).and_then(kind_of).is_some()
}

/// The bytes of a leftover, and its lock; None if it is in use, or nothing that we make.
fn examine(entry: &fs::DirEntry) -> Option<(u64, File)> {
    let kind = entry.file_type().ok()?;
    if !kind.is_file() && !kind.is_dir() {
        return None;
    }
    let path = entry.path();
    let handle = if kind.is_dir() {
        platform::open_folder(&path).ok()?
    } else {
        crate::io::open_regular(&path).ok()?
    };
    let lock = platform::lock(handle, &path).ok()??;
    Some((bytes_of(&path), lock))
}

fn bytes_of(path: &Path) -> u64 {
    let Ok(metadata) = path.symlink_metadata() else { return 0 };
    if !metadata.is_dir() {
        return metadata.len();
    }
    let Ok(entries) = fs::read_dir(path) else { return 0 };
    entries.flatten().map(|entry| bytes_of(&entry.path())).fold(0, u64::saturating_add)
}

/// Refuses an output that exists, one in a store, one that this system cannot name, and one that
/// the next run would take for a leftover.
pub(crate) fn check_absent(out: &Path, overwrite: bool) -> Result<()> {
    check_local(out)?;
    if is_temporary(out) {
        let problem =
            format!("{} is a name of temporary files, which other runs remove", out.display());
        return Err(Error::parameter(problem, "choose another output"));
    }
    if let Some(name) = out.file_name() {
        check_nameable(&name.to_string_lossy(), "choose another output")?;
    }
    if !overwrite && out.symlink_metadata().is_ok() {
        return Err(exists(out));
    }
    Ok(())
}

/// Refuses to replace a pipe, a device or a socket by a file.
pub(crate) fn check_file(out: &Path) -> Result<()> {
    match fs::metadata(out) {
        Ok(metadata) if !metadata.is_file() => {
            let problem = format!("{} is not a regular file", out.display());
            Err(Error::parameter(problem, "choose another output"))
        }
        _ => Ok(()),
    }
}

fn exists(out: &Path) -> Error {
    Error::Exists { path: out.display().to_string() }
}

/// The error of a rename; a name that another has taken meanwhile is one that exists.
pub(crate) fn renaming(to: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty => exists(to),
        _ => Error::io("renaming to", to, platform::explain_use(error)),
    }
}

/// Gives a file its name; in place of what has it only with `overwrite`.
pub(crate) fn rename_file(temporary: TemporaryFile, to: &Path, overwrite: bool) -> Result<()> {
    let TemporaryFile { file, lock: _lock } = temporary;
    let place = platform::long(to);
    let renamed = if overwrite { file.persist(&place) } else { keeping(file, &place) };
    renamed.map_err(|error| renaming(to, error.error))?;
    sync_parent(to)
}

/// Gives a file a name that nothing has, on file systems too that have neither a rename that keeps
/// what is there nor hard links: there an empty file, which only one run can create, holds the
/// name.
fn keeping(file: NamedTempFile, to: &Path) -> std::result::Result<File, PersistError> {
    let PersistError { error, file } = match file.persist_noclobber(to) {
        Err(refused) if may_be_lacking(&refused.error) => refused,
        result => return result,
    };
    if File::create_new(to).is_err() {
        return Err(PersistError { error, file });
    }
    file.persist(to).inspect_err(|_| {
        let _ = fs::remove_file(to);
    })
}

/// Whether a file system may lack the requested function: hard links, or folders that can be opened
/// and synced. A folder that must not be written or opened gives the same error.
fn may_be_lacking(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// Writes a small file, which appears under its name when it is whole; in place of what has it only
/// with `overwrite`.
///
/// # Errors
/// [`Error::Parameter`] if the name is taken; [`Error::Io`].
pub fn write_file(path: &Path, bytes: &[u8], overwrite: bool) -> Result<()> {
    check_absent(path, overwrite)?;
    check_file(path)?;
    let mut temporary = file_beside(path)?;
    let file = temporary.file.as_file_mut();
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    written.map_err(|error| Error::io("writing", path, error))?;
    rename_file(temporary, path, overwrite)
}

/// Gives a folder a name that nothing has.
pub(crate) fn rename_folder(from: &Path, to: &Path) -> io::Result<()> {
    if let Some(result) = platform::rename_keeping(from, to) {
        return result;
    }
    // The folder that is made here is ours, or there is one already; a rename replaces it only
    // while it is empty.
    fs::create_dir(to)?;
    fs::rename(from, to).inspect_err(|_| {
        let _ = fs::remove_dir(to);
    })
}

/// Makes the names in the folder of `path` last.
pub(crate) fn sync_parent(path: &Path) -> Result<()> {
    sync_folder(parent_of(path))
}

/// Makes the names in a folder last, where the system and the file system can; elsewhere the system
/// decides when.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    match platform::sync_folder(folder) {
        Err(error) if !may_be_lacking(&error) => Err(Error::io("syncing", folder, error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_we_make_are_leftovers() {
        assert_eq!(kind_of(".df11-aB3dEf.part"), Some(false));
        assert_eq!(kind_of(".df11-old.aB3dEf"), Some(true));
        assert_eq!(kind_of(".df11-new"), Some(true));
        let others = [".df11-.part", ".df11-aB3dE.part", ".df11-aB3dEfg.part", ".df11-aB3d-f.part"];
        for name in
            others.into_iter().chain(["df11-aB3dEf.part", ".df11-old.", ".df11-aB3dEf.part2"])
        {
            assert_eq!(kind_of(name), None, "{name}");
        }
        let folder = tempfile::tempdir().unwrap();
        let file = file_beside(&folder.path().join("x")).unwrap();
        assert_eq!(kind_of(file.file.path().file_name().unwrap().to_str().unwrap()), Some(false));
        assert_eq!(leftovers(folder.path()).unwrap(), [], "it is in use");
    }

    /// Each run removes leftovers before it makes its folder, and may meet one that another run has
    /// made and not locked yet.
    #[test]
    fn runs_that_begin_at_once_keep_their_folders() {
        let parent = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        remove_leftovers(parent.path()).unwrap();
                        let folder = TemporaryFolder::new_in(parent.path()).unwrap();
                        fs::write(folder.path().join("file"), "x").unwrap();
                    }
                });
            }
        });
    }
}
