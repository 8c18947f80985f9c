//! A checkpoint goes in and comes out, byte for byte, in every form of output and for any number of threads.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use df11::{
    CompressOptions, DecompressOptions, Encoding, Level, Model, Observer, OpenOptions, Source, compress,
    decompress, demo,
};

use safetensors::{
    Dtype,
    tensor::{TensorView, serialize_to_file},
};

fn with_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
}

/// All files below a folder, with their contents.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(folder).unwrap().to_owned(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

fn compressed(source: &Path, out: &Path, threads: usize) -> Model {
    with_threads(threads, || {
        compress(&Source::open(source).unwrap(), out, &CompressOptions::default(), &()).unwrap();
    });
    df11::open(out).unwrap()
}

#[test]
fn a_checkpoint_comes_back_byte_for_byte() {
    let folder = tempfile::tempdir().unwrap();
    let source = demo::tiny_checkpoint(folder.path()).unwrap();
    let original = files(&source);
    for out in ["model.df11", "folder"] {
        let out = folder.path().join(out);
        let model = compressed(&source, &out, 2);
        let found = model.verify(Level::Full, &()).unwrap();
        assert!(found.unchecked.is_empty());
        let restored = folder.path().join("restored");
        decompress(&model, &restored, &DecompressOptions::default(), &()).unwrap();
        assert_eq!(files(&restored), original);
        fs::remove_dir_all(restored).unwrap();
    }
}

#[test]
fn the_number_of_threads_does_not_show() {
    let folder = tempfile::tempdir().unwrap();
    let source = demo::tiny_checkpoint(folder.path()).unwrap();
    let outputs = [1, 2, 8].map(|threads| {
        let out = folder.path().join(format!("{threads}.df11"));
        compressed(&source, &out, threads);
        fs::read(out).unwrap()
    });
    assert!(outputs[0] == outputs[1] && outputs[0] == outputs[2]);
}

#[test]
fn tensors_rows_and_blocks_decode_to_the_original_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = demo::tiny_checkpoint(folder.path()).unwrap();
    let source = Source::open(&checkpoint).unwrap();
    compressed(&checkpoint, &folder.path().join("model.df11"), 2);
    for memory_map in [true, false] {
        let model = OpenOptions::new().memory_map(memory_map).open(folder.path().join("model.df11")).unwrap();
        for file in &source.weights {
            for expected in &file.tensors {
                let mut bytes = vec![0; expected.length as usize];
                file.read_exact_at(expected.offset, &mut bytes).unwrap();
                let tensor = model.tensor(&expected.name).unwrap();
                assert_eq!(tensor.decode_bytes().unwrap(), bytes, "{}", expected.name);
                let row = bytes.len() / expected.shape[0] as usize;
                let rows = expected.shape[0] / 3..expected.shape[0] / 2;
                let range = rows.start as usize * row..rows.end as usize * row;
                let mut out = vec![0xAA; range.len()];
                tensor.decode_row_bytes(rows, &mut out).unwrap();
                assert_eq!(out, bytes[range], "{}", expected.name);
            }
        }
        for block in model.blocks() {
            let layout = block.layout().unwrap();
            let mut buffer = vec![0xAA; layout.bytes as usize];
            block.decode_into(&mut buffer).unwrap();
            for (tensor, range) in block.tensors().zip(&layout.tensors) {
                assert_eq!(range.start % 256, 0);
                let decoded = tensor.decode_bytes().unwrap();
                assert_eq!(buffer[range.start as usize..range.end as usize], decoded);
            }
        }
    }
}

#[test]
fn a_tied_head_is_stored_once_and_layers_are_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let model = df11::open(demo::tiny_container(folder.path()).unwrap()).unwrap();
    let tied = ["lm_head.weight", "model.embed_tokens.weight"].map(|name| model.tensor(name).unwrap());
    assert_eq!(tied.iter().filter(|tensor| tensor.encoding() == Encoding::Alias).count(), 1);
    assert_eq!(tied[0].target().name(), tied[1].target().name());
    assert_eq!(tied[0].block_name(), tied[1].block_name());
    let blocks: Vec<String> = model.blocks().map(|block| block.name().to_owned()).collect();
    assert_eq!(
        blocks.iter().filter(|name| name.starts_with("model.layers.")).count(),
        demo::TINY.layers,
        "{blocks:?}"
    );
    assert_eq!(model.block("model.layers.2").unwrap().tensors().len(), 9);
}

/// Sections are aligned to pages; a block for each of many tiny modules would be mostly padding.
#[test]
fn tiny_modules_do_not_pad_the_container() {
    let folder = tempfile::tempdir().unwrap();
    let weights: Vec<u8> = (0..256u32).flat_map(|i| half::bf16::from_f32(i as f32).to_le_bytes()).collect();
    let tensors: BTreeMap<String, TensorView<'_>> = (0..2000)
        .flat_map(|layer| ["a.weight", "b.weight"].map(|part| format!("layers.{layer}.{part}")))
        .map(|name| (name, TensorView::new(Dtype::BF16, vec![16, 16], &weights).unwrap()))
        .collect();
    let source = folder.path().join("tiny.safetensors");
    serialize_to_file(tensors, None, &source).unwrap();
    let model = compressed(&source, &folder.path().join("tiny.df11"), 2);
    let (before, after) = (fs::metadata(&source).unwrap().len(), model.shards()[0].file_length());
    // The directory takes 300 bytes a tensor, here more than half of the tensor itself.
    let directory = model.shards()[0].directory_range();
    assert!(after - (directory.end - directory.start) < before + before / 10, "{before} became {after}");
    assert!(model.blocks().len() < 50);
}

#[test]
fn a_model_is_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Model>();
    shared::<df11::Tensor<'_>>();
    shared::<df11::Block<'_>>();
}

/// Counts what it is told of, and asks to stop after so many bytes.
struct Watch {
    stop_after: u64,
    announced: AtomicU64,
    done: AtomicU64,
}

impl Watch {
    fn new(stop_after: u64) -> Self {
        Self { stop_after, announced: AtomicU64::new(0), done: AtomicU64::new(0) }
    }
}

impl Observer for Watch {
    fn begin(&self, bytes: u64) {
        self.announced.fetch_add(bytes, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.done.load(Ordering::Relaxed) > self.stop_after
    }
}

#[test]
fn work_can_be_watched_and_stopped_at_every_stage() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = demo::tiny_checkpoint(folder.path()).unwrap();
    let source = Source::open(&checkpoint).unwrap();
    for out in ["out.df11", "out"] {
        let out = folder.path().join(out);
        let watch = Watch::new(u64::MAX);
        compress(&source, &out, &CompressOptions::default(), &watch).unwrap();
        let total = watch.done.into_inner();
        // Verification also counts the prefixes, which are no tensor data.
        let announced = watch.announced.into_inner();
        assert!(
            (announced..announced + announced / 50).contains(&total),
            "{announced} announced, {total} done"
        );
        fs::remove_file(&out).or_else(|_| fs::remove_dir_all(&out)).unwrap();
        let before = files(folder.path());
        for part in 0..8 {
            let watch = Watch::new(total * part / 8);
            let result = compress(&source, &out, &CompressOptions::default(), &watch);
            assert!(matches!(result, Err(df11::Error::Cancelled)), "part {part}: {result:?}");
            assert_eq!(files(folder.path()), before, "part {part} left something");
        }
    }
}
