//! Estimates and outlines: what compression would make, told without making it.

use std::{fs::File, io::Write, path::Path};

use df11::{CompressOptions, Error, Estimate, Layout, Model, Result, Source, Sources};
use serde_json::json;

/// Two weights files in a folder, seeded.
fn folder(root: &Path) -> Source {
    Source::open(&df11::hazmat::demo::tiny_checkpoint(root).unwrap()).unwrap()
}

/// Everything that a directory says except for the checksums of arrays.
fn said(model: &Model) -> Vec<String> {
    let shards = model.shards().iter().map(|shard| {
        let d = shard.directory();
        format!(
            "{:?} {:?} {:?} {:?} {:?} {:?}",
            d.shard, d.files, d.blocks, d.sections, d.tensors, d.arrays
        )
    });
    shards.collect()
}

#[test]
fn an_outline_says_what_the_container_will() {
    let root = tempfile::tempdir().unwrap();
    let source = folder(root.path());
    for layout in [Layout::gap(), Layout::Tile, Layout::Raw] {
        for out in ["out.df11", "out"] {
            let out = root.path().join(out);
            let options = CompressOptions::new().layout(layout).overwrite(true);
            let estimate = df11::estimate(&source, &out, &options, &()).unwrap();
            let outline = estimate.outline().unwrap();
            let report = df11::compress(&source, &out, &options, &()).unwrap();
            assert_eq!(estimate.report.stored_bytes, report.stored_bytes);
            let model = df11::open(&out).unwrap();
            assert_eq!(said(&outline), said(&model));
            #[cfg(feature = "cuda")]
            for memory in [&[100 << 20][..], &[600 << 10, 900 << 10]] {
                use df11::gpu::Plan;
                let (planned, written) = (Plan::fit(&outline, memory), Plan::fit(&model, memory));
                assert_eq!(planned.map_err(|e| e.to_string()), written.map_err(|e| e.to_string()));
            }
            let tensor = outline.tensors().find(|tensor| tensor.elements() > 1000).unwrap();
            assert!(matches!(tensor.decode::<u8>(), Err(Error::Corrupt { .. })));
        }
    }
}

/// The header of Llama 3.1 405B, in a file that is as long as its weights and has none of them.
fn llama_405b(path: &Path) -> u64 {
    let (layers, hidden, inner, keys, vocabulary) = (126, 16384u64, 53248u64, 1024u64, 128_256u64);
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        ("lm_head.weight".to_owned(), vec![vocabulary, hidden]),
    ];
    for layer in 0..layers {
        let mut add = |name: &str, shape: &[u64]| {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        add("self_attn.q_proj", &[hidden, hidden]);
        add("self_attn.k_proj", &[keys, hidden]);
        add("self_attn.v_proj", &[keys, hidden]);
        add("self_attn.o_proj", &[hidden, hidden]);
        add("mlp.gate_proj", &[inner, hidden]);
        add("mlp.up_proj", &[inner, hidden]);
        add("mlp.down_proj", &[hidden, inner]);
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in shapes {
        let bytes = 2 * shape.iter().product::<u64>();
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [end, end + bytes] });
        header.insert(name, entry);
        end += bytes;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
    end
}

#[test]
fn headers_alone_tell_the_size_of_llama_405b_and_that_it_fits_eight_gpus() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model.safetensors");
    let bytes = llama_405b(&path);
    assert_eq!(bytes, 811_706_777_600, "811.7 GB, as the paper has it");
    let sources = Sources::open(&path, None).unwrap();
    let out = root.path().join("out.df11");
    let estimate = |layout, bits| -> Result<Estimate> {
        let options = CompressOptions::new().layout(layout);
        let mut all = df11::estimate_all(&sources, &out, &options, Some(bits), &())?;
        assert_eq!(all.len(), 1);
        Ok(all.remove(0))
    };
    for layout in [Layout::gap(), Layout::Tile] {
        let estimate = estimate(layout, 2.65).unwrap();
        let bits = 16.0 * estimate.report.stored_bytes as f64 / bytes as f64;
        // Codes and the plane, and 0.05 to 0.1 of an index.
        assert!((10.65..10.75).contains(&bits), "{bits}");
        let outline = estimate.outline().unwrap();
        assert_eq!(outline.blocks().len(), 129);
        #[cfg(feature = "cuda")]
        {
            use df11::gpu::Plan;
            // In BF16 it would take ten such GPUs.
            let plan = Plan::fit(&outline, &[80 << 30; 8]).unwrap();
            assert_eq!(plan.host_bytes(), 0);
            assert!(plan.device_bytes().iter().all(|&bytes| bytes <= 80 << 30));
            assert!(plan.placements().is_sorted_by_key(|place| place.unwrap().device));
            assert!(Plan::fit(&outline, &[80 << 30; 7]).unwrap().host_bytes() > 0);
        }
    }
    for bits in [0.5, 8.5, f64::NAN] {
        assert!(matches!(estimate(Layout::Tile, bits), Err(Error::Parameter { .. })));
    }
}
