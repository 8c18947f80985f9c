//! Matrices to multiply by, cut, prepared and asked for the impossible on the stand-in for the
//! GPU's driver (see `tests/driver.rs`), which runs no kernels. What kernels make of them,
//! `tests/gpu/linear.rs` tests. Each test runs itself again in a process of its own.
#![cfg(all(target_os = "linux", feature = "cuda"))]
#![expect(unsafe_code, reason = "products, at addresses that the stand-in never reads")]

#[path = "support/container.rs"]
mod container;
#[path = "support/driver.rs"]
mod stand_in;

use container::{Item, Model, normal_weights};
use df11::{
    Dtype, Error, Result,
    gpu::{
        Device, GpuModel, GroupedLinear, Indices, Linear, LinearInput, LinearOutput, LoadOptions,
        Matrix, Plan, Residence, Routing, Status, Transcoded,
        cudarc::driver::{CudaContext, DevicePtr as _},
    },
    hazmat::gpu::{FastPacker, TableAddresses, TileAddresses},
};
use stand_in::{child, compile, devices, functions, in_child, run_child};

fn sample() -> df11::Model {
    let tile = |name, rows: u64, columns: u64| {
        let weights = normal_weights((rows * columns) as usize, rows);
        Item::tile(name, &[rows, columns], weights, (256, columns))
    };
    let stack = Item::tile("stack", &[3, 32, 520], normal_weights(49_920, 4), (256, 520));
    let items = [
        tile("a", 100, 520),
        tile("b", 3100, 520),
        tile("narrow", 64, 256),
        tile("wide", 40, 4096),
        tile("a", 100, 520).alias("tied"),
        stack,
        Item::tile("folded", &[64, 520], normal_weights(33_280, 5), (256, 1040)),
        Item::tile("vector", &[96, 520], normal_weights(49_920, 6), (8192, 49_920)),
        Item::gap("gap", &[96, 520], normal_weights(49_920, 7), (32, 128)),
        Item::raw("raw", Dtype::BF16, &[4, 8], vec![0; 64]),
        Item::raw("floats", Dtype::F32, &[4, 4], vec![0; 64]),
    ];
    Model::new(&items, &[]).open()
}

fn load(device: &Device) -> GpuModel {
    sample().load(device, &LoadOptions::new()).unwrap()
}

/// What a refusal says.
fn refused<T>(result: Result<T>) -> String {
    let error = result.err().expect("it is refused");
    assert!(matches!(error, Error::Parameter { .. }), "{error:?}");
    error.to_string()
}

fn fast(matrix: &Matrix) -> Matrix {
    match matrix.to_fast(matrix.good_exceptions()).unwrap() {
        Transcoded::Fast(fast) => fast,
        other => panic!("the stand-in counts no exceptions: {other:?}"),
    }
}

#[test]
fn matrices_know_their_sizes() {
    let Some([device]) = devices("matrices_know_their_sizes") else { return };
    let model = load(&device);
    for (name, rows, columns) in
        [("a", 100, 520), ("tied", 100, 520), ("stack", 96, 520), ("wide", 40, 4096)]
    {
        let matrix = model.matrix(name).unwrap();
        assert_eq!(
            (matrix.name(), matrix.row_count(), matrix.column_count()),
            (name, rows, columns)
        );
        assert_eq!((matrix.residence(), matrix.exceptions()), (Residence::Stored, None));
        assert_eq!(matrix.decoded_bytes(), 2 * rows * columns);
        // Ten or eleven bits a weight, and a decode table.
        let arrays = (matrix.device_bytes() - 16_384) * 8;
        assert!((10 * rows * columns..12 * rows * columns).contains(&arrays), "{name}: {arrays}");
        let (strips, steps) = (rows.div_ceil(32), columns.div_ceil(32));
        let fast = fast(&matrix);
        assert_eq!((fast.row_count(), fast.column_count()), (rows, columns));
        assert_eq!((fast.residence(), fast.exceptions()), (Residence::Fast, Some(0)));
        assert_eq!(fast.device_bytes(), strips * (steps * 1536 + steps.div_ceil(8) * 8));
        assert_eq!(matrix.to_fast_or_stored().unwrap().residence(), Residence::Fast);
    }
}

