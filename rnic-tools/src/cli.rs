//! Command-line conventions of all programs: exit codes, output, and a status line.

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The error that ends a program.
pub type Failure = Box<dyn std::error::Error>;

/// Returns the exit code of a program: 0, or 1 after printing the error to standard error. clap
/// exits with 2 on a wrong command line.
pub fn exit_code<E: Display>(program: &str, result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            print_error(program, &e);
            ExitCode::FAILURE
        }
    }
}

/// Prints a line to standard error. Ignores errors.
pub fn print_error(program: &str, what: impl Display) {
    let _ = writeln!(io::stderr(), "{program}: {what}");
}

/// Prints a line to standard output. A closed pipe is not an error.
pub fn print_line(line: impl Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(io::Error::new(e.kind(), format!("cannot write to standard output: {e}"))),
        Ok(()) => Ok(()),
    }
}

/// Parses a number that is at least 1.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        other => other.map_err(|e| format!("{text:?} is not a valid count: {e}")),
    }
}

/// Replaces control characters in a text from a peer, so that it cannot control the terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{FFFD}' } else { c }).collect()
}

/// A progress line on standard error. Shown only if standard error is a terminal.
pub struct StatusLine {
    /// Time of the last change; `None` if nothing is shown.
    shown: Option<Mutex<Option<Instant>>>,
}

impl StatusLine {
    /// Creates an empty line.
    pub fn new() -> Self {
        StatusLine { shown: io::stderr().is_terminal().then(Mutex::default) }
    }

    /// Shows a text. Skips frequent changes, because drawing takes time from the operation.
    pub fn show(&self, text: impl FnOnce() -> String) {
        let Some(shown) = &self.shown else { return };
        let Ok(mut shown) = shown.lock() else { return };
        if shown.is_none_or(|before| before.elapsed() >= INTERVAL) {
            *shown = Some(Instant::now());
            let text: String = printable(&text()).chars().take(WIDTH).collect();
            let _ = write!(io::stderr(), "\r{text}{CLEAR}");
        }
    }

    /// Removes the text. Needed before other output.
    pub fn clear(&self) {
        let Some(shown) = &self.shown else { return };
        if shown.lock().is_ok_and(|mut shown| shown.take().is_some()) {
            let _ = write!(io::stderr(), "\r{CLEAR}");
        }
    }
}

impl Default for StatusLine {
    fn default() -> Self {
        StatusLine::new()
    }
}

/// Clears a terminal's line from the cursor on.
const CLEAR: &str = "\x1b[K";
/// Maximum length of a status: longer lines would wrap, and could not be removed.
const WIDTH: usize = 79;
/// Minimum time between two changes.
const INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_at_least_one() {
        assert_eq!(at_least_one("3"), Ok(3));
        for wrong in ["0", "-1", "x", ""] {
            assert!(at_least_one(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a\u{FFFD}[2Jb\u{FFFD}c");
    }
}
