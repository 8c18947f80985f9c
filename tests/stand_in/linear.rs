//! Matrices of products: cut, prepared, and asked for the impossible. `tests/gpu/linear.rs` tests
//! the kernels' results.
#![expect(unsafe_code, reason = "products, at addresses that the stand-in never reads")]

use std::sync::Arc;

use df11::{
    Dtype, Error, Result,
    gpu::{
        CutArrays, Device, GpuModel, GroupedLinear, Indices, Linear, LinearInput, LinearOutput,
        LoadOptions, Matrix, Plan, Residence, Routing, Status, Transcoded,
        cudarc::driver::{CudaContext, CudaStream, DevicePtr as _},
    },
    hazmat::{
        Tiles,
        gpu::{FastPacker, TableAddresses, TileAddresses},
        tile::FloatSplit,
    },
};

use crate::{
    container::{Item, Model, normal_weights},
    refused,
    stand_in::{CONSTANTS, compile, devices, functions, run_child, setting},
};

fn sample() -> df11::Model {
    let weights = |count: usize| normal_weights(count, 4);
    let a = Item::matrix("a", [100, 520], 100);
    let items = [
        Item::matrix("b", [3100, 520], 3100),
        Item::matrix("narrow", [64, 256], 64),
        Item::matrix("wide", [40, 4096], 40),
        a.alias("tied"),
        a,
        Item::tile("stack", &[3, 32, 520], weights(49_920), (256, 520)),
        Item::tile("folded", &[64, 520], weights(33_280), (256, 1040)),
        Item::tile("vector", &[96, 520], weights(49_920), (8192, 49_920)),
        Item::gap("gap", &[96, 520], weights(49_920), (32, 128)),
        Item::raw("raw", Dtype::BF16, &[4, 8], vec![0; 64]),
        Item::raw("floats", Dtype::F32, &[4, 4], vec![0; 64]),
    ];
    Model::new(&items, &[]).open()
}

fn load(device: &Device) -> GpuModel {
    sample().load(device, &LoadOptions::new()).unwrap()
}

fn fast(matrix: &Matrix) -> Matrix {
    match matrix.to_fast(matrix.good_exceptions()).unwrap() {
        Transcoded::Fast(fast) => fast,
        other => panic!("the stand-in counts no exceptions: {other:?}"),
    }
}

fn size(matrix: &Matrix) -> (u64, u64) {
    (matrix.row_count(), matrix.column_count())
}

/// The stream of launches. The stand-in runs no kernels, so nothing is read or written at any
/// address, which is the proof of all calls here.
struct Stream {
    stream: Arc<CudaStream>,
    status: Status,
}

impl Stream {
    fn new(device: &Device) -> Self {
        let stream = device.context().new_stream().unwrap();
        Self { stream, status: Status::new(device).unwrap() }
    }

    fn multiply(&self, by: &Linear, x: LinearInput, y: &[LinearOutput], at: u64) -> Result<()> {
        // SAFETY: nothing is read or written.
        unsafe { by.multiply(x, y, at, &self.stream, &self.status) }
    }

    fn route(
        &self,
        by: &GroupedLinear,
        x: LinearInput,
        of: Routing,
        y: LinearOutput,
    ) -> Result<()> {
        // SAFETY: nothing is read or written.
        unsafe { by.multiply(x, of, y, &self.stream, &self.status) }
    }

    fn gather(&self, of: &Matrix, indices: Indices, count: u64, to: (u64, u64)) -> Result<()> {
        // SAFETY: nothing is read or written.
        unsafe { of.gather(indices, count, to, &self.stream, &self.status) }
    }

    fn decode(&self, matrix: &Matrix, place: u64) -> Result<()> {
        // SAFETY: nothing is read or written.
        unsafe { matrix.decode_into_raw(place, &self.stream, &self.status) }
    }

    fn decode_all(&self, all: &[(&Matrix, u64)]) -> Result<()> {
        // SAFETY: nothing is read or written.
        unsafe { Matrix::decode_all_into_raw(all, &self.stream, &self.status) }
    }
}

