//! A filter of system calls for each kind of thread.
//!
//! A thread that has been taken over through a hole in the daemon should find little to do: a
//! worker can move bytes between descriptors it has and touch memory it has, and can open, connect,
//! run and inspect nothing. [`calls`] says who needs what, [`program`] puts it in the kernel's
//! words; here it is put in force, by the thread itself.
//!
//! What happens to other calls has three grades. A call that no library makes behind a program's
//! back ([`calls::HOSTILE`]) ends the process, as a panic does: its state is suspect. A call that
//! is younger than this list fails with `ENOSYS`, as on an older kernel, so that a newer libc takes
//! the way it has for those: its update is not an outage. All others fail with `EPERM` and leave a
//! line in the kernel's log.

mod calls;
mod program;
#[cfg(test)]
mod tests;

use std::io;
use std::thread::JoinHandle;

use crate::config::Seccomp;
use program::{Denied, Instruction};

/// What a thread is for, and so what it may ask of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadKind {
    /// The control loop: opens files and sockets, runs nothing.
    Control,
    /// Moves data between descriptors and memory it is given; opens nothing.
    Worker,
    /// Reads the configuration again: opens files for reading.
    ConfigReader,
    /// Closes descriptors and unmaps memory.
    Reaper,
    /// Writes the lines of the log to standard error.
    Log,
    /// Reads the addresses of the host's interfaces (getifaddrs(3)).
    Addresses,
}

impl ThreadKind {
    /// All kinds, in the order of their declaration.
    pub const ALL: [ThreadKind; 6] = [
        ThreadKind::Control,
        ThreadKind::Worker,
        ThreadKind::ConfigReader,
        ThreadKind::Reaper,
        ThreadKind::Log,
        ThreadKind::Addresses,
    ];
}

/// Whether this kernel has the filters that `seccomp` asks for.
pub fn check_available(seccomp: Seccomp) -> io::Result<()> {
    let action = match seccomp {
        Seccomp::Enforce => program::ret::KILL_PROCESS,
        Seccomp::Log => program::ret::LOG,
        Seccomp::Off => return Ok(()),
    };
    if program::ARCHITECTURE.is_none() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "no filters for this architecture"));
    }
    // SAFETY: the kernel reads the four bytes of `action`, a live local, and writes nothing.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_ACTION_AVAIL,
            0 as libc::c_ulong,
            &raw const action,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Confines the calling thread, and every thread and process it starts from now on, for good.
pub fn confine(kind: ThreadKind, seccomp: Seccomp) -> io::Result<()> {
    let denied = match seccomp {
        Seccomp::Enforce => Denied::Refused,
        Seccomp::Log => Denied::Logged,
        Seccomp::Off => return Ok(()),
    };
    let program = program::assemble(&calls::needed_by(kind), calls::HOSTILE, denied)
        .ok_or(io::ErrorKind::Unsupported)?;
    // rustix finds these out at first use, by system calls that most kinds are about to lose; it
    // would take failure for an answer (pages of no size, a clock that is a system call).
    let _ = rustix::param::page_size();
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    install(&program)
}

/// Starts a thread that is confined before it does anything else, and before this returns: what is
/// started so is never seen without its filter, and fails to start if it cannot have one.
pub fn spawn_confined(
    name: &str,
    kind: ThreadKind,
    seccomp: Seccomp,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let (tell, told) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let confined = confine(kind, seccomp);
        let go = confined.is_ok();
        // The spawner waits for it.
        let _ = tell.send(confined);
        if go {
            body();
        }
    })?;
    let confined = told.recv().map_err(|_| io::Error::other("the thread panicked"))?;
    confined.map(|()| thread)
}

fn install(program: &[Instruction]) -> io::Result<()> {
    // The kernel wants to know that no set-uid program will run under a filter of our making.
    rustix::thread::set_no_new_privs(true)?;
    let mut code: Vec<libc::sock_filter> = program.iter().map(|i| i.encoded()).collect();
    let filter = libc::sock_fprog {
        len: u16::try_from(code.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: code.as_mut_ptr(),
    };
    // Denied calls are logged. Without SPEC_ALLOW, kernels before 5.16 slow the whole thread down
    // to keep speculation from reading what a sandbox may not: there is no such code in here.
    let flags = libc::SECCOMP_FILTER_FLAG_LOG | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the kernel copies `filter` and the `len` instructions it points to, which live in
    // `code` until after the call, and writes nothing. What it then does to this thread is to
    // refuse system calls, each of which has a documented failure; it touches no memory of ours.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter)
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
