//! Slices of tensors: what indexing with ranges gives, whatever the shape, the dtype and the
//! layout.

use std::ops::Range;

use df11::{Dtype, Error, Layout, Source, compress};
use proptest::{prelude::*, test_runner::TestRunner};

use crate::{
    container::{self, Item, Model, normal_weights, weights_file},
    files::check_error,
};

/// The elements of a slice, of `each` bytes, index by index.
fn sliced(bytes: &[u8], each: usize, shape: &[u64], ranges: &[Range<u64>]) -> Vec<u8> {
    let is_wanted = |index: usize| {
        let mut rest = index as u64;
        shape.iter().enumerate().rev().all(|(dimension, size)| {
            let at = rest % size;
            rest /= size;
            ranges.get(dimension).is_none_or(|range| range.contains(&at))
        })
    };
    let elements = bytes.chunks(each).enumerate();
    elements
        .filter(|&(index, _)| is_wanted(index))
        .flat_map(|(_, element)| element)
        .copied()
        .collect()
}

fn check(tensor: &df11::Tensor<'_>, bytes: &[u8], each: usize, ranges: &[Range<u64>]) {
    let expected = sliced(bytes, each, &tensor.shape(), ranges);
    assert_eq!(tensor.slice(ranges).unwrap().byte_length(), expected.len() as u64);
    let mut out = vec![0xAA; expected.len()];
    let slice = tensor.slice(ranges).unwrap();
    slice.decode_into(&mut out).unwrap();
    assert!(out == expected, "{ranges:?} of {:?} {:?}", tensor.name(), tensor.shape());
    out.push(0);
    assert!(matches!(slice.decode_into(&mut out), Err(Error::Parameter { .. })));
}

/// Shapes whose tiles are whole and partial, matrices and vectors; of the last one a row takes more
/// than one thread's piece.
const SHAPES: [&[u64]; 9] = [
    &[96, 512],
    &[70, 776],
    &[1, 20_000],
    &[15, 1024],
    &[300, 100],
    &[5, 40, 264],
    &[64, 32, 3, 3],
    &[20_001],
    &[2, 530_000],
];

/// A model of tensors with these shapes in one layout.
fn model(layout: Layout) -> (df11::Model, Vec<Item>, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let items: Vec<Item> =
        (1..).zip(SHAPES).map(|(seed, shape)| Item::normal(shape, seed)).collect();
    let (source, out) = (folder.path().join("m.safetensors"), folder.path().join("m.df11"));
    std::fs::write(&source, weights_file(&items)).unwrap();
    let options = df11::CompressOptions::new().layout(layout);
    compress(&Source::open(&source).unwrap(), &out, &options, &()).unwrap();
    (df11::open(&out).unwrap(), items, folder)
}

/// Ranges of the first dimensions, from three numbers each that choose one: whole, an index,
/// halves, at multiples of tiles, or any.
fn ranges(shape: &[u64], numbers: &[(u64, u64, u64)]) -> Vec<Range<u64>> {
    let choose = |(&size, &(kind, a, b)): (&u64, &(u64, u64, u64))| {
        let unit = if kind == 3 { 32 } else { 256 };
        let (a, b) = (a % (size + 1), b % (size + 1));
        match kind {
            0 => 0..size,
            1 => a.min(size - 1)..a.min(size - 1) + 1,
            2 => size / 2..size,
            3 | 4 => a.min(b) / unit * unit..(a.max(b).next_multiple_of(unit)).min(size),
            _ => a.min(b)..a.max(b),
        }
    };
    shape.iter().zip(numbers).map(choose).collect()
}

#[test]
fn slices_are_what_indexing_gives() {
    for layout in [Layout::Tile, Layout::gap(), Layout::Raw] {
        let (model, items, _folder) = model(layout);
        let mut runner = TestRunner::new(ProptestConfig::with_cases(96));
        let numbers = prop::collection::vec((0..6u64, any::<u64>(), any::<u64>()), 0..5);
        runner
            .run(&(0..SHAPES.len(), numbers), |(at, numbers)| {
                let Item { name, shape, data, .. } = &items[at];
                check(&model.tensor(name).unwrap(), data, 2, &ranges(shape, &numbers));
                Ok(())
            })
            .unwrap();
    }
}

/// The parts that tensor parallelism takes, each decoded without the others' codes.
#[test]
fn columns_do_not_need_the_codes_of_others() {
    let weights = normal_weights(64 * 1024, 3);
    let mut draft =
        Model::new(&[Item::tile("m", &[64, 1024], weights.clone(), (256, 1024))], &[]).draft();
    let records = draft.first_array("m") + 1;
    // The tiles with columns 256 to 511, of four in each row of tiles: lanes that do not add up.
    for tile in [1, 5] {
        draft.array(records)[32 * tile + 8..32 * tile + 32].fill(0xFF);
    }
    draft.repair_checksums();
    let model = container::open(draft.pack()).unwrap();
    let damaged = model.tensor("m").unwrap();
    for columns in [0..256, 512..1024, 600..700] {
        check(&damaged, &weights, 2, &[0..64, columns]);
    }
    let mut out = vec![0; 2 * 64 * 2];
    let lanes = damaged.slice(&[0..64, 255..257]).unwrap();
    check_error(lanes.decode_into(&mut out), "Corrupt", "");
}

#[test]
fn weights_and_other_dtypes() {
    let bytes: Vec<u8> = (0..6 * 10 * 4u32).map(|at| at as u8).collect();
    let items = [
        Item::raw("floats", Dtype::F32, &[6, 10], bytes.clone()),
        Item::raw("nibbles", Dtype::F4, &[6, 80], bytes.clone()),
        Item::raw("bytes", Dtype::U8, &[2, 3, 40], bytes.clone()),
        Item::raw("scalar", Dtype::F32, &[], bytes[..4].to_vec()),
        Item::raw("weights", Dtype::BF16, &[12, 10], bytes.clone()),
    ];
    let model = Model::new(&items, &[]).open();
    let tensor = |name: &str| model.tensor(name).unwrap();
    check(&tensor("floats"), &bytes, 4, &[1..4, 3..9]);
    check(&tensor("bytes"), &bytes, 1, &[0..2, 1..2, 5..6]);
    check(&tensor("bytes"), &bytes, 1, &[1..1]);
    check(&tensor("scalar"), &bytes[..4], 4, &[]);
    let mut nibbles = vec![0; 6 * 4];
    tensor("nibbles").slice(&[0..6, 2..10]).unwrap().decode_into(&mut nibbles).unwrap();
    assert_eq!(nibbles[..8], [1, 2, 3, 4, 41, 42, 43, 44]);
    let mut weights = vec![half::bf16::ZERO; 4];
    tensor("weights").slice(&[2..4, 8..10]).unwrap().decode_into(&mut weights).unwrap();
    let expected = [56u16, 58, 76, 78].map(|low| half::bf16::from_bits(low | (low + 1) << 8));
    assert_eq!(weights, expected);

    for (name, ranges, part) in [
        ("floats", &[0..6, 0..11][..], "they are 0..10"),
        ("floats", &[0..6, 0..10, 0..1], "3 ranges for the 2 dimensions"),
        ("nibbles", &[0..6, 1..3], "between bytes"),
    ] {
        check_error(tensor(name).slice(ranges), "Parameter", part);
    }
    assert!(tensor("floats").slice(&[0..1]).unwrap().decode_into(&mut weights).is_err());
}
