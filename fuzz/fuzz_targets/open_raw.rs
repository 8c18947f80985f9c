//! `df11_fuzz::targets::open_raw` with libFuzzer.
#![no_main]

use df11_fuzz::{start, targets::open_raw::run};

libfuzzer_sys::fuzz_target!(init: start(), |data: &[u8]| run(data));
