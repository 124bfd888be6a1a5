//! Cutting short what a thread waits for in the kernel.
//!
//! Closing a TCP socket waits as long as its owner said (`SO_LINGER`), also where it is closed
//! with a packet it was passed in and nobody can look at it before. That wait ends when the thread
//! has a signal: this gives it one every moment. A file system that does not answer is not to be
//! hurried like this.

use std::io;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::Duration;

/// How long a wait lasts at most.
const PATIENCE: Duration = Duration::from_millis(1);

/// Taken by nobody else, and without effect where nobody takes it.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Interrupts the thread that made it.
#[derive(Debug)]
pub struct Interrupter {
    /// A pointer or a number, by C library; it makes this stay in its thread.
    timer: libc::timer_t,
}

impl Interrupter {
    /// For the calling thread. To be made once for each.
    ///
    /// # Errors
    ///
    /// Those of the system: timers count against `RLIMIT_SIGPENDING`.
    pub fn of_this_thread() -> io::Result<Self> {
        // SAFETY: an all-zero `sigaction` is a valid value of that C struct.
        let mut action: libc::sigaction = unsafe { zeroed() };
        action.sa_sigaction = on_signal as *const () as usize;
        // SAFETY: `action` is initialised and lives through the call; the handler touches nothing,
        // so it may run at any instant on any thread. Without SA_RESTART calls end with EINTR,
        // which everything here expects. Nobody else takes this signal.
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

    /// Does something in which no wait that a signal ends lasts longer than a moment.
    pub fn during<R>(&self, something: impl FnOnce() -> R) -> R {
        self.set(PATIENCE);
        let result = something();
        self.set(Duration::ZERO);
        result
    }

    /// Interrupts from now on at this interval, or no more.
    fn set(&self, every: Duration) {
        let every = libc::timespec { tv_sec: 0, tv_nsec: every.subsec_nanos().into() };
        let setting = libc::itimerspec { it_interval: every, it_value: every };
        // SAFETY: the timer is there until this is dropped, `setting` is initialised and lives
        // through the call, and no old setting is asked for. It fails for wrong arguments only.
        unsafe { libc::timer_settime(self.timer, 0, &raw const setting, null_mut()) };
    }
}

impl Drop for Interrupter {
    fn drop(&mut self) {
        // SAFETY: the timer was made by `of_this_thread` and is not used after this.
        unsafe { libc::timer_delete(self.timer) };
    }
}

/// That it was called is all.
extern "C" fn on_signal(_: libc::c_int) {}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn every_wait_is_cut_short_and_only_within() {
        let interrupter = Interrupter::of_this_thread().unwrap_or_else(|e| panic!("{e}"));
        let (_ours, theirs) =
            std::os::unix::net::UnixStream::pair().unwrap_or_else(|e| panic!("{e}"));
        let wait =
            |timeout: Timespec| poll(&mut [PollFd::new(&theirs, PollFlags::IN)], Some(&timeout));
        let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
        let interrupted = Err(rustix::io::Errno::INTR);
        assert_eq!(interrupter.during(|| [(); 3].map(|()| wait(minute))), [interrupted; 3]);
        // A signal may have come last between the wait and the end.
        let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        assert_eq!(wait(moment), Ok(0));
    }
}
