//! Reads a directory from bytes, and validates it. The rules for sections, arrays, checksums and
//! tensors are here (spec/format.md, sections 2 to 6).

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned, little_endian::U64};

use super::{
    check::{Check, corrupt, require},
    directory::{Coded, Directory},
    records::{
        ArrayRecord, ENCODING_ALIAS, ENCODING_DELTA, ENCODING_FLOAT, ENCODING_RAW, FILE_WEIGHTS,
        SECTION_CODEBOOK, SECTION_PREFIX, SECTION_RAW, SECTION_SIDE, SectionRecord, TensorRecord,
        section_name,
    },
};
use crate::{
    Dtype, Error, Result,
    constants::{
        ARRAY_ALIGNMENT, HEAD_BYTES, MAX_ALIASES, MAX_DIMENSIONS, NONE, SECTION_ALIGNMENT, align,
    },
    dtype::elements,
};

struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl Cursor<'_> {
    fn record<T: FromBytes + Unaligned + Immutable + KnownLayout>(
        &mut self,
        name: &str,
    ) -> Result<T> {
        let (record, _) = T::read_from_prefix(&self.bytes[self.position..])
            .map_err(|_| corrupt(self.position, format_args!("it ends within {name}")))?;
        self.position += size_of::<T>();
        Ok(record)
    }

    /// A list. Nothing is allocated before the count is known to fit.
    fn list<T>(&mut self, name: &str) -> Result<Vec<T>>
    where
        T: FromBytes + Unaligned + Immutable + KnownLayout + Clone,
    {
        let count = self.record::<U64>(name)?.get();
        let rest = &self.bytes[self.position..];
        let records = usize::try_from(count)
            .ok()
            .and_then(|count| <[T]>::ref_from_prefix_with_elems(rest, count).ok());
        let (records, _) = records.ok_or_else(|| {
            let most = rest.len() / size_of::<T>();
            let problem = format_args!("it says {count} {name}, and there is room for {most}");
            corrupt(self.position, problem)
        })?;
        self.position += size_of_val(records);
        Ok(records.to_vec())
    }
}

impl Directory {
    /// Reads and validates a directory. The cost is linear in its length.
    ///
    /// `directory_offset` is where the directory starts in the container, in bytes.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Limit`] or [`Error::Unsupported`] as section 9 of the spec
    /// says, step 9.
    pub fn parse(bytes: &[u8], directory_offset: u64) -> Result<Self> {
        let mut cursor = Cursor { bytes, position: 0 };
        let directory = Self {
            shard: cursor.record("its first fields")?,
            files: cursor.list("files")?,
            blocks: cursor.list("blocks")?,
            sections: cursor.list("sections")?,
            tensors: cursor.list("tensors")?,
            arrays: cursor.list("arrays")?,
            checksums: cursor.list("checksums")?,
            metadata: cursor.list("entries of metadata")?,
            text: cursor.list("bytes of text")?,
        };
        let left = bytes.len() - cursor.position;
        require(left == 0, cursor.position, format_args!("{left} bytes are left over"))?;
        let check = Check::new(&directory);
        check.kinds()?;
        check.shard()?;
        check.text()?;
        check.metadata()?;
        check.files()?;
        check.blocks()?;
        check.sections(directory_offset)?;
        check.arrays()?;
        check.tensors()?;
        check.checksums()?;
        Ok(directory)
    }
}

