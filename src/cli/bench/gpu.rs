//! `df11 bench --gpu`: compares decoding with the copy rate of device memory, and loading and
//! streaming with the rate of a plain pinned copy.

use std::{cmp::Reverse, collections::BTreeMap, path::Path};

use df11::{
    Dtype, Model, Source,
    gpu::{Device, GpuBlock, GpuModel, GpuProgram, LoadOptions, Plan, Preference},
};
use serde_json::json;

use super::{Bench, jobs::without_verification};
use crate::cli::{
    Answer, Failure, Session,
    figures::has_weights,
    measure::{BlockDecoder, Series, repeat, timed},
};

/// Bytes read and written.
const COPY: &str = "device copy";
const UPLOAD: &str = "pinned copy";
/// Tensors smaller than this take as long as a launch does, whatever their shape.
const LARGE_BYTES: u64 = 1 << 20;

/// All series, after a check of every block against the CPU, and the device memory of a weight.
pub(super) fn run(
    bench: &Bench,
    source: &Source,
    folder: &Path,
    session: &Session,
) -> Result<Answer, Failure> {
    let (device, times) = (Device::open(0)?, bench.repetitions);
    let container = folder.join("model.df11");
    df11::compress(source, &container, &without_verification(), &session.progress())?;
    let model = df11::open(&container)?;
    let (resident, first_load) = timed(|| model.load(&device, &LoadOptions::new()))?;
    check(&model, &resident)?;
    let mut all = decoding(&resident, times)?;
    let stored = resident.device_bytes();
    drop(resident);
    let resident = model.load(&device, &fast_layout())?;
    check(&model, &resident)?;
    let fast = resident.device_bytes();
    drop(resident);
    all.extend(loading(&model, &device, stored, first_load, times)?);
    all.push(streaming(&model, &device, times)?);
    let mut answer = bench.answer(source, &all);
    let weights: u64 = model.tensors().filter(has_weights).map(|tensor| tensor.elements()).sum();
    let weights = weights.max(1) as f64;
    let [stored_bits, fast_bits] = [stored, fast].map(|bytes| 8.0 * bytes as f64 / weights);
    answer.text = format!(
        "{}\nOn the GPU it takes {stored_bits:.3} bits per weight as it is stored, and \
        {fast_bits:.3} in the fast layout.",
        answer.text.trim_end()
    );
    answer.json["resident_bytes"] = json!({ "stored": stored, "fast": fast });
    Ok(answer)
}

fn fast_layout() -> LoadOptions {
    LoadOptions::new().residence(Preference::Fast)
}

/// Decodes every block on both sides.
fn check(model: &Model, on_gpu: &GpuModel) -> Result<(), Failure> {
    let mut decoder = BlockDecoder::new(on_gpu)?;
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

/// Bytes of the tensors of a block, without padding.
fn decoded_bytes(block: GpuBlock<'_>) -> u64 {
    block.tensors().map(|tensor| tensor.byte_length()).sum()
}

/// A series and all rows of a tensor that stands for its dtype and shape: one coded tensor of each,
/// largest first.
fn shapes(model: &GpuModel) -> Result<Vec<(Series, GpuProgram)>, Failure> {
    let mut shapes = BTreeMap::new();
    for tensor in model.blocks().flat_map(|block| block.tensors()) {
        if tensor.byte_length() >= LARGE_BYTES {
            let key = (Reverse(tensor.byte_length()), tensor.dtype(), tensor.shape());
            shapes.entry(key).or_insert(tensor.name());
        }
    }
    let programs = shapes.into_iter().map(|((_, dtype, shape), name)| {
        let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
        let dtype = if dtype == Dtype::BF16 { "" } else { dtype.name() };
        let rows = 0..shape.first().copied().unwrap_or(1);
        let (program, name) = (model.rows(name, rows)?, format!("decode {}", sizes.join("×")));
        let name = if dtype.is_empty() { name } else { format!("{name} of {dtype}") };
        Ok((Series::new(name, program.bytes(), Some(COPY)), program))
    });
    programs.collect()
}

/// A plain copy, and decoding of each shape, of the largest block and of all.
fn decoding(model: &GpuModel, times: u16) -> Result<Vec<Series>, Failure> {
    let device = model.devices().next().expect("it was loaded onto one");
    let blocks: Vec<u64> = model.blocks().map(decoded_bytes).collect();
    let largest = blocks.iter().copied().max().unwrap_or(0);
    let longest = model.blocks().enumerate().max_by_key(|(_, block)| block.layout().bytes);
    let (of_shapes, programs): (Vec<_>, Vec<_>) = shapes(model)?.into_iter().unzip();
    let mut all = vec![Series::new(COPY, 2 * largest, None)];
    all.extend(of_shapes);
    all.push(Series::new("decode block", largest, Some(COPY)));
    all.push(Series::new("decode all blocks", blocks.iter().sum(), Some(COPY)));
    repeat(times, &mut all, || {
        let mut seconds = vec![device.measure_copy(largest)?];
        let mut decoder = BlockDecoder::new(model)?;
        let blocks = decoder.time_blocks(model)?;
        seconds.extend(decoder.time_programs(&programs)?);
        seconds.push(longest.map_or(0.0, |(at, _)| blocks[at]));
        seconds.push(blocks.iter().sum());
        Ok(seconds)
    })?;
    Ok(all)
}

/// A plain copy, and loading; the first load is a series of its own.
fn loading(
    model: &Model,
    device: &Device,
    stored: u64,
    first_load: f64,
    times: u16,
) -> Result<Vec<Series>, Failure> {
    let mut first = Series::new("first load", stored, Some(UPLOAD));
    first.seconds.push(first_load);
    let mut all = vec![
        Series::new(UPLOAD, stored, None),
        Series::new("load", stored, Some(UPLOAD)),
        Series::new("load, fast layout", stored, Some(UPLOAD)),
    ];
    repeat(times, &mut all, || {
        let mut seconds = vec![device.measure_upload(stored)?];
        for options in [LoadOptions::new(), fast_layout()] {
            let (_loaded, time) = timed(|| model.load(device, &options))?;
            seconds.push(time);
        }
        Ok(seconds)
    })?;
    all.insert(1, first);
    Ok(all)
}

/// Decoding with as little device memory as possible: every block is streamed.
fn streaming(model: &Model, device: &Device, times: u16) -> Result<Series, Failure> {
    let plan = Plan::all_streamed(model)?;
    let mut all = [Series::new("decode, streamed", plan.host_bytes(), Some(UPLOAD))];
    let streamed = model.load(device, &LoadOptions::new().plan(plan))?;
    check(model, &streamed)?;
    repeat(times, &mut all, || {
        Ok(vec![BlockDecoder::new(&streamed)?.time_blocks(&streamed)?.iter().sum()])
    })?;
    let [streamed] = all;
    Ok(streamed)
}
