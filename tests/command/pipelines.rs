//! Pipelines: folders of models, each component compressed by itself, everything else recorded, and
//! all of it given back byte for byte.

use std::{fs, ops::Deref, path::Path};

use df11::Dtype;
use serde_json::{Value, json};

use crate::{
    command::{Folder, names, text},
    container::{Item, normal_weights},
    files::files,
};

const MODEL_INDEX: &str = r#"{
  "_class_name": "StableDiffusionXLPipeline",
  "scheduler": ["diffusers", "EulerDiscreteScheduler"],
  "text_encoder": ["transformers", "CLIPTextModel"],
  "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
  "tokenizer": ["transformers", "CLIPTokenizer"],
  "unet": ["diffusers", "UNet2DConditionModel"],
  "vae": ["diffusers", "AutoencoderKL"]
}
"#;
const CLIP: &str =
    "{\n  \"architectures\": [\"CLIPTextModel\"],\n  \"model_type\": \"clip_text_model\"\n}\n";

/// A folder with a pipeline in `pipe`, as diffusers saves one.
struct Fixture(Folder);

impl Deref for Fixture {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.0
    }
}

impl Fixture {
    fn new() -> Self {
        let fixture = Self(Folder::new());
        fixture.write("pipe/model_index.json", MODEL_INDEX);
        fixture.write("pipe/scheduler/scheduler_config.json", "{}\n");
        fixture.write("pipe/tokenizer/vocab.json", "{\"a\": 0}\n");
        for name in ["text_encoder", "text_encoder_2"] {
            fixture.write(&format!("pipe/{name}/config.json"), CLIP);
        }
        // Both have the same tensor names, of which no single container may hold two.
        let tensors =
            |seed| [bf16("text_model.a.weight", seed), bf16("text_model.b.weight", seed + 1)];
        fixture.part("text_encoder/model.safetensors", &tensors(1));
        let [first, second] = tensors(3);
        fixture.part("text_encoder_2/model-00001-of-00002.safetensors", &[first]);
        fixture.part("text_encoder_2/model-00002-of-00002.safetensors", &[second]);
        let index = json!({ "metadata": {}, "weight_map": {
            "text_model.a.weight": "model-00001-of-00002.safetensors",
            "text_model.b.weight": "model-00002-of-00002.safetensors",
        } });
        fixture.write("pipe/text_encoder_2/model.safetensors.index.json", index.to_string());
        fixture.write("pipe/unet/config.json", "{\"_class_name\": \"UNet2DConditionModel\"}\n");
        fixture.part("unet/diffusion_pytorch_model.safetensors", &[bf16("down.weight", 5)]);
        fixture.write("pipe/vae/config.json", "{\"_class_name\": \"AutoencoderKL\"}\n");
        let raw = Item::raw("decoder.weight", Dtype::F32, &[64, 64], vec![7; 4 * 64 * 64]);
        fixture.part("vae/diffusion_pytorch_model.safetensors", &[raw]);
        fixture
    }

    /// A weights file of the pipeline.
    fn part(&self, name: &str, items: &[Item]) {
        self.weights(&format!("pipe/{name}"), items);
    }

    /// The compressed pipeline, in `pipe-df11`.
    fn compress(&self) -> Value {
        self.json("compress pipe")
    }
}

fn bf16(name: &str, seed: u64) -> Item {
    Item::raw(name, Dtype::BF16, &[256, 128], normal_weights(256 * 128, seed))
}

fn names_of(components: &Value) -> Vec<&str> {
    components
        .as_array()
        .unwrap()
        .iter()
        .map(|found| found["component"].as_str().unwrap())
        .collect()
}

const COMPONENTS: [&str; 5] = ["text_encoder", "text_encoder_2", "unet", "vae", ""];

