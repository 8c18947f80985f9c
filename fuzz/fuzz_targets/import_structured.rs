//! `df11_fuzz::targets::import_structured` with libFuzzer.
#![no_main]

use df11_fuzz::{start, targets::import_structured::run};

libfuzzer_sys::fuzz_target!(init: start(), |data: &[u8]| run(data));
