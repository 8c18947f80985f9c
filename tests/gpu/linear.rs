//! Products with compressed matrices, against sums in f64 on the CPU; the fast layout, against what
//! it was made of.

use std::{ops::Range, slice, sync::Arc};

use df11::{
    Error, Result,
    gpu::{
        CutArrays, Device, GpuModel, GroupedLinear, Indices, Linear, LinearInput, LinearOutput,
        LoadOptions, Matrix, Residence, Routing, Status, Transcoded,
        cudarc::driver::{
            CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _, result::memset_d8_async,
        },
    },
    hazmat::{
        Tiles,
        gpu::{FastPacker, TableAddresses, TileAddresses},
        tile::Arrays,
    },
};
use half::bf16;

use super::{
    POISON, capture, cases,
    container::{Item, Model, normal_weights, parse},
    gpu, gpu_stream, is_refused, launch, load, mutate, open, random, say,
};

pub(super) const POISON_HALF: u16 = u16::from_le_bytes([POISON; 2]);

/// A matrix on the CPU.
#[derive(Clone)]
pub(super) struct Host {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) bits: Vec<u16>,
}

impl Host {
    fn new(rows: usize, columns: usize, bytes: &[u8]) -> Self {
        let bits =
            bytes.chunks_exact(2).map(|half| u16::from_le_bytes([half[0], half[1]])).collect();
        Self { rows, columns, bits }
    }

    pub(super) fn normal(rows: usize, columns: usize, seed: u64) -> Self {
        Self::new(rows, columns, &normal_weights(rows * columns, seed))
    }

    /// Small whole numbers, and some with exponents far from theirs: sums in f32 are exact.
    pub(super) fn exact(rows: usize, columns: usize, mut seed: u64) -> Self {
        let mut one = || match random(&mut seed) % 16 {
            0 => 0.0,
            1 => -0.0,
            2 => 64.0,
            at => at as f64 - 9.0,
        };
        Self {
            rows,
            columns,
            bits: (0..rows * columns).map(|_| bf16::from_f64(one()).to_bits()).collect(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        self.bits.iter().flat_map(|bits| bits.to_le_bytes()).collect()
    }

    fn item(&self, name: &str) -> Item {
        let (rows, columns) = (self.rows as u64, self.columns as u64);
        Item::tile(name, &[rows, columns], self.bytes(), (256, columns))
    }

    fn row(&self, row: usize) -> impl Iterator<Item = f64> {
        let bits = &self.bits[row * self.columns..][..self.columns];
        bits.iter().map(|&bits| bf16::from_bits(bits).to_f64())
    }

    /// The terms of the sum for a row of this times a row of weights.
    pub(super) fn terms(&self, row: usize, weights: &Self, of: usize) -> impl Iterator<Item = f64> {
        self.row(row).zip(weights.row(of)).map(|(x, w)| x * w)
    }

    pub(super) fn slice(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        let cut = |row: usize| &self.bits[row * self.columns..][columns.clone()];
        let bits = rows.clone().flat_map(|row| cut(row).iter().copied()).collect();
        Self { rows: rows.len(), columns: columns.len(), bits }
    }

    /// The weights whose exponents lie outside the 16 that fit most weights of their tile.
    fn exceptions(&self) -> u64 {
        let mut all = 0;
        for strip in (0..self.rows).step_by(32) {
            for tile in (0..self.columns).step_by(256) {
                let mut counts = [0_u64; 256];
                for row in strip..self.rows.min(strip + 32) {
                    let columns = tile..self.columns.min(tile + 256);
                    let bits = &self.bits[row * self.columns..][columns];
                    for bits in bits {
                        counts[usize::from(bits >> 7 & 255)] += 1;
                    }
                }
                let inside =
                    |base: usize| counts[base.saturating_sub(15)..=base].iter().sum::<u64>();
                all += counts.iter().sum::<u64>() - (0..256).map(inside).max().unwrap();
            }
        }
        all
    }
}

pub(super) fn model(device: &Device, matrices: &[(&str, &Host)]) -> GpuModel {
    let items: Vec<Item> = matrices.iter().map(|(name, host)| host.item(name)).collect();
    load(device, Model::new(&items, &[]).build())
}

/// In the fast layout, with as many exceptions as it takes; as many as the CPU counts.
pub(super) fn fast(matrix: &Matrix, host: &Host) -> Matrix {
    let most = (host.rows * host.columns) as u64;
    let Transcoded::Fast(fast) = matrix.to_fast(most).unwrap() else {
        panic!("{most} are all weights")
    };
    assert_eq!((fast.residence(), fast.exceptions()), (Residence::Fast, Some(host.exceptions())));
    fast
}

fn wide(range: &Range<usize>) -> Range<u64> {
    range.start as u64..range.end as u64
}

/// The forms in which a matrix can be multiplied by.
fn forms(matrix: &Matrix, host: &Host) -> Vec<Matrix> {
    let forms = [matrix.clone(), fast(matrix, host)];
    forms.into_iter().filter(|form| Linear::new(slice::from_ref(form)).is_ok()).collect()
}

/// The output of a launch into this many halves of poison at an address, and the status.
pub(super) fn launch_at(
    device: &Device,
    stream: &Arc<CudaStream>,
    count: usize,
    run: impl FnOnce(u64, &Status) -> Result<()>,
) -> (Vec<u16>, u32) {
    let (bytes, word) = launch(device, stream, 2 * count, |output, status| {
        run(output.device_ptr_mut(stream).0, status)
    });
    (Host::new(1, count, &bytes).bits, word)
}

/// Bytes of a matrix as the GPU decodes it, or of a slice.
#[expect(unsafe_code, reason = "raw pointers")]
pub(super) fn decode_slice(
    stream: &Arc<CudaStream>,
    matrix: &Matrix,
    slice: Option<(Range<u64>, Range<u64>)>,
) -> Vec<u8> {
    let count = slice.as_ref().map_or(matrix.row_count() * matrix.column_count(), |slice| {
        (slice.0.end - slice.0.start) * (slice.1.end - slice.1.start)
    });
    let bytes = matrix.decoded_bytes() / (matrix.row_count() * matrix.column_count()) * count;
    let (bytes, word) = launch(matrix.device(), stream, bytes as usize, |output, status| {
        let (to, _written) = output.device_ptr_mut(stream);
        match slice {
            // SAFETY: the output has the bytes; everything lives until the status has been read.
            Some(slice) => unsafe { matrix.decode_slice_into_raw(slice, to, stream, status) },
            // SAFETY: as above.
            None => unsafe { matrix.decode_into_raw(to, stream, status) },
        }
    });
    assert_eq!(word, 0, "the status");
    bytes
}

pub(super) fn decode(stream: &Arc<CudaStream>, matrix: &Matrix) -> Vec<u8> {
    decode_slice(stream, matrix, None)
}

/// One product: x, where it lies in its buffer, and a bias for each matrix.
pub(super) struct Call<'h> {
    pub(super) x: &'h Host,
    /// In elements.
    pub(super) offset: usize,
    pub(super) pitch: usize,
    pub(super) bias: bool,
    /// Splits of the columns of each matrix; 0: the fastest.
    pub(super) splits: u64,
}

impl<'h> Call<'h> {
    fn new(x: &'h Host) -> Self {
        Self { x, offset: 0, pitch: x.columns.next_multiple_of(8), bias: false, splits: 0 }
    }

