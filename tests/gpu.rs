//! Decoding on the GPU, against the CPU's results: `cargo test --test gpu`. Without a GPU
//! each test says SKIPPED on standard error, or fails if `DF11_REQUIRE_GPU` is set. On a machine
//! other than the build's, `DF11_COMMAND` names the command.
#![cfg(feature = "cuda")]

#[path = "support/container.rs"]
mod container;
#[path = "gpu/floats.rs"]
mod floats;
#[path = "gpu/grouped.rs"]
mod grouped;
#[path = "gpu/linear.rs"]
mod linear;
#[path = "gpu/programs.rs"]
mod programs;
#[path = "gpu/residence.rs"]
mod residence;
#[path = "gpu/streaming.rs"]
mod streaming;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::Write as _,
    process::Command,
    sync::{Arc, Mutex, OnceLock},
    thread,
};

use container::{Draft, FLOATS, Item, Model, normal_weights, parse, weights};
use df11::{
    Dtype, Error, Level, OpenOptions, Result, Verification,
    gpu::{
        Device, GpuBlock, GpuDecoder, GpuModel, GpuProgram, LoadOptions, Status,
        cudarc::{
            driver::{
                CudaContext, CudaGraph, CudaStream, CudaViewMut,
                sys::{CUgraphInstantiate_flags, CUstreamCaptureMode},
            },
            nvrtc::Ptx,
        },
        devices,
    },
    hazmat::format::records::ENCODING_GAP,
};

const POISON: u8 = 0xA5;
/// Bytes after an output that must stay as they are.
const GUARD: usize = 4096;

/// Tells what eprintln would not: the test harness hides that.
fn say(text: &str) {
    std::io::stderr().write_all(format!("{text}\n").as_bytes()).unwrap();
}

/// The first GPU, for all tests.
fn gpu() -> Option<&'static Device> {
    static DEVICE: OnceLock<Result<Device, Error>> = OnceLock::new();
    match DEVICE.get_or_init(|| Device::open(0)) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(std::env::var_os("DF11_REQUIRE_GPU").is_none(), "{error}");
            say(&format!("SKIPPED: {error}"));
            None
        }
    }
}

/// All cases on a GPU, and the first `few` on the emulator (kernels/emulator), which takes
/// thousands of times as long.
fn cases<T>(all: &[T], few: usize) -> &[T] {
    let is_emulated = std::env::var_os("EMULATOR_PTX").is_some();
    if is_emulated { &all[..few.min(all.len())] } else { all }
}

/// An encoding: ways to cut its tensors, and the GPUs that it is tested on.
struct Family {
    cuts: &'static [Cut],
    /// Shared memory of a block: all that the GPU has; what those of compute capability 8.6, 8.9
    /// and 12.0 have; and so little that blocks have few warps (of `gap` one to eleven, of which
    /// not all make a group; of `tile` one where tiles are as large as they can be).
    rooms: [u32; 3],
}

const FAMILIES: [Family; 3] = [
    Family { cuts: &GAPS, rooms: [u32::MAX, 99 << 10, 40_000] },
    Family { cuts: &TILES, rooms: [u32::MAX, 99 << 10, 49_000] },
    Family { cuts: &floats::CUTS, rooms: [u32::MAX, 99 << 10, 49_000] },
];

impl Family {
    /// The first GPU as it is and as smaller ones are; none if there is none.
    fn gpus(&self) -> Vec<Device> {
        static DEVICES: Mutex<BTreeMap<u32, Device>> = Mutex::new(BTreeMap::new());
        let mut devices = DEVICES.lock().unwrap();
        let opened = |room| Device::open_with_shared_memory(0, room).unwrap();
        let mut open = |room| devices.entry(room).or_insert_with(|| opened(room)).clone();
        gpu().map_or_else(Vec::new, |_| self.rooms.map(&mut open).into())
    }
}

/// The first GPU and a stream of it.
fn gpu_stream() -> Option<(&'static Device, Arc<CudaStream>)> {
    gpu().map(|device| (device, device.context().new_stream().unwrap()))
}

fn open(bytes: Vec<u8>) -> df11::Model {
    container::open(bytes).unwrap()
}

fn load(device: &Device, bytes: Vec<u8>) -> GpuModel {
    open(bytes).load(device, &LoadOptions::new()).unwrap()
}

