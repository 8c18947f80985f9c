//! Findings as text and JSON.

use std::{collections::BTreeMap, iter, path::Path};

use df11::{
    Dtype, Encoding, Model, Tensor,
    hazmat::{format::records::FILE_WEIGHTS, huffman::Histogram},
};
use serde_json::{Value, json};

use super::{Findings, Part};
use crate::cli::{
    containers::container_bytes,
    figures::{self, Figures},
    reports::{component_name, of_component},
    text::{self, printable},
};

/// Characters of the longest bar.
const BAR: u64 = 40;

/// Component by component, and their sum.
pub(super) fn text(findings: &Findings<'_>, tensors: bool, histogram: bool) -> String {
    let of = |part| part_text(part, tensors, histogram);
    if !findings.models.is_pipeline() {
        return of(&findings.parts[0]);
    }
    let mut texts = Vec::new();
    for part in &findings.parts {
        let name = printable(component_name(part.folder));
        texts.push(format!("[{name}]\n{}", of(part)));
    }
    let total = total(findings);
    texts.push(format!(
        "[total]\nholds     {}\n{}",
        text::count(total.tensors, "tensor"),
        size(total.decoded_bytes, stored_bytes(findings))
    ));
    for folder in findings.models.missing() {
        texts.push(format!("[{}]\nmissing   this component is not here", printable(folder)));
    }
    texts.join("\n\n")
}

/// The findings for programs, and for the page.
pub(super) fn json(findings: &Findings<'_>, tensors: bool) -> Value {
    let (models, parts) = (findings.models, &findings.parts);
    if !models.is_pipeline() {
        return part_json(&parts[0], findings.path, tensors);
    }
    let component =
        |part: &Part<'_>| of_component(part.folder, part_json(part, findings.path, tensors));
    json!({
        "command": "inspect",
        "source": text::path_field(findings.path),
        "complete": models.missing().is_empty()
            && parts.iter().all(|part| part.model.is_complete()),
        "missing_components": models.missing(),
        "container_bytes": stored_bytes(findings),
        "total": total(findings).json(),
        "components": parts.iter().map(component).collect::<Vec<_>>(),
    })
}

/// Figures of all components.
fn total(findings: &Findings<'_>) -> Figures {
    Figures::sum("total", findings.parts.iter().map(|part| &part.total))
}

/// Bytes of the containers of all components.
fn stored_bytes(findings: &Findings<'_>) -> u64 {
    let components = findings.models.components().iter();
    components.map(|component| container_bytes(&component.model)).fold(0, u64::saturating_add)
}

fn size(decoded: u64, stored: u64) -> String {
    let sizes =
        format!("size      {} decoded, {} stored", text::bytes(decoded), text::bytes(stored));
    if decoded == 0 {
        return sizes;
    }
    format!("{sizes} ({})", text::percent(stored as f64 / decoded as f64))
}

fn part_text(part: &Part<'_>, tensors: bool, exponents: bool) -> String {
    let mut texts = vec![summary(part)];
    if !part.blocks.is_empty() {
        texts.push(figures::table(&part.blocks, &part.total));
    }
    if tensors {
        texts.push(tensor_table(part));
    }
    texts.extend(part.exponents.as_ref().filter(|_| exponents).map(histogram));
    texts.join("\n\n")
}

fn summary(part: &Part<'_>) -> String {
    let model = part.model;
    let (weights, side) = file_counts(model);
    let mut lines = vec![
        format!("identity  {}", model.identity()),
        format!(
            "holds     {} in {}, {}; {} and {}",
            text::count(part.total.tensors, "tensor"),
            text::count(part.blocks.len() as u64, "block"),
            text::count(model.shards().len() as u64, "container"),
            text::count(weights, "weights file"),
            text::count(side, "side file"),
        ),
        size(part.total.decoded_bytes, container_bytes(model)),
    ];
    for (key, value) in model.metadata() {
        lines.push(format!("metadata  {} = {}", printable(key), printable(value)));
    }
    lines.extend(differences(model));
    if !model.is_complete() {
        lines.push("shards    not all of the model's shards are here".to_owned());
    }
    let unknown = unknown_tensors(model);
    if unknown > 0 {
        let verb = if unknown == 1 { "is" } else { "are" };
        let tensors = text::count(unknown, "tensor");
        lines.push(format!(
            "unknown   {tensors} {verb} stored in a way that this version does not know; update \
            df11"
        ));
    }
    if part.exponents.is_none() && part.total.weights > 0 {
        lines
            .push("entropy   not measured; --entropy decodes all weights to measure it".to_owned());
    }
    lines.join("\n")
}

