//! What is compressed: the files of a checkpoint, or an open model, whose tensors are decoded
//! wherever they are read. The passes and the plan see the same in both.

use std::{
    borrow::Cow,
    collections::{BTreeMap, VecDeque},
    ops::Range,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock},
};

use blake3::Hasher;

use super::{
    folder::ModelFolder,
    options::{CompressOptions, check_key, check_metadata},
};
use crate::{
    Error, Model, Result, Tensor,
    constants::CHECKSUM_CHUNK_BYTES,
    io::FileReader,
    open::{
        Cpu, Decoder, OriginalFile, PreparedTensor,
        beside::{self, Beside},
    },
    parallel,
    source::{LeftOut, Source, SourceTensor, WeightsFile},
};

/// Everything that goes into a container.
pub(super) struct Input<'a> {
    /// Ascending by path.
    pub(super) weights: Vec<Weights<'a>>,
    /// Ascending by path.
    pub(super) side: Vec<Side<'a>>,
    pub(super) left_out: Vec<LeftOut>,
    /// Keys and values for runtimes.
    pub(super) metadata: BTreeMap<String, String>,
    /// What the source has to say of itself.
    pub(super) notes: Vec<String>,
}

impl<'a> Input<'a> {
    /// The files of a checkpoint.
    pub(super) fn of_source(source: &'a Source) -> Self {
        let weights =
            source.weights.iter().map(|file| Weights { file: Cow::Borrowed(file), decoded: None });
        let side = source
            .side
            .iter()
            .map(|file| Side::new(file.path.clone(), file.length, Place::Disk(file.file.clone())));
        Self {
            weights: weights.collect(),
            side: side.collect(),
            left_out: source.left_out.clone(),
            metadata: BTreeMap::new(),
            notes: source.notes.clone(),
        }
    }

    /// The original files of a model, all of whose shards are open.
    pub(super) fn of_model(model: &'a Model) -> Result<Self> {
        model.check_complete()?;
        let (mut weights, mut side) = (Vec::new(), Vec::new());
        for file in model.files() {
            if file.is_weights() {
                let decoded = Weights::decoded(file);
                weights.push(decoded.map_err(|error| error.in_file(file.shard().path()))?);
            } else {
                side.push(Side::recorded(model, file)?);
            }
        }
        weights.sort_by(|a, b| a.file.path.cmp(&b.file.path));
        side.sort_by(|a, b| a.path.cmp(&b.path));
        let metadata =
            model.metadata().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let (bystanders, mut left_out) = model.bystanders()?;
        left_out.extend(bystanders.into_iter().map(|file| {
            let reason = "not recorded in the containers".to_owned();
            LeftOut { path: file.path, reason }
        }));
        left_out.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Self { weights, side, left_out, metadata, notes: Vec::new() })
    }

    /// Adds what the caller wants kept for runtimes.
    pub(super) fn add_options(&mut self, options: &CompressOptions) -> Result<()> {
        options.metadata.keys().try_for_each(|key| check_key(key))?;
        self.metadata.extend(options.metadata.clone());
        check_metadata(&self.metadata)
    }

    /// Bytes of all tensors.
    pub(super) fn tensor_bytes(&self) -> u64 {
        self.weights
            .iter()
            .flat_map(|weights| &weights.file.tensors)
            .map(|tensor| tensor.length)
            .sum()
    }
}

/// An original weights file.
pub(super) struct Weights<'a> {
    /// Its description; its reader is of use only where nothing is decoded.
    pub(super) file: Cow<'a, WeightsFile>,
    /// Where the bytes come from, if not from the file.
    decoded: Option<Box<dyn Tensors + 'a>>,
}

/// The tensors of a weights file, by their index in its description.
trait Tensors: Sync {
    /// Reads a range of a tensor's bytes.
    fn read(&self, index: usize, range: Range<u64>, out: &mut [u8]) -> Result<()>;

    /// Bytes of a tensor that are best read together.
    fn grain(&self, index: usize) -> u64;

    /// Compares hashes with those that are stored.
    fn check_hashes(&self, file: &[u8; 32], tensors: &[&[u8; 32]]) -> Result<()>;
}

/// The tensors of a weights file that are stored in a container.
struct Decoded<'a> {
    file: OriginalFile<'a>,
    /// In the order of the file's description.
    tensors: Vec<Tensor<'a>>,
    /// Those that were read last, by index.
    prepared: Mutex<VecDeque<(usize, Prepared<'a>)>>,
}

type Prepared<'a> = Arc<dyn PreparedTensor + 'a>;

impl<'a> Weights<'a> {
    fn decoded(file: OriginalFile<'a>) -> Result<Self> {
        let (shard, description) = (file.shard(), file.description()?);
        let find = |tensor: &SourceTensor| {
            // The description was compared with the directory.
            shard.tensor(&tensor.name).expect("the directory has the tensors of its prefixes")
        };
        let tensors: Vec<Tensor<'a>> = description.tensors.iter().map(find).collect();
        tensors.iter().try_for_each(Tensor::check_known)?;
        let decoded = Decoded { file, tensors, prepared: Mutex::default() };
        Ok(Self { file: Cow::Owned(description), decoded: Some(Box::new(decoded)) })
    }

