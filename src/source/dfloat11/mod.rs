//! Checkpoints of the official DFloat11 package (`PyPI` `dfloat11`, up to 0.5.0): read as the BF16
//! files from which they were made.
//!
//! ```text
//! <block>.luts               u8 [k + 1, 256]   k LUTs of 256 entries; last row: code lengths
//! <block>.encoded_exponent   u8 [n]            the codes, most significant bit first
//! <block>.sign_mantissa      u8 [weights]      the plane
//! <block>.output_positions   u32 [..] as u8    the first weight of each thread block, and how many
//! <block>.gaps               u8 [..]           5 bits per thread: where its first code begins
//! <block>.split_positions    i64 [matrices−1]  where each matrix but the first begins
//! ```
//! The matrices of a block are concatenated, in the order in which `dfloat11_config.pattern_dict`
//! of config.json lists them; a pattern without a list is a module whose one `weight` is coded.
//! Shapes are not stored: see [`config`].
//!
//! A folder's files become one [`WeightsFile`]. Its bytes are those that the `safetensors` library
//! would have written for the original tensors, and are decoded on reading, which a reader does not
//! notice. This takes some 10 KiB of memory per block, 4 bytes per some 25 KB of weights, and 100
//! KiB for each read in progress.
//!
//! Exponents of 240 and more (infinities, NaN, huge numbers) have the same values as pointers
//! between the LUTs, so the package's own decoder loses such weights. This module restores them,
//! because code lengths tell a pointer from an exponent (see [`table`]).

mod coded;
mod config;
mod merged;
mod table;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    slice,
    sync::Arc,
};

use serde_json::Value;

use self::{
    coded::{CodedBlock, FileRange},
    config::{Config, ModelGeometry},
    merged::{BytesOf, Merged, MergedTensor},
    table::AGAIN,
};
use super::{
    safetensors::{MAX_HEADER_BYTES, SourceTensor, WeightsFile},
    walk::Found,
};
use crate::{
    Dtype, Error, Result,
    paths::{CONFIG, folder_of},
};

const CODES: &str = "encoded_exponent";
const PLANE: &str = "sign_mantissa";
const POSITIONS: &str = "output_positions";
const SPLITS: &str = "split_positions";
/// Suffixes of the tensors that together make a block, besides [`SPLITS`].
const ARRAYS: [&str; 5] = [CODES, PLANE, "luts", POSITIONS, "gaps"];
/// The file that a folder's files become if none of them has tensors that are not coded.
const MERGED: &str = "model.safetensors";
/// Positions of 131,072 matrices in one block; a block of thousands of experts has fewer.
const MAX_SPLIT_BYTES: u64 = 1 << 20;
/// Bytes that a tensor takes of a header besides its name, at least:
/// `:{"dtype":"U8","shape":[],"data_offsets":[0,0]},`.
const ENTRY_BYTES: usize = 48;

/// The folders of this listing, with their trailing `/`, whose config.json is that of a checkpoint
/// of the package.
pub(super) fn folders(found: &[Found]) -> BTreeSet<String> {
    let configs =
        found.iter().filter(|file| file.path == format!("{}{CONFIG}", folder_of(&file.path)));
    let checkpoints = configs.filter(|file| matches!(Config::read(&file.file), Ok(Some(_))));
    checkpoints.map(|file| folder_of(&file.path).to_owned()).collect()
}

/// Replaces the files of each folder that holds a checkpoint of the package by the one file that it
/// was made from, as far as that can be known. `root` is the source's folder. Returns what the user
/// should know of it.
///
/// # Errors
/// [`Error::Parameter`] if config.json is missing or does not tell what a block consists of;
/// [`Error::Corrupt`] if arrays are missing or contradict each other; [`Error::Unsupported`];
/// [`Error::Io`].
pub(super) fn import(weights: &mut Vec<WeightsFile>, root: &Path) -> Result<Vec<String>> {
    let mut folders = BTreeMap::<String, Vec<WeightsFile>>::new();
    for file in weights.drain(..) {
        folders.entry(folder_of(&file.path).to_owned()).or_default().push(file);
    }
    let mut notes = Vec::new();
    for (folder, files) in folders {
        if is_coded(&files) {
            let config = root.join(&folder).join(CONFIG);
            weights.push(Import::new(files, config)?.finish(&mut notes)?);
        } else {
            weights.extend(files);
        }
    }
    weights.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(notes)
}

/// Whether files have tensors of both names in one module.
fn is_coded(files: &[WeightsFile]) -> bool {
    let names = files.iter().flat_map(|file| &file.tensors).map(|tensor| tensor.name.as_str());
    let planes: BTreeSet<&str> = names.clone().filter_map(|name| module_of(name, PLANE)).collect();
    let mut modules = names.filter_map(|name| module_of(name, CODES));
    modules.any(|module| planes.contains(module))
}

