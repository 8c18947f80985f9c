//! Containers that every reader must accept: weights in `gap`, tensors stored raw, names, forms of
//! containers, limits that are just kept, and what later versions may add.

use df11::{
    Dtype,
    hazmat::{
        constants::{GAP_BYTES_PER_THREAD, GAP_THREADS_PER_BLOCK, NONE},
        format::records::SECTION_SKIPPABLE,
    },
};

use super::Vectors;
use crate::container::{
    File, Item, Model, Tensor, normal_weights, weights, with_header, with_length,
};

const GAP: (u32, u32) = (8, 64);

pub(super) fn make(to: &mut Vectors) {
    codes(to);
    threads(to);
    tensors(to);
    names(to);
    containers(to);
    shards(to);
    newer(to);
    limits(to);
}

/// A tensor of weights in the usual geometry.
fn gap(name: &str, shape: &[u64], weights: Vec<u8>) -> Item {
    Item::gap(name, shape, weights, GAP)
}

fn raw(name: &str, bytes: Vec<u8>) -> Item {
    Item::raw(name, Dtype::U8, &[bytes.len() as u64], bytes)
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 37 + at / 256) as u8).collect()
}

/// Exponents 100, 101, … with Fibonacci counts, which make one code longer than the other.
pub(super) fn fibonacci_weights(exponents: u8) -> Vec<u8> {
    let (mut a, mut b) = (1, 1);
    let mut flat = Vec::new();
    for exponent in 0..exponents {
        flat.extend(std::iter::repeat_n(100 + exponent, a));
        (a, b) = (b, a + b);
    }
    // A stride without a common divisor mixes them.
    let total = flat.len();
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

/// Every BF16 bit pattern once, in an order without a pattern.
pub(super) fn every_pattern() -> Vec<u8> {
    (0..=u16::MAX).flat_map(|word| word.wrapping_mul(40_503).to_le_bytes()).collect()
}

fn codes(to: &mut Vectors) {
    let two = weights((0..300).map(|at| if at % 3 == 0 { 0 } else { 255 }));
    to.items("all-patterns", &[Item::gap("w", &[256, 256], every_pattern(), (16, 256))]);
    to.items("single-exponent", &[gap("w", &[10, 60], weights(std::iter::repeat_n(127, 600)))]);
    to.items("two-exponents", &[gap("w", &[300], two)]);
    to.items("long-codes", &[gap("w", &[4180], fibonacci_weights(17))]);
    to.items("most-luts", &[gap("w", &[512], many_luts())]);
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

fn threads(to: &mut Vectors) {
    let equal = |count: usize| weights((0..count).map(|at| at as u8));
    let geometries = GAP_BYTES_PER_THREAD
        .into_iter()
        .flat_map(|bytes| GAP_THREADS_PER_BLOCK.map(|threads| (bytes, threads)))
        .map(|(bytes, threads)| {
            let data = normal_weights(300, u64::from(bytes * threads));
            Item::gap(&format!("w.{bytes}.{threads}"), &[30, 10], data, (bytes, threads))
        });
    to.items("one-weight", &[gap("w", &[1], weights([127]))]);
    to.items("partial-thread", &[gap("w", &[37], normal_weights(37, 1))]);
    to.items("one-thread-block", &[gap("w", &[512], equal(512))]);
    to.items("one-thread-more", &[gap("w", &[27, 19], equal(513))]);
    to.items("thread-blocks", &[gap("w", &[100, 160], normal_weights(16_000, 2))]);
    to.items("empty-thread-block", &[gap("w", &[4095], late_end())]);
    to.items("geometries", &geometries.collect::<Vec<_>>());
}

fn tensors(to: &mut Vectors) {
    let of_dtype =
        |&dtype: &Dtype| Item::raw(dtype.name(), dtype, &[2, 4], bytes(dtype.bits() as usize));
    let dtypes: Vec<Item> = Dtype::ALL.iter().map(of_dtype).collect();
    let empty = |name: &str, dtype, shape: &[u64]| Item::raw(name, dtype, shape, vec![]);
    let coded = gap("a.weight", &[20, 30], normal_weights(600, 3));
    let bias = Item::raw("b.bias", Dtype::F32, &[5], bytes(20));
    let none = empty("c.none", Dtype::BF16, &[0]);
    let rows = [
        Item::raw("f4", Dtype::F4, &[2, 3], bytes(3)),
        Item::raw("f6", Dtype::F6_E2M3, &[4, 5], bytes(15)),
    ];
    let scalars = [
        gap("coded", &[], weights([130])),
        Item::raw("raw", Dtype::BF16, &[], weights([131])),
        Item::raw("wide", Dtype::C64, &[], bytes(8)),
    ];
    let empties = [
        empty("a", Dtype::BF16, &[0]),
        raw("b", bytes(3)),
        empty("c", Dtype::F32, &[3, 0, 5]),
        empty("d", Dtype::F4, &[0, 1]),
        empty("e", Dtype::I64, &[0]).in_file("nothing.safetensors"),
    ];
    let eight = [
        gap("coded", &[2, 1, 3, 1, 2, 5, 1, 2], normal_weights(120, 4)),
        Item::raw("raw", Dtype::I16, &[1, 2, 1, 2, 1, 2, 1, 2], bytes(32)),
    ];
    let aliases = [
        coded.clone(),
        bias.clone(),
        none.clone(),
        coded.alias("A.weight"),
        coded.alias("z.weight").in_file("other.safetensors"),
        bias.alias("z.bias"),
        none.alias("z.none"),
    ];
    to.items("dtypes", &dtypes);
    to.items("sub-byte-rows", &rows);
    to.items("scalars", &scalars);
    to.items("empty-tensors", &empties);
    to.items("eight-dimensions", &eight);
    to.items("aliases", &aliases);
    to.items("fifteen-aliases", &[&[bias.clone()][..], &bias.aliases(15, "z.")].concat());
}

fn names(to: &mut Vectors) {
    let long = "n".repeat(4096);
    let raw = |(at, &name): (usize, &&str)| raw(name, bytes(3 + at)[at..].to_vec());
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
    let in_own_block = |item: Item| item.clone().in_block(&item.name);
    let alone: Vec<Item> = names.iter().enumerate().map(raw).map(in_own_block).collect();
    let order = ["a", "a.b", "B", "a-b", "ä", "z", "𐀀", "\u{ffff}"];
    let ordered: Vec<Item> = order.iter().enumerate().map(raw).collect();
    let items = [
        raw((0, &"x")).in_file("part/two/model.safetensors"),
        raw((1, &"y")).in_file("part.safetensors"),
        raw((2, &"z")).in_file("...safetensors"),
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
    to.items("names", &alone);
    to.items("name-order", &ordered);
    to.valid("paths", &Model::new(&items, side));
}

pub(super) fn smallest() -> Model {
    Model::new(&[raw("w", vec![1, 2, 3])], &[])
}

fn containers(to: &mut Vectors) {
    let coded = |name: &str, seed: u64| gap(name, &[10, 20], normal_weights(200, seed));
    let floats = |name: &str| Item::raw(name, Dtype::F32, &[4], bytes(16));
    let blocks = [
        coded("embed", 5).in_block("embed"),
        coded("layers.0.w", 6).in_block("layers.0"),
        floats("layers.0.b").in_block("layers.0"),
        coded("layers.1.w", 7).in_block("layers.1"),
        floats("layers.1.b").in_block("layers.1"),
    ];
    let one = [raw("x", bytes(3))];
    let interleaved = [coded("b", 8), coded("a", 9), coded("c", 10), raw("0", bytes(5))];
    to.items("blocks", &blocks);
    to.items("file-order", &interleaved);
    let side: [(&str, &[u8]); 2] = [("config.json", b"{}"), ("vocab.txt", b"a\nb\n")];
    to.valid("side-files", &Model::new(&one, &side));
    to.valid("empty-side-file", &Model::new(&one, &[("empty", b"")]));
    to.valid("side-files-only", &Model::new(&[], &[("README.md", b"# Nothing\n")]));
    to.valid("smallest", &smallest());
    to.items("two-chunks", &[raw("x", bytes(0x0010_0400)), raw("y", bytes(3))]);
    to.items("no-files", &[]);
    let mut make = |name: &str, side: &[(&str, &[u8])], edit: &dyn Fn(&mut Model)| {
        let mut model = Model::new(&one, side);
        edit(&mut model);
        to.valid(name, &model);
    };
    make("unused-block", &[], &|model| model.blocks.push(b"unused".to_vec()));
    make("side-files-beside", &side[1..], &|model| {
        let empty = File::beside("tokenizer/empty.txt", b"");
        model.files.extend([File::beside("config.json", b"{}"), empty]);
        model.identity = model.identity_of_files();
    });
    make("metadata", &[], &|model| {
        let long = "v".repeat(65_536);
        model.metadata = [
            ("example.com/empty", ""),
            ("example.long", &long),
            ("tool.ключ", "重み\nsecond line"),
            ("z", "plain"),
        ]
        .map(|(key, value)| (key.into(), value.into()))
        .into();
    });
    make("no-tensors", &[], &|model| {
        (model.tensors, model.blocks) = (vec![], vec![]);
        model.set_prefix(with_length(r#"{"__metadata__":{"format":"pt"}}"#));
    });
    headers(to);
}

/// All that JSON and safetensors allow, and the last of what readers must take.
fn headers(to: &mut Vectors) {
    let mut of = |name: &str, tensor: &str, bytes: Vec<u8>, json: &str| {
        let mut model = Model::new(&[raw(tensor, bytes)], &[]);
        model.set_prefix(with_length(json));
        to.valid(name, &model);
    };
    // White space, members in any order and such as no reader knows, escapes, and `__metadata__`
    // that is null.
    let json = concat!(
        "\t{ \"__metadata__\" : null ,\r\n \"\\u0061\\\"b\": {\"data_offsets\" : [ 0 ,3],\"more\":",
        "[{\"a\":[1.5e3,-0,true,null]}], \"shape\":[3],\n\"dtype\":\"U\\u0038\"}}\t\n"
    );
    of("header-text", "a\"b", bytes(3), json);
    // Arrays 98 deep within two objects, a surrogate pair, and the largest numbers.
    let (open, close) = ("[".repeat(98), "]".repeat(98));
    let json = format!(
        "{{\"\\ud83d\\uddDD\":{{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3],\
         \"deep\":{open}{close},\"numbers\":[1.7e308,-1.7E+308,1e-999,{}]}}}}",
        "9".repeat(308)
    );
    of("header-edges", "🗝", vec![1, 2, 3], &json);
}

/// Two shards of one model, each of which opens alone.
fn shards(to: &mut Vectors) {
    let part = |index: u64| {
        let item = gap(&format!("w{index}"), &[50], normal_weights(50, 11 + index));
        Model::new(&[item.in_file(&format!("model-{index}.safetensors"))], &[])
    };
    let mut parts = [part(0), part(1)];
    let mut both = parts[0].clone();
    both.files.push(parts[1].files[0].clone());
    for (part, index) in parts.iter_mut().zip(0..) {
        (part.shard, part.identity) = ((index, 2), both.identity_of_files());
        to.valid(&format!("shard-{}-of-2", index + 1), part);
    }
}

/// Additions that later versions may make.
fn newer(to: &mut Vectors) {
    let new = Item::raw("new", Dtype::BF16, &[4], bytes(8)).in_file("new.safetensors");
    let items = [raw("known", bytes(3)), new.clone(), new.alias("new.alias")];
    let mut model = Model::new(&items[..2], &[]);
    let built = model.build();
    let features = with_header(&built, |header| header.compatible_features = (1 << 63 | 1).into());
    to.valid_as("compatible-features", &model, features);
    let minor = with_header(&built, |header| header.version_minor = u16::MAX.into());
    to.valid_as("newer-minor", &model, minor);
    model.extra_sections =
        vec![(0, SECTION_SKIPPABLE, b"anything".to_vec()), (NONE, u32::MAX, vec![0xFF; 5000])];
    to.valid("unknown-section", &model);

    let mut unknown = |name: &str, items: &[Item], edit: &dyn Fn(&mut Tensor)| {
        let mut model = Model::new(items, &[]);
        edit(model.tensor("new"));
        to.valid(name, &model);
    };
    unknown("unknown-encoding", &items, &|tensor| {
        tensor.encoding = 77;
        tensor.parameters = [1, 2, 3, u64::MAX];
        tensor.arrays =
            vec![(5, vec![1, 2, 3]), (SECTION_SKIPPABLE + 9, vec![4; 300]), (5, vec![5])];
    });
    unknown("private-encoding", &items, &|tensor| tensor.encoding = 0x4000_0001);
    // Elements may have any size.
    let huge = Item { dtype: (99, "POSIT0".into()), shape: vec![1 << 50, 1 << 50], ..new.clone() };
    unknown(
        "unknown-dtype",
        &[raw("known", bytes(3)), huge.clone(), huge.alias("new.alias")],
        &|_| {},
    );
    // Without the dtype the meaning of an encoding is unknown.
    let new = Item { dtype: (99, "POSIT8".into()), ..raw("new", vec![4; 4]) };
    unknown("unknown-dtype-raw", &[raw("x", vec![1, 2, 3]), new], &|tensor| {
        tensor.parameters = [1, 2, 3, u64::MAX];
        tensor.arrays.push(tensor.arrays[0].clone());
    });
    // A reader that reserves the tensor's memory before it looks at the encoding aborts.
    let mut huge = items[..2].to_vec();
    (huge[1].shape, huge[1].length) = (vec![1 << 40, 1 << 17], 1 << 58);
    let mut model = Model::new(&huge, &[]);
    let tensor = model.tensor("new");
    tensor.encoding = 77;
    let (file, start) = (tensor.file as usize, tensor.file_offset);
    model.files[file].length = start + (1 << 58);
    model.identity = model.identity_of_files();
    to.valid("unknown-encoding-huge", &model);
    // 15 aliases each of two tensors that no reader decodes.
    let new = ["new.0", "new.1"].map(|name| raw(name, name.as_bytes()[..4].into()));
    let aliases = new.each_ref().map(|item| item.aliases(15, &format!("{}.", item.name)));
    let mut model =
        Model::new(&[&[raw("x", vec![1, 2, 3])][..], &new, &aliases.concat()].concat(), &[]);
    for name in ["new.0", "new.1"] {
        model.tensor(name).encoding = 77;
    }
    to.valid("unknown-aliases", &model);
}

/// 9999 files beside the container, whose paths name this many folders; one hash for all, so that
/// the vector stays small.
pub(super) fn many_files(folders: usize) -> Model {
    let mut model = Model::new(&[raw("x", vec![1, 2, 3])], &[]);
    let files = 9999;
    let path = |at: usize| {
        let inner = if at < folders - files { "f/x" } else { "x" };
        format!("{at:04}/{inner}")
    };
    model.files.extend((0..files).map(|at| File::unread(&path(at))));
    model.identity = model.identity_of_files();
    model
}

/// Limits that are just kept, and the characters next to the control characters.
fn limits(to: &mut Vectors) {
    to.valid("path-limits", &many_files(10_000));
    let items = [raw("x", vec![1, 2, 3]), raw("y", vec![9]).in_file("weights.df11")];
    let side: [(&str, &[u8]); 3] =
        [("model.df11", b"stored"), ("\u{a0}\u{ad}\u{2028}", b"no controls"), ("~ ", b"~")];
    to.valid("path-characters", &Model::new(&items, &side));
}
