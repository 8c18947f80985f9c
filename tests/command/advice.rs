//! Advice of `compress` and `estimate` before they work: few weights to code, another quantization,
//! the snapshot of a cache.

use std::{fs, path::MAIN_SEPARATOR};

use df11::Dtype;

use crate::{
    command::{Folder, text},
    container::{Item, normal_weights, weights_file},
};

/// A file of some weights of 16 bits that compress, or of their bytes as another dtype.
fn weights(name: &str, dtype: Dtype, bytes: u64) -> Vec<u8> {
    let data = (0..bytes / 2).flat_map(|at| [(at * 37 % 251) as u8, 60]).collect();
    weights_file(&[Item::raw(name, dtype, &[8 * bytes / dtype.bits()], data)])
}

/// A folder with these files in `model`.
fn folder(files: &[(&str, Vec<u8>)]) -> Folder {
    let folder = Folder::new();
    for (name, content) in files {
        folder.write(&format!("model/{name}"), content);
    }
    folder
}

/// The answer of a successful run, and its standard error.
fn said(folder: &Folder, line: &str) -> (String, String) {
    let output = folder.run(line);
    let [answer, told] = [&output.stdout, &output.stderr].map(|bytes| text(bytes).to_owned());
    assert!(output.status.success(), "{told}");
    (answer, told)
}

const LINES: [&str; 3] = ["estimate model", "compress --dry-run model", "compress model"];

#[test]
fn a_model_without_floats_is_told_at_once_and_no_success() {
    let folder = folder(&[("model.safetensors", weights("a", Dtype::I32, 1 << 16))]);
    for line in LINES {
        let (answer, told) = said(&folder, line);
        let none = "none of the weights are floats that df11 compresses (most are I32)";
        assert!(told.contains(none) && told.contains("F8_E4M3"), "{told}");
        assert!(answer.contains("nothing is compressed") && !answer.contains('%'), "{answer}");
    }
}

#[test]
fn a_model_with_few_floats_is_told_how_much() {
    let of = |bf16: u64| {
        folder(&[
            ("model.safetensors", weights("a", Dtype::I32, 1 << 20)),
            ("more.safetensors", weights("b", Dtype::BF16, bf16)),
        ])
    };
    let mixed = of(1 << 18);
    let (answer, told) = said(&mixed, "estimate model");
    let how_much =
        "only 20.0 % of the weights' bytes are floats that df11 compresses (most are I32)";
    assert!(told.contains(how_much), "{told}");
    assert!(answer.contains(" %)"), "{answer}");
    let notes = mixed.json("estimate model")["notes"].to_string();
    assert!(notes.contains("only 20.0 %"), "{notes}");
    // Half of it is worth no word.
    of(1 << 20).good("estimate model");
}

#[test]
fn floats_of_every_width_are_compressed_without_a_note() {
    for dtype in [Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::F16, Dtype::F32] {
        let folder = folder(&[("model.safetensors", weights("a", dtype, 1 << 16))]);
        for line in LINES {
            let (answer, told) = said(&folder, line);
            assert!(!told.contains("note") && answer.contains(" %)"), "{dtype:?}: {answer} {told}");
        }
        folder.good("verify model-df11");
        folder.good("decompress model-df11 -o back");
        let files = [folder.path("model"), folder.path("back")];
        let [before, after] = files.map(|of| fs::read(of.join("model.safetensors")).unwrap());
        assert!(before == after, "{dtype:?}");
    }
}

#[test]
fn a_config_with_another_quantization_is_told_at_once() {
    let of = |config: &str| {
        let weights = weights("a", Dtype::BF16, 1 << 16);
        folder(&[("model.safetensors", weights), ("config.json", config.into())])
    };
    let fp8 = r#"{"model_type":"llama","quantization_config":{"quant_method":"fp8"}}"#;
    let packed = r#"{"model_type":"gpt_oss","quantization_config":{"quant_method":"mxfp4"}}"#;
    let null = r#"{"model_type":"llama","quantization_config":null}"#;
    let image = r#"{"_class_name":"Flux","quantization_config":{"quant_method":"torchao"}}"#;
    for (config, part, outcome) in [
        (fp8, "(fp8)", "transformers and vLLM load such a folder"),
        (packed, "(mxfp4)", "all weights are decoded meanwhile"),
        (null, "(without a method)", "transformers will not load the compressed weights"),
        (image, "(torchao)", "diffusers will not load the compressed weights"),
    ] {
        let folder = of(config);
        for line in LINES {
            let (_, told) = said(&folder, line);
            assert!(told.contains("config.json already has a quantization_config"), "{told}");
            assert!(told.contains(part) && told.contains(outcome), "{told}");
        }
        let copied = fs::read_to_string(folder.path("model.df11/config.json"));
        assert!(copied.is_err() || copied.unwrap() == config);
    }
    of(r#"{"model_type":"llama"}"#).good("estimate model");
}

/// gpt-oss as it is published: experts in MXFP4, of which nothing is a float.
#[test]
fn a_model_in_mxfp4_is_loaded_by_transformers_and_says_so() {
    let config = r#"{"model_type":"gpt_oss","architectures":["GptOssForCausalLM"],
        "quantization_config":{"quant_method":"mxfp4"}}"#;
    let items = [
        Item::raw("q.weight", Dtype::BF16, &[256, 128], normal_weights(256 * 128, 7)),
        Item::raw("experts.down_proj_blocks", Dtype::U8, &[1 << 15], vec![7; 1 << 15]),
    ];
    let folder = folder(&[("config.json", config.into())]);
    folder.weights("model/model.safetensors", &items);
    let (answer, told) = said(&folder, "compress model");
    assert!(told.contains("(mxfp4)") && told.contains("by that quantization's own code"), "{told}");
    assert!(answer.contains("AutoModelForCausalLM.from_pretrained(\"model-df11\""), "{answer}");
    let card = fs::read_to_string(folder.path("model-df11/README.md")).unwrap();
    assert!(card.contains("from_pretrained") && !card.contains("vllm serve"), "{card}");
}

