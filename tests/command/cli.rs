//! The command as people and programs meet it: exit codes, one line of error with its remedy, JSON,
//! nothing left behind.

use std::{env, ffi::OsStr, fs, path::Path, process::Output};

use df11::Dtype;
#[cfg(unix)]
use df11::hazmat::demo;
use serde_json::{Value, json};

use crate::{
    command::{Fixture, assert_fails, names, text},
    container::{Item, weights_file},
    files::vector,
};

#[test]
fn the_output_has_a_default_and_estimate_tells_its_size() {
    let fixture = Fixture::new();
    fs::remove_file(&fixture.container).unwrap();
    let model = fixture.arg("model");
    for line in [format!("estimate {model}"), format!("compress {model} --dry-run")] {
        let estimate = fixture.json(&line);
        assert_eq!(estimate["written"], false);
        assert_eq!(fixture.names(), ["model"]);
        assert_eq!(estimate["output"], fixture.arg("model-df11"));
    }
    let estimate = fixture.json("estimate model");
    let mut command = fixture.command("compress . --threads 1 --json");
    let output = command.current_dir(&fixture.model).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(estimate["stored_bytes"], report["stored_bytes"]);
    let shards = names(&fixture.path("model-df11")).into_iter();
    let shards = shards.filter(|name| Path::new(name).extension() == Some(OsStr::new("df11")));
    let stored: usize = shards.map(|name| fixture.read(&format!("model-df11/{name}")).len()).sum();
    assert_eq!(report["stored_bytes"], stored);
    assert_eq!((&report["verified"], &report["written"]), (&true.into(), &true.into()));
    assert!(report["ratio"].as_f64().unwrap() < 1.0, "{report}");
    let verified = fixture.json("verify model-df11");
    assert_eq!((&verified["good"], &verified["level"]), (&true.into(), &"full".into()));
    // One file of weights becomes one file.
    let first = fixture.json("compress model/model-00001-of-00002.safetensors");
    let wanted = Path::new("model").join("model-00001-of-00002.df11");
    assert_eq!(first["output"], wanted.to_str().unwrap());
}

#[test]
fn usage_errors_are_documents_too() {
    let fixture = Fixture::new();
    let output = fixture.run("compress --json");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("<SRC>"), "{}", text(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&document["error"]["kind"], &document["error"]["exit_code"]),
        (&"usage".into(), &2.into())
    );
    let help = fixture.good("compress --help --json");
    let usage = format!("Usage: df11{} compress", env::consts::EXE_SUFFIX);
    assert!(help.contains(&usage), "{help}");
}

#[test]
fn folders_above_an_output_are_made() {
    let fixture = Fixture::new();
    fixture.good("compress model -o a/b/one.df11");
    fixture.good("convert a/b/one.df11 -o c/folder");
    fixture.good("decompress c/folder -o d/e/back");
    assert_eq!(names(&fixture.path("d/e/back")), names(&fixture.model));
    fixture.write("file", "in the way");
    fixture.fails("compress model -o file/x.df11", 2, &["file", "not a folder"]);
}

#[test]
fn a_demonstration_counts_a_tied_head_once() {
    let fixture = Fixture::new();
    let found = fixture.json("demo --device cpu");
    let [distinct, stored] = ["distinct_bytes", "stored_bytes"].map(|key| found[key].as_f64());
    let (ratio, bits) = (stored.unwrap() / distinct.unwrap(), found["bits_per_weight"].as_f64());
    assert_eq!(found["ratio"], ratio);
    // Directories and tensors of other dtypes add little to the codes.
    assert!((ratio - bits.unwrap() / 16.0).abs() < 0.02, "{found}");
    assert!(found["source_bytes"].as_f64() > distinct, "the files hold the head twice");
}

