//! A container: its frame (2), its checksums (4), and the tensors and files that it restores (6 and 7).

use std::collections::BTreeSet;

use crate::Kind::{Corrupt, Limit, Unsupported};
use crate::directory::{self, ARRAY_ALIGNMENT, CHECKSUM_CHUNK_BYTES, HEAD_BYTES, SECTION_ALIGNMENT};
use crate::directory::{ALIAS, GAP, RAW, WEIGHTS};
use crate::gap::{decode_gap, verify_gap};
use crate::record::{Array, Directory, Field, File, Header, Tensor, add, align, item, slice};
use crate::{Result, crc32};

const MAGIC: [u8; 8] = [0xDF, 0x44, 0x46, 0x31, 0x31, 0x0D, 0x0A, 0x1A];
const MAX_DIRECTORY_BYTES: u64 = 1 << 28;
const MAX_FILE_BYTES: u64 = (1 << 63) - 1;

/// A container that passed the checks of level *open*.
#[derive(Debug)]
pub struct Container<'a> {
    bytes: &'a [u8],
    directory_offset: u64,
    directory: Directory,
    /// Of each section, the checksums of its chunks.
    checksums: Vec<Vec<u32>>,
}

/// What the directory says of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Its name.
    pub name: &'a str,
    /// The id of its dtype (section 5).
    pub dtype: u32,
    /// Its dimensions, the outermost first.
    pub shape: &'a [u64],
    /// The id of its encoding (section 6).
    pub encoding: u32,
    /// The name of its block.
    pub block: &'a str,
    /// The hash that its bytes ought to have.
    pub hash: &'a [u8; 32],
}

/// Steps 1 to 8 of level open (9). Returns the directory's offset and bytes.
fn check_frame(bytes: &[u8]) -> Result<(u64, &[u8])> {
    let start = slice(bytes, 0, 12)?;
    Corrupt.unless(start[..8] == MAGIC, "2: magic")?;
    Unsupported.unless(start[8..10] == 1u16.to_le_bytes(), "2: version_major")?;
    let long_enough = bytes.len() as u64 >= HEAD_BYTES + Header::SIZE;
    Corrupt.unless(long_enough, "2: shorter than a head and a footer")?;
    let (header_bytes, head) = (slice(bytes, 0, Header::SIZE)?, slice(bytes, 0, HEAD_BYTES)?);
    let header = Header::read(&mut &*header_bytes)?;
    Corrupt.unless(header.header_checksum == crc32(&header_bytes[..60]), "2: header_checksum")?;
    Corrupt.unless(header.state == 1, "2: state")?;
    Unsupported.unless(header.incompatible_features == 0, "2: incompatible_features")?;
    let (offset, length) = (header.directory_offset, header.directory_length);
    Corrupt.unless(header.file_length == bytes.len() as u64, "2: file_length")?;
    Limit.unless(header.file_length <= MAX_FILE_BYTES, "2: file_length exceeds MAX_FILE_BYTES")?;
    Limit.unless(length <= MAX_DIRECTORY_BYTES, "2: directory_length exceeds MAX_DIRECTORY_BYTES")?;
    Corrupt.unless(offset >= HEAD_BYTES && offset % SECTION_ALIGNMENT == 0, "2: directory_offset")?;
    let end = add(offset, length)?;
    let footer = align(end, ARRAY_ALIGNMENT)?;
    Corrupt.unless(add(footer, Header::SIZE)? == header.file_length, "2: place of the footer")?;
    check_zero(&head[header_bytes.len()..])?;
    Corrupt.unless(slice(bytes, footer, Header::SIZE)? == header_bytes, "2: footer")?;
    check_zero(slice(bytes, end, footer - end)?)?;
    let directory = slice(bytes, offset, length)?;
    Corrupt.unless(header.directory_checksum == crc32(directory), "2: directory_checksum")?;
    Ok((offset, directory))
}

fn check_zero(bytes: &[u8]) -> Result<()> {
    Corrupt.unless(bytes.iter().all(|&byte| byte == 0), "2, 3: padding is not zero")
}

