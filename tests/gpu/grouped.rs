//! Products with a mixture's experts, against sums in f64 on the CPU.

use std::sync::Arc;

use df11::gpu::{
    Choices, ExpertDecoder, GroupedLinear, Indices, LinearInput, LinearOutput, Matrix, Routing,
    Status,
    cudarc::driver::{CudaStream, DevicePtr as _, DevicePtrMut as _},
};
use half::bf16;

use super::{
    Cut, POISON, capture, cases,
    container::{self, normal_weights},
    gpu, gpu_stream,
    linear::{self, Host, POISON_HALF, borrowed, check_sum, fast, launch_at, model},
    open, random,
};

/// A mixture: a matrix for each expert, and rows of x.
struct Mixture {
    hosts: Vec<Host>,
    linear: GroupedLinear,
    x: Host,
}

impl Mixture {
    /// Experts are slices of one tensor, as most checkpoints have them; or tensors of their own.
    fn new(experts: usize, rows: usize, columns: usize, stacked: bool) -> Self {
        Self::of(&Host::normal(experts * rows, columns, 11), experts, stacked)
    }

    fn of(all: &Host, experts: usize, stacked: bool) -> Self {
        let device = gpu().unwrap();
        let (rows, columns) = (all.rows / experts, all.columns);
        let hosts: Vec<Host> =
            (0..experts).map(|at| all.slice(at * rows..(at + 1) * rows, 0..columns)).collect();
        let matrices: Vec<Matrix> = if stacked {
            let model = model(device, &[("all", all)]);
            fast(&model.matrix("all").unwrap(), all).split_rows(experts as u64).unwrap()
        } else {
            let names: Vec<String> = (0..experts).map(|at| at.to_string()).collect();
            let pairs: Vec<(&str, &Host)> = names.iter().map(String::as_str).zip(&hosts).collect();
            let model = model(device, &pairs);
            pairs.iter().map(|(name, host)| fast(&model.matrix(name).unwrap(), host)).collect()
        };
        Self {
            hosts,
            linear: GroupedLinear::new(&matrices).unwrap(),
            x: Host::normal(9, columns, 5),
        }
    }

    fn rows(&self) -> usize {
        self.hosts[0].rows
    }

    /// The places that a block may have.
    fn block_sizes(&self) -> Vec<usize> {
        let named = |share: u64| self.linear.block_places(share * self.linear.experts()) as usize;
        let mut sizes: Vec<usize> = (0..=128).map(named).collect();
        sizes.dedup();
        sizes
    }

    /// Multiplies into poisoned memory; y with rows of `pitch`, and the status.
    #[expect(unsafe_code, reason = "raw pointers")]
    fn run(&self, stream: &Arc<CudaStream>, call: &Call) -> (Vec<u16>, u32) {
        // x at an address and with a pitch that copies of 16 bytes do not like, or do.
        let pitch = self.x.columns.next_multiple_of(8) + call.shift;
        let x = linear::Call { x: &self.x, offset: call.shift, pitch, bias: false, splits: 0 };
        let x = x.upload(stream);
        let offsets = stream.clone_htod(&call.offsets).unwrap();
        let rows = call.rows.as_ref().map(|rows| stream.clone_htod(rows).unwrap());
        let index = rows.as_ref().map_or(0, |rows| rows.device_ptr(stream).0);
        let routing = Routing::new(offsets.device_ptr(stream).0, call.places as u64).rows(index);
        let from = x.device_ptr(stream).0 + 2 * call.shift as u64;
        let input = LinearInput::new(from, 9, pitch as u64);
        launch_at(self.linear.device(), stream, call.places * call.pitch, |y, status| {
            let y = LinearOutput::new(y, call.pitch as u64);
            // SAFETY: there are as many rows, offsets and places; all live until the status is
            // read.
            unsafe { self.linear.multiply(input, routing, y, stream, status) }
        })
    }

    /// Each place against sums in f64, and poison everywhere else.
    fn check(&self, call: &Call, y: &[u16]) {
        let expert_of = |place: usize| {
            let holds = |pair: &[u32]| (pair[0] as usize..pair[1] as usize).contains(&place);
            call.offsets.windows(2).position(holds)
        };
        for (place, row) in y.chunks(call.pitch).enumerate() {
            let expert = expert_of(place);
            let written = if expert.is_some() { self.rows() } else { 0 };
            assert!(row[written..].iter().all(|&half| half == POISON_HALF), "after place {place}");
            let Some(weights) = expert.map(|expert| &self.hosts[expert]) else { continue };
            let x = call.rows.as_ref().map_or(place, |rows| rows[place] as usize);
            for (at, &bits) in row[..written].iter().enumerate() {
                let terms = self.x.terms(x, weights, at);
                check_sum(bits, terms, || format!("place {place}, column {at}"));
            }
        }
    }
}

