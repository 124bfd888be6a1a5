//! Decides how long a client or a worker polls for work before it sleeps.
//!
//! A few polls in a row catch a reply that is already on its way. Yielding then lets the other side
//! run where CPUs are few. After some 50 microseconds without work, sleeping costs less. If polling
//! threads outnumber the CPUs (two programs and a worker, for a connection within one machine), a
//! spin only keeps the other side from running: on two CPUs, half a round trip of small Sends took
//! 7 to 15 us with a hundred spins and 1.3 to 1.6 us without. Spinning without yields was measured
//! at 10 ms per hop.
//!
//! The scheduler gives a thread that yields no priority over a compute-bound thread: each yield
//! lasts for that thread's time slice, some milliseconds. A thread that sleeps runs at once when it
//! is woken. So a yield that lasted longer than any polling thread could have taken (`CROWDED`)
//! disables yields for a while, and for twice as long if it soon recurs. During that time the
//! waiter sleeps instead of yielding.

use std::time::Duration;

use crate::types::Time;

/// Limits on polling, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitPolicy {
    /// Polls in a row before the first yield. Not used on fewer than four CPUs.
    pub spins: u32,
    /// Time after the last work during which the waiter yields.
    pub yield_for: Duration,
}

impl Default for WaitPolicy {
    fn default() -> Self {
        WaitPolicy { spins: 100, yield_for: Duration::from_micros(50) }
    }
}

/// Step to take before polling again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// `std::hint::spin_loop`.
    Spin,
    /// `std::thread::yield_now`.
    Yield,
    /// Arm the wake-up, poll once more, and sleep.
    Sleep,
}

/// State of one wait, of all waits of a worker, or of a thread that polls in a loop.
#[derive(Clone, Debug)]
pub struct Waiter {
    policy: WaitPolicy,
    spun: u32,
    last_work: Time,
    /// Start of the last yield, if its duration has not been checked yet.
    yielded: Option<Time>,
    /// End of the current or last period without yields.
    crowded_until: Time,
    /// Length of that period.
    crowded_for: Duration,
    /// Short yields since the last long one.
    short_yields: u32,
    /// Time at which the last yield ended.
    shared: Time,
}

impl Waiter {
    /// Creates a waiter for a process that may run on `cpus` CPUs (see [`cpus`]). Call
    /// [`progress`](Self::progress) when the wait starts.
    pub fn new(cpus: usize, policy: WaitPolicy) -> Self {
        let spins = if cpus > POLLERS { policy.spins } else { 0 };
        Waiter {
            policy: WaitPolicy { spins, ..policy },
            spun: 0,
            last_work: Time(0),
            yielded: None,
            crowded_until: Time(0),
            crowded_for: Duration::ZERO,
            short_yields: 0,
            shared: Time(0),
        }
    }

    /// Returns true if a busy worker that serves several users should yield before it continues,
    /// so that programs on this CPU see their completions before its time slice ends. Returns false
    /// while a compute-bound thread shares the CPU: that thread would run for milliseconds, and the
    /// scheduler already divides the CPU fairly. `at_once` is true if the worker has no work left.
    #[inline]
    #[must_use]
    pub fn shares(&mut self, now: Time, at_once: bool) -> bool {
        let due = (at_once || now.since(self.shared) >= SHARE_EVERY) && !self.is_crowded(now);
        if due {
            self.yielded = Some(now);
        }
        due
    }

    /// Returns true while yields are disabled because another thread computes on this CPU.
    #[inline]
    pub fn is_crowded(&self, now: Time) -> bool {
        now < self.crowded_until
    }

    /// Returns true while yields are disabled and for a second afterwards: a compute-bound thread
    /// that is not seen for a moment usually comes back.
    #[inline]
    pub fn is_contended(&self, now: Time) -> bool {
        self.crowded_until != Time(0) && now.since(self.crowded_until) < FORGET
    }

    /// Records work at `now` and restarts the wait.
    #[inline]
    pub fn progress(&mut self, now: Time) {
        self.check_last_yield(now);
        self.spun = 0;
        self.last_work = now;
    }

