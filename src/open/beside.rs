//! Files beside the containers of a folder: side files (spec/format.md, section 8), and the model
//! card, which is not an original file and must not be restored as one.
//!
//! The directory records length and hash of each original side file. The file on disk may differ: a
//! line in `config.json`, the mark, tells transformers and diffusers that the weights are
//! compressed. A file that already begins with the mark gets a second one, so that every original
//! can be restored; JSON readers take both as one key.
//!
//! ```text
//! {                                                    the original, up to its first brace
//!   "quantization_config": {"quant_method": "df11"},   MARK
//!   "architectures": ["LlamaForCausalLM"], …           the rest of the original
//! ```
//!
//! The last line of a card holds a seal, by which readers recognise a card that nobody has edited.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind::{NotADirectory, NotFound},
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::original::{OriginalFile, hash};
use crate::{
    Error, Result,
    io::{FileReader, ReadAt, read_regular},
    paths::CONFIG,
    source::MAX_SIDE_BYTES,
};

/// The line in `config.json`.
const MARK: &str = "\n  \"quantization_config\": {\"quant_method\": \"df11\"},";

/// The most bytes that a file on disk has more than the original.
#[cfg(feature = "remote")]
pub(super) const MARK_BYTES: u64 = MARK.len() as u64;

/// The file at the place of a recorded side file.
pub(crate) enum Beside {
    /// The original.
    Original(PathBuf),
    /// A file that is the original except for the mark; these are the original's bytes.
    Marked(Vec<u8>),
    /// A file with other bytes.
    Changed(PathBuf),
    /// No file.
    Missing,
}

impl Beside {
    /// The error for what is not the original of this file.
    pub(crate) fn refused(&self, file: OriginalFile<'_>) -> Error {
        let problem = match self {
            Self::Missing => "it is missing beside the containers",
            _ => "it was changed after the model was compressed",
        };
        Error::corrupt(format!("file {:?}", file.path()), 0, problem)
            .remedied("fetch it again, or see --keep-changed of decompress")
            .in_file(file.shard().path())
    }
}

/// Looks for a recorded side file in the folder of its model, and compares its hash.
pub(crate) fn find(root: &Path, recorded: OriginalFile<'_>) -> Result<Beside> {
    let (path, length, wanted) = (recorded.path(), recorded.length(), recorded.record().hash);
    let file = root.join(path);
    let metadata = match fs::metadata(&file) {
        Ok(metadata) if metadata.is_file() => metadata,
        Ok(_) => return Ok(Beside::Missing),
        Err(error) if matches!(error.kind(), NotFound | NotADirectory) => {
            return Ok(Beside::Missing);
        }
        Err(error) => return Err(Error::io("looking at", &file, error)),
    };
    if metadata.len() == length && hash_file(&file)? == wanted {
        return Ok(Beside::Original(file));
    }
    let is_marked = path.rsplit('/').next() == Some(CONFIG)
        && length <= MAX_SIDE_BYTES
        && metadata.len() == length + MARK.len() as u64;
    if is_marked {
        let bytes = read_regular(&file, MAX_SIDE_BYTES + MARK.len() as u64)?;
        let original = unmark(&bytes).filter(|bytes| blake3::hash(bytes) == wanted);
        if let Some(original) = original {
            return Ok(Beside::Marked(original));
        }
    }
    Ok(Beside::Changed(file))
}

fn hash_file(path: &Path) -> Result<blake3::Hash> {
    let reader = FileReader::open(path)?;
    let mut hasher = blake3::Hasher::new();
    reader.stream(reader.size(), |bytes| {
        hash(&mut hasher, bytes);
        Ok(())
    })?;
    Ok(hasher.finalize())
}

/// Where the mark goes: after the first brace.
fn place(config: &[u8]) -> Option<usize> {
    let brace = config.iter().position(|byte| !b" \t\n\r".contains(byte))?;
    (config[brace] == b'{').then_some(brace + 1)
}

