//! Logits from compressed weights have the bits of those of candle's own Llama with BF16 weights:
//! on the CPU, and on a GPU with the feature `cuda` (`DF11_REQUIRE_GPU=1` makes a missing GPU a
//! failure).

use std::path::{Path, PathBuf};

use candle_core::{D, DType, Device, IndexOp as _, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{self, Config, Llama3RopeConfig, Llama3RopeType};
use df11::{CompressOptions, Source, hazmat::demo};
use df11_candle::{Cache, Llama, Mode, Weights};
use tempfile::TempDir;

const SHAPE: demo::Shape =
    demo::Shape { layers: 2, hidden: 128, key_value: 32, intermediate: 384, vocabulary: 256 };
const PROMPT: [u32; 7] = [3, 141, 59, 26, 5, 235, 97];
const MORE: usize = 4;

/// A checkpoint of BF16 weights, and the folder of its containers.
struct Models {
    folder: TempDir,
    checkpoint: PathBuf,
}

impl Models {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = demo::checkpoint(folder.path(), SHAPE, 7).unwrap();
        let source = Source::open(&checkpoint).unwrap();
        df11::compress(
            &source,
            &folder.path().join("compressed"),
            &CompressOptions::default(),
            &(),
        )
        .unwrap();
        Self { folder, checkpoint }
    }

    fn compressed(&self) -> PathBuf {
        self.folder.path().join("compressed")
    }

    /// The original files, read by candle.
    fn originals(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        let files = std::fs::read_dir(&self.checkpoint).unwrap().map(|entry| entry.unwrap().path());
        let files: Vec<_> =
            files.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
        let bytes = files.iter().map(|path| candle_core::safetensors::load(path, device).unwrap());
        VarBuilder::from_tensors(bytes.flatten().collect(), dtype, device)
    }
}

fn config(is_tied: bool, scaling: Option<Llama3RopeConfig>) -> Config {
    Config {
        hidden_size: SHAPE.hidden,
        intermediate_size: SHAPE.intermediate,
        vocab_size: SHAPE.vocabulary,
        num_hidden_layers: SHAPE.layers,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: scaling,
        max_position_embeddings: 64,
        tie_word_embeddings: is_tied,
    }
}

fn llama3() -> Llama3RopeConfig {
    Llama3RopeConfig {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 32,
        rope_type: Llama3RopeType::Llama3,
    }
}

/// Bits of logits after a prompt, and after each of some more tokens, the most likely ones; and
/// those.
type Said = (Vec<Vec<u32>>, Vec<u32>);

fn said(mut forward: impl FnMut(&[u32], usize) -> Result<Tensor>) -> Result<Said> {
    let (mut next, mut place, mut all, mut tokens) = (PROMPT.to_vec(), 0, Vec::new(), Vec::new());
    for _ in 0..=MORE {
        let logits = forward(&next, place)?;
        place += next.len();
        let bits = logits.to_vec1::<f32>()?.iter().map(|logit| logit.to_bits()).collect();
        all.push(bits);
        let token = logits.argmax(D::Minus1)?.to_scalar::<u32>()?;
        tokens.push(token);
        next = vec![token];
    }
    Ok((all, tokens))
}

/// Logits and tokens of candle's own model.
fn theirs(vb: VarBuilder<'_>, config: &Config, dtype: DType, device: &Device) -> Result<Said> {
    let model = llama::Llama::load(vb, config)?;
    let mut cache = llama::Cache::new(true, dtype, config, device)?;
    said(|tokens, place| {
        let ids = Tensor::new(tokens, device)?.unsqueeze(0)?;
        model.forward(&ids, place, &mut cache)?.i(0)
    })
}

fn ours(path: &Path, config: &Config, mode: Mode, dtype: DType, device: &Device) -> Result<Said> {
    let weights = Weights::open(path, device, mode)?;
    let model = Llama::new(&weights, config, dtype)?;
    let mut cache = Cache::new(config, dtype, device)?;
    let said = said(|tokens, _| model.forward(tokens, &mut cache))?;
    weights.check()?;
    let mut cache = Cache::new(config, dtype, device)?;
    assert_eq!(model.generate(&PROMPT, MORE + 1, &mut cache, |_| false)?, said.1);
    let mut cache = Cache::new(config, dtype, device)?;
    let end = said.1[2];
    assert!(model.generate(&PROMPT, MORE + 1, &mut cache, |token| token == end)?.len() <= 2);
    Ok(said)
}

