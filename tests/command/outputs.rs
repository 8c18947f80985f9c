//! Outputs: nothing that is there is lost, nothing gets a name that another has, whatever happens
//! meanwhile.

use std::{
    fs, io,
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};
#[cfg(unix)]
use std::{thread, time::Duration};

use df11::{
    CompressOptions, Dtype, Error, Layout, Level, ReadAt, Source, hazmat::demo, source::WeightsFile,
};

#[cfg(unix)]
use crate::command::{Folder, signal, text};
use crate::{
    command::{Fixture, assert_fails, names},
    container::{Item, weights_file},
};

/// A fixture with the checkpoint of a model that takes some time, in `big/model`.
fn big() -> Fixture {
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("big")).unwrap();
    demo::checkpoint(&fixture.path("big"), demo::DEMO, 1).unwrap();
    fixture
}

#[test]
fn what_appears_under_the_outputs_name_meanwhile_stays() {
    let big = big();
    for (source, out) in [
        ("big/model", "big/model.df11"),
        ("big/model", "big/shards"),
        ("big/model/model-00001-of-00002.safetensors", "big/one.df11"),
    ] {
        big.good(&format!("compress {source} -o {out} --no-verify"));
    }
    let before = big.names();
    for (line, output) in [
        ("compress big/model -o new.df11", "new.df11"),
        ("compress big/model -o new", "new"),
        ("convert big/model.df11 -o new.df11 --layout=gap", "new.df11"),
        ("convert big/shards -o new --layout=gap", "new"),
        ("decompress big/model.df11 -o new", "new"),
        ("decompress big/one.df11 -o new.safetensors", "new.safetensors"),
    ] {
        let child = big.start(&format!("{line} --threads=1"));
        big.wait_for_part("");
        let is_folder = output == "new";
        let precious = if is_folder { "new/precious" } else { output };
        big.write(precious, "precious");
        assert_fails(&child.wait_with_output().unwrap(), 2, &["exists", "--force"]);
        assert_eq!(big.read(precious), b"precious", "{line}");
        let output = big.path(output);
        if is_folder { fs::remove_dir_all(output) } else { fs::remove_file(output) }.unwrap();
        assert_eq!(big.names(), before, "{line}");
    }
}

#[test]
fn an_empty_folder_that_appears_meanwhile_is_no_output_either() {
    let big = big();
    let child = big.start("compress big/model -o new --no-verify");
    big.wait_for_part("");
    fs::create_dir(big.path("new")).unwrap();
    assert_fails(&child.wait_with_output().unwrap(), 2, &["exists", "--force"]);
    assert!(names(&big.path("new")).is_empty());
}

#[test]
fn of_two_writers_to_one_name_one_wins() {
    let big = big();
    for out in ["new.df11", "new"] {
        let line = format!("compress big/model -o {out} --threads=1 --no-verify");
        let writers = [big.start(&line), big.start(&line)];
        let outputs = writers.map(|writer| writer.wait_with_output().unwrap());
        let (won, lost): (Vec<&Output>, Vec<&Output>) =
            outputs.iter().partition(|output| output.status.success());
        assert_eq!((won.len(), lost.len()), (1, 1), "{outputs:?}");
        assert_fails(lost[0], 2, &["exists"]);
        assert_eq!(big.json(&format!("verify {out}"))["good"], true);
    }
    assert_eq!(big.names(), ["big", "model", "model.df11", "new", "new.df11"]);
}

/// A folder with weights files of these names, of one tensor each.
fn checkpoint(fixture: &Fixture, folder: &str, files: &[&str]) {
    let mut map = serde_json::Map::new();
    for (index, name) in files.iter().enumerate() {
        let item = Item::raw(&format!("t{index}"), Dtype::BF16, &[8], vec![0; 16]);
        fixture.weights(&format!("{folder}/{name}"), &[item]);
        map.insert(format!("t{index}"), (*name).into());
    }
    let json = serde_json::json!({ "metadata": {}, "weight_map": map });
    fixture.write(&format!("{folder}/model.safetensors.index.json"), json.to_string());
}

