//! One bar over all stages of long work, on standard error and on a terminal only.

use std::sync::atomic::{AtomicBool, Ordering};

use df11::{Observer, Stage};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const TEMPLATE: &str =
    "{msg:9} {wide_bar} {percent:>3} %  {decimal_bytes_per_sec:>11}  {eta:>3} left ";

/// Shows progress and passes on an interruption.
pub(super) struct Progress {
    bar: ProgressBar,
    interrupted: &'static AtomicBool,
}

impl Progress {
    pub(super) fn new(interrupted: &'static AtomicBool, quiet: bool) -> Self {
        // Standard error that is no terminal hides the bar by itself.
        let target =
            if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style);
        }
        Self { bar, interrupted }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Observer for Progress {
    fn begin(&self, bytes: u64) {
        self.bar.set_length(bytes);
        self.bar.reset();
    }

    fn enter(&self, stage: Stage) {
        self.bar.set_message(match stage {
            Stage::Analyse => "analysing",
            Stage::Encode => "encoding",
            Stage::Decode => "decoding",
            Stage::Verify => "verifying",
            Stage::Load => "loading",
        });
    }

    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn is_cancelled(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}
