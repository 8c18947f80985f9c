//! Reads a checkpoint's config.json, and infers the shapes of matrices from it. The checkpoint does
//! not contain these shapes: the package's loader takes them from the model's code.
//!
//! These facts are used, in this order:
//! 1. A linear layer's bias is stored, and has an element a row.
//! 2. An embedding or a head is `[vocabulary, width]`. The width of the hidden state is in
//!    config.json, and is the length of the norms that stand directly in a block.
//! 3. In a transformer block, most layers either read the hidden state, and its width is their
//!    number of columns, or write it, and its width is their number of rows. Their names tell
//!    which: a handful of names in all architectures. The other dimension must be among the widths
//!    in config.json (heads × head size, intermediate size, ..), if it has any.
//!
//! A shape that does not follow from these facts is not guessed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    slice,
};

use regex_lite::{Regex, RegexBuilder};
use serde::Deserialize;
use serde_json::Value;

use super::coded::BYTES_PER_THREAD;
use crate::{Error, Result, io::read_regular, source::header};

/// The longest config.json, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// The most patterns, and the most bytes that one takes when it is compiled: 16 MiB for all of
/// them, where a checkpoint has a handful of some KB.
const MAX_PATTERNS: u64 = 256;
const MAX_PATTERN_BYTES: usize = 64 << 10;

/// Where config.json keeps the language model's part, besides its top.
const PARTS: &[&str] = &["text_config", "llm_config", "language_config"];
const WIDTH_KEYS: &[&str] = &["hidden_size", "n_embd", "d_model"];
/// Keys of widths that a layer inside a block may have on its other side, also doubled (gate and up
/// in one).
const INNER_KEYS: &[&str] = &[
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_hidden_size",
    "n_inner",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
];
/// Layers that read the hidden state: `[.., width]`.
const READS: &[&str] = &[
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "wq",
    "wk",
    "wv",
    "wqkv",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "gate",
    "w1",
    "w3",
    "fc1",
    "dense_h_to_4h",
    "query_key_value",
];
/// Layers that write it: `[width, ..]`.
const WRITES: &[&str] = &["o_proj", "out_proj", "wo", "down_proj", "w2", "fc2", "dense_4h_to_h"];
/// Modules of one matrix with a row a token.
const TOKENS: &[&str] = &[
    "embed_tokens",
    "tok_embeddings",
    "word_embeddings",
    "wte",
    "embed_in",
    "lm_head",
    "embed_out",
];

/// A config.json with a `dfloat11_config`.
pub(super) struct Config {
    pub(super) version: Option<String>,
    /// Threads of a thread block, 1..=1024.
    pub(super) threads_per_block: u64,
    /// Names of matrices for each pattern of module names.
    pub(super) patterns: Vec<(Regex, Vec<String>)>,
    /// All of it, for what it says of the model.
    pub(super) json: Value,
}

#[derive(Deserialize)]
struct PackageConfig {
    version: Option<String>,
    threads_per_block: ThreadsPerBlock,
    bytes_per_thread: u64,
    pattern_dict: BTreeMap<String, Vec<String>>,
}

/// CUDA's dimensions, or the first of them.
#[derive(Deserialize)]
#[serde(untagged)]
enum ThreadsPerBlock {
    One(u64),
    List([u64; 1]),
}

