//! Fine-tunes as differences from their base: compressed, restored, and refused without it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use df11::{
    CompressOptions, DecompressOptions, Dtype, Encoding, Layout, Level, OpenOptions, Report,
    Source, compress, convert, decompress,
};

use crate::{
    container::{Item, weights_file},
    files::{check_error, files},
};

/// The base of the tests: some matrices, a vector, a small tensor, and one of another dtype.
fn base() -> Vec<Item> {
    let mut items: Vec<Item> = (1..)
        .zip([&[600u64, 1000][..], &[300_001], &[64, 3, 5, 32], &[8, 8]])
        .map(|(seed, shape)| Item::normal(shape, seed))
        .collect();
    items.push(Item::raw("steps", Dtype::I64, &[9000], vec![7; 72_000]));
    items
}

/// A fine-tune of it, and a tensor that the base lacks.
fn tune() -> Vec<Item> {
    let mut items = base();
    for item in items.iter_mut().filter(|item| item.dtype.0 == Dtype::BF16.id()) {
        // Some weights become their neighbours.
        item.data.chunks_mut(34).for_each(|part| part[0] ^= 1);
    }
    items.push(Item { name: "new".into(), ..Item::normal(&[300, 200], 9) });
    items
}

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    /// Base and fine-tune as folders.
    fn new() -> Self {
        let files = Self { folder: tempfile::tempdir().unwrap() };
        files.write("base", &base());
        files.write("tune", &tune());
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, items: &[Item]) {
        fs::create_dir_all(self.path(name)).unwrap();
        fs::write(self.path(name).join("model.safetensors"), weights_file(items)).unwrap();
        fs::write(self.path(name).join("config.json"), "{}").unwrap();
    }

    fn compress(&self, source: &str, out: &str, options: &CompressOptions) -> Report {
        let source = Source::open(&self.path(source)).unwrap();
        let report = compress(&source, &self.path(out), options, &()).unwrap();
        let names = fs::read_dir(self.folder.path()).unwrap().map(|file| file.unwrap().file_name());
        assert!(names.into_iter().all(|name| !name.as_encoded_bytes().starts_with(b".df11-")));
        report
    }

    /// Compresses the fine-tune against a base.
    fn against(&self, base: &str, out: &str) -> Report {
        self.compress("tune", out, &CompressOptions::new().base(self.path(base)))
    }

    /// Restores a model, and compares it with the fine-tune.
    #[track_caller]
    fn check(&self, name: &str, options: &OpenOptions) {
        let model = options.open(self.path(name)).unwrap();
        assert_eq!(model.verify(Level::Full, &()).unwrap().unchecked, [""; 0]);
        let back = self.path("back");
        decompress(&model, &back, &DecompressOptions::new(), &()).unwrap();
        assert!(files(&back) == files(&self.path("tune")));
        fs::remove_dir_all(back).unwrap();
    }
}

fn encodings(path: &Path) -> Vec<Encoding> {
    let model = OpenOptions::new().open(path).unwrap();
    model.tensors().map(|tensor| tensor.encoding()).collect()
}

/// In the order of their names: `[300001]`, `[600, 1000]`, `[64, 3, 5, 32]`, `[8, 8]`, `new`,
/// `steps`.
const WANTED: [Encoding; 6] = [
    Encoding::Delta,
    Encoding::Delta,
    Encoding::Delta,
    Encoding::Raw,
    Encoding::Tile,
    Encoding::Raw,
];

