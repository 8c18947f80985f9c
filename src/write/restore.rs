//! Decompression: restores the original files, byte for byte.

use std::{collections::BTreeSet, fs::File, path::Path};

use blake3::Hasher;

use super::{folder::OutputFolder, input::Side, options::DecompressOptions};
use crate::{
    Error, Model, Result,
    io::{FileReader, ReadAt},
    open::{
        Cpu, FilePieces, Models, OriginalFile,
        beside::{self, Beside},
        hash,
    },
    paths::{RENAME, check_nameable, is_safetensors},
    platform::{self, write_all_at},
    progress::{Observer, Stage, advance},
    source::{Component, Found, LeftOut, check_inside},
    temporary::{check_absent, check_file, file_beside, parent_of, rename_file},
};

/// Result of [`decompress`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Restored {
    /// Bytes of all files that were written.
    pub bytes: u64,
    /// Files that have the hash of the original.
    pub files: u64,
    /// Paths of side files that were copied although they have changed.
    pub changed: Vec<String>,
    /// Paths of missing side files.
    pub missing: Vec<String>,
    /// Paths of files beside the containers that the containers do not record: they were copied,
    /// but cannot be checked.
    pub unchecked: Vec<String>,
    /// Files beside the containers that were not copied.
    pub left_out: Vec<LeftOut>,
}

/// Writes the original files of a model, and proves by their hashes that they are the same, before
/// they get their names.
///
/// An output whose name ends in `.safetensors` is one file, if the model was made from one; any
/// other is a folder with all weights files and side files. Files in the model's folder that its
/// containers do not record are copied too, unless they would take the place of a restored file.
///
/// Works on all threads of the current rayon pool, in about 3 MiB per thread.
///
/// # Errors
/// [`Error::Parameter`] if the output exists, a shard is missing, or `out` is one file and the
/// model has several; [`Error::Corrupt`], also if a side file is missing or changed; [`Error::Io`],
/// also if the disk has too little free space, before anything is written; [`Error::Cancelled`].
/// After an error no partial output remains.
pub fn decompress(
    model: &Model,
    out: &Path,
    options: &DecompressOptions,
    observer: &dyn Observer,
) -> Result<Restored> {
    let restored = restore(vec![Component::new("", model)], out, options, observer)?;
    Ok(restored.into_iter().next().unwrap_or_default())
}

/// Like [`decompress`], for all models at a path. Components of a pipeline go to their places in
/// its folder, which appears when all of it is complete. Returns the result for each model, with
/// paths relative to the output.
///
/// # Errors
/// Like [`decompress`], and [`Error::Parameter`] if components are missing.
pub fn decompress_all(
    models: &Models,
    out: &Path,
    options: &DecompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Restored>> {
    models.check_complete()?;
    let components = models.components().iter();
    let components = components.map(|one| Component::new(one.folder.as_str(), &one.model));
    restore(components.collect(), out, options, observer)
}

/// Restores models, each to its folder in the output.
fn restore(
    components: Vec<Component<&Model>>,
    out: &Path,
    options: &DecompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Restored>> {
    check_absent(out, options.overwrite)?;
    let (mut restorers, mut length) = (Vec::new(), 0u64);
    for component in components {
        component.model.check_complete()?;
        let count = weights(component.model).count();
        if is_safetensors(out) && count != 1 {
            let problem = format!("the model was made of {count} weights files");
            return Err(Error::parameter(problem, "name a folder as output"));
        }
        // Lengths are claims until tensors are found to cover the files.
        for file in weights(component.model) {
            FilePieces::new(file, &Cpu)?;
            length = length.saturating_add(file.length());
        }
        let (bystanders, done) = (Vec::new(), Restored::default());
        restorers.push(Restorer { component, options, observer, bystanders, done });
    }
    observer.begin(length);
    observer.enter(Stage::Decode);
    if !is_safetensors(out) {
        return restore_folder(restorers, out, options);
    }
    // One model, and one weights file of it, as checked.
    let mut restorer = restorers.remove(0);
    let file = weights(restorer.component.model).next().expect("a weights file");
    check_file(out)?;
    check_space(out, length)?;
    let output = file_beside(out)?;
    restorer.restore(file, output.file.as_file(), out)?;
    rename_file(output, out, options.overwrite)?;
    Ok(vec![restorer.done])
}

fn restore_folder(
    mut restorers: Vec<Restorer<'_>>,
    out: &Path,
    options: &DecompressOptions,
) -> Result<Vec<Restored>> {
    let (mut paths, mut length) = (BTreeSet::new(), 0u64);
    for restorer in &mut restorers {
        restorer.find_bystanders()?;
        let Restorer { component, bystanders, .. } = restorer;
        let recorded = component.model.files().map(|file| (file.path(), file.length()));
        let others = bystanders.iter().map(|found| (found.path.as_str(), found.length));
        for (path, bytes) in recorded.chain(others) {
            paths.insert(component.path_of(path));
            length = length.saturating_add(bytes);
        }
    }
    paths.iter().try_for_each(|path| check_nameable(path, RENAME))?;
    check_space(out, length)?;
    let mut folder = OutputFolder::create(out, options.overwrite.then_some(paths))?;
    for restorer in &mut restorers {
        restorer.restore_all(&mut folder)?;
    }
    folder.finish()?;
    Ok(restorers.into_iter().map(|restorer| restorer.done).collect())
}

fn weights(model: &Model) -> impl Iterator<Item = OriginalFile<'_>> {
    model.files().filter(OriginalFile::is_weights)
}

struct Restorer<'a> {
    component: Component<&'a Model>,
    options: &'a DecompressOptions,
    observer: &'a dyn Observer,
    /// Files in the folder of the model that are copied too.
    bystanders: Vec<Found>,
    /// Results, with paths relative to the output.
    done: Restored,
}

