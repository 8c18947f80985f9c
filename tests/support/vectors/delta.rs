//! Containers with `delta` tensors, and those that have their bases.

use df11::{
    Dtype,
    hazmat::{
        delta::{self, Codebook, Encoder, segment_elements},
        format::records::ENCODING_DELTA,
    },
};

use super::Vectors;
use crate::container::{DeltaArrays, Item, Model, Store, normal_weights};

pub(super) fn make(to: &mut Vectors) {
    places(to);
    codes(to);
    segments(to);
    tensors(to);
    layouts(to);
    streams(to);
}

/// Weights that differ from others by some steps: of `spread` kinds, most of them 0.
fn changed(base: &[u8], spread: u16) -> Vec<u8> {
    let mut state = 1u64;
    let change = |weight: &[u8; 2]| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let step = (state >> 40) as u16 % spread.max(1);
        let step = if state >> 62 == 0 { step } else { 0 };
        u16::from_le_bytes(*weight).wrapping_add(step).to_le_bytes()
    };
    base.as_chunks().0.iter().flat_map(change).collect()
}

fn of_base(name: &str, shape: &[u64], base: &[u8], weights: Vec<u8>) -> Item {
    let encoded = delta::encode_tensor(base, &weights, shape).unwrap();
    let arrays = DeltaArrays { base: encoded.sizes.base(), arrays: encoded.arrays };
    Item { store: Store::Delta(arrays), ..Item::raw(name, Dtype::BF16, shape, weights) }
}

fn weights(shape: &[u64]) -> Vec<u8> {
    normal_weights(shape.iter().product::<u64>() as usize, 5)
}

/// All patterns, twice in another order.
fn all() -> [Vec<u8>; 2] {
    let ordered =
        |factor: u16| (0..=u16::MAX).flat_map(move |at| at.wrapping_mul(factor).to_le_bytes());
    [ordered(1).collect(), ordered(40_503).collect()]
}

const SHAPES: [&[u64]; 9] =
    [&[], &[1], &[2], &[3], &[7], &[8, 1], &[3, 3], &[2, 3, 4, 5], &[41, 264]];

/// Tensors of many shapes; their base in several encodings.
fn places(to: &mut Vectors) {
    let name = |shape: &[u64]| format!("{shape:?}");
    let base: Vec<Item> = SHAPES
        .iter()
        .map(|shape| Item::raw(&name(shape), Dtype::BF16, shape, weights(shape)))
        .chain([
            Item::in_tiles("tiles", &[32, 256], weights(&[32, 256]), (256, 256), 2),
            Item::gap("gap", &[600], weights(&[600]), (8, 64)),
            Item::raw("all", Dtype::BF16, &[256, 256], all()[0].clone()),
        ])
        .collect();
    let mut items: Vec<Item> = base
        .iter()
        .map(|item| of_base(&item.name, &item.shape, &item.data, changed(&item.data, 4)))
        .collect();
    let last = items.last_mut().unwrap();
    *last = of_base("all", &[256, 256], &all()[0], all()[1].clone());
    items.push(Item { store: Store::Alias("tiles".into()), ..items[9].clone() });
    items.last_mut().unwrap().name = "tied".into();
    items.push(Item::normal(&[5, 6], 1));
    to.items("delta-base", &base);
    to.with_base("delta", &Model::new(&items, &[]));
    to.without_base("delta-alone", &Model::new(&items, &[]));
    // Its base is a container without these tensors.
    to.without_base("delta-other-base", &Model::new(&items, &[]));
    let same: Vec<Item> = base
        .iter()
        .map(|item| of_base(&item.name, &item.shape, &item.data, item.data.clone()))
        .collect();
    to.with_base("delta-same", &Model::new(&same, &[]));
}

/// The base's tensor that most vectors change, and its weights afterwards.
const SHAPE: &[u64] = &[41, 264];

fn pair() -> (Vec<u8>, Vec<u8>) {
    let base = weights(SHAPE);
    let weights = changed(&base, 300);
    (base, weights)
}

fn item(edit: impl FnOnce(&mut [Vec<u8>; 3])) -> Item {
    let (base, weights) = pair();
    let mut item = of_base("[41, 264]", SHAPE, &base, weights);
    if let Store::Delta(delta) = &mut item.store {
        edit(&mut delta.arrays);
    }
    item
}

/// Codes that no writer chooses.
fn codes(to: &mut Vectors) {
    let (base, weights) = pair();
    let mut items = Vec::new();
    // Every weight escaped, in one context; contexts without tokens or weights.
    let escaped = [0, 1, 1, 104, 0, 8];
    let unused = [&[255, 2, 0, 1, 104, 0, 8][..]].concat();
    for code in [&escaped[..], &unused] {
        let codebook = Codebook::from_bytes(code).unwrap();
        let mut bitstream = Vec::new();
        Encoder::new(&codebook).encode_segment(&base, &weights, &mut bitstream).unwrap();
        let end = (bitstream.len() as u64).to_le_bytes();
        let mut item = item(|arrays| {
            *arrays = [code.to_vec(), [[0; 8], end].concat(), bitstream];
        });
        item.block = format!("{}", items.len());
        items.push(item);
    }
    to.with_base("delta-escapes", &Model::new(&items[..1], &[]));
    to.with_base("delta-context-unused", &Model::new(&items[1..], &[]));
}

