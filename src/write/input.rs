//! The input of compression: the files of a checkpoint, or an open model whose tensors are decoded
//! on reading. Passes and plan treat both alike.

use std::{
    borrow::Cow,
    collections::{BTreeMap, VecDeque},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
};

use blake3::Hasher;

use crate::{
    Error, Model, Result, Tensor,
    constants::CHECKSUM_CHUNK_BYTES,
    io::{FileReader, ReadAt},
    open::{
        BASE, Cpu, Decoder, OriginalFile, PreparedTensor,
        beside::{self, Beside},
        hash,
    },
    parallel,
    paths::{is_container, is_safetensors},
    source::{
        LeftOut, Source, SourceTensor, WeightsFile,
        group::{self, GroupedBlock},
        others,
    },
};

/// Decoded bytes from which on a block stands for itself; no layer of a model that is worth
/// compressing is smaller.
const MIN_BLOCK_BYTES: u64 = 64 << 10;

/// Everything that goes into a container.
#[derive(Default)]
pub(super) struct Input<'a> {
    /// Ascending by path.
    pub(super) weights: Vec<Weights<'a>>,
    /// Ascending by path.
    pub(super) side: Vec<Side<'a>>,
    pub(super) left_out: Vec<LeftOut>,
    /// Keys and values for runtimes.
    pub(super) metadata: BTreeMap<String, String>,
    /// Notes that the source made while it was read.
    pub(super) notes: Vec<String>,
    /// Names of all blocks, in order.
    pub(super) block_names: Vec<String>,
}

impl<'a> Input<'a> {
    /// The files of a checkpoint, for this output.
    pub(super) fn of_source(source: &'a Source, out: &Path) -> Result<Self> {
        let weights = source.weights.iter().map(|file| Weights::new(Cow::Borrowed(file), None));
        let side = source
            .side
            .iter()
            .map(|side| Side::on_disk(side.path.clone(), side.length, side.file.clone()));
        let mut input = Self {
            weights: weights.collect(),
            side: side.collect(),
            left_out: source.left_out.clone(),
            notes: source.notes.clone(),
            ..Self::default()
        };
        input.find_others(out)?;
        Ok(input)
    }

    /// The original files of a model, all of whose shards are open, for this output.
    pub(super) fn of_model(model: &'a Model, out: &Path) -> Result<Self> {
        model.check_complete()?;
        let (mut weights, mut side) = (Vec::new(), Vec::new());
        for file in model.files() {
            if file.is_weights() {
                let decoded = Weights::decoded(file);
                weights.push(decoded.map_err(|error| error.in_file(file.shard().path()))?);
            } else {
                side.push(Side::original(model, file)?);
            }
        }
        weights.sort_by(|a, b| a.file.path.cmp(&b.file.path));
        side.sort_by(|a, b| a.path.cmp(&b.path));
        // Its tensors are decoded, so the base is of no further use.
        let kept = model.metadata().filter(|(key, _)| *key != BASE);
        let metadata = kept.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let (bystanders, mut left_out) = model.bystanders()?;
        left_out.extend(bystanders.into_iter().map(|file| {
            let reason = "not recorded in the containers".to_owned();
            LeftOut { path: file.path, reason }
        }));
        left_out.sort_by(|a, b| a.path.cmp(&b.path));
        let mut input = Self { weights, side, left_out, metadata, ..Self::default() };
        input.find_others(out)?;
        Ok(input)
    }

    /// Finds the weights that loaders pass over, which a folder leaves out, and groups all tensors
    /// into blocks.
    fn find_others(&mut self, out: &Path) -> Result<()> {
        let weights: Vec<&str> = self.weights.iter().map(|file| &*file.file.path).collect();
        let side: Vec<&str> = self.side.iter().map(|side| &*side.path).collect();
        let found = others(&weights, &side, |at| self.side[at].bytes())?;
        self.weights.iter_mut().zip(found).for_each(|(file, other)| file.is_other = other);
        if !is_container(out) {
            self.leave_out_others();
        }
        self.block_names = group_blocks(&mut self.weights);
        Ok(())
    }

    /// A folder would offer them to loaders.
    fn leave_out_others(&mut self) {
        let weights = self.weights.extract_if(.., |file| file.is_other);
        let paths: Vec<String> = weights.map(|file| file.file.path.clone()).collect();
        let side = self.side.extract_if(.., |side| is_safetensors(&side.path));
        for path in paths.into_iter().chain(side.map(|side| side.path)) {
            let reason = "not named by the index; a single container keeps it".to_owned();
            self.left_out.push(LeftOut { path, reason });
        }
        self.left_out.sort_by(|a, b| a.path.cmp(&b.path));
    }
}

