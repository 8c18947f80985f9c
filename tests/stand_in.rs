//! The library and the command on a stand-in for the GPU's driver, compiled from support/driver.c:
//! it copies what is stored as it is and runs no kernels. What kernels make of things, `tests/gpu`
//! tests.
//!
//! The driver's library is found by the environment of a process, so that each test runs itself
//! again in a process of its own. Where no C compiler is (Rust links with one, so there mostly is),
//! each test says SKIPPED on the standard error; with `DF11_REQUIRE_CC` set that is a failure.
#![cfg(all(target_os = "linux", feature = "cuda"))]

#[path = "stand_in/command.rs"]
mod command;
#[path = "support/container.rs"]
mod container;
#[path = "stand_in/linear.rs"]
mod linear;
#[path = "stand_in/program.rs"]
mod program;
#[path = "stand_in/residence.rs"]
mod residence;
#[path = "support/driver.rs"]
mod stand_in;

use df11::{Error, Result};

/// What a refusal says.
fn refused<T>(result: Result<T>) -> String {
    let error = result.err().expect("it is refused");
    assert!(matches!(error, Error::Parameter { .. }), "{error:?}");
    error.to_string()
}
