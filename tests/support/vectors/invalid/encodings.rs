//! Section 6: aliases, raw, gap with its index and codes.

use df11::{
    Dtype,
    hazmat::format::records::{SECTION_CODEBOOK, SECTION_RAW},
};

use super::{CORRUPT, HUGE, LIMIT, OVERFLOW, coded, open, plain, remade};
use crate::container::{Item, Model, Tensor, weights};
use crate::vectors::Vector;

pub(super) fn aliases() -> Vec<Vector> {
    let base = || {
        let a = Item::raw("a", Dtype::U8, &[6], vec![1, 2, 3, 4, 5, 6]);
        let other = Item::raw("c", Dtype::U8, &[6], vec![9; 6]).in_block("other");
        Model::new(&[a.clone(), a.alias("b"), other], &[])
    };
    let alias = |edit: &dyn Fn(&mut Tensor)| remade(base(), |model| edit(model.tensor("b")));
    vec![
        open(
            "alias-to-itself",
            CORRUPT,
            "an alias of itself",
            alias(&|tensor| tensor.parameters[0] = 1),
        ),
        open(
            "alias-to-alias",
            CORRUPT,
            "an alias of an alias",
            remade(base(), |model| {
                let b = model.tensor("b").clone();
                *model.tensor("a") = Tensor { name: b"a".into(), parameters: [1, 0, 0, 0], ..b };
            }),
        ),
        open(
            "alias-to-nothing",
            CORRUPT,
            "a target that does not exist",
            alias(&|tensor| tensor.parameters[0] = 3),
        ),
        open(
            "alias-to-huge",
            CORRUPT,
            "target 2^64 - 1",
            alias(&|tensor| tensor.parameters[0] = HUGE),
        ),
        open(
            "alias-shape",
            CORRUPT,
            "a target of another shape",
            alias(&|tensor| tensor.shape = vec![2, 3]),
        ),
        open(
            "alias-dtype",
            CORRUPT,
            "a target of another dtype",
            alias(&|tensor| tensor.dtype = Dtype::I8.id()),
        ),
        open(
            "alias-block",
            CORRUPT,
            "a target in another block",
            alias(&|tensor| tensor.block = 1),
        ),
        open(
            "alias-hash",
            CORRUPT,
            "a target of another hash",
            alias(&|tensor| tensor.hash[0] ^= 1),
        ),
        open(
            "alias-array",
            CORRUPT,
            "an alias with an array",
            alias(&|tensor| {
                tensor.arrays = vec![(SECTION_RAW, tensor.data.clone())];
            }),
        ),
        open("aliases-limit", LIMIT, "16 aliases of one tensor", {
            let a = Item::raw("a", Dtype::U8, &[6], vec![1, 2, 3, 4, 5, 6]);
            let aliases = (0..16).map(|at| a.alias(&format!("b{at:02}")));
            Model::new(&[a.clone()].into_iter().chain(aliases).collect::<Vec<_>>(), &[]).build()
        }),
        open("alias-of-unknown-dtype", CORRUPT, "an alias of an unknown dtype, of another hash", {
            remade(base(), |model| {
                for name in ["a", "b"] {
                    model.tensor(name).dtype = 99;
                }
                model.tensor("b").hash[0] ^= 1;
            })
        }),
        open(
            "alias-parameter",
            CORRUPT,
            "an unused parameter",
            alias(&|tensor| tensor.parameters[1] = 1),
        ),
    ]
}

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn encodings() -> Vec<Vector> {
    let first = |edit: &dyn Fn(&mut Tensor)| remade(plain(), |model| edit(model.tensor("a")));
    let gap = |edit: &dyn Fn(&mut Tensor)| remade(coded(), |model| edit(model.tensor("w")));
    let elements = coded().tensors[0].shape[0];
    let parameter = |at: usize, value: u64| gap(&|tensor| tensor.parameters[at] = value);
    vec![
        open(
            "raw-shorter",
            CORRUPT,
            "an array shorter than the tensor",
            first(&|tensor| tensor.arrays[0].1.truncate(4)),
        ),
        open(
            "raw-longer",
            CORRUPT,
            "an array longer than the tensor",
            first(&|tensor| tensor.arrays[0].1.push(0)),
        ),
        open(
            "raw-without-array",
            CORRUPT,
            "a tensor with elements and without an array",
            first(&|tensor| tensor.arrays.clear()),
        ),
        open(
            "raw-two-arrays",
            CORRUPT,
            "two arrays",
            first(&|tensor| {
                tensor.arrays = vec![(SECTION_RAW, vec![1, 2]), (SECTION_RAW, vec![3, 4, 5])];
            }),
        ),
        open(
            "raw-empty-with-array",
            CORRUPT,
            "a tensor without elements and with an array",
            first(&|tensor| tensor.shape = vec![0]),
        ),
        open(
            "raw-parameter",
            CORRUPT,
            "a parameter that raw does not name",
            first(&|tensor| tensor.parameters[3] = 1),
        ),
        open("gap-dtype", CORRUPT, "gap for F16", gap(&|tensor| tensor.dtype = Dtype::F16.id())),
        open(
            "gap-empty",
            CORRUPT,
            "gap for a tensor without elements",
            gap(&|tensor| tensor.shape = vec![0]),
        ),
        open(
            "gap-arrays",
            CORRUPT,
            "gap with four arrays",
            gap(&|tensor| drop(tensor.arrays.remove(2))),
        ),
        open(
            "gap-array-order",
            CORRUPT,
            "output offsets before gaps",
            gap(&|tensor| tensor.arrays.swap(1, 2)),
        ),
        open(
            "gap-section",
            CORRUPT,
            "output offsets in the codebook section",
            gap(&|tensor| {
                tensor.arrays[2].0 = SECTION_CODEBOOK;
            }),
        ),
        open("gap-bytes-per-thread", CORRUPT, "24 bytes a thread", parameter(0, 24)),
        open("gap-bytes-per-thread-zero", CORRUPT, "no bytes a thread", parameter(0, 0)),
        open(
            "gap-bytes-per-thread-wide",
            CORRUPT,
            "2^32 + 8 bytes a thread",
            parameter(0, (1 << 32) + 8),
        ),
        open("gap-threads-per-block", CORRUPT, "65 threads a block", parameter(1, 65)),
        open("gap-threads-per-block-zero", CORRUPT, "no threads a block", parameter(1, 0)),
        open("gap-parameter", CORRUPT, "a parameter that gap does not name", parameter(3, 1)),
        open(
            "gap-bit-count-small",
            CORRUPT,
            "fewer bits than elements",
            parameter(2, elements - 1),
        ),
        open(
            "gap-bit-count-large",
            CORRUPT,
            "more than 16 bits an element",
            parameter(2, 16 * elements + 1),
        ),
        open("gap-bit-count-huge", CORRUPT, "bit_count 2^64 - 1", parameter(2, HUGE)),
        open(
            "gap-bit-count-threads",
            CORRUPT,
            "bits for one thread more than the bitstream has",
            {
                let threads = coded().tensors[0].arrays[3].1.len() as u64 / 8;
                parameter(2, 64 * threads + 1)
            },
        ),
        open("gap-elements-overflow", OVERFLOW, "2^60 elements, whose bits exceed 2^64", {
            remade(coded(), |model| {
                model.tensor("w").shape = vec![1 << 60];
                model.files[0].length = 1 << 62;
            })
        }),
        open(
            "gap-codebook-without-luts",
            CORRUPT,
            "a codebook of code lengths alone",
            gap(&|tensor| {
                tensor.arrays[0].1.truncate(256);
            }),
        ),
        open(
            "gap-codebook-length",
            CORRUPT,
            "a codebook with half a LUT",
            gap(&|tensor| {
                tensor.arrays[0].1.truncate(512);
            }),
        ),
        open(
            "gap-codebook-luts",
            CORRUPT,
            "129 LUTs",
            gap(&|tensor| tensor.arrays[0].1.resize(256 + 512 * 129, 0)),
        ),
        open(
            "gap-gaps-length",
            CORRUPT,
            "a byte of gaps too many",
            gap(&|tensor| tensor.arrays[1].1.push(0)),
        ),
        open(
            "gap-offsets-length",
            CORRUPT,
            "an output offset too many",
            gap(&|tensor| {
                tensor.arrays[2].1.extend([0; 8]);
            }),
        ),
        open(
            "gap-bitstream-length",
            CORRUPT,
            "a thread of bitstream too many",
            gap(&|tensor| {
                tensor.arrays[3].1.extend([0; 8]);
            }),
        ),
        open(
            "gap-plane-length",
            CORRUPT,
            "a byte of plane too few",
            gap(&|tensor| tensor.arrays[4].1.truncate(elements as usize - 1)),
        ),
    ]
}