/// The output of a launch into this many bytes of poison, and the status. Writes nothing after
/// them.
fn launch(
    device: &Device,
    stream: &Arc<CudaStream>,
    bytes: usize,
    launch: impl FnOnce(&mut CudaViewMut<'_, u8>, &Status) -> Result<()>,
) -> (Vec<u8>, u32) {
    let status = Status::new(device).unwrap();
    let mut output = stream.clone_htod(&vec![POISON; bytes + GUARD]).unwrap();
    launch(&mut output.as_view_mut(), &status).unwrap();
    let word = status.read(stream).unwrap();
    let mut result = stream.clone_dtoh(&output).unwrap();
    assert!(result.split_off(bytes).iter().all(|&byte| byte == POISON), "the guard stands");
    (result, word)
}

/// The same of a program, without a fault.
fn run(program: &GpuProgram, stream: &Arc<CudaStream>) -> Vec<u8> {
    let bytes = program.bytes() as usize;
    let (result, word) = launch(program.device(), stream, bytes, |output, status| {
        program.decode_into(output, stream, status)
    });
    assert_eq!(word, 0, "the status");
    result
}

/// The same of a block, whatever its status.
fn decode(stream: &Arc<CudaStream>, block: &GpuBlock<'_>) -> (Vec<u8>, u32) {
    let bytes = block.layout().bytes as usize;
    launch(block.device(), stream, bytes, |output, status| {
        block.decode_into(output, stream, status)
    })
}

/// All tensors of a block; between them `rest`, if it is known.
fn assert_is_block(result: &[u8], block: df11::Block<'_>, rest: Option<u8>) {
    let is_rest = |bytes: &[u8]| rest.is_none_or(|rest| bytes.iter().all(|&byte| byte == rest));
    let mut end = 0;
    for (tensor, range) in block.tensors().zip(block.layout().unwrap().tensors) {
        let (start, stop) = (range.start as usize, range.end as usize);
        let what = format!("{:?} of {:?}", tensor.name(), block.name());
        assert!(is_rest(&result[end..start]), "before {what}");
        assert!(result[start..stop] == tensor.decode::<u8>().unwrap(), "{what}");
        end = stop;
    }
}

/// Decodes a block and compares all tensors, and the poison between them.
fn check_block(stream: &Arc<CudaStream>, model: &GpuModel, original: &df11::Model, name: &str) {
    let (block, expected) = (model.block(name).unwrap(), original.block(name).unwrap());
    let (result, word) = decode(stream, &block);
    assert_eq!(word, 0, "status of block {name:?}");
    assert_eq!(block.layout(), &expected.layout().unwrap());
    assert_is_block(&result, expected, Some(POISON));
}

/// All blocks that are loaded, each on its GPU.
fn check_blocks(model: &GpuModel, original: &df11::Model) {
    for block in model.blocks() {
        let stream = block.device().context().new_stream().unwrap();
        check_block(&stream, model, original, block.name());
    }
}

fn check_model(device: &Device, bytes: &[u8]) {
    check_blocks(&load(device, bytes.to_vec()), &open(bytes.to_vec()));
}

/// Whether a call is refused as a mistake of the caller, with these words.
fn is_refused<T>(result: Result<T>, part: &str) -> bool {
    let is_parameter =
        |error: Error| matches!(error, Error::Parameter { .. }) && error.to_string().contains(part);
    result.is_err_and(is_parameter)
}

/// Captures what is launched. Tests on other threads free memory, which waits for the context and
/// so spoils what is being captured: then again.
fn capture(stream: &Arc<CudaStream>, launch: impl Fn() -> Result<()>) -> CudaGraph {
    stream.synchronize().unwrap();
    let attempt = |_| {
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        let launched = launch();
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let captured = stream.end_capture(flags);
        launched.is_ok().then_some(captured.ok()??)
    };
    (0..1000).find_map(attempt).unwrap()
}

/// A generator of test data.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// Weights of one distribution of exponents, by its number.
fn distribution(kind: usize, count: usize) -> Vec<u8> {
    let mut state = 7;
    match kind {
        0 => normal_weights(count, 5),
        // Codes of one bit: more than two a byte.
        1 => weights(std::iter::repeat_n(120, count)),
        // Codes of eight bits.
        2 => weights((0..count).map(|_| random(&mut state) as u8)),
        // Codes of up to sixteen bits: each exponent half as often as the one before.
        _ => {
            weights((0..count).map(|_| 100 + (random(&mut state) | 1 << 30).trailing_zeros() as u8))
        }
    }
}

/// How a tensor is cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// Into thread blocks: bytes per thread, threads per block.
    Gap(u32, u32),
    /// Into tiles of 256 columns, by the columns of the matrix.
    Matrix(u64),
    /// Into tiles of 8192 weights in a row.
    Vector,
    /// Floats, by their number in [`FLOATS`]: into tiles of 256 columns, by the columns of
    /// the matrix, or of 8192 in a row.
    Float(usize, Option<u64>),
}

