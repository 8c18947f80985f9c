//! A model on disk: one safetensors file, or a Hugging Face folder with everything in it; and what
//! the user should know about it before compression.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{
    dfloat11, hub_cache,
    index::{self, Index},
    safetensors::WeightsFile,
    walk::{Found, HIDDEN, LeftOut, MAX_SIDE_BYTES, UNREADABLE, walk},
};
use crate::{
    Dtype, Error, Result,
    float::is_coded,
    io::read_regular,
    paths::{check_local, check_path, configs, folder_of, is_safetensors},
};

/// Other formats of weights: copies of the same weights, more often than not.
const OTHER_FORMATS: &[&str] =
    &["bin", "ckpt", "df11", "gguf", "h5", "msgpack", "onnx", "pt", "pth"];

/// Why the index of a checkpoint of the official `DFloat11` package is left out.
const JOINED_INDEX: &str = "an index of files that become one";

/// The largest configuration that is looked at, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Everything that goes into a container, found and validated; no tensor data has been read.
#[derive(Debug)]
pub struct Source {
    /// The safetensors files, in bytewise order of their paths. No two of them have a tensor name
    /// in common.
    pub weights: Vec<WeightsFile>,
    /// The small files beside them, in bytewise order of their paths.
    pub side: Vec<SideFile>,
    /// Files found there that are not part of the source, in bytewise order of the paths.
    pub left_out: Vec<LeftOut>,
    /// Notes for the user on how the weights were read, a sentence each.
    pub notes: Vec<String>,
}

/// A small file that travels with the weights: config, tokenizer, README, the sharding index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideFile {
    /// The path relative to the source, `/`-separated; see [`check_path`].
    pub path: String,
    /// Where to read it.
    pub file: PathBuf,
    /// Its length in bytes when it was found; at most 256 MiB, except by
    /// [`Sources::open_all_files`](crate::Sources::open_all_files).
    pub length: u64,
}

impl From<Found> for SideFile {
    fn from(Found { path, file, length, .. }: Found) -> Self {
        Self { path, file, length }
    }
}

