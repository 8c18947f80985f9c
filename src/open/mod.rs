//! Opening: `open → validate → views → decode`.

mod added;
mod ahead;
mod base;
pub(crate) mod beside;
#[cfg(feature = "remote")]
mod cache;
#[cfg(feature = "remote")]
mod cached;
mod chunks;
mod decoder;
#[cfg(feature = "remote")]
mod far_folder;
#[cfg(feature = "remote")]
mod filling;
mod kept;
mod model;
mod opening;
mod options;
mod original;
#[cfg(feature = "cudarc")]
mod parts;
mod recorded;
#[cfg(feature = "remote")]
mod remote;
mod shard;
mod slice;
mod tensor;
mod tensor_slice;
mod verify;

pub use added::tensor_hashes;
pub use ahead::ReadAhead;
pub(crate) use base::{Base, BaseTensor};
#[cfg(feature = "remote")]
pub use cache::choose_cache;
#[cfg(feature = "cudarc")]
pub(crate) use decoder::PIECE_BYTES;
pub use decoder::{Cpu, Decoder, PreparedTensor, histogram};
#[cfg(feature = "cudarc")]
pub(crate) use model::none_such;
pub use model::{Block, BlockLayout, Model};
pub use opening::{Models, is_compressed, open};
pub(crate) use opening::{list_of_components, listed_components};
pub use options::OpenOptions;
pub(crate) use original::{FilePieces, OriginalFile, hash};
pub(crate) use recorded::{BASE, MAX_UPS, RecordedBase};
pub use shard::Shard;
#[cfg(feature = "cudarc")]
pub(crate) use slice::{Rect, Slice};
pub use tensor::{Encoding, Tensor, Tiles};
pub use tensor_slice::{Element, TensorSlice};
pub use verify::{Level, Verification, is_small, verify_containers};