const GAPS: [Cut; 12] = [
    Cut::Gap(8, 64),
    Cut::Gap(8, 128),
    Cut::Gap(8, 1024),
    Cut::Gap(16, 64),
    Cut::Gap(16, 256),
    Cut::Gap(16, 512),
    Cut::Gap(32, 64),
    Cut::Gap(32, 128),
    Cut::Gap(32, 1024),
    Cut::Gap(64, 64),
    Cut::Gap(64, 128),
    Cut::Gap(64, 256),
];
/// The last column of tiles whole, of one unit, of several; no whole tile.
const TILES: [Cut; 6] = [
    Cut::Vector,
    Cut::Matrix(256),
    Cut::Matrix(264),
    Cut::Matrix(1000),
    Cut::Matrix(8),
    Cut::Matrix(512),
];

impl Cut {
    /// The number of weights, rounded up to a whole matrix.
    fn count(self, count: usize) -> usize {
        match self {
            Self::Matrix(columns) | Self::Float(_, Some(columns)) => {
                count.next_multiple_of(columns as usize)
            }
            _ => count,
        }
    }

    fn item(self, name: &str, shape: &[u64], weights: Vec<u8>) -> Item {
        let elements = weights.len() as u64 / 2;
        match self {
            Self::Gap(bytes, threads) => Item::gap(name, shape, weights, (bytes, threads)),
            Self::Matrix(columns) => Item::tile(name, shape, weights, (256, columns)),
            Self::Vector => Item::tile(name, shape, weights, (8192, elements)),
            Self::Float(float, columns) => {
                let columns = columns.map_or((8192, elements), |columns| (256, columns));
                let data = floats::floats(float, &weights);
                let (dtype, zero_bits) = FLOATS[float];
                Item::float(name, (dtype, zero_bits), shape, data, columns)
            }
        }
    }
}

#[test]
fn probing_never_panics() {
    match devices() {
        Ok(all) => assert!(is_refused(Device::open(all.len()), "")),
        Err(error) => assert!(matches!(error, Error::Gpu { .. }), "{error:?}"),
    }
}

#[test]
fn edge_shapes_decode_as_on_the_cpu() {
    // Around a store, a warp's round, a thread block, a tile, and several of each.
    let counts = [
        1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 1000, 4095, 4097, 8191, 8192, 8193,
        65_537, 200_003,
    ];
    for family in &FAMILIES {
        for kind in 0..4 {
            let mut items = Vec::new();
            for (at, cut) in family.cuts.iter().enumerate() {
                for count in counts {
                    let (name, length) = (format!("{at}.{count}"), cut.count(count));
                    let item = cut.item(&name, &[length as u64], distribution(kind, length));
                    items.push(item.in_block(&format!("block {}", at % 5)));
                }
            }
            let bytes = Model::new(&items, &[]).build();
            family.gpus().iter().for_each(|device| check_model(device, &bytes));
        }
    }
}

#[test]
fn all_patterns_survive() {
    let all: Vec<u8> = (0..=u16::MAX).rev().flat_map(u16::to_le_bytes).collect();
    for family in &FAMILIES {
        let cuts = family.cuts.iter().filter(|cut| cut.count(1 << 16) == 1 << 16);
        let items: Vec<Item> =
            cuts.map(|cut| cut.item(&format!("{cut:?}"), &[256, 256], all.clone())).collect();
        let bytes = Model::new(&items, &[]).build();
        family.gpus().iter().for_each(|device| check_model(device, &bytes));
    }
}

