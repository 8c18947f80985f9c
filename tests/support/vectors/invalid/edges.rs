//! Rules at their edges: one value beyond a limit, one field that differs alone, boundaries at the
//! end.

use df11::{
    Dtype,
    hazmat::format::records::{SECTION_SKIPPABLE, SectionRecord},
};

use super::{
    LIMIT, edited_of, open, plain, remade,
    tile::{changed, offset, put_offset},
};
use crate::{
    container::{Draft, Item, Model, normal_weights, weights},
    vectors::{
        Vector,
        edges::many_files,
        valid::{late_end, many_luts},
    },
};

pub(super) fn names() -> Vec<Vector> {
    let block = |name: &[u8]| remade(plain(), |model| model.blocks[0] = name.into());
    let path = |name: &str, about: &str, path: &str| {
        open(name, about, remade(plain(), |model| model.files[1].path = path.into()))
    };
    vec![
        open("block-name-empty", "a block without a name", block(b"")),
        open("block-name-limit", "a block's name of 4097 bytes", block(&[b'n'; 4097]))
            .expecting(LIMIT),
        open("block-name-not-utf8", "a byte that no UTF-8 text has", block(b"b\xFFc")),
        path("path-delete", "a path with U+007F", "config\u{7f}.json"),
        path("path-control-80", "a path with U+0080", "config\u{80}.json"),
        path("path-control-9f", "a path with U+009F", "config\u{9f}.json"),
        open("folders-limit-exact", "10001 folders", many_files(10_001).build()).expecting(LIMIT),
        open("first-array-of-file", "first_array of a file skips an array", {
            edited_of(&plain(), |draft| draft.directory.files[1].first_array += 1)
        }),
    ]
}

/// Two sections to skip; an unknown encoding has two arrays in the first.
fn unknown_sections() -> Model {
    let mut model = plain();
    model.tensors[0].encoding = 77;
    model.tensors[0].arrays =
        vec![(SECTION_SKIPPABLE, vec![1; 5]), (SECTION_SKIPPABLE, vec![2; 5])];
    model.extra_sections.push((0, SECTION_SKIPPABLE + 1, vec![3]));
    model
}

/// Sections of unknown kinds, for which the same rules hold.
pub(super) fn sections() -> Vec<Vector> {
    let is_first = |section: &SectionRecord| section.kind == SECTION_SKIPPABLE;
    let of = |name: &str, about: &str, edit: &dyn Fn(&mut Draft, usize)| {
        let bytes = edited_of(&unknown_sections(), |draft| {
            let at = draft.directory.sections.iter().position(is_first).unwrap();
            edit(draft, at);
            draft.repair_checksums();
        });
        open(&format!("unknown-section-{name}"), about, bytes)
    };
    let second = |draft: &Draft, at: usize| {
        draft.directory.arrays.iter().rposition(|array| array.section == at as u64).unwrap()
    };
    vec![
        of("order", "sections to skip that do not ascend by kind", &|draft, at| {
            let sections = &mut draft.directory.sections;
            (sections[at].kind, sections[at + 1].kind) = (sections[at + 1].kind, sections[at].kind);
        }),
        of("reserved", "reserved of a section to skip is not zero", &|draft, at| {
            draft.directory.sections[at].reserved = 1.into();
        }),
        of("hole", "256 bytes between two arrays of a section to skip", &|draft, at| {
            let array = second(draft, at);
            draft.contents[at].splice(256..256, [0; 256]);
            draft.directory.sections[at].length += 256;
            draft.directory.arrays[array].offset += 256;
        }),
        of("overlap", "two arrays of a section to skip in one place", &|draft, at| {
            let array = second(draft, at);
            draft.directory.arrays[array].offset = 0.into();
        }),
        of("array-past-end", "an array that ends beyond its section to skip", &|draft, at| {
            let array = second(draft, at);
            draft.directory.arrays[array].length += 1;
        }),
    ]
}