/// Groups the tensors of all weights files into blocks; returns their names.
fn group_blocks(weights: &mut [Weights<'_>]) -> Vec<String> {
    let tensors = weights.iter().flat_map(|weights| &weights.file.tensors);
    let items: Vec<_> = tensors.map(group::Item::from).collect();
    let (mut blocks, mut names) = (vec![0; items.len()], Vec::new());
    for (block, group) in join_small(group::group(&items), &items).into_iter().enumerate() {
        group.tensors.iter().for_each(|&index| blocks[index] = block);
        names.push(group.name);
    }
    let mut blocks = blocks.into_iter();
    for weights in weights {
        weights.blocks = blocks.by_ref().take(weights.file.tensors.len()).collect();
    }
    names
}

/// Joins blocks in a row that are all small, until they have [`MIN_BLOCK_BYTES`] together; the
/// first one gives the name. The sections of a block take up to five pages, which a model of many
/// tiny modules would otherwise mostly consist of.
fn join_small(groups: Vec<GroupedBlock>, items: &[group::Item<'_>]) -> Vec<GroupedBlock> {
    let mut joined: Vec<GroupedBlock> = Vec::with_capacity(groups.len());
    let mut before = MIN_BLOCK_BYTES;
    for group in groups {
        let bytes: u64 = group.tensors.iter().map(|&index| items[index].bytes).sum();
        match joined.last_mut() {
            Some(last) if before < MIN_BLOCK_BYTES && bytes < MIN_BLOCK_BYTES => {
                last.tensors.extend(group.tensors);
                before += bytes;
            }
            _ => {
                joined.push(group);
                before = bytes;
            }
        }
    }
    joined
}

pub(super) struct Weights<'a> {
    /// Its description; its reader is of use only where nothing is decoded.
    pub(super) file: Cow<'a, WeightsFile>,
    /// Index of each tensor's block in the input's block names.
    pub(super) blocks: Vec<usize>,
    /// Whether loaders pass it over, since an index does not name it.
    pub(super) is_other: bool,
    /// The origin of the bytes, if it is not the file.
    decoded: Option<Decoded<'a>>,
}

/// The tensors of a weights file that are stored in a container.
struct Decoded<'a> {
    file: OriginalFile<'a>,
    /// In the order of the file's description.
    tensors: Vec<Tensor<'a>>,
    read: Box<ReadTensor<'a>>,
}

/// Decodes a range of the bytes of the tensor with this index.
type ReadTensor<'a> = dyn Fn(usize, Range<u64>, &mut [u8]) -> Result<()> + Sync + 'a;

impl<'a> Weights<'a> {
    fn new(file: Cow<'a, WeightsFile>, decoded: Option<Decoded<'a>>) -> Self {
        Self { file, blocks: Vec::new(), is_other: false, decoded }
    }

    fn decoded(file: OriginalFile<'a>) -> Result<Self> {
        let (shard, description) = (file.shard(), file.description()?);
        let find = |tensor: &SourceTensor| {
            // The description was compared with the directory.
            shard.tensor(&tensor.name).expect("the directory has the tensors of its prefixes")
        };
        let tensors: Vec<Tensor<'a>> = description.tensors.iter().map(find).collect();
        tensors.iter().try_for_each(Tensor::check_known)?;
        // The tensors that were read last, by index.
        let last: Mutex<VecDeque<(usize, Arc<dyn PreparedTensor + 'a>)>> = Mutex::default();
        let of = tensors.clone();
        let prepare = move |index| {
            let mut last = parallel::lock(&last);
            if let Some((_, found)) = last.iter().find(|(of, _)| *of == index) {
                return Ok(Arc::clone(found));
            }
            // Threads work on tensors in a row, each on one.
            last.truncate(rayon::current_num_threads());
            let new: Arc<dyn PreparedTensor + 'a> = Cpu.prepare(of[index])?.into();
            last.push_front((index, Arc::clone(&new)));
            Ok::<_, Error>(new)
        };
        let read = move |index, range, out: &mut [u8]| prepare(index)?.read(range, out);
        let decoded = Decoded { file, tensors, read: Box::new(read) };
        Ok(Self::new(Cow::Owned(description), Some(decoded)))
    }

    /// Reads or decodes bytes of one tensor, `offset` counted from the start of the file.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let Some(decoded) = &self.decoded else { return self.file.read_exact_at(offset, out) };
        // Tensors without bytes come before the one that starts where they do.
        let index = self.file.tensors.partition_point(|tensor| tensor.offset <= offset) - 1;
        let start = offset - self.file.tensors[index].offset;
        (decoded.read)(index, start..start + out.len() as u64, out)
    }

