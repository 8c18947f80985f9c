//! Tiles of other floats than BF16: F8, F16, F32, and what was BF16, F16 or F8 before.

use df11::{
    Dtype, Encoding,
    gpu::{
        Choices, Device, ExpertDecoder, Indices, Linear, LoadOptions, Matrix, Piece, Preference,
        Residence, Status, Transcoded,
        cudarc::driver::{DevicePtr as _, DevicePtrMut as _},
    },
    hazmat::tile::{CODEBOOK, FloatSplit},
};

use super::{
    Cut, POISON, cases, check_blocks,
    container::{FLOATS, Item, Model, Store, normal_weights, parse, tile_arrays::Arrays},
    gpu_stream, is_refused, launch,
    linear::{borrowed, decode_slice},
    load, open, random, run,
};

/// Each float in rows of tiles, in tiles of a matrix that end with the last column, and in others.
pub(crate) const CUTS: [Cut; 21] = {
    let mut cuts = [Cut::Vector; 21];
    let mut at = 0;
    while at < cuts.len() {
        cuts[at] = Cut::Float(at / 3, [None, Some(512), Some(264)][at % 3]);
        at += 1;
    }
    cuts
};

fn split(float: usize) -> FloatSplit {
    let (dtype, zero_bits) = FLOATS[float];
    FloatSplit::of(dtype, zero_bits).unwrap()
}

/// Floats out of as many BF16 weights: the exponents modulo those that the dtype has. All patterns
/// of BF16 become all patterns of 8 and 16 bits, and all exponents and signs of 32.
pub(crate) fn floats(float: usize, weights: &[u8]) -> Vec<u8> {
    let split = split(float);
    let (words, mut state) = (weights.as_chunks::<2>().0, 3);
    let word = |&word: &[u8; 2]| {
        let word = u32::from(u16::from_le_bytes(word));
        let (sign, exponent, mantissa) = (word >> 15, word >> 7 & 255, word & 127);
        // Mantissa, and what the dtype has no place for among the exponents; then more bits.
        let low = mantissa << 3 | exponent >> 5;
        let magnitude = split.kept_bits() - 1;
        let kept = match magnitude {
            0..=10 => low >> (10 - magnitude),
            _ => low << (magnitude - 10) | random(&mut state) as u32 >> (31 - (magnitude - 10)),
        };
        let exponent = exponent % (1 << split.exponent_bits());
        split.weight(exponent as u8, sign << magnitude | kept)
    };
    words.iter().map(word).flat_map(|word| word.to_le_bytes()[..split.bytes()].to_vec()).collect()
}

fn arrays(item: &Item) -> &Arrays {
    let Store::Encoded(arrays) = &item.store else { panic!("{} is in tiles", item.name) };
    arrays
}

/// The bytes that the reference decoder makes of an item.
fn reference(item: &Item) -> Option<Vec<u8>> {
    let Arrays { codebook, records, bitstream, plane, parameters, zero_bits } = arrays(item);
    let arrays = [codebook, records, bitstream, plane].map(Vec::as_slice);
    let [tile_columns, columns, bits] = *parameters;
    let parameters = [tile_columns, columns, bits, *zero_bits];
    let elements = item.shape.iter().product();
    df11_reference::decode_float(arrays, parameters, item.dtype.0, elements).ok()
}

#[test]
fn floats_decode_as_the_reference_does() {
    let Some((device, stream)) = gpu_stream() else { return };
    let patterns: Vec<u8> = (0..=u16::MAX).rev().flat_map(u16::to_le_bytes).collect();
    for (float, (dtype, _)) in FLOATS.into_iter().enumerate() {
        let mut items = vec![];
        for columns in [None, Some(256), Some(1024)] {
            let name = format!("patterns {columns:?}");
            items.push(Cut::Float(float, columns).item(&name, &[256, 256], patterns.clone()));
        }
        // Last units of one to eight weights in each half of a pair; a last row of tiles, and a
        // last column, that are not whole.
        for count in (8192 + 240..8192 + 280).chain(1..20).step_by(3).chain([8192, 256]) {
            let weights = normal_weights(count, 9);
            let item = Cut::Float(float, None).item(&format!("{count}"), &[count as u64], weights);
            items.push(item);
        }
        for (rows, columns) in [(70, 328), (33, 520), (1, 8), (32, 256), (65, 1000)] {
            let name = format!("{rows} x {columns}");
            let weights = normal_weights((rows * columns) as usize, columns);
            items.push(Cut::Float(float, Some(columns)).item(&name, &[rows, columns], weights));
        }
        let bytes = Model::new(&items, &[]).build();
        let (original, model) = (open(bytes.clone()), load(device, bytes));
        for item in &items {
            let name = &item.name;
            let expected = reference(item).unwrap();
            assert!(expected == item.data, "{dtype:?}, {name}: the reference");
            assert_eq!(original.tensor(name).unwrap().encoding(), Encoding::Float);
            let rows = model.rows(name, 0..item.shape[0]).unwrap();
            assert!(run(&rows, &stream) == expected, "{dtype:?}, {name}");
        }
    }
}

