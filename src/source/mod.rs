//! Reads the input (safetensors files and Hugging Face folders, also those of the official DFloat11
//! package), and groups its tensors into blocks.

mod dfloat11;
mod fetched;
pub(crate) mod folder;
pub(crate) mod group;
mod header;
pub(crate) mod hub_cache;
mod index;
pub(crate) mod pipeline;
mod safetensors;
mod walk;

pub use fetched::{FetchedSource, WantedFiles};
pub use folder::SideFile;
pub(crate) use folder::{KEPT_QUANTIZATIONS, Source};
pub(crate) use header::{HeaderTensor, prefix_of, read_header};
pub(crate) use index::{named_files, others};
pub use pipeline::Component;
pub(crate) use pipeline::{Sources, named};
pub use safetensors::{SourceTensor, WeightsFile};
pub use walk::LeftOut;
pub(crate) use walk::{Found, HIDDEN, MAX_SIDE_BYTES, check_inside, check_installed, walk};
