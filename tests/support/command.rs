//! The command, run as people and programs run it, in a folder with a small model.
#![allow(dead_code, reason = "each user needs another part")]

use std::{
    fs,
    ops::Deref,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use df11::hazmat::demo;
use serde_json::Value;
use tempfile::TempDir;

use crate::container::{Item, weights_file};

pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_df11");

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Sends a run a signal, such as `-INT`.
#[cfg(unix)]
pub(crate) fn signal(run: &Child, name: &str) {
    let pid = run.id().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

/// A folder of its own for a test, in which the command runs. Its arguments are the words of a
/// line.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// The whole path, as an argument.
    pub(crate) fn arg(&self, name: &str) -> String {
        self.path(name).into_os_string().into_string().unwrap()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        names(self.root())
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Writes a file, and makes the folders above it.
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Writes a weights file with these tensors.
    pub(crate) fn weights(&self, name: &str, items: &[Item]) {
        self.write(name, weights_file(items));
    }

    pub(crate) fn flip_middle_byte(&self, name: &str) {
        let mut bytes = self.read(name);
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        self.write(name, bytes);
    }

    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new(BINARY);
        command.args(line.split_whitespace()).current_dir(self.root()).stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    /// Starts the command.
    pub(crate) fn start(&self, line: &str) -> Child {
        let mut command = self.command(line);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Waits until work has begun in a folder, which shows in a temporary file or folder.
    pub(crate) fn wait_for_part(&self, folder: &str) {
        let start = Instant::now();
        while !names(&self.path(folder)).iter().any(|name| name.starts_with(".df11-")) {
            assert!(start.elapsed() < Duration::from_secs(60), "no work in a minute");
            thread::sleep(Duration::from_micros(200));
        }
    }

    pub(crate) fn good(&self, line: &str) -> String {
        let output = self.run(line);
        assert_eq!(output.status.code(), Some(0), "{line}: {}", text(&output.stderr));
        let told = "nothing on standard error, and no bar, where it is no terminal";
        assert_eq!(text(&output.stderr), "", "{line}: {told}");
        text(&output.stdout).to_owned()
    }

    pub(crate) fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.good(&format!("{line} --json"))).unwrap()
    }

    /// Like [`assert_fails`], with nothing on standard output.
    pub(crate) fn fails(&self, line: &str, code: i32, parts: &[&str]) {
        let output = self.run(line);
        assert_fails(&output, code, parts);
        assert_eq!(text(&output.stdout), "", "{line}");
    }

    /// Runs a line of shell here, in which `df11` is the command.
    pub(crate) fn shell(&self, line: &str) -> Output {
        let line = format!("df11() {{ '{BINARY}' \"$@\"; }}; {line}");
        let mut command = Command::new("sh");
        command.args(["-c", &line]).current_dir(self.root()).stdin(Stdio::null());
        command.output().unwrap()
    }
}

/// A folder with the tiny checkpoint in `model`, and its container in `model.df11`.
pub(crate) struct Fixture {
    folder: Folder,
    pub(crate) model: PathBuf,
    pub(crate) container: PathBuf,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let folder = Folder::new();
        let container = demo::tiny_container(folder.root()).unwrap();
        Self { model: folder.path("model"), container, folder }
    }
}

impl Deref for Fixture {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.folder
    }
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
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
