//! A model: the shards that belong together, with their blocks joined.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    path::{Path, PathBuf},
};

use rayon::prelude::*;

#[cfg(feature = "remote")]
use super::far_folder::FarFolder;
use super::{
    ahead::ReadAhead,
    beside::is_card,
    decoder::{Cpu, Decoder, PreparedTensor, ranges},
    original::OriginalFile,
    shard::Shard,
    tensor::Tensor,
};
use crate::{
    Error, Result,
    constants::{ARRAY_ALIGNMENT, align},
    parallel,
    paths::{PathTree, is_container},
    source::{Found, LeftOut},
};

/// An open model: one container, or all shards of a folder.
///
/// A model holds only directories; tensors are read and decoded on request. It is `Send` and
/// `Sync`: any number of threads may decode from it at once.
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
/// let model = df11::open(&path)?;
/// for block in model.blocks() {
///     for tensor in block.tensors() {
///         let (name, shape) = (tensor.name(), tensor.shape());
///         println!("{name} {shape:?} {:.2} bits per element", tensor.bits_per_element());
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Model {
    shards: Vec<Shard>,
    folder: Option<PathBuf>,
    #[cfg(feature = "remote")]
    far_folder: Option<FarFolder>,
    /// Folders in it, each with a `/` at its end, that hold other models.
    others: Vec<String>,
    blocks: Vec<JoinedBlock>,
    block_names: HashMap<String, usize>,
}

#[derive(Debug)]
struct JoinedBlock {
    name: String,
    /// Shard and tensor index, in the order of shards and names.
    tensors: Vec<(usize, usize)>,
}

impl Model {
    /// Joins shards, which may be in any order.
    pub(super) fn new(mut shards: Vec<Shard>, folder: Option<PathBuf>) -> Result<Self> {
        shards.sort_by_key(|shard| shard.directory().shard.shard_index.get());
        check_shards(&shards)?;
        check_names(&shards)?;
        let (blocks, block_names) = join_blocks(&shards);
        Ok(Self {
            shards,
            folder,
            #[cfg(feature = "remote")]
            far_folder: None,
            others: Vec::new(),
            blocks,
            block_names,
        })
    }

    /// Sets the name of its remote folder.
    #[cfg(feature = "remote")]
    pub(super) fn in_far_folder(self, folder: FarFolder) -> Self {
        Self { far_folder: Some(folder), ..self }
    }

    /// Its remote folder.
    #[cfg(feature = "remote")]
    pub(super) fn far_folder(&self) -> Option<&FarFolder> {
        self.far_folder.as_ref()
    }

