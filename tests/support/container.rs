//! Builds containers of any content, right or wrong: `Item`s → [`Model`] → [`Draft`] → bytes.
//!
//! A test may edit the results of each step before the next one. Checksums are made right at the
//! end, so a test breaks one rule and no other.
#![allow(dead_code, reason = "each user needs another part")]

#[path = "tile_arrays.rs"]
pub(crate) mod tile_arrays;
#[path = "tree.rs"]
mod tree;

use std::collections::BTreeMap;

use df11::{
    Dtype, OpenOptions, ReadAt,
    hazmat::{
        constants::{ARRAY_ALIGNMENT, CHECKSUM_CHUNK_BYTES, HEADER_BYTES, NONE},
        format::{
            Directory, Header, IdentifiedFile,
            directory::ShardRecord,
            identity,
            records::{
                ENCODING_ALIAS, ENCODING_DELTA, ENCODING_FLOAT, ENCODING_GAP, ENCODING_RAW,
                ENCODING_TILE, FILE_BESIDE, FILE_SIDE, FILE_WEIGHTS, FileRecord, SECTION_BITSTREAM,
                SECTION_CODEBOOK, SECTION_INDEX, SECTION_PLANE, SECTION_PREFIX, SECTION_RAW,
                SECTION_SIDE, SectionRecord, TensorRecord,
            },
        },
        gap::{GapGeometry, encode_tensor},
        tile,
    },
};
use tile_arrays::{Arrays, Split};
use tree::{Array, Owner, Tree};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Each dtype with each of its numbers of zero bits.
pub(crate) const FLOATS: [(Dtype, u64); 7] = [
    (Dtype::F8_E4M3, 0),
    (Dtype::F8_E5M2, 0),
    (Dtype::F16, 0),
    (Dtype::BF16, 4),
    (Dtype::F32, 0),
    (Dtype::F32, 13),
    (Dtype::F32, 16),
];

/// How an [`Item`] is stored.
#[derive(Clone, Debug)]
pub(crate) enum Store {
    Raw,
    Gap(u32, u32),
    /// In tiles, as encoded.
    Encoded(Arrays),
    /// As differences, encoded.
    Delta(DeltaArrays),
    Alias(String),
}

/// Codebook, records and bitstream of a `delta` tensor, and the hash of its base.
#[derive(Clone, Debug)]
pub(crate) struct DeltaArrays {
    pub(crate) base: [u8; 32],
    pub(crate) arrays: [Vec<u8>; 3],
}

/// A tensor to put into a model.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) name: String,
    pub(crate) dtype: (u32, String),
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Vec<u8>,
    /// Bytes in the weights file; other than those of `data` where no reader can decode them.
    pub(crate) length: u64,
    pub(crate) block: String,
    pub(crate) file: String,
    pub(crate) store: Store,
}

impl Item {
    pub(crate) fn raw(name: &str, dtype: Dtype, shape: &[u64], data: Vec<u8>) -> Self {
        Self {
            name: name.into(),
            dtype: (dtype.id(), dtype.name().into()),
            shape: shape.into(),
            length: data.len() as u64,
            data,
            block: "block".into(),
            file: "model.safetensors".into(),
            store: Store::Raw,
        }
    }

    /// Weights as those of trained models, named by their shape.
    pub(crate) fn normal(shape: &[u64], seed: u64) -> Self {
        let weights = normal_weights(shape.iter().product::<u64>() as usize, seed);
        Self::raw(&format!("{shape:?}"), Dtype::BF16, shape, weights)
    }

    /// Weights, coded with bytes per thread and threads per block.
    pub(crate) fn gap(name: &str, shape: &[u64], weights: Vec<u8>, geometry: (u32, u32)) -> Self {
        Self {
            store: Store::Gap(geometry.0, geometry.1),
            ..Self::raw(name, Dtype::BF16, shape, weights)
        }
    }

    /// Weights in tiles with these `tile_columns` and `columns`; pairs that occur at least `least`
    /// times have codes.
    pub(crate) fn in_tiles(
        name: &str,
        shape: &[u64],
        weights: Vec<u8>,
        parameters: (u64, u64),
        least: u64,
    ) -> Self {
        let arrays = Arrays::of(&weights, parameters.0 as usize, parameters.1 as usize, least);
        Self::encoded(name, shape, weights, arrays)
    }

