//! One safetensors file: `8-byte length | JSON | tensor data`.
//!
//! [`parse_header`] rejects everything that the `safetensors` crate rejects, and also headers
//! beyond the limits of a container, duplicate keys, and entries that are not objects.

use std::{fmt, path::Path, sync::Arc};

use super::header::{HeaderTensor, LENGTH_BYTES, data_bytes, parse_header};
use crate::{
    Dtype, Error, Result,
    io::{FileReader, ReadAt},
};

/// The longest JSON header, in bytes; the same as in the `safetensors` crate.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;

const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// A tensor as its file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// The name; any UTF-8 without NUL, 1 to [`MAX_NAME_BYTES`](crate::constants::MAX_NAME_BYTES)
    /// bytes. It is not a path, even if it looks like one.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// The dimensions, outermost first; at most
    /// [`MAX_DIMENSIONS`](crate::constants::MAX_DIMENSIONS), none for a scalar.
    pub shape: Vec<u64>,
    /// Where the data begins, in bytes from the start of the file.
    pub offset: u64,
    /// The size of the data in bytes, as `dtype` and `shape` require.
    pub length: u64,
}

/// An open safetensors file whose header has been read and validated; no tensor data has been read.
#[derive(Clone)]
pub struct WeightsFile {
    /// The path relative to the source, `/`-separated; see
    /// [`check_path`](crate::paths::check_path).
    pub path: String,
    /// The bytes of the file.
    pub reader: Arc<dyn ReadAt>,
    /// The length of the file in bytes: the prefix and all tensors, and nothing else.
    pub length: u64,
    /// All bytes before the tensor data: the length, the JSON and its padding.
    pub prefix: Vec<u8>,
    /// The tensors in ascending order of their data; empty ones at the same offset by name. They
    /// follow each other without holes from the end of the prefix to the end of the file.
    pub tensors: Vec<SourceTensor>,
}

impl fmt::Debug for WeightsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("WeightsFile");
        fields.field("path", &self.path).field("length", &self.length);
        fields.field("tensors", &self.tensors).finish_non_exhaustive()
    }
}

impl WeightsFile {
    /// Opens a file and reads its header; `path` is the name it gets in the container.
    ///
    /// # Errors
    /// The errors of [`FileReader::open`] and [`WeightsFile::parse`].
    pub fn open(file: &Path, path: &str) -> Result<Self> {
        Self::parse(path, Arc::new(FileReader::open(file)?))
    }

    /// Reads and validates the header; the cost grows only with the header, which has at most 100
    /// MB.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the file is none, is truncated, has trailing bytes, or breaks a rule
    /// of safetensors, or has a duplicate key; [`Error::Unsupported`] for a dtype or a tensor name
    /// that a container cannot hold; [`Error::Limit`] if a length, a shape or the number of
    /// dimensions is too large; [`Error::Io`] where reading fails. Each names `path`.
    pub fn parse(path: &str, reader: Arc<dyn ReadAt>) -> Result<Self> {
        let length = reader.size();
        let prefix = read_prefix(path, reader.as_ref())?;
        let header = parse_header(path, &prefix)?;
        let file = Self::described(path, reader, length, prefix, header)?;
        let start = file.prefix.len() as u64;
        let described = file.tensors.last().map_or(start, |last| last.offset + last.length);
        if length < described {
            return Err(truncated(path, length, described));
        }
        if length > described {
            let problem = format!("{} bytes follow the last tensor", length - described);
            return Err(
                Error::corrupt(path, described, problem).remedied("download the file again")
            );
        }
        Ok(file)
    }

    /// A file of this length with these tensors, if their dtypes are known.
    pub(crate) fn described(
        path: &str,
        reader: Arc<dyn ReadAt>,
        length: u64,
        prefix: Vec<u8>,
        header: Vec<HeaderTensor>,
    ) -> Result<Self> {
        let start = prefix.len() as u64;
        let ends = start.checked_add(data_bytes(&header));
        ends.ok_or_else(|| Error::overflow("where a tensor ends, in bytes").in_file(path))?;
        let tensor = |tensor: HeaderTensor| {
            let dtype = tensor.dtype().ok_or_else(|| {
                let what = format!("the dtype {:?} of tensor {:?}", tensor.dtype_name, tensor.name);
                Error::unsupported(what, "convert the tensor, or update df11").in_file(path)
            })?;
            let HeaderTensor { name, shape, data: (first, end), .. } = tensor;
            Ok(SourceTensor { name, dtype, shape, offset: start + first, length: end - first })
        };
        let tensors = header.into_iter().map(tensor).collect::<Result<_>>()?;
        Ok(Self { path: path.to_owned(), reader, length, prefix, tensors })
    }

    /// Fills `buf` with the bytes of the file from `offset` on. One positional read.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file, also if it has shrunk since it was opened; an [`Error`] that
    /// the reader put into its [`std::io::Error`], as a reader that decodes does.
    pub fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.reader.read_exact_at(offset, buf).map_err(|source| {
            let known = source.downcast::<Error>().map(|error| error.in_file(&self.path));
            known.unwrap_or_else(|source| Error::io("reading", &self.path, source))
        })
    }
}

/// The bytes before the tensor data, allocated only once the file is known to have as many.
fn read_prefix(path: &str, reader: &dyn ReadAt) -> Result<Vec<u8>> {
    let size = reader.size();
    if size < LENGTH_BYTES {
        return Err(truncated(path, size, LENGTH_BYTES));
    }
    let read = |offset, buf: &mut [u8]| {
        reader.read_exact_at(offset, buf).map_err(|source| Error::io("reading", path, source))
    };
    let mut length = [0; LENGTH_BYTES as usize];
    read(0, &mut length)?;
    let header = u64::from_le_bytes(length);
    if header > MAX_HEADER_BYTES {
        let mut start = vec![0; size.min(LFS_POINTER.len() as u64) as usize];
        read(0, &mut start)?;
        if start == LFS_POINTER {
            let problem = "this is a Git LFS pointer, not the weights";
            return Err(Error::corrupt(path, 0, problem).remedied("run git lfs pull"));
        }
        if start.get(LENGTH_BYTES as usize).is_some_and(|&first| first != b'{') {
            let remedy = "name one, or the folder of a model";
            let error = Error::corrupt(path, LENGTH_BYTES, "this is not a safetensors file");
            return Err(error.remedied(remedy));
        }
        let what = format_args!("{path}: the header's length in bytes");
        return Err(Error::limit(what, header, MAX_HEADER_BYTES));
    }
    if header > size - LENGTH_BYTES {
        return Err(truncated(path, size, LENGTH_BYTES + header));
    }
    let mut prefix = vec![0; (LENGTH_BYTES + header) as usize];
    read(0, &mut prefix)?;
    Ok(prefix)
}

fn truncated(path: &str, actual: u64, expected: u64) -> Error {
    let problem = format!("truncated: {actual} of at least {expected} bytes are there");
    Error::corrupt(path, actual, problem).remedied("download the file again")
}

#[cfg(test)]
mod tests {
    use super::Dtype;

    /// So the header's own checks of sizes are those of the `safetensors` crate.
    #[test]
    fn dtypes_are_those_of_the_safetensors_crate() {
        for dtype in Dtype::ALL {
            let theirs: safetensors::Dtype = serde_json::from_value(dtype.name().into()).unwrap();
            assert_eq!(theirs.bitsize() as u64, dtype.bits());
        }
    }
}
