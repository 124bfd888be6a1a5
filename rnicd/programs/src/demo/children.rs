//! Child processes of the demo, and their output.
//!
//! A child runs one part of `parts` and writes lines of the form `kind TAB rest`. Dropping it kills
//! it if it still runs, so no process remains after a failure.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Lines};
use std::process::{ChildStdout, Command, ExitStatus, Stdio};

use rnicd::exec::DaemonProcess;

/// Failures of a child process.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// It did not start, or its output could not be read.
    #[error("the {part} process: {error}")]
    System {
        /// Name of the child's part.
        part: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// It failed. Its standard error has the reason.
    #[error("the {part} process failed ({status})")]
    Failed {
        /// Name of the child's part.
        part: String,
        /// Exit status of the process.
        status: ExitStatus,
    },
    /// It ended without the expected line.
    #[error("the {part} process ended without its {wanted} line")]
    Silent {
        /// Name of the child's part.
        part: String,
        /// Kind of the expected line.
        wanted: &'static str,
    },
}

pub(super) struct Child {
    part: String,
    process: std::process::Child,
    lines: Option<Lines<BufReader<ChildStdout>>>,
}

impl Child {
    /// Starts this program again to run a part as a client of `daemon`.
    pub(super) fn start(daemon: &DaemonProcess, part: &[&OsStr]) -> Result<Self, ChildError> {
        let name = part.first().copied().unwrap_or_default().to_string_lossy().into_owned();
        let failed = |error| ChildError::System { part: name.clone(), error };
        // The running executable itself, even if its path now leads to another file.
        let mut process = Command::new("/proc/self/exe")
            .arg("demo-part")
            .args(part)
            .env("RNIC_SOCKET", daemon.socket())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let lines = process.stdout.take().map(|out| BufReader::new(out).lines());
        Ok(Child { part: name, process, lines })
    }

    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Returns the next line, or `None` after the child has closed its output.
    pub(super) fn next_line(&mut self) -> Result<Option<String>, ChildError> {
        let line = self.lines.as_mut().and_then(Iterator::next).transpose();
        line.map_err(|error| ChildError::System { part: self.part.clone(), error })
    }

    /// Skips to the next line of this kind and returns its rest.
    pub(super) fn line(&mut self, wanted: &'static str) -> Result<String, ChildError> {
        while let Some(line) = self.next_line()? {
            if let Some((kind, rest)) = line.split_once('\t')
                && kind == wanted
            {
                return Ok(rest.to_owned());
            }
        }
        // If the child failed, that is the better error.
        self.wait()?;
        Err(ChildError::Silent { part: self.part.clone(), wanted })
    }

    /// Waits for its end. Fails if the child failed.
    pub(super) fn finish(mut self) -> Result<(), ChildError> {
        self.wait()
    }

    fn wait(&mut self) -> Result<(), ChildError> {
        let waited = self.process.wait();
        let status =
            waited.map_err(|error| ChildError::System { part: self.part.clone(), error })?;
        if status.success() {
            Ok(())
        } else {
            Err(ChildError::Failed { part: self.part.clone(), status })
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Ok(None) = self.process.try_wait() {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}
