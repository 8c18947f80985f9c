//! Findings as one page that loads nothing: data as JSON in it, and a script that draws them.

use std::{collections::HashMap, path::Path};

use df11::{
    Dtype, Encoding, Models, Tensor,
    hazmat::{
        MIN_CODED_BYTES,
        format::records::{FILE_BESIDE, FILE_SIDE, FILE_WEIGHTS},
        huffman::Histogram,
    },
};
use serde_json::{Value, json};

use super::{Inspected, picture::escape, report::stored_bytes, sum_of_all};
use crate::cli::figures::Figures;

const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

/// What was found at one path: its components, each with its folder.
pub(super) struct InspectedPath<'m> {
    pub(super) path: &'m Path,
    pub(super) models: &'m Models,
    pub(super) parts: Vec<Inspected<'m>>,
}

/// The page of one model, or of two that are compared.
pub(super) fn page(found: &InspectedPath<'_>, other: Option<&InspectedPath<'_>>) -> String {
    let mut models = vec![document(found, other)];
    models.extend(other.map(|other| document(other, Some(found))));
    let data = json!({ "version": env!("CARGO_PKG_VERSION"), "models": models });
    // In JSON `<` stands in text alone, which thus can neither end the element nor begin a comment.
    let data = data.to_string().replace('<', "\\u003c");
    let title = escape(&name(found.path));
    let texts = HashMap::from([
        ("TITLE", title.as_str()),
        ("STYLE", STYLE),
        ("DATA", &data),
        ("SCRIPT", SCRIPT),
    ]);
    // One pass over the page, so that no text is taken for a place of another.
    let mut pieces = PAGE.split('@');
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        out.push_str(texts.get(piece).unwrap_or(&piece));
    }
    out
}

fn name(path: &Path) -> String {
    let named = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    named.file_name().unwrap_or(named.as_os_str()).to_string_lossy().into_owned()
}

/// One model as the script reads it.
fn document(found: &InspectedPath<'_>, other: Option<&InspectedPath<'_>>) -> Value {
    let twins: HashMap<String, Tensor<'_>> = other.into_iter().flat_map(tensors).collect();
    let (mut blocks, mut tensors) = (Vec::new(), Vec::new());
    for (component, findings) in &found.parts {
        for (block, (row, rows)) in
            findings.model.blocks().zip(findings.blocks.iter().zip(&findings.tensors))
        {
            let block_name = component.path_of(&row.name);
            let mut value = sizes(&row.figures);
            value["tensors"] = json!(row.figures.tensors);
            value["name"] = json!(block_name);
            blocks.push(value);
            for (tensor, row) in block.tensors().zip(rows) {
                let name = component.path_of(&row.name);
                let mut value = sizes(&row.figures);
                describe(&tensor, twins.get(&name), &mut value);
                value["name"] = json!(name);
                value["block"] = json!(block_name);
                tensors.push(value);
            }
        }
    }
    let files = files(found);
    let (last, _) = found.parts.last().expect("at least one model");
    let containers: usize =
        found.parts.iter().map(|(component, _)| component.model.shards().len()).sum();
    let stored = files.iter().filter_map(|file| file["stored"].as_u64());
    let original_bytes = stored.fold(0, u64::saturating_add);
    json!({
        "name": name(found.path),
        "identity": last.model.identity().to_string(),
        "missing": found.models.missing(),
        "containers": containers,
        "container_bytes": stored_bytes(&found.parts),
        "original_bytes": original_bytes,
        "total": sizes(&sum_of_all(&found.parts)),
        "blocks": blocks,
        "tensors": tensors,
        "files": files,
        "exponents": exponents(found).map(|exponents| exponents.counts().to_vec()),
    })
}

fn tensors<'a>(found: &'a InspectedPath<'_>) -> impl Iterator<Item = (String, Tensor<'a>)> {
    found.parts.iter().flat_map(|(component, _)| {
        component.model.tensors().map(|tensor| (component.path_of(tensor.name()), tensor))
    })
}

/// Exponents of all components, if they were counted.
fn exponents(found: &InspectedPath<'_>) -> Option<Histogram> {
    let mut sum = Histogram::default();
    for (_, findings) in &found.parts {
        sum.merge(findings.exponents.as_ref()?);
    }
    Some(sum)
}

fn sizes(figures: &Figures) -> Value {
    json!({
        "weights": figures.weights,
        "bits_per_weight": figures.bits_per_weight(),
        "entropy": figures.entropy(),
        "stored": figures.stored_bytes,
        "decoded": figures.decoded_bytes,
    })
}

/// Dtype, shape and encoding of a tensor, why it is not coded, and its twin in another model.
fn describe(tensor: &Tensor<'_>, twin: Option<&Tensor<'_>>, value: &mut Value) {
    value["dtype"] = json!(tensor.dtype().map_or("unknown", Dtype::name));
    value["shape"] = json!(tensor.shape());
    value["encoding"] = json!(tensor.encoding().name());
    let (reason, why) = match tensor.encoding() {
        Encoding::Raw if tensor.dtype() != Some(Dtype::BF16) => {
            (Some("not BF16"), "only BF16 is coded".to_owned())
        }
        Encoding::Raw if tensor.byte_length().is_ok_and(|bytes| bytes < MIN_CODED_BYTES) => {
            (Some("small"), "so small a tensor would save next to nothing".to_owned())
        }
        // The container does not tell which.
        Encoding::Raw => (
            Some("would not shrink, or raw was asked for"),
            "its codes would take more bytes than they save, or it was compressed with \
            --layout raw"
                .to_owned(),
        ),
        Encoding::Alias => (None, format!("the same bytes as {}", tensor.target().name())),
        _ => (None, String::new()),
    };
    value["reason"] = json!(reason);
    value["why"] = json!(why);
    value["twin"] = json!(twin.map(Tensor::stored_bytes));
    value["same"] = json!(twin.map(|twin| twin.hash() == tensor.hash()));
}

/// The original files; `stored` is the length of those that are in a container.
fn files(found: &InspectedPath<'_>) -> Vec<Value> {
    let mut files = Vec::new();
    for (component, _) in &found.parts {
        for shard in component.model.shards() {
            let directory = shard.directory();
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
