//! Connections in start-up that hold a descriptor and no QP: charges to users, and eviction.
//!
//! Each connection is charged to the user of the listener or of the connecting program. At the
//! limit, a new connection evicts the oldest connection from the remote host with the most
//! connections of the user with the most. The new connection already counts for its own user, so a
//! user never evicts connections of a user that has no more than itself. Connections that wait for
//! their peer are evicted before requests that wait for the user's program. Such requests are
//! evicted only for another user: the user's own new connections are rejected instead, as with a
//! full backlog.
//!
//! The sender of a message can forge its address. So a request that came as a message evicts only
//! another such request, and only of a host with more of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

use crate::rate::host;

/// The event that a connection in start-up waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// Waits for its peer: a request, a FIN, or room for a rejection.
    Peer,
    /// Waits for the listening program's decision.
    Decision,
    /// Waits for the listening program's decision, and came as a message.
    MessageDecision,
}

/// A charge. [`Startups::credit`] removes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Charge {
    user: u32,
    host: IpAddr,
    awaits: WaitsFor,
    age: u64,
}

/// All charges, by user.
#[derive(Debug, Default)]
pub(super) struct Startups {
    users: HashMap<u32, Share>,
    most: Ranking<u32>,
    /// Number of charges made so far, which is the `age` of the newest charge.
    aged: u64,
    total: usize,
}

/// Charges of one user.
#[derive(Debug, Default)]
struct Share {
    peer: HostSlots,
    decision: HostSlots,
    message: HostSlots,
}

/// Slots by host and age.
#[derive(Debug, Default)]
pub(super) struct HostSlots {
    hosts: HashMap<IpAddr, BTreeMap<u64, usize>>,
    most: Ranking<IpAddr>,
}

impl Startups {
    /// Charges a user for the connection in `slot` with this remote address.
    pub(super) fn charge(
        &mut self,
        user: u32,
        peer: IpAddr,
        awaits: WaitsFor,
        slot: usize,
    ) -> Charge {
        self.aged += 1;
        let charge = Charge { user, host: host(peer), awaits, age: self.aged };
        self.users.entry(user).or_default().line(awaits).add(&charge, slot);
        self.most.add(user);
        self.total += 1;
        charge
    }

    /// Removes a charge. A second call has no effect.
    pub(super) fn credit(&mut self, charge: Charge) {
        let user = charge.user;
        let Some(share) = self.users.get_mut(&user) else { return };
        if !share.line(charge.awaits).remove(&charge) {
            return;
        }
        self.most.subtract(user);
        self.total -= 1;
        if self.most.of(user) == 0 {
            self.users.remove(&user);
        }
    }

    /// Returns the number of charges of all users.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Returns the number of charges of a user.
    pub(super) fn of(&self, user: u32) -> usize {
        self.most.of(user)
    }

    /// Returns the slot of `user` to evict for one more connection from `peer`.
    pub(super) fn own_victim(&self, user: u32, peer: IpAddr) -> Option<usize> {
        let share = self.users.get(&user)?;
        let of_peer = share.peer.oldest_of_most(Some(host(peer)));
        of_peer.or_else(|| share.message.oldest_of_most(Some(host(peer))))
    }

    /// Returns the slot of `user` to evict for a request from `peer` that came as a message.
    pub(super) fn message_victim(&self, user: u32, peer: IpAddr) -> Option<usize> {
        self.users.get(&user)?.message.of_larger_host(peer)
    }

    /// Returns the slot, of any user, to evict for a connection of `user` from `peer`.
    pub(super) fn victim(&self, user: u32, peer: IpAddr) -> Option<usize> {
        let most = self.most.largest_with(Some(user))?;
        if most == user {
            return self.own_victim(user, peer);
        }
        let share = self.users.get(&most)?;
        let lines = [&share.peer, &share.message, &share.decision];
        lines.into_iter().find_map(|line| line.oldest_of_most(None))
    }
}

impl Share {
    fn line(&mut self, awaits: WaitsFor) -> &mut HostSlots {
        match awaits {
            WaitsFor::Peer => &mut self.peer,
            WaitsFor::Decision => &mut self.decision,
            WaitsFor::MessageDecision => &mut self.message,
        }
    }
}

impl HostSlots {
    /// Adds the slot of a charge.
    pub(super) fn add(&mut self, charge: &Charge, slot: usize) {
        self.hosts.entry(charge.host).or_default().insert(charge.age, slot);
        self.most.add(charge.host);
    }

    /// Removes the slot of a charge. Returns false if there was none.
    pub(super) fn remove(&mut self, charge: &Charge) -> bool {
        let Some(ages) = self.hosts.get_mut(&charge.host) else { return false };
        if ages.remove(&charge.age).is_none() {
            return false;
        }
        if ages.is_empty() {
            self.hosts.remove(&charge.host);
        }
        self.most.subtract(charge.host);
        true
    }

    /// Returns the oldest slot of the host with the most slots, if that host has at least two more
    /// than the host of `newcomer`.
    pub(super) fn of_larger_host(&self, newcomer: IpAddr) -> Option<usize> {
        let (count, largest) = *self.most.order.last()?;
        let slots =
            self.hosts.get(&largest).filter(|_| count > self.most.of(host(newcomer)) + 1)?;
        slots.first_key_value().map(|(_, slot)| *slot)
    }