impl Config {
    /// Reads a config.json; `None` if there is none, or none of the package.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is not what the package writes; [`Error::Unsupported`] for a
    /// geometry that its kernel does not have, or a pattern beyond ours; [`Error::Limit`] for a
    /// config, or a number of patterns, that no checkpoint has; [`Error::Io`].
    pub(super) fn read(file: &Path) -> Result<Option<Self>> {
        let length = match fs::metadata(file) {
            Ok(metadata) if metadata.is_file() => metadata.len(),
            _ => return Ok(None),
        };
        let place = file.display();
        Error::check_limit(format_args!("{place}: its length in bytes"), length, MAX_CONFIG_BYTES)?;
        let bytes = read_regular(file, MAX_CONFIG_BYTES)?;
        let invalid = |error| {
            Error::corrupt(&place, 0, format!("not the config of a DFloat11 checkpoint: {error}"))
        };
        let json: Value = header::from_slice(&bytes).map_err(invalid)?;
        let Some(own) = json.get("dfloat11_config") else { return Ok(None) };
        let own = PackageConfig::deserialize(own).map_err(invalid)?;
        let (ThreadsPerBlock::One(threads_per_block) | ThreadsPerBlock::List([threads_per_block])) =
            own.threads_per_block;
        if own.bytes_per_thread != BYTES_PER_THREAD || !(1..=1024).contains(&threads_per_block) {
            let what = format!(
                "{place}: {} bytes per thread, {threads_per_block} threads",
                own.bytes_per_thread
            );
            return Err(Error::unsupported(what, "compress the original BF16 files"));
        }
        let what = format_args!("{place}: the number of patterns in its pattern_dict");
        Error::check_limit(what, own.pattern_dict.len() as u64, MAX_PATTERNS)?;
        let patterns = own.pattern_dict.into_iter().map(|(pattern, attributes)| {
            let mut regex = RegexBuilder::new(&format!("^(?:{pattern})$"));
            let regex = regex.size_limit(MAX_PATTERN_BYTES).build().map_err(|error| {
                let what = format!("{place}: the pattern {pattern:?} ({error})").replace('\n', " ");
                Error::unsupported(what, "write it in plain regular expressions")
            })?;
            Ok((regex, attributes))
        });
        let patterns = patterns.collect::<Result<_>>()?;
        Ok(Some(Self { version: own.version, threads_per_block, patterns, json }))
    }
}

/// The known widths of a model.
#[derive(Default)]
pub(super) struct ModelGeometry {
    width: Option<u64>,
    vocabulary: Option<u64>,
    /// The widths of inner layers; none if they are unknown.
    inner: BTreeSet<u64>,
}

impl ModelGeometry {
    /// Finds the widths in config.json, and in the shapes of the tensors that are stored as they
    /// are. `modules` end with a dot, and ascend.
    pub(super) fn new<'a>(
        config: &Value,
        modules: &[String],
        tensors: impl Iterator<Item = (&'a str, &'a [u64])>,
    ) -> Self {
        let mut parts =
            std::iter::once(config).chain(PARTS.iter().filter_map(|part| config.get(part)));
        match parts
            .find_map(|part| Some((part, WIDTH_KEYS.iter().find_map(|key| number(part, key))?)))
        {
            Some((part, width)) => Self {
                width: Some(width),
                vocabulary: number(part, "vocab_size"),
                inner: inner(part, width),
            },
            None => Self { width: norms(modules, tensors), ..Self::default() },
        }
    }

    /// The shape of a matrix of this many weights, if it is known. `path` is that of its module,
    /// `whole` tells that the module is all of its block.
    pub(super) fn shape(
        &self,
        path: &str,
        whole: bool,
        weights: u64,
        bias: Option<&[u64]>,
    ) -> Option<Vec<u64>> {
        let split = |rows: u64| {
            (rows > 0 && weights.is_multiple_of(rows)).then(|| vec![rows, weights / rows])
        };
        if let Some(&[rows]) = bias {
            return split(rows);
        }
        let width = self.width.filter(|&width| width > 0 && weights.is_multiple_of(width))?;
        let other = weights / width;
        let name = path.rsplit('.').next().unwrap_or(path);
        if whole {
            let known =
                self.vocabulary.map_or_else(|| TOKENS.contains(&name), |rows| rows == other);
            return known.then(|| vec![other, width]);
        }
        if !self.inner.is_empty() && !self.inner.contains(&other) {
            return None;
        }
        if is_one_of(name, READS) {
            Some(vec![other, width])
        } else {
            is_one_of(name, WRITES).then(|| vec![width, other])
        }
    }
}

/// Whether a name is one of these, or one of them with a suffix (`q_proj_moe_gen`).
fn is_one_of(name: &str, names: &[&str]) -> bool {
    names.iter().any(|known| {
        name.strip_prefix(known).is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('_'))
    })
}

fn number(config: &Value, key: &str) -> Option<u64> {
    config.get(key)?.as_u64()
}

