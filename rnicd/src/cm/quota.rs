//! Whose a session is, how much of the start-up of connections its user may take up, how often one
//! remote host may connect, and how many connections are taken for one user.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use rnic_core::types::{SessionId, Time};

use crate::rate::{Buckets, host};

/// Whose a session is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// User id of the session's owner.
    pub user: u32,
    /// Connections in start-up that the user may have.
    pub startups: u32,
    /// The key that says so.
    pub startups_key: String,
    /// Connections that are taken from the kernel for the user's listeners, per second.
    pub accepts_per_second: u32,
}

/// The quotas of all sessions, and how often peers connect.
#[derive(Debug)]
pub(super) struct Quotas {
    sessions: HashMap<SessionId, Quota>,
    /// By the user whose listeners they come to: no user's peers use up what others' may.
    peers: Buckets<(u32, IpAddr)>,
    /// By the user whose listeners take connections.
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

    /// The user of a session.
    pub(super) fn user(&self, session: SessionId) -> u32 {
        self.of(session).map_or(NOBODY, |quota| quota.user)
    }

    /// Whether a connection may be taken from the kernel for a session's listener.
    pub(super) fn may_accept(&self, session: SessionId, now: Time) -> bool {
        let Some(quota) = self.of(session) else { return true };
        self.accepts.has(quota.user, quota.accepts_per_second, now)
    }

    /// Counts one that was.
    pub(super) fn count_accept(&mut self, session: SessionId, now: Time) {
        if let Some(Quota { user, accepts_per_second, .. }) = self.sessions.get(&session) {
            self.accepts.take(*user, *accepts_per_second, now);
        }
    }

    /// Counts a connection of a remote host to a user's listeners; false if there were too many
    /// lately.
    pub(super) fn take_rate(&mut self, user: u32, peer: IpAddr, most: u32, now: Time) -> bool {
        self.peers.take((user, host(peer)), most, now)
    }
}

/// Whose sessions are that no quota was set for. It is the number that means no user.
const NOBODY: u32 = u32::MAX;
/// For so much of the time a user's listeners save up connections to be taken at once: that many at
/// its rate occupy the control thread for about a tenth of this.
const ACCEPT_BURST: Duration = Duration::from_millis(100);
/// Users whose rate of accepting is remembered: more than have sessions.
const USERS_REMEMBERED: usize = 4096;
/// Remote hosts, by user, whose rate is remembered.
const PEERS_REMEMBERED: usize = 4096;