/// All encodings, in two blocks.
fn mixed(seed: u64) -> Vec<u8> {
    let coded = Item::gap("coded", &[300, 70], normal_weights(21_000, seed), (32, 128));
    let other = Item::gap("other", &[501, 9], normal_weights(4509, seed + 1), (16, 64));
    let tiles = Item::tile("tiles", &[300, 520], normal_weights(156_000, seed + 2), (256, 520));
    let vector = Item::tile("vector", &[501, 33], normal_weights(16_533, seed + 3), (8192, 16_533));
    let raw = Item::raw("raw", Dtype::F32, &[2, 3], (0..24).collect());
    let odd = Item::raw("odd", Dtype::U8, &[333], (0..333u32).map(|at| at as u8).collect());
    let items = [
        coded.clone(),
        coded.alias("tied"),
        tiles.clone(),
        tiles.alias("tied tiles"),
        vector.in_block("second"),
        raw,
        odd.in_block("second"),
        other.in_block("second"),
        Item::raw("none", Dtype::BF16, &[7, 0], vec![]),
    ];
    Model::new(&items, &[("config.json", b"{}\n")]).build()
}

#[test]
fn a_mapped_file_loads_as_well_as_one_that_is_read() {
    let Some(device) = gpu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = df11::hazmat::demo::tiny_container(folder.path()).unwrap();
    for map in [true, false] {
        let original = OpenOptions::new().memory_map(map).open(&path).unwrap();
        check_blocks(&original.load(device, &LoadOptions::new()).unwrap(), &original);
    }
}

#[test]
fn rows_decode_alone() {
    let Some((device, stream)) = gpu_stream() else { return };
    let bytes = mixed(9);
    let (original, model) = (open(bytes.clone()), load(device, bytes));
    let mut state = 1;
    for name in ["coded", "tied", "tiles", "vector", "other", "raw", "odd"] {
        let tensor = original.tensor(name).unwrap();
        let count = tensor.shape()[0];
        let all = tensor.decode::<u8>().unwrap();
        let row = all.len() / count as usize;
        for _ in 0..30 {
            let start = random(&mut state) % count;
            let end = start + random(&mut state) % (count - start + 1);
            let found = run(&model.rows(name, start..end).unwrap(), &stream);
            let expected = &all[start as usize * row..end as usize * row];
            assert!(found == expected, "{name:?} {start}..{end}");
        }
    }
    assert!(is_refused(model.rows("coded", 5..301), ""));
    assert!(is_refused(model.rows("absent", 0..1), ""));
}

#[test]
fn two_models_decode_on_many_streams_at_once() {
    let Some(device) = gpu() else { return };
    let samples = [mixed(11), mixed(12)].map(|bytes| (open(bytes.clone()), load(device, bytes)));
    thread::scope(|scope| {
        for thread in 0..6 {
            let samples = &samples;
            scope.spawn(move || {
                let stream = device.context().new_stream().unwrap();
                for round in 0..20 {
                    let (original, model) = &samples[(thread + round) % 2];
                    let block = ["block", "second"][round / 2 % 2];
                    check_block(&stream, model, original, block);
                }
            });
        }
    });
}

#[test]
fn impossible_outputs_are_refused() {
    let Some((device, stream)) = gpu_stream() else { return };
    let (model, status) = (load(device, mixed(5)), Status::new(device).unwrap());
    let block = model.block("block").unwrap();
    let length = block.layout().bytes as usize;
    let mut output = stream.alloc_zeros::<u8>(length + 8).unwrap();
    let refused = |result| assert!(is_refused(result, ""));
    refused(block.decode_into(&mut output.slice_mut(..length - 1), &stream, &status));
    refused(block.decode_into(&mut output.slice_mut(8..), &stream, &status));
    let other = CudaContext::new(0).unwrap().new_stream().unwrap();
    refused(block.decode_into(&mut output.as_view_mut(), &other, &status));
}

/// Tensors of all cuts of a family, in one block.
fn victims(family: &Family) -> Model {
    let items = family.cuts.iter().enumerate().map(|(at, cut)| {
        let count = cut.count(3000 + 777 * at);
        cut.item(&format!("{at:02}"), &[count as u64], distribution(at % 4, count))
    });
    Model::new(&items.collect::<Vec<_>>(), &[])
}

/// Which of a tensor's four or five arrays to change: of `gap` codebook, gaps, output offsets,
/// bitstream, plane; of tiles codebook, records, bitstream, plane; 5 is all of them, 6 none but the
/// bit count.
const KINDS: usize = 7;