    /// The folder with the side files beside its containers, if it has one. Remote side files are
    /// fetched to a temporary folder at the first call.
    #[cfg_attr(
        not(feature = "remote"),
        expect(clippy::unnecessary_wraps, reason = "side files may have to be fetched")
    )]
    pub(crate) fn side_folder(&self) -> Result<Option<&Path>> {
        #[cfg(feature = "remote")]
        if let Some(folder) = &self.far_folder {
            return folder.fetch(self.files_beside()).map(Some);
        }
        Ok(self.folder())
    }

    /// The path or the name of its folder, which begins those of its containers.
    pub(crate) fn root(&self) -> Option<PathBuf> {
        #[cfg(feature = "remote")]
        if let Some(folder) = &self.far_folder {
            return Some(folder.name());
        }
        self.folder.clone()
    }

    /// Names the subfolders of its folder that hold other models.
    pub(super) fn beside(self, others: impl IntoIterator<Item = String>) -> Self {
        Self { others: others.into_iter().map(|folder| folder + "/").collect(), ..self }
    }

    /// The original files, shard by shard.
    pub(crate) fn files(&self) -> impl Iterator<Item = OriginalFile<'_>> {
        self.shards.iter().flat_map(Shard::files)
    }

    /// The original files beside the containers.
    pub(crate) fn files_beside(&self) -> impl Iterator<Item = OriginalFile<'_>> {
        self.files().filter(OriginalFile::is_beside)
    }

    /// Files in its folder that no container records, and files that were skipped.
    pub(crate) fn bystanders(&self) -> Result<(Vec<Found>, Vec<LeftOut>)> {
        let (mut found, mut left_out) = self.walk()?;
        let beside: HashSet<&str> = self.files_beside().map(|file| file.path()).collect();
        let own: HashSet<&Path> = self.shards.iter().map(Shard::path).collect();
        let others = found.iter().filter(|file| is_container(&file.path));
        left_out.extend(others.filter(|file| !own.contains(&*file.file)).map(|file| LeftOut {
            path: file.path.clone(),
            reason: "a container of another model".to_owned(),
        }));
        found.retain(|file| !is_container(&file.path) && !beside.contains(&*file.path));
        Ok((found, left_out))
    }

    /// Refuses a model of which some shards are not open, and names them.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn check_complete(&self) -> Result<()> {
        Error::unless(self.is_complete(), || {
            let missing = self.missing_shards();
            let numbers = some(missing.iter().map(|index| index + 1));
            let (noun, verb) = if missing.len() == 1 { ("shard", "is") } else { ("shards", "are") };
            let mut problem = format!("{noun} {numbers} of {} {verb} missing", self.shard_count());
            if let Ok(files @ [_, ..]) = self.missing_files().as_deref() {
                problem = format!("{problem} (with {})", some(files));
            }
            Error::parameter(
                problem,
                "fetch what is missing, and name the folder that holds all shards",
            )
        })
    }

    /// The files in its folder, as by [`walk`](crate::source::walk), without those of other models
    /// and the card that compression wrote; none of a single container.
    fn walk(&self) -> Result<(Vec<Found>, Vec<LeftOut>)> {
        let Some(root) = self.folder() else { return Ok(Default::default()) };
        let (mut found, mut left_out) = crate::source::walk(root)?;
        let is_own = |path: &str| !self.others.iter().any(|folder| path.starts_with(folder));
        found.retain(|file| is_own(&file.path) && !is_card(root, &file.path));
        left_out.retain(|file| is_own(&file.path));
        Ok((found, left_out))
    }

    /// The open shards, ascending by their index.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The same, to be completed.
    pub(super) fn shards_mut(&mut self) -> &mut [Shard] {
        &mut self.shards
    }

    /// The folder that was opened, with side files beside the shards; `None` for a single
    /// container.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Whether all shards of the model are open; one shard of several can be opened alone.
    pub fn is_complete(&self) -> bool {
        self.shards.len() as u64 == self.shard_count()
    }

    /// Keys and values that the writer kept for runtimes, ascending by key. They are in shard 0;
    /// without it there are none.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.shards[0].directory().metadata()
    }

    /// The value of a key of the metadata. The cost grows with the number of keys.
    pub fn metadata_value(&self, key: &str) -> Option<&str> {
        self.metadata().find_map(|(found, value)| (found == key).then_some(value))
    }

    /// Indices of the model's shards that are not open, ascending. The cost grows with their
    /// number.
    pub fn missing_shards(&self) -> Vec<u64> {
        let mut open =
            self.shards.iter().map(|shard| shard.directory().shard.shard_index.get()).peekable();
        (0..self.shard_count()).filter(|&index| open.next_if_eq(&index).is_none()).collect()
    }

    /// Paths of weights files that are in no open shard, ascending, as far as an index
    /// (`*.safetensors.index.json`) beside the shards lists them.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder cannot be read.
    pub fn missing_files(&self) -> Result<Vec<String>> {
        let (found, _) = self.walk()?;
        let mut named = crate::source::named_files(&found);
        for file in self.files() {
            named.remove(file.path());
        }
        Ok(named.into_iter().collect())
    }

    /// The number of shards that the model has.
    pub fn shard_count(&self) -> u64 {
        self.shards[0].directory().shard.shard_count.get()
    }

    /// The hash that all shards of the model share.
    pub fn identity(&self) -> blake3::Hash {
        blake3::Hash::from_bytes(self.shards[0].directory().shard.identity)
    }

    /// The header of an original weights file, as JSON: its tensors with their offsets, and its
    /// metadata. The cost grows with its length.
    ///
    /// # Errors
    /// [`Error::Parameter`] if no open shard has a weights file of this path; [`Error::Corrupt`] if
    /// the header is damaged; [`Error::Io`].
    pub fn weights_header(&self, path: &str) -> Result<Vec<u8>> {
        let file = self.files().find(|file| file.is_weights() && file.path() == path);
        let file = file.ok_or_else(|| {
            let problem = format!("the model has no weights file {path:?}");
            Error::parameter(problem, "name one that it was compressed from")
        })?;
        // Its length comes first.
        Ok(file.check_header()?.0.split_off(size_of::<u64>()))
    }

    /// All blocks, in the order in which the model runs them.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = Block<'_>> {
        self.blocks.iter().map(|entry| Block { model: self, entry })
    }

    /// The block with this name. Constant time.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the model has no such block.
    pub fn block(&self, name: &str) -> Result<Block<'_>> {
        let index = self.block_names.get(name).ok_or_else(|| none_such("block", name))?;
        Ok(Block { model: self, entry: &self.blocks[*index] })
    }

    /// All tensors, shard by shard, ascending by name in each.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.shards.iter().flat_map(Shard::tensors)
    }

    /// A tensor by shard and index.
    #[cfg(feature = "cudarc")]
    pub(crate) fn tensor_at(&self, (shard, index): (usize, usize)) -> Tensor<'_> {
        Tensor::new(&self.shards[shard], index)
    }

    /// The tensor with this name. The cost grows with the logarithm of the number of tensors.
    ///
    /// # Errors
    /// [`Error::Parameter`] if the model has no such tensor.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        let found = self.shards.iter().find_map(|shard| shard.tensor(name));
        found.ok_or_else(|| none_such("tensor", name))
    }
}

