//! Actions on ids that the event thread takes after a delay.
//!
//! One action repeats a connection request that was refused. A server that closes a listener and
//! opens another on the same port, as perftest does for each connection, is unreachable for a
//! moment. Peers on the network rarely notice, but peers on the same host often do, and programs
//! that give up at the first refusal then fail at random. So the library reports a refusal only if
//! it persists.
//!
//! The other action reports that a connection of an RC or UC QP has left the timewait state.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::state::{IdBody, RETRY_PAUSE};

/// An action on an id.
#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    /// Repeats the connection request.
    ConnectAgain,
    /// Reports the end of the timewait state.
    EndTimewait,
}

/// Actions that are not due yet.
#[derive(Default)]
pub(crate) struct Delays {
    waiting: Mutex<Vec<Delayed>>,
}

struct Delayed {
    due: Instant,
    id: Weak<IdBody>,
    action: Action,
}

impl Delays {
    /// Adds an action on an id. Must be called by the event thread, which determines the next due
    /// time only between events.
    pub(super) fn add(&self, id: &Arc<IdBody>, action: Action) {
        let delay = match action {
            Action::ConnectAgain => RETRY_PAUSE,
            Action::EndTimewait => TIMEWAIT,
        };
        let id = Arc::downgrade(id);
        self.waiting.lock().push(Delayed { due: Instant::now() + delay, id, action });
    }

    /// Returns the time until the next action is due, or `None` if no action is queued.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        let first = self.waiting.lock().iter().map(|delayed| delayed.due).min();
        first.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Takes the actions that are due, except on destroyed ids.
    pub(crate) fn run(&self) {
        let now = Instant::now();
        let due: Vec<_> = self.waiting.lock().extract_if(.., |one| one.due <= now).collect();
        for Delayed { id, action, .. } in due {
            let Some(id) = id.upgrade() else { continue };
            match action {
                Action::ConnectAgain => id.connect_again(),
                Action::EndTimewait => id.end_timewait(),
            }
        }
    }
}

/// Time for which packets of an ended connection may still arrive. The kernel derives the same time
/// from the packet lifetime of RoCE: 4.096 us times 2 to the power of 17.
const TIMEWAIT: Duration = Duration::from_micros((4096 << 17) / 1000);
