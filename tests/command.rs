//! The command, run as people and programs run it.

#[path = "command/advice.rs"]
mod advice;
#[path = "command/after.rs"]
mod after;
#[path = "command/cli.rs"]
mod cli;
#[path = "support/command.rs"]
mod command;
#[path = "support/container.rs"]
mod container;
#[cfg(target_os = "linux")]
#[path = "command/faults.rs"]
mod faults;
#[path = "support/files.rs"]
mod files;
#[path = "command/html.rs"]
mod html;
#[path = "command/import.rs"]
mod import;
#[path = "command/inputs.rs"]
mod inputs;
#[path = "command/outputs.rs"]
mod outputs;
#[path = "command/pipelines.rs"]
mod pipelines;
