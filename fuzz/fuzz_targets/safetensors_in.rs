//! `df11_fuzz::targets::safetensors_in` with libFuzzer.
#![no_main]

use df11_fuzz::{start, targets::safetensors_in::run};

libfuzzer_sys::fuzz_target!(init: start(), |data: &[u8]| run(data));
