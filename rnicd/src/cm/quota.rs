//! Whose a session is, how much of the start-up of connections its user may take up, and how often
//! one remote host may connect.

use std::collections::HashMap;
use std::net::IpAddr;

use rnic_core::types::{SessionId, Time};

use super::startups::host;
use crate::rate::Buckets;

/// Whose a session is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Its user.
    pub user: u32,
    /// Connections in start-up that the user may have.
    pub half_open: u32,
    /// The key that says so.
    pub half_open_key: String,
}

/// The quotas of all sessions, and how often peers connect.
#[derive(Debug)]
pub(super) struct Quotas {
    sessions: HashMap<SessionId, Quota>,
    /// By the user whose listeners they come to: no user's peers use up what others' may.
    peers: Buckets<(u32, IpAddr)>,
}

impl Default for Quotas {
    fn default() -> Self {
        Quotas { sessions: HashMap::new(), peers: Buckets::new(PEERS_REMEMBERED) }
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

    /// Counts a connection of a remote host to a user's listeners; false if there were too many
    /// lately.
    pub(super) fn take_rate(&mut self, user: u32, peer: IpAddr, most: u32, now: Time) -> bool {
        self.peers.take((user, host(peer)), most, now)
    }
}

/// Whose sessions are that no quota was set for. It is the number that means no user.
const NOBODY: u32 = u32::MAX;
/// Remote hosts, by user, whose rate is remembered.
const PEERS_REMEMBERED: usize = 4096;