#[test]
fn floats_stay_compressed_on_the_gpu() {
    let Some((device, _)) = gpu_stream() else { return };
    for (float, (dtype, _)) in FLOATS.into_iter().enumerate() {
        let weights = normal_weights(1 << 20, 7);
        let item = Cut::Float(float, Some(1024)).item("w", &[1024, 1024], weights);
        let bytes = load(device, Model::new(std::slice::from_ref(&item), &[]).build());
        let bytes = bytes.device_bytes();
        assert!(bytes < item.data.len() as u64 / 100 * 90, "{dtype:?}: {bytes}");
    }
}

/// Small matrices and large ones, which come in several parts; one with too many exceptions, and
/// one that is not BF16.
#[test]
fn bf16_with_zero_bits_becomes_fast_while_it_is_loaded() {
    let Some((device, stream)) = gpu_stream() else { return };
    let bf16 = FLOATS.iter().position(|(dtype, _)| *dtype == Dtype::BF16).unwrap();
    let patterns: Vec<u8> = (0..=u16::MAX).rev().flat_map(u16::to_le_bytes).collect();
    let matrix = |float: usize, name: &str, shape: [u64; 2], weights| {
        Cut::Float(float, Some(shape[1])).item(name, &shape, weights)
    };
    let normal = |shape: [u64; 2]| normal_weights((shape[0] * shape[1]) as usize, shape[0]);
    let items = [
        matrix(bf16, "small", [100, 520], normal([100, 520])),
        matrix(bf16, "large", [3000, 2056], normal([3000, 2056])),
        matrix(bf16, "patterns", [256, 256], patterns),
        matrix(bf16 - 1, "f16", [100, 520], normal([100, 520])),
        Item::matrix("tile", [100, 520], 9),
    ];
    let original = open(Model::new(&items, &[]).build());
    let model = original.load(device, &LoadOptions::new().residence(Preference::Fast)).unwrap();
    check_blocks(&model, &original);
    for item in &items {
        match model.matrix(&item.name) {
            Ok(matrix) => {
                assert_eq!(matrix.residence(), Residence::Fast, "{}", item.name);
                assert!(decode_slice(&stream, &matrix, None) == item.data, "{}", item.name);
                Linear::new(&[matrix]).unwrap();
            }
            other => {
                let why = if item.name == "f16" { "no BF16" } else { "not stored in tiles" };
                assert!(["f16", "patterns"].contains(&&*item.name) && is_refused(other, why));
            }
        }
    }
}