impl Check<'_> {
    fn sections(&self, directory_offset: u64) -> Result<()> {
        let overflow = || Error::overflow("a section's end");
        let mut end = HEAD_BYTES;
        let mut before = None;
        for (i, (at, section)) in self.sections.iter().enumerate() {
            let (kind, block) = (section.kind.get(), section.block.get());
            let has_block = block < self.blocks.records.len() as u64;
            let legal = match kind {
                SECTION_CODEBOOK..=SECTION_RAW => has_block,
                SECTION_PREFIX | SECTION_SIDE => block == NONE,
                _ => block == NONE || has_block,
            };
            require(legal, at, format_args!("a section of kind {kind} in block {block}"))?;
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
        let problem = format_args!(
            "the sections end at {start}, and the directory starts at {directory_offset}"
        );
        require(start == directory_offset, self.sections.start, problem)
    }

    /// Arrays belong to records in order and are packed in their sections, which are those of their
    /// owners.
    fn arrays(&self) -> Result<()> {
        let mut next = 0u64;
        let files = self.files.iter().map(|(at, file)| (at, file.first_array, file.array_count));
        let tensors =
            self.tensors.iter().map(|(at, tensor)| (at, tensor.first_array, tensor.array_count));
        for (at, first, count) in files.chain(tensors) {
            require(first.get() == next, at, format_args!("first_array must be {next}"))?;
            next = next
                .checked_add(count.get())
                .ok_or_else(|| Error::overflow("the count of arrays"))?;
        }
        let count = self.arrays.records.len();
        let problem = format_args!("records own {next} arrays, and there are {count}");
        require(next == count as u64, self.arrays.start, problem)?;
        self.packing()?;
        self.owners()
    }

    fn packing(&self) -> Result<()> {
        let overflow = || Error::overflow("an array's end");
        let mut ends: Vec<Option<u64>> = vec![None; self.sections.records.len()];
        for (at, array) in self.arrays.iter() {
            let end = usize::try_from(array.section.get())
                .ok()
                .and_then(|section| ends.get_mut(section))
                .ok_or_else(|| corrupt(at, "an array is in no section"))?;
            let start = align(end.unwrap_or(0), ARRAY_ALIGNMENT).ok_or_else(overflow)?;
            let length = array.length.get();
            let problem = format_args!("an array must start at {start} and have a length");
            require(array.offset.get() == start && length > 0, at, problem)?;
            *end = Some(start.checked_add(length).ok_or_else(overflow)?);
        }
        for (i, ((at, section), end)) in self.sections.iter().zip(ends).enumerate() {
            let (length, end) = (section.length.get(), end.unwrap_or(0));
            let known = section_name(section.kind.get()).is_some();
            let problem =
                format_args!("section {i} has {length} bytes, and its arrays end at {end}");
            require(end <= length && (!known || end == length), at, problem)?;
        }
        Ok(())
    }

    /// Every array lies in a section of its owner.
    fn owners(&self) -> Result<()> {
        for (at, file) in self.files.iter() {
            let wanted = if file.kind == FILE_WEIGHTS { SECTION_PREFIX } else { SECTION_SIDE };
            for array in &self.arrays.records[file.array_range()] {
                let right = self.section_of(array).kind == wanted
                    && array.length.get() <= file.length.get();
                require(right, at, "a file's array is in the wrong section or too long")?;
                let fits = wanted != SECTION_SIDE || array.length == file.length;
                require(fits, at, "a side file's array has another length")?;
            }
        }
        for (at, record) in self.tensors.iter() {
            let own = |array| self.section_of(array).block == record.block;
            let are_own = self.arrays.records[record.array_range()].iter().all(own);
            let tensor = TensorCheck { check: self, at, record };
            tensor.require(are_own, "an array is in a section of another block")?;
        }
        Ok(())
    }

    /// The section of an array that `packing` accepted.
    fn section_of(&self, array: &ArrayRecord) -> &SectionRecord {
        &self.sections.records[array.section.get() as usize]
    }

    fn checksums(&self) -> Result<()> {
        let (count, expected) = (self.checksums.records.len(), self.directory.chunk_count());
        let problem = format_args!("{count} checksums, and the sections need {expected}");
        require(count as u64 == expected, self.checksums.start, problem)
    }

    /// All tensors, after their names, files, blocks, sections and arrays.
    fn tensors(&self) -> Result<()> {
        let mut before = None;
        let mut aliases = vec![0; self.tensors.records.len()];
        for (at, record) in self.tensors.iter() {
            let tensor = TensorCheck { check: self, at, record };
            let name = self.directory.tensor_name(record);
            let ascends = before.is_none_or(|before| before < name.as_bytes());
            tensor.require(ascends, "names are not ascending")?;
            before = Some(name.as_bytes());
            tensor.check()?;
            if record.encoding == ENCODING_ALIAS {
                let count = &mut aliases[record.parameters[0].get() as usize];
                *count += 1;
                let what = format_args!("the number of aliases of the target of tensor {name:?}");
                Error::check_limit(what, *count, MAX_ALIASES)?;
            }
        }
        Ok(())
    }
}

/// A tensor whose rules are checked, and where its record lies.
struct TensorCheck<'a> {
    check: &'a Check<'a>,
    at: usize,
    record: &'a TensorRecord,
}

const WRONG_ARRAYS: &str = "its arrays are not those of its encoding";

