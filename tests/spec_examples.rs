//! The examples in the appendices of spec/format.md are what the vector and the encoders give.
//!
//! `DF11_RENEW=1 cargo test --test spec_examples` writes them anew.

#[path = "support/container.rs"]
mod container;
#[path = "support/vectors/mod.rs"]
mod vectors;

use std::{fmt::Write, fs, path::Path};

use container::{Item, Model, encode, tile_arrays::Arrays};
use df11::{
    Dtype,
    hazmat::format::{Header, records},
};

type Fields = &'static [(&'static str, usize, usize)];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

/// A dump of a container, field after field.
struct Dump<'a> {
    bytes: &'a [u8],
    at: usize,
    text: String,
}

impl Dump<'_> {
    fn title(&mut self, title: &str) {
        writeln!(self.text, "\n{title}").unwrap();
    }

    fn field(&mut self, size: usize, name: &str, value: &str) {
        for (line, row) in self.bytes[self.at..self.at + size].chunks(16).enumerate() {
            let at = self.at + 16 * line;
            let about = if line == 0 { format!("{name}{value}") } else { String::new() };
            let text = format!("{at:5}  {:<47}  {about}", hex(row));
            writeln!(self.text, "{}", text.trim_end()).unwrap();
        }
        self.at += size;
    }

    /// The little-endian number of a field.
    fn number(&self, size: usize) -> u64 {
        let bytes = &self.bytes[self.at..self.at + size];
        bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn value(&mut self, size: usize, name: &str) -> u64 {
        let number = self.number(size);
        let shown = if number == u64::MAX { "NONE".into() } else { number.to_string() };
        self.field(size, name, &format!(" = {shown}"));
        number
    }

    fn record(&mut self, fields: Fields) {
        for &(name, _, size) in fields {
            if size <= 8 && name != "magic" {
                self.value(size, name);
            } else if self.bytes[self.at..self.at + size].iter().all(|&byte| byte == 0) {
                self.zeros(size, name);
            } else if name == "shape" {
                let first = self.number(8);
                self.field(8, "shape", &format!("[0] = {first}"));
                self.zeros(size - 8, "shape[1] to shape[7]");
            } else {
                self.field(size, name, "");
            }
        }
    }

    fn zeros(&mut self, size: usize, name: &str) {
        assert!(self.bytes[self.at..self.at + size].iter().all(|&byte| byte == 0), "{name}");
        writeln!(self.text, "{:5}  {:<47}  {name}", self.at, format!("00 × {size}")).unwrap();
        self.at += size;
    }

    /// A list with records that have these fields.
    fn list(&mut self, name: &str, fields: Fields) {
        self.title(name);
        let count = self.value(8, "count");
        for index in 0..count {
            if count > 1 {
                self.title(&format!("{name}, record {index}"));
            }
            self.record(fields);
        }
    }
}

fn smallest() -> Vec<u8> {
    vectors::read(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/vectors/valid/smallest.df11.gz"),
    )
    .unwrap()
}

fn appendix_a() -> String {
    let bytes = smallest();
    let mut dump = Dump { bytes: &bytes, at: 0, text: String::new() };
    let header = container::header(&bytes);
    let draft = container::parse(&bytes);
    dump.title("header");
    dump.record(Header::FIELDS);
    dump.zeros(4096 - 64, "to the end of the head");
    for section in &draft.directory.sections {
        let kind = records::section_name(section.kind.get()).unwrap();
        dump.title(&format!("section {kind}"));
        let content = &bytes[dump.at..dump.at + section.length.get() as usize];
        let about = match kind {
            "prefix" => format!("its length, {}, and the JSON", content[0]),
            _ => "the tensor".into(),
        };
        dump.field(content.len(), &about, "");
        dump.zeros(dump.at.next_multiple_of(4096) - dump.at, "to a multiple of 4096");
    }
    assert_eq!(dump.at as u64, header.directory_offset.get());
    dump.title("directory");
    dump.value(8, "shard_index");
    dump.value(8, "shard_count");
    dump.field(32, "identity", "");
    dump.list("files", records::FileRecord::FIELDS);
    dump.list("blocks", records::BlockRecord::FIELDS);
    dump.list("sections", records::SectionRecord::FIELDS);
    dump.list("tensors", records::TensorRecord::FIELDS);
    dump.list("arrays", records::ArrayRecord::FIELDS);
    dump.list("checksums", &[("checksum of a chunk", 0, 4)]);
    dump.list("metadata", &[]);
    dump.title("text");
    let count = dump.value(8, "count");
    let text = std::str::from_utf8(&draft.directory.text).unwrap();
    dump.field(count as usize, &format!("{text:?}"), "");
    let footer = header.footer_offset() as usize;
    dump.zeros(footer - dump.at, "to a multiple of 256");
    dump.title("footer");
    dump.field(64, "the header again", "");
    assert_eq!(dump.at, bytes.len());
    format!(
        "[smallest.df11](vectors/valid/smallest.df11.gz) (compressed there) has one tensor `w` of \
        dtype U8\nand shape [3], with the bytes 01 02 03, in one block and one file. It has {} \
        bytes; numbers at\nthe left are offsets.\n\n```\n{}```\n",
        bytes.len(),
        dump.text.trim_start_matches('\n')
    )
}

fn weights(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect()
}

/// Value, bytes, exponent and sign/mantissa byte of weights.
fn weight_rows(values: &[f32]) -> String {
    let mut rows = String::from("| weight | u16 | exponent | sign/mantissa |\n|---|---|---|---|\n");
    for &value in values {
        let word = half::bf16::from_f32(value).to_bits();
        let (exponent, sign_mantissa) = (word >> 7 & 0xFF, word >> 8 & 0x80 | word & 0x7F);
        writeln!(rows, "| {value} | {word:04X} | {exponent} | {sign_mantissa:02x} |").unwrap();
    }
    rows
}

