//! The rules on the fields of the directory (3, 5 and 6, and the places of sections in 2).

use std::collections::BTreeSet;

use crate::Kind::{Corrupt, Limit, Unsupported};
use crate::record::{Array, Directory, Field, File, Name, Section, Tensor, add, align, item, mul, slice};
use crate::{Result, gap};

pub(crate) const HEAD_BYTES: u64 = 4096;
pub(crate) const SECTION_ALIGNMENT: u64 = 4096;
pub(crate) const ARRAY_ALIGNMENT: u64 = 256;
pub(crate) const CHECKSUM_CHUNK_BYTES: u64 = 1 << 20;
const MAX_NAME_BYTES: u64 = 4096;
const MAX_DIMENSIONS: u64 = 8;
const MAX_SHARDS: u64 = 100_000;
const NONE: u64 = u64::MAX;

pub(crate) const WEIGHTS: u32 = 0;
const SIDE: u32 = 1;
const CODEBOOK: u32 = 1;
const INDEX: u32 = 2;
const BITSTREAM: u32 = 3;
const PLANE: u32 = 4;
const RAW_TENSORS: u32 = 5;
const PREFIXES: u32 = 6;
const SIDE_FILES: u32 = 7;
pub(crate) const ALIAS: u32 = 0;
pub(crate) const RAW: u32 = 1;
pub(crate) const GAP: u32 = 2;
const BF16: u32 = 15;

/// Parses the directory, and checks it (9, open, 9).
pub(crate) fn open(mut bytes: &[u8], directory_offset: u64) -> Result<Directory> {
    let directory = Directory::read(&mut bytes)?;
    Corrupt.unless(bytes.is_empty(), "3: bytes are left over")?;
    directory.check_known()?;
    directory.check_text()?;
    directory.check_order()?;
    directory.check_sections(directory_offset)?;
    directory.check_arrays()?;
    directory.files.iter().try_for_each(|file| directory.check_file(file))?;
    directory.tensors.iter().try_for_each(|tensor| directory.check_tensor(tensor))?;
    Ok(directory)
}

impl Directory {
    /// What makes the whole file Unsupported, before any rule that such a file need not keep.
    fn check_known(&self) -> Result<()> {
        Unsupported.unless(self.files.iter().all(|f| f.kind <= SIDE), "3, File: kind")?;
        let known = |s: &Section| (CODEBOOK..=SIDE_FILES).contains(&s.kind) || s.kind >= 1 << 31;
        Unsupported.unless(self.sections.iter().all(known), "3, Section: kind")?;
        Limit.unless(self.shard_count <= MAX_SHARDS, "3: shard_count exceeds MAX_SHARDS")?;
        Corrupt.unless(self.shard_index < self.shard_count, "3: shard_index is not less than shard_count")
    }

    /// 3, *Text*.
    fn check_text(&self) -> Result<()> {
        let paths_and_blocks = self.files.iter().map(|f| &f.path).chain(&self.blocks);
        let mut end = 0;
        for name in paths_and_blocks.chain(self.tensors.iter().map(|t| &t.name)) {
            Corrupt.unless(name.length > 0, "3: an empty name or path")?;
            Limit.unless(name.length <= MAX_NAME_BYTES, "3: a name or path exceeds MAX_NAME_BYTES")?;
            Corrupt.unless(name.offset == end, "3, Text: not back to back")?;
            end = add(end, name.length)?;
            let text = str::from_utf8(slice(&self.text, name.offset, name.length)?);
            Corrupt
                .unless(text.is_ok_and(|text| !text.contains('\0')), "1: text is not UTF-8 without NUL")?;
        }
        Corrupt.unless(end == self.text.len() as u64, "3, Text: some belongs to nobody")
    }

    /// A name or path, after `check_text`.
    pub(crate) fn text(&self, name: &Name) -> &str {
        slice(&self.text, name.offset, name.length)
            .ok()
            .and_then(|text| str::from_utf8(text).ok())
            .unwrap_or("")
    }

