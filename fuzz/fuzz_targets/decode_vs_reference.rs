#![no_main]
use libfuzzer_sys::fuzz_target;
fuzz_target!(init: df11_fuzz::start(), |data: &[u8]| { let _ = data; });
