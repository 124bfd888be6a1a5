//! Doorbells: which session rang for which QP, CQ or shared receive queue.
//!
//! A session that rang lately is polled; one that has been silent for [`POLL_FOR`] is told to use its
//! eventfd and is not looked at again until that fires. So a thousand idle clients cost nothing.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::schedule::Key;
use crate::abi::queue::doorbell;
use crate::device::{Cq, Srq};
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
    stalled: HashMap<u32, Stalled>,
    /// Shared receive queues by doorbell index, with the number of QPs that wait for a receive.
    held: HashMap<u32, (Arc<Srq>, u32)>,
    /// When it rang last, while it is polled.
    rang: Option<Time>,
}

/// A CQ without room.
struct Stalled {
    cq: Arc<Cq>,
    qps: BTreeSet<Key>,
}

impl Stalled {
    /// Its QPs may try again; those that fail will ask again to be woken.
    fn release(self, worker: u32, ready: &mut Vec<Key>) {
        self.cq.stop_waiting(worker);
        ready.extend(self.qps);
    }
}

/// All sessions attached to this worker.
#[derive(Default)]
pub(super) struct Sessions {
    sessions: HashMap<SessionId, Session>,
    polled: Vec<SessionId>,
}

impl Sessions {
    pub(super) fn attach(&mut self, id: SessionId, scanner: DoorbellScanner, now: Time) {
        let session = Session {
            scanner,
            targets: Vec::new(),
            stalled: HashMap::new(),
            held: HashMap::new(),
            rang: Some(now),
        };
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

    /// Forgets a QP, with the CQs it may wait for. A CQ for which it alone has waited is forgotten as
    /// well: it may go next, and its doorbell index and its memory belong to something else then.
    pub(super) fn unroute(
        &mut self,
        id: SessionId,
        index: u32,
        cqs: [&Cq; 2],
        worker: u32,
        key: Key,
    ) {
        if let Some(s) = self.sessions.get_mut(&id) {
            if let Some(t) = s.targets.get_mut(index as usize) {
                *t = None;
            }
            for cq in cqs {
                if let Some(stalled) = s.stalled.get_mut(&cq.doorbell()) {
                    stalled.qps.remove(&key);
                    if stalled.qps.is_empty() {
                        s.stalled.remove(&cq.doorbell());
                        cq.stop_waiting(worker);
                    }
                }
            }
        }
    }

    /// Remembers that a QP waits for room in a CQ.
    pub(super) fn stall(&mut self, id: SessionId, cq: &Arc<Cq>, key: Key) {
        if let Some(s) = self.sessions.get_mut(&id) {
            let new = || Stalled { cq: cq.clone(), qps: BTreeSet::new() };
            s.stalled.entry(cq.doorbell()).or_insert_with(new).qps.insert(key);
        }
    }

    /// A CQ has room again, by no doing of its client.
    pub(super) fn unstall(&mut self, cq: &Cq, worker: u32, ready: &mut Vec<Key>) {
        if let Some(stalled) =
            self.sessions.get_mut(&cq.session()).and_then(|s| s.stalled.remove(&cq.doorbell()))
        {
            stalled.release(worker, ready);
        }
    }

    /// Remembers that a QP waits for a receive of a shared queue.
    pub(super) fn hold(&mut self, id: SessionId, srq: &Arc<Srq>) {
        if let Some(s) = self.sessions.get_mut(&id) {
            s.held.entry(srq.doorbell()).or_insert_with(|| (srq.clone(), 0)).1 += 1;
        }
    }

    /// A QP waits no longer.
    pub(super) fn release(&mut self, id: SessionId, srq: &Srq) {
        if let Some(s) = self.sessions.get_mut(&id)
            && let Some((_, waiting)) = s.held.get_mut(&srq.doorbell())
        {
            *waiting -= 1;
            if *waiting == 0 {
                s.held.remove(&srq.doorbell());
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

    /// Collects the QPs that rang, whose CQ has room again, or whose shared receive queue has a
    /// receive for them, into `ready`.
    pub(super) fn scan(&mut self, now: Time, worker: u32, ready: &mut Vec<Key>) {
        let Sessions { sessions, polled } = self;
        polled.retain(|id| {
            let Some(s) = sessions.get_mut(id) else { return false };
            let Session { scanner, targets, stalled, held, rang } = s;
            let any = scanner.scan(|index| {
                if let Some(Some(key)) = targets.get(index as usize) {
                    ready.push(*key);
                } else if !stalled.is_empty()
                    && let Some(stalled) = stalled.remove(&index)
                {
                    stalled.release(worker, ready);
                } else if let Some((srq, _)) = held.get(&index) {
                    srq.ready(worker, |key| ready.push(key));
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