    /// Floats in tiles, with these `tile_columns` and `columns`, and so many zero bits.
    pub(crate) fn floats(
        name: &str,
        dtype: Dtype,
        shape: &[u64],
        data: Vec<u8>,
        (parameters, zero_bits, least): ((u64, u64), u64, u64),
    ) -> Self {
        let columns = (parameters.0 as usize, parameters.1 as usize);
        let arrays = Arrays::of_floats(&data, Split::of(dtype.id(), zero_bits), columns, least);
        Self { store: Store::Encoded(arrays), ..Self::raw(name, dtype, shape, data) }
    }

    /// Weights in tiles, encoded.
    pub(crate) fn encoded(name: &str, shape: &[u64], weights: Vec<u8>, arrays: Arrays) -> Self {
        Self { store: Store::Encoded(arrays), ..Self::raw(name, Dtype::BF16, shape, weights) }
    }

    /// Weights in tiles, by the columns of a tile and of the matrix, as the crate encodes them.
    pub(crate) fn tile(name: &str, shape: &[u64], weights: Vec<u8>, columns: (u64, u64)) -> Self {
        let arrays = encode_tile(&weights, columns.0, columns.1);
        Self::encoded(name, shape, weights, arrays)
    }

    /// A matrix of weights in tiles.
    pub(crate) fn matrix(name: &str, shape: [u64; 2], seed: u64) -> Self {
        let weights = normal_weights((shape[0] * shape[1]) as usize, seed);
        Self::tile(name, &shape, weights, (256, shape[1]))
    }

    /// Floats in tiles, by the columns of a tile and of the matrix, as the crate encodes them.
    pub(crate) fn float(
        name: &str,
        (dtype, zero_bits): (Dtype, u64),
        shape: &[u64],
        data: Vec<u8>,
        columns: (u64, u64),
    ) -> Self {
        let split = tile::FloatSplit::of(dtype, zero_bits).expect("the dtype has such a split");
        let arrays = encode_floats(&data, split, columns);
        Self { store: Store::Encoded(arrays), ..Self::raw(name, dtype, shape, data) }
    }

    /// The same bytes again, under another name.
    pub(crate) fn alias(&self, name: &str) -> Self {
        Self { name: name.into(), store: Store::Alias(self.name.clone()), ..self.clone() }
    }

    /// This many aliases, whose names end in their numbers.
    pub(crate) fn aliases(&self, count: usize, prefix: &str) -> Vec<Self> {
        (0..count).map(|at| self.alias(&format!("{prefix}{at:02}"))).collect()
    }

    pub(crate) fn in_block(self, block: &str) -> Self {
        Self { block: block.into(), ..self }
    }

    pub(crate) fn in_file(self, file: &str) -> Self {
        Self { file: file.into(), ..self }
    }
}

/// An array, and the kind of section that holds it.
pub(crate) type Stored = (u32, Vec<u8>);

#[derive(Clone, Debug)]
pub(crate) struct File {
    pub(crate) kind: u32,
    pub(crate) path: Vec<u8>,
    /// The original file.
    pub(crate) content: Vec<u8>,
    pub(crate) length: u64,
    pub(crate) hash: [u8; 32],
    pub(crate) arrays: Vec<Stored>,
}

#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: Vec<u8>,
    pub(crate) dtype: u32,
    pub(crate) encoding: u32,
    pub(crate) block: u64,
    pub(crate) file: u64,
    pub(crate) file_offset: u64,
    pub(crate) shape: Vec<u64>,
    pub(crate) parameters: [u64; 4],
    /// The decoded bytes.
    pub(crate) data: Vec<u8>,
    pub(crate) hash: [u8; 32],
    pub(crate) arrays: Vec<Stored>,
}

impl Tensor {
    pub(crate) fn array(&mut self, at: usize) -> &mut Vec<u8> {
        &mut self.arrays[at].1
    }
}

