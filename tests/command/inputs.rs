//! Inputs that are no plain files, that are many, or whose names and numbers are large.

use std::fs;

use df11::Dtype;

use crate::{
    command::{Fixture, Folder, assert_fails, text},
    container::{Item, Model, normal_weights},
    files::files,
};

#[test]
fn tensors_of_a_newer_encoding_are_shown() {
    let fixture = Fixture::new();
    let gap = Item::gap("known", &[64, 256], normal_weights(64 * 256, 1), (32, 128));
    let newer = Item::raw("newer", Dtype::BF16, &[64, 256], normal_weights(64 * 256, 2));
    let mut model = Model::new(&[gap, newer], &[]);
    model.tensor("newer").encoding = 9;
    fixture.write("newer.df11", model.build());
    let found = fixture.json("inspect newer.df11 --tensors");
    let tensors = found["blocks"][0]["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 2);
    assert_eq!(tensors[1]["encoding"], "unknown");
    assert_eq!(found["unknown_tensors"], 1);
    assert_eq!(found["total"]["weights"], 64 * 256);
    assert!(found["total"]["entropy_bits_per_weight"].as_f64().unwrap() > 2.0, "{found}");
    let said = fixture.good("inspect newer.df11 --tensors --histogram");
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
    fixture.write("huge.df11", Model::new(&items, &[]).build());
    let found = fixture.json("inspect huge.df11");
    assert_eq!(found["total"]["elements"], u64::MAX, "{found}");
    assert_eq!(found["total"]["saturated"], true);
    assert!(fixture.good("inspect huge.df11").contains("more than 18446744073709551614"));
}

/// Characters that drive a terminal, reorder text, or that nobody sees.
const UNSEEN: &str = "\u{1b}\u{7f}\u{9b}\u{ad}\u{200b}\u{200d}\u{200f}\u{202e}\u{2028}\u{2060}\
                      \u{2067}\u{feff}\u{e0041}";

#[test]
fn every_character_of_a_name_shows() {
    let fixture = Fixture::new();
    let name = format!("a\n{UNSEEN}é");
    let item = Item::gap(&name, &[64, 256], normal_weights(64 * 256, 1), (32, 128));
    let mut model = Model::new(&[item], &[]);
    let block = model.blocks.len() - 1;
    model.blocks[block] = format!("b{UNSEEN}").into_bytes();
    fixture.write("x.df11", model.build());
    fixture.write("y.df11", "no container");
    // No name of Windows has a control character.
    let allowed = |c: &char| !cfg!(windows) || *c >= ' ';
    let path = format!("x{}.df11", UNSEEN.chars().filter(allowed).collect::<String>());
    fs::copy(fixture.path("x.df11"), fixture.path(&path)).unwrap();
    fs::copy(fixture.path("y.df11"), fixture.path(&format!("y{path}"))).unwrap();
    for words in [
        &["inspect", "--tensors"][..],
        &["inspect", "--tensors", "--histogram"],
        &["verify"],
        &["verify", "--level", "structure"],
        &["decompress", "-o", "x.df11"],
        &["estimate"],
        &["doctor", "--folder"],
    ] {
        for path in [&path, &format!("y{path}"), &format!("none{path}")] {
            for json in [&[][..], &["--json"]] {
                let mut command = fixture.command(words[0]);
                // A folder is all that doctor takes.
                let source = if words[0] == "doctor" { "." } else { path };
                let output = command.args(&words[1..]).arg(source).args(json).output().unwrap();
                let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
                let seen = said.chars().all(|c| c == '\n' || !df11::hazmat::is_unseen(c));
                assert!(seen, "{words:?} {json:?}: {said:?}");
                assert!(!said.contains("a\n"), "{words:?}: {said}");
            }
        }
    }
    let mut command = fixture.command("inspect --tensors --json");
    let found: serde_json::Value =
        serde_json::from_slice(&command.arg(&path).output().unwrap().stdout).unwrap();
    assert_eq!(found["blocks"][0]["tensors"][0]["name"], name, "programs get the name as it is");
}

#[cfg(unix)]
mod unix {
    use std::{
        os::unix::{fs::symlink, net::UnixListener},
        process::Output,
        thread,
        time::{Duration, Instant},
    };

    use super::*;
    use crate::command::{Folder, assert_fails, names};

    /// Runs the command; what has not ended after this time hangs.
    fn ends(folder: &Folder, line: &str) -> Output {
        let mut child = folder.start(line);
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if start.elapsed() > Duration::from_secs(20) {
                child.kill().unwrap();
                panic!("{line} hangs");
            }
            thread::sleep(Duration::from_millis(5));
        }
        child.wait_with_output().unwrap()
    }

    fn pipe(folder: &Folder, name: &str) {
        assert!(folder.shell(&format!("mkfifo {name}")).status.success());
    }

    #[test]
    fn pipes_devices_and_sockets_are_refused_by_every_verb() {
        let fixture = Fixture::new();
        pipe(&fixture, "pipe.df11");
        let _listener = UnixListener::bind(fixture.path("socket.df11")).unwrap();
        symlink("/dev/zero", fixture.path("zero.df11")).unwrap();
        for source in ["pipe.df11", "socket.df11", "zero.df11", "/dev/null", "/dev/zero"] {
            for line in [
                "verify SOURCE",
                "verify SOURCE --level structure",
                "inspect SOURCE",
                "decompress SOURCE -o out",
                "convert SOURCE -o out",
                "compress SOURCE -o out",
                "compress SOURCE -o out --dry-run",
                "estimate SOURCE",
                "bench SOURCE --repetitions 1",
            ] {
                let line = line.replace("SOURCE", source);
                let output = ends(&fixture, &line);
                let error = text(&output.stderr);
                assert_eq!(output.status.code(), Some(2), "{line}: {error}");
                assert_eq!(error.lines().count(), 1, "{line}: {error}");
                // By its name alone some verbs refuse a container.
                if !["estimate", "compress", "bench"].iter().any(|verb| line.starts_with(verb)) {
                    assert!(error.contains("regular file"), "{line}: {error}");
                }
            }
        }
    }

    #[test]
    fn references_of_a_cache_are_short_regular_files() {
        let fixture = Fixture::new();
        let entry = "hub/models--org--name";
        fs::create_dir_all(fixture.path(entry).join("blobs")).unwrap();
        fs::create_dir_all(fixture.path(entry).join("refs")).unwrap();
        fs::create_dir_all(fixture.path(entry).join("snapshots")).unwrap();
        fs::rename(&fixture.model, fixture.path(entry).join("snapshots/0123")).unwrap();
        let compress = |line: &str| ends(&fixture, &format!("{line} --force -o out"));
        for make in ["mkfifo REF", "ln -s /dev/zero REF", "ln -s /dev/tty REF", "mkdir REF"] {
            for name in ["main", "v2"] {
                let made = make.replace("REF", &format!("{entry}/refs/{name}"));
                assert!(fixture.shell(&made).status.success());
            }
            let output = compress(&format!("compress {entry}"));
            assert!(output.status.success(), "{make}: {}", text(&output.stderr));
            let mut command = fixture.command("compress org/name@v2 -o out2");
            let output = command.env("HF_HUB_CACHE", fixture.path("hub")).output().unwrap();
            assert_fails(&output, 2, &["another revision", "hf download"]);
            fs::remove_dir_all(fixture.path(entry).join("refs")).unwrap();
            fs::create_dir(fixture.path(entry).join("refs")).unwrap();
        }
        // A file that begins as a commit and never ends.
        let long = format!("0123{}", "\n".repeat(2000));
        fixture.write(&format!("{entry}/refs/v2"), long);
        let mut command = fixture.command("compress org/name@v2 -o out2");
        let output = command.env("HF_HUB_CACHE", fixture.path("hub")).output().unwrap();
        assert_fails(&output, 2, &["another revision"]);
    }

    #[test]
    fn pipes_in_folders_are_refused_or_left_out() {
        let fixture = Fixture::new();
        pipe(&fixture, "model/pipe");
        let output = ends(&fixture, "compress model -o out");
        assert!(text(&output.stdout).contains("pipe: not a regular file"), "{output:?}");
        pipe(&fixture, "out/pipe");
        assert_eq!(ends(&fixture, "decompress out -o back").status.code(), Some(0));
        pipe(&fixture, "out/x.df11");
        for line in ["verify out", "inspect out", "convert out -o back"] {
            assert_fails(&ends(&fixture, line), 2, &["x.df11", "regular file"]);
        }
        pipe(&fixture, "model/x.safetensors");
        let output = ends(&fixture, "compress model -o back");
        assert_fails(&output, 2, &["x.safetensors", "regular file"]);
    }

    #[test]
    fn a_link_out_of_the_source_is_named_and_refused() {
        let fixture = Fixture::new();
        fixture.write("secret.json", "secret");
        let link = fixture.path("model/extra.json");
        for target in ["../secret.json", &fixture.arg("secret.json")] {
            symlink(target, &link).unwrap();
            let output = fixture.run("compress model -o out.df11");
            assert_fails(&output, 2, &["extra.json", "secret.json", "out of the folder"]);
            assert!(!fixture.path("out.df11").exists());
            fs::remove_file(&link).unwrap();
        }
        // A link to a file of the same folder is one of its files.
        symlink("config.json", &link).unwrap();
        fixture.good("compress model -o out.df11");
        fs::remove_file(&link).unwrap();
        // Beside containers it is no part of the model, and left out.
        fixture.good("compress model -o shards");
        symlink("../secret.json", fixture.path("shards/extra.json")).unwrap();
        let told = fixture.good("decompress shards -o b");
        assert!(told.contains("extra.json") && told.contains("out of the folder"), "{told}");
        assert!(fixture.good("convert shards -o c").contains("extra.json"));
        assert!(!fixture.path("b/extra.json").exists() && !fixture.path("c/extra.json").exists());
    }

    #[test]
    fn a_model_may_have_more_shards_than_a_process_may_have_files() {
        const SHARDS: usize = 100;
        let fixture = Fixture::new();
        for index in 0..SHARDS {
            let item = Item::raw(&format!("t{index}"), Dtype::BF16, &[8], vec![0; 16]);
            fixture.weights(&format!("many/{index:03}.safetensors"), &[item]);
        }
        for line in [
            "compress many -o shards",
            "verify shards",
            "inspect shards",
            "convert shards -o one.df11",
            "convert one.df11 -o again --layout raw",
            "decompress shards -o back",
            "compress many -o two.df11",
            "estimate many",
        ] {
            let output = fixture.shell(&format!("ulimit -n 64; df11 {line} --threads 2"));
            assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        }
        for name in names(&fixture.path("many")) {
            let [back, many] = ["back", "many"].map(|folder| format!("{folder}/{name}"));
            assert!(fixture.read(&back) == fixture.read(&many));
        }
    }

    #[test]
    fn memory_of_inspect_is_in_proportion_to_the_directory() {
        let fixture = Fixture::new();
        let mut model = Model::new(&[Item::raw("a", Dtype::U8, &[1], vec![1])], &[]);
        model.blocks.push(vec![b'x'; 4096]);
        model.blocks.extend((0..90_000).map(|index| format!("{index}").into_bytes()));
        let container = model.build();
        assert!(container.len() < 2_200_000);
        fixture.write("long.df11", container);
        for more in ["", "-q", "--json", "--tensors", "--tensors -q", "--json -q"] {
            // Memory that the process may write, in KiB. Today's need is a few times the directory.
            let line = format!("ulimit -d 250000; df11 inspect long.df11 {more} --threads 1 >said");
            let output = fixture.shell(&line);
            assert!(output.status.success(), "{more}: {}", text(&output.stderr));
        }
        let said = fs::metadata(fixture.path("said")).unwrap().len();
        assert!(said < 60_000_000, "{said}");
    }
}

