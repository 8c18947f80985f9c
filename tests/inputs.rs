//! Inputs that are no plain files, that are many, or whose names and numbers are large.

#[path = "support/command.rs"]
mod command;
#[path = "support/container.rs"]
mod container;

use std::fs;

use command::{Fixture, df11, good, json, text};
use container::{Item, Model, normal_weights};
use df11::Dtype;

#[test]
fn tensors_of_a_newer_encoding_are_shown() {
    let fixture = Fixture::new();
    let gap = Item::gap("known", &[64, 256], normal_weights(64 * 256, 1), (32, 128));
    let newer = Item::raw("newer", Dtype::BF16, &[64, 256], normal_weights(64 * 256, 2));
    let mut model = Model::new(&[gap, newer], &[]);
    model.tensor("newer").encoding = 9;
    let path = fixture.arg("newer.df11");
    fs::write(&path, model.build()).unwrap();
    let found = json(&["inspect", &path, "--tensors"]);
    let tensors = found["blocks"][0]["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 2);
    assert_eq!(tensors[1]["encoding"], "unknown");
    assert_eq!(found["unknown_tensors"], 1);
    assert_eq!(found["total"]["weights"], 64 * 256);
    assert!(found["total"]["entropy_bits_per_weight"].as_f64().unwrap() > 2.0, "{found}");
    let said = good(&["inspect", &path, "--tensors", "--histogram"]);
    assert!(said.contains("1 tensor is stored in a way that this version does not know"), "{said}");
}

#[test]
fn sums_of_sizes_do_not_wrap() {
    let fixture = Fixture::new();
    let huge = |name: &str| Item {
        dtype: (99, "X9".into()),
        shape: vec![1 << 40, 1 << 23],
        length: 0,
        data: Vec::new(),
        ..Item::raw(name, Dtype::U8, &[], Vec::new())
    };
    let items = [huge("a"), huge("b"), huge("c")];
    let path = fixture.arg("huge.df11");
    fs::write(&path, Model::new(&items, &[]).build()).unwrap();
    let found = json(&["inspect", &path]);
    assert_eq!(found["total"]["elements"], u64::MAX, "{found}");
    assert_eq!(found["total"]["saturated"], true);
    assert!(good(&["inspect", &path]).contains("more than 18446744073709551614"));
}

#[cfg(unix)]
mod unix {
    use std::{
        os::unix::{fs::symlink, net::UnixListener},
        path::Path,
        process::{Command, Output, Stdio},
        thread,
        time::{Duration, Instant},
    };

    use super::*;
    use command::{BINARY, assert_fails, fails, names};

    /// Runs the command; what has not ended after this time hangs.
    fn ends(arguments: &[&str]) -> Output {
        let mut command = Command::new(BINARY);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if start.elapsed() > Duration::from_secs(20) {
                child.kill().unwrap();
                panic!("{arguments:?} hangs");
            }
            thread::sleep(Duration::from_millis(5));
        }
        child.wait_with_output().unwrap()
    }

    fn pipe(path: &Path) {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }

    #[test]
    fn pipes_devices_and_sockets_are_refused_by_every_verb() {
        let fixture = Fixture::new();
        let (fifo, socket) = (fixture.arg("pipe.df11"), fixture.arg("socket.df11"));
        pipe(Path::new(&fifo));
        let _listener = UnixListener::bind(&socket).unwrap();
        let [out, link] = ["out", "zero.df11"].map(|name| fixture.arg(name));
        symlink("/dev/zero", &link).unwrap();
        for source in [&*fifo, &socket, &link, "/dev/null", "/dev/zero"] {
            for arguments in [
                &["verify", source][..],
                &["verify", source, "--level", "structure"],
                &["inspect", source],
                &["decompress", source, "-o", &out],
                &["convert", source, &out],
                &["compress", source, "-o", &out],
                &["compress", source, "-o", &out, "--dry-run"],
                &["estimate", source],
                &["bench", source, "--repetitions", "1"],
            ] {
                let output = ends(arguments);
                let error = text(&output.stderr);
                assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
                assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
                // By its name alone some verbs refuse a container.
                if !["estimate", "compress", "bench"].contains(&arguments[0]) {
                    assert!(error.contains("regular file"), "{arguments:?}: {error}");
                }
            }
        }
    }

    #[test]
    fn pipes_in_folders_are_refused_or_left_out() {
        let fixture = Fixture::new();
        let [model, out, back] = ["model", "out", "back"].map(|name| fixture.arg(name));
        pipe(&Path::new(&model).join("pipe"));
        let output = ends(&["compress", &model, "-o", &out]);
        assert!(text(&output.stdout).contains("pipe: not a regular file"), "{output:?}");
        pipe(&Path::new(&out).join("pipe"));
        assert_eq!(ends(&["decompress", &out, "-o", &back]).status.code(), Some(0));
        pipe(&Path::new(&out).join("x.df11"));
        for verb in [&["verify", &out][..], &["inspect", &out], &["convert", &out, &back]] {
            assert_fails(&ends(verb), 2, &["x.df11", "regular file"]);
        }
        pipe(&Path::new(&model).join("x.safetensors"));
        assert_fails(
            &ends(&["compress", &model, "-o", &back]),
            2,
            &["x.safetensors", "regular file"],
        );
    }

    #[test]
    fn a_link_out_of_the_source_is_named_and_refused() {
        let fixture = Fixture::new();
        let (model, out) = (fixture.arg("model"), fixture.arg("out.df11"));
        let secret = fixture.path("secret.json");
        fs::write(&secret, "secret").unwrap();
        let link = Path::new(&model).join("extra.json");
        for target in ["../secret.json", secret.to_str().unwrap()] {
            symlink(target, &link).unwrap();
            let output = df11(&["compress", &model, "-o", &out]);
            assert_fails(&output, 2, &["extra.json", "secret.json", "out of the folder"]);
            assert!(!Path::new(&out).exists());
            fs::remove_file(&link).unwrap();
        }
        // A link to a file of the same folder is one of its files.
        symlink("config.json", &link).unwrap();
        good(&["compress", &model, "-o", &out]);
        fs::remove_file(&link).unwrap();
        // Beside containers it is no part of the model, and left out.
        let shards = fixture.arg("shards");
        good(&["compress", &model, "-o", &shards]);
        symlink("../secret.json", Path::new(&shards).join("extra.json")).unwrap();
        let told = good(&["decompress", &shards, "-o", &fixture.arg("b")]);
        assert!(told.contains("extra.json") && told.contains("out of the folder"), "{told}");
        assert!(good(&["convert", &shards, &fixture.arg("c")]).contains("extra.json"));
        assert!(!fixture.path("b/extra.json").exists() && !fixture.path("c/extra.json").exists());
    }

    #[test]
    fn links_of_the_hubs_cache_are_followed() {
        let fixture = Fixture::new();
        let repository = fixture.path("models--org--name");
        let (blobs, snapshot) = (repository.join("blobs"), repository.join("snapshots/0123abcd"));
        for folder in [&blobs, &snapshot] {
            fs::create_dir_all(folder).unwrap();
        }
        for (index, name) in names(&fixture.model).iter().enumerate() {
            let blob = index.to_string();
            fs::rename(fixture.model.join(name), blobs.join(&blob)).unwrap();
            symlink(Path::new("../../blobs").join(&blob), snapshot.join(name)).unwrap();
        }
        let (snapshot, out) = (snapshot.to_str().unwrap(), fixture.path("out.df11"));
        good(&["compress", snapshot, "-o", out.to_str().unwrap()]);
        assert_eq!(fs::read(out).unwrap(), fs::read(&fixture.container).unwrap());
        // Blobs of another repository are none of this one's.
        let other = fixture.path("models--org--other/blobs");
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("x"), "{}").unwrap();
        symlink(other.join("x"), Path::new(snapshot).join("x.json")).unwrap();
        fails(
            &["compress", snapshot, "-o", &fixture.arg("no")],
            2,
            &["x.json", "out of the folder"],
        );
    }

    /// Runs a line of shell, in which `$1` is the command and `$2` the fixture's folder.
    fn shell(line: &str, fixture: &Fixture) -> Output {
        let arguments = ["-c", line, "sh", BINARY, fixture.folder.path().to_str().unwrap()];
        Command::new("sh").args(arguments).stdin(Stdio::null()).output().unwrap()
    }

    #[test]
    fn a_model_may_have_more_shards_than_a_process_may_have_files() {
        const SHARDS: usize = 100;
        let fixture = Fixture::new();
        let source = fixture.path("many");
        fs::create_dir(&source).unwrap();
        for index in 0..SHARDS {
            let header =
                format!(r#"{{"t{index}":{{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}}}}"#);
            command::safetensors(&source.join(format!("{index:03}.safetensors")), &header, 16);
        }
        for line in [
            "compress \"$2/many\" -o \"$2/shards\"",
            "verify \"$2/shards\"",
            "inspect \"$2/shards\"",
            "convert \"$2/shards\" \"$2/one.df11\"",
            "convert \"$2/one.df11\" \"$2/again\" --layout raw",
            "decompress \"$2/shards\" -o \"$2/back\"",
            "compress \"$2/many\" -o \"$2/two.df11\"",
            "estimate \"$2/many\"",
        ] {
            let output = shell(&format!("ulimit -n 64; exec \"$1\" {line} --threads 2"), &fixture);
            assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        }
        for name in names(&source) {
            assert!(
                fs::read(fixture.path("back").join(&name)).unwrap()
                    == fs::read(source.join(name)).unwrap()
            );
        }
    }

    #[test]
    fn memory_of_inspect_is_in_proportion_to_the_directory() {
        let fixture = Fixture::new();
        let mut model = Model::new(&[Item::raw("a", Dtype::U8, &[1], vec![1])], &[]);
        model.blocks.push(vec![b'x'; 4096]);
        model.blocks.extend((0..90_000).map(|index| format!("{index}").into_bytes()));
        let path = fixture.path("long.df11");
        fs::write(&path, model.build()).unwrap();
        assert!(fs::metadata(&path).unwrap().len() < 2_200_000);
        for more in ["", "-q", "--json", "--tensors", "--tensors -q", "--json -q"] {
            // Memory that the process may write, in KiB. Today's need is a few times the directory.
            let line = format!(
                "ulimit -d 250000; exec \"$1\" inspect \"$2/long.df11\" {more} --threads 1 \
                >\"$2/said\""
            );
            let output = shell(&line, &fixture);
            assert!(output.status.success(), "{more}: {}", text(&output.stderr));
        }
        let said = fs::metadata(fixture.path("said")).unwrap().len();
        assert!(said < 60_000_000, "{said}");
    }
}
