//! Rate limit for peers that guess STags.
//!
//! An invalid STag ends the stream, so a guesser must connect again and again. When an address has
//! used too many invalid STags on one user's connections within a minute, that user's listeners
//! reject it for the rest of the minute. Other users' listeners still accept it, so a user cannot
//! provoke guesses to block a peer for others. Each user's table is bounded, and a full table
//! evicts its oldest entry. Only a peer with more than a thousand addresses benefits from that.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use rnic_abi::types::Time;

use crate::rate::host;

/// Guesses by owner of the STags and by remote address.
#[derive(Debug)]
pub(super) struct StagGuessLimiter {
    limit: u32,
    users: HashMap<u32, Peers>,
    /// Start time of each user's oldest entry, oldest first.
    by_start: BTreeSet<(Time, u32)>,
}

/// Guesses at one user's STags.
#[derive(Debug, Default)]
struct Peers {
    /// By address: start of its minute, and number of guesses since then.
    counts: HashMap<IpAddr, (Time, u32)>,
    /// The same addresses by the start of their minute.
    by_start: BTreeSet<(Time, IpAddr)>,
}

impl StagGuessLimiter {
    pub(super) fn new(limit: u32) -> Self {
        StagGuessLimiter { limit, users: HashMap::new(), by_start: BTreeSet::new() }
    }

    /// Sets the number of guesses allowed per minute.
    pub(super) fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// Counts a guess by `peer` at a user's STags.
    pub(super) fn record(&mut self, user: u32, peer: IpAddr, now: Time) {
        let peer = host(peer);
        self.forget(now);
        let peers = self.users.entry(user).or_default();
        let oldest = peers.oldest();
        let count = peers.record(peer, now);
        if peers.oldest() != oldest {
            self.by_start.extend(peers.oldest().map(|at| (at, user)));
            oldest.map(|at| self.by_start.remove(&(at, user)));
        }
        if count == self.limit {
            tracing::warn!(
                %peer,
                user,
                "peer used {} invalid STags within a minute (limits.peer.stag_guesses_per_minute): \
                 its new connections to this user's listeners are reset until the minute is over",
                self.limit
            );
        }
    }

    /// Returns true if a user's listeners must reject an address.
    pub(super) fn rejects(&mut self, user: u32, peer: IpAddr, now: Time) -> bool {
        self.forget(now);
        let counts = self.users.get(&user).map(|peers| &peers.counts);
        counts.and_then(|c| c.get(&host(peer))).is_some_and(|(_, count)| *count >= self.limit)
    }

    /// Removes expired entries.
    fn forget(&mut self, now: Time) {
        while let Some((since, user)) = self.by_start.first().copied()
            && now.since(since) >= MINUTE
        {
            self.by_start.pop_first();
            let Some(peers) = self.users.get_mut(&user) else { continue };
            peers.forget_oldest();
            match peers.oldest() {
                Some(at) => drop(self.by_start.insert((at, user))),
                None => drop(self.users.remove(&user)),
            }
        }
    }
}

impl Peers {
    fn oldest(&self) -> Option<Time> {
        self.by_start.first().map(|(since, _)| *since)
    }

    fn record(&mut self, peer: IpAddr, now: Time) -> u32 {
        if self.counts.len() >= MAX_PEERS && !self.counts.contains_key(&peer) {
            self.forget_oldest();
        }
        let by_start = &mut self.by_start;
        let (_, count) = self.counts.entry(peer).or_insert_with(|| {
            by_start.insert((now, peer));
            (now, 0)
        });
        *count = count.saturating_add(1);
        *count
    }

    fn forget_oldest(&mut self) {
        if let Some((_, peer)) = self.by_start.pop_first() {
            self.counts.remove(&peer);
        }
    }
}

const MINUTE: Duration = Duration::from_secs(60);
/// Maximum number of addresses tracked per user.
const MAX_PEERS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const ME: u32 = 1000;
    const OTHER: u32 = 1001;

    fn peer(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn nth(n: u32) -> IpAddr {
        IpAddr::V4((0x0A00_0000 + n).into())
    }

    #[test]
    fn guesser_is_rejected_until_its_minute_ends() {
        let mut g = StagGuessLimiter::new(2);
        g.record(ME, peer("192.0.2.1"), Time(0));
        assert!(!g.rejects(ME, peer("192.0.2.1"), Time(SECOND)));
        g.record(ME, peer("::ffff:192.0.2.1"), Time(SECOND));
        assert!(g.rejects(ME, peer("192.0.2.1"), Time(59 * SECOND)));
        assert!(!g.rejects(ME, peer("192.0.2.2"), Time(59 * SECOND)));
        assert!(!g.rejects(ME, peer("192.0.2.1"), Time(60 * SECOND)));
        assert_eq!((g.users.len(), g.by_start.len()), (0, 0));
    }

    #[test]
    fn guesses_count_only_for_the_stag_owner() {
        let mut g = StagGuessLimiter::new(2);
        for _ in 0..10 {
            g.record(ME, peer("192.0.2.1"), Time(0));
        }
        g.record(OTHER, peer("192.0.2.1"), Time(1));
        assert!(g.rejects(ME, peer("192.0.2.1"), Time(2)));
        assert!(!g.rejects(OTHER, peer("192.0.2.1"), Time(2)));
        // Each user's entry expires independently.
        g.record(OTHER, peer("192.0.2.1"), Time(30 * SECOND));
        assert!(g.rejects(OTHER, peer("192.0.2.1"), Time(60 * SECOND)));
        assert_eq!((g.users.len(), g.by_start.len()), (1, 1));
        assert!(!g.rejects(OTHER, peer("192.0.2.1"), Time(61 * SECOND)));
        assert_eq!((g.users.len(), g.by_start.len()), (0, 0));
    }

    #[test]
    fn an_ipv6_host_is_its_network() {
        let mut g = StagGuessLimiter::new(2);
        g.record(ME, peer("2001:db8::1"), Time(0));
        g.record(ME, peer("2001:db8::2:3"), Time(0));
        assert!(g.rejects(ME, peer("2001:db8::4"), Time(0)));
        assert!(!g.rejects(ME, peer("2001:db8:0:1::4"), Time(0)));
    }

    #[test]
    fn full_table_forgets_only_its_users_oldest() {
        let mut g = StagGuessLimiter::new(1);
        g.record(OTHER, nth(0), Time(0));
        for n in 0..10_000 {
            g.record(ME, nth(n), Time(u64::from(n)));
        }
        let mine = &g.users[&ME];
        assert_eq!(
            (mine.counts.len(), mine.by_start.len(), g.by_start.len()),
            (MAX_PEERS, MAX_PEERS, 2)
        );
        assert!(g.rejects(ME, nth(9_999), Time(10_000)));
        assert!(!g.rejects(ME, nth(0), Time(10_000)));
        assert!(g.rejects(OTHER, nth(0), Time(10_000)));
        assert!(!g.rejects(ME, nth(9_999), Time(61 * SECOND)));
        assert_eq!((g.users.len(), g.by_start.len()), (0, 0));
    }
}
