//! `df11 completions`: a script by which a shell completes verbs and options.

use clap::{Args, CommandFactory};
use clap_complete::Shell;
use serde_json::json;

use super::{Answer, Cli};

const AFTER_HELP: &str = "\
Examples:
  source <(df11 completions bash)                               in this shell
  df11 completions bash > ~/.local/share/bash-completion/completions/df11
  df11 completions zsh > \"${fpath[1]}/_df11\"
  df11 completions fish > ~/.config/fish/completions/df11.fish";

/// Print the script by which a shell completes verbs and options
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Completions {
    /// Which shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(super) fn run(&self) -> Answer {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "df11", &mut script);
        let text = String::from_utf8_lossy(&script).trim_end().to_owned();
        let json =
            json!({ "command": "completions", "shell": self.shell.to_string(), "script": text });
        Answer { text, json }
    }
}
