//! Section 6.4: parameters and arrays, codebook, records, lanes, and what only verification finds.

use df11::{Dtype, hazmat::format::records::SECTION_CODEBOOK};

use super::{HUGE, OVERFLOW, open, remade};
use crate::{
    container::{
        Item, Model, Tensor, normal_weights,
        tile_arrays::{Arrays, Bits, Codebook, LANES, Pair, codebook_of, tiles},
        weights,
    },
    vectors::Vector,
};

const ROWS: u64 = 40;
const COLUMNS: u64 = 264;
const ELEMENTS: u64 = ROWS * COLUMNS;
/// One with which `bit_count` is neither the first nor the last byte of 16, so that a byte more or
/// less changes no length.
const SEED: u64 = 43;

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
    let bits: Vec<Bits> = tiles(&data(), 256, COLUMNS as usize)
        .iter()
        .map(|tile| Bits::new(tile, &codebook()))
        .collect();
    let byte = offset(&Arrays::new(256, COLUMNS as usize, &codebook(), &bits), 4) % 128 / 8;
    assert!((2..15).contains(&byte), "byte {byte}: another seed");
    assert!(bits.len() == 4 && bits[..2].iter().all(|tile| tile.shift > 0));
    bits
}

fn model(arrays: Arrays) -> Model {
    Model::new(
        &[
            Item::encoded("w", &[ROWS, COLUMNS], data(), arrays),
            Item::raw("x", Dtype::U8, &[3], vec![7; 3]),
        ],
        &[],
    )
}

fn arrays(bits: &[Bits]) -> Arrays {
    Arrays::new(256, COLUMNS as usize, &codebook(), bits)
}

fn tiled() -> Model {
    model(arrays(&bits()))
}

fn vector(level: &str, name: &str, about: &str, arrays: Arrays) -> Vector {
    Vector::invalid(name, level, about, model(arrays).build())
}

/// The arrays changed.
pub(super) fn changed(
    level: &str,
    name: &str,
    about: &str,
    edit: impl FnOnce(&mut Arrays),
) -> Vector {
    let mut arrays = arrays(&bits());
    edit(&mut arrays);
    vector(level, name, about, arrays)
}

/// The bits of the tiles changed, and placed anew.
fn recoded(level: &str, name: &str, about: &str, edit: impl FnOnce(&mut [Bits])) -> Vector {
    let mut bits = bits();
    edit(&mut bits);
    vector(level, name, about, arrays(&bits))
}

pub(super) fn vectors() -> Vec<Vector> {
    [parameters(), lengths(), codebooks(), records(), lanes(), for_verification()]
        .into_iter()
        .flatten()
        .collect()
}

/// The tensor's record or stored arrays changed.
fn tile(name: &str, about: &str, edit: &dyn Fn(&mut Tensor)) -> Vector {
    open(name, about, remade(tiled(), |model| edit(model.tensor("w"))))
}

