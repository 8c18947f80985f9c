//! `df11 bench`: measures the speed of every step and the limit that the machine sets for it, in
//! one process.

#[cfg(feature = "cudarc")]
mod gpu;
mod jobs;

use std::path::PathBuf;

use clap::Args;
use df11::{
    Source,
    hazmat::demo::{self, Shape},
};
use serde_json::{Value, json};

use super::{
    answer::{Answer, Failure},
    measure::{Series, median, repeat, timed},
    session::{Session, check_interrupted, pool, temporary_folder},
    text,
};
use jobs::{Job, Workplace};

/// 105 M weights of their own in eight layers.
const SHAPE: Shape =
    Shape { layers: 8, hidden: 1024, key_value: 256, intermediate: 3072, vocabulary: 8192 };

/// The blocks of Llama 3.1 8B, 218 M weights each: some, so that none finds another one's bytes in
/// a cache.
#[cfg(feature = "cudarc")]
const GPU_SHAPE: Shape =
    Shape { layers: 4, hidden: 4096, key_value: 1024, intermediate: 14_336, vocabulary: 8192 };

const AFTER_HELP: &str = "\
Without SRC, df11 makes 105 million seeded weights, whose scales differ by matrix and by row. \
Rates are decoded bytes per second: medians of interleaved repetitions, after one for warm-up. \
Outputs go to the temporary folder and are synced; name a folder in memory to leave out the disk.

Examples:
  df11 bench
  df11 bench Llama-3.1-8B --threads 1,2,8 --json
  df11 bench --folder /dev/shm
  df11 bench --gpu";

/// Measure encoding, decoding, hashing, checksums and opening
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Bench {
    /// A safetensors file or the folder of a model [default: seeded weights]
    #[arg(value_name = "SRC")]
    source: Option<PathBuf>,
    /// Numbers of threads, such as 1,2,4 [default: 1 and all cores]
    #[arg(long, value_delimiter = ',', value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    /// Measure decoding and loading on the first GPU instead, and compare them with plain copies
    #[cfg(feature = "cudarc")]
    #[arg(long, conflicts_with = "threads")]
    gpu: bool,
    /// With --gpu: layers of the seeded model, 0.44 GB each [default: 4]
    #[cfg(feature = "cudarc")]
    #[arg(long, requires = "gpu", conflicts_with = "source", value_name = "N")]
    layers: Option<usize>,
    /// Repetitions after the warm-up
    #[arg(long, default_value_t = 5, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1000))]
    repetitions: u16,
    /// Folder for outputs [default: the temporary folder]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

impl Bench {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        #[cfg(feature = "cudarc")]
        if self.gpu {
            // Before the weights are made, which takes a while.
            df11::gpu::Device::open(0)?;
        }
        let folder = self.folder.clone().unwrap_or_else(std::env::temp_dir);
        let temporary = temporary_folder(&folder)?;
        let source = match &self.source {
            Some(source) => source.clone(),
            None => demo::checkpoint(temporary.path(), self.shape(), 11)?,
        };
        check_interrupted()?;
        let source = Source::open(&source).map_err(Failure::Other)?;
        #[cfg(feature = "cudarc")]
        if self.gpu {
            return gpu::run(self, &source, temporary.path(), session);
        }
        let place = Workplace::new(&source, temporary.path(), session)?;
        Ok(self.answer(&source, &self.measure(&place.jobs())?))
    }

    fn shape(&self) -> Shape {
        #[cfg(feature = "cudarc")]
        if self.gpu {
            return Shape { layers: self.layers.unwrap_or(GPU_SHAPE.layers), ..GPU_SHAPE };
        }
        SHAPE
    }

    fn thread_counts(&self) -> Vec<usize> {
        if !self.threads.is_empty() {
            return self.threads.iter().copied().map(usize::from).collect();
        }
        let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        if all == 1 { vec![1] } else { vec![1, all] }
    }

    /// All jobs for all numbers of threads, in turn, so that what slows the machine down for a
    /// while slows all of them.
    fn measure(&self, jobs: &[Job<'_>]) -> Result<Vec<Series>, Failure> {
        let pools: Vec<_> = self.thread_counts().into_iter().map(pool).collect::<Result<_, _>>()?;
        let runs = || pools.iter().flat_map(|pool| jobs.iter().map(move |job| (pool, job)));
        let mut series: Vec<Series> = runs()
            .map(|(pool, job)| Series { threads: pool.current_num_threads(), ..job.series.clone() })
            .collect();
        let time = |(pool, job): (&rayon::ThreadPool, &Job<'_>)| {
            check_interrupted()?;
            Ok(pool.install(|| timed(&job.work))?.1)
        };
        repeat(self.repetitions, &mut series, || runs().map(time).collect())?;
        Ok(series)
    }

    fn answer(&self, source: &Source, series: &[Series]) -> Answer {
        let row = |one: &Series| {
            let (seconds, limit) = (median(&one.seconds), limit_of(series, one));
            let or_blank = |some: bool, text: String| if some { text } else { String::new() };
            [
                one.name.clone(),
                or_blank(one.threads > 0, one.threads.to_string()),
                text::duration(seconds),
                or_blank(one.bytes > 0, text::rate(one.bytes, seconds)),
                one.limit.unwrap_or_default().to_owned(),
                limit.map_or_else(String::new, |limit| text::percent(one.rate() / limit)),
            ]
        };
        let all = || source.weights.iter().flat_map(|file| &file.tensors);
        let (tensors, bytes) = (all().count(), all().map(|tensor| tensor.length).sum());
        let weights = all().filter(|tensor| tensor.dtype == df11::Dtype::BF16);
        let weights: u64 = weights.map(|tensor| tensor.length / 2).sum();
        let what = self.source.as_deref().map_or("seeded weights".to_owned(), text::path);
        let text = format!(
            "{}: {weights} weights in {tensors} tensors, {}; medians of {} repetitions\n\n{}",
            what,
            text::bytes(bytes),
            self.repetitions,
            text::table(
                ["step", "threads", "time", "rate", "limit", "of it"],
                series.iter().map(row)
            )
        );
        let results: Vec<Value> = series.iter().map(|one| result_json(series, one)).collect();
        let json = json!({
            "command": "bench",
            "source": self.source.as_ref().map(|path| path.to_string_lossy()),
            "version": env!("CARGO_PKG_VERSION"),
            "debug": cfg!(debug_assertions),
            "arch": std::env::consts::ARCH,
            "os": std::env::consts::OS,
            "weights": weights,
            "tensors": tensors,
            "bytes": bytes,
            "repetitions": self.repetitions,
            "results": results,
        });
        Answer { text, json }
    }
}

/// The rate of the job that sets the limit of another one, with as many threads.
fn limit_of(series: &[Series], one: &Series) -> Option<f64> {
    let name = one.limit?;
    let limit = series.iter().find(|limit| limit.threads == one.threads && limit.name == name)?;
    Some(limit.rate()).filter(|&rate| rate > 0.0)
}

fn result_json(series: &[Series], one: &Series) -> Value {
    json!({
        "name": one.name,
        "threads": one.threads,
        "bytes": one.bytes,
        "seconds": one.seconds,
        "median_seconds": median(&one.seconds),
        "bytes_per_second": one.rate(),
        "limit": one.limit,
        "limit_bytes_per_second": limit_of(series, one),
    })
}
