//! A filter of system calls for each kind of thread.
//!
//! A thread that an attacker controls through a bug in the daemon should be able to do little: a
//! worker can move bytes between its descriptors and touch its memory, but cannot open, execute or
//! inspect anything. [`calls`] lists the system calls of each kind, [`program`] translates them to
//! BPF, and this module installs the filter from within the thread.
//!
//! Other calls are denied in three ways. A call that no library makes on its own
//! ([`calls::HOSTILE`]) ends the process, like a panic, because its state is suspect. A call newer
//! than these lists fails with `ENOSYS`, as on an older kernel, so that a newer libc uses its
//! fallback and an update of it causes no outage. All others fail with `EPERM` and are logged by
//! the kernel.

mod calls;
mod program;
#[cfg(test)]
mod tests;

use std::io;
use std::thread::JoinHandle;

use crate::config::Seccomp;
use program::{Denied, Instruction};

/// Role of a thread, which determines its system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadKind {
    /// The control loop: opens files and sockets, executes nothing.
    Control,
    /// Moves data between the descriptors and memory it is given. Opens nothing.
    Worker,
    /// Reloads the configuration: opens files for reading.
    ConfigReader,
    /// Closes descriptors and unmaps memory.
    Reaper,
    /// Writes log lines to standard error.
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

/// Returns an error unless this kernel supports the filters that `seccomp` needs.
pub fn check_available(seccomp: Seccomp) -> io::Result<()> {
    let action = match seccomp {
        Seccomp::Enforce => program::ret::KILL_PROCESS,
        Seccomp::Log => program::ret::LOG,
        Seccomp::Off => return Ok(()),
    };
    if program::ARCHITECTURE.is_none() {
        let why = "seccomp filters are not implemented for this architecture";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
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

/// Confines the calling thread permanently, and every thread and process it starts later.
pub fn confine(kind: ThreadKind, seccomp: Seccomp) -> io::Result<()> {
    let denied = match seccomp {
        Seccomp::Enforce => Denied::Refused,
        Seccomp::Log => Denied::Logged,
        Seccomp::Off => return Ok(()),
    };
    let program = program::assemble(&calls::rules_of(kind), calls::HOSTILE, denied)
        .ok_or(io::ErrorKind::Unsupported)?;
    // rustix queries these at first use, with system calls that most kinds are about to lose, and
    // would take a failure for a result (a page size of zero, a clock without vDSO).
    let _ = rustix::param::page_size();
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    install(&program)
}

/// Starts a thread that is confined before `body` runs and before this returns. Fails if the thread
/// cannot be confined.
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
        // The receiver lives until it has this result.
        let _ = tell.send(confined);
        if go {
            body();
        }
    })?;
    let confined = told.recv().map_err(|_| io::Error::other("the thread panicked"))?;
    confined.map(|()| thread)
}

fn install(program: &[Instruction]) -> io::Result<()> {
    // Required by the kernel: no set-uid program may run under a filter of an unprivileged user.
    rustix::thread::set_no_new_privs(true)?;
    let mut code: Vec<libc::sock_filter> = program.iter().map(|i| i.encoded()).collect();
    let filter = libc::sock_fprog {
        len: u16::try_from(code.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: code.as_mut_ptr(),
    };
    // Denied calls are logged. Without SPEC_ALLOW, kernels before 5.16 slow the whole thread down
    // with mitigations against speculative reads by sandboxed code. No such code runs here.
    let flags = libc::SECCOMP_FILTER_FLAG_LOG | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the kernel copies `filter` and the `len` instructions it points to, which live in
    // `code` until after the call, and writes nothing. The only effect on this thread is that
    // system calls fail, each of which has a documented failure. It touches no memory of ours.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter)
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
