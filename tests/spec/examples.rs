//! The examples in the appendices of spec/format.md: each byte, number and name in them is what the
//! vector and the encoders give.

use std::path::Path;

use df11::{
    Dtype,
    hazmat::format::{Header, records},
};

use super::{
    container::{Item, Model, encode, tile_arrays::Arrays},
    tables::SPEC,
    vectors,
};

/// The text of an appendix.
fn appendix(heading: &str) -> &'static str {
    let (_, text) = SPEC.split_once(&format!("\n## {heading}\n")).expect("its heading");
    text.split("\n## ").next().unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

/// A field of a dump: its name, and how many bytes it has.
type Field = (String, usize);

/// The fields of a dump below each of its titles. Its rows are the bytes, one after the other.
fn fields(dump: &str, bytes: &[u8]) -> Vec<(String, Vec<Field>)> {
    let (mut fields, mut end): (Vec<(String, Vec<Field>)>, usize) = Default::default();
    for line in dump.lines().filter(|line| !line.is_empty()) {
        let row =
            line.trim_start().split_once("  ").and_then(|(at, row)| Some((at.parse().ok()?, row)));
        let Some((at, row)) = row else {
            fields.push((line.to_owned(), Vec::new()));
            continue;
        };
        assert_eq!(at, end, "{line}");
        let cut = row.char_indices().nth(47).map_or(row.len(), |(at, _)| at);
        let (shown, about) = (row[..cut].trim_end(), row[cut..].trim_start());
        let zeros = shown.strip_prefix("00 × ").map(|count| vec![0; count.parse().unwrap()]);
        let length = zeros.as_ref().map_or(shown.split(' ').count(), Vec::len);
        let found = &bytes[at..at + length];
        assert!(zeros.map_or_else(|| hex(found) == shown, |zeros| zeros == found), "{line}");
        let (name, value) = about.split_once(" = ").unwrap_or((about, ""));
        let number = found.iter().rev().fold(0, |number: u64, byte| number << 8 | u64::from(*byte));
        let number = if number == u64::MAX { "NONE".to_owned() } else { number.to_string() };
        assert!(value.is_empty() || value == number, "{line}");
        // Bytes without a name continue the field before; `shape[1] to shape[7]` is `shape`.
        let (name, below) = (name.split('[').next().unwrap(), &mut fields.last_mut().unwrap().1);
        match below.last_mut() {
            Some(last) if name.is_empty() || last.0 == name => last.1 += length,
            _ => below.push((name.to_owned(), length)),
        }
        end += length;
    }
    assert_eq!(end, bytes.len());
    fields
}

#[test]
fn the_smallest_container_is_as_it_is_shown() {
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/vectors");
    let bytes = vectors::read(&vectors.join("valid/smallest.df11.gz")).unwrap();
    let item = Item::raw("w", Dtype::U8, &[3], vec![1, 2, 3]);
    assert!(Model::new(&[item], &[]).build() == bytes);
    let text = appendix("A. The smallest container");
    assert!(text.contains(&format!("It has {} bytes", bytes.len())));
    let records = [
        ("header", Header::FIELDS, 1),
        ("files", records::FileRecord::FIELDS, 1),
        ("blocks", records::BlockRecord::FIELDS, 1),
        ("sections", records::SectionRecord::FIELDS, 2),
        ("tensors", records::TensorRecord::FIELDS, 1),
        ("arrays", records::ArrayRecord::FIELDS, 2),
        ("checksums", &[("checksum of a chunk", 0, 4)], 2),
        ("metadata", &[], 0),
    ];
    let shown = fields(text.split("```").nth(1).unwrap().trim(), &bytes);
    for (name, fields, count) in records {
        let of_name = shown.iter().filter(|(title, _)| title.split(',').next() == Some(name));
        let all = of_name.flat_map(|(_, fields)| fields);
        let not_count = all.filter(|(name, _)| name != "count" && !name.starts_with("to the end"));
        let found: Vec<(&str, usize)> = not_count.map(|(name, size)| (&**name, *size)).collect();
        let expected = fields.iter().map(|&(name, _, size)| (name, size)).collect::<Vec<_>>();
        assert_eq!(found, expected.repeat(count), "{name}");
    }
}

fn weights(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect()
}

/// Value, bytes, exponent and sign/mantissa byte of weights.
fn weight_rows(values: &[f32]) -> impl Iterator<Item = String> {
    values.iter().map(|&value| {
        let word = half::bf16::from_f32(value).to_bits();
        let (exponent, sign_mantissa) = (word >> 7 & 0xFF, word >> 8 & 0x80 | word & 0x7F);
        format!("| {value} | {word:04X} | {exponent} | {sign_mantissa:02x} |")
    })
}

