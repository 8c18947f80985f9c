//! Decompression: the original files, byte for byte.

use std::{fs::File, path::Path};

use blake3::Hasher;

use super::{
    config,
    folder::OutputFolder,
    rename::{self, check_absent},
    replace::{Earlier, check_file},
    temporary::file_beside,
};
use crate::{
    Error, Model, Result,
    format::records::{FILE_WEIGHTS, FileRecord},
    io::write_all_at,
    open::{Cpu, Decoder, FilePieces, Shard, hash},
    paths::{is_container, is_safetensors},
    progress::{Observer, Stage, advance},
    source::{Found, walk},
};

/// Choices of [`decompress`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DecompressOptions<'d> {
    /// Replace an output that exists; a folder only if each file in it has the path of a new one.
    pub overwrite: bool,
    /// What decodes the weights: the [`Cpu`] unless set.
    pub decoder: &'d dyn Decoder,
}

impl Default for DecompressOptions<'_> {
    fn default() -> Self {
        Self { overwrite: false, decoder: &Cpu }
    }
}

impl DecompressOptions<'_> {
    /// What [`decompress`] checks before it does anything; for callers that first make a costly decoder.
    ///
    /// # Errors
    /// [`Error::Parameter`] as [`decompress`].
    pub fn check(&self, model: &Model, out: &Path) -> Result<()> {
        check_absent(out, self.overwrite)?;
        if !model.is_complete() {
            let problem = format!("{} of the model's shards are open", model.shards().len());
            return Err(Error::parameter(problem, "open the folder that holds all of them"));
        }
        let count = files(model).filter(|&(shard, file)| is_weights(shard, file)).count();
        if is_safetensors(out) && count != 1 {
            let problem = format!("the model was made of {count} weights files");
            return Err(Error::parameter(problem, "name a folder as output"));
        }
        Ok(())
    }
}

/// Writes the original files of a model, and proves by their hashes that they are the same, before they get their names.
///
/// An output whose name ends in `.safetensors` is one file, where the model was made of one; any other is a folder with all weights
/// files and side files. Works on all threads of the current rayon pool, in about 3 MiB a thread. Returns the bytes written.
///
/// # Errors
/// [`Error::Parameter`] where the output exists, a shard is missing, or one file is asked for of a model of several;
/// [`Error::Corrupt`], [`Error::Io`], [`Error::Cancelled`], and what the decoder answers. Then nothing is left behind.
pub fn decompress(
    model: &Model,
    out: &Path,
    options: &DecompressOptions<'_>,
    observer: &dyn Observer,
) -> Result<u64> {
    options.check(model, out)?;
    let weights: Vec<(&Shard, usize)> =
        files(model).filter(|&(shard, file)| is_weights(shard, file)).collect();
    let lengths = weights.iter().map(|&(shard, file)| shard.directory().files[file].length.get());
    observer.begin(lengths.fold(0, u64::saturating_add));
    observer.enter(Stage::Decode);
    let restorer = Restorer { decoder: options.decoder, observer };
    if is_safetensors(out) {
        // One, as checked.
        let (shard, file) = weights[0];
        check_file(out)?;
        return restorer.restore_alone(shard, file, out, options.overwrite);
    }
    let earlier = options.overwrite.then(|| paths(model).map(Earlier::of)).transpose()?;
    let folder = OutputFolder::create(out, earlier)?;
    let mut bytes = 0;
    for (shard, file) in files(model) {
        let (output, path) =
            folder.create_file(shard.directory().file_path(&shard.directory().files[file]))?;
        bytes += restorer.restore(shard, file, &output, &path)?;
    }
    bytes += copy_side_files(model, &folder)?;
    folder.finish()?;
    Ok(bytes)
}

/// Paths of all files that are restored.
fn paths(model: &Model) -> Result<Vec<String>> {
    let stored =
        files(model).map(|(shard, file)| shard.directory().file_path(&shard.directory().files[file]));
    let mut paths: Vec<String> = stored.map(str::to_owned).collect();
    if let Some(root) = model.folder() {
        paths.extend(side_files_of(root)?.into_iter().map(|file| file.path));
    }
    Ok(paths)
}

fn files(model: &Model) -> impl Iterator<Item = (&Shard, usize)> {
    model.shards().iter().flat_map(|shard| (0..shard.directory().files.len()).map(move |file| (shard, file)))
}

fn is_weights(shard: &Shard, file: usize) -> bool {
    shard.directory().files[file].kind == FILE_WEIGHTS
}

struct Restorer<'a> {
    decoder: &'a dyn Decoder,
    observer: &'a dyn Observer,
}

impl Restorer<'_> {
    fn restore_alone(&self, shard: &Shard, file: usize, out: &Path, overwrite: bool) -> Result<u64> {
        let output = file_beside(out)?;
        let bytes = self.restore(shard, file, output.as_file(), out)?;
        rename::file(output, out, overwrite)?;
        Ok(bytes)
    }

    /// Writes one original file, which will be at `path`, and compares its hash.
    fn restore(&self, shard: &Shard, file: usize, output: &File, path: &Path) -> Result<u64> {
        let record = &shard.directory().files[file];
        let write = |offset: u64, bytes: &[u8]| {
            write_all_at(output, bytes, offset).map_err(|error| Error::io("writing", path, error))
        };
        let mut hasher = Hasher::new();
        if is_weights(shard, file) {
            let mut pieces = FilePieces::new(shard, file, self.decoder)?;
            let mut buffer = Vec::new();
            // To hash while the next batch is written, as verification does while it is decoded, took longer on 16 cores.
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
        Ok(record.length.get())
    }
}

fn check_hash(shard: &Shard, record: &FileRecord, hasher: &Hasher) -> Result<()> {
    if hasher.finalize() == record.hash {
        return Ok(());
    }
    let place = format!("file {:?}", shard.directory().file_path(record));
    let problem =
        "its bytes do not have the hash in the directory; the container is damaged, fetch or make it again";
    Err(Error::corrupt(place, 0, problem).in_file(shard.path()))
}

/// What lies beside the containers of a folder.
fn side_files_of(root: &Path) -> Result<Vec<Found>> {
    let (found, _) = walk(root)?;
    let side: Vec<Found> = found.into_iter().filter(|file| !is_container(&file.path)).collect();
    side.iter().try_for_each(Found::check_inside)?;
    Ok(side)
}

/// A folder of shards has its side files beside them.
fn copy_side_files(model: &Model, folder: &OutputFolder) -> Result<u64> {
    let Some(root) = model.folder() else { return Ok(0) };
    let mut bytes = 0;
    for file in side_files_of(root)? {
        let weights = files(model).filter(|&(shard, file)| is_weights(shard, file));
        let paths = weights.map(|(shard, file)| shard.directory().file_path(&shard.directory().files[file]));
        bytes += if let Some(original) = config::original(&file.path, &file.file, file.length, paths)? {
            folder.write(&original, &file.path)?;
            original.len() as u64
        } else {
            folder.copy(&file.file, &file.path)?;
            file.length
        };
    }
    Ok(bytes)
}
