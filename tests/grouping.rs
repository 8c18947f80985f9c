//! Grouping into blocks: what comes out for public models, and what it does not depend on.

#[path = "grouping/models.rs"]
mod models;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::{Duration, Instant},
};

use df11::hazmat::group::{GroupedBlock, Item, group};
use models::{Model, Tensor};
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

/// Asserts that each `{list}.{n}` is a block with all tensors of that prefix and no others, and
/// that the other blocks have the names given, in this order.
fn check(model: &Model, lists: &[(&str, usize)], others: &[&str]) {
    let blocks = blocks(&model.0);
    let mut layers = HashSet::new();
    for &(list, count) in lists {
        for layer in (0..count).map(|n| format!("{list}{n}")) {
            let block = blocks.iter().find(|block| block.name == layer);
            let block = block.unwrap_or_else(|| panic!("no block {layer} in {:?}", names(&blocks)));
            let inside: BTreeSet<_> =
                block.tensors.iter().map(|&tensor| model.0[tensor].0.as_str()).collect();
            let expected = model.0.iter().map(|(name, _)| name.as_str());
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
    assert_eq!(rest, others);
}

fn names(blocks: &[GroupedBlock]) -> Vec<&str> {
    blocks.iter().map(|block| block.name.as_str()).collect()
}

const LLAMA_ENDS: &[&str] = &["lm_head", "model.embed_tokens", "model.norm"];

/// A model; its lists, with the number of their blocks; its other blocks.
type Case = (Model, &'static [(&'static str, usize)], &'static [&'static str]);

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
fn cases() -> Vec<Case> {
    vec![
        (models::llama_8b(), &[("model.layers.", 32)], LLAMA_ENDS),
        // Experts stay in their layers.
        (models::mixtral_8x7b(), &[("model.layers.", 32)], LLAMA_ENDS),
        (models::quantized_mixtral(), &[("model.layers.", 32)], LLAMA_ENDS),
        (models::deepseek_v3(), &[("model.layers.", 62)], LLAMA_ENDS),
        (
            models::qwen3_next(),
            &[("model.layers.", 48), ("mtp.layers.", 1)],
            &["lm_head", "model.embed_tokens", "model.norm", "mtp.*"],
        ),
        // Layers of several kinds.
        (
            models::nemotron_h(),
            &[("backbone.layers.", 52)],
            &["backbone.embeddings", "backbone.norm_f", "lm_head"],
        ),
        (
            models::mamba_2_8b(),
            &[("backbone.layers.", 64)],
            &["backbone.embeddings", "backbone.norm_f"],
        ),
        // Towers of two kinds.
        (
            models::gemma3_4b(),
            &[
                ("language_model.model.layers.", 34),
                ("vision_tower.vision_model.encoder.layers.", 27),
            ],
            &[
                "language_model.model.embed_tokens",
                "language_model.model.norm",
                "multi_modal_projector",
                "vision_tower.vision_model.embeddings",
                "vision_tower.vision_model.post_layernorm",
            ],
        ),
        (
            models::clip_l(),
            &[("text_model.encoder.layers.", 12), ("vision_model.encoder.layers.", 24)],
            &[
                "logit_scale",
                "text_model.embeddings",
                "text_model.final_layer_norm",
                "text_projection",
                "vision_model.embeddings",
                "vision_model.*",
                "visual_projection",
            ],
        ),
        (
            models::whisper_large(),
            &[("model.encoder.layers.", 32), ("model.decoder.layers.", 32)],
            &[
                "model.decoder.*",
                "model.decoder.embed_tokens",
                "model.encoder.*",
                "model.encoder.conv2",
                "model.encoder.embed_positions",
            ],
        ),
        // No common prefix, and nested sequences.
        (models::gpt2(), &[("h.", 12)], &["ln_f", "wpe", "wte"]),
        (
            models::flan_t5(),
            &[("encoder.block.", 12), ("decoder.block.", 12)],
            &["decoder.final_layer_norm", "encoder.final_layer_norm", "lm_head", "shared"],
        ),
        // Sentence encoders with and without an index before.
        (models::mini_lm(""), &[("encoder.layer.", 6)], &["embeddings", "pooler"]),
        (
            models::mini_lm_with_head(),
            &[("0.auto_model.encoder.layer.", 6)],
            &["0.auto_model.embeddings", "0.auto_model.pooler", "2"],
        ),
        (
            models::two_numbered_towers(),
            &[("model.0.encoder.layer.", 6), ("model.1.encoder.layer.", 6)],
            &["model.0.embeddings", "model.0.pooler", "model.1.embeddings", "model.1.pooler"],
        ),
        (
            models::vit("vit.", false),
            &[("vit.encoder.layer.", 12)],
            &["vit.embeddings", "vit.layernorm"],
        ),
        (models::vit("", true), &[("encoder.layer.", 12)], &["embeddings", "layernorm"]),
        // Stages of blocks.
        (
            models::swin_tiny(),
            &[
                ("layers.0.blocks.", 2),
                ("layers.1.blocks.", 2),
                ("layers.2.blocks.", 6),
                ("layers.3.blocks.", 2),
            ],
            &["head", "layers.0.downsample", "layers.1.downsample", "layers.2.downsample", "*"],
        ),
        (
            models::flux_dev(),
            &[("transformer_blocks.", 19), ("single_transformer_blocks.", 38)],
            &["context_embedder", "norm_out", "*", "time_text_embed"],
        ),
        (
            models::vae_decoder(),
            &[
                ("decoder.mid_block.resnets.", 2),
                ("decoder.up_blocks.0.resnets.", 3),
                ("decoder.up_blocks.1.resnets.", 3),
                ("decoder.up_blocks.2.resnets.", 3),
                ("decoder.up_blocks.3.resnets.", 3),
            ],
            &["decoder.conv_in", "decoder.conv_out", "decoder.mid_block.attentions"],
        ),
    ]
}

