//! Small containers and checkpoints, made by df11's own writer.

use std::{collections::HashMap, fs, path::Path, sync::LazyLock};

use df11::{
    CompressOptions, Layout, Source, compress,
    hazmat::{bf16, gap::GapGeometry},
};
use safetensors::{Dtype, tensor::TensorView};
use tempfile::TempDir;

use crate::bytes::Random;

/// A tensor to be: name, dtype, shape, bytes.
pub type Sample = (String, Dtype, Vec<usize>, Vec<u8>);

/// Weights that compress: a handful of exponents.
pub fn weights(count: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut exponent = move || 118 + (random.draw() & random.draw() & 7).count_ones() as u8;
    (0..count).flat_map(|i| bf16::weight(exponent(), i as u8).to_le_bytes()).collect()
}

/// A temporary folder: in memory if the system has a folder there, which is faster than a disk.
pub fn memory_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    folder.expect("a temporary folder")
}

/// Writes a safetensors file.
pub fn write_safetensors(path: &Path, tensors: &[Sample], metadata: bool) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (
            name.as_str(),
            TensorView::new(*dtype, shape.clone(), bytes).expect("bytes as the shape asks for"),
        )
    });
    let metadata = metadata.then(|| HashMap::from([("format".to_owned(), "pt".to_owned())]));
    let bytes = safetensors::serialize(views, metadata).expect("tensors serialize");
    fs::write(path, bytes).expect("a temporary file");
}

/// The containers that `open_structured` changes.
pub static CONTAINERS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(containers);

fn sample(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Sample {
    (name.to_owned(), dtype, shape.to_vec(), bytes)
}

fn layer(index: usize) -> Vec<Sample> {
    let name = |part: &str| format!("layers.{index}.{part}");
    vec![
        sample(&name("a"), Dtype::BF16, &[64, 48], weights(64 * 48, 7 + index as u64)),
        sample(&name("b"), Dtype::BF16, &[3], weights(3, 3)),
        sample(&name("c"), Dtype::F32, &[], vec![1; 4]),
    ]
}

fn containers() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = folder.path().join("model");
    fs::create_dir(&root).expect("a folder");
    let mut first = layer(0);
    first.push(sample("none", Dtype::BF16, &[2, 0], Vec::new()));
    first.push(sample("u4", Dtype::F4, &[2, 3], vec![0x21, 0x43, 0x65]));
    let mut second = layer(1);
    second.push(sample("head", Dtype::BF16, &[128, 24], weights(64 * 48, 7)));
    write_safetensors(&root.join("a.safetensors"), &first, true);
    write_safetensors(&root.join("b.safetensors"), &second, false);
    fs::write(root.join("config.json"), "{}").expect("a side file");
    fs::write(root.join("empty"), "").expect("a side file");
    let one = folder.path().join("one.safetensors");
    // Smaller tensors are stored raw.
    write_safetensors(&one, &[sample("w", Dtype::BF16, &[17_000], weights(17_000, 1))], false);
    let matrices = folder.path().join("matrices.safetensors");
    let matrix = sample("m", Dtype::BF16, &[68, 264], weights(68 * 264, 2));
    let vector = sample("v", Dtype::BF16, &[16_385], weights(16_385, 3));
    write_safetensors(&matrices, &[matrix, vector], false);
    let small = folder.path().join("small.safetensors");
    write_safetensors(&small, &[sample("w", Dtype::U8, &[5], vec![5; 5])], false);
    let wide = Layout::Gap(GapGeometry::new(8, 64).expect("a geometry"));

    let compressed = |source: &Path, out: &str, layout| {
        let out = folder.path().join(out);
        let options = CompressOptions::new()
            .layout(layout)
            .metadata([("fuzz.sample".to_owned(), "yes".to_owned())].into());
        compress(&Source::open(source).expect("a source"), &out, &options, &())
            .expect("a container");
        out
    };
    let read = |path| fs::read(path).expect("a container");
    let shards = compressed(&root, "shards", Layout::gap());
    vec![
        read(compressed(&root, "all.df11", Layout::gap())),
        read(compressed(&one, "one.df11", wide)),
        read(compressed(&small, "small.df11", Layout::gap())),
        read(shards.join("a.df11")),
        read(shards.join("b.df11")),
        read(compressed(&root, "raw.df11", Layout::Raw)),
        read(compressed(&matrices, "matrices.df11", Layout::Tile)),
        read(compressed(&one, "vector.df11", Layout::Tile)),
    ]
}