    /// Records a poll without work at `now`. Returns the step to take before the next poll.
    #[inline]
    #[must_use]
    pub fn step(&mut self, now: Time) -> Step {
        self.check_last_yield(now);
        if self.spun < self.policy.spins {
            self.spun += 1;
            Step::Spin
        } else if now.since(self.last_work) < self.policy.yield_for && !self.is_crowded(now) {
            self.yielded = Some(now);
            Step::Yield
        } else {
            Step::Sleep
        }
    }

    /// Evaluates the duration of the last yield, unless already done.
    #[inline]
    fn check_last_yield(&mut self, now: Time) {
        let Some(yielded) = self.yielded.take() else { return };
        self.shared = now;
        if now.since(yielded) >= CROWDED {
            self.disable_yields(now);
        } else {
            self.short_yields = self.short_yields.saturating_add(1);
        }
    }

    /// Disables yields, because another thread needs the CPU.
    #[cold]
    fn disable_yields(&mut self, now: Time) {
        let again = now.since(self.crowded_until) < FORGET && self.short_yields < MANY_SHORT_YIELDS;
        self.short_yields = 0;
        let longer = if again { self.crowded_for * 2 } else { Duration::ZERO };
        self.crowded_for = longer.clamp(FIRST, LAST);
        self.crowded_until = now.after(self.crowded_for);
    }
}

/// Minimum interval between two yields of a busy worker: a few turns of its users.
const SHARE_EVERY: Duration = Duration::from_micros(5);
/// A yield of at least this duration must have let a thread run that does more than poll for work.
const CROWDED: Duration = Duration::from_micros(500);
/// Shortest and longest period without yields.
const FIRST: Duration = Duration::from_millis(2);
const LAST: Duration = Duration::from_millis(256);
/// A long yield within this time after such a period doubles the next period, unless at least
/// `MANY_SHORT_YIELDS` short yields occurred in between: a program that alternates between
/// computing and communicating must not cause longer and longer periods.
const FORGET: Duration = Duration::from_secs(1);
const MANY_SHORT_YIELDS: u32 = 16;

/// Number of threads that poll for one connection within a machine.
const POLLERS: usize = 3;

