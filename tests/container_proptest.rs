//! Any model goes in and comes out, byte for byte: alone and as a folder, on any number of threads.

#[path = "support/container.rs"]
mod container;

use std::{collections::BTreeMap, fs, path::Path};

use container::{Item, normal_weights, prefix};
use df11::{
    CompressOptions, DecompressOptions, Dtype, Layout, Level, Source, compress, convert, decompress,
};
use proptest::{collection::vec, prelude::*, sample::select};

#[derive(Clone, Debug)]
struct Case {
    items: Vec<Item>,
    side: Vec<(String, Vec<u8>)>,
    single: bool,
    threads: usize,
    layout: Layout,
    /// The layout of a container in between.
    other: Layout,
}

/// What the bytes of a tensor look like.
#[derive(Clone, Copy, Debug)]
enum Content {
    Normal,
    OneExponent,
    Noise,
    /// The same for every tensor of this length, so that some are tied.
    Tied,
}

fn content(kind: Content, length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = match kind {
        Content::Normal => normal_weights(length.div_ceil(2), seed),
        Content::Tied => normal_weights(length.div_ceil(2), 1),
        Content::OneExponent => container::weights(std::iter::repeat_n(121, length.div_ceil(2))),
        Content::Noise => {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&seed.to_le_bytes());
            let mut bytes = vec![0; length];
            hasher.finalize_xof().fill(&mut bytes);
            bytes
        }
    };
    bytes.truncate(length);
    bytes
}

fn shape() -> impl Strategy<Value = Vec<u64>> {
    prop_oneof![
        8 => vec(prop_oneof![9 => 1..40u64, 1 => Just(0)], 0..4),
        // Enough rows and columns for tiles of 32 rows.
        2 => (1..200u64, 16..60u64).prop_map(|(rows, columns)| vec![rows, 8 * columns]),
        // Large enough for several pieces and for an alias.
        1 => (200..300u64, 150..300u64).prop_map(|(rows, columns)| vec![rows, columns]),
    ]
}

fn item() -> impl Strategy<Value = Item> {
    let kind = select(vec![Content::Normal, Content::OneExponent, Content::Noise, Content::Tied]);
    let dtype = prop_oneof![3 => Just(Dtype::BF16), 1 => select(Dtype::ALL.to_vec())];
    let name = prop_oneof![
        (0..3usize, select(vec!["q", "k", "norm"]))
            .prop_map(|(layer, part)| format!("layers.{layer}.{part}.weight")),
        "[a-zé./\\\\\"\u{1} ]{1,12}",
    ];
    (name, dtype, shape(), kind, any::<u64>(), 0..3usize).prop_map(
        |(name, dtype, mut shape, kind, seed, file)| {
            if let (Some(last), false) = (shape.last_mut(), dtype.bits() % 8 == 0) {
                *last = last.next_multiple_of(4);
            }
            let dtype = if shape.is_empty() && dtype.bits() % 8 != 0 { Dtype::U8 } else { dtype };
            let length = dtype.bytes(&shape).unwrap() as usize;
            let file = ["model.safetensors", "part/one.safetensors", "z.safetensors"][file];
            Item::raw(&name, dtype, &shape, content(kind, length, seed)).in_file(file)
        },
    )
}

