//! The C interface: `include/df11.h`, described in docs/c.md.
//!
//! ```text
//! df11_open → df11_tensor_at, df11_tensor_named → df11_decode
//! df11_gpu_open → df11_gpu_load → df11_gpu_decode, df11_gpu_multiply → df11_gpu_check
//! ```
//!
//! No panic crosses the boundary: `error::call` catches it and returns [`Status::Internal`]. Every
//! pointer that may be null is checked first, and every size compared.

mod device;
mod error;
mod gpu;
mod model;
mod pointers;
mod version;

pub use device::{Gpu, GpuTensor, Product};
pub use error::{Status, df11_last_error};
pub use gpu::{
    df11_gpu_check, df11_gpu_close, df11_gpu_decode, df11_gpu_free, df11_gpu_keeps_order,
    df11_gpu_load, df11_gpu_multiply, df11_gpu_open, df11_gpu_workspace,
};
pub use model::{
    Model, Tensor, df11_close, df11_decode, df11_open, df11_tensor_at, df11_tensor_named,
};
pub use version::{
    ALL_ROWS, GPU_FAST, OPEN_WITHOUT_MAP, VERSION_MAJOR, VERSION_MINOR, df11_version,
};
