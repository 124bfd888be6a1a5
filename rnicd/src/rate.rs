//! Rate limits: a token bucket per key, for a bounded number of keys.
//!
//! A bucket holds as many tokens as its burst grants, and at least one. When the table is full, the
//! least recently used key is evicted, so new keys cost no further memory. New keys get full
//! buckets, which is why a client or peer must not have many keys. The module reads no clock.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use rnic_abi::types::Time;

/// Token buckets of the keys used most recently.
#[derive(Debug)]
pub struct Buckets<K> {
    capacity: usize,
    /// Size of a bucket, as the time in nanoseconds in which the rate refills it.
    burst: u64,
    asked: u64,
    entries: HashMap<K, Bucket>,
    /// Keys by their last use.
    by_use: BTreeMap<u64, K>,
}

/// Returns the key of a remote host. All addresses of an IPv6 /64 are one host.
pub fn host(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() & !u128::from(u64::MAX))),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Time at which it is full again.
    full_at: Time,
    used: u64,
}

impl<K: Copy + Eq + Hash> Buckets<K> {
    /// Creates buckets for up to `capacity` keys. Each saves up tokens for at most `burst`.
    pub fn new(capacity: usize, burst: Duration) -> Self {
        let burst = u64::try_from(burst.as_nanos()).unwrap_or(u64::MAX);
        Buckets { capacity, burst, asked: 0, entries: HashMap::new(), by_use: BTreeMap::new() }
    }

    /// Returns true if a bucket with the rate `per_second` has a token.
    pub fn has(&self, key: K, per_second: u32, now: Time) -> bool {
        let interval = interval(per_second);
        let full_at = self.entries.get(&key).map_or(now, |bucket| bucket.full_at.max(now));
        full_at.0.saturating_add(interval).saturating_sub(now.0) <= self.burst.max(interval)
    }

    /// Takes a token from a bucket with the rate `per_second`. Returns false if it is empty.
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

/// Returns the time per token in nanoseconds.
fn interval(per_second: u32) -> u64 {
    SECOND / u64::from(per_second.max(1))
}

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_grants_a_burst_then_the_rate() {
        let mut buckets = Buckets::new(4, Duration::from_secs(1));
        let start = Time(7 * SECOND);
        assert_eq!((0..100).filter(|_| buckets.take(1, 10, start)).count(), 10);
        assert!(!buckets.has(1, 10, start) && buckets.has(2, 10, start));
        // Half a second later half of the tokens are back. Another key has its own.
        let later = Time(start.0 + SECOND / 2);
        assert!(buckets.has(1, 10, later));
        assert_eq!((0..100).filter(|_| buckets.take(1, 10, later)).count(), 5);
        assert_eq!((0..100).filter(|_| buckets.take(2, 1, later)).count(), 1);
        // A long pause saves up no more than a second's worth.
        let late = Time(start.0 + 100 * SECOND);
        assert_eq!((0..100).filter(|_| buckets.take(1, 10, late)).count(), 10);
    }

    #[test]
    fn short_burst_holds_at_least_one_token() {
        let mut buckets = Buckets::new(4, Duration::from_millis(100));
        let start = Time(7 * SECOND);
        assert_eq!((0..1000).filter(|_| buckets.take(1, 100, start)).count(), 10);
        assert_eq!((0..1000).filter(|_| buckets.take(2, 2, start)).count(), 1);
        let later = Time(start.0 + SECOND / 2 - 1);
        assert!(!buckets.has(2, 2, later) && !buckets.take(2, 2, later));
        let later = Time(start.0 + SECOND / 2);
        assert!(buckets.has(2, 2, later) && buckets.take(2, 2, later));
        // The full rate is available to a key that takes each token when it arrives.
        let taken =
            (0..SECOND).step_by(5_000_000).filter(|n| buckets.take(3, 100, Time(start.0 + n)));
        assert_eq!(taken.count(), 109);
    }

    #[test]
    fn full_table_forgets_least_recent_key() {
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