impl Source {
    /// Opens a safetensors file, or a folder.
    ///
    /// A folder is searched with its subfolders. If a folder has a `*.safetensors.index.json`, its
    /// weights are the files that the index names, and other safetensors files beside the index are
    /// left out; without an index, they are all its safetensors files. In a model's entry in the
    /// cache of the Hub (`models--org--name`), the snapshot that `refs/main` names is used, or else
    /// the only one. Every weights file stays open until the source is dropped. The cost grows with
    /// the number of files and the length of their headers.
    ///
    /// If a folder holds a checkpoint of the official `DFloat11` package, recognised by its
    /// tensors, its files become one: the BF16 file from which the checkpoint was made, decoded on
    /// reading. This needs the checkpoint's `config.json`, also beside a single file. Matrices
    /// whose shapes cannot be inferred have one dimension then, and [`notes`](Self::notes) say so.
    ///
    /// # Errors
    /// [`Error::Parameter`] if there are no weights, a file named by an index is missing, a link
    /// leads out of the folder (except from a snapshot of the Hub's cache to its blobs), two files
    /// have a tensor of the same name, or an entry of the cache has several snapshots;
    /// [`Error::Corrupt`] if an index is damaged or disagrees with its files; those of
    /// [`WeightsFile::parse`]; [`Error::Io`] if a file or folder cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_variant(path, None)
    }

    /// Like [`Source::open`], with the weights of a variant (`model.fp16.safetensors`) if there is
    /// one.
    ///
    /// # Errors
    /// Like [`Source::open`], and [`Error::Parameter`] if no file is of the variant, or a file was
    /// named instead of a folder.
    pub fn open_variant(path: &Path, variant: Option<&str>) -> Result<Self> {
        check_local(path)?;
        let metadata =
            std::fs::metadata(path).map_err(|source| Error::io("opening", path, source))?;
        if !metadata.is_dir() {
            if variant.is_some() {
                let problem = format!("{} is one file, and has no variants", path.display());
                let remedy = "name the file of the variant, or the folder";
                return Err(Error::parameter(problem, remedy));
            }
            let root = path.parent().unwrap_or(Path::new(""));
            return Ok(open_file(path)?.complete(root)?.noted(None));
        }
        let (root, note) = hub_cache::snapshot(path)?;
        let (found, left_out) = walk(&root)?;
        index::check_variant(&found, variant)?;
        Ok(Self::of_files(&root, found, left_out, variant)?.noted(note))
    }

    /// Takes the files that were left out of those found.
    pub(super) fn take_left_out(&mut self, found: Vec<Found>) -> Result<()> {
        let of_weights = self.weights.iter().flat_map(|file| &file.tensors);
        let mut names: HashSet<String> = of_weights.map(|tensor| tensor.name.clone()).collect();
        for file in found {
            let is_it = |left: &LeftOut| left.path == file.path && left.reason != JOINED_INDEX;
            let Some(at) = self.left_out.iter().position(is_it) else { continue };
            file.check_inside()?;
            self.left_out.remove(at);
            if is_safetensors(&file.path) {
                match open_beside(&file, &names) {
                    Ok(weights) => {
                        names.extend(weights.tensors.iter().map(|tensor| tensor.name.clone()));
                        self.weights.push(weights);
                        continue;
                    }
                    Err(why) => self.notes.push(format!("{} is not compressed: {why}", file.path)),
                }
            }
            self.side.push(file.into());
        }
        self.weights.sort_by(|a, b| a.path.cmp(&b.path));
        self.side.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(())
    }

    /// The model in a folder of which [`walk`] has given this; the variant is there.
    pub(super) fn of_files(
        folder: &Path,
        found: Vec<Found>,
        left_out: Vec<LeftOut>,
        variant: Option<&str>,
    ) -> Result<Self> {
        let source = open_files(found, left_out, variant)?;
        if source.weights.is_empty() {
            let problem = format!("{} holds no safetensors files", folder.display());
            let remedy = "name a .safetensors file or the folder of a model; convert other \
                          formats to safetensors first";
            return Err(Error::parameter(problem, remedy));
        }
        source.complete(folder)
    }

    /// Puts this note first, then one if little of it will be coded.
    pub(super) fn noted(mut self, note: Option<String>) -> Self {
        self.notes.splice(0..0, note.into_iter().chain(little_to_code(&self.weights)));
        self
    }

    /// Reads checkpoints of other packages as what they were made from, and adds notes.
    fn complete(mut self, root: &Path) -> Result<Self> {
        self.notes.extend(dfloat11::import(&mut self.weights, root)?);
        self.check_names()?;
        let is_bf16 = |file: &LeftOut| file.reason == index::variant_reason("bf16");
        if is_little_bf16(&self.weights) && self.left_out.iter().any(is_bf16) {
            let note = "a BF16 variant of these weights was left out: --variant bf16 takes it";
            self.notes.push(note.to_owned());
        }
        let weights = self.weights.iter().map(|file| &*file.path);
        let configs = configs(weights, self.side.iter().map(|side| &*side.path));
        for side in self.side.iter().filter(|side| configs.contains(&*side.path)) {
            self.notes.extend(quantized_already(side)?);
        }
        Ok(self)
    }

    /// Tensor names are unique over all files, since a container finds tensors by name.
    fn check_names(&self) -> Result<()> {
        let mut owners = HashMap::new();
        for file in &self.weights {
            for tensor in &file.tensors {
                let (name, path) = (tensor.name.as_str(), &file.path);
                if let Some(other) = owners.insert(name, path) {
                    let problem = format!("{other} and {path} both have a tensor {name:?}");
                    let remedy = "compress each of them, or each component folder, on its own";
                    return Err(Error::parameter(problem, remedy));
                }
            }
        }
        Ok(())
    }
}

