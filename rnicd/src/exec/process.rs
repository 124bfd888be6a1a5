//! A private daemon as a process of its own.
//!
//! It holds on to a pipe of this process and ends with it, however this process ends: `kill -9`
//! leaves neither a daemon nor its folder. It is in a process group of its own, so that signals of
//! a terminal reach the program alone, and it is quiet: its log goes to a file, of which the last
//! lines are told if it dies.

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

/// Where the log of a private daemon goes.
#[derive(Clone, Debug, Default)]
pub enum LogTo {
    /// To a file without a name: its end is told if the daemon dies.
    #[default]
    Nobody,
    /// To the standard error of this process.
    Stderr,
    /// To the file at this path.
    File(PathBuf),
}

/// A private daemon that lives as long as this.
pub struct DaemonProcess {
    child: Child,
    /// Closed to end it.
    lifeline: Option<ChildStdin>,
    /// Removed last, also for a daemon that was killed and could not.
    folder: Folder,
    socket: PathBuf,
    /// What it said, if nobody else can tell.
    log: Option<File>,
}

/// How a daemon died, and its last words if nobody else heard them.
#[derive(Clone, Debug)]
pub struct Death {
    /// Exit status of the process.
    pub status: ExitStatus,
    /// The last lines of its log.
    pub last_words: String,
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the daemon died ({})", self.status)?;
        match self.last_words.as_str() {
            "" => Ok(()),
            words => write!(f, "; the end of its log:\n{words}"),
        }
    }
}

impl DaemonProcess {
    /// Starts one with this configuration, which has been checked, and waits until it serves.
    pub fn start(config: &str, overrides: Overrides, log: LogTo) -> Result<Self, ExecError> {
        let system = ExecError::system;
        let (stderr, log) = match log {
            LogTo::Stderr => (Stdio::inherit(), None),
            LogTo::Nobody => {
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
        let folder = Folder::new().map_err(system("cannot make a folder for the socket"))?;
        // The running file itself, even if another one has its name by now.
        let mut command = Command::new("/proc/self/exe");
        command.arg("private-daemon").arg("--folder").arg(folder.path()).process_group(0);
        if let Some(loopback) = overrides.loopback {
            command.args(["--loopback", loopback.name()]);
        }
        if let Some(seccomp) = overrides.seccomp {
            command.args(["--seccomp", seccomp.name()]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        let mut child =
            command.spawn().map_err(system("cannot start the daemon, /proc/self/exe"))?;
        let output = child.stdout.take();
        let lifeline = child.stdin.take();
        let mut daemon = DaemonProcess { child, lifeline, folder, socket: PathBuf::new(), log };
        if let Some(input) = &mut daemon.lifeline {
            // Fails only if it is gone, of which there is more to say below.
            let _ = input.write_all(config.as_bytes()).and_then(|()| input.write_all(&[0]));
        }
        let mut line = Vec::new();
        if let Some(output) = output {
            let read = BufReader::new(output).read_until(b'\n', &mut line);
            read.map_err(system("cannot hear the daemon"))?;
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

    /// Its socket, for `RNIC_SOCKET`.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its folder, which goes with it, and with everything in it.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// How it died, if it has.
    pub fn has_died(&mut self) -> Option<Death> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(self.death(status))
    }

    /// Stops it in order and waits until its folder is gone.
    pub fn stop(mut self) -> Result<(), ExecError> {
        self.lifeline = None;
        let status = self.child.wait().map_err(ExecError::system("cannot wait for the daemon"))?;
        match status.success() {
            true => Ok(()),
            false => Err(ExecError::Died(self.death(status))),
        }
    }

    fn death(&self, status: ExitStatus) -> Death {
        Death { status, last_words: self.log.as_ref().map(last_lines).unwrap_or_default() }
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        self.lifeline = None;
        // Its folder is not to go before it.
        let _ = self.child.wait();
    }
}

/// The last lines of a log.
fn last_lines(log: &File) -> String {
    let len = log.metadata().map_or(0, |metadata| metadata.len());
    let mut end = vec![0; LAST_BYTES];
    let read = log.read_at(&mut end, len.saturating_sub(LAST_BYTES as u64)).unwrap_or(0);
    let text = String::from_utf8_lossy(&end[..read]).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

/// How much of a log is looked at.
const LAST_BYTES: usize = 4096;
/// Lines of it that are told.
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
        let words = Death { status: ExitStatus::default(), last_words: "a\nb".to_owned() };
        assert!(words.to_string().ends_with("the end of its log:\na\nb"), "{words}");
    }
}
