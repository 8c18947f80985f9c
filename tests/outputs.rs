//! Outputs: nothing that is there is lost, nothing gets a name that another has, whatever happens
//! meanwhile.

#[path = "support/command.rs"]
mod command;

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use command::{BINARY, Fixture, assert_fails, df11, fails, good, json, names, text};
use df11::{
    CompressOptions, Error, Layout, Level, ReadAt, Source, hazmat::demo, source::WeightsFile,
};

/// Starts the command.
fn start(arguments: &[&str]) -> Child {
    let mut command = Command::new(BINARY);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Waits until work has begun in a folder, which shows in a temporary file or folder.
fn wait_for_part(folder: &Path) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        if names(folder).iter().any(|name| name.starts_with(".df11-")) {
            return;
        }
        thread::sleep(Duration::from_micros(200));
    }
    panic!("no work in a minute");
}

/// A folder with a model that takes some time: its checkpoint, container and folder of shards.
struct Big {
    fixture: Fixture,
    model: String,
    container: String,
    shards: String,
}

impl Big {
    fn new() -> Self {
        let fixture = Fixture::new();
        let store = fixture.path("big");
        fs::create_dir(&store).unwrap();
        let model = demo::checkpoint(&store, demo::DEMO, 1).unwrap();
        let model = model.to_str().unwrap().to_owned();
        let [container, shards] = ["big/model.df11", "big/shards"].map(|name| fixture.arg(name));
        good(&["compress", &model, "-o", &container, "--no-verify"]);
        good(&["compress", &model, "-o", &shards, "--no-verify"]);
        Self { fixture, model, container, shards }
    }
}

#[test]
fn what_appears_under_the_outputs_name_meanwhile_stays() {
    let big = Big::new();
    let out = |name: &str| big.fixture.arg(name);
    let [file, folder, plain] = [out("new.df11"), out("new"), out("new.safetensors")];
    let single = out("big/one.df11");
    let one = Path::new(&big.model).join("model-00001-of-00002.safetensors");
    good(&["compress", one.to_str().unwrap(), "-o", &single, "--no-verify"]);
    let before = big.fixture.names();
    for arguments in [
        ["compress", &big.model, "-o", &file, "--threads=1"],
        ["compress", &big.model, "-o", &folder, "--threads=1"],
        ["convert", &big.container, &file, "--layout=gap", "--threads=1"],
        ["convert", &big.shards, &folder, "--layout=gap", "--threads=1"],
        ["decompress", &big.container, "-o", &folder, "--threads=1"],
        ["decompress", &single, "-o", &plain, "--threads=1"],
    ] {
        let output = PathBuf::from(arguments.into_iter().find(|a| a.contains("/new")).unwrap());
        let child = start(&arguments);
        wait_for_part(big.fixture.folder.path());
        let precious = if output.extension().is_none() {
            fs::create_dir(&output).unwrap();
            output.join("precious")
        } else {
            output.clone()
        };
        fs::write(&precious, "precious").unwrap();
        assert_fails(&child.wait_with_output().unwrap(), 2, &["exists", "--force"]);
        assert_eq!(fs::read(&precious).unwrap(), b"precious", "{arguments:?}");
        if output.is_dir() { fs::remove_dir_all(&output) } else { fs::remove_file(&output) }
            .unwrap();
        assert_eq!(big.fixture.names(), before, "{arguments:?}");
    }
}

#[test]
fn an_empty_folder_that_appears_meanwhile_is_no_output_either() {
    let big = Big::new();
    let folder = big.fixture.arg("new");
    let child = start(&["compress", &big.model, "-o", &folder, "--no-verify"]);
    wait_for_part(big.fixture.folder.path());
    fs::create_dir(&folder).unwrap();
    assert_fails(&child.wait_with_output().unwrap(), 2, &["exists", "--force"]);
    assert!(names(Path::new(&folder)).is_empty());
}

#[test]
fn of_two_writers_to_one_name_one_wins() {
    let big = Big::new();
    for name in ["new.df11", "new"] {
        let out = big.fixture.arg(name);
        let arguments = ["compress", &big.model, "-o", &out, "--threads=1", "--no-verify"];
        let writers = [start(&arguments), start(&arguments)];
        let outputs = writers.map(|writer| writer.wait_with_output().unwrap());
        let (won, lost): (Vec<&Output>, Vec<&Output>) =
            outputs.iter().partition(|output| output.status.success());
        assert_eq!((won.len(), lost.len()), (1, 1), "{outputs:?}");
        assert_fails(lost[0], 2, &["exists"]);
        assert_eq!(json(&["verify", &out])["good"], true);
    }
    assert_eq!(big.fixture.names(), ["big", "model", "model.df11", "new", "new.df11"]);
}

