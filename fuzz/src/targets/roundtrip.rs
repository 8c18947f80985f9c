//! Round trips give the input again: any weights, in any geometry and any chunking, and any small
//! model through files.

use std::{collections::BTreeSet, fs, path::Path};

use crate::{
    array_witness,
    bytes::Bytes,
    compare, model,
    samples::{Sample, memory_folder, write_safetensors},
    tensors, witness,
};
use df11::{
    CompressOptions, DecompressOptions, Layout, Level, Model, Source, compress, convert,
    decompress,
    hazmat::{
        bf16,
        gap::{PLANE, encode_tensor},
        tile,
    },
};
use df11_reference::Container;
use safetensors::Dtype;

/// The most weights of an input that is encoded in tiny chunks.
const MAX_CHUNKS: usize = 300;

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data);
    // Files are slow.
    if bytes.u8() % 64 == 63 {
        files(&mut bytes);
    } else {
        codec(&mut bytes);
    }
}

fn codec(bytes: &mut Bytes<'_>) {
    let choice = bytes.u8();
    if choice >= 128 {
        return tiles(bytes);
    }
    let geometry = tensors::geometry_of(choice);
    let chunk = 1 + usize::from(bytes.u16());
    let raw = bytes.u8().is_multiple_of(4);
    let cuts: [u64; 2] = [bytes.u32().into(), bytes.u32().into()];
    let weights = if raw && bytes.0.len() >= 2 {
        bytes.0[..bytes.0.len() / 2 * 2].to_vec()
    } else {
        tensors::weights(bytes, 1 << 16)
    };
    let count = weights.len() as u64 / 2;
    let chunk = chunk.max(weights.len() / 2 / MAX_CHUNKS);

    let encoded = encode_tensor(&weights, geometry, chunk).expect("weights encode");
    let whole = encode_tensor(&weights, geometry, weights.len()).expect("weights encode");
    assert!(encoded == whole, "chunks change the result");
    assert!(encoded.decode(0..count).expect("what was encoded decodes") == weights);
    let range = compare::range(count, cuts);
    let part = encoded.decode(range.clone()).expect("any range decodes");
    assert!(part == weights[2 * range.start as usize..2 * range.end as usize]);
    array_witness::verify(&encoded, [count]).expect("what was encoded is right");
    let (arrays, parameters) = array_witness::of(&encoded);
    array_witness::verify_gap(arrays, parameters).expect("every array is right");
    let again = df11_reference::decode_gap(arrays, parameters).expect("the reference decodes");
    assert!(again == weights);
    let planes = weights.as_chunks().0.iter().map(|two| bf16::plane_byte(u16::from_le_bytes(*two)));
    assert!(planes.eq(encoded.arrays[PLANE].iter().copied()));
}

/// The same for tiles.
fn tiles(bytes: &mut Bytes<'_>) {
    let (choice, spans) = (bytes.u8(), u64::from(bytes.u8()));
    let cuts: [u64; 2] = [bytes.u32().into(), bytes.u32().into()];
    let mut weights = tensors::weights(bytes, 1 << 16);
    let Some(geometry) = tensors::tile_geometry(choice, &mut weights) else { return };
    let encoded = tile::encode_tensor(&weights, geometry).expect("weights encode");
    let count = weights.len() as u64 / 2;
    assert!(encoded.decode(0..count).expect("what was encoded decodes") == weights);
    let range = compare::range(count, cuts);
    let part = encoded.decode(range.clone()).expect("any range decodes");
    assert!(part == weights[2 * range.start as usize..2 * range.end as usize]);
    let strips = (1 + spans) * geometry.strip_elements();
    let ends = (0..count).step_by(strips as usize).chain([count]);
    array_witness::verify(&encoded, ends).expect("what was encoded is right");
    let (arrays, parameters) = array_witness::of(&encoded);
    array_witness::verify_tile(arrays, parameters).expect("every array is right");
    let again = df11_reference::decode_tile(arrays, parameters).expect("the reference decodes");
    assert!(again == weights);
}

