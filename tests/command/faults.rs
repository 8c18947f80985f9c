//! Files that remain when the system refuses in the middle: strace injects the errors.
//!
//! Without strace, or if it may not trace, each test says SKIPPED on standard error, or fails if
//! `DF11_REQUIRE_STRACE` is set.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use crate::command::{BINARY, Fixture, Folder, assert_fails, names, text};

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

/// Runs the command under strace with these options. Returns what it did, and strace's log.
fn trace(folder: &Folder, options: &[String], line: &str) -> (Output, String) {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-y", "-o"]).arg(log.path()).args(options).arg(BINARY);
    command.args(line.split_whitespace()).current_dir(folder.root()).stdin(Stdio::null());
    let output = command.output().unwrap();
    (output, fs::read_to_string(log.path()).unwrap())
}

/// Runs the command with these faults. Returns what it did, and whether one was injected.
fn inject(folder: &Folder, faults: &[&str], line: &str) -> (Output, bool) {
    let mut options = vec![format!("-etrace={RENAMES},fsync,link,linkat,mkdir,flock")];
    options.extend(faults.iter().map(|fault| format!("-einject={fault}")));
    let (output, log) = trace(folder, &options, line);
    (output, log.contains("(INJECTED)"))
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
    // Once as on this system, once as on one that cannot exchange two names.
    let cannot = "renameat2:error=EINVAL";
    // strace counts the calls of each kind by themselves.
    let plain = if cfg!(target_arch = "x86_64") { "rename" } else { "renameat" };
    for (also, calls) in [(None, RENAMES), (None, plain), (Some(cannot), plain)] {
        let renames = format!("{calls}:error=EIO:when");
        let (fixture, store) = (Fixture::new(), Fixture::new());
        let out = fixture.path("out");
        fixture.good("compress model -o out --layout=gap");
        let before = contents(&out).unwrap();
        store.good("compress model -o out");
        let after = contents(&store.path("out")).unwrap();
        let mut most = 0;
        for first in 1..6 {
            // This rename and all that follow fail; or only this one.
            for count in ["+", ""] {
                let fault = format!("{renames}={first}{count}");
                let faults: Vec<&str> = also.into_iter().chain([&*fault]).collect();
                let line = format!("compress model -o {} --force", out.display());
                let (output, injected) = inject(&fixture, &faults, &line);
                let whole = |wanted: &Vec<(String, Vec<u8>)>| {
                    let mut all = folders(fixture.root()).into_iter();
                    all.find(|path| contents(path).as_ref() == Some(wanted))
                };
                let (old, new) = (whole(&before), whole(&after));
                assert!(old.is_some() || new.is_some(), "{fault}: {}", text(&output.stderr));
                if output.status.success() {
                    assert_eq!(contents(&out).as_ref(), Some(&after), "{fault}");
                } else {
                    most = first;
                    assert_eq!(output.status.code(), Some(2), "{output:?}");
                    assert_eq!(text(&output.stderr).lines().count(), 1, "{output:?}");
                }
                // The error names the place of an output that is not under its name.
                if contents(&out).is_none() {
                    let place = old.or(new).unwrap();
                    let error = text(&output.stderr);
                    assert!(error.contains(place.to_str().unwrap()), "{place:?} in {error}");
                } else if !injected && also.is_none() {
                    assert!(output.status.success());
                }
                for path in folders(fixture.root()) {
                    let name = path.file_name().unwrap().to_string_lossy().into_owned();
                    if name.starts_with(".df11-") && path.parent() == Some(fixture.root()) {
                        fs::remove_dir_all(&path).unwrap();
                    }
                }
                let _ = fs::remove_dir_all(&out);
                fixture.good("compress model -o out --layout=gap");
            }
        }
        assert!(most > 0 || (also.is_none() && calls == plain), "no rename failed");
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
        for flags in ["", "--force --layout=gap"] {
            let line = format!("compress model -o {name} {flags}");
            let (output, injected) = inject(&fixture, cannot, &line);
            assert!(output.status.success(), "{}", text(&output.stderr));
            assert!(injected || !flags.is_empty());
            assert_eq!(fixture.json(&format!("verify {name}"))["good"], true);
        }
    }
    assert_eq!(fixture.names(), ["model", "model.df11", "new", "new.df11", "other", "other.df11"]);
}

#[test]
fn a_folder_that_cannot_be_synced_is_an_error() {
    if !has_strace() {
        return;
    }
    let fixture = Fixture::new();
    fixture.good("compress model/model-00001-of-00002.safetensors -o one.df11");
    for (source, out) in [
        ("compress model", "new.df11"),
        ("compress model", "new"),
        ("decompress model.df11", "back"),
        ("decompress one.df11", "new.safetensors"),
    ] {
        let line = &format!("{source} -o {}", fixture.arg(out));
        let remove = || {
            let out = fixture.path(out);
            if out.is_dir() { fs::remove_dir_all(&out) } else { fs::remove_file(&out) }
        };
        // The last sync of each run is that of the output's folder.
        let syncs = count_of_syncs(&fixture, line);
        remove().unwrap();
        let (output, injected) =
            inject(&fixture, &[&format!("fsync:error=EIO:when={syncs}")], line);
        assert!(injected, "{line}");
        assert_fails(&output, 2, &["syncing", fixture.root().to_str().unwrap()]);
        // Some file systems cannot sync folders, which is no error.
        let _ = remove();
        let (output, _) = inject(&fixture, &[&format!("fsync:error=EINVAL:when={syncs}")], line);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}

fn count_of_syncs(fixture: &Fixture, line: &str) -> usize {
    let (output, log) = trace(fixture, &["-etrace=fsync".to_owned()], line);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let syncs: Vec<&str> = log.lines().filter(|line| line.contains("fsync(")).collect();
    let folder = format!("<{}>", fixture.root().display());
    assert!(syncs.last().unwrap().contains(&folder), "{line}: {syncs:?}");
    syncs.len()
}

#[test]
fn a_doctor_that_is_killed_leaves_what_the_next_run_removes() {
    if !has_strace() {
        return;
    }
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("place")).unwrap();
    // Where it removes its files.
    let kill = ["-etrace=unlinkat,rmdir", "-einject=unlinkat,rmdir:signal=KILL:when=1"];
    let line = format!("doctor --folder {}", fixture.arg("place"));
    trace(&fixture, &kill.map(str::to_owned), &line);
    let left = names(&fixture.path("place"));
    assert_eq!(left.len(), 1, "{left:?}");
    let told = fixture.json(&line);
    assert!(told["checks"]["leftovers"].to_string().contains(&left[0]), "{told}");
    fixture.good("compress model -o place/model.df11");
    assert_eq!(names(&fixture.path("place")), ["model.df11"]);
}
