//! The stand-in for the library of the NVIDIA driver: compiled from `driver.c`, found by `LD_LIBRARY_PATH`.

use std::{
    fs,
    io::{ErrorKind, Write as _},
    process::Command,
};

use tempfile::TempDir;

pub(crate) const SOURCE: &str = include_str!("driver.c");
/// By the first of them the library is looked for; a machine with a GPU has its own under the second.
pub(crate) const LIBRARY_NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
/// What the kernels of constants say: the sizes of the structures that both sides know, and of the rest some.
pub(crate) const CONSTANTS: [(&str, &str); 2] = [
    ("df11_gap_constants", "128,16880,24,1,1,1,1,1,1,1,1,1"),
    ("df11_tile_constants", "128,16384,24,1,1,1,1"),
];

/// Where libraries can be loaded from, which not every folder for temporary files allows.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A folder with the library; the compiler defines a macro for each of `defines`. None where there is no compiler.
pub(crate) fn compile(defines: &[String]) -> Option<TempDir> {
    let folder = folder();
    let source = folder.path().join("driver.c");
    fs::write(&source, SOURCE).unwrap();
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-o"]).arg(folder.path().join(LIBRARY_NAMES[0])).arg(&source);
    match command.args(defines.iter().map(|define| format!("-D{define}"))).output() {
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
