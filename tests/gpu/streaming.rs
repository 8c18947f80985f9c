//! Plans, streamed blocks, and several parts.

use std::thread;

use df11::{
    Error, OpenOptions,
    gpu::{Device, GpuBlock, GpuModel, LoadOptions, Placement, Plan, Status, devices},
};

use super::{
    assert_is_block, check_block, check_blocks, check_model,
    container::{Item, Model, normal_weights},
    gpu, gpu_stream, is_refused, load, mixed, open, random, run,
};

const BLOCKS: usize = 7;

/// Seven blocks of three coded tensors, one of them in `gap`, and a raw one, and aliases in two of
/// them.
pub(super) fn layers() -> Vec<u8> {
    let mut items = Vec::new();
    for block in 0..BLOCKS {
        let (rows, seed) = (250 + block, 50 + block as u64);
        let name = |part: &str| format!("{block}.{part}");
        let raw = (0..777).map(|at| (at * block) as u8).collect();
        let (first, second) = (normal_weights(rows * 80, seed), normal_weights(33_000, seed + 9));
        let third = normal_weights(25_344, seed + 5);
        let items_of_block = [
            Item::gap(&name("first"), &[rows as u64, 80], first, (32, 128)),
            Item::tile(&name("second"), &[1000, 33], second, (8192, 33_000)),
            Item::tile(&name("third"), &[96, 264], third, (256, 264)),
            Item::raw(&name("raw"), df11::Dtype::U8, &[777], raw),
        ];
        items.extend(items_of_block.map(|item| item.in_block(&format!("layer {block}"))));
    }
    items.push(items[0].alias("tied"));
    items.push(items[13].alias("also tied"));
    Model::new(&items, &[]).build()
}

fn load_with(device: &Device, original: &df11::Model, plan: Plan) -> GpuModel {
    original.load(device, &LoadOptions::new().plan(plan)).unwrap()
}

pub(super) fn streamed(device: &Device) -> (df11::Model, GpuModel) {
    let original = open(layers());
    let model = load_with(device, &original, Plan::all_streamed(&original).unwrap());
    (original, model)
}

/// With all blocks resident, and with all streamed.
pub(super) fn load_both_ways(
    device: &Device,
    original: &df11::Model,
) -> impl Iterator<Item = GpuModel> {
    let plans = [Plan::resident(original), Plan::all_streamed(original)];
    plans.into_iter().map(|plan| load_with(device, original, plan.unwrap()))
}

#[test]
fn streamed_blocks_decode_in_any_order() {
    let Some((device, stream)) = gpu_stream() else { return };
    let (original, model) = streamed(device);
    assert!(model.blocks().all(|block| block.is_streamed()));
    let mut state = 3;
    for step in 0..80 {
        // In order, then at random, then backwards.
        let block = match step / 28 {
            0 => step % BLOCKS,
            1 => random(&mut state) as usize % BLOCKS,
            _ => BLOCKS - 1 - step % BLOCKS,
        };
        check_block(&stream, &model, &original, &format!("layer {block}"));
    }
}

#[test]
fn streamed_blocks_serve_many_streams() {
    let Some(device) = gpu() else { return };
    let (original, model) = streamed(device);
    thread::scope(|scope| {
        for thread in 0..4 {
            let (original, model) = (&original, &model);
            scope.spawn(move || {
                let (stream, mut state) = (device.context().new_stream().unwrap(), thread);
                for _ in 0..40 {
                    let block = random(&mut state) as usize % BLOCKS;
                    check_block(&stream, model, original, &format!("layer {block}"));
                }
            });
        }
    });
}

#[test]
fn a_plan_that_fits_decides_what_is_streamed() {
    let Some(device) = gpu() else { return };
    let original = open(layers());
    let all = Plan::resident(&original).unwrap().device_bytes()[0];
    let least = Plan::all_streamed(&original).unwrap().device_bytes()[0];
    for percent in [0, 30, 60, 100] {
        let plan = Plan::fit(&original, &[least + (all - least) * percent / 100]).unwrap();
        let streamed = plan.placements().iter().flatten().filter(|place| place.streamed).count();
        let needed = plan.device_bytes()[0];
        let model = load_with(device, &original, plan);
        assert_eq!(model.blocks().filter(GpuBlock::is_streamed).count(), streamed);
        let taken = model.device_bytes() + 2 * model.largest_block_bytes();
        assert!(taken <= needed, "the plan tells the bytes");
        (0..2).for_each(|_| check_blocks(&model, &original));
        assert_eq!(streamed == 0, percent == 100);
    }
}

/// The second GPU where there is one, else the first again.
fn another(device: &Device) -> Device {
    if devices().unwrap().len() > 1 { Device::open(1).unwrap() } else { device.clone() }
}

#[test]
fn a_model_lies_on_two_gpus() {
    let Some(device) = gpu() else { return };
    let (original, second) = (open(layers()), another(device));
    let all = Plan::resident(&original).unwrap().device_bytes()[0];
    let least = Plan::all_streamed(&original).unwrap().device_bytes()[0];
    for shares in [[all * 9 / 10, all], [least, least * 4 / 5]] {
        let plan = Plan::fit(&original, &shares).unwrap();
        assert!(plan.placements().iter().flatten().any(|place| place.device == 1));
        let devices = [device.clone(), second.clone()];
        let model = original.load_on(&devices, &LoadOptions::new().plan(plan), &()).unwrap();
        (0..3).for_each(|_| check_blocks(&model, &original));
    }
    let foreign = LoadOptions::new().plan(Plan::resident(&open(mixed(1))).unwrap());
    assert!(is_refused(original.load(device, &foreign), ""));
}