/// The coded model with the arrays of its tensor edited: codebook, gaps, output offsets, bitstream,
/// plane.
fn recoded(
    level: &str,
    name: &str,
    about: &str,
    edit: impl FnOnce(&mut [Vec<u8>; 5], &mut [u64; 4]),
) -> Vector {
    let mut model = coded();
    let tensor = model.tensor("w");
    let mut arrays: [Vec<u8>; 5] = std::array::from_fn(|at| tensor.arrays[at].1.clone());
    edit(&mut arrays, &mut tensor.parameters);
    for (stored, array) in tensor.arrays.iter_mut().zip(arrays) {
        stored.1 = array;
    }
    Vector::invalid(name, level, CORRUPT, about, model.build())
}

fn put(array: &mut [u8], index: usize, value: u64) {
    array[8 * index..8 * index + 8].copy_from_slice(&value.to_le_bytes());
}

fn get(array: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(array[8 * index..8 * index + 8].try_into().unwrap())
}

pub(super) fn index() -> Vec<Vector> {
    let last = |array: &Vec<u8>| array.len() / 8 - 1;
    vec![
        recoded("load", "offsets-start", "output offsets that do not start at 0", |arrays, _| {
            put(&mut arrays[2], 0, 1);
        }),
        recoded("load", "offsets-descend", "output offsets that descend", |arrays, _| {
            let second = get(&arrays[2], 2);
            put(&mut arrays[2], 1, second + 1);
        }),
        recoded(
            "load",
            "offsets-end",
            "output offsets that end after the elements",
            |arrays, _| {
                let at = last(&arrays[2]);
                let end = get(&arrays[2], at);
                put(&mut arrays[2], at, end + 1);
            },
        ),
        recoded(
            "load",
            "offsets-end-early",
            "output offsets that end before the elements",
            |arrays, _| {
                let at = last(&arrays[2]);
                let end = get(&arrays[2], at);
                put(&mut arrays[2], at, end - 1);
            },
        ),
        recoded("load", "offsets-huge", "an output offset of 2^64 - 1", |arrays, _| {
            put(&mut arrays[2], 1, HUGE);
        }),
        recoded(
            "load",
            "offset-inside",
            "an inner output offset that is one too small",
            |arrays, _| {
                let first = get(&arrays[2], 1);
                put(&mut arrays[2], 1, first - 1);
            },
        ),
        recoded("load", "gap-first", "gap(0) is 1", |arrays, _| arrays[1][0] |= 1),
        recoded(
            "load",
            "gap-of-thread-block",
            "a thread block that does not end where the next one starts",
            |arrays, _| {
                arrays[1][32] += 1;
            },
        ),
        recoded("verify", "gap-inside", "a wrong gap within a thread block", |arrays, _| {
            let gap = arrays[1][5] & 15;
            arrays[1][5] = arrays[1][5] & 0xF0 | (gap + 1);
        }),
        recoded(
            "verify",
            "gap-unused-half",
            "the half byte after the last gap is not zero",
            |arrays, _| {
                *arrays[1].last_mut().unwrap() |= 0x10;
            },
        ),
        recoded(
            "load",
            "bit-count",
            "bit_count is one more than the codes have",
            |_, parameters| {
                parameters[2] += 1;
            },
        ),
        recoded(
            "load",
            "bit-count-less",
            "bit_count ends within the last code",
            |_, parameters| {
                parameters[2] -= 1;
            },
        ),
        recoded("verify", "bits-after-end", "a bit after bit_count", |arrays, parameters| {
            arrays[3][(parameters[2] / 8) as usize] |= 1 << (parameters[2] % 8);
        }),
        recoded(
            "verify",
            "bits-at-end",
            "the last bit of the bitstream, after bit_count",
            |arrays, _| {
                *arrays[3].last_mut().unwrap() |= 0x80;
            },
        ),
        both_wrong(),
    ]
}

