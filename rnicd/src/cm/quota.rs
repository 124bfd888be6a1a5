//! Quotas of users in connection management: concurrent start-ups, connections per second from one
//! remote host, and accepted connections per second.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use rnic_abi::types::{SessionId, Time};

use crate::rate::{Buckets, host};

/// The user of a session and its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// User id of the session's owner.
    pub user: u32,
    /// Maximum connections in start-up.
    pub startups: u32,
    /// Configuration key of `startups`.
    pub startups_key: String,
    /// Connections per second that the daemon accepts for the user's listeners.
    pub accepts_per_second: u32,
}

/// Quotas of all sessions, and connection rates.
#[derive(Debug)]
pub(super) struct Quotas {
    sessions: HashMap<SessionId, Quota>,
    /// By listening user and remote host, so peers of one user do not consume another user's rate.
    peers: Buckets<(u32, IpAddr)>,
    /// By listening user.
    accepts: Buckets<u32>,
}

impl Default for Quotas {
    fn default() -> Self {
        Quotas {
            sessions: HashMap::new(),
            peers: Buckets::new(PEERS_REMEMBERED, Duration::from_secs(1)),
            accepts: Buckets::new(USERS_REMEMBERED, ACCEPT_BURST),
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

    pub(super) fn of(&self, session: SessionId) -> Option<&Quota> {
        self.sessions.get(&session)
    }

    /// Returns the user of a session.
    pub(super) fn user(&self, session: SessionId) -> u32 {
        self.of(session).map_or(NO_USER, |quota| quota.user)
    }

    /// Returns true if a connection may be accepted for a session's listener.
    pub(super) fn may_accept(&self, session: SessionId, now: Time) -> bool {
        let Some(quota) = self.of(session) else { return true };
        self.accepts.has(quota.user, quota.accepts_per_second, now)
    }

    /// Counts an accepted connection.
    pub(super) fn count_accept(&mut self, session: SessionId, now: Time) {
        if let Some(Quota { user, accepts_per_second, .. }) = self.sessions.get(&session) {
            self.accepts.take(*user, *accepts_per_second, now);
        }
    }

    /// Counts a connection of a remote host to a user's listeners. Returns false if the host is
    /// above its rate.
    pub(super) fn take_rate(&mut self, user: u32, peer: IpAddr, most: u32, now: Time) -> bool {
        self.peers.take((user, host(peer)), most, now)
    }
}

/// User ID of sessions without a quota: the kernel's invalid user ID, -1.
const NO_USER: u32 = u32::MAX;
/// Time for which an idle user's listeners save up accepts. Accepting all of them at once takes the
/// control thread about a tenth of this time.
const ACCEPT_BURST: Duration = Duration::from_millis(100);
/// Maximum users whose accept rate is tracked.
const USERS_REMEMBERED: usize = 4096;
/// Maximum pairs of user and remote host whose rate is tracked.
const PEERS_REMEMBERED: usize = 4096;
