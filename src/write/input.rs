//! What is compressed: the files of a checkpoint, or an open model, whose tensors are decoded wherever they are read. The passes and the
//! plan see the same in both.

use std::{
    borrow::Cow,
    collections::VecDeque,
    io::Write,
    ops::Range,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use blake3::Hasher;

use super::{config, folder::OutputFolder};
use crate::{
    Error, Model, Result, Tensor,
    constants::CHECKSUM_CHUNK_BYTES,
    format::records::{FILE_SIDE, FILE_WEIGHTS},
    io::{FileReader, ReadAt},
    open::{Cpu, Decoder, PreparedTensor, Shard, original, wrong_hash},
    source::{LeftOut, SideFile, Source, SourceTensor, WeightsFile, side_files},
};

/// Everything that goes into a container.
pub(super) struct Input<'a> {
    /// Ascending by path.
    pub(super) weights: Vec<Weights<'a>>,
    /// Ascending by path.
    pub(super) side: Vec<Side<'a>>,
    pub(super) left_out: Vec<LeftOut>,
    /// What the source has to say of itself.
    pub(super) notes: Vec<String>,
}

impl<'a> Input<'a> {
    /// The files of a checkpoint.
    pub(super) fn of_source(source: &'a Source) -> Self {
        let weights = source.weights.iter().map(|file| Weights { file: Cow::Borrowed(file), decoded: None });
        let side = source.side.iter().map(|file| Side {
            path: file.path.clone(),
            length: file.length,
            place: Place::Disk(file.file.clone()),
        });
        Self {
            weights: weights.collect(),
            side: side.collect(),
            left_out: source.left_out.clone(),
            notes: source.notes.clone(),
        }
    }