#[test]
fn a_base_has_any_form() {
    let files = Files::new();
    files.compress("base", "tile.df11", &CompressOptions::new());
    files.compress("base", "gap", &CompressOptions::new().layout(Layout::gap()));
    files.compress("base", "raw.df11", &CompressOptions::new().layout(Layout::Raw));
    let mut outputs = Vec::new();
    for base in ["base", "tile.df11", "gap", "raw.df11"] {
        let report = files.against(base, "out.df11");
        assert_eq!((report.delta_tensors, report.coded_tensors), (3, 4), "{base}");
        assert!(8.0 * report.delta_bytes as f64 / (report.delta_weights as f64) < 0.5);
        assert_eq!(encodings(&files.path("out.df11")), WANTED, "{base}");
        files.check("out.df11", &OpenOptions::new());
        let model = df11::open(files.path("out.df11")).unwrap();
        assert!(model.needs_base());
        assert_eq!(model.base_name().as_deref(), Some(base));
        let bytes = |name: &str| {
            let tensor = model.tensor(name).unwrap();
            let shard = &model.shards()[0];
            let arrays = shard.directory().tensors[shard.directory().find_tensor(name).unwrap()];
            (tensor.stored_bytes(), arrays.parameters)
        };
        outputs.push(["[300001]", "[600, 1000]"].map(bytes));
        // Windows deletes nothing that is open.
        drop(model);
        fs::remove_file(files.path("out.df11")).unwrap();
        // Any other form of the same base serves too.
        files.against(base, "out.df11");
        for other in ["base", "tile.df11", "gap", "raw.df11"] {
            files.check("out.df11", &OpenOptions::new().base(files.path(other)));
        }
        fs::remove_file(files.path("out.df11")).unwrap();
    }
    assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn the_size_is_known_before() {
    let files = Files::new();
    let options = CompressOptions::new().base(files.path("base"));
    let source = Source::open(&files.path("tune")).unwrap();
    let out = files.path("out.df11");
    let estimate = df11::estimate(&source, &out, &options, &()).unwrap();
    let report = compress(&source, &out, &options, &()).unwrap();
    assert_eq!(format!("{:?}", estimate.report), format!("{report:?}"));
    assert_eq!(fs::metadata(&out).unwrap().len(), report.stored_bytes);
    let sources = df11::Sources::open(&files.path("tune"), None).unwrap();
    let assumed = df11::estimate_all(&sources, &out, &options, Some(2.6), &());
    check_error(assumed, "Parameter", "base");
}

#[test]
fn folders_and_layouts() {
    let files = Files::new();
    let options = CompressOptions::new().base(files.path("base")).layout(Layout::gap());
    files.compress("tune", "folder", &options);
    files.check("folder", &OpenOptions::new());
    let options = CompressOptions::new().base(files.path("base")).layout(Layout::Raw);
    assert_eq!(files.compress("tune", "raw.df11", &options).delta_tensors, 0);
    assert!(!df11::open(files.path("raw.df11")).unwrap().needs_base());
}

#[test]
fn the_number_of_threads_does_not_show() {
    let files = Files::new();
    let outputs = [1, 2, 8].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let name = "same.df11";
        pool.install(|| files.against("base", name));
        let bytes = fs::read(files.path(name)).unwrap();
        fs::remove_file(files.path(name)).unwrap();
        bytes
    });
    assert!(outputs[0] == outputs[1] && outputs[0] == outputs[2]);
}

#[test]
fn slices_are_those_of_the_whole() {
    let files = Files::new();
    files.against("base", "out.df11");
    let model = df11::open(files.path("out.df11")).unwrap();
    let tensor = model.tensor("[600, 1000]").unwrap();
    let all: Vec<half::bf16> = tensor.decode().unwrap();
    for rows in [0..1, 5..77, 290..310, 599..600] {
        let part: Vec<half::bf16> =
            tensor.slice(&[rows.clone(), 3..500]).unwrap().decode().unwrap();
        let wanted = rows.flat_map(|row| &all[row as usize * 1000 + 3..row as usize * 1000 + 500]);
        assert!(part.iter().map(|one| one.to_bits()).eq(wanted.map(|one| one.to_bits())));
    }
}

#[test]
fn a_shard_alone_finds_the_base() {
    let files = Files::new();
    let mut more = Item { name: "more".into(), ..Item::normal(&[300, 300], 5) };
    fs::write(files.path("base/more.safetensors"), weights_file(&[more.clone()])).unwrap();
    more.data[0] ^= 1;
    fs::write(files.path("tune/more.safetensors"), weights_file(&[more.clone()])).unwrap();
    files.against("base", "folder");
    let shard = df11::open(files.path("folder/more.df11")).unwrap();
    assert_eq!(shard.tensor("more").unwrap().encoding(), Encoding::Delta);
    assert!(shard.tensor("more").unwrap().decode::<u8>().unwrap() == more.data);
}

#[test]
fn without_its_base_a_model_names_it() {
    let files = Files::new();
    files.against("base", "out.df11");
    fs::rename(files.path("base"), files.path("moved")).unwrap();
    let model = df11::open(files.path("out.df11")).unwrap();
    let read = |name| model.tensor(name).unwrap().decode::<u8>();
    check_error(read("[600, 1000]"), "NoBase", "\"base\"");
    check_error(read("[600, 1000]"), "NoBase", "--base");
    assert_eq!(read("new").unwrap(), tune()[5].data);
    let found = model.verify(Level::Full, &()).unwrap();
    assert_eq!((found.unchecked.len(), found.tensors), (1, 3));
    assert!(found.unchecked[0].contains("\"base\""), "{:?}", found.unchecked);
    let back = files.path("back");
    check_error(decompress(&model, &back, &DecompressOptions::new(), &()), "NoBase", "\"base\"");
    assert!(!back.exists());
    files.check("out.df11", &OpenOptions::new().base(files.path("moved")));
}