/// A folder as Mistral uploads one: shards that an index names, the same weights under other
/// names, a shard of an earlier upload, and weights in another format.
fn uploaded_twice(folder: &Folder) {
    let matrix = |name: &str, seed| {
        Item::raw(name, Dtype::BF16, &[256, 256], normal_weights(256 * 256, seed))
    };
    folder.weights("model/model-00001-of-00002.safetensors", &[matrix("model.layers.0.up", 1)]);
    folder.weights("model/model-00002-of-00002.safetensors", &[matrix("model.layers.1.up", 4)]);
    let index = r#"{"weight_map": {
        "model.layers.0.up": "model-00001-of-00002.safetensors",
        "model.layers.1.up": "model-00002-of-00002.safetensors"}}"#;
    folder.write("model/model.safetensors.index.json", index);
    let consolidated =
        [matrix("layers.0.w1", 1), matrix("layers.1.q", 8), matrix("layers.1.w1", 4)];
    folder.weights("model/consolidated.safetensors", &consolidated);
    folder.weights("model/model-00001-of-00003.safetensors", &[matrix("model.layers.0.up", 1)]);
    folder.write("model/pytorch_model.bin", "pickled");
    folder.write("model/.gitattributes", "hidden");
    folder.write("model/config.json", "{}");
}

