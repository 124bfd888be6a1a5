//! Signals as a descriptor, so that an event loop can wait for them.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// A received signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Signal number.
    pub number: i32,
    /// True if the kernel sent it, as for Ctrl-C, which goes to a whole process group.
    pub from_kernel: bool,
}

/// A set of signals to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalSet {
    /// TERM, INT and HUP, for the daemon.
    Daemon,
    /// Also QUIT, USR1, USR2, WINCH and CHLD: signals that a wrapper forwards, and the exit of its
    /// child.
    Wrapper,
}

impl SignalSet {
    fn numbers(self) -> &'static [i32] {
        match self {
            SignalSet::Daemon => &[libc::SIGTERM, libc::SIGINT, libc::SIGHUP],
            SignalSet::Wrapper => &[
                libc::SIGTERM,
                libc::SIGINT,
                libc::SIGHUP,
                libc::SIGQUIT,
                libc::SIGUSR1,
                libc::SIGUSR2,
                libc::SIGWINCH,
                libc::SIGCHLD,
            ],
        }
    }
}

/// A `signalfd`. While it is open, its signals have no other effect on this process.
pub struct Signals {
    fd: OwnedFd,
    /// The previous signal mask, which children get.
    before: libc::sigset_t,
    /// SIGHUP was ignored before, as under `nohup`.
    ignores_hangup: bool,
}

impl Signals {
    /// Takes over the signals of `set`. Must be called before any thread starts: threads inherit
    /// the mask, and a thread without it would receive the signals.
    pub fn take(set: SignalSet) -> io::Result<Self> {
        let mask = mask(set.numbers());
        let mut before = self::mask(&[]);
        // SAFETY: `mask` and `before` are initialised signal sets that outlive the call. Blocking
        // signals touches no other memory of this process.
        let error =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const mask, &raw mut before) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: -1 requests a new descriptor. `mask` is initialised and outlives the call.
        let fd =
            unsafe { libc::signalfd(-1, &raw const mask, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us, and no other code owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Signals { fd, before, ignores_hangup: is_ignored(libc::SIGHUP) })
    }

    /// Returns true if SIGHUP was ignored when this process started, as under `nohup`.
    pub fn ignores_hangup(&self) -> bool {
        self.ignores_hangup
    }

    /// Starts a program with the original signal mask. The kernel kills the program when the
    /// calling thread ends first, so the main thread must call this. (A set-uid program is not
    /// killed.)
    pub fn spawn_with_parent_death_signal(&self, command: &mut Command) -> io::Result<Child> {
        let before = self.before;
        let parent = rustix::process::getpid();
        let prepare = move || {
            // SAFETY: `before` is an initialised set owned by this closure. A null old set is
            // allowed.
            let error = unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut())
            };
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            let kill = Some(rustix::process::Signal::KILL);
            rustix::process::set_parent_process_death_signal(kill)?;
            // If the parent has changed already, it died before the prctl took effect.
            if rustix::process::getppid() == Some(parent) {
                Ok(())
            } else {
                Err(io::Error::from_raw_os_error(libc::ESRCH))
            }
        };
        // SAFETY: the closure runs between fork and exec of a process with threads, where only
        // async-signal-safe functions may be called: it calls pthread_sigmask, prctl and getppid,
        // which are, and neither allocates nor locks (an io::Error from a number does neither).
        unsafe { command.pre_exec(prepare) };
        command.spawn()
    }

    /// Takes the next pending signal, if any.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        let len = size_of::<libc::signalfd_siginfo>();
        // SAFETY: `info` is a live buffer of exactly `len` bytes, and the descriptor is owned by
        // `self` and open.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), len) };
        if got < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        if usize::try_from(got) != Ok(len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: `info` was zeroed, and every bit pattern is a valid value of this plain C struct
        // of integers.
        let info = unsafe { info.assume_init() };
        Ok(Some(Signal {
            number: i32::try_from(info.ssi_signo).unwrap_or(0),
            from_kernel: info.ssi_code == libc::SI_KERNEL,
        }))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Sends a signal to a child that has not been waited for.
pub fn send_signal(child: &Child, signal: i32) -> io::Result<()> {
    let pid = i32::try_from(child.id()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: kill touches no memory. The child has not been reaped, so the pid is still its own.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ends this process by `signal`, so that its parent sees the same end as the child's. Ends it with
/// exit code 128 + `signal` if the signal does not end a process.
pub fn exit_by_signal(signal: i32) -> ! {
    let mask = mask(&[signal]);
    let no_core = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    // The program has dumped its core already, so ours is of no use. A failure is harmless.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, no_core);
    // SAFETY: the default action is a valid disposition, `mask` is initialised and outlives the
    // call, and raising a signal in a process that is about to exit touches no memory.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const mask, std::ptr::null_mut());
        libc::raise(signal);
    }
    std::process::exit(128 + signal)
}

fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action nothing is changed. `action` is a live buffer of the type that
    // the call fills.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: zeroes are a valid action, whether or not the call has replaced them.
    result == 0 && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}

fn mask(numbers: &[i32]) -> libc::sigset_t {
    let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the whole set it is given, and `mask` is a live set.
    unsafe { libc::sigemptyset(mask.as_mut_ptr()) };
    for number in numbers {
        // SAFETY: the set was initialised above. An invalid number is refused with an error.
        unsafe { libc::sigaddset(mask.as_mut_ptr(), *number) };
    }
    // SAFETY: sigemptyset has initialised it.
    unsafe { mask.assume_init() }
}