#[test]
fn a_picture_replaces_what_is_there_only_by_force() {
    let fixture = Fixture::new();
    let (container, picture) = (fixture.arg("model.df11"), fixture.arg("picture.svg"));
    fs::write(&picture, "precious").unwrap();
    let arguments = ["inspect", &container, "--picture", &picture];
    fails(&arguments, 2, &["exists", "--force"]);
    assert_eq!(fs::read(&picture).unwrap(), b"precious");
    good(&[&arguments[..], &["--force"]].concat());
    assert!(fs::read(&picture).unwrap().starts_with(b"<svg "));
    assert_eq!(fixture.names(), ["model", "model.df11", "picture.svg"]);
}

/// A folder with weights files of these names, of one tensor each.
fn checkpoint(folder: &Path, files: &[&str]) {
    fs::create_dir_all(folder).unwrap();
    let mut map = serde_json::Map::new();
    for (index, name) in files.iter().enumerate() {
        let header =
            format!(r#"{{"t{index}":{{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}}}}"#);
        command::safetensors(&folder.join(name), &header, 16);
        map.insert(format!("t{index}"), (*name).into());
    }
    let json = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), json.to_string()).unwrap();
}

#[test]
fn weights_files_whose_containers_would_share_a_name_are_refused() {
    let fixture = Fixture::new();
    for files in
        [&["X", "X.safetensors"][..], &["X", "X.safetensors", "Y"], &["a.safetensors", "a"]]
    {
        let (source, out) = (fixture.path("source"), fixture.path("out"));
        checkpoint(&source, files);
        let [source_arg, out_arg] = [&source, &out].map(|path| path.to_str().unwrap());
        let output = df11(&["compress", source_arg, "-o", out_arg]);
        assert_fails(&output, 2, &[files[0], files[1], ".df11", "one file"]);
        assert!(!out.exists());
        // One container has the paths themselves.
        let (single, back) = (fixture.arg("single.df11"), fixture.path("back"));
        good(&["compress", source_arg, "-o", &single]);
        good(&["decompress", &single, "-o", back.to_str().unwrap()]);
        for file in files {
            assert_eq!(fs::read(back.join(file)).unwrap(), fs::read(source.join(file)).unwrap());
        }
        for path in [&source, &back] {
            fs::remove_dir_all(path).unwrap();
        }
        fs::remove_file(single).unwrap();
    }
}

#[test]
fn names_without_the_extension_of_safetensors_are_no_problem_by_themselves() {
    let fixture = Fixture::new();
    let (source, out, back) = (fixture.path("source"), fixture.arg("out"), fixture.path("back"));
    checkpoint(&source, &["X", "Y.safetensors"]);
    let report = json(&["compress", source.to_str().unwrap(), "-o", &out]);
    assert_eq!(report["shards"], 2);
    let made = ["README.md", "X.df11", "Y.df11", "model.safetensors.index.json"];
    assert_eq!(names(Path::new(&out)), made);
    good(&["decompress", &out, "-o", back.to_str().unwrap()]);
    assert_eq!(names(&back), names(&source));
}

/// Bytes of which one changes after it was read some times.
struct Changing {
    bytes: Vec<u8>,
    at: u64,
    reads: AtomicU32,
    /// The number of the first read that sees the change.
    from: u32,
}

impl ReadAt for Changing {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.bytes.read_exact_at(offset, buf)?;
        if (offset..offset + buf.len() as u64).contains(&self.at)
            && self.reads.fetch_add(1, Ordering::Relaxed) + 1 >= self.from
        {
            // Only a sign changes, which no histogram and no length of a code tells.
            buf[(self.at - offset) as usize] ^= 0x80;
        }
        Ok(())
    }
}

/// A safetensors file with a coded matrix of this many rows of 256, and a tensor that is stored
/// raw.
fn weights_file(rows: usize) -> Vec<u8> {
    let coded = 512 * rows;
    let header = format!(
        r#"{{"m":{{"dtype":"BF16","shape":[{rows},256],"data_offsets":[0,{coded}]}},
            "r":{{"dtype":"I64","shape":[8],"data_offsets":[{coded},{}]}}}}"#,
        coded + 64
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend((0..coded / 2).flat_map(|i| (0x3C00 | (i * 37 % 251) as u16).to_le_bytes()));
    bytes.extend([7; 64]);
    bytes
}

