//! Seeded checkpoints of a Llama-like shape, for the demonstration, examples and tests.
//!
//! Weights come from normal distributions whose scale differs by matrix and by row, as in trained
//! models. The same shape and seed give the same bytes on every machine.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use rayon::prelude::*;
use serde_json::json;

use crate::{CompressOptions, Dtype, Error, Result, Source, bf16, compress, source::prefix_of};

/// The geometry of a checkpoint: a decoder with grouped-query attention and a tied head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of a key or value, in all heads together; less than `hidden`, since queries share
    /// them.
    pub key_value: usize,
    /// Width of the feed-forward network.
    pub intermediate: usize,
    /// Rows of the embedding.
    pub vocabulary: usize,
}

/// 88 MiB in six layers: the checkpoint of `df11 demo`.
pub const DEMO: Shape =
    Shape { layers: 6, hidden: 768, key_value: 192, intermediate: 2304, vocabulary: 8192 };

/// 1 MiB in four layers: for tests and examples.
pub const TINY: Shape =
    Shape { layers: 4, hidden: 128, key_value: 32, intermediate: 256, vocabulary: 512 };

/// A small generator of seeded normal numbers: xorshift64* (Vigna 2016, An experimental exploration
/// of Marsaglia's xorshift generators) and the sum of twelve uniform numbers, whose distribution is
/// normal as far as a demonstration cares.
struct Normal(u64);

impl Normal {
    /// Seeds that differ by one give unrelated numbers: splitmix64's finaliser (Steele, Lea, Flood
    /// 2014).
    fn seeded(seed: u64) -> Self {
        let mut state = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        state = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        state = (state ^ state >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        Self((state ^ state >> 31) | 1)
    }

    fn uniform(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40) as f32 / (1 << 24) as f32
    }

    fn next(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }
}

/// A tensor for a safetensors file.
struct DemoTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

struct Builder {
    seed: u64,
    /// Made so far.
    matrices: u64,
    tensors: Vec<DemoTensor>,
}

impl Builder {
    /// A matrix whose rows have scales of their own around `scale`, each row of a generator of its
    /// own.
    fn matrix(&mut self, name: &str, rows: usize, columns: usize, scale: f32) {
        self.matrices += 1;
        let seed = self.seed ^ self.matrices.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut bytes = vec![0; 2 * rows * columns];
        bytes.par_chunks_exact_mut(2 * columns).enumerate().for_each(|(row, bytes)| {
            let mut normal = Normal::seeded(seed.wrapping_add(row as u64));
            let scale = scale * (0.3 * normal.next()).exp();
            for out in bytes.chunks_exact_mut(2) {
                let weight = half::bf16::from_f32(scale * normal.next());
                out.copy_from_slice(&weight.to_bits().to_le_bytes());
            }
        });
        self.push(name, Dtype::BF16, &[rows, columns], bytes);
    }

    fn ones(&mut self, name: &str, count: usize) {
        let one = bf16::weight(127, 0).to_le_bytes();
        self.push(name, Dtype::BF16, &[count], one.repeat(count));
    }

    fn push(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) {
        let shape = shape.iter().map(|&dimension| dimension as u64).collect();
        self.tensors.push(DemoTensor { name: name.to_owned(), dtype, shape, bytes });
    }

    fn layer(&mut self, index: usize, shape: Shape) {
        let name = |part: &str| format!("model.layers.{index}.{part}.weight");
        let Shape { hidden, key_value, intermediate, .. } = shape;
        let scale = 0.02 + 0.002 * index as f32;
        self.ones(&name("input_layernorm"), hidden);
        self.matrix(&name("self_attn.q_proj"), hidden, hidden, scale);
        self.matrix(&name("self_attn.k_proj"), key_value, hidden, 1.5 * scale);
        self.matrix(&name("self_attn.v_proj"), key_value, hidden, 0.5 * scale);
        self.matrix(&name("self_attn.o_proj"), hidden, hidden, 0.7 * scale);
        self.ones(&name("post_attention_layernorm"), hidden);
        self.matrix(&name("mlp.gate_proj"), intermediate, hidden, scale);
        self.matrix(&name("mlp.up_proj"), intermediate, hidden, 0.8 * scale);
        self.matrix(&name("mlp.down_proj"), hidden, intermediate, 0.6 * scale);
    }
}

