//! The idle timeout: how long the daemon may be without a client, and the start of that time.

use std::time::Duration;

use rnic_abi::types::Time;

/// Idle timeout of the daemon.
#[derive(Debug)]
pub(super) struct Idle {
    most: Duration,
    /// Start of the time without a client.
    since: Option<Time>,
    /// The daemon is about to end and accepts no new connections.
    ending: bool,
}

impl Idle {
    /// Creates an idle timeout of `most`.
    pub(super) fn new(most: Duration) -> Self {
        Idle { most, since: None, ending: false }
    }

    pub(super) fn most(&self) -> Duration {
        self.most
    }

    /// Returns the deadline, unless there is a client or the daemon is ending.
    pub(super) fn deadline(&self) -> Option<Time> {
        let since = self.since.filter(|_| !self.ending)?;
        Some(since.after(self.most))
    }

    /// Returns true if the daemon is about to end. This is final.
    pub(super) fn is_ending(&self) -> bool {
        self.ending
    }

    /// Returns true if the daemon begins to end with this call.
    pub(super) fn begins_to_end(&mut self, has_clients: bool, now: Time) -> bool {
        if self.ending {
            return false;
        }
        if has_clients {
            self.since = None;
            return false;
        }
        self.ending = now >= self.since.get_or_insert(now).after(self.most);
        self.ending
    }
}
