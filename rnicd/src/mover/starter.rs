//! The process that starts movers.
//!
//! It begins with the daemon, before any client can have passed a descriptor, and is never given
//! one. A process that the daemon started itself would inherit them all, and lose them again before
//! it runs its program: each is closed, and the file system of one that a client made decides when
//! that is over (a FUSE server answers the flush, or does not). Such a client would keep everybody
//! else from having a mover.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{channel, process};
use crate::config::Seccomp;
use crate::privilege::{ThreadKind, confine};

/// The starter of movers, as its daemon has it. It ends when this is dropped, and with the thread
/// that made it.
#[derive(Debug)]
pub struct Starter {
    channel: OwnedFd,
}

impl Starter {
    /// Starts the process, of this process's own program, as the user this process is now.
    ///
    /// # Errors
    ///
    /// Those of the system; a process that ends at once, as one does that may not have the filter
    /// `seccomp`.
    pub fn start(seccomp: Seccomp) -> io::Result<Self> {
        let (ours, theirs) = channel::pair()?;
        let arguments = ["mover-starter", seccomp.name()];
        // It is not waited for: it ends after everything else, or with everything else.
        drop(run(&arguments, theirs)?);
        match channel::receive(&ours, &mut [0])? {
            (0, _) => Err(ended()),
            _ => Ok(Starter { channel: ours }),
        }
    }

    /// Has a mover started for process `pid`, with `setup` as its standard input; what to signal it
    /// by, and to wait for its end.
    pub(super) fn mover(&self, pid: i32, setup: &OwnedFd) -> io::Result<OwnedFd> {
        channel::send(&self.channel, &pid.to_le_bytes(), &[setup.as_fd()])?;
        let mut said = [0; 256];
        match channel::receive(&self.channel, &mut said)? {
            (0, _) => Err(ended()),
            (len, mut passed) => passed.pop().ok_or_else(|| {
                io::Error::other(String::from_utf8_lossy(&said[..len]).into_owned())
            }),
        }
    }
}

fn ended() -> io::Error {
    io::Error::other("the process that starts movers has ended")
}

/// Starts this program as another process, with nothing of this one but its standard input.
fn run(arguments: &[&str], stdin: OwnedFd) -> io::Result<Child> {
    Command::new("/proc/self/exe")
        .args(arguments)
        .env_clear()
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// What runs in the process: starts movers as long as its daemon asks, by standard input.
///
/// # Errors
///
/// If standard input is no channel of a daemon.
pub fn start_movers(seccomp: Seccomp) -> io::Result<()> {
    process::give_up()?;
    confine(ThreadKind::Spawner, seccomp)?;
    let stdin = io::stdin();
    channel::send(&stdin, &[0], &[])?;
    loop {
        let mut pid = [0; 4];
        let (len, mut passed) = channel::receive(&stdin, &mut pid)?;
        if len == 0 {
            return Ok(());
        }
        let setup = passed.pop().ok_or(io::ErrorKind::InvalidInput)?;
        match start_mover(i32::from_le_bytes(pid), setup, seccomp) {
            Ok(process) => channel::send(&stdin, &[0], &[process.as_fd()])?,
            Err(error) => channel::send(&stdin, error.to_string().as_bytes(), &[])?,
        }
    }
}

fn start_mover(pid: i32, setup: OwnedFd, seccomp: Seccomp) -> io::Result<OwnedFd> {
    let mut child = run(&["mover", &pid.to_string(), seccomp.name()], setup)?;
    let opened = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    if opened.is_err() {
        let _ = child.kill();
    }
    // Somebody has to take note of its end, or its number stays taken.
    std::thread::Builder::new().spawn(move || child.wait())?;
    Ok(opened?)
}