#[test]
fn a_pipeline_becomes_a_folder_of_models_and_comes_back() {
    let fixture = Fixture::new();
    let original = files(&fixture.path("pipe"));
    let report = fixture.compress();
    assert_eq!(report["output"], "pipe-df11");
    assert_eq!(names_of(&report["components"]), COMPONENTS);
    let sum = |key: &str| {
        report["components"]
            .as_array()
            .unwrap()
            .iter()
            .map(|each| each[key].as_u64().unwrap())
            .sum::<u64>()
    };
    for key in
        ["source_bytes", "stored_bytes", "side_bytes", "coded_tensors", "raw_tensors", "shards"]
    {
        assert_eq!(report[key], sum(key), "{key}");
    }
    let made = files(&fixture.path("pipe-df11"));
    for name in [
        "pipeline.df11",
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/model.df11",
        "text_encoder_2/model-00001-of-00002.df11",
        "text_encoder_2/model.safetensors.index.json",
        "unet/diffusion_pytorch_model.df11",
        "vae/diffusion_pytorch_model.df11",
    ] {
        assert!(made.contains_key(name), "{name} in {:?}", made.keys());
    }
    assert!(!made.keys().any(|name| name.ends_with(".safetensors")));

    // Each component is a model like any other.
    let model = df11::open(fixture.path("pipe-df11/text_encoder_2")).unwrap();
    assert!(model.is_complete() && model.shards().len() == 2);
    let config: Value = serde_json::from_slice(&made["text_encoder_2/config.json"]).unwrap();
    assert_eq!(config["quantization_config"]["quant_method"], "df11");

    let verified = fixture.json("verify pipe-df11");
    assert_eq!((&verified["good"], &verified["complete"]), (&true.into(), &true.into()));
    assert_eq!(names_of(&verified["components"]), COMPONENTS);
    assert_eq!(verified["files"], original.len());
    let restored = fixture.json("decompress pipe-df11 -o back");
    assert_eq!(restored["files"], original.len());
    assert!(restored["unchecked"].as_array().unwrap().is_empty(), "{restored}");
    assert!(files(&fixture.path("back")) == original);
}

#[test]
fn people_are_told_by_component_and_in_sum() {
    let fixture = Fixture::new();
    let said = fixture.good("compress pipe");
    for name in ["text_encoder_2", "unet", "total"] {
        assert!(said.lines().any(|line| line.trim_start().starts_with(name)), "{name} in {said}");
    }
    let vae = said.lines().find(|line| line.trim_start().starts_with("vae")).unwrap();
    assert!(vae.contains("F32: not compressed"), "{said}");
    for verb in ["verify", "inspect"] {
        let said = fixture.good(&format!("{verb} pipe-df11"));
        for name in COMPONENTS {
            assert!(said.contains(name), "{verb}: {name} in {said}");
        }
    }
    let inspected = fixture.json("inspect pipe-df11");
    assert_eq!(names_of(&inspected["components"]), COMPONENTS);
    let estimated = fixture.json("estimate pipe");
    let sizes: u64 = files(&fixture.path("pipe-df11"))
        .iter()
        .filter(|(name, _)| Path::new(name).extension().is_some_and(|end| end == "df11"))
        .map(|(_, bytes)| bytes.len() as u64)
        .sum();
    assert_eq!(estimated["stored_bytes"], sizes);
    fixture.fails("estimate pipe --gpus 8GB", 2, &["pipeline", "name one of its components"]);
    let report = fixture.json("doctor --folder pipe-df11");
    assert_eq!(report["checks"]["models"]["value"].as_array().unwrap().len(), COMPONENTS.len());
}

#[test]
fn no_single_file_holds_a_pipeline() {
    let fixture = Fixture::new();
    fixture.fails("compress pipe -o pipe.df11", 2, &["pipeline", "folder"]);
    assert_eq!(fixture.names(), ["pipe"]);
}

