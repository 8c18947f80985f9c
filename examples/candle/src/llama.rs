//! A Llama whose matrices stay compressed. Its operations are those of candle's own, in their
//! order, so that logits have the same bits.

use std::f32::consts::PI;

use candle_core::{D, DType, Device, IndexOp as _, Module as _, Result, Tensor};
use candle_nn::{RmsNorm, VarBuilder, ops, rms_norm, rotary_emb::rope};
use candle_transformers::{
    models::llama::{Config, Llama3RopeType},
    utils::{build_causal_mask, repeat_kv},
};

use crate::{Embedding, Linear, Weights};

/// Keys and values of each layer, computed of the tokens so far.
#[derive(Clone)]
pub struct Cache {
    layers: Vec<Option<(Tensor, Tensor)>>,
    cosines: Tensor,
    sines: Tensor,
    tokens: usize,
}

impl Cache {
    /// A cache of no tokens yet.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn new(config: &Config, dtype: DType, device: &Device) -> Result<Self> {
        let frequencies = frequencies(config);
        let frequencies = Tensor::new(frequencies.as_slice(), device)?.unsqueeze(0)?;
        let most = config.max_position_embeddings;
        let positions =
            Tensor::arange(0, most as u32, device)?.to_dtype(DType::F32)?.unsqueeze(1)?;
        let angles = positions.matmul(&frequencies)?;
        Ok(Self {
            layers: vec![None; config.num_hidden_layers],
            cosines: angles.cos()?.to_dtype(dtype)?,
            sines: angles.sin()?.to_dtype(dtype)?,
            tokens: 0,
        })
    }

    /// Adds keys and values of new tokens of a layer; all of them.
    fn extend(&mut self, layer: usize, keys: Tensor, values: Tensor) -> Result<(Tensor, Tensor)> {
        let all = match &self.layers[layer] {
            Some((k, v)) => (Tensor::cat(&[k, &keys], 2)?, Tensor::cat(&[v, &values], 2)?),
            None => (keys, values),
        };
        self.layers[layer] = Some(all.clone());
        Ok(all)
    }

    /// Queries or keys of new tokens, turned by their positions.
    fn turn(&self, x: &Tensor) -> Result<Tensor> {
        let count = x.dim(2)?;
        let (cos, sin) = (
            self.cosines.narrow(0, self.tokens, count)?,
            self.sines.narrow(0, self.tokens, count)?,
        );
        rope(x, &cos, &sin)
    }
}

/// Frequencies of the rotary embedding, one for each pair of a head's elements.
fn frequencies(config: &Config) -> Vec<f32> {
    let head = config.hidden_size / config.num_attention_heads;
    let plain =
        (0..head).step_by(2).map(|at| 1f32 / config.rope_theta.powf(at as f32 / head as f32));
    let Some(scaling) =
        config.rope_scaling.as_ref().filter(|s| matches!(s.rope_type, Llama3RopeType::Llama3))
    else {
        return plain.collect();
    };
    let original = scaling.original_max_position_embeddings as f32;
    let (long, short) = (original / scaling.low_freq_factor, original / scaling.high_freq_factor);
    let scaled = |frequency: f32| {
        let length = 2. * PI / frequency;
        if length < short {
            return frequency;
        }
        if length > long {
            return frequency / scaling.factor;
        }
        let range = scaling.high_freq_factor - scaling.low_freq_factor;
        let share = (original / length - scaling.low_freq_factor) / range;
        (1. - share) * frequency / scaling.factor + share * frequency
    };
    plain.map(scaled).collect()
}

struct Layer {
    index: usize,
    norms: [RmsNorm; 2],
    qkv: [Linear; 3],
    output: Linear,
    gate_up: [Linear; 2],
    down: Linear,
    /// Heads of queries, and of keys and values.
    heads: [usize; 2],
}

