//! `df11_fuzz::targets::roundtrip` with libFuzzer.
#![no_main]

use df11_fuzz::{start, targets::roundtrip::run};

libfuzzer_sys::fuzz_target!(init: start(), |data: &[u8]| run(data));
