//! Faults of requests: who is at fault, what to do, and whether a retry may help. Messages contain
//! neither URLs nor bodies of responses, which can hold signatures and tokens.

use std::{error::Error as StdError, io};

use crate::error::io_remedied;

/// A fault of one request.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) kind: io::ErrorKind,
    pub(super) text: String,
    /// Whether another try may succeed.
    pub(super) is_passing: bool,
}

impl Fault {
    pub(super) fn passing(kind: io::ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), is_passing: true }
    }

    pub(super) fn lasting(kind: io::ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), is_passing: false }
    }

    /// The fault of a request for a range, of an object that was opened or is being opened.
    pub(super) fn of_range(error: object_store::Error, is_open: bool) -> Self {
        let fault = Self::from(error);
        if is_open || fault.text != CHANGED {
            return fault;
        }
        Self::lasting(fault.kind, "the object is empty; upload the container again")
    }

    /// The fault as an error of reading, after some tries.
    pub(super) fn after(self, tries: u32) -> io::Error {
        let text = match (self.is_passing, tries) {
            (true, 2..) => {
                format!("{}, {tries} times; try again when the store answers", self.text)
            }
            (true, _) => format!("{}; try again when the store answers", self.text),
            (false, _) => self.text,
        };
        io_remedied(self.kind, text)
    }
}

impl From<object_store::Error> for Fault {
    fn from(error: object_store::Error) -> Self {
        use io::ErrorKind::{AlreadyExists, InvalidData, NotFound, PermissionDenied, Unsupported};
        use object_store::Error as E;
        match &error {
            E::NotFound { .. } => {
                return Self::lasting(NotFound, "there is no such object; check its name");
            }
            E::PermissionDenied { .. } => return Self::denied(403),
            E::Unauthenticated { .. } => return Self::denied(401),
            E::AlreadyExists { .. } | E::Precondition { .. } => {
                return Self::lasting(AlreadyExists, "something has this name");
            }
            E::InvalidPath { .. } => {
                return Self::lasting(
                    InvalidData,
                    "it has a name with an empty part, . or ..; rename that object",
                );
            }
            E::NotSupported { .. } => return Self::lasting(Unsupported, NO_RANGES),
            _ => {}
        }
        let texts = texts(&error);
        if let Some(problem) = texts.iter().find_map(|text| text.strip_prefix(UNTRUSTED)) {
            let text = format!(
                "the server's certificate is not accepted ({problem}); check the server's name \
                 and this machine's clock, or name a file with the issuer's certificate in \
                 SSL_CERT_FILE"
            );
            return Self::lasting(PermissionDenied, text);
        }
        if texts.iter().any(|text| text.ends_with("InvalidContentType")) {
            return Self::lasting(Unsupported, NO_TLS);
        }
        if texts.iter().any(|text| text.contains("non-partial response")) {
            return Self::lasting(Unsupported, NO_RANGES);
        }
        if texts.iter().any(|text| text.starts_with("Requested ")) {
            return Self::passing(InvalidData, "the server sent another range than was asked for");
        }
        match texts.iter().find_map(|text| status(text)) {
            Some(status @ (401 | 403)) => Self::denied(status),
            // Object stores answer so to credentials that have expired.
            Some(400) => Self::lasting(
                PermissionDenied,
                "the server refused the request (status 400); renew the credentials, and check \
                 region and name",
            ),
            Some(404 | 410) => Self::lasting(NotFound, "there is no such object; check its name"),
            Some(416) => Self::lasting(InvalidData, CHANGED),
            Some(status @ (408 | 425 | 429 | 500 | 502..)) => {
                Self::passing(io::ErrorKind::Other, format!("the server answered {status}"))
            }
            Some(501) => Self::lasting(Unsupported, NOT_SERVED),
            Some(status) => Self::lasting(
                io::ErrorKind::Other,
                format!("the server answered {status}; check the name"),
            ),
            None => Self::passing(io::ErrorKind::ConnectionReset, innermost(&texts)),
        }
    }
}

impl Fault {
    fn denied(status: u16) -> Self {
        let text = format!(
            "access is denied (status {status}); set or renew the credentials of the store, and \
             check the name"
        );
        Self::lasting(io::ErrorKind::PermissionDenied, text)
    }
}

/// The problem of an object that is not the one that was opened.
pub(super) const CHANGED: &str = "the object was changed since it was opened; open it again";

/// How rustls begins the text of a certificate's problem, which tells no more than names of hosts.
const UNTRUSTED: &str = "invalid peer certificate: ";

const NO_TLS: &str = "the server does not encrypt connections (TLS); check its address, or begin \
                      it with http:// if everybody may read what is sent";

const NO_RANGES: &str = "the server does not answer requests for ranges; fetch the file, or serve \
                         it from one that does";

const NOT_SERVED: &str = "the server does not know this request (status 501); check that its \
                          address is that of a store of this kind, and that it knows \
                          If-None-Match if it is written to";

/// The texts of an error and of its causes.
fn texts(error: &object_store::Error) -> Vec<String> {
    let mut texts = Vec::new();
    let mut next: Option<&dyn StdError> = Some(error);
    while let Some(error) = next {
        texts.push(error.to_string());
        next = error.source();
    }
    texts
}

/// The status that a text tells.
fn status(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// The text of the first cause, if it can hold nothing secret.
fn innermost(texts: &[String]) -> String {
    const LONGEST: usize = 120;
    let last = texts.last().map_or("", String::as_str);
    if last.is_empty() || last.len() > LONGEST || last.contains(['/', '?', '=', '@']) {
        return "the connection failed".to_owned();
    }
    format!("the connection failed ({last})")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> Fault {
        let source = Box::new(io::Error::other(text.to_owned()));
        object_store::Error::Generic { store: "x", source }.into()
    }

    #[test]
    fn statuses_tell_whether_to_try_again() {
        for (status, is_passing) in [(500, true), (503, true), (429, true), (403, false)] {
            let text = format!("Server returned non-2xx status code: {status} Text: body");
            assert_eq!(generic(&text).is_passing, is_passing, "{status}");
        }
    }

    #[test]
    fn nothing_secret_is_told() {
        let secret = "error sending request for url (http://host/x?X-Amz-Signature=secret)";
        let text = generic(secret).text;
        assert_eq!(text, "the connection failed");
        let text =
            generic("Server returned non-2xx status code: 403 X: <Token>secret</Token>").text;
        assert!(!text.contains("secret"), "{text}");
        assert_eq!(
            generic("Connection refused").text,
            "the connection failed (Connection refused)"
        );
    }
}
