//! The regular files of a folder, each with the path it would have in a container.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    Error, Result,
    paths::{PENDING, check_path, is_safetensors},
};

/// The largest side file, in bytes.
pub(crate) const MAX_SIDE_BYTES: u64 = 256 << 20;

/// Why a link that leads nowhere is left out, and a file that may not be looked at.
pub(super) const UNREADABLE: &str = "it cannot be read";

/// Why hidden files and folders are left out.
pub(crate) const HIDDEN: &str = "hidden";

/// A regular file, or a link to one.
#[derive(Clone)]
pub(crate) struct Found {
    /// Relative, `/`-separated and accepted by [`check_path`].
    pub(crate) path: String,
    pub(crate) file: PathBuf,
    /// In bytes.
    pub(crate) length: u64,
    /// Where it lies, if it is a link that leads out of the folder.
    outside: Option<PathBuf>,
}

/// A file or folder that is not part of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The path relative to the source, with replacement characters if it is not UTF-8.
    pub path: String,
    /// Why, in a few words.
    pub reason: String,
}

impl LeftOut {
    /// Whether its name, or that of a folder above it, begins with a dot.
    pub fn is_hidden(&self) -> bool {
        self.reason == HIDDEN
    }
}

impl Found {
    /// Refuses a link that leads out of the folder: what it leads to is no part of the model.
    pub(crate) fn check_inside(&self) -> Result<()> {
        self.outside.as_ref().map_or(Ok(()), |target| refuse(&self.file, target))
    }
}

/// All files below `root` in bytewise order of their paths, and what was passed over.
///
/// Links to files are followed, since the Hugging Face cache consists of them; one that leads
/// elsewhere than into the folder, or from a snapshot to the blobs of its repository, is known by
/// [`Found::check_inside`]. Links to folders are not, since they may form a circle. Hidden files
/// and folders are passed over: `.git` and `.cache` are no part of a model, and `.env` must not end
/// up in a container. [`check_installed`] must not refuse the folder.
pub(crate) fn walk(root: &Path) -> Result<(Vec<Found>, Vec<LeftOut>)> {
    check_installed(root)?;
    let (mut found, mut left_out) = (Vec::new(), Vec::new());
    let (homes, mut folders) = (homes(root), vec![(root.to_owned(), String::new())]);
    while let Some((folder, prefix)) = folders.pop() {
        let listing = |source| Error::io("listing", &folder, source);
        for entry in fs::read_dir(&folder).map_err(listing)? {
            let entry = entry.map_err(listing)?;
            let (file, name) = (entry.path(), entry.file_name());
            let path = format!("{prefix}{}", name.to_string_lossy());
            let is_portable = name.to_str().is_some() && check_path(&path).is_ok();
            match look(&entry, is_portable, &homes)? {
                EntryKind::Folder => folders.push((file, path + "/")),
                EntryKind::File { length, outside } => {
                    found.push(Found { path, file, length, outside });
                }
                EntryKind::Lost(reason) if is_safetensors(&path) => {
                    let problem = format!("{path:?}: {reason}");
                    return Err(Error::parameter(problem, "download the file again, or rename it"));
                }
                EntryKind::Lost(reason) | EntryKind::Other(reason) => {
                    left_out.push(LeftOut { path, reason: reason.to_owned() });
                }
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok((found, left_out))
}

/// Refuses a folder of which some files may be of an earlier model, and others not there yet.
pub(crate) fn check_installed(folder: &Path) -> Result<()> {
    Error::unless(folder.join(PENDING).symlink_metadata().is_err(), || {
        let folder = folder.display();
        let problem = format!("a save into {folder} goes on, or was interrupted");
        let remedy = "wait for it; if it was interrupted, save there again, or finish it with \
                      `df11 doctor --finish --folder FOLDER`";
        Error::parameter(problem, remedy)
    })
}

/// Kind of a folder's entry, as a source takes it.
enum EntryKind {
    Folder,
    File {
        length: u64,
        outside: Option<PathBuf>,
    },
    /// Nothing, for this reason.
    Other(&'static str),
    /// The same; a model must not lose weights without notice.
    Lost(&'static str),
}

fn look(entry: &fs::DirEntry, is_portable: bool, homes: &[PathBuf]) -> Result<EntryKind> {
    let file = entry.path();
    let kind = entry.file_type().map_err(|source| Error::io("looking at", &file, source))?;
    Ok(if entry.file_name().as_encoded_bytes().starts_with(b".") {
        EntryKind::Other(HIDDEN)
    } else if !is_portable {
        EntryKind::Lost("its name is not portable")
    } else if kind.is_dir() {
        EntryKind::Folder
    } else {
        match fs::metadata(&file) {
            Ok(metadata) if metadata.is_file() => {
                let outside = if kind.is_symlink() { outside(homes, &file) } else { Ok(None) };
                let outside = outside.map_err(|source| Error::io("following", &file, source))?;
                EntryKind::File { length: metadata.len(), outside }
            }
            Ok(metadata) if metadata.is_dir() => EntryKind::Other("a link to a folder"),
            Ok(_) => EntryKind::Lost("not a regular file"),
            Err(_) => EntryKind::Lost(UNREADABLE),
        }
    })
}

/// The folder itself and, if it is a snapshot in the cache of the Hub, the blobs of its repository.
fn homes(root: &Path) -> Vec<PathBuf> {
    let Ok(root) = root.canonicalize() else { return Vec::new() };
    let repository = root
        .ancestors()
        .find(|folder| {
            folder.parent().and_then(Path::file_name).is_some_and(|name| name == "snapshots")
        })
        .and_then(|snapshot| snapshot.parent()?.parent());
    let blobs = repository.and_then(|repository| repository.join("blobs").canonicalize().ok());
    [Some(root), blobs].into_iter().flatten().collect()
}

/// Like [`Found::check_inside`], of a file, or a folder on its path, that may not exist.
pub(crate) fn check_inside(root: &Path, file: &Path) -> Result<()> {
    let target = outside(&homes(root), file).ok().flatten();
    target.map_or(Ok(()), |target| refuse(file, &target))
}

fn refuse(link: &Path, target: &Path) -> Result<()> {
    let (link, target) = (link.display(), target.display());
    let problem = format!("{link} is a link that leads out of the folder, to {target}");
    let remedy = "put the file itself there if it belongs to the model, or remove the link";
    Err(Error::parameter(problem, remedy))
}

/// The real path of a file, if it lies in none of these folders.
fn outside(homes: &[PathBuf], file: &Path) -> io::Result<Option<PathBuf>> {
    let target = file.canonicalize()?;
    Ok((!homes.iter().any(|home| target.starts_with(home))).then_some(target))
}
