//! The command as people and programs meet it: exit codes, one line of error with its remedy, JSON,
//! nothing left behind.

#[path = "support/command.rs"]
mod command;

use std::{
    ffi::OsStr,
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use command::{BINARY, Fixture, assert_fails, df11, fails, good, json, names, safetensors, text};
use df11::hazmat::demo;
use serde_json::Value;

#[test]
fn compress_verify_decompress() {
    let fixture = Fixture::new();
    for (out, back) in [("new.df11", "back-1"), ("folder", "back-2")] {
        let (out, back) = (fixture.path(out), fixture.path(back));
        let report =
            json(&[OsStr::new("compress"), fixture.model.as_ref(), OsStr::new("-o"), out.as_ref()]);
        assert_eq!((&report["verified"], &report["written"]), (&true.into(), &true.into()));
        assert!(report["ratio"].as_f64().unwrap() < 1.0, "{report}");
        let verified = json(&[OsStr::new("verify"), out.as_ref()]);
        assert_eq!((&verified["good"], &verified["level"]), (&true.into(), &"full".into()));
        json(&[OsStr::new("decompress"), out.as_ref(), OsStr::new("-o"), back.as_ref()]);
        assert_eq!(names(&back), names(&fixture.model));
        for name in names(&back) {
            assert_eq!(
                fs::read(back.join(&name)).unwrap(),
                fs::read(fixture.model.join(&name)).unwrap()
            );
        }
    }
    assert_eq!(fs::read(fixture.path("new.df11")).unwrap(), fs::read(&fixture.container).unwrap());
}

#[test]
fn the_output_has_a_default_and_estimate_tells_its_size() {
    let fixture = Fixture::new();
    fs::remove_file(&fixture.container).unwrap();
    let model = fixture.model.as_os_str();
    for arguments in [
        vec![OsStr::new("estimate"), model],
        vec![OsStr::new("compress"), model, "--dry-run".as_ref()],
    ] {
        let estimate = json(&arguments);
        assert_eq!(
            (estimate["written"].as_bool(), fixture.names()),
            (Some(false), vec!["model".to_owned()])
        );
        assert_eq!(estimate["output"], fixture.container.to_str().unwrap());
    }
    let estimate = json(&[OsStr::new("estimate"), model]);
    let arguments = ["compress", ".", "--threads", "1", "--json"];
    let output = Command::new(BINARY).args(arguments).current_dir(&fixture.model).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(estimate["stored_bytes"], report["stored_bytes"]);
    assert_eq!(
        fs::metadata(&fixture.container).unwrap().len(),
        report["stored_bytes"].as_u64().unwrap()
    );
}

#[test]
fn a_container_is_not_compressed_again() {
    let fixture = Fixture::new();
    let folder = fixture.path("folder");
    json(&["compress", fixture.model.to_str().unwrap(), "-o", folder.to_str().unwrap()]);
    for source in [fixture.container.to_str().unwrap(), folder.to_str().unwrap()] {
        for more in [&["--dry-run"][..], &["--force"]] {
            let output = df11(&[&["compress", source], more].concat());
            assert_fails(&output, 2, &["compressed already", "df11 inspect", "df11 convert"]);
            assert!(!text(&output.stderr).contains("--gpus"), "{}", text(&output.stderr));
        }
    }
}

#[test]
fn what_was_left_out_is_said() {
    let fixture = Fixture::new();
    fs::write(fixture.model.join("pytorch_model.bin"), "x").unwrap();
    let out = fixture.path("new.df11");
    let said = good(&[OsStr::new("compress"), fixture.model.as_ref(), "-o".as_ref(), out.as_ref()]);
    assert!(said.contains("pytorch_model.bin: weights in another format"), "{said}");
    assert!(said.contains("verified bit for bit"), "{said}");
}

#[test]
fn layouts_are_choices() {
    let fixture = Fixture::new();
    let size = |arguments: &[&str]| {
        let mut all = vec![OsStr::new("estimate"), fixture.model.as_os_str()];
        all.extend(arguments.iter().map(OsStr::new));
        json(&all)["stored_bytes"].as_u64().unwrap()
    };
    assert!(size(&["--layout", "raw"]) > size(&["--layout", "gap"]));
    assert!(size(&["--layout", "raw"]) > size(&["--layout", "tile"]));
    assert!(size(&["--bytes-per-thread", "8"]) > size(&["--bytes-per-thread", "32"]));
    let bad = [OsStr::new("estimate"), fixture.model.as_ref(), "--bytes-per-thread=7".as_ref()];
    fails(&bad, 2, &["7 bytes a thread", "choose from"]);
}

#[test]
fn tiles_are_estimated_compressed_and_shown() {
    let fixture = Fixture::new();
    let (model, out) = (fixture.model.to_str().unwrap(), fixture.path("tile.df11"));
    let out = out.to_str().unwrap();
    let estimate = json(&["estimate", model, "--layout", "tile"]);
    let report = json(&["compress", model, "-o", out, "--layout", "tile"]);
    assert_eq!(estimate["stored_bytes"], report["stored_bytes"]);
    assert_eq!(fs::metadata(out).unwrap().len(), report["stored_bytes"].as_u64().unwrap());
    assert_eq!(
        estimate["entropy_bits_per_weight"],
        json(&["estimate", model])["entropy_bits_per_weight"]
    );
    let found = json(&["inspect", out, "--tensors"]);
    assert!(found.to_string().contains(r#""encoding":"tile""#), "{found}");
    assert!(good(&["inspect", out, "--tensors"]).contains("  tile  "));
    assert_eq!(json(&["verify", out, "--device", "cpu"])["good"], true);
}

#[test]
fn conversion_gives_what_compression_gives() {
    let fixture = Fixture::new();
    let (model, container) = (fixture.model.to_str().unwrap(), fixture.container.to_str().unwrap());
    let [tile, converted, back, folder] = ["tile.df11", "converted.df11", "back.df11", "folder"]
        .map(|name| fixture.path(name).to_str().unwrap().to_owned());
    json(&["compress", model, "-o", &tile, "--layout", "tile"]);
    let report = json(&["convert", container, &converted, "--layout", "tile"]);
    assert_eq!((&report["command"], &report["verified"]), (&"convert".into(), &true.into()));
    assert!(fs::read(&converted).unwrap() == fs::read(&tile).unwrap());
    let said = good(&["convert", &converted, &back, "--threads", "1"]);
    assert!(said.contains("verified bit for bit"), "{said}");
    assert!(fs::read(&back).unwrap() == fs::read(container).unwrap());
    // The side files move out of the container.
    good(&["convert", &converted, &folder, "--layout=raw"]);
    let side = |names: Vec<String>| {
        names
            .into_iter()
            .filter(|name| Path::new(name).extension() == Some(OsStr::new("json")))
            .collect::<Vec<_>>()
    };
    assert_eq!(side(names(Path::new(&folder))), side(names(&fixture.model)));

    fails(&["convert", container, &back], 2, &["exists", "--force"]);
    fails(&["convert", &folder, &folder, "--force"], 2, &["is the source"]);
    fails(&["convert", "nowhere.df11", "out.df11"], 2, &["check the path"]);
    let mut damaged = fs::read(container).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 4;
    fs::write(container, damaged).unwrap();
    let before = fixture.names();
    let out = fixture.path("out.df11");
    fails(
        &["convert", container, out.to_str().unwrap(), "--layout=tile"],
        1,
        &["model.df11", "damaged"],
    );
    fs::remove_file(Path::new(&folder).join("model-00002-of-00002.df11")).unwrap();
    fails(&["convert", &folder, out.to_str().unwrap()], 2, &["open the folder that holds all"]);
    assert_eq!(fixture.names(), before);
}

#[test]
fn inspect_shows_blocks_tensors_and_exponents() {
    let fixture = Fixture::new();
    let container = fixture.container.as_os_str();
    let found = json(&[OsStr::new("inspect"), container, "--tensors".as_ref()]);
    let blocks = found["blocks"].as_array().unwrap();
    let tensors: usize =
        blocks.iter().map(|block| block["tensors"].as_array().unwrap().len()).sum();
    assert_eq!(found["tensor_count"], tensors);
    let counts: u64 = found["exponents"].as_array().unwrap().iter().filter_map(Value::as_u64).sum();
    assert_eq!(found["total"]["weights"], counts);
    assert!(found["total"]["entropy_bits_per_weight"].as_f64().unwrap() > 2.0);
    let unmeasured = json(&[OsStr::new("inspect"), container, "--entropy=never".as_ref()]);
    assert!(
        unmeasured["exponents"].is_null()
            && unmeasured["total"]["entropy_bits_per_weight"].is_null()
    );

    let said =
        good(&[OsStr::new("inspect"), container, "--tensors".as_ref(), "--histogram".as_ref()]);
    for part in ["model.layers.3", "lm_head.weight", "alias", "I64", "of 256 exponents occur"] {
        assert!(said.contains(part), "{part} in {said}");
    }
}

#[test]
fn the_picture_is_an_svg_and_replaces_nothing_else() {
    let fixture = Fixture::new();
    let picture = fixture.path("picture.svg");
    let flag = OsStr::new("--picture");
    let said = good(&[OsStr::new("inspect"), fixture.container.as_ref(), flag, picture.as_ref()]);
    assert!(said.ends_with(&format!("picture   {}\n", picture.display())), "{said}");
    let svg = fs::read_to_string(picture).unwrap();
    assert!(
        svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains("model.layers.0")
    );
    fails(
        &[OsStr::new("inspect"), fixture.container.as_ref(), flag, fixture.container.as_ref()],
        2,
        &["end it in .svg"],
    );
}

#[test]
fn doctor_says_how_the_machine_is() {
    let found = json(&["doctor"]);
    for check in ["version", "build", "cores", "memory", "cpu", "disk", "mapping", "decode", "gpu"]
    {
        let status = found["checks"][check]["status"].as_str().unwrap_or_default();
        assert!(matches!(status, "ok" | "warn"), "{check}: {found}");
    }
    let version = good(&["--version"]);
    assert!(version.starts_with("df11 0.") && version.contains("format 1.0"), "{version}");
}

#[test]
fn the_cpu_decodes_where_it_is_sooner_done_or_asked_for() {
    let fixture = Fixture::new();
    let container = fixture.container.to_str().unwrap();
    // So little is left to the CPU whatever the machine has.
    let found = json(&["verify", container]);
    assert_eq!(
        (&found["device"]["kind"], &found["device"]["ordinal"]),
        (&"cpu".into(), &Value::Null)
    );
    assert!(
        found["device"]["reason"].as_str().unwrap().contains("before a GPU has started"),
        "{found}"
    );
    let found = json(&["verify", container, "--device", "cpu"]);
    assert_eq!(
        (&found["device"]["kind"], &found["device"]["reason"]),
        (&"cpu".into(), &Value::Null)
    );
    assert!(json(&["verify", container, "--level", "checksums"])["device"].is_null());
    assert!(good(&["verify", container]).trim_end().ends_with("  device     CPU"));
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_only_where_it_is_asked_for() {
    let fixture = Fixture::new();
    let container = fixture.container.to_str().unwrap();
    // Hides those that are there.
    let hidden = |arguments: &[&str]| {
        let mut command = Command::new(BINARY);
        command
            .args(arguments)
            .env("CUDA_VISIBLE_DEVICES", "")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    for device in ["gpu", "0"] {
        for verb in [&["verify", container][..], &["demo"]] {
            let output = hidden(&[verb, &["--device", device]].concat());
            assert_fails(&output, 2, &["GPU"]);
            assert_eq!(text(&output.stdout), "");
        }
    }
    assert_eq!(fixture.names(), ["model", "model.df11"]);
    let output = hidden(&["demo", "--json"]);
    assert_eq!(
        (output.status.code(), text(&output.stderr)),
        (Some(0), ""),
        "the reason is in the document"
    );
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["device"]["kind"], "cpu");
    assert!(found["device"]["reason"].is_string(), "{found}");

    fails(
        &["verify", container, "--level", "checksums", "--device", "gpu"],
        2,
        &["decodes nothing"],
    );
    for wrong in ["cuda", "-1", "gpu0", ""] {
        assert_eq!(
            df11(&["verify", container, &format!("--device={wrong}")]).status.code(),
            Some(2)
        );
    }
}

#[test]
fn bench_measures_a_small_model_too() {
    let fixture = Fixture::new();
    let arguments = ["bench", fixture.model.to_str().unwrap(), "--threads=1,2", "--repetitions=1"];
    let found = json(&arguments);
    let results = found["results"].as_array().unwrap();
    for name in ["memory copy", "compress", "decode", "open", "verify all", "decompress"] {
        let threads: Vec<u64> = results
            .iter()
            .filter(|result| result["name"] == name)
            .filter_map(|result| result["threads"].as_u64())
            .collect();
        assert_eq!(threads, [1, 2], "{name}");
    }
}

#[test]
fn quiet_says_nothing_and_json_says_errors_too() {
    let fixture = Fixture::new();
    assert_eq!(good(&[OsStr::new("verify"), fixture.container.as_ref(), "-q".as_ref()]), "");
    let output = df11(&["verify", "nowhere.df11", "--json"]);
    assert_fails(&output, 2, &["nowhere.df11", "check the path"]);
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&error["error"]["kind"], &error["error"]["exit_code"]), (&"io".into(), &2.into()));
    // What may be a repository of the Hub; not so below a folder that is here, or a container.
    fails(&["verify", "org/name-df11"], 2, &["hf download org/name-df11 --local-dir name-df11"]);
    for path in ["tests/name", "org/name.df11", "org/name/part", "name"] {
        assert!(!text(&df11(&["verify", path]).stderr).contains("hf download"), "{path}");
    }
    assert_eq!(df11(&["squash"]).status.code(), Some(2));
    assert_eq!(df11(&["compress", "x", "--threads", "0"]).status.code(), Some(2));
}

#[test]
fn a_bad_source_is_refused_and_nothing_is_made() {
    let fixture = Fixture::new();
    fs::remove_file(&fixture.container).unwrap();
    let bf16 = r#"{"a":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}}"#;
    let twice = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    safetensors(&fixture.path("short.safetensors"), bf16, 9);
    safetensors(&fixture.path("twice.safetensors"), twice, 1);
    fs::write(fixture.path("text.safetensors"), "no safetensors file at all").unwrap();
    fs::write(fixture.path("tiny.safetensors"), "1234").unwrap();
    fs::write(fixture.path("old.bin"), "x").unwrap();
    fs::create_dir(fixture.path("empty")).unwrap();
    let before = fixture.names();
    for (name, part) in [
        ("short.safetensors", "short.safetensors"),
        ("twice.safetensors", "twice"),
        ("text.safetensors", "no safetensors file"),
        ("tiny.safetensors", "tiny.safetensors"),
        ("old.bin", "convert it"),
        ("empty", "holds no safetensors files"),
        ("absent", "check the path"),
    ] {
        for out in ["out.df11", "out"] {
            let (source, out) = (fixture.path(name), fixture.path(out));
            fails(
                &[OsStr::new("compress"), source.as_ref(), "-o".as_ref(), out.as_ref()],
                2,
                &[part],
            );
        }
    }
    assert_eq!(fixture.names(), before);
}

#[test]
fn an_output_that_exists_is_replaced_only_by_force() {
    let fixture = Fixture::new();
    let (model, container) = (fixture.model.as_os_str(), fixture.container.as_os_str());
    let before = fs::read(&fixture.container).unwrap();
    fails(&[OsStr::new("compress"), model, "-o".as_ref(), container], 2, &["exists", "--force"]);
    fails(&[OsStr::new("decompress"), container, "-o".as_ref(), model], 2, &["exists", "--force"]);
    good(&[OsStr::new("compress"), model, "-o".as_ref(), container, "--force".as_ref()]);
    assert_eq!(fs::read(&fixture.container).unwrap(), before);
    good(&[OsStr::new("decompress"), container, "-o".as_ref(), model, "--force".as_ref()]);
    assert_eq!(fixture.names(), ["model", "model.df11"]);
}

#[test]
fn force_does_not_delete_what_is_no_earlier_output() {
    let fixture = Fixture::new();
    let precious = fixture.path("photos");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("cat.jpg"), "cat").unwrap();
    let model = fixture.model.as_os_str();
    let compress = |out: &Path, part: &str| {
        fails(
            &[OsStr::new("compress"), model, "-o".as_ref(), out.as_ref(), "--force".as_ref()],
            2,
            &[part],
        );
    };
    compress(&precious, "not part of an earlier output");
    compress(&precious.join("cat.jpg"), "is a file");
    compress(&fixture.model, "is the source");
    compress(fixture.folder.path(), "holds it");
    assert_eq!(fs::read(precious.join("cat.jpg")).unwrap(), b"cat");
    assert_eq!(fixture.names(), ["model", "model.df11", "photos"]);
}

#[test]
fn damage_fails_the_check_and_a_newer_version_does_not() {
    let fixture = Fixture::new();
    let original = fs::read(&fixture.container).unwrap();
    let verify = [OsStr::new("verify"), fixture.container.as_ref()];

    let mut damaged = original.clone();
    damaged[original.len() / 2] ^= 4;
    fs::write(&fixture.container, &damaged).unwrap();
    fails(&verify, 1, &["model.df11", "damaged"]);
    let back = fixture.path("back");
    fails(
        &[OsStr::new("decompress"), fixture.container.as_ref(), "-o".as_ref(), back.as_ref()],
        1,
        &[],
    );
    assert_eq!(fixture.names(), ["model", "model.df11"]);

    fs::write(&fixture.container, &original[..original.len() - 100]).unwrap();
    fails(&verify, 1, &["model.df11"]);
    for other in ["text", "no container at all"] {
        fs::write(&fixture.container, other).unwrap();
        let output = df11(&verify);
        assert_fails(&output, 1, &["model.df11", "no df11 file", "name another"]);
        assert!(!text(&output.stderr).contains("damaged"), "{}", text(&output.stderr));
    }

    let mut newer = original;
    newer[8] = 2;
    fs::write(&fixture.container, &newer).unwrap();
    fails(&verify, 2, &["not supported", "update"]);
    fails(&[OsStr::new("inspect"), fixture.container.as_ref()], 2, &["not supported"]);
}

#[cfg(unix)]
mod unix {
    use std::{
        io::Read,
        os::unix::process::CommandExt,
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    /// The user and group that own nothing.
    const NOBODY: u32 = 65534;

    /// Runs a line of shell, in which `$1` is the command and `$2` the fixture's folder.
    fn shell(line: &str, fixture: &Fixture) -> Output {
        let arguments = ["-c", line, "sh", BINARY, fixture.folder.path().to_str().unwrap()];
        Command::new("sh").args(arguments).stdin(Stdio::null()).output().unwrap()
    }

    #[test]
    fn a_reader_that_goes_away_is_no_failure() {
        let fixture = Fixture::new();
        let mut child = Command::new(BINARY)
            .args([OsStr::new("inspect"), fixture.container.as_ref(), "--tensors".as_ref()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let mut error = String::new();
        child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        assert_eq!((child.wait().unwrap().code(), error.as_str()), (Some(0), ""));
    }

    #[test]
    fn a_full_standard_output_is_a_failure() {
        if !Path::new("/dev/full").exists() {
            eprintln!("skipped: no /dev/full");
            return;
        }
        let output = shell("\"$1\" inspect \"$2/model.df11\" >/dev/full", &Fixture::new());
        assert_fails(&output, 2, &["standard output", "free some space"]);
    }

    #[test]
    fn a_limit_of_file_sizes_leaves_nothing_behind() {
        let fixture = Fixture::new();
        // The command catches SIGXFSZ itself: writing fails instead of ending the process.
        for out in ["new.df11", "new"] {
            let line = format!("ulimit -f 100; exec \"$1\" compress \"$2/model\" -o \"$2/{out}\"");
            assert_fails(&shell(&line, &fixture), 2, &["writing", "ulimit"]);
        }
        let line = "ulimit -f 100; exec \"$1\" decompress \"$2/model.df11\" -o \"$2/back\"";
        assert_fails(&shell(line, &fixture), 2, &["writing", "ulimit"]);
        assert_eq!(fixture.names(), ["model", "model.df11"]);
    }

    /// What runs on a disk of 256 KiB fails with these remedies, and leaves nothing there.
    fn check_on_a_small_disk(run: impl FnOnce(&Fixture, &Path) -> [Output; 2], remedies: &[&str]) {
        let fixture = Fixture::new();
        let disk = fixture.path("disk");
        fs::create_dir(&disk).unwrap();
        let mounted = shell("mount -t tmpfs -o size=256k tmpfs \"$2/disk\"", &fixture);
        if !mounted.status.success() {
            eprintln!("skipped: cannot mount a small disk here ({})", text(&mounted.stderr).trim());
            return;
        }
        let outputs = run(&fixture, &disk);
        let left = names(&disk);
        assert!(shell("umount \"$2/disk\"", &fixture).status.success());
        for output in outputs {
            assert_fails(&output, 2, remedies);
        }
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn a_full_disk_leaves_nothing_behind() {
        let compress = |fixture: &Fixture, disk: &Path| {
            [disk.join("new.df11"), disk.join("new")].map(|out| {
                df11(&[OsStr::new("compress"), fixture.model.as_ref(), "-o".as_ref(), out.as_ref()])
            })
        };
        check_on_a_small_disk(compress, &["free some space"]);
    }

    /// Before anything is written: what is restored may be far larger than what there is room for.
    #[test]
    fn too_little_free_space_is_told_at_once() {
        let decompress = |fixture: &Fixture, disk: &Path| {
            let single = fixture.path("single.df11");
            let first = fixture.model.join("model-00001-of-00002.safetensors");
            good(&[OsStr::new("compress"), first.as_ref(), "-o".as_ref(), single.as_ref()]);
            [("back", &fixture.container), ("back.safetensors", &single)].map(|(out, source)| {
                let out = disk.join(out);
                df11(&[OsStr::new("decompress"), source.as_ref(), "-o".as_ref(), out.as_ref()])
            })
        };
        let remedies = ["bytes are to be written", "are free", "free some space"];
        check_on_a_small_disk(decompress, &remedies);
    }

    #[test]
    fn an_unwritable_folder_is_named() {
        use std::os::unix::fs::PermissionsExt;
        let fixture = Fixture::new();
        let folder = fixture.path("locked");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o555)).unwrap();
        fs::set_permissions(fixture.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in names(&fixture.model) {
            fs::set_permissions(fixture.model.join(name), fs::Permissions::from_mode(0o644))
                .unwrap();
        }
        let mut command = Command::new(BINARY);
        command
            .args([OsStr::new("compress"), fixture.model.as_ref(), "-o".as_ref()])
            .arg(folder.join("x.df11"));
        let mut probe = Command::new(BINARY);
        probe.arg("--version");
        if fs::write(folder.join("probe"), "").is_ok() {
            // The superuser may write anywhere; nobody may not.
            fs::remove_file(folder.join("probe")).unwrap();
            command.gid(NOBODY).uid(NOBODY);
            probe.gid(NOBODY).uid(NOBODY);
        }
        if !probe.output().is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: no other user can run the command here");
            return;
        }
        let output = command.output().unwrap();
        assert_fails(&output, 2, &["locked", "its permissions"]);
        assert!(names(&folder).is_empty());
    }

    /// Waits until the work has begun, which shows in a temporary file of some size.
    fn wait_for_part(folder: &Path) {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            if names(folder).iter().any(|name| Path::new(name).extension() == Some("part".as_ref()))
            {
                return;
            }
            thread::sleep(Duration::from_micros(200));
        }
        panic!("no work in a minute");
    }

    #[test]
    fn an_interruption_leaves_nothing_behind() {
        let fixture = Fixture::new();
        let big = tempfile::tempdir().unwrap();
        let model = demo::checkpoint(big.path(), demo::DEMO, 1).unwrap();
        for out in ["new.df11", "new"] {
            let child = Command::new(BINARY)
                .args([
                    OsStr::new("compress"),
                    model.as_ref(),
                    "-o".as_ref(),
                    fixture.path(out).as_ref(),
                ])
                .args(["--threads", "1"])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            wait_for_part(fixture.folder.path());
            let killed =
                Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
            assert!(killed.success());
            let output = child.wait_with_output().unwrap();
            assert_fails(&output, 130, &["interrupted"]);
            assert_eq!(fixture.names(), ["model", "model.df11"]);
        }
    }
}

/// What a folder's files are is said of the recorded ones alone, in both forms of the answer.
#[test]
fn files_beside_the_containers_are_named() {
    let fixture = Fixture::new();
    let folder = fixture.path("folder");
    let (folder, model) = (folder.to_str().unwrap(), fixture.model.to_str().unwrap());
    good(&["compress", model, "-o", folder, "--metadata", "tool.a=b=c"]);
    assert_eq!(json(&["inspect", folder])["metadata"], serde_json::json!({ "tool.a": "b=c" }));
    assert!(good(&["inspect", folder]).contains("metadata  tool.a = b=c"));
    let twice =
        ["compress", model, "-o", "twice.df11", "--metadata", "a.b=1", "--metadata", "a.b=2"];
    fails(&twice, 2, &["two values"]);
    assert_eq!(json(&["verify", folder])["good"], true);
    let back = fixture.path("back");
    let back = back.to_str().unwrap();
    let text = good(&["decompress", folder, "-o", back]);
    assert!(text.contains("every file has the hash of the original"), "{text}");

    fs::write(Path::new(folder).join("notes.md"), "mine").unwrap();
    fs::write(Path::new(folder).join("model.safetensors"), "stray").unwrap();
    let text = good(&["decompress", folder, "-o", back, "--force"]);
    assert!(!text.contains("every file"), "{text}");
    assert!(
        text.contains("unchecked notes.md") && text.contains("left out  model.safetensors"),
        "{text}"
    );

    fs::write(Path::new(folder).join("config.json"), "{}").unwrap();
    let message = ["config.json", "was changed", "--keep-changed"];
    fails(&["decompress", folder, "-o", back, "--force"], 1, &message);
    fails(&["verify", folder], 1, &message);
    let kept = json(&["decompress", folder, "-o", back, "--force", "--keep-changed"]);
    assert_eq!(kept["changed"], serde_json::json!(["config.json"]));
    assert_eq!(kept["unchecked"], serde_json::json!(["notes.md"]));
    assert_eq!(kept["missing"], serde_json::json!([]));
}

/// Not good, and not damaged either.
#[test]
fn what_cannot_be_checked_is_an_answer_of_its_own() {
    let fixture = Fixture::new();
    let vector =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/vectors/valid/unknown-encoding.df11.gz");
    let mut bytes = Vec::new();
    let mut decoder = flate2::read::GzDecoder::new(fs::File::open(vector).unwrap());
    std::io::Read::read_to_end(&mut decoder, &mut bytes).unwrap();
    fs::write(fixture.path("newer.df11"), bytes).unwrap();
    let folder = fixture.path("folder");
    good(&["compress", fixture.model.to_str().unwrap(), "-o", folder.to_str().unwrap()]);
    for source in [fixture.path("newer.df11"), folder.join("model-00001-of-00002.df11")] {
        let output = df11(&["verify", source.to_str().unwrap()]);
        let told = text(&output.stdout);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains("incomplete") && told.contains("unchecked"), "{told}");
        let output = df11(&["verify", "--json", source.to_str().unwrap()]);
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((output.status.code(), &answer["good"]), (Some(2), &Value::Bool(false)));
    }
}

#[cfg(feature = "cuda")]
#[test]
fn estimate_tells_which_gpu_holds_what() {
    let fixture = Fixture::new();
    let (model, container) = (fixture.model.to_str().unwrap(), fixture.container.to_str().unwrap());
    let placed = json(&["estimate", model, "--gpus", "1.1MB,2x1.2MB"]);
    let gpus = placed["placement"]["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 3);
    // The container that it will be has the same placement.
    let compressed = json(&["estimate", container, "--gpus", "1.1MB,2x1.2MB"]);
    assert_eq!(compressed["placement"], placed["placement"]);
    let blocks: usize = gpus.iter().map(|gpu| gpu["blocks"].as_array().unwrap().len()).sum();
    assert_eq!(blocks as u64, placed["blocks"].as_u64().unwrap());
    let assumed = json(&["estimate", model, "--gpus", "80GB", "--exponent-bits", "2.65"]);
    assert_eq!(assumed["placement"]["fits"], true);
    assert!(good(&["estimate", model, "--gpus", "80GB"]).contains("It fits"));
    let taken = |residence| {
        let placed = json(&["estimate", container, "--gpus", "80GB", "--residence", residence]);
        let gpu = &placed["placement"]["gpus"][0];
        (gpu["taken_bytes"].as_u64().unwrap(), gpu["fast"].as_array().unwrap().len())
    };
    let (stored, fast) = (taken("stored"), taken("fast"));
    assert!(stored.1 == 0 && fast.1 > 0 && fast.0 != stored.0, "{stored:?} {fast:?}");
    assert_eq!(taken("auto"), fast);
    fails(&["estimate", container], 2, &["compressed already", "df11 inspect"]);
    fails(
        &["estimate", model, "--gpus", "1000"],
        2,
        &["GPU 0 of the plan may use 1000 bytes", "more GPUs"],
    );
}
