//! A daemon for one program: started before it, gone after it.
//!
//! The daemon runs in threads of this process, on a socket in a folder of its own; the program is
//! a child that finds it through `RNIC_SOCKET`. Signals sent to this process are passed on, except
//! those the kernel sent to the whole foreground group, which the program has got already. This
//! process ends as the program ended: with its exit code, or by the signal that killed it.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};

use crate::config::Config;
use crate::control::{ControlSocket, Notifier, Server, StartError, Stopper};
use crate::privilege::{self, Signals};

/// Why a program could not be run.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The daemon did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The program did not start.
    #[error("cannot run {program:?}: {error}")]
    Spawn {
        /// The program.
        program: OsString,
        /// The system's error.
        error: io::Error,
    },
    /// The operating system refused something else.
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

/// A daemon in threads of this process, on a private socket.
pub struct PrivateDaemon {
    folder: tempfile::TempDir,
    stopper: Stopper,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl PrivateDaemon {
    /// Starts it in a new folder that only this user may enter.
    pub fn start(config: Config) -> Result<Self, ExecError> {
        let folder = tempfile::Builder::new().prefix("rnicd-exec-").tempdir();
        let folder = folder.map_err(system("cannot make a folder for the socket"))?;
        let path = folder.path().join(SOCKET);
        let socket = ControlSocket::open(Some(&path), &config.control).map_err(StartError::from)?;
        // Its clients are of its own user: nobody needs a mover.
        let server = Server::start(config, socket, None, Notifier::default(), None)?;
        let stopper = server.stopper();
        let thread = std::thread::Builder::new()
            .name("rnicd-control".to_owned())
            .spawn(|| server.run())
            .map_err(system("cannot start a thread"))?;
        Ok(PrivateDaemon { folder, stopper, thread: Some(thread) })
    }

    /// Its socket, for `RNIC_SOCKET`.
    pub fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join(SOCKET)
    }

    /// Stops it in order and removes its folder.
    pub fn stop(mut self) -> io::Result<()> {
        self.join()
    }

    fn join(&mut self) -> io::Result<()> {
        self.stopper.stop();
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the daemon panicked")))
    }
}

impl Drop for PrivateDaemon {
    fn drop(&mut self) {
        // Not stopped in order; whoever drops it has an error of its own to tell.
        let _ = self.join();
    }
}

/// Runs `program` (with its arguments) with a daemon of its own; returns how it ended. `signals`
/// were taken before any thread was started.
pub fn run(
    config: Config,
    program: &[OsString],
    signals: &Signals,
) -> Result<ExitStatus, ExecError> {
    let daemon = PrivateDaemon::start(config)?;
    let status = run_child(&daemon, signals, program);
    if let Err(error) = daemon.stop() {
        tracing::error!(%error, "the daemon did not stop in order");
    }
    status
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
    daemon: &PrivateDaemon,
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
        .spawn(&mut command)
        .map_err(|error| ExecError::Spawn { program: name.clone(), error })?;
    let waited = wait(&mut child, signals);
    waited.map_err(system("cannot wait for the program"))
}

/// Waits for the child's end and passes signals on until then.
fn wait(child: &mut Child, signals: &Signals) -> io::Result<ExitStatus> {
    loop {
        // Before sleeping: its end may be one of several signals that were merged.
        if let Some(status) = child.try_wait()? {
            return Ok(status);
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

fn system(what: &'static str) -> impl FnOnce(io::Error) -> ExecError {
    move |error| ExecError::System { what, error }
}

const SOCKET: &str = "rnicd.sock";
