//! The version of the interface, and its constants.

/// Major version of this interface. Programs compiled for another major version are incompatible.
pub const VERSION_MAJOR: u32 = 0;
/// Minor version of this interface. While the major version is 0, other minor versions are
/// incompatible too.
pub const VERSION_MINOR: u32 = 1;
/// For `df11_open`: read files on demand instead of mapping them into memory.
pub const OPEN_WITHOUT_MAP: u32 = 1;
/// For `df11_gpu_load`: transcode the matrix to the fast layout, in memory of the library.
pub const GPU_FAST: u32 = 1;
/// For `df11_decode` and `df11_gpu_decode`, as the number of rows: all from the first one on.
pub const ALL_ROWS: u64 = u64::MAX;

/// The version of the loaded library: `DF11_VERSION_MAJOR * 65536 + DF11_VERSION_MINOR`. Compare it
/// with the header's before anything else.
#[unsafe(no_mangle)]
#[expect(unsafe_code, reason = "a name that C knows")]
pub extern "C" fn df11_version() -> u32 {
    VERSION_MAJOR << 16 | VERSION_MINOR
}