/// A model of one or two files goes through a container, or one for each file, and comes back.
fn files(bytes: &mut Bytes<'_>) {
    let folder = memory_folder();
    let (source, out, restored) =
        (folder.path().join("source"), folder.path().join("out"), folder.path().join("restored"));
    fs::create_dir(&source).expect("a folder");
    let options = CompressOptions::new().layout(layout(bytes));
    let other = layout(bytes);
    let choice = bytes.u8();
    let out = if choice.is_multiple_of(2) { out.with_extension("df11") } else { out };
    let mut names = BTreeSet::new();
    let paths = ["a.safetensors", "b.safetensors"];
    let paths = &paths[..=usize::from(choice / 2 % 2)];
    for path in paths {
        let sample: Vec<Sample> =
            (0..bytes.u8() % 6).filter_map(|_| tensor(bytes, &mut names)).collect();
        write_safetensors(&source.join(path), &sample, (choice / 4).is_multiple_of(2));
    }
    fs::write(source.join("config.json"), bytes.run(usize::from(choice / 8))).expect("a side file");

    let opened = Source::open(&source).expect("a valid source");
    compress(&opened, &out, &options, &()).expect("it compresses");
    let model = df11::open(&out).expect("it opens");
    let found = model.verify(Level::Full, &()).expect("it is right");
    assert!(found.unchecked.is_empty() && model.tensors().count() == names.len());
    model::exercise(&model);
    decompress(&model, &restored, &DecompressOptions::default(), &()).expect("it decompresses");
    for path in paths.iter().chain(&["config.json"]) {
        assert_same(&source.join(path), &restored.join(path));
    }
    convert_there_and_back(&model, folder.path(), &options, other);
    for shard in model.shards() {
        let container = fs::read(shard.path()).expect("a container");
        let reference = Container::open(&container).expect("the reference opens it");
        witness::verify(&container, shard.directory()).expect("the witness finds it right");
        for (index, tensor) in reference.tensors().enumerate() {
            let ours =
                model.tensor(tensor.name).expect("it is there").decode::<u8>().expect("it decodes");
            assert!(reference.decode(index).expect("the reference decodes it") == ours);
        }
    }
}

fn layout(bytes: &mut Bytes<'_>) -> Layout {
    match bytes.u8() % 8 {
        0 => Layout::Raw,
        1..=3 => Layout::Tile,
        _ => Layout::Gap(tensors::geometry(bytes)),
    }
}

/// Through another layout and the other form to the same containers.
fn convert_there_and_back(model: &Model, folder: &Path, options: &CompressOptions, other: Layout) {
    let is_single = model.folder().is_none();
    let (there, back) = if is_single { ("there", "back.df11") } else { ("there.df11", "back") };
    let (there, back) = (folder.join(there), folder.join(back));
    convert(model, &there, &options.clone().layout(other), &()).expect("it converts");
    convert(&df11::open(&there).expect("it opens"), &back, options, &()).expect("it converts back");
    let again = df11::open(&back).expect("it opens");
    for (before, after) in model.shards().iter().zip(again.shards()) {
        assert_same(before.path(), after.path());
    }
}

fn assert_same(before: &Path, after: &Path) {
    assert!(fs::read(before).expect("a file") == fs::read(after).expect("a file"));
}

/// A tensor with a name of its own.
fn tensor(bytes: &mut Bytes<'_>, names: &mut BTreeSet<String>) -> Option<Sample> {
    let length = usize::from(bytes.u8() % 16);
    let name = String::from_utf8_lossy(bytes.run(length)).into_owned();
    let (kind, seed) = (bytes.u8(), bytes.u8());
    let (dtype, data) = match kind % 8 {
        0 => (Dtype::F32, vec![seed; 4 * usize::from(seed)]),
        1 => (Dtype::U8, bytes.run(usize::from(seed)).to_vec()),
        2 => (Dtype::F8_E4M3, vec![kind; usize::from(seed)]),
        // Large enough to be an alias where it occurs again.
        3 => (Dtype::BF16, crate::samples::weights(40_000, u64::from(seed % 2))),
        _ => (Dtype::BF16, tensors::weights(bytes, 1 << 16)),
    };
    let count = 8 * data.len() / dtype.bitsize();
    let shape = match kind / 8 % 4 {
        0 => vec![count],
        1 if count == 1 => vec![],
        2 if count % 4 == 0 => vec![4, count / 4],
        _ => vec![1, count, 1],
    };
    let valid = !name.is_empty() && !name.contains('\0') && name != "__metadata__";
    (valid && names.insert(name.clone())).then_some((name, dtype, shape, data))
}