/// The module of a tensor with this last component, with its trailing dot; empty for the root.
fn module_of<'a>(name: &'a str, last: &str) -> Option<&'a str> {
    name.strip_suffix(last).filter(|module| module.is_empty() || module.ends_with('.'))
}

struct Import {
    files: Vec<WeightsFile>,
    config_path: PathBuf,
    config: Config,
    /// The tensors as they lie in the files, by name, each with the index of its file.
    stored: BTreeMap<String, (usize, SourceTensor)>,
    /// The modules that are coded, ascending, with their trailing dots; also those that lack one of
    /// the two arrays, which is an error later.
    modules: Vec<String>,
    geometry: ModelGeometry,
    entries: BTreeMap<String, MergedTensor>,
    /// Bytes that the entries take in a header, at least.
    header: u64,
    /// Names of tensors whose shape nothing tells.
    flat: Vec<String>,
}

impl Import {
    fn new(files: Vec<WeightsFile>, config_path: PathBuf) -> Result<Self> {
        let config = Config::read(&config_path)?.ok_or_else(|| {
            let place = config_path.display();
            let problem = format!("a DFloat11 checkpoint needs {place} with its dfloat11_config");
            let remedy = "download the checkpoint's config.json to that place; its pattern_dict \
                          names the matrices";
            Error::parameter(problem, remedy)
        })?;
        let mut stored = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            for tensor in &file.tensors {
                let twice: Option<(usize, _)> =
                    stored.insert(tensor.name.clone(), (index, tensor.clone()));
                if let Some((other, _)) = twice {
                    let (other, path, name) = (&files[other].path, &file.path, &tensor.name);
                    let problem = format!("{other} and {path} both have a tensor {name:?}");
                    let remedy = "remove the file that is not part of the checkpoint";
                    return Err(Error::parameter(problem, remedy));
                }
            }
        }
        let modules: BTreeSet<&str> = stored
            .keys()
            .filter_map(|name| [CODES, PLANE].into_iter().find_map(|last| module_of(name, last)))
            .collect();
        let modules: Vec<String> = modules.into_iter().map(str::to_owned).collect();
        let shapes = stored.iter().map(|(name, (_, tensor))| (name.as_str(), &tensor.shape[..]));
        let geometry = ModelGeometry::new(&config.json, &modules, shapes);
        let (entries, flat) = (BTreeMap::new(), Vec::new());
        Ok(Self { files, config_path, config, stored, modules, geometry, entries, header: 0, flat })
    }

    /// A block's array of this name: the path of its file, a reader, and the tensor.
    fn array(&self, module: &str, name: &str) -> Result<FileRange> {
        let full = format!("{module}{name}");
        let (file, tensor) = self.stored.get(&full).ok_or_else(|| {
            let problem = format!("the DFloat11 checkpoint has no {full:?}");
            Error::corrupt(self.path(), 0, problem).remedied(AGAIN)
        })?;
        let file = &self.files[*file];
        let dtypes: &[Dtype] = match name {
            SPLITS => &[Dtype::I64],
            POSITIONS => &[Dtype::U8, Dtype::U32, Dtype::I32],
            _ => &[Dtype::U8],
        };
        if !dtypes.contains(&tensor.dtype) {
            let problem =
                format!("{full:?} must be {}, not {}", dtypes[0].name(), tensor.dtype.name());
            return Err(Error::corrupt(&file.path, tensor.offset, problem).remedied(AGAIN));
        }
        Ok(FileRange {
            path: format!("{}: {full}", file.path),
            reader: Arc::clone(&file.reader),
            offset: tensor.offset,
            length: tensor.length,
        })
    }

    /// Takes over one block: its matrices become tensors.
    fn module(&mut self, module: &str) -> Result<()> {
        let [stream, plane, luts, positions, gaps] = ARRAYS.map(|name| self.array(module, name));
        let geometry = self.config.threads_per_block;
        let block = CodedBlock::open([stream?, plane?, luts?, positions?, gaps?], geometry)?;
        let block = Arc::new(block);
        let splits = self.splits(module, block.weights())?;
        let attributes = self.attributes(module, splits.len() - 1)?;
        for (matrix, range) in splits.windows(2).enumerate() {
            let (first, weights) = (range[0], range[1] - range[0]);
            let path = match attributes.get(matrix) {
                None => module.trim_end_matches('.').to_owned(),
                Some(attribute) => format!("{module}{attribute}"),
            };
            let name = if path.is_empty() { "weight".to_owned() } else { format!("{path}.weight") };
            let bias =
                self.stored.get(&format!("{path}.bias")).map(|(_, tensor)| &tensor.shape[..]);
            let shape = self
                .geometry
                .shape(&path, attributes.is_empty(), weights, bias)
                .unwrap_or_else(|| {
                    self.flat.push(name.clone());
                    vec![weights]
                });
            let part = BytesOf::Coded { block: Arc::clone(&block), first };
            let entry = MergedTensor { dtype: Dtype::BF16, shape, bytes: 2 * weights, part };
            self.add(name, entry)?;
        }
        Ok(())
    }

    /// Where the matrices of a block begin, and the number of its weights.
    fn splits(&self, module: &str, weights: u64) -> Result<Vec<u64>> {
        let mut splits = vec![0];
        if self.stored.contains_key(&format!("{module}{SPLITS}")) {
            let array = self.array(module, SPLITS)?;
            let what = format_args!("{}: its length in bytes", array.path);
            Error::check_limit(what, array.length, MAX_SPLIT_BYTES)?;
            let bytes = array.read(0, array.length)?;
            let (entries, rest) = bytes.as_chunks();
            splits.extend(entries.iter().map(|&entry| u64::from_le_bytes(entry)));
            let ascending = splits.is_sorted() && splits.last().is_none_or(|&last| last <= weights);
            if !ascending || !rest.is_empty() {
                let problem = format!("must be ascending positions among {weights} weights");
                return Err(array.damaged(0, problem));
            }
        }
        splits.push(weights);
        Ok(splits)
    }

    /// The names of a block's matrices; none for the module's own weight.
    fn attributes(&self, module: &str, count: usize) -> Result<Vec<String>> {
        let name = module.trim_end_matches('.');
        let patterns = self.config.patterns.iter().filter(|(regex, _)| regex.is_match(name));
        let matches: Vec<&Vec<String>> = patterns.map(|(_, attributes)| attributes).collect();
        if let Some(fitting) = matches.iter().find(|attributes| attributes.len().max(1) == count) {
            return Ok((*fitting).clone());
        }
        let place = self.config_path.display();
        let lengths: Vec<usize> = matches.iter().map(|attributes| attributes.len()).collect();
        let problem = if lengths.is_empty() {
            format!("{place}: no pattern of pattern_dict matches the block {name:?}")
        } else {
            format!(
                "{place}: the block {name:?} has {count} matrices, and pattern_dict names \
                {lengths:?} for it"
            )
        };
        Err(Error::parameter(problem, "get the config.json that belongs to these weights"))
    }

    /// Adds a tensor. A module's name counts for each of its matrices, so names may take far more
    /// than the files and config.json do: more than a header may is refused before it is there.
    fn add(&mut self, name: String, entry: MergedTensor) -> Result<()> {
        self.header += (Value::from(name.as_str()).to_string().len() + ENTRY_BYTES) as u64;
        if self.header > MAX_HEADER_BYTES {
            let what = format_args!("{}: the header's length in bytes", self.path());
            return Err(Error::limit(what, self.header, MAX_HEADER_BYTES));
        }
        if self.entries.contains_key(&name) {
            let problem = format!("the DFloat11 checkpoint has the weights of {name:?} twice");
            return Err(Error::parameter(problem, AGAIN));
        }
        self.entries.insert(name, entry);
        Ok(())
    }

    /// The name of the merged file: that of the only one, or of the one with what is not coded.
    fn path(&self) -> String {
        let plain: Vec<_> =
            self.files.iter().filter(|file| !is_coded(slice::from_ref(file))).collect();
        match (&self.files[..], &plain[..]) {
            ([only], _) => only.path.clone(),
            (_, [rest]) => rest.path.clone(),
            _ => format!("{}{MERGED}", folder_of(&self.files[0].path)),
        }
    }

    /// Takes over all blocks, and the tensors that belong to none.
    fn finish(mut self, notes: &mut Vec<String>) -> Result<WeightsFile> {
        let modules = std::mem::take(&mut self.modules);
        for module in &modules {
            self.module(module)?;
        }
        let mut others = std::mem::take(&mut self.stored);
        for module in &modules {
            for array in ARRAYS.iter().chain([&SPLITS]) {
                others.remove(&format!("{module}{array}"));
            }
        }
        for (name, (file, tensor)) in others {
            let SourceTensor { dtype, shape, offset, length: bytes, .. } = tensor;
            let part = BytesOf::Stored { file, offset };
            self.add(name, MergedTensor { dtype, shape, bytes, part })?;
        }
        let path = self.path();
        notes.push(format!(
            "{path}: a DFloat11 checkpoint (version {}) of {} file(s) and {} blocks, decoded and \
            coded again",
            self.config.version.as_deref().unwrap_or("unknown"),
            self.files.len(),
            modules.len()
        ));
        if let Some(first) = self.flat.first() {
            notes.push(format!(
                "{path}: nothing in the checkpoint gives the shapes of {} tensor(s); stored with \
                one dimension: {first}{}",
                self.flat.len(),
                if self.flat.len() > 1 { ", ..." } else { "" }
            ));
        }
        // The order in which the safetensors library writes: by descending dtype, then by name.
        let mut entries: Vec<_> = std::mem::take(&mut self.entries).into_iter().collect();
        entries.sort_by_key(|(_, entry)| Reverse(entry.dtype));
        let merged = Merged::new(self.files, entries)?;
        WeightsFile::parse(&path, Arc::new(merged))
    }
}