#[test]
fn other_tensors_are_no_matrices() {
    let Some([device]) = devices("other_tensors_are_no_matrices") else { return };
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
    let Some([device]) = devices("slices_are_matrices_of_their_own") else { return };
    let model = load(&device);
    let whole = model.matrix("a").unwrap();
    let size = |matrix: &Matrix| (matrix.row_count(), matrix.column_count());
    let low = whole.rows(32..100).unwrap();
    assert_eq!(size(&low), (68, 520));
    assert_eq!(size(&low.rows(32..64).unwrap().columns(256..520).unwrap()), (32, 264));
    assert_eq!(size(&whole.columns(0..256).unwrap()), (100, 256));
    for rows in [0..33, 1..32, 32..32, 96..101] {
        assert!(refused(whole.rows(rows)).contains("multiples of 32"));
    }
    assert!(refused(low.rows(32..99)).contains("32..99 of 68 rows of \"a\""));
    assert!(refused(whole.columns(0..264)).contains("multiples of 256"));
    // The model may go: slices keep it.
    drop(model);
    let part = fast(&whole.columns(256..520).unwrap());
    assert_eq!((size(&part), size(&part.rows(64..100).unwrap())), ((100, 264), (36, 264)));
    assert_eq!(size(&part.rows(64..100).unwrap().columns(0..256).unwrap()), (36, 256));
    assert!(refused(part.columns(8..256)).contains("8..256 of 264 columns of \"a\""));
    // In either order, and of slices.
    let whole = fast(&whole);
    let inner = whole.columns(256..520).unwrap().columns(256..264).unwrap();
    assert_eq!((size(&inner), inner.device_bytes()), ((100, 8), whole.device_bytes()));
    assert!(refused(part.rows(0..10)).contains("multiples of 32"));
}

#[test]
fn products_are_prepared_and_checked() {
    let Some([device, second]) = devices("products_are_prepared_and_checked") else { return };
    let model = load(&device);
    let [a, b, narrow, wide] =
        ["a", "b", "narrow", "wide"].map(|name| fast(&model.matrix(name).unwrap()));
    let other = fast(&load(&second).matrix("a").unwrap());
    assert!(refused(Linear::new(&[])).contains("name one matrix or more"));
    assert!(
        refused(Linear::new(&[a.clone(), narrow.clone()]))
            .contains("520 columns and \"narrow\" 256")
    );
    assert!(refused(Linear::new(&[a.clone(), other])).contains("different GPUs"));
    // As stored too, and some so and some so.
    let mixed =
        Linear::new(&[model.matrix("a").unwrap(), b.clone(), model.matrix("b").unwrap()]).unwrap();
    assert_eq!(mixed.matrices().len(), 3);

    // Of 40 rows only slices of columns are work for a GPU; their sums need a workspace.
    let linear = Linear::new(&[wide]).unwrap();
    assert_eq!(linear.workspace_bytes(1), 4352 + 4 * 8 * 2048);
    // Without kernels for more rows, these are several launches.
    assert_eq!(linear.workspace_bytes(100), linear.workspace_bytes(16));
    let linear = Linear::new(&[a, b]).unwrap();
    assert_eq!(linear.matrices().len(), 2);

    let (stream, status) = (device.context().new_stream().unwrap(), Status::new(&device).unwrap());
    let multiply = |x, outputs: &[LinearOutput], workspace| {
        // SAFETY: the stand-in runs no kernels, so that nothing is read or written.
        unsafe { linear.multiply(x, outputs, workspace, &stream, &status) }
    };
    let outputs = [LinearOutput::new(4096, 3200).bias(8192), LinearOutput::new(4296, 3200)];
    for rows in 0..=200 {
        multiply(LinearInput::new(2, rows, 520), &outputs, 0).unwrap();
    }
    assert!(refused(multiply(LinearInput::new(2, 2, 519), &outputs, 0)).contains("overlap"));
    assert!(
        refused(multiply(LinearInput::new(2, 2, 520), &outputs[..1], 0))
            .contains("1 outputs for 2")
    );
    let tight = [outputs[0], LinearOutput::new(4296, 3099)];
    assert!(refused(multiply(LinearInput::new(2, 2, 520), &tight, 0)).contains("overlap"));
    multiply(LinearInput::new(2, 1, 0), &tight, 0).unwrap();
    assert!(refused(multiply(LinearInput::new(3, 1, 520), &outputs, 0)).contains("misaligned"));
    assert!(refused(multiply(LinearInput::new(2, 1, 520), &outputs, 8)).contains("misaligned"));
    let foreign = CudaContext::new(1).unwrap().new_stream().unwrap();
    let x = LinearInput::new(2, 1, 520);
    // SAFETY: as above.
    let answer = unsafe { linear.multiply(x, &outputs, 0, &foreign, &status) };
    // All GPUs of the stand-in have one context.
    assert!(answer.is_ok());
    let matrix = model.matrix("a").unwrap();
    // SAFETY: as above.
    let answer = unsafe { fast(&matrix).decode_into_raw(8, &stream, &status) };
    assert!(refused(answer).contains("no multiple of 16"));
    let gather = |matrix: &Matrix, indices, count, place| {
        // SAFETY: as above.
        unsafe { matrix.gather(indices, count, place, &stream, &status) }
    };
    let fast = fast(&matrix);
    gather(&fast, Indices::U32(4), 100, (2, 520)).unwrap();
    gather(&fast, Indices::U32(4), 0, (2, 520)).unwrap();
    gather(&fast, Indices::U32(4), 1, (2, 0)).unwrap();
    gather(&matrix, Indices::U32(4), 1, (2, 520)).unwrap();
    assert!(refused(gather(&fast, Indices::I64(4), 1, (2, 520))).contains("misaligned"));
    assert!(refused(gather(&fast, Indices::U32(4), 1, (1, 520))).contains("misaligned"));
    assert!(refused(gather(&fast, Indices::U32(4), 2, (2, 519))).contains("overlap"));
    assert!(refused(gather(&fast, Indices::U32(4), 1 << 40, (2, 520))).contains("fewer rows"));
}

