//! Programs: any tensors of one GPU, or slices of them, to chosen places of one output.

use std::{ops::Range, sync::Arc};

use df11::{
    Dtype, Encoding, Error,
    gpu::{
        GpuModel, GpuProgram, LoadOptions, Piece, Plan, Status,
        cudarc::driver::{
            CudaStream,
            sys::{CUgraphInstantiate_flags, CUstreamCaptureMode},
        },
    },
};

use super::{
    GUARD, POISON,
    container::{self, Item, normal_weights},
    gpu, load, mixed, open, random,
    streaming::layers,
};

/// A piece and the bytes that it must become.
struct Expected {
    name: String,
    ranges: Vec<Range<u64>>,
    offset: u64,
    bytes: Vec<u8>,
}

/// Pieces at random, one after the other with gaps of random multiples of 16.
fn pieces(
    original: &df11::Model,
    names: &[String],
    count: usize,
    state: &mut u64,
) -> Vec<Expected> {
    let mut end = 0;
    let piece = |_| {
        let name = names[random(state) as usize % names.len()].clone();
        let tensor = original.tensor(&name).unwrap();
        let ranges = if tensor.elements() > 0 { ranges(&tensor, state) } else { vec![] };
        let mut bytes = vec![0; tensor.slice(&ranges).unwrap().byte_length() as usize];
        tensor.slice(&ranges).unwrap().decode_into(&mut bytes).unwrap();
        let offset = end + 16 * (random(state) % 5);
        end = (offset + bytes.len() as u64).next_multiple_of(16);
        Expected { name, ranges, offset, bytes }
    };
    (0..count).map(piece).collect()
}

/// Indices wanted of none, one or more of the first dimensions: often all of one, often at
/// multiples of tiles.
fn ranges(tensor: &df11::Tensor<'_>, state: &mut u64) -> Vec<Range<u64>> {
    let shape = tensor.shape();
    let named = random(state) as usize % (shape.len() + 1);
    let mut one = |&size: &u64| {
        let unit = [1, 1, 8, 32, 256][random(state) as usize % 5];
        let start = random(state) % size / unit * unit;
        let end = (start + random(state) % (size - start + 1)).next_multiple_of(unit).min(size);
        if random(state).is_multiple_of(3) { 0..size } else { start..end }
    };
    let mut ranges: Vec<Range<u64>> = shape.iter().take(named).map(&mut one).collect();
    // Rows of a slice of `gap` begin on multiples of 16 bytes.
    if let (Encoding::Gap, Some(last)) = (tensor.target().encoding(), ranges.last_mut()) {
        let inner: u64 = shape[named..].iter().product();
        if named > 1 && !((last.end - last.start) * inner).is_multiple_of(8) {
            *last = 0..shape[named - 1];
        }
    }
    ranges
}

fn program(model: &GpuModel, expected: &[Expected]) -> GpuProgram {
    let pieces =
        expected.iter().map(|piece| Piece::new(&piece.name, piece.offset).slice(&piece.ranges));
    model.program(&pieces.collect::<Vec<_>>()).unwrap()
}

/// What the output must be: the pieces, and poison between and after them.
fn whole(program: &GpuProgram, expected: &[Expected]) -> Vec<u8> {
    let mut whole = vec![POISON; program.bytes() as usize + GUARD];
    for piece in expected {
        whole[piece.offset as usize..][..piece.bytes.len()].copy_from_slice(&piece.bytes);
    }
    whole
}

fn check(stream: &Arc<CudaStream>, status: &Status, program: &GpuProgram, expected: &[Expected]) {
    let whole = whole(program, expected);
    let mut output = stream.clone_htod(&vec![POISON; whole.len()]).unwrap();
    program.decode_into(&mut output.as_view_mut(), stream, status).unwrap();
    status.check(stream).unwrap();
    let names: Vec<_> =
        expected.iter().map(|piece| (&piece.name, &piece.ranges, piece.offset)).collect();
    assert!(stream.clone_dtoh(&output).unwrap() == whole, "{names:?}");
}

fn names(model: &df11::Model, block: Option<&str>) -> Vec<String> {
    let tensors =
        model.tensors().filter(|tensor| block.is_none_or(|name| tensor.block_name() == name));
    tensors.map(|tensor| tensor.name().to_owned()).collect()
}

#[test]
fn any_pieces_go_to_their_places() {
    let Some(device) = gpu() else { return };
    let stream = device.context().new_stream().unwrap();
    let status = Status::new(device).unwrap();
    for (sample, bytes) in [mixed(3), layers()].into_iter().enumerate() {
        let original = open(bytes.clone());
        for plan in [Plan::resident(&original), Plan::all_streamed(&original)] {
            let model =
                open(bytes.clone()).load(device, &LoadOptions::new().plan(plan.unwrap())).unwrap();
            let (all, mut state) = (names(&original, None), 1 + sample as u64);
            for count in [1, 2, 7, 40] {
                for _ in 0..6 {
                    let expected = pieces(&original, &all, count, &mut state);
                    check(&stream, &status, &program(&model, &expected), &expected);
                }
            }
        }
    }
}