#[test]
fn what_is_lost_or_changed_is_found() {
    let fixture = Fixture::new();
    fixture.compress();
    let (path, scheduler) = (fixture.path("pipe-df11"), "scheduler/scheduler_config.json");
    let original = fixture.read(&format!("pipe/{scheduler}"));
    fixture.write(&format!("pipe-df11/{scheduler}"), "[]\n");
    fixture.fails("verify pipe-df11", 1, &[scheduler, "changed"]);
    fixture.fails("decompress pipe-df11 -o back", 1, &[scheduler, "--keep-changed"]);
    assert!(!fixture.path("back").exists());
    let restored = fixture.json("decompress pipe-df11 -o back --keep-changed");
    assert_eq!(restored["changed"], json!([scheduler]));
    fixture.write(&format!("pipe-df11/{scheduler}"), original);

    // A component that is gone, with all that names it.
    fs::rename(path.join("vae"), fixture.path("away")).unwrap();
    let output = fixture.run("verify pipe-df11");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("vae") && text(&output.stderr).contains("missing"));
    fixture.fails("decompress pipe-df11 -o back-2", 2, &["vae", "missing"]);
    // Another model in its place.
    fs::rename(path.join("unet"), path.join("vae")).unwrap();
    fs::rename(fixture.path("away"), path.join("unet")).unwrap();
    fixture.fails("verify pipe-df11", 2, &["is another model"]);
    assert_eq!(fixture.names(), ["back", "pipe", "pipe-df11"]);
}

#[test]
fn an_earlier_output_is_replaced_and_nothing_else() {
    let fixture = Fixture::new();
    fixture.compress();
    let out = fixture.path("pipe-df11");
    let before = files(&out);
    fixture.fails("compress pipe", 2, &["exists", "--force"]);
    fixture.good("compress pipe --force");
    assert!(files(&out) == before);
    // A pipeline with fewer components may replace it too: the earlier output's files are known.
    fs::rename(fixture.path("pipe/text_encoder_2"), fixture.path("away")).unwrap();
    fixture.good("compress pipe --force");
    assert!(!out.join("text_encoder_2").exists());
    fs::rename(fixture.path("away"), fixture.path("pipe/text_encoder_2")).unwrap();
    for stray in ["notes.txt", "unet/notes.txt"] {
        fs::write(out.join(stray), "mine").unwrap();
        let refused = [stray, "not part of an earlier output"];
        fixture.fails("compress pipe --force", 2, &refused);
        fs::remove_file(out.join(stray)).unwrap();
    }
    // And what decompress wrote.
    fixture.good("decompress pipe-df11 -o back");
    fixture.good("decompress pipe-df11 -o back --force");
    fixture.write("back/vae/mine", "mine");
    fixture.fails("decompress pipe-df11 -o back --force", 2, &["mine"]);
}

#[test]
fn strays_in_the_folder_are_named() {
    let fixture = Fixture::new();
    fixture.compress();
    fixture.write("pipe-df11/notes.md", "mine");
    fixture.write("pipe-df11/unet/more.md", "mine");
    fixture.write("pipe-df11/vae/diffusion_pytorch_model.safetensors", "stray");
    let restored = fixture.json("decompress pipe-df11 -o back");
    assert_eq!(restored["unchecked"], json!(["unet/more.md", "notes.md"]));
    assert_eq!(restored["left_out"][0]["path"], "vae/diffusion_pytorch_model.safetensors");
}

#[test]
fn the_variant_that_loads_by_default_is_taken() {
    let fixture = Fixture::new();
    let half = Item::raw("down.weight", Dtype::F16, &[256, 128], vec![3; 2 * 256 * 128]);
    fixture.part("unet/diffusion_pytorch_model.fp16.safetensors", &[half]);
    fixture.part("vae/diffusion_pytorch_model.bf16.safetensors", &[bf16("decoder.weight", 9)]);
    let report = fixture.compress();
    let left: Vec<&str> = report["left_out"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| file["path"].as_str().unwrap())
        .collect();
    assert_eq!(
        left,
        [
            "unet/diffusion_pytorch_model.fp16.safetensors",
            "vae/diffusion_pytorch_model.bf16.safetensors"
        ]
    );
    assert!(
        report["left_out"][0]["reason"].as_str().unwrap().contains("--variant fp16"),
        "{report}"
    );
    assert!(report["notes"].to_string().contains("--variant bf16"), "{report}");
    assert_eq!(
        names(&fixture.path("pipe-df11/unet")),
        ["config.json", "diffusion_pytorch_model.df11"]
    );
    // A variant that is asked for, if there is one, and what is there elsewhere: as diffusers.
    fixture.json("compress pipe --force --variant bf16");
    assert!(fixture.path("pipe-df11/vae/diffusion_pytorch_model.bf16.df11").exists());
    assert!(fixture.path("pipe-df11/unet/diffusion_pytorch_model.df11").exists());
    assert_eq!(fixture.json("verify pipe-df11")["good"], true);
    fixture.fails("compress pipe --force --variant fp8", 2, &["fp8", "bf16", "fp16"]);
    let file = "pipe/unet/diffusion_pytorch_model.safetensors";
    fixture.fails(&format!("estimate {file} --variant fp16"), 2, &["one file"]);
    // A component alone has its variants too.
    let unet = fixture.json("estimate pipe/unet");
    assert_eq!((&unet["coded_tensors"], &unet["raw_tensors"]), (&1.into(), &0.into()));
}