/// Models in whose names the digits at the end are the structure.
fn numbered() -> [Case; 2] {
    [
        (
            models::torchvision_vit(),
            &[("encoder.layers.encoder_layer_", 12)],
            &["class_token", "conv_proj", "encoder.ln", "encoder.pos_embedding", "heads"],
        ),
        (
            models::resnet18(),
            &[("layer1.", 2), ("layer2.", 2), ("layer3.", 2), ("layer4.", 2)],
            &["*", "fc"],
        ),
    ]
}

#[test]
fn blocks_of_public_models() {
    for (model, lists, others) in cases().iter().chain(&numbered()) {
        check(model, lists, others);
    }
}

#[test]
fn a_unet() {
    let mut lists = vec![
        ("mid_block.attentions.0.transformer_blocks.".to_owned(), 10),
        ("mid_block.resnets.".into(), 2),
    ];
    for (stage, attentions, depth) in [
        ("down_blocks.1", 2, 2),
        ("down_blocks.2", 2, 10),
        ("up_blocks.0", 3, 10),
        ("up_blocks.1", 3, 2),
    ] {
        lists.extend(
            (0..attentions).map(|n| (format!("{stage}.attentions.{n}.transformer_blocks."), depth)),
        );
        lists.push((format!("{stage}.resnets."), attentions));
    }
    lists.extend([("down_blocks.0.resnets.".into(), 2), ("up_blocks.2.resnets.".into(), 3)]);
    let lists: Vec<_> = lists.iter().map(|(list, count)| (list.as_str(), *count)).collect();
    let mut rest = vec!["add_embedding".to_owned(), "*".to_owned()];
    for (stage, attentions, sampler) in [
        ("down_blocks.0", 0, Some("downsamplers")),
        ("down_blocks.1", 2, Some("downsamplers")),
        ("down_blocks.2", 2, None),
        ("mid_block", 1, None),
        ("up_blocks.0", 3, Some("upsamplers")),
        ("up_blocks.1", 3, Some("upsamplers")),
    ] {
        rest.extend((0..attentions).map(|n| format!("{stage}.attentions.{n}.*")));
        rest.extend(sampler.map(|sampler| format!("{stage}.{sampler}")));
    }
    check(&models::sdxl_unet(), &lists, &rest.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn models_without_numbers_and_sequences() {
    let plain =
        |names: &[&str]| Model(names.iter().map(|&name| (name.to_owned(), vec![64, 64])).collect());
    check(&plain(&["fc1.weight", "fc2.weight", "fc1.bias"]), &[], &["fc1", "fc2"]);
    check(&plain(&["w", "head"]), &[], &["head", "w"]);
    // A sequence that is the model is opened; one beside a larger thing is a block.
    check(
        &plain(&["net.0.weight", "net.2.weight", "net.10.weight"]),
        &[],
        &["net.0", "net.2", "net.10"],
    );
    let mut model = plain(&["mlp.0.weight", "mlp.2.weight"]);
    model.0.push(("embed.weight".to_owned(), vec![640, 64]));
    check(&model, &[], &["embed", "mlp"]);
    // An only layer is a block with its experts.
    let layer = [
        "attn.q",
        "attn.k",
        "mlp.experts.0.up",
        "mlp.experts.0.down",
        "mlp.experts.1.up",
        "mlp.experts.1.down",
    ];
    let names: Vec<_> = layer.iter().map(|name| format!("m.layers.0.{name}.weight")).collect();
    let mut names: Vec<_> = names.iter().map(String::as_str).collect();
    names.extend(["m.embed.weight", "head.weight"]);
    check(&plain(&names), &[("m.layers.", 1)], &["head", "m.embed"]);
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
    cases().into_iter().map(|(model, ..)| model).chain([models::sdxl_unet()])
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
fn renamed(model: &Model, mut seed: u64, keep_digits: bool) -> Model {
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
    Model(model.0.iter().map(|(old, shape)| (name(old), shape.clone())).collect())
}

fn partition(blocks: &[GroupedBlock]) -> BTreeSet<BTreeSet<usize>> {
    blocks.iter().map(|block| block.tensors.iter().copied().collect()).collect()
}

#[test]
fn names_mean_nothing() {
    for (model, seed) in all().zip(0..) {
        let expected = partition(&blocks(&model.0));
        for keep_digits in [false, true] {
            let renamed = renamed(&model, seed, keep_digits);
            assert_eq!(partition(&blocks(&renamed.0)), expected, "{}", renamed.0[0].0);
        }
    }
    for (model, ..) in numbered() {
        assert_eq!(partition(&blocks(&renamed(&model, 7, true).0)), partition(&blocks(&model.0)));
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
        let mut shuffled = model.0.clone();
        for at in (1..shuffled.len()).rev() {
            shuffled.swap(at, (next(&mut seed) % (at as u64 + 1)) as usize);
        }
        assert_eq!(named(&shuffled), named(&model.0));
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
        let model = Model(named.map(|(name, &n)| (name, vec![n, 3])).collect());
        let expected = partition(&blocks(&model.0));
        prop_assert_eq!(partition(&blocks(&renamed(&model, seed, true).0)), expected);
    }
}