    /// Reads or decodes bytes of one tensor, `offset` counted from the start of the file.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let Some(decoded) = &self.decoded else { return self.file.read_exact_at(offset, out) };
        // Tensors without bytes come before the one that starts where they do.
        let index = self.file.tensors.partition_point(|tensor| tensor.offset <= offset) - 1;
        let start = offset - self.file.tensors[index].offset;
        decoded.read(index, start..start + out.len() as u64, out)
    }

    /// Bytes of a tensor that are best read together: a multiple of them costs nothing twice.
    pub(super) fn grain(&self, index: usize) -> u64 {
        self.decoded.as_ref().map_or(2, |decoded| decoded.grain(index))
    }

    /// Compares hashes that the first pass found with those that the container has, if it comes
    /// from one.
    pub(super) fn check_hashes(&self, file: &[u8; 32], tensors: &[&[u8; 32]]) -> Result<()> {
        self.decoded.as_ref().map_or(Ok(()), |decoded| decoded.check_hashes(file, tensors))
    }
}

impl Tensors for Decoded<'_> {
    fn read(&self, index: usize, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        self.prepare(index)?.read(range, out)
    }

    fn grain(&self, index: usize) -> u64 {
        self.tensors[index].grain()
    }

    fn check_hashes(&self, file: &[u8; 32], tensors: &[&[u8; 32]]) -> Result<()> {
        let mut pairs = self.tensors.iter().zip(tensors);
        pairs.try_for_each(|(tensor, &hash)| tensor.check_hash((*hash).into()))?;
        self.file.check_hash((*file).into())
    }
}

impl<'a> Decoded<'a> {
    /// Prepares a tensor, or finds that it is among the last ones.
    fn prepare(&self, index: usize) -> Result<Prepared<'a>> {
        let mut prepared = parallel::lock(&self.prepared);
        if let Some((_, found)) = prepared.iter().find(|(of, _)| *of == index) {
            return Ok(Arc::clone(found));
        }
        // Threads work on tensors in a row, each on one.
        prepared.truncate(rayon::current_num_threads());
        let new: Prepared<'a> = Cpu.prepare(self.tensors[index])?.into();
        prepared.push_front((index, Arc::clone(&new)));
        Ok(new)
    }
}

/// A file that travels with the weights.
pub(super) struct Side<'a> {
    pub(super) path: String,
    pub(super) length: u64,
    place: Place<'a>,
    /// The hash that its container has, or that was found when it was first read.
    hash: OnceLock<[u8; 32]>,
}

pub(super) enum Place<'a> {
    Disk(PathBuf),
    Memory(Vec<u8>),
    /// In a container.
    Stored(OriginalFile<'a>),
}

impl<'a> Place<'a> {
    /// Where the original of a recorded side file is.
    fn recorded(model: &Model, file: OriginalFile<'a>) -> Result<Self> {
        if !file.is_beside() {
            return Ok(Self::Stored(file));
        }
        let Some(root) = model.folder() else {
            let path = file.path();
            let problem = format!("{path:?} lies beside the container, in the folder of the model");
            return Err(Error::parameter(problem, "name the folder instead of the container"));
        };
        match beside::find(root, file)? {
            Beside::Original(found) => Ok(Self::Disk(found)),
            Beside::Marked(bytes) => Ok(Self::Memory(bytes)),
            other => Err(other.refused(file)),
        }
    }
}

impl<'a> Side<'a> {
    fn new(path: String, length: u64, place: Place<'a>) -> Self {
        Self { path, length, place, hash: OnceLock::new() }
    }

    fn recorded(model: &Model, file: OriginalFile<'a>) -> Result<Self> {
        let (place, hash) = (Place::recorded(model, file)?, file.record().hash.into());
        Ok(Self { path: file.path().to_owned(), length: file.length(), place, hash })
    }

    /// Hands on its bytes, at most 1 MiB at a time.
    fn for_each(&self, take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match &self.place {
            Place::Disk(file) => FileReader::open(file)?.stream(self.length, take),
            Place::Memory(bytes) => bytes.chunks(CHECKSUM_CHUNK_BYTES as usize).try_for_each(take),
            Place::Stored(file) => file.stream(take),
        }
    }

    /// Hands on its bytes as [`Side::for_each`], and compares their hash with the known one.
    /// Returns it.
    pub(super) fn read(&self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<[u8; 32]> {
        let mut hasher = Hasher::new();
        self.for_each(|bytes| {
            hasher.update(bytes);
            take(bytes)
        })?;
        let hash = *hasher.finalize().as_bytes();
        if let Place::Stored(file) = &self.place {
            file.check_hash(hash.into())?;
        }
        if *self.hash.get_or_init(|| hash) != hash {
            return Err(changed(format_args!("{:?}", self.path)));
        }
        Ok(hash)
    }

    /// Its hash; compared with that in its container, where it comes from one.
    pub(super) fn hash(&self) -> Result<[u8; 32]> {
        self.read(|_| Ok(()))
    }

    /// All its bytes, compared as by [`Side::read`].
    pub(super) fn bytes(&self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        self.read(|bytes| {
            all.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(all)
    }

    /// Puts it into a folder.
    pub(super) fn write_into(&self, folder: &ModelFolder<'_>) -> Result<()> {
        folder.fill(&self.path, |write| self.read(write)).map(drop)
    }
}

/// The error of a source that changes while it is compressed.
pub(super) fn changed(what: impl std::fmt::Display) -> Error {
    let problem = format!("{what} changed while it was being compressed");
    Error::parameter(problem, "compress again, with nothing else writing to the source")
}
