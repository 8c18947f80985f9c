//! Windows 10 and newer.

#![expect(unsafe_code, reason = "calls of the system, each with its proof")]

use std::{
    borrow::Cow,
    ffi::CStr,
    fs::File,
    io,
    mem::MaybeUninit,
    os::windows::{
        ffi::OsStrExt as _,
        fs::{FileExt as _, OpenOptionsExt as _},
        io::AsRawHandle as _,
    },
    path::{Path, PathBuf, absolute},
    thread,
    time::Duration,
};

use crate::error::io_remedied;
use windows_sys::Win32::{
    Foundation::{
        ERROR_ACCESS_DENIED, ERROR_LOCK_VIOLATION, ERROR_SHARING_VIOLATION, ERROR_USER_MAPPED_FILE,
    },
    Storage::FileSystem::{
        FILE_FLAG_BACKUP_SEMANTICS, FILE_FLAG_DELETE_ON_CLOSE, FILE_FLAG_OPEN_REPARSE_POINT,
        GetDiskFreeSpaceExW, GetFileInformationByHandle, MoveFileExW,
    },
};

/// The variable that names the user's folder.
pub(crate) const HOME: &str = "USERPROFILE";
/// The variable that names the folder of temporary files.
pub const TEMPORARY: &str = "TMP";
/// The end of the name of a lock file.
const LOCK: &str = ".df11-lock";
/// Attempts to make a lock file, and the time between two.
const ATTEMPTS: usize = 10;
const PAUSE: Duration = Duration::from_millis(20);
/// Calls of the system refuse longer paths that do not begin with [`VERBATIM`]: 260 characters,
/// less the name of a temporary file.
const LONG: usize = 220;
/// Prefix of paths whose length has no limit.
const VERBATIM: &str = r"\\?\";

