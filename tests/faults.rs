//! What is left when the system refuses in the middle: strace injects the errors.
//!
//! Where no strace is, or it may not trace, each test says SKIPPED on the standard error; with
//! `DF11_REQUIRE_STRACE` set that is a failure.
#![cfg(target_os = "linux")]

#[path = "support/command.rs"]
mod command;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use command::{BINARY, Fixture, assert_fails, good, json, names, text};

const RENAMES: &str = "rename,renameat,renameat2";

fn has_strace() -> bool {
    let probe =
        Command::new("strace").args(["-f", "-o", "/dev/null", BINARY, "--version"]).output();
    if probe.is_ok_and(|output| output.status.success()) {
        return true;
    }
    assert!(std::env::var_os("DF11_REQUIRE_STRACE").is_none(), "no strace that may trace");
    std::io::stderr().write_all(b"SKIPPED: no strace\n").unwrap();
    false
}

/// Runs the command with these faults. Returns what it did, and whether one was injected.
fn inject(faults: &[&str], arguments: &[&str]) -> (Output, bool) {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-o"]).arg(log.path());
    command.args(["-e", &format!("trace={RENAMES},fsync,link,linkat,mkdir,flock")]);
    for fault in faults {
        command.args(["-e", &format!("inject={fault}")]);
    }
    let output = command.arg(BINARY).args(arguments).stdin(Stdio::null()).output().unwrap();
    let injected = fs::read_to_string(log.path()).unwrap().contains("(INJECTED)");
    (output, injected)
}

/// The files of a folder without subfolders, with their contents.
fn contents(folder: &Path) -> Option<Vec<(String, Vec<u8>)>> {
    let read = |name: String| Some((name.clone(), fs::read(folder.join(name)).ok()?));
    folder.is_dir().then(|| names(folder).into_iter().map(read).collect())?
}

/// Folders directly in a folder or in a folder there.
fn folders(folder: &Path) -> Vec<PathBuf> {
    let below = |folder: &Path| {
        names(folder)
            .into_iter()
            .map(|name| folder.join(name))
            .filter(|path| path.is_dir())
            .collect::<Vec<_>>()
    };
    below(folder).into_iter().flat_map(|path| [vec![path.clone()], below(&path)].concat()).collect()
}

#[test]
fn the_only_whole_copy_is_never_deleted() {
    if !has_strace() {
        return;
    }
    // As on this system, and as on one that cannot exchange two names.
    let cannot = "renameat2:error=EINVAL";
    // strace counts the calls of each kind by themselves.
    let plain = if cfg!(target_arch = "x86_64") { "rename" } else { "renameat" };
    for (also, calls) in [(None, RENAMES), (None, plain), (Some(cannot), plain)] {
        let renames = format!("{calls}:error=EIO:when");
        let fixture = Fixture::new();
        let out = fixture.arg("out");
        good(&["compress", &fixture.arg("model"), "-o", &out, "--layout=gap"]);
        let before = contents(Path::new(&out)).unwrap();
        let store = tempfile::tempdir().unwrap();
        good(&[
            "compress",
            &fixture.arg("model"),
            "-o",
            store.path().join("out").to_str().unwrap(),
        ]);
        let after = contents(&store.path().join("out")).unwrap();
        let arguments = ["compress", &fixture.arg("model"), "-o", &out, "--force"];
        let mut most = 0;
        for first in 1..6 {
            // This rename and all that follow fail; or only this one.
            for count in ["+", ""] {
                let fault = format!("{renames}={first}{count}");
                let faults: Vec<&str> = also.into_iter().chain([&*fault]).collect();
                let (output, injected) = inject(&faults, &arguments);
                let whole = |wanted: &Vec<(String, Vec<u8>)>| {
                    let mut all = folders(fixture.folder.path()).into_iter();
                    all.find(|path| contents(path).as_ref() == Some(wanted))
                };
                let (old, new) = (whole(&before), whole(&after));
                assert!(old.is_some() || new.is_some(), "{fault}: {}", text(&output.stderr));
                if output.status.success() {
                    assert_eq!(contents(Path::new(&out)).as_ref(), Some(&after), "{fault}");
                } else {
                    most = first;
                    assert_eq!(output.status.code(), Some(2), "{output:?}");
                    assert_eq!(text(&output.stderr).lines().count(), 1, "{output:?}");
                }
                // What is not under its name is said to be where it is.
                if contents(Path::new(&out)).is_none() {
                    let place = old.or(new).unwrap();
                    let error = text(&output.stderr);
                    assert!(error.contains(place.to_str().unwrap()), "{place:?} in {error}");
                } else if !injected && also.is_none() {
                    assert!(output.status.success());
                }
                for path in folders(fixture.folder.path()) {
                    let name = path.file_name().unwrap().to_string_lossy().into_owned();
                    if name.starts_with(".df11-") && path.parent() == Some(fixture.folder.path()) {
                        fs::remove_dir_all(&path).unwrap();
                    }
                }
                let _ = fs::remove_dir_all(&out);
                good(&["compress", &fixture.arg("model"), "-o", &out, "--layout=gap"]);
            }
        }
        assert!(most > 1 || (also.is_none() && calls == plain), "no rename failed");
    }
}