/// The first `count` bits of a stream, in the order of the stream.
fn bits(stream: &[u8], count: usize) -> String {
    (0..count).map(|bit| if stream[bit / 8] >> (bit % 8) & 1 == 1 { '1' } else { '0' }).collect()
}

fn gap_example() -> String {
    let values = [1.5, 2.0, 1.0, -0.5];
    let data = weights(&values);
    let (arrays, parameters) = encode(&data, 8, 64);
    let [codebook, gaps, offsets, bitstream, plane] = [0, 1, 2, 3, 4].map(|at| &arrays[at].1[..]);
    let lengths: Vec<usize> = (0..256).filter(|&exponent| codebook[exponent] > 0).collect();
    let codes = df11_reference::canonical_codes(codebook[..256].try_into().unwrap()).unwrap();
    let mut rows = String::from("| exponent | length | code |\n|---|---|---|\n");
    let mut ordered = lengths.clone();
    ordered.sort_by_key(|&exponent| (codebook[exponent], exponent));
    for exponent in ordered {
        let (length, code) = (usize::from(codebook[exponent]), codes[exponent]);
        writeln!(rows, "| {exponent} | {length} | {code:0length$b} |").unwrap();
    }
    let bit_count = parameters[2] as usize;
    format!(
        "**gap**, 8 bytes a thread and 64 threads a block, of four weights:\n\n{}\n{rows}\n\
         The bits in their order are {}, so bit_count is {bit_count}. The arrays are\n\n```\n\
         codebook        {} bytes: {} at {}, {} at {}, {} at {}; from byte 256 on LUT 0\n\
         LUT 0           {}: the entries 0 to 3, repeated 64 times\n\
         gaps            {}\n\
         output_offsets  {}\n\
         bitstream       {}\n\
         plane           {}\n```\n",
        weight_rows(&values),
        bits(bitstream, bit_count),
        codebook.len(),
        codebook[lengths[0]],
        lengths[0],
        codebook[lengths[1]],
        lengths[1],
        codebook[lengths[2]],
        lengths[2],
        hex(&codebook[256..264]),
        hex(gaps),
        hex(offsets),
        hex(bitstream),
        hex(plane),
    )
}

fn tile_example() -> String {
    let values = [1.0, 1.5, -1.0, 1.0, 1.0, 2.0, 0.5, 1.0];
    let data = weights(&values);
    let arrays = Arrays::of(&data, 8192, values.len(), 1);
    let [codebook, records, bitstream, plane] = arrays.list();
    let bit_count = arrays.parameters[2] as usize;
    assert_eq!(
        df11_reference::decode_tile([codebook, records, bitstream, plane], arrays.parameters),
        Ok(data)
    );
    let used = usize::from(records[8] & 0x3F);
    format!(
        "**tile**, one row (tile_columns 8192) of eight weights, which are one unit of four pairs \
        in lane 0:\n\n{}\n\
         | pair | value | length | code |\n|---|---|---|---|\n{}\n\
         The {used} bits of lane 0 in their order are {}; the other 31 lanes have none. So least \
         is 0, shift\n0, the excess of lane 0 is {used}, and bit_count is {bit_count}. The arrays \
         are\n\n```\n\
         codebook   {}  no escape; 1 pair of 1 bit, 2 of 2\n           {}\n\
         records    {}  tile 0\n           {}\n           {}  after it: offset \
         {bit_count}\n           {}\n\
         bitstream  {}\n\
         plane      {}\n```\n",
        weight_rows(&values),
        pair_rows(codebook),
        bits(bitstream, used),
        hex(&codebook[..16]),
        hex(&codebook[16..]),
        hex(&records[..16]),
        hex(&records[16..32]),
        hex(&records[32..48]),
        hex(&records[48..]),
        hex(bitstream),
        hex(plane),
    )
}

/// The pairs of a codebook without an escape, with their codes.
fn pair_rows(codebook: &[u8]) -> String {
    let numbers: Vec<u16> =
        codebook.chunks(2).map(|bytes| u16::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(numbers[0], 0);
    let lengths =
        (1..=12usize).flat_map(|length| std::iter::repeat_n(length, numbers[length].into()));
    let (mut rows, mut code, mut before) = (String::new(), 0, 1);
    for (length, value) in lengths.zip(&numbers[13..]) {
        code <<= length - before;
        let (first, second) = (value & 0xFF, value >> 8);
        writeln!(rows, "| {first}, {second} | {value:04X} | {length} | {code:0length$b} |")
            .unwrap();
        (code, before) = (code + 1, length);
    }
    rows
}

fn check(heading: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/format.md");
    let spec = fs::read_to_string(&path).unwrap();
    let start = spec.find(&format!("\n## {heading}\n\n")).unwrap() + heading.len() + 6;
    let end = start + spec[start..].find("\n## ").unwrap();
    let text = &spec[start..=end];
    if std::env::var_os("DF11_RENEW").is_some() {
        fs::write(&path, [&spec[..start], expected, "\n", &spec[end + 1..]].concat()).unwrap();
        return;
    }
    assert!(
        text.trim_end() == expected.trim_end(),
        "{heading} is stale; DF11_RENEW=1 cargo test --test spec_examples"
    );
}

#[test]
fn the_examples_of_the_spec_are_right() {
    let item = Item::raw("w", Dtype::U8, &[3], vec![1, 2, 3]);
    assert!(Model::new(&[item], &[]).build() == smallest());
    check("A. The smallest container", &appendix_a());
    check("B. Three codes", &format!("{}\n{}", gap_example(), tile_example()));
}