/// Everything in a container, by meaning.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) shard: (u64, u64),
    pub(crate) identity: [u8; 32],
    pub(crate) files: Vec<File>,
    pub(crate) blocks: Vec<Vec<u8>>,
    pub(crate) tensors: Vec<Tensor>,
    /// Sections without arrays: block, kind, bytes.
    pub(crate) extra_sections: Vec<(u64, u32, Vec<u8>)>,
    /// Keys and values.
    pub(crate) metadata: Vec<(Vec<u8>, Vec<u8>)>,
}

pub(crate) fn hash(bytes: &[u8]) -> [u8; 32] {
    *blake3::hash(bytes).as_bytes()
}

/// The prefix of a safetensors file with these tensors, in this order.
pub(crate) fn prefix<'a>(items: impl Iterator<Item = &'a Item>) -> Vec<u8> {
    let mut end = 0;
    let entries: Vec<String> = items
        .map(|item| {
            let start = end;
            end += item.length;
            let name = serde_json::to_string(&item.name).unwrap();
            let shape: Vec<String> = item.shape.iter().map(u64::to_string).collect();
            let (dtype, shape) = (&item.dtype.1, shape.join(","));
            format!(
                r#"{name}:{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}"#
            )
        })
        .collect();
    with_length(&format!("{{{}}}", entries.join(",")))
}

/// A safetensors file with these tensors, in this order.
pub(crate) fn weights_file(items: &[Item]) -> Vec<u8> {
    let mut bytes = prefix(items.iter());
    bytes.extend(items.iter().flat_map(|item| &item.data));
    bytes
}

/// A safetensors header with its length before it, padded to a multiple of eight bytes.
pub(crate) fn with_length(json: &str) -> Vec<u8> {
    let width = json.len().next_multiple_of(8);
    let mut prefix = (width as u64).to_le_bytes().to_vec();
    prefix.extend(json.bytes());
    prefix.resize(8 + width, b' ');
    prefix
}

/// The five arrays of `gap`, and its parameters.
pub(crate) fn encode(
    weights: &[u8],
    bytes_per_thread: u32,
    threads_per_block: u32,
) -> (Vec<Stored>, [u64; 4]) {
    let geometry = GapGeometry::new(bytes_per_thread, threads_per_block).unwrap();
    let encoded = encode_tensor(weights, geometry, usize::MAX).unwrap();
    let kinds = [SECTION_CODEBOOK, SECTION_INDEX, SECTION_INDEX, SECTION_BITSTREAM, SECTION_PLANE];
    let arrays = kinds.into_iter().zip(encoded.arrays).collect();
    let bit_count = encoded.sizes.bit_count();
    (arrays, [bytes_per_thread.into(), threads_per_block.into(), bit_count, 0])
}

/// The four arrays of `tile`, and its parameters.
fn in_sections(arrays: Arrays) -> (Vec<Stored>, [u64; 4]) {
    let Arrays { codebook, records, bitstream, plane, parameters, zero_bits } = arrays;
    let [tile_columns, columns, bits] = parameters;
    let arrays = vec![
        (SECTION_CODEBOOK, codebook),
        (SECTION_INDEX, records),
        (SECTION_BITSTREAM, bitstream),
        (SECTION_PLANE, plane),
    ];
    (arrays, [tile_columns, columns, bits, zero_bits])
}

/// The arrays of `tile` by the encoder of the crate.
pub(crate) fn encode_tile(weights: &[u8], tile_columns: u64, columns: u64) -> Arrays {
    encode_floats(weights, tile::FloatSplit::BF16, (tile_columns, columns))
}

/// The arrays of `float`, or of `tile`, by the encoder of the crate.
pub(crate) fn encode_floats(
    weights: &[u8],
    split: tile::FloatSplit,
    (tile_columns, columns): (u64, u64),
) -> Arrays {
    let elements = (weights.len() / split.bytes()) as u64;
    let geometry = tile::TileGeometry::new(tile_columns, columns, elements).unwrap();
    let encoded = tile::encode_floats(weights, split, geometry).unwrap();
    let tile::EncodedTensor { sizes, arrays } = encoded;
    let [codebook, records, bitstream, plane] = arrays;
    let parameters = [tile_columns, columns, sizes.bit_count()];
    let zero_bits = split.zero_bits().into();
    Arrays { codebook, records, bitstream, plane, parameters, zero_bits }
}

