//! Estimates the result of compression by all steps up to the plan, and makes the outline of the
//! container: header, directory and footer at their places, with nothing between them. The outline
//! opens as the container would, so every question that needs only the directory (such as which
//! GPUs can hold the model) can be answered before anything is compressed.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use zerocopy::{IntoBytes, little_endian::U32};

use super::{
    analysis,
    base::check_single,
    compress::{Compressor, open_base},
    encode::seal,
    folder::shard_paths,
    input::Input,
    options::{CompressOptions, Layout},
    plan::ContainerPlan,
    report::Report,
};
use crate::{
    Error, Model, OpenOptions, Result,
    format::{self, Directory, Header, IdentifiedFile, directory::ShardRecord},
    io::ReadAt,
    open::{Base, list_of_components},
    paths::is_container,
    progress::Observer,
    source::{Component, Source, Sources},
};

/// Estimates the result of [`compress`](super::compress()): runs only the first pass, and gives
/// exact sizes. Only the options for layout and base matter.
///
/// # Errors
/// Like [`compress`](super::compress()), except for writing.
pub fn estimate(
    source: &Source,
    out: &Path,
    options: &CompressOptions,
    observer: &dyn Observer,
) -> Result<Estimate> {
    let mut inputs = [Component::new("", Input::of_source(source, out)?)];
    let base = open_base(&mut inputs, out, options)?;
    let assumed = Assumed { layout: options.layout, base: base.as_ref(), exponent_bits: None };
    Estimate::new(&inputs[0], out, false, assumed, observer)
}

/// Like [`estimate`], for all models at a path, as [`compress_all`](super::compress_all) would make
/// them. With `exponent_bits` no weight is read, so only the safetensors headers are needed: codes
/// are assumed to take this many bits per weight (2.6 to 2.7 in trained models), and all tensors to
/// differ. That takes some milliseconds.
///
/// # Errors
/// Like [`estimate`]; [`Error::Parameter`] if the bits are not within 1 to 8, or if they are given
/// with a base: only the weights show how far they are from it.
pub fn estimate_all(
    sources: &Sources,
    out: &Path,
    options: &CompressOptions,
    exponent_bits: Option<f64>,
    observer: &dyn Observer,
) -> Result<Vec<Estimate>> {
    if exponent_bits.is_some() && options.base.is_some() {
        let problem = "differences from a base have no assumed size";
        return Err(Error::parameter(problem, "leave out the base, or read the weights"));
    }
    if let ([component], Some(_)) = (sources.components(), &options.base) {
        return Ok(vec![estimate(&component.model, out, options, observer)?]);
    }
    check_single(options.base.as_ref(), sources.components().len())?;
    let assumed = Assumed { layout: options.layout, base: None, exponent_bits };
    let in_pipeline = sources.is_pipeline();
    let mut identities = BTreeMap::new();
    let estimates = sources.components().iter().map(|component| {
        let Component { folder, model, .. } = component;
        let mut component = Component::new(folder.as_str(), Input::of_source(model, out)?);
        if in_pipeline && folder.is_empty() {
            component.model.metadata.extend([list_of_components(&identities)]);
        }
        // A placeholder as long as an identity, which is known only when all is written.
        identities.insert(folder.clone(), "0".repeat(2 * blake3::OUT_LEN));
        Estimate::new(&component, out, in_pipeline, assumed, observer)
    });
    estimates.collect()
}

/// Assumptions of an estimate.
#[derive(Clone, Copy)]
struct Assumed<'a> {
    layout: Layout,
    base: Option<&'a Base>,
    /// Bits of a code, if no weight is read.
    exponent_bits: Option<f64>,
}

/// The estimated result of compression.
#[derive(Debug)]
pub struct Estimate {
    /// Its sizes.
    pub report: Report,
    /// Path of each container, its directory without checksums, and that directory's offset in
    /// bytes.
    directories: Vec<(PathBuf, Directory, u64)>,
}

impl Estimate {
    /// Estimates by the first pass, or by headers with codes of this many bits.
    fn new(
        component: &Component<Input<'_>>,
        out: &Path,
        in_pipeline: bool,
        Assumed { layout, base, exponent_bits }: Assumed<'_>,
        observer: &dyn Observer,
    ) -> Result<Self> {
        if let Some(bits) = exponent_bits.filter(|bits| !(1.0..=8.0).contains(bits)) {
            let problem = format!("{bits} bits for the code of an exponent");
            let remedy = "name some from 1 to 8; trained models have 2.6 to 2.7";
            return Err(Error::parameter(problem, remedy));
        }
        let compressor = Compressor { component, layout, base, observer };
        if exponent_bits.is_none() {
            observer.begin(analysis::bytes(&component.model.weights, layout, base, 0));
        }
        let single = component.folder.is_empty() && is_container(out);
        let paths = if single {
            vec![out.to_owned()]
        } else {
            let paths = shard_paths(&component.model, in_pipeline)?;
            paths.iter().map(|path| out.join(component.path_of(path))).collect()
        };
        let mut report = Report::new(component, single);
        let mut directories = Vec::new();
        for (shard, path) in compressor.shards(single).iter().zip(paths) {
            let analyses = match exponent_bits {
                None => compressor.analyse(shard, None)?,
                Some(bits) => {
                    let weights = shard.weights.iter();
                    weights
                        .map(|file| analysis::assume(file, layout, bits))
                        .collect::<Result<_>>()?
                }
            };
            let plan = ContainerPlan::new(shard, &analyses)?;
            report.add(&plan);
            directories.push((path, plan.directory, plan.directory_offset));
        }
        let note = |bits| format!("no weight was read: codes of {bits} bits each are assumed");
        report.notes.extend(exponent_bits.map(note));
        Ok(Self { report, directories })
    }

    /// Opens the output as it would be, without arrays, for callers that need only directories,
    /// such as `gpu::Plan`. Decoding from it reports damage. Costs some microseconds per tensor.
    ///
    /// # Errors
    /// Like [`open`](crate::open()), except for reading: where the files together break a rule of
    /// the format.
    pub fn outline(&self) -> Result<Model> {
        let files = self.directories.iter().flat_map(|(_, of, _)| IdentifiedFile::of(of));
        let (identity, count) = (format::identity(files), self.directories.len() as u64);
        let outlines = (0..).zip(&self.directories).map(|(index, (path, directory, offset))| {
            let mut directory = directory.clone();
            directory.checksums = vec![U32::ZERO; directory.chunk_count() as usize];
            let shard = ShardRecord::new(index, count, identity);
            let (header, directory) = seal(&mut directory, *offset, shard)?;
            let outline: Box<dyn ReadAt> = Box::new(Outline { header, directory });
            Ok((path.clone(), outline))
        });
        OpenOptions::new().open_readers(outlines.collect::<Result<_>>()?)
    }
}

/// A container without its arrays.
struct Outline {
    header: Header,
    directory: Vec<u8>,
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
