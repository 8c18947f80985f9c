//! Sections 2 and 3: sections.

use df11::hazmat::{
    constants::NONE,
    format::records::{SECTION_PLANE, SECTION_RAW, SECTION_SIDE, SECTION_SKIPPABLE},
};

use super::{HUGE, OVERFLOW, UNSUPPORTED, of_draft, of_model, open, plain};
use crate::container::{Draft, Model};
use crate::vectors::Vector;

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn sections() -> Vec<Vector> {
    // Sections: raw in block 0, prefix, side.
    let extra = |name: &str, about: &str, block: u64, kind: u32, bytes: &[u8]| {
        of_model(name, about, |model| model.extra_sections.push((block, kind, bytes.into())))
    };
    vec![
        extra("section-kind", "an unknown kind of section that must not be skipped", 0, 8, b"new")
            .expecting(UNSUPPORTED),
        extra("section-kind-zero", "section kind 0", 0, 0, b"new").expecting(UNSUPPORTED),
        extra("section-kind-last", "section kind 2^31 - 1", NONE, SECTION_SKIPPABLE - 1, b"new")
            .expecting(UNSUPPORTED),
        of_draft(
            "section-kind-before-corrupt",
            "an unknown kind of section and sections out of order",
            |draft| {
                draft.directory.sections[0].kind = 9.into();
                draft.directory.sections[1].block = 0.into();
            },
        )
        .expecting(UNSUPPORTED),
        of_draft("section-reserved", "reserved is not zero", |draft| {
            draft.directory.sections[0].reserved = 1.into();
        }),
        extra(
            "section-without-arrays",
            "a section of a known kind without arrays",
            0,
            SECTION_PLANE,
            b"plane",
        ),
        of_draft("section-longer", "a section longer than its arrays", |draft| {
            draft.contents[0].push(0);
            draft.directory.sections[0].length += 1;
            draft.repair_checksums();
        }),
        of_draft("section-shorter", "a section shorter than its arrays", |draft| {
            draft.directory.sections[0].length -= 1;
        }),
        open("section-empty", "a section of no bytes", {
            let mut draft =
                remade_draft(|model| model.extra_sections.push((0, SECTION_SKIPPABLE, vec![1])));
            let at =
                draft.directory.sections.iter().position(|s| s.kind == SECTION_SKIPPABLE).unwrap();
            draft.contents[at].clear();
            draft.directory.sections[at].length = 0.into();
            for section in &mut draft.directory.sections[at + 1..] {
                section.offset -= 4096;
            }
            draft.repair_checksums();
            draft.pack()
        }),
        of_draft("sections-unsorted", "a side section before the prefix section", |draft| {
            let sections = &mut draft.directory.sections;
            (sections[1].kind, sections[2].kind) = (sections[2].kind, sections[1].kind);
            draft.directory.arrays[0].section = 2.into();
            draft.directory.arrays[1].section = 1.into();
            let lengths = [draft.contents[2].clone(), draft.contents[1].clone()];
            for (at, content) in (1..).zip(lengths) {
                draft.directory.sections[at].length = (content.len() as u64).into();
                draft.contents[at] = content;
            }
            draft.repair_checksums();
        }),
        open("sections-twice", "two sections of one kind in a block", {
            let mut draft =
                remade_draft(|model| model.extra_sections.push((0, SECTION_SKIPPABLE, vec![1])));
            let at =
                draft.directory.sections.iter().position(|s| s.kind == SECTION_SKIPPABLE).unwrap();
            draft.directory.sections[at].kind = SECTION_RAW.into();
            let last = draft.directory.arrays.len() - 1;
            draft.directory.arrays[last].section = (at as u64).into();
            draft.directory.arrays[last].offset = 0.into();
            draft.contents[at - 1].truncate(5);
            draft.directory.sections[at - 1].length = 5.into();
            draft.contents[at] = (10..18).collect();
            draft.directory.sections[at].length = 8.into();
            draft.repair_checksums();
            draft.pack()
        }),
        of_draft("sections-overlap", "two sections in one place", |draft| {
            draft.directory.sections[1].offset = draft.directory.sections[0].offset;
        }),
        of_draft(
            "section-hole",
            "4096 bytes between two sections that no section needs",
            |draft| {
                draft.contents[0].resize(4097, 0);
                draft.directory.sections[1].offset += 4096;
                draft.directory.sections[2].offset += 4096;
            },
        ),
        of_draft("section-unaligned", "a section that starts off a multiple of 4096", |draft| {
            draft.directory.sections[2].offset += 256;
        }),
        of_draft("section-in-head", "a section within the head", |draft| {
            draft.directory.sections[0].offset = 0.into();
        }),
        of_draft("section-past-file", "offset + length beyond the file (CVE-2026-7482)", |draft| {
            draft.directory.sections[2].length = (1 << 40).into();
            draft.directory.arrays[1].length = (1 << 40).into();
            draft.directory.files[1].length = (1 << 40).into();
        }),
        of_draft("section-length-overflow", "offset + length exceeds 2^64", |draft| {
            draft.directory.sections[2].length = (HUGE - 100).into();
            draft.directory.arrays[1].length = (HUGE - 100).into();
            draft.directory.files[1].length = (HUGE - 100).into();
        })
        .expecting(OVERFLOW),
        of_draft(
            "section-align-overflow",
            "a length that fits, and wraps to 0 when it is rounded up (CVE-2025-53630, \
            CVE-2026-27940)",
            |draft| {
                let length = HUGE - draft.directory.sections[2].offset.get() - 100;
                draft.directory.sections[2].length = length.into();
                draft.directory.arrays[1].length = length.into();
                draft.directory.files[1].length = length.into();
            },
        )
        .expecting(OVERFLOW),
        of_draft("section-without-block", "a raw section that belongs to no block", |draft| {
            draft.directory.sections[0].block = NONE.into();
        }),
        of_model("section-with-block", "a side section that belongs to a block", |model| {
            model.files[1].arrays.clear();
            model.extra_sections.push((0, SECTION_SIDE, b"{}\n".into()));
        }),
        of_draft("section-block", "a section of a block that does not exist", |draft| {
            draft.directory.sections[0].block = 1.into();
        }),
        extra(
            "unknown-section-block",
            "a section to skip, of a block that does not exist",
            1,
            SECTION_SKIPPABLE,
            b"x",
        ),
        open("directory-offset", "the directory starts a page after the sections end", {
            let mut draft = plain().draft();
            draft.contents.push(vec![0; 1]);
            draft.pack()
        }),
    ]
}

fn remade_draft(edit: impl FnOnce(&mut Model)) -> Draft {
    let mut model = plain();
    edit(&mut model);
    model.draft()
}