/// The weights are right, the index is not: each code has 8 bits, and a thread block starts one
/// code late by its gap and output offset alike.
fn both_wrong() -> Vector {
    let mut model = Model::new(
        &[Item::gap("w", &[1000], weights((0..1000u16).map(|at| at as u8)), (8, 64))],
        &[],
    );
    let tensor = model.tensor("w");
    tensor.arrays[1].1[32] += 8;
    put(&mut tensor.arrays[2].1, 1, 513);
    let about = "gap and output offset of a thread block skip a code, which the one before decodes";
    Vector::invalid("offset-and-gap", "verify", CORRUPT, about, model.build())
}

pub(super) fn codes() -> Vec<Vector> {
    let lengths = |name: &str, about: &str, edit: &dyn Fn(&mut [u8])| {
        recoded("load", name, about, |arrays, _| edit(&mut arrays[0][..256]))
    };
    let unused = coded().tensors[0].arrays[0].1.iter().position(|&length| length == 0).unwrap();
    let shortest =
        coded().tensors[0].arrays[0].1[..256].iter().position(|&length| length == 1).unwrap();
    let single = |edit: &dyn Fn(&mut Tensor)| {
        let mut model =
            Model::new(&[Item::gap("w", &[100], weights(vec![127; 100]), (8, 64))], &[]);
        edit(model.tensor("w"));
        model.build()
    };
    let load =
        |name: &str, about: &str, bytes| Vector::invalid(name, "load", CORRUPT, about, bytes);
    vec![
        lengths("lengths-too-many", "code lengths whose codes do not fit", &|lengths| {
            lengths[unused] = 3;
        }),
        lengths("lengths-too-few", "code lengths that leave codes unused", &|lengths| {
            lengths[shortest] = 2;
        }),
        lengths("lengths-limit", "a code length of 17", &|lengths| lengths[unused] = 17),
        lengths("lengths-255", "a code length of 255", &|lengths| lengths[unused] = 255),
        lengths("lengths-none", "no code at all", &|lengths| lengths.fill(0)),
        load(
            "single-length",
            "a single exponent with a code of two bits",
            single(&|tensor| tensor.arrays[0].1[127] = 2),
        ),
        load("no-code", "a bit that starts no code", single(&|tensor| tensor.arrays[3].1[4] = 1)),
        recoded(
            "verify",
            "lut-entry",
            "a LUT entry that does not follow from the code lengths",
            |arrays, _| {
                arrays[0][256 + 2 * 200] ^= 1;
            },
        ),
        Vector::invalid(
            "lut-unused",
            "verify",
            CORRUPT,
            "a LUT entry that no code reaches and that is not 0",
            single(&|tensor| tensor.arrays[0].1[256 + 2] = 1),
        ),
        Vector::invalid(
            "lut-more",
            "verify",
            CORRUPT,
            "more LUTs than follow from the code lengths",
            remade(coded(), |model| model.tensor("w").arrays[0].1.extend([0; 512])),
        ),
        Vector::invalid(
            "lut-fewer",
            "verify",
            CORRUPT,
            "fewer LUTs than follow from the code lengths",
            {
                remade(coded(), |model| {
                    let codebook = &mut model.tensor("w").arrays[0].1;
                    let short = codebook.len() - 512;
                    assert!(short > 256, "there are several LUTs");
                    codebook.truncate(short);
                })
            },
        ),
    ]
}
