//! Sections 3 and 5: tensors and arrays.

use df11::{
    Dtype,
    hazmat::{
        constants::NONE,
        format::records::{SECTION_PLANE, TensorRecord},
    },
};

use super::{CORRUPT, HUGE, LIMIT, OVERFLOW, edited, edited_of, open, plain, remade};
use crate::container::{Draft, Item, Model};
use crate::vectors::Vector;

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn tensors() -> Vec<Vector> {
    let first =
        |edit: &dyn Fn(&mut TensorRecord)| edited(|draft| edit(&mut draft.directory.tensors[0]));
    let shaped = |shape: &[u64]| remade(plain(), |model| model.tensors[0].shape = shape.into());
    vec![
        open(
            "dimensions-limit",
            LIMIT,
            "nine dimensions",
            first(&|tensor| tensor.dimension_count = 9.into()),
        ),
        open(
            "dimensions-huge",
            LIMIT,
            "2^64 - 1 dimensions",
            first(&|tensor| tensor.dimension_count = HUGE.into()),
        ),
        open(
            "shape-beyond",
            CORRUPT,
            "a dimension beyond dimension_count",
            first(&|tensor| tensor.shape[7] = 1.into()),
        ),
        open("shape-overflow", OVERFLOW, "dimensions 2^63 and 4", shaped(&[1 << 63, 4])),
        open(
            "shape-overflow-zero",
            OVERFLOW,
            "dimensions 2^63, 4 and 0: the zero does not mend it",
            {
                remade(plain(), |model| {
                    model.tensors[0].shape = vec![1 << 63, 4, 0];
                    model.tensors[0].arrays.clear();
                })
            },
        ),
        open(
            "size-overflow-zero",
            OVERFLOW,
            "2^63 and 0 elements of 16 bits: the zero does not mend it",
            {
                remade(plain(), |model| {
                    (model.tensors[0].dtype, model.tensors[0].shape) =
                        (Dtype::BF16.id(), vec![1 << 63, 0]);
                    model.tensors[0].arrays.clear();
                })
            },
        ),
        open("size-overflow", OVERFLOW, "a size in bytes that wraps to 5 (CVE-2026-33298)", {
            remade(plain(), |model| {
                // 64-bit elements: 2^61 + 1 of them have 2^67 + 64 bits.
                model.tensors[1].dtype = Dtype::U64.id();
                model.tensors[1].shape = vec![(1 << 61) + 1];
            })
        }),
        open(
            "bits",
            CORRUPT,
            "three elements of four bits",
            remade(plain(), |model| {
                (model.tensors[0].dtype, model.tensors[0].shape) = (Dtype::F4.id(), vec![3]);
                model.tensors[0].arrays[0].1.truncate(2);
            }),
        ),
        open(
            "tensor-block",
            CORRUPT,
            "a block that does not exist",
            edited(|draft| {
                draft.directory.tensors[0].block = 1.into();
            }),
        ),
        open(
            "tensor-block-none",
            CORRUPT,
            "a tensor without a block",
            edited(|draft| {
                draft.directory.tensors[0].block = NONE.into();
            }),
        ),
        open(
            "tensor-file",
            CORRUPT,
            "a file that does not exist",
            first(&|tensor| tensor.file = 2.into()),
        ),
        open(
            "tensor-in-side-file",
            CORRUPT,
            "a tensor of a side file",
            first(&|tensor| tensor.file = 1.into()),
        ),
        open(
            "tensor-past-file",
            CORRUPT,
            "a tensor that ends beyond its file",
            edited(|draft| {
                draft.directory.tensors[1].file_offset += 1;
            }),
        ),
        open(
            "tensor-offset-overflow",
            OVERFLOW,
            "file_offset + size exceeds 2^64",
            first(&|tensor| {
                tensor.file_offset = (HUGE - 2).into();
            }),
        ),
        open("empty-tensor-past-file", CORRUPT, "a tensor without bytes beyond its file", {
            let mut model = plain();
            model.tensors[0].shape = vec![0];
            model.tensors[0].arrays.clear();
            model.tensors[0].file_offset = model.files[0].length + 1;
            model.build()
        }),
        open(
            "unknown-dtype-past-file",
            CORRUPT,
            "a tensor of an unknown dtype that starts beyond its file",
            {
                let mut model = plain();
                model.tensors[0].dtype = 99;
                model.tensors[0].file_offset = model.files[0].length + 1;
                model.build()
            },
        ),
        open(
            "unknown-encoding-arrays",
            CORRUPT,
            "an unknown encoding with an array of another block",
            {
                let mut model = plain();
                model.blocks.push(b"other".to_vec());
                model.tensors[0].encoding = 77;
                edited_of(&model, |draft| draft.directory.tensors[0].block = 1.into())
            },
        ),
    ]
}

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn arrays() -> Vec<Vector> {
    // Arrays: prefix, side, a, b.
    let array = |edit: &dyn Fn(&mut Draft)| edited(edit);
    vec![
        open(
            "first-array",
            CORRUPT,
            "first_array skips an array",
            array(&|draft| {
                draft.directory.tensors[1].first_array += 1;
            }),
        ),
        open(
            "arrays-shared",
            CORRUPT,
            "two tensors with one array",
            array(&|draft| {
                draft.directory.tensors[1].first_array -= 1;
            }),
        ),
        open(
            "array-count-overflow",
            OVERFLOW,
            "first_array + array_count exceeds 2^64",
            array(&|draft| {
                draft.directory.tensors[1].array_count = HUGE.into();
            }),
        ),
        open(
            "array-count",
            CORRUPT,
            "more arrays than there are",
            array(&|draft| {
                draft.directory.tensors[1].array_count = 2.into();
            }),
        ),
        open(
            "arrays-left-over",
            CORRUPT,
            "an array that belongs to nobody",
            array(&|draft| {
                let array = draft.directory.arrays[1];
                draft.directory.arrays.push(array);
            }),
        ),
        open(
            "array-section",
            CORRUPT,
            "an array of a section that does not exist",
            array(&|draft| {
                draft.directory.arrays[3].section = 3.into();
            }),
        ),
        open(
            "array-section-huge",
            CORRUPT,
            "an array of section 2^64 - 1",
            array(&|draft| {
                draft.directory.arrays[3].section = HUGE.into();
            }),
        ),
        open(
            "arrays-overlap",
            CORRUPT,
            "an array on another",
            array(&|draft| {
                draft.directory.arrays[3].offset = 0.into();
            }),
        ),
        open(
            "array-hole",
            CORRUPT,
            "256 bytes between two arrays that no array needs",
            array(&|draft| {
                draft.contents[0].splice(256..256, [0; 256]);
                draft.directory.sections[0].length += 256;
                draft.directory.arrays[3].offset += 256;
                draft.repair_checksums();
            }),
        ),
        open(
            "array-unaligned",
            CORRUPT,
            "an array off a multiple of 256",
            array(&|draft| {
                draft.contents[0].insert(256, 0);
                draft.directory.sections[0].length += 1;
                draft.directory.arrays[3].offset += 1;
                draft.repair_checksums();
            }),
        ),
        open("array-empty", CORRUPT, "an array of no bytes", {
            let mut model = plain();
            model.tensors[1].shape = vec![0];
            let mut draft = model.draft();
            draft.directory.arrays[3].length = 0.into();
            draft.contents[0].truncate(256);
            draft.directory.sections[0].length = 256.into();
            draft.repair_checksums();
            draft.pack()
        }),
        open(
            "array-past-section",
            CORRUPT,
            "an array that ends beyond its section",
            array(&|draft| {
                draft.directory.arrays[3].length += 1;
                draft.directory.tensors[1].dtype = Dtype::U8.id().into();
                draft.directory.tensors[1].shape[0] = 9.into();
                draft.directory.files[0].length += 1;
            }),
        ),
        open(
            "array-length-overflow",
            OVERFLOW,
            "the end of an array exceeds 2^64",
            array(&|draft| {
                draft.directory.arrays[3].length = (HUGE - 1).into();
            }),
        ),
        open("array-of-other-block", CORRUPT, "an array in a section of another block", {
            let items = [
                Item::raw("a", Dtype::U8, &[5], vec![1; 5]).in_block("0"),
                Item::raw("b", Dtype::U8, &[5], vec![2; 5]).in_block("1"),
            ];
            edited_of(&Model::new(&items, &[]), |draft| draft.directory.tensors[1].block = 0.into())
        }),
        open(
            "array-in-prefix-section",
            CORRUPT,
            "a tensor's array in the prefix section",
            array(&|draft| {
                // The bytes of b go after the prefix.
                let prefix = draft.contents[1].len().next_multiple_of(256);
                draft.contents[1].resize(prefix, 0);
                draft.contents[1].extend(10..18);
                draft.contents[0].truncate(5);
                draft.directory.sections[0].length = 5.into();
                draft.directory.sections[1].length = (prefix as u64 + 8).into();
                draft.directory.arrays[3].section = 1.into();
                draft.directory.arrays[3].offset = (prefix as u64).into();
                draft.repair_checksums();
            }),
        ),
        open(
            "raw-in-plane-section",
            CORRUPT,
            "a raw tensor in the plane section",
            remade(plain(), |model| {
                model.tensors[1].arrays[0].0 = SECTION_PLANE;
            }),
        ),
    ]
}
