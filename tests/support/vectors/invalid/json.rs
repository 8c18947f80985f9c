//! Section 7: headers that are no JSON, or too deep, and shapes that differ from the directory's.

use df11::Dtype;

use crate::container::{Item, Model, with_length};
use crate::vectors::Vector;

/// A file of one tensor with this header; hashes and identity fit.
fn of(name: &str, about: &str, shape: &[u64], json: &str) -> Vector {
    let bytes = vec![7; shape.iter().product::<u64>() as usize];
    let mut model = Model::new(&[Item::raw("a", Dtype::U8, shape, bytes)], &[]);
    let prefix = with_length(json);
    model.tensors[0].file_offset = prefix.len() as u64;
    model.files[0].arrays[0].1 = prefix;
    model.refresh();
    Vector::invalid(&format!("header-{name}"), "verify", about, model.build())
}

/// This value in a member that means nothing to a reader.
fn member(name: &str, about: &str, value: &str) -> Vector {
    let json = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":VALUE}}"#;
    of(name, about, &[4], &json.replace("VALUE", value))
}

pub(super) fn syntax() -> Vec<Vector> {
    let text = |name: &str, about: &str, json: &str| of(name, about, &[4], json);
    // Within two objects.
    let deep = format!("{}{}", "[".repeat(99), "]".repeat(99));
    vec![
        text("leading-zero", "a dimension of 04", {
            r#"{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}"#
        }),
        text("no-comma", "two members without a comma between them", {
            r#"{"a":{"dtype":"U8" "shape":[4],"data_offsets":[0,4]}}"#
        }),
        text("no-colon", "a name and a value without a colon", {
            r#"{"a":{"dtype" "U8","shape":[4],"data_offsets":[0,4]}}"#
        }),
        text("no-end", "a string that does not end", {
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":"y}}"#
        }),
        member(
            "leading-zeros",
            "a number with leading zeros, in a member that no reader knows",
            "-007",
        ),
        member("plus", "a number with a plus sign", "+1"),
        member("no-fraction", "a fraction without digits", "1."),
        member("no-integer", "a fraction without an integer", ".5"),
        member("no-exponent", "an exponent without digits", "1e+"),
        member("escape", "an escape that JSON does not have", r#""\x41""#),
        member("escape-short", "an escape of three digits", r#""\u041""#),
        member("surrogates-swapped", "a surrogate pair, the low one first", r#""\uddDD\ud83d""#),
        member(
            "surrogate-and-text",
            "a high surrogate before another character",
            r#""\ud83d\u0041""#,
        ),
        member("word", "a word that is neither true, false nor null", "True"),
        member("depth", "101 objects and arrays in each other", &deep),
        member("number-range", "a number beyond the range of a double", "1e309"),
        member("integer-range", "an integer beyond the range of a double", &"9".repeat(400)),
    ]
}

pub(super) fn shapes() -> Vec<Vector> {
    let shaped = |name: &str, about: &str, shape: &str| {
        let json = r#"{"a":{"dtype":"U8","shape":SHAPE,"data_offsets":[0,12]}}"#;
        of(name, about, &[2, 3, 2], &json.replace("SHAPE", shape))
    };
    vec![
        shaped("shape-second", "the second and third dimensions are others", "[2,2,3]"),
        shaped("shape-more", "a dimension of 1 more", "[2,3,2,1]"),
        shaped("dimensions", "nine dimensions", "[2,3,2,1,1,1,1,1,1]"),
    ]
}
