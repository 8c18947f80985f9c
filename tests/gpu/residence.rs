//! Matrices that are loaded in the fast layout: the same bits, whatever is decoded.

use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};

use df11::{
    Dtype, Error, Observer,
    gpu::{Device, LoadOptions, Piece, Placement, Plan, Preference, Residence},
};

use super::{
    check_blocks,
    container::{Item, Model, normal_weights, parse, weights},
    gpu, gpu_stream, linear, mutate, open, random, run,
};

/// Small matrices and large ones, which come in several parts; such as cannot be fast, and what is
/// none.
fn mixed() -> Vec<u8> {
    let all: Vec<u8> = (0..=u16::MAX).rev().flat_map(u16::to_le_bytes).collect();
    let mut state = 9;
    let spread: Vec<u8> = weights((0..96 * 512).map(|_| random(&mut state) as u8));
    let first = [
        Item::matrix("a", [100, 520], 620),
        Item::raw("norm", Dtype::BF16, &[333], normal_weights(333, 3)),
        Item::matrix("large", [3000, 2056], 5056),
        Item::tile("spread", &[96, 512], spread, (256, 512)),
        Item::tile("vector", &[96, 520], normal_weights(49_920, 6), (8192, 49_920)),
        Item::matrix("b", [16, 128], 144),
    ];
    let second = [
        Item::tile("stack", &[3, 40, 520], normal_weights(62_400, 4), (256, 520)),
        Item::gap("gap", &[96, 520], normal_weights(49_920, 7), (32, 128)),
        Item::tile("patterns", &[256, 256], all, (256, 256)),
        Item::raw("floats", Dtype::F32, &[4, 4], vec![7; 64]),
    ];
    let plain = [Item::raw("only", Dtype::U8, &[77], vec![5; 77])];
    let tied = first[2].alias("tied");
    let mut items: Vec<Item> = first.map(|item| item.in_block("first")).into();
    items.extend(second.map(|item| item.in_block("second")));
    items.extend(plain.map(|item| item.in_block("third")));
    items.push(tied.in_block("first"));
    Model::new(&items, &[]).build()
}

fn fast() -> LoadOptions {
    LoadOptions::new().residence(Preference::Fast)
}

#[test]
fn fast_models_decode_the_same_bits() {
    let Some(device) = gpu() else { return };
    for device in [device.clone(), Device::open_with_shared_memory(0, 99 << 10).unwrap()] {
        let original = open(mixed());
        let (model, stored) =
            (original.load(&device, &fast()).unwrap(), super::load(&device, mixed()));
        check_blocks(&model, &original);
        for name in ["a", "large", "tied", "stack", "spread", "patterns"] {
            let matrix = model.matrix(name).unwrap();
            let is_fast = !["spread", "patterns"].contains(&name);
            assert_eq!(matrix.residence() == Residence::Fast, is_fast, "{name}");
            if is_fast {
                // The same exceptions as of a matrix that is made fast on the GPU.
                let stored = stored.matrix(name).unwrap().to_fast_or_stored().unwrap();
                assert_eq!(matrix.exceptions(), stored.exceptions(), "{name}");
                assert_eq!(matrix.device_bytes(), stored.device_bytes(), "{name}");
            }
        }
        let residences = [Residence::Fast, Residence::Fast, Residence::Stored];
        assert_eq!(model.plan().residences(), residences);
        assert!(model.device_bytes() <= model.plan().device_bytes()[0]);
    }
}

#[test]
fn slices_of_fast_models_are_those_of_tensors() {
    let Some((device, stream)) = gpu_stream() else { return };
    let original = open(mixed());
    let model = original.load(device, &fast()).unwrap();
    let mut state = 77;
    for (name, shape) in
        [("a", vec![100, 520]), ("large", vec![3000, 2056]), ("stack", vec![3, 40, 520])]
    {
        for round in 0..40 {
            let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
            for &size in &shape[..=(round % shape.len())] {
                let start = random(&mut state) % size;
                ranges.push(start..start + 1 + random(&mut state) % (size - start));
            }
            // Rows of a slice begin on multiples of 16 bytes, as those of tiles as stored.
            if let Some(last) = ranges.get_mut(shape.len() - 1) {
                *last = last.start / 8 * 8..last.end.next_multiple_of(8);
            }
            let tensor = original.tensor(name).unwrap();
            let program = model.program(&[Piece::new(name, 0).slice(&ranges)]).unwrap();
            let mut expected = vec![0; program.bytes() as usize];
            tensor.slice(&ranges).unwrap().decode_into(&mut expected).unwrap();
            assert!(run(&program, &stream) == expected, "{name} {ranges:?}");
        }
    }
}

