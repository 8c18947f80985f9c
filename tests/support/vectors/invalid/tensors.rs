//! Sections 3 and 5: tensors and arrays.

use df11::{
    Dtype,
    hazmat::{
        constants::NONE,
        format::records::{SECTION_PLANE, TensorRecord},
    },
};

use super::{HUGE, LIMIT, OVERFLOW, edited_of, of_draft, of_model, open, plain};
use crate::container::{Item, Model};
use crate::vectors::Vector;

pub(super) fn tensors() -> Vec<Vector> {
    let first = |name: &str, about: &str, edit: &dyn Fn(&mut TensorRecord)| {
        of_draft(name, about, |draft| edit(&mut draft.directory.tensors[0]))
    };
    let shaped = |name: &str, about: &str, shape: &[u64]| {
        of_model(name, about, |model| model.tensors[0].shape = shape.into())
    };
    vec![
        first("dimensions-limit", "nine dimensions", &|tensor| tensor.dimension_count = 9.into())
            .expecting(LIMIT),
        first("dimensions-huge", "2^64 - 1 dimensions", &|tensor| {
            tensor.dimension_count = HUGE.into();
        })
        .expecting(LIMIT),
        first("shape-beyond", "a dimension beyond dimension_count", &|tensor| {
            tensor.shape[7] = 1.into();
        }),
        shaped("shape-overflow", "dimensions 2^63 and 4", &[1 << 63, 4]).expecting(OVERFLOW),
        of_model(
            "shape-overflow-zero",
            "dimensions 2^63, 4 and 0: the zero does not mend it",
            |model| {
                model.tensors[0].shape = vec![1 << 63, 4, 0];
                model.tensors[0].arrays.clear();
            },
        )
        .expecting(OVERFLOW),
        of_model(
            "size-overflow-zero",
            "2^63 and 0 elements of 16 bits: the zero does not mend it",
            |model| {
                (model.tensors[0].dtype, model.tensors[0].shape) =
                    (Dtype::BF16.id(), vec![1 << 63, 0]);
                model.tensors[0].arrays.clear();
            },
        )
        .expecting(OVERFLOW),
        of_model("size-overflow", "a size in bytes that wraps to 5 (CVE-2026-33298)", |model| {
            // 64-bit elements: 2^61 + 1 of them have 2^67 + 64 bits.
            model.tensors[1].dtype = Dtype::U64.id();
            model.tensors[1].shape = vec![(1 << 61) + 1];
        })
        .expecting(OVERFLOW),
        of_model("bits", "three elements of four bits", |model| {
            (model.tensors[0].dtype, model.tensors[0].shape) = (Dtype::F4.id(), vec![3]);
            model.tensors[0].arrays[0].1.truncate(2);
        }),
        of_draft("tensor-block", "a block that does not exist", |draft| {
            draft.directory.tensors[0].block = 1.into();
        }),
        of_draft("tensor-block-none", "a tensor without a block", |draft| {
            draft.directory.tensors[0].block = NONE.into();
        }),
        first("tensor-file", "a file that does not exist", &|tensor| tensor.file = 2.into()),
        first("tensor-in-side-file", "a tensor of a side file", &|tensor| tensor.file = 1.into()),
        of_draft("tensor-past-file", "a tensor that ends beyond its file", |draft| {
            draft.directory.tensors[1].file_offset += 1;
        }),
        first("tensor-offset-overflow", "file_offset + size exceeds 2^64", &|tensor| {
            tensor.file_offset = (HUGE - 2).into();
        })
        .expecting(OVERFLOW),
        open("empty-tensor-past-file", "a tensor without bytes beyond its file", {
            let mut model = plain();
            model.tensors[0].shape = vec![0];
            model.tensors[0].arrays.clear();
            model.tensors[0].file_offset = model.files[0].length + 1;
            model.build()
        }),
        open(
            "unknown-dtype-past-file",
            "a tensor of an unknown dtype that starts beyond its file",
            {
                let mut model = plain();
                model.tensors[0].dtype = 99;
                model.tensors[0].file_offset = model.files[0].length + 1;
                model.build()
            },
        ),
        open("unknown-encoding-arrays", "an unknown encoding with an array of another block", {
            let mut model = plain();
            model.blocks.push(b"other".to_vec());
            model.tensors[0].encoding = 77;
            edited_of(&model, |draft| draft.directory.tensors[0].block = 1.into())
        }),
    ]
}