    /// x in poisoned memory.
    pub(super) fn upload(&self, stream: &Arc<CudaStream>) -> CudaSlice<u16> {
        let mut x = vec![POISON_HALF; self.offset + self.x.rows * self.pitch + 64];
        for (row, bits) in self.x.bits.chunks(self.x.columns).enumerate() {
            x[self.offset + row * self.pitch..][..self.x.columns].copy_from_slice(bits);
        }
        stream.clone_htod(&x).unwrap()
    }
}

/// The bias of a row of a matrix.
fn bias_of(row: usize) -> bf16 {
    bf16::from_f64(row as f64 % 7.0 - 3.0)
}

/// Room for all products side by side, and some elements between them.
struct Places {
    starts: Vec<usize>,
    pitch: usize,
}

impl Places {
    fn new(linear: &Linear) -> Self {
        let mut end = 3;
        let starts = linear.matrices().iter().map(|matrix| {
            let start = end;
            end = start + matrix.row_count() as usize + 5;
            start
        });
        let starts = starts.collect();
        Self { starts, pitch: end }
    }
}

/// A workspace that never lies on the heap of the test before.
fn workspace(stream: &Arc<CudaStream>, linear: &Linear, rows: usize) -> CudaSlice<u8> {
    stream.alloc_zeros::<u8>(linear.workspace_bytes(rows as u64) as usize + 256).unwrap()
}

fn multiply_in(
    stream: &Arc<CudaStream>,
    linear: &Linear,
    call: &Call<'_>,
    workspace: &mut CudaSlice<u8>,
) -> Vec<Vec<u16>> {
    let (products, word) = try_multiply(stream, linear, call, workspace);
    assert_eq!(word, 0, "the status");
    products
}

/// The products and the status; nothing else is written.
#[expect(unsafe_code, reason = "raw pointers")]
fn try_multiply(
    stream: &Arc<CudaStream>,
    linear: &Linear,
    call: &Call<'_>,
    workspace: &mut CudaSlice<u8>,
) -> (Vec<Vec<u16>>, u32) {
    let (places, x) = (Places::new(linear), call.upload(stream));
    let most = linear.matrices().iter().map(|matrix| matrix.row_count() as usize).max().unwrap();
    let bias: Vec<u16> = (0..most).map(|row| bias_of(row).to_bits()).collect();
    let bias = stream.clone_htod(&bias).unwrap();
    let rows = call.x.rows;
    let count = rows * places.pitch;
    let (mut y, word) = launch_at(linear.device(), stream, count, |y, status| {
        let (x, _read) = x.device_ptr(stream);
        let (bias, _read) = bias.device_ptr(stream);
        let (workspace, _used) = workspace.device_ptr_mut(stream);
        let output = |&start: &usize| {
            let output = LinearOutput::new(y + 2 * start as u64, places.pitch as u64);
            let output = output.splits(call.splits);
            if call.bias { output.bias(bias) } else { output }
        };
        let outputs: Vec<LinearOutput> = places.starts.iter().map(output).collect();
        let x = LinearInput::new(x + 2 * call.offset as u64, rows as u64, call.pitch as u64);
        // SAFETY: the buffers have these rows, the workspace was zeros; all live until the status
        // has been read.
        unsafe { linear.multiply(x, &outputs, workspace, stream, status) }
    });
    let take = |(matrix, &start): (&Matrix, &usize)| {
        let count = matrix.row_count() as usize;
        let mut rows =
            (0..rows).map(|row| row * places.pitch + start..row * places.pitch + start + count);
        let products: Vec<u16> = rows.clone().flat_map(|place| y[place].to_vec()).collect();
        rows.by_ref().for_each(|place| y[place].fill(POISON_HALF));
        products
    };
    let products = linear.matrices().iter().zip(&places.starts).map(take).collect();
    assert!(y.iter().all(|&half| half == POISON_HALF), "nothing else is written");
    (products, word)
}

fn multiply(stream: &Arc<CudaStream>, linear: &Linear, call: &Call<'_>) -> Vec<Vec<u16>> {
    let mut workspace = workspace(stream, linear, call.x.rows);
    let products = multiply_in(stream, linear, call, &mut workspace);
    let after = workspace.slice(linear.workspace_bytes(call.x.rows as u64) as usize..);
    let after = stream.clone_dtoh(&after).unwrap();
    assert!(after.iter().all(|&byte| byte == 0), "after the workspace");
    products
}

/// The product of x with one matrix.
fn product(stream: &Arc<CudaStream>, matrix: &Matrix, x: &Host) -> Vec<u16> {
    multiply(stream, &Linear::new(slice::from_ref(matrix)).unwrap(), &Call::new(x)).remove(0)
}

/// A number of a product against its sum in f64: rounding to BF16, and what sums in f32 in any
/// order may lose.
pub(super) fn check_sum(bits: u16, terms: impl Iterator<Item = f64>, what: impl Fn() -> String) {
    let (sum, size) =
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + f64::abs(term)));
    let found = bf16::from_bits(bits).to_f64();
    let allowed = sum.abs() / 256.0 + size / f64::from(1 << 18);
    assert!((found - sum).abs() <= allowed, "{}: {found}, not {sum}", what());
}

fn check(call: &Call<'_>, weights: &Host, product: &[u16], what: &str) {
    for (at, &bits) in product.iter().enumerate() {
        let (row, column) = (at / weights.rows, at % weights.rows);
        let bias = call.bias.then(|| bias_of(column).to_f64());
        let terms = call.x.terms(row, weights, column).chain(bias);
        check_sum(bits, terms, || format!("{what}, row {row}, column {column}"));
    }
}

