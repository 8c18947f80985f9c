//! Section 6.3: parameters, index and codes of `gap`.

use df11::{Dtype, hazmat::format::records::SECTION_CODEBOOK};

use super::{HUGE, Vectors, shorten};
use crate::{
    container::{Item, Model, normal_weights, weights},
    vectors::valid::{late_end, many_luts},
};

/// A coded tensor of three thread blocks and an odd number of threads, and one stored raw.
pub(super) fn coded() -> Model {
    let odd = |count: &usize| {
        let bits = crate::container::encode(&normal_weights(*count, 21), 8, 64).1[2];
        bits.div_ceil(64) % 2 == 1 && !bits.is_multiple_of(64)
    };
    let count = (4500..5000).find(odd).unwrap();
    let coded = Item::gap("w", &[count as u64], normal_weights(count, 21), (8, 64));
    Model::new(&[coded, Item::raw("x", Dtype::U8, &[3], vec![7; 3])], &[])
}

fn gap_of(data: Vec<u8>) -> Model {
    Model::new(&[Item::gap("w", &[data.len() as u64 / 2], data, (8, 64))], &[])
}

fn put(array: &mut [u8], index: usize, value: u64) {
    array[8 * index..8 * index + 8].copy_from_slice(&value.to_le_bytes());
}

fn get(array: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(array[8 * index..8 * index + 8].try_into().unwrap())
}

/// Moves an output offset, counted from the last one.
fn move_offset(offsets: &mut [u8], from_last: usize, by: i64) {
    let at = offsets.len() / 8 - 1 - from_last;
    put(offsets, at, get(offsets, at).wrapping_add_signed(by));
}

/// The first exponent with a code of this length; the codebook starts with the lengths.
fn of_length(codebook: &mut [u8], length: u8) -> &mut u8 {
    codebook[..256].iter_mut().find(|other| **other == length).unwrap()
}

pub(super) fn make(to: &mut Vectors) {
    let coded = coded();
    to.of(&coded).tensors(&[
        ("gap-dtype", |tensor| tensor.dtype = Dtype::F16.id()),
        ("gap-empty", |tensor| tensor.shape = vec![0]),
        ("gap-arrays", |tensor| drop(tensor.arrays.remove(2))),
        ("gap-array-order", |tensor| tensor.arrays.swap(1, 2)),
        ("gap-section", |tensor| tensor.arrays[2].0 = SECTION_CODEBOOK),
        ("gap-bytes-per-thread", |tensor| tensor.parameters[0] = 24),
        ("gap-bytes-per-thread-zero", |tensor| tensor.parameters[0] = 0),
        ("gap-bytes-per-thread-wide", |tensor| tensor.parameters[0] = (1 << 32) + 8),
        ("gap-threads-per-block", |tensor| tensor.parameters[1] = 65),
        ("gap-threads-per-block-zero", |tensor| tensor.parameters[1] = 0),
        ("gap-parameter", |tensor| tensor.parameters[3] = 1),
        ("gap-bit-count-small", |tensor| tensor.parameters[2] = tensor.shape[0] - 1),
        ("gap-bit-count-large", |tensor| tensor.parameters[2] = 16 * tensor.shape[0] + 1),
        ("gap-bit-count-huge", |tensor| tensor.parameters[2] = HUGE),
        // One thread more than the bitstream has.
        ("gap-bit-count-threads", |tensor| {
            tensor.parameters[2] = 8 * tensor.array(3).len() as u64 + 1;
        }),
        ("gap-codebook-without-luts", |tensor| tensor.array(0).truncate(256)),
        ("gap-codebook-length", |tensor| tensor.array(0).truncate(512)),
        ("gap-codebook-luts", |tensor| tensor.array(0).resize(256 + 512 * 129, 0)),
        ("gap-gaps-length", |tensor| tensor.array(1).push(0)),
        ("gap-offsets-length", |tensor| tensor.array(2).extend([0; 8])),
        ("gap-bitstream-length", |tensor| tensor.array(3).extend([0; 8])),
        ("gap-plane-length", |tensor| shorten(tensor.array(4), 1)),
    ]);
    to.of(&coded).models(&[("gap-elements-overflow", |model| {
        model.tensor("w").shape = vec![1 << 60];
        model.files[0].length = 1 << 62;
    })]);
    for (name, count, bits) in [("gap-bit-count-17", 1, 17), ("gap-bit-count-1", 2, 1)] {
        let mut model = gap_of(normal_weights(count, 3));
        model.tensors[0].parameters[2] = bits;
        to.invalid(name, model.build());
    }
    index(to, &coded);
    last_threads(to);
    codes(to, &coded);
}

