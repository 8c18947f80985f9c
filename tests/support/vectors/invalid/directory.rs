//! Sections 3, 5 and 6.1: sections, tensors, arrays, aliases.

use df11::{
    Dtype,
    hazmat::{
        constants::NONE,
        format::{
            Directory,
            records::{SECTION_PLANE, SECTION_RAW, SECTION_SIDE, SECTION_SKIPPABLE},
        },
    },
};

use super::{HUGE, Vectors, plain, with_section};
use crate::container::{Item, Model, Tensor};

pub(super) fn make(to: &mut Vectors) {
    sections(to);
    unknown_sections(to);
    tensors(to);
    arrays(to);
    aliases(to);
}

fn sections(to: &mut Vectors) {
    for (name, block, kind, bytes) in [
        ("section-kind", 0, 8, "new"),
        ("section-kind-zero", 0, 0, "new"),
        ("section-kind-last", NONE, SECTION_SKIPPABLE - 1, "new"),
        ("section-without-arrays", 0, SECTION_PLANE, "plane"),
        ("unknown-section-block", 1, SECTION_SKIPPABLE, "x"),
    ] {
        to.invalid(name, with_section(plain(), block, kind, bytes.as_bytes()).build());
    }
    to.of(&plain()).models(&[("section-with-block", |model| {
        model.files[1].arrays.clear();
        model.extra_sections.push((0, SECTION_SIDE, b"{}\n".into()));
    })]);
    to.of(&plain()).directories(&[
        ("section-kind-before-corrupt", |d| {
            (d.sections[0].kind, d.sections[1].block) = (9.into(), 0.into());
        }),
        ("section-reserved", |d| d.sections[0].reserved = 1.into()),
        ("section-shorter", |d| d.sections[0].length -= 1),
        ("sections-overlap", |d| d.sections[1].offset = d.sections[0].offset),
        ("section-unaligned", |d| d.sections[2].offset += 256),
        ("section-in-head", |d| d.sections[0].offset = 0.into()),
        ("section-past-file", |d| set_side_length(d, 1 << 40)),
        ("section-length-overflow", |d| set_side_length(d, HUGE - 100)),
        // It fits, and wraps to 0 when it is rounded up.
        ("section-align-overflow", |d| {
            set_side_length(d, HUGE - d.sections[2].offset.get() - 100);
        }),
        ("section-without-block", |d| d.sections[0].block = NONE.into()),
        ("section-block", |d| d.sections[0].block = 1.into()),
    ]);
    to.of(&plain()).drafts(&[
        ("section-longer", |draft| {
            draft.contents[0].push(0);
            draft.directory.sections[0].length += 1;
        }),
        ("sections-unsorted", |draft| {
            let d = &mut draft.directory;
            (d.sections[1].kind, d.sections[2].kind) = (d.sections[2].kind, d.sections[1].kind);
            (d.sections[1].length, d.sections[2].length) =
                (d.sections[2].length, d.sections[1].length);
            (d.arrays[0].section, d.arrays[1].section) = (2.into(), 1.into());
            draft.contents.swap(1, 2);
        }),
    ]);
    // Contents that no section has.
    for (name, contents) in [("section-hole", 0), ("directory-offset", 3)] {
        let mut draft = plain().draft();
        if contents == 0 {
            draft.contents[0].resize(4097, 0);
            draft.directory.sections[1..].iter_mut().for_each(|section| section.offset += 4096);
        } else {
            draft.contents.push(vec![0]);
        }
        to.invalid(name, draft.pack());
    }
    to.of(&with_section(plain(), 0, SECTION_SKIPPABLE, &[1])).drafts(&[
        ("section-empty", |draft| {
            draft.put(1, vec![]);
            draft.directory.sections[2..].iter_mut().for_each(|section| section.offset -= 4096);
        }),
        ("sections-twice", |draft| {
            draft.put(0, vec![1, 2, 3, 4, 5]);
            draft.put(1, (10..18).collect());
            draft.directory.sections[1].kind = SECTION_RAW.into();
            let array = draft.directory.arrays.last_mut().unwrap();
            (array.section, array.offset) = (1.into(), 0.into());
        }),
    ]);
}

/// The length of the side file, in all records.
fn set_side_length(directory: &mut Directory, length: u64) {
    directory.sections[2].length = length.into();
    directory.arrays[1].length = length.into();
    directory.files[1].length = length.into();
}

