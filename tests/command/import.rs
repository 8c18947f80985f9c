//! Checkpoints of the official DFloat11 package: its own files (`tests/dfloat11/make.py` makes
//! them) become the BF16 files that they were made from.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use df11::{CompressOptions, DecompressOptions, Dtype, Error, Result, Source, source::WeightsFile};
use safetensors::{SafeTensors, tensor::TensorView};
use tempfile::TempDir;

#[cfg(unix)]
use crate::command::{Folder, text};
use crate::files::{check_error, sha256};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dfloat11").join(name)
}

/// The hash of the file that was compressed.
fn original(path: &str) -> String {
    let lines = fs::read_to_string(fixture("originals.sha256")).unwrap();
    let line = lines.lines().find(|line| line.ends_with(&format!("  {path}"))).unwrap();
    line.split("  ").next().unwrap().to_owned()
}

fn read(file: &WeightsFile) -> Result<Vec<u8>> {
    let mut bytes = vec![0; file.length as usize];
    file.read_exact_at(0, &mut bytes)?;
    Ok(bytes)
}

/// The only weights file of a source.
fn only(path: &Path) -> Result<WeightsFile> {
    let mut source = Source::open(path)?;
    assert_eq!(source.weights.len(), 1);
    Ok(source.weights.remove(0))
}

/// Opens a checkpoint and decodes all of it.
fn decode(path: &Path) -> Result<Vec<u8>> {
    read(&only(path)?)
}

fn shapes(file: &WeightsFile) -> BTreeMap<&str, &[u64]> {
    file.tensors.iter().map(|tensor| (tensor.name.as_str(), &tensor.shape[..])).collect()
}

