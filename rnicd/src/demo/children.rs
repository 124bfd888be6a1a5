//! The demo's child processes and the lines they write.
//!
//! A child plays one part of `parts` and writes lines of the form `kind TAB rest`. It is killed if
//! it is dropped before it has ended, so nothing stays behind whatever fails.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Lines};
use std::process::{ChildStdout, Command, ExitStatus, Stdio};

use crate::exec::DaemonProcess;

/// Why a child is of no use.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// It did not start, or its output could not be read.
    #[error("the {part} process: {error}")]
    System {
        /// Name of the part that the child plays.
        part: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// It failed; it has said why on standard error.
    #[error("the {part} process failed ({status})")]
    Failed {
        /// Name of the part that the child plays.
        part: String,
        /// Exit status of the process.
        status: ExitStatus,
    },
    /// It did not say what it should have.
    #[error("the {part} process ended before it told its {wanted}")]
    Silent {
        /// Name of the part that the child plays.
        part: String,
        /// The kind of line that was awaited.
        wanted: &'static str,
    },
}

pub(super) struct Child {
    part: String,
    process: std::process::Child,
    lines: Option<Lines<BufReader<ChildStdout>>>,
}

impl Child {
    /// Starts this program again to play a part as a client of `daemon`.
    pub(super) fn start(daemon: &DaemonProcess, part: &[&OsStr]) -> Result<Self, ChildError> {
        let name = part.first().copied().unwrap_or_default().to_string_lossy().into_owned();
        let failed = |error| ChildError::System { part: name.clone(), error };
        // The running file itself, even if another one has its name by now.
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

    /// The next line; none when the child has closed its output.
    pub(super) fn next_line(&mut self) -> Result<Option<String>, ChildError> {
        let line = self.lines.as_mut().and_then(Iterator::next).transpose();
        line.map_err(|error| ChildError::System { part: self.part.clone(), error })
    }

    /// The rest of the next line of this kind.
    pub(super) fn line(&mut self, wanted: &'static str) -> Result<String, ChildError> {
        while let Some(line) = self.next_line()? {
            if let Some((kind, rest)) = line.split_once('\t')
                && kind == wanted
            {
                return Ok(rest.to_owned());
            }
        }
        // If it failed, that is the better reason.
        self.wait()?;
        Err(ChildError::Silent { part: self.part.clone(), wanted })
    }

    /// Waits for its end and insists on success.
    pub(super) fn finish(mut self) -> Result<(), ChildError> {
        self.wait()
    }

    fn wait(&mut self) -> Result<(), ChildError> {
        let waited = self.process.wait();
        let status =
            waited.map_err(|error| ChildError::System { part: self.part.clone(), error })?;
        match status.success() {
            true => Ok(()),
            false => Err(ChildError::Failed { part: self.part.clone(), status }),
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
