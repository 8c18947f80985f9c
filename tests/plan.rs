//! Which block lies where, decided without a GPU: `cargo test --test plan`.
#![cfg(feature = "cuda")]

#[path = "support/container.rs"]
mod container;

use container::{Item, Model, normal_weights};
use df11::{
    Error, OpenOptions,
    gpu::{Placement, Plan},
};
use proptest::prelude::*;

/// A block of a coded tensor with so many rows, and a small one beside it.
fn block(at: usize, rows: usize) -> [Item; 2] {
    let coded =
        Item::gap(&format!("{at}.coded"), &[rows as u64, 64], normal_weights(rows * 64, at as u64), (8, 64));
    let raw = Item::raw(&format!("{at}.raw"), df11::Dtype::U8, &[9], vec![at as u8; 9]);
    [coded, raw].map(|item| item.in_block(&format!("block {at}")))
}

fn model(rows: &[usize]) -> df11::Model {
    let items: Vec<Item> = rows.iter().enumerate().flat_map(|(at, &rows)| block(at, rows)).collect();
    let bytes = Model::new(&items, &[]).build();
    OpenOptions::new().open_readers(vec![("sample".into(), Box::new(bytes))]).unwrap()
}

fn streamed(plan: &Plan) -> usize {
    plan.placements().iter().filter(|place| place.streamed).count()
}

#[test]
fn what_fits_is_resident() {
    let model = model(&[300; 8]);
    let whole = Plan::resident(&model).unwrap();
    let bytes = whole.device_bytes()[0];
    assert_eq!(whole.placements(), [Placement { device: 0, streamed: false }; 8]);
    assert_eq!(whole.host_bytes(), 0);
    assert_eq!(Plan::fit(&model, &[bytes]).unwrap(), whole);
    assert_eq!(Plan::fit(&model, &[u64::MAX]).unwrap(), whole);
    assert!(streamed(&Plan::fit(&model, &[bytes - 1]).unwrap()) > 0);
}

#[test]
fn a_second_gpu_takes_what_the_first_does_not_hold() {
    let model = model(&[300; 8]);
    let bytes = Plan::resident(&model).unwrap().device_bytes()[0];
    let plan = Plan::fit(&model, &[bytes * 3 / 4, bytes]).unwrap();
    assert_eq!(streamed(&plan), 0);
    let devices: Vec<usize> = plan.placements().iter().map(|place| place.device).collect();
    assert!(devices.is_sorted() && devices[0] == 0 && devices[7] == 1, "{devices:?}");
    // All on the first where there is room.
    let plan = Plan::fit(&model, &[bytes, bytes]).unwrap();
    assert!(plan.placements().iter().all(|place| place.device == 0));
}

#[test]
fn streamed_blocks_are_spread_evenly() {
    let model = model(&[300; 24]);
    let whole = Plan::resident(&model).unwrap().device_bytes()[0];
    let least = Plan::all_streamed(&model).unwrap();
    assert_eq!(streamed(&least), 24);
    let mut before = 25;
    for step in 0..20 {
        let memory = least.device_bytes()[0] + (whole - least.device_bytes()[0]) * step / 20;
        let plan = Plan::fit(&model, &[memory]).unwrap();
        let count = streamed(&plan);
        assert!(count <= before, "more memory, fewer streamed");
        before = count;
        let places: Vec<usize> = (0..24).filter(|&at| plan.placements()[at].streamed).collect();
        // Two blocks fewer would not do.
        let one = (plan.host_bytes() / count as u64) * 2;
        assert!(plan.device_bytes()[0] + one > memory, "{count} of 24 in {memory}");
        let gaps: Vec<usize> = places.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let (least, most) = (gaps.iter().min().unwrap(), gaps.iter().max().unwrap());
        assert!(most - least <= 1, "{places:?}");
    }
    assert!(before < 24);
}

#[test]
fn small_blocks_stay_resident() {
    let mut rows = vec![2000; 6];
    rows[2] = 1;
    rows.extend([30_000; 6]);
    let model = model(&rows);
    let whole = Plan::resident(&model).unwrap().device_bytes()[0];
    let plan = Plan::fit(&model, &[whole - 1]).unwrap();
    assert!(streamed(&plan) > 0 && !plan.placements()[2].streamed, "{:?}", plan.placements());
}

#[test]
fn too_little_is_told_with_what_is_needed() {
    let model = model(&[300; 4]);
    let least = Plan::all_streamed(&model).unwrap().device_bytes()[0];
    assert!(Plan::fit(&model, &[least]).is_ok());
    for memory in [0, 1, least - 1] {
        let problem = Plan::fit(&model, &[memory]).unwrap_err();
        assert!(matches!(problem, Error::Parameter { .. }), "{problem:?}");
        assert!(problem.to_string().contains(&least.to_string()), "{problem}");
    }
    assert!(Plan::fit(&model, &[]).is_err_and(|error| matches!(error, Error::Parameter { .. })));
}

#[test]
fn containers_without_weights_have_a_plan() {
    let bytes = Model::new(&[], &[("config.json", b"{}\n")]).build();
    let model = OpenOptions::new().open_readers(vec![("empty".into(), Box::new(bytes))]).unwrap();
    let plan = Plan::fit(&model, &[0, 0]).unwrap();
    assert_eq!((plan.placements().len(), plan.device_bytes()), (0, &[0, 0][..]));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Whatever the blocks and the GPUs: no GPU takes more than it may, blocks lie in order, and nothing is streamed that need not be.
    #[test]
    fn plans_keep_to_their_memory(
        rows in prop::collection::vec(1usize..400, 1..12),
        shares in prop::collection::vec(0u64..150, 1..4),
    ) {
        let model = model(&rows);
        let whole = Plan::resident(&model).unwrap().device_bytes()[0];
        let memory: Vec<u64> = shares.iter().map(|share| whole * share / 100).collect();
        match Plan::fit(&model, &memory) {
            Ok(plan) => {
                prop_assert_eq!(plan.placements().len(), rows.len());
                prop_assert!(plan.placements().iter().map(|place| place.device).is_sorted());
                for (taken, memory) in plan.device_bytes().iter().zip(&memory) {
                    prop_assert!(taken <= memory);
                }
                prop_assert!(memory[0] < whole || streamed(&plan) == 0);
                prop_assert_eq!(plan.host_bytes() > 0, streamed(&plan) > 0);
            }
            Err(error) => {
                let refused = matches!(error, Error::Parameter { .. });
                prop_assert!(refused);
                let least = Plan::all_streamed(&model).unwrap().device_bytes()[0];
                prop_assert!(memory.iter().any(|&memory| memory < least));
            }
        }
    }
}