#[test]
fn experts_are_prepared_and_checked() {
    let Some([device, second]) = devices("experts_are_prepared_and_checked") else { return };
    let model = load(&device);
    let [stack, a, narrow] =
        ["stack", "a", "narrow"].map(|name| fast(&model.matrix(name).unwrap()));
    let other = fast(&load(&second).matrix("stack").unwrap());
    let experts = stack.split_rows(3).unwrap();
    assert!(experts.iter().all(|expert| (expert.row_count(), expert.column_count()) == (32, 520)));
    assert!(refused(stack.split_rows(5)).contains("96 rows of \"stack\" are not 5 parts"));
    assert!(refused(stack.split_rows(0)).contains("0 parts"));
    assert!(refused(stack.split_rows(2)).contains("multiples of 32"));
    // As stored, slices are what they are cut from as well; nobody multiplies by these yet.
    let stored = model.matrix("stack").unwrap().split_rows(3).unwrap();
    assert!(refused(GroupedLinear::new(&stored)).contains("Matrix::to_fast"));
    assert!(refused(GroupedLinear::new(&[])).contains("name 1 to 1024"));
    assert!(refused(GroupedLinear::new(&vec![a.clone(); 1025])).contains("1025 experts"));
    assert!(refused(GroupedLinear::new(&[a.clone(), narrow])).contains("520 columns"));
    assert!(refused(GroupedLinear::new(&[stack.clone(), a])).contains("96 rows and \"a\" 100"));
    assert!(refused(GroupedLinear::new(&[stack, other])).contains("different GPUs"));

    let linear = GroupedLinear::new(&experts).unwrap();
    assert_eq!((linear.experts(), linear.device().info().ordinal), (3, 0));
    let (stream, status) = (device.context().new_stream().unwrap(), Status::new(&device).unwrap());
    let multiply = |x, routing, y| {
        // SAFETY: the stand-in runs no kernels, so that nothing is read or written.
        unsafe { linear.multiply(x, routing, y, &stream, &status) }
    };
    let (x, y) = (LinearInput::new(2, 4, 520), LinearOutput::new(2, 32));
    let routing = Routing::new(4, 8).rows(4);
    multiply(x, routing, y).unwrap();
    multiply(x, Routing::new(4, 4), y).unwrap();
    multiply(LinearInput::new(2, 0, 520), Routing::new(4, 0), y).unwrap();
    assert!(refused(multiply(x, Routing::new(4, 5), y)).contains("Routing::rows"));
    assert!(refused(multiply(LinearInput::new(2, 0, 520), routing, y)).contains("Routing::rows"));
    assert!(refused(multiply(LinearInput::new(2, 4, 519), routing, y)).contains("overlap"));
    assert!(refused(multiply(x, routing, LinearOutput::new(2, 31))).contains("overlap"));
    assert!(refused(multiply(LinearInput::new(1, 4, 520), routing, y)).contains("misaligned"));
    assert!(refused(multiply(x, routing, LinearOutput::new(3, 32))).contains("misaligned"));
    assert!(refused(multiply(x, Routing::new(2, 8).rows(4), y)).contains("misaligned"));
    assert!(refused(multiply(x, Routing::new(4, 8).rows(2), y)).contains("misaligned"));
    assert!(refused(multiply(x, routing, y.bias(64))).contains("add it to y"));
    assert!(refused(multiply(x, Routing::new(4, 1 << 33).rows(4), y)).contains("multiply fewer"));
    multiply(x, Routing::new(4, 1 << 31).rows(4), y).unwrap();
}

