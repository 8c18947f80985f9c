//! Copies an open model: its containers as they were opened, even if their names belong to other
//! files by now, and the side files beside them. The copies are checked, and the hashes of side
//! files compared. A link that leads out of the folder is refused.

use std::{io::Write, path::Path};

use super::{folder::OutputFolder, input::Side};
use crate::{
    Error, Level, Model, OpenOptions, Result,
    io::{FileReader, ReadAt},
    open::{
        OriginalFile, Shard,
        beside::{self, Beside},
    },
    paths::{MODEL_INDEX, configs},
    progress::{Observer, Stage, advance},
    source::check_inside,
};

/// Writes the containers of an open model into a new folder, byte for byte, and checks the copies'
/// checksums; with `containers` false none of them. With them go the side files that lie in
/// `beside`, by default in the folder of the containers: from beyond a network they are fetched. A
/// configuration gets its mark. Returns the paths of those that have other hashes than the
/// containers record, which are copied as they are.
///
/// Takes 1 MiB of memory, and the time to write the containers and to read them again.
///
/// # Errors
/// [`Error::Parameter`] if `out` exists, a side file is a link that leads out of `beside`, or what
/// was copied is not the model that was opened; [`Error::Corrupt`]; [`Error::Io`];
/// [`Error::Cancelled`]. Then nothing is left behind.
pub fn copy(
    model: &Model,
    beside: Option<&Path>,
    out: &Path,
    containers: bool,
    observer: &dyn Observer,
) -> Result<Vec<String>> {
    let shards = if containers { model.shards() } else { &[] };
    observer.begin(shards.iter().map(Shard::file_length).sum());
    observer.enter(Stage::Encode);
    let mut folder = OutputFolder::create(out, None)?;
    for shard in shards {
        let (mut file, path) = folder.create_file(&container_path(model, shard))?;
        let writing = |error| Error::io("writing", &path, error);
        shard.stream(|bytes| {
            file.write_all(bytes).map_err(writing)?;
            advance(observer, bytes.len() as u64)
        })?;
        file.sync_all().map_err(writing)?;
    }
    if containers {
        check_copy(model, folder.path())?;
    }
    let mut changed = Vec::new();
    let root = beside.map_or_else(|| model.side_folder(), |folder| Ok(Some(folder)))?;
    let sides =
        root.into_iter().flat_map(|root| model.files_beside().map(move |file| (root, file)));
    for (root, recorded) in sides {
        match find(root, recorded)? {
            Beside::Missing => {}
            Beside::Changed(file) => {
                let (path, length) = (recorded.path(), FileReader::open(&file)?.size());
                folder.copy(&Side::on_disk(path.to_owned(), length, file), path)?;
                changed.push(path.to_owned());
            }
            found => write_side(model, recorded, found, &mut folder)?,
        }
    }
    folder.finish()?;
    Ok(changed)
}

/// The path of a container in the folder of its model; its name if it was opened by itself.
pub fn container_path(model: &Model, shard: &Shard) -> String {
    let (root, path) = (model.root(), shard.path());
    let inside = root.as_deref().and_then(|root| path.strip_prefix(root).ok());
    let inside = inside.or_else(|| path.file_name().map(Path::new)).unwrap_or(path);
    let names: Vec<_> = inside.iter().map(|name| name.to_string_lossy()).collect();
    names.join("/")
}

/// Refuses copies of containers that were overwritten in place while they were open.
fn check_copy(model: &Model, copied: &Path) -> Result<()> {
    let copy = OpenOptions::new().memory_map(false).open(copied)?;
    Error::unless(copy.identity() == model.identity(), || {
        let problem = "the containers were overwritten since they were opened, by another model's";
        Error::parameter(problem, "load the model again")
    })?;
    copy.verify(Level::Checksums, &()).map(|_| ())
}

/// Looks for a side file, and refuses what compression refuses.
fn find(root: &Path, recorded: OriginalFile<'_>) -> Result<Beside> {
    let file = root.join(recorded.path());
    // The components of a pipeline share its files.
    let home = root.parent().filter(|parent| parent.join(MODEL_INDEX).is_file()).unwrap_or(root);
    check_inside(home, &file)?;
    beside::find(root, recorded)
}

fn write_side(
    model: &Model,
    recorded: OriginalFile<'_>,
    found: Beside,
    folder: &mut OutputFolder,
) -> Result<()> {
    let (weights, sides) = model.files().partition::<Vec<_>, _>(OriginalFile::is_weights);
    let configs = configs(paths(&weights), paths(&sides));
    folder.copy_marked(&Side::found(recorded, found)?, &configs, recorded.path())
}

fn paths<'a>(files: &'a [OriginalFile<'a>]) -> impl Iterator<Item = &'a str> {
    files.iter().map(OriginalFile::path)
}