/// A strip or less, some, more than fill a GPU; steps, tiles, slices of columns, and parts of each.
const SHAPES: [(usize, usize); 11] = [
    (1, 8),
    (31, 40),
    (33, 264),
    (96, 256),
    (100, 520),
    (128, 2048),
    (7, 2048),
    (40, 4104),
    (1000, 1032),
    (4300, 520),
    (64, 14_336),
];

#[test]
fn products_are_those_of_the_cpu() {
    let Some((device, stream)) = gpu_stream() else { return };
    for (seed, &(rows, columns)) in cases(&SHAPES, 6).iter().enumerate() {
        let weights = Host::normal(rows, columns, seed as u64);
        let matrix = model(device, &[("w", &weights)]).matrix("w").unwrap();
        for form in forms(&matrix, &weights) {
            let linear = Linear::new(slice::from_ref(&form)).unwrap();
            for &x_rows in cases(&[1, 9, 17, 131, 0, 2, 7, 8, 16, 50, 300], 4) {
                let x = Host::normal(x_rows, columns, 77);
                let what = format!("{rows} x {columns}, {x_rows} rows, {:?}", form.residence());
                let aligned = Call::new(&x);
                let product = multiply(&stream, &linear, &aligned).remove(0);
                check(&aligned, &weights, &product, &what);
                // Anywhere in memory: the same bits. With a bias: other ones.
                let places = [(1, columns), (8, columns + 3), (3, columns.next_multiple_of(8))];
                for &(offset, pitch) in cases(&places, 1) {
                    let call = Call { offset, pitch, ..Call::new(&x) };
                    let moved = multiply(&stream, &linear, &call);
                    assert!(moved[0] == product, "{what}, {offset}, {pitch}");
                }
                let call = Call { bias: true, ..Call::new(&x) };
                check(&call, &weights, &multiply(&stream, &linear, &call)[0], &what);
            }
        }
    }
}

/// Two blocks of a cluster bring x to each other; one has no other.
#[test]
fn blocks_that_share_x_give_the_same() {
    let Some((device, stream)) = gpu_stream() else { return };
    let host = Host::normal(260, 264, 3);
    let matrix = model(device, &[("w", &host)]).matrix("w").unwrap();
    let fast = fast(&matrix, &host);
    for (rows, x_rows) in [(256, 256), (256, 192), (256, 512), (256, 500), (260, 256)] {
        let part = fast.rows(0..rows as u64).unwrap();
        let weights = host.slice(0..rows, 0..264);
        let linear = Linear::new(&[part]).unwrap();
        let x = Host::normal(x_rows, 264, 5);
        let (aligned, what) = (Call::new(&x), format!("{rows} rows, {x_rows} rows of x"));
        let product = multiply(&stream, &linear, &aligned).remove(0);
        check(&aligned, &weights, &product, &what);
        let moved = Call { offset: 3, ..Call::new(&x) };
        assert!(multiply(&stream, &linear, &moved)[0] == product, "{what}");
    }
}

#[test]
fn sums_that_f32_holds_are_exact() {
    let Some((device, stream)) = gpu_stream() else { return };
    for &(rows, columns) in cases(&SHAPES, 6) {
        let weights = Host::exact(rows, columns, 5);
        let matrix = model(device, &[("w", &weights)]).matrix("w").unwrap();
        let x = Host::exact(5, columns, 6);
        for form in forms(&matrix, &weights) {
            for (at, bits) in product(&stream, &form, &x).into_iter().enumerate() {
                let (row, column) = (at / rows, at % rows);
                let sum: f64 = x.terms(row, &weights, column).sum();
                let expected = bf16::from_f64(sum);
                // A sum of zeros may have either sign.
                let found = bf16::from_bits(bits);
                assert!(found == expected, "{rows} x {columns}, {row}, {column}: {sum}");
            }
        }
    }
}

/// Sums in f32 that hold it lose small whole numbers, and subtracting it is exact.
const LARGE: f64 = (1_u64 << 40) as f64;

/// A row of weights with one in each 16 columns that is not zero, whose sum depends on the order:
/// in that of these splits large ones come and go within a split, and what was before is lost.
fn ordered_row(columns: usize, splits: usize, state: &mut u64) -> (Vec<f64>, f64) {
    let (mut row, mut sum) = (vec![0.0; columns], 0.0);
    let split = columns.div_ceil(64).div_ceil(splits) * 64;
    for begin in (0..columns).step_by(split) {
        let (end, mut chain) = (columns.min(begin + split), 0.0);
        for group in (begin..end).step_by(16) {
            let width = (end - group).min(16);
            let is_last = group + 16 >= end;
            let (is_large, small) = (chain == LARGE, random(state) % 4);
            let weight = match small {
                _ if is_large && (is_last || small == 0) => -LARGE,
                0 if !is_last => LARGE,
                _ => small as f64,
            };
            row[group + random(state) as usize % width] = weight;
            chain = match weight {
                LARGE => LARGE,
                _ if weight < 0.0 => 0.0,
                _ if is_large => LARGE,
                _ => chain + weight,
            };
        }
        sum += chain;
    }
    (row, sum)
}

