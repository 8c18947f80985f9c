# The commands of daily work; `just` lists them. CI runs .ci/run, which needs no just.

default:
    @just --list

# What CI runs.
ci:
    bash .ci/run

# Tests of the workspace.
test:
    cargo test --workspace

# Formatting, lints and documentation, with warnings denied.
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --features df11/remote -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# Advisories; fetches the database.
advisories:
    cargo deny check advisories

# Writes the vectors that are missing and checks the others.
vectors:
    cargo run --release --example vectors

# The Python reader on the vectors.
python-reader:
    python3 spec/python/check_vectors.py

# spec/gpu.md as a program, on the vectors; `--write` writes its numbers anew.
gpu-text *ARGS="--check":
    python3 spec/gpu_check.py {{ARGS}}

# Builds the Python package and runs its tests and checks; arguments go to pytest.
python *ARGS:
    bash python/check {{ARGS}}

# Inference on candle, on the CPU; builds candle, which takes minutes.
candle:
    cargo test --manifest-path examples/candle/Cargo.toml

# Likewise on a GPU; needs nvcc.
candle-gpu:
    DF11_REQUIRE_GPU=1 cargo test --manifest-path examples/candle/Cargo.toml --release --features cuda

# The shared library for C, in target/release.
c-library:
    cargo build --release -p df11-capi

# Wheels and source distribution of the Python package, with checksums, in target/wheels.
wheels *PLATFORMS:
    bash python/wheels {{PLATFORMS}}

# Compiles the kernels to the committed PTX (`just ptx --check` only compares); needs no GPU.
ptx *ARGS:
    bash .ci/ptx {{ARGS}}

# The kernels' tests on an emulated GPU; words choose among them.
emulate *TESTS:
    .ci/emulate {{TESTS}}

# Every fuzz target for SECONDS each.
fuzz SECONDS="900":
    bash fuzz/run {{SECONDS}}

# Micro-benchmarks of the codec.
bench:
    cargo bench --bench codec
