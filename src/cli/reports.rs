//! The sizes that compression reports, for each model and in total: as text for people, and as a
//! JSON document.

use std::{path::Path, time::Instant};

use df11::{
    Dtype, Report,
    hazmat::is_coded,
    source::{Component, LeftOut},
};
use serde_json::{Value, json};

use super::text::{self, printable};

/// A run of a verb: what it reads, what it writes, and since when.
pub(super) struct Task<'a> {
    pub(super) verb: &'static str,
    pub(super) source: &'a Path,
    pub(super) out: &'a Path,
    pub(super) start: Instant,
}

impl Task<'_> {
    /// Adds the fields of every run to a document: this many bytes took this long.
    pub(super) fn add_to(&self, json: &mut Value, bytes: u64, seconds: f64) {
        json["command"] = json!(self.verb);
        json["source"] = json!(text::path_field(self.source));
        json["output"] = json!(text::path_field(self.out));
        json["seconds"] = json!(seconds);
        json["bytes_per_second"] = json!(text::per_second(bytes, seconds));
    }
}

/// The reports of all models at a path.
pub(super) struct Reports {
    /// Reports by the folder of the model.
    models: Vec<(String, Report)>,
    pub(super) total: Report,
}

impl Reports {
    /// Joins models with their reports, which come in the same order.
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

    /// The files that are in no container and are not hidden, if there are any.
    pub(super) fn lost(&self) -> Option<String> {
        let lost = self.total.left_out.iter().filter(|file| !file.is_hidden());
        let paths: Vec<String> = lost.map(|file| printable(&file.path)).collect();
        (!paths.is_empty()).then(|| paths.join(", "))
    }

    fn table(&self) -> String {
        let header = ["  component", "original", "stored", "ratio", "compressed", "raw"];
        let row = |(name, report): (&str, &Report)| {
            let ratio = match report.original_bytes() {
                0 => "–".to_owned(),
                _ => text::percent(report.ratio()),
            };
            [
                format!("  {}", printable(name)),
                text::bytes(report.original_bytes()),
                text::bytes(report.stored_bytes),
                ratio,
                report.coded_tensors.to_string(),
                report.raw_tensors.to_string(),
            ]
        };
        let models = self.models.iter().map(|(folder, report)| (component_name(folder), report));
        let table = text::table(header, models.chain([("total", &self.total)]).map(row));
        let mut lines: Vec<String> = table.lines().map(str::to_owned).collect();
        for (line, (_, report)) in lines[1..].iter_mut().zip(&self.models) {
            if report.coded_tensors == 0 && report.raw_tensors > 0 {
                let dtypes: Vec<&str> = report.raw_bytes.keys().map(|dtype| dtype.name()).collect();
                *line = format!("{line}  {}: not compressed", dtypes.join(", "));
            }
        }
        lines.join("\n")
    }

    /// The sizes for programs.
    pub(super) fn json(&self, task: &Task<'_>, seconds: f64) -> Value {
        let mut json = json_of(&self.total);
        task.add_to(&mut json, self.total.source_bytes, seconds);
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
        0 => "nothing is compressed".to_owned(),
        _ => text::percent(report.ratio()),
    };
    let (original, stored) =
        (text::bytes(report.original_bytes()), text::bytes(report.stored_bytes));
    let mut lines = vec![format!("  size      {original} → {stored} ({result})")];
    if report.coded_weights > 0 {
        lines.push(format!(
            "  weights   {:.2} bits per weight; the entropy limit is {:.2}",
            report.bits_per_weight(),
            report.entropy_limit()
        ));
    }
    if report.delta_weights > 0 {
        let bits = 8.0 * report.delta_bytes as f64 / report.delta_weights as f64;
        lines.push(format!(
            "  base      {} as differences from it, {bits:.3} bits per weight",
            text::count(report.delta_tensors, "tensor")
        ));
    }
    let aliases = match report.alias_tensors {
        0 => String::new(),
        count => format!(", {} (another tensor's bytes)", text::count(count, "alias")),
    };
    lines.push(format!(
        "  tensors   {} compressed, {} raw (uncompressed){aliases}; {} in {}",
        report.coded_tensors,
        report.raw_tensors,
        text::count(report.blocks, "block"),
        text::count(report.shards, "container")
    ));
    if !report.raw_bytes.is_empty() {
        lines.push(format!("  raw       {}", raw(report)));
    }
    for left_out in &report.left_out {
        lines.push(format!("  left out  {}: {}", printable(&left_out.path), left_out.reason));
    }
    lines.extend(report.notes.iter().map(|note| format!("  note      {}", printable(note))));
    lines.join("\n")
}

/// Says which weights are stored uncompressed, and why.
fn raw(report: &Report) -> String {
    let (floats, others): (Vec<_>, Vec<_>) =
        report.raw_bytes.iter().partition(|(dtype, _)| is_coded(**dtype));
    let parts = [
        (floats, "too small, would not shrink, or --layout raw"),
        (others, "not a float of 8, 16 or 32 bits"),
    ];
    let of =
        |(dtype, bytes): &(&Dtype, &u64)| format!("{} of {}", text::bytes(**bytes), dtype.name());
    let parts = parts.iter().filter(|(dtypes, _)| !dtypes.is_empty()).map(|(dtypes, reason)| {
        format!("{} ({reason})", dtypes.iter().map(of).collect::<Vec<_>>().join(", "))
    });
    parts.collect::<Vec<_>>().join("; ")
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
        "delta_tensors": report.delta_tensors,
        "delta_weights": report.delta_weights,
        "delta_bytes": report.delta_bytes,
        "raw_tensors": report.raw_tensors,
        "raw_bytes": raw_bytes,
        "alias_tensors": report.alias_tensors,
        "blocks": report.blocks,
        "shards": report.shards,
        "left_out": left_out_json(&report.left_out),
        "notes": report.notes,
    })
}

/// Name of a component of a pipeline, by its folder; the files of no component have none.
pub(super) fn component_name(folder: &str) -> &str {
    if folder.is_empty() { "other files" } else { folder }
}

/// A document about a component, with its folder.
pub(super) fn of_component(folder: &str, mut json: Value) -> Value {
    json["component"] = json!(folder);
    json
}