/// Sections of unknown kinds, for which the same rules hold: two to skip; an unknown encoding has
/// two arrays in the first.
fn unknown_sections(to: &mut Vectors) {
    let mut model = with_section(plain(), 0, SECTION_SKIPPABLE + 1, &[3]);
    model.tensors[0].encoding = 77;
    model.tensors[0].arrays =
        vec![(SECTION_SKIPPABLE, vec![1; 5]), (SECTION_SKIPPABLE, vec![2; 5])];
    let sections = model.draft().directory.sections;
    assert_eq!(sections[1].kind, SECTION_SKIPPABLE);
    to.of(&model).drafts(&[
        ("unknown-section-order", |draft| {
            let sections = &mut draft.directory.sections;
            (sections[1].kind, sections[2].kind) = (sections[2].kind, sections[1].kind);
        }),
        ("unknown-section-reserved", |draft| draft.directory.sections[1].reserved = 1.into()),
        ("unknown-section-hole", |draft| {
            draft.contents[1].splice(256..256, [0; 256]);
            draft.directory.sections[1].length += 256;
            draft.directory.arrays[3].offset += 256;
        }),
        ("unknown-section-overlap", |draft| draft.directory.arrays[3].offset = 0.into()),
        ("unknown-section-array-past-end", |draft| draft.directory.arrays[3].length += 1),
    ]);
}

fn tensors(to: &mut Vectors) {
    to.of(&plain()).directories(&[
        ("dimensions-limit", |d| d.tensors[0].dimension_count = 9.into()),
        ("dimensions-huge", |d| d.tensors[0].dimension_count = HUGE.into()),
        ("shape-beyond", |d| d.tensors[0].shape[7] = 1.into()),
        ("tensor-block", |d| d.tensors[0].block = 1.into()),
        ("tensor-block-none", |d| d.tensors[0].block = NONE.into()),
        ("tensor-file", |d| d.tensors[0].file = 2.into()),
        ("tensor-in-side-file", |d| d.tensors[0].file = 1.into()),
        ("tensor-past-file", |d| d.tensors[1].file_offset += 1),
        ("tensor-offset-overflow", |d| d.tensors[0].file_offset = (HUGE - 2).into()),
    ]);
    to.of(&plain()).tensors(&[
        ("shape-overflow", |tensor| tensor.shape = vec![1 << 63, 4]),
        // The zero does not make up for it.
        ("shape-overflow-zero", |tensor| {
            tensor.shape = vec![1 << 63, 4, 0];
            tensor.arrays.clear();
        }),
        ("size-overflow-zero", |tensor| {
            (tensor.dtype, tensor.shape) = (Dtype::BF16.id(), vec![1 << 63, 0]);
            tensor.arrays.clear();
        }),
        ("bits", |tensor| {
            (tensor.dtype, tensor.shape) = (Dtype::F4.id(), vec![3]);
            tensor.array(0).truncate(2);
        }),
        ("raw-shorter", |tensor| tensor.array(0).truncate(4)),
        ("raw-longer", |tensor| tensor.array(0).push(0)),
        ("raw-without-array", |tensor| tensor.arrays.clear()),
        ("raw-two-arrays", |tensor| {
            tensor.arrays = vec![(SECTION_RAW, vec![1, 2]), (SECTION_RAW, vec![3, 4, 5])];
        }),
        ("raw-empty-with-array", |tensor| tensor.shape = vec![0]),
        ("raw-parameter", |tensor| tensor.parameters[3] = 1),
    ]);
    to.of(&plain()).models(&[
        // 64-bit elements: 2^61 + 1 of them have 2^67 + 64 bits.
        ("size-overflow", |model| {
            (model.tensors[1].dtype, model.tensors[1].shape) =
                (Dtype::U64.id(), vec![(1 << 61) + 1]);
        }),
        ("raw-in-plane-section", |model| model.tensors[1].arrays[0].0 = SECTION_PLANE),
        ("empty-tensor-past-file", |model| {
            model.tensors[0].shape = vec![0];
            model.tensors[0].arrays.clear();
            model.tensors[0].file_offset = model.files[0].length + 1;
        }),
        ("unknown-dtype-past-file", |model| {
            model.tensors[0].dtype = 99;
            model.tensors[0].file_offset = model.files[0].length + 1;
        }),
    ]);
    let mut other = plain();
    other.blocks.push(b"other".to_vec());
    other.tensors[0].encoding = 77;
    to.of(&other).directories(&[("unknown-encoding-arrays", |d| d.tensors[0].block = 1.into())]);
}