    /// The order of files and tensors, and what names are unique (3).
    fn check_order(&self) -> Result<()> {
        let files = self.files.iter().map(|f| (f.kind, self.text(&f.path)));
        Corrupt.unless(files.is_sorted_by(|a, b| a < b), "3, File: order")?;
        let paths: BTreeSet<_> = self.files.iter().map(|f| self.text(&f.path)).collect();
        Corrupt.unless(paths.len() == self.files.len(), "3, File: two have one path")?;
        let mut folders = paths.iter().flat_map(|p| p.match_indices('/').map(|(i, _)| &p[..i]));
        Corrupt.unless(!folders.any(|folder| paths.contains(folder)), "3, File: a path lies in a file")?;
        let blocks: BTreeSet<_> = self.blocks.iter().map(|block| self.text(block)).collect();
        Corrupt.unless(blocks.len() == self.blocks.len(), "3, Block: two have one name")?;
        let tensors = self.tensors.iter().map(|t| self.text(&t.name));
        Corrupt.unless(tensors.is_sorted_by(|a, b| a < b), "3, Tensor: order")
    }

    /// 3, *Section*, with the places of section 2 and the count of section 4.
    fn check_sections(&self, directory_offset: u64) -> Result<()> {
        let (mut end, mut chunks) = (HEAD_BYTES, 0);
        for s in &self.sections {
            Corrupt.unless(s.reserved == 0, "3, Section: reserved")?;
            Corrupt.unless(s.block == NONE || s.block < self.blocks.len() as u64, "3, Section: block")?;
            let none = [PREFIXES, SIDE_FILES].contains(&s.kind);
            Corrupt
                .unless(s.kind > SIDE_FILES || none == (s.block == NONE), "3, Section: block of this kind")?;
            Corrupt.unless(s.length > 0, "3, Section: no bytes")?;
            Corrupt.unless(s.offset == align(end, SECTION_ALIGNMENT)?, "2: place of a section")?;
            end = add(s.offset, s.length)?;
            chunks = add(chunks, s.length.div_ceil(CHECKSUM_CHUNK_BYTES))?;
        }
        let ascending = self.sections.is_sorted_by(|a, b| (a.block, a.kind) < (b.block, b.kind));
        Corrupt.unless(ascending, "3, Section: order")?;
        Corrupt.unless(directory_offset == align(end, SECTION_ALIGNMENT)?, "2: place of the directory")?;
        Corrupt.unless(chunks == self.checksums.len() as u64, "4: count of checksums")
    }

    /// 3, *Array*: whose they are, and how they are packed.
    fn check_arrays(&self) -> Result<()> {
        let files = self.files.iter().map(|f| (f.first_array, f.array_count));
        let mut next = 0;
        for (first_array, array_count) in
            files.chain(self.tensors.iter().map(|t| (t.first_array, t.array_count)))
        {
            Corrupt.unless(first_array == next, "3, Array: first_array")?;
            next = add(next, array_count)?;
        }
        Corrupt.unless(next == self.arrays.len() as u64, "3, Array: array_count")?;
        let mut ends = vec![0; self.sections.len()];
        for a in &self.arrays {
            item(&ends, a.section)?;
            let end = &mut ends[a.section as usize];
            Corrupt.unless(a.offset == align(*end, ARRAY_ALIGNMENT)?, "3, Array: offset")?;
            Corrupt.unless(a.length > 0, "3, Array: no bytes")?;
            *end = add(a.offset, a.length)?;
        }
        let whole = |(s, end): (&Section, u64)| s.length == end || s.kind > SIDE_FILES && s.length > end;
        Corrupt.unless(self.sections.iter().zip(ends).all(whole), "3, Array: length of the section")
    }

    pub(crate) fn file_arrays(&self, file: &File) -> &[Array] {
        slice(&self.arrays, file.first_array, file.array_count).unwrap_or_default()
    }

    pub(crate) fn tensor_arrays(&self, tensor: &Tensor) -> &[Array] {
        slice(&self.arrays, tensor.first_array, tensor.array_count).unwrap_or_default()
    }

    /// Requires one array for each of these kinds of sections, in sections of this block.
    fn check_kinds(&self, arrays: &[Array], block: u64, kinds: &[u32]) -> Result<()> {
        let sections = arrays.iter().filter_map(|a| item(&self.sections, a.section).ok());
        let equal = sections.map(|s| (s.block, s.kind)).eq(kinds.iter().map(|&kind| (block, kind)));
        Corrupt.unless(equal, "3, 6: count of arrays, or their sections")
    }

    /// 3, *File*: all but order and text.
    fn check_file(&self, file: &File) -> Result<()> {
        Corrupt.unless(file.reserved == 0, "3, File: reserved")?;
        let path = self.text(&file.path);
        let plain = path.split('/').all(|component| !["", ".", ".."].contains(&component));
        Corrupt.unless(plain && !path.contains(|c| c == '\\' || c == ':' || c < ' '), "3, File: path")?;
        let arrays = self.file_arrays(file);
        if file.kind == WEIGHTS {
            self.check_kinds(arrays, NONE, &[PREFIXES])?;
            return Corrupt.unless(arrays.iter().all(|a| a.length <= file.length), "3, File: length");
        }
        self.check_kinds(arrays, NONE, if file.length > 0 { &[SIDE_FILES] } else { &[] })?;
        Corrupt.unless(arrays.iter().all(|a| a.length == file.length), "3, File: length")
    }

