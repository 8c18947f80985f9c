//! How Python loads an output, as its own configuration tells: for the person who made it, and for
//! the model card in it.

use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    open::beside::{MARKED_NAME, unmark},
    paths::{MODEL_INDEX, PIPELINE},
};

/// How to load an output with Python.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Loading {
    /// The library whose models these are, as the Hub names it; `None` if nothing tells.
    pub library: Option<&'static str>,
    /// Python code, without a line feed at its end.
    pub python: String,
    /// Whether it is a language model, such as vLLM serves.
    pub is_served: bool,
}

impl Loading {
    /// Of the output `out`: a container, or the folder of a model or a pipeline. Reads the JSON
    /// files by which transformers and diffusers know their models; what cannot be read tells
    /// nothing.
    pub fn of(out: &Path) -> Self {
        Self::of_folder(out, out)
    }

    /// Of a folder that will be `out`.
    pub(super) fn of_folder(folder: &Path, out: &Path) -> Self {
        if folder.join(PIPELINE).is_file() {
            return of_pipeline(folder, out);
        }
        if !folder.is_dir() {
            return Self::by_attaching(out);
        }
        match Config::read(folder) {
            Config::Transformers(class) => Self {
                library: Some("transformers"),
                python: format!(
                    "import df11, transformers\nmodel = transformers.{}.from_pretrained({}, \
                    device_map=\"auto\")",
                    class.name(),
                    quoted(out)
                ),
                is_served: class.is_served(),
            },
            Config::Diffusers(class) => Self {
                library: Some("diffusers"),
                python: format!(
                    "import df11, diffusers\nmodel = diffusers.{class}.from_pretrained({})",
                    quoted(out)
                ),
                is_served: false,
            },
            Config::Other => Self::by_attaching(out),
        }
    }

    fn by_attaching(out: &Path) -> Self {
        let python =
            format!("import df11\ndf11.attach(module, {})  # any torch.nn.Module", quoted(out));
        Self { library: None, python, is_served: false }
    }
}

/// A class of transformers.
struct Class {
    architecture: Option<String>,
    /// Whether its code is in the model's own folder.
    is_custom: bool,
}

impl Class {
    fn name(&self) -> &str {
        match &self.architecture {
            Some(name) if name.ends_with("ForCausalLM") => "AutoModelForCausalLM",
            Some(name) if !self.is_custom => name,
            _ => "AutoModel",
        }
    }

    fn is_served(&self) -> bool {
        let ends = ["ForCausalLM", "ForConditionalGeneration"];
        self.architecture.as_ref().is_some_and(|name| ends.iter().any(|end| name.ends_with(end)))
    }
}

/// What config.json says of a folder's model.
enum Config {
    /// A model of transformers, with the mark of this compression.
    Transformers(Class),
    /// A class of diffusers, with the same mark.
    Diffusers(String),
    /// A model that neither of them loads by itself.
    Other,
}

impl Config {
    fn read(folder: &Path) -> Self {
        let Ok(bytes) = fs::read(folder.join(MARKED_NAME)) else { return Self::Other };
        let Ok(json) = serde_json::from_slice::<Value>(&bytes) else { return Self::Other };
        if unmark(&bytes).is_none() {
            return Self::Other;
        }
        if let Some(name) = json["_class_name"].as_str().filter(|name| is_name(name)) {
            return Self::Diffusers(name.to_owned());
        }
        Self::Transformers(Class {
            architecture: json["architectures"][0]
                .as_str()
                .filter(|name| is_name(name))
                .map(str::to_owned),
            is_custom: json.get("auto_map").is_some(),
        })
    }
}

/// Code by which the pipeline's own loader loads all components, except those that no library
/// knows.
fn of_pipeline(folder: &Path, out: &Path) -> Loading {
    let index = fs::read(folder.join(MODEL_INDEX)).unwrap_or_default();
    let index: Value = serde_json::from_slice(&index).unwrap_or_default();
    let class =
        index["_class_name"].as_str().filter(|name| is_name(name)).unwrap_or("DiffusionPipeline");
    let mut python = "import df11, diffusers\n".to_owned();
    let mut given = String::new();
    for (name, path) in components(folder) {
        if matches!(Config::read(&path), Config::Other) {
            let _ = writeln!(
                python,
                "{name} = df11.attach(module, {})  # its own class",
                quoted(&out.join(&name))
            );
            let _ = write!(given, ", {name}={name}");
        }
    }
    let _ = write!(python, "pipeline = diffusers.{class}.from_pretrained({}{given})", quoted(out));
    Loading { library: Some("diffusers"), python, is_served: false }
}

/// Folders of a compressed pipeline that hold containers and may be names in Python, ascending.
fn components(folder: &Path) -> BTreeMap<String, PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let has_containers = |path: &Path| {
        fs::read_dir(path).is_ok_and(|mut entries| {
            entries.any(|entry| entry.is_ok_and(|entry| crate::paths::is_container(entry.path())))
        })
    };
    let folders = entries.filter(|entry| has_containers(&entry.path()));
    let named =
        folders.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())));
    named.filter(|(name, _)| is_name(name)).collect()
}

/// Whether text from a file is a name in Python, and so no other code.
fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    let is_first = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    bytes.next().is_some_and(is_first) && bytes.all(|byte| is_first(byte) || byte.is_ascii_digit())
}

/// A path as a string of Python.
fn quoted(path: &Path) -> String {
    Value::from(path.to_string_lossy()).to_string()
}
