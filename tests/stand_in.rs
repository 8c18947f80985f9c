//! The library and the command on a stand-in for the GPU's driver, compiled from support/driver.c:
//! it copies what is stored as it is and runs no kernels. `tests/gpu` tests the results of
//! kernels.
//!
//! The driver's library is found by the environment of a process, so that each test runs itself
//! again in a process of its own. Without a C compiler (rare, since Rust
//! links with one) each test says SKIPPED on standard error, or fails if `DF11_REQUIRE_CC` is set.
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

/// The message of a refusal.
fn refused<T>(result: Result<T>) -> String {
    let error = result.err().expect("it is refused");
    assert!(matches!(error, Error::Parameter { .. }), "{error:?}");
    error.to_string()
}
