//! For how long the daemon may be without a client, and since when it is.

use std::time::Duration;

use rnic_core::types::Time;

/// The patience of a daemon with nobody.
#[derive(Debug)]
pub(super) struct Idle {
    most: Duration,
    /// Since when it has had no client.
    since: Option<Time>,
    /// It is about to end: nobody can connect any more.
    leaving: bool,
}

impl Idle {
    /// To end after so long without a client.
    pub(super) fn new(most: Duration) -> Self {
        Idle { most, since: None, leaving: false }
    }

    /// How long it may be without a client.
    pub(super) fn most(&self) -> Duration {
        self.most
    }

    /// When that is over, unless there is a client or it is over already.
    pub(super) fn deadline(&self) -> Option<Time> {
        let since = self.since.filter(|_| !self.leaving)?;
        Some(since.after(self.most))
    }

    /// Whether the daemon is about to end. It is for good.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// Whether it is from now on.
    pub(super) fn begins_to_leave(&mut self, has_clients: bool, now: Time) -> bool {
        if self.leaving {
            return false;
        }
        if has_clients {
            self.since = None;
            return false;
        }
        self.leaving = now >= self.since.get_or_insert(now).after(self.most);
        self.leaving
    }
}