#[test]
fn weights_files_whose_containers_would_share_a_name_are_refused() {
    for files in
        [&["X", "X.safetensors"][..], &["X", "X.safetensors", "Y"], &["a.safetensors", "a"]]
    {
        let fixture = Fixture::new();
        checkpoint(&fixture, "source", files);
        let output = fixture.run("compress source -o out");
        assert_fails(&output, 2, &[files[0], files[1], ".df11", "one file"]);
        assert!(!fixture.path("out").exists());
        // One container has the paths themselves.
        fixture.good("compress source -o single.df11");
        fixture.good("decompress single.df11 -o back");
        for file in files {
            let [back, source] = ["back", "source"].map(|folder| format!("{folder}/{file}"));
            assert_eq!(fixture.read(&back), fixture.read(&source));
        }
    }
}

#[test]
fn names_without_the_extension_of_safetensors_are_no_problem_by_themselves() {
    let fixture = Fixture::new();
    checkpoint(&fixture, "source", &["X", "Y.safetensors"]);
    assert_eq!(fixture.json("compress source -o out")["shards"], 2);
    let made = ["README.md", "X.df11", "Y.df11", "model.safetensors.index.json"];
    assert_eq!(names(&fixture.path("out")), made);
    fixture.good("decompress out -o back");
    assert_eq!(names(&fixture.path("back")), names(&fixture.path("source")));
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

/// A file with a coded matrix of this many rows of 256, and a tensor that is stored raw.
fn coded_and_raw(rows: u64) -> Vec<u8> {
    let weights = (0..256 * rows).flat_map(|i| (0x3C00 | (i * 37 % 251) as u16).to_le_bytes());
    let matrix = Item::raw("m", Dtype::BF16, &[rows, 256], weights.collect());
    weights_file(&[matrix, Item::raw("r", Dtype::I64, &[8], vec![7; 64])])
}

#[test]
fn a_source_that_changes_between_the_passes_is_noticed_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new.df11");
    // 9 MiB, so that tiles are measured in a pass of their own; and 64 KiB.
    for (rows, layout) in [18432, 128]
        .into_iter()
        .flat_map(|rows| [Layout::Tile, Layout::gap(), Layout::Raw].map(|layout| (rows, layout)))
    {
        let bytes = coded_and_raw(rows);
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
    for (line, folder) in
        [("compress model -o out --force", "out"), ("decompress out -o back --force", "back")]
    {
        fixture.good(line);
        fixture.good(line);
        let before = names(&fixture.path(folder));
        for name in ["notes.txt", ".hidden", "photos/cat.jpg"] {
            let precious = format!("{folder}/{name}");
            fixture.write(&precious, "precious");
            fixture.fails(line, 2, &[name, "not part of an earlier output"]);
            assert_eq!(fixture.read(&precious), b"precious");
            fs::remove_file(fixture.path(&precious)).unwrap();
            let _ = fs::remove_dir(fixture.path(&format!("{folder}/photos")));
        }
        // A container of the same model that is no shard of it, or none of this output's shards.
        let other = format!("{folder}/other.df11");
        fixture.write(&other, fixture.read("model.df11"));
        fixture.fails(line, 2, &[".df11", "not part of an earlier output"]);
        assert_eq!(fixture.read(&other), fixture.read("model.df11"));
        fs::remove_file(fixture.path(&other)).unwrap();
        fixture.good(line);
        assert_eq!(names(&fixture.path(folder)), before);
    }
    // The containers of an earlier output may have other names than the new ones.
    checkpoint(&fixture, "single", &["only.safetensors"]);
    fixture.fails("compress model -o single --force", 2, &["only.safetensors"]);
    fs::remove_file(fixture.path("single/model.safetensors.index.json")).unwrap();
    fixture.write("single/notes.md", "as it was");
    fixture.good("compress single -o small");
    fixture.good("compress model -o small --force");
    assert_eq!(fixture.json("verify small")["good"], true);
}

#[test]
fn outputs_that_could_not_be_opened_again_are_refused() {
    let fixture = Fixture::new();
    fixture.fails("compress model -o .df11-aB3dEf.part", 2, &["name of temporary files"]);
    fixture.good("compress model -o out");
    fixture.fails("convert out -o out/again", 2, &["lies in the folder that is converted"]);
    assert_eq!(fixture.json("verify out")["good"], true);
    fixture.write(".hidden.safetensors", fixture.read("model/model-00001-of-00002.safetensors"));
    fixture.fails("compress .hidden.safetensors -o shown", 2, &["would be hidden"]);
    assert!(!fixture.path("shown").exists());
    // A folder with this container would be taken for a pipeline's.
    for name in ["pipeline", "Pipeline"] {
        // A folder each, since some disks fold names.
        let fixture = Fixture::new();
        let file = format!("{name}.safetensors");
        fixture.write(&file, fixture.read("model/model-00001-of-00002.safetensors"));
        for options in ["", " --no-verify"] {
            let line = format!("compress {file} -o listed{options}");
            fixture.fails(&line, 2, &["list of a pipeline's components"]);
        }
        let line = format!("compress model -o {name}.df11");
        fixture.fails(&line, 2, &["would list the components", "choose another name"]);
        fixture.good(&format!("compress {file} -o {name}-one.df11"));
        fixture.fails(
            &format!("convert {name}-one.df11 -o listed"),
            2,
            &["a pipeline's components"],
        );
        assert!(!fixture.path("listed").exists());
    }
}

#[test]
fn force_does_not_delete_what_is_like_an_earlier_output() {
    let fixture = Fixture::new();
    let line = "compress model -o out --force";
    let refused = |name: &str| fixture.fails(line, 2, &[name, "not part of an earlier output"]);
    // Containers by themselves that somebody keeps there: of a folder, and of one file.
    fixture.write("out/precious.df11", fixture.read("model.df11"));
    refused("precious.df11");
    fs::remove_file(fixture.path("out/precious.df11")).unwrap();
    fixture.write("lone.safetensors", fixture.read("model/model-00001-of-00002.safetensors"));
    fixture.good("compress lone.safetensors -o out/lone.df11");
    refused("lone.df11");
    fs::remove_file(fixture.path("out/lone.df11")).unwrap();
    // A side file of an earlier output that has been edited since, and is in the new one no more.
    fixture.write("model/notes.md", "as it was");
    fixture.good(line);
    fs::remove_file(fixture.path("model/notes.md")).unwrap();
    fixture.write("out/notes.md", "edited");
    refused("notes.md");
    assert_eq!(fixture.read("out/notes.md"), b"edited");
    fixture.write("out/notes.md", "as it was");
    fixture.good(line);
    assert!(!fixture.path("out/notes.md").exists());
}

#[cfg(unix)]
#[test]
fn force_does_not_delete_links_and_what_is_no_file() {
    let fixture = Fixture::new();
    let line = "compress model -o out --force";
    fixture.good(line);
    let config = fixture.path("out/config.json");
    fs::rename(&config, fixture.path("config.json")).unwrap();
    std::os::unix::fs::symlink(fixture.path("config.json"), &config).unwrap();
    fixture.fails(line, 2, &["config.json", "not part of an earlier output"]);
    fs::remove_file(&config).unwrap();
    assert!(fixture.shell("mkfifo out/config.json pipe.df11").status.success());
    fixture.fails(line, 2, &["config.json", "not part of an earlier output"]);
    fixture.fails("compress model -o pipe.df11 --force", 2, &["pipe.df11", "not a regular file"]);
}

#[test]
fn what_appears_in_a_folder_that_is_being_replaced_stays() {
    let big = big();
    big.good("compress big/model -o big/shards --no-verify");
    let child = big.start("compress big/model -o big/shards --force --threads=1");
    big.wait_for_part("big");
    big.write("big/shards/notes.txt", "precious");
    let output = child.wait_with_output().unwrap();
    assert_fails(&output, 2, &["notes.txt", "not part of an earlier output"]);
    assert_eq!(big.read("big/shards/notes.txt"), b"precious");
    assert_eq!(names(&big.path("big")), ["model", "shards"]);
}

#[test]
fn a_model_that_lacks_a_shard_is_incomplete_not_good() {
    let fixture = Fixture::new();
    fixture.good("compress model -o out");
    fs::remove_file(fixture.path("out/model-00002-of-00002.df11")).unwrap();
    for level in ["structure", "checksums", "full"] {
        let output = fixture.run(&format!("verify out --level {level} --json"));
        let file = "model-00002-of-00002.safetensors";
        assert_fails(&output, 2, &["incomplete", "shard 2 of 2", file]);
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&found["good"], &found["complete"]), (&false.into(), &false.into()), "{found}");
        assert_eq!(found["missing_shards"], serde_json::json!([1]));
        assert_eq!(found["missing_files"], serde_json::json!([file]));
        assert_eq!(found["error"]["exit_code"], 2);
    }
    assert_fails(&fixture.run("verify out -q"), 2, &["incomplete"]);
    // Damage of what is there comes first.
    fixture.flip_middle_byte("out/model-00001-of-00002.df11");
    fixture.fails("verify out", 1, &["model-00001-of-00002.df11", "damaged"]);
}

