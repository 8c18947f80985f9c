//! Section 6.4: parameters and arrays, codebook, records, lanes, and what only verification finds.

use df11::{Dtype, hazmat::format::records::SECTION_CODEBOOK};

use super::{Edits, HUGE, Vectors, shorten};
use crate::container::{
    Item, Model, Tensor, normal_weights,
    tile_arrays::{Arrays, Bits, Codebook, LANES, Pair, codebook_of, tiles},
    weights,
};

const ROWS: u64 = 40;
const COLUMNS: u64 = 264;
const ELEMENTS: u64 = ROWS * COLUMNS;
/// One with which `bit_count` is neither the first nor the last byte of 16, so that a byte more or
/// less changes no length.
const SEED: u64 = 43;

pub(super) fn make(to: &mut Vectors) {
    let tiled = model(arrays(&bits()));
    to.of(&tiled).tensors(PARAMETERS);
    to.of(&tiled).tensors(ARRAYS);
    to.of(&tiled).tensors(RECORDS);
    to.of(&tiled).tensors(ZEROS);
    for (name, edit) in CODES {
        let mut codebook = codebook();
        edit(&mut codebook);
        with_codebook(to, name, codebook.to_bytes());
    }
    codebooks(to);
    lanes(to);
    ends_of_lanes(to);
    pairs(to);
}

/// Every eighth row has one exponent, and in the last eight columns every eighth row has any: lanes
/// differ by more than 63 bits in each tile. Signs and mantissas are zero, so that the vectors stay
/// small.
fn data() -> Vec<u8> {
    let mut data = normal_weights(ELEMENTS as usize, SEED);
    for (at, weight) in data.chunks_mut(2).enumerate() {
        let (row, column) = (at / COLUMNS as usize, at % COLUMNS as usize);
        let exponent = match row % 8 {
            0 => 124,
            1 if column >= 256 => (at * 89 % 256) as u16,
            _ => u16::from_le_bytes([weight[0], weight[1]]) >> 7 & 0xFF,
        };
        weight.copy_from_slice(&(exponent << 7).to_le_bytes());
    }
    data
}

fn codebook() -> Codebook {
    Codebook::of(&tiles(&data(), 256, COLUMNS as usize), 3)
}

/// The bits of four tiles: 32 x 256, 32 x 8, 8 x 256, 8 x 8.
fn bits() -> Vec<Bits> {
    let tiles = tiles(&data(), 256, COLUMNS as usize);
    let bits: Vec<Bits> = tiles.iter().map(|tile| Bits::new(tile, &codebook())).collect();
    let byte = offset(&arrays(&bits).records, 4) % 128 / 8;
    assert!((2..15).contains(&byte), "byte {byte}: another seed");
    assert!(bits.len() == 4 && bits[..2].iter().all(|tile| tile.shift > 0));
    bits
}

fn arrays(bits: &[Bits]) -> Arrays {
    Arrays::new(256, COLUMNS as usize, &codebook(), bits)
}

fn model(arrays: Arrays) -> Model {
    let coded = Item::encoded("w", &[ROWS, COLUMNS], data(), arrays);
    Model::new(&[coded, Item::raw("x", Dtype::U8, &[3], vec![7; 3])], &[])
}

fn offset(records: &[u8], record: usize) -> u64 {
    let record = records[32 * record..].first_chunk().unwrap();
    u64::from_le_bytes(*record) & 0xFFFF_FFFF_FFFF
}

fn put_offset(tensor: &mut Tensor, record: usize, offset: u64) {
    tensor.array(1)[32 * record..32 * record + 6].copy_from_slice(&offset.to_le_bytes()[..6]);
}

fn move_offset(tensor: &mut Tensor, record: usize, by: i64) {
    let offset = offset(tensor.array(1), record).wrapping_add_signed(by);
    put_offset(tensor, record, offset);
}

