//! Section 7: prefixes of weights files that are no safetensors headers, or disagree with the
//! directory. All are found by verification at the latest.

use df11::Dtype;

use super::{Edits, Vectors};
use crate::container::{Item, Model, Tensor, prefix, with_length};

pub(super) fn make(to: &mut Vectors) {
    places(to);
    disagreements(to);
    neighbours(to);
    entries(to);
    texts(to);
    members(to);
}

/// Two tensors of four bytes, and one without any.
fn items() -> Vec<Item> {
    vec![
        Item::raw("a", Dtype::U8, &[4], vec![1, 2, 3, 4]),
        Item::raw("b", Dtype::U8, &[4], vec![5, 6, 7, 8]),
        Item::raw("none", Dtype::U8, &[0], vec![]),
    ]
}

fn places(to: &mut Vectors) {
    let base = Model::new(&items(), &[]);
    to.of(&base).directories(&[
        ("tensors-overlap", |d| d.tensors[1].file_offset -= 1),
        ("tensor-in-prefix", |d| d.tensors[0].file_offset -= 1),
        ("empty-tensor-in-prefix", |d| d.tensors[2].file_offset -= 9),
        ("empty-tensor-inside", |d| d.tensors[2].file_offset -= 6),
    ]);
    to.of(&base).models(&[
        ("tensors-leave-hole", |model| {
            model.files[0].length += 1;
            model.tensors[1].file_offset += 1;
            model.identity = model.identity_of_files();
        }),
        ("tensors-end-early", |model| {
            model.files[0].length = 1 << 62;
            model.identity = model.identity_of_files();
        }),
        ("tensors-swapped", |model| {
            let [first, second] = [0, 1].map(|at| model.tensors[at].file_offset);
            (model.tensors[0].file_offset, model.tensors[1].file_offset) = (second, first);
            model.refresh();
        }),
    ]);
}

/// The directory of one model, the prefix of another; hashes and identity fit.
fn disagreements(to: &mut Vectors) {
    let mut with = |name: &str, prefix: Vec<u8>| {
        let mut model = Model::new(&items(), &[]);
        model.set_prefix(prefix);
        to.invalid(&format!("prefix-{name}"), model.build());
    };
    let edits: Edits<'_, Vec<Item>> = &[
        ("name", |items| items[1].name = "B".into()),
        ("dtype", |items| items[1].dtype.1 = "I8".into()),
        ("shape", |items| items[1].shape = vec![2, 2]),
        ("order", |items| items.swap(0, 1)),
        ("tensor-missing", |items| drop(items.pop())),
        ("tensor-more", |items| items.push(Item::raw("more", Dtype::U8, &[0], vec![]))),
    ];
    for (name, edit) in edits {
        let mut items = items();
        edit(&mut items);
        with(name, prefix(items.iter()));
    }
    let whole = prefix(items().iter());
    let json = std::str::from_utf8(&whole[8..]).unwrap().trim_end();
    let again = r#","a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    with("duplicate-key", with_length(&(json.strip_suffix('}').unwrap().to_owned() + again)));
    let mut short = whole.clone();
    short[0] -= 8;
    with("length", short);
    with("no-json", with_length("{\"a\":"));
    with("empty", vec![0; 4]);
}

/// Headers of files in which one tensor is Unsupported: the others must be compared all the same.
fn neighbours(to: &mut Vectors) {
    let items = [("a", vec![1, 2, 3, 4]), ("b", vec![5, 6, 7, 8]), ("c", vec![9; 4])]
        .map(|(name, bytes)| Item::raw(name, Dtype::U8, &[4], bytes));
    // The header of one model, in which `b` has this dtype, and the directory of another.
    let mut with = |name: &str, dtype: &str, header: fn(&mut [Item]), newer: fn(&mut Tensor)| {
        let (mut model, mut others) = (Model::new(&items, &[]), items.clone());
        others[1].dtype.1 = dtype.into();
        header(&mut others);
        newer(model.tensor("b"));
        model.set_prefix(prefix(others.iter()));
        to.invalid(name, model.build());
    };
    let other: fn(&mut [Item]) = |items| items[2].dtype.1 = "I8".into();
    let unknown: fn(&mut Tensor) = |tensor| tensor.dtype = 99;
    with("neighbour-of-unknown-encoding", "U8", other, |tensor| tensor.encoding = 77);
    with("neighbour-of-unknown-dtype", "POSIT8", other, unknown);
    with("neighbour-name", "POSIT8", |items| items[2].name = "C".into(), unknown);
    with("unknown-dtype-named", "U8", |_| {}, unknown);
    with("known-dtype-unnamed", "POSIT8", |_| {}, |_| {});
    with("unknown-dtype-shape", "POSIT8", |items| items[1].shape = vec![2, 2], unknown);
    with("unknown-dtype-ends-early", "POSIT8", |items| items[1].length = 3, unknown);
    with(
        "unknown-dtype-offset",
        "POSIT8",
        |_| {},
        |tensor| {
            tensor.dtype = 99;
            tensor.file_offset += 1;
        },
    );
}

/// A file of one tensor, with this before its bytes; hashes and identity fit.
fn file(shape: &[u64], bytes: Vec<u8>, prefix: Vec<u8>) -> Vec<u8> {
    let mut model = Model::new(&[Item::raw("a", Dtype::U8, shape, bytes)], &[]);
    model.set_prefix(prefix);
    model.build()
}

