//! Section 6: aliases, raw, gap with its index and codes.

use df11::{
    Dtype,
    hazmat::format::records::{SECTION_CODEBOOK, SECTION_RAW},
};

use super::{HUGE, LIMIT, OVERFLOW, coded, of_model, open, remade};
use crate::container::{Item, Model, Tensor, weights};
use crate::vectors::Vector;

pub(super) fn aliases() -> Vec<Vector> {
    let base = || {
        let a = Item::raw("a", Dtype::U8, &[6], vec![1, 2, 3, 4, 5, 6]);
        let other = Item::raw("c", Dtype::U8, &[6], vec![9; 6]).in_block("other");
        Model::new(&[a.clone(), a.alias("b"), other], &[])
    };
    let alias = |name: &str, about: &str, edit: &dyn Fn(&mut Tensor)| {
        open(name, about, remade(base(), |model| edit(model.tensor("b"))))
    };
    vec![
        alias("alias-to-itself", "an alias of itself", &|tensor| tensor.parameters[0] = 1),
        open(
            "alias-to-alias",
            "an alias of an alias",
            remade(base(), |model| {
                let b = model.tensor("b").clone();
                *model.tensor("a") = Tensor { name: b"a".into(), parameters: [1, 0, 0, 0], ..b };
            }),
        ),
        alias("alias-to-nothing", "a target that does not exist", &|tensor| {
            tensor.parameters[0] = 3;
        }),
        alias("alias-to-huge", "target 2^64 - 1", &|tensor| tensor.parameters[0] = HUGE),
        alias("alias-shape", "a target of another shape", &|tensor| tensor.shape = vec![2, 3]),
        alias("alias-dtype", "a target of another dtype", &|tensor| tensor.dtype = Dtype::I8.id()),
        alias("alias-block", "a target in another block", &|tensor| tensor.block = 1),
        alias("alias-hash", "a target of another hash", &|tensor| tensor.hash[0] ^= 1),
        alias("alias-array", "an alias with an array", &|tensor| {
            tensor.arrays = vec![(SECTION_RAW, tensor.data.clone())];
        }),
        open("aliases-limit", "16 aliases of one tensor", {
            let a = Item::raw("a", Dtype::U8, &[6], vec![1, 2, 3, 4, 5, 6]);
            let aliases = (0..16).map(|at| a.alias(&format!("b{at:02}")));
            Model::new(&[a.clone()].into_iter().chain(aliases).collect::<Vec<_>>(), &[]).build()
        })
        .expecting(LIMIT),
        open("alias-of-unknown-dtype", "an alias of an unknown dtype, of another hash", {
            remade(base(), |model| {
                for name in ["a", "b"] {
                    model.tensor(name).dtype = 99;
                }
                model.tensor("b").hash[0] ^= 1;
            })
        }),
        alias("alias-parameter", "an unused parameter", &|tensor| tensor.parameters[1] = 1),
    ]
}

