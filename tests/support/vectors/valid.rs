//! Containers that every reader must accept.

use df11::{
    Dtype,
    hazmat::{
        constants::{GAP_BYTES_PER_THREAD, GAP_THREADS_PER_BLOCK, NONE},
        format::records::SECTION_SKIPPABLE,
    },
};

use super::{Vector, edges};
use crate::container::{File, Item, Model, Tensor, normal_weights, weights, with_header};

const GAP: (u32, u32) = (8, 64);

fn vector(name: &str, about: &str, items: &[Item]) -> Vector {
    whole(name, about, &Model::new(items, &[]))
}

fn whole(name: &str, about: &str, model: &Model) -> Vector {
    Vector::valid(name, about, model, model.build(), |_| false)
}

pub(super) fn vectors() -> Vec<Vector> {
    [codes(), threads(), tensors(), names(), containers(), newer(), edges::vectors()]
        .into_iter()
        .flatten()
        .collect()
}

/// Exponents 100, 101, … with Fibonacci counts, which make one code longer than the other.
pub(super) fn fibonacci_weights(exponents: u8) -> Vec<u8> {
    let (mut a, mut b) = (1, 1);
    let mut runs = Vec::new();
    for exponent in 0..exponents {
        runs.push((100 + exponent, a));
        (a, b) = (b, a + b);
    }
    let total: usize = runs.iter().map(|run| run.1).sum();
    let flat: Vec<u8> =
        runs.iter().flat_map(|&(exponent, count)| std::iter::repeat_n(exponent, count)).collect();
    // A stride without a common divisor mixes them.
    let stride = (total / 3..total).find(|stride| gcd(*stride, total) == 1).unwrap();
    weights((0..total).map(|at| flat[at * stride % total]))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Counts 256, 2, 1, 1, … give lengths 1, 8, 9, 9, …, and 128 LUTs.
pub(super) fn many_luts() -> Vec<u8> {
    let most = (0..=255u8).flat_map(|exponent| {
        std::iter::repeat_n(exponent, [256, 2, 1][usize::from(exponent.min(2))])
    });
    let ramp: Vec<u8> = most.collect();
    weights((0..512).map(|at| ramp[at * 197 % 512]))
}

fn codes() -> Vec<Vector> {
    let all: Vec<u8> =
        (0..=u16::MAX).flat_map(|word| word.wrapping_mul(40_503).to_le_bytes()).collect();
    vec![
        vector(
            "all-patterns",
            "every BF16 bit pattern once",
            &[Item::gap("w", &[256, 256], all, (16, 256))],
        ),
        vector(
            "single-exponent",
            "one exponent only: its code is the bit 0",
            &[Item::gap("w", &[10, 60], weights(std::iter::repeat_n(127, 600)), GAP)],
        ),
        vector(
            "two-exponents",
            "the smallest and the largest exponent, one bit each",
            &[Item::gap(
                "w",
                &[300],
                weights((0..300).map(|at| if at % 3 == 0 { 0 } else { 255 })),
                GAP,
            )],
        ),
        vector(
            "long-codes",
            "codes of all lengths from 1 to 16 bits",
            &[Item::gap("w", &[4180], fibonacci_weights(17), GAP)],
        ),
        vector(
            "most-luts",
            "127 prefixes of codes of 9 bits: 128 LUTs",
            &[Item::gap("w", &[512], many_luts(), GAP)],
        ),
    ]
}

/// Codes of 4095 bits, then one of two bits that starts in the first thread block and ends in the
/// second.
pub(super) fn late_end() -> Vec<u8> {
    weights((0..4095).map(|at| match at {
        4094 => 130,
        1000 => 131,
        _ => 120,
    }))
}

fn threads() -> Vec<Vector> {
    let equal = |count: usize| weights((0..count).map(|at| at as u8));
    let geometries: Vec<Item> = GAP_BYTES_PER_THREAD
        .into_iter()
        .flat_map(|bytes| GAP_THREADS_PER_BLOCK.map(|threads| (bytes, threads)))
        .map(|(bytes, threads)| {
            let data = normal_weights(300, u64::from(bytes * threads));
            Item::gap(&format!("w.{bytes}.{threads}"), &[30, 10], data, (bytes, threads))
        })
        .collect();
    vec![
        vector(
            "one-weight",
            "a tensor of one weight",
            &[Item::gap("w", &[1], weights([127]), GAP)],
        ),
        vector(
            "partial-thread",
            "the last thread ends within its bytes",
            &[Item::gap("w", &[37], normal_weights(37, 1), GAP)],
        ),
        vector(
            "one-thread-block",
            "512 codes of 8 bits: exactly one thread block of 64 threads of 8 bytes",
            &[Item::gap("w", &[512], equal(512), GAP)],
        ),
        vector(
            "one-thread-more",
            "one weight more than a thread block holds",
            &[Item::gap("w", &[27, 19], equal(513), GAP)],
        ),
        vector(
            "thread-blocks",
            "many thread blocks",
            &[Item::gap("w", &[100, 160], normal_weights(16_000, 2), GAP)],
        ),
        vector(
            "empty-thread-block",
            "a last thread block without elements: it holds the end of a code only",
            &[Item::gap("w", &[4095], late_end(), GAP)],
        ),
        vector("geometries", "each bytes_per_thread with each threads_per_block", &geometries),
    ]
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 37 + at / 256) as u8).collect()
}

