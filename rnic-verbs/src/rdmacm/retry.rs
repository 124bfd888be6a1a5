//! Repeats connection requests that were refused.
//!
//! A server that closes one listener and opens the next on the same port, as perftest does for each
//! connection, is unreachable for a moment. Peers on the network rarely notice, but peers on the
//! same host often do, and programs that give up at the first refusal then fail at random. So the
//! library reports a refusal only if it persists.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::state::{IdBody, RETRY_PAUSE};

/// Ids that will connect again, ordered by due time.
#[derive(Default)]
pub(crate) struct Retries {
    waiting: Mutex<Vec<(Instant, Weak<IdBody>)>>,
}

impl Retries {
    pub(super) fn add(&self, id: &Arc<IdBody>) {
        self.waiting.lock().push((Instant::now() + RETRY_PAUSE, Arc::downgrade(id)));
    }

    /// Returns the time until the next attempt is due, or `None` if there are none.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        let first = self.waiting.lock().first().map(|(at, _)| *at);
        first.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Repeats the attempts that are due.
    pub(crate) fn run(&self) {
        let now = Instant::now();
        let due: Vec<_> = self.waiting.lock().extract_if(.., |(at, _)| *at <= now).collect();
        for id in due.iter().filter_map(|(_, id)| id.upgrade()) {
            id.connect_again();
        }
    }
}
