//! Who takes how many of a shared queue's receives (RFC 5040 section 8.1.2, RFC 5041 section 8.3.2,
//! RFC 5042 section 6.4.2).
//!
//! A remote peer that sends more than the others leaves them without receives, so the RNIC has to
//! notice one that takes more than its fair share. The measure is the last [`Shares::sample`]
//! takings: as many as the queue has entries, but at least [`LEAST_SAMPLE`] and at most
//! [`MOST_SAMPLE`]. With `n` QPs on the queue the fair share of one is a sample / `n`; it is named
//! when it has taken more than twice that, but never for less than a quarter of the sample (with
//! many QPs most of which are idle, chance alone gives more than twice the share) and always for
//! more than three quarters (with two QPs, twice the fair share is everything). That a QP has the
//! queue to itself is not told from its peer's greed: the event says what was counted, the owner
//! knows what it expects.
//!
//! A QP that was named is named again only after it has come down to its fair share, and no queue
//! names anybody more than once a second: the peers choose how often this happens, and must not be
//! able to fill the owner's event channel with it.

use std::collections::HashMap;
use std::time::Duration;

use crate::types::{QpId, Time};

/// A QP that has taken more than its fair share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfair {
    /// The QP whose peer used them up.
    pub qp: QpId,
    /// Receives that the QP took, of the last `of_last` that were taken.
    pub taken: u32,
    /// How many receives were looked at: the last ones that any QP took.
    pub of_last: u32,
}

/// The last takings. Memory is bounded by the sample: an entry for each taking in it, and one for
/// each QP that occurs in it.
#[derive(Debug)]
pub(super) struct Shares {
    sample: u32,
    /// A ring, once it is full: the next place to be overwritten is `at`.
    takings: Vec<QpId>,
    at: usize,
    counts: HashMap<QpId, u32>,
    /// The QP named last, until it has come down to its fair share.
    blamed: Option<QpId>,
    /// Not before this time again.
    quiet_until: Time,
    named: u64,
}

impl Shares {
    pub(super) fn new(capacity: u32) -> Self {
        Shares {
            sample: capacity.clamp(LEAST_SAMPLE, MOST_SAMPLE),
            takings: Vec::new(),
            at: 0,
            counts: HashMap::new(),
            blamed: None,
            quiet_until: Time(0),
            named: 0,
        }
    }

    /// How often somebody was named.
    pub(super) fn named(&self) -> u64 {
        self.named
    }

    /// Counts a taking by one of `qps` QPs; the same QP if it is to be named for it. Nobody is
    /// before the sample is full.
    pub(super) fn record(&mut self, qp: QpId, qps: u32, now: Time) -> Option<Unfair> {
        if let Some(oldest) = self.takings.get_mut(self.at) {
            let oldest = std::mem::replace(oldest, qp);
            self.at = (self.at + 1) % self.sample as usize;
            self.forget(oldest, qps);
        } else {
            self.takings.push(qp);
            self.at = self.takings.len() % self.sample as usize;
        }
        let count = self.counts.entry(qp).or_default();
        *count += 1;
        let taken = *count;
        let full = self.takings.len() == self.sample as usize;
        if !full || self.blamed == Some(qp) || !self.is_unfair(taken, qps) {
            return None;
        }
        if now < self.quiet_until {
            return None;
        }
        self.blamed = Some(qp);
        self.quiet_until = now.after(QUIET);
        self.named += 1;
        Some(Unfair { qp, taken, of_last: self.sample })
    }

    /// A taking has left the sample.
    fn forget(&mut self, qp: QpId, qps: u32) {
        let Some(count) = self.counts.get_mut(&qp) else { return };
        *count -= 1;
        if self.blamed == Some(qp) && u64::from(*count) * u64::from(qps) <= u64::from(self.sample) {
            self.blamed = None;
        }
        if *count == 0 {
            self.counts.remove(&qp);
        }
    }

