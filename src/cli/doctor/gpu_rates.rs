//! What the first GPU does in a second: copies within its memory and from the host, and beside them
//! decoding and loading.

use std::path::{Path, PathBuf};

use df11::{
    CompressOptions, Error, Source,
    gpu::{Device, GpuModel, LoadOptions, Status},
    hazmat::gpu::{seconds_between, timestamp},
};
use safetensors::{
    Dtype,
    tensor::{TensorView, serialize_to_file},
};
use serde_json::json;
use tempfile::TempDir;

use super::{Finding, refused};
use crate::cli::{
    Failure, Session,
    measure::{median, timed},
    session::temporary_folder,
    text::{per_second, percent, rate},
};

/// More than any cache holds; each copy takes some tenths of a millisecond, and from the host some
/// milliseconds.
const COPY_BYTES: u64 = 512 << 20;
const UPLOAD_BYTES: u64 = 64 << 20;
/// Matrices of the block that is decoded and loaded: together some 130 MB, so that most of it comes
/// from memory and not from a cache.
const MATRICES: usize = 16;
const TIMES: usize = 3;
/// Decodings, one after the other.
const PASSES: usize = 11;

/// Empty where there are no weights, because the folder has no place for them, as another finding
/// says.
pub(super) fn findings(
    device: &Device,
    weights: &[u8],
    folder: &Path,
    session: &Session,
) -> Result<Vec<Finding>, Failure> {
    if weights.is_empty() {
        return Ok(Vec::new());
    }
    let found =
        sample(weights, folder).and_then(|(_folder, container)| measure(device, &container));
    session.check()?;
    Ok(found.unwrap_or_else(|error| vec![not_measured(error)]))
}

fn not_measured(error: Error) -> Finding {
    let (problem, remedy) = refused(error);
    let remedy =
        if remedy.is_empty() { "name another folder with --folder".to_owned() } else { remedy };
    Finding::good("gpu rates", format!("not measured: {problem}"), json!(null))
        .with_remedy(true, &remedy)
}

/// A container with one block of as many matrices, and the temporary folder that holds it.
fn sample(weights: &[u8], folder: &Path) -> df11::Result<(TempDir, PathBuf)> {
    let temporary = temporary_folder("doctor", folder)?;
    let matrices: Vec<(String, Vec<u8>)> = (0..MATRICES)
        .map(|index| {
            // The same weights in another order: equal matrices would be stored once.
            let mut matrix = weights.to_vec();
            matrix.rotate_left(2 * index);
            (format!("model.layers.0.{index}.weight"), matrix)
        })
        .collect();
    let views = matrices.iter().map(|(name, matrix)| {
        let view = TensorView::new(Dtype::BF16, vec![matrix.len() / 2], matrix);
        (name, view.expect("the bytes fit the shape"))
    });
    let source = temporary.path().join("gpu.safetensors");
    serialize_to_file(views, None, &source)
        .map_err(|error| Error::io("writing", &source, std::io::Error::other(error)))?;
    let container = temporary.path().join("gpu.df11");
    let options = CompressOptions::new().verify(false);
    df11::compress(&Source::open(&source)?, &container, &options, &())?;
    Ok((temporary, container))
}

fn measure(device: &Device, container: &Path) -> df11::Result<Vec<Finding>> {
    let model = df11::open(container)?;
    let stored: u64 = model.blocks().map(|block| block.stored_bytes()).sum();
    let copy = of_several(|| device.measure_copy(COPY_BYTES))?;
    let upload = of_several(|| device.measure_upload(UPLOAD_BYTES))?;
    // The first load allocates pinned memory, which later ones find.
    let loaded = model.load(device, &LoadOptions::new())?;
    let load = of_several(|| {
        let (loaded, seconds) = timed(|| model.load(device, &LoadOptions::new()));
        loaded.map(|_| seconds)
    })?;
    let (decoded, decode) = decode(device, &loaded)?;
    let copy = Rate {
        name: "gpu copy",
        what: "read and written by a copy",
        bytes: 2 * COPY_BYTES,
        seconds: copy,
    };
    let upload = Rate {
        name: "gpu upload",
        what: "from pinned memory to the GPU",
        bytes: UPLOAD_BYTES,
        seconds: upload,
    };
    let decode =
        Rate { name: "gpu decode", what: "of BF16 decoded", bytes: decoded, seconds: decode };
    let load = Rate {
        name: "gpu load",
        what: "of a container loaded, with checksums",
        bytes: stored,
        seconds: load,
    };
    Ok(vec![
        copy.finding(),
        upload.finding(),
        decode.beside(&copy, "the copy"),
        load.beside(&upload, "the pinned copy"),
    ])
}

/// The median seconds, after a first time that does not count.
fn of_several(mut measure: impl FnMut() -> df11::Result<f64>) -> df11::Result<f64> {
    measure()?;
    let samples = (0..TIMES).map(|_| measure()).collect::<df11::Result<Vec<f64>>>()?;
    Ok(median(&samples))
}

/// Bytes of the decoded block, and the median seconds that it takes.
fn decode(device: &Device, model: &GpuModel) -> df11::Result<(u64, f64)> {
    let stream = device.context().new_stream()?;
    let status = Status::new(device)?;
    let bytes = model.largest_block_bytes();
    let mut output = stream.alloc_zeros::<u8>(bytes as usize)?;
    let mut times = vec![timestamp(&stream)?];
    for _ in 0..PASSES {
        for block in model.blocks() {
            block.decode_into(&mut output.as_view_mut(), &stream, &status)?;
        }
        times.push(timestamp(&stream)?);
    }
    status.check(&stream)?;
    let seconds = times
        .windows(2)
        .map(|pair| seconds_between(&pair[0], &pair[1]))
        .collect::<df11::Result<Vec<_>>>()?;
    Ok((model.blocks().map(|block| block.layout().bytes).sum(), median(&seconds)))
}

/// Bytes that took so long.
struct Rate {
    name: &'static str,
    what: &'static str,
    bytes: u64,
    seconds: f64,
}

impl Rate {
    fn per_second(&self) -> f64 {
        per_second(self.bytes, self.seconds)
    }

    fn finding(&self) -> Finding {
        let text = format!("{} {}", rate(self.bytes, self.seconds), self.what);
        Finding::good(
            self.name,
            text,
            json!({ "bytes": self.bytes, "bytes_per_second": self.per_second() }),
        )
    }

    /// With its part of the rate that limits it.
    fn beside(&self, limit: &Self, of: &str) -> Finding {
        let part = self.per_second() / limit.per_second().max(1.0);
        let mut finding = self.finding();
        finding.text = format!("{}, {} of {of}", finding.text, percent(part));
        finding.value["of_limit"] = json!(part);
        finding
    }
}
