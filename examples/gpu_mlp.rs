//! An MLP of a small model on a GPU, from weights that stay compressed: `down(silu(gate(x)) *
//! up(x))`, by matrices as stored, in the fast layout, and in a mixture of both; for few rows of x
//! and for many. Compares with sums in f64 on the CPU, and prints bytes.
//!
//! ```text
//! cargo run --release --example gpu_mlp
//! ```
#![expect(unsafe_code, reason = "products at device addresses")]

use std::{error::Error, sync::Arc};

use df11::{
    CompressOptions, Source,
    gpu::{
        Device, GpuModel, Linear, LinearInput, LinearOutput, LoadOptions, Matrix, Status,
        cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _},
    },
    hazmat::demo,
};
use half::bf16;

const SHAPE: demo::Shape = demo::Shape {
    layers: 1,
    hidden: 4096,
    key_value: 1024,
    intermediate: 14_336,
    vocabulary: 1000,
};
/// Rows of x.
const ROWS: [usize; 2] = [2, 20];
/// For gate, up and down, whether they are in the fast layout.
const FORMS: [[bool; 3]; 3] = [[false; 3], [true; 3], [false, true, true]];

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let checkpoint = demo::checkpoint(folder.path(), SHAPE, 11)?;
    let container = folder.path().join("model.df11");
    let options = CompressOptions::new().verify(false).overwrite(true);
    df11::compress(&Source::open(&checkpoint)?, &container, &options, &())?;
    let original = df11::open(&container)?;
    let device = Device::open(0)?;
    let model = original.load(&device, &LoadOptions::new())?;
    println!("{}", device.info().name);

    let names = ["gate", "up", "down"].map(|part| format!("model.layers.0.mlp.{part}_proj.weight"));
    let host = names.iter().map(|name| original.tensor(name)?.decode::<bf16>());
    let host = host.collect::<Result<Vec<_>, _>>()?;
    for fast in FORMS {
        let matrices = names.iter().zip(fast).map(|(name, fast)| matrix(&model, name, fast));
        let mlp = Mlp::new(&matrices.collect::<Result<Vec<_>, _>>()?)?;
        for rows in ROWS {
            let x = (0..rows * SHAPE.hidden)
                .map(|at| bf16::from_f64(((at * 37 % 101) as f64 - 50.0) / 50.0));
            mlp.run(&x.collect::<Vec<_>>(), rows, &host)?;
        }
    }
    Ok(())
}

fn matrix(model: &GpuModel, name: &str, fast: bool) -> df11::Result<Matrix> {
    let stored = model.matrix(name)?;
    if fast { stored.to_fast_or_stored() } else { Ok(stored) }
}

/// Its products, each prepared once: gate and up share x.
struct Mlp {
    gate_up: Linear,
    down: Linear,
    bytes: u64,
}

impl Mlp {
    fn new(matrices: &[Matrix]) -> df11::Result<Self> {
        let bytes = matrices.iter().map(Matrix::device_bytes).sum();
        Ok(Self {
            gate_up: Linear::new(&matrices[..2])?,
            down: Linear::new(&matrices[2..])?,
            bytes,
        })
    }

    fn forms(&self) -> String {
        let all = [self.gate_up.matrices(), self.down.matrices()].concat();
        let forms = all.iter().map(|matrix| format!("{:?}", matrix.residence()));
        forms.collect::<Vec<_>>().join(", ")
    }

