//! `df11_fuzz::targets::deltas_vs_reference` with libFuzzer.
#![no_main]

use df11_fuzz::{start, targets::deltas_vs_reference::run};

libfuzzer_sys::fuzz_target!(init: start(), |data: &[u8]| run(data));
