//! Decompression: the original files, byte for byte.

use std::{collections::BTreeSet, fs::File, path::Path};

use blake3::Hasher;

use super::{
    copy::{check_space, copy},
    folder::{ModelFolder, OutputFolder},
    options::DecompressOptions,
    rename::{self, check_absent},
    replace::{Earlier, check_file},
    temporary::file_beside,
};
use crate::{
    Error, Model, Result,
    format::records::{FILE_BESIDE, FILE_WEIGHTS, FileRecord},
    io::write_all_at,
    open::{
        Cpu, FilePieces, Models, Shard,
        beside::{self, Beside},
        hash, wrong_hash,
    },
    paths::{is_container, is_safetensors},
    progress::{Observer, Stage, advance},
    source::{Found, LeftOut, leads_out},
};

/// What [`decompress`] has written.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Restored {
    /// Bytes of all files that were written.
    pub bytes: u64,
    /// Files that have the hash of the original.
    pub files: u64,
    /// Paths of side files that were copied although they are not the originals any more.
    pub changed: Vec<String>,
    /// Paths of side files that were not there.
    pub missing: Vec<String>,
    /// Paths of files beside the containers that the containers do not record: they were copied,
    /// and nothing tells whether they are what they were.
    pub unchecked: Vec<String>,
    /// Files beside the containers that were not copied.
    pub left_out: Vec<LeftOut>,
}

/// Writes the original files of a model, and proves by their hashes that they are the same, before
/// they get their names.
///
/// An output whose name ends in `.safetensors` is one file, where the model was made of one; any
/// other is a folder with all weights files and side files. Files in the folder of a model that its
/// containers do not record are copied too, except where they would stand in the way of one that
/// was restored.
///
/// Works on all threads of the current rayon pool, in about 3 MiB a thread.
///
/// # Errors
/// [`Error::Parameter`] if the output exists, a shard is missing, or one file is asked for of a
/// model of several; [`Error::Corrupt`], also if a side file is missing or changed; [`Error::Io`],
/// also if the disk has too little free space, before anything is written; [`Error::Cancelled`].
/// Then nothing is left behind.
pub fn decompress(
    model: &Model,
    out: &Path,
    options: &DecompressOptions,
    observer: &dyn Observer,
) -> Result<Restored> {
    let restored = restore(&[("", model)], out, options, observer)?;
    Ok(restored.into_iter().next().unwrap_or_default())
}

/// As [`decompress`], of all models at a path; those of a pipeline go to where they were in its
/// folder, which appears when all of it is whole. Returns what was restored of each, with paths
/// relative to the output.
///
/// # Errors
/// As [`decompress`], and [`Error::Parameter`] if components are missing.
pub fn decompress_all(
    models: &Models,
    out: &Path,
    options: &DecompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Restored>> {
    models.check_complete()?;
    let parts = models.components().iter();
    let parts: Vec<(&str, &Model)> =
        parts.map(|component| (component.folder.as_str(), &component.model)).collect();
    restore(&parts, out, options, observer)
}

/// Restores models, each to its folder in the output.
fn restore(
    parts: &[(&str, &Model)],
    out: &Path,
    options: &DecompressOptions,
    observer: &dyn Observer,
) -> Result<Vec<Restored>> {
    let mut restorers = Vec::new();
    for &(name, model) in parts {
        check(options, model, out)?;
        let done = Restored::default();
        restorers.push(Restorer { name, model, options, observer, done });
    }
    let mut length = 0u64;
    for restorer in &restorers {
        length = length.saturating_add(restorer.check_weights()?);
    }
    observer.begin(length);
    observer.enter(Stage::Decode);
    if !is_safetensors(out) {
        return restore_folder(restorers, out, options);
    }
    // One model, and one weights file of it, as checked.
    let mut restorer = restorers.remove(0);
    let (shard, file) = weights(restorer.model).next().expect("a weights file");
    check_file(out)?;
    check_space(out, length)?;
    restorer.restore_alone(shard, file, out)?;
    Ok(vec![restorer.done])
}

/// Fills a folder with the files of all models.
fn restore_folder(
    mut restorers: Vec<Restorer<'_>>,
    out: &Path,
    options: &DecompressOptions,
) -> Result<Vec<Restored>> {
    let mut bystanders = Vec::new();
    let (mut paths, mut length) = (Vec::new(), 0u64);
    for restorer in &mut restorers {
        let found = restorer.bystanders()?;
        let recorded =
            files(restorer.model).map(|(shard, file)| shard.directory().files[file].length.get());
        let lengths = recorded.chain(found.iter().map(|found| found.length));
        length = lengths.fold(length, u64::saturating_add);
        paths.extend(restorer.paths(&found));
        bystanders.push(found);
    }
    check_space(out, length)?;
    let folder = OutputFolder::create(out, options.overwrite.then(|| Earlier::of(paths)))?;
    for (restorer, found) in restorers.iter_mut().zip(bystanders) {
        restorer.restore_all(&folder.part(restorer.name), found)?;
    }
    folder.finish()?;
    Ok(restorers.into_iter().map(Restorer::finish).collect())
}

/// What [`decompress`] checks before it does anything.
fn check(options: &DecompressOptions, model: &Model, out: &Path) -> Result<()> {
    check_absent(out, options.overwrite)?;
    if !model.is_complete() {
        let problem = format!("{} of the model's shards are open", model.shards().len());
        return Err(Error::parameter(problem, "open the folder that holds all of them"));
    }
    let count = weights(model).count();
    if is_safetensors(out) && count != 1 {
        let problem = format!("the model was made of {count} weights files");
        return Err(Error::parameter(problem, "name a folder as output"));
    }
    Ok(())
}

fn files(model: &Model) -> impl Iterator<Item = (&Shard, usize)> {
    model
        .shards()
        .iter()
        .flat_map(|shard| (0..shard.directory().files.len()).map(move |file| (shard, file)))
}

fn weights(model: &Model) -> impl Iterator<Item = (&Shard, usize)> {
    files(model).filter(|&(shard, file)| is_weights(shard, file))
}

fn path_of(shard: &Shard, file: usize) -> &str {
    shard.directory().file_path(&shard.directory().files[file])
}

fn is_weights(shard: &Shard, file: usize) -> bool {
    shard.directory().files[file].kind == FILE_WEIGHTS
}

/// What restores one model.
struct Restorer<'a> {
    /// Its folder in the output; empty for all of it.
    name: &'a str,
    model: &'a Model,
    options: &'a DecompressOptions,
    observer: &'a dyn Observer,
    done: Restored,
}

