//! Decoding on NVIDIA GPUs: a model's sections stay compressed in device memory, and each block is
//! decoded when it is used.
//!
//! ```text
//! devices → Device → Model::load → GpuModel → GpuBlock::decode_into → weights, on a stream
//!                    validate, pinned buffers, checksums        no allocation, no synchronisation
//! ```
//!
//! Without CUDA, this module still links and does not panic: it looks for the driver at run time,
//! and [`devices`] and [`Device::open`] return [`Error::Gpu`](crate::Error::Gpu).
//!
//! [`GpuDecoder`] copies decoded bytes back to the host, for verification.
//!
//! ```no_run
//! use df11::gpu::{Device, LoadOptions, Status};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open(0)?;
//! let model = df11::open("model.df11")?.load(&device, &LoadOptions::default())?;
//! let stream = device.context().new_stream()?;
//! let status = Status::new(&device)?;
//! let mut output = stream.alloc_zeros::<u8>(model.largest_block_bytes() as usize)?;
//! for block in model.blocks() {
//!     block.decode_into(&mut output.as_view_mut(), &stream, &status)?;
//!     // … kernels that use the block, on the same stream …
//! }
//! status.check(&stream)?;
//! # Ok(())
//! # }
//! ```

pub(crate) mod device;
mod distribution;
pub(crate) mod driver;
mod fault;
mod fit;
mod host;
pub(crate) mod linear;
mod load;
mod memory;
mod model;
mod module;
mod needs;
mod part;
pub(crate) mod pinned;
mod placement;
mod program;
mod status;
mod stored;
mod streamer;
pub(crate) mod task;
mod upload;

pub use cudarc;
pub use device::{Device, DeviceInfo, devices};
pub use distribution::Placement;
pub use driver::has_driver;
pub use host::GpuDecoder;
pub use linear::{
    Choices, ExpertDecoder, GroupedLinear, Indices, Linear, LinearInput, LinearOutput, Matrix,
    Routing, Transcoded,
};
pub use load::{DeviceOptions, LoadOptions};
pub use model::{GpuBlock, GpuModel, GpuTensor, Piece};
pub use needs::Residence;
pub use placement::{Plan, Preference};
pub use program::GpuProgram;
pub use status::Status;
pub use upload::CutArrays;
