//! What is measured on the CPU: what the machine can do at most with memory, and whole calls of the
//! library, as the command makes them.

use std::{
    hint::black_box,
    path::{Path, PathBuf},
    sync::Mutex,
};

use df11::{CompressOptions, DecompressOptions, Layout, Level, OpenOptions, Source};
use rayon::prelude::*;

use crate::cli::{Failure, Session, containers::container_bytes};

/// Of a sample, for the limits: larger than the caches of most machines.
const SAMPLE_BYTES: usize = 128 << 20;
/// Bytes that a thread takes at a time; as large as a chunk of a section.
const PIECE: usize = 1 << 20;

const COPY: &str = "memory copy";
const CHECKSUM: &str = "CRC-32";
const HASH: &str = "BLAKE3";

/// Some work on some bytes, and the job whose rate limits it.
pub(super) struct Job<'a> {
    pub(super) name: &'static str,
    /// 0 where the cost does not grow with the weights.
    pub(super) bytes: u64,
    pub(super) limit: Option<&'static str>,
    pub(super) work: Box<dyn Fn() -> df11::Result<()> + Send + Sync + 'a>,
}

impl<'a> Job<'a> {
    fn new(
        name: &'static str,
        bytes: u64,
        limit: Option<&'static str>,
        work: impl Fn() -> df11::Result<()> + Send + Sync + 'a,
    ) -> Self {
        Self { name, bytes, limit, work: Box::new(work) }
    }

    /// What the machine can do at most.
    fn limit(name: &'static str, bytes: u64, work: impl Fn() + Send + Sync + 'a) -> Self {
        Self::new(name, bytes, None, move || {
            work();
            Ok(())
        })
    }
}

/// What jobs work on.
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
        let (container, progress) = (&self.container, || self.session.progress());
        let again = container.with_file_name("again.df11");
        let out = again.clone();
        let restored = container.with_file_name("restored");
        vec![
            Job::limit(COPY, sample, || self.copy()),
            Job::limit(CHECKSUM, sample, || self.checksum()),
            Job::limit(HASH, sample, || self.hash()),
            Job::new("first pass", all, hash, move || {
                df11::estimate(self.source, &out, Layout::default(), &progress()).map(drop)
            }),
            Job::new("compress", all, hash, move || {
                let options = without_verification();
                df11::compress(self.source, &again, &options, &progress()).map(drop)
            }),
            Job::new("open", 0, None, move || {
                df11::open(container).map(|model| drop(black_box(model)))
            }),
            Job::new("decode", all, Some(COPY), || self.decode(true)),
            Job::new("decode, no checksums", all, Some(COPY), || self.decode(false)),
            Job::new("verify checksums", self.stored_bytes, Some(CHECKSUM), move || {
                df11::open(container)?.verify(Level::Checksums, &progress()).map(drop)
            }),
            Job::new("verify all", all, hash, move || {
                df11::open(container)?.verify(Level::Full, &progress()).map(drop)
            }),
            Job::new("decompress", all, hash, move || {
                let options = DecompressOptions::new().overwrite(true);
                df11::decompress(&df11::open(container)?, &restored, &options, &progress())
                    .map(drop)
            }),
        ]
    }

    fn copy(&self) {
        let mut output = self.output.lock().expect("no job panics");
        let pairs = output.par_chunks_mut(PIECE).zip(self.sample.par_chunks(PIECE));
        pairs.for_each(|(to, from)| to[..from.len()].copy_from_slice(from));
        black_box(&*output);
    }

    fn checksum(&self) {
        let sums = self.sample.par_chunks(PIECE).map(crc32fast::hash);
        black_box(sums.reduce(|| 0, |a, b| a ^ b));
    }

    fn hash(&self) {
        let mut hasher = blake3::Hasher::new();
        if rayon::current_num_threads() == 1 {
            hasher.update(&self.sample);
        } else {
            hasher.update_rayon(&self.sample);
        }
        black_box(hasher.finalize());
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