impl<'a> Container<'a> {
    /// Opens a container, with all that section 9 checks on open, in its order.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn open(bytes: &'a [u8]) -> Result<Self> {
        let (directory_offset, directory) = check_frame(bytes)?;
        let directory = directory::open(directory, directory_offset)?;
        let mut all = directory.checksums.iter().copied();
        let chunk_counts = directory.sections.iter().map(|s| s.length.div_ceil(CHECKSUM_CHUNK_BYTES));
        let checksums = chunk_counts.map(|count| all.by_ref().take(count as usize).collect()).collect();
        Ok(Self { bytes, directory_offset, directory, checksums })
    }

    /// All tensors, in the order of the directory.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> {
        let block =
            |t: &Tensor| item(&self.directory.blocks, t.block).map_or("", |name| self.directory.text(name));
        self.directory.tensors.iter().map(move |t| TensorInfo {
            name: self.directory.text(&t.name),
            dtype: t.dtype,
            shape: t.shape(),
            encoding: t.encoding,
            block: block(t),
            hash: &t.hash,
        })
    }

    /// The paths of all files, in the order of the directory.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &str> {
        self.directory.files.iter().map(|f| self.directory.text(&f.path))
    }

    /// The bytes of a tensor as in the original file. Of what it reads it checks what section 9 checks on load.
    ///
    /// # Errors
    /// Corrupt by section 4 or 6, Unsupported if dtype or encoding are unknown, Limit if there is no such tensor.
    pub fn decode(&self, index: usize) -> Result<Vec<u8>> {
        let t = self.directory.tensors.get(index).ok_or_else(|| Limit.error("there is no such tensor"))?;
        self.check_chunks(self.directory.tensor_arrays(self.stored(t)?))?;
        self.decode_unchecked(t)
    }

    /// The bytes of an original file (7). Of what it reads it checks what section 9 checks on load.
    ///
    /// # Errors
    /// Those of [`Self::decode`]; Corrupt where tensors do not cover the file; Limit if memory does not hold it.
    pub fn restore(&self, index: usize) -> Result<Vec<u8>> {
        let file = self.directory.files.get(index).ok_or_else(|| Limit.error("there is no such file"))?;
        let tensors = if file.kind == WEIGHTS { self.coverage(index as u64, file)? } else { Vec::new() };
        let mut arrays = Vec::from_iter(self.directory.file_arrays(file));
        for t in &tensors {
            arrays.extend(self.directory.tensor_arrays(self.stored(t)?));
        }
        self.check_chunks(arrays)?;
        let mut bytes = Vec::new();
        let reserved =
            usize::try_from(file.length).is_ok_and(|length| bytes.try_reserve_exact(length).is_ok());
        Limit.unless(reserved, "the file exceeds the memory")?;
        for array in self.directory.file_arrays(file) {
            bytes.extend(self.array(array)?);
        }
        for t in tensors {
            bytes.extend(self.decode_unchecked(t)?);
        }
        Ok(bytes)
    }

    /// Checks the whole file: what section 9 verifies, but for hashes and the identity.
    ///
    /// # Errors
    /// Corrupt where a rule is broken, Unsupported where a tensor's dtype or encoding is unknown.
    pub fn verify(&self) -> Result<()> {
        for (section, checksums) in (0..).zip(&self.checksums) {
            (0..).zip(checksums).try_for_each(|(chunk, _)| self.check_chunk(section, chunk))?;
        }
        self.check_zeros()?;
        for t in &self.directory.tensors {
            self.stored(t)?;
            if t.encoding == GAP {
                verify_gap(self.arrays(t)?, t.gap_parameters())?;
            }
        }
        let mut weights = (0..).zip(&self.directory.files).filter(|(_, file)| file.kind == WEIGHTS);
        weights.try_for_each(|(index, file)| self.coverage(index, file).map(drop))
    }

    fn array(&self, array: &Array) -> Result<&'a [u8]> {
        let section = item(&self.directory.sections, array.section)?;
        slice(self.bytes, add(section.offset, array.offset)?, array.length)
    }

    /// The arrays of a tensor in the order of section 6, and empty ones.
    fn arrays(&self, t: &Tensor) -> Result<[&'a [u8]; 5]> {
        let mut arrays = [&[] as &[u8]; 5];
        for (bytes, array) in arrays.iter_mut().zip(self.directory.tensor_arrays(t)) {
            *bytes = self.array(array)?;
        }
        Ok(arrays)
    }

    /// The tensor that holds the bytes, for an alias its target (6.1), unless it is Unsupported (3, *Tensor*).
    fn stored<'t>(&'t self, t: &'t Tensor) -> Result<&'t Tensor> {
        Unsupported.unless(t.size()?.is_some(), "3, Tensor: dtype")?;
        let stored = if t.encoding == ALIAS { item(&self.directory.tensors, t.parameters[0])? } else { t };
        Unsupported.unless([RAW, GAP].contains(&stored.encoding), "3, Tensor: encoding")?;
        Ok(stored)
    }

    /// Decodes a tensor (6) whose checksums are checked.
    fn decode_unchecked(&self, t: &Tensor) -> Result<Vec<u8>> {
        let t = self.stored(t)?;
        let arrays = self.arrays(t)?;
        if t.encoding == RAW { Ok(arrays[0].to_vec()) } else { decode_gap(arrays, t.gap_parameters()) }
    }

    /// The checksum of one chunk (4).
    fn check_chunk(&self, section: u64, chunk: u64) -> Result<()> {
        let s = item(&self.directory.sections, section)?;
        let start = chunk * CHECKSUM_CHUNK_BYTES;
        let bytes = slice(self.bytes, s.offset + start, CHECKSUM_CHUNK_BYTES.min(s.length - start))?;
        let checksum = *item(item(&self.checksums, section)?, chunk)?;
        Corrupt.unless(crc32(bytes) == checksum, "4: checksum of a chunk")
    }

    /// Checks, once, each chunk that holds bytes of these arrays (4).
    fn check_chunks<'t>(&self, arrays: impl IntoIterator<Item = &'t Array>) -> Result<()> {
        let mut chunks = BTreeSet::new();
        for a in arrays {
            let range = a.offset / CHECKSUM_CHUNK_BYTES..=(a.offset + a.length - 1) / CHECKSUM_CHUNK_BYTES;
            chunks.extend(range.map(|chunk| (a.section, chunk)));
        }
        chunks.into_iter().try_for_each(|(section, chunk)| self.check_chunk(section, chunk))
    }

    /// The zeros between sections (2) and between arrays (3).
    fn check_zeros(&self) -> Result<()> {
        let mut end = HEAD_BYTES;
        for s in &self.directory.sections {
            check_zero(slice(self.bytes, end, s.offset - end)?)?;
            end = s.offset + s.length;
        }
        check_zero(slice(self.bytes, end, self.directory_offset - end)?)?;
        let mut ends: Vec<u64> = self.directory.sections.iter().map(|s| s.offset).collect();
        for a in &self.directory.arrays {
            let start = item(&self.directory.sections, a.section)?.offset + a.offset;
            let end = &mut ends[a.section as usize];
            check_zero(slice(self.bytes, *end, start - *end)?)?;
            *end = start + a.length;
        }
        Ok(())
    }

    /// Requires that tensors cover a weights file, and returns them in the order in which they do (7).
    fn coverage(&self, index: u64, file: &File) -> Result<Vec<&Tensor>> {
        let prefix = self.directory.file_arrays(file).iter().map(|a| a.length).sum();
        let mut tensors: Vec<&Tensor> = self.directory.tensors.iter().filter(|t| t.file == index).collect();
        tensors.sort_by_key(|t| t.file_offset);
        let mut end: u64 = prefix;
        for t in &tensors {
            let (_, bytes) = t.size()?.ok_or_else(|| Unsupported.error("3, Tensor: dtype"))?;
            let placed = if bytes > 0 { t.file_offset == end } else { t.file_offset >= prefix };
            Corrupt.unless(placed, "7: tensors overlap or leave a hole")?;
            end = add(end, bytes)?;
        }
        Corrupt.unless(end == file.length, "7: tensors do not end where the file ends")?;
        Ok(tensors)
    }
}
