//! A container: its frame (2), the rules on the fields of its directory (3, 5, 6), its checksums
//! (4) and its tensors.

use std::collections::BTreeSet;

use crate::Kind::{Limit, Unsupported};
use crate::record::{
    Array, Directory, Field, File, Header, Name, Section, Tensor, align, item, slice,
};
use crate::{Result, crc32, delta, float, gap, require, tile};

const MAGIC: [u8; 8] = [0xDF, 0x44, 0x46, 0x31, 0x31, 0x0D, 0x0A, 0x1A];
const HEAD_BYTES: u64 = 4096;
const SECTION_ALIGNMENT: u64 = 4096;
const ARRAY_ALIGNMENT: u64 = 256;
const CHECKSUM_CHUNK_BYTES: u64 = 1 << 20;
const MAX_DIRECTORY_BYTES: u64 = 1 << 28;
const MAX_FILE_BYTES: u64 = (1 << 63) - 1;
const MAX_NAME_BYTES: u64 = 4096;
const MAX_COMPONENT_BYTES: usize = 255;
const MAX_PATH_COMPONENTS: usize = 32;
const MAX_FILES: usize = 10_000;
const MAX_FOLDERS: usize = 10_000;
const MAX_ALIASES: u64 = 15;
const MAX_KEY_BYTES: u64 = 255;
const MAX_VALUE_BYTES: u64 = 1 << 16;
const MAX_METADATA_BYTES: u64 = 1 << 20;
const MAX_DIMENSIONS: u64 = 8;
const MAX_SHARDS: u64 = 100_000;
const NONE: u64 = u64::MAX;
const WEIGHTS: u32 = 0;
const BESIDE: u32 = 2;
const CODEBOOK: u32 = 1;
const INDEX: u32 = 2;
const BITSTREAM: u32 = 3;
const PLANE: u32 = 4;
const RAW_TENSORS: u32 = 5;
const PREFIXES: u32 = 6;
const SIDE_FILES: u32 = 7;
const ALIAS: u32 = 0;
const RAW: u32 = 1;
const GAP: u32 = 2;
const TILE: u32 = 3;
const FLOAT: u32 = 4;
const DELTA: u32 = 5;
const BF16: u32 = 15;

/// A container that passed the checks of level *open*.
#[derive(Debug)]
pub struct Container<'a> {
    bytes: &'a [u8],
    directory: Directory,
}

/// The directory's entry of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dimensions, the outermost first.
    pub shape: &'a [u64],
    /// The hash that its bytes ought to have.
    pub hash: &'a [u8; 32],
}

/// Steps 1 to 8 of level open (9). Returns where the directory starts, and its bytes.
fn check_frame(bytes: &[u8]) -> Result<(u64, &[u8])> {
    let size = bytes.len() as u64;
    require(size >= 12 && bytes.starts_with(&MAGIC), "2: magic")?;
    Unsupported.unless(bytes[8..10] == [1, 0], "2: version_major")?;
    require(size >= HEAD_BYTES + Header::SIZE, "2: shorter than head and footer")?;
    let (header_bytes, rest) = bytes.split_at(Header::SIZE as usize);
    let header = Header::read(&mut &*header_bytes)?;
    require(header.header_checksum == crc32(&header_bytes[..60]), "2: header_checksum")?;
    require(header.state == 1, "2: state")?;
    Unsupported.unless(header.incompatible_features == 0, "2: incompatible_features")?;
    Limit.unless(header.file_length <= MAX_FILE_BYTES, "2: file_length")?;
    require(header.file_length == size, "2: file_length")?;
    let (offset, length) = (header.directory_offset, header.directory_length);
    Limit.unless(length <= MAX_DIRECTORY_BYTES, "2: directory_length")?;
    require(offset >= HEAD_BYTES && offset % SECTION_ALIGNMENT == 0, "2: directory_offset")?;
    let footer = align(u128::from(offset) + u128::from(length), ARRAY_ALIGNMENT);
    require(footer + u128::from(Header::SIZE) == size.into(), "2: place of the footer")?;
    let directory = slice(bytes, offset, length)?;
    let space = &bytes[(offset + length) as usize..footer as usize];
    let mut zeros = rest[..(HEAD_BYTES - Header::SIZE) as usize].iter().chain(space);
    require(zeros.all(|&byte| byte == 0), "2: padding is not zero")?;
    require(bytes.ends_with(header_bytes), "2: footer")?;
    require(header.directory_checksum == crc32(directory), "2: directory_checksum")?;
    Ok((offset, directory))
}

