//! How tensors are stored: one folder per encoding, with pure functions between the weights of a
//! tensor and its arrays. Readers know an encoding by the traits in [`stored`].
//!
//! # To add an encoding, change
//!
//! - **Format**: its number in `format/records.rs`, a variant of `Coded` in `format/directory.rs`,
//!   `VERSION_MINOR` in `constants.rs`, `Encoding` in `open/tensor.rs`.
//! - **Codes**: a folder here, whose sizes have the traits of [`stored`], and a name in `hazmat`.
//! - **Writing**: `Layout` in `write/options.rs`; the first pass in `write/analysis.rs` (`work`,
//!   `Pass`, `assume`); its results and all sizes in `write/coding.rs`; the second pass in
//!   `write/encode.rs` (`Worker::run`).
//! - **GPUs**: `kernels/X.cu` and `X_task.cuh`, `TARGETS` in `kernels/build.py`; in `gpu` the task
//!   (`task`), the compiled kernels and `DEMANDS` (`module`), `table_of` (`needs`), `CodedTensor`
//!   (`stored`), and the checks that only the CPU makes (`host`). Products know `tile` alone.
//! - **Names**: `LayoutName` in `cli/containers.rs`, `layout_of` in `python/src/write.rs`, and
//!   `python/df11/_native.pyi`. The Python package keeps matrices compressed if they are in `tile`,
//!   or if it can encode them so; it decodes all others.
//! - **Spec**: `format.md` (sections 6, 10, 11), `terms.md`, `versions.md`, and the readers in
//!   `reference`, `python` and `readers/go`.
//! - **Tests**: `tests/codec`, `tests/spec`, `tests/support` (`container.rs`, `array_witness.rs`,
//!   `vectors`; then `just vectors`), `ENTRIES` in `tests/sources/ptx.rs`, and in `fuzz/src`
//!   `witness.rs`, `draft.rs` and `targets`.

pub mod delta;
pub mod gap;
pub mod stored;
pub mod tile;