impl Model {
    /// A whole model in one container: files by path, blocks as they come, tensors by name.
    pub(crate) fn new(items: &[Item], side: &[(&str, &[u8])]) -> Self {
        let mut paths: Vec<&str> = items.iter().map(|item| &*item.file).collect();
        paths.sort_unstable();
        paths.dedup();
        let mut blocks: Vec<&str> = Vec::new();
        for item in items {
            if !blocks.contains(&&*item.block) {
                blocks.push(&item.block);
            }
        }
        let mut files = Vec::new();
        let mut offsets = BTreeMap::new();
        for path in &paths {
            let members = || items.iter().filter(|item| item.file == *path);
            let prefix = prefix(members());
            let mut content = prefix.clone();
            for item in members() {
                offsets.insert(&*item.name, content.len() as u64);
                content.extend(&item.data);
            }
            files.push(File::new(FILE_WEIGHTS, path, content, vec![(SECTION_PREFIX, prefix)]));
        }
        let mut side = side.to_vec();
        side.sort_unstable();
        files.extend(side.iter().map(|(path, content)| File::side(path, content)));
        let mut sorted: Vec<&Item> = items.iter().collect();
        sorted.sort_by_key(|item| &item.name);
        let index = |name: &str| sorted.iter().position(|item| item.name == name).unwrap() as u64;
        let tensors = sorted.iter().map(|item| {
            let (encoding, (arrays, parameters)) = match &item.store {
                Store::Alias(target) => (ENCODING_ALIAS, (vec![], [index(target), 0, 0, 0])),
                Store::Raw => (ENCODING_RAW, (vec![(SECTION_RAW, item.data.clone())], [0; 4])),
                &Store::Gap(bytes, threads) => (ENCODING_GAP, encode(&item.data, bytes, threads)),
                Store::Encoded(arrays) => {
                    let is_tile = item.dtype.0 == Dtype::BF16.id() && arrays.zero_bits == 0;
                    let encoding = if is_tile { ENCODING_TILE } else { ENCODING_FLOAT };
                    (encoding, in_sections(arrays.clone()))
                }
                Store::Delta(DeltaArrays { base, arrays }) => {
                    let kinds = [SECTION_CODEBOOK, SECTION_INDEX, SECTION_BITSTREAM];
                    let parts = base.as_chunks::<8>().0;
                    let base = std::array::from_fn(|at| u64::from_le_bytes(parts[at]));
                    (ENCODING_DELTA, (kinds.into_iter().zip(arrays.clone()).collect(), base))
                }
            };
            Tensor {
                name: item.name.clone().into_bytes(),
                dtype: item.dtype.0,
                encoding,
                block: blocks.iter().position(|block| *block == item.block).unwrap() as u64,
                file: paths.iter().position(|path| *path == item.file).unwrap() as u64,
                file_offset: offsets[&*item.name],
                shape: item.shape.clone(),
                parameters,
                data: item.data.clone(),
                hash: hash(&item.data),
                arrays: arrays
                    .into_iter()
                    .filter(|(_, bytes): &Stored| !bytes.is_empty())
                    .collect(),
            }
        });
        let mut model = Self {
            shard: (0, 1),
            identity: [0; 32],
            tensors: tensors.collect(),
            blocks: blocks.iter().map(|block| block.as_bytes().to_vec()).collect(),
            files,
            extra_sections: Vec::new(),
            metadata: Vec::new(),
        };
        model.identity = model.identity_of_files();
        model
    }

    pub(crate) fn identity_of_files(&self) -> [u8; 32] {
        identity(self.files.iter().map(|file| IdentifiedFile {
            path: std::str::from_utf8(&file.path).unwrap(),
            is_weights: file.kind == FILE_WEIGHTS,
            length: file.length,
            hash: file.hash,
        }))
    }

    /// Makes hash and length of a weights file those of its prefix and tensors, and the identity
    /// that of the files.
    pub(crate) fn refresh(&mut self) {
        for (index, file) in
            self.files.iter_mut().enumerate().filter(|(_, file)| file.kind == FILE_WEIGHTS)
        {
            let mut content = file.arrays[0].1.clone();
            let mut members: Vec<&Tensor> =
                self.tensors.iter().filter(|tensor| tensor.file == index as u64).collect();
            members.sort_by_key(|tensor| (tensor.file_offset, tensor.data.len()));
            content.extend(members.iter().flat_map(|tensor| &tensor.data));
            file.length = content.len() as u64;
            file.hash = hash(&content);
            file.content = content;
        }
        self.identity = self.identity_of_files();
    }

