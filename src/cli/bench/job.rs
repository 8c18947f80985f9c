//! One thing that is measured.

use crate::cli::{Failure, measure::timed};

/// Some work on some bytes, and the job whose rate limits it.
pub(super) struct Job<'a> {
    pub(super) name: &'static str,
    /// 0 where the cost does not grow with the weights.
    pub(super) bytes: u64,
    pub(super) limit: Option<&'static str>,
    work: Box<dyn Fn() -> Result<(), Failure> + Send + Sync + 'a>,
}

impl<'a> Job<'a> {
    pub(super) fn new(
        name: &'static str,
        bytes: u64,
        limit: Option<&'static str>,
        work: impl Fn() -> Result<(), Failure> + Send + Sync + 'a,
    ) -> Self {
        Self { name, bytes, limit, work: Box::new(work) }
    }

    /// Seconds of the work, done once.
    pub(super) fn time(&self) -> Result<f64, Failure> {
        let (result, seconds) = timed(&self.work);
        result.map(|()| seconds)
    }
}
