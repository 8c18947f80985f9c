//! A checkpoint of the official package taken apart, to be changed and put together again.

use std::{path::Path, sync::LazyLock};

use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::{
    Folder,
    encode::{Arrays, Lengths, encode},
};
use crate::{
    bytes::{self, Bytes, at},
    tensors,
};

/// The most weights of a block that is made up.
const MAX_WEIGHTS: usize = 3000;

/// Patterns of module names, for some of which compilers run long.
#[rustfmt::skip]
const PATTERNS: &[&str] = &[
    "blocks\\.0", "blocks\\.[0-9]+", "blocks\\.\\d+|", "", ".*", "(", "a)|(?:b", "(?i)BLOCKS\\.0",
    "(?x)blocks\\.0 # all", "(a|b|blocks)*\\.0", "((a{1000}){1000}){1000}", "(.?){999}", "(?=x)",
    "\\1", "\u{e9}+\n",
];

/// Names of matrices, modules and tensors.
#[rustfmt::skip]
const NAMES: &[&str] = &[
    "", "q_proj", "o_proj", "down_proj", "wte", "weight", "bias", "a.b", ".", "\0", "\"\\\n",
    "\u{e9}\u{10ffff}", "blocks.0.norm.weight", "blocks.0.q_proj.bias", "blocks.0.q_proj.weight",
    "blocks.0.encoded_exponent", "blocks.0.luts", "blocks.0.gaps", "blocks.0.sign_mantissa",
    "blocks.0.output_positions", "blocks.0.split_positions", "blocks.1.sign_mantissa",
    "encoded_exponent", "sign_mantissa", "wte.weight", "__metadata__",
];

/// Numbers at which checks tend to break.
#[rustfmt::skip]
const VALUES: &[u64] = &[
    0, 1, 2, 3, 7, 8, 16, 255, 512, 1023, 1024, 1025, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 61,
    1 << 62, (1 << 63) - 1, 1 << 63, u64::MAX,
];

const DTYPES: &[&str] = &["U8", "U32", "I32", "I64", "BF16", "F16", "BOOL", "F4", "U64", "BF17"];

/// Sizes in a configuration.
const SIZES: &[&str] = &["hidden_size", "vocab_size", "head_dim", "intermediate_size", "n_embd"];

/// Members of the package's own part of it.
const OWN: &[&str] = &["version", "threads_per_block", "bytes_per_thread", "pattern_dict", "x"];

#[derive(Clone)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

/// A checkpoint as a tree.
#[derive(Clone)]
pub struct Draft {
    config: Option<Value>,
    files: Vec<(String, Vec<Tensor>)>,
}

/// The fixtures, which the package itself has made.
pub static FIXTURES: LazyLock<[Folder; 2]> = LazyLock::new(|| {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/dfloat11"));
    ["plain", "llama"].map(|name| Folder::read(&folder.join(name)))
});

impl Draft {
    /// A checkpoint that is in no folder yet: one block or two, with what stands beside them. Also
    /// the weights of its matrices by their names.
    pub fn new(bytes: &mut Bytes<'_>) -> (Self, Vec<(String, Vec<u8>)>) {
        let threads = bytes.pick(&[1u64, 2, 3, 5, 8, 33, 512, 1024]);
        let mut tensors = Vec::new();
        let mut matrices = Vec::new();
        let shape = bytes.u8();
        let modules: &[(&str, &[&str])] = match shape % 4 {
            0 => &[("blocks.0.", &["q_proj", "o_proj", "mixer"])],
            1 => &[("blocks.0.", &["q_proj"]), ("wte.", &[])],
            2 => &[("", &[])],
            _ => &[("wte.", &[]), ("blocks.0.", &["a.b", "down_proj"])],
        };
        for (module, attributes) in modules {
            let weights = tensors::weights(bytes, MAX_WEIGHTS);
            let lengths = bytes.pick(&[Lengths::Equal, Lengths::Unary, Lengths::Steep]);
            let arrays = encode(&weights, lengths, threads, bytes.u8());
            let mut ends: Vec<usize> =
                attributes.iter().skip(1).map(|_| 2 * bytes.index(weights.len() / 2 + 1)).collect();
            ends.sort_unstable();
            push_block(&mut tensors, module, arrays, &ends, shape >= 128);
            ends.push(weights.len());
            let starts = [0].into_iter().chain(ends.clone());
            for (matrix, (start, &end)) in starts.zip(&ends).enumerate() {
                let path = match attributes.get(matrix) {
                    Some(attribute) => format!("{module}{attribute}."),
                    None => (*module).to_owned(),
                };
                matrices.push((format!("{path}weight"), weights[start..end].to_vec()));
            }
        }
        let other = |name: &str, length: u64| Tensor {
            name: name.to_owned(),
            dtype: "BF16".to_owned(),
            shape: vec![length],
            bytes: vec![7; 2 * length as usize],
        };
        tensors.push(other("blocks.0.norm.weight", u64::from(bytes.u8())));
        tensors.push(other("blocks.0.q_proj.bias", u64::from(bytes.u8())));
        let mut files = vec![("a.safetensors".to_owned(), tensors)];
        if shape / 4 % 2 == 1 {
            let rest = files[0].1.split_off(6);
            files.push(("b.safetensors".to_owned(), rest));
        }
        let pattern = |module: &str| module.trim_end_matches('.').replace(".0", "\\.\\d+");
        let patterns = modules.iter().map(|(module, names)| (pattern(module), json!(names)));
        let patterns: serde_json::Map<String, Value> = patterns.collect();
        let config = json!({
            "hidden_size": bytes.u8(),
            "num_attention_heads": bytes.u8() % 8,
            "dfloat11_config": {
                "version": "0.5.0",
                "threads_per_block": [threads],
                "bytes_per_thread": 8,
                "pattern_dict": patterns,
            },
        });
        (Self { config: Some(config), files }, matrices)
    }

