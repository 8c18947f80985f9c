//! The line in config.json by which transformers knows that a folder's weights are compressed.
//!
//! ```text
//! {                                                              the original's bytes, up to its first brace
//!   "quantization_config": {"quant_method": "df11"},             MARK, at most once more than the original has it
//!   "architectures": ["LlamaForCausalLM"], …                     the rest of the original
//! ```
//! A folder of containers has it, and nothing else: restoring and converting read the original. So that every original comes
//! back, one that begins with the mark itself gets another, which JSON reads as one.

use std::path::{Path, PathBuf};

use super::{
    folder::OutputFolder,
    input::{Input, Place},
};
use crate::{
    Result,
    io::read_regular,
    source::{MAX_SIDE_BYTES, folder_of},
};

const MARK: &str = "\n  \"quantization_config\": {\"quant_method\": \"df11\"},";
const NAME: &str = "config.json";

/// Whether this is the configuration of weights, given their files' paths: it lies beside them.
fn is_config<'a>(path: &str, mut weights: impl Iterator<Item = &'a str>) -> bool {
    path.strip_prefix(folder_of(path)) == Some(NAME)
        && weights.any(|weights| folder_of(weights) == folder_of(path))
}

/// Where the mark goes: behind the first brace.
fn place(config: &[u8]) -> Option<usize> {
    let brace = config.iter().position(|byte| !byte.is_ascii_whitespace())?;
    (config[brace] == b'{').then_some(brace + 1)
}

/// A configuration of transformers that names no quantization, or one that begins with a mark, with one more.
fn mark(config: &[u8]) -> Option<Vec<u8>> {
    let place = place(config)?;
    if !config[place..].starts_with(MARK.as_bytes()) {
        let json: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(config).ok()?;
        if !json.get("model_type")?.is_string() || json.contains_key("quantization_config") {
            return None;
        }
    }
    Some([&config[..place], MARK.as_bytes(), &config[place..]].concat())
}

/// What [`mark`] was given, if this came from it.
fn unmark(config: &[u8]) -> Option<Vec<u8>> {
    let place = place(config)?;
    let rest = config[place..].strip_prefix(MARK.as_bytes())?;
    Some([&config[..place], rest].concat())
}

/// The original of a side file beside containers, where it is another than the file; `weights` are the paths of the original weights.
pub(super) fn original<'a>(
    path: &str,
    file: &Path,
    length: u64,
    weights: impl Iterator<Item = &'a str>,
) -> Result<Option<Vec<u8>>> {
    if length > MAX_SIDE_BYTES + MARK.len() as u64 || !is_config(path, weights) {
        return Ok(None);
    }
    Ok(unmark(&read_regular(file)?))
}

/// Puts the side files beside the containers, each configuration with its mark.
pub(super) fn write_side_files(input: &Input<'_>, folder: &OutputFolder) -> Result<()> {
    for side in &input.side {
        if is_config(&side.path, input.weights.iter().map(|weights| weights.file.path.as_str())) {
            let config = side.read()?;
            folder.write(mark(&config).as_deref().unwrap_or(&config), &side.path)?;
        } else {
            side.write_into(folder)?;
        }
    }
    Ok(())
}

/// Where a side file of a folder of containers comes from.
pub(super) fn place_of<'a, 's>(
    path: &str,
    file: PathBuf,
    length: u64,
    weights: impl Iterator<Item = &'a str>,
) -> Result<(u64, Place<'s>)> {
    Ok(match original(path, &file, length, weights)? {
        Some(bytes) => (bytes.len() as u64, Place::Memory(bytes)),
        None => (length, Place::Disk(file)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(config: &str) -> Option<String> {
        mark(config.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn every_configuration_that_is_marked_comes_back() {
        for config in [
            "{\"model_type\":\"llama\"}",
            "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\"\n}\n",
            "\r\n { \"model_type\" : \"llama\" } ",
            &format!("{{{MARK}\"model_type\": \"llama\"}}"),
            &format!("{{{MARK}{MARK}\"model_type\": \"llama\"}}"),
            // Nonsense that begins as if it were marked.
            &format!("{{{MARK}"),
        ] {
            let marked = marked(config).unwrap();
            assert_eq!(unmark(marked.as_bytes()).unwrap(), config.as_bytes());
            if let Ok(json) = serde_json::from_str::<serde_json::Value>(&marked) {
                assert_eq!(json["quantization_config"]["quant_method"], "df11");
                assert_eq!(json["model_type"], "llama");
            }
        }
    }

    #[test]
    fn other_files_stay_as_they_are() {
        for config in [
            "",
            "{}",
            "[{\"model_type\": \"llama\"}]",
            "{\"model_type\": 1}",
            "{\"text_config\": {\"model_type\": \"llama\"}}",
            "{\"model_type\": \"llama\", \"quantization_config\": {\"quant_method\": \"fp8\"}}",
            "{\"model_type\": \"llama\", \"quantization_config\": null}",
            "{\"model_type\": \"llama\"",
            "\u{feff}{\"model_type\": \"llama\"}",
        ] {
            assert_eq!(marked(config), None, "{config}");
            assert_eq!(unmark(config.as_bytes()), None, "{config}");
        }
    }

    #[test]
    fn a_configuration_lies_beside_its_weights() {
        let weights = ["text_encoder/model.safetensors", "unet/a.safetensors"];
        for (path, expected) in [
            ("text_encoder/config.json", true),
            ("unet/config.json", true),
            ("config.json", false),
            ("unet/generation_config.json", false),
            ("unet/a/config.json", false),
        ] {
            assert_eq!(is_config(path, weights.into_iter()), expected, "{path}");
        }
        assert!(is_config("config.json", ["model.safetensors"].into_iter()));
    }
}
