//! The shares of QPs in the receives of an SRQ (RFC 5040 section 8.1.2, RFC 5041 section 8.3.2, RFC
//! 5042 section 6.4.3.1).
//!
//! A peer that sends more than the others can leave their QPs without receives, so the RNIC must
//! detect a QP that takes more than its fair share. The measure is a sample of the last receives
//! taken: as many as the queue has entries, but at least [`MIN_SAMPLE`] and at most [`MAX_SAMPLE`].
//! If `n` QPs use the queue, the fair share of each is 1/`n` of the sample. A QP is reported when
//! it has taken more than twice that, with two exceptions: never for a quarter of the sample or
//! less (with many mostly idle QPs, chance alone gives more than twice the share), and always for
//! more than three quarters (with two QPs, twice the fair share is everything). The only active QP
//! cannot be distinguished from a QP with a greedy peer. The event contains the counts, because
//! only the owner knows which traffic is normal.
//!
//! A reported QP is reported again only after it has dropped to its fair share, and each queue
//! reports at most once per second: the peers control how often this happens, and must not be able
//! to fill the owner's event channel.

use std::collections::HashMap;
use std::time::Duration;

use rnic_abi::types::{QpId, Time};

/// A QP that has taken more than its fair share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfair {
    /// The QP that took the receives.
    pub qp: QpId,
    /// Number of receives that the QP took, of the last `of_last`.
    pub taken: u32,
    /// Size of the sample: number of the last receives taken by any QP.
    pub of_last: u32,
}

/// The last receives taken. The sample bounds the memory: one entry for each receive and one for
/// each QP in it.
#[derive(Debug)]
pub(super) struct Shares {
    sample: u32,
    /// Takers of the receives in the sample. When full, a ring whose next element to overwrite is
    /// at `at`.
    takers: Vec<QpId>,
    at: usize,
    counts: HashMap<QpId, u32>,
    /// The QP reported last, until it has dropped to its fair share.
    reported: Option<QpId>,
    /// Time before which nothing is reported.
    quiet_until: Time,
    reports: u64,
}

impl Shares {
    pub(super) fn new(capacity: u32) -> Self {
        Shares {
            sample: capacity.clamp(MIN_SAMPLE, MAX_SAMPLE),
            takers: Vec::new(),
            at: 0,
            counts: HashMap::new(),
            reported: None,
            quiet_until: Time(0),
            reports: 0,
        }
    }

    /// Returns the number of reports.
    pub(super) fn reports(&self) -> u64 {
        self.reports
    }

    /// Counts a receive taken by one of `qps` QPs. Returns a report if one is due.
    pub(super) fn record(&mut self, qp: QpId, qps: u32, now: Time) -> Option<Unfair> {
        if let Some(oldest) = self.takers.get_mut(self.at) {
            let oldest = std::mem::replace(oldest, qp);
            self.at = (self.at + 1) % self.sample as usize;
            self.forget(oldest, qps);
        } else {
            self.takers.push(qp);
            self.at = self.takers.len() % self.sample as usize;
        }
        let count = self.counts.entry(qp).or_default();
        *count += 1;
        let taken = *count;
        let full = self.takers.len() == self.sample as usize;
        if !full || self.reported == Some(qp) || !self.is_unfair(taken, qps) {
            return None;
        }
        if now < self.quiet_until {
            return None;
        }
        self.reported = Some(qp);
        self.quiet_until = now.after(QUIET);
        self.reports += 1;
        Some(Unfair { qp, taken, of_last: self.sample })
    }

    /// Removes a receive from the sample.
    fn forget(&mut self, qp: QpId, qps: u32) {
        let Some(count) = self.counts.get_mut(&qp) else { return };
        *count -= 1;
        if self.reported == Some(qp) && u64::from(*count) * u64::from(qps) <= u64::from(self.sample)
        {
            self.reported = None;
        }
        if *count == 0 {
            self.counts.remove(&qp);
        }
    }

    /// Returns true if `taken` receives of a sample are more than one of `qps` QPs may take.
    //= DDP-8.3.2-5a, RDMAP-8.1.2-8
    fn is_unfair(&self, taken: u32, qps: u32) -> bool {
        let sample = u64::from(self.sample);
        let twice = 2 * sample / u64::from(qps.max(1));
        u64::from(taken) > twice.clamp(sample / 4, sample / 4 * 3)
    }
}

/// Minimum size of a sample. A smaller sample is not significant.
const MIN_SAMPLE: u32 = 64;
/// Maximum size of a sample. A larger sample costs memory and adds no information.
const MAX_SAMPLE: u32 = 4096;
/// Minimum time between two reports of a queue.
const QUIET: Duration = Duration::from_secs(1);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn feed(shares: &mut Shares, takers: &[(u32, u32)], qps: u32, now: Time) -> Vec<Unfair> {
        let each = takers.iter().flat_map(|(qp, n)| (0..*n).map(|_| QpId(*qp)));
        each.filter_map(|qp| shares.record(qp, qps, now)).collect()
    }

    #[test]
    fn no_report_within_the_fair_share() {
        let mut shares = Shares::new(8);
        assert_eq!(feed(&mut shares, &[(1, 63)], 2, Time(0)), []);
        let reports = feed(&mut shares, &[(1, 1)], 2, Time(0));
        assert_eq!(reports, [Unfair { qp: QpId(1), taken: 64, of_last: 64 }]);
        let mut shares = Shares::new(8);
        let even: Vec<(u32, u32)> = (0..400).map(|n| (n % 4, 1)).collect();
        assert_eq!(feed(&mut shares, &even, 4, Time(0)), []);
        let mut shares = Shares::new(256);
        assert_eq!(feed(&mut shares, &[(1, 192), (2, 64), (1, 192), (2, 64)], 2, Time(0)), []);
    }

    #[test]
    fn the_threshold_depends_on_the_number_of_qps() {
        for (qps, most) in [(2, 48), (3, 42), (4, 32), (8, 16), (1000, 16)] {
            let shares = Shares::new(64);
            assert!(!shares.is_unfair(most, qps), "{qps}");
            assert!(shares.is_unfair(most + 1, qps), "{qps}");
        }
    }

    #[test]
    fn at_most_one_report_per_second() {
        let mut shares = Shares::new(64);
        assert_eq!(feed(&mut shares, &[(1, 64), (1, 1000)], 2, Time(0)).len(), 1);
        // Drops to the fair share, and rises again within the same second.
        assert_eq!(feed(&mut shares, &[(2, 32), (1, 64)], 2, Time(SECOND - 1)).len(), 0);
        assert_eq!(feed(&mut shares, &[(1, 1)], 2, Time(SECOND)).len(), 1);
        // Another QP is reported as soon as the time has passed.
        assert_eq!(feed(&mut shares, &[(2, 64)], 2, Time(SECOND + 5)).len(), 0);
        let reports = feed(&mut shares, &[(2, 64)], 2, Time(2 * SECOND));
        assert_eq!(reports.iter().map(|u| u.qp).collect::<Vec<_>>(), [QpId(2)]);
        assert_eq!(shares.reports(), 3);
    }

    #[test]
    fn a_report_needs_a_drop_to_the_fair_share() {
        // A receive leaves the sample before the next is counted: 33 of 64 are 32 at that moment.
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
        assert_eq!((shares.takers.len(), shares.counts.len()), (100, 100));
        assert!(shares.takers.capacity() <= 128);
    }
}
