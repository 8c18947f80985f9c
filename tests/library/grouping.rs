//! Grouping into blocks: what comes out for public models, and what it does not depend on.

#[path = "grouping/models.rs"]
mod models;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::{Duration, Instant},
};

use df11::hazmat::group::{GroupedBlock, Item, group};
use models::{Model, Tensor, models};
use proptest::prelude::*;

fn blocks(tensors: &[Tensor]) -> Vec<GroupedBlock> {
    let bytes = |shape: &[u64]| shape.iter().product::<u64>() * 2;
    let items: Vec<_> =
        tensors.iter().map(|(name, shape)| Item { name, shape, bytes: bytes(shape) }).collect();
    let blocks = group(&items);
    let mut seen = vec![false; tensors.len()];
    for &tensor in blocks.iter().flat_map(|block| &block.tensors) {
        assert!(
            !std::mem::replace(&mut seen[tensor], true),
            "{} is in two blocks",
            tensors[tensor].0
        );
    }
    assert!(seen.iter().all(|&seen| seen), "a tensor is in no block");
    let names: HashSet<_> = blocks.iter().map(|block| &block.name).collect();
    assert_eq!(names.len(), blocks.len(), "names are unique");
    assert!(
        blocks
            .iter()
            .all(|block| (1..=4096).contains(&block.name.len()) && !block.tensors.is_empty())
    );
    blocks
}

/// Asserts that each `{list}{n}` is a block with all tensors of that prefix and no others, and that
/// the other blocks have the names given, in this order.
fn check(model: &Model) {
    let blocks = blocks(&model.tensors);
    let mut layers = HashSet::new();
    for (list, count) in &model.lists {
        for layer in (0..*count).map(|n| format!("{list}{n}")) {
            let block = blocks.iter().find(|block| block.name == layer);
            let block = block.unwrap_or_else(|| panic!("no block {layer} in {:?}", names(&blocks)));
            let inside: BTreeSet<_> =
                block.tensors.iter().map(|&tensor| model.tensors[tensor].0.as_str()).collect();
            let expected = model.tensors.iter().map(|(name, _)| name.as_str());
            let prefix = format!("{layer}.");
            assert_eq!(
                inside,
                expected.filter(|name| name.starts_with(&prefix)).collect(),
                "{layer}"
            );
            layers.insert(layer);
        }
    }
    let rest: Vec<_> = names(&blocks).into_iter().filter(|name| !layers.contains(*name)).collect();
    assert_eq!(rest, model.others);
}

fn names(blocks: &[GroupedBlock]) -> Vec<&str> {
    blocks.iter().map(|block| block.name.as_str()).collect()
}

#[test]
fn blocks_of_public_models() {
    let models = models();
    assert_eq!(models.len(), 23);
    models.iter().for_each(check);
}

#[test]
fn models_without_numbers_and_sequences() {
    let plain = |names: &[&str], lists: &[(&str, usize)], others: &[&str]| Model {
        tensors: names.iter().map(|&name| (name.to_owned(), vec![64, 64])).collect(),
        lists: lists.iter().map(|&(list, count)| (list.to_owned(), count)).collect(),
        others: others.iter().map(|&name| name.to_owned()).collect(),
        is_numbered: false,
    };
    check(&plain(&["fc1.weight", "fc2.weight", "fc1.bias"], &[], &["fc1", "fc2"]));
    check(&plain(&["w", "head"], &[], &["head", "w"]));
    // A sequence that is the model is opened; one beside a larger thing is a block.
    let sequence = ["net.0.weight", "net.2.weight", "net.10.weight"];
    check(&plain(&sequence, &[], &["net.0", "net.2", "net.10"]));
    let mut model = plain(&["mlp.0.weight", "mlp.2.weight"], &[], &["embed", "mlp"]);
    model.tensors.push(("embed.weight".to_owned(), vec![640, 64]));
    check(&model);
    // An only layer is a block with its experts.
    let names = [
        "m.layers.0.attn.q.weight",
        "m.layers.0.attn.k.weight",
        "m.layers.0.mlp.experts.0.up.weight",
        "m.layers.0.mlp.experts.0.down.weight",
        "m.layers.0.mlp.experts.1.up.weight",
        "m.layers.0.mlp.experts.1.down.weight",
        "m.embed.weight",
        "head.weight",
    ];
    check(&plain(&names, &[("m.layers.", 1)], &["head", "m.embed"]));
}

#[test]
fn order_is_natural_and_labels_are_unique() {
    let layers: Vec<_> =
        [10, 9, 1, 0].into_iter().flat_map(|n| [(n, "a.p"), (n, "a.q"), (n, "b")]).collect();
    let tensors: Vec<_> =
        layers.iter().map(|(n, part)| (format!("l.{n}.{part}.w"), vec![8, 8])).collect();
    assert_eq!(names(&blocks(&tensors)), ["l.0", "l.1", "l.9", "l.10"]);
    let odd = [
        "*", ".", "..", "...", ".a", "a", "a.b", "a.", "a..", "0", "0.0", "00", "1.0", "~2", "*~2",
        "a.*",
    ];
    let tensors: Vec<_> = odd.iter().map(|name| ((*name).to_owned(), vec![8, 8])).collect();
    assert_eq!(blocks(&tensors).iter().map(|block| block.tensors.len()).sum::<usize>(), odd.len());
    assert!(group(&[]).is_empty());
}