    fn run(&self, x: &[bf16], rows: usize, weights: &[Vec<bf16>]) -> Result<(), Box<dyn Error>> {
        let (device, inner) = (self.gate_up.device(), SHAPE.intermediate);
        let (stream, status) = (device.context().new_stream()?, Status::new(device)?);
        let space_of = |linear: &Linear| linear.workspace_bytes(rows as u64);
        let bytes = space_of(&self.gate_up).max(space_of(&self.down)).max(1);
        let mut space = stream.alloc_zeros::<u8>(bytes as usize)?;
        let device_x = upload(&stream, x)?;
        let mut both = stream.alloc_zeros::<u16>(rows * 2 * inner)?;
        let mut y = stream.alloc_zeros::<u16>(rows * SHAPE.hidden)?;

        let mut run = |linear: &Linear, x: &CudaSlice<u16>, y: &mut CudaSlice<u16>| {
            let (x, _read) = x.device_ptr(&stream);
            let (y, _written) = y.device_ptr_mut(&stream);
            let (space, _used) = space.device_ptr_mut(&stream);
            multiply(linear, (x, rows), y, space, &stream, &status)
        };
        run(&self.gate_up, &device_x, &mut both)?;
        // The caller's own kernels come between; here the host does it.
        let both = download(&stream, &both)?;
        let hidden: Vec<bf16> =
            both.chunks(2 * inner).flat_map(|row| activate(&row[..inner], &row[inner..])).collect();
        let hidden_device = upload(&stream, &hidden)?;
        run(&self.down, &hidden_device, &mut y)?;
        status.check(&stream)?;

        let parts = [&both, &both, &download(&stream, &y)?];
        let places = [(0, 2 * inner), (inner, 2 * inner), (0, SHAPE.hidden)];
        let inputs = [x, x, &hidden];
        let mut worst: f64 = 0.0;
        for at in 0..3 {
            let (start, pitch) = places[at];
            worst = worst.max(error((inputs[at], rows), &weights[at], parts[at], start, pitch));
        }
        println!(
            "{}, {rows} rows: {} bytes, {:.2} bits per weight; error at most {worst:.4} of what \
            rounding to BF16 may lose",
            self.forms(),
            self.bytes,
            self.bytes as f64 * 8.0 / weights.iter().map(Vec::len).sum::<usize>() as f64,
        );
        if worst > 1.01 { Err("the products differ from the CPU's".into()) } else { Ok(()) }
    }
}

fn upload(stream: &Arc<CudaStream>, values: &[bf16]) -> Result<CudaSlice<u16>, Box<dyn Error>> {
    Ok(stream.clone_htod(&values.iter().map(|value| value.to_bits()).collect::<Vec<_>>())?)
}

fn download(
    stream: &Arc<CudaStream>,
    values: &CudaSlice<u16>,
) -> Result<Vec<bf16>, Box<dyn Error>> {
    Ok(stream.clone_dtoh(values)?.into_iter().map(bf16::from_bits).collect())
}

/// All products of one `Linear`, side by side.
fn multiply(
    linear: &Linear,
    (x, rows): (u64, usize),
    y: u64,
    space: u64,
    stream: &CudaStream,
    status: &Status,
) -> df11::Result<()> {
    let pitch: u64 = linear.matrices().iter().map(Matrix::row_count).sum();
    let columns = linear.matrices()[0].column_count();
    let mut place = y;
    let outputs = linear.matrices().iter().map(|matrix| {
        let output = LinearOutput::new(place, pitch);
        place += 2 * matrix.row_count();
        output
    });
    let outputs: Vec<LinearOutput> = outputs.collect();
    let x = LinearInput::new(x, rows as u64, columns);
    // SAFETY: x has the rows, y room for all products side by side, the workspace was zeros and is
    // used on one stream; the caller waits before it drops any of them.
    unsafe { linear.multiply(x, &outputs, space, stream, status) }
}

fn activate(gate: &[bf16], up: &[bf16]) -> Vec<bf16> {
    let silu = |gate: f64| gate / (1.0 + (-gate).exp());
    gate.iter()
        .zip(up)
        .map(|(gate, up)| bf16::from_f64(silu(gate.to_f64()) * up.to_f64()))
        .collect()
}

/// The largest difference from sums in f64, as a share of what rounding to BF16 (half a unit of
/// eight bits) and sums in f32 may lose.
fn error(
    (x, rows): (&[bf16], usize),
    weights: &[bf16],
    y: &[bf16],
    start: usize,
    pitch: usize,
) -> f64 {
    let columns = x.len() / rows;
    let mut worst: f64 = 0.0;
    for (row, x) in x.chunks(columns).enumerate() {
        for (at, weights) in weights.chunks(columns).enumerate() {
            let terms = x.iter().zip(weights).map(|(x, w)| x.to_f64() * w.to_f64());
            let (sum, size) =
                terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + f64::abs(term)));
            let allowed = f64::abs(sum) / 256.0 + size / f64::from(1 << 18);
            let found = y[row * pitch + start + at].to_f64();
            worst = worst.max((found - sum).abs() / allowed);
        }
    }
    worst
}