#[test]
fn fast_matrices_keep_the_model_and_multiply() {
    let Some((device, stream)) = gpu_stream() else { return };
    let original = open(mixed());
    let matrix = original.load(device, &fast()).unwrap().matrix("large").unwrap();
    let decoded = linear::decode(&stream, &matrix);
    assert!(decoded == original.tensor("large").unwrap().decode::<u8>().unwrap());
    df11::gpu::Linear::new(&[matrix]).unwrap();
}

/// Counts bytes, and cancels after some.
#[derive(Default)]
struct Counter {
    all: Mutex<u64>,
    done: AtomicU64,
    most: Option<u64>,
}

impl Observer for Counter {
    fn begin(&self, bytes: u64) {
        *self.all.lock().unwrap() = bytes;
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.most.is_some_and(|most| self.done.load(Ordering::Relaxed) > most)
    }
}

#[test]
fn loading_counts_all_bytes_and_can_be_cancelled() {
    let Some(device) = gpu() else { return };
    let devices = std::slice::from_ref(device);
    let counter = Counter::default();
    open(mixed()).load_on(devices, &fast(), &counter).unwrap();
    assert_eq!(counter.done.into_inner(), counter.all.into_inner().unwrap());
    for most in [0, 100_000, 5_000_000] {
        let counter = Counter { most: Some(most), ..Counter::default() };
        let result = open(mixed()).load_on(devices, &fast(), &counter);
        assert!(matches!(result, Err(Error::Cancelled)), "{most}");
    }
    // The device is as good as before.
    open(mixed()).load(device, &fast()).unwrap();
}

#[test]
fn auto_takes_what_memory_allows() {
    let Some(device) = gpu() else { return };
    let model = open(mixed());
    let [stored, all] = [Preference::Stored, Preference::Fast].map(|preference| {
        let plan = Plan::resident(&model).unwrap().prefer(&model, preference, &[]).unwrap();
        plan.device_bytes()[0]
    });
    for (memory, residences) in [
        (all, [Residence::Fast, Residence::Fast, Residence::Stored]),
        (all - 1, [Residence::Fast, Residence::Stored, Residence::Stored]),
        (stored, [Residence::Stored; 3]),
    ] {
        let plan =
            Plan::resident(&model).unwrap().prefer(&model, Preference::Auto, &[memory]).unwrap();
        assert_eq!(plan.residences(), residences);
        assert!(plan.device_bytes()[0] <= memory);
        let loaded = model.load(device, &LoadOptions::new().plan(plan)).unwrap();
        assert!(loaded.device_bytes() <= memory);
        check_blocks(&loaded, &model);
    }
    let loaded = model.load(device, &LoadOptions::new().residence(Preference::Auto)).unwrap();
    assert_eq!(loaded.matrix("a").unwrap().residence(), Residence::Fast);
}

#[test]
fn fast_and_streamed_blocks_live_side_by_side() {
    let Some(device) = gpu() else { return };
    let model = open(mixed());
    let plan = Plan::of(&model, 1, |block| {
        Some(Placement { device: 0, streamed: block.name() == "second" })
    });
    let plan = plan.unwrap().prefer(&model, Preference::Fast, &[]).unwrap();
    let loaded = model.load(device, &LoadOptions::new().plan(plan)).unwrap();
    (0..3).for_each(|_| check_blocks(&loaded, &model));
    assert_eq!(loaded.matrix("a").unwrap().residence(), Residence::Fast);
    assert!(loaded.matrix("stack").is_err());
}

/// Hostile streams become an error, or another matrix.
#[test]
fn hostile_streams_are_refused_or_decoded() {
    let Some(device) = gpu() else { return };
    let (mut state, mut refused) = (5, 0);
    let items = [(40, 520), (100, 264), (3000, 2056)]
        .map(|(rows, columns)| Item::matrix(&format!("{rows}"), [rows, columns], rows));
    let valid = Model::new(&items, &[]).build();
    for round in 0..21 {
        let mut draft = parse(&valid);
        (0..items.len()).for_each(|tensor| mutate(&mut draft, tensor, round % 7, &mut state));
        draft.repair_checksums();
        match open(draft.pack()).load(device, &fast().without_validation()) {
            Ok(_) => {}
            Err(Error::Corrupt { .. }) => refused += 1,
            Err(other) => panic!("round {round}: {other}"),
        }
    }
    assert!(refused > 10, "{refused} of 21");
}