fn tensors() -> Vec<Vector> {
    let dtypes: Vec<Item> = Dtype::ALL
        .iter()
        .map(|dtype| {
            let data = bytes((8 * dtype.bits() / 8) as usize);
            Item::raw(dtype.name(), *dtype, &[2, 4], data)
        })
        .collect();
    let empty = |name: &str, dtype, shape: &[u64]| Item::raw(name, dtype, shape, vec![]);
    let coded = Item::gap("a.weight", &[20, 30], normal_weights(600, 3), GAP);
    let raw = Item::raw("b.bias", Dtype::F32, &[5], bytes(20));
    let none = empty("c.none", Dtype::BF16, &[0]);
    let many: Vec<Item> = (0..15).map(|at| raw.alias(&format!("z.{at:02}"))).collect();
    vec![
        vector("dtypes", "a tensor of every dtype, stored raw", &dtypes),
        vector(
            "sub-byte-rows",
            "elements of 4 and 6 bits whose rows do not end at a byte",
            &[
                Item::raw("f4", Dtype::F4, &[2, 3], bytes(3)),
                Item::raw("f6", Dtype::F6_E2M3, &[4, 5], bytes(15)),
            ],
        ),
        vector(
            "scalars",
            "tensors without dimensions have one element",
            &[
                Item::gap("coded", &[], weights([130]), GAP),
                Item::raw("raw", Dtype::BF16, &[], weights([131])),
                Item::raw("wide", Dtype::C64, &[], bytes(8)),
            ],
        ),
        vector(
            "empty-tensors",
            "tensors without elements, in a file with others and in one with nothing else",
            &[
                empty("a", Dtype::BF16, &[0]),
                Item::raw("b", Dtype::U8, &[3], bytes(3)),
                empty("c", Dtype::F32, &[3, 0, 5]),
                empty("d", Dtype::F4, &[0, 1]),
                empty("e", Dtype::I64, &[0]).in_file("nothing.safetensors"),
            ],
        ),
        vector(
            "eight-dimensions",
            "as many dimensions as there may be",
            &[
                Item::gap("coded", &[2, 1, 3, 1, 2, 5, 1, 2], normal_weights(120, 4), GAP),
                Item::raw("raw", Dtype::I16, &[1, 2, 1, 2, 1, 2, 1, 2], bytes(32)),
            ],
        ),
        vector(
            "aliases",
            "aliases of coded, raw and empty tensors, before and after their targets, one in \
            another file",
            &[
                coded.clone(),
                raw.clone(),
                none.clone(),
                coded.alias("A.weight"),
                coded.alias("z.weight").in_file("other.safetensors"),
                raw.alias("z.bias"),
                none.alias("z.none"),
            ],
        ),
        vector(
            "fifteen-aliases",
            "as many aliases of one tensor as there may be",
            &[std::slice::from_ref(&raw), &many[..]].concat(),
        ),
    ]
}