#[test]
fn sharded_variants_and_their_indexes() {
    let fixture = Fixture::new();
    let half = |name: &str| Item::raw(name, Dtype::F16, &[2, 2], vec![3; 8]);
    for (name, tensor) in [("00001", "text_model.a.weight"), ("00002", "text_model.b.weight")] {
        fixture.part(
            &format!("text_encoder_2/model.fp16-{name}-of-00002.safetensors"),
            &[half(tensor)],
        );
    }
    let index = json!({ "weight_map": {
        "text_model.a.weight": "model.fp16-00001-of-00002.safetensors",
        "text_model.b.weight": "model.fp16-00002-of-00002.safetensors",
    } });
    fixture.write("pipe/text_encoder_2/model.safetensors.index.fp16.json", index.to_string());
    let report = fixture.json("estimate pipe");
    assert_eq!(report["left_out"].as_array().unwrap().len(), 3, "{report}");
    let variant = fixture.json("estimate pipe --variant fp16");
    assert_eq!(variant["left_out"].as_array().unwrap().len(), 3, "{variant}");
    let component = &variant["components"][1];
    assert_eq!(
        (&component["component"], &component["raw_tensors"]),
        (&"text_encoder_2".into(), &2.into())
    );
}

#[test]
fn weights_beside_the_components_are_left_out_and_named() {
    let fixture = Fixture::new();
    fixture.part("all-in-one.safetensors", &[bf16("w", 1)]);
    let report = fixture.compress();
    assert_eq!(report["left_out"][0]["path"], "all-in-one.safetensors");
    assert!(
        report["left_out"][0]["reason"].as_str().unwrap().contains("of no component"),
        "{report}"
    );
}

#[cfg(unix)] // The limit is a shell's.
#[test]
fn an_interrupted_run_leaves_nothing() {
    let fixture = Fixture::new();
    fixture.part("vae/another.safetensors", &[bf16("decoder.weight", 5)]);
    fixture.fails("compress pipe", 2, &["vae", "both have a tensor"]);
    fs::remove_file(fixture.path("pipe/vae/another.safetensors")).unwrap();
    // The last component has no room, after others are written.
    let large = Item::raw("decoder.weight", Dtype::F32, &[1024, 1024], vec![7; 4 << 20]);
    fixture.part("vae/diffusion_pytorch_model.safetensors", &[large]);
    let output = fixture.shell("ulimit -f 2000; df11 compress pipe --quiet");
    crate::command::assert_fails(&output, 2, &["limit of file sizes"]);
    assert_eq!(fixture.names(), ["pipe"]);
}

#[test]
fn a_pipeline_is_converted() {
    let fixture = Fixture::new();
    fixture.compress();
    let report = fixture.json("convert pipe-df11 -o gap --layout gap");
    assert_eq!(names_of(&report["components"]), COMPONENTS);
    fixture.json("convert gap -o tile");
    // The card has the folder's name.
    let all = |folder: &str| {
        let mut all = files(&fixture.path(folder));
        assert!(all.remove("README.md").is_some());
        all
    };
    assert!(all("tile") == all("pipe-df11"));
    fixture.fails("convert pipe-df11 -o one.df11", 2, &["pipeline", "folder"]);
}