/// Returns the number of CPUs that the calling thread may run on, at least 1.
pub fn cpus() -> usize {
    rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count().max(1) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(spins: u32, micros: u64) -> WaitPolicy {
        WaitPolicy { spins, yield_for: Duration::from_micros(micros) }
    }

    fn steps(waiter: &mut Waiter, from: u64, count: u64) -> Vec<Step> {
        (0..count).map(|n| waiter.step(Time(from + n * 1000))).collect()
    }

    #[test]
    fn spins_then_yields_then_sleeps() {
        use Step::{Sleep, Spin, Yield};
        let mut waiter = Waiter::new(4, policy(2, 4));
        waiter.progress(Time(7000));
        let expected = [Spin, Spin, Yield, Yield, Sleep, Sleep];
        assert_eq!(steps(&mut waiter, 7000, 6), expected);
        waiter.progress(Time(50_000));
        assert_eq!(steps(&mut waiter, 50_000, 6), expected);
    }

    #[test]
    fn no_spins_on_few_cpus() {
        for cpus in 1..=POLLERS {
            let mut waiter = Waiter::new(cpus, WaitPolicy::default());
            waiter.progress(Time(0));
            assert!(!steps(&mut waiter, 0, 200).contains(&Step::Spin), "{cpus} CPUs");
        }
    }

    #[test]
    fn long_yields_disable_yields_exponentially() {
        const US: u64 = 1000;
        const MS: u64 = 1000 * US;
        let mut waiter = Waiter::new(2, WaitPolicy::default());
        let mut now = 10_000 * MS;
        waiter.progress(Time(now));
        for _ in 0..20 {
            assert_eq!(waiter.step(Time(now)), Step::Yield);
            now += 2 * US;
        }
        // With and without work after the long yield.
        for (took_ms, work, room_ms) in
            [(3, false, 2), (1, true, 4), (4, false, 8), (4, true, 16), (4, true, 32)]
        {
            waiter.progress(Time(now));
            assert_eq!(waiter.step(Time(now)), Step::Yield);
            now += took_ms * MS;
            if work {
                waiter.progress(Time(now));
            }
            for at in [0, room_ms * MS / 2, room_ms * MS - 1] {
                assert_eq!(waiter.step(Time(now + at)), Step::Sleep, "{took_ms} {at}");
                // As after a sleep.
                waiter.progress(Time(now + at));
                assert_eq!(waiter.step(Time(now + at)), Step::Sleep);
            }
            now += room_ms * MS;
        }
        // The period has an upper limit, and short yields reset it.
        for _ in 0..10 {
            waiter.progress(Time(now));
            assert_eq!(waiter.step(Time(now)), Step::Yield);
            now += 5 * MS;
            waiter.progress(Time(now));
            let mut room = 0;
            while waiter.step(Time(now + room)) == Step::Sleep {
                room += MS;
                waiter.progress(Time(now + room));
            }
            assert!(room <= 256 * MS, "{room}");
            now += room + 2 * US;
        }
        waiter.progress(Time(now));
        now += 2000 * MS;
        waiter.progress(Time(now));
        assert_eq!(waiter.step(Time(now)), Step::Yield);
        now += MS;
        assert_eq!(waiter.step(Time(now)), Step::Sleep);
        now += 2 * MS;
        waiter.progress(Time(now));
        assert_eq!(waiter.step(Time(now)), Step::Yield);
    }

    #[test]
    fn short_yields_reset_the_back_off() {
        const US: u64 = 1000;
        let mut waiter = Waiter::new(2, WaitPolicy::default());
        let mut now = 1_000_000 * US;
        for _ in 0..20 {
            waiter.progress(Time(now));
            for _ in 0..20 {
                assert_eq!(waiter.step(Time(now)), Step::Yield);
                now += 2 * US;
            }
            // 5 ms of computing, while the worker yields.
            now += 5000 * US;
            waiter.progress(Time(now));
            assert!(waiter.is_crowded(Time(now)));
            now += 2000 * US;
            assert!(!waiter.is_crowded(Time(now)));
        }
    }

    #[test]
    fn a_busy_worker_yields_unless_crowded() {
        let us = |n: u64| Time(1_000_000_000 + n * 1000);
        let mut waiter = Waiter::new(2, WaitPolicy::default());
        assert!(waiter.shares(us(0), false));
        // The yield took 2 us.
        waiter.progress(us(2));
        assert!(!waiter.shares(us(6), false));
        assert!(waiter.shares(us(7), false));
        // This yield was so long that another thread computes: no more yields for 2 ms.
        waiter.progress(us(4007));
        assert!(!waiter.shares(us(4100), false) && !waiter.shares(us(6006), false));
        assert!(waiter.is_crowded(us(6006)) && !waiter.is_crowded(us(6007)));
        assert!(waiter.shares(us(6007), false));
    }

    #[test]
    fn contention_outlasts_a_long_yield_by_a_second() {
        let ms = |n: u64| Time(10_000_000_000 + n * 1_000_000);
        let mut waiter = Waiter::new(2, WaitPolicy::default());
        assert!(!waiter.is_contended(Time(0)) && !waiter.is_contended(ms(0)));
        assert!(waiter.shares(ms(0), true));
        waiter.progress(ms(4));
        assert!(waiter.is_contended(ms(4)) && waiter.is_crowded(ms(4)));
        // Yields are enabled again after 2 ms.
        assert!(!waiter.is_crowded(ms(6)) && waiter.is_contended(ms(1005)));
        assert!(!waiter.is_contended(ms(1006)));
    }

    #[test]
    fn a_zero_policy_sleeps_at_once() {
        let mut waiter = Waiter::new(8, policy(0, 0));
        waiter.progress(Time(5));
        assert_eq!(waiter.step(Time(5)), Step::Sleep);
    }

    #[test]
    fn at_least_one_cpu() {
        assert!(cpus() >= 1);
    }
}
