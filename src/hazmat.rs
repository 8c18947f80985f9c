//! The internal parts of the library: codes, encodings, and the bytes of a container.
//!
//! They are for tools, tests, fuzzing, and bindings to other languages. **Nothing here is covered
//! by semantic versioning**: any release may change, rename or remove it. For anything else use the
//! items of the crate's root, of [`source`](crate::source) and of `gpu`.
//!
//! These parts rely on the checks that the rest of the library makes. An encoder trusts the sizes
//! that its caller has computed; a directory passed to the writer must be one that a reader
//! accepts. Decoders are the exception: they accept any bytes, and return an error or weights.
//!
//! ```
//! use df11::hazmat::{gap::{self, GapGeometry}, huffman::Histogram};
//!
//! // 1.0 and 1.5 have one exponent, 127, so one code.
//! let weights = [0x80, 0x3f, 0xc0, 0x3f];
//! assert_eq!(Histogram::of(&weights).used(), 1);
//! let encoded = gap::encode_tensor(&weights, GapGeometry::default(), usize::MAX)?;
//! # Ok::<(), df11::Error>(())
//! ```

pub use crate::{
    encoding::{delta, gap, stored, tile},
    error::{io_remedy, is_unseen, printable},
    float::is_coded,
    io::FileReader,
    open::{
        Cpu, Decoder, PreparedTensor, ReadAhead, Shard, Tiles, histogram, is_small, tensor_hashes,
        verify_containers,
    },
    parallel::pool,
    paths::{PENDING, check_local, check_path, is_far, shown},
    source::hub_cache::{Located, locate},
    temporary::{Leftover, TemporaryFolder, leftovers, remove_leftovers, write_file},
    write::{
        Destination, Loading, MIN_CODED_BYTES, SaveTarget, check_replaceable, container_path, copy,
        earlier_containers,
    },
};

#[cfg(feature = "remote")]
pub use crate::{open::choose_cache, store::end_waits_when};

/// BF16 weights as bytes: exponents and planes.
pub mod bf16 {
    pub use crate::bf16::*;
}

/// The numbers that the format fixes.
pub mod constants {
    pub use crate::constants::*;
}

/// Seeded checkpoints for demonstration, tests and benchmarks.
pub mod demo {
    pub use crate::demo::*;
}

/// The container as bytes: header, directory, checksums.
pub mod format {
    pub use crate::format::*;
}

/// The rule by which tensors are grouped into blocks.
pub mod group {
    pub use crate::source::group::*;
}

/// The exponent code: histograms, lengths and codes.
pub mod huffman {
    pub use crate::huffman::*;
}

/// Functions that differ between systems, for the command and the C API.
#[doc(hidden)]
pub mod platform {
    #[cfg(feature = "cli")]
    pub use crate::platform::{
        MEMORY_FOLDER, PYTHON, is_broken_pipe, memory, page_size, quote, watch_stops,
    };
    pub use crate::platform::{TEMPORARY, free_bytes, path_of_c};
}

/// Items that bindings and benchmarks need of a GPU besides [`gpu`](crate::gpu).
#[cfg(feature = "cudarc")]
pub mod gpu {
    pub use crate::gpu::{
        device::{seconds_between, timestamp},
        driver::{Visit, capture_of_raw},
        linear::{
            BandPlan, BlockShape, BlockWork, FastPacker, Split, Tile2, Tile64Demand, TileDemand,
        },
        pinned::PinnedRange,
        task::{TableAddresses, TileAddresses},
    };
}
