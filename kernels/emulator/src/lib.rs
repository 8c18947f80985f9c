//! A CUDA driver that runs kernels on the CPU: for tests on a machine without a GPU.
//!
//! It interprets PTX. Warps take turns in a random order, copies of the copy engine come at any
//! time, and before they do their places hold nonsense: a kernel that forgets to wait computes
//! wrong numbers, one that waits for what never comes hangs, which is told with the place of every
//! warp, and one that reaches outside its memory is stopped. It does not find races that need the
//! memory model of a GPU, nor says anything of speed; launches run one after the other.
//!
//! Machine code is not interpreted: `EMULATOR_PTX` names the folder with the PTX of its source.
//! `EMULATOR_SEED` chooses the order of turns.
#![expect(unsafe_code, reason = "the driver's functions take pointers")]
#![allow(
    clippy::cast_lossless,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "registers are bits, whatever an instruction takes them for"
)]

mod block;
mod copies;
mod driver;
mod exchange;
mod execute;
mod lower;
mod lower_memory;
mod machine;
mod map;
mod matrices;
mod memory;
mod parse;
mod program;
mod scalar;
#[cfg(test)]
mod tests;
mod warp;
