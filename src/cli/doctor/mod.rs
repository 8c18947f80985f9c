//! `df11 doctor`: says what this machine has, and how to get what it lacks.

#[cfg(feature = "cudarc")]
mod gpu;
mod machine;
mod speeds;

use std::path::{Path, PathBuf};

use clap::Args;
use df11::{
    OpenOptions,
    hazmat::{
        Leftover, PENDING, SaveTarget,
        constants::{VERSION_MAJOR, VERSION_MINOR},
        platform::{MEMORY_FOLDER, TEMPORARY},
    },
    is_compressed,
    source::Component,
};
use serde_json::{Map, Value, json};

use super::{
    answer::{Answer, Failure},
    containers::container_bytes,
    reports::component_name,
    session::{check_interrupted, temporary_folder},
    text,
};

const AFTER_HELP: &str = "\
Examples:
  df11 doctor
  df11 doctor --folder /data --json";

/// Check this machine, and say how to fix what is missing
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Doctor {
    /// Folder to test (space, memory mapping) and to search for models and leftovers of killed
    /// runs [default: test the temporary folder, search the current one]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,

    /// Finish an interrupted save into the folder first
    #[arg(long, requires = "folder")]
    finish: bool,
}

/// One line of the report.
struct Finding {
    /// Stable key.
    name: &'static str,
    /// For people.
    text: String,
    /// For programs.
    value: Value,
    /// Remedy, where something could be better.
    remedy: Option<String>,
}

impl Finding {
    fn good(name: &'static str, text: impl Into<String>, value: Value) -> Self {
        Self { name, text: text.into(), value, remedy: None }
    }

    fn with_remedy(self, needed: bool, remedy: &str) -> Self {
        Self { remedy: needed.then(|| remedy.to_owned()), ..self }
    }

    /// Bytes that took so long.
    fn rate(name: &'static str, what: &str, bytes: u64, seconds: f64) -> Self {
        let value = json!({ "bytes_per_second": text::per_second(bytes, seconds) });
        Self::good(name, format!("{} {what}", text::rate(bytes, seconds)), value)
    }

    fn status(&self) -> &'static str {
        if self.remedy.is_some() { "warn" } else { "ok" }
    }
}

impl Doctor {
    pub(super) fn run(&self) -> Result<Answer, Failure> {
        let folder = self.folder.clone().unwrap_or_else(std::env::temp_dir);
        if self.finish {
            SaveTarget::lock(&folder)?;
        }
        let mut findings = vec![version(), build()];
        findings.extend(machine::findings(&folder));
        findings.push(leftovers(self.folder.as_deref().unwrap_or(Path::new("."))));
        findings.extend(self.folder.as_deref().and_then(models));
        check_interrupted()?;
        let place = temporary_folder(&folder);
        match &place {
            Ok(place) => findings.extend(speeds::findings(place.path())?),
            Err(error) => findings.push(unwritable(error)),
        }
        findings.extend(gpu::findings(place.ok().as_ref())?);
        Ok(Answer { text: lines(&findings), json: document(&findings, &folder) })
    }
}

/// The models in a folder, if it holds containers.
fn models(folder: &Path) -> Option<Finding> {
    if !is_compressed(folder).ok()? {
        return None;
    }
    let models = match OpenOptions::new().memory_map(false).open_all(folder) {
        Ok(models) => models,
        Err(error) => {
            let text = format!("cannot be opened: {error}");
            let finding = Finding::good("models", text, json!([]));
            return Some(
                finding.with_remedy(true, "download the folder again; df11 verify says more"),
            );
        }
    };
    let all = models.components().iter();
    let is_whole =
        models.missing().is_empty() && all.clone().all(|found| found.model.is_complete());
    let (mut texts, mut values) = (Vec::new(), Vec::new());
    for Component { folder, model, .. } in all {
        let bytes = container_bytes(model);
        let name = if models.is_pipeline() { component_name(folder) } else { folder };
        let (shards, count) = (model.shards().len() as u64, model.shard_count());
        texts.push(format!("{name} {} ({shards} of {count} containers)", text::bytes(bytes)));
        values.push(json!({
            "component": folder, "stored_bytes": bytes, "shards": shards, "shard_count": count,
        }));
    }
    texts.extend(models.missing().iter().map(|name| format!("{name} missing")));
    let finding = Finding::good("models", texts.join(", ").trim().to_owned(), values.into());
    Some(finding.with_remedy(!is_whole, "download the missing files, which df11 verify names"))
}

