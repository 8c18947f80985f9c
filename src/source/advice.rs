//! What the user should know of a source before it is compressed: that little of it is, or that
//! nothing will load it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{LeftOut, SideFile, Source, WeightsFile, variant};
use crate::{Dtype, Error, Result, paths::is_config};

/// The largest configuration that is looked at, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// A sentence for each thing that is worth one, except what [`little_to_code`] says.
pub(super) fn advice(source: &Source) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    let is_bf16 = |file: &LeftOut| file.reason == variant::reason("bf16");
    if little_to_code(&source.weights).is_some() && source.left_out.iter().any(is_bf16) {
        notes.push(
            "a BF16 variant of these weights was left out: --variant bf16 takes it".to_owned(),
        );
    }
    for side in &source.side {
        notes.extend(quantized_already(source, side)?);
    }
    Ok(notes)
}

/// That less than half of the weights' bytes are BF16, the dtype that is coded.
pub(super) fn little_to_code<'a>(
    weights: impl IntoIterator<Item = &'a WeightsFile>,
) -> Option<String> {
    let mut bytes: BTreeMap<&str, u64> = BTreeMap::new();
    for tensor in weights.into_iter().flat_map(|file| &file.tensors) {
        *bytes.entry(tensor.dtype.name()).or_default() += tensor.length;
    }
    let total: u64 = bytes.values().sum();
    let coded = bytes.remove(Dtype::BF16.name()).unwrap_or_default();
    if total == 0 || coded >= total.div_ceil(2) {
        return None;
    }
    let (most, _) = bytes.into_iter().max_by_key(|&(_, count)| count)?;
    let how_much = match coded {
        0 => "none of the weights are BF16".to_owned(),
        _ => format!(
            "only {:.1} % of the weights' bytes are BF16",
            100.0 * coded as f64 / total as f64
        ),
    };
    Some(format!(
        "{how_much} (most are {most}): only BF16 is coded, and everything else is stored as it is, \
        at its full size. A lossless tool may do no more; converting the model to BF16 first would \
        round its weights, which changes what it answers: do so only if that is wanted, with \
        model.to(torch.bfloat16).save_pretrained(...), and compress the result"
    ))
}

/// That transformers would not find compressed weights, because a configuration names another
/// quantization.
fn quantized_already(source: &Source, side: &SideFile) -> Result<Option<String>> {
    let mut weights = source.weights.iter().map(|file| &*file.path);
    if !is_config(&side.path, &mut weights) || side.length > MAX_CONFIG_BYTES {
        return Ok(None);
    }
    let bytes =
        std::fs::read(&side.file).map_err(|error| Error::io("reading", &side.file, error))?;
    let Ok(config) = serde_json::from_slice::<Value>(&bytes) else { return Ok(None) };
    let Some(named) = config.get("quantization_config") else { return Ok(None) };
    let method = named.get("quant_method").and_then(Value::as_str);
    let remedy = match method {
        Some("df11") => return Ok(None),
        Some(_) => {
            "compress the BF16 model that it was made from to have one that loads; this one comes \
            back with df11 decompress, byte for byte"
        }
        None => "take it out of the file to have a folder that loads",
    };
    Ok(Some(format!(
        "{} has a quantization_config already ({}), which stays as it is: from_pretrained of \
        transformers will not load the compressed weights; {remedy}",
        side.path,
        method.unwrap_or("of no method")
    )))
}
