//! `df11 bench --gpu`: decoding beside the copy rate of device memory, loading beside the rate of a plain pinned copy.

use std::path::Path;

use df11::{
    Error, Model, Source,
    gpu::{Device, GpuModel, LoadOptions, Status, cudarc::driver::CudaStream, seconds_between, timestamp},
};

use super::{Series, jobs::without_verification};
use crate::cli::{Failure, Session, measure::timed};

/// Times that a repetition decodes all blocks.
const PASSES: usize = 5;
/// Bytes read and written.
const COPY: &str = "device copy";
const UPLOAD: &str = "pinned copy";

/// All series, after a check of every block against the CPU.
pub(super) fn measure(
    source: &Source,
    folder: &Path,
    repetitions: u16,
    session: &Session,
) -> Result<Vec<Series>, Failure> {
    let device = Device::open(0)?;
    let container = folder.join("model.df11");
    df11::compress(source, &container, &without_verification(), &session.progress())?;
    let model = df11::open(&container)?;
    let (resident, first) = timed(|| model.load(&device, &LoadOptions::new()));
    let resident = resident?;
    let stored: u64 = model.blocks().map(|block| block.stored_bytes()).sum();
    let mut all = All::new(&resident, stored, first);
    let stream = new_stream(&device)?;
    check(&model, &resident, &stream)?;
    drop(resident);
    for repetition in 0..=repetitions {
        session.check()?;
        all.repeat(&model, &device, &stream, repetition > 0)?;
    }
    Ok(all.into_series())
}

fn new_stream(device: &Device) -> Result<std::sync::Arc<CudaStream>, Failure> {
    Ok(device.context().new_stream().map_err(Error::from)?)
}

/// Decodes every block on both sides.
fn check(model: &Model, resident: &GpuModel, stream: &std::sync::Arc<CudaStream>) -> Result<(), Failure> {
    let status = Status::new(resident.device())?;
    let bytes = resident.largest_block_bytes() as usize;
    let mut output = stream.alloc_zeros::<u8>(bytes).map_err(Error::from)?;
    let mut expected = vec![0; bytes];
    for block in model.blocks() {
        let name = block.name();
        let on_gpu = resident.block(name).expect("the same model");
        on_gpu.decode_into(&mut output.as_view_mut(), stream, &status)?;
        status.check(stream)?;
        let result = stream.clone_dtoh(&output).map_err(Error::from)?;
        let layout = block.layout()?;
        block.decode_into(&mut expected[..layout.bytes as usize])?;
        for range in layout.tensors {
            let range = range.start as usize..range.end as usize;
            if result[range.clone()] != expected[range] {
                let problem = format!("block {name:?} decoded on the GPU differs from the CPU's decoding");
                return Err(Failure::Mismatch(problem));
            }
        }
    }
    Ok(())
}

/// What is measured.
struct All {
    copy: Series,
    decode_block: Series,
    decode: Series,
    upload: Series,
    first_load: Series,
    load: Series,
}

fn series(name: &'static str, bytes: u64, limit: Option<&'static str>) -> Series {
    Series { threads: 0, name, bytes, limit, seconds: Vec::new() }
}

impl All {
    fn new(resident: &GpuModel, stored: u64, first_load: f64) -> Self {
        let decoded = |block: df11::gpu::GpuBlock<'_>| -> u64 {
            block.tensors().map(|tensor| tensor.byte_length()).sum()
        };
        let largest = resident.blocks().map(decoded).max().unwrap_or(0);
        let mut all = Self {
            copy: series(COPY, 2 * largest, None),
            decode_block: series("decode block", largest, Some(COPY)),
            decode: series("decode", resident.blocks().map(decoded).sum(), Some(COPY)),
            upload: series(UPLOAD, stored, None),
            first_load: series("first load", stored, Some(UPLOAD)),
            load: series("load", stored, Some(UPLOAD)),
        };
        all.first_load.seconds.push(first_load);
        all
    }

    /// Every job once.
    fn repeat(
        &mut self,
        model: &Model,
        device: &Device,
        stream: &std::sync::Arc<CudaStream>,
        counts: bool,
    ) -> Result<(), Failure> {
        let upload = device.measure_upload(self.upload.bytes)?;
        let (resident, load) = timed(|| model.load(device, &LoadOptions::new()));
        let resident = resident?;
        let copy = device.measure_copy(self.copy.bytes / 2)?;
        let (decode, block) = decode(&resident, stream)?;
        if counts {
            self.upload.seconds.push(upload);
            self.load.seconds.push(load);
            self.copy.seconds.push(copy);
            self.decode.seconds.push(decode);
            self.decode_block.seconds.push(block);
        }
        Ok(())
    }

    fn into_series(self) -> Vec<Series> {
        vec![self.copy, self.decode_block, self.decode, self.upload, self.first_load, self.load]
    }
}

/// Seconds of all blocks, one after the other into one buffer, and of the largest one among them. What one block leaves in the cache
/// is none of the next one's.
fn decode(model: &GpuModel, stream: &std::sync::Arc<CudaStream>) -> Result<(f64, f64), Failure> {
    let status = Status::new(model.device())?;
    let bytes = model.largest_block_bytes();
    let mut output = stream.alloc_zeros::<u8>(bytes as usize).map_err(Error::from)?;
    let mut times = Vec::new();
    // The last pass is timed: the GPU runs at its full clock then, and has work queued while the host launches more.
    for _ in 0..PASSES {
        times.clear();
        times.push((0, timestamp(stream)?));
        for block in model.blocks() {
            block.decode_into(&mut output.as_view_mut(), stream, &status)?;
            times.push((block.layout().bytes, timestamp(stream)?));
        }
    }
    status.check(stream)?;
    let (mut sum, mut largest) = (0.0, (0, 0.0));
    for pair in times.windows(2) {
        let seconds = seconds_between(&pair[0].1, &pair[1].1)?;
        sum += seconds;
        if pair[1].0 > largest.0 {
            largest = (pair[1].0, seconds);
        }
    }
    Ok((sum, largest.1))
}