/// The first `count` bits of a stream, in the order of the stream.
fn bits(stream: &[u8], count: usize) -> String {
    (0..count).map(|bit| if stream[bit / 8] >> (bit % 8) & 1 == 1 { '1' } else { '0' }).collect()
}

/// The tables of an example are these rows, and its text has all these parts.
fn check(text: &str, rows: impl IntoIterator<Item = String>, parts: &[String]) {
    let is_row = |line: &&str| {
        let cell = line.strip_prefix("| ").unwrap_or_default();
        cell.starts_with(|c: char| c == '-' || c.is_ascii_digit())
    };
    let shown: Vec<&str> = text.lines().filter(is_row).collect();
    assert_eq!(shown, rows.into_iter().collect::<Vec<_>>());
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

#[test]
fn the_three_codes_are_as_they_are_shown() {
    let text = appendix("B. Three codes");
    let (gap, tile) = text.split_at(text.find("**tile**").unwrap());
    check_gap(gap);
    check_tile(tile);
}

fn check_gap(text: &str) {
    let values = [1.5, 2.0, 1.0, -0.5];
    let (arrays, parameters) = encode(&weights(&values), 8, 64);
    let [codebook, gaps, offsets, bitstream, plane] = [0, 1, 2, 3, 4].map(|at| &arrays[at].1[..]);
    let codes = df11_reference::canonical_codes(codebook[..256].try_into().unwrap()).unwrap();
    let mut exponents: Vec<usize> = (0..256).filter(|&exponent| codebook[exponent] > 0).collect();
    let at = |exponent: &usize| format!("{} at {exponent}", codebook[*exponent]);
    let lengths = exponents.iter().map(at).collect::<Vec<_>>().join(", ");
    exponents.sort_by_key(|&exponent| (codebook[exponent], exponent));
    let code_rows = exponents.iter().map(|&exponent| {
        let (length, code) = (usize::from(codebook[exponent]), codes[exponent]);
        format!("| {exponent} | {length} | {code:0length$b} |")
    });
    let count = parameters[2] as usize;
    let parts = [
        format!("The bits, in order, are {}, so bit_count is {count}.", bits(bitstream, count)),
        format!("codebook        {} bytes: {lengths}; from byte 256 on LUT 0\n", codebook.len()),
        format!("LUT 0           {}: the entries 0 to 3, ", hex(&codebook[256..264])),
        format!("gaps            {}\n", hex(gaps)),
        format!("output_offsets  {}\n", hex(offsets)),
        format!("bitstream       {}\n", hex(bitstream)),
        format!("plane           {}\n", hex(plane)),
    ];
    check(text, weight_rows(&values).chain(code_rows), &parts);
}

fn check_tile(text: &str) {
    let values = [1.0, 1.5, -1.0, 1.0, 1.0, 2.0, 0.5, 1.0];
    let arrays = Arrays::of(&weights(&values), 8192, values.len(), 1);
    let [codebook, records, bitstream, plane] = arrays.list();
    let decoded = df11_reference::decode_tile(arrays.list(), arrays.parameters);
    assert_eq!(decoded, Ok(weights(&values)));
    let (used, count) = (usize::from(records[8] & 0x3F), arrays.parameters[2]);
    let lines = |bytes: &[u8], about: &str| {
        format!("{}  {about}\n           {}\n", hex(&bytes[..16]), hex(&bytes[16..]))
    };
    let parts = [
        format!("The {used} bits of lane 0, in order, are {}; the", bits(bitstream, used)),
        format!("the excess of lane 0 is {used}, and bit_count is {count}."),
        format!("codebook   {}", lines(codebook, "no escape; 1 pair of 1 bit, 2 of 2")),
        format!("records    {}", lines(&records[..32], "tile 0")),
        format!("           {}", lines(&records[32..], &format!("after it: offset {count}"))),
        format!("bitstream  {}\n", hex(bitstream)),
        format!("plane      {}\n", hex(plane)),
    ];
    check(text, weight_rows(&values).chain(pair_rows(codebook)), &parts);
}

/// The pairs of a codebook without an escape, with their codes.
fn pair_rows(codebook: &[u8]) -> Vec<String> {
    let numbers: Vec<u16> =
        codebook.chunks(2).map(|bytes| u16::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(numbers[0], 0);
    let lengths =
        (1..=12usize).flat_map(|length| std::iter::repeat_n(length, numbers[length].into()));
    let (mut code, mut before) = (0, 1);
    let row = |(length, value): (usize, &u16)| {
        let (first, second) = (value & 0xFF, value >> 8);
        (code, before) = (code << (length - before), length);
        code += 1;
        format!("| {first}, {second} | {value:04X} | {length} | {:0length$b} |", code - 1)
    };
    lengths.zip(&numbers[13..]).map(row).collect()
}
