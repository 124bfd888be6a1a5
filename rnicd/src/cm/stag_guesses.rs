//! Peers that try one STag after the other.
//!
//! A wrong STag ends the stream, so whoever guesses has to connect again and again. An address that
//! has named too many STags of one user's within a minute is turned away by that user's listeners
//! for the rest of it, and by nobody else's: what a user's own connections are made to guess is his
//! affair alone. Each user's table is bounded: when it is full his oldest minute is forgotten,
//! which at worst forgives a guesser that has a thousand addresses and would need no forgiveness.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use rnic_core::types::Time;

use crate::rate::host;

/// Wrong STags, by the user whose STags were meant and by address.
#[derive(Debug)]
pub(super) struct StagGuessLimiter {
    limit: u32,
    users: HashMap<u32, Peers>,
    /// When which user's oldest minute began, oldest first.
    ages: BTreeSet<(Time, u32)>,
}

/// Those at one user's.
#[derive(Debug, Default)]
struct Peers {
    /// Since when, and how many.
    counts: HashMap<IpAddr, (Time, u32)>,
    /// The same by age.
    ages: BTreeSet<(Time, IpAddr)>,
}

impl StagGuessLimiter {
    pub(super) fn new(limit: u32) -> Self {
        StagGuessLimiter { limit, users: HashMap::new(), ages: BTreeSet::new() }
    }

    /// How many a minute may have from now on.
    pub(super) fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// Counts one at a user's STags.
    pub(super) fn note(&mut self, user: u32, peer: IpAddr, now: Time) {
        let peer = host(peer);
        self.forget(now);
        let peers = self.users.entry(user).or_default();
        let oldest = peers.oldest();
        let count = peers.note(peer, now);
        if peers.oldest() != oldest {
            self.ages.extend(peers.oldest().map(|at| (at, user)));
            oldest.map(|at| self.ages.remove(&(at, user)));
        }
        if count == self.limit {
            tracing::warn!(
                %peer,
                user,
                "limits.peer.stag_guesses_per_minute = {} wrong STags: new connections from there \
                 to listeners of this user are reset until the minute is over",
                self.limit
            );
        }
    }

    /// Whether an address has guessed too often to be let in by a user's listeners.
    pub(super) fn turns_away(&mut self, user: u32, peer: IpAddr, now: Time) -> bool {
        self.forget(now);
        let counts = self.users.get(&user).map(|peers| &peers.counts);
        counts.and_then(|c| c.get(&host(peer))).is_some_and(|(_, count)| *count >= self.limit)
    }

    /// Drops minutes that are over.
    fn forget(&mut self, now: Time) {
        while let Some((since, user)) = self.ages.first().copied()
            && now.since(since) >= MINUTE
        {
            self.ages.pop_first();
            let Some(peers) = self.users.get_mut(&user) else { continue };
            peers.forget_oldest();
            match peers.oldest() {
                Some(at) => drop(self.ages.insert((at, user))),
                None => drop(self.users.remove(&user)),
            }
        }
    }
}

impl Peers {
    fn oldest(&self) -> Option<Time> {
        self.ages.first().map(|(since, _)| *since)
    }

    fn note(&mut self, peer: IpAddr, now: Time) -> u32 {
        if self.counts.len() >= MOST && !self.counts.contains_key(&peer) {
            self.forget_oldest();
        }
        let ages = &mut self.ages;
        let (_, count) = self.counts.entry(peer).or_insert_with(|| {
            ages.insert((now, peer));
            (now, 0)
        });
        *count = count.saturating_add(1);
        *count
    }

    fn forget_oldest(&mut self) {
        if let Some((_, peer)) = self.ages.pop_first() {
            self.counts.remove(&peer);
        }
    }
}

const MINUTE: Duration = Duration::from_secs(60);
/// Addresses remembered at once, for each user.
const MOST: usize = 1024;

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
    fn an_address_is_turned_away_for_the_rest_of_its_minute() {
        let mut g = StagGuessLimiter::new(2);
        g.note(ME, peer("192.0.2.1"), Time(0));
        assert!(!g.turns_away(ME, peer("192.0.2.1"), Time(SECOND)));
        g.note(ME, peer("::ffff:192.0.2.1"), Time(SECOND));
        assert!(g.turns_away(ME, peer("192.0.2.1"), Time(59 * SECOND)));
        assert!(!g.turns_away(ME, peer("192.0.2.2"), Time(59 * SECOND)));
        assert!(!g.turns_away(ME, peer("192.0.2.1"), Time(60 * SECOND)));
        assert_eq!((g.users.len(), g.ages.len()), (0, 0));
    }

    #[test]
    fn guesses_at_one_users_stags_are_that_users_affair() {
        let mut g = StagGuessLimiter::new(2);
        for _ in 0..10 {
            g.note(ME, peer("192.0.2.1"), Time(0));
        }
        g.note(OTHER, peer("192.0.2.1"), Time(1));
        assert!(g.turns_away(ME, peer("192.0.2.1"), Time(2)));
        assert!(!g.turns_away(OTHER, peer("192.0.2.1"), Time(2)));
        // Each minute ends by itself.
        g.note(OTHER, peer("192.0.2.1"), Time(30 * SECOND));
        assert!(g.turns_away(OTHER, peer("192.0.2.1"), Time(60 * SECOND)));
        assert_eq!((g.users.len(), g.ages.len()), (1, 1));
        assert!(!g.turns_away(OTHER, peer("192.0.2.1"), Time(61 * SECOND)));
        assert_eq!((g.users.len(), g.ages.len()), (0, 0));
    }

    #[test]
    fn an_ipv6_host_is_its_network() {
        let mut g = StagGuessLimiter::new(2);
        g.note(ME, peer("2001:db8::1"), Time(0));
        g.note(ME, peer("2001:db8::2:3"), Time(0));
        assert!(g.turns_away(ME, peer("2001:db8::4"), Time(0)));
        assert!(!g.turns_away(ME, peer("2001:db8:0:1::4"), Time(0)));
    }

    #[test]
    fn a_users_table_is_bounded_keeps_the_newest_and_displaces_nobody_elses() {
        let mut g = StagGuessLimiter::new(1);
        g.note(OTHER, nth(0), Time(0));
        for n in 0..10_000 {
            g.note(ME, nth(n), Time(u64::from(n)));
        }
        let mine = &g.users[&ME];
        assert_eq!((mine.counts.len(), mine.ages.len(), g.ages.len()), (MOST, MOST, 2));
        assert!(g.turns_away(ME, nth(9_999), Time(10_000)));
        assert!(!g.turns_away(ME, nth(0), Time(10_000)));
        assert!(g.turns_away(OTHER, nth(0), Time(10_000)));
        assert!(!g.turns_away(ME, nth(9_999), Time(61 * SECOND)));
        assert_eq!((g.users.len(), g.ages.len()), (0, 0));
    }
}
