//! A checkpoint goes in and comes out, byte for byte, in every form of output and for any number of
//! threads.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use df11::{
    CompressOptions, DecompressOptions, Dtype, Encoding, Layout, Level, Model, Observer, Source,
    compress, convert, decompress,
    hazmat::{demo, histogram},
};

use crate::{
    container::{self, Item, weights_file},
    files::{check_error, files},
};

fn with_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
}

/// All layouts that code.
fn layouts() -> [Layout; 2] {
    [Layout::gap(), Layout::Tile]
}

fn options(layout: Layout) -> CompressOptions {
    CompressOptions::new().layout(layout)
}

fn compressed(source: &Path, out: &Path, layout: Layout, threads: usize) -> Model {
    with_threads(threads, || {
        compress(&Source::open(source).unwrap(), out, &options(layout), &()).unwrap();
    });
    df11::open(out).unwrap()
}

#[test]
fn the_number_of_threads_does_not_show() {
    let folder = tempfile::tempdir().unwrap();
    let source = demo::tiny_checkpoint(folder.path()).unwrap();
    for layout in layouts() {
        let outputs = [1, 2, 8].map(|threads| {
            let out = folder.path().join(format!("{threads}{}.df11", name_of(layout)));
            compressed(&source, &out, layout, threads);
            fs::read(out).unwrap()
        });
        assert!(outputs[0] == outputs[1] && outputs[0] == outputs[2], "{layout:?}");
    }
}

/// The name of a layout, for a file.
fn name_of(layout: Layout) -> &'static str {
    if layout == Layout::Tile { "tile" } else { "gap" }
}

/// A safetensors file with a matrix of each of these shapes, named by it. Returns them.
fn write_weights(path: &Path, shapes: &[&[u64]]) -> Vec<Item> {
    let items: Vec<Item> =
        (1..).zip(shapes).map(|(seed, shape)| Item::normal(shape, seed)).collect();
    fs::write(path, weights_file(&items)).unwrap();
    items
}

/// Tensors that are larger than what one thread counts and measures alone, in matrices, vectors and
/// what is left of them; their slices are those of `tests/slices.rs`.
#[test]
fn large_tensors_go_through_tiles_too() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("large.safetensors");
    let shapes: [&[u64]; 5] =
        [&[3000, 1000], &[2_500_001], &[40, 65_536], &[6, 700, 8, 80], &[17, 136]];
    let items = write_weights(&source, &shapes);
    let outputs = [1, 3].map(|threads| {
        let out = folder.path().join(format!("{threads}.df11"));
        let model = compressed(&source, &out, Layout::Tile, threads);
        let verified = with_threads(threads, || model.verify(Level::Full, &()));
        assert!(verified.unwrap().unchecked.is_empty());
        for Item { name, data, .. } in &items {
            let tensor = model.tensor(name).unwrap();
            let large = data.len() > 32 << 10;
            assert_eq!(tensor.encoding(), if large { Encoding::Tile } else { Encoding::Raw });
            assert_eq!(histogram(&tensor).unwrap().total(), tensor.elements());
            assert!(tensor.decode::<u8>().unwrap() == *data);
        }
        fs::read(out).unwrap()
    });
    assert!(outputs[0] == outputs[1]);
}