/// A file whose header is this, without padding.
fn header(json: &[u8]) -> Vec<u8> {
    let prefix = [&(json.len() as u64).to_le_bytes(), json].concat();
    file(&[4], vec![1, 2, 3, 4], prefix)
}

const GOOD: &str = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;

/// JSON of another shape than section 7 wants: entries and their members.
fn entries(to: &mut Vectors) {
    let mut entry = |name: &str, entry: &str| {
        to.invalid(&format!("header-{name}"), header(format!(r#"{{"a":{entry}}}"#).as_bytes()));
    };
    entry("entry-list", r#"["U8",[4],[0,4]]"#);
    entry("member-missing", r#"{"dtype":"U8","data_offsets":[0,4]}"#);
    entry("member-twice", r#"{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}"#);
    let u8 = r#""U8""#;
    for (name, [dtype, shape, offsets], more) in [
        ("dtype-object", [r#"{"U8":null}"#, "[4]", "[0,4]"], ""),
        ("dtype-case", [r#""u8""#, "[4]", "[0,4]"], ""),
        ("shape-fraction", [u8, "[4.0]", "[0,4]"], ""),
        ("shape-exponent", [u8, "[4e0]", "[0,4]"], ""),
        ("shape-text", [u8, r#"["4"]"#, "[0,4]"], ""),
        ("shape-huge", [u8, "[18446744073709551616]", "[0,4]"], ""),
        ("offset-minus-zero", [u8, "[4]", "[-0,4]"], ""),
        ("offset-true", [u8, "[4]", "[false,4]"], ""),
        ("offsets-three", [u8, "[4]", "[0,4,4]"], ""),
        ("key-twice-escaped", [u8, "[4]", "[0,4]"], r#","x":{"b":1,"\u0062":2}"#),
        ("nan", [u8, "[4]", "[0,4]"], r#","x":NaN"#),
    ] {
        let members = format!(r#""dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}"#);
        entry(name, &format!("{{{members}}}"));
    }
}

/// Texts that are no JSON object, and what may not stand beside entries.
fn texts(to: &mut Vectors) {
    // The good header with this before its first member.
    for (name, text) in [
        ("metadata-number", r#"{"__metadata__":{"x":1},"#),
        ("metadata-list", r#"{"__metadata__":[],"#),
        ("surrogate", r#"{"__metadata__":{"x":"\ud800"},"#),
        ("control", "{\"__metadata__\":{\"x\":\"\t\"},"),
    ] {
        to.invalid(&format!("header-{name}"), header(GOOD.replacen('{', text, 1).as_bytes()));
    }
    for (name, text) in [
        ("list", "[]".to_owned()),
        ("two-values", format!("{GOOD} {{}}")),
        ("comma", GOOD.replace("}}", "},}")),
        ("zero-padding", format!("{GOOD}\0\0\0")),
        ("byte-order-mark", format!("\u{feff}{GOOD}")),
    ] {
        to.invalid(&format!("header-{name}"), header(text.as_bytes()));
    }
    let text = GOOD.replacen('{', r#"{"__metadata__":{"x":"?"},"#, 1);
    let mut bytes = text.into_bytes();
    *bytes.iter_mut().find(|byte| **byte == b'?').unwrap() = 0xFF;
    to.invalid("header-not-utf8", header(&bytes));
}

/// Members that mean nothing to a reader and are no JSON, or too deep, or too large.
fn members(to: &mut Vectors) {
    let mut of = |name: &str, shape: &[u64], json: &str| {
        let bytes = vec![7; shape.iter().product::<u64>() as usize];
        to.invalid(&format!("header-{name}"), file(shape, bytes, with_length(json)));
    };
    for (name, json) in [
        ("leading-zero", r#"{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}"#),
        ("no-comma", r#"{"a":{"dtype":"U8" "shape":[4],"data_offsets":[0,4]}}"#),
        ("no-colon", r#"{"a":{"dtype" "U8","shape":[4],"data_offsets":[0,4]}}"#),
        ("no-end", r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":"y}}"#),
    ] {
        of(name, &[4], json);
    }
    // Within two objects.
    let deep = format!("{}{}", "[".repeat(99), "]".repeat(99));
    for (name, value) in [
        ("leading-zeros", "-007"),
        ("plus", "+1"),
        ("no-fraction", "1."),
        ("no-integer", ".5"),
        ("no-exponent", "1e+"),
        ("escape", r#""\x41""#),
        ("escape-short", r#""\u041""#),
        ("surrogates-swapped", r#""\uddDD\ud83d""#),
        ("surrogate-and-text", r#""\ud83d\u0041""#),
        ("word", "True"),
        ("depth", &deep),
        ("number-range", "1e309"),
        ("integer-range", &"9".repeat(400)),
    ] {
        of(name, &[4], &GOOD.replace("}}", &format!(",\"x\":{value}}}}}")));
    }
    for (name, shape) in [
        ("shape-second", "[2,2,3]"),
        ("shape-more", "[2,3,2,1]"),
        ("dimensions", "[2,3,2,1,1,1,1,1,1]"),
    ] {
        let json = r#"{"a":{"dtype":"U8","shape":SHAPE,"data_offsets":[0,12]}}"#;
        of(name, &[2, 3, 2], &json.replace("SHAPE", shape));
    }
}