fn names() -> Vec<Vector> {
    let long = "n".repeat(4096);
    let raw =
        |name: &str, at: usize| Item::raw(name, Dtype::U8, &[3], bytes(3 + at)[at..].to_vec());
    let names = [
        "../../etc/passwd",
        "/",
        ".",
        "a\nb\u{1}",
        "ключ.重み.🗝",
        " ",
        "C:\\x",
        "\u{7f}\u{85}",
        "\"quoted\\\"",
        &long,
    ];
    let tensors: Vec<Item> =
        names.iter().enumerate().map(|(at, name)| raw(name, at).in_block(name)).collect();
    let order = ["a", "a.b", "B", "a-b", "ä", "z", "𐀀", "\u{ffff}"];
    let ordered: Vec<Item> = order.iter().enumerate().map(|(at, name)| raw(name, at)).collect();
    let items = [
        raw("x", 0).in_file("part/two/model.safetensors"),
        raw("y", 1).in_file("part.safetensors"),
        raw("z", 2).in_file("...safetensors"),
    ];
    let mut deep = vec!["d".repeat(255); 15];
    deep.extend(["e".repeat(254), "x".into()]);
    let deep = deep.join("/");
    let components = ["c"; 32].join("/");
    let side: &[(&str, &[u8])] = &[
        ("config.json", b"{}\n"),
        ("tokenizer/ключ.txt", b"x"),
        (".hidden", b"\0"),
        (&deep, b"deep"),
        (&components, b"many"),
    ];
    vec![
        vector(
            "names",
            "any text without NUL is a name, up to 4096 bytes; names are no paths",
            &tensors,
        ),
        vector("name-order", "names ascend by their UTF-8 bytes, unlike UTF-16", &ordered),
        whole(
            "paths",
            "files in folders, a path of 4096 bytes with components of 255, and one of 32 \
            components",
            &Model::new(&items, side),
        ),
    ]
}

fn containers() -> Vec<Vector> {
    let coded = |name: &str, seed: u64| Item::gap(name, &[10, 20], normal_weights(200, seed), GAP);
    let blocks = [
        coded("embed", 5).in_block("embed"),
        coded("layers.0.w", 6).in_block("layers.0"),
        Item::raw("layers.0.b", Dtype::F32, &[4], bytes(16)).in_block("layers.0"),
        coded("layers.1.w", 7).in_block("layers.1"),
        Item::raw("layers.1.b", Dtype::F32, &[4], bytes(16)).in_block("layers.1"),
    ];
    let one = [Item::raw("x", Dtype::U8, &[3], bytes(3))];
    let mut interleaved = vec![coded("b", 8), coded("a", 9), coded("c", 10)];
    interleaved.push(Item::raw("0", Dtype::U8, &[5], bytes(5)));
    let mut unused = Model::new(&one, &[]);
    unused.blocks.push(b"unused".to_vec());
    let chunks = [
        Item::raw("x", Dtype::U8, &[0x0010_0400], bytes(0x0010_0400)),
        Item::raw("y", Dtype::U8, &[3], bytes(3)),
    ];
    let mut vectors = vec![
        vector("blocks", "several blocks, each with sections of its own", &blocks),
        vector("file-order", "tensors in the file in another order than their names", &interleaved),
        whole(
            "side-files",
            "weights and side files",
            &Model::new(&one, &[("config.json", b"{}"), ("vocab.txt", b"a\nb\n")]),
        ),
        whole(
            "empty-side-file",
            "a side file without bytes has no array",
            &Model::new(&one, &[("empty", b"")]),
        ),
        whole(
            "side-files-beside",
            "side files that lie beside the container, and one that is stored",
            &beside(&one),
        ),
        whole(
            "metadata",
            "keys and values for runtimes, one value empty, one of many lines",
            &metadata(&one),
        ),
        whole("smallest", "the smallest container of a tensor, which format.md shows", &smallest()),
        whole("header-text", "a header with all that JSON and safetensors allow", &header_text()),
        whole(
            "side-files-only",
            "no weights file",
            &Model::new(&[], &[("README.md", b"# Nothing\n")]),
        ),
        vector("two-chunks", "a section of more than one checksum chunk", &chunks),
        whole("unused-block", "a block without tensors and sections", &unused),
        whole("no-files", "no files, no blocks, no sections", &Model::new(&[], &[])),
        whole("no-tensors", "a weights file whose header is {}", &no_tensors()),
    ];
    vectors.extend(shards());
    vectors
}