fn layout() -> impl Strategy<Value = Layout> {
    let gap = |bytes| Layout::Gap(df11::hazmat::gap::Geometry::new(bytes, 64).unwrap());
    prop_oneof![
        2 => select(vec![8, 16, 32, 64]).prop_map(gap),
        3 => Just(Layout::Tile),
        1 => Just(Layout::Raw),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let side = vec(("[a-z]{1,6}\\.json", vec(any::<u8>(), 0..300)), 0..3);
    (vec(item(), 1..8), side, any::<bool>(), 1..5usize, layout(), layout()).prop_map(
        |(items, side, single, threads, layout, other)| {
            let by_name: BTreeMap<String, Item> =
                items.into_iter().map(|item| (item.name.clone(), item)).collect();
            Case { items: by_name.into_values().collect(), side, single, threads, layout, other }
        },
    )
}

/// Writes the model as a Hugging Face folder; returns its files.
fn write(case: &Case, folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files: BTreeMap<String, Vec<u8>> = case.side.iter().cloned().collect();
    for item in &case.items {
        let of_file = || case.items.iter().filter(|other| other.file == item.file);
        let mut content = prefix(of_file());
        of_file().for_each(|item| content.extend(&item.data));
        files.insert(item.file.clone(), content);
    }
    for (path, content) in &files {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    files
}

fn check_tensor(model: &df11::Model, item: &Item) {
    let tensor = model.tensor(&item.name).unwrap();
    assert_eq!(tensor.shape(), item.shape);
    assert!(tensor.decode::<u8>().unwrap() == item.data, "{:?}", item.name);
    let rows = item.shape.first().copied().unwrap_or(1);
    if rows == 0 || !(item.data.len() as u64).is_multiple_of(rows) {
        return;
    }
    let row = item.data.len() as u64 / rows;
    for range in [0..1, rows - 1..rows, rows / 3..rows, rows / 2..rows / 2] {
        let mut out = vec![0xAA; ((range.end - range.start) * row) as usize];
        tensor.slice(std::slice::from_ref(&range)).unwrap().decode_into(&mut out).unwrap();
        assert!(
            out == item.data[(range.start * row) as usize..(range.end * row) as usize],
            "rows {range:?}"
        );
    }
}

fn check(case: &Case) {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    let files = write(case, &source);
    let out = folder.path().join(if case.single { "model.df11" } else { "model" });
    let options = CompressOptions::new().layout(case.layout);
    compress(&Source::open(&source).unwrap(), &out, &options, &()).unwrap();
    let model = df11::open(&out).unwrap();
    assert!(model.verify(Level::Full, &()).unwrap().unchecked.is_empty());
    assert_eq!(model.tensors().count(), case.items.len());
    case.items.iter().for_each(|item| check_tensor(&model, item));
    for block in model.blocks() {
        let layout = block.layout().unwrap();
        let mut buffer = vec![0xAA; layout.bytes as usize];
        block.decode_into(&mut buffer).unwrap();
        for (tensor, range) in block.tensors().zip(layout.tensors) {
            let item = case.items.iter().find(|item| item.name == tensor.name()).unwrap();
            assert_eq!(range.start % 256, 0);
            assert!(buffer[range.start as usize..range.end as usize] == item.data);
        }
    }
    convert_there_and_back(case, &model, folder.path(), &out);
    let restored = folder.path().join("restored");
    decompress(&model, &restored, &DecompressOptions::default(), &()).unwrap();
    for (path, content) in files {
        assert!(fs::read(restored.join(&path)).unwrap() == content, "{path}");
    }
}

/// Through the other layout, and the other form, to the same bytes.
fn convert_there_and_back(case: &Case, model: &df11::Model, folder: &Path, original: &Path) {
    let (there, back) = if case.single { ("there", "back.df11") } else { ("there.df11", "back") };
    let (there, back) = (folder.join(there), folder.join(back));
    let options = CompressOptions::new().layout(case.other);
    convert(model, &there, &options, &()).unwrap();
    let options = options.layout(case.layout);
    convert(&df11::open(&there).unwrap(), &back, &options, &()).unwrap();
    let containers: Vec<String> = model
        .shards()
        .iter()
        .map(|shard| shard.path().strip_prefix(original).unwrap().to_str().unwrap().to_owned())
        .collect();
    for path in
        containers.iter().chain(case.side.iter().map(|(path, _)| path).filter(|_| !case.single))
    {
        let at = |root: &Path| if path.is_empty() { root.to_owned() } else { root.join(path) };
        assert!(fs::read(at(original)).unwrap() == fs::read(at(&back)).unwrap(), "{path}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_model_comes_back(case in case()) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(case.threads).build().unwrap();
        pool.install(|| check(&case));
    }
}
