//! The file from which a checkpoint was made: its bytes are in the checkpoint's files, or are
//! decoded when they are read.

use std::{io, sync::Arc};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::coded::CodedBlock;
use crate::{
    Dtype, Error, Result,
    io::ReadAt,
    source::{header::prefix_of, safetensors::WeightsFile},
};

/// A tensor as it will stand in the merged file.
pub(super) struct MergedTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: u64,
    pub(super) part: BytesOf,
}

/// Where bytes of the merged file come from.
pub(super) enum BytesOf {
    /// Generated: the header before the tensors.
    Prefix(Vec<u8>),
    /// Copied unchanged, from this offset of a file.
    Stored { file: usize, offset: u64 },
    /// Decoded, from this weight of a block.
    Coded { block: Arc<CodedBlock>, first: u64 },
}

/// The whole file: `length | JSON | tensors`.
pub(super) struct Merged {
    files: Vec<WeightsFile>,
    /// In ascending order of their starts, without holes; each with bytes.
    segments: Vec<Segment>,
    size: u64,
}

struct Segment {
    start: u64,
    length: u64,
    part: BytesOf,
}

impl Merged {
    /// Lays out a file of these tensors, in this order.
    pub(super) fn new(
        files: Vec<WeightsFile>,
        entries: Vec<(String, MergedTensor)>,
    ) -> Result<Self> {
        let described =
            entries.iter().map(|(name, entry)| (&**name, entry.dtype, &*entry.shape, entry.bytes));
        let prefix = prefix_of(metadata(&files).as_ref(), described)?;
        let start = prefix.len() as u64;
        let mut segments = vec![Segment { start: 0, length: start, part: BytesOf::Prefix(prefix) }];
        let mut size = start;
        for (_, MergedTensor { bytes: length, part, .. }) in entries {
            let start = size;
            let end = size.checked_add(length);
            size = end.ok_or_else(|| Error::overflow("the bytes of a checkpoint"))?;
            if length > 0 {
                segments.push(Segment { start, length, part });
            }
        }
        Ok(Self { files, segments, size })
    }

    /// Fills `buf` with bytes that the file has.
    fn read(&self, mut offset: u64, mut buf: &mut [u8]) -> Result<()> {
        let first =
            self.segments.partition_point(|segment| segment.start + segment.length <= offset);
        for segment in &self.segments[first..] {
            let from = offset - segment.start;
            let count = (segment.length - from).min(buf.len() as u64);
            let (part, rest) = buf.split_at_mut(count as usize);
            match &segment.part {
                BytesOf::Prefix(bytes) => {
                    part.copy_from_slice(&bytes[from as usize..][..part.len()]);
                }
                BytesOf::Stored { file, offset } => {
                    self.files[*file].read_exact_at(offset + from, part)?;
                }
                BytesOf::Coded { block, first } => block.read(2 * first + from, part)?,
            }
            (offset, buf) = (offset + count, rest);
            if buf.is_empty() {
                break;
            }
        }
        Ok(())
    }
}

impl ReadAt for Merged {
    fn size(&self) -> u64 {
        self.size
    }

    /// Errors of decoding come inside an [`io::Error`]; [`WeightsFile::read_exact_at`] takes them
    /// out again.
    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.read(offset, buf).map_err(io::Error::other)
    }
}

/// The files' own metadata, as JSON in ascending order of the keys; of equal keys the first counts.
fn metadata(files: &[WeightsFile]) -> Option<Value> {
    /// A header, without its tensors.
    #[derive(Deserialize)]
    struct HeaderMetadata {
        #[serde(rename = "__metadata__")]
        metadata: Option<Map<String, Value>>,
    }
    let mut all: Option<Map<String, Value>> = None;
    for file in files {
        let header: Option<HeaderMetadata> = serde_json::from_slice(&file.prefix[8..]).ok();
        if let Some(metadata) = header.and_then(|header| header.metadata) {
            let all = all.get_or_insert_default();
            metadata.into_iter().for_each(|(key, value)| {
                all.entry(key).or_insert(value);
            });
        }
    }
    all.map(Value::Object)
}