struct Call {
    offsets: Vec<u32>,
    rows: Option<Vec<u32>>,
    places: usize,
    pitch: usize,
    /// Offset of x in its buffer, and extra pitch, in elements.
    shift: usize,
}

impl Call {
    /// This many places for each expert; their rows of x at random.
    fn new(mixture: &Mixture, counts: &[u32], seed: u64) -> Self {
        let mut offsets = vec![0];
        for count in counts {
            offsets.push(offsets[offsets.len() - 1] + count);
        }
        let (places, mut state) = (offsets[counts.len()] as usize, seed);
        let rows = (0..places).map(|_| (random(&mut state) % 9) as u32).collect();
        Self { offsets, rows: Some(rows), places, pitch: mixture.rows() + 3, shift: 0 }
    }
}

/// Shapes of a mixture: experts, rows, columns, and whether all are one tensor.
const SHAPES: [(usize, usize, usize, bool); 4] =
    [(5, 96, 520, true), (3, 40, 264, false), (1, 7, 8, false), (20, 64, 1032, true)];

#[test]
fn each_place_is_multiplied_by_its_expert() {
    let Some((_, stream)) = gpu_stream() else { return };
    for &(experts, rows, columns, stacked) in cases(&SHAPES, 3) {
        let mixture = Mixture::new(experts, rows, columns, stacked);
        let only = |expert: usize, places| {
            (0..experts).map(|at| if at == expert { places } else { 0 }).collect()
        };
        let mut state = 7;
        let some = (0..experts).map(|_| (random(&mut state) % 4) as u32 * 3).collect();
        let (first, second) = (only(experts - 1, 1), only(experts / 2, 140));
        let counts: [Vec<u32>; 5] = [vec![0; experts], first, second, vec![17; experts], some];
        for (seed, counts) in counts.iter().enumerate() {
            let call = Call::new(&mixture, counts, seed as u64);
            let (y, word) = mixture.run(&stream, &call);
            assert_eq!(word, 0);
            mixture.check(&call, &y);
            // Anywhere in memory, and in every run: the same bits.
            for shift in [1, 8, 0] {
                let call =
                    Call { shift, offsets: call.offsets.clone(), rows: call.rows.clone(), ..call };
                let (moved, word) = mixture.run(&stream, &call);
                assert!(moved == y && word == 0, "{experts} x {rows} x {columns}, {shift}");
            }
            // Each place without the others: the same bits.
            for place in (0..call.places).step_by(5) {
                let offsets =
                    call.offsets.iter().map(|&offset| u32::from(offset as usize > place)).collect();
                let row = call.rows.as_ref().map(|rows| vec![rows[place]]);
                let alone = Call { offsets, rows: row, places: 1, ..call };
                let (alone, _) = mixture.run(&stream, &alone);
                assert!(alone[..rows] == y[place * call.pitch..][..rows], "place {place}");
            }
        }
    }
}

/// Places may have the rows of x in their order, and some places no expert.
#[test]
fn places_without_an_expert_stay_as_they_are() {
    let Some((_, stream)) = gpu_stream() else { return };
    let mixture = Mixture::new(5, 96, 520, true);
    for offsets in [vec![2, 2, 4, 4, 5, 7], vec![9; 6], vec![0; 6], vec![0, 9, 9, 9, 9, 9]] {
        let call = Call { offsets, rows: None, places: 9, pitch: 96, shift: 0 };
        let (y, word) = mixture.run(&stream, &call);
        assert_eq!(word, 0);
        mixture.check(&call, &y);
    }
}

#[test]
fn hostile_offsets_and_rows_stay_inside() {
    let Some((_, stream)) = gpu_stream() else { return };
    let mixture = Mixture::new(5, 96, 520, true);
    // Numbers of places that take each kernel.
    for each in [3, 20, 60] {
        hostile_offsets(&mixture, &stream, each);
    }
}