/// Asserts that products by a matrix are added in the order of these splits, and not in another.
fn add_in_order(
    (device, stream): &(&'static Device, Arc<CudaStream>),
    (rows, columns): (usize, usize),
    splits: usize,
    counts: &[usize],
    state: &mut u64,
) {
    let bf16 = |value: f64| bf16::from_f64(value).to_bits();
    let x = |count: usize| {
        let bits = (0..count).flat_map(|row| vec![bf16((1 << (row % 3)).into()); columns]);
        Host { rows: count, columns, bits: bits.collect() }
    };
    let (weights, sums): (Vec<Vec<f64>>, Vec<f64>) =
        (0..rows).map(|_| ordered_row(columns, splits, state)).unzip();
    let bits = weights.concat().into_iter().map(bf16).collect();
    let host = Host { rows, columns, bits };
    let stored = model(device, &[("a", &host)]).matrix("a").unwrap();
    let linear = Linear::new(&[fast(&stored, &host)]).unwrap();
    for &count in counts {
        let (x, call) = (x(count), |x, splits| Call { splits, ..Call::new(x) });
        if !linear.keeps_order(count as u64, &[splits as u64]) {
            // More rows have as many splits as a cluster has blocks.
            let most = if count > 64 { 8 } else { 64 };
            let is_hopper = device.info().compute_capability == (9, 0);
            assert!(!is_hopper || splits > most, "{splits} splits, {count} rows");
            continue;
        }
        let product = multiply(stream, &linear, &call(&x, splits as u64)).remove(0);
        for (at, &bits) in product.iter().enumerate() {
            let expected = sums[at % rows] * f64::from(1 << (at / rows % 3));
            assert_eq!(bits, bf16(expected), "{splits} splits, {count} rows, {at}");
        }
        let others = if splits == 1 { 2 } else { 1 };
        let other = multiply(stream, &linear, &call(&x, others)).remove(0);
        // A few sums may be the same by chance.
        assert!(rows < 33 || product != other, "another order has other sums");
    }
}

#[test]
fn sums_are_added_in_the_order_of_the_splits() {
    let Some(gpu) = gpu_stream() else { return };
    let mut state = 5;
    for &shape in cases(&[(35, 520), (70, 1288), (33, 4096), (4, 136)], 1) {
        for splits in [1, 2, 3, 5, 7, 13].into_iter().filter(|splits| splits * 128 < shape.1) {
            let counts = cases(&[1, 9, 17, 50, 129, 2, 8, 16, 64, 100, 200, 300, 700], 5);
            add_in_order(&gpu, shape, splits, counts, &mut state);
        }
    }
    // More stages than shared memory has room for, also on an emulated GPU.
    add_in_order(&gpu, (20, 4104), 1, &[3, 30], &mut state);
    // More rows than a launch takes; the second launch has another kernel.
    add_in_order(&gpu, (20, 136), 1, &[3077], &mut state);
}

/// Infinities and NaN come out as in any order of sums.
#[test]
fn what_is_not_finite_comes_out() {
    let Some((device, stream)) = gpu_stream() else { return };
    let mut weights = Host::normal(70, 520, 3);
    let x = Host { rows: 2, columns: 520, bits: vec![bf16::ONE.to_bits(); 1040] };
    let mut place = |row: usize, column: usize, value: bf16| {
        weights.bits[row * 520 + column] = value.to_bits();
    };
    (0..4).for_each(|at| place(3, 130 * at, bf16::INFINITY));
    place(33, 519, bf16::NEG_INFINITY);
    place(64, 1, bf16::INFINITY);
    place(64, 300, bf16::NEG_INFINITY);
    place(69, 257, bf16::NAN);
    place(5, 5, bf16::MIN_POSITIVE_SUBNORMAL);
    let matrix = model(device, &[("w", &weights)]).matrix("w").unwrap();
    for form in forms(&matrix, &weights) {
        for row in product(&stream, &form, &x).chunks(70) {
            let value = |at: usize| bf16::from_bits(row[at]);
            assert!(value(3) == bf16::INFINITY && value(33) == bf16::NEG_INFINITY);
            assert!(value(64).is_nan() && value(69).is_nan());
            let finite = (0..70).filter(|at| ![3, 33, 64, 69].contains(at));
            assert!(finite.map(value).all(bf16::is_finite));
        }
    }
}

#[test]
fn several_matrices_share_x_and_no_bits() {
    let Some((device, stream)) = gpu_stream() else { return };
    let sizes = cases(&[40, 1, 96, 3000, 32, 1000, 64, 65, 5000, 7], 3);
    let &columns = cases(&[520, 2056], 1).last().unwrap();
    let hosts: Vec<Host> =
        sizes.iter().map(|&rows| Host::normal(rows, columns, rows as u64)).collect();
    let names: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    let matrices: Vec<(&str, &Host)> = names.iter().map(String::as_str).zip(&hosts).collect();
    let model = model(device, &matrices);
    let forms: Vec<Vec<Matrix>> =
        matrices.iter().map(|(name, host)| forms(&model.matrix(name).unwrap(), host)).collect();
    let xs = [16, 17, 40, 130].map(|rows| Host::normal(rows, columns, 9));
    for form in 0..forms[0].len() {
        // The last ones in the other form, if there is one.
        let pick = |at: usize| forms[at][if at < sizes.len() * 7 / 10 { form } else { 0 }].clone();
        let linear = Linear::new(&(0..sizes.len()).map(pick).collect::<Vec<_>>()).unwrap();
        for x in &xs {
            let call = Call { bias: true, ..Call::new(x) };
            let mut shared = workspace(&stream, &linear, x.rows);
            let products = multiply_in(&stream, &linear, &call, &mut shared);
            for (at, product) in products.iter().enumerate() {
                // With more rows than one launch takes, one matrix stands for all.
                if x.rows == 16 || at == 2 {
                    check(&call, &hosts[at], product, &names[at]);
                }
                // Alone, in a workspace that others have used.
                let alone = Linear::new(&[pick(at)]).unwrap();
                assert!(alone.workspace_bytes(16) <= linear.workspace_bytes(16));
                let alone = multiply_in(&stream, &alone, &call, &mut shared);
                assert!(alone[0] == *product, "{} alone", names[at]);
            }
            // The same bits in every run, whatever other matrices there are.
            for _ in 0..cases(&[(); 20], 2).len().min(if x.rows == 16 { 20 } else { 3 }) {
                assert!(multiply_in(&stream, &linear, &call, &mut shared) == products);
            }
        }
        // And of each row without the others.
        let (x, mut shared) = (&xs[0], workspace(&stream, &linear, 16));
        let all = Call { bias: true, ..Call::new(x) };
        let products = multiply_in(&stream, &linear, &all, &mut shared);
        for row in 0..*cases(&[3, 16], 1).last().unwrap() {
            let one = x.slice(row..row + 1, 0..columns);
            let call = Call { bias: true, ..Call::new(&one) };
            let alone = multiply_in(&stream, &linear, &call, &mut shared);
            for ((product, alone), host) in products.iter().zip(alone).zip(&hosts) {
                let rows = host.rows;
                assert!(product[row * rows..][..rows] == alone, "row {row} of {rows} rows");
            }
        }
    }
}

#[test]
fn slices_multiply_and_decode_as_what_they_are_cut_from() {
    let Some((device, stream)) = gpu_stream() else { return };
    let &even = cases(&[96, 3 * 1024], 1).last().unwrap();
    let (rows, columns) = (even + 70, 1304);
    let whole = Host::normal(rows, columns, 8);
    let matrix = model(device, &[("w", &whole)]).matrix("w").unwrap();
    let whole_fast = fast(&matrix, &whole);
    let cuts = [
        (0..rows, 0..columns),
        (32..96, 0..columns),
        (even + 32..rows, 0..columns),
        (0..rows, 256..1024),
        (64..rows, 1024..columns),
        (0..rows.min(1024), 0..256),
    ];
    for (row_range, column_range) in cuts {
        let host = whole.slice(row_range.clone(), column_range.clone());
        let cut = matrix.rows(wide(&row_range)).unwrap().columns(wide(&column_range)).unwrap();
        let what = format!("{row_range:?}, {column_range:?}");
        assert!(decode(&stream, &cut) == host.bytes(), "{what}");
        let made = fast(&cut, &host);
        assert!(decode(&stream, &made) == host.bytes(), "{what}");
        let x = Host::normal(3, host.columns, 2);
        for form in forms(&cut, &host) {
            check(&Call::new(&x), &host, &product(&stream, &form, &x), &what);
        }
        // A slice of what is fast.
        let part = whole_fast.columns(wide(&column_range)).unwrap().rows(wide(&row_range)).unwrap();
        assert!(decode(&stream, &part) == host.bytes(), "{what}");
        let of_part = product(&stream, &part, &x);
        assert!(product(&stream, &made, &x) == of_part, "{what}: the same bits");
        check(&Call::new(&x), &host, &of_part, &what);
        // And of that one.
        if host.rows > 64 && host.columns > 256 {
            let part = part.rows(32..64).unwrap().columns(256..host.columns as u64).unwrap();
            let host = host.slice(32..64, 256..host.columns);
            let x = x.slice(0..3, 256..x.columns);
            assert!(decode(&stream, &part) == host.bytes(), "{what}");
            check(&Call::new(&x), &host, &product(&stream, &part, &x), &what);
        }
    }
}

/// A matrix of a model in device memory of the caller, as stored, and that memory.
#[expect(unsafe_code, reason = "raw pointers")]
pub(super) fn borrowed(
    device: &Device,
    stream: &Arc<CudaStream>,
    model: &df11::Model,
    name: &str,
) -> (Matrix, Vec<CudaSlice<u8>>) {
    let tensor = model.tensor(name).unwrap();
    let tiles = Tiles::of(&tensor).unwrap().unwrap();
    let ((rows, columns), split) = (tiles.shape(), tiles.split());
    let lengths = tiles.array_lengths();
    let alloc = |bytes: u64| stream.alloc_zeros::<u8>(bytes.max(1) as usize).unwrap();
    let memory: Vec<_> = lengths.into_iter().chain([Device::table_bytes()]).map(alloc).collect();
    let [codebook, records, bitstream, plane, table] =
        [0, 1, 2, 3, 4].map(|at| memory[at].device_ptr(stream).0);
    stream.synchronize().unwrap();
    let arrays = [codebook, records, bitstream, plane];
    let to = std::array::from_fn(|at| (arrays[at], lengths[at]));
    let wanted = CutArrays { name, rows: 0..rows, columns: 0..columns, to };
    // SAFETY: each array has its memory.
    unsafe { model.upload_arrays(device, &[wanted], &()) }.unwrap();
    let tables = [TableAddresses { codebook, codebook_bytes: lengths[0], table }];
    // SAFETY: the codebook is there, and the table has its bytes.
    unsafe { device.build_tables(split, &tables) }.unwrap();
    let arrays = [0, 1, 2, 3].map(|at| tiles.array(at).unwrap());
    let arrays = Arrays::new(rows, columns, split, arrays.each_ref().map(|array| &**array));
    let staged_bytes = arrays.unwrap().staged_bytes();
    let bitstream_bytes = lengths[2];
    let at = TileAddresses { records, bitstream, bitstream_bytes, plane, table, staged_bytes };
    // SAFETY: the arrays are there, and the caller keeps them.
    let stored = unsafe { Matrix::of_tiles(device, (rows, columns), split, at) };
    (stored.unwrap(), memory)
}

#[test]
#[expect(unsafe_code, reason = "raw pointers")]
fn cuts_arrive_as_the_host_makes_them() {
    let Some((device, stream)) = gpu_stream() else { return };
    // The plane of the first one travels in several pieces.
    let hosts = [(2100, 4104, 1), (96, 520, 2)]
        .map(|(rows, columns, seed)| Host::normal(rows, columns, seed));
    let items = [hosts[0].item("large"), hosts[1].item("small")];
    let model = open(Model::new(&items, &[]).build());
    let windows = [
        ("large", 0..2100, 256..4104),
        ("large", 32..2100, 0..4104),
        ("small", 32..64, 256..512),
        ("small", 0..96, 512..520),
        ("small", 0..96, 0..520),
    ];
    let expected = windows.clone().map(|(name, rows, columns)| {
        let tiles = Tiles::of(&model.tensor(name).unwrap()).unwrap().unwrap();
        let lengths = tiles.cut_lengths(rows.clone(), columns.clone()).unwrap();
        let arrays = tiles.cut(rows, columns).unwrap();
        assert_eq!(lengths, arrays.each_ref().map(|array| array.len() as u64));
        arrays
    });
    let poison = |length| stream.clone_htod(&vec![POISON; length + 16]).unwrap();
    let memory = expected.each_ref().map(|arrays| arrays.each_ref().map(|one| poison(one.len())));
    let cuts: Vec<CutArrays<'_>> = windows
        .into_iter()
        .zip(&memory)
        .map(|((name, rows, columns), room)| {
            let to = room.each_ref();
            let to = to.map(|one| (one.device_ptr(&stream).0, one.len() as u64 - 16));
            CutArrays { name, rows, columns, to }
        })
        .collect();
    stream.synchronize().unwrap();
    // SAFETY: each array has its memory.
    unsafe { model.upload_arrays(device, &cuts, &()) }.unwrap();
    for (arrays, memory) in expected.iter().zip(&memory) {
        for (array, memory) in arrays.iter().zip(memory) {
            let found = stream.clone_dtoh(memory).unwrap();
            assert!(found == [&**array, &[POISON; 16]].concat());
        }
    }
    // Refused before or while they are copied; nothing is written after an array's memory.
    let with = |change: &dyn Fn(&mut CutArrays<'_>)| {
        let mut cuts = cuts.clone();
        change(&mut cuts[2]);
        // SAFETY: as above; memory of another length is refused.
        unsafe { model.upload_arrays(device, &cuts, &()) }
    };
    let shorter = with(&|cut| cut.to[3].1 -= 16);
    assert!(matches!(shorter, Err(Error::Corrupt { .. })), "{shorter:?}");
    assert!(is_refused(with(&|cut| cut.rows = 1..64), "within tiles"));
    assert!(is_refused(with(&|cut| cut.rows = 32..128), ""));
    let missing = with(&|cut| cut.name = "none");
    assert!(is_refused(missing, "none"));
}

/// Such a matrix in both forms.
struct Borrowed {
    stored: Matrix,
    fast: Matrix,
    _memory: Vec<CudaSlice<u8>>,
}

impl Borrowed {
    #[expect(unsafe_code, reason = "raw pointers")]
    fn new(device: &Device, stream: &Arc<CudaStream>, host: &Host) -> Self {
        let model = open(Model::new(&[host.item("w")], &[]).build());
        let (rows, columns) = (host.rows as u64, host.columns as u64);
        let (stored, mut memory) = borrowed(device, stream, &model, "w");
        let alloc = |bytes: u64| stream.alloc_zeros::<u8>(bytes.max(1) as usize).unwrap();
        let weights = stream.clone_htod(&host.bytes()).unwrap();
        let strips = alloc(Matrix::fast_bytes(rows, columns));
        let to = strips.device_ptr(stream).0;
        // SAFETY: the strips have their bytes, and the weights are there.
        let packer = unsafe { FastPacker::new(device, (rows, columns), to, stream) }.unwrap();
        for first in (0..rows).step_by(64) {
            let rows = first..rows.min(first + 64);
            let from = weights.device_ptr(stream).0 + 2 * first * columns;
            // SAFETY: as above.
            unsafe { packer.pack(rows, from, stream) }.unwrap();
        }
        let count = packer.exceptions(stream).unwrap().expect("few");
        assert_eq!(count, host.exceptions());
        let entries = alloc(4 * count);
        let entries_at = entries.device_ptr(stream).0;
        // SAFETY: there is room for as many.
        unsafe { packer.take(count, entries_at, stream) }.unwrap();
        stream.synchronize().unwrap();
        // SAFETY: as for the stored one.
        let fast =
            unsafe { Matrix::of_fast(device, (rows, columns), to, (entries_at, count)) }.unwrap();
        memory.extend([strips, entries]);
        Self { stored, fast, _memory: memory }
    }
}

#[test]
#[expect(unsafe_code, reason = "raw pointers")]
fn matrices_in_memory_of_the_caller_are_the_same() {
    let Some((device, stream)) = gpu_stream() else { return };
    let hosts = [(3 * 1024 + 70, 1304, 8), (96, 1304, 9), (40, 264, 10)]
        .map(|(rows, columns, seed)| Host::normal(rows, columns, seed));
    let all = hosts.each_ref().map(|host| Borrowed::new(device, &stream, host));
    for (Borrowed { stored, fast, .. }, host) in all.iter().zip(&hosts) {
        for matrix in [stored, fast] {
            assert!(decode(&stream, matrix) == host.bytes());
            for (rows, columns) in [(5..37, 3..200), (0..1, 8..264), (32..40, 0..256)] {
                let found = decode_slice(&stream, matrix, Some((wide(&rows), wide(&columns))));
                assert!(found == host.slice(rows.clone(), columns.clone()).bytes(), "{rows:?}");
            }
            let x = Host::normal(3, host.columns, 2);
            check(&Call::new(&x), host, &product(&stream, matrix, &x), "borrowed");
        }
    }
    // Many at once: more than a launch takes, in both forms.
    let mut outputs: Vec<_> = (0..12)
        .map(|at| stream.clone_htod(&vec![POISON; hosts[at % 3].bytes().len()]).unwrap())
        .collect();
    let forms = |at: usize| if at < 10 { &all[at % 3].stored } else { &all[at % 3].fast };
    let places: Vec<_> = outputs
        .iter_mut()
        .enumerate()
        .map(|(at, output)| (forms(at), output.device_ptr_mut(&stream).0))
        .collect();
    let status = Status::new(device).unwrap();
    // SAFETY: the outputs have their bytes; everything lives until the status has been read.
    unsafe { Matrix::decode_all_into_raw(&places, &stream, &status) }.unwrap();
    status.check(&stream).unwrap();
    for (at, output) in outputs.iter().enumerate() {
        assert!(stream.clone_dtoh(output).unwrap() == hosts[at % 3].bytes(), "{at}");
    }
    // Experts that are parts of one: the bits of each by itself.
    let experts = &all[1].fast;
    let (parts, each) =
        (GroupedLinear::of_parts(experts, 3).unwrap(), experts.split_rows(3).unwrap());
    let x = Host::normal(4, 1304, 5);
    let x_here = stream.clone_htod(&x.bits).unwrap();
    let offsets = stream.clone_htod(&[0_u32, 1, 1, 4]).unwrap();
    let products = [parts, GroupedLinear::new(&each).unwrap()].map(|grouped| {
        let routing = Routing::new(offsets.device_ptr(&stream).0, 4);
        let x = LinearInput::new(x_here.device_ptr(&stream).0, 4, 1304);
        launch_at(device, &stream, 4 * 32, |to, status| {
            // SAFETY: as many rows, offsets and places; all live until the status has been read.
            unsafe { grouped.multiply(x, routing, LinearOutput::new(to, 32), &stream, status) }
        })
    });
    assert!(products[0] == products[1] && products[0].1 == 0);
    assert!(!products[0].0.contains(&POISON_HALF));
}

#[test]
fn all_patterns_survive_the_fast_layout() {
    let Some((device, stream)) = gpu_stream() else { return };
    // In an order in which each tile has exponents from everywhere.
    let bits: Vec<u16> = (0..=u16::MAX).map(|at| at.wrapping_mul(40_503)).collect();
    for (rows, columns) in [(256, 256), (512, 128), (64, 1024), (8192, 8), (16, 4096)] {
        let host = Host { rows, columns, bits: bits.clone() };
        let matrix = model(device, &[("w", &host)]).matrix("w").unwrap();
        assert!(decode(&stream, &matrix) == host.bytes());
        assert!(decode(&stream, &fast(&matrix, &host)) == host.bytes(), "{rows} x {columns}");
        // Too many to be fast by itself, and just enough.
        let exceptions = host.exceptions();
        let refused = matrix.to_fast(exceptions - 1).unwrap();
        assert!(matches!(refused, Transcoded::TooManyExceptions { exceptions: found, most }
                if found == exceptions && most == exceptions - 1));
        assert!(matches!(matrix.to_fast(exceptions).unwrap(), Transcoded::Fast(_)));
        assert_eq!(matrix.to_fast_or_stored().unwrap().residence(), Residence::Stored);
    }
}

#[test]
#[expect(unsafe_code, reason = "raw pointers")]
fn rows_are_gathered_by_their_indices() {
    let Some((device, stream)) = gpu_stream() else { return };
    let bits: Vec<u16> = (0..=u16::MAX).map(|at| at.wrapping_mul(40_503)).collect();
    let hosts = [Host::normal(1000, 1032, 3), Host { rows: 128, columns: 512, bits }];
    for (whole, first, columns) in
        [(&hosts[0], 0, 0..1032), (&hosts[1], 32, 0..512), (&hosts[0], 64, 256..1032)]
    {
        let matrix = model(device, &[("w", whole)]).matrix("w").unwrap();
        let cut = |form: &Matrix| {
            let rows = form.rows(first..whole.rows as u64).unwrap();
            rows.columns(columns.start as u64..columns.end as u64).unwrap()
        };
        let host = &whole.slice(0..whole.rows, columns.clone());
        let forms = [cut(&matrix), cut(&fast(&matrix, whole))];
        let (mut state, row_count) = (5, host.rows as u64 - first);
        for (count, pitch) in
            [(1, host.columns), (3, host.columns + 3), (64, host.columns), (300, 2048)]
        {
            let mut wanted: Vec<u64> = (0..count).map(|_| random(&mut state) % row_count).collect();
            // The last one names no row.
            let bad = count == 3;
            if bad {
                wanted[2] = row_count;
            }
            let narrow: Vec<u32> = wanted.iter().map(|&index| index as u32).collect();
            let (narrow, wide) =
                (stream.clone_htod(&narrow).unwrap(), stream.clone_htod(&wanted).unwrap());
            let indices = [
                Indices::U32(narrow.device_ptr(&stream).0),
                Indices::I64(wide.device_ptr(&stream).0),
            ];
            let mut expected = vec![POISON_HALF; count * pitch];
            for (at, &index) in wanted.iter().enumerate() {
                let row = &mut expected[at * pitch..][..host.columns];
                row.fill(0);
                if index < row_count {
                    let from = (first + index) as usize * host.columns;
                    row.copy_from_slice(&host.bits[from..][..host.columns]);
                }
            }
            for (at, form) in [0, 1].into_iter().flat_map(|at| forms.iter().map(move |f| (at, f))) {
                let indices = indices[at];
                let (found, word) = launch_at(device, &stream, expected.len(), |to, status| {
                    let place = (to, pitch as u64);
                    // SAFETY: as many indices, and rows of output; all live until the status has
                    // been read.
                    unsafe { form.gather(indices, count as u64, place, &stream, status) }
                });
                let what = format!("{count} of {indices:?}, {:?}", form.residence());
                assert!(found == expected && (word != 0) == bad, "{what}: {word}");
            }
        }
    }
}

/// More than one range of strips is decoded for it; 12.15 bits per weight are enough.
#[test]
fn a_large_matrix_is_small_in_the_fast_layout() {
    let Some((device, stream)) = gpu_stream() else { return };
    let host = Host::normal(5000, 8192, 1);
    let matrix = model(device, &[("w", &host)]).matrix("w").unwrap();
    let fast = matrix.to_fast_or_stored().unwrap();
    assert_eq!((fast.residence(), fast.exceptions()), (Residence::Fast, Some(host.exceptions())));
    let bits = fast.device_bytes() as f64 * 8.0 / (host.rows * host.columns) as f64;
    assert!(bits < 12.15, "{bits}");
    assert!(decode(&stream, &fast) == host.bytes());
}

#[test]
#[expect(unsafe_code, reason = "capture of raw pointers")]
fn products_are_captured_in_graphs() {
    let Some((device, stream)) = gpu_stream() else { return };
    let hosts = [Host::normal(40, 4104, 1), Host::normal(1000, 4104, 2)];
    let model = model(device, &[("a", &hosts[0]), ("b", &hosts[1])]);
    let matrices = ["a", "b"].map(|name| model.matrix(name).unwrap().to_fast_or_stored().unwrap());
    let linear = Linear::new(&matrices).unwrap();
    let x = Host::normal(4, 4104, 7);
    let call = Call::new(&x);
    let expected = multiply(&stream, &linear, &call);
    let (device_x, status) = (call.upload(&stream), Status::new(device).unwrap());
    let mut space = workspace(&stream, &linear, 4);
    let mut y = stream.alloc_zeros::<u16>(4 * 1040).unwrap();
    let (x_pointer, _) = device_x.device_ptr(&stream);
    let (y_pointer, _) = y.device_ptr_mut(&stream);
    let (space_pointer, _) = space.device_ptr_mut(&stream);
    stream.synchronize().unwrap();
    let outputs = [LinearOutput::new(y_pointer, 1040), LinearOutput::new(y_pointer + 80, 1040)];
    let graph = capture(&stream, || {
        let x = LinearInput::new(x_pointer, 4, call.pitch as u64);
        // SAFETY: all of it lives to the end of the test, which waits.
        unsafe { linear.multiply(x, &outputs, space_pointer, &stream, &status) }
    });
    for _ in 0..3 {
        stream.memcpy_htod(&vec![POISON_HALF; 4 * 1040], &mut y).unwrap();
        graph.launch().unwrap();
        status.check(&stream).unwrap();
        let found = stream.clone_dtoh(&y).unwrap();
        for row in 0..4 {
            assert!(found[row * 1040..][..40] == expected[0][row * 40..][..40]);
            assert!(found[row * 1040 + 40..][..1000] == expected[1][row * 1000..][..1000]);
        }
    }
}

/// Each product reads what the one before it has written, and all use one workspace: none may begin
/// so early that it reads or writes too early.
#[test]
fn products_that_follow_each_other_wait_for_each_other() {
    let Some((device, stream)) = gpu_stream() else { return };
    // Sums that meet in memory, and none; from one block to all of them.
    let sizes = [(2056, 4104), (40, 2056), (9000, 40), (4104, 9000)];
    let hosts: Vec<Host> =
        sizes.iter().map(|&(rows, columns)| Host::normal(rows, columns, 5)).collect();
    let matrices: Vec<(&str, &Host)> = ["a", "b", "c", "d"].into_iter().zip(&hosts).collect();
    let model = model(device, &matrices);
    for form in 0..2 {
        let linears = matrices.iter().filter_map(|(name, host)| {
            let form = forms(&model.matrix(name).unwrap(), host).into_iter().nth(form)?;
            Some(Linear::new(&[form]).unwrap())
        });
        let linears: Vec<Linear> = linears.collect();
        if !linears.is_empty() {
            for rows in [1, 16, 40, 200, 400] {
                run_chain(&stream, &linears, rows);
            }
        }
    }
}

/// x through all products, three times around: one after the other, and captured in a graph.
#[expect(unsafe_code, reason = "raw pointers")]
fn run_chain(stream: &Arc<CudaStream>, linears: &[Linear], rows: u64) {
    let status = Status::new(linears[0].device()).unwrap();
    let calls: Vec<&Linear> = linears.iter().cycle().take(3 * linears.len()).collect();
    let size = |linear: &&Linear| (rows * linear.matrices()[0].row_count()) as usize;
    let columns = |linear: &Linear| linear.matrices()[0].column_count();
    // Weights are about 0.02: sums neither grow nor vanish by much.
    let x = Host::normal(rows as usize, columns(calls[0]) as usize, 3);
    let mut buffers = vec![stream.clone_htod(&x.bits).unwrap()];
    buffers.extend(calls.iter().map(|call| stream.alloc_zeros::<u16>(size(call)).unwrap()));
    let most = linears.iter().map(|linear| linear.workspace_bytes(rows)).max().unwrap();
    let mut space = stream.alloc_zeros::<u8>(most as usize + 256).unwrap();
    let places: Vec<u64> =
        buffers.iter_mut().map(|buffer| buffer.device_ptr_mut(stream).0).collect();
    let space = space.device_ptr_mut(stream).0;
    stream.synchronize().unwrap();
    let multiply = |at: usize| {
        let x = LinearInput::new(places[at], rows, columns(calls[at]));
        let y = LinearOutput::new(places[at + 1], calls[at].matrices()[0].row_count());
        // SAFETY: all of it has these rows and lives to the end of the test, which waits.
        unsafe { calls[at].multiply(x, &[y], space, stream, &status) }
    };
    for at in 0..calls.len() {
        multiply(at).unwrap();
        stream.synchronize().unwrap();
    }
    let read = || -> Vec<Vec<u16>> {
        buffers[1..].iter().map(|buffer| stream.clone_dtoh(buffer).unwrap()).collect()
    };
    let expected = read();
    let has_any = |y: &Vec<u16>| y.iter().any(|&bits| bits & 0x7FFF != 0);
    assert!(expected.iter().all(has_any), "no product vanishes");
    let clear = || {
        for (&place, y) in places[1..].iter().zip(&expected) {
            // SAFETY: the buffer has as many bytes, and lives to the end of the test.
            unsafe { memset_d8_async(place, POISON, 2 * y.len(), stream.cu_stream()) }.unwrap();
        }
    };
    // Without waiting, and captured.
    for _ in 0..10 {
        clear();
        (0..calls.len()).for_each(|at| multiply(at).unwrap());
        status.check(stream).unwrap();
        assert!(read() == expected, "{rows} rows");
    }
    let graph = capture(stream, || (0..calls.len()).try_for_each(multiply));
    for _ in 0..10 {
        clear();
        (0..5).for_each(|_| graph.launch().unwrap());
        status.check(stream).unwrap();
        assert!(read() == expected, "{rows} rows in a graph");
    }
}

/// Matrices of a model whose arrays were changed, so that nobody notices but the kernels; how, is
/// told by the round.
fn hostile(device: &Device, hosts: &[Host], round: usize, state: &mut u64) -> Vec<Matrix> {
    let names: Vec<String> = hosts.iter().map(|host| host.rows.to_string()).collect();
    let items: Vec<Item> = names.iter().zip(hosts).map(|(name, host)| host.item(name)).collect();
    let mut draft = parse(&Model::new(&items, &[]).build());
    (0..items.len()).for_each(|tensor| mutate(&mut draft, tensor, round % 7, state));
    draft.repair_checksums();
    let model = open(draft.pack()).load(device, &LoadOptions::new().without_validation()).unwrap();
    names.iter().map(|name| model.matrix(name).unwrap()).collect()
}

/// Fewer for tools that run kernels a hundred times slower.
fn hostile_rounds() -> usize {
    super::hostile_rounds().min(70)
}

/// Products and gathered rows stay inside their outputs, and what is wrong in an index sets the
/// status.
#[test]
fn hostile_streams_stay_inside_products() {
    let Some((device, stream)) = gpu_stream() else { return };
    let hosts =
        [(40, 520), (100, 264), (301, 1000)].map(|(rows, columns)| Host::normal(rows, columns, 4));
    let (mut state, mut noticed, mut all) = (9, 0, 0);
    for round in 0..hostile_rounds() {
        for (matrix, host) in hostile(device, &hosts, round, &mut state).iter().zip(&hosts) {
            let linear = Linear::new(slice::from_ref(matrix)).unwrap();
            let x = Host::normal([1, 8, 16, 20][round % 4], host.columns, 2);
            let call = Call::new(&x);
            let (product, word) =
                try_multiply(&stream, &linear, &call, &mut workspace(&stream, &linear, x.rows));
            if word == 0 {
                // Other bits or codes may be another matrix, which is decoded likewise.
                let decoded = Host::new(host.rows, host.columns, &decode(&stream, matrix));
                if decoded.bits.iter().all(|&bits| bf16::from_bits(bits).to_f64().abs() < 1e30) {
                    check(&call, &decoded, &product[0], &format!("round {round}"));
                }
            }
            let bad = gather_one(&stream, matrix, host.rows as u64 - 1);
            assert!(word != 0 || bad == 0, "round {round}: rows of a matrix without a fault");
            (noticed, all) = (noticed + usize::from(word != 0), all + 1);
        }
    }
    say(&format!("{all} hostile matrices were multiplied by, {noticed} set the status"));
    assert!(noticed > all / 3, "{noticed} of {all}");
}

/// The status after a row; nothing is written after it.
#[expect(unsafe_code, reason = "raw pointers")]
fn gather_one(stream: &Arc<CudaStream>, matrix: &Matrix, row: u64) -> u32 {
    let (columns, index) = (matrix.column_count(), stream.clone_htod(&[row]).unwrap());
    let indices = Indices::I64(index.device_ptr(stream).0);
    let (_, word) = launch_at(matrix.device(), stream, columns as usize, |to, status| {
        // SAFETY: an index, and room for its row; all live until the status has been read.
        unsafe { matrix.gather(indices, 1, (to, columns), stream, status) }
    });
    word
}

/// Hostile streams become an error or another matrix, and nothing else; those that are refused say
/// why.
#[test]
fn hostile_streams_do_not_become_fast() {
    let Some(device) = gpu() else { return };
    let (mut state, mut refused) = (3, 0);
    let hosts =
        [(40, 520), (100, 264), (300, 1000)].map(|(rows, columns)| Host::normal(rows, columns, 4));
    for round in 0..42 {
        for matrix in hostile(device, &hosts, round, &mut state) {
            match matrix.to_fast(matrix.row_count() * matrix.column_count()) {
                Ok(_) => {}
                Err(Error::Corrupt { .. }) => refused += 1,
                Err(other) => panic!("round {round}: {other}"),
            }
        }
    }
    assert!(refused > 20, "{refused} of 126");
}
