//! Doorbells: which session rang for which QP or CQ.
//!
//! A session that rang lately is polled; one that has been silent for [`POLL_FOR`] is told to use its
//! eventfd and is not looked at again until that fires. So a thousand idle clients cost nothing.

use std::collections::HashMap;
use std::time::Duration;

use super::schedule::Key;
use crate::abi::queue::doorbell;
use crate::shm::doorbell::DoorbellScanner;
use crate::types::{SessionId, Time};

/// How long a session is polled after it last rang.
const POLL_FOR: Duration = Duration::from_micros(200);

/// A session's doorbell page on this worker.
struct Session {
    scanner: DoorbellScanner,
    /// QP by doorbell index.
    targets: Vec<Option<Key>>,
    /// QPs that wait for room in the CQ with this doorbell index.
    stalled: HashMap<u32, Vec<Key>>,
    /// When it rang last, while it is polled.
    rang: Option<Time>,
}

/// All sessions attached to this worker.
#[derive(Default)]
pub(super) struct Sessions {
    sessions: HashMap<SessionId, Session>,
    polled: Vec<SessionId>,
}

impl Sessions {
    pub(super) fn attach(&mut self, id: SessionId, scanner: DoorbellScanner, now: Time) {
        let session =
            Session { scanner, targets: Vec::new(), stalled: HashMap::new(), rang: Some(now) };
        self.sessions.insert(id, session);
        self.polled.push(id);
    }

    pub(super) fn detach(&mut self, id: SessionId) {
        self.sessions.remove(&id);
        self.polled.retain(|s| *s != id);
    }

    /// Routes a doorbell index to a QP.
    pub(super) fn route(&mut self, id: SessionId, index: u32, key: Key) {
        if let Some(s) = self.sessions.get_mut(&id)
            && index < doorbell::INDICES
        {
            let at = index as usize;
            if s.targets.len() <= at {
                s.targets.resize(at + 1, None);
            }
            s.targets[at] = Some(key);
        }
    }

    /// Forgets a QP.
    pub(super) fn unroute(&mut self, id: SessionId, index: u32, key: Key) {
        if let Some(s) = self.sessions.get_mut(&id) {
            if let Some(t) = s.targets.get_mut(index as usize) {
                *t = None;
            }
            for waiting in s.stalled.values_mut() {
                waiting.retain(|k| *k != key);
            }
        }
    }

    /// Remembers that a QP waits for room in the CQ with doorbell index `cq`.
    pub(super) fn stall(&mut self, id: SessionId, cq: u32, key: Key) {
        if let Some(s) = self.sessions.get_mut(&id) {
            let waiting = s.stalled.entry(cq).or_default();
            if !waiting.contains(&key) {
                waiting.push(key);
            }
        }
    }

    /// The session's eventfd fired: poll it again.
    pub(super) fn rang(&mut self, id: SessionId, now: Time) {
        if let Some(s) = self.sessions.get_mut(&id) {
            if s.rang.is_none() {
                s.scanner.awake();
                self.polled.push(id);
            }
            s.rang = Some(now);
        }
    }

    /// Collects the QPs that rang, or whose CQ has room again, into `ready`.
    pub(super) fn scan(&mut self, now: Time, ready: &mut Vec<Key>) {
        let Sessions { sessions, polled } = self;
        polled.retain(|id| {
            let Some(s) = sessions.get_mut(id) else { return false };
            let Session { scanner, targets, stalled, rang } = s;
            let any = scanner.scan(|index| {
                if let Some(Some(key)) = targets.get(index as usize) {
                    ready.push(*key);
                } else if let Some(waiting) = stalled.remove(&index) {
                    ready.extend(waiting);
                }
            });
            if any {
                *rang = Some(now);
            }
            // An interval that began in the future (a clock of tests) is an interval of zero.
            let silent = rang.is_none_or(|at| now.since(at) > POLL_FOR);
            if silent && scanner.prepare_sleep() {
                *rang = None;
                return false;
            }
            true
        });
    }

    /// Puts every polled session to sleep; false if one has rung in the meantime.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        let Sessions { sessions, polled } = self;
        polled.retain(|id| {
            let Some(s) = sessions.get_mut(id) else { return false };
            let asleep = s.scanner.prepare_sleep();
            if asleep {
                s.rang = None;
            }
            !asleep
        });
        polled.is_empty()
    }
}
