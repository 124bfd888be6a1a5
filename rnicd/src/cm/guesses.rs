//! Peers that try one STag after the other.
//!
//! A wrong STag ends the stream, so whoever guesses has to connect again and again. An address that
//! has named too many within a minute is turned away for the rest of it. The table is bounded:
//! when it is full the oldest minute is forgotten, which at worst forgives a guesser that has
//! thousands of addresses and would need no forgiveness.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use rnic_core::types::Time;

/// Wrong STags by address.
#[derive(Debug)]
pub(super) struct Guesses {
    limit: u32,
    /// Since when, and how many.
    peers: HashMap<IpAddr, (Time, u32)>,
    /// The same by age.
    ages: BTreeSet<(Time, IpAddr)>,
}

impl Guesses {
    pub(super) fn new(limit: u32) -> Self {
        Guesses { limit, peers: HashMap::new(), ages: BTreeSet::new() }
    }

    /// How many a minute may have from now on.
    pub(super) fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// Counts one.
    pub(super) fn note(&mut self, peer: IpAddr, now: Time) {
        let peer = network(peer);
        self.forget(now);
        if self.peers.len() >= MOST && !self.peers.contains_key(&peer) {
            self.forget_oldest();
        }
        let ages = &mut self.ages;
        let (_, count) = self.peers.entry(peer).or_insert_with(|| {
            ages.insert((now, peer));
            (now, 0)
        });
        *count = count.saturating_add(1);
        if *count == self.limit {
            tracing::warn!(
                %peer,
                "limits.peer.stag_guesses_per_minute = {} wrong STags: new connections from there are \
                 reset until the minute is over",
                self.limit
            );
        }
    }

    /// Whether an address has guessed too often.
    pub(super) fn turns_away(&mut self, peer: IpAddr, now: Time) -> bool {
        self.forget(now);
        self.peers.get(&network(peer)).is_some_and(|(_, count)| *count >= self.limit)
    }

    /// Drops minutes that are over.
    fn forget(&mut self, now: Time) {
        while self.ages.first().is_some_and(|(since, _)| now.since(*since) >= MINUTE) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, peer)) = self.ages.pop_first() {
            self.peers.remove(&peer);
        }
    }
}

/// What one peer is: an IPv4 address, or the IPv6 network in which a host chooses its addresses.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V4(v4) => IpAddr::V4(v4),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6) >> 64 << 64)),
    }
}

const MINUTE: Duration = Duration::from_secs(60);
/// Addresses remembered at once.
const MOST: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn peer(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn an_address_is_turned_away_for_the_rest_of_its_minute() {
        let mut g = Guesses::new(2);
        g.note(peer("192.0.2.1"), Time(0));
        assert!(!g.turns_away(peer("192.0.2.1"), Time(SECOND)));
        g.note(peer("::ffff:192.0.2.1"), Time(SECOND));
        assert!(g.turns_away(peer("192.0.2.1"), Time(59 * SECOND)));
        assert!(!g.turns_away(peer("192.0.2.2"), Time(59 * SECOND)));
        assert!(!g.turns_away(peer("192.0.2.1"), Time(60 * SECOND)));
        assert_eq!((g.peers.len(), g.ages.len()), (0, 0));
    }

    #[test]
    fn an_ipv6_host_is_its_network() {
        let mut g = Guesses::new(2);
        g.note(peer("2001:db8::1"), Time(0));
        g.note(peer("2001:db8::2:3"), Time(0));
        assert!(g.turns_away(peer("2001:db8::4"), Time(0)));
        assert!(!g.turns_away(peer("2001:db8:0:1::4"), Time(0)));
    }

    #[test]
    fn the_table_is_bounded_and_keeps_the_newest() {
        let mut g = Guesses::new(1);
        let nth = |n: u32| IpAddr::V4((0x0A00_0000 + n).into());
        for n in 0..10_000 {
            g.note(nth(n), Time(u64::from(n)));
        }
        assert_eq!((g.peers.len(), g.ages.len()), (MOST, MOST));
        assert!(g.turns_away(nth(9_999), Time(10_000)));
        assert!(!g.turns_away(nth(0), Time(10_000)));
    }
}