    /// Takes a sound checkpoint apart.
    pub fn of(folder: &Folder) -> Self {
        let json = |config: &Vec<u8>| serde_json::from_slice(config).expect("JSON");
        let config = folder.config.as_ref().map(json);
        let files = folder.files.iter().map(|(name, bytes)| {
            let file = SafeTensors::deserialize(bytes).expect("a sound file");
            let tensor = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| Tensor {
                name: name.to_owned(),
                dtype: view.dtype().to_string(),
                shape: view.shape().iter().map(|&dimension| dimension as u64).collect(),
                bytes: view.data().to_vec(),
            };
            let mut tensors: Vec<Tensor> = file.iter().map(tensor).collect();
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            (name.clone(), tensors)
        });
        Self { config, files: files.collect() }
    }

    /// One change.
    pub fn change(&mut self, bytes: &mut Bytes<'_>) {
        let (end, change): (&str, fn(&mut Tensor, &mut Bytes<'_>)) = match bytes.u8() % 16 {
            0..=2 => return self.change_config(bytes),
            3 => return self.change_files(bytes),
            4 => ("output_positions", change_number::<4>),
            5 => ("split_positions", change_number::<8>),
            6 | 7 => ("gaps", change_gap),
            8 | 9 => ("luts", change_rows),
            10 | 11 => ("encoded_exponent", change_byte),
            _ => ("", change_tensor),
        };
        // One of the tensors whose names end so.
        let choice = bytes.u8();
        let tensors = self.files.iter_mut().flat_map(|(_, tensors)| tensors);
        let mut arrays: Vec<_> = tensors.filter(|tensor| tensor.name.ends_with(end)).collect();
        if let Some(tensor) = at(&mut arrays, choice) {
            change(tensor, bytes);
        }
    }

    fn change_config(&mut self, bytes: &mut Bytes<'_>) {
        let Some(config) = &mut self.config else { return };
        let choice = bytes.u8();
        match choice % 16 {
            15 => self.config = None,
            13.. => {
                let size = bytes.pick(SIZES);
                config[size] = value(bytes);
            }
            _ => change_own(&mut config["dfloat11_config"], choice, bytes),
        }
    }

    fn change_files(&mut self, bytes: &mut Bytes<'_>) {
        let (from, tensor, to) = (bytes.u8(), bytes.u8(), bytes.u8());
        let Some((_, tensors)) = at(&mut self.files, from) else { return };
        if tensors.is_empty() {
            return;
        }
        let index = usize::from(tensor) % tensors.len();
        match bytes.u8() % 4 {
            0 => drop(tensors.remove(index)),
            1 => {
                let moved = tensors.remove(index);
                if to.is_multiple_of(3) {
                    self.files.push((format!("c{}.safetensors", self.files.len()), vec![moved]));
                } else if let Some((_, tensors)) = at(&mut self.files, to) {
                    tensors.push(moved);
                }
            }
            2 => {
                let mut copy = tensors[index].clone();
                bytes.pick(NAMES).clone_into(&mut copy.name);
                tensors.push(copy);
            }
            _ => {
                let other = usize::from(to) % tensors.len();
                tensors.swap(index, other);
            }
        }
    }

    /// The files, of one input of eight with the rest of the fuzzer's bytes as changes of theirs.
    pub fn render(&self, bytes: &mut Bytes<'_>) -> Folder {
        let config = self.config.as_ref().map(|config| config.to_string().into_bytes());
        let files = self.files.iter().map(|(name, tensors)| (name.clone(), safetensors(tensors)));
        let mut folder = Folder { config, files: files.collect() };
        if bytes.u8() % 8 < 7 {
            return folder;
        }
        bytes::change(bytes, 4, |bytes| {
            let (choice, place, value) = (bytes.u8(), bytes.u16(), bytes.u8());
            let content = match &mut folder.config {
                Some(config) if choice % 4 == 0 => config,
                _ => &mut at(&mut folder.files, choice / 4).expect("a file").1,
            };
            let place = usize::from(place) % content.len().max(1);
            match choice % 4 {
                3 => content.truncate(place),
                _ => {
                    if let Some(byte) = content.get_mut(place) {
                        *byte ^= value;
                    }
                }
            }
        });
        folder
    }
}

/// Changes the package's own part of a configuration.
fn change_own(own: &mut Value, choice: u8, bytes: &mut Bytes<'_>) {
    match choice % 16 {
        0 => own["threads_per_block"] = json!(bytes.pick(VALUES)),
        1 => own["threads_per_block"] = json!([bytes.u8()]),
        2 => own["bytes_per_thread"] = value(bytes),
        3 => {
            let member = bytes.pick(OWN);
            own[member] = value(bytes);
        }
        4..=6 => {
            let names: Vec<_> = (0..bytes.u8() % 4).map(|_| bytes.pick(NAMES)).collect();
            if let Some(patterns) = own["pattern_dict"].as_object_mut() {
                patterns.insert(bytes.pick(PATTERNS).to_owned(), json!(names));
            }
        }
        7 => {
            let pattern = String::from_utf8_lossy(bytes.run(usize::from(choice / 8))).into_owned();
            if let Some(patterns) = own["pattern_dict"].as_object_mut() {
                patterns.insert(pattern, json!(["q_proj"]));
            }
        }
        _ => {
            let (pattern, attribute) = (bytes.u8(), bytes.u8());
            let Some(patterns) = own["pattern_dict"].as_object_mut() else { return };
            let mut lists: Vec<_> = patterns.values_mut().collect();
            let Some(list) = at(&mut lists, pattern) else { return };
            match (list.as_array_mut(), choice % 4) {
                (Some(list), 0) => list.push(json!(bytes.pick(NAMES))),
                (Some(list), 1) => drop(list.pop()),
                (Some(list), 2) if !list.is_empty() => {
                    *at(list, attribute).expect("one") = json!(bytes.pick(NAMES));
                }
                _ => **list = value(bytes),
            }
        }
    }
}

fn value(bytes: &mut Bytes<'_>) -> Value {
    match bytes.u8() % 8 {
        0 => Value::Null,
        1 => json!(bytes.pick(NAMES)),
        2 => json!([bytes.pick(VALUES), bytes.pick(VALUES)]),
        3 => json!({ "a": bytes.pick(VALUES) }),
        4 => json!(-1),
        5 => json!(bytes.pick(VALUES)),
        _ => json!(bytes.u8()),
    }
}

fn push_block(
    tensors: &mut Vec<Tensor>,
    module: &str,
    arrays: Arrays,
    ends: &[usize],
    words: bool,
) {
    let splits: Vec<u8> = ends.iter().flat_map(|&end| (end as u64 / 2).to_le_bytes()).collect();
    let positions = if words { ("U32", 4) } else { ("U8", 1) };
    let all = [
        ("encoded_exponent", ("U8", 1), arrays.codes),
        ("sign_mantissa", ("U8", 1), arrays.plane),
        ("luts", ("U8", 1), arrays.luts),
        ("output_positions", positions, arrays.positions),
        ("gaps", ("U8", 1), arrays.gaps),
        ("split_positions", ("I64", 8), splits),
    ];
    let count = if ends.is_empty() { 5 } else { 6 };
    tensors.extend(all.into_iter().take(count).map(|(name, (dtype, size), bytes)| Tensor {
        name: format!("{module}{name}"),
        dtype: dtype.to_owned(),
        shape: vec![(bytes.len() / size) as u64],
        bytes,
    }));
}

fn change_byte(tensor: &mut Tensor, bytes: &mut Bytes<'_>) {
    let place = usize::from(bytes.u16());
    if !tensor.bytes.is_empty() {
        let place = place % tensor.bytes.len();
        tensor.bytes[place] ^= bytes.u8();
    }
}

fn change_tensor(tensor: &mut Tensor, bytes: &mut Bytes<'_>) {
    let length = tensor.bytes.len();
    match bytes.u8() % 8 {
        0..=2 => change_byte(tensor, bytes),
        3 | 4 => {
            let by = if bytes.u8().is_multiple_of(4) { 256 } else { usize::from(bytes.u8() % 16) };
            let longer = bytes.u8().is_multiple_of(2);
            tensor.bytes.resize(if longer { length + by } else { length.saturating_sub(by) }, 0);
            let size = match &tensor.dtype[..] {
                "I64" => 8,
                "U32" | "I32" => 4,
                "BF16" => 2,
                _ => 1,
            };
            tensor.shape = vec![(tensor.bytes.len() / size) as u64];
        }
        5 => bytes.pick(DTYPES).clone_into(&mut tensor.dtype),
        6 => {
            let place = bytes.index(tensor.shape.len() + 1);
            tensor.shape.insert(place, bytes.pick(&[1, 1, 1, 1, 1, 1, 0, 2, 1 << 40, u64::MAX]));
        }
        _ => bytes.pick(NAMES).clone_into(&mut tensor.name),
    }
}

/// Changes where a thread is said to begin.
fn change_gap(tensor: &mut Tensor, bytes: &mut Bytes<'_>) {
    let gaps = &mut tensor.bytes;
    // Small checkpoints fill few of the first threads.
    let threads = (8 * gaps.len() / 5).max(1);
    let among = if bytes.u8() < 192 { threads.min(32) } else { threads };
    let (thread, value) = (bytes.index(among), bytes.u8());
    for bit in 0..5 {
        let place = 5 * thread + bit;
        if let Some(byte) = gaps.get_mut(place / 8) {
            let mask = 0x80 >> (place % 8);
            *byte = *byte & !mask | if value >> bit & 1 == 1 { mask } else { 0 };
        }
    }
}

fn change_number<const N: usize>(tensor: &mut Tensor, bytes: &mut Bytes<'_>) {
    let numbers = tensor.bytes.as_chunks_mut::<N>().0;
    if numbers.is_empty() {
        return;
    }
    let place = bytes.index(numbers.len());
    let mut before = [0; 8];
    before[..N].copy_from_slice(&numbers[place]);
    let before = u64::from_le_bytes(before);
    let after = match bytes.u8() % 3 {
        0 => bytes.pick(VALUES),
        1 => bytes.u16().into(),
        _ => before.wrapping_add(bytes.u8().into()).wrapping_sub(128),
    };
    numbers[place].copy_from_slice(&after.to_le_bytes()[..N]);
}

/// Tables and code lengths, as far as these bytes are such.
fn change_rows(tensor: &mut Tensor, bytes: &mut Bytes<'_>) {
    let rows = tensor.bytes.as_chunks_mut::<256>().0;
    if rows.is_empty() {
        return;
    }
    let (a, b, last) = (bytes.index(rows.len()), bytes.index(rows.len()), rows.len() - 1);
    match bytes.u8() % 5 {
        0 => rows[a] = rows[b],
        1 => {
            // Entries become a number, a pointer more often than not.
            let (first, count, value) =
                (usize::from(bytes.u8()), usize::from(bytes.u8()), bytes.u8());
            let value = if value < 128 { 0xF0 | value } else { value };
            rows[a][first..].iter_mut().take(count).for_each(|entry| *entry = value);
        }
        2 => rows[last].swap(bytes.u8().into(), bytes.u8().into()),
        3 => rows[last][usize::from(bytes.u8())] = bytes.u8() % 34,
        _ => {
            let row = rows[b];
            tensor.bytes.splice(256 * a..256 * a, row);
        }
    }
}

/// A safetensors file of these tensors, whatever they say.
fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for tensor in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.bytes);
        let offsets = [start, data.len()];
        let entry =
            json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets });
        header.push(format!("{}:{entry}", json!(tensor.name)));
    }
    let mut header = format!("{{{}}}", header.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}
