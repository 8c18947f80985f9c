//! What comes in: safetensors files and Hugging Face folders, also those of the official DFloat11 package, and their grouping into blocks.

mod advice;
mod dfloat11;
mod folder;
pub(crate) mod group;
mod header;
pub(crate) mod hub_cache;
mod index;
mod pipeline;
mod safetensors;
mod unique;
mod variant;
mod walk;

pub use folder::{LeftOut, MAX_SIDE_BYTES, SideFile, Source};
pub(crate) use header::{Header, HeaderTensor};
pub(crate) use index::{folder_of, named_files};
pub use pipeline::{Component, Sources};
pub use safetensors::{MAX_HEADER_BYTES, SourceTensor, WeightsFile};
pub(crate) use walk::{Found, HIDDEN, leads_out, walk};