/// The first few, separated by commas.
fn some(all: impl IntoIterator<Item = impl ToString, IntoIter: ExactSizeIterator>) -> String {
    const MAX: usize = 4;
    let all = all.into_iter();
    let more = all.len().saturating_sub(MAX);
    let mut text = all.take(MAX).map(|one| one.to_string()).collect::<Vec<_>>().join(", ");
    if more > 0 {
        text = format!("{text} and {more} more");
    }
    text
}

/// The error for a name that a model lacks, here and on GPUs.
pub(crate) fn none_such(what: &str, name: &str) -> Error {
    Error::parameter(format!("there is no {what} {name:?}"), "name one that the model has")
}

fn check_shards(shards: &[Shard]) -> Result<()> {
    for pair in shards.windows(2) {
        let (first, second) = (&pair[0].directory().shard, &pair[1].directory().shard);
        let paths = format!("{} and {}", pair[0].path().display(), pair[1].path().display());
        let remedy = "keep the shards of each model in a folder of their own";
        if first.identity != second.identity || first.shard_count != second.shard_count {
            return Err(Error::parameter(format!("{paths} belong to different models"), remedy));
        }
        if first.shard_index == second.shard_index {
            return Err(Error::parameter(format!("{paths} are the same shard"), remedy));
        }
    }
    Ok(())
}

/// Names of tensors are unique in a model, and one folder can hold all its files (section 8).
fn check_names(shards: &[Shard]) -> Result<()> {
    let mut owners = HashMap::new();
    // In one shard they are unique already.
    for shard in shards.iter().filter(|_| shards.len() > 1) {
        for tensor in shard.tensors() {
            let name = tensor.name();
            if let Some(other) = owners.insert(name, shard) {
                let problem = format!("tensor {name:?} is in {} too", other.path().display());
                return Err(Error::corrupt("directory", 0, problem).in_file(shard.path()));
            }
        }
    }
    let files = shards.iter().flat_map(Shard::files);
    let tree = PathTree::new(files.map(|file| file.path()));
    let Some((first, second)) = tree.clash() else { return Ok(()) };
    let problem =
        format!("the shards hold files {first:?} and {second:?}, which exclude each other");
    Err(Error::corrupt("directory", 0, problem).in_file(shards[0].path()))
}

fn join_blocks(shards: &[Shard]) -> (Vec<JoinedBlock>, HashMap<String, usize>) {
    let mut blocks: Vec<JoinedBlock> = Vec::new();
    let mut names = HashMap::new();
    for (shard_index, shard) in shards.iter().enumerate() {
        let directory = shard.directory();
        let joined: Vec<usize> = directory
            .blocks
            .iter()
            .map(|block| {
                let name = directory.block_name(block).to_owned();
                *names.entry(name.clone()).or_insert_with(|| {
                    blocks.push(JoinedBlock { name, tensors: Vec::new() });
                    blocks.len() - 1
                })
            })
            .collect();
        for (index, tensor) in directory.tensors.iter().enumerate() {
            blocks[joined[tensor.block.get() as usize]].tensors.push((shard_index, index));
        }
    }
    (blocks, names)
}