#[test]
fn slices_of_floats_decode_alone() {
    let Some((device, stream)) = gpu_stream() else { return };
    let mut state = 4;
    for (float, (dtype, _)) in FLOATS.into_iter().enumerate() {
        let matrix = Cut::Float(float, Some(520));
        let items = [
            matrix.item("matrix", &[100, 520], normal_weights(52_000, 1)),
            Cut::Float(float, None).item("vector", &[91, 199], normal_weights(91 * 199, 2)),
            matrix.item("experts", &[5, 20, 520], normal_weights(52_000, 3)),
            matrix.item("folded", &[260, 200], normal_weights(52_000, 4)),
        ];
        let bytes = Model::new(&items, &[]).build();
        let (original, model) = (open(bytes.clone()), load(device, bytes));
        for name in ["matrix", "vector", "experts", "folded"] {
            let tensor = original.tensor(name).unwrap();
            for () in cases(&[(); 40], 3) {
                let mut range = |&size: &u64| {
                    let start = random(&mut state) % size;
                    start..start + 1 + random(&mut state) % (size - start)
                };
                let mut ranges: Vec<_> = tensor.shape().iter().map(&mut range).collect();
                if name == "folded" {
                    // Its rows are not those of the tiles, and are decoded one by one, each to a
                    // multiple of 16 bytes.
                    let columns = ranges[1].start.min(184) / 8 * 8;
                    ranges[1] = columns..columns + 16;
                }
                let slice = tensor.slice(&ranges).unwrap();
                let mut expected = vec![0; slice.byte_length() as usize];
                slice.decode_into(&mut expected).unwrap();
                let program = model.program(&[Piece::new(name, 0).slice(&ranges)]).unwrap();
                assert!(run(&program, &stream) == expected, "{dtype:?}, {name} {ranges:?}");
            }
        }
        // Rows of nine bytes or more that are no multiple of sixteen.
        let odd = model.program(&[Piece::new("folded", 0).slice(&[0..9, 0..9])]);
        assert!(is_refused(odd, "multiple of 16"), "{dtype:?}");
    }
}

#[test]
#[expect(unsafe_code, reason = "raw pointers")]
fn matrices_of_floats_in_memory_of_the_caller_are_decoded() {
    let Some((device, stream)) = gpu_stream() else { return };
    let (rows, columns) = (70, 520);
    let item = |float: usize| {
        let weights = normal_weights((rows * columns) as usize, float as u64);
        Cut::Float(float, Some(columns)).item("w", &[rows, columns], weights)
    };
    let items: Vec<_> = (0..FLOATS.len()).map(item).collect();
    let all: Vec<_> = items
        .iter()
        .map(|item| {
            let model = open(Model::new(std::slice::from_ref(item), &[]).build());
            borrowed(device, &stream, &model, "w")
        })
        .collect();
    for ((item, (matrix, _)), (dtype, _)) in items.iter().zip(&all).zip(FLOATS) {
        assert_eq!(matrix.decoded_bytes(), item.data.len() as u64);
        assert!(matrix.device_bytes() < matrix.decoded_bytes() + Device::table_bytes());
        assert!(decode_slice(&stream, matrix, None) == item.data, "{dtype:?}");
        let each = item.data.len() / (rows * columns) as usize;
        for (some, across) in [(5..37, 3..200), (0..1, 8..264), (32..70, 256..520)] {
            let row = |row: u64| {
                let [start, end] = [across.start, across.end].map(|at| row * columns + at);
                item.data[each * start as usize..each * end as usize].to_vec()
            };
            let expected: Vec<u8> = some.clone().flat_map(row).collect();
            let found = decode_slice(&stream, matrix, Some((some.clone(), across.clone())));
            assert!(found == expected, "{dtype:?} {some:?} {across:?}");
        }
        // No other kernel reads them.
        assert!(is_refused(Linear::new(std::slice::from_ref(matrix)), "BF16"), "{dtype:?}");
        match matrix.to_fast(1000) {
            Ok(Transcoded::Fast(fast)) if dtype == Dtype::BF16 => {
                assert!(decode_slice(&stream, &fast, None) == item.data);
            }
            other => assert!(is_refused(other, "BF16"), "{dtype:?}"),
        }
        let status = Status::new(device).unwrap();
        // SAFETY: it is refused before any address is used.
        let rows = unsafe { matrix.gather(Indices::U32(256), 1, (256, columns), &stream, &status) };
        assert!(is_refused(rows, "BF16"), "{dtype:?}");
    }
    // All at once, most of them several times.
    let order = [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 0];
    let mut outputs: Vec<_> = order
        .iter()
        .map(|&at| stream.clone_htod(&vec![POISON; items[at].data.len()]).unwrap())
        .collect();
    let places: Vec<_> = order
        .iter()
        .zip(&mut outputs)
        .map(|(&at, output)| (&all[at].0, output.device_ptr_mut(&stream).0))
        .collect();
    let status = Status::new(device).unwrap();
    // SAFETY: the outputs have their bytes; everything lives until the status has been read.
    unsafe { Matrix::decode_all_into_raw(&places, &stream, &status) }.unwrap();
    status.check(&stream).unwrap();
    for (&at, output) in order.iter().zip(&outputs) {
        assert!(stream.clone_dtoh(output).unwrap() == items[at].data, "{at}");
    }
}

