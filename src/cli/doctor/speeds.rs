//! Compresses and restores a small model, and measures the speed of each step on one core.

use std::{hint::black_box, path::Path};

use df11::{
    CompressOptions, Level, OpenOptions, Result, Source,
    hazmat::{
        demo::{self, Shape},
        gap::{GapGeometry, encode_tensor},
    },
};
use serde_json::json;

use super::Finding;
use crate::cli::{
    Failure,
    measure::{median_of, timed},
    session::check_interrupted,
};

/// A sample that takes tenths of a second.
const SAMPLE: Shape =
    Shape { layers: 2, hidden: 256, key_value: 64, intermediate: 512, vocabulary: 16_384 };
const SEED: u64 = 11;
const TIMES: usize = 5;
const REPEATS: usize = 8;
const PORTION_ELEMENTS: usize = 1 << 19;

/// `folder` takes the model.
pub(super) fn findings(folder: &Path) -> Result<Vec<Finding>, Failure> {
    let source = Source::open(&demo::checkpoint(folder, SAMPLE, SEED)?)?;
    let container = folder.join("model.df11");
    df11::compress(&source, &container, &CompressOptions::default(), &())?;
    let mut findings = vec![mapping(&container)];
    check_interrupted()?;
    findings.extend(codec(&largest(&source)?)?);
    Ok(findings)
}

/// Whether a container can be mapped and comes back the same.
fn mapping(container: &Path) -> Finding {
    let check = || -> Result<()> {
        OpenOptions::new().memory_map(true).open(container)?.verify(Level::Full, &()).map(drop)
    };
    match check() {
        Ok(()) => Finding::good(
            "mapping",
            "works; a small model was compressed, mapped and verified",
            json!(true),
        ),
        Err(error) => Finding::good("mapping", format!("fails: {error}"), json!(false))
            .with_remedy(
                true,
                "copy containers to a local disk, or open them with OpenOptions::memory_map(false)",
            ),
    }
}

/// The bytes of the largest tensor.
fn largest(source: &Source) -> Result<Vec<u8>> {
    let tensors = source
        .weights
        .iter()
        .flat_map(|file| file.tensors.iter().map(move |tensor| (file, tensor)));
    let Some((file, tensor)) = tensors.max_by_key(|(_, tensor)| tensor.length) else {
        return Ok(Vec::new());
    };
    let mut bytes = vec![0; tensor.length as usize];
    file.read_exact_at(tensor.offset, &mut bytes)?;
    Ok(bytes)
}

fn codec(weights: &[u8]) -> Result<Vec<Finding>> {
    // The bytes hashed do not fit into the caches that hold a tensor.
    let large = weights.repeat(REPEATS);
    let encode = || encode_tensor(weights, GapGeometry::default(), PORTION_ELEMENTS);
    let (encoded, elements) = (encode()?, 0..weights.len() as u64 / 2);
    Ok(vec![
        rate("checksum", "of CRC-32", large.len(), || Ok(crc32fast::hash(&large)))?,
        rate("hash", "of BLAKE3", large.len(), || Ok(blake3::hash(&large)))?,
        rate("encode", "of BF16 encoded", weights.len(), encode)?,
        rate("decode", "of BF16 decoded", weights.len(), || encoded.decode(elements.clone()))?,
    ])
}

/// The rate of work on this many bytes.
fn rate<T>(
    name: &'static str,
    what: &str,
    bytes: usize,
    work: impl Fn() -> Result<T>,
) -> Result<Finding> {
    let work = || work().map(|done| drop(black_box(done)));
    let seconds = median_of(TIMES, || Ok(timed(work)?.1))?;
    Ok(Finding::rate(name, &format!("{what}, one core"), bytes as u64, seconds))
}
