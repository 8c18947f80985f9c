//! `df11 decompress`: restores the original files, byte for byte.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args;
use df11::{
    DecompressOptions, Error, Models, Restored, decompress_all,
    hazmat::{check_replaceable, format::records::FILE_WEIGHTS, is_far, shown},
    source::LeftOut,
};
use serde_json::{Value, json};

use super::{
    answer::{Answer, Failure},
    containers::named,
    reports::{Task, component_name, left_out_json, of_component},
    session::{BaseArg, Session, Threads, add_removed, open_to_stream, tidy},
    text,
};

const AFTER_HELP: &str = "\
Examples:
  df11 decompress Llama-3.1-8B-df11 -o restored      to the folder restored
  df11 decompress model.df11 -o model.safetensors    if the model was one file

Each restored file is compared with the hash of the original before it gets its name. Other files \
beside the containers are copied and reported as unchecked.";

/// Restore the original files, byte for byte
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Decompress {
    /// A container, or the folder of a model or a pipeline
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// Output: one file if it ends in .safetensors, otherwise a folder [default: SRC without .df11
    /// or -df11]
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,
    /// Replace an earlier output
    #[arg(long)]
    force: bool,
    /// Copy side files that have changed and skip missing ones, instead of failing
    #[arg(long)]
    keep_changed: bool,
    #[command(flatten)]
    base: BaseArg,
    #[command(flatten)]
    threads: Threads,
}

impl Decompress {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        let start = Instant::now();
        let models = open_to_stream(&self.source, &self.base)?;
        let out = self.out.clone().map_or_else(|| default_out(&self.source, &models), Ok)?;
        if self.force {
            check_replaceable(&self.source, &out, "safetensors")?;
        }
        let removed = tidy(&out);
        let options =
            DecompressOptions::new().overwrite(self.force).keep_changed(self.keep_changed);
        let progress = session.progress();
        let parts = self.threads.run(|| Ok(decompress_all(&models, &out, &options, &progress)?))?;
        let seconds = start.elapsed().as_secs_f64();
        let restored = sum(&parts);
        let mut text = format!(
            "{}\n  restored  {} in {}, {}; {}",
            text::path(&out),
            text::bytes(restored.bytes),
            text::duration(seconds),
            text::rate(restored.bytes, seconds),
            proof(&restored),
        );
        text.push_str(&exceptions(&restored));
        let mut json = document(&restored);
        let task = Task { verb: "decompress", source: &self.source, out: &out, start };
        task.add_to(&mut json, restored.bytes, seconds);
        if models.is_pipeline() {
            let parts = models.components().iter().zip(&parts);
            text.push_str("\n\n");
            text.push_str(&text::table(
                ["  component", "files", "bytes"],
                parts.clone().map(|(component, restored)| {
                    let name = text::printable(component_name(&component.folder));
                    let bytes = text::bytes(restored.bytes);
                    [format!("  {name}"), restored.files.to_string(), bytes]
                }),
            ));
            json["components"] = parts
                .map(|(component, restored)| of_component(&component.folder, document(restored)))
                .collect();
        }
        let mut answer = Answer { text, json };
        add_removed(&mut answer, &removed);
        Ok(answer)
    }
}

/// `NAME` of `NAME.df11` and `NAME-df11`; `NAME.safetensors` if the model was one file.
fn default_out(source: &Path, models: &Models) -> Result<PathBuf, Failure> {
    let unnamed = || {
        Error::parameter(
            format!("{} gives no name for the output", text::path(source)),
            "name it with -o",
        )
    };
    let shown = shown(source);
    // Containers from a network are restored into the current folder.
    let local = if is_far(source) { shown.file_name().map(Path::new) } else { Some(&*shown) };
    let named = named(local.ok_or_else(unnamed)?)?;
    let name = named.file_name().and_then(|name| name.to_str()).ok_or_else(unnamed)?;
    let name = [".df11", "-df11", "_df11"].iter().find_map(|end| name.strip_suffix(end));
    let name = name.filter(|name| !name.is_empty()).ok_or_else(unnamed)?;
    let mut files = models
        .components()
        .iter()
        .flat_map(|component| component.model.shards())
        .flat_map(|shard| &shard.directory().files);
    let is_one_file =
        matches!((files.next(), files.next()), (Some(file), None) if file.kind == FILE_WEIGHTS);
    let end = if is_one_file { ".safetensors" } else { "" };
    Ok(named.with_file_name(format!("{name}{end}")))
}

/// Sum of what was written of all models.
fn sum(parts: &[Restored]) -> Restored {
    let mut sum = Restored::default();
    for part in parts {
        sum.bytes += part.bytes;
        sum.files += part.files;
        sum.changed.extend(part.changed.iter().cloned());
        sum.missing.extend(part.missing.iter().cloned());
        sum.unchecked.extend(part.unchecked.iter().cloned());
        sum.left_out.extend(part.left_out.iter().cloned());
    }
    sum
}

fn document(restored: &Restored) -> Value {
    json!({
        "bytes": restored.bytes,
        "files": restored.files,
        "changed": restored.changed,
        "missing": restored.missing,
        "unchecked": restored.unchecked,
        "left_out": left_out_json(&restored.left_out),
    })
}

/// Says what the hashes have proved, and of which files.
fn proof(restored: &Restored) -> String {
    let others = [&restored.changed, &restored.missing, &restored.unchecked];
    if others.iter().all(|paths| paths.is_empty()) {
        return "every file has the hash of the original".to_owned();
    }
    format!(
        "{} have the hash of the original; the rest are listed below",
        text::count(restored.files, "file")
    )
}

/// A line for each file that is no proven original.
fn exceptions(restored: &Restored) -> String {
    let lines = [
        ("changed  ", &restored.changed),
        ("missing  ", &restored.missing),
        ("unchecked", &restored.unchecked),
    ];
    let mut out = String::new();
    for (what, paths) in lines {
        out.extend(paths.iter().map(|path| format!("\n  {what} {}", text::printable(path))));
    }
    let left_out = restored.left_out.iter().map(|LeftOut { path, reason }| {
        format!("\n  left out  {}: {}", text::printable(path), text::printable(reason))
    });
    out.extend(left_out);
    out
}
