//! The error type: each variant says who is at fault, where, and what to do about it.

use std::{fmt::Display, io, path::Path};

/// The result of every fallible call in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of this library, sorted by who can fix them.
///
/// A message is one line and ends with the remedy, if there is one. Names in messages are
/// [printable](crate::hazmat::printable); fields have them unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused to read or write.
    #[error("{}: {source}", printable(.context))]
    Io {
        /// The file, and the operation that failed.
        context: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The data is well-formed, but needs something that this version does not know.
    #[error(
        "{} is not supported by this version of df11; {}", printable(.what), printable(.remedy)
    )]
    Unsupported {
        /// The feature, version, encoding or dtype.
        what: String,
        /// Remedy for the user.
        remedy: String,
    },
    /// The bytes break a rule of their format: the file is damaged, truncated or was never valid.
    #[error(
        "{}, byte {offset}: {}{}",
        printable(.place), printable(.problem), end(.remedy.as_ref())
    )]
    Corrupt {
        /// The file, section or array in which the problem lies.
        place: String,
        /// Where in `place`, in bytes from its start.
        offset: u64,
        /// The rule that is broken.
        problem: String,
        /// Remedy for the user, besides fetching the file or making it again.
        remedy: Option<String>,
    },
    /// A tensor is stored as its differences from a tensor of another model, the base, which is
    /// missing.
    #[error("{}; {}", printable(.what), printable(.remedy))]
    NoBase {
        /// The tensor or model that lacks its base, and which base that is.
        what: String,
        /// How to name the base.
        remedy: String,
    },
    /// A limit of the format is exceeded.
    #[error("{} is {value}, and the format allows at most {limit}", printable(.what))]
    Limit {
        /// The quantity, with its unit.
        what: String,
        /// Its value; saturated if it does not fit.
        value: u64,
        /// The largest value allowed.
        limit: u64,
    },
    /// The caller asked for something impossible.
    #[error("{}; {}", printable(.problem), printable(.remedy))]
    Parameter {
        /// Problem with the request.
        problem: String,
        /// Suggestion of what to ask for instead.
        remedy: String,
    },
    /// The output exists, and the caller's [`CompressOptions`](crate::CompressOptions) or
    /// [`DecompressOptions`](crate::DecompressOptions) do not allow replacing it.
    #[error(
        "{} exists; choose another output, or replace it with overwrite: true", printable(.path)
    )]
    Exists {
        /// The output.
        path: String,
    },
    /// The GPU or its driver failed.
    #[error("GPU: {}; {}", printable(.problem), printable(.remedy))]
    Gpu {
        /// The failure of the GPU or its driver.
        problem: String,
        /// Remedy for the user.
        remedy: String,
    },
    /// The caller's [`Observer`](crate::progress::Observer) asked to stop; no partial output
    /// remains.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// An [`Error::Io`] with the path and the action that failed; [`Error::Cancelled`] if it was
    /// interrupted.
    pub fn io(action: &str, path: impl AsRef<Path>, source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::Interrupted {
            return Self::Cancelled;
        }
        Self::Io { context: format!("{action} {}", path.as_ref().display()), source }
    }

    /// An [`Error::Corrupt`] at a byte offset of a named place.
    pub fn corrupt(place: impl Display, offset: u64, problem: impl Display) -> Self {
        Self::Corrupt {
            place: place.to_string(),
            offset,
            problem: problem.to_string(),
            remedy: None,
        }
    }

    /// An [`Error::Unsupported`] with its remedy.
    pub fn unsupported(what: impl Display, remedy: impl Display) -> Self {
        Self::Unsupported { what: what.to_string(), remedy: remedy.to_string() }
    }

    /// An [`Error::NoBase`] with its remedy.
    pub fn no_base(what: impl Display, remedy: impl Display) -> Self {
        Self::NoBase { what: what.to_string(), remedy: remedy.to_string() }
    }

    /// Whether another reader, or this one with another model, may succeed where it failed.
    pub(crate) const fn is_incomplete(&self) -> bool {
        matches!(self, Self::Unsupported { .. } | Self::NoBase { .. })
    }

    /// An [`Error::Limit`].
    pub fn limit(what: impl Display, value: u64, limit: u64) -> Self {
        Self::Limit { what: what.to_string(), value, limit }
    }

    /// An error, unless something holds.
    pub(crate) fn unless(holds: bool, error: impl FnOnce() -> Self) -> Result<()> {
        if holds { Ok(()) } else { Err(error()) }
    }

    /// [`Error::Limit`] if a value exceeds its limit.
    pub(crate) fn check_limit(what: impl Display, value: u64, limit: u64) -> Result<()> {
        Self::unless(value <= limit, || Self::limit(what, value, limit))
    }

    /// An [`Error::Limit`] for a quantity that 64 bits do not hold.
    pub(crate) fn overflow(what: impl Display) -> Self {
        Self::limit(what, u64::MAX, u64::MAX - 1)
    }

    /// An [`Error::Parameter`] with its remedy.
    pub fn parameter(problem: impl Display, remedy: impl Display) -> Self {
        Self::Parameter { problem: problem.to_string(), remedy: remedy.to_string() }
    }

    /// The same [`Error::Corrupt`] with a remedy of its own; any other error as it is.
    #[must_use]
    pub fn remedied(mut self, text: impl Display) -> Self {
        if let Self::Corrupt { remedy, .. } = &mut self {
            *remedy = Some(text.to_string());
        }
        self
    }

    /// The same error with a larger place before the place that it names.
    #[must_use]
    pub fn within(self, larger: impl Display) -> Self {
        match self {
            Self::Corrupt { place, offset, problem, remedy } => {
                Self::Corrupt { place: format!("{larger}: {place}"), offset, problem, remedy }
            }
            Self::Unsupported { what, remedy } => {
                Self::Unsupported { what: format!("{larger}: {what}"), remedy }
            }
            Self::NoBase { what, remedy } => {
                Self::NoBase { what: format!("{larger}: {what}"), remedy }
            }
            Self::Limit { what, value, limit } => {
                Self::Limit { what: format!("{larger}: {what}"), value, limit }
            }
            other => other,
        }
    }

    /// The same error with the file's path before the place that it names, unless it is there
    /// already.
    #[must_use]
    pub fn in_file(self, path: impl AsRef<Path>) -> Self {
        let path = path.as_ref();
        let is_nameless = path.as_os_str().is_empty();
        if is_nameless || self.is_in_file(path) { self } else { self.within(path.display()) }
    }

    /// Whether the place that it names, if it names one, is this file or begins with its path.
    pub(crate) fn is_in_file(&self, path: &Path) -> bool {
        let path = path.display().to_string();
        match self {
            Self::Corrupt { place: text, .. }
            | Self::Unsupported { what: text, .. }
            | Self::NoBase { what: text, .. }
            | Self::Limit { what: text, .. } => {
                let rest = text.strip_prefix(&path).filter(|_| !path.is_empty());
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
            }
            _ => true,
        }
    }
}

