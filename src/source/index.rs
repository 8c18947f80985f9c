//! Chooses the weights files of a folder, by the sharding index (`{"metadata": …, "weight_map":
//! {tensor: file}}`) and by variants. A variant is a copy of the weights in another dtype, marked
//! by a word in the file's name, as in `model.fp16.safetensors`; transformers and diffusers load it
//! if the caller passes `variant="fp16"`.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    path::Path,
    sync::LazyLock,
};

use regex_lite::Regex;
use serde::Deserialize;

use super::{
    header,
    safetensors::WeightsFile,
    walk::{Found, LeftOut, MAX_SIDE_BYTES},
};
use crate::{
    Error, Result,
    io::read_regular,
    paths::{check_path, folder_of, has_extension},
};

/// Paths of weights files that may have variants, and of their indexes: folder and stem, and the
/// variant, before or after `-00001-of-00003` or `.index`.
static WEIGHTS_NAME: LazyLock<Regex> = LazyLock::new(|| {
    let number = r"-\d{5}-of-\d{5}";
    let file = format!(r"(?:{number}(?:\.([^.]+))?|(?:\.([^.]+?))?(?:{number})?)\.safetensors");
    let index = r"\.safetensors(?:\.index(?:\.([^.]+))?|\.([^.]+)\.index)\.json";
    let pattern = format!("^((?:.*/)?(?:diffusion_pytorch_model|model))(?:{file}|{index})$");
    Regex::new(&pattern).expect("a pattern that is tested")
});

/// The folder and stem of a file, and its variant; `None` for names that have none.
fn parse(path: &str) -> Option<(&str, Option<&str>)> {
    let found = WEIGHTS_NAME.captures(path)?;
    let variant = (2..6).find_map(|word| found.get(word)).map(|word| word.as_str());
    Some((found.get(1)?.as_str(), variant))
}

/// How the name of an index ends.
const SUFFIX: &str = ".safetensors.index.json";
/// The index that counts if a folder has several: the one that the transformers library looks
/// for.
const DEFAULT: &str = "model.safetensors.index.json";

/// Whether a path is that of an index, also of a variant.
pub(super) fn is_index(path: &str) -> bool {
    path.ends_with(SUFFIX)
        || has_extension(path, "json") && parse(path).is_some_and(|(_, variant)| variant.is_some())
}

/// An index, with every path relative to the source.
pub(super) struct Index {
    pub(super) path: String,
    /// File → the tensors that it must hold.
    pub(super) files: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
struct IndexJson {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads and validates an index; the cost grows with its length.
    pub(super) fn read(found: &Found) -> Result<Self> {
        let what = format_args!("{}: its length in bytes", found.path);
        Error::check_limit(what, found.length, MAX_SIDE_BYTES)?;
        Self::parse(&found.path, &read_regular(&found.file, MAX_SIDE_BYTES)?)
    }

    fn parse(path: &str, bytes: &[u8]) -> Result<Self> {
        let invalid = |error| Error::corrupt(path, 0, format!("not a sharding index: {error}"));
        let json: IndexJson = header::from_slice(bytes).map_err(invalid)?;
        let mut files = BTreeMap::<String, Vec<String>>::new();
        for (tensor, file) in json.weight_map {
            if check_path(&file).is_err() {
                let problem = format!(
                    "it places a tensor in {file:?}, which is not a path inside its folder"
                );
                return Err(Error::corrupt(path, 0, problem));
            }
            files.entry(format!("{}{file}", folder_of(path))).or_default().push(tensor);
        }
        Ok(Self { path: path.to_owned(), files })
    }

    /// Checks that each file holds what the index places in it.
    pub(super) fn check(&self, weights: &[WeightsFile]) -> Result<()> {
        for (path, tensors) in &self.files {
            let Some(file) = weights.iter().find(|file| file.path == *path) else { continue };
            let names: HashSet<_> =
                file.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            if let Some(tensor) = tensors.iter().find(|tensor| !names.contains(tensor.as_str())) {
                let problem = format!("it places {tensor:?} in {path}, which has no such tensor");
                return Err(Error::corrupt(&self.path, 0, problem).remedied("download both again"));
            }
        }
        Ok(())
    }