#[test]
fn a_compression_names_what_will_not_come_back() {
    let folder = Folder::new();
    uploaded_twice(&folder);
    let lost = "df11 decompress will not bring back consolidated.safetensors, \
                model-00001-of-00003.safetensors, pytorch_model.bin; --all-files keeps every \
                file, in one container\n";
    let said = folder.good("compress model -o told");
    assert!(said.ends_with(lost), "{said}");
    let quiet = folder.run("compress model -o quiet -q");
    assert_eq!(quiet.status.code(), Some(0));
    assert_eq!((text(&quiet.stdout), text(&quiet.stderr)), ("", &*format!("df11: {lost}")));
    let told = folder.json("compress model -o json");
    assert_eq!(told["left_out"].as_array().unwrap().len(), 4, "{told}");
    // Nothing is said where nothing is lost.
    folder.write("whole/.gitattributes", "hidden");
    folder.weights("whole/model.safetensors", &[Item::raw("a", Dtype::U8, &[1], vec![1])]);
    assert_eq!(text(&folder.run("compress whole -q").stderr), "");
}

#[test]
fn all_files_of_a_folder_come_back() {
    let folder = Folder::new();
    uploaded_twice(&folder);
    let report = folder.json("compress model --all-files");
    assert_eq!(report["output"], "model.df11");
    assert_eq!(report["coded_tensors"], 3, "{report}");
    assert_eq!(report["alias_tensors"], 2, "equal tensors are stored once: {report}");
    let notes = report["notes"].to_string();
    assert!(notes.contains("model-00001-of-00003.safetensors is not compressed"), "{notes}");
    folder.good("decompress model.df11 -o back");
    let mut originals = files(&folder.path("model"));
    originals.remove(".gitattributes");
    assert!(files(&folder.path("back")) == originals);
    assert_eq!(folder.json("estimate model --all-files")["stored_bytes"], report["stored_bytes"]);

    // In another layout and back, it is the same container.
    folder.good("convert model.df11 -o gap.df11 --layout gap");
    folder.good("convert gap.df11 -o tile.df11");
    assert!(folder.read("tile.df11") == folder.read("model.df11"));
    // Loaders read all containers of a folder, and must not meet the other weights there.
    let said = folder.good("convert model.df11 -o model-df11");
    assert!(said.contains("will not bring back consolidated.safetensors, model-00001"), "{said}");
    for name in ["model-00001-of-00002.df11", "model-00002-of-00002.df11"] {
        let name = format!("model-df11/{name}");
        assert!(folder.path(&name).is_file(), "{name}");
    }
    assert!(!folder.path("model-df11/consolidated.df11").exists());

    folder.fails("compress model --all-files -o out", 2, &["one container", "-o NAME.df11"]);
    let both = folder.run("compress model --all-files --variant fp16");
    assert!(text(&both.stderr).contains("cannot be used with"), "{}", text(&both.stderr));
    folder.write("pipe/model_index.json", "{}");
    folder.weights("pipe/unet/model.safetensors", &[Item::raw("a", Dtype::U8, &[1], vec![1])]);
    folder.fails("compress pipe --all-files", 2, &["a pipeline is several models", "component"]);
}

