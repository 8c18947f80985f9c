//! What the loader's way to the GPU was chosen by: pinned memory from the driver against registered
//! memory, the file's mapping registered, and rings of pinned buffers of several sizes. Figures for
//! benches/record/.
//!
//! ```text
//! cargo run --release --example gpu_ring -- FILE MIB    # writes FILE, on disk or in memory, first
//! ```
#![expect(unsafe_code, reason = "raw calls of the driver are what is measured")]

use std::{
    error::Error,
    fs::File,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use df11::gpu::{
    Device,
    cudarc::driver::{CudaStream, result, sys},
};

const MIB: usize = 1 << 20;
const THREADS: usize = 16;
const TIMES: usize = 5;
/// Bytes that are checked while they are in the cache of the core that read them.
const CACHED: usize = 256 << 10;

fn milliseconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64() * 1e3
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Runs `work` for 0, 1, … below `count` on some threads.
fn share(threads: usize, count: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(at) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&at| at < count)
                {
                    work(at);
                }
            });
        }
    });
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, mib] = &arguments[..] else { return Err("FILE MIB".into()) };
    let bytes = mib.parse::<usize>()? * MIB;
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
    let content: Vec<u8> =
        (0..16 * MIB as u32).map(|at| at.wrapping_mul(2_654_435_761) as u8).collect();
    share(THREADS, bytes.div_ceil(16 * MIB), |at| {
        file.write_all_at(&content, (at * 16 * MIB) as u64).unwrap();
    });
    let device = Device::open(0)?;
    let stream = device.context().new_stream()?;
    allocation(&device);
    registration(&file, bytes, &stream);
    rings(&device, &file, bytes, &stream)?;
    std::fs::remove_file(path)?;
    Ok(())
}

/// 64 MiB of pinned memory.
fn allocation(device: &Device) {
    device.context().bind_to_thread().unwrap();
    // SAFETY: nothing reads the memory, and the process ends soon.
    let host = milliseconds(|| _ = unsafe { result::malloc_host(64 * MIB, 0) }.unwrap());
    println!("64 MiB by cuMemHostAlloc {host:.2} ms");
    for large in [false, true] {
        let mut memory = memmap2::MmapMut::map_anon(66 * MIB).unwrap();
        if large {
            memory.advise(memmap2::Advice::HugePage).unwrap();
        }
        let start = memory.as_ptr().align_offset(2 * MIB);
        let touch = milliseconds(|| {
            thread::scope(|scope| {
                for part in memory[start..start + 64 * MIB].chunks_mut(4 * MIB) {
                    scope.spawn(|| part.iter_mut().step_by(4096).for_each(|byte| *byte = 0));
                }
            });
        });
        let place = memory[start..].as_mut_ptr().cast();
        let register = milliseconds(|| {
            // SAFETY: the memory lives until it is unregistered.
            unsafe { sys::cuMemHostRegister_v2(place, 64 * MIB, 1) }.result().unwrap();
        });
        println!(
            "64 MiB ordinary, large pages {large}: touched in {touch:.2} ms, registered in \
            {register:.2} ms"
        );
        // SAFETY: registered above.
        unsafe { sys::cuMemHostUnregister(place) }.result().unwrap();
    }
}

/// The file's mapping, registered as it is.
fn registration(file: &File, bytes: usize, stream: &Arc<CudaStream>) {
    // SAFETY: nobody truncates the file meanwhile.
    let map = unsafe { memmap2::Mmap::map(file) }.unwrap();
    let place = map.as_ptr().cast_mut().cast();
    let flags = sys::CU_MEMHOSTREGISTER_READ_ONLY;
    let register = milliseconds(|| {
        // SAFETY: the mapping lives until it is unregistered.
        unsafe { sys::cuMemHostRegister_v2(place, bytes, flags) }.result().unwrap();
    });
    let mut to = stream.alloc_zeros::<u8>(bytes).unwrap();
    let copy = milliseconds(|| {
        stream.memcpy_htod(&map[..bytes], &mut to).unwrap();
        stream.synchronize().unwrap();
    });
    // SAFETY: registered above, and the copy is done.
    let unregister = milliseconds(|| unsafe { sys::cuMemHostUnregister(place) }.result().unwrap());
    println!(
        "mapping of {} MiB: registered in {register:.1} ms, copied in {copy:.1} ms, unregistered \
        in {unregister:.1} ms",
        bytes / MIB
    );
}