impl Layer {
    fn new(weights: &Weights, index: usize, config: &Config, vb: &VarBuilder) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let heads = [config.num_attention_heads, config.num_key_value_heads];
        let few = hidden / heads[0] * heads[1];
        let norm = |name| rms_norm(hidden, config.rms_norm_eps, vb.pp(name));
        let linear = |name: &str, shape| Linear::new(weights, shape, &vb.pp(name));
        Ok(Self {
            index,
            norms: [norm("input_layernorm")?, norm("post_attention_layernorm")?],
            qkv: [
                linear("self_attn.q_proj", (hidden, hidden))?,
                linear("self_attn.k_proj", (hidden, few))?,
                linear("self_attn.v_proj", (hidden, few))?,
            ],
            output: linear("self_attn.o_proj", (hidden, hidden))?,
            gate_up: [
                linear("mlp.gate_proj", (hidden, inner))?,
                linear("mlp.up_proj", (hidden, inner))?,
            ],
            down: linear("mlp.down_proj", (inner, hidden))?,
            heads,
        })
    }

    fn forward(&self, x: &Tensor, mask: Option<&Tensor>, cache: &mut Cache) -> Result<Tensor> {
        let x = (self.attend(&self.norms[0].forward(x)?, mask, cache)? + x)?;
        let normed = self.norms[1].forward(&x)?;
        let gate = ops::silu(&self.gate_up[0].forward(&normed)?)?;
        let inner = (gate * self.gate_up[1].forward(&normed)?)?;
        self.down.forward(&inner)? + x
    }

    fn attend(&self, x: &Tensor, mask: Option<&Tensor>, cache: &mut Cache) -> Result<Tensor> {
        let (batch, count, width) = x.dims3()?;
        let [heads, few] = self.heads;
        let split = |linear: &Linear, heads| {
            linear.forward(x)?.reshape((batch, count, heads, ()))?.transpose(1, 2)?.contiguous()
        };
        let q = cache.turn(&split(&self.qkv[0], heads)?)?;
        let k = cache.turn(&split(&self.qkv[1], few)?)?;
        let (k, v) = cache.extend(self.index, k, split(&self.qkv[2], few)?)?;
        let wide = |x| repeat_kv(x, heads / few)?.to_dtype(DType::F32);
        let (q, k, v) = (q.to_dtype(DType::F32)?, wide(k)?, wide(v)?);
        let scale = ((width / heads) as f64).sqrt();
        let mut scores = (q.matmul(&k.t()?)? / scale)?;
        if let Some(mask) = mask {
            let hidden =
                Tensor::new(f32::NEG_INFINITY, x.device())?.broadcast_as(scores.shape())?;
            scores = mask.broadcast_as(scores.shape())?.where_cond(&hidden, &scores)?;
        }
        let shares = ops::softmax_last_dim(&scores)?;
        let sums = shares.matmul(&v.contiguous()?)?.to_dtype(x.dtype())?;
        self.output.forward(&sums.transpose(1, 2)?.reshape((batch, count, width))?)
    }
}

/// A Llama (1 to 3) whose matrices stay compressed; norms are decoded once.
pub struct Llama {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    weights: Weights,
}

impl Llama {
    /// Builds the model from weights with the names that Hugging Face gives them.
    ///
    /// # Errors
    /// If a weight is missing or of another shape; failures of the device.
    pub fn new(weights: &Weights, config: &Config, dtype: DType) -> Result<Self> {
        let vb = weights.var_builder(dtype);
        let model = vb.pp("model");
        let head =
            if config.tie_word_embeddings { model.pp("embed_tokens") } else { vb.pp("lm_head") };
        let layer = |at| Layer::new(weights, at, config, &model.pp("layers").pp(at));
        Ok(Self {
            embedding: Embedding::new(weights, &model.pp("embed_tokens"))?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            norm: rms_norm(config.hidden_size, config.rms_norm_eps, model.pp("norm"))?,
            head: Linear::new(weights, (config.hidden_size, config.vocab_size), &head)?,
            weights: weights.clone(),
        })
    }

    /// Logits (F32) of the token after these, which come after those that the cache knows.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn forward(&self, tokens: &[u32], cache: &mut Cache) -> Result<Tensor> {
        let device = self.weights.device();
        let ids = Tensor::new(tokens, device)?.unsqueeze(0)?;
        let is_many = tokens.len() > 1;
        let mask = if is_many {
            Some(build_causal_mask(tokens.len(), cache.tokens, device)?)
        } else {
            None
        };
        let mut x = self.embedding.forward(&ids)?;
        for layer in &self.layers {
            x = layer.forward(&x, mask.as_ref(), cache)?;
        }
        cache.tokens += tokens.len();
        let last = self.norm.forward(&x)?.i((.., tokens.len() - 1, ..))?.contiguous()?;
        self.head.forward(&last)?.to_dtype(DType::F32)?.squeeze(0)
    }

    /// The most likely tokens after these, at most `most`; ends before one that `is_end` names.
    ///
    /// # Errors
    /// Failures of the device; weights that are damaged.
    pub fn generate(
        &self,
        tokens: &[u32],
        most: usize,
        cache: &mut Cache,
        is_end: impl Fn(u32) -> bool,
    ) -> Result<Vec<u32>> {
        let (mut next, mut made) = (tokens.to_vec(), Vec::new());
        while made.len() < most {
            let token = self.forward(&next, cache)?.argmax(D::Minus1)?.to_scalar::<u32>()?;
            self.weights.check()?;
            if is_end(token) {
                break;
            }
            made.push(token);
            next = vec![token];
        }
        Ok(made)
    }
}