impl<'a> Container<'a> {
    /// Opens a container, with all that section 9 checks on open, in its order.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn open(bytes: &'a [u8]) -> Result<Self> {
        let (directory_offset, mut rest) = check_frame(bytes)?;
        let directory = Directory::read(&mut rest)?;
        require(rest.is_empty(), "3: bytes are left over")?;
        Unsupported.unless(directory.files.iter().all(|f| f.kind <= BESIDE), "3, File: kind")?;
        let known = |s: &Section| (CODEBOOK..=SIDE_FILES).contains(&s.kind) || s.kind >= 1 << 31;
        Unsupported.unless(directory.sections.iter().all(known), "3, Section: kind")?;
        directory.check_text()?;
        directory.check_names()?;
        directory.check_paths()?;
        directory.check_sections(directory_offset)?;
        directory.check_arrays()?;
        directory.files.iter().try_for_each(|file| directory.check_file(file))?;
        directory.tensors.iter().try_for_each(|tensor| directory.check_tensor(tensor))?;
        directory.check_aliases()?;
        Ok(Self { bytes, directory })
    }

    /// All tensors, in the order of the directory.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> {
        self.directory.tensors.iter().map(|t| TensorInfo {
            name: self.directory.text(&t.name),
            shape: t.shape(),
            hash: &t.hash,
        })
    }

    /// The bytes of a tensor as in the original file (6). Of what it reads it checks what section 9
    /// checks on load.
    ///
    /// # Errors
    /// Corrupt by section 4 or 6, or if there is no such tensor; Unsupported if dtype or encoding
    /// are unknown.
    pub fn decode(&self, index: usize) -> Result<Vec<u8>> {
        self.decode_with(index, None)
    }

    /// The same, with the base model of tensors in delta (6.6); without it they are Unsupported.
    ///
    /// # Errors
    /// As those of `decode`.
    pub fn decode_with(&self, index: usize, base: Option<&Container<'_>>) -> Result<Vec<u8>> {
        let d = &self.directory;
        let mut t = item(&d.tensors, index as u64)?;
        if t.encoding == ALIAS {
            t = item(&d.tensors, t.parameters[0])?;
        }
        let size = t.size()?;
        let known = size.is_some() && [RAW, GAP, TILE, FLOAT, DELTA].contains(&t.encoding);
        Unsupported.unless(known, "3, Tensor: dtype or encoding")?;
        let mut stored = [&[] as &[u8]; 5];
        for (bytes, a) in stored.iter_mut().zip(d.arrays_of(t.first_array, t.array_count)) {
            let section = item(&d.sections, a.section)?;
            *bytes = slice(self.bytes, section.offset + a.offset, a.length)?;
            let last = (a.offset + a.length - 1) / CHECKSUM_CHUNK_BYTES;
            for chunk in a.offset / CHECKSUM_CHUNK_BYTES..=last {
                self.check_chunk(a.section, chunk)?;
            }
        }
        let ([tiles @ .., _], [parameters @ .., _]) = (stored, t.parameters);
        match t.encoding {
            GAP => gap::decode_gap(stored, parameters),
            TILE => tile::decode_tile(tiles, parameters),
            FLOAT => {
                let (elements, _) = size.unwrap_or_default();
                float::decode_float(tiles, t.parameters, t.dtype, elements)
            }
            DELTA => {
                let [arrays @ .., _] = tiles;
                delta::decode_delta(arrays, &self.base_of(t, base)?, t.shape())
            }
            _ => Ok(tiles[0].to_vec()),
        }
    }

    /// The bytes of the base of a tensor (6.6).
    fn base_of(&self, t: &Tensor, base: Option<&Container<'_>>) -> Result<Vec<u8>> {
        let name = self.directory.text(&t.name);
        let hash = t.parameters.map(u64::to_le_bytes);
        let found = base.and_then(|base| {
            let is_base = |other: &Tensor| {
                let same = (other.dtype, other.shape()) == (t.dtype, t.shape())
                    && base.directory.text(&other.name) == name;
                same && other.hash == *hash.as_flattened()
            };
            Some((base, base.directory.tensors.iter().position(is_base)?))
        });
        Unsupported.unless(found.is_some(), "6.6: the base is not there")?;
        found.map_or(Ok(Vec::new()), |(base, index)| base.decode(index))
    }

    /// The checksum of a chunk (4).
    fn check_chunk(&self, section: u64, chunk: u64) -> Result<()> {
        let (before, sections) = self.directory.sections.split_at(section as usize);
        let checksum = before.iter().map(Section::chunk_count).sum::<u64>() + chunk;
        let start = chunk * CHECKSUM_CHUNK_BYTES;
        let length = CHECKSUM_CHUNK_BYTES.min(sections[0].length - start);
        let bytes = slice(self.bytes, sections[0].offset + start, length)?;
        let expected = *item(&self.directory.checksums, checksum)?;
        require(crc32(bytes) == expected, "4: checksum of a chunk")
    }
}

