//! Names of objects: parsed, and shown without what only their owner may see.

use crate::{
    Error, Result,
    paths::{scheme_of, shown_name},
};

/// A name in its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) scheme: String,
    /// Bucket, container, or host with its port.
    pub(super) root: String,
    /// What follows, without the slash between.
    pub(super) path: String,
    /// The name as it was given, with its scheme in lower case.
    pub(super) full: String,
}

impl Name {
    /// # Errors
    /// [`Error::Parameter`] for a name without a scheme or a root.
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
        let full = format!("{scheme}{}", &full[scheme.len()..]);
        Ok(Self { scheme, root: root.to_owned(), path: path.to_owned(), full })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let name = Name::parse("https://user:pass@host:81/a/b.df11?X-Sig=secret#x").unwrap();
        assert_eq!((&*name.root, name.bare_path()), ("user:pass@host:81", "a/b.df11"));
        assert_eq!(name.shown(), "https://host:81/a/b.df11");
        let name = Name::parse("HTTPS://user:pa/ss@host/a/b.df11?X-Sig=secret").unwrap();
        assert_eq!((&*name.scheme, name.shown()), ("https", "https://host/a/b.df11".to_owned()));
        assert_eq!(&*name.full, "https://user:pa/ss@host/a/b.df11?X-Sig=secret");
        let name = Name::parse("s3://bucket/odd?name.df11").unwrap();
        assert_eq!((&*name.root, name.bare_path()), ("bucket", "odd?name.df11"));
        assert_eq!(Name::parse("hf://org/name@v1").unwrap().shown(), "hf://org/name@v1");
        assert!(matches!(Name::parse("s3:///key"), Err(Error::Parameter { .. })));
    }
}
