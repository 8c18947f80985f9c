//! The outline of a container that is not written: header, directory and footer at their places,
//! and nothing between them. It opens as the container would, so whatever asks directories alone
//! (what fits on which GPUs) can be asked before anything is compressed.

use std::{io, path::PathBuf};

use zerocopy::{IntoBytes, little_endian::U32};

use super::{output::seal, plan::ContainerPlan};
use crate::{
    Model, OpenOptions, Result,
    format::{self, Directory, Header, IdentifiedFile, directory::ShardRecord},
    io::ReadAt,
};

/// A container without its arrays.
#[derive(Debug)]
struct Outline {
    header: Header,
    directory: Vec<u8>,
}

/// What an outline is made of, once all shards of its model are known.
#[derive(Debug)]
pub(super) struct Draft {
    path: PathBuf,
    directory: Directory,
    directory_offset: u64,
}

impl Draft {
    /// Of a plan, for a container with this path.
    pub(super) fn new(path: PathBuf, plan: ContainerPlan<'_>) -> Self {
        Self { path, directory: plan.directory, directory_offset: plan.directory_offset }
    }

    fn seal(&self, shard: ShardRecord) -> Result<Outline> {
        let mut directory = self.directory.clone();
        directory.checksums = vec![U32::ZERO; directory.chunk_count() as usize];
        let (header, directory) = seal(&mut directory, self.directory_offset, shard)?;
        Ok(Outline { header, directory })
    }
}

impl ReadAt for Outline {
    fn size(&self) -> u64 {
        self.header.file_length.get()
    }

    /// Zeros where a container has arrays.
    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|&end| end <= self.size());
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.fill(0);
        let parts = [
            (0, self.header.as_bytes()),
            (self.header.directory_offset.get(), &self.directory),
            (self.header.footer_offset(), self.header.as_bytes()),
        ];
        for (start, part) in parts {
            let (from, to) = (start.max(offset), (start + part.len() as u64).min(end));
            if from < to {
                let part = &part[(from - start) as usize..(to - start) as usize];
                buf[(from - offset) as usize..(to - offset) as usize].copy_from_slice(part);
            }
        }
        Ok(())
    }
}

/// Opens the outlines of all containers of one model.
pub(super) fn open(drafts: &[Draft]) -> Result<Model> {
    let identity =
        format::identity(drafts.iter().flat_map(|draft| IdentifiedFile::of(&draft.directory)));
    let count = drafts.len() as u64;
    let outlines = (0..).zip(drafts).map(|(index, draft)| {
        let outline = draft.seal(ShardRecord::new(index, count, identity))?;
        Ok((draft.path.clone(), Box::new(outline) as Box<dyn ReadAt>))
    });
    OpenOptions::new().open_readers(outlines.collect::<Result<_>>()?)
}
