//! Lets other threads run while a thread polls.

use std::cell::RefCell;
use std::thread;
use std::time::{Duration, Instant};

use rnic_abi::shm::wait::{WaitPolicy, Waiter};
use rnic_abi::types::Time;
use rustix::thread::{Timespec, nanosleep};

thread_local! {
    /// Origin of the thread's times, and the durations of its yields. The policy has no effect
    /// here, because the program decides when to yield.
    static POLLING: RefCell<(Instant, Waiter)> =
        RefCell::new((Instant::now(), Waiter::new(1, WaitPolicy::default())));
}

/// Lets another thread use the CPU of a thread that polls CQs in a loop and has found them empty.
///
/// The thread yields ([`std::thread::yield_now`]). If a compute-bound thread shares the CPU, a
/// yield lasts for the time slice of that thread, some milliseconds. For 2 to 256 ms after such a
/// yield, each call of this function sleeps for 50 to 100 microseconds instead. In both cases a
/// worker of the daemon, or another thread of the program on which the completion depends, can run.
pub fn yield_now() {
    POLLING.with(|polling| {
        // Already borrowed if this call is from a signal handler that has interrupted another.
        let Ok(mut polling) = polling.try_borrow_mut() else { return thread::yield_now() };
        let (origin, waiter) = &mut *polling;
        let now = || Time(0).after(origin.elapsed());
        pause(waiter, now, thread::yield_now, nap);
    });
}

/// Sleeps for [`NAP`], or until a signal arrives. Unlike `std::thread::sleep`, not a cancellation
/// point (pthreads(7)): `ibv_poll_cq(3)` has none.
fn nap() {
    let time = Timespec { tv_sec: 0, tv_nsec: NAP.subsec_nanos().into() };
    let _ = nanosleep(&time);
}

fn pause(
    waiter: &mut Waiter,
    now: impl Fn() -> Time,
    yield_now: impl FnOnce(),
    sleep: impl FnOnce(),
) {
    if waiter.shares(now(), true) {
        yield_now();
        waiter.progress(now());
    } else {
        sleep();
    }
}

/// Sleep time. The kernel adds at most the timer slack of the thread, 50 microseconds by default.
const NAP: Duration = Duration::from_micros(50);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn sleeps_after_a_long_yield() {
        let mut waiter = Waiter::new(1, WaitPolicy::default());
        let now = Cell::new(1_000_000_000);
        let mut paused = |took: Duration| {
            let slept = Cell::new(false);
            let pass = || now.set(now.get() + took.as_nanos() as u64);
            pause(
                &mut waiter,
                || Time(now.get()),
                pass,
                || {
                    pass();
                    slept.set(true);
                },
            );
            slept.get()
        };
        let [short, long] = [Duration::from_micros(1), Duration::from_millis(4)];
        assert!(!paused(short) && !paused(short) && !paused(long));
        // Each call sleeps until 2 ms have passed.
        assert!(paused(short) && paused(Duration::from_millis(2)));
        assert!(!paused(short));
    }
}
