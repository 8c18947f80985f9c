//! All that systems do differently: one file a system, with the same functions. Nothing else in the
//! crate asks which system it runs on, of which a test (`tests/sources/platform.rs`) makes sure.
//!
//! | function | Unix | Windows |
//! |---|---|---|
//! | `lock` | `flock` of the file or folder | a lock file beside it, which goes with its handle |
//! | `rename_keeping` | `renameat2`, or `renamex_np` | `MoveFileExW` without its flag to replace |
//! | `exchange` | the same | none |
//! | `sync_folder` | `fsync` | the system decides when |
//! | `file_id` | device and inode | volume and file index |
//! | `long` | the path | a path without the limit of 260 characters |
//! | `watch_stops` | SIGINT, SIGTERM, SIGHUP | Ctrl-C, Ctrl-Break, a console that closes |

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(all(unix, feature = "cudarc"))]
pub(crate) use unix::in_large_pages;
#[cfg(unix)]
pub(crate) use unix::{
    HOME, exchange, explain_use, file_id, lock, long, make_accessible, most_open_files,
    open_folder, open_without_waiting, read_exact_at, rename_keeping, sync_folder, wait_for_lock,
    why_unnameable, write_all_at,
};
#[cfg(all(unix, feature = "cli"))]
pub use unix::{MEMORY_FOLDER, PYTHON, TEMPORARY, memory, page_size, quote, watch_stops};
#[cfg(unix)]
pub use unix::{free_bytes, path_of_c};
#[cfg(all(windows, feature = "cudarc"))]
pub(crate) use windows::in_large_pages;
#[cfg(windows)]
pub(crate) use windows::{
    HOME, exchange, explain_use, file_id, lock, long, make_accessible, most_open_files,
    open_folder, open_without_waiting, read_exact_at, rename_keeping, sync_folder, wait_for_lock,
    why_unnameable, write_all_at,
};
#[cfg(all(windows, feature = "cli"))]
pub use windows::{MEMORY_FOLDER, PYTHON, TEMPORARY, memory, page_size, quote, watch_stops};
#[cfg(windows)]
pub use windows::{free_bytes, path_of_c};
