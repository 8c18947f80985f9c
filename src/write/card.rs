//! The model card of an output folder: what it is, and how to load it.

use std::path::Path;

use super::{folder::OutputFolder, loading::Loading, options::Card, report::Report};
use crate::{
    Result,
    constants::VERSION_MAJOR,
    open::card::{has_front_matter, seal},
};

/// Writes the card of a folder that will be `out`.
pub(super) fn write(
    folder: &OutputFolder,
    out: &Path,
    path: &str,
    card: &Card,
    reports: &[Report],
    identity: &str,
) -> Result<()> {
    let loading = Loading::of_folder(folder.path(), Path::new(&*name_of(out)));
    let report = Report::sum(reports);
    let mut text = String::new();
    if has_front_matter(path) {
        text.push_str(&front_matter(card, &loading));
    }
    text.push_str(&body(&name_of(out), card, &report, reports.len(), identity, &loading));
    folder.part("").write(seal(&text).as_bytes(), path)
}

fn name_of(out: &Path) -> String {
    out.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .chars()
        .filter(|char| !char.is_control())
        .collect()
}

/// What the Hub reads.
fn front_matter(card: &Card, loading: &Loading) -> String {
    let mut lines = vec!["---".to_owned()];
    lines.extend(loading.library.map(|library| format!("library_name: {library}")));
    if let Some(base) = &card.base_model {
        lines.push(format!("base_model: {base}"));
        lines.push("base_model_relation: quantized".to_owned());
    }
    lines.push("tags:\n- df11\n- lossless-compression\n- bfloat16\n---\n\n".to_owned());
    lines.join("\n")
}

fn body(
    name: &str,
    card: &Card,
    report: &Report,
    models: usize,
    identity: &str,
    loading: &Loading,
) -> String {
    let of = card
        .base_model
        .as_ref()
        .map_or_else(String::new, |base| format!(" of [{base}](https://huggingface.co/{base})"));
    let title: String = name.chars().filter(|char| !"[]<>`*#|".contains(*char)).collect();
    let title = title.trim();
    let title = if title.is_empty() { "Model" } else { title };
    let what = if models > 1 {
        "identity of `pipeline.df11`, which lists all components"
    } else {
        "identity"
    };
    let serve = if loading.is_served {
        format!(
            "\nServe it with vLLM, with the package `df11` installed:\n\n```sh\nvllm serve \
            {name:?}\n```\n"
        )
    } else {
        String::new()
    };
    format!(
        "# {title}\n\nThe weights{of}, losslessly compressed: every bit of every weight comes \
        back. Container format df11, version {VERSION_MAJOR}, by the method of \
        [DFloat11](https://arxiv.org/abs/2504.11651).\n\n\
         | | |\n|---|---|\n| before | {before} bytes |\n| after | {after} bytes ({ratio:.1} %) |\n\
         | bits a weight | {bits:.2}, of 16 |\n| {what} (BLAKE3) | `{identity}` |\n\n\
         Load it with the Python package `df11`, which must be imported first:\n\n\
         ```python\n{python}\n```\n{serve}\n\
         Get the original files back, byte for byte, or check that they would come back:\n\n\
         ```sh\ndf11 decompress {name:?}\ndf11 verify {name:?}\n```\n\n",
        before = report.source_bytes,
        after = report.stored_bytes,
        ratio = 100.0 * report.ratio(),
        bits = report.bits_per_weight(),
        python = loading.python,
    )
}