#[test]
fn a_file_that_was_never_a_container_is_not_called_damaged() {
    let fixture = Fixture::new();
    for (path, remedy) in [
        ("model/config.json", "name a .df11 file, or the folder that holds it"),
        ("model/model-00001-of-00002.safetensors", "compress it first"),
    ] {
        for verb in ["inspect", "verify", "convert -o out.df11", "decompress -o out"] {
            let output = fixture.run(&format!("{verb} {path}"));
            assert_fails(&output, 2, &["is not a df11 container", remedy]);
            assert!(!text(&output.stderr).contains("damaged"), "{}", text(&output.stderr));
        }
    }
    // Another name is enough for a container.
    fs::copy(&fixture.container, fixture.path("model.bin")).unwrap();
    fixture.good("verify model.bin");
    // One remedy, and no other one after it.
    fixture.write("lfs.safetensors", "version https://git-lfs.github.com/spec/v1");
    let [lfs, other, missing] =
        ["compress lfs.safetensors", "compress model/config.json", "verify org/name"]
            .map(|line| text(&fixture.run(line).stderr).to_owned());
    assert!(lfs.ends_with("not the weights; run git lfs pull\n"), "{lfs}");
    assert!(
        other.ends_with("not a safetensors file; name one, or the folder of a model\n"),
        "{other}"
    );
    assert!(missing.ends_with("hf download org/name --local-dir name\n"), "{missing}");
}

