//! One safetensors file: `8-byte length | JSON | tensor data`.
//!
//! What the `safetensors` crate rejects is rejected here too, since its own `Metadata` has the last word. On
//! top of that come the limits of the container and the ban on duplicate keys.

use std::{fmt, ops::Range, path::Path, sync::Arc};

use safetensors::tensor::{Metadata, TensorInfo};
use serde::{
    Deserialize, Deserializer,
    de::{self, EnumAccess, IntoDeserializer, MapAccess, VariantAccess, Visitor},
};

use super::unique::Unique;
use crate::{
    Dtype, Error, Result,
    constants::{MAX_DIMENSIONS, MAX_NAME_BYTES},
    io::{FileReader, ReadAt},
};

/// The longest JSON header, in bytes; the same as in the `safetensors` crate.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

const LENGTH_BYTES: u64 = size_of::<u64>() as u64;
const METADATA_KEY: &str = "__metadata__";
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// A tensor as its file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// The name; any UTF-8 without NUL, 1 to [`MAX_NAME_BYTES`] bytes. It is no path, even if it looks like one.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// The dimensions, outermost first; at most [`MAX_DIMENSIONS`], none for a scalar.
    pub shape: Vec<u64>,
    /// Where the data begins, in bytes from the start of the file.
    pub offset: u64,
    /// The size of the data in bytes: what `dtype` and `shape` ask for.
    pub length: u64,
}

/// An open safetensors file whose header has been read and validated; no tensor data has been read.
#[derive(Clone)]
pub struct WeightsFile {
    /// The path relative to the source, `/`-separated; see [`check_path`](crate::paths::check_path).
    pub path: String,
    /// The bytes of the file.
    pub reader: Arc<dyn ReadAt>,
    /// The length of the file in bytes: the prefix and all tensors, and nothing else.
    pub length: u64,
    /// All bytes before the tensor data: the length, the JSON and its padding.
    pub prefix: Vec<u8>,
    /// The tensors in ascending order of their data; empty ones at the same offset by name. They follow each
    /// other without holes from the end of the prefix to the end of the file.
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
    /// Those of [`FileReader::open`] and [`WeightsFile::parse`].
    pub fn open(file: &Path, path: &str) -> Result<Self> {
        Self::parse(path, Arc::new(FileReader::open(file)?))
    }

    /// Reads and validates the header; the cost grows with the header alone, at most [`MAX_HEADER_BYTES`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the file is none, is truncated, has trailing bytes, or breaks a rule of safetensors, or
    /// has a duplicate key; [`Error::Unsupported`] for a dtype or a tensor name that a container cannot hold;
    /// [`Error::Limit`] where a length, a shape or the number of dimensions is too large; [`Error::Io`] where
    /// reading fails. Each names `path`.
    pub fn parse(path: &str, reader: Arc<dyn ReadAt>) -> Result<Self> {
        let length = reader.size();
        let prefix = read_prefix(path, reader.as_ref())?;
        let tensors = parse_prefix(path, &prefix)?;
        let described = tensors.last().map_or(prefix.len() as u64, |last| last.offset + last.length);
        if length < described {
            return Err(truncated(path, length, described));
        }
        if length > described {
            let problem =
                format!("{} bytes follow the last tensor; download the file again", length - described);
            return Err(Error::corrupt(path, described, problem));
        }
        Ok(Self { path: path.to_owned(), reader, length, prefix, tensors })
    }

    /// Fills `buf` with the bytes of the file from `offset` on. One positional read.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file, also where it has shrunk since it was opened; an [`Error`] that the reader put into
    /// its [`std::io::Error`], as one does that decodes what it is asked for.
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
        let mut start = vec![0; LFS_POINTER.len().min(usize::try_from(size).unwrap_or(usize::MAX))];
        read(0, &mut start)?;
        if start == LFS_POINTER {
            let problem = "this is a Git LFS pointer, not the weights; run `git lfs pull`";
            return Err(Error::corrupt(path, 0, problem));
        }
        let mut first = [0; 1];
        if size > LENGTH_BYTES {
            read(LENGTH_BYTES, &mut first)?;
            if first != *b"{" {
                let problem = "this is no safetensors file; name one, or the folder of a model";
                return Err(Error::corrupt(path, LENGTH_BYTES, problem));
            }
        }
        return Err(Error::limit(format!("{path}: the header's length in bytes"), header, MAX_HEADER_BYTES));
    }
    if header > size - LENGTH_BYTES {
        return Err(truncated(path, size, LENGTH_BYTES + header));
    }
    let mut prefix = vec![0; (LENGTH_BYTES + header) as usize];
    read(0, &mut prefix)?;
    Ok(prefix)
}

fn truncated(path: &str, actual: u64, expected: u64) -> Error {
    let problem =
        format!("truncated: {actual} of at least {expected} bytes are there; download the file again");
    Error::corrupt(path, actual, problem)
}

