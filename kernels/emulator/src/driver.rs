//! The functions of the driver that src/gpu/driver.rs lists, as cuda.h declares them. Everything is
//! done at once, on the calling thread.
#![allow(non_snake_case, clippy::missing_safety_doc, reason = "the driver's names and contracts")]

use std::{
    alloc::{Layout, alloc, dealloc},
    cell::Cell,
    collections::BTreeMap,
    env,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fs,
    path::Path,
    ptr, slice,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use crate::{
    machine::{self, Launch},
    map::TensorMap,
    memory, parse,
    program::{Entry, Program},
};

type Answer = c_int;
type Handle = *mut c_void;
const INVALID_VALUE: Answer = 1;
const OUT_OF_MEMORY: Answer = 2;
const NOT_FOUND: Answer = 500;
const ILLEGAL_ADDRESS: Answer = 700;

/// Bytes of the emulated GPU's memory.
const MEMORY: usize = 1 << 30;
const SHARED: c_int = 227 << 10;
const ALIGNMENT: usize = 256;

fn setting(name: &str, otherwise: u64) -> u64 {
    env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn processors() -> u32 {
    setting("EMULATOR_PROCESSORS", 4) as u32
}

macro_rules! answers {
    ($($name:ident($($argument:ident: $of:ty),*) $body:block)*) => {
        $(
            // SAFETY: the driver has these names; nothing else of the process does.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($argument: $of),*) -> Answer {
                #[allow(
                    unused_unsafe,
                    clippy::multiple_unsafe_ops_per_block,
                    reason = "short calls"
                )]
                // SAFETY: pointers are what cuda.h asks of callers: null or valid.
                unsafe { $body }
            }
        )*
    };
}