fn beside(items: &[Item]) -> Model {
    let mut model = Model::new(items, &[("vocab.txt", b"a\nb\n")]);
    model
        .files
        .extend([File::beside("config.json", b"{}"), File::beside("tokenizer/empty.txt", b"")]);
    model.identity = model.identity_of_files();
    model
}

fn metadata(items: &[Item]) -> Model {
    let mut model = Model::new(items, &[]);
    let long = "v".repeat(65_536);
    let entries: [(&str, &str); 4] = [
        ("example.com/empty", ""),
        ("example.long", &long),
        ("tool.ключ", "重み\nsecond line"),
        ("z", "plain"),
    ];
    model.metadata = entries.map(|(key, value)| (key.into(), value.into())).into();
    model
}

pub(crate) fn smallest() -> Model {
    Model::new(&[Item::raw("w", Dtype::U8, &[3], vec![1, 2, 3])], &[])
}

/// White space, members in any order and such as no reader knows, escapes, and `__metadata__` that
/// is null.
fn header_text() -> Model {
    let mut model = Model::new(&[Item::raw("a\"b", Dtype::U8, &[3], bytes(3))], &[]);
    let json = concat!(
        "\t{ \"__metadata__\" : null ,\r\n \"\\u0061\\\"b\": {\"data_offsets\" : [ 0 ,3],\"more\":",
        "[{\"a\":[1.5e3,-0,true,null]}], \"shape\":[3],\n\"dtype\":\"U\\u0038\"}}\t\n"
    );
    let before = model.files[0].arrays[0].1.len() as u64;
    let prefix = crate::container::with_length(json);
    model.tensors[0].file_offset = model.tensors[0].file_offset + prefix.len() as u64 - before;
    model.files[0].arrays[0].1 = prefix;
    model.refresh();
    model
}

