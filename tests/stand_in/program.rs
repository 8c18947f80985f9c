//! Programs of tensors on a GPU, planned and run. `tests/gpu/programs.rs` tests the kernels'
//! results.

use df11::{
    Dtype,
    gpu::{Device, GpuDecoder, GpuModel, GpuProgram, LoadOptions, Piece, Placement, Plan, Status},
    hazmat::Decoder,
};

use crate::{
    container::{Item, Model, normal_weights},
    refused,
    stand_in::devices,
};

const POISON: u8 = 0xA5;
/// Three blocks: raw tensors of 40 rows, of 120, 9 and 64 bytes, and a coded one.
fn sample() -> df11::Model {
    let mut items = Vec::new();
    for block in 0..3u8 {
        let bytes =
            |count: usize| (0..count).map(|at| (at * 7) as u8 ^ block << 6).collect::<Vec<u8>>();
        let name = |part: &str| format!("{block}.{part}");
        let of_block = [
            Item::raw(&name("floats"), Dtype::F32, &[40, 30], bytes(4800)),
            Item::raw(&name("odd"), Dtype::U8, &[40, 9], bytes(360)),
            Item::raw(&name("halves"), Dtype::F16, &[40, 32], bytes(2560)),
            Item::gap(&name("coded"), &[50, 80], normal_weights(4000, 5), (32, 128)),
        ];
        items.extend(of_block.map(|item| item.in_block(&format!("layer {block}"))));
    }
    items.push(items[0].alias("tied"));
    items.push(Item::raw("none", Dtype::BF16, &[7, 0], vec![]));
    Model::new(&items, &[]).open()
}