fn parameters() -> Vec<Vector> {
    let parameter = |name: &str, about: &str, at: usize, value: u64| {
        tile(name, about, &|tensor| tensor.parameters[at] = value)
    };
    let bit_count = tiled().tensors[0].parameters[2];
    vec![
        tile("tile-dtype", "tile for F16", &|tensor| tensor.dtype = Dtype::F16.id()),
        tile("tile-empty", "tile for a tensor without elements", &|tensor| tensor.shape = vec![0]),
        parameter("tile-tile-columns", "tiles of 512 columns", 0, 512),
        parameter("tile-tile-columns-zero", "tiles without columns", 0, 0),
        parameter("tile-tile-columns-wide", "tiles of 2^32 + 256 columns", 0, (1 << 32) + 256),
        parameter("tile-columns-of-row", "tiles of 8192 columns in a matrix", 0, 8192),
        parameter("tile-columns-zero", "no columns", 1, 0),
        parameter("tile-columns-unaligned", "columns that are no multiple of 8", 1, 132),
        parameter("tile-columns-divisor", "columns that do not divide the elements", 1, 256),
        parameter("tile-columns-more", "more columns than elements", 1, 2 * ELEMENTS),
        parameter("tile-columns-huge", "2^64 - 8 columns", 1, HUGE - 7),
        parameter(
            "tile-columns-other",
            "columns that make other tiles than there are records",
            1,
            8,
        ),
        parameter("tile-parameter", "a parameter that tile does not name", 3, 1),
        tile("tile-bit-count-small", "fewer bits than pairs", &|tensor| {
            tensor.parameters[2] = (ELEMENTS / 2 - 1) / 8 * 8;
            tensor.arrays[2].1.truncate(16 * tensor.parameters[2].div_ceil(128) as usize);
        }),
        parameter("tile-bit-count-zero", "no bits", 2, 0),
        parameter("tile-bit-count-unaligned", "bits that are no multiple of 8", 2, bit_count - 4),
        parameter("tile-bit-count-large", "2^48 bits", 2, 1 << 48),
        parameter("tile-bit-count-huge", "2^64 - 8 bits", 2, HUGE - 7),
        parameter("tile-bit-count-array", "more bits than the bitstream has", 2, bit_count + 128),
        open("tile-elements-overflow", "2^60 elements in one row", {
            remade(tiled(), |model| {
                let tensor = model.tensor("w");
                (tensor.shape, tensor.parameters[0], tensor.parameters[1]) =
                    (vec![1 << 60], 8192, 1 << 60);
                model.files[0].length = 1 << 62;
            })
        })
        .expecting(OVERFLOW),
        open("tile-count", "2^32 tiles", {
            remade(tiled(), |model| {
                let tensor = model.tensor("w");
                (tensor.shape, tensor.parameters[1]) = (vec![1 << 37, 8], 8);
                model.files[0].length = 1 << 62;
            })
        }),
    ]
}

/// Arrays: their number, sections and lengths.
fn lengths() -> Vec<Vector> {
    let grow = |name: &str, about: &str, array: usize, by: usize| {
        tile(name, about, &|tensor| tensor.arrays[array].1.extend(vec![0; by]))
    };
    let cut = |name: &str, about: &str, array: usize, by: usize| {
        tile(name, about, &|tensor| {
            let length = tensor.arrays[array].1.len() - by;
            tensor.arrays[array].1.truncate(length);
        })
    };
    vec![
        tile("tile-arrays", "tile with three arrays", &|tensor| drop(tensor.arrays.remove(1))),
        tile("tile-arrays-more", "tile with the five arrays of gap", &|tensor| {
            tensor.arrays.insert(2, tensor.arrays[1].clone());
        }),
        tile("tile-array-order", "bitstream before records", &|tensor| tensor.arrays.swap(1, 2)),
        tile("tile-section", "records in the codebook section", &|tensor| {
            tensor.arrays[1].0 = SECTION_CODEBOOK;
        }),
        tile("tile-codebook-short", "a codebook of 24 bytes", &|tensor| {
            tensor.arrays[0].1.truncate(24);
        }),
        grow("tile-codebook-odd", "a codebook that ends within a value", 0, 1),
        tile("tile-codebook-long", "a codebook with 4097 values", &|tensor| {
            tensor.arrays[0].1.resize(26 + 2 * 4097, 0);
        }),
        cut("tile-records-short", "as many records as tiles", 1, 32),
        grow("tile-records-long", "two records more than tiles", 1, 32),
        cut("tile-bitstream-short", "a bitstream of 16 bytes less", 2, 16),
        grow("tile-bitstream-long", "a bitstream of 16 bytes more", 2, 16),
        cut(
            "tile-bitstream-unaligned",
            "a bitstream that does not end at a multiple of 16 bytes",
            2,
            1,
        ),
        cut("tile-plane-short", "a byte of plane too few", 3, 1),
        grow("tile-plane-long", "a byte of plane too many", 3, 1),
    ]
}