fn no_tensors() -> Model {
    let mut model = Model::new(&[Item::raw("x", Dtype::U8, &[0], vec![])], &[]);
    (model.tensors, model.blocks) = (vec![], vec![]);
    model.files[0].arrays[0].1 =
        crate::container::with_length(r#"{"__metadata__":{"format":"pt"}}"#);
    model.refresh();
    model
}

/// Two shards of one model, each of which opens alone.
fn shards() -> Vec<Vector> {
    let part = |index: u64| {
        let item = Item::gap(&format!("w{index}"), &[50], normal_weights(50, 11 + index), GAP);
        Model::new(&[item.in_file(&format!("model-{index}.safetensors"))], &[])
    };
    let mut parts = [part(0), part(1)];
    let mut both = parts[0].clone();
    both.files.push(parts[1].files[0].clone());
    let identity = both.identity_of_files();
    for (index, part) in parts.iter_mut().enumerate() {
        part.shard = (index as u64, 2);
        part.identity = identity;
    }
    let [first, second] = &parts;
    vec![
        whole("shard-1-of-2", "a shard opens alone", first),
        whole("shard-2-of-2", "the shard that goes with the other", second),
    ]
}

/// What later versions may add.
fn newer() -> Vec<Vector> {
    let items = [
        Item::raw("known", Dtype::U8, &[3], bytes(3)),
        Item::raw("new", Dtype::BF16, &[4], bytes(8)).in_file("new.safetensors"),
    ];
    let model = Model::new(&items, &[]);
    let features =
        with_header(&model.build(), |header| header.compatible_features = (1 << 63 | 1).into());
    let minor = with_header(&model.build(), |header| header.version_minor = u16::MAX.into());
    let mut skippable = model.clone();
    skippable.extra_sections =
        vec![(0, SECTION_SKIPPABLE, b"anything".to_vec()), (NONE, u32::MAX, vec![0xFF; 5000])];
    let none = |_: &Tensor| false;
    let is_new = |tensor: &Tensor| tensor.name.starts_with(b"new");
    let mut vectors = vec![
        Vector::valid(
            "compatible-features",
            "features that a reader may ignore",
            &model,
            features,
            none,
        ),
        Vector::valid("newer-minor", "a later minor version", &model, minor, none),
        whole("unknown-section", "sections of kinds that a reader skips", &skippable),
    ];
    let mut unknown = |name: &str, about: &str, edit: &dyn Fn(&mut Tensor)| {
        let mut items = items.to_vec();
        items.push(items[1].alias("new.alias"));
        let mut model = Model::new(&items, &[]);
        edit(model.tensor("new"));
        let bytes = model.build();
        vectors.push(Vector::valid(name, about, &model, bytes, is_new));
    };
    unknown(
        "unknown-encoding",
        "an encoding of a later version, in sections known and unknown, and an alias of it",
        &|tensor| {
            tensor.encoding = 77;
            tensor.parameters = [1, 2, 3, u64::MAX];
            tensor.arrays =
                vec![(5, vec![1, 2, 3]), (SECTION_SKIPPABLE + 9, vec![4; 300]), (5, vec![5])];
        },
    );
    unknown("private-encoding", "an encoding for private use, and an alias of it", &|tensor| {
        tensor.encoding = 0x4000_0001;
    });
    vectors.push(unknown_huge(&items));
    vectors.push(unknown_dtype(&items));
    vectors
}

/// A reader that reserves the tensor's memory before it looks at the encoding aborts.
fn unknown_huge(items: &[Item]) -> Vector {
    let mut items = items.to_vec();
    (items[1].shape, items[1].length) = (vec![1 << 40, 1 << 17], 1 << 58);
    let mut model = Model::new(&items, &[]);
    let tensor = model.tensor("new");
    tensor.encoding = 77;
    let file = tensor.file as usize;
    model.files[file].length = start_of(&model, "new") + (1 << 58);
    model.identity = model.identity_of_files();
    let about = "an unknown encoding that makes 2^58 bytes of eight";
    Vector::valid("unknown-encoding-huge", about, &model, model.build(), |tensor| {
        tensor.name == b"new"
    })
}

fn start_of(model: &Model, name: &str) -> u64 {
    model.tensors.iter().find(|tensor| tensor.name == name.as_bytes()).unwrap().file_offset
}

fn unknown_dtype(items: &[Item]) -> Vector {
    let mut items = items.to_vec();
    items[1].dtype = (99, "POSIT0".into());
    items[1].shape = vec![1 << 50, 1 << 50];
    items.push(items[1].alias("new.alias"));
    let model = Model::new(&items, &[]);
    let about = "a dtype of a later version, whose elements may have any size, and an alias of it";
    Vector::valid("unknown-dtype", about, &model, model.build(), |tensor| {
        tensor.name.starts_with(b"new")
    })
}