/// Blocks in no order: each third one resident on the first GPU, streamed to the second, or
/// nowhere.
#[test]
fn blocks_lie_where_the_caller_says() {
    let Some(device) = gpu() else { return };
    let (original, devices) = (open(layers()), [device.clone(), another(device)]);
    let place = |block: df11::Block<'_>| {
        let at: usize = block.name().strip_prefix("layer ").unwrap().parse().unwrap();
        (at % 3 != 1)
            .then_some(Placement { device: usize::from(at % 3 == 2), streamed: at % 3 == 2 })
    };
    let plan = Plan::of(&original, 2, place).unwrap();
    let model = original.load_on(&devices, &LoadOptions::new().plan(plan.clone()), &()).unwrap();
    let names: Vec<&str> = model.blocks().map(|block| block.name()).collect();
    assert_eq!(names, ["layer 0", "layer 2", "layer 3", "layer 5", "layer 6"]);
    assert!(model.device_bytes() < plan.device_bytes().iter().sum());
    (0..3).for_each(|_| check_blocks(&model, &original));
    assert_eq!(model.blocks().filter(GpuBlock::is_streamed).count(), 2);
}

#[test]
fn rows_of_streamed_tensors_are_read_in_place() {
    let Some((device, stream)) = gpu_stream() else { return };
    let (original, model) = streamed(device);
    for name in ["0.first", "3.second", "tied", "also tied", "4.raw"] {
        let tensor = original.tensor(name).unwrap();
        let all = tensor.decode::<u8>().unwrap();
        let row = all.len() / tensor.shape()[0] as usize;
        let found = run(&model.rows(name, 17..200).unwrap(), &stream);
        assert!(found == all[17 * row..200 * row], "{name}");
    }
}

/// A file's mapping is pinned where it lies; bytes in memory, and a second model over the same
/// mapping, are copied.
#[test]
fn mappings_are_pinned_in_place() {
    let Some(device) = gpu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.df11");
    std::fs::write(&path, layers()).unwrap();
    let original = df11::open(&path).unwrap();
    let plan = Plan::all_streamed(&original).unwrap();
    let options = LoadOptions::new().plan(plan.clone());
    let mapped = original.load(device, &options).unwrap();
    assert_eq!(mapped.copied_bytes(), 0, "the driver pins a mapping");
    let second = original.load(device, &options).unwrap();
    assert!(second.copied_bytes() > 0 && second.copied_bytes() <= plan.host_bytes());
    let read =
        OpenOptions::new().memory_map(false).open(&path).unwrap().load(device, &options).unwrap();
    assert!(read.copied_bytes() > 0);
    let again = df11::open(&path).unwrap().load(device, &options).unwrap();
    assert_eq!(again.copied_bytes(), 0, "another mapping of the same file");
    drop(original);
    let original = df11::open(&path).unwrap();
    for model in [&mapped, &second, &read, &again] {
        check_blocks(model, &original);
    }
}

#[test]
fn damage_in_streamed_sections_is_found() {
    let Some(device) = gpu() else { return };
    let mut bytes = layers();
    let model = open(bytes.clone());
    let sections = &model.shards()[0].directory().sections;
    let last = sections.iter().rfind(|section| section.block_index().is_some()).unwrap();
    bytes[last.offset.get() as usize] ^= 1;
    let options = LoadOptions::new().plan(Plan::all_streamed(&model).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.df11");
    std::fs::write(&path, &bytes).unwrap();
    for damaged in [open(bytes), df11::open(&path).unwrap()] {
        let problem = damaged.load(device, &options).unwrap_err();
        assert!(matches!(problem, Error::Corrupt { .. }), "{problem:?}");
    }
    check_model(device, &layers());
}

#[test]
fn too_little_memory_is_told() {
    let Some(device) = gpu() else { return };
    let problem = device.measure_copy(1 << 50).unwrap_err();
    assert!(matches!(problem, Error::Gpu { .. }), "{problem:?}");
    check_model(device, &layers());
}

/// Dropping waits for what was put on streams: memory that were freed sooner would be someone
/// else's.
#[test]
fn a_model_is_dropped_while_it_decodes() {
    let Some((device, stream)) = gpu_stream() else { return };
    let (original, status) = (open(layers()), Status::new(device).unwrap());
    for model in load_both_ways(device, &original) {
        let bytes = model.largest_block_bytes() as usize;
        let mut outputs: Vec<_> =
            (0..20 * BLOCKS).map(|_| stream.alloc_zeros::<u8>(bytes).unwrap()).collect();
        for (at, output) in outputs.iter_mut().enumerate() {
            let block = model.blocks().nth(at % BLOCKS).unwrap();
            block.decode_into(&mut output.as_view_mut(), &stream, &status).unwrap();
        }
        drop(model);
        // Memory of the same sizes, with other content.
        let others: Vec<_> = (0..4).map(|seed| load(device, mixed(seed))).collect();
        status.check(&stream).unwrap();
        for (at, output) in outputs.iter().enumerate() {
            let block = original.blocks().nth(at % BLOCKS).unwrap();
            assert_is_block(&stream.clone_dtoh(output).unwrap(), block, None);
        }
        drop(others);
    }
}