#[test]
fn sizes_do_not_overflow() {
    let item = |name| Item { name, shape: &[u64::MAX, u64::MAX], bytes: u64::MAX };
    assert_eq!(group(&[item("a"), item("b"), item("c.x"), item("c.y")]).len(), 3);
}

#[test]
fn hostile_names_cost_no_more_than_friendly_ones() {
    let dots = |n: usize| format!("{}{n}{}", ".".repeat(n % 2000), ".".repeat(2000));
    let kinds: [&dyn Fn(usize) -> String; 5] = [
        &|n| format!("w{n}"),
        &|n| n.to_string().chars().flat_map(|digit| [digit, '.']).collect(),
        &|n| format!("l.{n}.a.b.c"),
        &|n| format!("{}{}", "0.".repeat(n % 40), n),
        &|n| format!("{}{n}", "x1.".repeat(20)),
    ];
    let start = Instant::now();
    for kind in kinds {
        blocks(&(0..100_000).map(|n| (kind(n), vec![2, 2])).collect::<Vec<_>>());
    }
    blocks(&(0..4_000).map(|n| (dots(n), vec![2, 2])).collect::<Vec<_>>());
    blocks(
        &(0..4_000).map(|n| (format!("{}{n}", "é".repeat(2040)), vec![2, 2])).collect::<Vec<_>>(),
    );
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

fn all() -> impl Iterator<Item = Model> {
    models().into_iter().filter(|model| !model.is_numbered)
}

/// The next number of a splitmix64 sequence.
fn next(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The same tensors, with each component but the numbers replaced by a word of letters; of a
/// component that ends in a number, the number stays where `keep_digits` says so.
fn renamed(tensors: &[Tensor], mut seed: u64, keep_digits: bool) -> Vec<Tensor> {
    let (mut words, mut used) = (HashMap::new(), HashSet::new());
    let mut word = |part: &str| {
        let fresh = || loop {
            let number = next(&mut seed);
            let letters =
                (0..=number % 7).map(|at| char::from(b'a' + (number >> (8 + 5 * at)) as u8 % 26));
            let word: String = letters.collect();
            if used.insert(word.clone()) {
                return word;
            }
        };
        words.entry(part.to_owned()).or_insert_with(fresh).clone()
    };
    let mut component = |part: &str| {
        let stem = part.trim_end_matches(|c: char| c.is_ascii_digit());
        match (stem, keep_digits) {
            ("", _) => part.to_owned(),
            (stem, true) => word(stem) + &part[stem.len()..],
            (_, false) => word(part),
        }
    };
    let mut name = |name: &str| name.split('.').map(&mut component).collect::<Vec<_>>().join(".");
    tensors.iter().map(|(old, shape)| (name(old), shape.clone())).collect()
}

fn partition(blocks: &[GroupedBlock]) -> BTreeSet<BTreeSet<usize>> {
    blocks.iter().map(|block| block.tensors.iter().copied().collect()).collect()
}

#[test]
fn names_mean_nothing() {
    for (model, seed) in models().iter().zip(0..) {
        let expected = partition(&blocks(&model.tensors));
        for keep_digits in if model.is_numbered { &[true][..] } else { &[false, true] } {
            let renamed = renamed(&model.tensors, seed, *keep_digits);
            assert_eq!(partition(&blocks(&renamed)), expected, "{}", renamed[0].0);
        }
    }
}

#[test]
fn the_order_of_the_input_means_nothing() {
    for (model, mut seed) in all().zip(0..) {
        let named = |tensors: &[Tensor]| -> Vec<_> {
            let name = |tensor: &usize| tensors[*tensor].0.clone();
            blocks(tensors)
                .iter()
                .map(|block| {
                    (block.name.clone(), block.tensors.iter().map(name).collect::<Vec<_>>())
                })
                .collect()
        };
        let mut shuffled = model.tensors.clone();
        for at in (1..shuffled.len()).rev() {
            shuffled.swap(at, (next(&mut seed) % (at as u64 + 1)) as usize);
        }
        assert_eq!(named(&shuffled), named(&model.tensors));
    }
}

proptest! {
    #[test]
    fn any_names_are_divided_without_loss(
        names in prop::collection::hash_set("[a-c0-2.é]{1,12}", 0..200),
        dimensions in prop::collection::vec(0..5_u64, 200),
        seed: u64,
    ) {
        let named = names.into_iter().zip(&dimensions);
        let tensors: Vec<Tensor> = named.map(|(name, &n)| (name, vec![n, 3])).collect();
        let expected = partition(&blocks(&tensors));
        prop_assert_eq!(partition(&blocks(&renamed(&tensors, seed, true))), expected);
    }
}
