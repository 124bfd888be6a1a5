//! Signals as a descriptor, so that a loop can wait for them beside everything else.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// A signal that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Number of the signal.
    pub number: i32,
    /// Whether the kernel sent it, as a terminal's Ctrl-C is sent to a whole process group.
    pub from_kernel: bool,
}

/// Which signals are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalSet {
    /// TERM, INT and HUP: what a daemon is told.
    Daemon,
    /// Also QUIT, USR1, USR2, WINCH and CHLD: what a wrapper passes on, and its child's end.
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

/// A `signalfd`. While it is open, its signals do nothing else to this process.
pub struct Signals {
    fd: OwnedFd,
    /// The mask before, which children are to have.
    before: libc::sigset_t,
    /// SIGHUP was ignored before, as `nohup` does it.
    ignores_hangup: bool,
}

impl Signals {
    /// Takes over the signals of `set`. To be called before any thread is started: threads
    /// inherit the mask, and one without it would take the signals instead.
    pub fn take(set: SignalSet) -> io::Result<Self> {
        let mask = mask(set.numbers());
        let mut before = self::mask(&[]);
        // SAFETY: `mask` and `before` are initialised signal sets that live through the call.
        // Blocking signals touches no other memory of ours.
        let error =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const mask, &raw mut before) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: -1 asks for a new descriptor; `mask` is initialised and lives through the call.
        let fd =
            unsafe { libc::signalfd(-1, &raw const mask, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us and nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Signals { fd, before, ignores_hangup: is_ignored(libc::SIGHUP) })
    }

    /// Returns true if this process was started with SIGHUP ignored, as `nohup` starts programs.
    pub fn ignores_hangup(&self) -> bool {
        self.ignores_hangup
    }

    /// Starts a program that gets its signals as if we had never taken them, and that the kernel
    /// kills when the calling thread ends before it: to be called by the main thread. (One that is
    /// set-uid is not killed.)
    pub fn spawn_to_die_with_us(&self, command: &mut Command) -> io::Result<Child> {
        let before = self.before;
        let parent = rustix::process::getpid();
        let prepare = move || {
            // SAFETY: `before` is an initialised set owned by this closure; a null old set is
            // allowed.
            let error = unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut())
            };
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            let kill = Some(rustix::process::Signal::KILL);
            rustix::process::set_parent_process_death_signal(kill)?;
            // Whoever has another parent by now was too late to be told.
            match rustix::process::getppid() == Some(parent) {
                true => Ok(()),
                false => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            }
        };
        // SAFETY: the closure runs between fork and exec of a process with threads, where only
        // async-signal-safe functions may be called: it calls pthread_sigmask, prctl and getppid,
        // which are, and neither allocates nor locks (an io::Error from a number does neither).
        unsafe { command.pre_exec(prepare) };
        command.spawn()
    }

    /// The next signal that has arrived, if there is one.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        let len = size_of::<libc::signalfd_siginfo>();
        // SAFETY: `info` is a live buffer of exactly `len` bytes, and the descriptor is ours and
        // open.
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
        // SAFETY: it was zeroed, and every bit pattern is a valid value of this plain C struct of
        // integers.
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
    // SAFETY: kill touches no memory. The child has not been reaped, so its number is still its.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ends this process by `signal`, so that its parent sees the same end as it would have seen of a
/// child that died of it; by exit code 128 + `signal` if that signal does not end a process.
pub fn die_of(signal: i32) -> ! {
    let mask = mask(&[signal]);
    let no_core = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    // The program has dumped its core already; ours would tell nothing. Failing to say so is
    // harmless.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, no_core);
    // SAFETY: the default action is a valid disposition, `mask` is initialised and lives through
    // the call, and raising a signal in a process that is about to exit touches no memory.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const mask, std::ptr::null_mut());
        libc::raise(signal);
    }
    std::process::exit(128 + signal)
}

fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action nothing is changed; `action` is a live buffer of the type that
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
        // SAFETY: the set was initialised above; a bad number is refused with an error.
        unsafe { libc::sigaddset(mask.as_mut_ptr(), *number) };
    }
    // SAFETY: sigemptyset initialised it.
    unsafe { mask.assume_init() }
}
