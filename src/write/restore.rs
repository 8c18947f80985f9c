//! Decompression: the original files, byte for byte.

use std::{fs::File, path::Path};

use blake3::Hasher;

use super::{
    compress::check_absent,
    config,
    folder::{OutputFolder, temporary_beside},
};
use crate::{
    Error, Model, Result,
    format::records::{FILE_WEIGHTS, FileRecord},
    io::write_all_at,
    open::{Cpu, Decoder, FilePieces, Shard, hash},
    paths::{is_container, is_safetensors},
    progress::{Observer, Stage, advance},
};

/// Choices of [`decompress`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DecompressOptions<'d> {
    /// Replace an output that exists.
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
        return restorer.restore_alone(shard, file, out);
    }
    let folder = OutputFolder::create(out)?;
    let mut bytes = 0;
    for (shard, file) in files(model) {
        let path = folder.path_of(shard.directory().file_path(&shard.directory().files[file]))?;
        let output = File::create_new(&path).map_err(|error| Error::io("creating", &path, error))?;
        bytes += restorer.restore(shard, file, &output, &path)?;
    }
    bytes += copy_side_files(model, &folder)?;
    folder.finish()?;
    Ok(bytes)
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
    fn restore_alone(&self, shard: &Shard, file: usize, out: &Path) -> Result<u64> {
        let output = temporary_beside(out)?;
        let bytes = self.restore(shard, file, output.as_file(), out)?;
        output.persist(out).map_err(|error| Error::io("renaming to", out, error.error))?;
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

/// A folder of shards has its side files beside them.
fn copy_side_files(model: &Model, folder: &OutputFolder) -> Result<u64> {
    let Some(root) = model.folder() else { return Ok(0) };
    let mut bytes = 0;
    let (found, _) = crate::source::walk(root)?;
    for file in found.iter().filter(|file| !is_container(&file.path)) {
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