/// Whether a change of this kind can only be another valid stream where it changes nothing.
fn is_index(tile: bool, kind: usize) -> bool {
    kind == 6 || if tile { kind == 1 } else { [1, 2].contains(&kind) }
}

fn mutate(draft: &mut Draft, tensor: usize, kind: usize, state: &mut u64) {
    let record = &mut draft.directory.tensors[tensor];
    let (first, count) = (record.first_array.get() as usize, record.array_count.get() as usize);
    let tile = record.encoding != ENCODING_GAP;
    if kind == 6 && tile {
        // A container opens only with this many words of 16 bytes and at least a bit for each pair.
        let end = record.parameters[2].get().div_ceil(128) * 128;
        let elements: u64 = record.dimensions().iter().product();
        let bits = end - 8 * (random(state) % 16);
        record.parameters[2] = bits.max(elements.div_ceil(2).next_multiple_of(8)).into();
    } else if kind == 6 {
        let thread_bits = 8 * record.parameters[0].get();
        let threads = record.parameters[2].get().div_ceil(thread_bits);
        let elements = record.shape[0].get();
        let bits = (threads - 1) * thread_bits + 1 + random(state) % thread_bits;
        record.parameters[2] = bits.clamp(elements, 16 * elements).into();
    }
    for array in 0..count {
        if array != kind && kind != 5 {
            continue;
        }
        let bytes = draft.array(first + array);
        // Only the code lengths of a `gap` codebook are read.
        let length = if array == 0 && !tile { 256 } else { bytes.len() };
        let bytes = &mut bytes[..length];
        match random(state) % 3 {
            0 => bytes.iter_mut().for_each(|byte| *byte = random(state) as u8),
            1 => bytes[random(state) as usize % length] ^= 1 << (random(state) % 8),
            _ => (0..4).for_each(|_| bytes[random(state) as usize % length] = random(state) as u8),
        }
    }
}

#[test]
fn hostile_streams_stay_inside_their_outputs() {
    for family in &FAMILIES {
        family.gpus().iter().for_each(|device| decode_hostile_streams(family, device));
    }
}

/// Rounds of hostile streams, one of each cut; `DF11_HOSTILE_ROUNDS` for tools that run kernels a
/// hundred times slower.
fn hostile_rounds() -> usize {
    std::env::var("DF11_HOSTILE_ROUNDS").map_or(140, |rounds| rounds.parse().unwrap())
}

fn decode_hostile_streams(family: &Family, device: &Device) {
    let original = victims(family);
    let valid = original.build();
    let stream = device.context().new_stream().unwrap();
    let (mut state, mut streams, mut noticed) = (1, 0, 0);
    for round in 0..hostile_rounds() {
        let kind = round % KINDS;
        let mut draft = parse(&valid);
        let tensors = draft.directory.tensors.len();
        (0..tensors).for_each(|tensor| mutate(&mut draft, tensor, kind, &mut state));
        draft.repair_checksums();
        let options = LoadOptions::new().without_validation();
        let model = open(draft.pack()).load(device, &options).unwrap();
        // Alone, and all in one launch.
        for tensor in &original.tensors {
            let name = std::str::from_utf8(&tensor.name).unwrap();
            let rows = model.rows(name, 0..tensor.shape[0]).unwrap();
            let (result, word) = launch(device, &stream, tensor.data.len(), |output, status| {
                rows.decode_into(output, &stream, status)
            });
            // A changed index is always found; other bits or codes may be another valid stream.
            let same = result == tensor.data;
            let tile = tensor.encoding != ENCODING_GAP;
            assert!(word != 0 || same || !is_index(tile, kind), "round {round}, tensor {name}");
            streams += 1;
            noticed += usize::from(word != 0);
        }
        decode(&stream, &model.block("block").unwrap());
    }
    say(&format!("{streams} hostile streams reached the kernels, {noticed} set the status"));
    assert!(streams == hostile_rounds() * family.cuts.len() && noticed > streams / 3);
    check_model(device, &valid);
}

