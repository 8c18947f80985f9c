//! Programs: any tensors of one GPU, or slices of them, to chosen places of one output.

use std::{ops::Range, sync::Arc};

use df11::{
    Dtype, Encoding,
    gpu::{
        GpuModel, GpuProgram, LoadOptions, Piece, Status,
        cudarc::driver::{CudaStream, DevicePtrMut as _},
    },
};

use super::{
    POISON, assert_is_block, capture,
    container::{self, Item, normal_weights},
    gpu_stream, is_refused, mixed, open, random, run,
    streaming::{layers, load_both_ways, streamed},
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

/// The expected output: the pieces, and poison between them.
fn whole(program: &GpuProgram, expected: &[Expected]) -> Vec<u8> {
    let mut whole = vec![POISON; program.bytes() as usize];
    for piece in expected {
        whole[piece.offset as usize..][..piece.bytes.len()].copy_from_slice(&piece.bytes);
    }
    whole
}

fn check(stream: &Arc<CudaStream>, program: &GpuProgram, expected: &[Expected]) {
    let names: Vec<_> =
        expected.iter().map(|piece| (&piece.name, &piece.ranges, piece.offset)).collect();
    assert!(run(program, stream) == whole(program, expected), "{names:?}");
}

fn names(model: &df11::Model, block: Option<&str>) -> Vec<String> {
    let tensors =
        model.tensors().filter(|tensor| block.is_none_or(|name| tensor.block_name() == name));
    tensors.map(|tensor| tensor.name().to_owned()).collect()
}

#[test]
fn any_pieces_go_to_their_places() {
    let Some((device, stream)) = gpu_stream() else { return };
    for (sample, bytes) in [mixed(3), layers()].into_iter().enumerate() {
        let original = open(bytes);
        for model in load_both_ways(device, &original) {
            let (all, mut state) = (names(&original, None), 1 + sample as u64);
            for count in [1, 2, 7, 40] {
                for _ in 0..6 {
                    let expected = pieces(&original, &all, count, &mut state);
                    check(&stream, &program(&model, &expected), &expected);
                }
            }
        }
    }
}

#[test]
fn programs_of_streamed_blocks_take_turns_with_blocks() {
    let Some((device, stream)) = gpu_stream() else { return };
    let ((original, model), status) = (streamed(device), Status::new(device).unwrap());
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
        check(&stream, program, expected);
        let block = model.blocks().nth(random(&mut state) as usize % programs.len()).unwrap();
        block.decode_into(&mut block_output.as_view_mut(), &stream, &status).unwrap();
    }
    status.check(&stream).unwrap();
}

/// Programs with tensors of any blocks, and of one block.
#[test]
#[expect(unsafe_code, reason = "capture of raw pointers")]
fn programs_and_blocks_are_captured_in_graphs() {
    let Some((device, stream)) = gpu_stream() else { return };
    let (original, status) = (open(layers()), Status::new(device).unwrap());
    for model in load_both_ways(device, &original) {
        let mut state = 4;
        let [any, of_block] = [None, Some("layer 3")].map(|of| {
            let expected = pieces(&original, &names(&original, of), 12, &mut state);
            let program = program(&model, &expected);
            let whole = whole(&program, &expected);
            (program, whole)
        });
        let block = model.block("layer 3").unwrap();
        let bytes = [any.1.len(), of_block.1.len(), block.layout().bytes as usize];
        let mut outputs = bytes.map(|bytes| stream.alloc_zeros::<u8>(bytes).unwrap());
        let places = outputs.each_mut().map(|output| output.device_ptr_mut(&stream).0);
        let decode = |program: &GpuProgram, place| {
            // SAFETY: outputs, model and status live until the graph has run.
            unsafe { program.decode_into_raw(place, &stream, &status) }
        };
        let graph = capture(&stream, || {
            decode(&any.0, places[0])?;
            decode(&of_block.0, places[1])?;
            // SAFETY: as above.
            unsafe { block.decode_into_raw(places[2], &stream, &status) }
        });
        for _ in 0..3 {
            for output in &mut outputs {
                stream.memcpy_htod(&vec![POISON; output.len()], output).unwrap();
            }
            graph.launch().unwrap();
            status.check(&stream).unwrap();
            let found = outputs.each_ref().map(|output| stream.clone_dtoh(output).unwrap());
            assert!(found[0] == any.1 && found[1] == of_block.1);
            assert_is_block(&found[2], original.block("layer 3").unwrap(), Some(POISON));
        }
    }
}

/// Each half of the columns of a matrix, of as many GPUs as there might be, and what a slice of
/// `gap` may not ask for.
#[test]
fn columns_of_all_encodings() {
    let Some((device, stream)) = gpu_stream() else { return };
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
            let halves = [vec![2..5, 0..10, 256..512], vec![0..7, 3..9, 5..1303], vec![1..7, 2..3]];
            slices.extend(halves);
        }
        for ranges in slices {
            let mut bytes = vec![0; tensor.slice(&ranges).unwrap().byte_length() as usize];
            tensor.slice(&ranges).unwrap().decode_into(&mut bytes).unwrap();
            let piece = Expected { name: name.into(), ranges: ranges.clone(), offset: 32, bytes };
            match model.program(&[Piece::new(name, 32).slice(&ranges)]) {
                Ok(program) => check(&stream, &program, &[piece]),
                refused => {
                    assert!(is_refused(refused, "") && name == "folded", "{name} {ranges:?}");
                }
            }
        }
        let odd = model.program(&[Piece::new(name, 0).slice(&[0..rows, 3..shape[1] - 2])]);
        assert_eq!(odd.is_err(), ["gap", "folded"].contains(&name), "{name}");
        let beyond = [0..rows, 0..shape[1], 0..columns, 0..1];
        assert!(model.program(&[Piece::new(name, 0).slice(&beyond)]).is_err());
    }
}