/// Two matrices of other shapes for each expert, and more tasks than threads choose at once.
#[test]
#[expect(unsafe_code, reason = "raw pointers")]
fn experts_that_a_router_chose_are_decoded() {
    const EXPERTS: usize = 300;
    let Some((device, stream)) = gpu_stream() else { return };
    for float in [0, 1] {
        assert_eq!(split(float).bytes(), 1);
        let shapes = [(64, 512), (34, 520)];
        let (items, held): (Vec<_>, Vec<_>) = shapes
            .into_iter()
            .map(|(rows, columns)| {
                let weights = normal_weights((rows * columns) as usize, rows);
                let item = Cut::Float(float, Some(columns)).item("w", &[rows, columns], weights);
                let model = open(Model::new(std::slice::from_ref(&item), &[]).build());
                let held = borrowed(device, &stream, &model, "w");
                (item.data, held)
            })
            .unzip();
        // The second expert has a slice in place of each.
        let slice = |matrix: &Matrix| matrix.rows(0..32).unwrap().columns(256..512).unwrap();
        let slices: Vec<_> = held.iter().map(|(matrix, _)| slice(matrix)).collect();
        let cut = |(data, (_, columns)): (&Vec<u8>, (u64, u64))| -> Vec<u8> {
            let row = |at| data[at * columns as usize..][256..512].to_vec();
            (0..32).flat_map(row).collect()
        };
        let cuts: Vec<_> = items.iter().zip(shapes).map(cut).collect();
        let matrices: Vec<(Matrix, u32)> = (0..2 * EXPERTS)
            .map(|at| {
                let expert = at / 2;
                let matrix = if expert == 1 { &slices[at % 2] } else { &held[at % 2].0 };
                (matrix.clone(), expert as u32)
            })
            .collect();
        let decoder = ExpertDecoder::new(&matrices).unwrap();
        let expected = |is_chosen: &dyn Fn(i64) -> bool| -> Vec<u8> {
            let bytes = (0..2 * EXPERTS).flat_map(|at| {
                let data = if at / 2 == 1 { &cuts[at % 2] } else { &items[at % 2] };
                if is_chosen(i64::from(at as u32) / 2) {
                    data.clone()
                } else {
                    vec![POISON; data.len()]
                }
            });
            bytes.collect()
        };
        let bytes = decoder.bytes() as usize;
        let run = |choices: Option<Choices>| {
            let (result, word) = launch(device, &stream, bytes, |output, status| {
                let output = output.device_ptr_mut(&stream).0;
                // SAFETY: the output has the bytes; ids and map live until the status is read.
                unsafe { decoder.decode_into_raw(choices, output, &stream, status) }
            });
            assert_eq!(word, 0, "the status");
            result
        };
        assert!(run(None) == expected(&|_| true), "all");
        let lists: [&[i64]; 6] =
            [&[], &[7], &[0, 1], &[299, 3, -1, 3, 300, 1 << 40, 1, 7], &[-1], &[300; 40]];
        for ids in lists {
            let chosen = |expert| ids.contains(&expert);
            let wide = stream.clone_htod(&[ids, &[0]].concat()).unwrap();
            let count = ids.len() as u64;
            let choices = Choices::new(Indices::I64(wide.device_ptr(&stream).0), count);
            assert!(run(Some(choices)) == expected(&chosen), "{ids:?}");
            let low = |id: i64| id.cast_unsigned() as u32;
            let narrow: Vec<u32> = ids.iter().map(|&id| low(id)).chain([0]).collect();
            // 2^40 is 0 in 32 bits.
            let chosen = |expert| narrow[..ids.len()].contains(&low(expert));
            let narrow = stream.clone_htod(&narrow).unwrap();
            let choices = Choices::new(Indices::U32(narrow.device_ptr(&stream).0), count);
            assert!(run(Some(choices)) == expected(&chosen), "{ids:?}, 32 bits");
            // This rank has the last 100 of the router's 400 experts, and others.
            let place = |id: i64| if id < 100 { 299 - id } else { -1 };
            let map: Vec<i32> = (0..250).map(|id| place(id) as i32).collect();
            let map = stream.clone_htod(&map).unwrap();
            let mapped: Vec<i64> =
                ids.iter().filter(|&&id| (0..250).contains(&id)).map(|&id| place(id)).collect();
            let chosen = |expert| mapped.contains(&expert);
            let choices = Choices::new(Indices::I64(wide.device_ptr(&stream).0), count);
            let choices = choices.mapped(map.device_ptr(&stream).0, 250);
            assert!(run(Some(choices)) == expected(&chosen), "{ids:?}, mapped");
        }
        // As many choices as name all.
        let many = stream.clone_htod(&vec![5_u32; 8 * EXPERTS]).unwrap();
        let choices = Choices::new(Indices::U32(many.device_ptr(&stream).0), 8 * EXPERTS as u64);
        assert!(run(Some(choices)) == expected(&|_| true), "many");
    }
}

