//! Connecting again where nobody listened a moment ago.
//!
//! A server that closes one listener and opens the next on the same port leaves a gap, which on the
//! network is rarely met and within one machine often. Programs that fail there fail at random
//! (perftest does so with every connection), so a refusal counts only when it has lasted.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{ConnectWanted, IdBody};

/// How long nobody may listen before that is told.
const GRACE: Duration = Duration::from_millis(500);
/// From a refusal to the next attempt.
const PAUSE: Duration = Duration::from_millis(10);

/// What an id asks its peer for, and since when.
#[derive(Clone)]
pub(super) struct Attempt {
    pub(super) wanted: ConnectWanted,
    until: Instant,
}

impl Attempt {
    pub(super) fn new(wanted: &ConnectWanted) -> Self {
        Attempt { wanted: wanted.clone(), until: Instant::now() + GRACE }
    }

    /// Whether a refusal is not worth telling yet.
    pub(super) fn may_go_on(&self) -> bool {
        Instant::now() + PAUSE < self.until
    }
}

/// Ids that are to connect again, each at its time, earliest first.
#[derive(Default)]
pub(crate) struct Retries {
    waiting: Mutex<Vec<(Instant, Weak<IdBody>)>>,
}

impl Retries {
    pub(super) fn add(&self, id: &Arc<IdBody>) {
        self.waiting.lock().push((Instant::now() + PAUSE, Arc::downgrade(id)));
    }

    /// How long until the next one is due; `None` if there is none.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        let first = self.waiting.lock().first().map(|(at, _)| *at);
        first.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Has those connect that are due.
    pub(crate) fn run(&self) {
        let now = Instant::now();
        let due: Vec<_> = self.waiting.lock().extract_if(.., |(at, _)| *at <= now).collect();
        for id in due.iter().filter_map(|(_, id)| id.upgrade()) {
            id.connect_again();
        }
    }
}
