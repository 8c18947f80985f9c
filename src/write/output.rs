//! A container while it is being written, to a temporary file or in a temporary folder.

use std::{
    fs::File,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use zerocopy::IntoBytes;

use super::plan::ContainerPlan;
use crate::{
    Error, Result,
    format::{
        Directory, Header, IdentifiedFile,
        checksum::{PieceChecksum, SectionChecksums},
        directory::ShardRecord,
    },
    io::write_all_at,
    parallel,
};

/// A container being written.
#[derive(Debug)]
pub(super) struct ContainerOutput {
    /// The file; `None` while it is closed.
    file: Option<File>,
    path: PathBuf,
    directory: Directory,
    directory_offset: u64,
    checksums: Vec<Mutex<SectionChecksums>>,
}

impl ContainerOutput {
    /// Begins a new file, which is or will be at `path`, with the header of an unfinished
    /// container, and takes the plan's directory.
    pub(super) fn new(file: File, path: PathBuf, plan: &mut ContainerPlan<'_>) -> Result<Self> {
        let directory = std::mem::take(&mut plan.directory);
        let sections = directory.sections.len();
        let output = Self {
            file: Some(file),
            path,
            directory,
            directory_offset: plan.directory_offset,
            checksums: (0..sections).map(|_| Mutex::default()).collect(),
        };
        output.write_at(0, Header::unfinished().as_bytes())?;
        Ok(output)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        write_all_at(self.file(), bytes, offset)
            .map_err(|error| Error::io("writing", &self.path, error))
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("it is open while it is written")
    }

    /// Writes bytes of an array, `offset` counted from the array's start. Any thread may write any
    /// part once.
    ///
    /// # Panics
    /// Where the bytes exceed the array.
    pub(super) fn write_array(&self, array: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let record = &self.directory.arrays[array];
        assert!(offset + bytes.len() as u64 <= record.length.get(), "bytes within their array");
        let section = record.section.get() as usize;
        let in_section = record.offset.get() + offset;
        self.write_at(self.directory.sections[section].offset.get() + in_section, bytes)?;
        let piece = PieceChecksum::new(in_section, bytes);
        parallel::lock(&self.checksums[section]).add(piece);
        Ok(())
    }

    /// The original files, for the identity.
    pub(super) fn files(&self) -> impl Iterator<Item = IdentifiedFile<'_>> {
        IdentifiedFile::of(&self.directory)
    }

    /// Closes a file that is at its path until it is sealed, since a model may have more shards
    /// than a process may have files open.
    pub(super) fn close(&mut self) {
        self.file = None;
    }

    /// Writes directory, footer and header, and makes sure that they are on the disk.
    pub(super) fn seal(&mut self, shard: ShardRecord) -> Result<()> {
        if self.file.is_none() {
            let file = File::options().write(true).open(&self.path);
            self.file = Some(file.map_err(|error| Error::io("opening", &self.path, error))?);
        }
        for (section, checksums) in self.directory.sections.iter().zip(self.checksums.drain(..)) {
            let checksums = checksums.into_inner().unwrap_or_else(PoisonError::into_inner);
            self.directory.checksums.extend(
                checksums
                    .finish(section.length.get())
                    .into_iter()
                    .map(zerocopy::little_endian::U32::new),
            );
        }
        let (header, bytes) = seal(&mut self.directory, self.directory_offset, shard)?;
        self.write_at(self.directory_offset, &bytes)?;
        self.write_at(header.footer_offset(), header.as_bytes())?;
        self.sync()?;
        self.write_at(0, header.as_bytes())?;
        self.sync()
    }

    fn sync(&self) -> Result<()> {
        self.file().sync_all().map_err(|error| Error::io("syncing", &self.path, error))
    }

    /// The sealed file.
    pub(super) fn into_file(self) -> File {
        self.file.expect("it is open since it was sealed")
    }
}

/// Makes a directory with all its checksums that of one shard of a model. Returns header and
/// directory as they are stored.
pub(super) fn seal(
    directory: &mut Directory,
    directory_offset: u64,
    shard: ShardRecord,
) -> Result<(Header, Vec<u8>)> {
    directory.shard = shard;
    let bytes = directory.to_bytes();
    let header = Header::complete(directory_offset, &bytes)?;
    Ok((header, bytes))
}