fn hostile_offsets(mixture: &Mixture, stream: &Arc<CudaStream>, each: u32) {
    let good = Call::new(mixture, &[each; 5], 1);
    let places = good.places as u64;
    let (expected, _) = mixture.run(stream, &good);
    let mut state = 3;
    for round in 0..cases(&[(); 60], 12).len() {
        let (mut offsets, mut rows) = (good.offsets.clone(), good.rows.clone().unwrap());
        match round % 4 {
            0 => {
                offsets[1 + random(&mut state) as usize % 5] =
                    u32::MAX - (random(&mut state) % 5) as u32;
            }
            1 => offsets[random(&mut state) as usize % 4] = 5 * each - 1,
            2 => {
                let place = random(&mut state) % places;
                rows[place as usize] = 9 + random(&mut state) as u32 % 1000;
            }
            _ => offsets.iter_mut().for_each(|offset| *offset = random(&mut state) as u32),
        }
        let call = Call { offsets, rows: Some(rows), ..good };
        let (y, word) = mixture.run(stream, &call);
        assert_eq!(word, 256, "round {round}: {:?}", call.offsets);
        let between =
            y.chunks(call.pitch).all(|row| row[96..].iter().all(|&half| half == POISON_HALF));
        assert!(between, "nothing else is written");
    }
    assert!(mixture.run(stream, &good) == (expected, 0));
}

/// Experts that each row of x chose, as slots: one by one, and sorted into blocks.
struct Slots<'a> {
    mixture: &'a Mixture,
    /// The expert of each slot.
    experts: Vec<u32>,
    share: usize,
    factors: Option<Vec<f32>>,
}

/// Lists of `Routing::in_blocks`.
struct Blocks {
    each: usize,
    experts: Vec<u32>,
    indices: Vec<u32>,
    end: u32,
}

impl<'a> Slots<'a> {
    fn new(mixture: &'a Mixture, share: usize, seed: u64) -> Self {
        let mut state = seed;
        let mut one = || (random(&mut state) % mixture.hosts.len() as u64) as u32;
        Self { mixture, experts: (0..9 * share).map(|_| one()).collect(), share, factors: None }
    }

    /// As vLLM's operator leaves them: blocks of one expert, padded with the number of slots, and
    /// anything after the end.
    fn blocks(&self, each: usize) -> Blocks {
        let slots = self.experts.len() as u32;
        let (mut experts, mut indices) = (Vec::new(), Vec::new());
        for expert in 0..self.mixture.hosts.len() as u32 {
            let mine = (0..slots).filter(|&slot| self.experts[slot as usize] == expert);
            indices.extend(mine);
            indices.resize(indices.len().next_multiple_of(each), slots);
            experts.resize(indices.len() / each, expert);
        }
        let end = indices.len() as u32;
        indices.extend([u32::MAX, 0, 1]);
        Blocks { each, experts, indices, end }
    }

    /// y with rows of `rows + 3`, and the status.
    #[expect(unsafe_code, reason = "raw pointers")]
    fn run(&self, stream: &Arc<CudaStream>, blocks: Option<&Blocks>) -> (Vec<u16>, u32) {
        let linear = &self.mixture.linear;
        let columns = self.mixture.x.columns;
        let x = stream.clone_htod(&self.mixture.x.bits).unwrap();
        let experts = blocks.map_or(&self.experts, |blocks| &blocks.experts);
        let experts = stream.clone_htod(experts).unwrap();
        let indices = blocks.map(|blocks| stream.clone_htod(&blocks.indices).unwrap());
        let end = blocks.map(|blocks| stream.clone_htod(&[blocks.end]).unwrap());
        let factors = self.factors.as_ref().map(|all| stream.clone_htod(all).unwrap());
        let (slots, share) = (self.experts.len() as u64, self.share as u64);
        let mut routing = Routing::slots(experts.device_ptr(stream).0, slots, share);
        if let (Some(indices), Some(end)) = (&indices, &end) {
            let places = indices.len() as u64;
            let each = blocks.map_or(0, |blocks| blocks.each as u64);
            let (indices, end) = (indices.device_ptr(stream).0, end.device_ptr(stream).0);
            routing = routing.in_blocks(each, indices, places, end);
        }
        let routing = routing.factors(factors.as_ref().map_or(0, |all| all.device_ptr(stream).0));
        let input = LinearInput::new(x.device_ptr(stream).0, 9, columns as u64);
        let pitch = self.pitch();
        launch_at(linear.device(), stream, self.experts.len() * pitch, |y, status| {
            let y = LinearOutput::new(y, pitch as u64);
            // SAFETY: lists and factors have the lengths that `Routing` asks for; all live until
            // the status is read.
            unsafe { linear.multiply(input, routing, y, stream, status) }
        })
    }

