//! A daemon for one program: started before it, gone after it.
//!
//! The daemon is a process of its own ([`DaemonProcess`]), on a socket in a folder of its own; the
//! program is a child of this process that finds it through `RNIC_SOCKET`. Signals sent to this
//! process are passed on, except those the kernel sent to the whole foreground group, which the
//! program has got already. This process ends as the program ended: with its exit code, or by the
//! signal that killed it.
//!
//! If this process is killed (`SIGKILL`), the kernel kills the program likewise, and the daemon
//! ends by itself and takes its folder along. The program's own children are then nobody's; those
//! that are clients lose their sessions.

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

/// Why a program was not run to its end with a daemon.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The daemon did not start.
    #[error("the daemon did not start: {0}")]
    NotStarted(String),
    /// The daemon ended before it was told to.
    #[error("{0}")]
    Died(Death),
    /// The file for the log cannot be written.
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
    /// The operating system refused something else.
    #[error("{what}: {error}")]
    System {
        /// The operation that failed, in words.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

impl ExecError {
    /// The exit code of a program that runs others, as shells, `env` and `timeout` have it: 127 if
    /// the program was not found, 126 if it cannot be run, 125 if something else failed.
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

/// Exit code if something other than the program failed.
pub const FAILED: u8 = 125;

/// Runs `program` (with its arguments) as a client of `daemon`; returns how it ended, when the
/// daemon is gone. `signals` were taken before any thread was started. A program that succeeded
/// while its daemon died did not: that is the error.
pub fn run(
    mut daemon: DaemonProcess,
    program: &[OsString],
    signals: &Signals,
) -> Result<ExitStatus, ExecError> {
    let status = run_child(&mut daemon, signals, program)?;
    match daemon.stop() {
        Err(error) if status.success() => Err(error),
        _ => Ok(status),
    }
}

/// Ends as the program ended: gives its exit code, or does not return if a signal killed it.
pub fn end_as(status: ExitStatus) -> ExitCode {
    match (status.code(), status.signal()) {
        // Exit codes have 8 bits.
        (Some(code), _) => ExitCode::from(code as u8),
        (None, Some(signal)) => privilege::die_of(signal),
        (None, None) => ExitCode::FAILURE,
    }
}

fn run_child(
    daemon: &mut DaemonProcess,
    signals: &Signals,
    program: &[OsString],
) -> Result<ExitStatus, ExecError> {
    let Some((name, args)) = program.split_first() else {
        let error = io::ErrorKind::InvalidInput.into();
        return Err(ExecError::System { what: "no program was given", error });
    };
    let mut command = Command::new(name);
    command.args(args).env("RNIC_SOCKET", daemon.socket());
    let mut child = signals
        .spawn_to_die_with_us(&mut command)
        .map_err(|error| ExecError::Spawn { program: name.clone(), error })?;
    let waited = wait(&mut child, daemon, signals);
    waited.map_err(ExecError::system("cannot wait for the program"))
}

/// Waits for the child's end and passes signals on until then.
fn wait(
    child: &mut Child,
    daemon: &mut DaemonProcess,
    signals: &Signals,
) -> io::Result<ExitStatus> {
    let mut mourned = false;
    loop {
        // Before sleeping: its end may be one of several signals that were merged.
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        // The program sees it, too, and decides what that means to it.
        if !mourned && let Some(death) = daemon.has_died() {
            mourned = true;
            crate::cli::complain(&format!("rnicd: {death}"));
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