#[test]
fn hostile_indexes_and_damage_are_refused_by_the_host() {
    let Some(device) = gpu() else { return };
    let bytes = mixed(21);
    // The first output offset, the first tile's, the number of codes of a bit; of a plane, with the
    // checksum of before.
    for (name, array, byte) in
        [("coded", 2, 0), ("tiles", 1, 0), ("vector", 0, 2), ("coded", 4, 100)]
    {
        let mut draft = parse(&bytes);
        let index = draft.first_array(name) + array;
        draft.array(index)[byte] ^= 8;
        if array < 4 {
            draft.repair_checksums();
        }
        let problem = open(draft.pack()).load(device, &LoadOptions::new()).unwrap_err();
        assert!(matches!(problem, Error::Corrupt { .. }), "{name}: {problem:?}");
    }
    // The pinned buffers are still good.
    check_model(device, &bytes);
}

#[test]
fn loads_from_several_threads_share_the_device() {
    let Some(device) = gpu() else { return };
    // A panic of one of them is a panic of the scope.
    thread::scope(|scope| {
        for seed in 0..4 {
            scope.spawn(move || check_model(device, &mixed(100 + seed)));
        }
    });
}

/// Verifies on the GPU, from the load on.
fn verify_on(
    device: &Device,
    model: &df11::Model,
    options: &LoadOptions,
) -> df11::Result<Verification> {
    model.verify_with(Level::Full, &GpuDecoder::load(model, device, options)?, &())
}

#[test]
fn the_gpu_verifies_and_decodes_what_the_cpu_does() {
    let Some(device) = gpu() else { return };
    // More blocks than outputs, whose tensors take turns in the file; and a tensor of several
    // pieces.
    let mut items: Vec<Item> = (0..40)
        .map(|at| {
            let count = 1000 + 997 * at;
            let cut = [Cut::Gap(16, 64), Cut::Vector][at % 2];
            let item = cut.item(&format!("{at:02}"), &[count as u64], normal_weights(count, 3));
            item.in_block(&format!("block {}", at % 5))
        })
        .collect();
    let large = Item::gap("large", &[3000, 1001], normal_weights(3_003_000, 8), (32, 256));
    let raw = Item::raw("raw", Dtype::U8, &[2_100_001], vec![7; 2_100_001]);
    items.extend([large.in_block("block 2"), raw.in_file("other.safetensors")]);
    let mut samples = vec![Model::new(&items, &[("config.json", b"{}")]).build(), mixed(31)];
    samples.extend(FAMILIES.map(|family| victims(&family).build()));
    for bytes in samples {
        let model = open(bytes);
        let decoder = GpuDecoder::load(&model, device, &LoadOptions::new()).unwrap();
        let expected = model.verify(Level::Full, &()).unwrap();
        for threads in [1, 3, 16] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let found = pool.install(|| model.verify_with(Level::Full, &decoder, &())).unwrap();
            assert_eq!(found, expected, "{threads} threads");
        }
        for block in model.blocks() {
            let bytes = block.layout().unwrap().bytes as usize;
            let (mut ours, mut theirs) = (vec![1; bytes], vec![2; bytes]);
            block.decode_into(&mut ours).unwrap();
            block.decode_with(&decoder, &mut theirs).unwrap();
            assert!(ours == theirs, "{}", block.name());
        }
    }
}

#[test]
fn a_decoder_refuses_tensors_of_another_model() {
    let Some(device) = gpu() else { return };
    let (model, same) = (open(mixed(41)), open(mixed(41)));
    let decoder = GpuDecoder::load(&model, device, &LoadOptions::new()).unwrap();
    assert!(is_refused(same.verify_with(Level::Full, &decoder, &()), ""));
}

#[test]
fn damage_is_found_on_the_gpu_as_on_the_cpu() {
    let Some(device) = gpu() else { return };
    for family in &FAMILIES {
        find_damage(family, device);
    }
}

fn find_damage(family: &Family, device: &Device) {
    let original = victims(family);
    let valid = original.build();
    let (mut state, mut found) = (99, 0);
    for round in 0..20 * KINDS {
        let mut draft = parse(&valid);
        let tensor = random(&mut state) as usize % draft.directory.tensors.len();
        mutate(&mut draft, tensor, round % KINDS, &mut state);
        // Sometimes the checksum tells.
        if round % 5 != 0 {
            draft.repair_checksums();
        }
        let model = open(draft.pack());
        let expected = model.verify(Level::Full, &());
        // With what the host refuses at once, and with what reaches the kernels.
        for options in [LoadOptions::new(), LoadOptions::new().without_validation()] {
            match (&expected, verify_on(device, &model, &options)) {
                (Ok(expected), Ok(found)) => assert_eq!(&found, expected),
                (Err(Error::Corrupt { .. }), Err(Error::Corrupt { .. })) => found += 1,
                (cpu, gpu) => panic!("round {round}, tensor {tensor}: CPU {cpu:?}, GPU {gpu:?}"),
            }
        }
    }
    say(&format!("{found} damaged containers were found on the GPU"));
    assert!(found > 10 * KINDS);
    check_model(device, &valid);
}

