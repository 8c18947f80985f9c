//! Progress and cancellation of long work.

/// What a piece of long work is doing; the order is the order of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// First pass over the source: histograms and hashes.
    Analyse,
    /// Second pass over the source: encoding and writing.
    Encode,
    /// Decoding, to write files or tensors.
    Decode,
    /// Checking what was written.
    Verify,
}

/// Watches long work and may ask it to stop. Methods are called from worker threads.
///
/// `()` watches nothing and never stops the work.
pub trait Observer: Send + Sync {
    /// A stage begins, in which `bytes` bytes of BF16 and other tensor data will be worked through.
    fn begin(&self, _stage: Stage, _bytes: u64) {}
    /// `bytes` more bytes of the current stage are done.
    fn advance(&self, _bytes: u64) {}
    /// Asked between pieces of at most a few MiB; `true` ends the work with
    /// [`Error::Cancelled`](crate::Error::Cancelled).
    fn is_cancelled(&self) -> bool {
        false
    }
}

impl Observer for () {}
