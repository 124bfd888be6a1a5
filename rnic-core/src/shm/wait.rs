//! How long to look for work before sleeping: the same for clients and workers.
//!
//! A handful of looks in a row catch an answer that is already on its way; yielding then lets the
//! other side run where CPUs are few; and after some 50 microseconds without work a sleep is
//! cheaper than going on. Where CPUs are fewer than those who look (two programs and a worker, for
//! a connection inside one machine), a spin only keeps the other side from running: on two CPUs,
//! half a round trip of small Sends took 7 to 15 us with a hundred spins and 1.3 to 1.6 us without.
//! Spinning without yields was measured at 10 ms per hop.

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
}

impl Waiter {
    /// For a process that may run on `cpus` CPUs (see [`cpus`]). Call [`progress`](Self::progress)
    /// when the wait starts.
    pub fn new(cpus: usize, policy: WaitPolicy) -> Self {
        let spins = if cpus > LOOKERS { policy.spins } else { 0 };
        Waiter { policy: WaitPolicy { spins, ..policy }, spun: 0, last_work: Time(0) }
    }

    /// There was work at `now`: the patience starts anew.
    #[inline]
    pub fn progress(&mut self, now: Time) {
        self.spun = 0;
        self.last_work = now;
    }

    /// There was none.
    #[inline]
    #[must_use]
    pub fn step(&mut self, now: Time) -> Step {
        if self.spun < self.policy.spins {
            self.spun += 1;
            Step::Spin
        } else if now.since(self.last_work) < self.policy.yield_for {
            Step::Yield
        } else {
            Step::Sleep
        }
    }
}

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