    /// Bytes of a tensor that are best read together: a multiple of them costs nothing twice.
    pub(super) fn grain(&self, index: usize) -> u64 {
        self.decoded.as_ref().map_or(2, |decoded| decoded.tensors[index].grain())
    }

    /// Compares hashes that the first pass found with those that the container has, if it comes
    /// from one.
    pub(super) fn check_hashes(&self, file: &[u8; 32], tensors: &[&[u8; 32]]) -> Result<()> {
        let Some(decoded) = &self.decoded else { return Ok(()) };
        let mut pairs = decoded.tensors.iter().zip(tensors);
        pairs.try_for_each(|(tensor, &hash)| tensor.check_hash((*hash).into()))?;
        decoded.file.check_hash((*file).into())
    }
}

/// A file that travels with the weights.
pub(super) struct Side<'a> {
    pub(super) path: String,
    pub(super) length: u64,
    place: SideContent<'a>,
    /// The hash that its container has, or that was found when it was first read.
    hash: OnceLock<[u8; 32]>,
}

/// Where a side file is.
enum SideContent<'a> {
    Disk(PathBuf),
    Memory(Vec<u8>),
    /// In a container.
    Stored(OriginalFile<'a>),
}

impl<'a> Side<'a> {
    pub(super) fn on_disk(path: String, length: u64, file: PathBuf) -> Self {
        Self { path, length, place: SideContent::Disk(file), hash: OnceLock::new() }
    }

    /// A file that a model records, found at this place.
    fn recorded(file: OriginalFile<'a>, place: SideContent<'a>) -> Self {
        let (path, hash) = (file.path().to_owned(), file.record().hash.into());
        Self { path, length: file.length(), place, hash }
    }

    /// The original of a side file of a model.
    pub(super) fn original(model: &Model, file: OriginalFile<'a>) -> Result<Self> {
        if !file.is_beside() {
            return Ok(Self::recorded(file, SideContent::Stored(file)));
        }
        let Some(root) = model.side_folder()? else {
            let path = file.path();
            let problem = format!("{path:?} lies beside the container, in the folder of the model");
            return Err(Error::parameter(problem, "name the folder instead of the container"));
        };
        Self::found(file, beside::find(root, file)?)
    }

    /// Takes a file found beside the containers, if it is the original.
    pub(super) fn found(file: OriginalFile<'a>, found: Beside) -> Result<Self> {
        match found {
            Beside::Original(path) => Ok(Self::recorded(file, SideContent::Disk(path))),
            Beside::Marked(bytes) => Ok(Self::recorded(file, SideContent::Memory(bytes))),
            other => Err(other.refused(file)),
        }
    }

    /// Hands on its bytes, at most 1 MiB at a time, and compares their hash with the known one.
    /// Returns it.
    pub(super) fn read(&self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<[u8; 32]> {
        let mut hasher = Hasher::new();
        let mut take = |bytes: &[u8]| {
            hash(&mut hasher, bytes);
            take(bytes)
        };
        match &self.place {
            SideContent::Disk(file) => {
                let reader = FileReader::open(file)?;
                if reader.size() != self.length {
                    return Err(self.changed());
                }
                reader.stream(self.length, take)?;
            }
            SideContent::Memory(bytes) => {
                bytes.chunks(CHECKSUM_CHUNK_BYTES as usize).try_for_each(&mut take)?;
            }
            SideContent::Stored(file) => file.stream(take)?,
        }
        let hash = *hasher.finalize().as_bytes();
        if let SideContent::Stored(file) = &self.place {
            file.check_hash(hash.into())?;
        }
        if *self.hash.get_or_init(|| hash) == hash { Ok(hash) } else { Err(self.changed()) }
    }

    /// All its bytes.
    pub(super) fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.read(|part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(bytes)
    }

    fn changed(&self) -> Error {
        changed(format_args!("{:?}", self.path))
    }
}

/// The error of a source that changes while it is read.
pub(super) fn changed(what: impl std::fmt::Display) -> Error {
    let problem = format!("{what} changed while it was being read");
    Error::parameter(problem, "try again, with nothing else writing to it")
}
