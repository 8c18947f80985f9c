//! Containers beyond a network: what is fetched, what is refused, and that no fault of a server
//! gives a wrong byte.

#[path = "remote/bases.rs"]
mod bases;
#[path = "remote/cache.rs"]
mod cache;
#[path = "support/container.rs"]
mod container;
#[path = "remote/faults.rs"]
mod faults;
#[path = "support/files.rs"]
mod files;
#[path = "remote/folders.rs"]
mod folders;
#[path = "remote/reads.rs"]
mod reads;
#[path = "support/server.rs"]
mod server;
#[path = "remote/sources.rs"]
mod sources;

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use df11::OpenOptions;
use server::Server;
use tempfile::TempDir;

/// The tiny container behind HTTP, and on a disk.
struct Fixture {
    _folder: TempDir,
    server: Server,
    bytes: Vec<u8>,
    local: df11::Model,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = df11::hazmat::demo::tiny_container(folder.path()).unwrap();
        Self::of(folder, &path)
    }

    /// The same of another container, which lies in a temporary folder.
    fn of(folder: TempDir, path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let server = Server::new(BTreeMap::from([("m/x.df11".to_owned(), bytes.clone())]));
        Self { server, bytes, local: df11::open(path).unwrap(), _folder: folder }
    }

    fn url(&self) -> String {
        self.server.url("m/x.df11")
    }

    fn open(&self) -> df11::Result<df11::Model> {
        patient().open(self.url())
    }
}

/// Options whose faults show soon.
fn patient() -> OpenOptions {
    OpenOptions::new().patience(Duration::from_millis(300), 4)
}
