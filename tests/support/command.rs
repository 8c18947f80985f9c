//! The command, run as people and programs run it, on a small model.
#![allow(dead_code, reason = "each user needs another part")]

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use df11::hazmat::demo;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_df11");

pub(crate) fn df11<A: AsRef<OsStr>>(arguments: &[A]) -> Output {
    Command::new(BINARY).args(arguments).stdin(Stdio::null()).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// A folder with the tiny checkpoint in `model`, and its container.
pub(crate) struct Fixture {
    pub(crate) folder: TempDir,
    pub(crate) model: PathBuf,
    pub(crate) container: PathBuf,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let container = demo::tiny_container(folder.path()).unwrap();
        Self { model: folder.path().join("model"), container, folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// As an argument.
    pub(crate) fn arg(&self, name: &str) -> String {
        self.path(name).into_os_string().into_string().unwrap()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        names(self.folder.path())
    }
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub(crate) fn good<A: AsRef<OsStr>>(arguments: &[A]) -> String {
    let output = df11(arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(
        text(&output.stderr),
        "",
        "nothing on standard error, and no bar, where it is no terminal"
    );
    text(&output.stdout).to_owned()
}

pub(crate) fn json<A: AsRef<OsStr>>(arguments: &[A]) -> Value {
    let mut arguments: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
    arguments.push(OsStr::new("--json"));
    serde_json::from_str(&good(&arguments)).unwrap()
}

/// Checks the exit code and the one line, in which all of `parts` occur.
pub(crate) fn assert_fails(output: &Output, code: i32, parts: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("df11: ") && error.contains("; "), "a message and a remedy: {error}");
    for part in parts {
        assert!(error.contains(part), "{part:?} in {error}");
    }
}

pub(crate) fn fails<A: AsRef<OsStr>>(arguments: &[A], code: i32, parts: &[&str]) {
    let output = df11(arguments);
    assert_fails(&output, code, parts);
    assert_eq!(text(&output.stdout), "");
}

/// A safetensors file with this header and `data` bytes of data.
pub(crate) fn safetensors(path: &Path, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    fs::write(path, bytes).unwrap();
}
