//! `df11 man`: the manual page, of the command or of one verb.

use clap::{Args, CommandFactory};
use df11::Error;
use serde_json::json;

use super::{Answer, Cli, Failure};

const AFTER_HELP: &str = "\
Examples:
  df11 man | man -l -                                 read it
  df11 man compress | man -l -                        that of a verb
  df11 man > ~/.local/share/man/man1/df11.1           install it";

/// Print the manual page
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Man {
    /// The verb whose page is wanted [default: that of df11]
    verb: Option<String>,
}

impl Man {
    pub(super) fn run(&self) -> Result<Answer, Failure> {
        let mut command = Cli::command();
        command.build();
        let command = match &self.verb {
            None => command,
            Some(verb) => command.find_subcommand(verb).cloned().ok_or_else(|| {
                Error::parameter(format!("{verb:?} is no verb of df11"), "see df11 --help")
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
