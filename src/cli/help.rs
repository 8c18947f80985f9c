//! Help that the command prints: `df11 completions`, a shell script that completes verbs and
//! options, and `df11 man`, the manual page of the command or of one verb.

use clap::{Args, Command};
use clap_complete::Shell;
use df11::Error;
use serde_json::json;

use super::answer::{Answer, Failure};

const COMPLETIONS_HELP: &str = "\
Examples:
  source <(df11 completions bash)                               in this shell
  df11 completions bash > ~/.local/share/bash-completion/completions/df11
  df11 completions zsh > \"${fpath[1]}/_df11\"
  df11 completions fish > ~/.config/fish/completions/df11.fish";

const MAN_HELP: &str = "\
Examples:
  df11 man | man -l -                          read it
  df11 man compress | man -l -                 read the page of a verb
  df11 man > ~/.local/share/man/man1/df11.1    install it";

/// Print a script that makes a shell complete verbs and options
#[derive(Args)]
#[command(after_help = COMPLETIONS_HELP)]
pub(super) struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(super) fn run(&self, mut command: Command) -> Answer {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "df11", &mut script);
        let text = String::from_utf8_lossy(&script).trim_end().to_owned();
        let json =
            json!({ "command": "completions", "shell": self.shell.to_string(), "script": text });
        Answer { text, json }
    }
}

/// Print the manual page
#[derive(Args)]
#[command(after_help = MAN_HELP)]
pub(super) struct Man {
    /// Print the page of this verb [default: of df11]
    verb: Option<String>,
}

impl Man {
    pub(super) fn run(&self, mut command: Command) -> Result<Answer, Failure> {
        command.build();
        let command = match &self.verb {
            None => command,
            Some(verb) => command.find_subcommand(verb).cloned().ok_or_else(|| {
                Error::parameter(format!("df11 has no verb {verb:?}"), "see df11 --help")
            })?,
        };
        let mut page = Vec::new();
        let rendered = clap_mangen::Man::new(command).render(&mut page);
        rendered.map_err(Failure::Output)?;
        let text = String::from_utf8_lossy(&page).trim_end().to_owned();
        let json = json!({ "command": "man", "verb": self.verb, "page": text });
        Ok(Answer { text, json })
    }
}
