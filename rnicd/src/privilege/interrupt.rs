//! Interrupts a thread's waits in the kernel.
//!
//! Closing a TCP socket may wait for the time that its owner has set with `SO_LINGER`. This is also
//! true for a socket in a discarded packet, whose options cannot be changed. A signal to the thread
//! ends that wait, so a timer sends one at short intervals. This does not help with a file system
//! that does not respond.

use std::io;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::Duration;

/// Maximum duration of a wait.
const INTERVAL: Duration = Duration::from_millis(1);

/// No other code of the daemon uses this signal, and by default it is ignored.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Interrupts the thread that created it.
#[derive(Debug)]
pub struct Interrupter {
    /// A pointer or a number, depending on the C library. Keeps this type in its thread (not
    /// `Send`).
    timer: libc::timer_t,
}

impl Interrupter {
    /// Creates the interrupter of the calling thread. Must be called at most once per thread.
    ///
    /// # Errors
    ///
    /// Errors of the system calls: timers count against `RLIMIT_SIGPENDING`.
    pub fn of_this_thread() -> io::Result<Self> {
        // SAFETY: an all-zero `sigaction` is a valid value of that C struct.
        let mut action: libc::sigaction = unsafe { zeroed() };
        action.sa_sigaction = on_signal as *const () as usize;
        // SAFETY: `action` is initialised and outlives the call. The handler touches nothing, so it
        // may run at any time on any thread. Without SA_RESTART system calls end with EINTR, which
        // all code here handles. No other code uses this signal.
        if unsafe { libc::sigaction(SIGNAL, &raw const action, null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: an all-zero `sigevent` is a valid value of that C struct.
        let mut event: libc::sigevent = unsafe { zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGNAL;
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        let mut timer: libc::timer_t = null_mut();
        // SAFETY: `event` is initialised, `timer` is a live local of the right type, and both
        // outlive the call, which writes nothing else. The signal goes to this thread alone.
        let made =
            unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        if made != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Interrupter { timer })
    }

    /// Runs `something`. No interruptible wait in it lasts longer than `INTERVAL`.
    pub fn during<R>(&self, something: impl FnOnce() -> R) -> R {
        self.set(INTERVAL);
        let result = something();
        self.set(Duration::ZERO);
        result
    }

    /// Sets the interval of interruptions, or stops them if it is zero.
    fn set(&self, every: Duration) {
        let every = libc::timespec { tv_sec: 0, tv_nsec: every.subsec_nanos().into() };
        let setting = libc::itimerspec { it_interval: every, it_value: every };
        // SAFETY: the timer exists until `self` is dropped, `setting` is initialised and outlives
        // the call, and no old setting is requested. It fails only for invalid arguments.
        unsafe { libc::timer_settime(self.timer, 0, &raw const setting, null_mut()) };
    }
}

impl Drop for Interrupter {
    fn drop(&mut self) {
        // SAFETY: the timer was created by `of_this_thread` and is not used after this.
        unsafe { libc::timer_delete(self.timer) };
    }
}

/// Empty: the delivery of the signal is enough to interrupt a wait.
extern "C" fn on_signal(_: libc::c_int) {}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn waits_are_interrupted_only_within() {
        let interrupter = Interrupter::of_this_thread().unwrap_or_else(|e| panic!("{e}"));
        let (_ours, theirs) =
            std::os::unix::net::UnixStream::pair().unwrap_or_else(|e| panic!("{e}"));
        let wait =
            |timeout: Timespec| poll(&mut [PollFd::new(&theirs, PollFlags::IN)], Some(&timeout));
        let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
        let interrupted = Err(rustix::io::Errno::INTR);
        assert_eq!(interrupter.during(|| [(); 3].map(|()| wait(minute))), [interrupted; 3]);
        // A last signal may have arrived between the wait and the end.
        let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        assert_eq!(wait(moment), Ok(0));
    }
}