#[test]
fn only_experts_of_one_float_of_8_bits_are_chosen_from() {
    let Some((device, stream)) = gpu_stream() else { return };
    let matrix = |float: usize, shape: [u64; 2]| {
        let weights = normal_weights((shape[0] * shape[1]) as usize, 1);
        let item = Cut::Float(float, Some(shape[1])).item("w", &shape, weights);
        let model = open(Model::new(&[item], &[]).build());
        borrowed(device, &stream, &model, "w")
    };
    let [(e4m3, _a), (e5m2, _b), (f16, _c)] = [0, 1, 2].map(|float| matrix(float, [32, 256]));
    let (odd, _d) = matrix(0, [1, 264]);
    let refused = |matrices: &[(Matrix, u32)], part| {
        assert!(is_refused(ExpertDecoder::new(matrices), part), "{part}");
    };
    refused(&[], "no experts");
    refused(&[(f16.clone(), 0)], "8 bits");
    refused(&[(e4m3.clone(), 0), (e5m2, 1)], "8 bits");
    refused(&[(e4m3.clone(), 1024)], "1,024");
    refused(&[(odd, 0), (e4m3.clone(), 1)], "byte 264");
    let decoder = ExpertDecoder::new(&[(e4m3, 0)]).unwrap();
    let status = Status::new(device).unwrap();
    let wide = Some(Choices::new(Indices::I64(260), 1));
    for (choices, output, part) in [(None, 8, "256 bytes"), (wide, 256, "misaligned")] {
        // SAFETY: it is refused before any address is used.
        #[expect(unsafe_code, reason = "raw pointers")]
        let result = unsafe { decoder.decode_into_raw(choices, output, &stream, &status) };
        assert!(is_refused(result, part), "{part}");
    }
}

#[test]
fn exponents_that_a_dtype_does_not_have_set_the_status() {
    let Some((device, stream)) = gpu_stream() else { return };
    for (float, (dtype, _)) in FLOATS.into_iter().enumerate() {
        let count = 40_000;
        let item = Cut::Float(float, Some(1000)).item("w", &[40, 1000], normal_weights(count, 1));
        let original = Model::new(std::slice::from_ref(&item), &[]).build();
        let words = arrays(&item).codebook.len() / 2;
        let least = words.saturating_sub(13).min(6);
        // A pair of the codebook that occurs has a larger exponent in one half; and none has.
        for (word, half) in [(13, 0), (13, 1), (13 + least / 2, 0), (words - 1, 1), (0, 2)] {
            let mut draft = parse(&original);
            let codebook = draft.first_array("w") + CODEBOOK;
            let mut changed = item.clone();
            let Store::Encoded(changed_arrays) = &mut changed.store else { unreachable!() };
            if half < 2 {
                let at = 2 * word + half;
                draft.array(codebook)[at] |= 0xE0;
                changed_arrays.codebook[at] |= 0xE0;
            }
            draft.repair_checksums();
            let options = LoadOptions::new().without_validation();
            let model = open(draft.pack()).load(device, &options).unwrap();
            let rows = model.rows("w", 0..40).unwrap();
            let (result, word) = launch(device, &stream, item.data.len(), |output, status| {
                rows.decode_into(output, &stream, status)
            });
            match reference(&changed) {
                Some(expected) => assert!(word == 0 && result == expected, "{dtype:?}, {half}"),
                None if split(float).exponent_bits() == 8 => {}
                None => assert_ne!(word, 0, "{dtype:?}, {half}"),
            }
        }
    }
}
