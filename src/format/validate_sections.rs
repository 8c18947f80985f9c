//! The rules of sections, their arrays and their checksums (spec/format.md, sections 2 to 4).

use super::{
    directory::chunk_count,
    records::{
        ArrayRecord, FILE_WEIGHTS, SECTION_CODEBOOK, SECTION_PREFIX, SECTION_RAW, SECTION_SIDE,
        SectionRecord, section_name,
    },
    validate::{Check, corrupt, overflow},
};
use crate::{
    Result,
    constants::{ARRAY_ALIGNMENT, HEAD_BYTES, NONE, SECTION_ALIGNMENT, align},
};

impl Check<'_> {
    pub(super) fn sections(&self, directory_offset: u64) -> Result<()> {
        let mut end = HEAD_BYTES;
        let mut before = None;
        for (i, section) in self.directory.sections.iter().enumerate() {
            let (at, kind, block) = (self.section_at(i), section.kind.get(), section.block.get());
            self.section_kind(at, kind, block)?;
            if before.is_some_and(|before| before >= (block, kind)) {
                return Err(corrupt(at, "sections are not ascending by block and kind"));
            }
            before = Some((block, kind));
            let start = align(end, SECTION_ALIGNMENT).ok_or_else(|| overflow("a section's end"))?;
            if section.reserved.get() != 0
                || section.length.get() == 0
                || section.offset.get() != start
            {
                let problem = format!("section {i} must start at {start} and have a length");
                return Err(corrupt(at, problem));
            }
            end = start
                .checked_add(section.length.get())
                .ok_or_else(|| overflow("a section's end"))?;
        }
        let start =
            align(end, SECTION_ALIGNMENT).ok_or_else(|| overflow("the last section's end"))?;
        if start == directory_offset {
            Ok(())
        } else {
            let problem = format!(
                "the sections end at {start}, and the directory starts at {directory_offset}"
            );
            Err(corrupt(self.places.sections, problem))
        }
    }

    fn section_kind(&self, at: usize, kind: u32, block: u64) -> Result<()> {
        let legal = match kind {
            SECTION_CODEBOOK..=SECTION_RAW => block < self.directory.blocks.len() as u64,
            SECTION_PREFIX | SECTION_SIDE => block == NONE,
            _ => block == NONE || block < self.directory.blocks.len() as u64,
        };
        if legal {
            Ok(())
        } else {
            Err(corrupt(at, format_args!("a section of kind {kind} in block {block}")))
        }
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
            if first.get() != next {
                return Err(corrupt(at, format_args!("first_array must be {next}")));
            }
            next = next.checked_add(count.get()).ok_or_else(|| overflow("the count of arrays"))?;
        }
        if next != directory.arrays.len() as u64 {
            let problem =
                format!("records own {next} arrays, and there are {}", directory.arrays.len());
            return Err(corrupt(self.places.arrays, problem));
        }
        self.packing()?;
        self.owners()
    }

    fn packing(&self) -> Result<()> {
        let sections = &self.directory.sections;
        let mut ends: Vec<Option<u64>> = vec![None; sections.len()];
        for (i, array) in self.directory.arrays.iter().enumerate() {
            let at = self.array_at(i);
            let end = usize::try_from(array.section.get())
                .ok()
                .and_then(|section| ends.get_mut(section))
                .ok_or_else(|| corrupt(at, "an array is in no section"))?;
            let start = align(end.unwrap_or(0), ARRAY_ALIGNMENT)
                .ok_or_else(|| overflow("an array's end"))?;
            if array.offset.get() != start || array.length.get() == 0 {
                return Err(corrupt(
                    at,
                    format_args!("an array must start at {start} and have a length"),
                ));
            }
            let stop =
                start.checked_add(array.length.get()).ok_or_else(|| overflow("an array's end"))?;
            *end = Some(stop);
        }
        for (i, (section, end)) in sections.iter().zip(ends).enumerate() {
            let (length, end) = (section.length.get(), end.unwrap_or(0));
            let known = section_name(section.kind.get()).is_some();
            if end > length || (known && end != length) {
                let problem =
                    format!("section {i} has {length} bytes, and its arrays end at {end}");
                return Err(corrupt(self.section_at(i), problem));
            }
        }
        Ok(())
    }

    /// Every array lies in a section of its owner.
    fn owners(&self) -> Result<()> {
        let directory = self.directory;
        for (i, file) in directory.files.iter().enumerate() {
            let wanted =
                if file.kind.get() == FILE_WEIGHTS { SECTION_PREFIX } else { SECTION_SIDE };
            for array in &directory.arrays[file.array_range()] {
                if self.section_of(array).kind.get() != wanted
                    || array.length.get() > file.length.get()
                {
                    return Err(corrupt(
                        self.file_at(i),
                        "a file's array is in the wrong section or too long",
                    ));
                }
                if wanted == SECTION_SIDE && array.length != file.length {
                    return Err(corrupt(self.file_at(i), "a side file's array has another length"));
                }
            }
        }
        for (i, tensor) in directory.tensors.iter().enumerate() {
            for array in &directory.arrays[tensor.array_range()] {
                if self.section_of(array).block != tensor.block {
                    return Err(self.tensor_corrupt(i, "an array is in a section of another block"));
                }
            }
        }
        Ok(())
    }

    /// The section of an array that `packing` accepted.
    pub(super) fn section_of(&self, array: &ArrayRecord) -> &SectionRecord {
        &self.directory.sections[array.section.get() as usize]
    }

    pub(super) fn checksums(&self) -> Result<()> {
        let expected: u64 =
            self.directory.sections.iter().map(|section| chunk_count(section.length.get())).sum();
        if expected == self.directory.checksums.len() as u64 {
            Ok(())
        } else {
            let problem = format!(
                "{} checksums, and the sections need {expected}",
                self.directory.checksums.len()
            );
            Err(corrupt(self.places.checksums, problem))
        }
    }
}
