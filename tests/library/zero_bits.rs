//! BF16 whose mantissas all end with zero bits, as that of FP8 with scales that are powers of two.

use std::{fs, path::Path};

use df11::{
    CompressOptions, DecompressOptions, Encoding, Error, Layout, Level, Model, Source, compress,
    convert, decompress,
};

use crate::container::{Item, parse, weights_file};

/// Normal weights without the lowest bits of their mantissas, as FP8 has them.
fn narrow(name: &str, shape: &[u64], seed: u64) -> Item {
    let mut item = Item { name: name.into(), ..Item::normal(shape, seed) };
    item.data.iter_mut().step_by(2).for_each(|low| *low &= 0xF0);
    item
}

/// Matrices that one thread counts alone and larger ones, a vector, zeros, and others whose low
/// bits are not all zero: of one of them a single bit.
fn mixed() -> Vec<Item> {
    let mut spoiled = narrow("spoiled", &[256, 512], 6);
    *spoiled.data.iter_mut().nth_back(1).unwrap() |= 8;
    let mut zeros = narrow("zeros", &[128, 256], 7);
    zeros.data.fill(0);
    vec![
        narrow("large", &[2500, 1000], 1),
        narrow("odd", &[301, 137], 2),
        Item { name: "ordinary".into(), ..Item::normal(&[300, 512], 3) },
        narrow("small", &[16, 16], 4),
        spoiled,
        narrow("vector", &[100_001], 5),
        zeros,
    ]
}

fn write(folder: &Path, items: &[Item]) -> Source {
    let path = folder.join("mixed.safetensors");
    fs::write(&path, weights_file(items)).unwrap();
    Source::open(&path).unwrap()
}

fn compressed(source: &Source, out: &Path, layout: Layout) -> Model {
    compress(source, out, &CompressOptions::new().layout(layout), &()).unwrap();
    df11::open(out).unwrap()
}

fn encodings(model: &Model) -> Vec<(&str, Encoding)> {
    model.tensors().map(|tensor| (tensor.name(), tensor.encoding())).collect()
}

#[test]
fn they_are_not_stored() {
    let folder = tempfile::tempdir().unwrap();
    let (items, path) = (mixed(), |name: &str| folder.path().join(name));
    let source = write(folder.path(), &items);
    let original = fs::read(path("mixed.safetensors")).unwrap();
    let model = compressed(&source, &path("tile.df11"), Layout::Tile);
    let expected = [
        ("large", Encoding::Float),
        ("odd", Encoding::Float),
        ("ordinary", Encoding::Tile),
        ("small", Encoding::Raw),
        ("spoiled", Encoding::Tile),
        ("vector", Encoding::Float),
        ("zeros", Encoding::Float),
    ];
    assert_eq!(encodings(&model), expected);
    let options = CompressOptions::new().layout(Layout::Tile);
    let estimate = df11::estimate(&source, &path("new.df11"), &options, &()).unwrap();
    assert_eq!(encodings(&estimate.outline().unwrap()), expected);
    let stored = fs::metadata(path("tile.df11")).unwrap().len();
    assert_eq!(estimate.report.stored_bytes, stored);
    assert!(model.verify(Level::Full, &()).unwrap().unchecked.is_empty());
    for Item { name, data, .. } in &items {
        assert!(model.tensor(name).unwrap().decode::<u8>().unwrap() == *data, "{name}");
    }
    decompress(&model, &path("back"), &DecompressOptions::default(), &()).unwrap();
    assert!(fs::read(path("back").join("mixed.safetensors")).unwrap() == original);

    // Another layout keeps the zero bits; and back.
    let gap = compressed(&source, &path("gap.df11"), Layout::gap());
    assert!(encodings(&gap).iter().all(|(_, encoding)| *encoding != Encoding::Float));
    for (from, to, layout) in [(&model, "gap", Layout::gap()), (&gap, "tile", Layout::Tile)] {
        let again = path("again.df11");
        let options = CompressOptions::new().layout(layout).overwrite(true);
        convert(from, &again, &options, &()).unwrap();
        let direct = path(&format!("{to}.df11"));
        assert!(fs::read(again).unwrap() == fs::read(direct).unwrap(), "{to}");
    }
}

#[test]
fn a_changed_byte_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let items = [narrow("w", &[96, 512], 8)];
    let out = folder.path().join("w.df11");
    drop(compressed(&write(folder.path(), &items), &out, Layout::Tile));
    let container = fs::read(&out).unwrap();
    let first = parse(&container).first_array("w");
    // Codebook, records, bitstream and plane: the checksums find it, and if these are of the
    // changed bytes, the structure or the hash.
    for (array, repaired) in (first..first + 4).flat_map(|array| [(array, false), (array, true)]) {
        let mut draft = parse(&container);
        let bytes = draft.array(array);
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        if repaired {
            draft.repair_checksums();
        }
        fs::write(&out, draft.pack()).unwrap();
        let model = df11::open(&out).unwrap();
        let found = model.verify(Level::Full, &());
        assert!(matches!(found, Err(Error::Corrupt { .. })), "{array} {repaired}: {found:?}");
    }
}
