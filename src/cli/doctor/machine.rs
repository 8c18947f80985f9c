//! Cores, memory, instruction sets, page size, disk, and the Python that would use df11.

use std::{env, ffi::OsString, path::Path, process::Command, thread};

use df11::hazmat::platform;
use serde_json::{Value, json};

use super::Finding;
use crate::cli::text;

/// Free memory and disk below which a warning is due.
const LITTLE_MEMORY: u64 = 512 << 20;
const LITTLE_DISK: u64 = 1 << 30;
/// The interpreter whose command this is: the Python package sets it.
const INTERPRETER: &str = "DF11_PYTHON";

pub(super) fn findings(folder: &Path) -> Vec<Finding> {
    vec![cores(), memory(), instructions(), pages(), disk(folder), python()]
}

fn cores() -> Finding {
    match thread::available_parallelism() {
        Ok(cores) => Finding::good("cores", format!("{cores} usable"), json!(cores.get())),
        Err(error) => Finding::good("cores", format!("unknown: {error}"), json!(null))
            .with_remedy(true, "give their number with --threads"),
    }
}

fn memory() -> Finding {
    let Some((total, available)) = platform::memory() else {
        return Finding::good("memory", "unknown on this system", json!(null));
    };
    let text = format!("{}, {} available", text::bytes(total), text::bytes(available));
    Finding::good("memory", text, json!({ "total": total, "available": available })).with_remedy(
        available < LITTLE_MEMORY,
        "close other programs; compression needs some MiB per thread",
    )
}

/// Instructions that checksums, hashes and decoding are fast with.
fn instructions() -> Finding {
    let known = known_instructions();
    let names = |present| -> Vec<&str> {
        let those = known.iter().filter(|(_, is_there, _)| *is_there == present);
        those.map(|(name, ..)| *name).collect()
    };
    let (present, missing) = (names(true), names(false));
    let needed = known.iter().any(|(_, is_there, needed)| *needed && !is_there);
    let mut text = if present.is_empty() { "none known".to_owned() } else { present.join(" ") };
    if !missing.is_empty() {
        text = format!("{text}; not {}", missing.join(" "));
    }
    Finding::good("cpu", text, json!({ "present": present, "missing": missing })).with_remedy(
        needed,
        "results are the same but checksums and hashes are slow; use a newer processor or \
        hypervisor setting",
    )
}

/// Name, whether it is there, and whether its absence hurts; none on processors for which the code
/// asks for none.
fn known_instructions() -> Vec<(&'static str, bool, bool)> {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    macro_rules! features {
        ($($name:tt $needed:literal),*) => {
            vec![$(($name, is_detected!($name), $needed)),*]
        };
    }
    #[cfg(target_arch = "x86_64")]
    let known = {
        use std::is_x86_feature_detected as is_detected;
        features![
            "sse4.1" true, "pclmulqdq" true, "avx2" true,
            "bmi2" false, "avx512f" false, "vpclmulqdq" false
        ]
    };
    #[cfg(target_arch = "aarch64")]
    let known = {
        use std::arch::is_aarch64_feature_detected as is_detected;
        features!["neon" true, "crc" true, "pmull" true]
    };
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let known = Vec::new();
    known
}

fn pages() -> Finding {
    let bytes = platform::page_size();
    Finding::good("page size", format!("{bytes} bytes"), json!(bytes))
}

fn disk(folder: &Path) -> Finding {
    let place = folder.display();
    match platform::free_bytes(folder) {
        Ok(free) => Finding::good(
            "disk",
            format!("{} free in {place}", text::bytes(free)),
            json!({ "free": free }),
        )
        .with_remedy(
            free < LITTLE_DISK,
            &format!(
                "free some space, or set {} to a folder on a larger disk",
                platform::TEMPORARY
            ),
        ),
        Err(error) => Finding::good("disk", format!("unknown in {place}: {error}"), json!(null))
            .with_remedy(true, "name a folder that exists"),
    }
}

/// Runs `df11/_doctor.py` in the interpreter whose command this is, else that of the system.
fn python() -> Finding {
    let python = env::var_os(INTERPRETER).unwrap_or_else(|| OsString::from(platform::PYTHON));
    let name = python.display().to_string();
    // Nothing is imported from the current folder, which may be anybody's.
    let mut command = Command::new(&python);
    command.args(["-m", "df11._doctor"]).env("PYTHONSAFEPATH", "1");
    let Ok(output) = command.output() else {
        return Finding::good("python", format!("there is no {name}"), json!(null));
    };
    let told = serde_json::from_slice::<Value>(&output.stdout).ok();
    let Some(mut told) = told.filter(|_| output.status.success()) else {
        let remedy = "pip install ./python of a checkout puts it there";
        let text = format!("{name} has no package df11; {remedy}");
        return Finding::good("python", text, json!(null));
    };
    let text = told["text"].as_str().unwrap_or_default().to_owned();
    let remedy = told["remedy"].as_str().unwrap_or_default().to_owned();
    Finding::good("python", text, told["value"].take()).with_remedy(!remedy.is_empty(), &remedy)
}