pub(super) fn aliases() -> Vec<Vector> {
    let alias = |data: Vec<u8>, of: &[u64], shape: &[u64]| {
        let target = Item::raw("a", Dtype::U8, of, data);
        let alias = Item { shape: shape.into(), ..target.alias("b") };
        Model::new(&[target, alias], &[]).build()
    };
    vec![
        open("alias-shape-alone", "a target of as many dimensions, and another shape", {
            alias((1..7).collect(), &[2, 3], &[3, 2])
        }),
        open("alias-dimensions", "an alias of shape [0, 0], and a target of shape [0]", {
            alias(vec![], &[0], &[0, 0])
        }),
        open("aliases-limit-unknown", "16 aliases of a tensor of an unknown encoding", {
            let a = Item::raw("a", Dtype::U8, &[6], vec![1, 2, 3, 4, 5, 6]);
            let aliases = (0..16).map(|at| a.alias(&format!("b{at:02}")));
            let items: Vec<Item> = [a.clone()].into_iter().chain(aliases).collect();
            remade(Model::new(&items, &[]), |model| model.tensor("a").encoding = 77)
        })
        .expecting(LIMIT),
    ]
}

fn gap_of(data: Vec<u8>) -> Model {
    let count = data.len() as u64 / 2;
    Model::new(&[Item::gap("w", &[count], data, (8, 64))], &[])
}

/// A code of two bits that starts in bit 63 and ends in bit 64: the second thread holds its end
/// only.
fn end_in_last_thread() -> Model {
    let model = gap_of(weights([&[120; 61][..], &[131, 130]].concat()));
    assert_eq!((model.tensors[0].parameters[2], model.tensors[0].arrays[1].1[0]), (65, 0x10));
    model
}

pub(super) fn gap() -> Vec<Vector> {
    let vector =
        |name: &str, level: &str, about: &str, bytes| Vector::invalid(name, level, about, bytes);
    let bit_count = |name: &str, about: &str, count: usize, bits: u64| {
        let model = gap_of(normal_weights(count, 3));
        let bytes = remade(model, |model| model.tensors[0].parameters[2] = bits);
        vector(name, "open", about, bytes)
    };
    let inner_lut = |name: &str, about: &str, last: bool| {
        let bytes = remade(gap_of(many_luts()), |model| {
            let codebook = &mut model.tensor("w").arrays[0].1;
            assert_eq!(codebook.len(), 256 + 512 * 128);
            let lut = if last { 127 } else { 1 };
            codebook[256 + 512 * lut + if last { 510 } else { 0 }] ^= 1;
        });
        vector(name, "verify", about, bytes)
    };
    vec![
        inner_lut("lut-1-entry", "the first entry of LUT 1 is another", false),
        inner_lut("lut-last-entry", "the last entry of the last LUT is another", true),
        vector("gap-at-end", "verify", "the gap of a last thread with the end of a code only", {
            remade(end_in_last_thread(), |model| model.tensors[0].arrays[1].1[0] = 0x20)
        }),
        vector("gap-at-end-zero", "verify", "the same gap is 0", {
            remade(end_in_last_thread(), |model| model.tensors[0].arrays[1].1[0] = 0)
        }),
        vector("gap-at-end-of-thread-block", "load", "the same in a thread block of its own", {
            remade(gap_of(late_end()), |model| {
                let gaps = &mut model.tensors[0].arrays[1].1;
                assert_eq!((gaps.len(), gaps[32]), (33, 1));
                gaps[32] = 2;
            })
        }),
        vector(
            "offset-at-end",
            "load",
            "a thread block with the end of a code only, and an element",
            {
                remade(gap_of(late_end()), |model| {
                    let offsets = &mut model.tensors[0].arrays[2].1;
                    assert_eq!(offsets[8..16], 4095u64.to_le_bytes());
                    offsets[8..16].copy_from_slice(&4094u64.to_le_bytes());
                })
            },
        ),
        bit_count("gap-bit-count-17", "17 bits of one weight; the arrays fit", 1, 17),
        bit_count("gap-bit-count-1", "one bit of two weights; the arrays fit", 2, 1),
    ]
}

pub(super) fn tile() -> Vec<Vector> {
    let about = "all tiles start a byte late, the first one too; bits and bit_count go with them";
    vec![changed("load", "tile-offsets-moved", about, |arrays| {
        for record in 0..5 {
            let moved = offset(arrays, record) + 8;
            put_offset(arrays, record, moved);
        }
        arrays.parameters[2] += 8;
        arrays.bitstream.insert(0, 0);
        assert_eq!(arrays.bitstream.pop(), Some(0));
    })]
}
