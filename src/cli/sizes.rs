//! Sizes before and after, of each model and in sum: what `compress`, `convert` and `estimate`
//! answer.

use std::path::Path;

use df11::{
    Dtype, Model, Report,
    hazmat::Shard,
    source::{Component, LeftOut},
};
use serde_json::{Value, json};

use super::text::{self, Table};

/// What a component of a pipeline is called, by its folder; the files of no component have none.
pub(super) fn component_name(folder: &str) -> &str {
    if folder.is_empty() { "other files" } else { folder }
}

/// A document about a component, with its folder.
pub(super) fn of_component(folder: &str, mut json: Value) -> Value {
    json["component"] = json!(folder);
    json
}

/// Bytes of the containers of a model.
pub(super) fn container_bytes(model: &Model) -> u64 {
    model.shards().iter().map(Shard::file_length).fold(0, u64::saturating_add)
}

/// The reports of all models at a path.
pub(super) struct Sizes {
    /// By the folder of the model.
    models: Vec<(String, Report)>,
    pub(super) total: Report,
}

impl Sizes {
    /// Of models with their reports, in the same order.
    pub(super) fn new<M>(models: &[Component<M>], reports: Vec<Report>) -> Self {
        let total = Report::sum(&reports);
        let folders = models.iter().map(|component| component.folder.clone());
        Self { models: folders.zip(reports).collect(), total }
    }

    /// Sizes, bits and counts, a line each; of a pipeline with a table of its components.
    pub(super) fn text(&self) -> String {
        let mut text = text_of(&self.total);
        if self.models.len() > 1 {
            text.push_str("\n\n");
            text.push_str(&self.table());
            text.push('\n');
        }
        text
    }

    fn table(&self) -> String {
        let mut table = Table::new(["  component", "original", "stored", "ratio", "coded", "raw"]);
        let mut add = |name: &str, report: &Report| {
            let ratio = match report.original_bytes() {
                0 => "–".to_owned(),
                _ => text::percent(report.ratio()),
            };
            table.row([
                format!("  {}", text::printable(name)),
                text::bytes(report.original_bytes()),
                text::bytes(report.stored_bytes),
                ratio,
                report.coded_tensors.to_string(),
                report.raw_tensors.to_string(),
            ]);
        };
        for (name, report) in &self.models {
            add(component_name(name), report);
        }
        add("total", &self.total);
        let mut lines: Vec<String> = table.render().lines().map(str::to_owned).collect();
        for (line, (_, report)) in lines[1..].iter_mut().zip(&self.models) {
            if report.coded_tensors == 0 && report.raw_tensors > 0 {
                let dtypes: Vec<&str> = report.raw_bytes.keys().map(|dtype| dtype.name()).collect();
                line.push_str("  ");
                line.push_str(&dtypes.join(", "));
                line.push_str(": stored as it is");
            }
        }
        lines.join("\n")
    }

    /// The same for programs.
    pub(super) fn json(&self, command: &str, source: &Path, out: &Path, seconds: f64) -> Value {
        let mut json = json_of(&self.total);
        json["command"] = json!(command);
        json["source"] = json!(source.to_string_lossy());
        json["output"] = json!(out.to_string_lossy());
        json["seconds"] = json!(seconds);
        json["bytes_per_second"] = json!(text::per_second(self.total.source_bytes, seconds));
        if self.models.len() > 1 {
            let models = self.models.iter();
            json["components"] =
                models.map(|(folder, report)| of_component(folder, json_of(report))).collect();
        }
        json
    }
}

fn text_of(report: &Report) -> String {
    let result = match report.coded_tensors {
        0 => "nothing is compressed: no tensor is coded".to_owned(),
        _ => text::percent(report.ratio()),
    };
    let (original, stored) =
        (text::bytes(report.original_bytes()), text::bytes(report.stored_bytes));
    let mut lines = vec![format!("  size      {original} → {stored} ({result})")];
    if report.coded_weights > 0 {
        lines.push(format!(
            "  weights   {:.3} bits each; their own: {:.3} of exponent entropy + 8 of sign and \
            mantissa",
            report.bits_per_weight(),
            report.entropy()
        ));
    }
    lines.push(format!(
        "  tensors   {} coded, {} raw, {} in {}, {}",
        report.coded_tensors,
        report.raw_tensors,
        text::count(report.alias_tensors, "alias"),
        text::count(report.blocks, "block"),
        text::count(report.shards, "container")
    ));
    if !report.raw_bytes.is_empty() {
        lines.push(format!("  raw       {}", raw(report)));
    }
    for left_out in &report.left_out {
        lines.push(format!("  left out  {}: {}", text::printable(&left_out.path), left_out.reason));
    }
    lines.extend(report.notes.iter().map(|note| format!("  note      {}", text::printable(note))));
    lines.join("\n")
}

/// What is stored as it is, and why.
fn raw(report: &Report) -> String {
    let of_dtype = |(dtype, &bytes): (&Dtype, &u64)| {
        let reason = match dtype {
            Dtype::BF16 => "small, would not shrink, or raw was asked for",
            _ => "only BF16 is coded",
        };
        format!("{} of {} ({reason})", text::bytes(bytes), dtype.name())
    };
    report.raw_bytes.iter().map(of_dtype).collect::<Vec<_>>().join(", ")
}

/// Files that were found and left out, for programs.
pub(super) fn left_out_json(files: &[LeftOut]) -> Value {
    files.iter().map(|file| json!({ "path": file.path, "reason": file.reason })).collect()
}

fn json_of(report: &Report) -> Value {
    let raw_bytes: serde_json::Map<String, Value> = report
        .raw_bytes
        .iter()
        .map(|(dtype, bytes)| (dtype.name().to_owned(), json!(bytes)))
        .collect();
    json!({
        "source_bytes": report.source_bytes,
        "side_bytes": report.side_bytes,
        "stored_bytes": report.stored_bytes,
        "stored_side_bytes": report.stored_side_bytes,
        "ratio": report.ratio(),
        "bits_per_weight": report.bits_per_weight(),
        "entropy_bits_per_weight": report.entropy(),
        "coded_weights": report.coded_weights,
        "coded_tensors": report.coded_tensors,
        "raw_tensors": report.raw_tensors,
        "raw_bytes": raw_bytes,
        "alias_tensors": report.alias_tensors,
        "blocks": report.blocks,
        "shards": report.shards,
        "left_out": left_out_json(&report.left_out),
        "notes": report.notes,
    })
}