/// Possible addresses of a matrix's arrays.
const AT: TileAddresses = TileAddresses {
    records: 256,
    bitstream: 512,
    bitstream_bytes: 4096,
    plane: 8192,
    table: 16_384,
    staged_bytes: 2704,
};

fn of_tiles(device: &Device, shape: (u64, u64), at: TileAddresses) -> Result<Matrix> {
    // SAFETY: nothing is read or written.
    unsafe { Matrix::of_tiles(device, shape, FloatSplit::BF16, at) }
}

fn of_fast(device: &Device, shape: (u64, u64), strips: u64, entries: (u64, u64)) -> Result<Matrix> {
    // SAFETY: nothing is read or written.
    unsafe { Matrix::of_fast(device, shape, strips, entries) }
}

/// Each is refused with these words.
fn all_refused<T>(rows: impl IntoIterator<Item = (Result<T>, &'static str)>) {
    for (at, (result, part)) in rows.into_iter().enumerate() {
        let said = refused(result);
        assert!(said.contains(part), "row {at}, {part:?} in {said}");
    }
}

#[test]
fn matrices_know_their_sizes() {
    let Some([device]) = devices() else { return };
    let model = load(&device);
    for (name, rows, columns) in
        [("a", 100, 520), ("tied", 100, 520), ("stack", 96, 520), ("wide", 40, 4096)]
    {
        let matrix = model.matrix(name).unwrap();
        assert_eq!((matrix.name(), size(&matrix)), (name, (rows, columns)));
        assert_eq!((matrix.residence(), matrix.exceptions()), (Residence::Stored, None));
        assert_eq!(matrix.decoded_bytes(), 2 * rows * columns);
        // Ten or eleven bits per weight, and a decode table.
        let arrays = (matrix.device_bytes() - 16_384) * 8;
        assert!((10 * rows * columns..12 * rows * columns).contains(&arrays), "{name}: {arrays}");
        let (strips, steps) = (rows.div_ceil(32), columns.div_ceil(32));
        let fast = fast(&matrix);
        assert_eq!(size(&fast), (rows, columns));
        assert_eq!((fast.residence(), fast.exceptions()), (Residence::Fast, Some(0)));
        assert_eq!(fast.device_bytes(), strips * (steps * 1536 + steps.div_ceil(8) * 88));
        assert_eq!(matrix.to_fast_or_stored().unwrap().residence(), Residence::Fast);
    }
}

#[test]
fn other_tensors_are_no_matrices() {
    let Some([device]) = devices() else { return };
    let model = load(&device);
    for (name, remedy) in [
        ("folded", "GpuModel::program"),
        ("vector", "GpuModel::program"),
        ("gap", "convert the container to the tile layout"),
        ("raw", "convert the container to the tile layout"),
        ("floats", "GpuModel::program"),
        ("absent", "name one that the model has"),
    ] {
        let said = refused(model.matrix(name));
        assert!(said.contains(name) && said.contains(remedy), "{said}");
    }
    let plan = Plan::all_streamed(&sample()).unwrap();
    let streamed = sample().load(&device, &LoadOptions::new().plan(plan)).unwrap();
    assert!(refused(streamed.matrix("a")).contains("load its block resident"));
}

#[test]
fn slices_are_matrices_of_their_own() {
    let Some([device]) = devices() else { return };
    let model = load(&device);
    let whole = model.matrix("a").unwrap();
    let low = whole.rows(32..100).unwrap();
    assert_eq!(size(&low), (68, 520));
    assert_eq!(size(&low.rows(32..64).unwrap().columns(256..520).unwrap()), (32, 264));
    assert_eq!(size(&whole.columns(0..256).unwrap()), (100, 256));
    // The model may go: slices keep it.
    drop(model);
    let part = fast(&whole.columns(256..520).unwrap());
    assert_eq!((size(&part), size(&part.rows(64..100).unwrap())), ((100, 264), (36, 264)));
    assert_eq!(size(&part.rows(64..100).unwrap().columns(0..256).unwrap()), (36, 256));
    // In either order, and of slices.
    let fast = fast(&whole);
    let inner = fast.columns(256..520).unwrap().columns(256..264).unwrap();
    assert_eq!((size(&inner), inner.device_bytes()), ((100, 8), fast.device_bytes()));
    all_refused([
        (whole.rows(0..33), "multiples of 32"),
        (whole.rows(1..32), "multiples of 32"),
        (whole.rows(32..32), "multiples of 32"),
        (whole.rows(96..101), "multiples of 32"),
        (low.rows(32..99), "32..99 of 68 rows of \"a\""),
        (whole.columns(0..264), "multiples of 256"),
        (part.columns(8..256), "8..256 of 264 columns of \"a\""),
        (part.rows(0..10), "multiples of 32"),
    ]);
}

#[test]
fn products_are_prepared_and_checked() {
    let Some([device, second]) = devices() else { return };
    let (model, stream) = (load(&device), Stream::new(&device));
    let stored = model.matrix("a").unwrap();
    let [a, b, narrow, wide] =
        ["a", "b", "narrow", "wide"].map(|name| fast(&model.matrix(name).unwrap()));
    let other = fast(&load(&second).matrix("a").unwrap());
    all_refused([
        (Linear::new(&[]), "name one matrix or more"),
        (Linear::new(&[a.clone(), narrow]), "520 columns and \"narrow\" 256"),
        (Linear::new(&[a.clone(), other]), "different GPUs"),
    ]);
    // Matrices as stored too, and mixed with fast ones.
    let mixed = Linear::new(&[stored.clone(), b.clone(), model.matrix("b").unwrap()]).unwrap();
    assert_eq!(mixed.matrices().len(), 3);

    // 40 rows keep a GPU busy only in slices of columns, whose sums need a workspace.
    let linear = Linear::new(&[wide]).unwrap();
    assert_eq!(linear.workspace_bytes(1), 4352 + 4 * 8 * 2048);
    // Without kernels for more rows, these are several launches.
    assert_eq!(linear.workspace_bytes(100), linear.workspace_bytes(16));
    let linear = Linear::new(&[a.clone(), b]).unwrap();
    assert_eq!(linear.matrices().len(), 2);

    let x = LinearInput::new;
    let outputs = [LinearOutput::new(4096, 3200).bias(8192), LinearOutput::new(4296, 3200)];
    let tight = [outputs[0], LinearOutput::new(4296, 3099)];
    let multiply =
        |x, outputs: &[LinearOutput], workspace| stream.multiply(&linear, x, outputs, workspace);
    for rows in 0..=200 {
        multiply(x(2, rows, 520), &outputs, 0).unwrap();
    }
    multiply(x(2, 1, 0), &tight, 0).unwrap();
    let gather = |matrix, indices, count, place| stream.gather(matrix, indices, count, place);
    for (matrix, count, pitch) in [(&a, 100, 520), (&a, 0, 520), (&a, 1, 0), (&stored, 1, 520)] {
        gather(matrix, Indices::U32(4), count, (2, pitch)).unwrap();
    }
    all_refused([
        (multiply(x(2, 2, 519), &outputs, 0), "overlap"),
        (multiply(x(2, 2, 520), &outputs[..1], 0), "1 outputs for 2"),
        (multiply(x(2, 2, 520), &tight, 0), "overlap"),
        (multiply(x(3, 1, 520), &outputs, 0), "misaligned"),
        (multiply(x(2, 1, 520), &outputs, 8), "misaligned"),
        (stream.decode(&a, 8), "not a multiple of 16"),
        (gather(&a, Indices::I64(4), 1, (2, 520)), "misaligned"),
        (gather(&a, Indices::U32(4), 1, (1, 520)), "misaligned"),
        (gather(&a, Indices::U32(4), 2, (2, 519)), "overlap"),
        (gather(&a, Indices::U32(4), 1 << 40, (2, 520)), "fewer rows"),
    ]);
    let foreign = CudaContext::new(1).unwrap().new_stream().unwrap();
    // All GPUs of the stand-in have one context.
    let foreign = Stream { stream: foreign, ..stream };
    foreign.multiply(&linear, x(2, 1, 520), &outputs, 0).unwrap();
}

#[test]
fn experts_are_prepared_and_checked() {
    let Some([device, second]) = devices() else { return };
    let (model, stream) = (load(&device), Stream::new(&device));
    let [stack, a, narrow] =
        ["stack", "a", "narrow"].map(|name| fast(&model.matrix(name).unwrap()));
    let other = fast(&load(&second).matrix("stack").unwrap());
    let experts = stack.split_rows(3).unwrap();
    assert!(experts.iter().all(|expert| size(expert) == (32, 520)));
    all_refused([
        (stack.split_rows(5), "96 rows of \"stack\" are not 5 parts"),
        (stack.split_rows(0), "0 parts"),
        (stack.split_rows(2), "multiples of 32"),
    ]);
    // Slices as stored keep the matrix that they are cut from; nobody multiplies by these yet.
    let stored = model.matrix("stack").unwrap().split_rows(3).unwrap();
    all_refused([
        (GroupedLinear::new(&stored), "Matrix::to_fast"),
        (GroupedLinear::new(&[]), "name 1 to 1024"),
        (GroupedLinear::new(&vec![a.clone(); 1025]), "1025 experts"),
        (GroupedLinear::new(&[a.clone(), narrow]), "520 columns"),
        (GroupedLinear::new(&[stack.clone(), a]), "96 rows and \"a\" 100"),
        (GroupedLinear::new(&[stack, other]), "different GPUs"),
    ]);

    let linear = GroupedLinear::new(&experts).unwrap();
    assert_eq!((linear.experts(), linear.device().info().ordinal), (3, 0));
    let multiply = |x, routing, y| stream.route(&linear, x, routing, y);
    let (x, y) = (LinearInput::new(2, 4, 520), LinearOutput::new(2, 32));
    let (routing, none) = (Routing::new(4, 8).rows(4), LinearInput::new(2, 0, 520));
    for (x, routing) in [
        (x, routing),
        (x, Routing::new(4, 4)),
        (none, Routing::new(4, 0)),
        (x, Routing::new(4, 1 << 31).rows(4)),
        (x, Routing::slots(4, 32, 8).factors(4)),
        (x, Routing::slots(4, 30, 8).in_blocks(16, 4, 80, 4)),
        (none, Routing::slots(4, 0, 8)),
    ] {
        multiply(x, routing, y).unwrap();
    }
    all_refused([
        (multiply(x, Routing::new(4, 5), y), "Routing::rows"),
        (multiply(none, routing, y), "Routing::rows"),
        (multiply(LinearInput::new(2, 4, 519), routing, y), "overlap"),
        (multiply(x, routing, LinearOutput::new(2, 31)), "overlap"),
        (multiply(LinearInput::new(1, 4, 520), routing, y), "misaligned"),
        (multiply(x, routing, LinearOutput::new(3, 32)), "misaligned"),
        (multiply(x, Routing::new(2, 8).rows(4), y), "misaligned"),
        (multiply(x, Routing::new(4, 8).rows(2), y), "misaligned"),
        (multiply(x, routing.factors(2), y), "misaligned"),
        (multiply(x, Routing::slots(2, 4, 1), y), "misaligned"),
        (multiply(x, Routing::slots(4, 4, 1).in_blocks(16, 4, 48, 2), y), "misaligned"),
        (multiply(x, Routing::slots(4, 33, 8), y), "every `share` slots"),
        (multiply(x, Routing::slots(4, 4, 0), y), "every `share` slots"),
        (multiply(x, Routing::slots(4, 4, 1 << 32), y), "every `share` slots"),
        (multiply(x, Routing::slots(4, 4, 1).rows(4), y), "Routing::in_blocks"),
        (multiply(x, Routing::slots(4, 4, 1).in_blocks(16, 0, 48, 4), y), "Routing::in_blocks"),
        (multiply(x, Routing::slots(4, 4, 1).in_blocks(16, 0, 48, 0), y), "Routing::in_blocks"),
        (multiply(x, Routing::slots(4, 4, 1).in_blocks(24, 4, 48, 4), y), "block_places says"),
        (
            multiply(x, Routing::slots(4, 4, 1).in_blocks(16, 4, 48, 4).rows(4), y),
            "Routing::in_blocks",
        ),
        (multiply(x, Routing::slots(4, 4, 1).in_blocks(16, 4, 1 << 32, 4), y), "multiply fewer"),
        (multiply(x, Routing::new(4, 4).in_blocks(16, 4, 48, 4), y), "every `share` slots"),
        (multiply(x, Routing::slots(4, 1 << 31, 1 << 31), y), "multiply fewer"),
        (multiply(x, routing, y.bias(64)), "add it to y"),
        (multiply(x, Routing::new(4, 1 << 33).rows(4), y), "multiply fewer"),
    ]);
}

#[test]
fn matrices_in_memory_of_the_caller_are_checked() {
    let Some([device, second]) = devices() else { return };
    let stream = Stream::new(&device);
    for shape in [(0, 256), (256, 0), (64, 260), (1 << 32, 256), (64, 1 << 32)] {
        let both = [of_tiles(&device, shape, AT), of_fast(&device, shape, 256, (512, 0))];
        all_refused(both.map(|matrix| (matrix, "multiple of 8")));
    }
    let misaligned = [
        TileAddresses { records: 8, ..AT },
        TileAddresses { bitstream: 8, ..AT },
        TileAddresses { bitstream_bytes: 4088, ..AT },
        TileAddresses { plane: 8, ..AT },
        TileAddresses { table: 8, ..AT },
    ];
    all_refused(misaligned.map(|at| (of_tiles(&device, (64, 512), at), "misaligned")));
    all_refused([
        (of_fast(&device, (64, 512), 8, (512, 0)), "misaligned"),
        (of_fast(&device, (1 << 20, 4096), 256, (512, 0)), "fewer rows"),
    ]);

    let stored = of_tiles(&device, (100, 520), AT).unwrap();
    let bytes = 32 * 13 + 4096 + 52_000 + 16_384;
    assert_eq!((size(&stored), stored.residence()), ((100, 520), Residence::Stored));
    assert_eq!(stored.device_bytes(), bytes);
    let packed = of_fast(&device, (96, 520), 256, (65_536, 7)).unwrap();
    assert_eq!((packed.residence(), packed.exceptions()), (Residence::Fast, Some(7)));
    assert_eq!(packed.device_bytes(), Matrix::fast_bytes(96, 520) + 28);
    for matrix in [&stored, &packed] {
        let Stream { stream, status } = &stream;
        // SAFETY: nothing is read or written.
        let decode = |slice, to| unsafe { matrix.decode_slice_into_raw(slice, to, stream, status) };
        decode((5..7, 3..4), 256).unwrap();
        all_refused([
            (decode((0..1, 0..520), 8), "256 bytes"),
            (decode((0..101, 0..520), 256), "0..101"),
            (decode((0..1, 520..521), 256), "520..521"),
        ]);
    }
    stream.decode_all(&[]).unwrap();
    stream.decode_all(&[(&stored, 256), (&packed, 512), (&stored, 1024)].repeat(9)).unwrap();
    let other = of_tiles(&second, (100, 520), AT).unwrap();
    all_refused([
        (stream.decode_all(&[(&stored, 8)]), "256 bytes"),
        (stream.decode_all(&[(&stored, 256), (&other, 256)]), "different GPUs"),
    ]);
    all_refused([
        (GroupedLinear::of_parts(&stored, 1), "in the fast layout"),
        (GroupedLinear::of_parts(&packed, 0), "are not 0 experts"),
        (GroupedLinear::of_parts(&packed, 5), "96 rows are not 5 experts"),
        (GroupedLinear::of_parts(&packed, 2), "multiples of 32"),
        (GroupedLinear::of_parts(&packed, 1025), "1 to 1024"),
    ]);
    assert_eq!(GroupedLinear::of_parts(&packed, 3).unwrap().experts(), 3);
}

#[test]
fn packers_take_strips_in_order() {
    let Some([device]) = devices() else { return };
    let stream = device.context().new_stream().unwrap();
    // SAFETY: nothing is read or written.
    let make = |shape, strips| unsafe { FastPacker::new(&device, shape, strips, &stream) };
    all_refused([
        (make((0, 520), 256), "fewer rows"),
        (make((100, 520), 8), ""),
        (make((1 << 16, 1 << 16), 256), ""),
    ]);
    let packer = make((100, 520), 256).unwrap();
    assert_eq!(packer.exceptions(&stream).unwrap(), Some(0));
    // SAFETY: as above.
    let pack = |rows| unsafe { packer.pack(rows, 256, &stream) };
    pack(0..64).unwrap();
    pack(64..100).unwrap();
    all_refused([0..33, 1..32, 32..32, 96..101].map(|rows| (pack(rows), "multiples of 32")));
    // SAFETY: as above.
    assert!(refused(unsafe { packer.take(1 << 40, 256, &stream) }).contains("exceptions"));
}

#[test]
fn tables_and_arrays_come_to_the_caller() {
    let Some([device]) = devices() else { return };
    let stream = device.context().new_stream().unwrap();
    let table = TableAddresses { codebook: 2, codebook_bytes: 30, table: 16 };
    // SAFETY: nothing is read or written.
    let build =
        |tables: &[TableAddresses]| unsafe { device.build_tables(FloatSplit::BF16, tables) };
    build(&[]).unwrap();
    build(&[table, table]).unwrap();
    let misaligned =
        [TableAddresses { codebook: 1, ..table }, TableAddresses { table: 8, ..table }];
    all_refused(misaligned.map(|table| (build(&[table]), "misaligned")));

    let model = sample();
    // The stand-in copies indeed: here is room for any of the arrays.
    let memory = stream.alloc_zeros::<u8>(1 << 20).unwrap();
    let (to, _) = memory.device_ptr(&stream);
    let upload = |names: &[&str]| {
        let wanted = |&name| {
            let tensor = model.tensor(name).ok();
            let tiles = tensor.as_ref().and_then(|tensor| Tiles::of(tensor).unwrap());
            let shape = |tiles: Tiles<'_>| (tiles.shape(), tiles.array_lengths());
            let ((rows, columns), lengths) = tiles.map_or(((1, 1), [0; 4]), shape);
            let to = lengths.map(|length| (to, length));
            CutArrays { name, rows: 0..rows, columns: 0..columns, to }
        };
        let wanted: Vec<_> = names.iter().map(wanted).collect();
        // SAFETY: each array has its memory.
        unsafe { model.upload_arrays(&device, &wanted, &()) }
    };
    upload(&["a", "tied", "stack"]).unwrap();
    let others = ["vector", "gap", "raw", "floats", "folded"];
    all_refused(others.map(|name| (upload(&["a", name]), "Tiles::of")));
    assert!(refused(upload(&["a", "absent"])).contains("no tensor"));
}

/// No product and no decoding takes device memory of its own: a transposed product needs only the
/// caller's temporary, as large as the largest matrix. And nothing waits.
#[test]
fn calls_allocate_nothing_and_wait_for_nothing() {
    const WAITS: [&str; 3] = ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"];
    let Some([device]) = devices() else { return };
    let (model, on) = (load(&device), Stream::new(&device));
    let stored = ["a", "b", "stack"].map(|name| model.matrix(name).unwrap());
    let fast = stored.each_ref().map(fast);
    let matrices = [&stored[..], &fast].concat();
    let linear = Linear::new(&matrices).unwrap();
    let experts = GroupedLinear::new(&fast[2].split_rows(3).unwrap()).unwrap();
    let borrowed = of_tiles(&device, (100, 520), AT).unwrap();
    let packed = of_fast(&device, (96, 520), 256, (65_536, 7)).unwrap();
    let largest = matrices.iter().map(Matrix::decoded_bytes).max().unwrap();
    let temporary = on.stream.alloc_zeros::<u8>(largest as usize).unwrap();
    let (place, _) = temporary.device_ptr(&on.stream);
    for function in WAITS.iter().chain(&["cuMemAlloc_v2", "cuMemAllocAsync"]) {
        // SAFETY: this process runs this test alone, and no other thread of it asks for its
        // environment.
        unsafe { std::env::set_var(format!("DRIVER_{function}"), "2") };
    }
    assert!(on.stream.alloc_zeros::<u8>(1).is_err() && on.stream.synchronize().is_err());
    for matrix in &matrices {
        on.decode(matrix, place).unwrap();
    }
    // Nor does whoever holds the arrays, and makes everything anew for each call.
    let parts = [borrowed.rows(32..64).unwrap(), packed.rows(32..64).unwrap()];
    on.decode_all(&parts.each_ref().map(|part| (part, place))).unwrap();
    let y = [LinearOutput::new(4096, 3200); 6];
    let x = |rows| LinearInput::new(2, rows, 520);
    on.multiply(&Linear::new(&parts).unwrap(), x(3), &y[..2], 0).unwrap();
    let grouped = GroupedLinear::of_parts(&packed, 3).unwrap();
    on.route(&grouped, x(3), Routing::new(4, 3), y[0]).unwrap();
    on.multiply(&linear, x(100), &y, 0).unwrap();
    on.route(&experts, x(100), Routing::new(4, 100), y[0]).unwrap();
    on.gather(&fast[0], Indices::U32(4), 100, (2, 520)).unwrap();
    on.gather(&stored[0], Indices::U32(4), 100, (2, 520)).unwrap();
    for function in WAITS {
        // SAFETY: as above.
        unsafe { std::env::remove_var(format!("DRIVER_{function}")) };
    }
}

/// From how many rows of x on decoding is faster depends on the GPU and on the residence.
#[test]
fn crossovers_are_those_of_the_gpu() {
    if let Some(expected) = setting("expected") {
        let model = load(&Device::open(0).unwrap());
        let stored = model.matrix("a").unwrap();
        let crossover = |matrices: &[Matrix]| Linear::new(matrices).unwrap().crossover_rows();
        let [of_stored, of_fast] =
            [stored.clone(), fast(&stored)].map(|matrix| crossover(&[matrix]));
        assert_eq!(format!("{of_stored} {of_fast}"), expected);
        assert_eq!(crossover(&[fast(&stored), stored]), of_stored.min(of_fast));
        return;
    }
    let Some(folder) = compile() else { return };
    for (capability, bus_width, expected) in [
        ("90", "5120", "65 8193"),
        ("90", "6016", "65 3073"),
        ("90", "4096", "49 49"),
        ("80", "5120", "49 49"),
    ] {
        let gpu = [("capability", capability), ("bus_width", bus_width), ("expected", expected)];
        run_child(&folder, &gpu);
    }
}

/// More rows with matrices as stored are one launch too, if there are kernels for them. Their sums
/// need a workspace.
#[test]
fn more_rows_by_matrices_as_stored_need_a_workspace() {
    if setting("child").is_some() {
        let device = Device::open(0).unwrap();
        let linear = Linear::new(&[load(&device).matrix("wide").unwrap()]).unwrap();
        // Slices of the two strips' columns.
        let few = 4352 + 4 * 8 * 2048;
        assert_eq!([1, 16].map(|rows| linear.workspace_bytes(rows)), [few; 2]);
        // The parts of eight items of one group of strips, and one more place.
        let [some, most] = [32, 64].map(|rows| 4352 + 9 * 256 * rows * 4);
        let sizes = [17, 32, 33, 64, 200].map(|rows| linear.workspace_bytes(rows));
        assert_eq!(sizes, [some, some, most, most, most]);
        let (stream, y) = (Stream::new(&device), [LinearOutput::new(4096, 40)]);
        for rows in 0..=200 {
            stream.multiply(&linear, LinearInput::new(16, rows, 4096), &y, 256).unwrap();
        }
        return;
    }
    let Some(folder) = compile() else { return };
    let (name, constants) = CONSTANTS;
    run_child(&folder, &[(name, &constants.replace(",0,17408,", ",768,17408,"))]);
}

/// All that the new calls ask of a driver.
fn all_calls() -> Result<()> {
    let device = Device::open(0)?;
    let wide = Model::new(&[Item::matrix("wide", [40, 4096], 40)], &[]).open();
    let model = wide.load(&device, &LoadOptions::new())?;
    let matrix = model.matrix("wide")?;
    let Transcoded::Fast(fast) = matrix.to_fast(5)? else {
        panic!("the stand-in counts no exceptions")
    };
    let linear = Linear::new(&[fast.rows(32..40)?, matrix.clone()])?;
    let on = Stream { stream: device.context().new_stream()?, status: Status::new(&device)? };
    let (x, y) = (|rows| LinearInput::new(16, rows, 4096), LinearOutput::new(4096, 40));
    on.multiply(&linear, x(1), &[y; 2], 256)?;
    on.multiply(&linear, x(150), &[y; 2], 256)?;
    on.route(&GroupedLinear::new(&fast.split_rows(1)?)?, x(1), Routing::new(4, 1), y)?;
    on.decode(&fast, 256)?;
    on.gather(&fast, Indices::I64(8), 3, (256, 4096))?;
    on.decode(&matrix.columns(0..2048)?, 256)?;
    let table = TableAddresses { codebook: 2, codebook_bytes: 30, table: 16 };
    // SAFETY: nothing is read or written.
    unsafe { device.build_tables(FloatSplit::BF16, &[table]) }?;
    // SAFETY: as above.
    let packer = unsafe { FastPacker::new(&device, (40, 4096), 256, &on.stream) }?;
    // SAFETY: as above.
    unsafe { packer.pack(0..40, 256, &on.stream) }?;
    let exceptions = packer.exceptions(&on.stream)?.unwrap_or(0);
    // SAFETY: as above.
    unsafe { packer.take(exceptions, 256, &on.stream) }?;
    let mut memory = [0_u8; 4096];
    // SAFETY: the memory is there until the result is dropped.
    drop(unsafe { device.pin(memory.as_mut_ptr().cast(), memory.len()) }?);
    on.status.check(&on.stream)
}

/// Failures are reported, and nothing panics: one process for each answer of the driver.
#[test]
fn failures_of_the_driver_are_errors() {
    if let Some(expected) = setting("expected") {
        match (all_calls(), &*expected) {
            (Ok(()), "" | "any") => {}
            (Err(error @ Error::Gpu { .. }), part) => {
                let said = error.to_string();
                assert!(part == "any" || !part.is_empty() && said.contains(part), "{said}");
            }
            other => panic!("{other:?}"),
        }
        return;
    }
    let Some(folder) = compile() else { return };
    let run = |answers: &[(&str, &str)], expected: &str| {
        run_child(&folder, &[answers, &[("expected", expected)]].concat());
    };
    run(&[("version", "12000")], "");
    for function in functions() {
        run(&[(function, "700")], "any");
    }
    run(&[("cuLaunchKernel", "700")], "words for 700");
    run(&[("cuMemcpyDtoHAsync_v2", "700")], "words for 700");
    run(&[("memory", "300000")], "a matrix in the fast layout needs 396032 bytes");
    // Launches that begin early, where kernels and driver know how.
    let (name, constants) = CONSTANTS;
    let early = constants.replace(",32,0,9,", ",32,1,9,");
    for (version, expected) in [("12030", "words for 700"), ("12020", "")] {
        let answers = [("version", version), (name, &early), ("cuLaunchKernelEx", "700")];
        run(&answers, expected);
        run(&answers[..2], "");
    }
    run(&[(name, "128,1,16")], "made for 12 bytes of constants");
    for (from, to, expected) in [
        // With kernels for more rows.
        (",1,0,0,0,0,0,4,", ",1,9,640,9,256,384,4,", ""),
        // Another size of a task, of a block of warps.
        ("848,848,", "840,848,", "build df11 again"),
        (",2048,8,", ",2048,4,", "partial_bytes: 2048, matrices: 4, group: 4"),
        // Kernels that need more shared memory than there is.
        (",9,32,9,16,64,", ",9,32,232449,16,64,", "shared memory"),
        (",16,16384,2048,", ",16,16384,400000,", "shared memory"),
    ] {
        assert!(constants.contains(from), "{from}");
        run(&[(name, &constants.replace(from, to))], expected);
    }
}
