//! Properties of the sources that no compiler checks.

#[cfg(unix)]
#[path = "sources/docs.rs"]
mod docs;
#[path = "support/files.rs"]
mod files;
#[path = "sources/layers.rs"]
mod layers;
#[path = "sources/platform.rs"]
mod platform;
#[path = "sources/ptx.rs"]
mod ptx;
