//! What many queue pairs end for: a completion queue or shared receive queue that died, and a
//! session that ends. They end some at a time, between the turns of others.

use super::Engine;
use super::dying::{DyingQueue, EndingSession, Queue};
use super::reason::Reason;
use super::schedule::{END_COST, Key, STEP_COST, SessionSlot};
use super::state::EngineState;
use crate::device::cq::CqFault;
use crate::device::srq::SrqFault;
use crate::engine::numbers::cost;
use crate::types::{SessionId, Time};

/// Queue pairs that end in one step.
const ENDS: usize = 8;
/// Doorbell indices looked at in one step.
const LOOKS: usize = 512;

impl EngineState {
    /// The next QPs of a session, at most [`ENDS`] of those that qualify, and where to go on;
    /// nowhere if these were the last.
    fn next_qps(
        &self,
        seat: SessionSlot,
        mut next: usize,
        mut qualifies: impl FnMut(Key) -> bool,
    ) -> (Vec<Key>, Option<usize>) {
        let mut found = Vec::new();
        for _ in 0..LOOKS {
            let Some(target) = self.doorbells.target(seat, next) else { return (found, None) };
            next += 1;
            if let Some(key) = target
                && qualifies(key)
            {
                found.push(key);
                if found.len() == ENDS {
                    break;
                }
            }
        }
        (found, Some(next))
    }
}

impl Engine {
    /// Ends some QPs of a queue that died; whether there were any to look at.
    pub(super) fn end_dying(&mut self) -> bool {
        let Some(dying) = self.state.dying.pop_front() else { return false };
        let DyingQueue { queue, session, next } = dying;
        let seat = self.state.doorbells.seat(session);
        let (found, next) = self.state.next_qps(seat, next, |key| {
            let qp = self.qps.get(key as usize).and_then(Option::as_ref);
            qp.is_some_and(|qp| match queue {
                Queue::Completion(cq) => qp.core.send_cq.id() == cq || qp.core.recv_cq.id() == cq,
                Queue::SharedReceive(srq) => qp.responder.srq().is_some_and(|of| of.id() == srq),
            })
        });
        self.state.schedule.charge(seat, cost(LOOKS) * STEP_COST);
        for key in found {
            let reason = match queue {
                Queue::Completion(cq) => Reason::Cq(cq, CqFault::Dead),
                Queue::SharedReceive(srq) => Reason::Srq(srq, SrqFault::Dead),
            };
            self.with_key(key, |qp, engine| {
                qp.fail_locally(engine, reason);
                // One that has ended may wait for room there, to flush.
                engine.wake(&mut qp.core);
            });
        }
        if let Some(next) = next {
            self.state.dying.push_back(DyingQueue { queue, session, next });
        }
        true
    }

    /// Ends a session: its STags are off, nothing of it is looked at any more, and its QPs have no
    /// turns. They go by [`Engine::poll_session_end`].
    pub fn close_session(&mut self, session: SessionId, now: Time) {
        self.state.now = now;
        self.state.stags.revoke_session(session);
        let seat = self.state.doorbells.seat(session);
        self.state.schedule.close(seat);
        self.state.doorbells.close(seat);
        self.state.ending.push_back(EndingSession { session, seat, next: 0 });
    }

    /// Whether sessions were closed whose QPs have not all gone.
    pub fn is_ending(&self) -> bool {
        !self.state.ending.is_empty()
    }

    /// Destroys some QPs of a session that was closed: the session, when nothing is left of it.
    pub fn poll_session_end(&mut self, now: Time) -> Option<SessionId> {
        self.state.now = now;
        let EndingSession { session, seat, next } = self.state.ending.pop_front()?;
        let (found, next) = self.state.next_qps(seat, next, |_| true);
        for key in found {
            if let Some(id) = self.qps.get(key as usize).and_then(|qp| Some(qp.as_ref()?.core.id)) {
                self.destroy(id, now);
                self.state.round -= END_COST;
            }
        }
        if let Some(next) = next {
            self.state.ending.push_back(EndingSession { session, seat, next });
            return None;
        }
        // Nothing that was made for a session has no doorbell, but nothing may be left of it
        // either.
        let qps = self.qps.iter().flatten();
        let left: Vec<_> =
            qps.filter(|qp| qp.core.session == session).map(|qp| qp.core.id).collect();
        for qp in left {
            self.destroy(qp, now);
        }
        self.state.doorbells.detach(seat);
        self.state.schedule.leave(seat);
        Some(session)
    }

    /// Ends a session at once: its STags are off, its connections are aborted, nothing completes
    /// any more.
    pub fn detach_session(&mut self, session: SessionId, now: Time) {
        self.close_session(session, now);
        while self.is_ending() {
            self.poll_session_end(now);
        }
    }
}