fn codebooks() -> Vec<Vector> {
    let with = |name: &str, about: &str, codebook: Vec<u8>| {
        changed("load", name, about, |arrays| arrays.codebook = codebook)
    };
    let edited = |name: &str, about: &str, edit: &dyn Fn(&mut Codebook)| {
        let mut codebook = codebook();
        edit(&mut codebook);
        with(name, about, codebook.to_bytes())
    };
    let longest = |codebook: &Codebook| codebook.pairs.last().unwrap().0;
    vec![
        with("tile-code-none", "neither pairs nor an escape", codebook_of(0, &[], &[])),
        with(
            "tile-code-escape-of-13",
            "an escape of 13 bits",
            codebook_of(13, &[(1, 2)], &[0x7C7C, 0x7C7B]),
        ),
        with(
            "tile-code-escape-huge",
            "an escape of 65535 bits",
            codebook_of(u16::MAX, &[(1, 2)], &[0x7C7B, 0x7C7C]),
        ),
        with("tile-code-single", "a single pair of two bits", codebook_of(0, &[(2, 1)], &[0x7C7C])),
        with("tile-code-single-escape", "a single escape of two bits", codebook_of(2, &[], &[])),
        edited("tile-code-too-many", "a code more than fits", &|codebook| {
            let length = longest(codebook);
            codebook.pairs.push((length, u16::MAX));
        }),
        edited("tile-code-too-few", "a code less than there must be", &|codebook| {
            codebook.pairs.pop();
        }),
        edited("tile-code-without-escape", "no escape, and room for it", &|codebook| {
            codebook.escape = 0;
        }),
        edited("tile-code-order", "values of one length that descend", &|codebook| {
            let last = codebook.pairs.len() - 1;
            assert_eq!(codebook.pairs[last].0, codebook.pairs[last - 1].0);
            codebook.pairs.swap(last - 1, last);
        }),
        edited("tile-code-twice", "one value twice, with one length", &|codebook| {
            let last = codebook.pairs.len() - 1;
            codebook.pairs[last] = codebook.pairs[last - 1];
        }),
        edited("tile-code-twice-apart", "one value twice, with two lengths", &|codebook| {
            let last = codebook.pairs.len() - 1;
            assert_ne!(codebook.pairs[0].0, codebook.pairs[last].0);
            codebook.pairs[last].1 = codebook.pairs[0].1;
            codebook.pairs.sort_unstable();
        }),
        changed("load", "tile-code-values-more", "a value without a code", |arrays| {
            arrays.codebook.extend([0xFF, 0xFF]);
        }),
        changed("load", "tile-code-values-fewer", "a code without a value", |arrays| {
            let length = arrays.codebook.len() - 2;
            arrays.codebook.truncate(length);
        }),
        with("tile-code-counts-huge", "twelve times 65535 codes", {
            let counts: Vec<(usize, u16)> = (1..=12).map(|length| (length, u16::MAX)).collect();
            codebook_of(0, &counts, &[0x7C7B, 0x7C7C])
        }),
        no_code(),
    ]
}

/// A bit that starts no code.
fn no_code() -> Vector {
    let data = weights(vec![127; 100]);
    let mut arrays = Arrays::of(&data, 8192, 100, 1);
    arrays.bitstream[0] |= 2;
    let model = Model::new(&[Item::encoded("w", &[100], data, arrays)], &[]);
    Vector::invalid("tile-no-code", "load", "a bit that starts no code", model.build())
}

pub(super) fn offset(arrays: &Arrays, record: usize) -> u64 {
    u64::from_le_bytes(arrays.records[32 * record..32 * record + 8].try_into().unwrap())
        & 0xFFFF_FFFF_FFFF
}

pub(super) fn put_offset(arrays: &mut Arrays, record: usize, offset: u64) {
    arrays.records[32 * record..32 * record + 6].copy_from_slice(&offset.to_le_bytes()[..6]);
}

