//! The Python code that loads an output, derived from the output's configuration: for the person
//! who made it, and for its model card.

use std::{fmt::Write, path::Path};

use serde_json::Value;

use super::{folder::OutputFolder, options::Card, replace::listed_in, report::Report};
use crate::{
    Result,
    constants::VERSION_MAJOR,
    error::is_unseen,
    io::read_regular,
    open::beside::{has_front_matter, seal, unmark},
    paths::{CONFIG, MODEL_INDEX, PIPELINE},
    source::{KEPT_QUANTIZATIONS, MAX_SIDE_BYTES},
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
    /// Tells how to load the output `out`: a container, or the folder of a model or a pipeline.
    /// Reads the JSON files by which transformers and diffusers know their models, and ignores
    /// those that it cannot read.
    pub fn of(out: &Path) -> Self {
        Self::of_folder(out, out)
    }

    /// Tells how to load `folder`, which will be `out`.
    fn of_folder(folder: &Path, out: &Path) -> Self {
        if folder.join(PIPELINE).is_file() {
            return of_pipeline(folder, out);
        }
        let Some(Class { library, name, is_served }) = Class::read(folder) else {
            let place = quoted(out);
            let python =
                format!("import df11\ndf11.attach(module, {place})  # any torch.nn.Module");
            return Self { library: None, python, is_served: false };
        };
        let place = if library == "transformers" { ", device_map=\"auto\"" } else { "" };
        let python = format!(
            "import df11, {library}\nmodel = {library}.{name}.from_pretrained({}{place})",
            quoted(out)
        );
        Self { library: Some(library), python, is_served }
    }
}

/// The class by which a library loads a folder's model.
struct Class {
    library: &'static str,
    name: String,
    is_served: bool,
}

impl Class {
    /// Reads it from a config.json with the mark of this compression, or with the name of another
    /// quantization, by whose code transformers loads the model. `None` for a model that neither
    /// transformers nor diffusers loads by itself.
    fn read(folder: &Path) -> Option<Self> {
        let bytes = read_regular(&folder.join(CONFIG), MAX_SIDE_BYTES).ok()?;
        let json: Value = serde_json::from_slice(&bytes).ok()?;
        let is_of_another = unmark(&bytes).is_none();
        let method = json["quantization_config"]["quant_method"].as_str();
        if is_of_another {
            method.filter(|name| *name != "df11")?;
        }
        // No engine has run with others.
        let is_kept = method.is_some_and(|method| KEPT_QUANTIZATIONS.contains(&method));
        let name = |value: &Value| value.as_str().filter(|name| is_name(name)).map(str::to_owned);
        if let Some(name) = name(&json["_class_name"]) {
            let class = Self { library: "diffusers", name, is_served: false };
            return (!is_of_another).then_some(class);
        }
        let architecture = name(&json["architectures"][0]).unwrap_or_default();
        let is_causal = architecture.ends_with("ForCausalLM");
        let is_language = is_causal || architecture.ends_with("ForConditionalGeneration");
        let is_served = is_language && (!is_of_another || is_kept);
        // The code of a custom class is in the model's own folder.
        let is_custom = json.get("auto_map").is_some();
        let name = match architecture {
            _ if is_causal => "AutoModelForCausalLM".to_owned(),
            name if !name.is_empty() && !is_custom => name,
            _ => "AutoModel".to_owned(),
        };
        Some(Self { library: "transformers", name, is_served })
    }
}

/// Code by which the pipeline's own loader loads all components that its container lists and that
/// are there, except those that no library knows.
fn of_pipeline(folder: &Path, out: &Path) -> Loading {
    let index = read_regular(&folder.join(MODEL_INDEX), MAX_SIDE_BYTES).unwrap_or_default();
    let index: Value = serde_json::from_slice(&index).unwrap_or_default();
    let class =
        index["_class_name"].as_str().filter(|name| is_name(name)).unwrap_or("DiffusionPipeline");
    let mut python = "import df11, diffusers\n".to_owned();
    let mut given = String::new();
    let listed = listed_in(folder).into_keys();
    for name in listed.filter(|name| is_name(name) && folder.join(name).is_dir()) {
        if Class::read(&folder.join(&name)).is_none() {
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

/// Writes the card of a folder that will be `out`.
pub(super) fn write(
    folder: &mut OutputFolder,
    out: &Path,
    path: &str,
    card: &Card,
    reports: &[Report],
    identity: &str,
) -> Result<()> {
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let name: String = name.chars().filter(|&char| !is_unseen(char)).collect();
    let loading = Loading::of_folder(folder.path(), Path::new(&name));
    let report = Report::sum(reports);
    let mut text = String::new();
    if has_front_matter(path) {
        text.push_str("---\n");
        if let Some(library) = loading.library {
            let _ = writeln!(text, "library_name: {library}");
        }
        if let Some(base) = &card.base_model {
            let _ = writeln!(text, "base_model: {base}\nbase_model_relation: quantized");
        }
        let is_bf16 = report.coded_source_bytes == 2 * report.coded_weights;
        let tag = if is_bf16 { "- bfloat16\n" } else { "" };
        let _ = write!(text, "tags:\n- df11\n- lossless-compression\n{tag}---\n\n");
    }
    let of = card
        .base_model
        .as_ref()
        .map_or_else(String::new, |base| format!(" of [{base}](https://huggingface.co/{base})"));
    let title: String = name.chars().filter(|char| !"[]<>`*#|".contains(*char)).collect();
    let title = Some(title.trim()).filter(|title| !title.is_empty()).unwrap_or("Model");
    let what = if reports.len() > 1 {
        "identity of `pipeline.df11`, which lists all components"
    } else {
        "identity"
    };
    let serve = format!(
        "\nServe it with vLLM, with the package `df11` installed:\n\n```sh\nvllm serve \
        {name:?}\n```\n"
    );
    let _ = write!(
        text,
        "# {title}\n\nThe weights{of}, losslessly compressed: every bit of every weight comes \
        back. Container format df11, version {VERSION_MAJOR}, by the method of \
        [DFloat11](https://arxiv.org/abs/2504.11651).\n\n\
         | | |\n|---|---|\n| before | {before} bytes |\n| after | {after} bytes ({ratio:.1} %) |\n\
         | bits per weight | {bits:.2} of {source_bits} |\n| {what} (BLAKE3) | `{identity}` |\n\n\
         Load it with the Python package `df11`. `from_pretrained` needs no `import df11` if pip \
         installed the package:\n\n\
         ```python\n{python}\n```\n{serve}\n\
         Restore the original files, byte for byte, or check the container:\n\n\
         ```sh\ndf11 decompress {name:?}\ndf11 verify {name:?}\n```\n\n",
        before = report.source_bytes,
        after = report.stored_bytes,
        ratio = 100.0 * report.ratio(),
        bits = report.bits_per_weight(),
        source_bits = (100.0 * report.source_bits_per_weight()).round() / 100.0,
        python = loading.python,
        serve = if loading.is_served { &serve } else { "" },
    );
    folder.write(seal(&text).as_bytes(), path)
}