fn arrays(to: &mut Vectors) {
    to.of(&plain()).directories(&[
        ("first-array", |d| d.tensors[1].first_array += 1),
        ("arrays-shared", |d| d.tensors[1].first_array -= 1),
        ("array-count-overflow", |d| d.tensors[1].array_count = HUGE.into()),
        ("array-count", |d| d.tensors[1].array_count = 2.into()),
        ("arrays-left-over", |d| d.arrays.push(d.arrays[1])),
        ("array-section", |d| d.arrays[3].section = 3.into()),
        ("array-section-huge", |d| d.arrays[3].section = HUGE.into()),
        ("arrays-overlap", |d| d.arrays[3].offset = 0.into()),
        ("array-length-overflow", |d| d.arrays[3].length = (HUGE - 1).into()),
        ("array-past-section", |d| {
            d.arrays[3].length += 1;
            (d.tensors[1].dtype, d.tensors[1].shape[0]) = (Dtype::U8.id().into(), 9.into());
            d.files[0].length += 1;
        }),
    ]);
    to.of(&plain()).drafts(&[
        ("array-hole", |draft| {
            draft.contents[0].splice(256..256, [0; 256]);
            draft.directory.sections[0].length += 256;
            draft.directory.arrays[3].offset += 256;
        }),
        ("array-unaligned", |draft| {
            draft.contents[0].insert(256, 0);
            draft.directory.sections[0].length += 1;
            draft.directory.arrays[3].offset += 1;
        }),
        ("array-empty", |draft| {
            draft.directory.tensors[1].shape[0] = 0.into();
            draft.directory.arrays[3].length = 0.into();
            draft.put(0, draft.contents[0][..256].to_vec());
        }),
        // The bytes of bé go after the prefix.
        ("array-in-prefix-section", |draft| {
            let prefix = draft.contents[1].len().next_multiple_of(256);
            let mut both = draft.contents[1].clone();
            both.resize(prefix, 0);
            both.extend(10..18);
            draft.put(0, draft.contents[0][..5].to_vec());
            draft.put(1, both);
            draft.directory.arrays[3].section = 1.into();
            draft.directory.arrays[3].offset = (prefix as u64).into();
        }),
    ]);
    let items = [("a", 1, "0"), ("b", 2, "1")]
        .map(|(name, byte, block)| Item::raw(name, Dtype::U8, &[5], vec![byte; 5]).in_block(block));
    let blocks = Model::new(&items, &[]);
    to.of(&blocks).directories(&[("array-of-other-block", |d| d.tensors[1].block = 0.into())]);
}

fn aliases(to: &mut Vectors) {
    let a = Item::raw("a", Dtype::U8, &[6], vec![1, 2, 3, 4, 5, 6]);
    let other = Item::raw("c", Dtype::U8, &[6], vec![9; 6]).in_block("other");
    let base = Model::new(&[a.clone(), a.alias("b"), other], &[]);
    to.of(&base).at(1).tensors(&[
        ("alias-to-itself", |tensor| tensor.parameters[0] = 1),
        ("alias-to-nothing", |tensor| tensor.parameters[0] = 3),
        ("alias-to-huge", |tensor| tensor.parameters[0] = HUGE),
        ("alias-shape", |tensor| tensor.shape = vec![2, 3]),
        ("alias-dtype", |tensor| tensor.dtype = Dtype::I8.id()),
        ("alias-block", |tensor| tensor.block = 1),
        ("alias-hash", |tensor| tensor.hash[0] ^= 1),
        ("alias-array", |tensor| tensor.arrays = vec![(SECTION_RAW, tensor.data.clone())]),
        ("alias-parameter", |tensor| tensor.parameters[1] = 1),
    ]);
    to.of(&base).models(&[
        ("alias-to-alias", |model| {
            let b = model.tensor("b").clone();
            *model.tensor("a") = Tensor { name: b"a".into(), parameters: [1, 0, 0, 0], ..b };
        }),
        ("alias-of-unknown-dtype", |model| {
            model.tensors[..2].iter_mut().for_each(|tensor| tensor.dtype = 99);
            model.tensor("b").hash[0] ^= 1;
        }),
    ]);
    for (name, data, of, shape) in [
        ("alias-shape-alone", vec![1, 2, 3, 4, 5, 6], &[2, 3][..], &[3, 2]),
        ("alias-dimensions", vec![], &[0], &[0, 0]),
    ] {
        let target = Item::raw("a", Dtype::U8, of, data);
        let alias = Item { shape: shape.into(), ..target.alias("b") };
        to.invalid(name, Model::new(&[target, alias], &[]).build());
    }
    let many = Model::new(&[&[a.clone()][..], &a.aliases(16, "b")].concat(), &[]);
    to.of(&many).models(&[
        ("aliases-limit", |_| {}),
        ("aliases-limit-unknown", |model| model.tensor("a").encoding = 77),
    ]);
}