impl Directory {
    /// 3, *Text*.
    fn check_text(&self) -> Result<()> {
        let mut end = 0;
        let paths_and_blocks = self.files.iter().map(|f| &f.path).chain(&self.blocks);
        let names = paths_and_blocks.chain(self.tensors.iter().map(|t| &t.name));
        let names = names.map(|name| (name, 1, MAX_NAME_BYTES));
        let entries = self
            .metadata
            .iter()
            .flat_map(|entry| [(&entry.key, 1, MAX_KEY_BYTES), (&entry.value, 0, MAX_VALUE_BYTES)]);
        for (name, least, most) in names.chain(entries) {
            Limit.unless(name.length <= most, "3: a name, path, key or value is too long")?;
            let place = name.length >= least && name.offset == end;
            require(place, "3, Text: empty, or not back to back")?;
            let text = str::from_utf8(slice(&self.text, name.offset, name.length)?);
            let plain = text.is_ok_and(|text| !text.contains('\0'));
            require(plain, "1: a name or path is not UTF-8 without NUL")?;
            end += name.length;
        }
        require(end == self.text.len() as u64, "3, Text: some belongs to nobody")
    }

    /// A name or path, after `check_text`.
    fn text(&self, name: &Name) -> &str {
        slice(&self.text, name.offset, name.length)
            .map_or("", |text| str::from_utf8(text).unwrap_or(""))
    }

    /// 3: which shard this is, what only the first one has, *Metadata*, and names of blocks and
    /// tensors.
    fn check_names(&self) -> Result<()> {
        Limit.unless(self.shard_count <= MAX_SHARDS, "3: shard_count")?;
        require(self.shard_index < self.shard_count, "3: shard_index")?;
        let plain = self.files.iter().all(|f| f.kind == WEIGHTS) && self.metadata.is_empty();
        require(self.shard_index == 0 || plain, "3: side files or metadata in a later shard")?;
        let bytes = self.metadata.iter().map(|entry| entry.key.length + entry.value.length);
        Limit.unless(bytes.sum::<u64>() <= MAX_METADATA_BYTES, "3, Metadata: bytes")?;
        let keys = self.metadata.iter().map(|entry| self.text(&entry.key));
        require(keys.is_sorted_by(|a, b| a < b), "3, Metadata: order")?;
        let blocks: BTreeSet<_> = self.blocks.iter().map(|block| self.text(block)).collect();
        require(blocks.len() == self.blocks.len(), "3, Block: two have one name")?;
        let tensors = self.tensors.iter().map(|t| self.text(&t.name));
        require(tensors.is_sorted_by(|a, b| a < b), "3, Tensor: order")
    }

    /// 3, *File*: order and paths.
    fn check_paths(&self) -> Result<()> {
        Limit.unless(self.files.len() <= MAX_FILES, "3, File: more than MAX_FILES")?;
        let files = self.files.iter().map(|f| (f.kind, self.text(&f.path)));
        require(files.is_sorted_by(|a, b| a < b), "3, File: order")?;
        let paths: BTreeSet<_> = self.files.iter().map(|f| self.text(&f.path)).collect();
        require(paths.len() == self.files.len(), "3, File: two have one path")?;
        let mut folders = BTreeSet::new();
        for path in &paths {
            let plain = path.split('/').all(|component| !["", ".", ".."].contains(&component));
            let plain = plain && !path.contains(|c: char| c == '\\' || c == ':' || c.is_control());
            let in_file = path.match_indices('/').any(|(at, _)| paths.contains(&path[..at]));
            require(plain && !in_file, "3, File: path")?;
            let count = path.split('/').count();
            Limit.unless(count <= MAX_PATH_COMPONENTS, "3, File: many components")?;
            let short = path.split('/').all(|component| component.len() <= MAX_COMPONENT_BYTES);
            Limit.unless(short, "3, File: a long component")?;
            folders.extend(path.match_indices('/').map(|(at, _)| &path[..at]));
        }
        Limit.unless(folders.len() <= MAX_FOLDERS, "3, File: more than MAX_FOLDERS")
    }

