//! Findings as text and JSON.

use std::{collections::BTreeMap, path::Path};

use df11::{
    Encoding, Tensor,
    hazmat::{format::records::FILE_WEIGHTS, huffman::Histogram},
};
use serde_json::{Value, json};

use super::{Findings, Inspected};
use crate::cli::{
    figures::{self, bits},
    sizes::container_bytes,
    text::{self, Table},
};

/// Characters of the longest bar.
const BAR: u64 = 40;

/// Bytes of the containers of all components.
pub(super) fn stored_bytes(parts: &[Inspected<'_>]) -> u64 {
    parts
        .iter()
        .map(|(component, _)| container_bytes(&component.model))
        .fold(0, u64::saturating_add)
}

/// The sum of all components.
pub(super) fn totals(parts: &[Inspected<'_>]) -> String {
    let (total, stored) = (super::sum_of_all(parts), stored_bytes(parts));
    format!(
        "holds     {}\n{}",
        text::count(total.tensors, "tensor"),
        size(total.decoded_bytes, stored)
    )
}

fn size(decoded: u64, stored: u64) -> String {
    let sizes =
        format!("size      {} decoded, {} stored", text::bytes(decoded), text::bytes(stored));
    if decoded == 0 {
        return sizes;
    }
    format!("{sizes} ({})", text::percent(stored as f64 / decoded as f64))
}

pub(super) fn text(findings: &Findings<'_>, tensors: bool) -> String {
    let mut parts = vec![summary(findings)];
    if !findings.blocks.is_empty() {
        parts.push(figures::table(&findings.blocks, &findings.total));
    }
    if tensors {
        parts.push(tensor_table(findings));
    }
    parts.join("\n\n")
}

fn summary(findings: &Findings<'_>) -> String {
    let model = findings.model;
    let stored = container_bytes(findings.model);
    let decoded = findings.total.decoded_bytes;
    let (weights, side) = file_counts(findings);
    let mut lines = vec![
        format!("identity  {}", model.identity()),
        format!(
            "holds     {} in {}, {}; {} and {}",
            text::count(findings.total.tensors, "tensor"),
            text::count(findings.blocks.len() as u64, "block"),
            text::count(model.shards().len() as u64, "container"),
            text::count(weights, "weights file"),
            text::count(side, "side file"),
        ),
        size(decoded, stored),
    ];
    for (key, value) in model.metadata() {
        lines.push(format!("metadata  {} = {}", text::printable(key), text::printable(value)));
    }
    if !model.is_complete() {
        lines.push("shards    not all of the model's shards are here".to_owned());
    }
    let unknown = unknown_tensors(findings);
    if unknown > 0 {
        let verb = if unknown == 1 { "is" } else { "are" };
        let tensors = text::count(unknown, "tensor");
        lines.push(format!(
            "unknown   {tensors} {verb} stored in a way that this version does not know; update \
            df11"
        ));
    }
    if findings.exponents.is_none() && findings.total.weights > 0 {
        lines.push(
            "entropy   not measured; --entropy decodes the weights and measures it".to_owned(),
        );
    }
    lines.join("\n")
}

/// Tensors of encodings or dtypes of a newer version.
fn unknown_tensors(findings: &Findings<'_>) -> u64 {
    let tensors = findings.model.tensors();
    tensors.filter(|tensor| matches!(tensor.target().encoding(), Encoding::Unknown(_))).count()
        as u64
}

/// Weights files, and side files that the containers record.
fn file_counts(findings: &Findings<'_>) -> (u64, u64) {
    let files = findings.model.shards().iter().flat_map(|shard| &shard.directory().files);
    files.fold((0, 0), |(weights, side), file| {
        if file.kind == FILE_WEIGHTS { (weights + 1, side) } else { (weights, side + 1) }
    })
}

fn tensor_table(findings: &Findings<'_>) -> String {
    let mut table = Table::new([
        "tensor",
        "dtype",
        "shape",
        "encoding",
        "stored",
        "bits a weight",
        "entropy + 8",
    ]);
    for (block, rows) in findings.model.blocks().zip(&findings.tensors) {
        for (tensor, row) in block.tensors().zip(rows) {
            table.row([
                text::printable(&row.name),
                dtype(&tensor).to_owned(),
                format!("{:?}", tensor.shape()),
                tensor.encoding().name().to_owned(),
                text::bytes(row.figures.stored_bytes),
                bits(row.figures.bits_per_weight()),
                bits(row.figures.entropy().map(|entropy| entropy + 8.0)),
            ]);
        }
    }
    table.render()
}

fn dtype(tensor: &Tensor<'_>) -> &'static str {
    tensor.dtype().map_or("unknown", df11::Dtype::name)
}

/// Bars of the exponents that occur.
pub(super) fn histogram(exponents: &Histogram) -> String {
    let total = exponents.total().max(1) as f64;
    let most = exponents.counts().iter().copied().max().unwrap_or(0);
    let mut table = Table::new(["exponent", "share", "weights"]);
    let mut bars = vec![String::new()];
    for (exponent, &count) in exponents.counts().iter().enumerate().filter(|&(_, &count)| count > 0)
    {
        table.row([exponent.to_string(), text::percent(count as f64 / total), count.to_string()]);
        bars.push("█".repeat((BAR * count + most / 2).checked_div(most).unwrap_or(0) as usize));
    }
    let rows = table.render();
    let lines =
        rows.lines().zip(bars).map(|(row, bar)| format!("{row}  {bar}").trim_end().to_owned());
    let lines: Vec<String> = lines.collect();
    format!(
        "{}\n{} of 256 exponents occur; entropy of all together {:.3} bits",
        lines.join("\n"),
        exponents.used(),
        exponents.entropy()
    )
}

pub(super) fn json(findings: &Findings<'_>, source: &Path, tensors: bool) -> Value {
    let model = findings.model;
    let (weights_files, side_files) = file_counts(findings);
    let blocks: Vec<Value> = model
        .blocks()
        .enumerate()
        .map(|(index, block)| {
            let mut value = findings.blocks[index].json();
            if tensors {
                let rows = block.tensors().zip(&findings.tensors[index]);
                value["tensors"] =
                    rows.map(|(tensor, row)| tensor_json(&tensor, &row.figures)).collect();
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
        "shards": shards(findings),
        "weights_files": weights_files,
        "side_files": side_files,
        "container_bytes": container_bytes(findings.model),
        "tensor_count": findings.total.tensors,
        "unknown_tensors": unknown_tensors(findings),
        "total": findings.total.json(),
        "blocks": blocks,
        "exponents": findings.exponents.as_ref().map(|exponents| exponents.counts().to_vec()),
    })
}

fn shards(findings: &Findings<'_>) -> Vec<Value> {
    let shards = findings.model.shards().iter();
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

fn tensor_json(tensor: &Tensor<'_>, figures: &figures::Figures) -> Value {
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
