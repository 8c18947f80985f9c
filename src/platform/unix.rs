//! Linux, macOS and other Unix systems.

use std::{
    borrow::Cow,
    ffi::{CStr, OsStr},
    fs::{File, Permissions},
    io,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, OFlags},
    io::Errno,
    process::Resource,
};

/// The variable that names the user's folder.
pub(crate) const HOME: &str = "HOME";
/// The variable that names the folder of temporary files.
pub const TEMPORARY: &str = "TMPDIR";

/// Fills `buf` with the bytes of a file from `offset` on.
///
/// # Errors
/// The system's error; [`io::ErrorKind::UnexpectedEof`] if the file ends before.
pub(crate) fn read_exact_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(buf, offset)
}

/// Writes all of `bytes` to a file, from `offset` on; other threads may write elsewhere in it at
/// the same time.
pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}

/// Identifies an open file on this machine: its device and its number there.
pub(crate) fn file_id(file: &File) -> io::Result<[u64; 2]> {
    let metadata = file.metadata()?;
    Ok([metadata.dev(), metadata.ino()])
}

/// Opens a file for reading, and never waits for the other end of a pipe.
pub(crate) fn open_without_waiting(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)
}

/// The number of files that this process may have open; None if there is no limit.
pub(crate) fn max_open_files() -> Option<u64> {
    rustix::process::getrlimit(Resource::Nofile).current
}

/// Makes what a builder creates as accessible as `mode`, less what the process's umask takes.
pub(crate) fn make_accessible(builder: &mut tempfile::Builder<'_, '_>, mode: u32) {
    builder.permissions(Permissions::from_mode(mode));
}

/// Opens a folder, to lock it. Something else, such as a pipe, may have taken its place.
pub(crate) fn open_folder(path: &Path) -> io::Result<File> {
    let only_folders = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits().cast_signed();
    File::options().read(true).custom_flags(only_folders).open(path)
}

/// Locks the file or folder of a handle, which has this path. The lock lasts as long as the result,
/// or a copy of it, is open. None if somebody else has it.
///
/// # Errors
/// The system's error, for example if the file system has no locks.
pub(crate) fn lock(handle: File, _path: &Path) -> io::Result<Option<File>> {
    match rustix::fs::flock(&handle, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(None),
        result => Ok(result.map(|()| Some(handle))?),
    }
}

/// As [`lock`], as soon as nobody else has it.
pub(crate) fn wait_for_lock(handle: File, _path: &Path) -> io::Result<File> {
    loop {
        match rustix::fs::flock(&handle, FlockOperation::LockExclusive) {
            Err(Errno::INTR) => {}
            result => return Ok(result.map(|()| handle)?),
        }
    }
}

/// Gives a file or folder a name that nothing has; None if the system or the file system has no
/// such rename.
pub(crate) fn rename_keeping(from: &Path, to: &Path) -> Option<io::Result<()>> {
    rename_with(from, to, false)
}

/// Exchanges two names in one step; None if the system or the file system cannot.
pub(crate) fn exchange(a: &Path, b: &Path) -> Option<io::Result<()>> {
    rename_with(a, b, true)
}

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn rename_with(from: &Path, to: &Path, exchange: bool) -> Option<io::Result<()>> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let flag = if exchange { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
    match renameat_with(CWD, from, CWD, to, flag) {
        Err(Errno::NOSYS | Errno::INVAL | Errno::NOTSUP) => None,
        result => Some(result.map_err(io::Error::from)),
    }
}

/// Other systems have no such renames.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn rename_with(_: &Path, _: &Path, _: bool) -> Option<io::Result<()>> {
    None
}

/// Whether something has this path.
pub(crate) fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Makes the names in a folder last.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Makes the bytes of a file last.
pub(crate) fn sync_file(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Adds a remedy to the error of a rename or removal that fails while a program has the file open;
/// here none does.
pub(crate) fn explain_use(error: io::Error) -> io::Error {
    error
}

/// The same path, for calls that limit the length of others.
pub(crate) fn long(path: &Path) -> Cow<'_, Path> {
    path.into()
}

/// Why no file can have a name that a container may hold: all can.
pub(crate) fn why_unnameable(_: &str) -> Option<&'static str> {
    None
}

/// Asks for large pages, where the system has them.
#[cfg(feature = "cudarc")]
pub(crate) fn in_large_pages(memory: &memmap2::MmapMut) {
    #[cfg(target_os = "linux")]
    memory.advise(memmap2::Advice::HugePage).ok();
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

/// Bytes that this user may still write to the disk of a folder.
///
/// # Errors
/// The system's error.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(folder)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// A path as C names it: any bytes.
pub fn path_of_c(text: &CStr) -> PathBuf {
    OsStr::from_bytes(text.to_bytes()).into()
}

#[cfg(feature = "cli")]
pub use command::{MEMORY_FOLDER, PYTHON, is_broken_pipe, memory, page_size, quote, watch_stops};

/// Functions that only the command uses.
#[cfg(feature = "cli")]
mod command {
    use std::{
        borrow::Cow,
        fs, io,
        sync::{Arc, atomic::AtomicUsize},
    };

    use signal_hook::{consts, flag};

    /// The interpreter, by the name that installers give it.
    pub const PYTHON: &str = "python3";
    /// The folder that is in memory, on Linux. The Python package puts containers there while a
    /// model is loaded, or else with temporary files.
    pub const MEMORY_FOLDER: &str = "/dev/shm";
    /// Whether who reads a pipe has gone away.
    pub fn is_broken_pipe(error: &io::Error) -> bool {
        error.kind() == io::ErrorKind::BrokenPipe
    }

    /// Writes the number of the signal that asks the process to stop. Without this, a signal ends
    /// it at once.
    pub fn watch_stops(stop: &Arc<AtomicUsize>) {
        /// The same number on all systems that we know; the crate has no constant for it.
        const SIGXFSZ: i32 = 25;
        for signal in [consts::SIGINT, consts::SIGTERM, consts::SIGHUP] {
            let _ = flag::register_usize(signal, stop.clone(), signal.unsigned_abs() as usize);
        }
        // A write beyond the limit of file sizes then fails, as on a full disk, instead of ending
        // the process. Nobody reads the flag.
        let _ = flag::register(SIGXFSZ, Arc::default());
    }

    /// Total and available memory in bytes, as Linux tells it.
    pub fn memory() -> Option<(u64, u64)> {
        let info = fs::read_to_string("/proc/meminfo").ok()?;
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
        };
        Some((field("MemTotal:")?, field("MemAvailable:")?))
    }

    /// Bytes of a page of memory.
    pub fn page_size() -> usize {
        rustix::param::page_size()
    }

    /// Quotes a text as one argument of a shell, if it must be.
    pub fn quote(text: &str) -> Cow<'_, str> {
        shlex::try_quote(text).unwrap_or(text.into())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{Error, io::read_regular};

    #[cfg(feature = "cli")]
    #[test]
    fn arguments_can_be_pasted_into_a_shell() {
        let cases = [("a/b.df11", "a/b.df11"), ("my model", "'my model'"), ("$x", "'$x'")];
        for (name, wanted) in cases {
            assert_eq!(super::quote(name), wanted);
        }
    }

    #[test]
    fn pipes_devices_and_folders_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).unwrap();
        for path in [&pipe, Path::new("/dev/zero"), folder.path()] {
            assert!(matches!(read_regular(path, 5), Err(Error::Parameter { .. })), "{path:?}");
        }
    }
}
