//! Decodes a checkpoint as the package's own decoder does. Each thread starts at its gap and reads
//! the codes that begin in its eight bytes, look-up table by look-up table. Its weights follow
//! those of the threads before it in its thread block; the positions give the block's first weight.
//! Slow; shares nothing with df11.
//!
//! One thing it does otherwise: the code lengths, not the number alone, tell an exponent of 240 or
//! more from a pointer to a table.

use std::collections::BTreeMap;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::{Folder, Imported};

/// A tensor: dtype, shape, bytes.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);
type Tensors = BTreeMap<String, Tensor>;

const CODES: &str = "encoded_exponent";
const PLANE: &str = "sign_mantissa";
const ARRAYS: [&str; 6] = [CODES, PLANE, "luts", "output_positions", "gaps", "split_positions"];

/// Compares what df11 has read, all of it, with what the folder says.
pub fn check(folder: &Folder, imported: &Imported) {
    let files: Vec<(&str, Tensors)> =
        folder.files.iter().map(|(name, bytes)| (&name[..], tensors(bytes))).collect();
    let all: Tensors = files.iter().flat_map(|(_, tensors)| tensors.clone()).collect();
    let modules: Vec<&str> = all.keys().filter_map(|name| module_of(name, CODES)).collect();
    if !modules.iter().any(|module| all.contains_key(&format!("{module}{PLANE}"))) {
        for (file, bytes) in imported {
            let own = folder.files.iter().find(|(name, _)| *name == file.path);
            let same = bytes.as_ref() == Some(&own.expect("a file of the folder").1);
            assert!(same, "an ordinary file is not itself");
        }
        return;
    }
    let [(_, bytes)] = &imported[..] else { panic!("{} files of one checkpoint", imported.len()) };
    let Some(bytes) = bytes else { return };
    let mut ours = tensors(bytes);
    let config: Value =
        serde_json::from_slice(folder.config.as_ref().expect("a config")).expect("JSON");
    let own = &config["dfloat11_config"];
    let threads = &own["threads_per_block"];
    let threads = threads.as_u64().or_else(|| threads[0].as_u64()).expect("a number of threads");
    let mut others = all.clone();
    for module in modules {
        let arrays =
            ARRAYS.map(|array| others.remove(&format!("{module}{array}")).map(|tensor| tensor.2));
        let [Some(codes), Some(plane), Some(luts), Some(positions), Some(gaps), splits] = arrays
        else {
            panic!("df11 decodes {module:?}, which has not all arrays");
        };
        let weights = Block { codes, plane, luts, positions, gaps, threads }.decode();
        let weights = weights.unwrap_or_else(|| panic!("only df11 decodes {module:?}"));
        take(&mut ours, module, &matrices(&weights, splits.as_deref()), &own["pattern_dict"]);
    }
    assert!(ours == others, "what is not coded changes");
}

fn tensors(file: &[u8]) -> Tensors {
    let file = SafeTensors::deserialize(file).expect("what df11 reads the safetensors crate reads");
    file.iter()
        .map(|(name, view)| {
            (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        })
        .collect()
}

fn module_of<'a>(name: &'a str, last: &str) -> Option<&'a str> {
    name.strip_suffix(last).filter(|module| module.is_empty() || module.ends_with('.'))
}

fn matrices<'a>(weights: &'a [u8], splits: Option<&[u8]>) -> Vec<&'a [u8]> {
    let splits = splits.unwrap_or_default().as_chunks().0;
    let mut ends: Vec<usize> =
        splits.iter().map(|split| 2 * u64::from_le_bytes(*split) as usize).collect();
    ends.push(weights.len());
    let starts = [0].into_iter().chain(ends.clone());
    starts.zip(&ends).map(|(start, &end)| &weights[start..end]).collect()
}

/// Takes the matrices of a block out of what df11 made, where some list of the patterns names them
/// so.
fn take(ours: &mut Tensors, module: &str, matrices: &[&[u8]], patterns: &Value) {
    let path = module.strip_suffix('.').unwrap_or(module);
    let lists = patterns.as_object().expect("patterns").values();
    let weight =
        |path: String| if path.is_empty() { "weight".to_owned() } else { path + ".weight" };
    let names = |list: &Value| -> Vec<String> {
        let list = list.as_array().expect("a list");
        if list.is_empty() {
            return vec![weight(path.to_owned())];
        }
        let names = list.iter().map(|name| name.as_str().expect("a name"));
        names.map(|name| weight(format!("{module}{name}"))).collect()
    };
    let are = |names: &Vec<String>| {
        let is = |(name, matrix): (&String, &&[u8])| {
            ours.get(name).is_some_and(|(dtype, shape, bytes)| {
                *dtype == Dtype::BF16
                    && bytes == matrix
                    && shape.iter().product::<usize>() == bytes.len() / 2
            })
        };
        names.len() == matrices.len() && names.iter().zip(matrices).all(is)
    };
    let found = lists.map(names).find(are).unwrap_or_else(|| panic!("two results for {module:?}"));
    for name in &found {
        ours.remove(name);
    }
}

struct Block {
    codes: Vec<u8>,
    plane: Vec<u8>,
    luts: Vec<u8>,
    positions: Vec<u8>,
    gaps: Vec<u8>,
    threads: u64,
}

impl Block {
    fn decode(&self) -> Option<Vec<u8>> {
        let positions = self.positions.as_chunks().0.iter();
        let positions: Vec<_> = positions.map(|four| u32::from_le_bytes(*four) as usize).collect();
        let mut exponents = Vec::new();
        for (block, ends) in (0..).zip(positions.windows(2)) {
            if exponents.len() != ends[0] {
                return None;
            }
            for thread in self.threads * block..self.threads * (block + 1) {
                let start = 64 * thread;
                let mut bit = start + bits(&self.gaps, 5 * thread, 5);
                while bit < start + 64 && exponents.len() < ends[1] {
                    let (exponent, length) = self.code(bit)?;
                    exponents.push(exponent);
                    bit += u64::from(length);
                }
                if exponents.len() == ends[1] {
                    break;
                }
            }
            if exponents.len() != ends[1] {
                return None;
            }
        }
        (exponents.len() == self.plane.len()).then(|| {
            let weight = |(exponent, plane): (&u8, &u8)| {
                [exponent << 7 | plane & 0x7F, plane & 0x80 | exponent >> 1]
            };
            exponents.iter().zip(&self.plane).flat_map(weight).collect()
        })
    }

    /// The exponent whose code begins at a bit, and the code's length.
    fn code(&self, bit: u64) -> Option<(u8, u8)> {
        let rows: Vec<&[u8]> = self.luts.chunks(256).collect();
        let (lengths, luts) = rows.split_last()?;
        let mut lut = 0;
        for level in 0..4 {
            let value = luts.get(lut)?[bits(&self.codes, bit + 8 * level, 8) as usize];
            let length = lengths[usize::from(value)];
            if (8 * level + 1..=8 * level + 8).contains(&length.into()) {
                return Some((value, length));
            }
            if value < 240 {
                return None;
            }
            lut = 256 - usize::from(value);
        }
        None
    }
}

/// A number of up to eight bits, the first one the most significant; zeros follow the end.
fn bits(bytes: &[u8], bit: u64, count: u64) -> u64 {
    let byte = |at: u64| u64::from(bytes.get(at as usize).copied().unwrap_or(0));
    let two = byte(bit / 8) << 8 | byte(bit / 8 + 1);
    two >> (16 - count - bit % 8) & ((1 << count) - 1)
}
