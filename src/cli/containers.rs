//! What the verbs that make containers have in common: their arguments, their output, their answer.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use df11::{
    Error, Layout, Sources,
    hazmat::{
        Loading, Located,
        constants::{GAP_DEFAULT_BYTES_PER_THREAD, GAP_DEFAULT_THREADS_PER_BLOCK},
        gap::Geometry,
    },
};
use serde_json::{Value, json};

use super::{Answer, Failure, session::Removed, sizes::Sizes, text};

#[derive(Args)]
pub(super) struct Verification {
    /// Decode everything again and compare all hashes before the output gets its name (the default)
    #[arg(long, overrides_with = "no_verify")]
    verify: bool,
    /// Trust the encoder
    #[arg(long, overrides_with = "verify")]
    no_verify: bool,
}

impl Verification {
    pub(super) const fn is_wanted(&self) -> bool {
        !self.no_verify
    }
}

#[derive(Args, Clone, Copy, Default)]
pub(super) struct LayoutArgs {
    /// How BF16 tensors are stored [default: tile, or gap where its geometry is named]
    #[arg(long, value_enum, hide_default_value = true)]
    layout: Option<LayoutName>,
    /// Advanced: bitstream bytes a thread of the gap layout: 8, 16, 32 or 64 [default: 32]
    #[arg(long, value_name = "N")]
    bytes_per_thread: Option<u32>,
    /// Advanced: threads a thread block of the gap layout: 64, 128, 256, 512 or 1024 [default: 128]
    #[arg(long, value_name = "N")]
    threads_per_block: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum LayoutName {
    /// Huffman-coded pairs of exponents in tiles, where that is smaller
    Tile,
    /// Huffman-coded exponents with a gap array, as in the paper, where that is smaller
    Gap,
    /// As they are
    Raw,
}

impl LayoutArgs {
    pub(super) fn layout(self) -> Result<Layout, Failure> {
        let geometry = self.bytes_per_thread.is_some() || self.threads_per_block.is_some();
        let name = self.layout.unwrap_or(if geometry { LayoutName::Gap } else { LayoutName::Tile });
        if geometry && name != LayoutName::Gap {
            let problem = "bytes a thread and threads a block are numbers of the gap layout";
            return Err(Error::parameter(problem, "leave them out, or choose --layout gap").into());
        }
        let geometry = Geometry::new(
            self.bytes_per_thread.unwrap_or(GAP_DEFAULT_BYTES_PER_THREAD),
            self.threads_per_block.unwrap_or(GAP_DEFAULT_THREADS_PER_BLOCK),
        )?;
        Ok(match name {
            LayoutName::Gap => Layout::Gap(geometry),
            LayoutName::Tile => Layout::Tile,
            LayoutName::Raw => Layout::Raw,
        })
    }
}

/// What is told of containers that were written: `json` is the document of their sizes.
pub(super) fn answer(
    mut json: Value,
    sizes: &Sizes,
    out: &Path,
    seconds: f64,
    verified: bool,
    removed: &Removed,
) -> Answer {
    json["written"] = json!(true);
    json["verified"] = json!(verified);
    let text = format!(
        "{}\n{}\n  time      {}, {}{}",
        text::path(out),
        sizes.text(),
        text::duration(seconds),
        text::rate(sizes.total.source_bytes, seconds),
        if verified { ", verified bit for bit" } else { ", not verified" }
    );
    let mut answer = Answer { text, json };
    removed.add_to(&mut answer);
    add_loading(&mut answer, out);
    answer
}

/// Ends an answer with the way to load what was written.
fn add_loading(answer: &mut Answer, out: &Path) {
    let python = Loading::of(out).python;
    answer.text.push_str("\n\nLoad it with Python:");
    for line in python.lines() {
        answer.text.push_str("\n  ");
        answer.text.push_str(&text::printable(line));
    }
    if out.is_file() && has_config(out) {
        let (out, folder) = (text::path(out), text::path(&out.with_extension("")));
        let hint =
            format!("\nTransformers and vLLM load folders: df11 convert {out} {folder}-df11");
        answer.text.push_str(&hint);
    }
    answer.json["load"] = json!(python);
}

/// Whether a container holds what transformers asks of a folder.
fn has_config(container: &Path) -> bool {
    df11::open(container).is_ok_and(|model| {
        model.shards().iter().map(df11::hazmat::Shard::directory).any(|directory| {
            directory.files.iter().any(|file| directory.file_path(file) == "config.json")
        })
    })
}

/// `SRC.df11` beside the source, or `SRC-df11` of a pipeline, which becomes a folder; the extension
/// of a file gives way.
pub(super) fn default_out(place: &Located, models: &Sources) -> Result<PathBuf, Failure> {
    let source = place.path.as_path();
    let end = if models.is_pipeline() { "-df11" } else { ".df11" };
    if let Some(name) = place.repository.as_ref().filter(|_| place.by_name) {
        // In the current folder, and not in the cache.
        let name = name.rsplit('/').next().unwrap_or(name);
        return Ok(PathBuf::from(format!("{name}{end}")));
    }
    let named = named(source)?;
    let name = if named.is_dir() { named.file_name() } else { named.file_stem() };
    let mut name = name
        .ok_or_else(|| {
            Error::parameter(format!("{} has no name", source.display()), "name an output with -o")
        })?
        .to_owned();
    name.push(end);
    Ok(named.with_file_name(name))
}

/// The same path, or the one that it stands for if it ends in `.` or `..` and so has no name.
pub(super) fn named(path: &Path) -> Result<PathBuf, Error> {
    if path.file_name().is_some() {
        return Ok(path.to_owned());
    }
    path.canonicalize().map_err(|error| Error::io("opening", path, error))
}

/// A source that needs no compression.
pub(super) fn compressed_already(path: &Path, remedy: &str) -> Failure {
    Error::parameter(format!("{} is compressed already", path.display()), remedy).into()
}