    /// 3, *Section*, with the places of section 2 and the count of section 4.
    fn check_sections(&self, directory_offset: u64) -> Result<()> {
        let (mut end, mut chunks) = (HEAD_BYTES.into(), 0);
        for s in &self.sections {
            require(s.reserved == 0 && s.length > 0, "3, Section: reserved or length")?;
            let none =
                [PREFIXES, SIDE_FILES].contains(&s.kind) || s.kind > SIDE_FILES && s.block == NONE;
            let block = if none { s.block == NONE } else { s.block < self.blocks.len() as u64 };
            require(block, "3, Section: block")?;
            let start = align(end, SECTION_ALIGNMENT);
            require(u128::from(s.offset) == start, "2: place of a section")?;
            end = u128::from(s.offset) + u128::from(s.length);
            chunks += u128::from(s.chunk_count());
        }
        let ascending = self.sections.is_sorted_by(|a, b| (a.block, a.kind) < (b.block, b.kind));
        require(ascending, "3, Section: order")?;
        let directory_place = align(end, SECTION_ALIGNMENT);
        require(directory_place == directory_offset.into(), "2: place of the directory")?;
        require(chunks == self.checksums.len() as u128, "4: count of checksums")
    }

    /// 3, *Array*: whose they are, and how they are packed.
    fn check_arrays(&self) -> Result<()> {
        let mut next = 0;
        let files = self.files.iter().map(|f| (f.first_array, f.array_count));
        let tensors = self.tensors.iter().map(|t| (t.first_array, t.array_count));
        for (first, count) in files.chain(tensors) {
            require(u128::from(first) == next, "3, Array: first_array")?;
            next += u128::from(count);
        }
        require(next == self.arrays.len() as u128, "3, Array: array_count")?;
        let mut ends = vec![0; self.sections.len()];
        for a in &self.arrays {
            let start = align(*item(&ends, a.section)?, ARRAY_ALIGNMENT);
            let right = u128::from(a.offset) == start && a.length > 0;
            require(right, "3, Array: offset or length")?;
            ends[a.section as usize] = start + u128::from(a.length);
        }
        let whole = |(s, end): (&Section, u128)| match u128::from(s.length) {
            length if s.kind > SIDE_FILES => length >= end,
            length => length == end,
        };
        require(self.sections.iter().zip(ends).all(whole), "3, Array: length of the section")
    }

    fn arrays_of(&self, first: u64, count: u64) -> &[Array] {
        slice(&self.arrays, first, count).unwrap_or_default()
    }

    /// Requires arrays of these lengths, in sections of these kinds.
    fn check_stored(&self, arrays: &[Array], kinds: &[u32], lengths: &[u64]) -> Result<()> {
        let mut right = arrays.len() == kinds.len();
        for (a, (kind, length)) in arrays.iter().zip(kinds.iter().zip(lengths)) {
            let s = item(&self.sections, a.section)?;
            right &= (s.kind, a.length) == (*kind, *length);
        }
        require(right, "3, 6: count of arrays, their sections or their lengths")
    }

    /// 3, *File*: all but order and path.
    fn check_file(&self, file: &File) -> Result<()> {
        require(file.reserved == 0, "3, File: reserved")?;
        let shard = file.kind == BESIDE && self.text(&file.path).ends_with(".df11");
        require(!shard, "3, File: name of a shard")?;
        let arrays = self.arrays_of(file.first_array, file.array_count);
        let (kinds, length): (&[_], _) = match file.kind {
            WEIGHTS => (&[PREFIXES], arrays.first().map_or(0, |a| a.length).min(file.length)),
            BESIDE => (&[], 0),
            _ => (if file.length == 0 { &[] } else { &[SIDE_FILES] }, file.length),
        };
        self.check_stored(arrays, kinds, &[length])
    }

    /// 3, *Tensor*: all but order and name.
    fn check_tensor(&self, t: &Tensor) -> Result<()> {
        Limit.unless(t.dimension_count <= MAX_DIMENSIONS, "3, Tensor: dimension_count")?;
        let after = &t.shape[t.dimension_count as usize..];
        require(after.iter().all(|&dimension| dimension == 0), "3, Tensor: shape")?;
        item(&self.blocks, t.block)?;
        let file = item(&self.files, t.file)?;
        require(file.kind == WEIGHTS, "3, Tensor: file")?;
        let arrays = self.arrays_of(t.first_array, t.array_count);
        let in_block =
            |a: &Array| item(&self.sections, a.section).is_ok_and(|s| s.block == t.block);
        require(arrays.iter().all(in_block), "3, Array: block")?;
        let size = t.size()?;
        let end = u128::from(t.file_offset) + u128::from(size.map_or(0, |(_, bytes)| bytes));
        require(end <= file.length.into(), "3, Tensor: ends outside its file")?;
        if t.encoding == ALIAS {
            return self.check_alias(t, arrays);
        }
        size.map_or(Ok(()), |(elements, bytes)| self.check_encoding(t, arrays, elements, bytes))
    }

