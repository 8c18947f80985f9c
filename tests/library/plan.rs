//! Which block lies where, decided without a GPU.

use df11::{
    Error,
    gpu::{Placement, Plan, Preference, Residence},
};
use proptest::prelude::*;

use crate::{
    container::{Item, Model, normal_weights},
    files::check_error,
};

/// A block of a coded tensor with this many rows, and a small one beside it.
fn block(at: usize, rows: usize) -> [Item; 2] {
    let coded = Item::gap(
        &format!("{at}.coded"),
        &[rows as u64, 64],
        normal_weights(rows * 64, at as u64),
        (8, 64),
    );
    let raw = Item::raw(&format!("{at}.raw"), df11::Dtype::U8, &[9], vec![at as u8; 9]);
    [coded, raw].map(|item| item.in_block(&format!("block {at}")))
}

fn model(rows: &[usize]) -> df11::Model {
    let items: Vec<Item> =
        rows.iter().enumerate().flat_map(|(at, &rows)| block(at, rows)).collect();
    Model::new(&items, &[]).open()
}

/// Placements of the loaded blocks.
fn placed(plan: &Plan) -> impl Iterator<Item = Placement> {
    plan.placements().iter().copied().flatten()
}

fn streamed(plan: &Plan) -> usize {
    placed(plan).filter(|place| place.streamed).count()
}

#[test]
fn what_fits_is_resident() {
    let model = model(&[300; 8]);
    let whole = Plan::resident(&model).unwrap();
    let bytes = whole.device_bytes()[0];
    assert_eq!(whole.placements(), [Some(Placement { device: 0, streamed: false }); 8]);
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
    let devices: Vec<usize> = placed(&plan).map(|place| place.device).collect();
    assert!(devices.is_sorted() && devices[0] == 0 && devices[7] == 1, "{devices:?}");
    // All on the first where there is room.
    let plan = Plan::fit(&model, &[bytes, bytes]).unwrap();
    assert!(placed(&plan).all(|place| place.device == 0));
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
        let places: Vec<usize> =
            (0..24).filter(|&at| plan.placements()[at].unwrap().streamed).collect();
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
    assert!(
        streamed(&plan) > 0 && !plan.placements()[2].unwrap().streamed,
        "{:?}",
        plan.placements()
    );
}

#[test]
fn too_little_is_told_with_what_is_needed() {
    let model = model(&[300; 4]);
    let least = Plan::all_streamed(&model).unwrap().device_bytes()[0];
    assert!(Plan::fit(&model, &[least]).is_ok());
    for memory in [0, 1, least - 1] {
        check_error(Plan::fit(&model, &[memory]), "Parameter", &least.to_string());
    }
    check_error(Plan::fit(&model, &[]), "Parameter", "");
}

#[test]
fn containers_without_weights_have_a_plan() {
    let model = Model::new(&[], &[("config.json", b"{}\n")]).open();
    let plan = Plan::fit(&model, &[0, 0]).unwrap();
    assert_eq!((plan.placements().len(), plan.device_bytes()), (0, &[0, 0][..]));
}

fn on(device: usize, streamed: bool) -> Placement {
    Placement { device, streamed }
}

#[test]
fn each_block_lies_where_the_caller_says() {
    let model = model(&[300, 400, 200, 300, 500]);
    let of = |places: [Option<Placement>; 5]| {
        let names: Vec<String> = model.blocks().map(|block| block.name().to_owned()).collect();
        let at = |name: &str| names.iter().position(|other| other == name).unwrap();
        Plan::of(&model, 3, |block| places[at(block.name())]).unwrap()
    };
    let places =
        [Some(on(2, false)), None, Some(on(0, true)), Some(on(0, false)), Some(on(2, true))];
    let plan = of(places);
    assert_eq!(plan.placements(), places);
    // GPUs do not know of each other's blocks, and what is not loaded takes nothing.
    let first = of([None, None, Some(on(0, true)), Some(on(0, false)), None]);
    let third = of([Some(on(2, false)), None, None, None, Some(on(2, true))]);
    assert_eq!(plan.device_bytes(), [first.device_bytes()[0], 0, third.device_bytes()[2]]);
    assert_eq!(plan.host_bytes(), first.host_bytes() + third.host_bytes());
    assert!(first.host_bytes() > 0 && third.host_bytes() > first.host_bytes());
    assert_eq!(of([None; 5]).device_bytes(), [0; 3]);
    // It agrees with the other constructors.
    for streamed in [false, true] {
        let whole = if streamed { Plan::all_streamed(&model) } else { Plan::resident(&model) };
        assert_eq!(Plan::of(&model, 1, |_| Some(on(0, streamed))).unwrap(), whole.unwrap());
    }
    let plan =
        Plan::of(&model, 2, |block| Some(on(usize::from(block.name() == "block 3") * 2, false)));
    let part = "\"block 3\" is placed on GPU 2 of 2 in the plan; count GPUs from 0";
    check_error(plan, "Parameter", part);
}