pub(super) fn arrays() -> Vec<Vector> {
    // Arrays: prefix, side, a, b.
    vec![
        of_draft("first-array", "first_array skips an array", |draft| {
            draft.directory.tensors[1].first_array += 1;
        }),
        of_draft("arrays-shared", "two tensors with one array", |draft| {
            draft.directory.tensors[1].first_array -= 1;
        }),
        of_draft("array-count-overflow", "first_array + array_count exceeds 2^64", |draft| {
            draft.directory.tensors[1].array_count = HUGE.into();
        })
        .expecting(OVERFLOW),
        of_draft("array-count", "more arrays than there are", |draft| {
            draft.directory.tensors[1].array_count = 2.into();
        }),
        of_draft("arrays-left-over", "an array that belongs to nobody", |draft| {
            let array = draft.directory.arrays[1];
            draft.directory.arrays.push(array);
        }),
        of_draft("array-section", "an array of a section that does not exist", |draft| {
            draft.directory.arrays[3].section = 3.into();
        }),
        of_draft("array-section-huge", "an array of section 2^64 - 1", |draft| {
            draft.directory.arrays[3].section = HUGE.into();
        }),
        of_draft("arrays-overlap", "an array on another", |draft| {
            draft.directory.arrays[3].offset = 0.into();
        }),
        of_draft("array-hole", "256 bytes between two arrays that no array needs", |draft| {
            draft.contents[0].splice(256..256, [0; 256]);
            draft.directory.sections[0].length += 256;
            draft.directory.arrays[3].offset += 256;
            draft.repair_checksums();
        }),
        of_draft("array-unaligned", "an array off a multiple of 256", |draft| {
            draft.contents[0].insert(256, 0);
            draft.directory.sections[0].length += 1;
            draft.directory.arrays[3].offset += 1;
            draft.repair_checksums();
        }),
        open("array-empty", "an array of no bytes", {
            let mut model = plain();
            model.tensors[1].shape = vec![0];
            let mut draft = model.draft();
            draft.directory.arrays[3].length = 0.into();
            draft.contents[0].truncate(256);
            draft.directory.sections[0].length = 256.into();
            draft.repair_checksums();
            draft.pack()
        }),
        of_draft("array-past-section", "an array that ends beyond its section", |draft| {
            draft.directory.arrays[3].length += 1;
            draft.directory.tensors[1].dtype = Dtype::U8.id().into();
            draft.directory.tensors[1].shape[0] = 9.into();
            draft.directory.files[0].length += 1;
        }),
        of_draft("array-length-overflow", "the end of an array exceeds 2^64", |draft| {
            draft.directory.arrays[3].length = (HUGE - 1).into();
        })
        .expecting(OVERFLOW),
        open("array-of-other-block", "an array in a section of another block", {
            let items = [
                Item::raw("a", Dtype::U8, &[5], vec![1; 5]).in_block("0"),
                Item::raw("b", Dtype::U8, &[5], vec![2; 5]).in_block("1"),
            ];
            edited_of(&Model::new(&items, &[]), |draft| draft.directory.tensors[1].block = 0.into())
        }),
        of_draft("array-in-prefix-section", "a tensor's array in the prefix section", |draft| {
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
        of_model("raw-in-plane-section", "a raw tensor in the plane section", |model| {
            model.tensors[1].arrays[0].0 = SECTION_PLANE;
        }),
    ]
}
