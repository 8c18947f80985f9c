//! What `compress` and `estimate` say before they work: little to code, another quantization, which
//! snapshot of a cache.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;

/// Some weights of 16 bits that compress, or their bytes as another dtype.
fn weights(name: &str, dtype: &str, bytes: u64) -> Vec<u8> {
    let count = bytes / if dtype == "F32" { 4 } else { 2 };
    let header = format!(
        r#"{{"{name}":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[0,{bytes}]}}}}"#
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..bytes / 2).flat_map(|at| [(at * 37 % 251) as u8, 60]));
    file
}

fn folder(files: &[(&str, Vec<u8>)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fill(&folder.path().join("model"), files);
    folder
}

fn fill(model: &Path, files: &[(&str, Vec<u8>)]) {
    fs::create_dir_all(model).unwrap();
    for (name, content) in files {
        fs::write(model.join(name), content).unwrap();
    }
}

fn df11(verb: &[&str], path: &Path) -> (Output, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_df11")).args(verb).arg(path).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (answer, told) = (text(&output.stdout), text(&output.stderr));
    (output, answer, told)
}

fn json(verb: &[&str], path: &Path) -> Value {
    let (output, answer, told) = df11(&[verb, &["--json"]].concat(), path);
    assert!(output.status.success(), "{told}");
    assert_eq!(told, "");
    serde_json::from_str(&answer).unwrap()
}

const VERBS: [&[&str]; 3] = [&["estimate"], &["compress", "--dry-run"], &["compress"]];

#[test]
fn a_model_without_bf16_is_told_at_once_and_no_success() {
    let folder = folder(&[("model.safetensors", weights("a", "F32", 1 << 16))]);
    for verb in VERBS {
        let (output, answer, told) = df11(verb, &folder.path().join("model"));
        assert!(output.status.success(), "{told}");
        assert!(told.contains("none of the weights are BF16 (most are F32)"), "{told}");
        assert!(
            told.contains("would round its weights") && told.contains("torch.bfloat16"),
            "{told}"
        );
        assert!(answer.contains("nothing is compressed") && !answer.contains('%'), "{answer}");
    }
}

#[test]
fn a_model_with_little_bf16_is_told_how_much() {
    let files = [
        ("model.safetensors", weights("a", "F32", 1 << 20)),
        ("more.safetensors", weights("b", "BF16", 1 << 18)),
    ];
    let mixed = folder(&files);
    let (_, answer, told) = df11(&["estimate"], &mixed.path().join("model"));
    assert!(told.contains("only 20.0 % of the weights' bytes are BF16 (most are F32)"), "{told}");
    assert!(answer.contains(" %)"), "{answer}");
    let notes = json(&["estimate"], &mixed.path().join("model"))["notes"].to_string();
    assert!(notes.contains("only 20.0 %"), "{notes}");
    // Half of it is worth no word.
    let half = folder(&[
        ("model.safetensors", weights("a", "F32", 1 << 14)),
        ("more.safetensors", weights("b", "BF16", 1 << 14)),
    ]);
    assert_eq!(df11(&["estimate"], &half.path().join("model")).2, "");
}

#[test]
fn a_config_with_another_quantization_is_told_at_once() {
    let weights = weights("a", "BF16", 1 << 16);
    for (config, part) in [
        (r#"{"model_type":"llama","quantization_config":{"quant_method":"fp8"}}"#, "(fp8)"),
        (r#"{"model_type":"llama","quantization_config":null}"#, "(of no method)"),
    ] {
        let files = [("model.safetensors", weights.clone()), ("config.json", config.into())];
        let folder = folder(&files);
        for verb in VERBS {
            let (output, _, told) = df11(verb, &folder.path().join("model"));
            assert!(output.status.success(), "{told}");
            assert!(told.contains("config.json has a quantization_config already"), "{told}");
            assert!(told.contains(part) && told.contains("will not load"), "{told}");
        }
        let copied = fs::read_to_string(folder.path().join("model.df11/config.json"));
        assert!(copied.is_err() || copied.unwrap() == config);
    }
    let files =
        [("model.safetensors", weights), ("config.json", r#"{"model_type":"llama"}"#.into())];
    assert_eq!(df11(&["estimate"], &folder(&files).path().join("model")).2, "");
}

/// A cache entry as the library of the Hub lays it out.
fn cache_entry(root: &Path, commits: &[&str], main: Option<&str>) -> PathBuf {
    let entry = root.join("models--org--name");
    fs::create_dir_all(entry.join("refs")).unwrap();
    fill(&entry.join("blobs"), &[]);
    for commit in commits {
        let snapshot = entry.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        for (name, content) in [
            ("model.safetensors", weights("a", "BF16", 1 << 16)),
            ("tokenizer.json", vec![b' '; 1 << 20]),
            (
                "config.json",
                format!(r#"{{"model_type":"llama","commit":"{commit}"}}"#).into_bytes(),
            ),
        ] {
            let blob = format!("{commit}-{name}");
            fs::write(entry.join("blobs").join(&blob), content).unwrap();
            std::os::unix::fs::symlink(format!("../../blobs/{blob}"), snapshot.join(name)).unwrap();
        }
    }
    if let Some(main) = main {
        fs::write(entry.join("refs/main"), main).unwrap();
    }
    entry
}

#[test]
fn the_root_of_a_cache_entry_is_the_snapshot_of_main() {
    for (commits, main, chosen) in [
        (&["aaa", "bbb"][..], Some("bbb"), "bbb"),
        (&["aaa"], None, "aaa"),
        (&["aaa"], Some("gone"), "aaa"),
        (&["aaa"], Some("../snapshots/aaa"), "aaa"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let entry = cache_entry(folder.path(), commits, main);
        let out = folder.path().join("out");
        let report = json(&["compress", "-o", out.to_str().unwrap()], &entry);
        assert!(
            report["notes"].to_string().contains(&format!("snapshots/{chosen} was read")),
            "{report}"
        );
        assert!(report["ratio"].as_f64().unwrap() < 0.9, "{report}");
        let config = fs::read_to_string(out.join("config.json")).unwrap();
        assert!(config.contains(chosen) && config.contains("df11"), "{config}");
        assert!(out.join("model.df11").is_file() && !out.join("blobs").exists());
    }
}

#[test]
fn several_snapshots_without_main_are_asked_about() {
    let folder = tempfile::tempdir().unwrap();
    let entry = cache_entry(folder.path(), &["aaa", "bbb"], None);
    let (output, _, told) = df11(&["compress"], &entry);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        told.contains("2 snapshots") && told.contains("snapshots/aaa, ") && told.contains("/bbb"),
        "{told}"
    );
    assert_eq!(told.lines().count(), 1);
    let empty = cache_entry(&folder.path().join("empty"), &[], None);
    fs::create_dir(empty.join("snapshots")).unwrap();
    assert!(df11(&["compress"], &empty).2.contains("without a snapshot"));
}

#[test]
fn a_ratio_has_the_same_files_on_both_sides() {
    let files = [
        ("model.safetensors", weights("a", "BF16", 1 << 18)),
        ("tokenizer.json", vec![b' '; 1 << 20]),
    ];
    let folder = folder(&files);
    let model = folder.path().join("model");
    for (out, side_inside) in [("one.df11", 1 << 20), ("folder", 0)] {
        let out = folder.path().join(out);
        let report = json(&["compress", "-o", out.to_str().unwrap()], &model);
        let number = |key: &str| report[key].as_f64().unwrap();
        assert_eq!(report["stored_side_bytes"], side_inside);
        let original = number("source_bytes") + f64::from(side_inside);
        assert!((number("ratio") - number("stored_bytes") / original).abs() < 1e-9, "{report}");
        assert!(number("ratio") < 1.0, "{report}");
    }
}