/// Four bits of BF16 that was FP8 are kept, of other BF16 eight.
#[test]
fn the_entropy_limit_counts_the_bits_that_are_kept() {
    let folder = Folder::new();
    let of = |name: &str, mask: u8| {
        let mut data = normal_weights(256 * 512, 3);
        data.iter_mut().step_by(2).for_each(|low| *low &= mask);
        Item::raw(name, Dtype::BF16, &[256, 512], data)
    };
    folder.weights("m.safetensors", &[of("a", 0xF0), of("b", 0xFF)]);
    folder.good("compress m.safetensors -o m.df11");
    let found = folder.json("inspect m.df11 --tensors");
    let blocks = found["blocks"].as_array().unwrap().iter();
    let tensors: Vec<_> = blocks.flat_map(|block| block["tensors"].as_array().unwrap()).collect();
    assert_eq!(tensors.len(), 2);
    for (tensor, kept) in tensors.into_iter().zip([4.0, 8.0]) {
        assert_eq!(tensor["kept_bits_per_weight"], kept, "{tensor}");
        let [stored, entropy] = ["bits_per_weight", "entropy_bits_per_weight"]
            .map(|figure| tensor[figure].as_f64().unwrap());
        assert!((kept + entropy..kept + entropy + 0.3).contains(&stored), "{tensor}");
    }
}

#[test]
fn entropy_is_one_figure_wherever_it_is_told() {
    let fixture = Fixture::new();
    let found = fixture.json("inspect model.df11");
    let entropy = found["total"]["entropy_bits_per_weight"].as_f64().unwrap();
    let said = fixture.good("inspect model.df11 --histogram --picture x.svg --html x.html");
    assert!(said.lines().any(|line| line.ends_with(&format!("{:.3}", entropy + 8.0))), "{said}");
    assert_eq!(said.matches("entropy").count(), 1, "the column alone: {said}");
    let picture = String::from_utf8(fixture.read("x.svg")).unwrap();
    assert!(picture.contains(&format!("entropy {entropy:.3} of 8 bits")), "{picture}");
    fixture.good("compress model -o tile.df11");
    let compressed = fixture.json("estimate model")["entropy_bits_per_weight"].as_f64().unwrap();
    let said = fixture.good("estimate model");
    let limit = format!("the entropy limit is {:.2}", 8.0 + compressed);
    assert!(said.contains(&limit), "{limit} in {said}");
}