answers! {
    cuGetErrorName(_number: c_int, to: *mut *const c_char) { *to = c"EMULATED".as_ptr(); 0 }
    cuGetErrorString(_number: c_int, to: *mut *const c_char) {
        *to = c"the emulator has said why".as_ptr();
        0
    }
    cuDriverGetVersion(to: *mut c_int) { *to = 12080; 0 }
    cuInit(_flags: c_uint) { 0 }
    cuDeviceGetCount(to: *mut c_int) { *to = 1; 0 }
    cuDeviceGet(to: *mut c_int, ordinal: c_int) { *to = ordinal; 0 }
    cuDeviceGetName(to: *mut c_char, size: c_int, _device: c_int) {
        let name = c"df11 emulator".to_bytes_with_nul();
        let count = name.len().min(size as usize);
        ptr::copy_nonoverlapping(name.as_ptr().cast(), to, count);
        0
    }
    cuDeviceTotalMem_v2(to: *mut usize, _device: c_int) { *to = MEMORY; 0 }
    cuDeviceGetAttribute(to: *mut c_int, attribute: c_int, _device: c_int) {
        let capability = setting("EMULATOR_CAPABILITY", 90) as c_int;
        *to = match attribute {
            16 => processors() as c_int,
            37 => 5120,
            75 => capability / 10,
            76 => capability % 10,
            97 => SHARED,
            115 => 1,
            _ => return INVALID_VALUE,
        };
        0
    }
    cuDevicePrimaryCtxRetain(to: *mut Handle, _device: c_int) { *to = handle(); 0 }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) { 0 }
    cuCtxGetCurrent(to: *mut Handle) { *to = CURRENT.get(); 0 }
    cuCtxSetCurrent(context: Handle) { CURRENT.set(context); 0 }
    cuCtxSynchronize() { 0 }
    cuStreamCreate(to: *mut Handle, _flags: c_uint) { *to = handle(); 0 }
    cuStreamDestroy_v2(_stream: Handle) { 0 }
    cuStreamSynchronize(_stream: Handle) { 0 }
    cuStreamWaitEvent(_stream: Handle, _event: Handle, _flags: c_uint) { 0 }
    cuStreamGetCaptureInfo_v2(
        _stream: Handle, status: *mut c_int, _id: *mut u64, _graph: Handle,
        _dependencies: Handle, _count: *mut usize
    ) {
        *status = 0;
        0
    }
    cuEventCreate(to: *mut Handle, _flags: c_uint) { *to = handle(); 0 }
    cuEventElapsedTime(to: *mut f32, _start: Handle, _end: Handle) { *to = 1.0; 0 }
    cuEventDestroy_v2(_event: Handle) { 0 }
    cuEventRecord(_event: Handle, _stream: Handle) { 0 }
    cuEventSynchronize(_event: Handle) { 0 }
    cuMemGetInfo_v2(available: *mut usize, total: *mut usize) {
        (*available, *total) = (MEMORY, MEMORY);
        0
    }
    cuMemAlloc_v2(to: *mut u64, bytes: usize) { allocate(&mut *to, bytes) }
    cuMemAllocAsync(to: *mut u64, bytes: usize, _stream: Handle) { allocate(&mut *to, bytes) }
    cuMemFree_v2(memory: u64) { release(memory) }
    cuMemFreeAsync(memory: u64, _stream: Handle) { release(memory) }
    cuMemHostRegister_v2(
        host: u64, bytes: usize, _flags: c_uint
    ) {
        memory::note(host, bytes as u64);
        0
    }
    cuMemHostUnregister(host: u64) { memory::forget(host); 0 }
    cuMemHostGetDevicePointer_v2(to: *mut u64, host: u64, _flags: c_uint) { *to = host; 0 }
    cuMemcpyHtoDAsync_v2(
        to: u64, from: u64, bytes: usize, _stream: Handle
    ) {
        copy(to, from, bytes)
    }
    cuMemcpyDtoHAsync_v2(
        to: u64, from: u64, bytes: usize, _stream: Handle
    ) {
        copy(to, from, bytes)
    }
    cuMemcpyDtoDAsync_v2(
        to: u64, from: u64, bytes: usize, _stream: Handle
    ) {
        copy(to, from, bytes)
    }
    cuMemcpyAsync(to: u64, from: u64, bytes: usize, _stream: Handle) { copy(to, from, bytes) }
    cuMemcpy2DAsync_v2(rows: *const Rows, _stream: Handle) {
        let rows = &*rows;
        for row in 0..rows.height as u64 {
            let (to, from) = (rows.to + row * rows.to_pitch, rows.from + row * rows.from_pitch);
            copy(to, from, rows.width);
        }
        0
    }
    cuMemsetD8Async(to: u64, value: u8, bytes: usize, _stream: Handle) {
        ptr::write_bytes(to as *mut u8, value, bytes);
        0
    }
    cuModuleLoadData(to: *mut Handle, image: *const u8) {
        let text = source_of(image);
        let program = Arc::new(Program::new(&parse::parse(&text)));
        *to = Box::into_raw(Box::new(program)).cast();
        0
    }
    cuModuleUnload(_module: Handle) { 0 }
    cuModuleGetFunction(to: *mut Handle, module: Handle, name: *const c_char) {
        let program = &*module.cast::<Arc<Program>>();
        let name = CStr::from_ptr(name).to_string_lossy().into_owned();
        let Some(entry) = program.entries.get(&name) else { return NOT_FOUND };
        let function = Function { program: Arc::clone(program), entry: Arc::clone(entry), name };
        *to = Box::into_raw(Box::new(function)).cast();
        0
    }
    cuModuleGetGlobal_v2(to: *mut u64, bytes: *mut usize, module: Handle, name: *const c_char) {
        let program = &*module.cast::<Arc<Program>>();
        let name = CStr::from_ptr(name).to_string_lossy();
        let Some(constant) = program.constants.get(name.as_ref()) else { return NOT_FOUND };
        *to = constant.as_ptr() as u64;
        *bytes = constant.len();
        0
    }
    cuFuncGetAttribute(to: *mut c_int, attribute: c_int, function: Handle) {
        let function = &*function.cast::<Function>();
        *to = if attribute == 1 { function.entry.static_shared as c_int } else { 0 };
        0
    }
    cuFuncSetAttribute(_function: Handle, _attribute: c_int, _value: c_int) { 0 }
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        to: *mut c_int, function: Handle, threads: c_int, shared: usize, _flags: c_uint
    ) {
        let function = &*function.cast::<Function>();
        let by_memory = (SHARED + 1024) / (shared + function.entry.static_shared + 1024) as c_int;
        *to = by_memory.min(2048 / threads.max(1)).max(0);
        0
    }
    cuTensorMapEncodeTiled(
        map: *mut u8, of: c_uint, rank: c_uint, address: u64, sizes: *const u64,
        pitches: *const u64, boxes: *const u32, _every: *const u32, _interleave: c_uint,
        swizzle: c_uint, _promotion: c_uint, _fill: c_uint
    ) {
        const BF16: c_uint = 9;
        const SWIZZLE_128: c_uint = 3;
        if of != BF16 || swizzle != SWIZZLE_128 || !(2..=3).contains(&rank) {
            return INVALID_VALUE;
        }
        let rank = rank as usize;
        let mut made = TensorMap { address, dimensions: rank as u32, ..TensorMap::default() };
        made.sizes[..rank].copy_from_slice(slice::from_raw_parts(sizes, rank));
        made.pitches[..rank - 1].copy_from_slice(slice::from_raw_parts(pitches, rank - 1));
        made.boxes[..rank].copy_from_slice(slice::from_raw_parts(boxes, rank));
        made.write(slice::from_raw_parts_mut(map, TensorMap::BYTES));
        0
    }
    cuLaunchKernel(
        function: Handle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint, _stream: Handle, parameters: *const *const u8, _extra: Handle
    ) {
        if gy * gz * by * bz != 1 {
            return INVALID_VALUE;
        }
        launch(&*function.cast(), gx, bx, shared, 1, parameters)
    }
    cuLaunchKernelEx(
        config: *const Config, function: Handle, parameters: *const *const u8, _extra: Handle
    ) {
        const CLUSTER: c_int = 4;
        let config = &*config;
        let attributes = slice::from_raw_parts(config.attributes, config.count as usize);
        let cluster = attributes.iter().find(|one| one.id == CLUSTER).map_or(1, |one| one.value[0]);
        let [blocks, _, _] = config.grid;
        let cluster = cluster as u32;
        launch(&*function.cast(), blocks, config.block[0], config.shared, cluster, parameters)
    }
}

