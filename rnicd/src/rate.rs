//! How often somebody may do something: a token bucket each, for a bounded number of somebodies.
//!
//! A bucket holds what its burst grants, and one token at least. When the table is full the one who
//! asked longest ago is forgotten, so a crowd of new ones costs nobody memory; they get full
//! buckets, which is why keys are to be things that nobody has many of. It reads no clock.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use rnic_core::types::Time;

/// Token buckets, one for each key that has asked lately.
#[derive(Debug)]
pub struct Buckets<K> {
    capacity: usize,
    /// Nanoseconds that a full bucket lasts: how far ahead of its rate a key may be.
    burst: u64,
    asked: u64,
    entries: HashMap<K, Bucket>,
    /// Keys by when they asked last.
    by_use: BTreeMap<u64, K>,
}

/// The key of a remote host. The addresses of an IPv6 /64 are one host's.
pub fn host(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() & !u128::from(u64::MAX))),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// When it will be full again.
    full_at: Time,
    used: u64,
}

impl<K: Copy + Eq + Hash> Buckets<K> {
    /// Buckets for so many keys, each of which saves up what falls into it in `burst`.
    pub fn new(capacity: usize, burst: Duration) -> Self {
        let burst = u64::try_from(burst.as_nanos()).unwrap_or(u64::MAX);
        Buckets { capacity, burst, asked: 0, entries: HashMap::new(), by_use: BTreeMap::new() }
    }

    /// Whether a bucket into which `per_second` fall has a token.
    pub fn has(&self, key: K, per_second: u32, now: Time) -> bool {
        let interval = interval(per_second);
        let full_at = self.entries.get(&key).map_or(now, |bucket| bucket.full_at.max(now));
        full_at.0.saturating_add(interval).saturating_sub(now.0) <= self.burst.max(interval)
    }

    /// Takes a token of a bucket into which `per_second` fall; false if it is empty.
    pub fn take(&mut self, key: K, per_second: u32, now: Time) -> bool {
        let old = self.entries.get(&key).copied();
        if let Some(old) = old {
            self.by_use.remove(&old.used);
        } else if self.entries.len() >= self.capacity
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.entries.remove(&oldest);
        }
        let full_at = old.map_or(now, |old| old.full_at.max(now));
        let interval = interval(per_second);
        let next = Time(full_at.0.saturating_add(interval));
        let granted = next.0.saturating_sub(now.0) <= self.burst.max(interval);
        self.asked += 1;
        let bucket = Bucket { full_at: if granted { next } else { full_at }, used: self.asked };
        self.entries.insert(key, bucket);
        self.by_use.insert(self.asked, key);
        granted
    }
}

/// Nanoseconds in which one token falls.
fn interval(per_second: u32) -> u64 {
    SECOND / u64::from(per_second.max(1))
}

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_grants_what_it_says_and_then_the_rate_holds() {
        let mut buckets = Buckets::new(4, Duration::from_secs(1));
        let start = Time(7 * SECOND);
        assert_eq!((0..100).filter(|_| buckets.take(1, 10, start)).count(), 10);
        assert!(!buckets.has(1, 10, start) && buckets.has(2, 10, start));
        // Half a second later half of it has come back; another key has its own.
        let later = Time(start.0 + SECOND / 2);
        assert!(buckets.has(1, 10, later));
        assert_eq!((0..100).filter(|_| buckets.take(1, 10, later)).count(), 5);
        assert_eq!((0..100).filter(|_| buckets.take(2, 1, later)).count(), 1);
        // Long silence does not save up more than a second's worth.
        let late = Time(start.0 + 100 * SECOND);
        assert_eq!((0..100).filter(|_| buckets.take(1, 10, late)).count(), 10);
    }

    #[test]
    fn a_short_burst_saves_up_little_and_one_at_least() {
        let mut buckets = Buckets::new(4, Duration::from_millis(100));
        let start = Time(7 * SECOND);
        assert_eq!((0..1000).filter(|_| buckets.take(1, 100, start)).count(), 10);
        assert_eq!((0..1000).filter(|_| buckets.take(2, 2, start)).count(), 1);
        let later = Time(start.0 + SECOND / 2 - 1);
        assert!(!buckets.has(2, 2, later) && !buckets.take(2, 2, later));
        let later = Time(start.0 + SECOND / 2);
        assert!(buckets.has(2, 2, later) && buckets.take(2, 2, later));
        // All of the rate is there for who takes each as it falls.
        let taken =
            (0..SECOND).step_by(5_000_000).filter(|n| buckets.take(3, 100, Time(start.0 + n)));
        assert_eq!(taken.count(), 109);
    }

    #[test]
    fn a_crowd_displaces_who_asked_longest_ago_and_the_table_stays_small() {
        let mut buckets = Buckets::new(3, Duration::from_secs(1));
        for key in 0..1000 {
            assert!(buckets.take(key, 1, Time(0)));
            assert!(!buckets.take(key, 1, Time(0)));
            assert!(buckets.entries.len() <= 3 && buckets.by_use.len() == buckets.entries.len());
        }
        assert!(!buckets.take(998, 1, Time(0)), "it is still remembered");
        assert!(buckets.take(0, 1, Time(0)), "it was forgotten");
    }
}