#[test]
fn the_card_of_a_model_in_fp8_names_vllm_and_no_bfloat16() {
    let config = r#"{"model_type":"llama","architectures":["LlamaForCausalLM"],
        "quantization_config":{"quant_method":"fp8"}}"#;
    let weights = weights("q.weight", Dtype::F8_E4M3, 1 << 16);
    let folder = folder(&[("model.safetensors", weights), ("config.json", config.into())]);
    said(&folder, "compress model");
    let card = fs::read_to_string(folder.path("model-df11/README.md")).unwrap();
    assert!(card.contains("vllm serve \"model-df11\""), "{card}");
    assert!(card.contains("- lossless-compression") && !card.contains("bfloat16"), "{card}");
}

/// An entry `models--org--name` as the library of the Hub lays it out in a cache.
fn cache_entry(commits: &[&str], main: Option<&str>) -> Folder {
    let (folder, entry) = (Folder::new(), "models--org--name");
    for part in ["blobs", "snapshots"] {
        fs::create_dir_all(folder.path(entry).join(part)).unwrap();
    }
    for commit in commits {
        let snapshot = folder.path(entry).join("snapshots").join(commit);
        fs::create_dir(&snapshot).unwrap();
        let config = format!(r#"{{"model_type":"llama","commit":"{commit}"}}"#);
        for (name, content) in [
            ("model.safetensors", weights("a", Dtype::BF16, 1 << 16)),
            ("tokenizer.json", vec![b' '; 1 << 20]),
            ("config.json", config.into_bytes()),
        ] {
            let blob = format!("blobs/{commit}-{name}");
            folder.write(&format!("{entry}/{blob}"), content);
            #[cfg(unix)]
            std::os::unix::fs::symlink(format!("../../{blob}"), snapshot.join(name)).unwrap();
            // As the library of the Hub does where links need a privilege.
            #[cfg(not(unix))]
            fs::copy(folder.path(entry).join(&blob), snapshot.join(name)).unwrap();
        }
    }
    if let Some(main) = main {
        folder.write(&format!("{entry}/refs/main"), main);
    }
    folder
}

#[test]
fn the_root_of_a_cache_entry_is_the_snapshot_of_main() {
    for (commits, main, chosen) in [
        (&["aaa", "bbb"][..], Some("bbb"), "bbb"),
        (&["aaa"], None, "aaa"),
        (&["aaa"], Some("gone"), "aaa"),
        (&["aaa"], Some("../snapshots/aaa"), "aaa"),
    ] {
        let folder = cache_entry(commits, main);
        let report = folder.json("compress models--org--name -o out");
        let read = format!("snapshots{MAIN_SEPARATOR}{chosen} was read");
        assert!(report["notes"][0].as_str().unwrap().contains(&read), "{report}");
        assert!(report["ratio"].as_f64().unwrap() < 0.9, "{report}");
        let config = fs::read_to_string(folder.path("out/config.json")).unwrap();
        assert!(config.contains(chosen) && config.contains("df11"), "{config}");
        assert!(folder.path("out/model.df11").is_file() && !folder.path("out/blobs").exists());
    }
}

#[test]
fn several_snapshots_without_main_are_asked_about() {
    let line = "compress models--org--name";
    let [first, second] = ["aaa", "bbb"].map(|name| format!("snapshots{MAIN_SEPARATOR}{name}"));
    let parts = ["2 snapshots", &format!("{first}, "), &*second];
    cache_entry(&["aaa", "bbb"], None).fails(line, 2, &parts);
    cache_entry(&[], None).fails(line, 2, &["without a snapshot"]);
}

#[test]
fn a_ratio_has_the_same_files_on_both_sides() {
    let folder = folder(&[
        ("model.safetensors", weights("a", Dtype::BF16, 1 << 18)),
        ("tokenizer.json", vec![b' '; 1 << 20]),
    ]);
    for (out, side_inside) in [("one.df11", 1 << 20), ("folder", 0)] {
        let report = folder.json(&format!("compress model -o {out}"));
        let number = |key: &str| report[key].as_f64().unwrap();
        assert_eq!(report["stored_side_bytes"], side_inside);
        let original = number("source_bytes") + f64::from(side_inside);
        assert!((number("ratio") - number("stored_bytes") / original).abs() < 1e-9, "{report}");
        assert!(number("ratio") < 1.0, "{report}");
    }
}