/// Where arrays of a matrix might lie; the stand-in never looks.
const AT: TileAddresses = TileAddresses {
    records: 256,
    bitstream: 512,
    bitstream_bytes: 4096,
    plane: 8192,
    table: 16_384,
    staged_bytes: 2704,
};

#[test]
fn matrices_in_memory_of_the_caller_are_checked() {
    let Some([device, second]) = devices("matrices_in_memory_of_the_caller_are_checked") else {
        return;
    };
    let (stream, status) = (device.context().new_stream().unwrap(), Status::new(&device).unwrap());
    // SAFETY: the stand-in runs no kernels, so that nothing is read or written; so for all that
    // follows.
    let tiles = |device: &Device, shape, at| unsafe { Matrix::of_tiles(device, shape, at) };
    // SAFETY: as above.
    let fast = |shape, strips, entries| unsafe { Matrix::of_fast(&device, shape, strips, entries) };
    for shape in [(0, 256), (256, 0), (64, 260), (1 << 32, 256), (64, 1 << 32)] {
        assert!(refused(tiles(&device, shape, AT)).contains("multiple of 8"));
        assert!(refused(fast(shape, 256, (512, 0))).contains("multiple of 8"));
    }
    for at in [
        TileAddresses { records: 8, ..AT },
        TileAddresses { bitstream: 8, ..AT },
        TileAddresses { bitstream_bytes: 4088, ..AT },
        TileAddresses { plane: 8, ..AT },
        TileAddresses { table: 8, ..AT },
    ] {
        assert!(refused(tiles(&device, (64, 512), at)).contains("misaligned"));
    }
    assert!(refused(fast((64, 512), 8, (512, 0))).contains("misaligned"));
    assert!(refused(fast((1 << 20, 4096), 256, (512, 0))).contains("fewer rows"));

    let stored = tiles(&device, (100, 520), AT).unwrap();
    assert_eq!((stored.row_count(), stored.column_count()), (100, 520));
    assert_eq!(
        (stored.residence(), stored.device_bytes()),
        (Residence::Stored, 32 * 13 + 4096 + 52_000 + 16_384)
    );
    let packed = fast((96, 520), 256, (65_536, 7)).unwrap();
    assert_eq!((packed.residence(), packed.exceptions()), (Residence::Fast, Some(7)));
    assert_eq!(packed.device_bytes(), Matrix::fast_bytes(96, 520) + 28);
    for matrix in [&stored, &packed] {
        // SAFETY: as above.
        let decode =
            |slice, to| unsafe { matrix.decode_slice_into_raw(slice, to, &stream, &status) };
        decode((5..7, 3..4), 256).unwrap();
        assert!(refused(decode((0..1, 0..520), 8)).contains("256 bytes"));
        assert!(refused(decode((0..101, 0..520), 256)).contains("0..101"));
        assert!(refused(decode((0..1, 520..521), 256)).contains("520..521"));
    }
    let all = [(&stored, 256), (&packed, 512), (&stored, 1024)];
    // SAFETY: as above.
    let decode_all =
        |all: &[(&Matrix, u64)]| unsafe { Matrix::decode_all_into_raw(all, &stream, &status) };
    decode_all(&[]).unwrap();
    decode_all(&all.repeat(9)).unwrap();
    assert!(refused(decode_all(&[(&stored, 8)])).contains("256 bytes"));
    let other = tiles(&second, (100, 520), AT).unwrap();
    assert!(refused(decode_all(&[(&stored, 256), (&other, 256)])).contains("different GPUs"));

    assert!(refused(GroupedLinear::of_parts(&stored, 1)).contains("in the fast layout"));
    assert!(refused(GroupedLinear::of_parts(&packed, 0)).contains("are not 0 experts"));
    assert!(refused(GroupedLinear::of_parts(&packed, 5)).contains("96 rows are not 5 experts"));
    assert!(refused(GroupedLinear::of_parts(&packed, 2)).contains("multiples of 32"));
    assert!(refused(GroupedLinear::of_parts(&packed, 1025)).contains("1 to 1024"));
    assert_eq!(GroupedLinear::of_parts(&packed, 3).unwrap().experts(), 3);
}