    /// Checks that the folder has every file that the index names.
    pub(super) fn check_files(&self, present: &BTreeSet<&str>) -> Result<()> {
        let missing = self.files.keys().find(|file| !present.contains(file.as_str()));
        let Some(file) = missing else { return Ok(()) };
        if present.contains(&*Path::new(file).with_extension("df11").to_string_lossy()) {
            let problem = format!("{file} is already compressed");
            return Err(Error::parameter(problem, "name the folder of one model"));
        }
        let problem = format!("{} names {file}, which is missing", self.path);
        let remedy = "download the missing file, or name a single file instead of the folder";
        Err(Error::parameter(problem, remedy))
    }
}

/// The index that counts for each folder that has one, keyed by the folder with its trailing `/`.
pub(super) fn read_all(found: &[Found]) -> Result<BTreeMap<String, Index>> {
    let mut candidates = BTreeMap::<&str, Vec<&Found>>::new();
    for file in found.iter().filter(|file| is_index(&file.path)) {
        candidates.entry(folder_of(&file.path)).or_default().push(file);
    }
    let choose = |(folder, files): (&str, Vec<&Found>)| {
        let chosen = match files[..] {
            [only] => Some(only),
            _ => files.iter().copied().find(|file| file.path[folder.len()..] == *DEFAULT),
        };
        let chosen = chosen.ok_or_else(|| {
            let problem = format!("{} and {} divide the same folder", files[0].path, files[1].path);
            let remedy = "move one of them, and the files that it names, to a folder of its own";
            Error::parameter(problem, remedy)
        })?;
        Ok((folder.to_owned(), Index::read(chosen)?))
    };
    candidates.into_iter().map(choose).collect()
}

/// Returns the model's *other* weights files: they lie in a folder with an index that does not name
/// them, so that loaders pass over them. `read` gives a side file's bytes. An index that
/// cannot be parsed names none, and makes no file another one.
pub(crate) fn others(
    weights: &[&str],
    side: &[&str],
    mut read: impl FnMut(usize) -> Result<Vec<u8>>,
) -> Result<Vec<bool>> {
    let mut others = vec![false; weights.len()];
    for (at, path) in side.iter().enumerate().filter(|(_, path)| is_index(path)) {
        let folder = folder_of(path);
        let here = |other: &&&str| folder_of(other) == folder && is_index(other);
        let is_chosen = path[folder.len()..] == *DEFAULT || side.iter().filter(here).count() == 1;
        let in_folder = weights.iter().filter(|file| folder_of(file) == folder).count();
        if !is_chosen || in_folder < 2 {
            continue;
        }
        let Ok(index) = Index::parse(path, &read(at)?) else { continue };
        for (file, is_other) in weights.iter().zip(&mut others) {
            *is_other |= folder_of(file) == folder && !index.files.contains_key(*file);
        }
    }
    Ok(others)
}

/// Weights files that the indexes of a folder name. Indexes that cannot be read name none.
pub(crate) fn named_files(found: &[Found]) -> BTreeSet<String> {
    let indexes = found.iter().filter(|file| is_index(&file.path));
    indexes
        .filter_map(|file| Index::read(file).ok())
        .flat_map(|index| index.files.into_keys())
        .collect()
}

/// Leaves out of the files of a folder those of variants that are not wanted.
///
/// Takes the wanted variant of each folder and stem if it is there, else the files without a
/// variant, else the only variant, as diffusers does.
///
/// # Errors
/// [`Error::Parameter`] if several variants are there and nothing tells which.
pub(super) fn choose_variant(
    found: Vec<Found>,
    wanted: Option<&str>,
) -> Result<(Vec<Found>, Vec<LeftOut>)> {
    let mut groups: BTreeMap<&str, BTreeSet<Option<&str>>> = BTreeMap::new();
    for (group, variant) in found.iter().filter_map(|file| parse(&file.path)) {
        groups.entry(group).or_default().insert(variant);
    }
    let mut chosen = BTreeMap::new();
    for (group, variants) in groups {
        let choice = match variants.first() {
            _ if wanted.is_some() && variants.contains(&wanted) => wanted,
            Some(&first) if first.is_none() || variants.len() == 1 => first,
            _ => {
                let names: Vec<&str> = variants.into_iter().flatten().collect();
                let names = names.join(", ");
                let problem =
                    format!("{group}: there are the variants {names}, and no other files");
                return Err(Error::parameter(problem, "choose one with --variant"));
            }
        };
        chosen.insert(group, choice);
    }
    let why_not = |file: &Found| {
        let (group, variant) = parse(&file.path)?;
        match (variant, chosen[group]) {
            (variant, choice) if variant == choice => None,
            (Some(variant), _) => Some(variant_reason(variant)),
            (None, choice) => {
                Some(format!("the variant {} is taken instead", choice.unwrap_or_default()))
            }
        }
    };
    let reasons: Vec<Option<String>> = found.iter().map(why_not).collect();
    let (mut taken, mut left_out) = (Vec::new(), Vec::new());
    for (file, reason) in found.into_iter().zip(reasons) {
        match reason {
            None => taken.push(file),
            Some(reason) => left_out.push(LeftOut { path: file.path, reason }),
        }
    }
    Ok((taken, left_out))
}

/// Checks that a requested variant exists.
///
/// # Errors
/// [`Error::Parameter`] with those that are.
pub(super) fn check_variant(found: &[Found], wanted: Option<&str>) -> Result<()> {
    let Some(wanted) = wanted else { return Ok(()) };
    let names: BTreeSet<&str> = found.iter().filter_map(|file| parse(&file.path)?.1).collect();
    if names.contains(wanted) {
        return Ok(());
    }
    let mut problem = format!("no weights file is of the variant {wanted}");
    if !names.is_empty() {
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        problem = format!("{problem}, only of {names}");
    }
    Err(Error::parameter(problem, "leave --variant out to take the default weights"))
}

/// Why the files of a variant are left out.
pub(super) fn variant_reason(variant: &str) -> String {
    format!("the variant {variant}; --variant {variant} takes it")
}

#[cfg(test)]
mod tests {
    use super::{is_index, parse};