#[test]
fn a_source_that_changes_between_the_passes_is_noticed_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new.df11");
    // Of 9 MiB, so that tiles are measured in a pass of their own; and of 64 KiB.
    for (rows, layout) in [18432, 128]
        .into_iter()
        .flat_map(|rows| [Layout::Tile, Layout::gap(), Layout::Raw].map(|layout| (rows, layout)))
    {
        let bytes = weights_file(rows);
        let length = bytes.len() as u64;
        // In the middle of the matrix, and in the tensor that is stored raw.
        for at in [(length / 2) | 1, length - 1] {
            let mut refused = 0;
            for from in 2..=5 {
                let reader = Changing { bytes: bytes.clone(), at, reads: AtomicU32::new(0), from };
                let file = WeightsFile::parse("model.safetensors", Arc::new(reader)).unwrap();
                let weights = vec![file];
                let source =
                    Source { weights, side: Vec::new(), left_out: Vec::new(), notes: Vec::new() };
                let options = CompressOptions::new().layout(layout).verify(false);
                match df11::compress(&source, &out, &options, &()) {
                    Ok(_) => {
                        df11::open(&out).unwrap().verify(Level::Full, &()).unwrap();
                        fs::remove_file(&out).unwrap();
                    }
                    Err(error @ Error::Parameter { .. }) => {
                        let message = error.to_string();
                        for part in ["model.safetensors", "changed while"] {
                            assert!(message.contains(part), "{message}");
                        }
                        assert!(!message.contains(".df11-"), "{message}");
                        assert!(names(folder.path()).is_empty());
                        refused += 1;
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            assert!(refused > 0, "{rows} {layout:?}: no second pass has read byte {at}");
        }
    }
}

#[test]
fn force_replaces_a_folder_only_if_it_knows_every_file_in_it() {
    let fixture = Fixture::new();
    let [model, out, back] = ["model", "out", "back"].map(|name| fixture.arg(name));
    let compress = ["compress", &model, "-o", &out, "--force"];
    let decompress = ["decompress", &out, "-o", &back, "--force"];
    for arguments in [compress, decompress] {
        good(&arguments);
        good(&arguments);
        let folder = Path::new(arguments[3]);
        let before = names(folder);
        for (name, is_folder) in
            [("notes.txt", false), (".hidden", false), ("photos/cat.jpg", true)]
        {
            let precious = folder.join(name);
            fs::create_dir_all(precious.parent().unwrap()).unwrap();
            fs::write(&precious, "precious").unwrap();
            fails(&arguments, 2, &[name, "not part of an earlier output"]);
            assert_eq!(fs::read(&precious).unwrap(), b"precious");
            fs::remove_file(&precious).unwrap();
            if is_folder {
                fs::remove_dir(precious.parent().unwrap()).unwrap();
            }
        }
        // Of the same model, but no shard of it, or none that this output would have.
        let other = folder.join("other.df11");
        fs::copy(&fixture.container, &other).unwrap();
        fails(&arguments, 2, &[".df11", "not part of an earlier output"]);
        assert_eq!(fs::read(&other).unwrap(), fs::read(&fixture.container).unwrap());
        fs::remove_file(&other).unwrap();
        good(&arguments);
        assert_eq!(names(folder), before);
    }
    // The containers of an earlier output may have other names than the new ones.
    let single = fixture.path("single");
    fs::create_dir(&single).unwrap();
    checkpoint(&single, &["only.safetensors"]);
    fails(
        &["compress", &model, "-o", single.to_str().unwrap(), "--force"],
        2,
        &["only.safetensors"],
    );
    fs::remove_file(single.join("model.safetensors.index.json")).unwrap();
    fs::write(single.join("notes.md"), "as it was").unwrap();
    fs::remove_file(Path::new(&out).join("config.json")).unwrap();
    good(&["compress", single.to_str().unwrap(), "-o", &fixture.arg("small")]);
    good(&["compress", &model, "-o", &fixture.arg("small"), "--force"]);
    assert_eq!(json(&["verify", &fixture.arg("small")])["good"], true);
}

#[test]
fn outputs_that_could_not_be_opened_again_are_refused() {
    let fixture = Fixture::new();
    let [model, leftover, out] =
        ["model", ".df11-aB3dEf.part", "out"].map(|name| fixture.arg(name));
    fails(&["compress", &model, "-o", &leftover], 2, &["name of temporary files"]);
    good(&["compress", &model, "-o", &out]);
    let inside = fixture.arg("out/again");
    fails(&["convert", &out, &inside], 2, &["lies in the folder that is converted"]);
    assert_eq!(json(&["verify", &out])["good"], true);
    let hidden = fixture.path(".hidden.safetensors");
    let shard = fixture.path("model/model-00001-of-00002.safetensors");
    fs::copy(shard, &hidden).unwrap();
    fails(
        &["compress", hidden.to_str().unwrap(), "-o", &fixture.arg("shown")],
        2,
        &["would be hidden"],
    );
    assert!(!fixture.path("shown").exists());
}

#[test]
fn force_does_not_delete_what_is_like_an_earlier_output() {
    let fixture = Fixture::new();
    let [model, out] = ["model", "out"].map(|name| fixture.arg(name));
    let arguments = ["compress", &model, "-o", &out, "--force"];
    // Containers by themselves that somebody keeps there: of a folder, and of one file.
    fs::create_dir(&out).unwrap();
    let (whole, lone) = (fixture.path("out/precious.df11"), fixture.path("out/lone.df11"));
    let shard = fixture.path("lone.safetensors");
    fs::copy(fixture.path("model/model-00001-of-00002.safetensors"), &shard).unwrap();
    fs::copy(&fixture.container, &whole).unwrap();
    fails(&arguments, 2, &["precious.df11", "not part of an earlier output"]);
    fs::remove_file(&whole).unwrap();
    good(&["compress", shard.to_str().unwrap(), "-o", lone.to_str().unwrap()]);
    fails(&arguments, 2, &["lone.df11", "not part of an earlier output"]);
    fs::remove_file(&lone).unwrap();
    // A side file of an earlier output that has been edited since, and is in the new one no more.
    fs::write(fixture.path("model/notes.md"), "as it was").unwrap();
    good(&arguments);
    fs::remove_file(fixture.path("model/notes.md")).unwrap();
    fs::write(fixture.path("out/notes.md"), "edited").unwrap();
    fails(&arguments, 2, &["notes.md", "not part of an earlier output"]);
    assert_eq!(fs::read(fixture.path("out/notes.md")).unwrap(), b"edited");
    fs::write(fixture.path("out/notes.md"), "as it was").unwrap();
    good(&arguments);
    assert!(!fixture.path("out/notes.md").exists());
}

#[cfg(unix)]
#[test]
fn force_does_not_delete_links_and_what_is_no_file() {
    let fixture = Fixture::new();
    let [model, out] = ["model", "out"].map(|name| fixture.arg(name));
    let arguments = ["compress", &model, "-o", &out, "--force"];
    good(&arguments);
    let config = Path::new(&out).join("config.json");
    fs::rename(&config, fixture.path("config.json")).unwrap();
    std::os::unix::fs::symlink(fixture.path("config.json"), &config).unwrap();
    fails(&arguments, 2, &["config.json", "not part of an earlier output"]);
    fs::remove_file(&config).unwrap();
    assert!(Command::new("mkfifo").arg(&config).status().unwrap().success());
    fails(&arguments, 2, &["config.json", "not part of an earlier output"]);
    let pipe = fixture.arg("pipe.df11");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    fails(&["compress", &model, "-o", &pipe, "--force"], 2, &["pipe.df11", "no regular file"]);
}

#[test]
fn what_appears_in_a_folder_that_is_being_replaced_stays() {
    let big = Big::new();
    let out = big.fixture.arg("big/shards");
    let child = start(&["compress", &big.model, "-o", &out, "--force", "--threads=1"]);
    wait_for_part(&big.fixture.path("big"));
    fs::write(Path::new(&out).join("notes.txt"), "precious").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_fails(&output, 2, &["notes.txt", "not part of an earlier output"]);
    assert_eq!(fs::read(Path::new(&out).join("notes.txt")).unwrap(), b"precious");
    assert_eq!(names(&big.fixture.path("big")), ["model", "model.df11", "shards"]);
}

#[test]
fn a_model_that_lacks_a_shard_is_incomplete_not_good() {
    let fixture = Fixture::new();
    let out = fixture.arg("out");
    good(&["compress", &fixture.arg("model"), "-o", &out]);
    fs::remove_file(Path::new(&out).join("model-00002-of-00002.df11")).unwrap();
    for level in ["structure", "checksums", "full"] {
        let arguments = ["verify", &out, "--level", level, "--json"];
        let output = df11(&arguments);
        assert_fails(
            &output,
            2,
            &["incomplete", "shard 2 of 2", "model-00002-of-00002.safetensors"],
        );
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&found["good"], &found["complete"]), (&false.into(), &false.into()), "{found}");
        assert_eq!(found["missing_shards"], serde_json::json!([1]));
        assert_eq!(found["missing_files"], serde_json::json!(["model-00002-of-00002.safetensors"]));
        assert_eq!(found["error"]["exit_code"], 2);
    }
    let quiet = df11(&["verify", &out, "-q"]);
    assert_fails(&quiet, 2, &["incomplete"]);
    // Damage of what is there comes first.
    let first = Path::new(&out).join("model-00001-of-00002.df11");
    let mut bytes = fs::read(&first).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&first, bytes).unwrap();
    fails(&["verify", &out], 1, &["model-00001-of-00002.df11", "damaged"]);
}

