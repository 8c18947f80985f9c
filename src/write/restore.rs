//! Decompression: the original files, byte for byte.

use std::{fs, io::Write, path::Path};

use blake3::Hasher;

use super::{
    compress::check_absent,
    folder::{OutputFolder, parent_of},
};
use crate::{
    Error, Model, Result,
    format::records::{FILE_WEIGHTS, FileRecord},
    open::{FilePieces, Shard, hash, is_container},
    progress::{Observer, Stage, advance},
};

/// Choices of [`decompress`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct DecompressOptions {
    /// Replace an output that exists.
    pub overwrite: bool,
}

/// Writes the original files of a model, and proves by their hashes that they are the same, before they get their names.
///
/// An output whose name ends in `.safetensors` is one file, where the model was made of one; any other is a folder with all weights
/// files and side files. Works on all threads of the current rayon pool, in about 3 MiB a thread. Returns the bytes written.
///
/// # Errors
/// [`Error::Parameter`] where the output exists, a shard is missing, or one file is asked for of a model of several;
/// [`Error::Corrupt`], [`Error::Io`], [`Error::Cancelled`]. Then nothing is left behind.
pub fn decompress(
    model: &Model,
    out: &Path,
    options: &DecompressOptions,
    observer: &dyn Observer,
) -> Result<u64> {
    check_absent(out, options.overwrite)?;
    if !model.is_complete() {
        let problem = format!("{} of the model's shards are open", model.shards().len());
        return Err(Error::parameter(problem, "open the folder that holds all of them"));
    }
    let weights: Vec<(&Shard, usize)> =
        files(model).filter(|&(shard, file)| is_weights(shard, file)).collect();
    let lengths = weights.iter().map(|&(shard, file)| shard.directory().files[file].length.get());
    observer.begin(lengths.fold(0, u64::saturating_add));
    observer.enter(Stage::Decode);
    if out.extension().is_some_and(|extension| extension == "safetensors") {
        let [(shard, file)] = weights[..] else {
            let problem = format!("the model was made of {} weights files", weights.len());
            return Err(Error::parameter(problem, "name a folder as output"));
        };
        return restore_alone(shard, file, out, observer);
    }
    let folder = OutputFolder::create(out)?;
    let mut bytes = 0;
    for (shard, file) in files(model) {
        let path = folder.path_of(shard.directory().file_path(&shard.directory().files[file]))?;
        let mut output = fs::File::create_new(&path).map_err(|error| Error::io("creating", &path, error))?;
        bytes += restore(shard, file, &mut output, observer).map_err(|error| name_output(error, &path))?;
        output.sync_all().map_err(|error| Error::io("syncing", &path, error))?;
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

/// Writing fails without saying where; say it.
fn name_output(error: Error, path: &Path) -> Error {
    match error {
        Error::Io { context, source } if context.is_empty() => Error::io("writing", path, source),
        other => other,
    }
}

fn restore_alone(shard: &Shard, file: usize, out: &Path, observer: &dyn Observer) -> Result<u64> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let folder = parent_of(out);
    let mut output = builder
        .prefix(".")
        .suffix(".part")
        .tempfile_in(folder)
        .map_err(|error| Error::io("creating a file in", folder, error))?;
    let bytes =
        restore(shard, file, output.as_file_mut(), observer).map_err(|error| name_output(error, out))?;
    output.as_file().sync_all().map_err(|error| Error::io("syncing", out, error))?;
    output.persist(out).map_err(|error| Error::io("renaming to", out, error.error))?;
    Ok(bytes)
}

/// Writes one original file and compares its hash.
fn restore(shard: &Shard, file: usize, output: &mut dyn Write, observer: &dyn Observer) -> Result<u64> {
    let record = &shard.directory().files[file];
    let mut hasher = Hasher::new();
    let mut write = |bytes: &[u8]| {
        let written = output.write_all(bytes).map_err(|source| Error::Io { context: String::new(), source });
        hash(&mut hasher, bytes);
        written
    };
    if is_weights(shard, file) {
        let mut pieces = FilePieces::new(shard, file)?;
        while let Some(batch) = pieces.next_batch()? {
            write(batch.bytes)?;
            advance(observer, batch.bytes.len() as u64)?;
        }
    } else {
        for array in record.array_range() {
            shard.stream_array(array, &mut write)?;
        }
    }
    check_hash(shard, record, &hasher)?;
    Ok(record.length.get())
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
        folder.copy(&file.file, &file.path)?;
        bytes += file.length;
    }
    Ok(bytes)
}
