//! Outputs that go into a store: written and verified here, then uploaded.
//!
//! ```text
//! existing objects are checked → output in a temporary folder → containers → side files
//!         → index, config, pipeline.df11 → objects of an earlier output go → directories read back
//! ```
//! A reader that comes meanwhile finds containers that tell that others are missing.

use std::path::{Path, PathBuf};

#[cfg(feature = "remote")]
use super::upload::Remote;
use crate::{Result, paths::is_far, progress::Observer};

/// Where an output is written, and where it goes then.
#[derive(Debug)]
pub struct Destination {
    path: PathBuf,
    #[cfg(feature = "remote")]
    remote: Option<Remote>,
}

impl Destination {
    /// A path is the place itself. For a name in an object store, such as `s3://bucket/model`, the
    /// place is in the system's temporary folder. What the store has there is replaced only with
    /// `overwrite`, and only if an earlier output of this crate holds or records all of it.
    ///
    /// # Errors
    /// [`Error::Exists`](crate::Error::Exists); [`Error::Parameter`](crate::Error::Parameter) for
    /// HTTP and the Hub, which take no objects, and for objects that are no earlier output;
    /// [`Error::Io`](crate::Error::Io); [`Error::Unsupported`](crate::Error::Unsupported) without
    /// the feature `remote`.
    pub fn of(out: &Path, overwrite: bool) -> Result<Self> {
        match out.to_str().filter(|_| is_far(out)) {
            Some(name) => Self::in_store(name, overwrite),
            None => Ok(Self {
                path: out.to_owned(),
                #[cfg(feature = "remote")]
                remote: None,
            }),
        }
    }

    #[cfg(feature = "remote")]
    fn in_store(name: &str, overwrite: bool) -> Result<Self> {
        let remote = Remote::of(name, overwrite)?;
        Ok(Self { path: remote.local(), remote: Some(remote) })
    }

    #[cfg(not(feature = "remote"))]
    fn in_store(name: &str, _: bool) -> Result<Self> {
        Err(crate::paths::no_stores(name))
    }

    /// Where the output is to be written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Uploads the output, if it goes into a store; nothing else. If that fails, the objects that
    /// were put there are removed again, except those that took the place of an earlier output's.
    ///
    /// # Errors
    /// [`Error::Exists`](crate::Error::Exists) if something was put there meanwhile;
    /// [`Error::Io`](crate::Error::Io); [`Error::Cancelled`](crate::Error::Cancelled).
    pub fn publish(self, observer: &dyn Observer) -> Result<()> {
        #[cfg(feature = "remote")]
        if let Some(remote) = &self.remote {
            return remote.publish(observer);
        }
        let _ = observer;
        Ok(())
    }
}