#[test]
fn a_kept_demonstration_goes_on() {
    let fixture = Fixture::new();
    assert!(fixture.good("demo --device cpu").ends_with("--keep FOLDER keeps them.\n"));
    let said = fixture.good("demo --keep kept");
    let kept = Path::new("kept").join("model-df11");
    assert!(said.contains(&format!("df11 inspect {}\n", kept.display())), "{said}");
    assert!(said.contains(&format!("from_pretrained({kept:?}")), "{said}");
    assert_eq!(fixture.json("verify kept/model-df11")["good"], true);
    let output = fixture.command("").args(["demo", "--keep", "with space"]).output().unwrap();
    let spaced =
        if cfg!(windows) { r#""with space\model-df11""# } else { "'with space/model-df11'" };
    assert!(text(&output.stdout).contains(&format!("df11 verify {spaced}")));
    fixture.fails("demo --keep kept", 2, &["not empty"]);
}

#[test]
fn a_container_is_not_compressed_again() {
    let fixture = Fixture::new();
    fixture.json("compress model -o folder");
    for source in ["model.df11", "folder"] {
        for flag in ["--dry-run", "--force"] {
            let output = fixture.run(&format!("compress {source} {flag}"));
            assert_fails(&output, 2, &["already compressed", "df11 inspect", "df11 convert"]);
            assert!(!text(&output.stderr).contains("--gpus"), "{}", text(&output.stderr));
        }
    }
}

#[test]
fn common_mistakes_are_told_what_to_type() {
    let fixture = Fixture::new();
    let assert_usage = |line: &str, part: &str| {
        let output = fixture.run(line);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(part), "{}", text(&output.stderr));
    };
    for verb in ["compress", "convert", "decompress"] {
        assert_usage(&format!("{verb} model model-df11"), "Name the output with -o.");
    }
    assert_usage("estimate model --gpus 80", "write 80GiB");
    let line = "compress model -o model.safetensors";
    fixture.fails(line, 2, &["would be a folder of containers", ".df11"]);
    fixture.fails("convert model.df11 -o back.safetensors", 2, &["would be a folder"]);
    fixture.fails("compress model --variant fp16", 2, &["of the variant fp16; leave --variant"]);
    // The folder of a demonstration holds a model and a compressed one.
    fixture.good("compress model -o model-df11");
    fs::remove_file(&fixture.container).unwrap();
    fixture.fails("compress . -o all", 2, &["is already compressed", "folder of one model"]);
}

#[test]
fn tensors_are_counted_in_words() {
    let fixture = Fixture::new();
    let said = fixture.good("compress model -o new.df11");
    assert!(said.contains("raw (uncompressed)"), "{said}");
    assert!(said.contains("(not a float of 8, 16 or 32 bits)"), "{said}");
    assert!(!said.contains(" 0 "), "{said}");
}

#[test]
fn what_was_left_out_is_said() {
    let fixture = Fixture::new();
    fixture.write("model/pytorch_model.bin", "x");
    let said = fixture.good("compress model -o new.df11");
    assert!(said.contains("pytorch_model.bin: weights in another format"), "{said}");
    assert!(said.contains("verified bit for bit"), "{said}");
}

#[test]
fn layouts_are_choices() {
    let fixture = Fixture::new();
    let size = |flags: &str| {
        fixture.json(&format!("estimate model {flags}"))["stored_bytes"].as_u64().unwrap()
    };
    assert!(size("--layout raw") > size("--layout gap"));
    assert!(size("--layout raw") > size("--layout tile"));
    assert!(size("--bytes-per-thread 8") > size("--bytes-per-thread 32"));
    fixture.fails("estimate model --bytes-per-thread=7", 2, &["7 bytes per thread", "choose from"]);
}

