//! Options shared by all verbs: the form of the answer, threads, progress, and interruption.

use std::{
    ffi::OsString,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::{
    Args,
    error::{ContextKind, ContextValue, ErrorKind},
};
use df11::{
    Error, Models, Observer, OpenOptions, Stage,
    hazmat::{Leftover, TemporaryFolder, platform, remove_leftovers},
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use super::{
    answer::{Answer, Failure},
    signal::is_interrupted,
    text::{self, printable},
};

/// Template of the progress bar.
const TEMPLATE: &str =
    "{msg:9} {wide_bar} {percent:>3} %  {decimal_bytes_per_sec:>11}  {eta:>3} left ";

// One run of the command. (Its doc comment would be the help of the command.)
#[derive(Args)]
pub(super) struct Session {
    /// Print the result as one JSON document
    #[arg(long, global = true)]
    pub(super) json: bool,
    #[cfg(feature = "remote")]
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        help = "Keep chunks that are read from stores here, for later runs [default: DF11_CACHE]"
    )]
    pub(super) cache: Option<PathBuf>,
    /// Print only errors and the names of files that are left out
    #[arg(short, long, global = true)]
    quiet: bool,
}

#[derive(Args, Clone, Copy, Default)]
pub(super) struct Threads {
    /// Number of threads [default: all cores]; the result does not depend on it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

impl Threads {
    /// Runs work in a pool of its own.
    pub(super) fn run<T: Send>(
        self,
        work: impl FnOnce() -> Result<T, Failure> + Send,
    ) -> Result<T, Failure> {
        pool(self.threads.map_or(0, usize::from))?.install(work)
    }
}

/// A pool of this many threads; 0 means all cores.
pub(super) fn pool(threads: usize) -> Result<rayon::ThreadPool, Failure> {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|error| {
        Failure::from(Error::parameter(
            format!("cannot start {threads} threads: {error}"),
            "use fewer threads",
        ))
    })
}

#[derive(Args, Clone, Default)]
pub(super) struct BaseArg {
    /// The base of a model that was compressed with --base, if it has moved since
    #[arg(long, value_name = "BASE")]
    base: Option<PathBuf>,
}

impl BaseArg {
    /// How models are opened with it.
    pub(super) fn options(&self) -> OpenOptions {
        let options = OpenOptions::new();
        self.base.iter().fold(options, OpenOptions::base)
    }
}

/// Opens models that will be read from end to end. Reading makes copies, unlike a mapping. But its
/// memory is bounded, and a file that shrinks meanwhile is an error and not the end of the process.
pub(super) fn open_to_stream(path: &Path, base: &BaseArg) -> Result<Models, Error> {
    base.options().memory_map(false).open_all(path)
}

/// A folder for temporary files, which goes when it is dropped. `place` must be there.
pub(super) fn temporary_folder(place: &Path) -> Result<TemporaryFolder, Error> {
    let listed = std::fs::read_dir(place);
    listed.map_err(|error| Error::io("creating a folder in", place, error))?;
    TemporaryFolder::new_in(place)
}

impl Session {
    /// A progress bar on a terminal, nothing elsewhere; both can be interrupted.
    pub(super) fn progress(&self) -> Progress {
        // Standard error that is no terminal hides the bar by itself.
        let target =
            if self.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style);
        }
        Progress(bar)
    }

    /// Prints a text to standard error that programs find in a field of the answer.
    pub(super) fn notice(&self, text: &str) {
        if self.wants_text() {
            let _ = writeln!(io::stderr(), "df11: {}", printable(text));
        }
    }

    /// Prints to standard error a text that a quiet run must not hide. Other runs have it in their
    /// answer.
    pub(super) fn insist(&self, text: &str) {
        if self.quiet && !self.json {
            let _ = writeln!(io::stderr(), "df11: {}", printable(text));
        }
    }

    /// Whether the answer's text will be printed.
    pub(super) const fn wants_text(&self) -> bool {
        !self.json && !self.quiet
    }

    pub(super) fn print(&self, answer: &Answer) -> Result<(), Failure> {
        if self.json {
            put(&text::document(&answer.json))
        } else if self.quiet {
            Ok(())
        } else {
            put(&text::printable_lines(&answer.text))
        }
    }

    /// Reports a failure: a line on standard error, and with `--json` a document too.
    pub(super) fn fail(&self, failure: &Failure) -> u8 {
        if self.json && !matches!(failure, Failure::Output(_)) {
            // Standard error says it in any case.
            let _ = put(&text::document(&failure.json()));
        }
        let _ = writeln!(io::stderr(), "df11: {}", failure.message());
        failure.exit_code()
    }
}