const PARAMETERS: Edits<'_, Tensor> = &[
    ("tile-dtype", |tensor| tensor.dtype = Dtype::F16.id()),
    ("tile-empty", |tensor| tensor.shape = vec![0]),
    ("tile-tile-columns", |tensor| tensor.parameters[0] = 512),
    ("tile-tile-columns-zero", |tensor| tensor.parameters[0] = 0),
    ("tile-tile-columns-wide", |tensor| tensor.parameters[0] = (1 << 32) + 256),
    ("tile-columns-of-row", |tensor| tensor.parameters[0] = 8192),
    ("tile-columns-zero", |tensor| tensor.parameters[1] = 0),
    ("tile-columns-unaligned", |tensor| tensor.parameters[1] = 132),
    ("tile-columns-divisor", |tensor| tensor.parameters[1] = 256),
    ("tile-columns-more", |tensor| tensor.parameters[1] = 2 * ELEMENTS),
    ("tile-columns-huge", |tensor| tensor.parameters[1] = HUGE - 7),
    // They make other tiles than there are records.
    ("tile-columns-other", |tensor| tensor.parameters[1] = 8),
    ("tile-parameter", |tensor| tensor.parameters[3] = 1),
    // Fewer bits than pairs.
    ("tile-bit-count-small", |tensor| {
        tensor.parameters[2] = (ELEMENTS / 2 - 1) / 8 * 8;
        let bytes = 16 * tensor.parameters[2].div_ceil(128) as usize;
        tensor.array(2).truncate(bytes);
    }),
    ("tile-bit-count-zero", |tensor| tensor.parameters[2] = 0),
    ("tile-bit-count-unaligned", |tensor| tensor.parameters[2] -= 4),
    ("tile-bit-count-large", |tensor| tensor.parameters[2] = 1 << 48),
    ("tile-bit-count-huge", |tensor| tensor.parameters[2] = HUGE - 7),
    ("tile-bit-count-array", |tensor| tensor.parameters[2] += 128),
];

/// Arrays: their number, sections and lengths.
const ARRAYS: Edits<'_, Tensor> = &[
    ("tile-arrays", |tensor| drop(tensor.arrays.remove(1))),
    // As many as gap has.
    ("tile-arrays-more", |tensor| tensor.arrays.insert(2, tensor.arrays[1].clone())),
    ("tile-array-order", |tensor| tensor.arrays.swap(1, 2)),
    ("tile-section", |tensor| tensor.arrays[1].0 = SECTION_CODEBOOK),
    ("tile-codebook-short", |tensor| tensor.array(0).truncate(24)),
    ("tile-codebook-odd", |tensor| tensor.array(0).push(0)),
    ("tile-codebook-long", |tensor| tensor.array(0).resize(26 + 2 * 4097, 0)),
    ("tile-records-short", |tensor| shorten(tensor.array(1), 32)),
    ("tile-records-long", |tensor| tensor.array(1).extend([0; 32])),
    ("tile-bitstream-short", |tensor| shorten(tensor.array(2), 16)),
    ("tile-bitstream-long", |tensor| tensor.array(2).extend([0; 16])),
    ("tile-bitstream-unaligned", |tensor| shorten(tensor.array(2), 1)),
    ("tile-plane-short", |tensor| shorten(tensor.array(3), 1)),
    ("tile-plane-long", |tensor| tensor.array(3).push(0)),
    // A value without a code, and a code without a value.
    ("tile-code-values-more", |tensor| tensor.array(0).extend([0xFF, 0xFF])),
    ("tile-code-values-fewer", |tensor| shorten(tensor.array(0), 2)),
];

const RECORDS: Edits<'_, Tensor> = &[
    ("tile-offset-first", |tensor| move_offset(tensor, 0, 8)),
    ("tile-offset-inside", |tensor| move_offset(tensor, 1, 8)),
    ("tile-offset-unaligned", |tensor| move_offset(tensor, 1, -1)),
    ("tile-offset-descends", |tensor| put_offset(tensor, 2, 8)),
    ("tile-offset-huge", |tensor| put_offset(tensor, 2, (1 << 48) - 8)),
    ("tile-offset-last", |tensor| move_offset(tensor, 4, -8)),
    // All tiles start a byte late, the first one too; bits and bit_count go with them.
    ("tile-offsets-moved", |tensor| {
        (0..5).for_each(|record| move_offset(tensor, record, 8));
        tensor.parameters[2] += 8;
        tensor.array(2).insert(0, 0);
        assert_eq!(tensor.array(2).pop(), Some(0));
    }),
    ("tile-bit-count", |tensor| tensor.parameters[2] -= 8),
    ("tile-ends-early", |tensor| {
        move_offset(tensor, 4, -8);
        tensor.parameters[2] -= 8;
    }),
    ("tile-ends-late", |tensor| {
        move_offset(tensor, 4, 8);
        tensor.parameters[2] += 8;
    }),
    ("tile-last-record-least", |tensor| tensor.array(1)[4 * 32 + 6] = 1),
    ("tile-last-record-excess", |tensor| tensor.array(1)[5 * 32 - 1] = 0x80),
    // Lanes that are longer together than their tile, and shorter.
    ("tile-sum-more", |tensor| tensor.array(1)[32 + 7] |= 0x1F),
    ("tile-sum-less", |tensor| tensor.array(1)[8..32].fill(0)),
];

