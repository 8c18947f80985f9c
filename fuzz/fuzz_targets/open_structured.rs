//! `df11_fuzz::targets::open_structured` with libFuzzer.
#![no_main]

use df11_fuzz::{start, targets::open_structured::run};

libfuzzer_sys::fuzz_target!(init: start(), |data: &[u8]| run(data));
