//! Models whose matrices are loaded in the fast layout. `tests/gpu/residence.rs` tests the decoded
//! weights.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use df11::{
    Dtype, Error, OpenOptions, ReadAt,
    gpu::{Device, LoadOptions, Placement, Plan, Preference, Residence},
};

use crate::{
    container::{Item, Model, normal_weights, open},
    refused,
    stand_in::{compile, devices, run_child, setting},
};

/// Matrices, one of which comes in several parts, and tensors that are none.
fn bytes() -> Vec<u8> {
    let items = [
        Item::matrix("small", [100, 520], 100).in_block("layer"),
        Item::matrix("large", [2100, 2056], 2100).in_block("layer"),
        Item::raw("norm", Dtype::BF16, &[520], normal_weights(520, 3)).in_block("layer"),
        Item::gap("gap", &[96, 520], normal_weights(49_920, 7), (32, 128)).in_block("layer"),
        Item::raw("rest", Dtype::U8, &[77], vec![5; 77]).in_block("rest"),
    ];
    Model::new(&items, &[]).build()
}

fn fast() -> LoadOptions {
    LoadOptions::new().residence(Preference::Fast)
}

#[test]
fn matrices_lie_in_the_fast_layout_alone() {
    let Some(devices) = devices::<2>() else { return };
    let model = open(bytes()).unwrap();
    let plan = Plan::of(&model, 2, |block| {
        Some(Placement { device: usize::from(block.name() == "rest"), streamed: false })
    });
    let plan = plan.unwrap().prefer(&model, Preference::Fast, &[]).unwrap();
    let loaded = model.load_on(&devices, &LoadOptions::new().plan(plan.clone()), &()).unwrap();
    for name in ["small", "large"] {
        let matrix = loaded.matrix(name).unwrap();
        // The stand-in counts no exceptions.
        assert_eq!((matrix.residence(), matrix.exceptions()), (Residence::Fast, Some(0)));
        let (strips, steps) = (matrix.row_count().div_ceil(32), matrix.column_count().div_ceil(32));
        assert_eq!(matrix.device_bytes(), strips * (steps * 1536 + steps.div_ceil(8) * 88));
    }
    assert!(loaded.device_bytes() <= plan.device_bytes().iter().sum());
    let stored = model.load_on(&devices, &LoadOptions::new(), &()).unwrap();
    assert_eq!(stored.matrix("small").unwrap().residence(), Residence::Stored);
    assert!(loaded.device_bytes() > stored.device_bytes());
}

#[test]
fn one_call_opens_and_loads() {
    let Some([device]) = devices() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.df11");
    std::fs::write(&path, bytes()).unwrap();
    let on_gpu = OpenOptions::new().device(device.info().ordinal);
    let loaded = on_gpu.open(&path).unwrap();
    assert_eq!(loaded.matrix("small").unwrap().residence(), Residence::Stored);
    let loaded = on_gpu.load(fast()).open(&path).unwrap();
    assert_eq!(loaded.matrix("small").unwrap().residence(), Residence::Fast);
    assert!(refused(OpenOptions::new().device(77).open(&path)).contains("there is no GPU 77"));
    // The file is looked at first.
    let missing = OpenOptions::new().device(77).open(folder.path().join("none.df11"));
    assert!(matches!(missing, Err(Error::Io { .. })), "{missing:?}");
}

/// Counts the bytes that are read.
struct Counting(Vec<u8>, Arc<AtomicU64>);

impl ReadAt for Counting {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        self.1.fetch_add(buf.len() as u64, Ordering::Relaxed);
        self.0.read_exact_at(offset, buf)
    }
}

#[test]
fn auto_leaves_a_third_of_the_free_memory() {
    let auto = LoadOptions::new().residence(Preference::Auto);
    let model = open(bytes()).unwrap();
    let plan = Plan::resident(&model).unwrap().prefer(&model, Preference::Fast, &[]).unwrap();
    if setting("child").is_none() {
        let Some(folder) = compile() else { return };
        // Enough for 90 %, and too little for two thirds.
        let free = plan.device_bytes()[0] * 4 / 3;
        return run_child(&folder, &[("devices", "2"), ("memory", &free.to_string())]);
    }
    let devices = [0, 1].map(|ordinal| Device::open(ordinal).unwrap());
    for devices in [&devices[..1], &devices] {
        let loaded = model.load_on(devices, &auto, &()).unwrap();
        assert_eq!(
            loaded.plan(),
            &Plan::of(&model, devices.len(), |_| {
                Some(Placement { device: 0, streamed: false })
            })
            .unwrap()
        );
    }
}

#[test]
fn every_byte_is_read_once() {
    let Some([device]) = devices() else { return };
    let (bytes, read) = (bytes(), Arc::new(AtomicU64::new(0)));
    let length = bytes.len() as u64;
    let model = open(Counting(bytes, Arc::clone(&read))).unwrap();
    let opened = read.swap(0, Ordering::Relaxed);
    model.load(&device, &fast()).unwrap();
    // Records are looked at before: 32 bytes for 8192 weights. One chunk more would be a sixth.
    let loaded = read.load(Ordering::Relaxed);
    assert!(opened < length / 10 && loaded < length + length / 20, "{loaded} of {length}");
}

#[test]
fn a_plan_says_itself_where_matrices_lie() {
    let Some([device]) = devices() else { return };
    let model = open(bytes()).unwrap();
    let options = fast().plan(Plan::resident(&model).unwrap());
    assert!(refused(model.load(&device, &options)).contains("Plan::prefer"));
}

#[test]
fn damage_is_told_and_the_device_still_loads() {
    let Some([device]) = devices() else { return };
    let good = bytes();
    let model = open(good.clone()).unwrap();
    let sections = &model.shards()[0].directory().sections;
    for section in sections {
        let (start, length) = (section.offset.get(), section.length.get());
        for at in [start, start + length / 2, start + length - 1] {
            let mut damaged = good.clone();
            damaged[at as usize] ^= 1;
            let loaded = open(damaged).unwrap().load(&device, &fast());
            // A byte of a section that no GPU needs: the start of the weights file.
            let is_right = match loaded {
                Ok(_) => section.block_index().is_none(),
                Err(error) => {
                    section.block_index().is_some() && matches!(error, Error::Corrupt { .. })
                }
            };
            assert!(is_right, "byte {at}");
        }
    }
    open(good).unwrap().load(&device, &fast()).unwrap();
}

#[test]
fn failures_of_the_driver_are_told() {
    if setting("child").is_some() {
        let device = Device::open(0).unwrap();
        let error = open(bytes()).unwrap().load(&device, &fast()).unwrap_err();
        assert!(matches!(error, Error::Gpu { .. }), "{error:?}");
        return;
    }
    let Some(folder) = compile() else { return };
    // Neither is called before matrices arrive.
    for function in ["cuStreamWaitEvent", "cuMemsetD8Async"] {
        run_child(&folder, &[(function, "700")]);
    }
}
