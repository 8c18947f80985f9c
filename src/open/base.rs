//! The base of a model: another model, compressed or not, to which tensors in `delta` store
//! differences. Names locate it, and the hashes of its tensors prove that it is the right one.

use std::{
    collections::HashMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use blake3::Hash;

use super::{
    decoder::{PreparedTensor, TensorReader},
    model::Model,
    opening::is_compressed,
    options::OpenOptions,
    original::hash_tensor,
    recorded::{NoBase, RecordedBase},
    shard::{FindBase, Shard},
    tensor::{Encoding, Tensor},
};
use crate::{
    Dtype, Result,
    encoding::stored::ReadBase,
    format::records::ENCODING_DELTA,
    paths::shown,
    source::{Source, SourceTensor, WeightsFile, hub_cache::locate},
};

/// The most models of which each is the base of the one before.
const MAX_DEPTH: usize = 4;

/// An open base.
#[derive(Debug)]
pub(crate) struct Base {
    path: PathBuf,
    model: BaseModel,
}

#[derive(Debug)]
enum BaseModel {
    Compressed(Box<Model>),
    Files {
        source: Source,
        /// File and tensor by name.
        names: HashMap<String, (usize, usize)>,
        /// Hashes of tensors that were computed, file by file.
        hashes: Vec<Vec<OnceLock<Hash>>>,
    },
}

impl Base {
    /// Opens a model by its path or name, compressed or not.
    pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        let mut options = OpenOptions { base: None, ..options.clone() };
        options.depth += 1;
        let place = locate(path)?;
        let model = if is_compressed(&place.path)? {
            BaseModel::Compressed(options.open(&place.path)?.into())
        } else {
            BaseModel::of_files(Source::open(&place.path)?)
        };
        Ok(Self { path: path.to_owned(), model })
    }

    /// The identity of a compressed one.
    pub(crate) fn identity(&self) -> Option<Hash> {
        match &self.model {
            BaseModel::Compressed(model) => Some(model.identity()),
            BaseModel::Files { .. } => None,
        }
    }

    /// The tensor of this name.
    pub(crate) fn tensor(&self, name: &str) -> Option<BaseTensor<'_>> {
        match &self.model {
            BaseModel::Compressed(model) => model.tensor(name).ok().map(BaseTensor::Stored),
            BaseModel::Files { source, names, hashes } => {
                let &(file, tensor) = names.get(name)?;
                let (weights, hash) = (&source.weights[file], &hashes[file][tensor]);
                Some(BaseTensor::File(weights, &weights.tensors[tensor], hash))
            }
        }
    }

    /// Checks that it has the bases of a model's tensors, as far as directories and headers tell.
    fn check(&self, model: &Model) -> Result<(), String> {
        let own = model.tensors().filter(|tensor| tensor.encoding() == Encoding::Delta);
        for tensor in own {
            let found = self.tensor(tensor.name()).filter(|found| found.is_like(&tensor));
            let wanted = tensor.base_hash();
            if found.and_then(|found| found.known_hash()).is_some_and(|hash| hash == wanted) {
                continue;
            }
            if found.is_none_or(|found| found.known_hash().is_some()) {
                return Err(self.differs(tensor.name()));
            }
        }
        Ok(())
    }

    fn differs(&self, name: &str) -> String {
        format!("{} has another tensor {name:?} than it has", shown(&self.path).display())
    }
}

impl BaseModel {
    fn of_files(source: Source) -> Self {
        let files = source.weights.iter().enumerate();
        let names = files.flat_map(|(file, weights)| {
            let tensors = weights.tensors.iter().enumerate();
            tensors.map(move |(index, tensor)| (tensor.name.clone(), (file, index)))
        });
        let names = names.collect();
        let new = |weights: &WeightsFile| weights.tensors.iter().map(|_| OnceLock::new()).collect();
        let hashes = source.weights.iter().map(new).collect();
        Self::Files { source, names, hashes }
    }
}

/// A tensor of a base.
#[derive(Clone, Copy)]
pub(crate) enum BaseTensor<'b> {
    Stored(Tensor<'b>),
    File(&'b WeightsFile, &'b SourceTensor, &'b OnceLock<Hash>),
}

impl<'b> BaseTensor<'b> {
    pub(crate) fn dtype(&self) -> Option<Dtype> {
        match self {
            Self::Stored(tensor) => tensor.dtype(),
            Self::File(_, tensor, _) => Some(tensor.dtype),
        }
    }

    pub(crate) fn shape(&self) -> Vec<u64> {
        match self {
            Self::Stored(tensor) => tensor.shape(),
            Self::File(_, tensor, _) => tensor.shape.clone(),
        }
    }

    fn is_like(&self, tensor: &Tensor<'_>) -> bool {
        self.dtype() == tensor.dtype() && self.shape() == tensor.shape()
    }

    /// Its hash, if nothing needs to be read for it.
    fn known_hash(&self) -> Option<Hash> {
        match self {
            Self::Stored(tensor) => Some(tensor.hash()),
            Self::File(_, _, hash) => hash.get().copied(),
        }
    }

    /// Its hash; of a file's tensor, the first time all of it is read.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn hash(&self) -> Result<Hash> {
        if let Some(hash) = self.known_hash() {
            return Ok(hash);
        }
        let Self::File(file, tensor, known) = self else { unreachable!("others are known") };
        let hash = hash_tensor(file, tensor)?;
        Ok(*known.get_or_init(|| hash))
    }

    /// Prepares it for reading.
    ///
    /// # Errors
    /// As for decoding it.
    pub(crate) fn prepare(&self) -> Result<Box<dyn ReadBase + 'b>> {
        Ok(match self {
            Self::Stored(tensor) => Box::new(StoredBase(TensorReader::new(tensor)?)),
            Self::File(file, tensor, _) => Box::new(FileBase(file, tensor.offset)),
        })
    }
}

