//! A private daemon as a child process.
//!
//! The daemon holds a pipe to this process and ends when this process does, even after `kill -9`,
//! so neither daemon nor folder is left behind. It is in its own process group, so signals of a
//! terminal reach only the program. Its log goes to a file. If it dies, the last lines are shown.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use super::ExecError;
use super::private::{FAILED, Folder, Overrides, READY};

/// Destination of a private daemon's log.
#[derive(Clone, Debug, Default)]
pub enum LogTo {
    /// An unnamed temporary file. Its end is shown if the daemon dies.
    #[default]
    TempFile,
    /// The standard error of this process.
    Stderr,
    /// The file at this path.
    File(PathBuf),
}

/// A private daemon, stopped when this is dropped.
pub struct DaemonProcess {
    child: Child,
    /// Closed to stop the daemon.
    lifeline: Option<ChildStdin>,
    /// Removed last, even if the daemon was killed and could not remove it.
    folder: Folder,
    socket: PathBuf,
    /// Its log, if it goes to an unnamed file.
    log: Option<File>,
}

/// Exit status of a daemon that died, and the end of its log.
#[derive(Clone, Debug)]
pub struct Death {
    /// Exit status of the process.
    pub status: ExitStatus,
    /// The last lines of its log, if it goes to an unnamed file.
    pub log_end: String,
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the daemon died ({})", self.status)?;
        match self.log_end.as_str() {
            "" => Ok(()),
            words => write!(f, "; the end of its log:\n{words}"),
        }
    }
}

impl DaemonProcess {
    /// Starts a daemon with this valid configuration, and waits until it serves.
    pub fn start(config: &str, overrides: Overrides, log: LogTo) -> Result<Self, ExecError> {
        let system = ExecError::system;
        let (stderr, log) = match log {
            LogTo::Stderr => (Stdio::inherit(), None),
            LogTo::TempFile => {
                let path = std::env::temp_dir();
                let file = tempfile::tempfile_in(&path);
                let file = file.map_err(|error| ExecError::Log { path, error })?;
                let copy = file.try_clone().map_err(system("cannot share the log"))?;
                (copy.into(), Some(file))
            }
            LogTo::File(path) => {
                let file = File::options().append(true).create(true).open(&path);
                (file.map_err(|error| ExecError::Log { path, error })?.into(), None)
            }
        };
        let folder = Folder::new().map_err(system("cannot create a folder for the socket"))?;
        // The running executable itself, even if its path now leads to another file.
        let mut command = Command::new("/proc/self/exe");
        command.arg("private-daemon").arg("--folder").arg(folder.path()).process_group(0);
        if let Some(profile) = &overrides.profile {
            command.args(["--profile", profile]);
        }
        if let Some(loopback) = overrides.loopback {
            command.args(["--loopback", loopback.name()]);
        }
        if let Some(seccomp) = overrides.seccomp {
            command.args(["--seccomp", seccomp.name()]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        let mut child =
            command.spawn().map_err(system("cannot start the daemon (/proc/self/exe)"))?;
        let output = child.stdout.take();
        let lifeline = child.stdin.take();
        let mut daemon = DaemonProcess { child, lifeline, folder, socket: PathBuf::new(), log };
        if let Some(input) = &mut daemon.lifeline {
            // Fails only if the daemon is gone, which is handled below.
            let _ = input.write_all(config.as_bytes()).and_then(|()| input.write_all(&[0]));
        }
        let mut line = Vec::new();
        if let Some(output) = output {
            let read = BufReader::new(output).read_until(b'\n', &mut line);
            read.map_err(system("cannot read from the daemon"))?;
        }
        let mut fields = line.strip_suffix(b"\n").unwrap_or_default().splitn(2, |b| *b == b'\t');
        match (fields.next(), fields.next()) {
            (Some(READY), Some(socket)) => {
                daemon.socket = PathBuf::from(OsStr::from_bytes(socket));
                Ok(daemon)
            }
            (Some(FAILED), Some(why)) => {
                Err(ExecError::NotStarted(String::from_utf8_lossy(why).into_owned()))
            }
            _ => {
                let status = daemon.child.wait().map_err(system("cannot wait for the daemon"))?;
                Err(ExecError::Died(daemon.death(status)))
            }
        }
    }

    /// Returns the path of its socket, for `RNIC_SOCKET`.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the path of its folder, which is removed with it and its contents.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns how it died, if it has.
    pub fn has_died(&mut self) -> Option<Death> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(self.death(status))
    }

    /// Stops it gracefully and waits until its folder is removed.
    pub fn stop(mut self) -> Result<(), ExecError> {
        self.lifeline = None;
        let status = self.child.wait().map_err(ExecError::system("cannot wait for the daemon"))?;
        if status.success() { Ok(()) } else { Err(ExecError::Died(self.death(status))) }
    }

    fn death(&self, status: ExitStatus) -> Death {
        Death { status, log_end: self.log.as_ref().map(last_lines).unwrap_or_default() }
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        self.lifeline = None;
        // The folder must not be removed before the daemon ends.
        let _ = self.child.wait();
    }
}

/// Returns the last lines of a log.
fn last_lines(log: &File) -> String {
    let len = log.metadata().map_or(0, |metadata| metadata.len());
    let mut end = vec![0; LAST_BYTES];
    let read = log.read_at(&mut end, len.saturating_sub(LAST_BYTES as u64)).unwrap_or(0);
    let text = String::from_utf8_lossy(&end[..read]).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

/// Bytes of the log's end to read.
const LAST_BYTES: usize = 4096;
/// Maximum number of lines to show.
const LAST_LINES: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_log_is_its_last_lines() {
        let mut log = tempfile::tempfile().unwrap();
        assert_eq!(last_lines(&log), "");
        for n in 0..1000 {
            writeln!(log, "line {n}").unwrap();
        }
        let said = last_lines(&log);
        assert!(said.starts_with("line 990\n") && said.ends_with("\nline 999"), "{said}");
        let words = Death { status: ExitStatus::default(), log_end: "a\nb".to_owned() };
        assert!(words.to_string().ends_with("the end of its log:\na\nb"), "{words}");
    }
}