/// The widths of a block's layers except for that of the hidden state; empty if the config does not
/// tell those of heads.
fn inner(config: &Value, width: u64) -> BTreeSet<u64> {
    let Some(heads) = number(config, "num_attention_heads").filter(|&heads| heads > 0) else {
        return BTreeSet::new();
    };
    let groups = number(config, "num_key_value_heads").unwrap_or(heads);
    let head = number(config, "head_dim").unwrap_or(width / heads);
    let (query, key) = (heads.saturating_mul(head), groups.saturating_mul(head));
    // Queries with a gate, and all three in one.
    let mut widths = BTreeSet::from([
        query,
        key,
        query.saturating_mul(2),
        query.saturating_add(key.saturating_mul(2)),
    ]);
    for value in INNER_KEYS.iter().filter_map(|name| config.get(name)) {
        let values = value.as_array().map_or(slice::from_ref(value), Vec::as_slice);
        widths.extend(
            values
                .iter()
                .filter_map(Value::as_u64)
                .flat_map(|width| [width, width.saturating_mul(2)]),
        );
    }
    widths
}

/// The one length of all norms that stand directly in a module.
fn norms<'a>(
    modules: &[String],
    tensors: impl Iterator<Item = (&'a str, &'a [u64])>,
) -> Option<u64> {
    let lengths: BTreeSet<u64> = tensors
        .filter_map(|(name, shape)| {
            let path = name.strip_suffix("norm.weight")?;
            let module = &path[..=path.rfind('.')?];
            let &[length] = shape else { return None };
            modules.binary_search_by(|coded| coded.as_str().cmp(module)).is_ok().then_some(length)
        })
        .collect();
    if lengths.len() == 1 { lengths.first().copied() } else { None }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn known(config: &Value) -> ModelGeometry {
        ModelGeometry::new(config, &[], std::iter::empty())
    }

    #[test]
    fn from_the_config() {
        let qwen = known(&json!({
            "hidden_size": 2560, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 9728, "vocab_size": 151_936
        }));
        let shape = |path, weights| qwen.shape(path, false, weights, None);
        assert_eq!(shape("l.0.self_attn.q_proj", 2560 * 4096), Some(vec![4096, 2560]));
        assert_eq!(shape("l.0.self_attn.o_proj", 2560 * 4096), Some(vec![2560, 4096]));
        assert_eq!(shape("l.0.mlp.down_proj", 2560 * 9728), Some(vec![2560, 9728]));
        assert_eq!(shape("l.0.mlp.up_proj_moe_gen", 2560 * 9728), Some(vec![9728, 2560]));
        assert_eq!(shape("l.0.mlp.up_proj", 2560 * 9729), None, "not a width of this model");
        assert_eq!(shape("l.0.mlp.up_proj", 2561 * 9728), None);
        assert_eq!(shape("l.0.mlp.mixer", 2560 * 9728), None, "nothing tells which side is which");
        assert_eq!(qwen.shape("head", true, 2560 * 151_936, None), Some(vec![151_936, 2560]));
        assert_eq!(qwen.shape("lm_head", true, 2560 * 151_935, None), None);
    }

    #[test]
    fn from_biases_and_norms() {
        let modules = ["l.0.".to_owned(), "l.1.".to_owned()];
        let norms: [(&str, &[u64]); 4] = [
            ("l.0.norm.weight", &[6]),
            ("l.1.input_layernorm.weight", &[6]),
            ("l.0.a.q_norm.weight", &[2]),
            ("norm.weight", &[9]),
        ];
        let geometry = ModelGeometry::new(&Value::Null, &modules, norms.into_iter());
        assert_eq!(geometry.shape("l.0.a.q_proj", false, 30, None), Some(vec![5, 6]));
        assert_eq!(geometry.shape("lm_head", true, 30, None), Some(vec![5, 6]));
        assert_eq!(geometry.shape("something", true, 30, None), None);
        assert_eq!(geometry.shape("l.0.x", false, 30, Some(&[15])), Some(vec![15, 2]));
        assert_eq!(geometry.shape("l.0.x", false, 30, Some(&[4])), None);
        assert_eq!(known(&Value::Null).shape("l.0.a.q_proj", false, 30, None), None);
    }

    #[test]
    fn hostile_numbers() {
        let huge = u64::MAX;
        let config = json!({
            "hidden_size": huge, "num_attention_heads": huge, "head_dim": huge,
            "intermediate_size": [huge, -1, "x"],
        });
        assert_eq!(known(&config).shape("q_proj", false, huge, None), None);
        assert_eq!(known(&json!({ "hidden_size": 0 })).shape("q_proj", false, 6, None), None);
        assert_eq!(known(&json!([])).shape("q_proj", false, 6, Some(&[0])), None);
    }
}
