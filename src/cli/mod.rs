//! The command line: `arguments → verb → answer → text or JSON, and an exit code`. Only the binary
//! and the command of the Python package use it; it has no stable API.
//!
//! A verb prints nothing itself: it returns an `Answer` or a `Failure`.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | success, or help on request |
//! | 1 | a check failed: a container is damaged or exceeds a limit, or bytes differ |
//! | 2 | everything else: wrong arguments, a corrupt *source*, a check that was not completed |
//! | 130, 143 | cancelled by Ctrl-C, by SIGTERM |

mod answer;
mod bench;
mod compress;
mod containers;
mod decompress;
mod demo;
mod device;
mod doctor;
mod estimate;
mod figures;
#[cfg(feature = "cudarc")]
mod gpus;
mod help;
mod inspect;
mod measure;
mod reports;
mod session;
mod signal;
mod text;
mod verify;

use std::{ffi::OsString, sync::LazyLock};

use clap::{CommandFactory, Parser, Subcommand};
use df11::hazmat::constants::{VERSION_MAJOR, VERSION_MINOR};

pub use inspect::describe;

use answer::{Answer, Failure};
use session::Session;

static VERSION: LazyLock<String> = LazyLock::new(|| {
    format!("{} (format {VERSION_MAJOR}.{VERSION_MINOR})", env!("CARGO_PKG_VERSION"))
});

const ABOUT: &str =
    "Store BFloat16 model weights in two thirds of their size, without losing a bit";

const AFTER_HELP: &str = "\
Examples:
  df11 demo                           make a model, compress it, check every bit
  df11 compress Llama-3.1-8B          to the folder Llama-3.1-8B-df11
  df11 inspect Llama-3.1-8B-df11      show what it holds, block by block
  df11 decompress Llama-3.1-8B-df11   restore the original files
  source <(df11 completions bash)     complete verbs and options in this shell

Exit codes:
  0    success
  1    a check failed: a container is damaged, or bytes differ
  2    wrong usage, a failed read or write, or a file from a newer version
  130  interrupted by Ctrl-C (143 by SIGTERM); no output is left half-written";

#[derive(Parser)]
#[command(name = "df11", version = VERSION.as_str(), about = ABOUT, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    session: Session,
}

#[derive(Subcommand)]
enum Verb {
    Compress(compress::Compress),
    Estimate(estimate::EstimateArgs),
    Convert(compress::Convert),
    Decompress(decompress::Decompress),
    Verify(verify::Verify),
    #[command(visible_alias = "info")]
    Inspect(inspect::Inspect),
    Doctor(doctor::Doctor),
    Demo(demo::Demo),
    Bench(bench::Bench),
    Completions(help::Completions),
    Man(help::Man),
}

impl Verb {
    fn run(&self, session: &Session) -> Result<Answer, Failure> {
        match self {
            Self::Compress(verb) => verb.run(session),
            Self::Estimate(verb) => verb.run(session),
            Self::Convert(verb) => verb.run(session),
            Self::Decompress(verb) => verb.run(session),
            Self::Verify(verb) => verb.run(session),
            Self::Inspect(verb) => verb.run(session),
            Self::Doctor(verb) => verb.run(),
            Self::Demo(verb) => verb.run(session),
            Self::Bench(verb) => verb.run(session),
            Self::Completions(verb) => Ok(verb.run(Cli::command())),
            Self::Man(verb) => verb.run(Cli::command()),
        }
    }
}

/// Runs the command with these arguments, of which the first is its name. Returns the exit code.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let Cli { verb, session } = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(usage) => return session::fail_usage(&usage, &arguments),
    };
    signal::take_over();
    #[cfg(feature = "remote")]
    if let Some(folder) = &session.cache {
        df11::hazmat::choose_cache(folder, None);
    }
    let print = |answer: Answer| session.print(&answer).map(|()| answer.exit_code());
    match verb.run(&session).and_then(print) {
        Ok(code) => code,
        Err(failure) => session.fail(&failure),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn arguments_are_consistent() {
        super::Cli::command().debug_assert();
    }

    /// Longer ones wrap in a terminal of 80 columns, into lines that look like examples.
    #[test]
    fn examples_of_the_help_fit_a_terminal() {
        let command = super::Cli::command();
        for verb in command.get_subcommands().chain([&command]) {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in help.lines().filter(|line| line.starts_with("  ")) {
                assert!(line.chars().count() <= 80, "{}: {line}", verb.get_name());
            }
        }
    }
}
