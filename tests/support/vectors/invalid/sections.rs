//! Sections 2 and 3: sections.

use df11::hazmat::{
    constants::NONE,
    format::records::{SECTION_PLANE, SECTION_RAW, SECTION_SIDE, SECTION_SKIPPABLE},
};

use super::{CORRUPT, HUGE, OVERFLOW, UNSUPPORTED, edited, open, plain, remade};
use crate::container::{Draft, Model};
use crate::vectors::Vector;

#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn sections() -> Vec<Vector> {
    // Sections: raw in block 0, prefix, side.
    let section = |edit: &dyn Fn(&mut Draft)| edited(edit);
    let extra = |block: u64, kind: u32, bytes: &[u8]| {
        remade(plain(), |model| model.extra_sections.push((block, kind, bytes.into())))
    };
    vec![
        open(
            "section-kind",
            UNSUPPORTED,
            "an unknown kind of section that must not be skipped",
            extra(0, 8, b"new"),
        ),
        open("section-kind-zero", UNSUPPORTED, "section kind 0", extra(0, 0, b"new")),
        open(
            "section-kind-last",
            UNSUPPORTED,
            "section kind 2^31 - 1",
            extra(NONE, SECTION_SKIPPABLE - 1, b"new"),
        ),
        open(
            "section-kind-before-corrupt",
            UNSUPPORTED,
            "an unknown kind of section and sections out of order",
            {
                section(&|draft| {
                    draft.directory.sections[0].kind = 9.into();
                    draft.directory.sections[1].block = 0.into();
                })
            },
        ),
        open(
            "section-reserved",
            CORRUPT,
            "reserved is not zero",
            section(&|draft| {
                draft.directory.sections[0].reserved = 1.into();
            }),
        ),
        open(
            "section-without-arrays",
            CORRUPT,
            "a section of a known kind without arrays",
            extra(0, SECTION_PLANE, b"plane"),
        ),
        open(
            "section-longer",
            CORRUPT,
            "a section longer than its arrays",
            section(&|draft| {
                draft.contents[0].push(0);
                draft.directory.sections[0].length += 1;
                draft.repair_checksums();
            }),
        ),
        open(
            "section-shorter",
            CORRUPT,
            "a section shorter than its arrays",
            section(&|draft| {
                draft.directory.sections[0].length -= 1;
            }),
        ),
        open("section-empty", CORRUPT, "a section of no bytes", {
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
        open(
            "sections-unsorted",
            CORRUPT,
            "a side section before the prefix section",
            section(&|draft| {
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
        ),
        open("sections-twice", CORRUPT, "two sections of one kind in a block", {
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
        open(
            "sections-overlap",
            CORRUPT,
            "two sections in one place",
            section(&|draft| {
                draft.directory.sections[1].offset = draft.directory.sections[0].offset;
            }),
        ),
        open(
            "section-hole",
            CORRUPT,
            "4096 bytes between two sections that no section needs",
            section(&|draft| {
                draft.contents[0].resize(4097, 0);
                draft.directory.sections[1].offset += 4096;
                draft.directory.sections[2].offset += 4096;
            }),
        ),
        open(
            "section-unaligned",
            CORRUPT,
            "a section that starts off a multiple of 4096",
            section(&|draft| {
                draft.directory.sections[2].offset += 256;
            }),
        ),
        open(
            "section-in-head",
            CORRUPT,
            "a section within the head",
            section(&|draft| {
                draft.directory.sections[0].offset = 0.into();
            }),
        ),
        open(
            "section-past-file",
            CORRUPT,
            "offset + length beyond the file (CVE-2026-7482)",
            section(&|draft| {
                draft.directory.sections[2].length = (1 << 40).into();
                draft.directory.arrays[1].length = (1 << 40).into();
                draft.directory.files[1].length = (1 << 40).into();
            }),
        ),
        open(
            "section-length-overflow",
            OVERFLOW,
            "offset + length exceeds 2^64",
            section(&|draft| {
                draft.directory.sections[2].length = (HUGE - 100).into();
                draft.directory.arrays[1].length = (HUGE - 100).into();
                draft.directory.files[1].length = (HUGE - 100).into();
            }),
        ),
        open(
            "section-align-overflow",
            OVERFLOW,
            "a length that fits, and wraps to 0 when it is rounded up (CVE-2025-53630, \
            CVE-2026-27940)",
            section(&|draft| {
                let length = HUGE - draft.directory.sections[2].offset.get() - 100;
                draft.directory.sections[2].length = length.into();
                draft.directory.arrays[1].length = length.into();
                draft.directory.files[1].length = length.into();
            }),
        ),
        open(
            "section-without-block",
            CORRUPT,
            "a raw section that belongs to no block",
            section(&|draft| {
                draft.directory.sections[0].block = NONE.into();
            }),
        ),
        open("section-with-block", CORRUPT, "a side section that belongs to a block", {
            remade(plain(), |model| {
                model.files[1].arrays.clear();
                model.extra_sections.push((0, SECTION_SIDE, b"{}\n".into()));
            })
        }),
        open(
            "section-block",
            CORRUPT,
            "a section of a block that does not exist",
            section(&|draft| {
                draft.directory.sections[0].block = 1.into();
            }),
        ),
        open(
            "unknown-section-block",
            CORRUPT,
            "a section to skip, of a block that does not exist",
            extra(1, SECTION_SKIPPABLE, b"x"),
        ),
        open("directory-offset", CORRUPT, "the directory starts a page after the sections end", {
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