    /// Puts another prefix into the first file; its tensors move by what it is longer.
    pub(crate) fn set_prefix(&mut self, prefix: Vec<u8>) {
        let (before, after) = (self.files[0].arrays[0].1.len() as u64, prefix.len() as u64);
        for tensor in &mut self.tensors {
            tensor.file_offset = tensor.file_offset + after - before;
        }
        self.files[0].arrays[0].1 = prefix;
        self.refresh();
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name.as_bytes()).unwrap()
    }

    /// Lays out sections, arrays and text.
    pub(crate) fn draft(&self) -> Draft {
        let arrays = |block: u64, arrays: &[Stored]| {
            let array = |(kind, bytes): &Stored| Array { block, kind: *kind, bytes: bytes.clone() };
            arrays.iter().map(array).collect()
        };
        let files = self.files.iter().map(|file| Owner {
            record: FileRecord {
                kind: file.kind.into(),
                length: file.length.into(),
                hash: file.hash,
                ..FileRecord::new_zeroed()
            },
            name: file.path.clone(),
            arrays: arrays(NONE, &file.arrays),
        });
        let tensors = self.tensors.iter().map(|tensor| Owner {
            record: TensorRecord {
                dtype: tensor.dtype.into(),
                encoding: tensor.encoding.into(),
                block: tensor.block.into(),
                file: tensor.file.into(),
                file_offset: tensor.file_offset.into(),
                dimension_count: (tensor.shape.len() as u64).into(),
                shape: std::array::from_fn(|at| tensor.shape.get(at).copied().unwrap_or(0).into()),
                parameters: tensor.parameters.map(Into::into),
                hash: tensor.hash,
                ..TensorRecord::new_zeroed()
            },
            name: tensor.name.clone(),
            arrays: arrays(tensor.block, &tensor.arrays),
        });
        let tree = Tree {
            shard: ShardRecord {
                shard_index: self.shard.0.into(),
                shard_count: self.shard.1.into(),
                identity: self.identity,
            },
            files: files.collect(),
            blocks: self.blocks.clone(),
            tensors: tensors.collect(),
            metadata: self.metadata.clone(),
            extra_sections: self.extra_sections.clone(),
        };
        let (directory, contents) = tree.lay_out(|_, _| ());
        let mut draft = Draft { directory, contents };
        draft.repair_checksums();
        draft
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        self.draft().pack()
    }

    pub(crate) fn open(&self) -> df11::Model {
        open(self.build()).unwrap()
    }
}

impl File {
    pub(crate) fn new(kind: u32, path: &str, content: Vec<u8>, arrays: Vec<Stored>) -> Self {
        let (length, hash) = (content.len() as u64, hash(&content));
        Self { kind, path: path.as_bytes().into(), content, length, hash, arrays }
    }

    pub(crate) fn side(path: &str, content: &[u8]) -> Self {
        let arrays =
            if content.is_empty() { vec![] } else { vec![(SECTION_SIDE, content.to_vec())] };
        Self::new(FILE_SIDE, path, content.to_vec(), arrays)
    }

    /// A side file that lies beside the container.
    pub(crate) fn beside(path: &str, content: &[u8]) -> Self {
        Self::new(FILE_BESIDE, path, content.to_vec(), vec![])
    }

    /// One of a hash that is nobody's, so that many stay small when compressed.
    pub(crate) fn unread(path: &str) -> Self {
        Self { hash: [0; 32], ..Self::beside(path, b"") }
    }
}

/// Everything in a container, by record. Records may lie about the contents, which stand in the
/// file one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    pub(crate) directory: Directory,
    pub(crate) contents: Vec<Vec<u8>>,
}

impl Draft {
    pub(crate) fn repair_checksums(&mut self) {
        let chunks =
            self.contents.iter().flat_map(|content| content.chunks(CHECKSUM_CHUNK_BYTES as usize));
        self.directory.checksums = chunks.map(|chunk| crc32fast::hash(chunk).into()).collect();
    }