    fn pitch(&self) -> usize {
        self.mixture.rows() + 3
    }

    /// The same products by offsets, at the slots' rows.
    fn by_offsets(&self, stream: &Arc<CudaStream>) -> Vec<u16> {
        let mut order: Vec<usize> = (0..self.experts.len()).collect();
        order.sort_by_key(|&slot| self.experts[slot]);
        let count = |expert| self.experts.iter().filter(|&&one| one < expert).count() as u32;
        let offsets = (0..=self.mixture.hosts.len() as u32).map(count).collect();
        let rows = order.iter().map(|&slot| (slot / self.share) as u32).collect();
        let (places, pitch) = (order.len(), self.pitch());
        let call = Call { offsets, rows: Some(rows), places, pitch, shift: 0 };
        let (sorted, word) = self.mixture.run(stream, &call);
        assert_eq!(word, 0);
        let mut y = vec![0; sorted.len()];
        for (row, slot) in sorted.chunks(pitch).zip(order) {
            y[slot * pitch..][..pitch].copy_from_slice(row);
        }
        y
    }
}

/// Slots give the bits of places, one by one and in blocks, with any number of slots per expert.
#[test]
fn slots_are_multiplied_by_their_experts() {
    let Some((_, stream)) = gpu_stream() else { return };
    for &(experts, rows, columns, stacked) in cases(&SHAPES, 3) {
        let mixture = Mixture::new(experts, rows, columns, stacked);
        for share in [1, 2, 7] {
            let slots = Slots::new(&mixture, share, share as u64);
            let expected = slots.by_offsets(&stream);
            assert!(slots.run(&stream, None) == (expected.clone(), 0), "{share} slots each");
            for each in mixture.block_sizes() {
                let found = slots.run(&stream, Some(&slots.blocks(each)));
                assert!(found == (expected.clone(), 0), "{share}, in blocks of {each}");
            }
        }
    }
}

/// Many rows of each expert: several blocks of each, two groups of strips, and on every
/// multiprocessor several pieces.
#[test]
fn many_rows_have_the_bits_of_few() {
    let Some((_, stream)) = gpu_stream() else { return };
    for &share in cases(&[60, 2000], 1) {
        let mixture = Mixture::new(2, 320, 264, true);
        let mut slots = Slots::new(&mixture, share, 1);
        slots.factors = Some((0..9 * share).map(|at| 0.01 * (at % 97) as f32 - 0.4).collect());
        let (expected, word) = slots.run(&stream, None);
        assert_eq!(word, 0);
        for each in mixture.block_sizes() {
            let found = slots.run(&stream, Some(&slots.blocks(each)));
            assert!(found == (expected.clone(), 0), "{share} slots each, in blocks of {each}");
        }
        slots.factors = None;
        let (expected, _) = slots.run(&stream, None);
        assert!(slots.by_offsets(&stream) == expected, "{share} slots each, by offsets");
    }
}

/// Slots without an expert, as vLLM leaves those of padding, give zeros.
#[test]
fn slots_without_an_expert_are_zero() {
    let Some((_, stream)) = gpu_stream() else { return };
    let mixture = Mixture::new(5, 96, 520, true);
    let mut slots = Slots::new(&mixture, 2, 1);
    let (mut expected, _) = slots.run(&stream, None);
    for slot in [0, 3, 17] {
        slots.experts[slot] = u32::MAX;
        expected[slot * slots.pitch()..][..96].fill(0);
    }
    assert!(slots.run(&stream, None) == (expected, 0));
    // A block among others.
    let whole = Slots::new(&mixture, 2, 1);
    for each in mixture.block_sizes() {
        let mut blocks = whole.blocks(each);
        blocks.experts[1] = u32::MAX;
        let (mut expected, _) = whole.run(&stream, None);
        for &slot in blocks.indices[each..2 * each].iter().filter(|&&slot| slot < 18) {
            expected[slot as usize * whole.pitch()..][..96].fill(0);
        }
        assert!(whole.run(&stream, Some(&blocks)) == (expected, 0), "blocks of {each}");
    }
    slots.experts.fill(u32::MAX);
    let (y, word) = slots.run(&stream, None);
    assert!(word == 0 && y.chunks(slots.pitch()).all(|row| row[..96] == [0; 96]));
    for each in mixture.block_sizes() {
        let end = 18_usize.next_multiple_of(each);
        let experts = vec![u32::MAX; end / each];
        let blocks = Blocks { each, experts, indices: (0..end as u32).collect(), end: end as u32 };
        let (y, word) = slots.run(&stream, Some(&blocks));
        assert!(word == 0 && y.chunks(slots.pitch()).all(|row| row[..96] == [0; 96]), "{each}");
    }
}