#[test]
fn the_command_decodes_on_the_gpu_and_says_so() {
    let Some(device) = gpu() else { return };
    let built = || option_env!("CARGO_BIN_EXE_df11").map(OsString::from);
    let Some(binary) = std::env::var_os("DF11_COMMAND").or_else(built) else { return };
    let folder = tempfile::tempdir().unwrap();
    let container = df11::hazmat::demo::tiny_container(folder.path()).unwrap();
    let container = container.to_str().unwrap();
    let gpu = ["--device", "gpu", "--json"];
    for arguments in [[&["verify", container], &gpu[..]].concat(), ["demo", "--json"].into()] {
        let output = Command::new(&binary).args(&arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && error.is_empty(), "{arguments:?}: {error}");
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let found = ["kind", "ordinal", "name"].map(|key| &answer["device"][key]);
        assert_eq!(serde_json::json!(found), serde_json::json!(["gpu", 0, *device.info().name]));
    }
    let output = Command::new(&binary).args(["doctor", "--json"]).output().unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for check in ["gpu copy", "gpu upload", "gpu decode", "gpu load"] {
        let rate = &answer["checks"][check]["value"]["bytes_per_second"];
        assert!(rate.as_f64() > Some(1e6), "{check}: {answer}");
    }
}

#[test]
fn a_gpu_too_small_for_a_kernel_is_an_error_that_says_so() {
    let Some(device) = gpu() else { return };
    // Room for one warp of the kernel of 8 bytes per thread, and for no other kernel.
    let small = Device::open_with_shared_memory(device.info().ordinal, 20_000).unwrap();
    let model =
        |cut: Cut| Model::new(&[cut.item("coded", &[3000], normal_weights(3000, 1))], &[]).build();
    check_model(&small, &model(Cut::Gap(8, 128)));
    for cut in [Cut::Gap(16, 128), Cut::Gap(32, 128), Cut::Gap(64, 128), Cut::Vector] {
        let loaded = open(model(cut)).load(&small, &LoadOptions::new());
        let planned = loaded.and_then(|model| model.rows("coded", 0..3000).map(drop));
        assert!(planned.is_err_and(|error| error.to_string().contains("shared memory")), "{cut:?}");
    }
}

#[test]
fn kernels_have_the_constants_of_the_manifest() {
    macro_rules! module {
        ($name:literal, $target:literal, $constants:literal) => {
            (
                $name,
                include_str!(concat!("../kernels/ptx/", $name, ".ptx")),
                include_bytes!(concat!("../kernels/ptx/", $name, ".", $target, ".cubin")).to_vec(),
                $constants,
            )
        };
    }
    let Some((device, stream)) = gpu_stream() else { return };
    let manifest = include_str!("../kernels/ptx/manifest.json");
    let manifest: serde_json::Value = serde_json::from_str(manifest).unwrap();
    // Code for Hopper alone may have constants of its own.
    let modules = [
        module!("gap", "sm_90", "constants"),
        module!("tile", "sm_90", "constants"),
        module!("float", "sm_90", "constants"),
        module!("linear", "sm_90a", "hopper_constants"),
    ];
    for (name, ptx, machine_code, of_machine_code) in modules {
        let mut codes = vec![(Ptx::from_src(ptx), "constants")];
        if device.info().compute_capability == (9, 0) {
            codes.push((Ptx::from_binary(machine_code), of_machine_code));
        }
        for (code, constants) in codes {
            let constants =
                manifest["modules"][format!("{name}.ptx")][constants].as_array().unwrap();
            let expected: Vec<u8> = constants
                .iter()
                .flat_map(|number| (number.as_u64().unwrap() as u32).to_le_bytes())
                .collect();
            let module = device.context().load_module(code).unwrap();
            let symbol = module.get_global(&format!("df11_{name}_constants"), &stream).unwrap();
            let bytes = stream.clone_dtoh(&symbol).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(bytes, expected);
        }
    }
}