/// Writes a checkpoint into the folder `folder/model`, as Hugging Face models have it: two shards
/// with an index, configuration and tokenizer, a tied head that is stored twice, and some tensors
/// that are not BF16. Returns that folder.
///
/// # Errors
/// [`Error::Io`] if a file cannot be written.
pub fn checkpoint(folder: &Path, shape: Shape, seed: u64) -> Result<PathBuf> {
    let mut builder = Builder { seed, matrices: 0, tensors: Vec::new() };
    builder.matrix("model.embed_tokens.weight", shape.vocabulary, shape.hidden, 0.02);
    for index in 0..shape.layers / 2 {
        builder.layer(index, shape);
    }
    let first = std::mem::take(&mut builder.tensors);
    let head = first[0].bytes.clone();
    for index in shape.layers / 2..shape.layers {
        builder.layer(index, shape);
    }
    builder.ones("model.norm.weight", shape.hidden);
    let frequencies =
        (0..32).flat_map(|i| (1e4f32.powf(-(i as f32) / 32.0)).to_le_bytes()).collect();
    builder.push("model.rotary_emb.inv_freq", Dtype::F32, &[32], frequencies);
    let positions = (0..64u64).flat_map(u64::to_le_bytes).collect();
    // Loaders of transformers and vLLM pass over what has this name in it.
    builder.push("model.rotary_emb.inv_freq_positions", Dtype::I64, &[1, 64], positions);
    builder.push("lm_head.weight", Dtype::BF16, &[shape.vocabulary, shape.hidden], head);
    write(&folder.join("model"), shape, [first, builder.tensors])
}

fn write(folder: &Path, shape: Shape, mut shards: [Vec<DemoTensor>; 2]) -> Result<PathBuf> {
    fs::create_dir_all(folder).map_err(|error| Error::io("creating", folder, error))?;
    let mut map = serde_json::Map::new();
    for (index, shard) in (1..).zip(&mut shards) {
        let name = format!("model-{index:05}-of-00002.safetensors");
        write_tensors(&folder.join(&name), shard)?;
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
    }
    let total: usize = shards.iter().flatten().map(|tensor| tensor.bytes.len()).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    let head = if shape.key_value.is_multiple_of(64) { 64 } else { shape.key_value };
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.hidden / head,
        "num_key_value_heads": shape.key_value / head,
        "head_dim": head,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
    });
    for (name, json) in [
        ("model.safetensors.index.json", index),
        ("config.json", config),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", json!({ "tokenizer_class": "PreTrainedTokenizerFast" })),
    ] {
        let path = folder.join(name);
        fs::write(&path, format!("{json:#}\n"))
            .map_err(|error| Error::io("writing", &path, error))?;
    }
    Ok(folder.to_owned())
}

/// A tokenizer whose tokens are the 256 bytes. GPT-2's alphabet shows those that do not print as
/// letters from U+0100 on.
fn tokenizer() -> serde_json::Value {
    let prints = |byte| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    let mut others = '\u{100}'..;
    let letter = |byte: u8| {
        if prints(byte) { char::from(byte) } else { others.next().unwrap_or_default() }
    };
    let letters = (0..=255u8).map(letter).map(String::from);
    let vocab: BTreeMap<String, usize> = letters.zip(0..).collect();
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": bytes,
        "decoder": bytes,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
}

/// Writes a safetensors file as its library would: tensors by descending dtype, then by name.
fn write_tensors(path: &Path, tensors: &mut [DemoTensor]) -> Result<()> {
    tensors.sort_by(|a, b| (Reverse(a.dtype), &a.name).cmp(&(Reverse(b.dtype), &b.name)));
    let described = tensors
        .iter()
        .map(|tensor| (&*tensor.name, tensor.dtype, &*tensor.shape, tensor.bytes.len() as u64));
    let prefix = prefix_of(Some(&json!({ "format": "pt" })), described)?;
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(&prefix)?;
        tensors.iter().try_for_each(|tensor| file.write_all(&tensor.bytes))
    };
    write().map_err(|error| Error::io("writing", path, error))
}

/// A checkpoint of 1 MiB in `folder/model`. Returns that folder.
///
/// # Errors
/// Like [`checkpoint`].
pub fn tiny_checkpoint(folder: &Path) -> Result<PathBuf> {
    checkpoint(folder, TINY, 11)
}

/// The tiny checkpoint, compressed, as `folder/model.df11`. Returns its path.
///
/// # Errors
/// Like [`checkpoint`] and [`compress`].
pub fn tiny_container(folder: &Path) -> Result<PathBuf> {
    let source = Source::open(&tiny_checkpoint(folder)?)?;
    let path = folder.join("model.df11");
    compress(&source, &path, &CompressOptions::default(), &())?;
    Ok(path)
}
