//! A folder of containers: where each goes, and the side files beside them.
//!
//! Of the side files the configuration of the weights gets a line by which transformers and
//! diffusers know that they are compressed ([`MARK`]), and nothing else: restoring and converting
//! read the original, which has the recorded hash. So that every original comes back, one that
//! begins with the mark itself gets another, which JSON reads as one.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{folder::OutputFolder, input::Input};
use crate::{
    Error, Result,
    open::beside::{MARK, place},
    paths::{PIPELINE, PathTree, ends_as_container, is_config, shard_path},
    source::Component,
};

/// Where the container of each weights file goes in a folder; of a pipeline's files without
/// weights, where their one container goes.
///
/// # Errors
/// [`Error::Parameter`] if two would have one path, or there is none.
pub(super) fn shard_paths(input: &Input<'_>, in_pipeline: bool) -> Result<Vec<String>> {
    if input.weights.is_empty() {
        let problem = "the model has no weights file, so a folder would hold nothing";
        let remedy = "write one file: give the output a name that ends in .df11";
        let alone = || Error::parameter(problem, remedy);
        return in_pipeline.then(|| vec![PIPELINE.to_owned()]).ok_or_else(alone);
    }
    let mut owners = BTreeMap::new();
    let mut paths = Vec::new();
    for file in input.weights.iter().map(|weights| &weights.file.path) {
        let path = shard_path(file);
        if let Some(other) = owners.insert(path.clone(), file) {
            let problem =
                format!("the containers of {other:?} and {file:?} would both be {path:?}");
            let remedy =
                "make one file with -o NAME.df11, which keeps all names, or rename one of them";
            return Err(Error::parameter(problem, remedy));
        }
        paths.push(path);
    }
    Ok(paths)
}

/// Refuses files of which one would take the place of another in a folder of containers.
pub(super) fn check_outputs(input: &Input<'_>, shards: &[String]) -> Result<()> {
    let remedy = "write one file: give the output a name that ends in .df11";
    if let Some(hidden) =
        shards.iter().find(|path| path.split('/').any(|name| name.starts_with('.')))
    {
        let problem =
            format!("{hidden:?} would be hidden, and hidden files of a folder are not opened");
        return Err(Error::parameter(problem, remedy));
    }
    // Whatever ends so is a shard to whoever opens the folder.
    if let Some(side) = input.side.iter().find(|side| ends_as_container(&side.path)) {
        let problem = format!("the side file {:?} would be taken for a container", side.path);
        return Err(Error::parameter(problem, remedy));
    }
    let side = input.side.iter().map(|side| &*side.path);
    match PathTree::new(shards.iter().map(String::as_str).chain(side)).clash() {
        None => Ok(()),
        Some((first, second)) => {
            let problem = format!("the folder cannot hold both {first:?} and {second:?}");
            Err(Error::parameter(problem, remedy))
        }
    }
}

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

/// Puts the side files of a model beside its containers, each configuration with its mark.
pub(super) fn write_side_files(
    component: &Component<Input<'_>>,
    folder: &mut OutputFolder,
) -> Result<()> {
    let Input { weights, side, .. } = &component.model;
    for side in side {
        let path = component.path_of(&side.path);
        if is_config(&side.path, weights.iter().map(|weights| weights.file.path.as_str())) {
            let config = side.bytes()?;
            folder.write(mark(&config).as_deref().unwrap_or(&config), &path)?;
        } else {
            folder.copy(side, &path)?;
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
