//! Names of objects: parses them, and shows them without what only their owner may see.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use percent_encoding::percent_decode_str;

use crate::{
    Error, Result,
    paths::{scheme_of, shown_name},
};

/// A name in its parts.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) scheme: String,
    /// Bucket, container, or host with its port.
    pub(super) root: String,
    /// The rest, without the slash between.
    pub(super) path: String,
    /// The name as it was given, with its scheme in lower case, without user and password.
    pub(super) full: String,
    /// User and password of a URL, as the value of the header `Authorization`.
    pub(super) login: Option<String>,
}

impl Name {
    /// # Errors
    /// [`Error::Parameter`] for a name without a scheme or a root, and for a URL whose password has
    /// a slash.
    pub(super) fn parse(full: &str) -> Result<Self> {
        let parts = scheme_of(full).and_then(|(scheme, rest)| {
            let (root, path) = rest.split_once('/').unwrap_or((rest, ""));
            (!root.is_empty()).then_some((scheme, root, path))
        });
        let (scheme, root, path) = parts.ok_or_else(|| {
            let problem = format!("{} names no bucket or host", shown_name(full));
            Error::parameter(problem, "write it as s3://bucket/path or https://host/path")
        })?;
        let scheme = scheme.to_ascii_lowercase();
        let (root, login) = if scheme.starts_with("http") {
            check_password(full, root)?;
            root.rsplit_once('@').map_or((root, None), |(user, root)| (root, Some(basic(user))))
        } else {
            (root, None)
        };
        let slash = if rest_has_path(full) { "/" } else { "" };
        let full = format!("{scheme}://{root}{slash}{path}");
        Ok(Self { scheme, root: root.to_owned(), path: path.to_owned(), full, login })
    }

    pub(super) fn is_http(&self) -> bool {
        matches!(&*self.scheme, "http" | "https")
    }

    /// Its path without the query, which signed URLs have.
    pub(super) fn bare_path(&self) -> &str {
        let path = if self.is_http() { self.path.split(['?', '#']).next() } else { None };
        path.unwrap_or(&self.path)
    }

    pub(super) fn shown(&self) -> String {
        shown_name(&self.full)
    }
}

/// Whether a slash follows the root of a name.
fn rest_has_path(full: &str) -> bool {
    full.split_once("://").is_some_and(|(_, rest)| rest.contains('/'))
}

/// Refuses what would be taken for a host and its port, though a user and a password were meant.
fn check_password(full: &str, root: &str) -> Result<()> {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let host = root.rsplit_once('@').map_or(root, |(_, host)| host);
    // The colons of an IPv6 address are in brackets.
    let port = host.rsplit_once(':').filter(|(_, port)| !port.contains(']'));
    Error::unless(port.is_none_or(|(_, port)| is_port(port)), || {
        let problem = format!("{} has a port that is no number", shown_name(full));
        Error::parameter(problem, "write / @ and : of a password as %2F, %40 and %3A")
    })
}

/// The header of basic authentication, of the percent-encoded `user:password`.
fn basic(text: &str) -> String {
    let (user, password) = text.split_once(':').unwrap_or((text, ""));
    let decoded = |text| percent_decode_str(text).collect::<Vec<u8>>();
    let both = [decoded(user), decoded(password)].join(&b':');
    format!("Basic {}", BASE64_STANDARD.encode(both))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let name = Name::parse("https://us%40er:pa%2Fss@host:81/a/b.df11?X-Sig=secret#x").unwrap();
        assert_eq!((&*name.root, name.bare_path()), ("host:81", "a/b.df11"));
        assert_eq!(&*name.full, "https://host:81/a/b.df11?X-Sig=secret#x");
        // printf 'us@er:pa/ss' | base64
        assert_eq!(name.login.as_deref(), Some("Basic dXNAZXI6cGEvc3M="));
        assert_eq!(name.shown(), "https://host:81/a/b.df11");
        let name = Name::parse("HTTPS://[::1]:81/a/b.df11?X-Sig=secret").unwrap();
        assert_eq!(
            (&*name.scheme, name.shown()),
            ("https", "https://[::1]:81/a/b.df11".to_owned())
        );
        assert_eq!((&*name.full, name.login), ("https://[::1]:81/a/b.df11?X-Sig=secret", None));
        let Err(error) = Name::parse("https://user:pa/ss@host/a") else { panic!() };
        let text = error.to_string();
        assert!(text.contains("%2F") && !text.contains("pa/") && !text.contains("user"), "{text}");
        let name = Name::parse("s3://bucket/odd?name.df11").unwrap();
        assert_eq!((&*name.root, name.bare_path()), ("bucket", "odd?name.df11"));
        assert_eq!(Name::parse("hf://org/name@v1").unwrap().shown(), "hf://org/name@v1");
        assert!(matches!(Name::parse("s3:///key"), Err(Error::Parameter { .. })));
    }
}