#[test]
fn conversion_gives_what_compression_gives() {
    let fixture = Fixture::new();
    fixture.json("compress model -o tile.df11 --layout tile");
    let report = fixture.json("convert model.df11 -o converted.df11 --layout tile");
    assert_eq!((&report["command"], &report["verified"]), (&"convert".into(), &true.into()));
    assert!(fixture.read("converted.df11") == fixture.read("tile.df11"));
    assert!(fixture.good("inspect tile.df11 --tensors").contains("  tile  "));
    let found = fixture.json("inspect tile.df11 --tensors");
    assert!(found.to_string().contains(r#""encoding":"tile""#), "{found}");
    let said = fixture.good("convert converted.df11 -o back.df11 --threads 1");
    assert!(said.contains("verified bit for bit"), "{said}");
    assert!(fixture.read("back.df11") == fixture.read("model.df11"));
    // The side files move out of the container.
    fixture.good("convert converted.df11 -o folder --layout=raw");
    let side = |folder: &str| {
        let mut names = names(&fixture.path(folder));
        names.retain(|name| Path::new(name).extension() == Some(OsStr::new("json")));
        names
    };
    assert_eq!(side("folder"), side("model"));

    fixture.fails("convert model.df11 -o back.df11", 2, &["exists", "--force"]);
    fixture.fails("convert folder -o folder --force", 2, &["is the source"]);
    fixture.fails("convert nowhere.df11 -o out.df11", 2, &["check the path"]);
    fixture.flip_middle_byte("model.df11");
    let before = fixture.names();
    let damaged = ["model.df11", "damaged"];
    fixture.fails("convert model.df11 -o out.df11 --layout=tile", 1, &damaged);
    fs::remove_file(fixture.path("folder/model-00002-of-00002.df11")).unwrap();
    fixture.fails(
        "convert folder -o out.df11",
        2,
        &["shard 2 of 2 is missing", "holds all shards"],
    );
    assert_eq!(fixture.names(), before);
}

#[test]
fn inspect_shows_blocks_tensors_and_exponents() {
    let fixture = Fixture::new();
    let found = fixture.json("inspect model.df11 --tensors");
    let blocks = found["blocks"].as_array().unwrap();
    let tensors: usize =
        blocks.iter().map(|block| block["tensors"].as_array().unwrap().len()).sum();
    assert_eq!(found["tensor_count"], tensors);
    let counts: u64 = found["exponents"].as_array().unwrap().iter().filter_map(Value::as_u64).sum();
    assert_eq!(found["total"]["weights"], counts);
    assert!(found["total"]["entropy_bits_per_weight"].as_f64().unwrap() > 2.0);
    let unmeasured = fixture.json("inspect model.df11 --entropy=never");
    let total = &unmeasured["total"];
    assert!(unmeasured["exponents"].is_null() && total["entropy_bits_per_weight"].is_null());

    let said = fixture.good("inspect model.df11 --tensors --histogram");
    for part in ["model.layers.3", "lm_head.weight", "alias", "I64", "of 256 exponents occur"] {
        assert!(said.contains(part), "{part} in {said}");
    }
}

#[test]
fn the_picture_is_an_svg_and_replaces_what_is_there_only_by_force() {
    let fixture = Fixture::new();
    fixture.write("picture.svg", "precious");
    fixture.fails("inspect model.df11 --picture picture.svg", 2, &["exists", "--force"]);
    assert_eq!(fixture.read("picture.svg"), b"precious");
    let said = fixture.good("inspect model.df11 --picture picture.svg --force");
    assert!(said.ends_with("picture   picture.svg\n"), "{said}");
    let svg = fs::read_to_string(fixture.path("picture.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("model.layers.0"));
    fixture.fails("inspect model.df11 --picture model.df11", 2, &["end it in .svg"]);
    assert_eq!(fixture.names(), ["model", "model.df11", "picture.svg"]);
}

#[test]
fn doctor_says_how_the_machine_is() {
    let fixture = Fixture::new();
    let found = fixture.json("doctor");
    for check in ["version", "build", "cores", "memory", "cpu", "disk", "mapping", "decode", "gpu"]
    {
        let status = found["checks"][check]["status"].as_str().unwrap_or_default();
        assert!(matches!(status, "ok" | "warn"), "{check}: {found}");
    }
    let version = fixture.good("--version");
    assert!(version.starts_with("df11 0.") && version.contains("format 1.1"), "{version}");
}

#[test]
fn the_cpu_decodes_where_it_is_sooner_done_or_asked_for() {
    let fixture = Fixture::new();
    // So little is left to the CPU whatever the machine has.
    let device = &fixture.json("verify model.df11")["device"];
    assert_eq!((&device["kind"], &device["ordinal"]), (&"cpu".into(), &Value::Null));
    let reason = device["reason"].as_str().unwrap();
    assert!(reason.contains("faster than starting a GPU"), "{reason}");
    let device = &fixture.json("verify model.df11 --device cpu")["device"];
    assert_eq!((&device["kind"], &device["reason"]), (&"cpu".into(), &Value::Null));
    assert!(fixture.json("verify model.df11 --level checksums")["device"].is_null());
    assert!(fixture.good("verify model.df11").trim_end().ends_with("  device     CPU"));
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_only_where_it_is_asked_for() {
    let fixture = Fixture::new();
    // Hides those that are there.
    let hidden =
        |line: &str| fixture.command(line).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    for device in ["gpu", "0"] {
        for verb in ["verify model.df11", "demo"] {
            let output = hidden(&format!("{verb} --device {device}"));
            assert_fails(&output, 2, &["GPU"]);
            assert_eq!(text(&output.stdout), "");
        }
    }
    assert_eq!(fixture.names(), ["model", "model.df11"]);
    let output = hidden("demo --json");
    let told = (output.status.code(), text(&output.stderr));
    assert_eq!(told, (Some(0), ""), "the reason is in the document");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["device"]["kind"], "cpu");
    assert!(found["device"]["reason"].is_string(), "{found}");

    let arguments = "verify model.df11 --level checksums --device gpu";
    fixture.fails(arguments, 2, &["decodes nothing"]);
    for wrong in ["cuda", "-1", "gpu0", ""] {
        let output = fixture.run(&format!("verify model.df11 --device={wrong}"));
        assert_eq!(output.status.code(), Some(2));
    }
}

#[test]
fn bench_measures_a_small_model_too() {
    let fixture = Fixture::new();
    let found = fixture.json("bench model --threads=1,2 --repetitions=1");
    let results = found["results"].as_array().unwrap();
    for name in ["memory copy", "compress", "decode", "open", "verify all", "decompress"] {
        let of_name = results.iter().filter(|result| result["name"] == name);
        let threads: Vec<u64> = of_name.filter_map(|result| result["threads"].as_u64()).collect();
        assert_eq!(threads, [1, 2], "{name}");
    }
}

#[test]
fn quiet_says_nothing_and_json_says_errors_too() {
    let fixture = Fixture::new();
    assert_eq!(fixture.good("verify model.df11 -q"), "");
    let output = fixture.run("verify nowhere.df11 --json");
    assert_fails(&output, 2, &["nowhere.df11", "check the path"]);
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&error["error"]["kind"], &error["error"]["exit_code"]), (&"io".into(), &2.into()));
    // Names that may be a repository of the Hub; a path below an existing folder, or of a
    // container, is none.
    let remedy = ["hf download org/name-df11 --local-dir name-df11"];
    fixture.fails("verify org/name-df11", 2, &remedy);
    for path in ["model/name", "org/name.df11", "org/name/part", "name"] {
        let output = fixture.run(&format!("verify {path}"));
        assert!(!text(&output.stderr).contains("hf download"), "{path}");
    }
    assert_eq!(fixture.run("squash").status.code(), Some(2));
    assert_eq!(fixture.run("compress x --threads 0").status.code(), Some(2));
}

#[test]
fn a_bad_source_is_refused_and_nothing_is_made() {
    let fixture = Fixture::new();
    fs::remove_file(&fixture.container).unwrap();
    let whole = weights_file(&[Item::raw("a", Dtype::BF16, &[8], vec![0; 16])]);
    fixture.write("short.safetensors", &whole[..whole.len() - 7]);
    let before = fixture.names();
    for (name, part) in [("short.safetensors", "short.safetensors"), ("absent", "check the path")] {
        for out in ["out.df11", "out"] {
            fixture.fails(&format!("compress {name} -o {out}"), 2, &[part]);
        }
    }
    assert_eq!(fixture.names(), before);
}

#[test]
fn an_output_that_exists_is_replaced_only_by_force() {
    let fixture = Fixture::new();
    let before = fixture.read("model.df11");
    for line in ["compress model -o model.df11", "decompress model.df11 -o model"] {
        fixture.fails(line, 2, &["exists", "--force"]);
        fixture.good(&format!("{line} --force"));
        assert_eq!(fixture.read("model.df11"), before);
    }
    assert_eq!(fixture.names(), ["model", "model.df11"]);
}

#[test]
fn force_does_not_delete_what_is_no_earlier_output() {
    let fixture = Fixture::new();
    fixture.write("photos/cat.jpg", "cat");
    for (out, part) in [
        ("photos", "not part of an earlier output"),
        ("photos/cat.jpg", "is a file"),
        ("model", "is the source"),
        (".", "holds it"),
    ] {
        fixture.fails(&format!("compress model -o {out} --force"), 2, &[part]);
    }
    assert_eq!(fixture.read("photos/cat.jpg"), b"cat");
    assert_eq!(fixture.names(), ["model", "model.df11", "photos"]);
}

#[test]
fn damage_fails_the_check_and_a_newer_version_does_not() {
    let fixture = Fixture::new();
    let mut original = fixture.read("model.df11");
    fixture.flip_middle_byte("model.df11");
    fixture.fails("verify model.df11", 1, &["model.df11", "damaged"]);
    fixture.fails("decompress model.df11 -o back", 1, &[]);
    assert_eq!(fixture.names(), ["model", "model.df11"]);

    fixture.write("model.df11", &original[..original.len() - 100]);
    fixture.fails("verify model.df11", 1, &["model.df11"]);
    for other in ["text", "no container at all"] {
        fixture.write("model.df11", other);
        let output = fixture.run("verify model.df11");
        assert_fails(&output, 1, &["model.df11", "not a df11 file", "name another"]);
        assert!(!text(&output.stderr).contains("damaged"), "{}", text(&output.stderr));
    }

    original[8] = 2; // the version
    fixture.write("model.df11", original);
    fixture.fails("verify model.df11", 2, &["not supported", "update"]);
    fixture.fails("inspect model.df11", 2, &["not supported"]);
}

#[cfg(unix)]
mod unix {
    use std::{
        io::Read,
        os::unix::{fs::PermissionsExt, process::CommandExt},
    };

    use super::*;
    use crate::command::signal;

    /// The user and group that own nothing.
    const NOBODY: u32 = 65534;

    #[test]
    fn a_reader_that_goes_away_is_no_failure() {
        let fixture = Fixture::new();
        let mut child = fixture.start("inspect model.df11 --tensors");
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
        let output = Fixture::new().shell("df11 inspect model.df11 >/dev/full");
        assert_fails(&output, 2, &["standard output", "free some space"]);
    }

    #[test]
    fn a_limit_of_file_sizes_leaves_nothing_behind() {
        let fixture = Fixture::new();
        // The command catches SIGXFSZ itself: writing fails instead of ending the process.
        for line in
            ["compress model -o new.df11", "compress model -o new", "decompress model.df11 -o back"]
        {
            let output = fixture.shell(&format!("ulimit -f 100; df11 {line}"));
            assert_fails(&output, 2, &["writing", "ulimit"]);
        }
        assert_eq!(fixture.names(), ["model", "model.df11"]);
    }

    /// A disk of 256 KiB: what is written runs into its end; what is to be restored may be far
    /// larger than what there is room for, and is refused before.
    #[test]
    fn a_full_disk_leaves_nothing_behind() {
        let fixture = Fixture::new();
        fixture.good("compress model/model-00001-of-00002.safetensors -o single.df11");
        fs::create_dir(fixture.path("disk")).unwrap();
        let mounted = fixture.shell("mount -t tmpfs -o size=256k tmpfs disk");
        if !mounted.status.success() {
            eprintln!("skipped: cannot mount a small disk here ({})", text(&mounted.stderr).trim());
            return;
        }
        let told = &["bytes are to be written", "are free", "free some space"][..];
        let outputs = [
            ("compress model -o disk/new.df11", &told[2..]),
            ("compress model -o disk/new", &told[2..]),
            ("decompress model.df11 -o disk/back", told),
            ("decompress single.df11 -o disk/back.safetensors", told),
        ]
        .map(|(line, parts)| (fixture.run(line), names(&fixture.path("disk")), parts));
        assert!(fixture.shell("umount disk").status.success());
        for (output, left, parts) in outputs {
            assert_fails(&output, 2, parts);
            assert!(left.is_empty(), "{left:?}");
        }
    }

    #[test]
    fn an_unwritable_folder_is_named() {
        let fixture = Fixture::new();
        let folder = fixture.path("locked");
        fs::create_dir(&folder).unwrap();
        let allow = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        allow(&folder, 0o555);
        allow(fixture.root(), 0o755);
        for name in names(&fixture.model) {
            allow(&fixture.model.join(name), 0o644);
        }
        let mut command = fixture.command("compress model -o locked/x.df11");
        let mut probe = fixture.command("--version");
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
        assert_fails(&command.output().unwrap(), 2, &["locked", "its permissions"]);
        assert!(names(&folder).is_empty());
    }

    #[test]
    fn an_interruption_leaves_nothing_behind() {
        let fixture = Fixture::new();
        let big = tempfile::tempdir().unwrap();
        let model = demo::checkpoint(big.path(), demo::DEMO, 1).unwrap();
        for (out, name, code) in [("new.df11", "-INT", 130), ("new", "-TERM", 143)] {
            let line = format!("compress {} -o {out} --threads 1", model.display());
            let child = fixture.start(&line);
            fixture.wait_for_part("");
            signal(&child, name);
            assert_fails(&child.wait_with_output().unwrap(), code, &["interrupted"]);
            assert_eq!(fixture.names(), ["model", "model.df11"]);
        }
    }
}

/// Both forms of the answer describe only the recorded files of a folder.
#[test]
fn files_beside_the_containers_are_named() {
    let fixture = Fixture::new();
    fixture.good("compress model -o folder --metadata tool.a=b=c");
    assert_eq!(fixture.json("inspect folder")["metadata"], json!({ "tool.a": "b=c" }));
    assert!(fixture.good("inspect folder").contains("metadata  tool.a = b=c"));
    let twice = "compress model -o twice.df11 --metadata a.b=1 --metadata a.b=2";
    fixture.fails(twice, 2, &["two values"]);
    assert_eq!(fixture.json("verify folder")["good"], true);
    let text = fixture.good("decompress folder -o back");
    assert!(text.contains("every file has the hash of the original"), "{text}");

    fixture.write("folder/notes.md", "mine");
    fixture.write("folder/model.safetensors", "stray");
    let text = fixture.good("decompress folder -o back --force");
    assert!(!text.contains("every file"), "{text}");
    for part in ["unchecked notes.md", "left out  model.safetensors"] {
        assert!(text.contains(part), "{text}");
    }

    fixture.write("folder/config.json", "{}");
    let message = ["config.json", "was changed", "--keep-changed"];
    fixture.fails("decompress folder -o back --force", 1, &message);
    fixture.fails("verify folder", 1, &message);
    let kept = fixture.json("decompress folder -o back --force --keep-changed");
    assert_eq!(kept["changed"], json!(["config.json"]));
}

/// Not good, and not damaged either.
#[test]
fn what_cannot_be_checked_is_an_answer_of_its_own() {
    let fixture = Fixture::new();
    fixture.write("newer.df11", vector("valid/unknown-encoding"));
    fixture.good("compress model -o folder");
    for source in ["newer.df11", "folder/model-00001-of-00002.df11"] {
        let output = fixture.run(&format!("verify {source}"));
        let told = text(&output.stdout);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains("incomplete") && told.contains("unchecked"), "{told}");
        let Output { status, stdout, .. } = fixture.run(&format!("verify --json {source}"));
        let answer: Value = serde_json::from_slice(&stdout).unwrap();
        assert_eq!((status.code(), &answer["good"]), (Some(2), &Value::Bool(false)));
    }
}

#[cfg(feature = "cuda")]
#[test]
fn estimate_tells_which_gpu_holds_what() {
    let fixture = Fixture::new();
    let placed = fixture.json("estimate model -o one.df11 --gpus 1.1MB,2x1.2MB");
    let gpus = placed["placement"]["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 3);
    // The container that it will be has the same placement.
    let compressed = fixture.json("estimate model.df11 --gpus 1.1MB,2x1.2MB");
    assert_eq!(compressed["placement"], placed["placement"]);
    let blocks: usize = gpus.iter().map(|gpu| gpu["blocks"].as_array().unwrap().len()).sum();
    assert_eq!(placed["blocks"], blocks);
    let assumed = fixture.json("estimate model --gpus 80GB --exponent-bits 2.65");
    assert_eq!(assumed["placement"]["fits"], true);
    assert!(fixture.good("estimate model --gpus 80GB").contains("It fits"));
    let taken = |residence| {
        let line = format!("estimate model.df11 --gpus 80GB --residence {residence}");
        let gpu = &fixture.json(&line)["placement"]["gpus"][0];
        (gpu["taken_bytes"].as_u64().unwrap(), gpu["fast"].as_array().unwrap().len())
    };
    let (stored, fast) = (taken("stored"), taken("fast"));
    assert!(stored.1 == 0 && fast.1 > 0 && fast.0 != stored.0, "{stored:?} {fast:?}");
    assert_eq!(taken("auto"), fast);
    fixture.fails("estimate model.df11", 2, &["already compressed", "df11 inspect"]);
    let parts = ["GPU 0 of the plan may use 1000 bytes", "more GPUs"];
    fixture.fails("estimate model --gpus 1000B", 2, &parts);
}
