//! The `df11` command. All work is done by the library, whose module `cli` has its verbs.

fn main() -> std::process::ExitCode {
    df11::cli::run(std::env::args_os()).into()
}
