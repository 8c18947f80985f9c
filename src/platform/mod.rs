//! Differences between operating systems: one file per system, with the same functions. No other
//! code of the crate asks on which system it runs; a test (`tests/sources/platform.rs`) enforces
//! that.
//!
//! | function | Unix | Windows |
//! |---|---|---|
//! | `lock` | `flock` of the file or folder | a lock file beside it, which goes with its handle |
//! | `rename_keeping` | `renameat2`, or `renamex_np` | `MoveFileExW` without its flag to replace |
//! | `exchange` | the same | none |
//! | `sync_file` | `fsync` | flushes a handle that may write |
//! | `sync_folder` | `fsync` | the system decides when |
//! | `file_id` | device and inode | volume and file index |
//! | `is_broken_pipe` | `EPIPE` | two codes |
//! | `long` | the path | a path without the limit of 260 characters |
//! | `watch_stops` | SIGINT, SIGTERM, SIGHUP | Ctrl-C, Ctrl-Break, a console that closes |

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
use unix as system;
#[cfg(windows)]
use windows as system;

#[cfg(feature = "cudarc")]
pub(crate) use system::in_large_pages;
pub(crate) use system::{
    HOME, exchange, explain_use, file_id, is_there, lock, long, make_accessible, max_open_files,
    open_folder, open_without_waiting, read_exact_at, rename_keeping, sync_file, sync_folder,
    wait_for_lock, why_unnameable, write_all_at,
};
#[cfg(feature = "cli")]
pub use system::{MEMORY_FOLDER, PYTHON, is_broken_pipe, memory, page_size, quote, watch_stops};
pub use system::{TEMPORARY, free_bytes, path_of_c};