/// Faults that only verification finds.
const ZEROS: Edits<'_, Tensor> = &[
    ("tile-bits-after-end", |tensor| {
        let bit_count = tensor.parameters[2];
        assert!(bit_count % 128 > 0);
        tensor.array(2)[bit_count as usize / 8] |= 1;
    }),
    ("tile-bits-at-end", |tensor| *tensor.array(2).last_mut().unwrap() |= 0x80),
    // Between the last lane of a tile and its end.
    ("tile-bits-after-lanes", |tensor| {
        let rest = |tile: &Bits| (0..LANES).map(|lane| tile.length(lane)).sum::<u64>() % 8;
        let tile = bits().iter().position(|tile| rest(tile) > 0).unwrap();
        let end = offset(tensor.array(1), tile + 1);
        tensor.array(2)[end as usize / 8 - 1] |= 0x80;
    }),
    ("tile-hash", |tensor| tensor.array(3)[100] ^= 0x80),
];

const CODES: Edits<'_, Codebook> = &[
    ("tile-code-too-many", |codebook| {
        let (longest, _) = *codebook.pairs.last().unwrap();
        codebook.pairs.push((longest, u16::MAX));
    }),
    ("tile-code-too-few", |codebook| codebook.pairs.truncate(codebook.pairs.len() - 1)),
    // There is room for it.
    ("tile-code-without-escape", |codebook| codebook.escape = 0),
    ("tile-code-order", |codebook| {
        let last = codebook.pairs.len() - 1;
        assert_eq!(codebook.pairs[last].0, codebook.pairs[last - 1].0);
        codebook.pairs.swap(last - 1, last);
    }),
    // With one length, and with two.
    ("tile-code-twice", |codebook| {
        let last = codebook.pairs.len() - 1;
        codebook.pairs[last] = codebook.pairs[last - 1];
    }),
    ("tile-code-twice-apart", |codebook| {
        let last = codebook.pairs.len() - 1;
        assert_ne!(codebook.pairs[0].0, codebook.pairs[last].0);
        codebook.pairs[last].1 = codebook.pairs[0].1;
        codebook.pairs.sort_unstable();
    }),
];

fn with_codebook(to: &mut Vectors, name: &str, codebook: Vec<u8>) {
    to.invalid(name, model(Arrays { codebook, ..arrays(&bits()) }).build());
}

fn codebooks(to: &mut Vectors) {
    let huge: Vec<(usize, u16)> = (1..=12).map(|length| (length, u16::MAX)).collect();
    for (name, codebook) in [
        // Neither pairs nor an escape.
        ("none", codebook_of(0, &[], &[])),
        ("escape-of-13", codebook_of(13, &[(1, 2)], &[0x7C7C, 0x7C7B])),
        ("escape-huge", codebook_of(u16::MAX, &[(1, 2)], &[0x7C7B, 0x7C7C])),
        ("single", codebook_of(0, &[(2, 1)], &[0x7C7C])),
        ("single-escape", codebook_of(2, &[], &[])),
        ("counts-huge", codebook_of(0, &huge, &[0x7C7B, 0x7C7C])),
    ] {
        with_codebook(to, &format!("tile-code-{name}"), codebook);
    }
    let tiled = model(arrays(&bits()));
    to.of(&tiled).models(&[
        ("tile-elements-overflow", |model| {
            let tensor = model.tensor("w");
            (tensor.shape, tensor.parameters[0], tensor.parameters[1]) =
                (vec![1 << 60], 8192, 1 << 60);
            model.files[0].length = 1 << 62;
        }),
        // 2^32 tiles.
        ("tile-count", |model| {
            let tensor = model.tensor("w");
            (tensor.shape, tensor.parameters[1]) = (vec![1 << 37, 8], 8);
            model.files[0].length = 1 << 62;
        }),
    ]);
}

/// The bits of the tiles changed, and placed anew.
fn recoded(to: &mut Vectors, name: &str, edit: impl FnOnce(&mut [Bits])) {
    let mut bits = bits();
    edit(&mut bits);
    to.invalid(name, model(arrays(&bits)).build());
}

