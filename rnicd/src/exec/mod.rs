//! A private daemon for one program, started before it and stopped after it.
//!
//! The daemon is a process of its own ([`DaemonProcess`]) with its socket in its own folder. The
//! program is a child of this process and finds the socket in `RNIC_SOCKET`. Signals to this
//! process are forwarded to the program, except those that the kernel sends to the whole foreground
//! process group, which the program receives itself. This process ends as the program did: with its
//! exit code, or by its signal.
//!
//! If this process is killed (`SIGKILL`), the kernel kills the program too, and the daemon ends on
//! its own and removes its folder. The program's own children are not killed; clients among them
//! lose their sessions.

mod private;
mod process;

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus};

use rustix::event::{PollFd, PollFlags, poll};

use crate::privilege::{self, Signals};

pub use private::{Overrides, PrivateDaemon, PrivateError, serve};
pub use process::{DaemonProcess, Death, LogTo};

/// Reasons why a program did not run to completion with a daemon.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The daemon did not start.
    #[error("the daemon did not start: {0}")]
    NotStarted(String),
    /// The daemon ended before the program.
    #[error("{0}")]
    Died(Death),
    /// The log file cannot be written.
    #[error("cannot write the log {path}: {error}", path = path.display())]
    Log {
        /// Path of the log file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The program did not start.
    #[error("cannot run {program:?}: {error}")]
    Spawn {
        /// Name or path of the program, as given.
        program: OsString,
        /// The system's error.
        error: io::Error,
    },
    /// Another operation failed.
    #[error("{what}: {error}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

impl ExecError {
    /// Returns the exit code that shells, `env` and `timeout` use too: 127 if the program was not
    /// found, 126 if it cannot be executed, 125 if anything else failed.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            ExecError::Spawn { error, .. } if error.kind() == io::ErrorKind::NotFound => 127,
            ExecError::Spawn { .. } => 126,
            _ => FAILED,
        })
    }

    fn system(what: &'static str) -> impl FnOnce(io::Error) -> ExecError {
        move |error| ExecError::System { what, error }
    }
}

/// Exit code for all failures except the program's own.
pub const FAILED: u8 = 125;

/// Runs `program` (with its arguments) as a client of `daemon`. Returns its exit status after the
/// daemon has ended. `signals` must be taken before any thread is started. If the program succeeded
/// but the daemon died, the result is an error.
pub fn run(
    mut daemon: DaemonProcess,
    program: &[OsString],
    signals: &Signals,
    report: impl FnOnce(&Death),
) -> Result<ExitStatus, ExecError> {
    let status = run_child(&mut daemon, signals, program, report)?;
    match daemon.stop() {
        Err(error) if status.success() => Err(error),
        _ => Ok(status),
    }
}

/// Ends as the program did: returns its exit code, or kills this process with its signal.
pub fn end_as(status: ExitStatus) -> ExitCode {
    match (status.code(), status.signal()) {
        // Exit codes have 8 bits.
        (Some(code), _) => ExitCode::from(code as u8),
        (None, Some(signal)) => privilege::exit_by_signal(signal),
        (None, None) => ExitCode::FAILURE,
    }
}

fn run_child(
    daemon: &mut DaemonProcess,
    signals: &Signals,
    program: &[OsString],
    report: impl FnOnce(&Death),
) -> Result<ExitStatus, ExecError> {
    let Some((name, args)) = program.split_first() else {
        let error = io::ErrorKind::InvalidInput.into();
        return Err(ExecError::System { what: "no program was given", error });
    };
    let mut command = Command::new(name);
    command.args(args).env("RNIC_SOCKET", daemon.socket());
    let mut child = signals
        .spawn_with_parent_death_signal(&mut command)
        .map_err(|error| ExecError::Spawn { program: name.clone(), error })?;
    let waited = wait(&mut child, daemon, signals, report);
    waited.map_err(ExecError::system("cannot wait for the program"))
}

/// Waits for the child's end and passes on signals until then.
fn wait(
    child: &mut Child,
    daemon: &mut DaemonProcess,
    signals: &Signals,
    report: impl FnOnce(&Death),
) -> io::Result<ExitStatus> {
    let mut report = Some(report);
    loop {
        // Checked before each sleep, because SIGCHLD may be merged with an earlier one.
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        // Only reported: the program also sees that the daemon has died, and may continue.
        if report.is_some()
            && let Some(death) = daemon.has_died()
            && let Some(report) = report.take()
        {
            report(&death);
        }
        match poll(&mut [PollFd::new(&signals.as_fd(), PollFlags::IN)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        while let Some(signal) = signals.next()? {
            if signal.number != libc::SIGCHLD && !signal.from_kernel {
                privilege::send_signal(child, signal.number)?;
            }
        }
    }
}
