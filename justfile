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
    cargo clippy --workspace --all-targets -- -D warnings
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

# Every fuzz target for SECONDS each.
fuzz SECONDS="900":
    bash fuzz/run {{SECONDS}}

# Micro-benchmarks of the codec.
bench:
    cargo bench --bench codec