/// A copy of a fixture that may be changed.
fn copy(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

/// The tensors of a file: dtype, shape, bytes.
type Tensors = BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(file: &Path) -> Tensors {
    let bytes = fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, t)| (name.to_owned(), (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect()
}

fn write(file: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(file, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Writes the file with one tensor changed; of bytes whose number changes, the shape becomes flat.
fn edit(file: &Path, tensor: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let mut all = tensors(file);
    let (dtype, shape, bytes) = all.get_mut(tensor).unwrap();
    let length = bytes.len();
    change(bytes);
    if bytes.len() != length {
        *shape = vec![bytes.len() / (dtype.bitsize() / 8)];
    }
    write(file, &all);
}

#[test]
fn a_folder_of_blocks_is_the_original_file() {
    let file = only(&fixture("llama")).unwrap();
    assert_eq!(file.path, "model.safetensors");
    assert_eq!(sha256(read(&file).unwrap()), original("llama/model.safetensors"));
    let shapes = shapes(&file);
    assert_eq!(shapes["model.layers.1.self_attn.q_proj.weight"], [40, 36]);
    assert_eq!(shapes["model.layers.1.self_attn.o_proj.weight"], [36, 40]);
    assert_eq!(shapes["model.layers.0.mlp.down_proj.weight"], [36, 151]);
    assert_eq!(shapes["lm_head.weight"], [131, 36]);
}

#[test]
fn shapes_follow_from_norms_where_the_config_has_none() {
    let folder = copy("llama");
    let config = folder.path().join("config.json");
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    fs::write(
        &config,
        serde_json::json!({ "dfloat11_config": json["dfloat11_config"] }).to_string(),
    )
    .unwrap();
    assert_eq!(sha256(decode(folder.path()).unwrap()), original("llama/model.safetensors"));
}

#[test]
fn infinities_nan_and_what_nothing_tells() {
    let path = fixture("plain");
    for path in [path.clone(), path.join("model.safetensors")] {
        let source = Source::open(&path).unwrap();
        let file = &source.weights[0];
        let shapes = shapes(file);
        assert_eq!(shapes["blocks.0.to_out.0.weight"], [45, 91]);
        assert_eq!(shapes["blocks.1.to_q.weight"], [7, 13]);
        assert_eq!(shapes["blocks.0.mixer.weight"], [135]);
        assert_eq!(source.notes.len(), 2);
        assert!(
            source.notes[1].contains("2 tensor(s)")
                && source.notes[1].contains("blocks.0.mixer.weight")
        );

        // The flat tensors have their bytes, in their places; only their shapes differ from the
        // original's.
        let mut all = SafeTensors::deserialize(&read(file).unwrap())
            .unwrap()
            .iter()
            .map(|(name, t)| (name.to_owned(), (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
            .collect::<Tensors>();
        all.get_mut("blocks.0.mixer.weight").unwrap().1 = vec![3, 45];
        all.get_mut("blocks.1.mixer.weight").unwrap().1 = vec![3, 13];
        let nan = &all["blocks.0.to_q.weight"].2[2 * 108..][..4];
        assert_eq!(nan, [0xC1, 0x7F, 0xFF, 0xFF], "the payloads of NaN");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.safetensors");
        write(&file, &all);
        assert_eq!(sha256(fs::read(file).unwrap()), original("plain/model.safetensors"));
    }
}

#[test]
fn the_container_is_that_of_the_original() {
    let folder = tempfile::tempdir().unwrap();
    let original_folder = folder.path().join("original");
    fs::create_dir(&original_folder).unwrap();
    fs::write(original_folder.join("model.safetensors"), decode(&fixture("llama")).unwrap())
        .unwrap();
    fs::copy(fixture("llama/config.json"), original_folder.join("config.json")).unwrap();
    let compress = |from: &Path, to: &str| {
        let to = folder.path().join(to);
        let report =
            df11::compress(&Source::open(from).unwrap(), &to, &CompressOptions::default(), &())
                .unwrap();
        (fs::read(&to).unwrap(), report)
    };
    let (imported, report) = compress(&fixture("llama"), "imported.df11");
    assert!(
        report.notes[0].contains("version 0.5.0") && report.notes.len() == 1,
        "{:?}",
        report.notes
    );
    assert!(imported == compress(&original_folder, "original.df11").0);

    let back = folder.path().join("back");
    let model = df11::open(folder.path().join("imported.df11")).unwrap();
    df11::decompress(&model, &back, &DecompressOptions::default(), &()).unwrap();
    assert_eq!(
        sha256(fs::read(back.join("model.safetensors")).unwrap()),
        original("llama/model.safetensors")
    );
}

#[cfg(unix)] // Elsewhere links need a privilege.
#[test]
fn the_command_imports() {
    let folder = Folder::new();
    std::os::unix::fs::symlink(fixture("llama"), folder.path("llama")).unwrap();
    let output = folder.run("compress llama -o out");
    let (said, told) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((output.status.code(), told.lines().count()), (Some(0), 1), "{told}");
    assert!(told.contains("a DFloat11 checkpoint"), "{told}");
    assert!(said.contains("note      model.safetensors: a DFloat11 checkpoint"), "{said}");
    assert!(folder.path("out/model.df11").is_file() && folder.path("out/config.json").is_file());
    folder.good("decompress out -o back");
    let restored = folder.read("back/model.safetensors");
    assert_eq!(sha256(&restored), original("llama/model.safetensors"));

    let damaged = copy("llama");
    edit(&damaged.path().join("model_layers_1.safetensors"), "model.layers.1.gaps", |gaps| {
        gaps[9] ^= 1;
    });
    let output = folder.run(&format!("compress {} -o damaged.df11", damaged.path().display()));
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    for part in ["model.layers.1.gaps", "download the checkpoint again"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!folder.path("damaged.df11").exists());
}

#[test]
fn an_index_does_not_hide_blocks() {
    let folder = copy("llama");
    let index = r#"{"weight_map":{"model.norm.weight":"model.safetensors"}}"#;
    fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    let source = Source::open(folder.path()).unwrap();
    assert_eq!(source.weights.len(), 1);
    assert_eq!(source.left_out[0].path, "model.safetensors.index.json");
    assert_eq!(sha256(read(&source.weights[0]).unwrap()), original("llama/model.safetensors"));
}

#[test]
fn a_config_that_does_not_fit() {
    let folder = copy("plain");
    let config = folder.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    for (from, to, kind, part) in [
        ("dfloat11_config", "other", "Parameter", "config.json"),
        ("blocks\\\\.", "layers\\\\.", "Parameter", "no pattern of pattern_dict matches"),
        ("\"mixer\"", "\"mixer\", \"more\"", "Parameter", "has 3 matrices"),
        ("\"mixer\"", "\"to_q\"", "Parameter", "twice"),
        ("[0-9]+", "(?=x)", "Unsupported", "the pattern"),
        ("\"bytes_per_thread\": 8", "\"bytes_per_thread\": 16", "Unsupported", "16 bytes per"),
        ("512", "0", "Unsupported", "0 threads"),
        ("512", "256", "Corrupt", "gaps"),
        ("\"pattern_dict\"", "\"patterns\"", "Corrupt", "pattern_dict"),
    ] {
        assert!(text.contains(from));
        fs::write(&config, text.replace(from, to)).unwrap();
        check_error(Source::open(folder.path()), kind, part);
    }
    fs::remove_file(&config).unwrap();
    check_error(Source::open(folder.path()), "Parameter", "config.json");
    check_error(Source::open(&folder.path().join("model.safetensors")), "Parameter", "config.json");
}

/// A small config.json or file that would need much memory is refused before it takes any.
#[test]
fn a_config_that_asks_for_much() {
    let folder = copy("plain");
    let config = folder.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let sound = json["dfloat11_config"]["pattern_dict"].clone();
    let mut with = |patterns: &serde_json::Map<String, serde_json::Value>| {
        json["dfloat11_config"]["pattern_dict"] = serde_json::json!(patterns);
        fs::write(&config, json.to_string()).unwrap();
        Source::open(folder.path())
    };
    let of = |patterns: &mut dyn Iterator<Item = String>| {
        let mut all = sound.as_object().unwrap().clone();
        all.extend(patterns.map(|pattern| (pattern, serde_json::json!(["x"]))));
        all
    };
    // Some MiB each when compiled, unless that is refused.
    let large = of(&mut (0..1000).map(|n| format!("((a{{100}}){{100}}){{8}}{n}")));
    check_error(with(&large), "Limit", "patterns");
    let large = of(&mut (0..100).map(|n| format!("((a{{100}}){{100}}){{8}}{n}")));
    check_error(with(&large), "Unsupported", "size limit");
    with(&of(&mut (0..250).map(|n| format!("(model|transformer)\\.blocks\\.\\d+\\.x{n}"))))
        .unwrap();

    // 15 MB for each of many modules.
    let long = "x".repeat(15 << 20);
    let patterns: serde_json::Map<_, _> =
        [(".*".to_owned(), serde_json::json!([long]))].into_iter().collect();
    let mut all = Tensors::new();
    let source = tensors(&fixture("plain/model.safetensors"));
    for module in 0..50 {
        for array in ["encoded_exponent", "sign_mantissa", "luts", "output_positions", "gaps"] {
            all.insert(format!("{module}.{array}"), source[&format!("proj.{array}")].clone());
        }
    }
    write(&folder.path().join("model.safetensors"), &all);
    check_error(with(&patterns), "Limit", "header");
}

/// A module's long name counts for each of its matrices, and control characters take six bytes of
/// JSON.
#[test]
fn names_that_no_header_could_hold() {
    let folder = copy("plain");
    let source = tensors(&fixture("plain/model.safetensors"));
    let module = "\u{1}".repeat(4000);
    let mut all: Tensors =
        ["encoded_exponent", "sign_mantissa", "luts", "output_positions", "gaps"]
            .map(|array| (format!("{module}.{array}"), source[&format!("proj.{array}")].clone()))
            .into();
    let count = 100_000;
    let splits = (safetensors::Dtype::I64, vec![count - 1], vec![0; 8 * (count - 1)]);
    all.insert(format!("{module}.split_positions"), splits);
    write(&folder.path().join("model.safetensors"), &all);
    let config = folder.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let names: Vec<String> = (0..count).map(|n| n.to_string()).collect();
    json["dfloat11_config"]["pattern_dict"] = serde_json::json!({ "[^m]*": names });
    fs::write(&config, json.to_string()).unwrap();
    check_error(Source::open(folder.path()), "Limit", "header");
}

#[test]
fn arrays_that_are_missing_or_cut_short() {
    const BLOCK: &str = "model.layers.0";
    for (array, count) in [
        ("encoded_exponent", 1),
        ("encoded_exponent", 3000),
        ("sign_mantissa", 1),
        ("luts", 1),
        ("luts", 256),
        ("output_positions", 4),
        ("output_positions", 3),
        ("gaps", 1),
        ("gaps", 320),
        ("split_positions", 8),
    ] {
        let folder = copy("llama");
        let file = folder.path().join("model_layers_0.safetensors");
        let name = format!("{BLOCK}.{array}");
        edit(&file, &name, |bytes| bytes.truncate(bytes.len() - count));
        match decode(folder.path()) {
            Err(Error::Corrupt { place, remedy: Some(remedy), .. }) => {
                assert!(place.contains(BLOCK) && remedy.contains("download"), "{place}; {remedy}");
            }
            Err(Error::Parameter { problem, .. }) => {
                assert!(problem.contains("6 matrices"), "{problem}");
            }
            other => panic!("{array} less {count}: {:?}", other.map(|bytes| bytes.len())),
        }
        let mut all = tensors(&file);
        all.remove(&name);
        write(&file, &all);
        match (array, decode(folder.path())) {
            ("split_positions", result) => check_error(result, "Parameter", "1 matrices"),
            (_, result) => check_error(result, "Corrupt", "the DFloat11 checkpoint has no"),
        }
    }
}

#[test]
fn damaged_positions_and_splits() {
    let change = |tensor: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let folder = copy("llama");
        edit(
            &folder.path().join("model_layers_0.safetensors"),
            &format!("model.layers.0.{tensor}"),
            change,
        );
        decode(folder.path())
    };
    let set = |at: usize, value: u32| {
        move |bytes: &mut Vec<u8>| bytes[4 * at..][..4].copy_from_slice(&value.to_le_bytes())
    };
    for (at, value) in
        [(0, 1), (1, 0), (1, 20_629), (1, u32::MAX), (2, 20_627), (2, 0), (1, 12_000), (1, 20_628)]
    {
        assert!(
            matches!(change("output_positions", &set(at, value)), Err(Error::Corrupt { .. })),
            "{at} {value}"
        );
    }
    for (at, value) in [(0, -1i64), (0, 2161), (5, 20_629), (5, i64::MAX)] {
        let result = change("split_positions", &|splits| {
            splits[8 * at..][..8].copy_from_slice(&value.to_le_bytes());
        });
        assert!(matches!(result, Err(Error::Corrupt { .. })), "{at} {value}");
    }
}

#[test]
fn an_ordinary_model_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    write(
        &file,
        &Tensors::from([("x.gaps".to_owned(), (safetensors::Dtype::U8, vec![3], vec![1, 2, 3]))]),
    );
    let source = Source::open(&file).unwrap();
    assert_eq!(source.weights[0].tensors[0].dtype, Dtype::U8);
    assert!(!source.notes.iter().any(|note| note.contains("DFloat11")), "{:?}", source.notes);
}