/// Kills runs in the middle of their work, as many as there are outputs.
#[cfg(unix)]
fn kill_in_the_middle(big: &Big, outs: &[&str]) {
    let runs = outs.iter().map(|out| start(&["compress", &big.model, "-o", out, "--threads=1"]));
    let runs: Vec<Child> = runs.collect();
    while count_of_parts(big) < outs.len() {
        thread::sleep(Duration::from_micros(200));
    }
    for mut run in runs {
        run.kill().unwrap();
        run.wait().unwrap();
    }
}

#[cfg(unix)]
fn count_of_parts(big: &Big) -> usize {
    big.fixture.names().iter().filter(|name| name.starts_with(".df11-")).count()
}

#[cfg(unix)]
#[test]
fn leftovers_of_killed_runs_are_found_told_and_removed() {
    let big = Big::new();
    kill_in_the_middle(&big, &[&big.fixture.arg("new.df11"), &big.fixture.arg("new")]);
    let parts: Vec<String> =
        big.fixture.names().into_iter().filter(|name| name.starts_with(".df11-")).collect();
    assert_eq!(parts.len(), 2);
    let folder = big.fixture.folder.path().to_str().unwrap();
    let found = json(&["doctor", "--folder", folder]);
    let check = &found["checks"]["leftovers"];
    assert_eq!(check["status"], "warn", "{check}");
    assert!(parts.iter().all(|part| check["value"].to_string().contains(part.as_str())), "{check}");

    // What a run still uses is nobody's leftover, and is there till its end.
    let slow = start(&["compress", &big.model, "-o", &big.fixture.arg("slow.df11"), "--threads=1"]);
    // It removes the leftovers itself.
    while count_of_parts(&big) != 1 || parts.iter().any(|part| big.fixture.path(part).exists()) {
        thread::sleep(Duration::from_micros(200));
    }
    fs::write(big.fixture.path(&parts[0]), "as a killed run leaves it").unwrap();
    let parts = [parts[0].clone()];
    let said =
        df11(&["decompress", &big.fixture.arg("model.df11"), "-o", &big.fixture.arg("back")]);
    assert!(said.status.success(), "{}", text(&said.stderr));
    for part in &parts {
        assert!(text(&said.stdout).contains(part.as_str()), "{}", text(&said.stdout));
    }
    assert!(slow.wait_with_output().unwrap().status.success());
    assert_eq!(big.fixture.names(), ["back", "big", "model", "model.df11", "slow.df11"]);
    assert_eq!(json(&["doctor", "--folder", folder])["checks"]["leftovers"]["status"], "ok");
}