/// A lane of the first tile with room for a step of length less, and one for a step more.
fn lanes(to: &mut Vectors) {
    let first = bits().swap_remove(0);
    let shortest = (0..LANES).find(|&lane| first.excess[lane] == 0).unwrap();
    let longest = (0..LANES).max_by_key(|&lane| first.excess[lane]).unwrap();
    let empty = (0..LANES).find(|&lane| bits()[1].lanes[lane].is_empty()).unwrap();
    recoded(to, "tile-lane-short", |tiles| tiles[0].excess[longest] -= 1);
    recoded(to, "tile-lane-long", |tiles| tiles[0].excess[shortest] += 1);
    recoded(to, "tile-lane-longer", |tiles| tiles[0].excess[shortest] = 63);
    recoded(to, "tile-lanes-both", |tiles| {
        tiles[0].excess[shortest] += 1;
        tiles[0].excess[longest] -= 1;
    });
    recoded(to, "tile-lane-empty", |tiles| tiles[1].excess[empty] += 1);
}

/// Records and bits by which every weight decodes, but that no writer makes.
fn ends_of_lanes(to: &mut Vectors) {
    let room = |tile: &Bits| {
        (0..LANES).find(|&lane| tile.length(lane) as usize > tile.lanes[lane].len()).unwrap()
    };
    let last = bits().swap_remove(3);
    let padding = (0..LANES).map(|lane| last.length(lane)).sum::<u64>() % 8;
    assert!(last.shift == 0 || padding > 0);
    recoded(to, "tile-shift", |tiles| {
        let shift = tiles[0].shift + 1;
        tiles[0].describe(shift);
    });
    recoded(to, "tile-shift-7", |tiles| tiles[0].describe(7));
    recoded(to, "tile-least", |tiles| {
        tiles[0].least -= 1 << tiles[0].shift;
        tiles[0].excess.iter_mut().for_each(|excess| *excess += 1);
        assert!(tiles[0].excess.iter().all(|&excess| excess < 64));
    });
    // One bit, where lanes have no weights.
    recoded(to, "tile-least-of-empty-lanes", |tiles| {
        let tile = &mut tiles[1];
        assert_eq!(tile.least, 0);
        tile.least = 1;
        tile.excess = std::array::from_fn(|lane| {
            (tile.lanes[lane].len() as u64).saturating_sub(1).div_ceil(1 << tile.shift)
        });
    });
    recoded(to, "tile-bits-of-lane", |tiles| {
        let lane = room(&tiles[0]);
        tiles[0].lanes[lane].push(true);
    });
    recoded(to, "tile-bits-at-end-of-lane", |tiles| {
        let lane = room(&tiles[0]);
        let end = tiles[0].length(lane) as usize;
        tiles[0].lanes[lane].resize(end - 1, false);
        tiles[0].lanes[lane].push(true);
    });
}

fn pairs(to: &mut Vectors) {
    let vector = |data: Vec<u8>, arrays| {
        Model::new(&[Item::encoded("w", &[data.len() as u64 / 2], data, arrays)], &[]).build()
    };
    // A bit that starts no code.
    let data = weights(vec![127; 100]);
    let mut arrays = Arrays::of(&data, 8192, 100, 1);
    arrays.bitstream[0] |= 2;
    to.invalid("tile-no-code", vector(data, arrays));
    // The last pair of an odd unit, of three weights, has two exponents.
    let data = weights([127, 126, 127]);
    let mut odd = tiles(&data, 8192, 3);
    odd[0].lanes[0][1] = Pair::Coded(127 | 126 << 8);
    let arrays = Arrays::with(&odd, 8192, 3, &Codebook::of(&odd, 1));
    to.invalid("tile-odd-pair", vector(data, arrays));
    // A pair that has a code, after the escape.
    let (codebook, mut tiles) = (codebook(), tiles(&self::data(), 256, COLUMNS as usize));
    let value = tiles[0].lanes[5][7].value();
    assert!(codebook.escape > 0 && codebook.pairs.iter().any(|pair| pair.1 == value));
    tiles[0].lanes[5][7] = Pair::Escaped(value);
    let escaped = Arrays::with(&tiles, 256, COLUMNS as usize, &codebook);
    to.invalid("tile-escaped", model(escaped).build());
}
