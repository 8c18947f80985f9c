//! Side files that lie beside the containers of a folder (spec/format.md, section 8).
//!
//! The directory has length and hash of the original. The file may be another one: transformers
//! finds a line in `config.json` by which it knows that the weights are compressed.
//!
//! ```text
//! {                                                    the original, up to its first brace
//!   "quantization_config": {"quant_method": "df11"},   MARK
//!   "architectures": ["LlamaForCausalLM"], …           the rest of the original
//! ```

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::original::{OriginalFile, hash};
use crate::{
    Error, Result,
    io::{FileReader, ReadAt, read_regular},
    paths::CONFIG,
    source::MAX_SIDE_BYTES,
};

/// The line in `config.json`.
pub(crate) const MARK: &str = "\n  \"quantization_config\": {\"quant_method\": \"df11\"},";

/// What was found at the place of a recorded side file.
pub(crate) enum Beside {
    /// The original.
    Original(PathBuf),
    /// A file that is the original except for the mark; these are the original's bytes.
    Marked(Vec<u8>),
    /// A file with other bytes.
    Changed(PathBuf),
    /// No file.
    Missing,
}

impl Beside {
    /// The error for what is not the original of this file.
    pub(crate) fn refused(&self, file: OriginalFile<'_>) -> Error {
        let problem = match self {
            Self::Missing => "it is missing beside the containers",
            _ => "it was changed after the model was compressed",
        };
        Error::corrupt(format!("file {:?}", file.path()), 0, problem)
            .remedied("fetch it again, or see --keep-changed of decompress")
            .in_file(file.shard().path())
    }
}

/// Looks for a recorded side file in the folder of its model, and compares its hash.
pub(crate) fn find(root: &Path, recorded: OriginalFile<'_>) -> Result<Beside> {
    let (path, length, wanted) = (recorded.path(), recorded.length(), recorded.record().hash);
    let file = root.join(path);
    let metadata = match fs::metadata(&file) {
        Ok(metadata) if metadata.is_file() => metadata,
        Ok(_) => return Ok(Beside::Missing),
        Err(error) if is_absent(&error) => return Ok(Beside::Missing),
        Err(error) => return Err(Error::io("looking at", &file, error)),
    };
    if metadata.len() == length && hash_file(&file)? == wanted {
        return Ok(Beside::Original(file));
    }
    let is_marked = path.rsplit('/').next() == Some(CONFIG)
        && length <= MAX_SIDE_BYTES
        && metadata.len() == length + MARK.len() as u64;
    if is_marked {
        let bytes = read_regular(&file)?;
        let original = unmark(&bytes).filter(|bytes| blake3::hash(bytes) == wanted);
        if let Some(original) = original {
            return Ok(Beside::Marked(original));
        }
    }
    Ok(Beside::Changed(file))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn hash_file(path: &Path) -> Result<blake3::Hash> {
    let reader = FileReader::open(path)?;
    let mut hasher = blake3::Hasher::new();
    reader.stream(reader.size(), |bytes| {
        hash(&mut hasher, bytes);
        Ok(())
    })?;
    Ok(hasher.finalize())
}

/// Where the mark goes: after the first brace.
pub(crate) fn place(config: &[u8]) -> Option<usize> {
    let brace = config.iter().position(|byte| !b" \t\n\r".contains(byte))?;
    (config[brace] == b'{').then_some(brace + 1)
}

/// The file without the mark, if it has one.
pub(crate) fn unmark(config: &[u8]) -> Option<Vec<u8>> {
    let place = place(config)?;
    let rest = config[place..].strip_prefix(MARK.as_bytes())?;
    Some([&config[..place], rest].concat())
}