#[cfg(unix)]
#[test]
fn nothing_but_leftovers_is_removed() {
    let fixture = Fixture::new();
    let others = [".df11-notes", ".df11-abcdef.part.txt", ".df11-abc-ef.part", "df11-abcdef.part"];
    for name in others {
        fs::write(fixture.path(name), "precious").unwrap();
    }
    std::os::unix::fs::symlink(&fixture.model, fixture.path(".df11-abcdef.part")).unwrap();
    fs::create_dir(fixture.path(".df11-old.abcdef")).unwrap();
    fs::write(fixture.path(".df11-old.abcdef/old"), "an earlier output").unwrap();
    fs::write(fixture.path(".df11-uvwxyz.part"), "a leftover").unwrap();
    let found = json(&["compress", &fixture.arg("model"), "-o", &fixture.arg("new.df11")]);
    assert_eq!(found["removed"].as_array().unwrap().len(), 1, "{found}");
    let left = fixture.names();
    assert!(!left.contains(&".df11-uvwxyz.part".to_owned()));
    for name in others.iter().chain(&[".df11-abcdef.part", ".df11-old.abcdef"]) {
        assert!(left.contains(&(*name).to_owned()), "{name}");
    }
    let folder = fixture.folder.path().to_str().unwrap();
    let found = json(&["doctor", "--folder", folder]);
    assert!(found["checks"]["leftovers"].to_string().contains(".df11-old.abcdef"), "{found}");
}
