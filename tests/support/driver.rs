//! The stand-in for the library of the NVIDIA driver: compiled from `driver.c`, found by
//! `LD_LIBRARY_PATH`.
#![allow(dead_code, reason = "each user needs another part")]

use std::{
    fs,
    io::{ErrorKind, Write as _},
    path::Path,
    process::Command,
};

use df11::gpu::Device;
use tempfile::TempDir;

pub(crate) const SOURCE: &str = include_str!("driver.c");
/// By the first of them the library is looked for; a machine with a GPU has its own under the
/// second.
pub(crate) const LIBRARY_NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
/// Constants of the kernels that multiply: the sizes of the structures that both sides know, and
/// some numbers for the rest. The kernels are loaded when a matrix is requested.
pub(crate) const CONSTANTS: (&str, &str) = (
    "df11_linear_constants",
    "848,848,720,1152,1024,896,176,48,80,112,96,4,8,2048,8,4,1024,6,8,8,4,2,64,8,256,393216,32,0,9,\
     9,32,9,16,64,128,0,0,1,0,0,0,0,0,4,16,16384,2048,640,2,2,3072,4,20,2,128,64,0,17408,32768,\
     16384,1024,32,320,4",
);

/// The stand-in's functions, by its source.
pub(crate) fn functions() -> Vec<&'static str> {
    let names =
        SOURCE.lines().filter_map(|line| Some(line.strip_prefix("int ")?.split_once('(')?.0));
    names.filter(|name| name.starts_with("cu")).collect()
}

/// A folder from which libraries can be loaded; not every folder for temporary files allows that.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A folder with the library. None if there is no compiler.
pub(crate) fn compile() -> Option<TempDir> {
    let folder = folder();
    let source = folder.path().join("driver.c");
    fs::write(&source, SOURCE).unwrap();
    let mut command = Command::new("cc");
    // Its functions call each other whatever others call them.
    command.args(["-shared", "-fPIC", "-Wl,-Bsymbolic", "-o"]);
    match command.arg(folder.path().join(LIBRARY_NAMES[0])).arg(&source).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(folder)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            assert!(std::env::var_os("DF11_REQUIRE_CC").is_none(), "no C compiler");
            // The harness hides what eprintln writes.
            std::io::stderr().write_all(b"SKIPPED: no C compiler\n").unwrap();
            None
        }
        Err(error) => panic!("cc: {error}"),
    }
}

/// Has a process find the library in this folder, which answers so.
pub(crate) fn answer(command: &mut Command, folder: &Path, answers: &[(&str, &str)]) {
    command.env("LD_LIBRARY_PATH", folder).env_remove("CUDA_VISIBLE_DEVICES");
    for (name, answer) in [&CONSTANTS].into_iter().chain(answers) {
        command.env(format!("DRIVER_{name}"), answer);
    }
}

/// How the stand-in of this process answers, if anybody said so.
pub(crate) fn setting(name: &str) -> Option<String> {
    std::env::var(format!("DRIVER_{name}")).ok()
}

/// Runs the test of this thread again, in a process with the stand-in, which answers so. It passes.
pub(crate) fn run_child(folder: &TempDir, answers: &[(&str, &str)]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = std::thread::current();
    command.args(["--exact", test.name().expect("the harness names it"), "--nocapture"]);
    answer(&mut command, folder.path(), &[&[("child", "1")], answers].concat());
    let output = command.output().unwrap();
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{command:?}: {said}{told}");
    assert!(said.contains("1 passed"), "{command:?} names a test");
}

/// The GPUs of the process where the test of this thread goes on. None in any other: that one runs
/// the test again, with the stand-in and as many GPUs.
pub(crate) fn devices<const N: usize>() -> Option<[Device; N]> {
    if setting("child").is_some() {
        return Some(std::array::from_fn(|ordinal| Device::open(ordinal).unwrap()));
    }
    if let Some(folder) = compile() {
        run_child(&folder, &[("devices", &N.to_string())]);
    }
    None
}
