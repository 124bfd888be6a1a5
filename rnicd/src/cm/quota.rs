//! How much of the start-up of connections one user's listeners and one remote host may take up.
//!
//! A user with too many connections that have said nothing loses the oldest of them, so that another
//! user's do not have to give way. Whoever connects too often is not listened to for a while.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};

use rnic_core::types::{SessionId, Time};

use crate::rate::Buckets;

/// Whose a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Its user.
    pub user: u32,
    /// Connections to the user's listeners that may be without a complete request.
    pub half_open: u32,
}

/// The quotas of all sessions, and what is used of them.
#[derive(Debug)]
pub(super) struct Quotas {
    sessions: HashMap<SessionId, Quota>,
    /// Connections of each user that may give way, by age.
    half_open: HashMap<u32, BTreeSet<u64>>,
    /// Users by the ages of their connections.
    owners: HashMap<u64, u32>,
    peers: Buckets<IpAddr>,
}

impl Default for Quotas {
    fn default() -> Self {
        Quotas {
            sessions: HashMap::new(),
            half_open: HashMap::new(),
            owners: HashMap::new(),
            peers: Buckets::new(PEERS_REMEMBERED),
        }
    }
}

impl Quotas {
    pub(super) fn set(&mut self, session: SessionId, quota: Quota) {
        self.sessions.insert(session, quota);
    }

    pub(super) fn forget(&mut self, session: SessionId) {
        self.sessions.remove(&session);
    }

    /// A connection to a listener of a session may give way from now on.
    pub(super) fn enter(&mut self, age: u64, session: SessionId) {
        if let Some(quota) = self.sessions.get(&session) {
            self.half_open.entry(quota.user).or_default().insert(age);
            self.owners.insert(age, quota.user);
        }
    }

    /// It is gone, or may no longer.
    pub(super) fn leave(&mut self, age: u64) {
        let Some(user) = self.owners.remove(&age) else { return };
        if let Some(ages) = self.half_open.get_mut(&user) {
            ages.remove(&age);
            if ages.is_empty() {
                self.half_open.remove(&user);
            }
        }
    }

    /// The connection that gives way to one more of this session's user, and the limit that makes
    /// it.
    pub(super) fn oldest_too_many(&self, session: SessionId) -> Option<(u64, usize)> {
        let quota = self.sessions.get(&session)?;
        let limit = quota.half_open as usize;
        let ages = self.half_open.get(&quota.user).filter(|ages| ages.len() >= limit)?;
        ages.first().map(|age| (*age, limit))
    }

    /// Counts a connection of a remote host; false if there were too many lately.
    pub(super) fn take_rate(&mut self, peer: IpAddr, per_second: u32, now: Time) -> bool {
        self.peers.take(host(peer), per_second, now)
    }
}

/// The addresses that one host may have are one: an IPv6 host has a whole /64.
fn host(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() & !u128::from(u64::MAX))),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// Remote hosts whose rate is remembered.
const PEERS_REMEMBERED: usize = 4096;