#[test]
fn another_base_is_refused() {
    let files = Files::new();
    files.against("base", "out.df11");
    let mut other = base();
    other[0].data[10] ^= 1;
    files.write("other", &other);
    files.compress("other", "other.df11", &CompressOptions::new());
    let open = |name: &str| OpenOptions::new().base(files.path(name)).open(files.path("out.df11"));
    check_error(open("other.df11"), "NoBase", "other.df11");
    // The hash of a file is known when a tensor is read.
    let model = open("other").unwrap();
    let read = |name| model.tensor(name).unwrap().decode::<u8>();
    check_error(read("[600, 1000]"), "NoBase", "[600, 1000]");
    assert_eq!(read("[300001]").unwrap(), tune()[1].data);
    // The base itself changes.
    files.write("base", &other);
    let model = df11::open(files.path("out.df11")).unwrap();
    check_error(model.tensor("[600, 1000]").unwrap().decode::<u8>(), "NoBase", "[600, 1000]");
    check_error(OpenOptions::new().base(files.path("none")).open(files.path("out.df11")), "Io", "");
}

#[test]
fn a_converted_model_stands_alone() {
    let files = Files::new();
    files.against("base", "out.df11");
    let model = df11::open(files.path("out.df11")).unwrap();
    convert(&model, &files.path("alone.df11"), &CompressOptions::new(), &()).unwrap();
    drop(model);
    files.compress("tune", "wanted.df11", &CompressOptions::new());
    fs::remove_dir_all(files.path("base")).unwrap();
    let read = |name: &str| fs::read(files.path(name)).unwrap();
    assert!(read("alone.df11") == read("wanted.df11"));
}

#[test]
fn a_base_may_have_a_base() {
    let files = Files::new();
    files.against("base", "first.df11");
    let mut items = tune();
    items[0].data.chunks_mut(50).for_each(|part| part[0] ^= 1);
    files.write("tune", &items);
    files.against("first.df11", "second.df11");
    assert_eq!(encodings(&files.path("second.df11"))[..2], [Encoding::Delta; 2]);
    files.check("second.df11", &OpenOptions::new());
    fs::rename(files.path("base"), files.path("moved")).unwrap();
    let model = df11::open(files.path("second.df11")).unwrap();
    check_error(model.tensor("[600, 1000]").unwrap().decode::<u8>(), "NoBase", "\"base\"");
}

#[test]
fn a_far_fine_tune_is_stored_alone() {
    let files = Files::new();
    // The same weights at other places.
    let mut other = base().remove(0);
    let weights = other.data.as_chunks::<2>().0.to_vec();
    let place = |at: usize| weights[at * 7919 % weights.len()];
    other.data = (0..weights.len()).flat_map(place).collect();
    files.write("base", &[other]);
    for layout in [Layout::Tile, Layout::gap()] {
        let options = CompressOptions::new().base(files.path("base")).layout(layout);
        let report = files.compress("tune", "out.df11", &options);
        assert_eq!(report.delta_tensors, 0, "{layout:?}");
        files.compress("tune", "alone.df11", &CompressOptions::new().layout(layout));
        let stored = |name: &str| {
            let model = df11::open(files.path(name)).unwrap();
            model.tensor("[600, 1000]").unwrap().stored_bytes()
        };
        assert_eq!(stored("out.df11"), stored("alone.df11"));
        fs::remove_file(files.path("out.df11")).unwrap();
        fs::remove_file(files.path("alone.df11")).unwrap();
    }
}

#[test]
fn damaged_containers_are_noticed() {
    let files = Files::new();
    files.against("base", "out.df11");
    let bytes = fs::read(files.path("out.df11")).unwrap();
    for length in [0, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(files.path("cut.df11"), &bytes[..length]).unwrap();
        check_error(df11::open(files.path("cut.df11")), "Corrupt", "cut.df11");
    }
    let model = df11::open(files.path("out.df11")).unwrap();
    let directory = model.shards()[0].directory();
    for section in &directory.sections {
        let mut damaged = bytes.clone();
        damaged[section.offset.get() as usize + section.length.get() as usize / 2] ^= 1;
        fs::write(files.path("damaged.df11"), damaged).unwrap();
        let model = df11::open(files.path("damaged.df11")).unwrap();
        check_error(model.verify(Level::Full, &()), "Corrupt", "damaged.df11");
    }
}
