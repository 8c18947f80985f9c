//! Findings as one HTML page that loads nothing else: it contains the data as JSON, and a script
//! that draws them.

use std::path::Path;

use df11::{
    Dtype,
    hazmat::{
        MIN_CODED_BYTES, Shard,
        format::records::{FILE_BESIDE, FILE_SIDE, FILE_WEIGHTS},
        is_coded, shown,
    },
};
use serde_json::{Value, json};

use super::{Findings, picture::escape, report};

const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

/// The page of one model, or of two that are compared.
pub(super) fn page(findings: &[&Findings<'_>]) -> String {
    let models: Vec<Value> = findings.iter().map(|findings| document(findings)).collect();
    let data = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "small_bytes": MIN_CODED_BYTES,
        "coded_dtypes": coded_dtypes(),
        "models": models,
    });
    // In JSON `<` stands in text alone, which thus can neither end the element nor begin a comment.
    let data = data.to_string().replace('<', "\\u003c");
    let title = escape(&name(findings[0].path));
    // One pass over the page, so that no text is taken for a place of another.
    let texts = PAGE.split('@').map(|piece| match piece {
        "TITLE" => &title,
        "STYLE" => STYLE,
        "DATA" => &data,
        "SCRIPT" => SCRIPT,
        other => other,
    });
    texts.collect()
}

fn coded_dtypes() -> Vec<&'static str> {
    Dtype::ALL.iter().filter(|&&dtype| is_coded(dtype)).map(|dtype| dtype.name()).collect()
}

fn name(path: &Path) -> String {
    let named = path.canonicalize().unwrap_or_else(|_| shown(path).into_owned());
    named.file_name().unwrap_or(named.as_os_str()).to_string_lossy().into_owned()
}

/// The document of `--json --tensors` for a path, its name, and the original files. Pages are given
/// to others, so that paths of this machine stay out of them.
fn document(findings: &Findings<'_>) -> Value {
    let mut document = report::json(findings, true);
    remove_paths(&mut document);
    document["components"].as_array_mut().into_iter().flatten().for_each(remove_paths);
    document["name"] = json!(name(findings.path));
    document["files"] = files(findings).into();
    document
}

fn remove_paths(document: &mut Value) {
    document["source"].take();
    let shards = document["shards"].as_array_mut().into_iter().flatten();
    shards.for_each(|shard| drop(shard["path"].take()));
}

/// The original files; `stored` is the length of those that are in a container.
fn files(findings: &Findings<'_>) -> Vec<Value> {
    let mut files = Vec::new();
    for component in findings.models.components() {
        for directory in component.model.shards().iter().map(Shard::directory) {
            files.extend(directory.files.iter().map(|file| {
                let kind = match file.kind.get() {
                    FILE_WEIGHTS => "weights",
                    FILE_SIDE => "side, stored",
                    FILE_BESIDE => "side, beside the containers",
                    _ => "unknown",
                };
                json!({
                    "path": component.path_of(directory.file_path(file)),
                    "kind": kind,
                    "length": file.length.get(),
                    "stored": (file.kind != FILE_BESIDE).then(|| file.length.get()),
                    "hash": blake3::Hash::from_bytes(file.hash).to_string(),
                })
            }));
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_a_place_for_each_text_and_no_other() {
        for place in ["@TITLE@", "@STYLE@", "@DATA@", "@SCRIPT@"] {
            assert_eq!(PAGE.matches(place).count(), 1, "{place}");
        }
        assert_eq!(PAGE.matches('@').count(), 8);
        assert!(!SCRIPT.contains("</") && !STYLE.contains("</"));
    }
}
