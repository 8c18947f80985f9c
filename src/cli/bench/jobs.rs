//! Measurements on the CPU: the machine's maximum memory rates, and whole calls of the library, as
//! the command makes them.

use std::{
    hint::black_box,
    path::{Path, PathBuf},
    sync::Mutex,
};

use df11::{CompressOptions, DecompressOptions, Level, OpenOptions, Source};
use rayon::prelude::*;

use crate::cli::{Failure, Session, containers::container_bytes, measure::Series};

/// Bytes of a sample for the limits: more than the caches of most machines hold.
const SAMPLE_BYTES: usize = 128 << 20;
/// Bytes that a thread takes at a time; as large as a chunk of a section.
const PIECE: usize = 1 << 20;

const COPY: &str = "memory copy";
const CHECKSUM: &str = "CRC-32";
const HASH: &str = "BLAKE3";

/// A series that is to be measured, and its work.
pub(super) struct Job<'a> {
    pub(super) series: Series,
    pub(super) work: Box<dyn Fn() -> df11::Result<()> + Send + Sync + 'a>,
}

impl<'a> Job<'a> {
    fn new<T>(
        name: &'static str,
        bytes: u64,
        limit: Option<&'static str>,
        work: impl Fn() -> df11::Result<T> + Send + Sync + 'a,
    ) -> Self {
        let work = Box::new(move || work().map(|done| drop(black_box(done))));
        Self { series: Series::new(name, bytes, limit), work }
    }
}

/// The objects that jobs work on.
pub(super) struct Workplace<'a> {
    source: &'a Source,
    session: &'a Session,
    container: PathBuf,
    sample: Vec<u8>,
    /// Where the sample is copied to, and blocks are decoded to.
    output: Mutex<Vec<u8>>,
    bytes: u64,
    stored_bytes: u64,
}

pub(super) fn without_verification() -> CompressOptions {
    CompressOptions::new().verify(false).overwrite(true)
}

impl<'a> Workplace<'a> {
    /// Compresses once, for the jobs that read.
    pub(super) fn new(
        source: &'a Source,
        folder: &Path,
        session: &'a Session,
    ) -> Result<Self, Failure> {
        let container = folder.join("model.df11");
        df11::compress(source, &container, &without_verification(), &session.progress())?;
        let sample = sample(source)?;
        let model = df11::open(&container)?;
        let mut largest = sample.len();
        for block in model.blocks() {
            largest = largest.max(block.layout()?.bytes as usize);
        }
        Ok(Self {
            source,
            session,
            sample,
            output: Mutex::new(vec![0; largest]),
            bytes: source.weights.iter().map(|file| file.length).sum(),
            stored_bytes: container_bytes(&model),
            container,
        })
    }

    /// All jobs, the limits first.
    pub(super) fn jobs(&self) -> Vec<Job<'_>> {
        let (sample, all, hash) = (self.sample.len() as u64, self.bytes, Some(HASH));
        let (open, progress) = (|| df11::open(&self.container), || self.session.progress());
        let beside = |name: &str| self.container.with_file_name(name);
        vec![
            Job::new(COPY, sample, None, || Ok(self.copy())),
            Job::new(CHECKSUM, sample, None, || Ok(self.checksum())),
            Job::new(HASH, sample, None, || Ok(self.hash())),
            Job::new("first pass", all, hash, move || {
                df11::estimate(
                    self.source,
                    &beside("again.df11"),
                    &without_verification(),
                    &progress(),
                )
            }),
            Job::new("compress", all, hash, move || {
                let options = without_verification();
                df11::compress(self.source, &beside("again.df11"), &options, &progress())
            }),
            Job::new("open", 0, None, open),
            Job::new("decode", all, Some(COPY), || self.decode(true)),
            Job::new("decode, no checksums", all, Some(COPY), || self.decode(false)),
            Job::new("verify checksums", self.stored_bytes, Some(CHECKSUM), move || {
                open()?.verify(Level::Checksums, &progress())
            }),
            Job::new("verify all", all, hash, move || open()?.verify(Level::Full, &progress())),
            Job::new("decompress", all, hash, move || {
                let options = DecompressOptions::new().overwrite(true);
                df11::decompress(&open()?, &beside("restored"), &options, &progress())
            }),
        ]
    }

    /// Returns a byte that was copied.
    fn copy(&self) -> Option<u8> {
        let mut output = self.output.lock().expect("no job panics");
        let pairs = output.par_chunks_mut(PIECE).zip(self.sample.par_chunks(PIECE));
        pairs.for_each(|(to, from)| to[..from.len()].copy_from_slice(from));
        black_box(&*output).first().copied()
    }

    fn checksum(&self) -> u32 {
        let sums = self.sample.par_chunks(PIECE).map(crc32fast::hash);
        sums.reduce(|| 0, |a, b| a ^ b)
    }

    fn hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        if rayon::current_num_threads() == 1 {
            hasher.update(&self.sample);
        } else {
            hasher.update_rayon(&self.sample);
        }
        hasher.finalize()
    }

    /// Opening, and decoding of all blocks into one buffer after the other, as a model runs.
    fn decode(&self, checksums: bool) -> df11::Result<()> {
        let model = OpenOptions::new().checksums(checksums).open(&self.container)?;
        let mut output = self.output.lock().expect("no job panics");
        for block in model.blocks() {
            block.decode_into(&mut output[..block.layout()?.bytes as usize])?;
        }
        black_box(&*output);
        Ok(())
    }
}

/// Bytes of the source, as many as there are up to a limit.
fn sample(source: &Source) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    for file in &source.weights {
        let start = bytes.len();
        bytes.resize(start + (file.length as usize).min(SAMPLE_BYTES - start), 0);
        file.read_exact_at(0, &mut bytes[start..])?;
    }
    Ok(bytes)
}
