//! Answers of verbs, as text and as JSON, and failures. Whoever is at fault determines the exit
//! code, and each message ends with a remedy.

use std::io;

use df11::{Error, hazmat::io_remedy};
use serde_json::{Value, json};

use super::{signal::interrupted_code, text::printable};

/// The result of a verb: text for people, one JSON document for programs.
pub(super) struct Answer {
    /// Lines, without the last line feed.
    pub(super) text: String,
    /// An object with stable keys.
    pub(super) json: Value,
}

impl Answer {
    /// 2 for an answer whose field `good` is false, although nothing failed: not everything could
    /// be checked. Only `verify` has that field; without it, 0.
    pub(super) fn exit_code(&self) -> u8 {
        if self.json["good"] == false { 2 } else { 0 }
    }
}

/// Why a verb has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// A container is damaged: the check failed.
    Check(Error),
    /// Bytes that must be equal differ.
    Mismatch(String),
    /// The files that are there are good, but some are missing; the document says what was found.
    Incomplete(String, Value),
    /// It could not be done; or the source of a container is corrupt, which callers say by
    /// `map_err(Failure::Other)`.
    Other(Error),
    /// Standard output takes nothing.
    Output(io::Error),
}

/// A container that breaks a rule has failed the check; for what is wrong with a source, see
/// [`Failure::Other`].
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if matches!(error, Error::Corrupt { .. }) { Self::Check(error) } else { Self::Other(error) }
    }
}

impl Failure {
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::Check(_) | Self::Mismatch(_) => 1,
            Self::Other(Error::Cancelled) => interrupted_code(),
            Self::Incomplete(..) | Self::Other(_) | Self::Output(_) => 2,
        }
    }

    /// One line.
    pub(super) fn message(&self) -> String {
        let message = match self {
            Self::Check(error) => with_remedy(
                error,
                "the container is damaged: download it or compress the model again",
            ),
            Self::Other(error) => with_remedy(error, "the file is damaged: download it again"),
            Self::Mismatch(problem) => {
                format!("{problem}; please report this with the output of df11 doctor")
            }
            Self::Incomplete(problem, _) => problem.clone(),
            Self::Output(error) => {
                format!("writing to standard output: {error}{}", end(error))
            }
        };
        printable(&message)
    }

    pub(super) fn json(&self) -> Value {
        let kind = match self {
            Self::Mismatch(_) => "mismatch",
            Self::Incomplete(..) => "incomplete",
            Self::Output(_) => "io",
            Self::Check(error) | Self::Other(error) => match error {
                Error::Io { .. } => "io",
                Error::Unsupported { .. } => "unsupported",
                Error::NoBase { .. } => "no_base",
                Error::Corrupt { .. } => "corrupt",
                Error::Limit { .. } => "limit",
                Error::Parameter { .. } | Error::Exists { .. } => "parameter",
                Error::Gpu { .. } => "gpu",
                Error::Cancelled => "cancelled",
            },
        };
        let error =
            json!({ "kind": kind, "message": self.message(), "exit_code": self.exit_code() });
        let mut document =
            if let Self::Incomplete(_, found) = self { found.clone() } else { json!({}) };
        document["error"] = error;
        document
    }
}

fn with_remedy(error: &Error, damaged: &str) -> String {
    match error {
        Error::Io { source, .. } => format!("{error}{}", end(source)),
        Error::Corrupt { remedy: None, .. } => format!("{error}; {damaged}"),
        Error::Limit { .. } => {
            format!("{error}; section 1 of the format specification lists all limits")
        }
        Error::Exists { path } => {
            format!("{path} exists; choose another output, or replace it with --force")
        }
        Error::Cancelled => "interrupted; nothing is left half-written".to_owned(),
        _ => error.to_string(),
    }
}

/// The end of a message about an answer of the system.
fn end(error: &io::Error) -> String {
    io_remedy(error).map_or_else(String::new, |remedy| format!("; {remedy}"))
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn every_message_is_one_line_with_a_remedy() {
        let io = |kind: ErrorKind| Error::io("writing", "a\nb", kind.into());
        for failure in [
            Failure::from(io(ErrorKind::StorageFull)),
            Failure::from(io(ErrorKind::PermissionDenied)),
            Failure::from(io(ErrorKind::NotFound)),
            Failure::from(io(ErrorKind::Other)),
            Failure::from(Error::corrupt("directory", 7, "wrong")),
            Failure::Other(Error::corrupt("model.safetensors", 7, "wrong")),
            Failure::from(Error::limit("the directory", 9, 8)),
            Failure::from(Error::Cancelled),
            Failure::Mismatch("different".to_owned()),
            Failure::Incomplete("shards are missing; fetch them".to_owned(), json!({})),
            Failure::Output(ErrorKind::StorageFull.into()),
        ] {
            let message = failure.message();
            assert!(!message.contains('\n') && message.contains("; "), "{message}");
        }
    }

    #[test]
    fn exit_codes_tell_who_is_at_fault() {
        assert_eq!(Failure::from(Error::corrupt("x", 0, "")).exit_code(), 1);
        assert_eq!(Failure::Other(Error::corrupt("x", 0, "")).exit_code(), 2);
        assert_eq!(Failure::from(Error::unsupported("x", "")).exit_code(), 2);
        assert_eq!(Failure::from(Error::Cancelled).exit_code(), 130);
    }
}
