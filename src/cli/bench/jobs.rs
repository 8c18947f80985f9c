//! What is measured: whole library calls, as the command makes them.

use std::{
    hint::black_box,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use df11::{CompressOptions, DecompressOptions, Layout, Level, OpenOptions, Source};

use super::{
    job::Job,
    limits::{self, CHECKSUM, COPY, HASH},
};
use crate::cli::{Failure, Session, sizes::container_bytes};

/// All jobs, the limits first. Compresses once, for those that read.
pub(super) fn all<'a>(
    source: &'a Source,
    folder: &Path,
    session: &'a Session,
) -> Result<Vec<Job<'a>>, Failure> {
    let container = folder.join("model.df11");
    df11::compress(source, &container, &without_verification(), &session.progress())?;
    let mut jobs = limits::all(source)?;
    jobs.extend(writing(source, folder, session));
    jobs.extend(reading(source, &container, session)?);
    Ok(jobs)
}

pub(super) fn without_verification() -> CompressOptions {
    CompressOptions::new().verify(false).overwrite(true)
}

fn bytes_of(source: &Source) -> u64 {
    source.weights.iter().map(|file| file.length).sum()
}

fn writing<'a>(source: &'a Source, folder: &Path, session: &'a Session) -> Vec<Job<'a>> {
    let (bytes, again) = (bytes_of(source), folder.join("again.df11"));
    let out = again.clone();
    vec![
        Job::new("first pass", bytes, Some(HASH), move || {
            df11::estimate(source, &out, Layout::default(), &session.progress())?;
            Ok(())
        }),
        Job::new("compress", bytes, Some(HASH), move || {
            df11::compress(source, &again, &without_verification(), &session.progress())?;
            Ok(())
        }),
    ]
}

fn reading<'a>(
    source: &Source,
    container: &Path,
    session: &'a Session,
) -> Result<Vec<Job<'a>>, Failure> {
    let bytes = bytes_of(source);
    let model = df11::open(container)?;
    let stored = container_bytes(&model);
    let mut largest = 0;
    for block in model.blocks() {
        largest = largest.max(block.layout()?.bytes);
    }
    let verify = |name, bytes, limit, level| {
        let container = container.to_owned();
        Job::new(name, bytes, Some(limit), move || {
            df11::open(&container)?.verify(level, &session.progress())?;
            Ok(())
        })
    };
    Ok(vec![
        opening(container.to_owned()),
        decoding("decode", container, bytes, largest, true),
        decoding("decode, no checksums", container, bytes, largest, false),
        verify("verify checksums", stored, CHECKSUM, Level::Checksums),
        verify("verify all", bytes, HASH, Level::Full),
        restoring(container.to_owned(), bytes, session),
    ])
}

fn opening<'a>(container: PathBuf) -> Job<'a> {
    Job::new("open", 0, None, move || {
        black_box(df11::open(&container)?);
        Ok(())
    })
}

/// Opening, and decoding of all blocks into one buffer after the other, as a model runs.
fn decoding<'a>(
    name: &'static str,
    container: &Path,
    bytes: u64,
    largest: u64,
    checksums: bool,
) -> Job<'a> {
    let (container, buffer) = (container.to_owned(), Mutex::new(vec![0; largest as usize]));
    Job::new(name, bytes, Some(COPY), move || {
        let model = OpenOptions::new().checksums(checksums).open(&container)?;
        let mut buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
        for block in model.blocks() {
            block.decode_into(&mut buffer[..block.layout()?.bytes as usize])?;
        }
        black_box(&*buffer);
        Ok(())
    })
}

fn restoring(container: PathBuf, bytes: u64, session: &Session) -> Job<'_> {
    let out = container.with_file_name("restored");
    let options = DecompressOptions::new().overwrite(true);
    Job::new("decompress", bytes, Some(HASH), move || {
        df11::decompress(&df11::open(&container)?, &out, &options, &session.progress())?;
        Ok(())
    })
}