/// The tensors of a prefix (length, JSON, padding) in ascending order of their data.
fn parse_prefix(path: &str, prefix: &[u8]) -> Result<Vec<SourceTensor>> {
    let json = std::str::from_utf8(&prefix[LENGTH_BYTES as usize..]).map_err(|error| {
        let offset = LENGTH_BYTES + error.valid_up_to() as u64;
        Error::corrupt(path, offset, "the header is not UTF-8, so this is no safetensors file")
    })?;
    let invalid = |error: serde_json::Error| {
        let offset = LENGTH_BYTES + byte_of(json, error.line(), error.column());
        Error::corrupt(path, offset, format!("the header is no valid safetensors header: {error}"))
    };
    serde_json::from_str::<Unique>(json).map_err(invalid)?;
    let Header(mut entries) = serde_json::from_str(json).map_err(invalid)?;
    entries
        .sort_by(|(left, a), (right, b)| a.data_offsets.cmp(&b.data_offsets).then_with(|| left.cmp(right)));
    let tensors = entries
        .iter()
        .map(|(name, entry)| entry.check(name, prefix.len() as u64).map_err(|error| named(error, path)))
        .collect::<Result<Vec<_>>>()?;
    confirm(path, entries)?;
    Ok(tensors)
}

/// Lets the `safetensors` crate judge offsets and sizes: no holes, no overlaps, dtype and shape as long as the
/// data.
fn confirm(path: &str, entries: Vec<(String, Entry)>) -> Result<()> {
    let infos = entries.into_iter().filter_map(|(name, entry)| {
        let Element::Known(dtype) = entry.dtype else { return None };
        Some((name, TensorInfo { dtype, shape: entry.shape, data_offsets: entry.data_offsets }))
    });
    let problem = |error| format!("the header contradicts itself (hole, overlap or wrong size): {error}");
    Metadata::new(None, infos.collect())
        .map(|_| ())
        .map_err(|error| Error::corrupt(path, LENGTH_BYTES, problem(error).replace('\n', " ")))
}

/// The byte at a line and column, both counted from one; `serde_json` counts columns in bytes.
fn byte_of(json: &str, line: usize, column: usize) -> u64 {
    let before: usize = json.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    (before + column.saturating_sub(1)) as u64
}

fn named(error: Error, path: &str) -> Error {
    match error {
        Error::Corrupt { offset, problem, .. } => Error::corrupt(path, offset, problem),
        other => other.in_file(path),
    }
}

/// The header's tensors as they stand there.
struct Header(Vec<(String, Entry)>);

/// A tensor's entry, by the same derive and field types as the `safetensors` crate, so that the same JSON fits.
#[derive(Deserialize)]
struct Entry {
    dtype: Element,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

enum Element {
    Known(safetensors::Dtype),
    Unknown(String),
}

impl Entry {
    /// The tensor, if its entry is within the container's limits; `start` is where the file's data begins.
    fn check(&self, name: &str, start: u64) -> Result<SourceTensor> {
        check_name(name)?;
        let dtype = self.dtype.resolve(name)?;
        let shape: Vec<u64> = self.shape.iter().map(|&dimension| dimension as u64).collect();
        if shape.len() as u64 > MAX_DIMENSIONS {
            let what = format!("the number of dimensions of {name:?}");
            return Err(Error::limit(what, shape.len() as u64, MAX_DIMENSIONS));
        }
        if let Err(error @ Error::Limit { .. }) = dtype.bytes(&shape) {
            return Err(error.in_file(name));
        }
        let Range { start: from, end: to } = self.data_offsets.0 as u64..self.data_offsets.1 as u64;
        let ends = start.checked_add(to).filter(|_| from <= to);
        let Some(_) = ends else {
            let problem = format!("the data of {name:?} spans {from}..{to}, which is no range");
            return Err(Error::corrupt(name, LENGTH_BYTES, problem));
        };
        Ok(SourceTensor { name: name.to_owned(), dtype, shape, offset: start + from, length: to - from })
    }
}

fn check_name(name: &str) -> Result<()> {
    if name.len() as u64 > MAX_NAME_BYTES {
        return Err(Error::limit("the length of a tensor name in bytes", name.len() as u64, MAX_NAME_BYTES));
    }
    if name.is_empty() || name.contains('\0') {
        let what = format!("the tensor name {name:?} (empty, or with a NUL)");
        return Err(Error::unsupported(what, "rename the tensor"));
    }
    Ok(())
}

impl Element {
    fn resolve(&self, name: &str) -> Result<Dtype> {
        let dtype = match self {
            Self::Known(dtype) => dtype.to_string(),
            Self::Unknown(dtype) => dtype.clone(),
        };
        Dtype::from_name(&dtype).ok_or_else(|| {
            let what = format!("the dtype {dtype:?} of tensor {name:?}");
            Error::unsupported(what, "convert the tensor, or update df11")
        })
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA_KEY {
                        map.next_value::<Option<std::collections::HashMap<String, String>>>()?;
                    } else {
                        let entry = map.next_value()?;
                        entries.push((name, entry));
                    }
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Reads the name as an enum variant, which is what the `safetensors` crate does, but keeps one it does not know.
impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl<'de> Visitor<'de> for Name {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a dtype")
            }

            fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<Element, A::Error> {
                let (name, variant) = data.variant::<String>()?;
                variant.unit_variant()?;
                let known: Result<_, de::value::Error> =
                    safetensors::Dtype::deserialize(name.as_str().into_deserializer());
                Ok(known.map_or(Element::Unknown(name), Element::Known))
            }
        }
        deserializer.deserialize_enum("Dtype", &[], Name)
    }
}