fn index(to: &mut Vectors, coded: &Model) {
    to.of(coded).tensors(&[
        ("offsets-start", |tensor| put(tensor.array(2), 0, 1)),
        ("offsets-descend", |tensor| {
            let second = get(tensor.array(2), 2);
            put(tensor.array(2), 1, second + 1);
        }),
        ("offsets-end", |tensor| move_offset(tensor.array(2), 0, 1)),
        ("offsets-end-early", |tensor| move_offset(tensor.array(2), 0, -1)),
        ("offset-inside", |tensor| move_offset(tensor.array(2), 2, -1)),
        ("offsets-huge", |tensor| put(tensor.array(2), 1, HUGE)),
        ("gap-first", |tensor| tensor.array(1)[0] |= 1),
        ("gap-of-thread-block", |tensor| tensor.array(1)[32] += 1),
        ("gap-inside", |tensor| {
            let gap = tensor.array(1)[5] & 15;
            tensor.array(1)[5] = tensor.array(1)[5] & 0xF0 | (gap + 1);
        }),
        ("gap-unused-half", |tensor| *tensor.array(1).last_mut().unwrap() |= 0x10),
        ("bit-count", |tensor| tensor.parameters[2] += 1),
        ("bit-count-less", |tensor| tensor.parameters[2] -= 1),
        ("bits-after-end", |tensor| {
            let end = tensor.parameters[2];
            tensor.array(3)[(end / 8) as usize] |= 1 << (end % 8);
        }),
        ("bits-at-end", |tensor| *tensor.array(3).last_mut().unwrap() |= 0x80),
    ]);
    // The weights are right, the index is not: each code has 8 bits, and a thread block starts one
    // code late by its gap and output offset alike, which the one before decodes.
    let equal = gap_of(weights((0..1000u16).map(|at| at as u8)));
    to.of(&equal).tensors(&[("offset-and-gap", |tensor| {
        tensor.array(1)[32] += 8;
        put(tensor.array(2), 1, 513);
    })]);
}

/// The last thread holds the end of a code only.
fn last_threads(to: &mut Vectors) {
    // A code of two bits that starts in bit 63 and ends in bit 64.
    let mut thread = gap_of(weights([&[120; 61][..], &[131, 130]].concat()));
    assert_eq!((thread.tensors[0].parameters[2], thread.tensor("w").array(1)[0]), (65, 0x10));
    to.of(&thread).tensors(&[
        ("gap-at-end", |tensor| tensor.array(1)[0] = 0x20),
        ("gap-at-end-zero", |tensor| tensor.array(1)[0] = 0),
    ]);
    // In a thread block of its own.
    let mut block = gap_of(late_end());
    let tensor = block.tensor("w");
    assert_eq!((tensor.array(1).len(), tensor.array(1)[32]), (33, 1));
    assert_eq!(get(tensor.array(2), 1), 4095);
    to.of(&block).tensors(&[
        ("gap-at-end-of-thread-block", |tensor| tensor.array(1)[32] = 2),
        ("offset-at-end", |tensor| put(tensor.array(2), 1, 4094)),
    ]);
}

fn codes(to: &mut Vectors, coded: &Model) {
    to.of(coded).tensors(&[
        ("lengths-too-many", |tensor| *of_length(tensor.array(0), 0) = 3),
        ("lengths-too-few", |tensor| *of_length(tensor.array(0), 1) = 2),
        ("lengths-limit", |tensor| *of_length(tensor.array(0), 0) = 17),
        ("lengths-255", |tensor| *of_length(tensor.array(0), 0) = 255),
        ("lengths-none", |tensor| tensor.array(0)[..256].fill(0)),
        // It does not follow from the code lengths.
        ("lut-entry", |tensor| tensor.array(0)[256 + 2 * 200] ^= 1),
        ("lut-more", |tensor| tensor.array(0).extend([0; 512])),
        ("lut-fewer", |tensor| {
            let short = tensor.array(0).len() - 512;
            assert!(short > 256, "there are several LUTs");
            tensor.array(0).truncate(short);
        }),
    ]);
    to.of(&gap_of(weights(vec![127; 100]))).tensors(&[
        ("single-length", |tensor| tensor.array(0)[127] = 2),
        ("no-code", |tensor| tensor.array(3)[4] = 1),
        ("lut-unused", |tensor| tensor.array(0)[256 + 2] = 1),
    ]);
    let mut luts = gap_of(many_luts());
    assert_eq!(luts.tensor("w").array(0).len(), 256 + 512 * 128);
    to.of(&luts).tensors(&[
        ("lut-1-entry", |tensor| tensor.array(0)[256 + 512] ^= 1),
        ("lut-last-entry", |tensor| tensor.array(0)[256 + 512 * 127 + 510] ^= 1),
    ]);
}
