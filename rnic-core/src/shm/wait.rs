//! How long to look for work before sleeping: the same for clients and workers.
//!
//! A handful of looks in a row catch an answer that is already on its way; yielding then lets the
//! other side run where CPUs are few; and after some 50 microseconds without work a sleep is
//! cheaper than going on. Where CPUs are fewer than those who look (two programs and a worker, for
//! a connection inside one machine), a spin only keeps the other side from running: on two CPUs,
//! half a round trip of small Sends took 7 to 15 us with a hundred spins and 1.3 to 1.6 us without.
//! Spinning without yields was measured at 10 ms per hop.
//!
//! Who yields all the time has no claim on the CPU: if somebody computes there, each yield lasts as
//! long as the scheduler lets him run, some milliseconds. Who sleeps has one: woken, it runs at
//! once. So a yield that lasted longer than any of those who look could have taken (`CROWDED`) ends
//! yielding for a while, and for longer each time that it happens again at once; until then it is
//! sleep at the first empty look.

use std::time::Duration;

use crate::types::Time;

/// The numbers, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitPolicy {
    /// Looks in a row before the first yield; none on fewer than four CPUs.
    pub spins: u32,
    /// How long after the last work yields go on.
    pub yield_for: Duration,
}

impl Default for WaitPolicy {
    fn default() -> Self {
        WaitPolicy { spins: 100, yield_for: Duration::from_micros(50) }
    }
}

/// What to do before looking for work again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// `std::hint::spin_loop`.
    Spin,
    /// `std::thread::yield_now`.
    Yield,
    /// Arm whatever wakes us, look once more, and sleep.
    Sleep,
}

/// One wait, or a worker's whole life of waits.
#[derive(Clone, Debug)]
pub struct Waiter {
    policy: WaitPolicy,
    spun: u32,
    last_work: Time,
    /// When the yield began that may still be going on.
    yielded: Option<Time>,
    /// Until when there are no yields, and how long that was in all.
    crowded_until: Time,
    crowded_for: Duration,
    /// Yields since the last one that took long.
    short_yields: u32,
    /// When the last yield was over.
    shared: Time,
}

