//! The Python that would use df11, and the releases of the libraries in it.

use std::{env, ffi::OsString, process::Command};

use serde_json::{Value, json};

use super::Finding;

/// The interpreter whose command this is: the Python package sets it.
const INTERPRETER: &str = "DF11_PYTHON";

/// What `df11/_doctor.py` tells, of the interpreter whose command this is, else of `python3`.
pub(super) fn finding() -> Finding {
    let python = env::var_os(INTERPRETER).unwrap_or_else(|| OsString::from("python3"));
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
