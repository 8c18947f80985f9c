//! `df11 bench --gpu`: decoding beside the copy rate of device memory, loading and streaming beside
//! the rate of a plain pinned copy.

mod decode;

use std::path::Path;

use df11::{
    Dtype, Encoding, Error, Model, Source,
    gpu::{Device, GpuModel, LoadOptions, Plan, Preference, cudarc::driver::CudaStream},
};
use serde_json::json;

use super::{Series, jobs::without_verification};
use crate::cli::{Answer, Failure, Session, measure::timed};
use decode::BlockDecoder;

/// Bytes read and written.
const COPY: &str = "device copy";
const UPLOAD: &str = "pinned copy";

/// All series, after a check of every block against the CPU.
pub(super) fn measure(
    source: &Source,
    folder: &Path,
    repetitions: u16,
    session: &Session,
) -> Result<(Vec<Series>, Resident), Failure> {
    let device = Device::open(0)?;
    let container = folder.join("model.df11");
    df11::compress(source, &container, &without_verification(), &session.progress())?;
    let model = df11::open(&container)?;
    let (resident, first) = timed(|| model.load(&device, &LoadOptions::new()));
    let resident = resident?;
    let stream = new_stream(&device)?;
    let mut all = All::new(&resident, first);
    check(&model, &resident, &stream)?;
    let shapes = decode::shapes(&resident)?;
    all.shapes =
        shapes.iter().map(|shape| series(&shape.name, shape.rows.bytes(), Some(COPY))).collect();
    for repetition in 0..=repetitions {
        session.check()?;
        all.decode_once(&resident, &shapes, &stream, repetition > 0)?;
    }
    let stored = resident.device_bytes();
    drop((shapes, resident));
    let resident = model.load(&device, &fast())?;
    check(&model, &resident, &stream)?;
    let bytes = Resident { weights: weights(&model), stored, fast: resident.device_bytes() };
    drop(resident);
    for repetition in 0..=repetitions {
        session.check()?;
        all.load_once(&model, &device, repetition > 0)?;
    }
    all.stream(&model, &device, &stream, repetitions, session)?;
    Ok((all.into_series(), bytes))
}

/// BF16 weights of a model; those of an alias are its target's.
fn weights(model: &Model) -> u64 {
    let tensors = model.blocks().flat_map(|block| block.tensors());
    let own = tensors.filter(|tensor| {
        tensor.dtype() == Some(Dtype::BF16) && tensor.encoding() != Encoding::Alias
    });
    own.map(|tensor| tensor.elements()).sum()
}

/// Device memory that the model takes, in bytes.
pub(super) struct Resident {
    /// That the model has.
    weights: u64,
    stored: u64,
    fast: u64,
}

impl Resident {
    /// Says it for a weight.
    pub(super) fn add_to(&self, answer: &mut Answer) {
        let bits = |bytes: u64| 8.0 * bytes as f64 / self.weights.max(1) as f64;
        let (stored, fast) = (bits(self.stored), bits(self.fast));
        answer.text = format!(
            "{}\nOn the GPU it takes {stored:.3} bits a weight as it is stored, and {fast:.3} in \
            the fast layout.",
            answer.text.trim_end()
        );
        answer.json["resident_bytes"] = json!({ "stored": self.stored, "fast": self.fast });
    }
}

fn fast() -> LoadOptions {
    LoadOptions::new().residence(Preference::Fast)
}

fn new_stream(device: &Device) -> Result<std::sync::Arc<CudaStream>, Failure> {
    Ok(device.context().new_stream().map_err(Error::from)?)
}

/// Decodes every block on both sides.
fn check(
    model: &Model,
    on_gpu: &GpuModel,
    stream: &std::sync::Arc<CudaStream>,
) -> Result<(), Failure> {
    let mut decoder = BlockDecoder::new(on_gpu, stream)?;
    let mut expected = vec![0; on_gpu.largest_block_bytes() as usize];
    for (block, decoded) in model.blocks().zip(on_gpu.blocks()) {
        let name = block.name();
        let result = decoder.decode_to_host(decoded)?;
        let layout = block.layout()?;
        block.decode_into(&mut expected[..layout.bytes as usize])?;
        for range in layout.tensors {
            let range = range.start as usize..range.end as usize;
            if result[range.clone()] != expected[range] {
                let problem =
                    format!("block {name:?} decoded on the GPU differs from the CPU's decoding");
                return Err(Failure::Mismatch(problem));
            }
        }
    }
    Ok(())
}

