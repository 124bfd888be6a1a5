//! Ends the QPs of a CQ or SRQ that died, and of a session that was closed. A few QPs end at a
//! time, between the turns of others.

use super::reason::Reason;
use super::schedule::{END_COST, Key, STEP_COST, SessionSlot};
use super::state::EngineState;
use super::teardown_queue::{DeadQueue, EndingSession, Queue};
use super::{Engine, Notification};
use crate::device::cq::CqFault;
use crate::device::srq::SrqFault;
use crate::engine::numbers::cost;
use rnic_abi::types::{SessionId, Time};

/// Maximum number of QPs that end in one step.
const MAX_ENDS: usize = 8;
/// Maximum number of doorbell indices visited in one step.
const MAX_VISITS: usize = 512;

impl EngineState {
    /// Returns the next QPs of a session that qualify, at most [`MAX_ENDS`], and the doorbell index
    /// to continue at, or `None` if these were the last.
    fn next_qps(
        &self,
        slot: SessionSlot,
        mut next: usize,
        mut qualifies: impl FnMut(Key) -> bool,
    ) -> (Vec<Key>, Option<usize>) {
        let mut found = Vec::new();
        for _ in 0..MAX_VISITS {
            let Some(target) = self.doorbells.target(slot, next) else { return (found, None) };
            next += 1;
            if let Some(key) = target
                && qualifies(key)
            {
                found.push(key);
                if found.len() == MAX_ENDS {
                    break;
                }
            }
        }
        (found, Some(next))
    }
}

impl Engine {
    /// Ends some QPs of a dead CQ or SRQ. Returns true if a dead queue was visited.
    pub(super) fn end_dead_queue(&mut self) -> bool {
        let Some(dying) = self.state.dying.pop_front() else { return false };
        let DeadQueue { queue, session, next } = dying;
        let slot = self.state.doorbells.slot(session);
        let (found, next) = self.state.next_qps(slot, next, |key| {
            let qp = self.qps.get(key as usize).and_then(Option::as_ref);
            qp.is_some_and(|qp| match queue {
                Queue::Completion(cq) => qp.core.send_cq.id() == cq || qp.core.recv_cq.id() == cq,
                Queue::SharedReceive(srq) => qp.responder.srq().is_some_and(|of| of.id() == srq),
            })
        });
        self.state.schedule.charge(slot, cost(MAX_VISITS) * STEP_COST);
        for key in found {
            let reason = match queue {
                Queue::Completion(cq) => Reason::Cq(cq, CqFault::Dead),
                Queue::SharedReceive(srq) => Reason::Srq(srq, SrqFault::Dead),
            };
            self.with_key(key, |qp, engine| {
                qp.fail_locally(engine, reason);
                // A QP that has ended may be waiting for room in the CQ to flush.
                engine.wake(&mut qp.core);
            });
        }
        if let Some(next) = next {
            self.state.dying.push_back(DeadQueue { queue, session, next });
            return true;
        }
        // The resource manager moves the QPs of other workers to Error. Those of this worker have
        // ended by now, with an event that has the reason.
        self.state.report(match queue {
            Queue::Completion(cq) => Notification::CqFailed(cq),
            Queue::SharedReceive(srq) => Notification::SrqFailed(srq),
        });
        true
    }

    /// Closes a session: its STags are invalid, its doorbells are no longer polled, and its QPs get
    /// no turns. [`Engine::poll_session_end`] then destroys the QPs.
    pub fn close_session(&mut self, session: SessionId, now: Time) {
        self.state.now = now;
        // A worker that stops closes all sessions, also those that are ending.
        if self.state.ending.iter().any(|ending| ending.session == session) {
            return;
        }
        self.place_held(None);
        self.state.stags.revoke_session(session);
        let slot = self.state.doorbells.slot(session);
        self.state.schedule.close(slot);
        self.state.doorbells.close(slot);
        self.state.ending.push_back(EndingSession { session, slot, next: 0 });
    }

    /// Returns true while a closed session still has QPs.
    pub fn is_ending(&self) -> bool {
        !self.state.ending.is_empty()
    }

    /// Destroys some QPs of a closed session. Returns the session once nothing of it remains.
    pub fn poll_session_end(&mut self, now: Time) -> Option<SessionId> {
        self.state.now = now;
        let EndingSession { session, slot, next } = self.state.ending.pop_front()?;
        let (found, next) = self.state.next_qps(slot, next, |_| true);
        for key in found {
            if let Some(id) = self.qps.get(key as usize).and_then(|qp| Some(qp.as_ref()?.core.id)) {
                self.destroy(id, now);
                self.state.round -= END_COST;
            }
        }
        if let Some(next) = next {
            self.state.ending.push_back(EndingSession { session, slot, next });
            return None;
        }
        // QPs without a doorbell are not expected, but nothing of the session may remain.
        let qps = self.qps.iter().flatten();
        let left: Vec<_> =
            qps.filter(|qp| qp.core.session == session).map(|qp| qp.core.id).collect();
        for qp in left {
            self.destroy(qp, now);
        }
        self.state.doorbells.detach(slot);
        self.state.schedule.leave(slot);
        Some(session)
    }

    /// Ends a session at once: its STags are invalid, its connections are aborted, and none of its
    /// requests and receives complete.
    pub fn detach_session(&mut self, session: SessionId, now: Time) {
        self.close_session(session, now);
        while self.is_ending() {
            self.poll_session_end(now);
        }
    }
}