impl Waiter {
    /// For a process that may run on `cpus` CPUs (see [`cpus`]). Call [`progress`](Self::progress)
    /// when the wait starts.
    pub fn new(cpus: usize, policy: WaitPolicy) -> Self {
        let spins = if cpus > LOOKERS { policy.spins } else { 0 };
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

    /// For a busy worker that serves several users: whether to yield before it goes on, so that
    /// programs on this CPU see soon what was done for them, and not when its slice is over. Not
    /// where somebody computes: he would have the CPU for milliseconds, and the scheduler knows
    /// what is fair between him and the worker. With `at_once` the worker has nothing better to do.
    #[inline]
    #[must_use]
    pub fn shares(&mut self, now: Time, at_once: bool) -> bool {
        let due = (at_once || now.since(self.shared) >= SHARE_EVERY) && !self.is_crowded(now);
        if due {
            self.yielded = Some(now);
        }
        due
    }

    /// Whether somebody computes on this CPU, so that there are no yields for now.
    #[inline]
    pub fn is_crowded(&self, now: Time) -> bool {
        now < self.crowded_until
    }

    /// There was work at `now`: the patience starts anew.
    #[inline]
    pub fn progress(&mut self, now: Time) {
        self.look_back(now);
        self.spun = 0;
        self.last_work = now;
    }

    /// There was no work at `now`: what to do before the next look.
    #[inline]
    #[must_use]
    pub fn step(&mut self, now: Time) -> Step {
        self.look_back(now);
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

    /// What the last yield, if there was one, says about others on this CPU.
    #[inline]
    fn look_back(&mut self, now: Time) {
        let Some(yielded) = self.yielded.take() else { return };
        self.shared = now;
        if now.since(yielded) >= CROWDED {
            self.make_room(now);
        } else {
            self.short_yields = self.short_yields.saturating_add(1);
        }
    }

    /// Somebody else wants the CPU.
    #[cold]
    fn make_room(&mut self, now: Time) {
        let again = now.since(self.crowded_until) < FORGET && self.short_yields < ALONE;
        self.short_yields = 0;
        let longer = if again { self.crowded_for * 2 } else { Duration::ZERO };
        self.crowded_for = longer.clamp(FIRST, LAST);
        self.crowded_until = now.after(self.crowded_for);
    }
}

/// How long a busy worker goes on between two yields: a few turns of its users.
const SHARE_EVERY: Duration = Duration::from_micros(5);
/// A yield that takes this long has made room for more than another who looks for work.
const CROWDED: Duration = Duration::from_micros(500);
/// How long there are no yields, the first time and at most.
const FIRST: Duration = Duration::from_millis(2);
const LAST: Duration = Duration::from_millis(256);
/// How long after that another such yield counts as the same crowd, if there were fewer short ones
/// in between than this: a program that computes and communicates by turns is not a crowd.
const FORGET: Duration = Duration::from_secs(1);
const ALONE: u32 = 16;

/// Threads that look for work on behalf of one connection inside a machine.
const LOOKERS: usize = 3;

/// CPUs that the calling thread may run on, at least 1.
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
    fn nobody_spins_on_fewer_cpus_than_look() {
        for cpus in 1..=LOOKERS {
            let mut waiter = Waiter::new(cpus, WaitPolicy::default());
            waiter.progress(Time(0));
            assert!(!steps(&mut waiter, 0, 200).contains(&Step::Spin), "{cpus} CPUs");
        }
    }

    #[test]
    fn a_yield_that_took_long_makes_room_for_a_while_and_for_longer_each_time() {
        const US: u64 = 1000;
        const MS: u64 = 1000 * US;
        let mut waiter = Waiter::new(2, WaitPolicy::default());
        let mut now = 10_000 * MS;
        waiter.progress(Time(now));
        for _ in 0..20 {
            assert_eq!(waiter.step(Time(now)), Step::Yield);
            now += 2 * US;
        }
        // Whether or not there is work after the long yield.
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
        // It has an upper end, and is forgotten when yields are short.
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
    fn a_program_that_computes_now_and_then_makes_no_longer_room_each_time() {
        const US: u64 = 1000;
        let mut waiter = Waiter::new(2, WaitPolicy::default());
        let mut now = 1_000_000 * US;
        for _ in 0..20 {
            waiter.progress(Time(now));
            for _ in 0..20 {
                assert_eq!(waiter.step(Time(now)), Step::Yield);
                now += 2 * US;
            }
            // It computes for 5 ms, while the worker yields.
            now += 5000 * US;
            waiter.progress(Time(now));
            assert!(waiter.is_crowded(Time(now)));
            now += 2000 * US;
            assert!(!waiter.is_crowded(Time(now)));
        }
    }

    #[test]
    fn who_is_busy_for_several_users_yields_in_between_unless_somebody_computes() {
        let us = |n: u64| Time(1_000_000_000 + n * 1000);
        let mut waiter = Waiter::new(2, WaitPolicy::default());
        assert!(waiter.shares(us(0), false));
        // The yield took 2 us.
        waiter.progress(us(2));
        assert!(!waiter.shares(us(6), false));
        assert!(waiter.shares(us(7), false));
        // This one took so long that somebody else computes: no more for 2 ms.
        waiter.progress(us(4007));
        assert!(!waiter.shares(us(4100), false) && !waiter.shares(us(6006), false));
        assert!(waiter.is_crowded(us(6006)) && !waiter.is_crowded(us(6007)));
        assert!(waiter.shares(us(6007), false));
    }

    #[test]
    fn a_policy_without_patience_sleeps_at_once() {
        let mut waiter = Waiter::new(8, policy(0, 0));
        waiter.progress(Time(5));
        assert_eq!(waiter.step(Time(5)), Step::Sleep);
    }

    #[test]
    fn there_is_a_cpu_to_run_on() {
        assert!(cpus() >= 1);
    }
}