/// As cuda.h has it.
#[repr(C)]
pub(crate) struct Rows {
    from_x: usize,
    from_y: usize,
    from_type: c_int,
    from_host: u64,
    from: u64,
    from_array: u64,
    from_pitch: u64,
    to_x: usize,
    to_y: usize,
    to_type: c_int,
    to_host: u64,
    to: u64,
    to_array: u64,
    to_pitch: u64,
    width: usize,
    height: usize,
}

/// As cuda.h has it.
#[repr(C)]
pub(crate) struct Attribute {
    id: c_int,
    pad: c_int,
    value: [c_int; 16],
}

/// As cuda.h has it.
#[repr(C)]
pub(crate) struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
    attributes: *const Attribute,
    count: c_uint,
}

struct Function {
    program: Arc<Program>,
    entry: Arc<Entry>,
    name: String,
}

thread_local! {
    static CURRENT: Cell<Handle> = const { Cell::new(ptr::null_mut()) };
}

/// A handle that nobody looks into.
fn handle() -> Handle {
    ptr::dangling_mut::<u64>().cast()
}

// ---- memory

static LAYOUTS: Mutex<BTreeMap<u64, Layout>> = Mutex::new(BTreeMap::new());

fn allocate(to: &mut u64, bytes: usize) -> Answer {
    let Ok(layout) = Layout::from_size_align(bytes.max(1), ALIGNMENT) else { return OUT_OF_MEMORY };
    if bytes > MEMORY {
        return OUT_OF_MEMORY;
    }
    // SAFETY: the layout has bytes.
    let memory = unsafe { alloc(layout) } as u64;
    LAYOUTS.lock().unwrap_or_else(PoisonError::into_inner).insert(memory, layout);
    memory::note(memory, bytes as u64);
    *to = memory;
    0
}