#[test]
fn what_is_not_loaded_leaves_room() {
    // The fourth one is by far the largest.
    let model = model(&[300, 300, 300, 3000, 300]);
    let large = |block: &df11::Block<'_>| block.name() == "block 3";
    let all = Plan::resident(&model).unwrap().device_bytes()[0];
    let rest =
        Plan::of(&model, 1, |block| if large(&block) { None } else { Some(on(0, false)) }).unwrap();
    let memory = rest.device_bytes()[0];
    assert!(memory < all / 2 && Plan::fit(&model, &[memory]).is_err());
    assert_eq!(Plan::fit_some(&model, &[memory], |block| !large(&block)).unwrap(), rest);
    let tight = Plan::fit_some(&model, &[memory - 1], |block| !large(&block)).unwrap();
    assert!(streamed(&tight) > 0 && tight.placements()[3].is_none() && placed(&tight).count() == 4);
    let none = Plan::fit_some(&model, &[0], |_| false).unwrap();
    assert_eq!((placed(&none).count(), none.device_bytes()), (0, &[0][..]));
}

/// Blocks of matrices, an embedding alone in its block, and one that no matrix can be made of.
fn matrices() -> df11::Model {
    let items = [
        Item::matrix("embedding", [640, 256], 640).in_block("embedding"),
        Item::matrix("up", [320, 256], 320).in_block("layer"),
        Item::matrix("down", [320, 256], 320).in_block("layer"),
        Item::raw("norm", df11::Dtype::BF16, &[256], normal_weights(256, 1)).in_block("layer"),
        Item::gap("gap", &[300, 64], normal_weights(19_200, 2), (8, 64)).in_block("gap"),
    ];
    Model::new(&items, &[]).open()
}

#[test]
fn matrices_are_fast_as_far_as_preferred() {
    let model = matrices();
    let stored = Plan::resident(&model).unwrap();
    assert_eq!(stored.residences(), [Residence::Stored; 3]);
    let prefer =
        |preference, memory: &[u64]| stored.clone().prefer(&model, preference, memory).unwrap();
    let fast = prefer(Preference::Fast, &[]);
    assert_eq!(fast.residences(), [Residence::Fast, Residence::Fast, Residence::Stored]);
    assert_eq!(fast.placements(), stored.placements());
    // 1536 bytes for 1024 weights, 8 for a head of 8192, 4 for each exception of 256; not more than
    // 12.15 bits.
    let (weights, before, after) = (1280 * 256, stored.device_bytes()[0], fast.device_bytes()[0]);
    let taken = weights * 3 / 2 + weights / 1024 + weights / 64;
    assert!(taken * 8 <= weights * 1215 / 100 && after > before, "{before} {after}");
    assert_eq!(prefer(Preference::Stored, &[]), stored);
    // The layer first, whatever the order.
    let auto = prefer(Preference::Auto, &[after - 1]);
    assert_eq!(auto.residences(), [Residence::Stored, Residence::Fast, Residence::Stored]);
    assert!(auto.device_bytes()[0] < after && auto.device_bytes()[0] > before);
    assert_eq!(prefer(Preference::Auto, &[after]), fast);
    assert_eq!(prefer(Preference::Auto, &[before]).device_bytes(), stored.device_bytes());
    // Streamed blocks stay as stored.
    let streamed = Plan::all_streamed(&model).unwrap();
    assert_eq!(streamed.clone().prefer(&model, Preference::Fast, &[]).unwrap(), streamed);
    for memory in [&[][..], &[after, after]] {
        check_error(stored.clone().prefer(&model, Preference::Auto, memory), "Parameter", "");
    }
    assert!(stored.clone().prefer(&self::model(&[300]), Preference::Fast, &[]).is_err());
    // Placing counts the sizes that are wanted.
    let fit = |memory: &[u64], preference| Plan::fit_preferring(&model, memory, preference);
    assert_eq!(fit(&[after], Preference::Fast).unwrap(), fast);
    let refused = fit(&[after - 1], Preference::Fast).unwrap_err().to_string();
    assert!(refused.contains(&after.to_string()) && refused.contains("prefer auto"), "{refused}");
    assert_eq!(fit(&[after - 1], Preference::Auto).unwrap(), auto);
    let two = fit(&[after - 1, after], Preference::Fast).unwrap();
    assert_eq!((two.residences(), two.placements()[2].unwrap().device), (fast.residences(), 1));
    assert_eq!(
        fit(&[before - 1], Preference::Auto).unwrap(),
        Plan::fit(&model, &[before - 1]).unwrap()
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// For any blocks and GPUs: no GPU takes more than it may, blocks lie in order, and
    /// nothing is streamed that need not be.
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
                prop_assert!(placed(&plan).map(|place| place.device).is_sorted());
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
