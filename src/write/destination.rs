//! Outputs in a store: written and verified locally, then uploaded.
//!
//! ```text
//! nothing has the name → output in a temporary folder → containers → side files
//!         → index, config, pipeline.df11 → directories read back
//! ```
//! Until the end, readers lack the files by which loaders recognise a model's folder.

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
    /// place is in the system's temporary folder. Nothing in a store is replaced.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for HTTP and the Hub, which take no objects,
    /// and for a name that has some; [`Error::Limit`](crate::Error::Limit) for one that has too
    /// many; [`Error::Io`](crate::Error::Io); [`Error::Unsupported`](crate::Error::Unsupported)
    /// without the feature `remote`.
    pub fn of(out: &Path) -> Result<Self> {
        match out.to_str().filter(|_| is_far(out)) {
            Some(name) => Self::in_store(name),
            None => Ok(Self {
                path: out.to_owned(),
                #[cfg(feature = "remote")]
                remote: None,
            }),
        }
    }

    #[cfg(feature = "remote")]
    fn in_store(name: &str) -> Result<Self> {
        let remote = Remote::of(name)?;
        Ok(Self { path: remote.local(), remote: Some(remote) })
    }

    #[cfg(not(feature = "remote"))]
    fn in_store(name: &str) -> Result<Self> {
        Err(crate::paths::no_stores(name))
    }

    /// Where the output is to be written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Uploads the output, if it goes into a store, and opens it there; does nothing else. If the
    /// upload fails, the objects that it put there are removed again.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) and [`Error::Exists`](crate::Error::Exists) if
    /// something was put there meanwhile; [`Error::Io`](crate::Error::Io);
    /// [`Error::Cancelled`](crate::Error::Cancelled); those of [`OpenOptions::open`] for what is
    /// there at the end.
    ///
    /// [`OpenOptions::open`]: crate::OpenOptions::open
    pub fn publish(self, observer: &dyn Observer) -> Result<()> {
        #[cfg(feature = "remote")]
        if let Some(remote) = &self.remote {
            return remote.publish(observer);
        }
        let _ = observer;
        Ok(())
    }
}