#[test]
fn without_renames_that_keep_nothing_is_replaced_either() {
    if !has_strace() {
        return;
    }
    let fixture = Fixture::new();
    let renames = "renameat2:error=EINVAL";
    let links = "link,linkat:error=EPERM";
    for (name, cannot) in [
        ("new.df11", &[renames][..]),
        ("new", &[renames]),
        ("other.df11", &[renames, links]),
        ("other", &[renames, links]),
    ] {
        let out = fixture.arg(name);
        let (output, injected) = inject(cannot, &["compress", &fixture.arg("model"), "-o", &out]);
        assert!(injected && output.status.success(), "{}", text(&output.stderr));
        assert_eq!(json(&["verify", &out])["good"], true);
        let arguments = ["compress", &fixture.arg("model"), "-o", &out, "--force", "--layout=gap"];
        let (output, _) = inject(cannot, &arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(json(&["verify", &out])["good"], true);
    }
    assert_eq!(fixture.names(), ["model", "model.df11", "new", "new.df11", "other", "other.df11"]);
}

#[test]
fn a_folder_that_cannot_be_synced_is_an_error() {
    if !has_strace() {
        return;
    }
    let fixture = Fixture::new();
    let container = fixture.arg("model.df11");
    let one = fixture.model.join("model-00001-of-00002.safetensors");
    let single = fixture.arg("one.df11");
    good(&["compress", one.to_str().unwrap(), "-o", &single]);
    let [file, folder, back, plain] =
        ["new.df11", "new", "back", "new.safetensors"].map(|name| fixture.arg(name));
    for arguments in [
        ["compress", &fixture.arg("model"), "-o", &file],
        ["compress", &fixture.arg("model"), "-o", &folder],
        ["decompress", &container, "-o", &back],
        ["decompress", &single, "-o", &plain],
    ] {
        // The last sync of each run is that of the output's folder.
        let syncs = count_of_syncs(&arguments);
        let out = PathBuf::from(arguments[3]);
        if out.is_dir() { fs::remove_dir_all(&out) } else { fs::remove_file(&out) }.unwrap();
        let (output, injected) = inject(&[&format!("fsync:error=EIO:when={syncs}")], &arguments);
        assert!(injected, "{arguments:?}");
        assert_fails(&output, 2, &["syncing", fixture.folder.path().to_str().unwrap()]);
        // Some file systems cannot sync folders, which is no error.
        let _ = if out.is_dir() { fs::remove_dir_all(&out) } else { fs::remove_file(&out) };
        let (output, _) = inject(&[&format!("fsync:error=EINVAL:when={syncs}")], &arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}

fn count_of_syncs(arguments: &[&str]) -> usize {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-y", "-e", "trace=fsync", "-o"]).arg(log.path()).arg(BINARY);
    let output = command.args(arguments).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let log = fs::read_to_string(log.path()).unwrap();
    let syncs: Vec<&str> = log.lines().filter(|line| line.contains("fsync(")).collect();
    let parent = Path::new(arguments[3]).parent().unwrap().to_str().unwrap();
    assert!(syncs.last().unwrap().contains(&format!("<{parent}>")), "{arguments:?}: {syncs:?}");
    syncs.len()
}
