//! The process that starts copiers.
//!
//! It begins with the daemon, before any client can have passed a descriptor, and is never given
//! one. A process that the daemon started itself would inherit them all, and lose them again before
//! it runs its program: each is closed, and the file system of one that a client made decides when
//! that is over (a FUSE server answers the flush, or does not). Such a client would keep everybody
//! else from having a copier.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{channel, process};
use crate::config::Seccomp;
use crate::privilege::{ThreadKind, confine};

/// The spawner of copiers, as its daemon has it. It ends when this is dropped, and with the thread
/// that made it.
#[derive(Debug)]
pub struct Spawner {
    channel: OwnedFd,
}

impl Spawner {
    /// Starts the process, of this process's own program, as the user this process is now and with
    /// its limits.
    ///
    /// # Errors
    ///
    /// Those of the system; what keeps the process from beginning its work.
    pub fn start(seccomp: Seccomp) -> io::Result<Self> {
        let (ours, theirs) = channel::pair()?;
        let mut spawner = program(&["copier-spawner", seccomp.name()], theirs);
        // In a group of its own: a terminal's signals are for the daemon. It is not waited for: it
        // ends after everything else, or with everything else.
        drop(spawner.process_group(0).spawn()?);
        let spawner = Spawner { channel: ours };
        match spawner.answer()? {
            Ok(_) => Ok(spawner),
            Err(why) => Err(io::Error::other(why)),
        }
    }

    /// Has a copier started for process `pid`, with `setup` as its standard input: what to signal
    /// it by, and to wait for its end; or why there is none.
    ///
    /// # Errors
    ///
    /// If the spawner does not answer. It is of no use any more then.
    pub(super) fn copier(&self, pid: i32, setup: &OwnedFd) -> io::Result<Result<OwnedFd, String>> {
        match channel::send(&self.channel, &pid.to_le_bytes(), &[setup.as_fd()]) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(error),
            // Nothing was sent (ETOOMANYREFS, ENOMEM): the next one may be.
            Err(error) => return Ok(Err(error.to_string())),
        }
        let started = self.answer()?;
        // The kernel drops a descriptor for which this process has no room.
        Ok(started.and_then(|process| process.ok_or_else(|| Errno::MFILE.to_string())))
    }

    /// What it says: that something was done, with a descriptor perhaps, or why not.
    fn answer(&self) -> io::Result<Result<Option<OwnedFd>, String>> {
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        if poll(&mut [PollFd::new(&self.channel, PollFlags::IN)], Some(&patience))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut said = [0; 256];
        match channel::receive(&self.channel, &mut said)? {
            (0, _) => Err(ended()),
            (1, mut passed) if said[0] == DONE => Ok(Ok(passed.pop())),
            (len, _) => Ok(Err(String::from_utf8_lossy(&said[..len]).into_owned())),
        }
    }
}

/// It starts a process, which no client can delay. After this it is taken for dead.
const PATIENCE: Duration = Duration::from_secs(30);

/// An answer that is no error's text.
const DONE: u8 = 0;

/// What clients are told from then on.
pub(super) fn ended() -> io::Error {
    io::Error::other("the process that starts copiers has ended")
}

/// This program as another process, with nothing of this one but its standard input.
fn program(arguments: &[&str], stdin: OwnedFd) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("rnicd").args(arguments).env_clear().stdin(Stdio::from(stdin));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// What runs in the process: starts copiers as long as its daemon asks, by standard input.
///
/// # Errors
///
/// If standard input is no channel of a daemon.
pub fn start_copiers(seccomp: Seccomp) -> io::Result<()> {
    let stdin = io::stdin();
    let complain = |e: io::Error| channel::send(&stdin, e.to_string().as_bytes(), &[]);
    if let Err(error) =
        process::give_up(c"rnicd-spawner").and_then(|()| confine(ThreadKind::Spawner, seccomp))
    {
        return complain(error);
    }
    channel::send(&stdin, &[DONE], &[])?;
    loop {
        let mut pid = [0; 4];
        let (len, mut passed) = channel::receive(&stdin, &mut pid)?;
        if len == 0 {
            return Ok(());
        }
        let setup = passed.pop().ok_or_else(|| Errno::MFILE.into());
        let started = setup.and_then(|s| start_copier(i32::from_le_bytes(pid), s, seccomp));
        // Passing it fails where clients of the daemon's user have left too much unread
        // (ETOOMANYREFS). That must end nobody's copier but this one, which ends with `setup`.
        let answered = started.and_then(|p| channel::send(&stdin, &[DONE], &[p.as_fd()]));
        if let Err(error) = answered {
            complain(error)?;
        }
    }
}

fn start_copier(pid: i32, setup: OwnedFd, seccomp: Seccomp) -> io::Result<OwnedFd> {
    let mut copier = program(&["copier", &pid.to_string(), seccomp.name()], setup).spawn()?;
    let opened = pidfd_open(Pid::from_child(&copier), PidfdFlags::empty());
    if opened.is_err() {
        let _ = copier.kill();
    }
    let copier = Arc::new(Mutex::new(copier));
    let waits = copier.clone();
    // Somebody has to take note of its end, or its number stays taken.
    let waiting = std::thread::Builder::new().spawn(move || waits.lock().wait());
    if let Err(error) = waiting {
        // It has nothing of a client yet, and cannot be stuck.
        let mut copier = copier.lock();
        copier.kill()?;
        copier.wait()?;
        return Err(error);
    }
    Ok(opened?)
}