    #[test]
    fn names_tell_their_variant() {
        let model = |variant| Some(("model", variant));
        for (name, expected) in [
            ("model.safetensors", model(None)),
            ("model-00001-of-00002.safetensors", model(None)),
            ("model.safetensors.index.json", model(None)),
            ("model.fp16.safetensors", model(Some("fp16"))),
            ("model.fp16-00001-of-00002.safetensors", model(Some("fp16"))),
            ("model-00001-of-00002.fp16.safetensors", model(Some("fp16"))),
            ("model.safetensors.index.fp16.json", model(Some("fp16"))),
            ("model.safetensors.fp16.index.json", model(Some("fp16"))),
            (
                "diffusion_pytorch_model.non_ema.safetensors",
                Some(("diffusion_pytorch_model", Some("non_ema"))),
            ),
            ("model_index.json", None),
            ("model.a.b.safetensors", None),
            ("model..safetensors", None),
            ("model-lora.safetensors", None),
            ("other.fp16.safetensors", None),
            ("modelé-of-00002.safetensors", None),
        ] {
            assert_eq!(parse(name), expected, "{name}");
        }
        assert_eq!(parse("unet/model.safetensors"), Some(("unet/model", None)));
        assert!(is_index("unet/model.safetensors.index.fp16.json"));
        assert!(is_index("a/model.safetensors.index.json") && is_index("x.safetensors.index.json"));
        assert!(!is_index("model.fp16.safetensors") && !is_index("model.fp16.json"));
    }
}