/// Readers fill pinned buffers from the file, with checksums, and start copies.
fn rings(
    device: &Device,
    file: &File,
    bytes: usize,
    stream: &CudaStream,
) -> Result<(), Box<dyn Error>> {
    let copies: Vec<f64> =
        (0..TIMES).map(|_| device.measure_upload(bytes as u64)).collect::<Result<_, _>>()?;
    println!("plain pinned copy {:.2} ms", median(copies) * 1e3);
    let second = device.context().new_stream()?;
    let mut to = device.context().default_stream().alloc_zeros::<u8>(bytes)?;
    let to = df11::gpu::cudarc::driver::DevicePtrMut::device_ptr_mut(&mut to, stream).0;
    for (readers, mib, streams) in [
        (12, 1, 1),
        (12, 2, 1),
        (8, 4, 1),
        (10, 4, 1),
        (12, 4, 1),
        (16, 4, 1),
        (12, 4, 2),
        (12, 8, 1),
    ] {
        let streams = &[stream, &*second][..streams];
        let ring = Ring { device, file, bytes, piece: mib * MIB, streams, to };
        let allocate = |()| {
            // SAFETY: the buffers live to the end of the process, and are each used by one reader.
            unsafe { result::malloc_host(mib * MIB, 0) }.unwrap() as usize
        };
        let buffers: Vec<[usize; 2]> = (0..readers).map(|_| [(); 2].map(allocate)).collect();
        let times = (0..=TIMES).map(|_| milliseconds(|| ring.run(&buffers))).skip(1).collect();
        println!(
            "{readers} readers, 2 buffers of {mib} MiB each, {} streams: {:.2} ms",
            streams.len(),
            median(times)
        );
    }
    Ok(())
}

struct Ring<'a> {
    device: &'a Device,
    file: &'a File,
    bytes: usize,
    piece: usize,
    streams: &'a [&'a CudaStream],
    to: u64,
}

impl Ring<'_> {
    fn run(&self, buffers: &[[usize; 2]]) {
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for (reader, buffers) in buffers.iter().enumerate() {
                let (next, stream) = (&next, self.streams[reader % self.streams.len()]);
                scope.spawn(move || self.read(next, buffers, stream));
            }
        });
        self.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    }

    fn read(&self, next: &AtomicUsize, buffers: &[usize; 2], stream: &CudaStream) {
        let context = self.device.context();
        context.bind_to_thread().unwrap();
        let events = [(); 2].map(|()| context.new_event(None).unwrap());
        for turn in 0.. {
            let start = next.fetch_add(1, Ordering::Relaxed) * self.piece;
            if start >= self.bytes {
                return;
            }
            let (event, buffer) = (&events[turn % 2], buffers[turn % 2] as *mut u8);
            event.synchronize().unwrap();
            // SAFETY: the buffer is this reader's, and the copy from it is done.
            let buffer = unsafe {
                std::slice::from_raw_parts_mut(buffer, self.piece.min(self.bytes - start))
            };
            let mut checksum = crc32fast::Hasher::new();
            for (at, part) in buffer.chunks_mut(CACHED).enumerate() {
                self.file.read_exact_at(part, (start + at * CACHED) as u64).unwrap();
                checksum.update(part);
            }
            std::hint::black_box(checksum.finalize());
            // SAFETY: the target has room for all bytes, and the source stays until the event.
            unsafe {
                result::memcpy_htod_async(self.to + start as u64, buffer, stream.cu_stream())
            }
            .unwrap();
            event.record(stream).unwrap();
        }
    }
}
