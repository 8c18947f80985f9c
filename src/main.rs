//! The `df11` command. Its verbs are in `cli`, one file each; all work is done by the library.

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