/// The tensors that a model uses together, usually one transformer layer. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Block<'m> {
    model: &'m Model,
    entry: &'m JoinedBlock,
}

/// Where each tensor of a block goes in one buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// Size of the buffer, in bytes.
    pub bytes: u64,
    /// The bytes of each tensor, in the order of [`Block::tensors`]. Each starts on a multiple of
    /// 256: libraries choose kernels by alignment, so the bits of a result may depend on it.
    pub tensors: Vec<Range<u64>>,
}

impl<'m> Block<'m> {
    /// Its name.
    pub fn name(&self) -> &'m str {
        &self.entry.name
    }

    /// Its tensors, shard by shard, ascending by name in each.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'m>> + use<'m> {
        let model = self.model;
        self.entry
            .tensors
            .iter()
            .map(move |&(shard, index)| Tensor::new(&model.shards()[shard], index))
    }

    /// Shard and index of each of its tensors, in the order of [`Block::tensors`].
    #[cfg(feature = "cudarc")]
    pub(crate) fn tensor_ids(&self) -> &'m [(usize, usize)] {
        &self.entry.tensors
    }

    /// Bytes of all its arrays.
    pub fn stored_bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.stored_bytes()).sum()
    }

    /// Where each tensor goes in a buffer for [`Block::decode_into`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a tensor has a dtype of a newer version; [`Error::Limit`] if the
    /// size exceeds 2^64 − 1.
    pub fn layout(&self) -> Result<BlockLayout> {
        let mut bytes = 0u64;
        let mut tensors = Vec::with_capacity(self.entry.tensors.len());
        for tensor in self.tensors() {
            // Tensors that cannot be decoded, and aliases, may be of any size.
            let length = tensor.byte_length()?;
            let range =
                align(bytes, ARRAY_ALIGNMENT).and_then(|at| Some(at..at.checked_add(length)?));
            let range = range.ok_or_else(|| Error::overflow("the size of a block in bytes"))?;
            bytes = range.end;
            tensors.push(range);
        }
        Ok(BlockLayout { bytes, tensors })
    }

    /// Decodes all tensors into one buffer of [`BlockLayout::bytes`], on all threads. Bytes between
    /// tensors become zero.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a buffer of another length; otherwise as
    /// [`Tensor::decode_into`].
    pub fn decode_into(&self, buffer: &mut [u8]) -> Result<()> {
        self.decode_with(&Cpu, buffer)
    }

    /// Like [`Block::decode_into`], with a decoder other than the CPU.
    ///
    /// # Errors
    /// Like [`Block::decode_into`], and the decoder's errors.
    pub fn decode_with(&self, decoder: &dyn Decoder, buffer: &mut [u8]) -> Result<()> {
        let layout = self.layout()?;
        if buffer.len() as u64 != layout.bytes {
            let (name, needed, given) = (self.name(), layout.bytes, buffer.len());
            let problem = format!("block {name:?} needs a buffer of {needed} bytes, not {given}");
            return Err(Error::parameter(problem, "ask Block::layout for the size"));
        }
        let _ahead = ReadAhead::after_codebooks(|| self.tensors());
        let tensors: Vec<Box<dyn PreparedTensor + '_>> =
            self.tensors().map(|tensor| decoder.prepare(tensor)).collect::<Result<_>>()?;
        let (mut parts, mut end) = (Vec::new(), 0);
        for (tensor, place) in tensors.iter().zip(&layout.tensors) {
            parts.push((None, end..place.start));
            let pieces = ranges(0..place.end - place.start, tensor.grain());
            parts.extend(pieces.map(|range| (Some(tensor), range)));
            end = place.end;
        }
        let lengths = parts.iter().map(|(_, range)| range.end - range.start);
        let outs: Vec<_> = parallel::split(buffer, lengths).collect();
        let parts = parts.into_iter().zip(outs).par_bridge();
        parts.try_for_each(|((tensor, range), out)| {
            let Some(tensor) = tensor else {
                out.fill(0);
                return Ok(());
            };
            tensor.read(range, out)
        })
    }
}