/// transformers finds its own line in a folder's configuration, and nobody else ever sees it.
#[test]
fn the_configuration_of_a_folder_names_the_compression() {
    let folder = tempfile::tempdir().unwrap();
    let source = demo::tiny_checkpoint(folder.path()).unwrap();
    let config = "{\n  \"model_type\": \"llama\"\n}\n";
    for path in ["config.json", "tokenizer/config.json"] {
        fs::create_dir_all(source.join(path).parent().unwrap()).unwrap();
        fs::write(source.join(path), config).unwrap();
    }
    let original = files(&source);
    let path = |name: &str| folder.path().join(name);
    let model = compressed(&source, &path("folder"), Layout::default(), 2);
    let marked = files(&path("folder"));
    let json: serde_json::Value = serde_json::from_slice(&marked["config.json"]).unwrap();
    assert_eq!(json["quantization_config"]["quant_method"], "df11");
    assert_eq!(marked["tokenizer/config.json"], config.as_bytes(), "no weights beside it");
    decompress(&model, &path("restored"), &DecompressOptions::default(), &()).unwrap();
    assert_eq!(files(&path("restored")), original);

    // One container holds the original; a folder that comes from it, or from another folder, is as
    // if compressed anew.
    compressed(&source, &path("direct.df11"), Layout::default(), 2);
    for (from, to, expected) in [
        ("folder", "one.df11", "direct.df11"),
        ("one.df11", "two", "folder"),
        ("two", "three", "folder"),
    ] {
        let model = df11::open(path(from)).unwrap();
        convert(&model, &path(to), &CompressOptions::default(), &()).unwrap();
        if path(to).is_dir() {
            assert_eq!(files(&path(to)), files(&path(expected)), "{from} to {to}");
        } else {
            let [made, expected] = [to, expected].map(|name| fs::read(path(name)).unwrap());
            assert!(made == expected, "{from} to {to}");
        }
    }
}

/// Strips that do not fit the pieces of the other layout.
#[test]
fn large_tensors_are_converted() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("large.safetensors");
    write_weights(&source, &[&[700, 5000], &[3_500_000], &[25, 140_000]]);
    let [gap, tile] = layouts().map(|layout| {
        let out = folder.path().join(format!("{}.df11", name_of(layout)));
        compressed(&source, &out, layout, 2);
        out
    });
    for (from, to, layout) in [(&gap, &tile, Layout::Tile), (&tile, &gap, Layout::gap())] {
        let out = folder.path().join("converted.df11");
        let options = options(layout).overwrite(true);
        convert(&df11::open(from).unwrap(), &out, &options, &()).unwrap();
        assert!(fs::read(out).unwrap() == fs::read(to).unwrap());
    }
}

#[test]
fn a_damaged_model_is_not_converted() {
    let folder = tempfile::tempdir().unwrap();
    for layout in layouts() {
        let source = demo::tiny_checkpoint(folder.path()).unwrap();
        let path = folder.path().join("model.df11");
        compressed(&source, &path, layout, 2);
        let mut draft = container::parse(&fs::read(&path).unwrap());
        let section =
            draft.directory.sections.iter().position(|section| section.kind == 4).unwrap();
        draft.contents[section][77] ^= 1;
        draft.repair_checksums();
        fs::write(&path, draft.pack()).unwrap();
        let options = options(Layout::Raw).verify(false);
        let out = folder.path().join("out.df11");
        check_error(convert(&df11::open(&path).unwrap(), &out, &options, &()), "Corrupt", "hash");
        assert!(!out.exists());
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_tied_head_is_stored_once_and_layers_are_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let model = df11::open(demo::tiny_container(folder.path()).unwrap()).unwrap();
    let tied =
        ["lm_head.weight", "model.embed_tokens.weight"].map(|name| model.tensor(name).unwrap());
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
    let weights: Vec<u8> =
        (0..256u32).flat_map(|i| half::bf16::from_f32(i as f32).to_le_bytes()).collect();
    let names = (0..2000)
        .flat_map(|layer| ["a.weight", "b.weight"].map(|part| format!("layers.{layer}.{part}")));
    let items: Vec<Item> =
        names.map(|name| Item::raw(&name, Dtype::BF16, &[16, 16], weights.clone())).collect();
    let source = folder.path().join("tiny.safetensors");
    fs::write(&source, weights_file(&items)).unwrap();
    let model = compressed(&source, &folder.path().join("tiny.df11"), Layout::gap(), 2);
    let (before, after) = (fs::metadata(&source).unwrap().len(), model.shards()[0].file_length());
    // The directory takes 300 bytes a tensor, here more than half of the tensor itself.
    let directory = model.shards()[0].directory_range();
    assert!(
        after - (directory.end - directory.start) < before + before / 10,
        "{before} became {after}"
    );
    assert!(model.blocks().len() < 50);
}

#[test]
fn a_model_is_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Model>();
    shared::<df11::Tensor<'_>>();
    shared::<df11::Block<'_>>();
}

