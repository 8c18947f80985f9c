//! Generates text from a folder of Hugging Face that df11 compressed:
//!
//! ```text
//! df11 compress Llama-3.2-1B -o Llama-3.2-1B-df11
//! cargo run --release -- Llama-3.2-1B-df11 "The capital of France is" [TOKENS] [exact|fused] [gpu]
//! ```

use std::{error::Error, fs, path::Path, time::Instant};

use candle_core::{DType, Device};
use candle_transformers::models::llama::{LlamaConfig, LlamaEosToks};
use df11_candle::{Cache, Llama, Mode, Weights};
use tokenizers::Tokenizer;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, prompt, rest @ ..] = &arguments[..] else {
        return Err("FOLDER PROMPT [TOKENS] [exact|fused] [gpu]".into());
    };
    let has = |word: &str| rest.iter().any(|other| other == word);
    let most = rest.iter().find_map(|word| word.parse().ok()).unwrap_or(50);
    let mode = if has("fused") { Mode::Fused } else { Mode::Exact };
    // candle multiplies no BF16 on the CPU; F32 holds every BF16 weight exactly.
    let (device, dtype) =
        if has("gpu") { (Device::new_cuda(0)?, DType::BF16) } else { (Device::Cpu, DType::F32) };

    let folder = Path::new(folder);
    let config: LlamaConfig = serde_json::from_slice(&fs::read(folder.join("config.json"))?)?;
    let config = config.into_config(false);
    let tokenizer =
        Tokenizer::from_file(folder.join("tokenizer.json")).map_err(|error| error.to_string())?;
    let start = Instant::now();
    let weights = Weights::open(folder, &device, mode)?;
    let model = Llama::new(&weights, &config, dtype)?;
    eprintln!("opened in {:.2} s", start.elapsed().as_secs_f64());

    let encoded = tokenizer.encode(prompt.as_str(), true).map_err(|error| error.to_string())?;
    let is_end = |token| match &config.eos_token_id {
        Some(LlamaEosToks::Single(end)) => token == *end,
        Some(LlamaEosToks::Multiple(ends)) => ends.contains(&token),
        None => false,
    };
    let start = Instant::now();
    let tokens = model.generate(
        encoded.get_ids(),
        most,
        &mut Cache::new(&config, dtype, &device)?,
        is_end,
    )?;
    let seconds = start.elapsed().as_secs_f64();
    println!("{prompt}{}", tokenizer.decode(&tokens, true).map_err(|error| error.to_string())?);
    eprintln!("{} tokens in {seconds:.2} s", tokens.len());
    Ok(())
}
