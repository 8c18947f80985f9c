//! The `df11` command.
fn main() {}
