//! Lists the GPUs, and measures the first one for a second: copies within its memory and from the
//! host, decoding, and loading.

use std::path::Path;

use df11::{
    CompressOptions, Error, Source,
    gpu::{Device, LoadOptions, devices, has_driver},
    hazmat::{
        TemporaryFolder,
        demo::{self, Shape},
    },
};
use serde_json::json;

use super::Finding;
use crate::cli::{
    Failure,
    measure::{BlockDecoder, median_of, timed},
    session::check_interrupted,
    text::{self, percent},
};

/// More than any cache holds; each copy takes some tenths of a millisecond, and from the host some
/// milliseconds.
const COPY_BYTES: u64 = 512 << 20;
const UPLOAD_BYTES: u64 = 64 << 20;
/// The sample that is decoded and loaded: layers of some 130 MB together, so that most of it comes
/// from memory and not from a cache.
const SAMPLE: Shape =
    Shape { layers: 2, hidden: 2048, key_value: 512, intermediate: 3584, vocabulary: 1024 };
const SEED: u64 = 11;
const TIMES: usize = 3;

/// Rates are left out if `folder` is `None`: there is no place for weights, and another finding
/// says so.
pub(super) fn findings(folder: Option<&TemporaryFolder>) -> Result<Vec<Finding>, Failure> {
    // Kept open, so that it starts once.
    let opened = Device::open(0).ok();
    let mut findings = vec![device()];
    if let (Some(device), Some(folder)) = (&opened, folder) {
        let rates = rates(device, folder.path());
        check_interrupted()?;
        findings.extend(rates.unwrap_or_else(|error| vec![not_measured(error)]));
    }
    Ok(findings)
}

/// The GPUs, and whether the kernels load on the first one.
fn device() -> Finding {
    let all = match devices() {
        Ok(all) => all,
        Err(error) => return no_gpu(error),
    };
    let names: Vec<String> = all
        .iter()
        .map(|info| {
            let ((major, minor), memory) = (info.driver, text::bytes(info.total_memory));
            format!("{}, {memory}, driver of CUDA {major}.{minor}", info.name)
        })
        .collect();
    let value = json!({ "supported": true, "devices": names });
    match Device::open(0) {
        Ok(_) => Finding::good("gpu", format!("{}; the kernels load", names.join("; ")), value),
        Err(error) => {
            let (problem, remedy) = refused(error);
            let text = format!("{}; GPU 0 does not work: {problem}", names.join("; "));
            Finding::good("gpu", text, value).with_remedy(true, &remedy)
        }
    }
}

/// A missing driver is not a problem, and the finding says what a GPU would need; a driver that
/// does not work is one.
fn no_gpu(error: Error) -> Finding {
    let (problem, remedy) = refused(error);
    let (text, value) =
        (format!("none in use: {problem}"), json!({ "supported": true, "devices": [] }));
    if has_driver() {
        Finding::good("gpu", text, value).with_remedy(true, &remedy)
    } else {
        Finding::good("gpu", format!("{text}; {remedy}"), value)
    }
}

fn refused(error: Error) -> (String, String) {
    match error {
        Error::Gpu { problem, remedy } => (problem, remedy),
        other => (other.to_string(), String::new()),
    }
}

fn not_measured(error: Error) -> Finding {
    let (problem, remedy) = refused(error);
    let remedy =
        if remedy.is_empty() { "name another folder with --folder".to_owned() } else { remedy };
    Finding::good("gpu rates", format!("not measured: {problem}"), json!(null))
        .with_remedy(true, &remedy)
}

fn rates(device: &Device, folder: &Path) -> df11::Result<Vec<Finding>> {
    let container = folder.join("gpu.df11");
    let source = Source::open(&demo::checkpoint(&folder.join("gpu"), SAMPLE, SEED)?)?;
    df11::compress(&source, &container, &CompressOptions::new().verify(false), &())?;
    let model = df11::open(&container)?;
    let stored: u64 = model.blocks().map(|block| block.stored_bytes()).sum();
    let copy = median_of(TIMES, || device.measure_copy(COPY_BYTES))?;
    let upload = median_of(TIMES, || device.measure_upload(UPLOAD_BYTES))?;
    // The first load allocates pinned memory, which later ones find.
    let loaded = model.load(device, &LoadOptions::new())?;
    let load = median_of(TIMES, || Ok(timed(|| model.load(device, &LoadOptions::new()))?.1))?;
    let mut decoder = BlockDecoder::new(&loaded)?;
    let decode = median_of(TIMES, || Ok(decoder.time_blocks(&loaded)?.iter().sum()))?;
    let output = loaded.blocks().map(|block| block.layout().bytes).sum();
    let copy = rate("gpu copy", "read and written by a copy", 2 * COPY_BYTES, copy);
    let upload = rate("gpu upload", "from pinned memory to the GPU", UPLOAD_BYTES, upload);
    let decode = rate("gpu decode", "of BF16 decoded", output, decode);
    let load = rate("gpu load", "of a container loaded, with checksums", stored, load);
    let decode = beside(decode, &copy, "the copy");
    let load = beside(load, &upload, "the pinned copy");
    Ok(vec![copy, upload, decode, load])
}

fn rate(name: &'static str, what: &str, bytes: u64, seconds: f64) -> Finding {
    let mut finding = Finding::rate(name, what, bytes, seconds);
    finding.value["bytes"] = json!(bytes);
    finding
}

/// A rate with its part of the one that limits it.
fn beside(mut finding: Finding, limit: &Finding, of: &str) -> Finding {
    let rate = |finding: &Finding| finding.value["bytes_per_second"].as_f64().unwrap_or(0.0);
    let part = rate(&finding) / rate(limit).max(1.0);
    finding.text = format!("{}, {} of {of}", finding.text, percent(part));
    finding.value["of_limit"] = json!(part);
    finding
}