/// Sums that f32 holds exactly are multiplied by their factor, and rounded once.
#[test]
fn factors_multiply_before_rounding() {
    let Some((_, stream)) = gpu_stream() else { return };
    let mut mixture = Mixture::of(&Host::exact(4 * 64, 264, 3), 4, true);
    mixture.x = Host::exact(9, 264, 4);
    let mut slots = Slots::new(&mixture, 3, 2);
    let factors: Vec<f32> = (0..27).map(|at| 0.037 * at as f32 - 0.4).collect();
    slots.factors = Some(factors.clone());
    let (y, word) = slots.run(&stream, None);
    assert_eq!(word, 0);
    for each in mixture.block_sizes() {
        let found = slots.run(&stream, Some(&slots.blocks(each)));
        assert!(found == (y.clone(), 0), "in blocks of {each}");
    }
    let mut rounded_twice = 0;
    for (slot, row) in y.chunks(slots.pitch()).enumerate() {
        let weights = &mixture.hosts[slots.experts[slot] as usize];
        for (at, &bits) in row[..64].iter().enumerate() {
            let sum = mixture.x.terms(slot / 3, weights, at).sum::<f64>() as f32;
            let expected = bf16::from_f32(sum * factors[slot]);
            assert_eq!(bits, expected.to_bits(), "slot {slot}, column {at}");
            let twice = bf16::from_f32(bf16::from_f32(sum).to_f32() * factors[slot]);
            rounded_twice += usize::from(twice != expected);
        }
    }
    assert!(rounded_twice > 50, "a second rounding would be seen");
}

#[test]
fn hostile_blocks_stay_inside() {
    let Some((_, stream)) = gpu_stream() else { return };
    let mixture = Mixture::new(5, 96, 520, true);
    let slots = Slots::new(&mixture, 2, 1);
    let (expected, _) = slots.run(&stream, None);
    let mut state = 3;
    let sizes = mixture.block_sizes();
    let with_factors = Slots { factors: Some(vec![2.; 18]), ..Slots::new(&mixture, 2, 1) };
    for round in 0..40 {
        let each = sizes[round / 4 % sizes.len()];
        let mut blocks = slots.blocks(each);
        let used = blocks.experts.len();
        match round % 4 {
            0 => {
                let expert = 5 + random(&mut state) as u32 % 1000;
                blocks.experts[random(&mut state) as usize % used] = expert;
            }
            1 => blocks.indices[0] = 18 + random(&mut state) as u32 % 1000,
            2 => blocks.indices[..each].fill(u32::MAX),
            _ => blocks.experts.iter_mut().for_each(|expert| *expert = u32::MAX - 1),
        }
        let (y, word) = slots.run(&stream, Some(&blocks));
        assert_eq!(word, 256, "round {round}");
        let between =
            y.chunks(slots.pitch()).all(|row| row[96..].iter().all(|&half| half == POISON_HALF));
        assert!(between, "nothing else is written");
        assert_eq!(with_factors.run(&stream, Some(&blocks)).1, 256, "round {round}");
    }
    // A number of places past the end of the list counts as the list's length, whose last block is
    // not whole.
    for &each in &sizes {
        let beyond = Blocks { end: u32::MAX, ..slots.blocks(each) };
        assert!(slots.run(&stream, Some(&beyond)) == (expected.clone(), 0), "blocks of {each}");
    }
    let mut slots = Slots::new(&mixture, 40, 1);
    slots.experts.fill(3);
    for each in sizes {
        // Padding before a slot, among a block's first 32 places and after them, or at its end.
        for (padded, word) in [(1, 256), (31, if each > 32 { 256 } else { 0 }), (each - 1, 0)] {
            let mut blocks = slots.blocks(each);
            blocks.indices[padded] = u32::MAX;
            assert_eq!(slots.run(&stream, Some(&blocks)).1, word, "place {padded} of {each}");
        }
        // Lists for blocks of another size.
        let blocks = slots.blocks(each);
        let odd = Blocks { end: blocks.end - 1, ..blocks };
        assert_eq!(slots.run(&stream, Some(&odd)).1, 256, "{each}");
    }
}