impl TensorCheck<'_> {
    fn require(&self, holds: bool, problem: impl std::fmt::Display) -> Result<()> {
        Error::unless(holds, || self.corrupt(problem))
    }

    fn corrupt(&self, problem: impl std::fmt::Display) -> Error {
        let name = self.check.directory.tensor_name(self.record);
        corrupt(self.at, format_args!("tensor {name:?}: {problem}"))
    }

    fn check(&self) -> Result<()> {
        let record = self.record;
        let dimensions = record.dimension_count.get();
        Error::check_limit("a tensor's number of dimensions", dimensions, MAX_DIMENSIONS)?;
        let is_zero = record.shape[dimensions as usize..].iter().all(|&dimension| dimension == 0);
        self.require(is_zero, "a dimension beyond dimension_count is not zero")?;
        let has_block = record.block.get() < self.check.blocks.records.len() as u64;
        self.require(has_block, "its block does not exist")?;
        let file = usize::try_from(record.file.get())
            .ok()
            .and_then(|file| self.check.files.records.get(file))
            .filter(|file| file.kind.get() == FILE_WEIGHTS)
            .ok_or_else(|| self.corrupt("its weights file does not exist"))?;
        let dtype = Dtype::from_id(record.dtype.get());
        let shape = record.dimensions();
        let bytes = match dtype.map(|dtype| dtype.bytes(&shape)) {
            // Nothing is known of the size of its elements.
            None => 0,
            Some(Err(Error::Parameter { problem, .. })) => return Err(self.corrupt(problem)),
            Some(bytes) => bytes?,
        };
        let end = record.file_offset.get().checked_add(bytes);
        let is_inside = end.is_some_and(|end| end <= file.length.get());
        self.require(is_inside, "it ends beyond its weights file")?;
        match (record.encoding.get(), dtype) {
            (ENCODING_ALIAS, _) => self.alias(),
            (ENCODING_RAW, Some(_)) => self.raw(bytes),
            (encoding, Some(dtype)) if Coded::is_coded(encoding) => {
                self.coded(dtype, elements(&shape)?)
            }
            _ => Ok(()),
        }
    }

    fn alias(&self) -> Result<()> {
        self.parameters(1)?;
        self.arrays(&[])?;
        let target = usize::try_from(self.record.parameters[0].get())
            .ok()
            .and_then(|target| self.check.tensors.records.get(target))
            .ok_or_else(|| self.corrupt("the target of the alias does not exist"))?;
        let same = target.encoding.get() != ENCODING_ALIAS
            && target.block == self.record.block
            && target.dtype == self.record.dtype
            && target.dimension_count == self.record.dimension_count
            && target.shape == self.record.shape
            && target.hash == self.record.hash;
        self.require(same, "the target of the alias is not its equal")
    }

    fn raw(&self, bytes: u64) -> Result<()> {
        self.parameters(0)?;
        let array = [(SECTION_RAW, bytes)];
        self.arrays(&array[..usize::from(bytes > 0)])
    }

    fn coded(&self, dtype: Dtype, count: u64) -> Result<()> {
        let encoding = self.record.encoding.get();
        let all = [ENCODING_FLOAT, ENCODING_DELTA].contains(&encoding);
        self.parameters(if all { 4 } else { 3 })?;
        let split = Coded::split(self.record).filter(|_| count > 0);
        let split = split.ok_or_else(|| {
            self.corrupt(format_args!("{} tensors are not coded so, nor empty ones", dtype.name()))
        })?;
        // The plane first: once it is known to be there, no other size can be large for nothing.
        let plane = self.check.arrays.records[self.record.array_range()].last();
        let bytes = split.plane_bytes(count);
        let has_plane = plane.is_some_and(|plane| plane.length == bytes);
        // A delta has no other array whose size depends on the number of weights alone.
        self.require(has_plane || encoding == ENCODING_DELTA, WRONG_ARRAYS)?;
        let sizes = Coded::of(self.check.directory, self.record).map_err(|error| match error {
            limit @ Error::Limit { .. } => limit,
            error => self.corrupt(error),
        })?;
        self.arrays(&sizes.expect("a coded tensor").arrays())
    }

    /// The parameters from `used` on are zero.
    fn parameters(&self, used: usize) -> Result<()> {
        let is_zero = self.record.parameters[used..].iter().all(|&parameter| parameter == 0);
        self.require(is_zero, "an unused parameter is not zero")
    }

    /// The arrays are in sections of these kinds and have these lengths in bytes.
    fn arrays(&self, expected: &[(u32, u64)]) -> Result<()> {
        let arrays = self.check.arrays.records[self.record.array_range()].iter();
        let found =
            arrays.map(|array| (self.check.section_of(array).kind.get(), array.length.get()));
        self.require(found.eq(expected.iter().copied()), WRONG_ARRAYS)
    }
}