/// Leftovers of killed runs in a folder, and where models are compressed while they are loaded.
fn leftovers(folder: &Path) -> Finding {
    let mut folders = vec![folder.to_owned()];
    for other in [std::env::temp_dir(), MEMORY_FOLDER.into()] {
        let is_new = |known: &PathBuf| known.canonicalize().ok() != other.canonicalize().ok();
        if other.is_dir() && folders.iter().all(is_new) {
            folders.push(other);
        }
    }
    let all: df11::Result<Vec<_>> =
        folders.iter().map(|folder| df11::hazmat::leftovers(folder)).collect();
    let found = match all {
        Ok(found) => found.concat(),
        Err(error) => return Finding::good("leftovers", format!("unknown: {error}"), json!(null)),
    };
    let places: Vec<_> = folders.iter().map(|folder| folder.to_string_lossy()).collect();
    let place = places.join(", ");
    let paths: Vec<_> = found.iter().map(|leftover| leftover.path.to_string_lossy()).collect();
    let value = found.iter().zip(&paths).map(|(leftover, path)| {
        json!({ "path": path, "bytes": leftover.bytes, "is_output": leftover.is_output })
    });
    let value = value.collect();
    if found.is_empty() {
        return Finding::good(
            "leftovers",
            format!("no killed run left anything in {place}"),
            value,
        );
    }
    let bytes = found.iter().map(|leftover| leftover.bytes).fold(0, u64::saturating_add);
    let text =
        format!("{} left in {place} by killed runs: {}", text::bytes(bytes), paths.join(", "));
    let is_new = |leftover: &Leftover| leftover.path.ends_with(PENDING);
    let remedy = if found.iter().any(is_new) {
        "a save was interrupted: save there again, or finish it with df11 doctor --finish --folder \
        DIR; delete others, or let the next run that writes there do it"
    } else if found.iter().any(|leftover| leftover.is_output) {
        ".df11-old.* holds an earlier output, the only copy if its name has none: move it back or \
        delete it"
    } else {
        "delete them, or let the next run that writes there do it"
    };
    Finding::good("leftovers", text, value).with_remedy(true, remedy)
}

fn version() -> Finding {
    let (version, format) = (env!("CARGO_PKG_VERSION"), format!("{VERSION_MAJOR}.{VERSION_MINOR}"));
    let value = json!({ "crate": version, "format": format });
    Finding::good("version", format!("df11 {version}, format {format}"), value)
}

fn build() -> Finding {
    let debug = cfg!(debug_assertions);
    let text = format!(
        "{} for {} on {}",
        if debug { "debug build" } else { "release build" },
        std::env::consts::ARCH,
        std::env::consts::OS
    );
    let value =
        json!({ "debug": debug, "arch": std::env::consts::ARCH, "os": std::env::consts::OS });
    Finding::good("build", text, value)
        .with_remedy(debug, "a debug build is many times slower; build with cargo build --release")
}

fn unwritable(error: &df11::Error) -> Finding {
    Finding::good("mapping", format!("not tried: {error}"), json!(null))
        .with_remedy(true, &format!("name a writable folder with --folder, or set {TEMPORARY}"))
}

#[cfg(not(feature = "cudarc"))]
mod gpu {
    use df11::hazmat::TemporaryFolder;

    use super::{Failure, Finding, json};

    pub(super) fn findings(_: Option<&TemporaryFolder>) -> Result<Vec<Finding>, Failure> {
        let text = "not used by this build; build with the feature cuda";
        let value = json!({ "supported": false, "devices": [] });
        Ok(vec![Finding::good("gpu", text, value)])
    }
}

fn lines(findings: &[Finding]) -> String {
    let mut lines = Vec::new();
    for finding in findings {
        lines.push(format!(
            "{:4}  {:10}  {}",
            finding.status(),
            finding.name,
            text::printable(&finding.text)
        ));
        if let Some(remedy) = &finding.remedy {
            lines.push(format!("{:18}→ {remedy}", ""));
        }
    }
    lines.join("\n")
}

fn document(findings: &[Finding], folder: &Path) -> Value {
    let checks: Map<String, Value> = findings
        .iter()
        .map(|finding| {
            let check = json!({
                "status": finding.status(),
                "text": finding.text,
                "value": finding.value,
                "remedy": finding.remedy,
            });
            (finding.name.to_owned(), check)
        })
        .collect();
    json!({ "command": "doctor", "folder": folder.to_string_lossy(), "checks": checks })
}