/// Temporary files and folders there.
#[cfg(unix)]
fn parts(folder: &Folder) -> Vec<String> {
    let mut names = folder.names();
    names.retain(|name| name.starts_with(".df11-"));
    names
}

/// A run that has begun to write, which stands still there. However busy the machine is: one that
/// was done before it was seen is started again.
#[cfg(unix)]
fn standing_run(
    folder: &Folder,
    out: &str,
    writes: impl Fn(&[String]) -> bool,
) -> std::process::Child {
    for _ in 0..50 {
        let mut run = folder.start(&format!("compress big/model -o {out} --threads=1"));
        while !writes(&parts(folder)) && run.try_wait().unwrap().is_none() {
            thread::sleep(Duration::from_micros(200));
        }
        if run.try_wait().unwrap().is_none() {
            signal(&run, "-STOP");
            // Until it does.
            thread::sleep(Duration::from_millis(20));
            // Nor before it has locked what it writes: other runs would remove that.
            if writes(&parts(folder))
                && df11::hazmat::leftovers(&folder.path("")).unwrap().is_empty()
            {
                return run;
            }
            signal(&run, "-CONT");
        }
        assert!(run.wait().unwrap().success());
        let path = folder.path(out);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }
    panic!("no run was seen writing {out}");
}

#[cfg(unix)]
#[test]
fn leftovers_of_killed_runs_are_found_told_and_removed() {
    let big = big();
    let first = standing_run(&big, "new.df11", |parts| parts.len() == 1);
    let second = standing_run(&big, "new", |parts| parts.len() == 2);
    for mut run in [first, second] {
        run.kill().unwrap();
        run.wait().unwrap();
    }
    let left = parts(&big);
    assert_eq!(left.len(), 2);
    let found = big.json("doctor --folder .");
    let check = &found["checks"]["leftovers"];
    assert_eq!(check["status"], "warn", "{check}");
    assert!(left.iter().all(|part| check["value"].to_string().contains(part.as_str())), "{check}");

    // Files that a run still uses are no leftovers, and exist until it ends.
    // It removes the leftovers itself.
    let slow =
        standing_run(&big, "slow.df11", |parts| parts.len() == 1 && !left.contains(&parts[0]));
    big.write(&left[0], "as a killed run leaves it");
    let said = big.run("decompress model.df11 -o back");
    assert!(said.status.success(), "{}", text(&said.stderr));
    assert!(text(&said.stdout).contains(&left[0]), "{}", text(&said.stdout));
    signal(&slow, "-CONT");
    assert!(slow.wait_with_output().unwrap().status.success());
    assert_eq!(big.names(), ["back", "big", "model", "model.df11", "slow.df11"]);
    let found = big.json("doctor --folder .");
    let told = found["checks"]["leftovers"].to_string();
    assert!(left.iter().all(|part| !told.contains(part.as_str())), "{told}");
    // It also looks where the Python package compresses while it loads.
    big.write("elsewhere/.df11-uvwxyz.part/model/x.df11", "a leftover");
    let mut command = big.command("doctor --json");
    let output = command.env("TMPDIR", big.path("elsewhere")).output().unwrap();
    assert!(text(&output.stdout).contains("elsewhere/.df11-uvwxyz.part"), "{output:?}");
}

#[cfg(unix)]
#[test]
fn nothing_but_leftovers_is_removed() {
    let fixture = Fixture::new();
    let others = [".df11-notes", ".df11-abcdef.part.txt", ".df11-abc-ef.part", "df11-abcdef.part"];
    for name in others {
        fixture.write(name, "precious");
    }
    std::os::unix::fs::symlink(&fixture.model, fixture.path(".df11-abcdef.part")).unwrap();
    fixture.write(".df11-old.abcdef/old", "an earlier output");
    fixture.write(".df11-uvwxyz.part", "a leftover");
    let found = fixture.json("compress model -o new.df11");
    assert_eq!(found["removed"].as_array().unwrap().len(), 1, "{found}");
    let left = fixture.names();
    assert!(!left.contains(&".df11-uvwxyz.part".to_owned()));
    for name in others.iter().chain(&[".df11-abcdef.part", ".df11-old.abcdef"]) {
        assert!(left.contains(&(*name).to_owned()), "{name}");
    }
    let found = fixture.json("doctor --folder .");
    assert!(found["checks"]["leftovers"].to_string().contains(".df11-old.abcdef"), "{found}");
}