impl Restorer<'_> {
    /// Bytes of the weights files. Lengths are claims until tensors are found to cover the files.
    fn check_weights(&self) -> Result<u64> {
        let mut length = 0u64;
        for (shard, file) in weights(self.model) {
            FilePieces::new(shard, file, &Cpu)?;
            length = length.saturating_add(shard.directory().files[file].length.get());
        }
        Ok(length)
    }

    fn restore_alone(&mut self, shard: &Shard, file: usize, out: &Path) -> Result<()> {
        let output = file_beside(out)?;
        self.restore(shard, file, output.as_file(), out)?;
        rename::file(output, out, self.options.overwrite)
    }

    fn restore_all(&mut self, folder: &ModelFolder<'_>, bystanders: Vec<Found>) -> Result<()> {
        // Small files first: what is wrong with them shows at once.
        for (shard, file) in beside::recorded(self.model) {
            self.restore_beside(shard, &shard.directory().files[file], folder)?;
        }
        for (shard, file) in files(self.model) {
            if shard.directory().files[file].kind == FILE_BESIDE {
                continue;
            }
            let (output, path) = folder.create_file(path_of(shard, file))?;
            self.restore(shard, file, &output, &path)?;
        }
        for found in bystanders {
            self.done.bytes += copy(&found.file, folder, &found.path, None)?;
            self.done.unchecked.push(found.path);
        }
        Ok(())
    }

    /// Paths of all files that are restored or copied, relative to the output.
    fn paths(&self, bystanders: &[Found]) -> Vec<String> {
        let recorded = files(self.model).map(|(shard, file)| path_of(shard, file));
        let all = recorded.chain(bystanders.iter().map(|found| found.path.as_str()));
        all.map(|path| self.outer(path)).collect()
    }

    /// A path of the model, relative to the output.
    fn outer(&self, path: &str) -> String {
        if self.name.is_empty() { path.to_owned() } else { format!("{}/{path}", self.name) }
    }

    /// What was done, with paths relative to the output.
    fn finish(mut self) -> Restored {
        let mut done = std::mem::take(&mut self.done);
        for paths in [&mut done.changed, &mut done.missing, &mut done.unchecked] {
            for path in paths.iter_mut() {
                *path = self.outer(path);
            }
        }
        done.left_out.iter_mut().for_each(|file| file.path = self.outer(&file.path));
        done
    }

    /// Copies a recorded side file, if it is the original or may be another one.
    fn restore_beside(
        &mut self,
        shard: &Shard,
        record: &FileRecord,
        folder: &ModelFolder<'_>,
    ) -> Result<()> {
        let path = shard.directory().file_path(record);
        let root = self.model.folder();
        match root.map_or(Ok(Beside::Missing), |root| beside::find(root, path, record))? {
            Beside::Original(file) => {
                self.done.bytes += copy(&file, folder, path, Some(&record.hash))?;
                self.done.files += 1;
            }
            Beside::Marked(original) => {
                folder.write(&original, path)?;
                self.done.bytes += original.len() as u64;
                self.done.files += 1;
            }
            Beside::Changed(file)
                if self.options.keep_changed && root.is_some_and(|root| leads_out(root, &file)) =>
            {
                return Err(Error::parameter(
                    format!("{} is a link that leads out of the folder", file.display()),
                    "put the file itself there, or remove the link",
                ));
            }
            Beside::Changed(file) if self.options.keep_changed => {
                self.done.bytes += copy(&file, folder, path, None)?;
                self.done.changed.push(path.to_owned());
            }
            Beside::Missing if self.options.keep_changed => self.done.missing.push(path.to_owned()),
            Beside::Changed(_) => return Err(beside::refused(shard, path, beside::CHANGED)),
            Beside::Missing => return Err(beside::refused(shard, path, beside::MISSING)),
        }
        Ok(())
    }

    /// Files in the folder of the model that no container records, without those that would take
    /// the place of one that is recorded, and without weights, which loaders could take for the
    /// model's.
    fn bystanders(&mut self) -> Result<Vec<Found>> {
        let (found, left_out) = self.model.walk()?;
        self.done.left_out = left_out;
        let recorded: BTreeSet<&str> =
            files(self.model).map(|(shard, file)| path_of(shard, file)).collect();
        let beside: BTreeSet<&str> =
            beside::recorded(self.model).map(|(shard, file)| path_of(shard, file)).collect();
        let mut bystanders = Vec::new();
        for file in found {
            if is_container(&file.path) || beside.contains(&*file.path) {
                continue;
            }
            let reason = if clashes(&file.path, &recorded) {
                "an original file has its place"
            } else if file.check_inside().is_err() {
                "a link that leads out of the folder"
            } else if is_safetensors(&file.path) {
                "weights that no container records"
            } else {
                bystanders.push(file);
                continue;
            };
            self.done.left_out.push(LeftOut { path: file.path, reason: reason.to_owned() });
        }
        Ok(bystanders)
    }

    /// Writes one original file, which will be at `path`, and compares its hash.
    fn restore(&mut self, shard: &Shard, file: usize, output: &File, path: &Path) -> Result<()> {
        let record = &shard.directory().files[file];
        let write = |offset: u64, bytes: &[u8]| {
            write_all_at(output, bytes, offset).map_err(|error| Error::io("writing", path, error))
        };
        let mut hasher = Hasher::new();
        if is_weights(shard, file) {
            let mut pieces = FilePieces::new(shard, file, &Cpu)?;
            let mut buffer = Vec::new();
            // To hash while the next batch is written, as verification does while it is decoded,
            // took longer on 16 cores.
            while let Some(batch) = pieces.next_batch(buffer, &write)? {
                hash(&mut hasher, &batch.bytes);
                advance(self.observer, batch.bytes.len() as u64)?;
                buffer = batch.bytes;
            }
        } else {
            let mut offset = 0;
            for array in record.array_range() {
                shard.stream_array(array, |bytes| {
                    write(offset, bytes)?;
                    hash(&mut hasher, bytes);
                    offset += bytes.len() as u64;
                    Ok(())
                })?;
            }
        }
        check_hash(shard, record, &hasher)?;
        output.sync_all().map_err(|error| Error::io("syncing", path, error))?;
        self.done.bytes += record.length.get();
        self.done.files += 1;
        Ok(())
    }
}

fn check_hash(shard: &Shard, record: &FileRecord, hasher: &Hasher) -> Result<()> {
    if hasher.finalize() == record.hash {
        return Ok(());
    }
    let place = format!("file {:?}", shard.directory().file_path(record));
    Err(wrong_hash(place).in_file(shard.path()))
}

/// Whether a path equals a recorded one, or one of the two lies in the other.
fn clashes(path: &str, recorded: &BTreeSet<&str>) -> bool {
    let inside = format!("{path}/");
    recorded.contains(path)
        || path.match_indices('/').any(|(at, _)| recorded.contains(&path[..at]))
        || recorded.range(&*inside..).next().is_some_and(|next| next.starts_with(&inside))
}
