//! The stand-in for the library of the NVIDIA driver: compiled from `driver.c`, found by
//! `LD_LIBRARY_PATH`.
#![allow(dead_code, reason = "each user needs another part")]

use std::{
    fs,
    io::{ErrorKind, Write as _},
    process::Command,
};

use df11::gpu::Device;
use tempfile::TempDir;

pub(crate) const SOURCE: &str = include_str!("driver.c");
/// By the first of them the library is looked for; a machine with a GPU has its own under the
/// second.
pub(crate) const LIBRARY_NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
/// What the kernels were compiled with: the sizes of the structures that both sides know, and of
/// the rest some.
pub(crate) const CONSTANTS: [(&str, &str); 2] = [
    ("df11_gap_constants", "128,16880,24,1,1,1,1,1,1,1,1"),
    ("df11_tile_constants", "128,16384,24,8,1,1,1"),
];

/// Likewise of the kernels that multiply, which are loaded when a matrix is asked for.
pub(crate) const LINEAR_CONSTANTS: (&str, &str) = (
    "df11_linear_constants",
    "1024,96,80,112,192,96,4,8,2048,8,4,1024,8,64,4,30,4,25,20,4,8,262144,256,8,32,0,9,9,9,1,0,0,0,\
     0,4,16,16384,2048,640,2,2,3072,4,20,2,128,64,0,17408,32768,16384,1024,32,320,4",
);

/// The stand-in's functions, by its source.
pub(crate) fn functions() -> Vec<&'static str> {
    let names =
        SOURCE.lines().filter_map(|line| Some(line.strip_prefix("int ")?.split_once('(')?.0));
    names.filter(|name| name.starts_with("cu")).collect()
}

/// Where libraries can be loaded from, which not every folder for temporary files allows.
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

/// Set where the driver is the stand-in.
const CHILD: &str = "DF11_TEST_STAND_IN";

/// A process that runs the test of this name again, with the stand-in in this folder and this
/// many GPUs.
pub(crate) fn child(folder: &TempDir, name: &str, devices: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env(CHILD, "1");
    command.env_remove("CUDA_VISIBLE_DEVICES").env("DRIVER_devices", devices.to_string());
    let constants = CONSTANTS.iter().chain([&LINEAR_CONSTANTS]);
    command.envs(constants.map(|(name, answer)| (format!("DRIVER_{name}"), answer)));
    command
}

/// Runs a child; its test passes.
pub(crate) fn run_child(mut command: Command) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{command:?}: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("1 passed"), "{command:?} names a test");
}

/// Whether this process is a child.
pub(crate) fn in_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// The GPUs of the process where the test of this name goes on. None in any other: that one runs
/// the test again, with the stand-in and as many GPUs.
pub(crate) fn devices<const N: usize>(name: &str) -> Option<[Device; N]> {
    if in_child() {
        return Some(std::array::from_fn(|ordinal| Device::open(ordinal).unwrap()));
    }
    if let Some(folder) = compile() {
        run_child(child(&folder, name, N as u32));
    }
    None
}