impl Restorer<'_> {
    fn restore_all(&mut self, folder: &mut OutputFolder) -> Result<()> {
        // Small files first: what is wrong with them shows at once.
        let model = self.component.model;
        for file in model.files_beside() {
            self.restore_beside(file, folder)?;
        }
        for file in model.files().filter(|file| !file.is_beside()) {
            if file.is_weights() {
                let (output, path) = folder.create_file(&self.component.path_of(file.path()))?;
                self.restore(file, &output, &path)?;
            } else {
                self.copy(&Side::original(model, file)?, folder)?;
                self.done.files += 1;
            }
        }
        for found in std::mem::take(&mut self.bystanders) {
            let path = self.copy(&Side::on_disk(found.path, found.length, found.file), folder)?;
            self.done.unchecked.push(path);
        }
        Ok(())
    }

    /// Copies a side file; returns its path in the output.
    fn copy(&mut self, side: &Side<'_>, folder: &mut OutputFolder) -> Result<String> {
        let path = self.component.path_of(&side.path);
        folder.copy(side, &path)?;
        self.done.bytes += side.length;
        Ok(path)
    }

    /// Copies a recorded side file, if it is the original or may be another one.
    fn restore_beside(
        &mut self,
        recorded: OriginalFile<'_>,
        folder: &mut OutputFolder,
    ) -> Result<()> {
        let root = self.component.model.side_folder()?;
        match root.map_or(Ok(Beside::Missing), |root| beside::find(root, recorded))? {
            Beside::Changed(file) if self.options.keep_changed => {
                root.map_or(Ok(()), |root| check_inside(root, &file))?;
                let length = FileReader::open(&file)?.size();
                let side = Side::on_disk(recorded.path().to_owned(), length, file);
                let path = self.copy(&side, folder)?;
                self.done.changed.push(path);
            }
            Beside::Missing if self.options.keep_changed => {
                self.done.missing.push(self.component.path_of(recorded.path()));
            }
            found => {
                self.copy(&Side::found(recorded, found)?, folder)?;
                self.done.files += 1;
            }
        }
        Ok(())
    }

    /// Finds what no container records, without what would take the place of a recorded file, and
    /// without weights, which loaders could take for the model's.
    fn find_bystanders(&mut self) -> Result<()> {
        let model = self.component.model;
        let (found, mut left_out) = model.bystanders()?;
        let recorded: BTreeSet<&str> = model.files().map(|file| file.path()).collect();
        for file in found {
            let reason = if clashes(&file.path, &recorded) {
                "an original file has its place"
            } else if file.check_inside().is_err() {
                "a link that leads out of the folder"
            } else if is_safetensors(&file.path) {
                "weights that no container records"
            } else {
                self.bystanders.push(file);
                continue;
            };
            left_out.push(LeftOut { path: file.path, reason: reason.to_owned() });
        }
        for file in &mut left_out {
            file.path = self.component.path_of(&file.path);
        }
        self.done.left_out = left_out;
        Ok(())
    }

    /// Writes one weights file, which will be at `path`, and compares its hash.
    fn restore(&mut self, file: OriginalFile<'_>, output: &File, path: &Path) -> Result<()> {
        let write = |offset: u64, bytes: &[u8]| {
            write_all_at(output, bytes, offset).map_err(|error| Error::io("writing", path, error))
        };
        let mut hasher = Hasher::new();
        let mut pieces = FilePieces::new(file, &Cpu)?;
        let mut buffer = Vec::new();
        // Hashing while the next batch is written, as verification does while it is decoded, took
        // longer on 16 cores.
        while let Some(batch) = pieces.next_batch(buffer, &write)? {
            hash(&mut hasher, &batch.bytes);
            advance(self.observer, batch.bytes.len() as u64)?;
            buffer = batch.bytes;
        }
        file.check_hash(hasher.finalize())?;
        output.sync_all().map_err(|error| Error::io("syncing", path, error))?;
        self.done.bytes += file.length();
        self.done.files += 1;
        Ok(())
    }
}

/// Whether a path equals a recorded one, or one of the two lies in the other.
fn clashes(path: &str, recorded: &BTreeSet<&str>) -> bool {
    let inside = format!("{path}/");
    recorded.contains(path)
        || path.match_indices('/').any(|(at, _)| recorded.contains(&path[..at]))
        || recorded.range(&*inside..).next().is_some_and(|next| next.starts_with(&inside))
}

/// Refuses to begin if the output's disk has too little space.
fn check_space(out: &Path, bytes: u64) -> Result<()> {
    let folder = parent_of(out);
    // Where the system does not tell, writing will.
    let Ok(free) = platform::free_bytes(folder) else { return Ok(()) };
    if bytes <= free {
        return Ok(());
    }
    let problem = format!("{bytes} bytes are to be written, and {free} are free");
    let full = std::io::Error::new(std::io::ErrorKind::StorageFull, problem);
    Err(Error::io("looking at the disk of", folder, full))
}
