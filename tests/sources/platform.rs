//! Only `src/platform/` asks which system it runs on, and in Python `_platform.py`.

use std::{fs, path::Path};

use crate::files::files;

/// Things that only some systems have, in Rust: conditions, crates, and files of the system.
const RUST: [&str; 13] = [
    "(unix",
    "(windows)",
    "target_os",
    "target_vendor",
    "os::unix",
    "os::windows",
    "os::fd",
    "rustix",
    "windows_sys",
    "libc::",
    "signal_hook",
    "/proc/",
    "\"/dev/",
];
/// The same in Python.
const PYTHON: [&str; 15] = [
    "/proc/",
    "/dev/",
    "os.name",
    "sys.platform",
    "platform.system",
    "fcntl",
    "import resource",
    "import pwd",
    "os.fork",
    "O_TMPFILE",
    "mkfifo",
    "os.getuid",
    "msvcrt",
    "winreg",
    "memfd_create",
];

/// Whether a word is there, and no part of a longer one.
fn has(line: &str, word: &str) -> bool {
    let is_word =
        |char: Option<char>| char.is_some_and(|char| char.is_alphanumeric() || char == '_');
    line.match_indices(word).any(|(at, _)| {
        let starts_inside =
            word.starts_with(char::is_alphabetic) && is_word(line[..at].chars().last());
        let ends_inside =
            word.ends_with(char::is_alphabetic) && is_word(line[at + word.len()..].chars().next());
        !starts_inside && !ends_inside
    })
}

/// The lines of code in a folder that have one of these words, except comments and tests.
fn found(folder: &str, extension: &str, home: &str, words: &[&str]) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let names = files(&folder).into_keys();
    let names = names.filter(|name| name.ends_with(extension) && !name.starts_with(home));
    let lines = names.flat_map(|name| {
        let text = fs::read_to_string(folder.join(&name)).unwrap();
        let code = text.split("\nmod tests {").next().unwrap();
        let code = code.lines().map(|line| line.split("// ").next().unwrap().trim());
        let code = code.filter(|line| !line.starts_with(['#', '/']) || line.starts_with("#["));
        let lines = code.filter(|line| words.iter().any(|word| has(line, word)));
        lines.map(|line| format!("{name}: {line}")).collect::<Vec<_>>()
    });
    lines.collect()
}

#[test]
fn one_module_knows_the_systems() {
    for folder in ["src", "capi/src", "python/src"] {
        let lines = found(folder, ".rs", "platform/", &RUST);
        assert!(lines.is_empty(), "these belong into src/platform/:\n{}", lines.join("\n"));
    }
    assert!(found("src", ".rs", "none", &RUST).len() > 20, "the words are found where they are");
}

#[test]
fn one_module_of_the_python_package_knows_the_systems() {
    let lines = found("python/df11", ".py", "_platform.py", &PYTHON);
    assert!(lines.is_empty(), "these belong into _platform.py:\n{}", lines.join("\n"));
    assert!(found("python/df11", ".py", "none", &PYTHON).len() > 2, "the words are found");
}