fn release(memory: u64) -> Answer {
    let layout = LAYOUTS.lock().unwrap_or_else(PoisonError::into_inner).remove(&memory);
    let Some(layout) = layout else { return INVALID_VALUE };
    memory::forget(memory);
    // SAFETY: it was allocated so, and is in no list any more.
    unsafe { dealloc(memory as *mut u8, layout) };
    0
}

fn copy(to: u64, from: u64, bytes: usize) -> Answer {
    // SAFETY: callers promise both, as to the driver.
    unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
    0
}

// ---- kernels

/// PTX of a module: the image itself, or, of machine code, the file with its source.
///
/// # Safety
/// The image is one that the driver takes.
unsafe fn source_of(image: *const u8) -> String {
    // SAFETY: an image of either kind has four bytes.
    let head = unsafe { slice::from_raw_parts(image, 4) };
    if head != b"\x7fELF" {
        // SAFETY: PTX ends with a zero.
        return unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy().into_owned();
    }
    let name = name_of(image);
    let folder = env::var("EMULATOR_PTX").expect("EMULATOR_PTX names the folder of PTX");
    let file = Path::new(&folder).join(format!("{name}.ptx"));
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// The module whose machine code this is, by the constants that it has.
fn name_of(image: *const u8) -> &'static str {
    // SAFETY: an ELF file of 64 bits has a header of 64 bytes, which tells where its table of
    // sections is (offset 40), how large an entry is (58) and how many there are (60); the table is
    // the last thing in files of ptxas.
    let head = unsafe { slice::from_raw_parts(image, 64) };
    let short = |at: usize| usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
    let table = u64::from_le_bytes(head[40..48].try_into().expect("eight bytes")) as usize;
    // SAFETY: as above.
    let all = unsafe { slice::from_raw_parts(image, table + short(58) * short(60)) };
    let has = |name: &str| all.windows(name.len()).any(|window| window == name.as_bytes());
    let names = ["linear", "gap", "tile", "float"];
    let found = names.into_iter().find(|name| has(&format!("df11_{name}_constants")));
    found.expect("a module of df11")
}

/// # Safety
/// Parameters are as many as the kernel has, each of its size.
unsafe fn launch(
    function: &Function,
    blocks: u32,
    threads: u32,
    shared: u32,
    cluster: u32,
    parameters: *const *const u8,
) -> Answer {
    static LAUNCHES: AtomicU64 = AtomicU64::new(1);
    static SEED: OnceLock<u64> = OnceLock::new();
    let entry = &function.entry;
    let cluster = entry.cluster.unwrap_or(cluster);
    if blocks == 0 || threads == 0 || !blocks.is_multiple_of(cluster) {
        return INVALID_VALUE;
    }
    let mut given = vec![0; entry.parameter_bytes];
    for (at, &(place, bytes)) in entry.parameters.iter().enumerate() {
        // SAFETY: the caller's promise.
        let from = unsafe { parameters.add(at) };
        // SAFETY: as above.
        let from = unsafe { from.read() };
        // SAFETY: as above.
        let from = unsafe { slice::from_raw_parts(from, bytes) };
        given[place..place + bytes].copy_from_slice(from);
    }
    let seed = SEED.get_or_init(|| setting("EMULATOR_SEED", 1));
    let number = LAUNCHES.fetch_add(1, Ordering::Relaxed);
    let launch = Launch {
        program: Arc::clone(&function.program),
        entry: Arc::clone(entry),
        name: function.name.clone(),
        parameters: given,
        blocks,
        threads,
        cluster,
        dynamic_shared: shared,
        resident: processors(),
        seed: (seed << 32 | number).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
    };
    let begin = Instant::now();
    match machine::run(&launch) {
        Ok(instructions) => {
            if env::var_os("EMULATOR_LOG").is_some() {
                let Launch { name, blocks, threads, .. } = &launch;
                let seconds = begin.elapsed().as_secs_f32();
                eprintln!("emulator: {name}, {blocks} x {threads}: {instructions}, {seconds:.3} s");
            }
            0
        }
        Err(machine::Fault(problem)) => {
            eprintln!("emulator: {problem}");
            ILLEGAL_ADDRESS
        }
    }
}