    /// The original files of a model, all of whose shards are open.
    pub(super) fn of_model(model: &'a Model) -> Result<Self> {
        if !model.is_complete() {
            let problem = format!("{} of the model's shards are open", model.shards().len());
            return Err(Error::parameter(problem, "open the folder that holds all of them"));
        }
        let (mut weights, mut side, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
        for shard in model.shards() {
            for (index, record) in shard.directory().files.iter().enumerate() {
                if record.kind == FILE_WEIGHTS {
                    weights
                        .push(Weights::of_shard(shard, index).map_err(|error| error.in_file(shard.path()))?);
                } else if record.kind == FILE_SIDE {
                    let path = shard.directory().file_path(record).to_owned();
                    side.push(Side { path, length: record.length.get(), place: Place::Stored(shard, index) });
                }
            }
        }
        if let Some(root) = model.folder() {
            let (found, passed_over) = side_files(root)?;
            for SideFile { path, file, length } in found {
                let paths = weights.iter().map(|weights: &Weights<'_>| weights.file.path.as_str());
                let (length, place) = config::place_of(&path, file, length, paths)?;
                side.push(Side { path, length, place });
            }
            left_out = passed_over;
        }
        weights.sort_by(|a, b| a.file.path.cmp(&b.file.path));
        side.sort_by(|a, b| a.path.cmp(&b.path));
        if let Some(pair) = side.windows(2).find(|pair| pair[0].path == pair[1].path) {
            let problem = format!("there are two side files {:?}", pair[0].path);
            return Err(Error::parameter(problem, "take away the one beside the container"));
        }
        Ok(Self { weights, side, left_out, notes: Vec::new() })
    }

    /// Bytes of all tensors.
    pub(super) fn tensor_bytes(&self) -> u64 {
        self.weights.iter().flat_map(|weights| &weights.file.tensors).map(|tensor| tensor.length).sum()
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
    fn unit(&self, index: usize) -> u64;

    /// Compares hashes with those that are stored.
    fn check_hashes(&self, file: &[u8; 32], tensors: &[&[u8; 32]]) -> Result<()>;
}

/// The tensors of a weights file that are stored in a container.
struct Decoded<'a> {
    shard: &'a Shard,
    file: usize,
    /// In the order of the file's description.
    tensors: Vec<Tensor<'a>>,
    /// Those that were read last, by index.
    prepared: Mutex<VecDeque<(usize, Prepared<'a>)>>,
}

type Prepared<'a> = Arc<dyn PreparedTensor + 'a>;

impl<'a> Weights<'a> {
    fn of_shard(shard: &'a Shard, file: usize) -> Result<Self> {
        let description = original(shard, file)?;
        let find = |tensor: &SourceTensor| {
            // The description was compared with the directory.
            shard.tensor(&tensor.name).expect("the directory has the tensors of its prefixes")
        };
        let tensors: Vec<Tensor<'a>> = description.tensors.iter().map(find).collect();
        tensors.iter().try_for_each(Tensor::check_known)?;
        let decoded = Decoded { shard, file, tensors, prepared: Mutex::default() };
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
    pub(super) fn unit(&self, index: usize) -> u64 {
        self.decoded.as_ref().map_or(2, |decoded| decoded.unit(index))
    }

    /// Compares hashes that the first pass found with those that the container has, if it comes from one.
    pub(super) fn check_hashes(&self, file: &[u8; 32], tensors: &[&[u8; 32]]) -> Result<()> {
        self.decoded.as_ref().map_or(Ok(()), |decoded| decoded.check_hashes(file, tensors))
    }
}

impl Tensors for Decoded<'_> {
    fn read(&self, index: usize, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        self.prepare(index)?.read(range, out)
    }

    fn unit(&self, index: usize) -> u64 {
        self.tensors[index].unit()
    }

    fn check_hashes(&self, file: &[u8; 32], tensors: &[&[u8; 32]]) -> Result<()> {
        let wrong = |place: String| Err(wrong_hash(place).in_file(self.shard.path()));
        let mut pairs = self.tensors.iter().zip(tensors);
        if let Some((tensor, _)) = pairs.find(|(tensor, hash)| tensor.hash().as_bytes() != **hash) {
            return wrong(format!("tensor {:?}", tensor.name()));
        }
        let directory = self.shard.directory();
        let record = &directory.files[self.file];
        if record.hash == *file { Ok(()) } else { wrong(format!("file {:?}", directory.file_path(record))) }
    }
}

impl<'a> Decoded<'a> {
    /// Prepares a tensor, or finds that it is among the last ones.
    fn prepare(&self, index: usize) -> Result<Prepared<'a>> {
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
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
}

pub(super) enum Place<'a> {
    Disk(PathBuf),
    Memory(Vec<u8>),
    /// In a container, by the index of the file.
    Stored(&'a Shard, usize),
}

impl Side<'_> {
    /// Hands on its bytes, at most 1 MiB at a time.
    pub(super) fn for_each(&self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match &self.place {
            Place::Disk(file) => {
                let reader = FileReader::open(file)?;
                let mut bytes = Vec::new();
                for start in (0..self.length).step_by(CHECKSUM_CHUNK_BYTES as usize) {
                    bytes.resize(CHECKSUM_CHUNK_BYTES.min(self.length - start) as usize, 0);
                    reader
                        .read_exact_at(start, &mut bytes)
                        .map_err(|error| Error::io("reading", file, error))?;
                    take(&bytes)?;
                }
                Ok(())
            }
            Place::Memory(bytes) => bytes.chunks(CHECKSUM_CHUNK_BYTES as usize).try_for_each(take),
            Place::Stored(shard, file) => {
                let mut arrays = shard.directory().files[*file].array_range();
                arrays.try_for_each(|array| shard.stream_array(array, &mut take))
            }
        }
    }

    /// Its hash; compared with that in its container, where it comes from one.
    pub(super) fn hash(&self) -> Result<[u8; 32]> {
        let mut hasher = Hasher::new();
        self.for_each(|bytes| {
            hasher.update(bytes);
            Ok(())
        })?;
        let hash = *hasher.finalize().as_bytes();
        match self.place {
            Place::Stored(shard, file) if shard.directory().files[file].hash != hash => {
                let problem = "its bytes do not have the hash in the directory";
                Err(Error::corrupt(format!("file {:?}", self.path), 0, problem).in_file(shard.path()))
            }
            _ => Ok(hash),
        }
    }

    /// All its bytes, compared with their hash where they come from a container.
    pub(super) fn read(&self) -> Result<Vec<u8>> {
        self.hash()?;
        let mut all = Vec::new();
        self.for_each(|bytes| {
            all.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(all)
    }

    /// Puts it into a folder.
    pub(super) fn write_into(&self, folder: &OutputFolder) -> Result<()> {
        match &self.place {
            Place::Disk(file) => return folder.copy(file, &self.path),
            Place::Memory(bytes) => return folder.write(bytes, &self.path),
            Place::Stored(..) => self.hash()?,
        };
        let (mut target, path) = folder.create_file(&self.path)?;
        self.for_each(|bytes| target.write_all(bytes).map_err(|error| Error::io("writing", &path, error)))?;
        target.sync_all().map_err(|error| Error::io("syncing", &path, error))
    }

    /// The error where its bytes are not those of the first time.
    pub(super) fn check_same(&self, hash: &[u8; 32], first: &[u8; 32]) -> Result<()> {
        if hash == first { Ok(()) } else { Err(changed(&self.path)) }
    }
}

/// The error of a source that changes while it is compressed.
pub(super) fn changed(what: impl std::fmt::Display) -> Error {
    let problem = format!("{what} changed while it was being compressed");
    Error::parameter(problem, "compress again, with nothing else writing to the source")
}
