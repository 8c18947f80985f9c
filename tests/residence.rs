//! Models whose matrices are loaded in the fast layout, on the stand-in for the GPU's driver (see
//! `tests/driver.rs`), which runs no kernels. What is decoded of them, `tests/gpu/residence.rs`
//! tests. Each test runs itself again in a process of its own.
#![cfg(all(target_os = "linux", feature = "cuda"))]

#[path = "support/container.rs"]
mod container;
#[path = "support/driver.rs"]
mod stand_in;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use container::{Item, Model, normal_weights};
use df11::{
    Dtype, Error, ReadAt,
    gpu::{Device, LoadOptions, Placement, Plan, Preference, Residence},
};
use stand_in::{child, compile, devices, in_child, run_child};

/// Matrices, one of which comes in several parts, and tensors that are none.
fn bytes() -> Vec<u8> {
    let tile = |name: &str, rows: u64, columns: u64| {
        let weights = normal_weights((rows * columns) as usize, rows);
        Item::tile(name, &[rows, columns], weights, (256, columns)).in_block("layer")
    };
    let items = [
        tile("small", 100, 520),
        tile("large", 2100, 2056),
        Item::raw("norm", Dtype::BF16, &[520], normal_weights(520, 3)).in_block("layer"),
        Item::gap("gap", &[96, 520], normal_weights(49_920, 7), (32, 128)).in_block("layer"),
        Item::raw("rest", Dtype::U8, &[77], vec![5; 77]).in_block("rest"),
    ];
    Model::new(&items, &[]).build()
}

fn open(bytes: impl ReadAt + 'static) -> df11::Model {
    container::open(bytes).unwrap()
}

fn fast() -> LoadOptions {
    LoadOptions::new().residence(Preference::Fast)
}

#[test]
fn matrices_lie_in_the_fast_layout_alone() {
    let Some(devices) = devices::<2>("matrices_lie_in_the_fast_layout_alone") else { return };
    let model = open(bytes());
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
        assert_eq!(matrix.device_bytes(), strips * (steps * 1536 + steps.div_ceil(8) * 8));
    }
    assert!(loaded.device_bytes() <= plan.device_bytes().iter().sum());
    let stored = model.load_on(&devices, &LoadOptions::new(), &()).unwrap();
    assert_eq!(stored.matrix("small").unwrap().residence(), Residence::Stored);
    assert!(loaded.device_bytes() > stored.device_bytes());
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
fn every_byte_is_read_once() {
    let Some([device]) = devices("every_byte_is_read_once") else { return };
    let (bytes, read) = (bytes(), Arc::new(AtomicU64::new(0)));
    let length = bytes.len() as u64;
    let model = open(Counting(bytes, Arc::clone(&read)));
    let opened = read.swap(0, Ordering::Relaxed);
    model.load(&device, &fast()).unwrap();
    // Records are looked at before: 32 bytes for 8192 weights. One chunk more would be a sixth.
    let loaded = read.load(Ordering::Relaxed);
    assert!(opened < length / 10 && loaded < length + length / 20, "{loaded} of {length}");
}

#[test]
fn a_plan_says_itself_where_matrices_lie() {
    let Some([device]) = devices("a_plan_says_itself_where_matrices_lie") else { return };
    let model = open(bytes());
    let options = fast().plan(Plan::resident(&model).unwrap());
    let refused = model.load(&device, &options).unwrap_err();
    assert!(matches!(refused, Error::Parameter { .. }), "{refused:?}");
    assert!(refused.to_string().contains("Plan::prefer"), "{refused}");
}

#[test]
fn damage_is_told_and_the_device_still_loads() {
    let Some([device]) = devices("damage_is_told_and_the_device_still_loads") else { return };
    let good = bytes();
    let model = open(good.clone());
    let sections = &model.shards()[0].directory().sections;
    for section in sections {
        let (start, length) = (section.offset.get(), section.length.get());
        for at in [start, start + length / 2, start + length - 1] {
            let mut damaged = good.clone();
            damaged[at as usize] ^= 1;
            let loaded = open(damaged).load(&device, &fast());
            // A byte of a section that no GPU needs: the start of the weights file.
            let is_needed = section.block_index().is_some();
            assert_eq!(loaded.is_err(), is_needed, "byte {at}");
            assert!(
                loaded.err().is_none_or(|error| matches!(error, Error::Corrupt { .. })),
                "byte {at}"
            );
        }
    }
    open(good).load(&device, &fast()).unwrap();
}

#[test]
fn failures_of_the_driver_are_told() {
    const NAME: &str = "failures_of_the_driver_are_told";
    if in_child() {
        let device = Device::open(0).unwrap();
        let error = open(bytes()).load(&device, &fast()).unwrap_err();
        assert!(matches!(error, Error::Gpu { .. }), "{error:?}");
        return;
    }
    let Some(folder) = compile() else { return };
    // Neither is called before matrices arrive.
    for function in ["cuStreamWaitEvent", "cuMemsetD8Async"] {
        let mut command = child(&folder, NAME, 1);
        command.env(format!("DRIVER_{function}"), "700");
        run_child(command);
    }
}
