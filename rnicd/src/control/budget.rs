//! CPU budgets of users on the control thread.
//!
//! A request costs its client less than the daemon. If other users have sessions, a user's requests
//! may take at most half of the control thread's time, beyond a [`BURST`]. The rest is for other
//! users, and for programs on the thread's CPU.

use std::collections::HashMap;
use std::time::Duration;

use rnic_abi::types::Time;

/// Remaining CPU time of users.
#[derive(Debug, Default)]
pub(super) struct Budgets(HashMap<u32, Budget>);

#[derive(Clone, Copy, Debug)]
struct Budget {
    /// Nanoseconds, at most [`BURST`]. Overdrawn time is negative, down to minus [`BURST`]: a user
    /// that was alone may have used all of the time for hours.
    left: i64,
    /// Time at which `left` was computed.
    at: Time,
}

impl Budgets {
    /// Charges a user for CPU time that its clients used.
    pub(super) fn spend(&mut self, user: u32, took: Duration, now: Time) {
        if !self.0.contains_key(&user) {
            self.0.retain(|_, budget| budget.at(now).left < FULL);
        }
        let budget = self.0.entry(user).or_insert(Budget { left: FULL, at: now });
        *budget = budget.at(now);
        budget.left = budget.left.saturating_sub_unsigned(took.as_nanos() as u64).max(-FULL);
    }

    /// Returns the time until which a user's requests must wait, if its budget is overdrawn.
    pub(super) fn rests_until(&self, user: u32, now: Time) -> Option<Time> {
        let left = self.0.get(&user)?.at(now).left;
        let overdrawn = u64::try_from(-left).ok().filter(|over| *over > 0)?;
        Some(now.after(Duration::from_nanos(overdrawn.saturating_mul(SHARE))))
    }
}

impl Budget {
    /// Returns the budget at a later time.
    fn at(self, now: Time) -> Budget {
        let gained = now.since(self.at).as_nanos() as u64 / SHARE;
        Budget { left: self.left.saturating_add_unsigned(gained).min(FULL), at: now }
    }
}

/// A user gets at most 1/`SHARE` of the time.
const SHARE: u64 = 2;
/// Time that a user may take at once after a quiet period: some thousand requests.
const BURST: Duration = Duration::from_millis(20);
const FULL: i64 = BURST.as_nanos() as i64;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn busy_user_gets_half_of_the_time() {
        let mut budgets = Budgets::default();
        let mut now = Time(1);
        let mut had = Duration::ZERO;
        let end = now.after(1000 * MS);
        while now < end {
            now = now.after(MS);
            had += MS;
            assert_eq!(budgets.rests_until(2, now), None);
            budgets.spend(1, MS, now);
            now = budgets.rests_until(1, now).unwrap_or(now);
        }
        assert!((500 * MS..=500 * MS + BURST).contains(&had), "{had:?}");
    }

    #[test]
    fn quiet_user_saves_up_only_one_burst() {
        for quiet in [0, 20, 40, 3_600_000] {
            let mut budgets = Budgets::default();
            let mut now = Time(1);
            budgets.spend(1, BURST + MS, now);
            assert_eq!(budgets.rests_until(1, now), Some(now.after(2 * MS)), "{quiet}");
            assert_eq!(budgets.rests_until(1, now.after(MS)), Some(now.after(2 * MS)), "{quiet}");
            assert_eq!(budgets.rests_until(1, now.after(2 * MS)), None, "{quiet}");
            now = now.after(2 * (BURST + MS) + quiet * MS);
            budgets.spend(1, BURST, now);
            assert_eq!(budgets.rests_until(1, now), None, "{quiet}");
            budgets.spend(1, MS, now);
            assert_eq!(budgets.rests_until(1, now), Some(now.after(2 * MS)), "{quiet}");
        }
    }

    #[test]
    fn overdraft_of_a_lone_user_is_bounded() {
        let mut budgets = Budgets::default();
        let mut now = Time(1);
        for _ in 0..1000 {
            now = now.after(MS);
            budgets.spend(1, MS, now);
        }
        assert_eq!(budgets.rests_until(1, now), Some(now.after(2 * BURST)));
    }

    #[test]
    fn users_with_full_budgets_are_forgotten() {
        let mut budgets = Budgets::default();
        let mut now = Time(1);
        for user in 0..1000 {
            now = now.after(MS);
            budgets.spend(user, MS / 4, now);
        }
        assert!(budgets.0.len() <= 2, "{}", budgets.0.len());
    }
}