/// What is measured.
struct All {
    copy: Series,
    shapes: Vec<Series>,
    decode_block: Series,
    decode: Series,
    upload: Series,
    first_load: Series,
    load: Series,
    load_fast: Series,
    streamed: Series,
}

fn series(name: &str, bytes: u64, limit: Option<&'static str>) -> Series {
    Series::new(0, name, bytes, limit)
}

/// Bytes of the tensors of a block, without padding.
fn decoded_bytes(block: df11::gpu::GpuBlock<'_>) -> u64 {
    block.tensors().map(|tensor| tensor.byte_length()).sum()
}

impl All {
    fn new(resident: &GpuModel, first_load: f64) -> Self {
        let largest = resident.blocks().map(decoded_bytes).max().unwrap_or(0);
        let stored = resident.device_bytes();
        let mut all = Self {
            copy: series(COPY, 2 * largest, None),
            shapes: Vec::new(),
            decode_block: series("decode block", largest, Some(COPY)),
            decode: series(
                "decode all blocks",
                resident.blocks().map(decoded_bytes).sum(),
                Some(COPY),
            ),
            upload: series(UPLOAD, stored, None),
            first_load: series("first load", stored, Some(UPLOAD)),
            load: series("load", stored, Some(UPLOAD)),
            load_fast: series("load, fast layout", stored, Some(UPLOAD)),
            streamed: series("decode, streamed", 0, Some(UPLOAD)),
        };
        all.first_load.seconds.push(first_load);
        all
    }

    /// Every kind of decoding once.
    fn decode_once(
        &mut self,
        resident: &GpuModel,
        shapes: &[decode::ShapeRows],
        stream: &std::sync::Arc<CudaStream>,
        counts: bool,
    ) -> Result<(), Failure> {
        let device = resident.devices().next().expect("it was loaded onto one");
        let copy = device.measure_copy(self.copy.bytes / 2)?;
        let mut decoder = BlockDecoder::new(resident, stream)?;
        let (decode, block) = decoder.time_blocks(resident)?;
        let by_shape = decoder.time_shapes(shapes)?;
        if counts {
            self.copy.seconds.push(copy);
            self.decode.seconds.push(decode);
            self.decode_block.seconds.push(block);
            self.shapes
                .iter_mut()
                .zip(by_shape)
                .for_each(|(series, time)| series.seconds.push(time));
        }
        Ok(())
    }

    /// A plain copy and a load once.
    fn load_once(&mut self, model: &Model, device: &Device, counts: bool) -> Result<(), Failure> {
        let upload = device.measure_upload(self.upload.bytes)?;
        let (loaded, load) = timed(|| model.load(device, &LoadOptions::new()));
        drop(loaded?);
        let (loaded, load_fast) = timed(|| model.load(device, &fast()));
        drop(loaded?);
        if counts {
            self.upload.seconds.push(upload);
            self.load.seconds.push(load);
            self.load_fast.seconds.push(load_fast);
        }
        Ok(())
    }

    /// Decoding with as little device memory as possible: every block is streamed.
    fn stream(
        &mut self,
        model: &Model,
        device: &Device,
        stream: &std::sync::Arc<CudaStream>,
        repetitions: u16,
        session: &Session,
    ) -> Result<(), Failure> {
        let plan = Plan::all_streamed(model)?;
        self.streamed.bytes = plan.host_bytes();
        let streamed = model.load(device, &LoadOptions::new().plan(plan))?;
        check(model, &streamed, stream)?;
        for repetition in 0..=repetitions {
            session.check()?;
            let (seconds, _) = BlockDecoder::new(&streamed, stream)?.time_blocks(&streamed)?;
            if repetition > 0 {
                self.streamed.seconds.push(seconds);
            }
        }
        Ok(())
    }

    fn into_series(self) -> Vec<Series> {
        let mut all = vec![self.copy];
        all.extend(self.shapes);
        all.extend([self.decode_block, self.decode]);
        all.extend([self.upload, self.first_load, self.load, self.load_fast, self.streamed]);
        all
    }
}
