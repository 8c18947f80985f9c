//! Variants: copies of the same weights in another dtype, which transformers and diffusers tell by
//! a word in the file's name, as `model.fp16.safetensors`, and load if `variant="fp16"` is asked
//! for.

use std::collections::{BTreeMap, BTreeSet};

use super::walk::{Found, LeftOut};
use crate::{
    Error, Result,
    paths::{folder_of, has_extension},
};

/// What the names of weights files begin with that may have variants.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];

/// Where a name says that its file is one of several: `-00001-of-00003`.
const NUMBER: &str = "-00000-of-00000";

/// The stem of a weights file or an index, and its variant; `None` for other names.
fn parse(name: &str) -> Option<(&'static str, Option<&str>)> {
    let (stem, rest) = STEMS.iter().find_map(|stem| Some((*stem, name.strip_prefix(stem)?)))?;
    let word =
        rest.strip_suffix(".safetensors").map(without_number).or_else(|| index_word(rest))?;
    match word.strip_prefix('.') {
        None if word.is_empty() => Some((stem, None)),
        Some(word) if !word.is_empty() && !word.contains('.') => Some((stem, Some(word))),
        _ => None,
    }
}

/// The folder and stem of a file, and its variant; `None` for names that have none.
fn parse_path(path: &str) -> Option<((&str, &'static str), Option<&str>)> {
    let (folder, name) = path.split_at(folder_of(path).len());
    parse(name).map(|(stem, variant)| ((folder, stem), variant))
}

/// What stands before or after the number, of which one is empty.
fn without_number(text: &str) -> &str {
    let is_number = |part: &str| {
        let same = |(a, b): (u8, u8)| if b == b'0' { a.is_ascii_digit() } else { a == b };
        part.len() == NUMBER.len() && part.bytes().zip(NUMBER.bytes()).all(same)
    };
    let cut = text.len().checked_sub(NUMBER.len());
    if let Some((before, _)) =
        cut.and_then(|at| text.split_at_checked(at)).filter(|(_, end)| is_number(end))
    {
        return before;
    }
    match text.split_at_checked(NUMBER.len()) {
        Some((start, after)) if is_number(start) => after,
        _ => text,
    }
}

/// The same for what follows the stem in an index's name.
fn index_word(rest: &str) -> Option<&str> {
    let middle = rest.strip_prefix(".safetensors")?.strip_suffix(".json")?;
    middle.strip_prefix(".index").or_else(|| middle.strip_suffix(".index"))
}

/// Whether a path is that of the index of a variant.
pub(super) fn is_index(path: &str) -> bool {
    has_extension(path, "json") && parse_path(path).is_some_and(|(_, variant)| variant.is_some())
}

/// Leaves out of the files of a folder those of variants that are not wanted.
///
/// Of each folder and stem the wanted variant is taken if it is there, else the files without a
/// variant, else the only variant: what diffusers loads.
///
/// # Errors
/// [`Error::Parameter`] if several variants are there and nothing tells which.
pub(super) fn choose(
    found: Vec<Found>,
    wanted: Option<&str>,
) -> Result<(Vec<Found>, Vec<LeftOut>)> {
    let mut groups: BTreeMap<_, BTreeSet<Option<&str>>> = BTreeMap::new();
    for (group, variant) in found.iter().filter_map(|file| parse_path(&file.path)) {
        groups.entry(group).or_default().insert(variant);
    }
    let mut chosen = BTreeMap::new();
    for ((folder, stem), variants) in groups {
        let choice = match variants.first() {
            _ if wanted.is_some() && variants.contains(&wanted) => wanted,
            Some(&first) if first.is_none() || variants.len() == 1 => first,
            _ => return Err(undecided(&format!("{folder}{stem}"), &variants)),
        };
        chosen.insert((folder, stem), choice);
    }
    let why_not = |file: &Found| {
        let (group, variant) = parse_path(&file.path)?;
        match (variant, chosen[&group]) {
            (variant, choice) if variant == choice => None,
            (Some(variant), _) => Some(reason(variant)),
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

fn undecided(place: &str, variants: &BTreeSet<Option<&str>>) -> Error {
    let names: Vec<&str> = variants.iter().copied().flatten().collect();
    let problem =
        format!("{place}: there are the variants {}, and no other files", names.join(", "));
    Error::parameter(problem, "choose one with --variant")
}

/// Checks that a variant that is asked for is there.
///
/// # Errors
/// [`Error::Parameter`] with those that are.
pub(super) fn check(found: &[Found], wanted: Option<&str>) -> Result<()> {
    let Some(wanted) = wanted else { return Ok(()) };
    let names: BTreeSet<&str> = found.iter().filter_map(|file| parse_path(&file.path)?.1).collect();
    if names.contains(wanted) {
        return Ok(());
    }
    let there = if names.is_empty() {
        "there are none".to_owned()
    } else {
        format!("there are {}", names.into_iter().collect::<Vec<_>>().join(", "))
    };
    let remedy = format!("{there}; leave --variant out for what loads without one");
    Err(Error::parameter(format!("no weights file is of the variant {wanted}"), remedy))
}

/// Why the files of a variant are left out.
pub(super) fn reason(variant: &str) -> String {
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
        assert!(is_index("unet/model.safetensors.index.fp16.json"));
        assert!(!is_index("model.safetensors.index.json") && !is_index("model.fp16.safetensors"));
    }
}