#[test]
fn packers_take_strips_in_order() {
    let Some([device]) = devices("packers_take_strips_in_order") else { return };
    let stream = device.context().new_stream().unwrap();
    // SAFETY: the stand-in runs no kernels, so that nothing is read or written; so for all that
    // follows.
    let make = |shape, strips| unsafe { FastPacker::new(&device, shape, strips, &stream) };
    assert!(refused(make((0, 520), 256)).contains("fewer rows") && make((100, 520), 8).is_err());
    assert!(make((1 << 16, 1 << 16), 256).is_err());
    let packer = make((100, 520), 256).unwrap();
    assert_eq!(
        (packer.bytes(), packer.exceptions(&stream).unwrap()),
        (Matrix::fast_bytes(100, 520), Some(0))
    );
    // SAFETY: as above.
    let pack = |rows| unsafe { packer.pack(rows, 256, &stream) };
    pack(0..64).unwrap();
    pack(64..100).unwrap();
    for rows in [0..33, 1..32, 32..32, 96..101] {
        assert!(refused(pack(rows)).contains("multiples of 32"));
    }
    // SAFETY: as above.
    assert!(refused(unsafe { packer.take(1 << 40, 256, &stream) }).contains("exceptions"));
}

#[test]
fn tables_and_arrays_come_to_the_caller() {
    let Some([device]) = devices("tables_and_arrays_come_to_the_caller") else { return };
    let stream = device.context().new_stream().unwrap();
    let table = TableAddresses { codebook: 2, codebook_bytes: 30, table: 16 };
    // SAFETY: the stand-in runs no kernels, so that nothing is read or written.
    let build = |tables: &[TableAddresses]| unsafe { device.build_tables(tables) };
    build(&[]).unwrap();
    build(&[table, table]).unwrap();
    assert!(refused(build(&[TableAddresses { codebook: 1, ..table }])).contains("misaligned"));
    assert!(refused(build(&[TableAddresses { table: 8, ..table }])).contains("misaligned"));

    let model = sample();
    // The stand-in copies indeed: here is room for any of the arrays.
    let memory = stream.alloc_zeros::<u8>(1 << 20).unwrap();
    let (to, _) = memory.device_ptr(&stream);
    let upload = |names: &[&str]| {
        let wanted: Vec<_> = names.iter().map(|&name| (name, [to; 4])).collect();
        // SAFETY: each array has its memory.
        unsafe { model.upload_arrays(&device, &wanted, &()) }
    };
    upload(&["a", "tied", "stack"]).unwrap();
    for name in ["vector", "gap", "raw", "floats", "folded"] {
        assert!(refused(upload(&["a", name])).contains("Tiles::of"));
    }
    assert!(refused(upload(&["a", "absent"])).contains("no tensor"));
}