fn open_file(path: &Path) -> Result<Source> {
    let name =
        path.file_name().and_then(|name| name.to_str()).filter(|name| check_path(name).is_ok());
    let name = name.ok_or_else(|| {
        Error::parameter(
            format!("{} is not a portable file name", path.display()),
            "rename the file",
        )
    })?;
    if index::is_index(name) {
        let problem = format!("{name} is an index and holds no weights");
        return Err(Error::parameter(problem, "name its folder"));
    }
    if is_other_format(name) {
        let problem = format!("{name} is not a safetensors file");
        return Err(Error::parameter(problem, "convert it to safetensors first"));
    }
    let weights = vec![WeightsFile::open(path, name)?];
    Ok(Source { weights, side: Vec::new(), left_out: Vec::new(), notes: Vec::new() })
}

/// Opens a weights file whose tensors have other names than these, or returns the reason why it is
/// not one.
fn open_beside(file: &Found, names: &HashSet<String>) -> Result<WeightsFile, String> {
    let weights = WeightsFile::open(&file.file, &file.path).map_err(|error| error.to_string())?;
    match weights.tensors.iter().find(|tensor| names.contains(&tensor.name)) {
        None => Ok(weights),
        Some(tensor) => Err(format!("another file has a tensor {:?} too", tensor.name)),
    }
}

/// A model is made of all its files: refuses what is there and cannot be read, and an index that
/// was left out and is not hidden, since it tells which weights there are.
fn check_readable(left_out: &[LeftOut]) -> Result<()> {
    let is_lost = |file: &&LeftOut| {
        file.reason == UNREADABLE || (file.reason != HIDDEN && index::is_index(&file.path))
    };
    let Some(LeftOut { path, reason }) = left_out.iter().find(is_lost) else { return Ok(()) };
    let remedy = "download the file again, or remove it if it is not part of the model";
    Err(Error::parameter(format!("{path:?}: {reason}"), remedy))
}

/// A source of the files of a folder, which may have no weights.
pub(super) fn open_files(
    found: Vec<Found>,
    mut left_out: Vec<LeftOut>,
    variant: Option<&str>,
) -> Result<Source> {
    check_readable(&left_out)?;
    let (found, others) = index::choose_variant(found, variant)?;
    left_out.extend(others);
    let mut indexes = index::read_all(&found)?;
    // Their loader takes all files; an index, if there is one, knows only those that were not
    // coded.
    let imported = dfloat11::folders(&found);
    indexes.retain(|folder, _| !imported.contains(folder));
    let present = found.iter().map(|file| file.path.as_str()).collect();
    indexes.values().try_for_each(|index| index.check_files(&present))?;
    let named: BTreeSet<&str> =
        indexes.values().flat_map(|index| index.files.keys()).map(String::as_str).collect();

    let (mut weights, mut side) = (Vec::new(), Vec::new());
    for file in found {
        if let Some(reason) = why_not(&file, &named, &indexes, &imported) {
            left_out.push(LeftOut { path: file.path, reason });
            continue;
        }
        file.check_inside()?;
        if named.contains(file.path.as_str()) || is_safetensors(&file.path) {
            weights.push(WeightsFile::open(&file.file, &file.path)?);
        } else {
            side.push(file.into());
        }
    }
    indexes.values().try_for_each(|index| index.check(&weights))?;
    left_out.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(Source { weights, side, left_out, notes: Vec::new() })
}

/// The reason why a file is not part of the source, if it is not.
fn why_not(
    file: &Found,
    named: &BTreeSet<&str>,
    indexes: &BTreeMap<String, Index>,
    imported: &BTreeSet<String>,
) -> Option<String> {
    let folder = folder_of(&file.path);
    if index::is_index(&file.path) && imported.contains(folder) {
        Some(JOINED_INDEX.to_owned())
    } else if named.contains(file.path.as_str()) {
        None
    } else if is_safetensors(&file.path) {
        indexes.get(folder).map(|index| format!("not named by {}", index.path))
    } else if is_other_format(&file.path) {
        Some("weights in another format".to_owned())
    } else {
        let is_large = file.length > MAX_SIDE_BYTES;
        is_large.then(|| format!("larger than {} MiB", MAX_SIDE_BYTES >> 20))
    }
}

