//! The line in config.json by which transformers and diffusers know that a folder's weights are
//! compressed.
//!
//! A folder of containers has it ([`MARK`]), and nothing else: restoring and converting read the
//! original, which has the recorded hash. So that every original comes back, one that begins with
//! the mark itself gets another, which JSON reads as one.

use serde_json::Value;

use super::{folder::ModelFolder, input::Input};
use crate::{
    Result,
    open::beside::{MARK, place},
    paths::is_config,
};

/// A configuration of transformers or diffusers that names no quantization, or one that begins with
/// a mark, with one more.
fn mark(config: &[u8]) -> Option<Vec<u8>> {
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

/// Puts the side files beside the containers, each configuration with its mark.
pub(super) fn write_side_files(input: &Input<'_>, folder: &ModelFolder<'_>) -> Result<()> {
    for side in &input.side {
        if is_config(&side.path, input.weights.iter().map(|weights| weights.file.path.as_str())) {
            let config = side.bytes()?;
            folder.write(mark(&config).as_deref().unwrap_or(&config), &side.path)?;
        } else {
            side.write_into(folder)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::beside::unmark;

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
