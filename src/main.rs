//! The `df11` command. The library's module `cli` implements its verbs.

fn main() -> std::process::ExitCode {
    df11::cli::run(std::env::args_os()).into()
}