fn records() -> Vec<Vector> {
    let of =
        |name: &str, about: &str, edit: &dyn Fn(&mut Arrays)| changed("load", name, about, edit);
    let moved = |record: usize, by: i64| {
        move |arrays: &mut Arrays| {
            let offset = offset(arrays, record).wrapping_add_signed(by);
            put_offset(arrays, record, offset);
        }
    };
    vec![
        of("tile-offset-first", "the first tile does not start at 0", &moved(0, 8)),
        of("tile-offset-inside", "a tile that starts a byte late", &moved(1, 8)),
        of("tile-offset-unaligned", "a tile that starts within a byte", &moved(1, -1)),
        of("tile-offset-descends", "a tile that starts before the one before", &|arrays| {
            put_offset(arrays, 2, 8);
        }),
        of("tile-offset-huge", "a tile that starts at bit 2^48 - 8", &|arrays| {
            put_offset(arrays, 2, (1 << 48) - 8);
        }),
        of("tile-offset-last", "a last offset that is not bit_count", &moved(4, -8)),
        of("tile-bit-count", "bit_count that is not the last offset", &|arrays| {
            arrays.parameters[2] -= 8;
        }),
        of(
            "tile-ends-early",
            "bit_count and the last offset before the end of the last tile",
            &|arrays| {
                moved(4, -8)(arrays);
                arrays.parameters[2] -= 8;
            },
        ),
        of(
            "tile-ends-late",
            "bit_count and the last offset after the end of the last tile",
            &|arrays| {
                moved(4, 8)(arrays);
                arrays.parameters[2] += 8;
            },
        ),
        of("tile-last-record-least", "a last record with more than an offset", &|arrays| {
            arrays.records[4 * 32 + 6] = 1;
        }),
        of("tile-last-record-excess", "a last record with an excess", &|arrays| {
            arrays.records[5 * 32 - 1] = 0x80;
        }),
        of("tile-sum-more", "lanes that are longer together than their tile", &|arrays| {
            arrays.records[32 + 7] |= 0x1F;
        }),
        of("tile-sum-less", "lanes that are shorter together than their tile", &|arrays| {
            arrays.records[8..32].fill(0);
        }),
    ]
}

/// A lane of the first tile with room for a step of length less, and one for a step more.
fn lanes() -> Vec<Vector> {
    let first = bits().swap_remove(0);
    let shortest = (0..LANES).find(|&lane| first.excess[lane] == 0).unwrap();
    let longest = (0..LANES).max_by_key(|&lane| first.excess[lane]).unwrap();
    let empty = (0..LANES).find(|&lane| bits()[1].lanes[lane].is_empty()).unwrap();
    vec![
        recoded("load", "tile-lane-short", "a lane shorter than its pairs", |tiles| {
            tiles[0].excess[longest] -= 1;
        }),
        recoded("load", "tile-lane-long", "a lane longer than it may be", |tiles| {
            tiles[0].excess[shortest] += 1;
        }),
        recoded("load", "tile-lane-longer", "a lane of all the bits that there may be", |tiles| {
            tiles[0].excess[shortest] = 63;
        }),
        recoded("load", "tile-lanes-both", "lanes longer and shorter by as much", |tiles| {
            tiles[0].excess[shortest] += 1;
            tiles[0].excess[longest] -= 1;
        }),
        recoded("load", "tile-lane-empty", "a lane without weights and with bits", |tiles| {
            tiles[1].excess[empty] += 1;
        }),
        odd_unit(),
    ]
}

/// A last unit of three weights.
fn odd_unit() -> Vector {
    let data = weights([127, 126, 127]);
    let mut tiles = tiles(&data, 8192, 3);
    tiles[0].lanes[0][1] = Pair::Coded(127 | 126 << 8);
    let arrays = Arrays::with(&tiles, 8192, 3, &Codebook::of(&tiles, 1));
    let model = Model::new(&[Item::encoded("w", &[3], data, arrays)], &[]);
    let about = "the last pair of an odd unit has two exponents";
    Vector::invalid("tile-odd-pair", "load", about, model.build())
}