/// Whatever is multiplied or decoded, in device memory there is what was there before: the caller's
/// temporary, as large as the largest matrix, is all that a transposed product takes. And nothing
/// waits.
#[test]
fn calls_allocate_nothing_and_wait_for_nothing() {
    let Some([device]) = devices("calls_allocate_nothing_and_wait_for_nothing") else { return };
    let model = load(&device);
    let matrices: Vec<Matrix> = ["a", "b", "stack"]
        .into_iter()
        .flat_map(|name| [model.matrix(name).unwrap(), fast(&model.matrix(name).unwrap())])
        .collect();
    let fast: Vec<Matrix> = matrices.iter().skip(1).step_by(2).cloned().collect();
    let linear = Linear::new(&matrices).unwrap();
    let experts = GroupedLinear::new(&fast[2].split_rows(3).unwrap()).unwrap();
    // SAFETY: the stand-in runs no kernels, so that nothing is read or written.
    let borrowed = unsafe { Matrix::of_tiles(&device, (100, 520), AT) }.unwrap();
    // SAFETY: as above.
    let packed = unsafe { Matrix::of_fast(&device, (96, 520), 256, (65_536, 7)) }.unwrap();
    let (stream, status) = (device.context().new_stream().unwrap(), Status::new(&device).unwrap());
    let largest = matrices.iter().map(Matrix::decoded_bytes).max().unwrap();
    let temporary = stream.alloc_zeros::<u8>(largest as usize).unwrap();
    let (place, _) = temporary.device_ptr(&stream);
    for function in [
        "cuMemAlloc_v2",
        "cuMemAllocAsync",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuCtxSynchronize",
    ] {
        // SAFETY: this process runs this test alone, and no other thread of it asks for its
        // environment.
        unsafe { std::env::set_var(format!("DRIVER_{function}"), "2") };
    }
    assert!(stream.alloc_zeros::<u8>(1).is_err() && stream.synchronize().is_err());
    for matrix in &matrices {
        // SAFETY: the temporary is as large as the largest of them.
        unsafe { matrix.decode_into_raw(place, &stream, &status) }.unwrap();
    }
    // Nor does whoever holds the arrays, and makes everything anew for each call.
    let parts = [borrowed.rows(32..64).unwrap(), packed.rows(32..64).unwrap()];
    // SAFETY: the stand-in runs no kernels.
    unsafe {
        Matrix::decode_all_into_raw(&parts.each_ref().map(|part| (part, place)), &stream, &status)
    }
    .unwrap();
    let y = [LinearOutput::new(4096, 3200); 2];
    let both = Linear::new(&parts).unwrap();
    // SAFETY: as above.
    unsafe { both.multiply(LinearInput::new(2, 3, 520), &y, 0, &stream, &status) }.unwrap();
    let grouped = GroupedLinear::of_parts(&packed, 3).unwrap();
    // SAFETY: as above.
    unsafe {
        grouped.multiply(LinearInput::new(2, 3, 520), Routing::new(4, 3), y[0], &stream, &status)
    }
    .unwrap();
    let (x, outputs) = (LinearInput::new(2, 100, 520), [LinearOutput::new(4096, 3200); 6]);
    // SAFETY: the stand-in runs no kernels, so that nothing is read or written.
    unsafe { linear.multiply(x, &outputs, 0, &stream, &status) }.unwrap();
    // SAFETY: as above.
    unsafe { experts.multiply(x, Routing::new(4, 100), outputs[0], &stream, &status) }.unwrap();
    // SAFETY: as above.
    unsafe { fast[0].gather(Indices::U32(4), 100, (2, 520), &stream, &status) }.unwrap();
    // SAFETY: as above.
    unsafe { matrices[0].gather(Indices::U32(4), 100, (2, 520), &stream, &status) }.unwrap();
    for function in ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"] {
        // SAFETY: as above.
        unsafe { std::env::remove_var(format!("DRIVER_{function}")) };
    }
}

