//! How much of the control thread's time a user may have.
//!
//! A question costs whoever asks less than whoever answers. Where others have sessions as well, a
//! user's requests are carried out for at most half of the time, after a [`BURST`]; the rest of it
//! is for others, and for programs on the CPU that the thread is on.

use std::collections::HashMap;
use std::time::Duration;

use rnic_core::types::Time;

/// What users have left of their time.
#[derive(Debug, Default)]
pub(super) struct Budgets(HashMap<u32, Budget>);

#[derive(Clone, Copy, Debug)]
struct Budget {
    /// Nanoseconds, at most [`BURST`]; what was overdrawn is below zero, as much at most: while he
    /// was alone he may have had all of the time for hours.
    left: i64,
    /// When it was that much.
    at: Time,
}

impl Budgets {
    /// What a user's clients wanted has just had a CPU for so long.
    pub(super) fn spend(&mut self, user: u32, took: Duration, now: Time) {
        if !self.0.contains_key(&user) {
            self.0.retain(|_, budget| budget.at(now).left < FULL);
        }
        let budget = self.0.entry(user).or_insert(Budget { left: FULL, at: now });
        *budget = budget.at(now);
        budget.left = budget.left.saturating_sub_unsigned(took.as_nanos() as u64).max(-FULL);
    }

    /// When a user's requests are to be carried out again, if that is not now.
    pub(super) fn rests_until(&self, user: u32, now: Time) -> Option<Time> {
        let left = self.0.get(&user)?.at(now).left;
        let overdrawn = u64::try_from(-left).ok().filter(|over| *over > 0)?;
        Some(now.after(Duration::from_nanos(overdrawn.saturating_mul(SHARE))))
    }
}

impl Budget {
    /// What it is later.
    fn at(self, now: Time) -> Budget {
        let gained = now.since(self.at).as_nanos() as u64 / SHARE;
        Budget { left: self.left.saturating_add_unsigned(gained).min(FULL), at: now }
    }
}

/// One part in so many of the time is a user's.
const SHARE: u64 = 2;
/// What who was quiet may have at once: some thousand requests.
const BURST: Duration = Duration::from_millis(20);
const FULL: i64 = BURST.as_nanos() as i64;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn who_always_asks_has_half_of_the_time_and_others_all_of_theirs() {
        let mut budgets = Budgets::default();
        let (mut now, mut had) = (Time(1), Duration::ZERO);
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
    fn who_was_quiet_has_a_burst_and_no_more_however_long_he_was() {
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
    fn who_had_all_of_the_time_while_he_was_alone_does_not_repay_all_of_it() {
        let mut budgets = Budgets::default();
        let mut now = Time(1);
        for _ in 0..1000 {
            now = now.after(MS);
            budgets.spend(1, MS, now);
        }
        assert_eq!(budgets.rests_until(1, now), Some(now.after(2 * BURST)));
    }

    #[test]
    fn users_who_have_all_of_it_are_forgotten() {
        let mut budgets = Budgets::default();
        let mut now = Time(1);
        for user in 0..1000 {
            now = now.after(MS);
            budgets.spend(user, MS / 4, now);
        }
        assert!(budgets.0.len() <= 2, "{}", budgets.0.len());
    }
}