pub(super) fn encodings() -> Vec<Vector> {
    let first = |name: &str, about: &str, edit: &dyn Fn(&mut Tensor)| {
        of_model(name, about, |model| edit(model.tensor("a")))
    };
    let gap = |name: &str, about: &str, edit: &dyn Fn(&mut Tensor)| {
        open(name, about, remade(coded(), |model| edit(model.tensor("w"))))
    };
    let elements = coded().tensors[0].shape[0];
    let threads = coded().tensors[0].arrays[3].1.len() as u64 / 8;
    let parameter = |name: &str, about: &str, at: usize, value: u64| {
        gap(name, about, &|tensor| tensor.parameters[at] = value)
    };
    vec![
        first("raw-shorter", "an array shorter than the tensor", &|tensor| {
            tensor.arrays[0].1.truncate(4);
        }),
        first("raw-longer", "an array longer than the tensor", &|tensor| {
            tensor.arrays[0].1.push(0);
        }),
        first("raw-without-array", "a tensor with elements and without an array", &|tensor| {
            tensor.arrays.clear();
        }),
        first("raw-two-arrays", "two arrays", &|tensor| {
            tensor.arrays = vec![(SECTION_RAW, vec![1, 2]), (SECTION_RAW, vec![3, 4, 5])];
        }),
        first("raw-empty-with-array", "a tensor without elements and with an array", &|tensor| {
            tensor.shape = vec![0];
        }),
        first("raw-parameter", "a parameter that raw does not name", &|tensor| {
            tensor.parameters[3] = 1;
        }),
        gap("gap-dtype", "gap for F16", &|tensor| tensor.dtype = Dtype::F16.id()),
        gap("gap-empty", "gap for a tensor without elements", &|tensor| tensor.shape = vec![0]),
        gap("gap-arrays", "gap with four arrays", &|tensor| drop(tensor.arrays.remove(2))),
        gap("gap-array-order", "output offsets before gaps", &|tensor| tensor.arrays.swap(1, 2)),
        gap("gap-section", "output offsets in the codebook section", &|tensor| {
            tensor.arrays[2].0 = SECTION_CODEBOOK;
        }),
        parameter("gap-bytes-per-thread", "24 bytes a thread", 0, 24),
        parameter("gap-bytes-per-thread-zero", "no bytes a thread", 0, 0),
        parameter("gap-bytes-per-thread-wide", "2^32 + 8 bytes a thread", 0, (1 << 32) + 8),
        parameter("gap-threads-per-block", "65 threads a block", 1, 65),
        parameter("gap-threads-per-block-zero", "no threads a block", 1, 0),
        parameter("gap-parameter", "a parameter that gap does not name", 3, 1),
        parameter("gap-bit-count-small", "fewer bits than elements", 2, elements - 1),
        parameter("gap-bit-count-large", "more than 16 bits an element", 2, 16 * elements + 1),
        parameter("gap-bit-count-huge", "bit_count 2^64 - 1", 2, HUGE),
        parameter(
            "gap-bit-count-threads",
            "bits for one thread more than the bitstream has",
            2,
            64 * threads + 1,
        ),
        open("gap-elements-overflow", "2^60 elements, whose bits exceed 2^64", {
            remade(coded(), |model| {
                model.tensor("w").shape = vec![1 << 60];
                model.files[0].length = 1 << 62;
            })
        })
        .expecting(OVERFLOW),
        gap("gap-codebook-without-luts", "a codebook of code lengths alone", &|tensor| {
            tensor.arrays[0].1.truncate(256);
        }),
        gap("gap-codebook-length", "a codebook with half a LUT", &|tensor| {
            tensor.arrays[0].1.truncate(512);
        }),
        gap("gap-codebook-luts", "129 LUTs", &|tensor| {
            tensor.arrays[0].1.resize(256 + 512 * 129, 0);
        }),
        gap("gap-gaps-length", "a byte of gaps too many", &|tensor| tensor.arrays[1].1.push(0)),
        gap("gap-offsets-length", "an output offset too many", &|tensor| {
            tensor.arrays[2].1.extend([0; 8]);
        }),
        gap("gap-bitstream-length", "a thread of bitstream too many", &|tensor| {
            tensor.arrays[3].1.extend([0; 8]);
        }),
        gap("gap-plane-length", "a byte of plane too few", &|tensor| {
            tensor.arrays[4].1.truncate(elements as usize - 1);
        }),
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
    Vector::invalid(name, level, about, model.build())
}

fn put(array: &mut [u8], index: usize, value: u64) {
    array[8 * index..8 * index + 8].copy_from_slice(&value.to_le_bytes());
}

fn get(array: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(array[8 * index..8 * index + 8].try_into().unwrap())
}

pub(super) fn index() -> Vec<Vector> {
    // An output offset moved by this, counted from the last one.
    let moved = |name: &str, about: &str, from_last: usize, by: i64| {
        recoded("load", name, about, |arrays, _| {
            let at = arrays[2].len() / 8 - 1 - from_last;
            let offset = get(&arrays[2], at);
            put(&mut arrays[2], at, offset.wrapping_add_signed(by));
        })
    };
    let bits = |name: &str, about: &str, by: i64| {
        recoded("load", name, about, |_, parameters| {
            parameters[2] = parameters[2].wrapping_add_signed(by);
        })
    };
    vec![
        recoded("load", "offsets-start", "output offsets that do not start at 0", |arrays, _| {
            put(&mut arrays[2], 0, 1);
        }),
        recoded("load", "offsets-descend", "output offsets that descend", |arrays, _| {
            let second = get(&arrays[2], 2);
            put(&mut arrays[2], 1, second + 1);
        }),
        moved("offsets-end", "output offsets that end after the elements", 0, 1),
        moved("offsets-end-early", "output offsets that end before the elements", 0, -1),
        recoded("load", "offsets-huge", "an output offset of 2^64 - 1", |arrays, _| {
            put(&mut arrays[2], 1, HUGE);
        }),
        moved("offset-inside", "an inner output offset that is one too small", 2, -1),
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
        bits("bit-count", "bit_count is one more than the codes have", 1),
        bits("bit-count-less", "bit_count ends within the last code", -1),
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
    Vector::invalid("offset-and-gap", "verify", about, model.build())
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
    let load = |name: &str, about: &str, bytes| Vector::invalid(name, "load", about, bytes);
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
            "a LUT entry that no code reaches and that is not 0",
            single(&|tensor| tensor.arrays[0].1[256 + 2] = 1),
        ),
        Vector::invalid(
            "lut-more",
            "verify",
            "more LUTs than follow from the code lengths",
            remade(coded(), |model| model.tensor("w").arrays[0].1.extend([0; 512])),
        ),
        Vector::invalid("lut-fewer", "verify", "fewer LUTs than follow from the code lengths", {
            remade(coded(), |model| {
                let codebook = &mut model.tensor("w").arrays[0].1;
                let short = codebook.len() - 512;
                assert!(short > 256, "there are several LUTs");
                codebook.truncate(short);
            })
        }),
    ]
}
