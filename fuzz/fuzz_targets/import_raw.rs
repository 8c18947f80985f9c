//! `df11_fuzz::targets::import_raw` with libFuzzer.
#![no_main]

use df11_fuzz::{start, targets::import_raw::run};

libfuzzer_sys::fuzz_target!(init: start(), |data: &[u8]| run(data));
