//! Where arrays go: packed into sections, and sections into the container (spec/format.md, sections
//! 2 and 3).

use std::collections::{BTreeMap, HashMap};

use crate::{
    Error, Result,
    constants::{ARRAY_ALIGNMENT, HEAD_BYTES, MAX_FILE_BYTES, SECTION_ALIGNMENT, align},
    format::records::{ArrayRecord, SectionRecord},
};

/// Packs arrays into sections.
#[derive(Default)]
pub(super) struct ArrayLayout {
    /// Block and section kind, offset in the section, length, of each array.
    arrays: Vec<((u64, u32), u64, u64)>,
    /// The end of the last array of each section; in the order of sections.
    ends: BTreeMap<(u64, u32), u64>,
}

impl ArrayLayout {
    /// Adds arrays of one record, without those of no bytes; returns the index of the first.
    pub(super) fn add(&mut self, block: u64, arrays: &[(u32, u64)]) -> u64 {
        let first = self.arrays.len() as u64;
        for &(kind, length) in arrays.iter().filter(|&&(_, length)| length > 0) {
            let end = self.ends.entry((block, kind)).or_default();
            let offset = end.next_multiple_of(ARRAY_ALIGNMENT);
            *end = offset + length;
            self.arrays.push(((block, kind), offset, length));
        }
        first
    }

    /// Places the sections in the file; returns them, the arrays, and where the directory starts.
    pub(super) fn place(self) -> Result<(Vec<SectionRecord>, Vec<ArrayRecord>, u64)> {
        let mut sections = Vec::with_capacity(self.ends.len());
        let mut indices = HashMap::new();
        let mut offset = HEAD_BYTES;
        for (&(block, kind), &length) in &self.ends {
            indices.insert((block, kind), sections.len() as u64);
            sections.push(SectionRecord {
                kind: kind.into(),
                reserved: 0.into(),
                block: block.into(),
                offset: offset.into(),
                length: length.into(),
            });
            offset = offset
                .checked_add(length)
                .and_then(|end| align(end, SECTION_ALIGNMENT))
                .ok_or_else(|| {
                    Error::limit("the container's length in bytes", u64::MAX, MAX_FILE_BYTES)
                })?;
        }
        let arrays = self
            .arrays
            .into_iter()
            .map(|(section, offset, length)| ArrayRecord {
                section: indices[&section].into(),
                offset: offset.into(),
                length: length.into(),
            })
            .collect();
        Ok((sections, arrays, offset))
    }
}
