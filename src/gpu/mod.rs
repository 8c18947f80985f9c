//! Decoding on NVIDIA GPUs: a model's sections stay compressed in device memory, and a block is expanded when it is used.
//!
//! ```text
//! devices → Device → Model::load → GpuModel → GpuBlock::decode_into → BF16 in the caller's buffer, on the caller's stream
//!                    validate, pinned buffers, checksums        no allocation, no synchronisation
//! ```
//!
//! Nothing here panics or fails to link where CUDA is missing: the driver is looked for at run time, and [`devices`] and
//! [`Device::open`] answer [`Error::Gpu`](crate::Error::Gpu) with what to do.
//!
//! [`GpuDecoder`] brings decoded bytes back to the host: for verification and for restoring files.
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

mod arrays;
mod block;
mod coding;
mod device;
mod driver;
mod fault;
mod fit;
mod host;
mod host_section;
mod launches;
mod limits;
mod linear;
mod load;
mod memory;
mod model;
mod module;
mod needs;
mod options;
mod part;
mod pinned;
mod pinned_range;
mod placement;
mod prefetch;
mod program;
mod route;
mod schedule;
mod status;
mod stored;
mod streamer;
mod task;
mod upload;
mod visit;

pub use arrays::TableAddresses;
pub use block::{GpuBlock, GpuTensor};
pub use cudarc;
pub use device::{Device, DeviceInfo, devices};
pub use driver::has_driver;
pub use host::GpuDecoder;
pub use limits::{seconds_between, timestamp};
pub use linear::{
    FastPacker, GroupedLinear, Indices, Linear, LinearInput, LinearOutput, Matrix, Residence, Routing,
    TileAddresses, Transcoded,
};
pub use load::LoadOptions;
pub use model::GpuModel;
pub use options::DeviceOptions;
pub use pinned_range::PinnedRange;
pub use placement::{Placement, Plan, Preference};
pub use prefetch::{Decoded, Prefetch};
pub use program::{GpuProgram, Piece};
pub use route::capture_of_raw;
pub use status::Status;
pub use visit::Visit;
