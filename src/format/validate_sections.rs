//! The rules of sections, their arrays and their checksums (spec/format.md, sections 2 to 4).

use super::{
    records::{
        ArrayRecord, FILE_WEIGHTS, SECTION_CODEBOOK, SECTION_PREFIX, SECTION_RAW, SECTION_SIDE,
        SectionRecord, section_name,
    },
    validate::{Check, corrupt, require},
};
use crate::{
    Error, Result,
    constants::{ARRAY_ALIGNMENT, HEAD_BYTES, NONE, SECTION_ALIGNMENT, align},
};

impl Check<'_> {
    pub(super) fn sections(&self, directory_offset: u64) -> Result<()> {
        let overflow = || Error::overflow("a section's end");
        let mut end = HEAD_BYTES;
        let mut before = None;
        for (i, section) in self.directory.sections.iter().enumerate() {
            let (at, kind, block) = (self.section_at(i), section.kind.get(), section.block.get());
            self.section_kind(at, kind, block)?;
            let ascends = before.is_none_or(|before| before < (block, kind));
            require(ascends, at, "sections are not ascending by block and kind")?;
            before = Some((block, kind));
            let start = align(end, SECTION_ALIGNMENT).ok_or_else(overflow)?;
            let length = section.length.get();
            require(
                section.reserved == 0 && length > 0 && section.offset.get() == start,
                at,
                format_args!("section {i} must start at {start} and have a length"),
            )?;
            end = start.checked_add(length).ok_or_else(overflow)?;
        }
        let start = align(end, SECTION_ALIGNMENT)
            .ok_or_else(|| Error::overflow("the last section's end"))?;
        require(
            start == directory_offset,
            self.places.sections,
            format_args!(
                "the sections end at {start}, and the directory starts at {directory_offset}"
            ),
        )
    }

    fn section_kind(&self, at: usize, kind: u32, block: u64) -> Result<()> {
        let legal = match kind {
            SECTION_CODEBOOK..=SECTION_RAW => block < self.directory.blocks.len() as u64,
            SECTION_PREFIX | SECTION_SIDE => block == NONE,
            _ => block == NONE || block < self.directory.blocks.len() as u64,
        };
        require(legal, at, format_args!("a section of kind {kind} in block {block}"))
    }

    /// Arrays belong to records in order and are packed in their sections.
    pub(super) fn arrays(&self) -> Result<()> {
        let directory = self.directory;
        let mut next = 0u64;
        let files = directory.files.iter().enumerate();
        let tensors = directory.tensors.iter().enumerate();
        let owners = files
            .map(|(i, file)| (self.file_at(i), file.first_array, file.array_count))
            .chain(
                tensors
                    .map(|(i, tensor)| (self.tensor_at(i), tensor.first_array, tensor.array_count)),
            );
        for (at, first, count) in owners {
            require(first.get() == next, at, format_args!("first_array must be {next}"))?;
            next = next
                .checked_add(count.get())
                .ok_or_else(|| Error::overflow("the count of arrays"))?;
        }
        let count = directory.arrays.len();
        let problem = format_args!("records own {next} arrays, and there are {count}");
        require(next == count as u64, self.places.arrays, problem)?;
        self.packing()?;
        self.owners()
    }

    fn packing(&self) -> Result<()> {
        let overflow = || Error::overflow("an array's end");
        let sections = &self.directory.sections;
        let mut ends: Vec<Option<u64>> = vec![None; sections.len()];
        for (i, array) in self.directory.arrays.iter().enumerate() {
            let at = self.array_at(i);
            let end = usize::try_from(array.section.get())
                .ok()
                .and_then(|section| ends.get_mut(section))
                .ok_or_else(|| corrupt(at, "an array is in no section"))?;
            let start = align(end.unwrap_or(0), ARRAY_ALIGNMENT).ok_or_else(overflow)?;
            let length = array.length.get();
            require(
                array.offset.get() == start && length > 0,
                at,
                format_args!("an array must start at {start} and have a length"),
            )?;
            *end = Some(start.checked_add(length).ok_or_else(overflow)?);
        }
        for (i, (section, end)) in sections.iter().zip(ends).enumerate() {
            let (length, end) = (section.length.get(), end.unwrap_or(0));
            let known = section_name(section.kind.get()).is_some();
            require(
                end <= length && (!known || end == length),
                self.section_at(i),
                format_args!("section {i} has {length} bytes, and its arrays end at {end}"),
            )?;
        }
        Ok(())
    }

    /// Every array lies in a section of its owner.
    fn owners(&self) -> Result<()> {
        let directory = self.directory;
        for (i, file) in directory.files.iter().enumerate() {
            let at = self.file_at(i);
            let wanted = if file.kind == FILE_WEIGHTS { SECTION_PREFIX } else { SECTION_SIDE };
            for array in &directory.arrays[file.array_range()] {
                require(
                    self.section_of(array).kind == wanted
                        && array.length.get() <= file.length.get(),
                    at,
                    "a file's array is in the wrong section or too long",
                )?;
                let fits = wanted != SECTION_SIDE || array.length == file.length;
                require(fits, at, "a side file's array has another length")?;
            }
        }
        for (i, tensor) in directory.tensors.iter().enumerate() {
            for array in &directory.arrays[tensor.array_range()] {
                let is_own = self.section_of(array).block == tensor.block;
                self.require(i, is_own, "an array is in a section of another block")?;
            }
        }
        Ok(())
    }

    /// The section of an array that `packing` accepted.
    pub(super) fn section_of(&self, array: &ArrayRecord) -> &SectionRecord {
        &self.directory.sections[array.section.get() as usize]
    }

    pub(super) fn checksums(&self) -> Result<()> {
        let (count, expected) = (self.directory.checksums.len(), self.directory.chunk_count());
        let problem = format_args!("{count} checksums, and the sections need {expected}");
        require(count as u64 == expected, self.places.checksums, problem)
    }
}