/// The sentence about tensors that are differences from those of a base, if there are some.
fn differences(model: &Model) -> Option<String> {
    let own = || model.tensors().filter(|tensor| tensor.encoding() == Encoding::Delta);
    let count = own().count() as u64;
    let name = model.base_name();
    let name = name.as_deref().map_or("another model".into(), printable);
    let sum = |of: &dyn Fn(Tensor<'_>) -> u64| own().map(of).fold(0, u64::saturating_add);
    let bits = 8.0 * sum(&|tensor| tensor.stored_bytes()) as f64;
    let bits = bits / sum(&|tensor| tensor.elements()).max(1) as f64;
    let verb = if count == 1 { "is a difference" } else { "are differences" };
    let tensors = text::count(count, "tensor");
    let line = format!("base      {tensors} {verb} from {name}: {bits:.3} bits per weight");
    (count > 0).then_some(line)
}

/// Tensors of encodings or dtypes of a newer version.
fn unknown_tensors(model: &Model) -> u64 {
    let is_unknown =
        |tensor: &Tensor<'_>| matches!(tensor.target().encoding(), Encoding::Unknown(_));
    model.tensors().filter(is_unknown).count() as u64
}

/// Weights files, and side files that the containers record.
fn file_counts(model: &Model) -> (u64, u64) {
    let files = model.shards().iter().flat_map(|shard| &shard.directory().files);
    files.fold((0, 0), |(weights, side), file| {
        if file.kind == FILE_WEIGHTS { (weights + 1, side) } else { (weights, side + 1) }
    })
}

fn tensor_table(part: &Part<'_>) -> String {
    let header = ["tensor", "dtype", "shape", "encoding", "stored", "bits/weight", "entropy limit"];
    let row = |(tensor, figures): (Tensor<'_>, &Figures)| {
        let [stored, bits, information] = figures.cells();
        [
            printable(&figures.name),
            dtype(&tensor).to_owned(),
            format!("{:?}", tensor.shape()),
            tensor.encoding().name().to_owned(),
            stored,
            bits,
            information,
        ]
    };
    let blocks = part.model.blocks().zip(&part.blocks);
    text::table(
        header,
        blocks.flat_map(|(block, found)| block.tensors().zip(&found.tensors)).map(row),
    )
}

fn dtype(tensor: &Tensor<'_>) -> &'static str {
    tensor.dtype().map_or("unknown", Dtype::name)
}

/// Bars of the exponents that occur.
fn histogram(exponents: &Histogram) -> String {
    let total = exponents.total().max(1) as f64;
    let most = exponents.counts().iter().copied().max().unwrap_or(0);
    let counts = || exponents.counts().iter().copied().enumerate().filter(|&(_, count)| count > 0);
    let rows = counts().map(|(exponent, count)| {
        [exponent.to_string(), text::percent(count as f64 / total), count.to_string()]
    });
    let table = text::table(["exponent", "share", "weights"], rows);
    let bars = iter::once(0).chain(counts().map(|(_, count)| (BAR * count + most / 2) / most));
    let lines = table
        .lines()
        .zip(bars)
        .map(|(row, bar)| format!("{row}  {}", "█".repeat(bar as usize)).trim_end().to_owned());
    let lines: Vec<String> = lines.collect();
    format!("{}\n{} of 256 exponents occur", lines.join("\n"), exponents.used())
}

pub(super) fn part_json(part: &Part<'_>, source: &Path, tensors: bool) -> Value {
    let model = part.model;
    let (weights_files, side_files) = file_counts(model);
    let blocks: Vec<Value> = model
        .blocks()
        .zip(&part.blocks)
        .map(|(block, found)| {
            let mut value = found.json();
            if tensors {
                let rows = block.tensors().zip(&found.tensors);
                value["tensors"] = rows.map(|(tensor, row)| tensor_json(&tensor, row)).collect();
            }
            value
        })
        .collect();
    json!({
        "command": "inspect",
        "source": source.to_string_lossy(),
        "identity": model.identity().to_string(),
        "complete": model.is_complete(),
        "metadata": model.metadata().collect::<BTreeMap<_, _>>(),
        "shards": shards(model),
        "weights_files": weights_files,
        "side_files": side_files,
        "container_bytes": container_bytes(model),
        "tensor_count": part.total.tensors,
        "unknown_tensors": unknown_tensors(model),
        "total": part.total.json(),
        "blocks": blocks,
        "exponents": part.exponents.as_ref().map(|exponents| exponents.counts().to_vec()),
    })
}

fn shards(model: &Model) -> Vec<Value> {
    let shards = model.shards().iter();
    shards
        .map(|shard| {
            let record = &shard.directory().shard;
            json!({
                "path": shard.path().to_string_lossy(),
                "index": record.shard_index.get(),
                "count": record.shard_count.get(),
                "bytes": shard.file_length(),
            })
        })
        .collect()
}

fn tensor_json(tensor: &Tensor<'_>, figures: &Figures) -> Value {
    let mut value = figures.json();
    value["name"] = json!(tensor.name());
    value["dtype"] = json!(dtype(tensor));
    value["shape"] = json!(tensor.shape());
    value["encoding"] = json!(tensor.encoding().name());
    value["hash"] = json!(tensor.hash().to_string());
    if tensor.encoding() == Encoding::Alias {
        value["target"] = json!(tensor.target().name());
    }
    value
}