/// A message that has its remedy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Remedied(String);

/// An error of reading or writing with a message that has its remedy.
pub(crate) fn io_remedied(kind: io::ErrorKind, text: impl Into<String>) -> io::Error {
    io::Error::new(kind, Remedied(text.into()))
}

/// A remedy for an answer of the system; none if the answer is a message of our own, which has one.
pub fn io_remedy(error: &io::Error) -> Option<&'static str> {
    use io::ErrorKind as Kind;
    let source = error.get_ref();
    if source.is_some_and(|source| source.is::<Remedied>() || source.is::<Error>()) {
        return None;
    }
    Some(match error.kind() {
        Kind::StorageFull | Kind::QuotaExceeded => {
            "free some space, or name an output on another disk (df11 estimate and df11 inspect \
            show sizes)"
        }
        Kind::FileTooLarge => {
            "raise the limit of file sizes (ulimit -f), or use a file system for larger files"
        }
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => {
            "change its permissions, or name another place"
        }
        Kind::NotFound => "check the path",
        Kind::NotADirectory => "check the path, a part of it is not a folder",
        Kind::OutOfMemory => "close other programs, or use fewer threads",
        Kind::UnexpectedEof => "the file is too short: download it again",
        _ => "check the disk and try again",
    })
}

/// The end of a message: its remedy, if it has one.
fn end(remedy: Option<&String>) -> String {
    remedy.map_or_else(String::new, |remedy| format!("; {}", printable(remedy)))
}

/// Text in which every character shows: names come from files, and one could end the line, drive
/// the terminal, or look like another name. Characters that [`is_unseen`] are escaped, as in Rust.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            _ if c.is_control() => out.extend(c.escape_debug()),
            _ if is_unseen(c) => out.extend(c.escape_unicode()),
            _ => out.push(c),
        }
    }
    out
}

/// Whether a character is a control, ends lines, reorders the text around it, or is invisible: what
/// Unicode calls `Bidi_Control` and `Default_Ignorable_Code_Point`, and its separators of lines.
pub fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{AD}' | '\u{34F}' | '\u{61C}' | '\u{115F}' | '\u{1160}' | '\u{17B4}' | '\u{17B5}'
            | '\u{180B}'..='\u{180F}' | '\u{200B}'..='\u{200F}' | '\u{2028}'..='\u{202E}'
            | '\u{2060}'..='\u{206F}' | '\u{3164}' | '\u{FE00}'..='\u{FE0F}' | '\u{FEFF}'
            | '\u{FFA0}' | '\u{FFF0}'..='\u{FFFB}' | '\u{1BCA0}'..='\u{1BCA3}'
            | '\u{1D173}'..='\u{1D17A}' | '\u{E0000}'..='\u{E0FFF}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_shows() {
        assert_eq!(printable("a\u{1b}[2J\n\u{202E}é"), "a\\u{1b}[2J\\n\\u{202e}é");
        for c in "\u{85}\u{200B}\u{200D}\u{FEFF}\u{2060}\u{AD}\u{E0041}\u{2028}\u{2067}".chars() {
            assert_eq!(printable(&format!("a{c}b")), format!("a{}b", c.escape_unicode()));
        }
        let seen = "model.layers.0/é ü 模型 мод ‘x’ → 🙂 e\u{301}\u{a0}";
        assert_eq!(printable(seen), seen);
        let error = Error::io("opening", "a\n\u{200B}", io::ErrorKind::NotFound.into());
        assert_eq!(error.to_string(), "opening a\\n\\u{200b}: entity not found");
    }
}
