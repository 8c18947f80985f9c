//! Progress and cancellation of long work.

/// Stages of a piece of long work, in the order of the work on one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Fetching files from a store.
    Fetch,
    /// First pass over the source: histograms, hashes, and sizes.
    Analyse,
    /// Second pass over the source: encoding and writing.
    Encode,
    /// Decoding and writing the original files.
    Decode,
    /// Checking what was written, or an existing container.
    Verify,
    /// Bringing stored bytes to GPUs.
    Load,
    /// Uploading an output to a store.
    Upload,
}

/// Watches long work and may ask it to stop. Methods are called from worker threads.
///
/// `()` watches nothing and never stops the work.
pub trait Observer: Send + Sync {
    /// The work begins; [`advance`](Self::advance) will be told of `bytes` bytes in all, over all
    /// stages. Fetching from a store and uploading to one count as separate work.
    fn begin(&self, _bytes: u64) {}
    /// A stage is entered; with several containers, more than once.
    fn enter(&self, _stage: Stage) {}
    /// `bytes` more bytes are done. They are bytes of decoded tensors and files, counted each time
    /// that they are read (in [`Stage::Analyse`], twice for large tensors that become tiles); in
    /// [`Stage::Load`], [`Stage::Fetch`] and [`Stage::Upload`] they are stored bytes.
    fn advance(&self, _bytes: u64) {}
    /// Called between pieces of a few MiB; `true` ends the work with
    /// [`Error::Cancelled`](crate::Error::Cancelled).
    fn is_cancelled(&self) -> bool {
        false
    }
}

impl Observer for () {}

/// Counts done bytes, unless the observer asks to stop.
pub(crate) fn advance(observer: &dyn Observer, bytes: u64) -> crate::Result<()> {
    observer.advance(bytes);
    if observer.is_cancelled() { Err(crate::Error::Cancelled) } else { Ok(()) }
}