    /// 6.1, except for the number of aliases.
    fn check_alias(&self, t: &Tensor, arrays: &[Array]) -> Result<()> {
        require(t.parameters[1..] == [0; 3] && arrays.is_empty(), "6.1: parameters or arrays")?;
        let target = item(&self.tensors, t.parameters[0])?;
        let same = (target.block, target.dtype, target.shape()) == (t.block, t.dtype, t.shape());
        require(target.encoding != ALIAS && same && target.hash == t.hash, "6.1: target")
    }

    /// 6.1: how many aliases a tensor has.
    fn check_aliases(&self) -> Result<()> {
        let mut counts = vec![0; self.tensors.len()];
        for t in self.tensors.iter().filter(|t| t.encoding == ALIAS) {
            counts[t.parameters[0] as usize] += 1;
        }
        Limit.unless(counts.iter().all(|&count| count <= MAX_ALIASES), "6.1: more than MAX_ALIASES")
    }

    /// 6. An encoding that it does not name makes the tensor Unsupported when it is decoded.
    fn check_encoding(
        &self,
        t: &Tensor,
        arrays: &[Array],
        elements: u64,
        bytes: u64,
    ) -> Result<()> {
        let codebook = arrays.first().map_or(0, |a| a.length);
        let [parameters @ .., zero_bits] = t.parameters;
        let (kinds, lengths, named): (&[_], _, _) = match t.encoding {
            RAW if bytes == 0 => (&[], vec![], 0),
            RAW => (&[RAW_TENSORS], vec![bytes], 0),
            GAP => {
                let lengths = gap::array_lengths(codebook, elements, parameters)?.to_vec();
                (&[CODEBOOK, INDEX, INDEX, BITSTREAM, PLANE], lengths, 3)
            }
            TILE => {
                let lengths = tile::array_lengths(codebook, elements, parameters, 8)?.to_vec();
                (&[CODEBOOK, INDEX, BITSTREAM, PLANE], lengths, 3)
            }
            FLOAT => {
                let kept = float::Split::new(t.dtype, zero_bits)?.kept;
                let lengths = tile::array_lengths(codebook, elements, parameters, kept)?.to_vec();
                (&[CODEBOOK, INDEX, BITSTREAM, PLANE], lengths, 4)
            }
            DELTA => {
                let lengths: Vec<u64> = arrays.iter().map(|a| a.length).collect();
                let right = <[u64; 3]>::try_from(&lengths[..])
                    .is_ok_and(|lengths| delta::has_lengths(t.shape(), elements, lengths));
                require(right && t.dtype == BF16, "6.6: dtype or lengths of arrays")?;
                (&[CODEBOOK, INDEX, BITSTREAM], lengths, 4)
            }
            _ => return Ok(()),
        };
        require(named != 3 || t.dtype == BF16, "6.3, 6.4: dtype")?;
        require(t.parameters[named..].iter().all(|&unused| unused == 0), "6: unused parameters")?;
        self.check_stored(arrays, kinds, &lengths)
    }
}

impl Section {
    fn chunk_count(&self) -> u64 {
        self.length.div_ceil(CHECKSUM_CHUNK_BYTES)
    }
}

impl Tensor {
    fn shape(&self) -> &[u64] {
        slice(&self.shape, 0, self.dimension_count).unwrap_or_default()
    }

    /// Elements and bytes (5), unless the dtype is unknown.
    fn size(&self) -> Result<Option<(u64, u64)>> {
        let element_bits = match self.dtype {
            2 => 4,
            3 | 4 => 6,
            1 | 5..=11 => 8,
            12..=15 => 16,
            16..=18 => 32,
            19..=22 => 64,
            _ => return Ok(None),
        };
        let sizes = self.shape().iter().copied().filter(|&dimension| dimension > 0);
        let bits = sizes.chain([element_bits]).try_fold(1, u64::checked_mul);
        require(bits.is_some(), "5: too many bits")?;
        let bits = bits.unwrap_or(0);
        if self.shape().contains(&0) {
            return Ok(Some((0, 0)));
        }
        require(bits % 8 == 0, "5: elements do not fill whole bytes")?;
        Ok(Some((bits / element_bits, bits / 8)))
    }
}