/// A tensor of a compressed base.
struct StoredBase<'b>(TensorReader<'b>);

impl ReadBase for StoredBase<'_> {
    fn read(&self, elements: Range<u64>, out: &mut [u8]) -> Result<()> {
        self.0.read(2 * elements.start..2 * elements.end, out)
    }
}

/// A tensor of a safetensors file, and where it begins there.
struct FileBase<'b>(&'b WeightsFile, u64);

impl ReadBase for FileBase<'_> {
    fn read(&self, elements: Range<u64>, out: &mut [u8]) -> Result<()> {
        self.0.read_exact_at(self.1 + 2 * elements.start, out)
    }
}

/// The base that was found, or why there is none.
#[derive(Debug)]
struct FoundBase(Result<Base, NoBase>);

impl FoundBase {
    /// The base of a tensor.
    fn tensor(&self, tensor: &Tensor<'_>) -> Result<BaseTensor<'_>> {
        let base = self.0.as_ref().map_err(NoBase::error)?;
        let wanted = tensor.base_hash();
        let found = base.tensor(tensor.name()).filter(|found| found.is_like(tensor));
        match found {
            Some(found) if found.hash()? == wanted => Ok(found),
            _ => {
                let problem = Some(base.differs(tensor.name()));
                Err(NoBase { recorded: RecordedBase::default(), problem }.error())
            }
        }
    }
}

impl FindBase for FoundBase {
    fn check(&self, shard: &Shard, tensor: usize) -> Result<()> {
        self.tensor(&Tensor::new(shard, tensor)).map(drop)
    }

    fn prepare<'m>(&'m self, shard: &'m Shard, tensor: usize) -> Result<Box<dyn ReadBase + 'm>> {
        self.tensor(&Tensor::new(shard, tensor))?.prepare()
    }
}

impl Shard {
    fn needs_base(&self) -> bool {
        self.directory().tensors.iter().any(|tensor| tensor.encoding == ENCODING_DELTA)
    }
}

impl Model {
    /// Whether tensors are stored as differences from those of another model.
    pub fn needs_base(&self) -> bool {
        self.shards().iter().any(Shard::needs_base)
    }

    /// The name of that model, as far as it is recorded: of its repository of the Hub, or of its
    /// folder or file. `None` for a model that needs none too.
    pub fn base_name(&self) -> Option<String> {
        let first = RecordedBase::of(&self.shards()[0]);
        self.needs_base().then(|| first.name().map(str::to_owned)).flatten()
    }
}

impl OpenOptions {
    /// Finds the base of a model that needs one.
    pub(super) fn with_base(&self, mut model: Model) -> Result<Model> {
        if !model.needs_base() {
            return Ok(model);
        }
        let base = match &self.base {
            Some(path) => Ok(self.named_base(&model, path)?),
            None => self.recorded_base(&model),
        };
        let bases = Arc::new(FoundBase(base));
        for shard in model.shards_mut() {
            shard.set_bases(Arc::clone(&bases) as _);
        }
        Ok(model)
    }

    /// The base that the caller names.
    fn named_base(&self, model: &Model, path: &Path) -> Result<Base> {
        let base = Base::open(path, self)?;
        base.check(model).map_err(|problem| {
            let recorded = RecordedBase::of_model(model, self);
            NoBase { recorded, problem: Some(problem) }.error()
        })?;
        Ok(base)
    }

    /// The base where the model says that it was, if it is there.
    fn recorded_base(&self, model: &Model) -> Result<Base, NoBase> {
        let recorded = RecordedBase::of_model(model, self);
        if self.depth >= MAX_DEPTH {
            let problem = Some(format!("{MAX_DEPTH} models are each the base of the one before"));
            return Err(NoBase { recorded, problem });
        }
        let first = model.shards().first().and_then(|shard| shard.path().parent());
        let folder = model.root().or_else(|| first.map(Path::to_owned));
        let mut problem = None;
        for place in recorded.places(folder.as_deref()) {
            let found = Base::open(&place, self).map_err(|error| error.to_string());
            match found.and_then(|base| base.check(model).map(|()| base)) {
                Ok(base) => return Ok(base),
                Err(other) => problem = problem.or(Some(other)),
            }
        }
        Err(NoBase { recorded, problem })
    }
}