/// Fills `buf` with the bytes of a file from `offset` on. This also moves the file's cursor, but
/// reads at the given offset, so threads do not disturb each other.
///
/// # Errors
/// The system's error; [`io::ErrorKind::UnexpectedEof`] if the file ends before.
pub(crate) fn read_exact_at(file: &File, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buf.is_empty() {
        match file.seek_read(buf, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                buf = &mut buf[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes` to a file, from `offset` on; other threads may write elsewhere in it at
/// the same time. Moves the file's cursor as well.
pub(crate) fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.seek_write(bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Identifies an open file on this machine: its volume and its index there.
pub(crate) fn file_id(file: &File) -> io::Result<[u64; 2]> {
    let mut found = MaybeUninit::uninit();
    // SAFETY: the handle is open, and the result has room for what is written.
    let done = unsafe { GetFileInformationByHandle(file.as_raw_handle(), found.as_mut_ptr()) };
    check(done)?;
    // SAFETY: the call succeeded, so it has written all fields.
    let found = unsafe { found.assume_init() };
    let index = u64::from(found.nFileIndexHigh) << 32 | u64::from(found.nFileIndexLow);
    Ok([found.dwVolumeSerialNumber.into(), index])
}

/// The system's answer as a result.
fn check(done: i32) -> io::Result<()> {
    if done == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Opens a file for reading.
pub(crate) fn open_without_waiting(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// The number of files that this process may have open; None, since there is no limit.
pub(crate) fn max_open_files() -> Option<u64> {
    None
}

/// Does nothing: what is created inherits who may access it from its folder.
pub(crate) fn make_accessible(_: &mut tempfile::Builder<'_, '_>, _mode: u32) {}

/// Opens a folder, to lock it. Something else may have taken its place.
pub(crate) fn open_folder(path: &Path) -> io::Result<File> {
    let flags = FILE_FLAG_BACKUP_SEMANTICS | FILE_FLAG_OPEN_REPARSE_POINT;
    let folder = File::options().read(true).custom_flags(flags).open(path)?;
    let is_folder = folder.metadata()?.is_dir();
    if is_folder { Ok(folder) } else { Err(io::ErrorKind::NotADirectory.into()) }
}

/// Whether something has this path and keeps it. What is being deleted has its name until nobody
/// has it open, and cannot be opened again.
pub(crate) fn is_there(path: &Path) -> bool {
    let flags = FILE_FLAG_BACKUP_SEMANTICS | FILE_FLAG_OPEN_REPARSE_POINT;
    File::options().access_mode(0).custom_flags(flags).open(path).is_ok()
}

/// Locks the file or folder that has this path: opens a lock file beside it, alone. The lock lasts
/// as long as the result is open, and the system removes the lock file with it, also if the process
/// is killed. None if somebody else has it.
///
/// The handle is closed: a folder that is open cannot be renamed, and a lock of its bytes
/// (`LockFileEx`) would keep other handles from reading a file.
///
/// # Errors
/// The system's error, for example if the folder above is not writable.
pub(crate) fn lock(handle: File, path: &Path) -> io::Result<Option<File>> {
    drop(handle);
    let mut options = File::options();
    options.write(true).create(true).share_mode(0).custom_flags(FILE_FLAG_DELETE_ON_CLOSE);
    let lock_file = lock_file(path)?;
    for _ in 0..ATTEMPTS {
        match options.open(&lock_file) {
            Err(error) if has_code(&error, &[ERROR_SHARING_VIOLATION]) => return Ok(None),
            // The file before is still being deleted, or access is denied for good.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => thread::sleep(PAUSE),
            result => return result.map(Some),
        }
    }
    Err(io::ErrorKind::PermissionDenied.into())
}

/// As [`lock`], as soon as nobody else has it.
#[expect(clippy::needless_pass_by_value, reason = "on other systems it becomes the lock")]
pub(crate) fn wait_for_lock(handle: File, path: &Path) -> io::Result<File> {
    loop {
        if let Some(lock) = lock(handle.try_clone()?, path)? {
            return Ok(lock);
        }
        thread::sleep(PAUSE);
    }
}

fn lock_file(path: &Path) -> io::Result<PathBuf> {
    let path = absolute(path)?;
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    name.push(LOCK);
    Ok(path.with_file_name(name))
}

/// Gives a file or folder a name that nothing has; every file system has such a rename.
#[expect(clippy::unnecessary_wraps, reason = "some other systems have none")]
pub(crate) fn rename_keeping(from: &Path, to: &Path) -> Option<io::Result<()>> {
    let wide = |path: &Path| long(path).as_os_str().encode_wide().chain([0]).collect::<Vec<_>>();
    let (from, to) = (wide(from), wide(to));
    // SAFETY: both are texts that end with zero.
    Some(check(unsafe { MoveFileExW(from.as_ptr(), to.as_ptr(), 0) }))
}

/// Exchanges two names in one step: None, no file system can.
pub(crate) fn exchange(_: &Path, _: &Path) -> Option<io::Result<()>> {
    None
}

/// Does nothing: the system decides when names last.
#[expect(clippy::unnecessary_wraps, reason = "on other systems it may fail")]
pub(crate) fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Makes the bytes of a file last. Only who may write a file can have it flushed: for one that is
/// read-only the system decides when.
pub(crate) fn sync_file(path: &Path) -> io::Result<()> {
    match File::options().write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        file => file?.sync_all(),
    }
}

/// Whether an error says that a file is in use. A rename onto a file that is mapped, and that of a
/// folder with a file that is open, are denied without another reason.
fn is_use(error: &io::Error) -> bool {
    let codes = [
        ERROR_ACCESS_DENIED,
        ERROR_SHARING_VIOLATION,
        ERROR_LOCK_VIOLATION,
        ERROR_USER_MAPPED_FILE,
    ];
    has_code(error, &codes)
}

fn has_code(error: &io::Error, codes: &[u32]) -> bool {
    error.raw_os_error().is_some_and(|code| codes.contains(&code.cast_unsigned()))
}

/// Adds a remedy to the error of a rename or removal that fails while a program has the file open.
pub(crate) fn explain_use(error: io::Error) -> io::Error {
    if !is_use(&error) {
        return error;
    }
    let remedy = "a program may have it, or a file in it, open or mapped: close what uses it";
    io_remedied(error.kind(), format!("{error}; {remedy}, then run this again"))
}

/// The same path, without a limit if it is long.
pub(crate) fn long(path: &Path) -> Cow<'_, Path> {
    let Some(whole) = absolute(path).ok().filter(|whole| whole.as_os_str().len() > LONG) else {
        return path.into();
    };
    let text = whole.to_string_lossy();
    match text.strip_prefix(r"\\") {
        Some(rest) if rest.starts_with(['?', '.']) => path.into(),
        Some(share) => PathBuf::from(format!(r"{VERBATIM}UNC\{share}")).into(),
        None => PathBuf::from(format!("{VERBATIM}{text}")).into(),
    }
}

/// Why no file can have a name, which some other system may allow; None if one can. The system
/// would write to a device instead, or drop the end of the name.
pub(crate) fn why_unnameable(name: &str) -> Option<&'static str> {
    let stem = name.split('.').next().unwrap_or_default().trim_end().to_uppercase();
    let port = stem.strip_prefix("COM").or_else(|| stem.strip_prefix("LPT"));
    let is_port = port.is_some_and(|end| end.chars().count() == 1 && is_digit(end));
    if name.contains(['<', '>', ':', '"', '|', '?', '*', '\\', '/']) {
        return Some("a character of it means something else");
    }
    if name.ends_with(['.', ' ']) {
        return Some("names do not end in a dot or a space");
    }
    (is_port || ["CON", "PRN", "AUX", "NUL"].contains(&&*stem)).then_some("it is a device")
}

/// Whether all is digits, as the system counts ports.
fn is_digit(text: &str) -> bool {
    text.chars().all(|char| char.is_ascii_digit() || "¹²³".contains(char))
}

/// Does nothing: large pages need a privilege here.
#[cfg(feature = "cudarc")]
pub(crate) fn in_large_pages(_: &memmap2::MmapMut) {}

/// Bytes that this user may still write to the disk of a folder.
///
/// # Errors
/// The system's error.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    // The call wants a separator at the end of the name of a share.
    let folder = long(&absolute(folder)?).join("");
    let folder: Vec<u16> = folder.as_os_str().encode_wide().chain([0]).collect();
    let (mut free, none) = (0, std::ptr::null_mut());
    // SAFETY: the text ends with zero, the result has room, and the others are not asked for.
    check(unsafe { GetDiskFreeSpaceExW(folder.as_ptr(), &raw mut free, none, none) })?;
    Ok(free)
}

/// A path as C names it: UTF-8.
pub fn path_of_c(text: &CStr) -> PathBuf {
    text.to_string_lossy().into_owned().into()
}

#[cfg(feature = "cli")]
pub use command::{MEMORY_FOLDER, PYTHON, is_broken_pipe, memory, page_size, quote, watch_stops};

/// Functions that only the command uses.
#[cfg(feature = "cli")]
mod command {
    use std::{
        borrow::Cow,
        io,
        mem::MaybeUninit,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use windows_sys::Win32::{
        Foundation::ERROR_PIPE_NOT_CONNECTED,
        System::SystemInformation::{GetSystemInfo, GlobalMemoryStatusEx, MEMORYSTATUSEX},
    };

    /// The interpreter, by the name that installers give it.
    pub const PYTHON: &str = "python";
    /// A folder that is in memory; Windows has none.
    pub const MEMORY_FOLDER: &str = "";
    /// Writes 2, as Unix numbers Ctrl-C, when the user asks the process to stop. Without this, that
    /// ends it at once.
    pub fn watch_stops(stop: &Arc<AtomicUsize>) {
        let stop = Arc::clone(stop);
        let _ = ctrlc::set_handler(move || stop.store(2, Ordering::Relaxed));
    }

    /// Whether who reads a pipe has gone away. The standard library knows one of the two codes for
    /// this.
    pub fn is_broken_pipe(error: &io::Error) -> bool {
        let code = error.raw_os_error().map(i32::cast_unsigned);
        error.kind() == io::ErrorKind::BrokenPipe || code == Some(ERROR_PIPE_NOT_CONNECTED)
    }

    /// Total memory, and what is available of it; where the page file is small or missing, no more
    /// than processes may still commit.
    pub fn memory() -> Option<(u64, u64)> {
        let length = u32::try_from(size_of::<MEMORYSTATUSEX>()).ok()?;
        let mut status = MEMORYSTATUSEX { dwLength: length, ..Default::default() };
        // SAFETY: the structure is valid and tells its length.
        let done = unsafe { GlobalMemoryStatusEx(&raw mut status) };
        let available = status.ullAvailPhys.min(status.ullAvailPageFile);
        (done != 0).then_some((status.ullTotalPhys, available))
    }

    /// Bytes of a page of memory.
    pub fn page_size() -> usize {
        let mut found = MaybeUninit::uninit();
        // SAFETY: the result has room for what is written.
        unsafe { GetSystemInfo(found.as_mut_ptr()) };
        // SAFETY: the call always writes all fields.
        let found = unsafe { found.assume_init() };
        found.dwPageSize as usize
    }

    /// Quotes a text as one argument of a shell, if it must be; no path has a quotation mark.
    pub fn quote(text: &str) -> Cow<'_, str> {
        let is_plain = |char: char| char.is_alphanumeric() || r"\/:._-~+@".contains(char);
        if !text.is_empty() && text.chars().all(is_plain) {
            return text.into();
        }
        format!("\"{text}\"").into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_file_goes_with_its_lock() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("folder");
        std::fs::create_dir(&folder).unwrap();
        let held = lock(open_folder(&folder).unwrap(), &folder).unwrap().unwrap();
        assert!(place.path().join("folder.df11-lock").exists());
        assert!(lock(open_folder(&folder).unwrap(), &folder).unwrap().is_none(), "it is taken");
        drop(held);
        assert!(!place.path().join("folder.df11-lock").exists());
        assert!(lock(open_folder(&folder).unwrap(), &folder).unwrap().is_some());
    }

    #[test]
    fn a_rename_keeps_what_is_there_and_takes_long_paths() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        std::fs::write(at("a"), "a").unwrap();
        std::fs::write(at("b"), "b").unwrap();
        let error = rename_keeping(&at("a"), &at("b")).unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        let deep = at(&"d".repeat(120)).join("e".repeat(120));
        std::fs::create_dir_all(&deep).unwrap();
        assert!(deep.as_os_str().len() > 260 - 12, "{}", deep.display());
        rename_keeping(&at("a"), &deep.join("a")).unwrap().unwrap();
        assert_eq!(std::fs::read(deep.join("a")).unwrap(), b"a");
        assert!(free_bytes(&deep).unwrap() > 0);
    }

    #[test]
    fn long_paths_lose_their_limit() {
        let name = "x".repeat(250);
        let plain = |path: &str| long(Path::new(path)).display().to_string();
        assert_eq!(plain(r"C:\a"), r"C:\a");
        assert_eq!(plain(&format!(r"C:\a/{name}")), format!(r"\\?\C:\a\{name}"));
        assert_eq!(plain(&format!(r"\\host\a\{name}")), format!(r"\\?\UNC\host\a\{name}"));
        let verbatim = format!(r"\\?\C:\{name}");
        assert_eq!(plain(&verbatim), verbatim);
    }

    #[cfg(feature = "cli")]
    #[test]
    fn arguments_can_be_pasted_into_a_shell() {
        for (name, wanted) in
            [(r"a\b.df11", r"a\b.df11"), ("my model", "\"my model\""), ("a&b", "\"a&b\"")]
        {
            assert_eq!(quote(name), wanted);
        }
    }

    #[test]
    fn names_of_devices_and_names_that_change_are_refused() {
        for name in
            ["aux", "NUL.json", "com1.txt", "LPT¹", "con .x", "a.", "a ", "a?", "a:b", "a|b", "<"]
        {
            assert!(why_unnameable(name).is_some(), "{name}");
        }
        for name in ["auxiliary.json", "com.txt", "COM10", "model.safetensors", ".x", "nulls", "é"]
        {
            assert_eq!(why_unnameable(name), None, "{name}");
        }
    }

    #[test]
    fn errors_of_files_in_use_have_a_remedy() {
        for code in [5, 32, 33, 1224] {
            let error = explain_use(io::Error::from_raw_os_error(code)).to_string();
            assert!(error.contains("close what uses it"), "{error}");
        }
        let other = explain_use(io::Error::from_raw_os_error(2));
        assert_eq!(other.raw_os_error(), Some(2));
    }
}