    /// 3, *Tensor*: all but order and text. A tensor of unknown dtype has no further rules.
    fn check_tensor(&self, t: &Tensor) -> Result<()> {
        Limit.unless(
            t.dimension_count <= MAX_DIMENSIONS,
            "3, Tensor: dimension_count exceeds MAX_DIMENSIONS",
        )?;
        let after = &t.shape[t.dimension_count as usize..];
        Corrupt.unless(after.iter().all(|&dimension| dimension == 0), "3, Tensor: shape")?;
        Corrupt.unless(t.block < self.blocks.len() as u64, "3, Tensor: block")?;
        let file = item(&self.files, t.file)?;
        Corrupt.unless(file.kind == WEIGHTS, "3, Tensor: file")?;
        let of_block = |a: &Array| item(&self.sections, a.section).is_ok_and(|s| s.block == t.block);
        Corrupt.unless(self.tensor_arrays(t).iter().all(of_block), "3, Array: block")?;
        let size = t.size()?;
        let end = add(t.file_offset, size.map_or(0, |(_, bytes)| bytes))?;
        Corrupt.unless(end <= file.length, "3, Tensor: ends outside its file")?;
        size.map_or(Ok(()), |(elements, bytes)| self.check_encoding(t, elements, bytes))
    }

    /// 6. An encoding that it does not name makes the tensor Unsupported when it is decoded.
    fn check_encoding(&self, t: &Tensor, elements: u64, bytes: u64) -> Result<()> {
        let (arrays, [p, q, r, s]) = (self.tensor_arrays(t), t.parameters);
        match t.encoding {
            ALIAS => {
                self.check_kinds(arrays, t.block, &[])?;
                let target = item(&self.tensors, p)?;
                Corrupt.unless(target.encoding != ALIAS && [q, r, s] == [0; 3], "6.1: parameters")?;
                let same = (target.block, target.dtype, target.shape()) == (t.block, t.dtype, t.shape());
                Corrupt.unless(same && target.hash == t.hash, "6.1: target")
            }
            RAW => {
                self.check_kinds(arrays, t.block, if bytes > 0 { &[RAW_TENSORS] } else { &[] })?;
                let whole = arrays.iter().all(|a| a.length == bytes);
                Corrupt.unless(whole && t.parameters == [0; 4], "6.2: parameters or length of the array")
            }
            GAP => {
                Corrupt.unless(t.dtype == BF16 && s == 0, "6.3: dtype or parameters")?;
                self.check_kinds(arrays, t.block, &[CODEBOOK, INDEX, INDEX, BITSTREAM, PLANE])?;
                gap::check_lengths(elements, std::array::from_fn(|i| arrays[i].length), t.gap_parameters())
            }
            _ => Ok(()),
        }
    }
}

impl Tensor {
    pub(crate) fn shape(&self) -> &[u64] {
        slice(&self.shape, 0, self.dimension_count).unwrap_or_default()
    }

    /// `bytes_per_thread`, `threads_per_block` and `bit_count` (6.3).
    pub(crate) fn gap_parameters(&self) -> [u64; 3] {
        let [bytes_per_thread, threads_per_block, bit_count, _] = self.parameters;
        [bytes_per_thread, threads_per_block, bit_count]
    }

    /// Elements and bytes (5), unless the dtype is unknown.
    pub(crate) fn size(&self) -> Result<Option<(u64, u64)>> {
        let element_bits = match self.dtype {
            2 => 4,
            3 | 4 => 6,
            1 | 5..=11 => 8,
            12..=15 => 16,
            16..=18 => 32,
            19..=22 => 64,
            _ => return Ok(None),
        };
        let elements =
            self.shape().iter().filter(|&&dimension| dimension > 0).try_fold(1, |a, &b| mul(a, b))?;
        let bits = mul(elements, element_bits)?;
        if self.shape().contains(&0) {
            return Ok(Some((0, 0)));
        }
        Corrupt.unless(bits % 8 == 0, "5: elements do not fill whole bytes")?;
        Ok(Some((elements, bits / 8)))
    }
}
