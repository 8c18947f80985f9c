//! Times loading a container onto a GPU, the first time and again, compares it with a plain pinned
//! copy of as many bytes, and shows the host memory that it takes. `make` writes blocks of Llama
//! 3.1 8B. Figures for benches/record/.
//!
//! ```text
//! cargo run --release --example gpu_load -- make FOLDER LAYERS    # FOLDER/model.df11
//! cargo run --release --example gpu_load -- time FILE             # from the page cache
//! cargo run --release --example gpu_load -- cold FILE             # pages dropped before each load
//! ```

use std::{
    error::Error,
    fs::{self, File},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use df11::{
    CompressOptions, Source,
    gpu::{Device, LoadOptions},
    hazmat::demo,
};

const TIMES: usize = 7;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["make", folder, layers] => make(Path::new(folder), layers.parse()?),
        ["time", file] => time(Path::new(file), false),
        ["cold", file] => time(Path::new(file), true),
        _ => Err("make FOLDER LAYERS, time FILE, or cold FILE".into()),
    }
}

fn make(folder: &Path, layers: usize) -> Result<(), Box<dyn Error>> {
    let shape = demo::Shape {
        layers,
        hidden: 4096,
        key_value: 1024,
        intermediate: 14_336,
        vocabulary: 128_256,
    };
    let checkpoint = demo::checkpoint(folder, shape, 11)?;
    let options = CompressOptions::new().verify(false).overwrite(true);
    let report =
        df11::compress(&Source::open(&checkpoint)?, &folder.join("model.df11"), &options, &())?;
    println!("{} bytes of BF16, {} stored", report.source_bytes, report.stored_bytes);
    fs::remove_dir_all(checkpoint)?;
    Ok(())
}

fn time(file: &Path, cold: bool) -> Result<(), Box<dyn Error>> {
    let device = Device::open(0)?;
    let (mut bytes, mut seconds, mut opened) = (0, Vec::new(), 0.0);
    for _ in 0..if cold { 3 } else { TIMES + 1 } {
        if cold {
            drop_pages(file)?;
        }
        let start = Instant::now();
        let model = df11::open(file)?;
        opened = start.elapsed().as_secs_f64();
        let before = anonymous_bytes();
        let start = Instant::now();
        let (loaded, most) = watch(|| {
            let loaded = model.load(&device, &LoadOptions::new());
            (loaded, start.elapsed().as_secs_f64())
        });
        let (model, taken) = (loaded.0?, loaded.1);
        bytes = model.device_bytes();
        seconds.push(taken);
        println!(
            "{taken:.4} s, host memory of the process at most {} MiB more",
            (most.max(before) - before) >> 20
        );
    }
    let copies = (0..3).map(|_| device.measure_upload(bytes)).collect::<Result<_, _>>()?;
    let (copy, gigabytes) = (median(copies), bytes as f64 / 1e9);
    println!(
        "open {opened:.5} s; {bytes} bytes; pinned copy {copy:.4} s, {:.1} GB/s",
        gigabytes / copy
    );
    let [first, then] = [seconds[0], median(seconds.split_off(1))]
        .map(|taken| format!("{:.3} of the copy, {:.1} GB/s", copy / taken, gigabytes / taken));
    println!("first load {first}\nthen       {then}, median");
    Ok(())
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// Has the system forget the file's pages; Linux only.
fn drop_pages(file: &Path) -> Result<(), Box<dyn Error>> {
    let file = File::open(file)?;
    file.sync_all()?;
    #[cfg(target_os = "linux")]
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

/// Memory of this process that is no file's, in bytes; Linux only.
fn anonymous_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .map_or(0, |kib| kib << 10)
}

/// Runs some work; gives its result, and the most memory meanwhile.
fn watch<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let (done, most) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                most.fetch_max(anonymous_bytes(), Ordering::Relaxed);
                thread::sleep(Duration::from_micros(500));
            }
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        most.fetch_max(anonymous_bytes(), Ordering::Relaxed);
        (result, most.load(Ordering::Relaxed))
    })
}