/// One bar over all stages of long work, which passes on an interruption.
pub(super) struct Progress(ProgressBar);

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

impl Observer for Progress {
    fn begin(&self, bytes: u64) {
        self.0.set_length(bytes);
        self.0.reset();
    }

    fn enter(&self, stage: Stage) {
        self.0.set_message(match stage {
            Stage::Analyse => "analysing",
            Stage::Encode => "encoding",
            Stage::Decode => "decoding",
            Stage::Verify => "verifying",
            Stage::Load => "loading",
            Stage::Fetch => "fetching",
            Stage::Upload => "uploading",
        });
    }

    fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    fn is_cancelled(&self) -> bool {
        is_interrupted()
    }
}

/// Ends the work of a verb between two steps, if the user asked for it.
pub(super) fn check_interrupted() -> Result<(), Failure> {
    if is_interrupted() { Err(Error::Cancelled.into()) } else { Ok(()) }
}

/// Removes what killed runs left beside an output.
pub(super) fn tidy(out: &Path) -> Vec<Leftover> {
    let parent =
        out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A folder that cannot be listed fails the run where it is written to.
    remove_leftovers(parent).unwrap_or_default()
}

/// Adds to an answer what was removed before its verb began.
pub(super) fn add_removed(answer: &mut Answer, removed: &[Leftover]) {
    answer.text.extend(removed.iter().map(|leftover| {
        let (path, size) = (text::path(&leftover.path), text::bytes(leftover.bytes));
        format!("\n  removed   {path} ({size}), which a killed run had left behind")
    }));
    let removed = removed.iter().map(
        |leftover| json!({ "path": leftover.path.to_string_lossy(), "bytes": leftover.bytes }),
    );
    answer.json["removed"] = removed.collect();
}

/// Reports arguments that do not parse, or prints the help that they ask for. With `--json` among
/// them, an error is a document on standard output too. Returns the exit code.
pub(super) fn fail_usage(usage: &clap::Error, arguments: &[OsString]) -> u8 {
    let code = usage.exit_code().unsigned_abs() as u8;
    if usage.use_stderr() && arguments.iter().any(|argument| argument == "--json") {
        let message = usage.render().to_string();
        let message = message.lines().next().unwrap_or_default().trim_start_matches("error: ");
        let error = json!({ "kind": "usage", "message": message, "exit_code": code });
        // Standard error says it in any case.
        let _ = put(&format!("{:#}", json!({ "error": error })));
    }
    // If standard error is closed, nobody can read this.
    let _ = usage.print();
    if is_second_path(usage, arguments) {
        let _ = writeln!(io::stderr(), "Name the output with -o.");
    }
    code
}

/// Whether an output was named as `cp` takes it.
fn is_second_path(usage: &clap::Error, arguments: &[OsString]) -> bool {
    let verbs = ["compress", "convert", "decompress"];
    let Some(ContextValue::String(extra)) = usage.get(ContextKind::InvalidArg) else {
        return false;
    };
    usage.kind() == ErrorKind::UnknownArgument
        && !extra.starts_with('-')
        && arguments.iter().any(|argument| verbs.iter().any(|verb| argument == verb))
}

/// Writes to standard output. A reader that has gone away, as `head` does, is no failure.
fn put(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if !platform::is_broken_pipe(&error) => Err(Failure::Output(error)),
        _ => Ok(()),
    }
}