/// A replay follows the router as it is then; and the product after it waits for it.
#[test]
#[expect(unsafe_code, reason = "capture of raw pointers")]
fn a_graph_follows_the_router() {
    let Some((device, stream)) = gpu_stream() else { return };
    let mixture = Mixture::new(20, 64, 1032, true);
    let status = Status::new(device).unwrap();
    let x = stream.clone_htod(&mixture.x.bits).unwrap();
    let mut offsets = stream.clone_htod(&[0u32; 21]).unwrap();
    let mut rows = stream.clone_htod(&[0u32; 24]).unwrap();
    let mut y = stream.clone_htod(&vec![POISON_HALF; 24 * 67]).unwrap();
    let places =
        [x.device_ptr(&stream).0, offsets.device_ptr(&stream).0, rows.device_ptr(&stream).0];
    let to = y.device_ptr_mut(&stream).0;
    stream.synchronize().unwrap();
    let graph = capture(&stream, || {
        let routing = Routing::new(places[1], 24).rows(places[2]);
        let (x, y) = (LinearInput::new(places[0], 9, 1032), LinearOutput::new(to, 67));
        // SAFETY: all of it lives to the end of the test, which waits. Twice gives the same.
        unsafe { mixture.linear.multiply(x, routing, y, &stream, &status) }?;
        // SAFETY: as above.
        unsafe { mixture.linear.multiply(x, routing, y, &stream, &status) }
    });
    for seed in 0..5 {
        let mut counts = vec![0; 20];
        let mut state = seed;
        (0..24).for_each(|_| counts[random(&mut state) as usize % 20] += 1);
        let call = Call::new(&mixture, &counts, seed);
        stream.memcpy_htod(&call.offsets, &mut offsets).unwrap();
        stream.memcpy_htod(call.rows.as_ref().unwrap(), &mut rows).unwrap();
        stream.memcpy_htod(&vec![POISON_HALF; 24 * 67], &mut y).unwrap();
        graph.launch().unwrap();
        status.check(&stream).unwrap();
        mixture.check(&call, &stream.clone_dtoh(&y).unwrap());
    }
}

#[test]
#[expect(unsafe_code, reason = "raw pointers")]
fn a_replay_decodes_the_experts_of_its_time() {
    let Some((device, stream)) = gpu_stream() else { return };
    let item = Cut::Float(0, Some(256)).item("w", &[32, 256], normal_weights(32 * 256, 1));
    let model = open(container::Model::new(std::slice::from_ref(&item), &[]).build());
    let (matrix, _memory) = borrowed(device, &stream, &model, "w");
    let matrices: Vec<(Matrix, u32)> = (0..9).map(|expert| (matrix.clone(), expert)).collect();
    let decoder = ExpertDecoder::new(&matrices).unwrap();
    let mut ids = stream.clone_htod(&[0_u32]).unwrap();
    let mut output = stream.clone_htod(&vec![POISON; decoder.bytes() as usize]).unwrap();
    let status = Status::new(device).unwrap();
    let to = output.device_ptr_mut(&stream).0;
    let choices = Some(Choices::new(Indices::U32(ids.device_ptr(&stream).0), 1));
    // SAFETY: ids and output are as large, and live until the status is read.
    let graph =
        capture(&stream, || unsafe { decoder.decode_into_raw(choices, to, &stream, &status) });
    for expert in [4, 7] {
        stream.memcpy_htod(&[expert], &mut ids).unwrap();
        graph.launch().unwrap();
    }
    status.check(&stream).unwrap();
    let result = stream.clone_dtoh(&output).unwrap();
    for (expert, found) in result.chunks(item.data.len()).enumerate() {
        let poison = vec![POISON; item.data.len()];
        let expected = if [4, 7].contains(&expert) { &item.data } else { &poison };
        assert!(found == *expected, "{expert}");
    }
}