/// A configuration of transformers or diffusers that names no quantization, or one that begins with
/// a mark, with one more.
pub(crate) fn mark(config: &[u8]) -> Option<Vec<u8>> {
    let place = place(config)?;
    if !config[place..].starts_with(MARK.as_bytes()) {
        let json: serde_json::Map<String, Value> = serde_json::from_slice(config).ok()?;
        let names_a_model = ["model_type", "_class_name"]
            .iter()
            .any(|key| json.get(*key).is_some_and(Value::is_string));
        if !names_a_model || json.contains_key("quantization_config") {
            return None;
        }
    }
    Some([&config[..place], MARK.as_bytes(), &config[place..]].concat())
}

/// The file without the mark, if it has one.
pub(crate) fn unmark(config: &[u8]) -> Option<Vec<u8>> {
    let place = place(config)?;
    let rest = config[place..].strip_prefix(MARK.as_bytes())?;
    Some([&config[..place], rest].concat())
}

/// Where the card goes, and where if the model has a file of that name.
const CARD_NAMES: [&str; 2] = ["README.md", "DF11.md"];

/// No card is longer, in bytes.
const MAX_CARD_BYTES: u64 = 64 << 10;

const SEAL: &str = "<!-- written by df11 compress; BLAKE3 of the text above: ";
const END: &str = " -->\n";

/// The card's path, given those of the model's own files; `None` if both names are taken.
pub(crate) fn card_path(own: &BTreeSet<String>) -> Option<&'static str> {
    CARD_NAMES.into_iter().find(|name| !own.iter().any(|path| path.eq_ignore_ascii_case(name)))
}

/// Whether a path is that of a card which the Hub reads, by its first lines too.
pub(crate) fn has_front_matter(path: &str) -> bool {
    path == CARD_NAMES[0]
}

/// A card with its last line.
pub(crate) fn seal(text: &str) -> String {
    format!("{text}{SEAL}{}{END}", blake3::hash(text.as_bytes()).to_hex())
}

/// Whether a file in a folder is a card, as it was written.
pub(crate) fn is_card(root: &Path, path: &str) -> bool {
    let file = root.join(path);
    CARD_NAMES.contains(&path)
        && read_regular(&file, MAX_CARD_BYTES).is_ok_and(|bytes| is_sealed(&bytes))
}

fn is_sealed(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    text.rsplit_once(SEAL).is_some_and(|(above, _)| seal(above) == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unedited_card_is_known() {
        let sealed = seal("# Model\n");
        assert!(is_sealed(sealed.as_bytes()));
        let edited =
            [sealed.replace("Model", "model"), format!("{sealed}more\n"), "# Model\n".to_owned()];
        for edited in edited {
            assert!(!is_sealed(edited.as_bytes()), "{edited}");
        }
    }

    #[test]
    fn the_name_is_one_that_is_free() {
        let of = |own: &[&str]| card_path(&own.iter().map(|path| (*path).to_owned()).collect());
        assert_eq!(of(&["config.json"]), Some("README.md"));
        assert_eq!(of(&["Readme.md"]), Some("DF11.md"));
        assert_eq!(of(&["README.md", "df11.md"]), None);
    }

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
            "{\"_class_name\": \"UNet2DConditionModel\", \"_name_or_path\": \"model_type\"}",
            // Nonsense that begins as if it were marked.
            &format!("{{{MARK}"),
        ] {
            let marked = marked(config).unwrap();
            assert_eq!(unmark(marked.as_bytes()).unwrap(), config.as_bytes());
            if let Ok(json) = serde_json::from_str::<Value>(&marked) {
                assert_eq!(json["quantization_config"]["quant_method"], "df11");
                assert!(json.get("model_type").or(json.get("_class_name")).is_some());
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
            "{\"_class_name\": [\"llama\"]}",
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
}