/// From how many rows of x on decoding is faster depends on the GPU and on the residence.
#[test]
fn crossovers_are_those_of_the_gpu() {
    const NAME: &str = "crossovers_are_those_of_the_gpu";
    const EXPECTED: &str = "DF11_TEST_EXPECTED";
    if in_child() {
        let model = load(&Device::open(0).unwrap());
        let stored = model.matrix("a").unwrap();
        let crossover = |matrices: &[Matrix]| Linear::new(matrices).unwrap().crossover_rows();
        let [of_stored, of_fast] =
            [stored.clone(), fast(&stored)].map(|matrix| crossover(&[matrix]));
        assert_eq!(format!("{of_stored} {of_fast}"), std::env::var(EXPECTED).unwrap());
        assert_eq!(crossover(&[fast(&stored), stored]), of_stored.min(of_fast));
        return;
    }
    let Some(folder) = compile() else { return };
    for (capability, bus_width, expected) in [
        ("90", "5120", "129 2049"),
        ("90", "6016", "65 2049"),
        ("90", "4096", "49 49"),
        ("80", "5120", "49 49"),
    ] {
        let mut command = child(&folder, NAME, 1);
        command.env("DRIVER_capability", capability).env("DRIVER_bus_width", bus_width);
        command.env(EXPECTED, expected);
        run_child(command);
    }
}

/// As stored too, more rows are one launch where there are kernels for them, whose sums need a
/// workspace.
#[test]
fn more_rows_by_matrices_as_stored_need_a_workspace() {
    const NAME: &str = "more_rows_by_matrices_as_stored_need_a_workspace";
    if in_child() {
        let device = Device::open(0).unwrap();
        let linear = Linear::new(&[load(&device).matrix("wide").unwrap()]).unwrap();
        // Slices of the two strips' columns.
        let few = 4352 + 4 * 8 * 2048;
        assert_eq!([1, 16].map(|rows| linear.workspace_bytes(rows)), [few; 2]);
        // Of one group of strips eight items' parts, and a place more.
        let [some, most] = [32, 64].map(|rows| 4352 + 9 * 256 * rows * 4);
        let sizes = [17, 32, 33, 64, 200].map(|rows| linear.workspace_bytes(rows));
        assert_eq!(sizes, [some, some, most, most, most]);
        let (stream, status) =
            (device.context().new_stream().unwrap(), Status::new(&device).unwrap());
        let y = [LinearOutput::new(4096, 40)];
        for rows in 0..=200 {
            // SAFETY: the stand-in runs no kernels.
            unsafe { linear.multiply(LinearInput::new(16, rows, 4096), &y, 256, &stream, &status) }
                .unwrap();
        }
        return;
    }
    let Some(folder) = compile() else { return };
    let constants = stand_in::LINEAR_CONSTANTS.1.replace(",0,17408,", ",768,17408,");
    let mut command = child(&folder, NAME, 1);
    command.env("DRIVER_df11_linear_constants", constants);
    run_child(command);
}

/// All that the new calls ask of a driver.
fn all_calls() -> Result<()> {
    let device = Device::open(0)?;
    let weights = normal_weights(40 * 4096, 1);
    let wide = Model::new(&[Item::tile("wide", &[40, 4096], weights, (256, 4096))], &[]).open();
    let model = wide.load(&device, &LoadOptions::new())?;
    let matrix = model.matrix("wide")?;
    let Transcoded::Fast(fast) = matrix.to_fast(5)? else {
        panic!("the stand-in counts no exceptions")
    };
    let linear = Linear::new(&[fast.rows(32..40)?, matrix.clone()])?;
    let (stream, status) = (device.context().new_stream()?, Status::new(&device)?);
    let outputs = [LinearOutput::new(4096, 40); 2];
    // SAFETY: the stand-in runs no kernels.
    unsafe { linear.multiply(LinearInput::new(16, 1, 4096), &outputs, 256, &stream, &status) }?;
    // SAFETY: as above.
    unsafe { linear.multiply(LinearInput::new(16, 150, 4096), &outputs, 256, &stream, &status) }?;
    let experts = GroupedLinear::new(&fast.split_rows(1)?)?;
    let (x, y) = (LinearInput::new(16, 1, 4096), LinearOutput::new(4096, 40));
    // SAFETY: as above.
    unsafe { experts.multiply(x, Routing::new(4, 1), y, &stream, &status) }?;
    // SAFETY: as above.
    unsafe { fast.decode_into_raw(256, &stream, &status) }?;
    // SAFETY: as above.
    unsafe { fast.gather(Indices::I64(8), 3, (256, 4096), &stream, &status) }?;
    // SAFETY: as above.
    unsafe { matrix.columns(0..2048)?.decode_into_raw(256, &stream, &status) }?;
    // SAFETY: as above.
    unsafe {
        device.build_tables(&[TableAddresses { codebook: 2, codebook_bytes: 30, table: 16 }])
    }?;
    // SAFETY: as above.
    let packer = unsafe { FastPacker::new(&device, (40, 4096), 256, &stream) }?;
    // SAFETY: as above.
    unsafe { packer.pack(0..40, 256, &stream) }?;
    let exceptions = packer.exceptions(&stream)?.unwrap_or(0);
    // SAFETY: as above.
    unsafe { packer.take(exceptions, 256, &stream) }?;
    let mut memory = [0_u8; 4096];
    // SAFETY: the memory is there until the result is dropped.
    drop(unsafe { device.pin(memory.as_mut_ptr().cast(), memory.len()) }?);
    status.check(&stream)
}

