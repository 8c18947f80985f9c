//! The parts that the fuzz targets share.
#![warn(missing_docs)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::Once,
};

#[path = "../../tests/support/array_witness.rs"]
pub mod array_witness;
pub mod bytes;
pub mod compare;
pub mod draft;
pub mod import;
pub mod model;
pub mod samples;
pub mod targets;
pub mod tensors;
pub mod witness;

/// The largest single allocation that any target may need, in bytes. The largest honest one is a
/// piece of some MiB for each thread.
///
/// A hostile length that reaches an allocator unchecked asks for more, even where the system would
/// hand out untouched zeros. Zeroed and growing allocations call `alloc` too.
const LARGEST_ALLOCATION: usize = 128 << 20;

struct Bounded;

// SAFETY: every call goes on to the system's allocator, whose contract is that of this trait, or
// returns null, which the trait allows for an allocation that fails.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST_ALLOCATION {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps this function's contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as for `alloc`; all memory comes from this allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Bounded = Bounded;

/// Makes the calling thread the only one of rayon's pool: an input then takes the same way each
/// time.
pub fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread();
        pool.build_global().expect("nobody made a pool before");
    });
}