/// Counts what it is told of, and asks to stop after a number of bytes.
#[derive(Default)]
struct Watch {
    stop_after: u64,
    announced: AtomicU64,
    done: AtomicU64,
    /// The most that it was told of at once.
    largest: AtomicU64,
}

impl Watch {
    fn new(stop_after: u64) -> Self {
        Self { stop_after, ..Self::default() }
    }
}

impl Observer for Watch {
    fn begin(&self, bytes: u64) {
        self.announced.fetch_add(bytes, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        self.largest.fetch_max(bytes, Ordering::Relaxed);
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
    for (out, layout) in
        [("out.df11", layouts()[0]), ("out", layouts()[0]), ("out.df11", layouts()[1])]
    {
        let out = folder.path().join(out);
        let watch = Watch::new(u64::MAX);
        compress(&source, &out, &options(layout), &watch).unwrap();
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
            let result = compress(&source, &out, &options(layout), &watch);
            assert!(matches!(result, Err(df11::Error::Cancelled)), "part {part}: {result:?}");
            assert_eq!(files(folder.path()), before, "part {part} left something");
        }
    }
}

/// A safetensors file with one tensor of each name, of 8 MiB: more than is measured at once.
fn long_tensors(path: &Path, tensors: &[(&str, Vec<u8>)]) -> Source {
    let item =
        |(name, data): &(&str, Vec<u8>)| Item::raw(name, Dtype::BF16, &[2048, 2048], data.clone());
    fs::write(path, weights_file(&tensors.iter().map(item).collect::<Vec<_>>())).unwrap();
    Source::open(path).unwrap()
}

#[test]
fn measuring_long_tensors_is_announced_and_told_as_it_goes_on() {
    const BYTES: u64 = 8 << 20;
    let folder = tempfile::tempdir().unwrap();
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as u16
    };
    let coded: Vec<u8> =
        (0..BYTES / 2).flat_map(|_| (random() & 0x807F | 0x3F00).to_le_bytes()).collect();
    // No code makes it smaller, so it is not measured, which its announced bytes are told of all
    // the same.
    let raw: Vec<u8> = (0..BYTES / 2).flat_map(|_| random().to_le_bytes()).collect();
    let out = folder.path().join("out.df11");
    let watched = |source: &Source, layout, stop_after| {
        let watch = Watch::new(stop_after);
        let done = with_threads(1, || df11::estimate(source, &out, &options(layout), &watch));
        (done, watch.announced.into_inner(), watch.done.into_inner(), watch.largest.into_inner())
    };

    let source = long_tensors(&folder.path().join("coded.safetensors"), &[("a", coded.clone())]);
    for (layout, times) in [(Layout::Tile, 2), (Layout::gap(), 1), (Layout::Raw, 1)] {
        let (done, announced, told, largest) = watched(&source, layout, u64::MAX);
        assert_eq!(done.unwrap().report.coded_tensors, u64::from(layout != Layout::Raw));
        assert_eq!((announced, told), (times * BYTES, times * BYTES), "{layout:?}");
        assert!(largest <= 256 << 10, "{largest} bytes at once");
    }
    let (done, _, told, _) = watched(&source, Layout::Tile, BYTES + BYTES / 2);
    assert!(matches!(done, Err(df11::Error::Cancelled)) && told < 2 * BYTES, "{told}");

    let source = long_tensors(&folder.path().join("both.safetensors"), &[("a", coded), ("b", raw)]);
    let (done, announced, told, _) = watched(&source, Layout::Tile, u64::MAX);
    assert_eq!(done.unwrap().report.raw_tensors, 1);
    assert_eq!((announced, told), (4 * BYTES, 4 * BYTES));
}