/// What goes wrong is told, and nothing panics: in a process for each answer of the driver.
#[test]
fn failures_of_the_driver_are_errors() {
    const NAME: &str = "failures_of_the_driver_are_errors";
    const EXPECTED: &str = "DF11_TEST_EXPECTED";
    if in_child() {
        let answer = all_calls();
        match std::env::var(EXPECTED).unwrap().as_str() {
            "" => answer.unwrap(),
            "any" => assert!(
                answer.is_ok() || answer.is_err_and(|error| matches!(error, Error::Gpu { .. }))
            ),
            part => {
                let error = answer.unwrap_err();
                assert!(
                    matches!(error, Error::Gpu { .. }) && error.to_string().contains(part),
                    "{error}"
                );
            }
        }
        return;
    }
    let Some(folder) = compile() else { return };
    let run = |name: &str, answer: &str, expected: &str| {
        let mut command = child(&folder, NAME, 1);
        command.env(format!("DRIVER_{name}"), answer).env(EXPECTED, expected);
        run_child(command);
    };
    run("version", "12000", "");
    for function in functions() {
        run(function, "700", "any");
    }
    run("cuLaunchKernel", "700", "words for 700");
    run("cuMemcpyDtoHAsync_v2", "700", "words for 700");
    // Launches that begin early, where kernels and driver know how.
    let constants = stand_in::LINEAR_CONSTANTS.1;
    let early = constants.replace(",32,0,9,", ",32,1,9,");
    for (version, answer) in [("12030", "words for 700"), ("12020", "")] {
        let mut command = child(&folder, NAME, 1);
        command.env("DRIVER_version", version).env("DRIVER_df11_linear_constants", &early);
        command.env("DRIVER_cuLaunchKernelEx", "700").env(EXPECTED, answer);
        run_child(command);
        let mut command = child(&folder, NAME, 1);
        command.env("DRIVER_version", version).env("DRIVER_df11_linear_constants", &early);
        command.env(EXPECTED, "");
        run_child(command);
    }
    // And with kernels for more rows.
    let wide = constants.replace(",1,0,0,0,0,4,", ",1,9,640,9,384,4,");
    run("df11_linear_constants", &wide, "");
    // Another size of a task, of a block of warps, and kernels that need more shared memory than
    // there is.
    run("df11_linear_constants", &constants.replace("1024,96,", "1040,96,"), "build df11 again");
    run(
        "df11_linear_constants",
        &constants.replace(",2048,8,", ",2048,4,"),
        "partial_bytes: 2048, matrices: 4, group: 4",
    );
    let large = constants.replace(",9,1,0,0,0,0,", ",232449,1,0,0,0,0,");
    run("df11_linear_constants", &large, "shared memory");
    let large = constants.replace(",16,16384,2048,", ",16,16384,400000,");
    run("df11_linear_constants", &large, "shared memory");
    run("memory", "300000", "a matrix in the fast layout needs 393472 bytes");
}