pub(super) fn is_other_format(path: &str) -> bool {
    let extension = Path::new(path).extension().and_then(|extension| extension.to_str());
    extension
        .is_some_and(|extension| OTHER_FORMATS.contains(&extension.to_ascii_lowercase().as_str()))
}

/// Whether less than half of the weights' bytes are BF16.
fn is_little_bf16(weights: &[WeightsFile]) -> bool {
    let tensors = || weights.iter().flat_map(|file| &file.tensors);
    let bf16 = tensors().filter(|tensor| tensor.dtype == Dtype::BF16);
    let total: u64 = tensors().map(|tensor| tensor.length).sum();
    bf16.map(|tensor| tensor.length).sum::<u64>() < total.div_ceil(2)
}

/// Notes that less than half of the weights' bytes are floats that are coded.
pub(super) fn little_to_code<'a>(
    weights: impl IntoIterator<Item = &'a WeightsFile>,
) -> Option<String> {
    let mut others: BTreeMap<&str, u64> = BTreeMap::new();
    let mut coded = 0;
    for tensor in weights.into_iter().flat_map(|file| &file.tensors) {
        if is_coded(tensor.dtype) {
            coded += tensor.length;
        } else {
            *others.entry(tensor.dtype.name()).or_default() += tensor.length;
        }
    }
    let total = coded + others.values().sum::<u64>();
    if total == 0 || coded >= total.div_ceil(2) {
        return None;
    }
    let (most, _) = others.into_iter().max_by_key(|&(_, count)| count)?;
    let how_much = match coded {
        0 => "none of the weights are floats that df11 compresses".to_owned(),
        _ => format!(
            "only {:.1} % of the weights' bytes are floats that df11 compresses",
            100.0 * coded as f64 / total as f64
        ),
    };
    Some(format!(
        "{how_much} (most are {most}): everything else is stored unchanged. df11 compresses BF16, \
        F16, F32, F8_E4M3 and F8_E5M2. Compress the checkpoint that these weights were made from, \
        if it has such floats"
    ))
}

/// Quantizations whose weights stay compressed beside their own code.
pub(crate) const KEPT_QUANTIZATIONS: [&str; 2] = ["fp8", "compressed-tensors"];

/// Notes that a configuration names another quantization, and what that means for loading.
fn quantized_already(side: &SideFile) -> Result<Option<String>> {
    if side.length > MAX_CONFIG_BYTES {
        return Ok(None);
    }
    let bytes = read_regular(&side.file, MAX_CONFIG_BYTES)?;
    let Ok(config) = serde_json::from_slice::<Value>(&bytes) else { return Ok(None) };
    let Some(named) = config.get("quantization_config") else { return Ok(None) };
    let method = named.get("quant_method").and_then(Value::as_str);
    let outcome = match method {
        Some("df11") => return Ok(None),
        Some(method) if KEPT_QUANTIZATIONS.contains(&method) => {
            "transformers and vLLM load such a folder by that quantization's own code, and weights \
            that it leaves in FP8 stay compressed in memory"
        }
        Some(_) if config.get("_class_name").is_none() => {
            "transformers and vLLM load such a folder by that quantization's own code, and all \
            weights are decoded meanwhile"
        }
        Some(_) => {
            "diffusers will not load the compressed weights; compress the BF16 model that it was \
            made from to get one that loads; df11 decompress restores this one, byte for byte"
        }
        None => {
            "from_pretrained of transformers will not load the compressed weights; remove it from \
            the file to get a folder that loads"
        }
    };
    Ok(Some(format!(
        "{} already has a quantization_config ({}), which df11 keeps: {outcome}",
        side.path,
        method.unwrap_or("without a method")
    )))
}
