//! Triggers of rules: which of the matching occasions have an effect.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::error::FaultError;
use super::words::Words;

/// Selects occasions by their number, counted from 1, and by a pseudorandom choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trigger {
    /// Time after the rule was set during which it has no effect and counts nothing.
    pub after: Duration,
    /// Only this occasion.
    nth: Option<u64>,
    /// Only the multiples of this number.
    every: Option<u64>,
    /// Probability in parts per billion.
    probability: Option<u32>,
    /// Seed of the choice. The same seed and occasions give the same faults.
    seed: u64,
    /// Maximum number of faults.
    limit: Option<u64>,
}

/// Keys of triggers, in the order of the documentation.
pub(super) const KEYS: &[&str] = &["nth", "every", "after", "probability", "seed", "limit"];

const BILLION: u32 = 1_000_000_000;

impl Trigger {
    pub(super) fn take(words: &mut Words) -> Result<Self, FaultError> {
        let every = words.number("every", 1, u64::MAX)?;
        let nth = words.parse("nth", |value| match (value.parse(), every) {
            (_, Some(_)) => Err("cannot be combined with every".to_owned()),
            (Ok(nth), None) if nth > 0 => Ok(nth),
            _ => Err("needs a whole number of at least 1".to_owned()),
        })?;
        Ok(Trigger {
            after: words.time("after")?.unwrap_or_default(),
            nth,
            every,
            probability: words.parse("probability", probability)?,
            seed: words.number("seed", 0, u64::MAX)?.unwrap_or_default(),
            limit: words.number("limit", 1, u64::MAX)?,
        })
    }

    /// Returns true if occasion `n` is selected.
    fn selects(&self, n: u64) -> bool {
        let numbered = match (self.nth, self.every) {
            (Some(nth), _) => n == nth,
            (None, Some(every)) => n.is_multiple_of(every),
            (None, None) => true,
        };
        numbered
            && self.probability.is_none_or(|parts| {
                let chosen = (u128::from(mix(self.seed ^ mix(n))) * u128::from(BILLION)) >> 64;
                chosen < parts.into()
            })
    }
}

/// Parses `0.01` or `1%`.
pub(super) fn probability(text: &str) -> Result<u32, String> {
    let (number, unit) = match text.strip_suffix('%') {
        Some(number) => (number, 100.0),
        None => (text, 1.0),
    };
    let share = number.parse().map(|number: f64| number / unit);
    match share {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(billionths(share)),
        _ => Err("needs a number from 0 to 1, or a percentage".to_owned()),
    }
}

/// Returns a share from 0 to 1 as parts per billion.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the result is from 0 to a billion"
)]
fn billionths(share: f64) -> u32 {
    (share * f64::from(BILLION)) as u32
}

/// Returns a pseudorandom number (the finaliser of SplitMix64).
fn mix(n: u64) -> u64 {
    let n = n.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    n ^ (n >> 31)
}

/// Counts the occasions and faults of a rule. Shared by the workers and the control thread.
#[derive(Debug, Default)]
pub struct Counter {
    seen: AtomicU64,
    injected: AtomicU64,
}

impl Counter {
    /// Counts an occasion. Returns true if the fault takes place.
    pub fn strikes(&self, trigger: &Trigger) -> bool {
        let n = self.seen.fetch_add(1, Relaxed) + 1;
        if !trigger.selects(n) {
            return false;
        }
        let most = trigger.limit.unwrap_or(u64::MAX);
        let within_limit = |injected| (injected < most).then_some(injected + 1);
        self.injected.fetch_update(Relaxed, Relaxed, within_limit).is_ok()
    }

    /// Counts an occasion whose fault is decided elsewhere.
    pub fn count(&self, injected: bool) {
        self.seen.fetch_add(1, Relaxed);
        self.injected.fetch_add(injected.into(), Relaxed);
    }

    /// Returns the number of matching occasions.
    pub fn seen(&self) -> u64 {
        self.seen.load(Relaxed)
    }

    /// Returns the number of faults.
    pub fn injected(&self) -> u64 {
        self.injected.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn struck(trigger: Trigger, of: u64) -> Vec<u64> {
        let counter = Counter::default();
        let struck: Vec<_> = (1..=of).filter(|_| counter.strikes(&trigger)).collect();
        assert_eq!((counter.seen(), counter.injected()), (of, struck.len() as u64));
        struck
    }

    #[test]
    fn triggers_select_by_number() {
        let all = Trigger::default();
        assert_eq!(struck(all, 3), [1, 2, 3]);
        assert_eq!(struck(Trigger { nth: Some(2), ..all }, 9), [2]);
        assert_eq!(struck(Trigger { every: Some(3), ..all }, 10), [3, 6, 9]);
        assert_eq!(struck(Trigger { limit: Some(2), ..all }, 10), [1, 2]);
        assert_eq!(struck(Trigger { every: Some(3), limit: Some(2), ..all }, 10), [3, 6]);
    }

    #[test]
    fn the_same_seed_gives_the_same_faults() {
        let one_in_ten =
            |seed| Trigger { probability: Some(100_000_000), seed, ..Trigger::default() };
        let first = struck(one_in_ten(1), 10_000);
        assert_eq!(first, struck(one_in_ten(1), 10_000));
        assert_ne!(first, struck(one_in_ten(2), 10_000));
        assert!((900..1_100).contains(&first.len()), "{}", first.len());
        let never = Trigger { probability: Some(0), ..Trigger::default() };
        let always = Trigger { probability: Some(1_000_000_000), ..Trigger::default() };
        assert_eq!((struck(never, 100).len(), struck(always, 100).len()), (0, 100));
    }

    #[test]
    fn probabilities_are_shares_or_percentages() {
        assert_eq!(probability("0.25"), Ok(250_000_000));
        assert_eq!(probability("1%"), Ok(10_000_000));
        assert_eq!((probability("0"), probability("1")), (Ok(0), Ok(1_000_000_000)));
        for bad in ["1.1", "-0.1", "", "%", "101%", "NaN", "x"] {
            assert!(probability(bad).is_err(), "{bad}");
        }
    }
}