/// Runs a program of raw tensors, whose memory is the host's, and compares each piece, and what
/// lies between.
fn check(original: &df11::Model, program: &GpuProgram, pieces: &[Cut<'_>]) {
    let parts = pieces.iter().map(|&(name, rows, offset)| {
        let tensor = original.tensor(name).unwrap();
        let bytes = tensor.decode::<u8>().unwrap();
        let row = bytes.len() as u64 / tensor.shape().first().copied().unwrap_or(1).max(1);
        let range = rows.map_or(0..bytes.len() as u64, |(start, end)| start * row..end * row);
        (offset, bytes[range.start as usize..range.end as usize].to_vec())
    });
    check_bytes(program, &parts.collect::<Vec<_>>(), &format!("{pieces:?}"));
}

/// Like [`check`], for pieces of these bytes at their places in the output.
fn check_bytes(program: &GpuProgram, parts: &[(u64, Vec<u8>)], what: &str) {
    let device = program.device();
    let (stream, status) = (device.context().new_stream().unwrap(), Status::new(device).unwrap());
    let mut output = stream.clone_htod(&vec![POISON; program.bytes() as usize + 64]).unwrap();
    let mut expected = vec![POISON; output.len()];
    for (offset, bytes) in parts {
        expected[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    program.decode_into(&mut output.as_view_mut(), &stream, &status).unwrap();
    status.check(&stream).unwrap();
    assert!(stream.clone_dtoh(&output).unwrap() == expected, "{what}");
}

/// A tensor, its rows or all of it, and its place in the output.
type Cut<'n> = (&'n str, Option<(u64, u64)>, u64);

/// Columns of raw tensors, which the driver copies row by row, and what cannot be sliced on a GPU.
#[test]
fn slices_are_dense_in_the_output() {
    let Some([_]) = devices() else { return };
    let original = sample();
    for plan in [Plan::resident(&original), Plan::all_streamed(&original)] {
        let model = load(&original, &plan.unwrap());
        for (name, ranges) in
            [("0.floats", [3..37, 7..30]), ("1.odd", [0..40, 8..9]), ("tied", [5..6, 0..29])]
        {
            let program = model.program(&[Piece::new(name, 48).slice(&ranges)]).unwrap();
            let tensor = original.tensor(name).unwrap();
            let mut expected = vec![0; tensor.slice(&ranges).unwrap().byte_length() as usize];
            tensor.slice(&ranges).unwrap().decode_into(&mut expected).unwrap();
            check_bytes(&program, &[(48, expected)], &format!("{name} {ranges:?}"));
        }
        let sliced = |columns| model.program(&[Piece::new("0.coded", 0).slice(&[0..50, columns])]);
        sliced(8..24).unwrap();
        let error = sliced(8..23).unwrap_err().to_string();
        assert!(error.contains("convert the container to the tile layout"), "{error}");
    }
}

fn program(model: &GpuModel, cuts: &[Cut<'_>]) -> df11::Result<GpuProgram> {
    let pieces = cuts.iter().map(|&(name, rows, offset)| match rows {
        Some((start, end)) => Piece::new(name, offset).rows(start..end),
        None => Piece::new(name, offset),
    });
    model.program(&pieces.collect::<Vec<_>>())
}

fn load(original: &df11::Model, plan: &Plan) -> GpuModel {
    let devices: Vec<Device> =
        (0..plan.device_bytes().len()).map(|ordinal| Device::open(ordinal).unwrap()).collect();
    original.load_on(&devices, &LoadOptions::new().plan(plan.clone()), &()).unwrap()
}

#[test]
fn pieces_of_any_blocks_go_to_their_places() {
    let Some([_]) = devices() else { return };
    let original = sample();
    for plan in [Plan::resident(&original), Plan::all_streamed(&original)] {
        let model = load(&original, &plan.unwrap());
        let cuts: [&[Cut<'_>]; 7] = [
            &[("0.floats", None, 0)],
            // Raw tensors go anywhere, in any order.
            &[("2.odd", None, 4999), ("0.floats", None, 16), ("1.halves", None, 6000)],
            &[
                ("1.odd", Some((3, 40)), 1),
                ("1.odd", Some((0, 3)), 500),
                ("1.halves", Some((5, 5)), 0),
            ],
            &[("tied", Some((0, 20)), 0), ("0.floats", Some((20, 40)), 2400)],
            &[("none", None, 77)],
            &[("1.odd", None, 0), ("1.odd", None, 360), ("1.odd", Some((39, 40)), 720)],
            &[("1.floats", None, 1 << 20)],
        ];
        for cuts in cuts {
            let program = program(&model, cuts).unwrap();
            (0..3).for_each(|_| check(&original, &program, cuts));
        }
        let rows = model.rows("2.floats", 4..9).unwrap();
        assert_eq!(rows.bytes(), 600);
        check(&original, &rows, &[("2.floats", Some((4, 9)), 0)]);
        // It keeps the model.
        drop(model);
        check(&original, &rows, &[("2.floats", Some((4, 9)), 0)]);
    }
}

#[test]
fn slots_serve_programs_of_one_streamed_block() {
    let Some([_]) = devices() else { return };
    let original = sample();
    let resident = load(&original, &Plan::resident(&original).unwrap());
    let model = load(&original, &Plan::all_streamed(&original).unwrap());
    let is_streamed =
        |model: &GpuModel, cuts: &[Cut<'_>]| program(model, cuts).unwrap().is_streamed();
    for (cuts, expected) in [
        (&[("0.odd", None, 0)][..], true),
        (&[("1.odd", None, 0), ("1.coded", None, 512)], true),
        (&[("0.odd", None, 0), ("1.odd", None, 512)], false),
        // A few rows are no reason to copy a block; the halves of a tensor are.
        (&[("1.floats", Some((3, 9)), 0)], false),
        (&[("1.coded", Some((0, 25)), 4096), ("1.coded", Some((25, 50)), 0)], true),
    ] {
        assert_eq!(is_streamed(&model, cuts), expected, "{cuts:?}");
        assert!(!is_streamed(&resident, cuts));
    }
    // Programs and blocks take turns.
    let cuts: [[Cut<'_>; 2]; 3] = [
        [("0.floats", None, 0), ("0.odd", None, 4800)],
        [("1.floats", None, 0), ("1.odd", None, 4800)],
        [("2.floats", None, 0), ("2.odd", None, 4800)],
    ];
    let programs = cuts.map(|cuts| program(&model, &cuts).unwrap());
    let device = model.devices().next().unwrap();
    let (stream, status) = (device.context().new_stream().unwrap(), Status::new(device).unwrap());
    let mut output = stream.alloc_zeros::<u8>(model.largest_block_bytes() as usize).unwrap();
    for at in [0, 1, 2, 0, 2, 1, 1, 0, 2] {
        check(&original, &programs[at], &cuts[at]);
        let block = model.block(&format!("layer {}", (at * 2 + 1) % 3)).unwrap();
        block.decode_into(&mut output.as_view_mut(), &stream, &status).unwrap();
    }
}

#[test]
fn impossible_programs_are_refused() {
    let Some([_, _]) = devices() else { return };
    let original = sample();
    let model = load(&original, &Plan::resident(&original).unwrap());
    let coded = original.tensor("0.coded").unwrap();
    assert!(coded.stored_bytes() < coded.byte_length().unwrap());
    for (cuts, part) in [
        (&[][..], "nothing to decode"),
        (&[("absent", None, 0)], "no tensor \"absent\""),
        (&[("0.odd", Some((3, 41)), 0)], "they are 0..40"),
        (&[("0.odd", None, 0), ("0.coded", None, 8)], "a multiple of 16"),
        (&[("0.odd", None, u64::MAX - 9)], "a smaller offset"),
    ] {
        let said = refused(program(&model, cuts));
        assert!(said.contains(part), "{said}");
    }
    let all = Plan::resident(&original).unwrap().device_bytes()[0];
    let plan = Plan::fit(&original, &[all * 2 / 3, all]).unwrap();
    let model = load(&original, &plan);
    let of = |device| {
        plan.placements()
            .iter()
            .position(|place| place.is_some_and(|place| place.device == device))
            .unwrap()
    };
    let name =
        |device: usize| original.blocks().nth(of(device)).unwrap().tensors().next().unwrap().name();
    let said = refused(model.program(&[Piece::new(name(0), 0), Piece::new(name(1), 512)]));
    assert!(said.contains("different GPUs; make a program for each"), "{said}");
    assert_eq!(model.program(&[Piece::new(name(1), 0)]).unwrap().device().info().ordinal, 1);
}

#[test]
fn blocks_that_are_not_loaded_are_told() {
    let Some([_, _]) = devices() else { return };
    let original = sample();
    let last = original.blocks().last().unwrap().name().to_owned();
    let on = |device, streamed| Some(Placement { device, streamed });
    // The third block on the first GPU, the first one streamed to the second; the one between
    // nowhere.
    let place = |block: df11::Block<'_>| match block.name() {
        "layer 2" => on(0, false),
        "layer 0" => on(1, true),
        name if name == last => on(1, false),
        _ => None,
    };
    let plan = Plan::of(&original, 2, place).unwrap();
    let model = load(&original, &plan);
    let names: Vec<&str> = model.blocks().map(|block| block.name()).collect();
    assert_eq!(names, ["layer 0", "layer 2", &last]);
    let places: Vec<(usize, bool)> =
        model.blocks().map(|block| (block.device().info().ordinal, block.is_streamed())).collect();
    assert_eq!(places, [(1, true), (0, false), (1, false)]);
    let outputs: u64 = [0, 1]
        .map(|ordinal| {
            let mine = model.blocks().filter(|block| block.device().info().ordinal == ordinal);
            2 * mine.map(|block| block.layout().bytes).max().unwrap()
        })
        .iter()
        .sum();
    // The plan counts a task for raw tensors too, which is far less than the block that is left
    // out.
    let slack = plan.device_bytes().iter().sum::<u64>() - (model.device_bytes() + outputs);
    assert!(slack < 4096, "{slack}");
    // Loaded tensors decode as usual, also an alias beside its target.
    for cuts in [
        &[("2.floats", None, 0), ("2.odd", Some((3, 9)), 5000)][..],
        &[("tied", None, 16)],
        &[("0.halves", None, 0)],
    ] {
        let program = program(&model, cuts).unwrap();
        assert_eq!(program.is_streamed(), cuts[0].0 != "2.floats");
        (0..3).for_each(|_| check(&original, &program, cuts));
    }
    assert_eq!(model.tensor("tied").unwrap().shape(), [40, 30]);
    // An error names a tensor that is not loaded; nothing panics.
    let cuts = [("2.odd", None, 0), ("1.coded", None, 512)];
    for (said, part) in [
        (refused(model.block("layer 1")), "block \"layer 1\" is not loaded"),
        (refused(model.tensor("1.odd")), "tensor \"1.odd\" is not loaded"),
        (refused(model.rows("1.odd", 0..1)), "tensor \"1.odd\" is not loaded"),
        (refused(program(&model, &cuts)), "tensor \"1.coded\" is not"),
        (refused(model.block("absent")), "no block \"absent\""),
        (refused(model.tensor("absent")), "no tensor \"absent\""),
    ] {
        assert!(said.contains(part), "{said}");
    }
    let device = Device::open(0).unwrap();
    let part =
        Plan::of(&original, 1, |block| if block.name() == "layer 1" { None } else { on(0, false) });
    let decoder =
        GpuDecoder::load(&original, &device, &LoadOptions::new().plan(part.unwrap())).unwrap();
    let read = |name| {
        let mut out = vec![0; 360];
        decoder.prepare(original.tensor(name).unwrap())?.read(0..360, &mut out).map(|()| out)
    };
    let error = read("1.odd").unwrap_err();
    assert!(error.to_string().contains("tensor \"1.odd\" is not loaded"), "{error}");
}

#[test]
fn plans_of_other_numbers_of_gpus_are_refused() {
    let Some(devices) = devices::<2>() else { return };
    let original = sample();
    let first = |_: df11::Block<'_>| Some(Placement { device: 0, streamed: false });
    for count in [1, 3] {
        let plan = Plan::of(&original, count, first).unwrap();
        let said = refused(original.load_on(&devices, &LoadOptions::new().plan(plan), &()));
        assert!(said.contains(&format!("the plan is for {count} GPUs, not 2")), "{said}");
    }
    // A GPU may have none of the blocks, and a model none that is loaded.
    let plan = Plan::of(&original, 2, first).unwrap();
    assert_eq!(load(&original, &plan).blocks().len(), original.blocks().len());
    let none = load(&original, &Plan::of(&original, 2, |_| None).unwrap());
    assert_eq!((none.blocks().len(), none.largest_block_bytes()), (0, 0));
    assert!(none.block("layer 0").is_err_and(|error| error.to_string().contains("not loaded")));
}