#[test]
fn programs_of_streamed_blocks_take_turns_with_blocks() {
    let Some(device) = gpu() else { return };
    let original = open(layers());
    let plan = Plan::all_streamed(&original).unwrap();
    let model = open(layers()).load(device, &LoadOptions::new().plan(plan)).unwrap();
    let (stream, status) = (device.context().new_stream().unwrap(), Status::new(device).unwrap());
    let mut state = 9;
    let programs: Vec<_> = original
        .blocks()
        .map(|block| {
            let mut expected =
                pieces(&original, &names(&original, Some(block.name())), 9, &mut state);
            // Whole tensors, for which slots are filled.
            let mut end = 0;
            for piece in &mut expected {
                piece.bytes = original.tensor(&piece.name).unwrap().decode::<u8>().unwrap();
                piece.ranges.clear();
                piece.offset = end;
                end = (end + piece.bytes.len() as u64).next_multiple_of(16);
            }
            (program(&model, &expected), expected)
        })
        .collect();
    let mut block_output = stream.alloc_zeros::<u8>(model.largest_block_bytes() as usize).unwrap();
    for step in 0..60 {
        let at = if step < 20 { step } else { random(&mut state) as usize } % programs.len();
        let (program, expected) = &programs[at];
        assert!(program.is_streamed());
        check(&stream, &status, program, expected);
        let block = model.blocks().nth(random(&mut state) as usize % programs.len()).unwrap();
        block.decode_into(&mut block_output.as_view_mut(), &stream, &status).unwrap();
    }
    status.check(&stream).unwrap();
}

#[test]
#[expect(unsafe_code, reason = "capture of raw pointers")]
fn programs_are_captured_in_graphs() {
    use df11::gpu::cudarc::driver::DevicePtrMut as _;
    let Some(device) = gpu() else { return };
    let original = open(layers());
    for plan in [Plan::resident(&original), Plan::all_streamed(&original)] {
        let model = open(layers()).load(device, &LoadOptions::new().plan(plan.unwrap())).unwrap();
        let (stream, status) =
            (device.context().new_stream().unwrap(), Status::new(device).unwrap());
        let mut state = 4;
        for of in [None, Some("layer 3")] {
            let expected = pieces(&original, &names(&original, of), 12, &mut state);
            let program = program(&model, &expected);
            let whole = whole(&program, &expected);
            let mut output = stream.alloc_zeros::<u8>(whole.len()).unwrap();
            let pointer = output.device_ptr_mut(&stream).0;
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            // SAFETY: output, model and status live until the graph has run.
            unsafe { program.decode_into_raw(pointer, &stream, &status) }.unwrap();
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags).unwrap().unwrap();
            for _ in 0..3 {
                stream.memcpy_htod(&vec![POISON; whole.len()], &mut output).unwrap();
                graph.launch().unwrap();
                status.check(&stream).unwrap();
                assert!(stream.clone_dtoh(&output).unwrap() == whole);
            }
        }
    }
}

/// Each half of the columns of a matrix, of as many GPUs as there might be, and what a slice of
/// `gap` may not ask for.
#[test]
fn columns_of_all_encodings() {
    let Some(device) = gpu() else { return };
    let stream = device.context().new_stream().unwrap();
    let status = Status::new(device).unwrap();
    let (tiles, gap) = (normal_weights(70 * 1304, 8), normal_weights(64 * 400, 9));
    let items = [
        Item::tile("tiles", &[70, 1304], tiles.clone(), (256, 1304)),
        Item::tile("vector", &[70, 1304], tiles.clone(), (8192, 70 * 1304)),
        Item::tile("experts", &[7, 10, 1304], tiles.clone(), (256, 1304)),
        Item::tile("folded", &[70, 1304], tiles.clone(), (256, 652 * 2 * 2)),
        Item::gap("gap", &[64, 400], gap, (8, 64)),
        Item::raw("raw", Dtype::BF16, &[70, 1304], tiles),
    ];
    let original = open(container::Model::new(&items, &[]).build());
    let model = original.load(device, &LoadOptions::new()).unwrap();
    for name in ["tiles", "vector", "experts", "folded", "gap", "raw"] {
        let tensor = original.tensor(name).unwrap();
        let (shape, mut state) = (tensor.shape(), 5);
        let (rows, columns) = (shape[0], shape[shape.len() - 1]);
        let mut slices =
            vec![vec![0..rows, 0..shape[1] / 2], vec![1..rows / 2, shape[1] / 2..shape[1]]];
        slices.extend((0..30).map(|_| ranges(&tensor, &mut state)));
        if name == "experts" {
            slices.extend([
                vec![2..5, 0..10, 256..512],
                vec![0..7, 3..9, 5..1303],
                vec![1..7, 2..3],
            ]);
        }
        for ranges in slices {
            let mut bytes = vec![0; tensor.slice(&ranges).unwrap().byte_length() as usize];
            tensor.slice(&ranges).unwrap().decode_into(&mut bytes).unwrap();
            let piece = Expected { name: name.into(), ranges: ranges.clone(), offset: 32, bytes };
            let made = model.program(&[Piece::new(name, 32).slice(&ranges)]);
            match made {
                Ok(program) => check(&stream, &status, &program, &[piece]),
                Err(error) => {
                    assert!(
                        matches!(error, Error::Parameter { .. }) && name == "folded",
                        "{name} {ranges:?}: {error}"
                    );
                }
            }
        }
        let odd = model.program(&[Piece::new(name, 0).slice(&[0..rows, 3..shape[1] - 2])]);
        assert_eq!(odd.is_err(), ["gap", "folded"].contains(&name), "{name}");
        assert!(
            model
                .program(&[Piece::new(name, 0).slice(&[0..rows, 0..shape[1], 0..columns, 0..1])])
                .is_err()
        );
    }
}

#[test]
fn coded_pieces_start_on_multiples_of_16() {
    let Some(device) = gpu() else { return };
    let model = load(device, mixed(5));
    for (name, offset, is_good) in
        [("coded", 16, true), ("coded", 8, false), ("tiles", 2, false), ("odd", 3, true)]
    {
        let program = model.program(&[Piece::new(name, offset)]);
        assert_eq!(program.is_ok(), is_good, "{name} at {offset}");
        assert!(program.err().is_none_or(|error| matches!(error, Error::Parameter { .. })));
    }
}