    fn oldest_of_most(&self, newcomer: Option<IpAddr>) -> Option<usize> {
        let host = self.most.largest_with(newcomer)?;
        self.hosts.get(&host)?.first_key_value().map(|(_, slot)| *slot)
    }
}

/// Counts by key, and the keys in order of their count.
#[derive(Debug)]
struct Ranking<K> {
    counts: HashMap<K, usize>,
    order: BTreeSet<(usize, K)>,
}

impl<K> Default for Ranking<K> {
    fn default() -> Self {
        Ranking { counts: HashMap::new(), order: BTreeSet::new() }
    }
}

impl<K: Copy + Eq + Hash + Ord> Ranking<K> {
    fn of(&self, key: K) -> usize {
        self.counts.get(&key).copied().unwrap_or(0)
    }

    fn add(&mut self, key: K) {
        self.set(key, self.of(key) + 1);
    }

    fn subtract(&mut self, key: K) {
        self.set(key, self.of(key).saturating_sub(1));
    }

    fn set(&mut self, key: K, count: usize) {
        if let Some(old) = self.counts.remove(&key) {
            self.order.remove(&(old, key));
        }
        if count > 0 {
            self.counts.insert(key, count);
            self.order.insert((count, key));
        }
    }

    /// Returns the key with the highest count, counting one more for `newcomer`. Returns `newcomer`
    /// only if its count is not 0.
    fn largest_with(&self, newcomer: Option<K>) -> Option<K> {
        let (count, key) = *self.order.last()?;
        let of_newcomer = newcomer.map(|key| (self.of(key), key));
        match of_newcomer {
            Some((own @ 1.., newcomer)) if own + 1 >= count => Some(newcomer),
            _ => Some(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u32 = 1000;
    const B: u32 = 1001;

    fn peer(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    #[test]
    fn eviction_picks_top_user_top_host_oldest() {
        let mut s = Startups::default();
        for (slot, user, host) in [(0, B, 9), (1, A, 1), (2, A, 2), (3, A, 2), (4, A, 1), (5, A, 2)]
        {
            s.charge(user, peer(host), WaitsFor::Peer, slot);
        }
        assert_eq!((s.total(), s.of(A), s.of(B)), (6, 5, 1));
        assert_eq!(s.victim(B, peer(9)), Some(2));
        assert_eq!(s.victim(A, peer(3)), Some(2));
        // Including the new connection, host 1 has as many as host 2.
        assert_eq!(s.victim(A, peer(1)), Some(1));
        assert_eq!(s.own_victim(B, peer(1)), Some(0));
        assert_eq!(s.own_victim(1002, peer(1)), None);
    }

    #[test]
    fn user_does_not_evict_its_equals() {
        let mut s = Startups::default();
        for slot in 0..3 {
            s.charge(A, peer(1), WaitsFor::Peer, slot);
            s.charge(B, peer(2), WaitsFor::Peer, 10 + slot);
        }
        assert_eq!(s.victim(A, peer(1)), Some(0));
        assert_eq!(s.victim(B, peer(1)), Some(10));
        s.charge(A, peer(1), WaitsFor::Peer, 3);
        assert_eq!(s.victim(B, peer(1)), Some(10));
        s.charge(A, peer(1), WaitsFor::Peer, 4);
        assert_eq!(s.victim(B, peer(1)), Some(0));
    }

    #[test]
    fn requests_are_evicted_last_and_by_others() {
        let mut s = Startups::default();
        s.charge(A, peer(1), WaitsFor::Decision, 0);
        s.charge(A, peer(1), WaitsFor::Decision, 1);
        let silent = s.charge(A, peer(1), WaitsFor::Peer, 2);
        assert_eq!(s.victim(B, peer(1)), Some(2));
        assert_eq!(s.victim(A, peer(1)), Some(2));
        s.credit(silent);
        assert_eq!(s.victim(B, peer(1)), Some(0));
        assert_eq!((s.victim(A, peer(1)), s.own_victim(A, peer(1))), (None, None));
    }

    #[test]
    fn credited_charges_leave_no_state() {
        let mut s = Startups::default();
        let charges: Vec<_> = (0..100)
            .map(|n| s.charge(A + n % 3, peer(n as u8 % 7), WaitsFor::Peer, n as usize))
            .collect();
        for charge in &charges {
            s.credit(*charge);
            // A second credit changes nothing.
            s.credit(*charge);
        }
        assert_eq!((s.total(), s.users.len(), s.most.order.len()), (0, 0, 0));
        assert_eq!((s.most.counts.len(), s.victim(A, peer(1))), (0, None));
    }

    #[test]
    fn an_ipv6_host_is_its_network() {
        let [a, b, c] = ["2001:db8::1", "2001:db8::2:3", "2001:db8:0:1::1"]
            .map(|text| host(text.parse().expect("an address")));
        assert!(a == b && a != c);
        assert_eq!(host("::ffff:192.0.2.1".parse().expect("an address")), peer(1));
    }
}