    /// The bytes of an array, for editing; repair the checksums after it.
    pub(crate) fn array(&mut self, array: usize) -> &mut [u8] {
        let record = self.directory.arrays[array];
        let (start, length) = (record.offset.get() as usize, record.length.get() as usize);
        &mut self.contents[record.section.get() as usize][start..start + length]
    }

    /// The first array of a tensor.
    pub(crate) fn first_array(&self, name: &str) -> usize {
        self.directory.tensors[self.tensor_index(name)].first_array.get() as usize
    }

    pub(crate) fn tensor_index(&self, name: &str) -> usize {
        self.directory
            .tensors
            .iter()
            .position(|tensor| self.directory.tensor_name(tensor) == name)
            .unwrap()
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut TensorRecord {
        let index = self.tensor_index(name);
        &mut self.directory.tensors[index]
    }

    /// Puts these bytes into a section.
    pub(crate) fn put(&mut self, section: usize, content: Vec<u8>) {
        self.directory.sections[section].length = (content.len() as u64).into();
        self.contents[section] = content;
    }

    pub(crate) fn pack(&self) -> Vec<u8> {
        self.pack_with(|_| {})
    }

    /// The container with the directory's bytes edited.
    pub(crate) fn pack_with(&self, edit: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut directory = self.directory.to_bytes();
        edit(&mut directory);
        let bytes = seal(&self.contents, &directory);
        match self.directory.version_minor() {
            0 => bytes,
            minor => with_header(&bytes, |header| header.version_minor = minor.into()),
        }
    }
}

/// Head, sections, directory and footer around these bytes.
pub(crate) fn seal(contents: &[Vec<u8>], directory: &[u8]) -> Vec<u8> {
    let mut bytes = tree::join(contents);
    let header = Header::complete(bytes.len() as u64, directory).unwrap();
    bytes.extend(directory);
    tree::pad(&mut bytes, ARRAY_ALIGNMENT);
    bytes.extend(header.as_bytes());
    bytes[..HEADER_BYTES as usize].copy_from_slice(header.as_bytes());
    bytes
}

/// Opens a container in memory.
pub(crate) fn open(bytes: impl ReadAt + 'static) -> df11::Result<df11::Model> {
    OpenOptions::new().open_readers(vec![("sample".into(), Box::new(bytes))])
}

/// The header of a container.
pub(crate) fn header(bytes: &[u8]) -> Header {
    Header::read_from_prefix(bytes).unwrap().0
}

/// The container with another header and footer, whose checksum is right.
pub(crate) fn with_header(bytes: &[u8], edit: impl FnOnce(&mut Header)) -> Vec<u8> {
    let mut header = header(bytes);
    edit(&mut header);
    put_header(bytes, &header.sealed())
}

/// The container with this header and footer.
pub(crate) fn put_header(bytes: &[u8], header: &Header) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let footer = bytes.len() - HEADER_BYTES as usize;
    bytes[..HEADER_BYTES as usize].copy_from_slice(header.as_bytes());
    bytes[footer..].copy_from_slice(header.as_bytes());
    bytes
}

/// Sections and directory of a container that this crate accepts.
pub(crate) fn parse(bytes: &[u8]) -> Draft {
    let header = header(bytes);
    let offset = header.directory_offset.get();
    let end = offset + header.directory_length.get();
    let directory = Directory::parse(&bytes[offset as usize..end as usize], offset).unwrap();
    let content = |section: &SectionRecord| {
        bytes[section.offset.get() as usize..section.end() as usize].to_vec()
    };
    let contents = directory.sections.iter().map(content).collect();
    Draft { directory, contents }
}

/// Weights with these exponents, and signs and mantissas without a pattern.
pub(crate) fn weights(exponents: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let mut state = 0x9E37_79B9u32;
    exponents
        .into_iter()
        .flat_map(|exponent| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            df11::hazmat::bf16::weight(exponent, (state >> 24) as u8).to_le_bytes()
        })
        .collect()
}

/// This many weights, with exponents distributed like those of trained weights.
pub(crate) fn normal_weights(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    weights((0..count).map(|_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        124 - (state >> 32 | 1 << 31).trailing_zeros().min(20) as u8
    }))
}