fn for_verification() -> Vec<Vector> {
    let of =
        |name: &str, about: &str, edit: &dyn Fn(&mut [Bits])| recoded("verify", name, about, edit);
    let room = |tile: &Bits| {
        (0..LANES).find(|&lane| tile.length(lane) as usize > tile.lanes[lane].len()).unwrap()
    };
    let last = bits().swap_remove(3);
    let padding = (0..LANES).map(|lane| last.length(lane)).sum::<u64>() % 8;
    assert!(last.shift == 0 || padding > 0);
    vec![
        escaped(),
        of("tile-shift", "a greater shift than there need be", &|tiles| {
            let shift = tiles[0].shift + 1;
            tiles[0].describe(shift);
        }),
        of("tile-shift-7", "shift 7", &|tiles| tiles[0].describe(7)),
        of("tile-least", "a smaller least, and excesses that are greater by one", &|tiles| {
            tiles[0].least -= 1 << tiles[0].shift;
            tiles[0].excess.iter_mut().for_each(|excess| *excess += 1);
            assert!(tiles[0].excess.iter().all(|&excess| excess < 64));
        }),
        of("tile-least-of-empty-lanes", "a least of 1 bit where lanes have no weights", &|tiles| {
            let tile = &mut tiles[1];
            assert_eq!(tile.least, 0);
            tile.least = 1;
            tile.excess = std::array::from_fn(|lane| {
                (tile.lanes[lane].len() as u64).saturating_sub(1).div_ceil(1 << tile.shift)
            });
        }),
        of("tile-bits-of-lane", "a bit behind the last pair of a lane", &|tiles| {
            let lane = room(&tiles[0]);
            tiles[0].lanes[lane].push(true);
        }),
        of("tile-bits-at-end-of-lane", "the last bit of a lane, behind its last pair", &|tiles| {
            let lane = room(&tiles[0]);
            let end = tiles[0].length(lane) as usize;
            tiles[0].lanes[lane].resize(end - 1, false);
            tiles[0].lanes[lane].push(true);
        }),
        tile_end(),
        changed("verify", "tile-bits-after-end", "a bit at bit_count", |arrays| {
            let bit_count = arrays.parameters[2];
            assert!(bit_count % 128 > 0);
            arrays.bitstream[bit_count as usize / 8] |= 1;
        }),
        changed(
            "verify",
            "tile-bits-at-end",
            "the last bit of the bitstream, after bit_count",
            |arrays| {
                *arrays.bitstream.last_mut().unwrap() |= 0x80;
            },
        ),
        changed("verify", "tile-hash", "other weights than the hash says", |arrays| {
            arrays.plane[100] ^= 0x80;
        }),
    ]
}

/// A pair that has a code, behind the escape.
fn escaped() -> Vector {
    let codebook = codebook();
    assert!(codebook.escape > 0);
    let mut tiles = tiles(&data(), 256, COLUMNS as usize);
    let value = tiles[0].lanes[5][7].value();
    assert!(codebook.pairs.iter().any(|pair| pair.1 == value));
    tiles[0].lanes[5][7] = Pair::Escaped(value);
    let arrays = Arrays::with(&tiles, 256, COLUMNS as usize, &codebook);
    vector("verify", "tile-escaped", "a pair that has a code is escaped", arrays)
}

/// A bit between the last lane of a tile and its end.
fn tile_end() -> Vector {
    let bits = bits();
    let rest = |tile: &Bits| (0..LANES).map(|lane| tile.length(lane)).sum::<u64>() % 8;
    let tile = bits.iter().position(|tile| rest(tile) > 0).unwrap();
    changed(
        "verify",
        "tile-bits-after-lanes",
        "a bit between the last lane of a tile and its end",
        |arrays| {
            let end = offset(arrays, tile + 1);
            arrays.bitstream[end as usize / 8 - 1] |= 0x80;
        },
    )
}