fn logits_are_equal(dtype: DType, device: &Device) -> Result<()> {
    let models = Models::new();
    for (is_tied, scaling) in [(true, None), (false, Some(llama3()))] {
        let config = config(is_tied, scaling);
        let expected = theirs(models.originals(dtype, device), &config, dtype, device)?;
        let spread = expected.0.iter().flatten().collect::<std::collections::HashSet<_>>().len();
        assert!(spread > 100, "logits differ from each other");
        let found = ours(&models.compressed(), &config, Mode::Exact, dtype, device)?;
        assert_eq!(found, expected, "tied: {is_tied}");
        // Any model of candle, from the container as a backend.
        let weights = Weights::open(models.compressed(), device, Mode::Exact)?;
        let found = theirs(weights.var_builder(dtype), &config, dtype, device)?;
        assert_eq!(found, expected, "candle's model from a container, tied: {is_tied}");
    }
    Ok(())
}

#[test]
fn logits_on_the_cpu_have_the_bits_of_bf16_weights() -> Result<()> {
    logits_are_equal(DType::F32, &Device::Cpu)
}

#[test]
fn what_is_not_there_is_an_error() -> Result<()> {
    let models = Models::new();
    let weights = Weights::open(models.compressed(), &Device::Cpu, Mode::Exact)?;
    let vb = weights.var_builder(DType::F32);
    let missing = vb.get((2, 2), "none").unwrap_err().to_string();
    assert!(missing.contains("none"), "{missing}");
    let wrong = vb.get((2, 2), "model.norm.weight").unwrap_err().to_string();
    assert!(wrong.contains("shape mismatch"), "{wrong}");
    let mut wide = config(true, None);
    wide.intermediate_size += 1;
    let wrong = Llama::new(&weights, &wide, DType::F32).err().unwrap().to_string();
    assert!(wrong.contains("mlp.gate_proj.weight is Some(BF16) [384, 128]"), "{wrong}");
    let model = Llama::new(&weights, &config(true, None), DType::F32)?;
    let mut cache = Cache::new(&config(true, None), DType::F32, &Device::Cpu)?;
    let beyond = model.forward(&[SHAPE.vocabulary as u32], &mut cache).unwrap_err().to_string();
    assert!(beyond.contains("no indices 256..257"), "{beyond}");
    Ok(())
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::*;

    fn device() -> Option<Device> {
        let device = Device::new_cuda(0);
        if device.is_err() {
            assert!(std::env::var_os("DF11_REQUIRE_GPU").is_none(), "{device:?}");
            eprintln!("SKIPPED: no GPU");
        }
        device.ok()
    }

    #[test]
    fn logits_on_a_gpu_have_the_bits_of_bf16_weights() -> Result<()> {
        device().map_or(Ok(()), |device| logits_are_equal(DType::BF16, &device))
    }

    /// The largest difference is small beside the largest logit.
    #[test]
    fn fused_logits_on_a_gpu_are_close() -> Result<()> {
        let Some(device) = device() else { return Ok(()) };
        let (models, config) = (Models::new(), config(true, None));
        let exact = ours(&models.compressed(), &config, Mode::Exact, DType::BF16, &device)?;
        let fused = ours(&models.compressed(), &config, Mode::Fused, DType::BF16, &device)?;
        let values = |said: &Said| -> Vec<f32> {
            said.0[0].iter().map(|&bits| f32::from_bits(bits)).collect()
        };
        let pairs: Vec<_> = values(&exact).into_iter().zip(values(&fused)).collect();
        let largest = pairs.iter().fold(0f32, |most, (one, _)| most.max(one.abs()));
        let difference =
            pairs.iter().fold(0f32, |most, (one, other)| most.max((one - other).abs()));
        println!("largest logit {largest}, largest difference {difference}");
        assert!(difference > 0.0 && difference < largest / 16.0, "{difference} of {largest}");
        Ok(())
    }
}