/// Several segments, of rows and of a vector.
fn segments(to: &mut Vectors) {
    let shapes: [&[u64]; 2] = [&[300, 1023], &[(1 << 18) + 9]];
    let pattern = |shape: &[u64]| {
        let count = shape.iter().product::<u64>();
        (0..count).flat_map(|at| (0x3C00 + (at % 509) as u16).to_le_bytes()).collect::<Vec<u8>>()
    };
    let raw = |shape: &&[u64]| Item::raw(&format!("{shape:?}"), Dtype::BF16, shape, pattern(shape));
    let base: Vec<Item> = shapes.iter().map(raw).collect();
    assert!(base.iter().all(|item| item.data.len() as u64 > 2 * segment_elements(&item.shape)));
    let change = |item: &Item| {
        let mut weights = item.data.clone();
        weights.chunks_mut(998).for_each(|part| part[0] ^= 1);
        of_base(&item.name, &item.shape, &item.data, weights)
    };
    let items: Vec<Item> = base.iter().map(change).collect();
    to.items("delta-segments-base", &base);
    to.with_base("delta-segments", &Model::new(&items, &[]));
}

fn one(to: &mut Vectors, name: &str, edit: impl FnOnce(&mut Model)) {
    let mut model = Model::new(&[item(|_| ())], &[]);
    edit(&mut model);
    to.invalid(&format!("delta-{name}"), model.build());
}

/// Faults of the record of a tensor.
fn tensors(to: &mut Vectors) {
    one(to, "dtype", |model| {
        model.tensors[0].dtype = Dtype::F16.id();
        model.refresh();
    });
    one(to, "arrays", |model| drop(model.tensors[0].arrays.pop()));
    one(to, "hash", |model| model.tensors[0].hash[0] ^= 1);
    let mut empty = Model::new(&[Item::raw("x", Dtype::BF16, &[0, 3], Vec::new())], &[]);
    empty.tensors[0].encoding = ENCODING_DELTA;
    to.invalid("delta-empty", empty.build());
    let mut edit = |name: &str, edit: &dyn Fn(&mut [Vec<u8>; 3])| {
        to.invalid(&format!("delta-{name}"), Model::new(&[item(edit)], &[]).build());
    };
    edit("codebook-short", &|[codebook, ..]| codebook.truncate(5));
    edit("codebook-long", &|[codebook, ..]| codebook.resize(5059, 0));
    edit("records-long", &|[_, records, _]| records.extend([0; 8]));
    edit("bitstream-short", &|[_, _, bitstream]| bitstream.truncate(32));
    edit("bitstream-odd", &|[_, _, bitstream]| bitstream.push(0));
}

/// Codebooks and records.
fn layouts(to: &mut Vectors) {
    let mut edit = |name: &str, edit: &dyn Fn(&mut [Vec<u8>; 3])| {
        to.invalid(&format!("delta-{name}"), Model::new(&[item(edit)], &[]).build());
    };
    edit("contexts-zero", &|[codebook, ..]| codebook[1] = 0);
    edit("contexts-17", &|[codebook, ..]| codebook[1] = 17);
    edit("codebook-ends", &|[codebook, ..]| codebook.truncate(codebook.len() - 1));
    edit("codebook-after", &|[codebook, ..]| codebook.push(0));
    let code = |bytes: &'static [u8]| move |arrays: &mut [Vec<u8>; 3]| arrays[0] = bytes.to_vec();
    edit("tokens-equal", &code(&[0, 1, 2, 5, 0, 4, 5, 0, 4]));
    edit("token-105", &code(&[0, 1, 1, 105, 0, 8]));
    edit("frequency-zero", &code(&[0, 1, 2, 5, 0, 0, 6, 0, 8]));
    edit("frequencies-less", &code(&[0, 1, 1, 104, 255, 7]));
    edit("frequencies-more", &code(&[0, 1, 2, 1, 0, 8, 104, 1, 0]));
    edit("context-empty", &code(&[255, 2, 1, 104, 0, 8, 0]));
    edit("record-first", &|[_, records, _]| records[0] = 4);
    edit("record-last", &|[_, records, _]| records[8] -= 4);
    edit("record-past", &|[_, records, _]| records[15] = 1);
}

/// Segments.
fn streams(to: &mut Vectors) {
    let mut edit = |name: &str, edit: &dyn Fn(&mut Vec<u8>)| {
        let item = item(|[_, records, bitstream]| {
            edit(bitstream);
            records[8..].copy_from_slice(&(bitstream.len() as u64).to_le_bytes());
        });
        to.invalid(&format!("delta-{name}"), Model::new(&[item], &[]).build());
    };
    let words = |bitstream: &[u8]| u32::from_le_bytes(*bitstream.first_chunk().unwrap());
    edit("words-more", &|bytes| bytes[3] = 1);
    edit("words-less", &move |bytes| {
        let less = words(bytes) - 1;
        bytes[..4].copy_from_slice(&less.to_le_bytes());
    });
    edit("state-low", &|bytes| bytes[4 + 3..4 + 8].fill(0));
    edit("state-high", &|bytes| bytes[4 + 7] |= 0x80);
    edit("state-other", &|bytes| bytes[4] ^= 1);
    edit("word-other", &|bytes| bytes[36] ^= 1);
    edit("word-after", &move |bytes| {
        let more = words(bytes) + 1;
        bytes[..4].copy_from_slice(&more.to_le_bytes());
        bytes.splice(36..36, [0; 4]);
    });
    edit("raw-bits-after", &|bytes| bytes.extend([0; 4]));
    edit("raw-bit-set", &|bytes| *bytes.last_mut().unwrap() |= 0x80);
    edit("raw-bits-missing", &|bytes| bytes.truncate(bytes.len() - 4));
}