    /// Whether `taken` of a sample is more than one of `qps` QPs may take.
    //= DDP-8.3.2-5a, RDMAP-8.1.2-8
    fn is_unfair(&self, taken: u32, qps: u32) -> bool {
        let sample = u64::from(self.sample);
        let twice = 2 * sample / u64::from(qps.max(1));
        u64::from(taken) > twice.clamp(sample / 4, sample / 4 * 3)
    }
}

/// Takings over which shares are counted at least: fewer say nothing.
const LEAST_SAMPLE: u32 = 64;
/// And at most: more say nothing new, and cost memory.
const MOST_SAMPLE: u32 = 4096;
/// How long a queue names nobody after it named somebody.
const QUIET: Duration = Duration::from_secs(1);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn feed(shares: &mut Shares, takings: &[(u32, u32)], qps: u32, now: Time) -> Vec<Unfair> {
        let each = takings.iter().flat_map(|(qp, n)| (0..*n).map(|_| QpId(*qp)));
        each.filter_map(|qp| shares.record(qp, qps, now)).collect()
    }

    #[test]
    fn nobody_is_named_before_the_sample_is_full_or_within_the_share() {
        let mut shares = Shares::new(8);
        assert_eq!(feed(&mut shares, &[(1, 63)], 2, Time(0)), []);
        let named = feed(&mut shares, &[(1, 1)], 2, Time(0));
        assert_eq!(named, [Unfair { qp: QpId(1), taken: 64, of_last: 64 }]);
        let mut shares = Shares::new(8);
        let even: Vec<(u32, u32)> = (0..400).map(|n| (n % 4, 1)).collect();
        assert_eq!(feed(&mut shares, &even, 4, Time(0)), []);
        let mut shares = Shares::new(256);
        assert_eq!(feed(&mut shares, &[(1, 192), (2, 64), (1, 192), (2, 64)], 2, Time(0)), []);
    }

    #[test]
    fn the_threshold_follows_the_number_of_queue_pairs() {
        for (qps, most) in [(2, 48), (3, 42), (4, 32), (8, 16), (1000, 16)] {
            let shares = Shares::new(64);
            assert!(!shares.is_unfair(most, qps), "{qps}");
            assert!(shares.is_unfair(most + 1, qps), "{qps}");
        }
    }

    #[test]
    fn an_episode_is_told_once_and_not_more_often_than_once_a_second() {
        let mut shares = Shares::new(64);
        assert_eq!(feed(&mut shares, &[(1, 64), (1, 1000)], 2, Time(0)).len(), 1);
        // Down to the fair share, and up again within the same second.
        assert_eq!(feed(&mut shares, &[(2, 32), (1, 64)], 2, Time(SECOND - 1)).len(), 0);
        assert_eq!(feed(&mut shares, &[(1, 1)], 2, Time(SECOND)).len(), 1);
        // Another one is told of as soon as it is time.
        assert_eq!(feed(&mut shares, &[(2, 64)], 2, Time(SECOND + 5)).len(), 0);
        let named = feed(&mut shares, &[(2, 64)], 2, Time(2 * SECOND));
        assert_eq!(named.iter().map(|u| u.qp).collect::<Vec<_>>(), [QpId(2)]);
        assert_eq!(shares.named(), 3);
    }

    #[test]
    fn an_episode_lasts_until_no_more_than_the_fair_share_is_taken() {
        // A taking leaves before the next is counted: 33 of 64 are 32 for that moment.
        for (others, named_again) in [(30, 0), (31, 1)] {
            let mut shares = Shares::new(64);
            assert_eq!(feed(&mut shares, &[(1, 64)], 2, Time(0)).len(), 1);
            let again = feed(&mut shares, &[(2, others), (1, 64)], 2, Time(2 * SECOND));
            assert_eq!(again.len(), named_again, "{others} by others");
        }
    }

    #[test]
    fn memory_is_bounded_by_the_sample() {
        let mut shares = Shares::new(100);
        for n in 0..10_000 {
            shares.record(QpId(n), 1000, Time(0));
        }
        assert_eq!((shares.takings.len(), shares.counts.len()), (100, 100));
        assert!(shares.takings.capacity() <= 128);
    }
}
