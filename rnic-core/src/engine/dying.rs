//! What many queue pairs end for: a completion queue or shared receive queue that died, and a session
//! that ends. They end some at a time, between the turns of others.

use super::complete::CQ_IS_DEAD;
use super::reason::Reason;
use super::receives::SRQ_IS_DEAD;
use super::schedule::{END_COST, Key, STEP_COST, Seat};
use super::{Engine, Shard};
use crate::device::cq::CqFault;
use crate::device::srq::SrqFault;
use crate::device::{Cq, Srq};
use crate::types::{CqId, SessionId, SrqId, Time};

/// Queue pairs that end in one step.
const ENDS: usize = 8;
/// Doorbell indices looked at in one step.
const LOOKS: usize = 512;

/// A queue that died.
#[derive(Clone, Copy)]
enum Queue {
    Completion(CqId),
    SharedReceive(SrqId),
}

/// A queue that died, with QPs of this engine still to be ended.
pub(super) struct Dying {
    queue: Queue,
    /// Its owner, whose are also the QPs that use it.
    session: SessionId,
    /// Where among his doorbell indices to go on.
    next: usize,
}

impl Dying {
    pub(super) fn of_cq(cq: &Cq) -> Self {
        Dying { queue: Queue::Completion(cq.id()), session: cq.session(), next: 0 }
    }

    pub(super) fn of_srq(srq: &Srq) -> Self {
        Dying { queue: Queue::SharedReceive(srq.id()), session: srq.session(), next: 0 }
    }
}

/// A session whose QPs end.
pub(super) struct Ending {
    session: SessionId,
    seat: Seat,
    next: usize,
}

impl Shard {
    /// The next QPs of a session, at most [`ENDS`] of those that qualify, and where to go on; nowhere
    /// if these were the last.
    fn next_qps(
        &self,
        seat: Seat,
        mut next: usize,
        mut qualifies: impl FnMut(Key) -> bool,
    ) -> (Vec<Key>, Option<usize>) {
        let mut found = Vec::new();
        for _ in 0..LOOKS {
            let Some(target) = self.sessions.target(seat, next) else { return (found, None) };
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
        let Some(dying) = self.shard.dying.pop_front() else { return false };
        let Dying { queue, session, next } = dying;
        let seat = self.shard.sessions.seat(session);
        let (found, next) = self.shard.next_qps(seat, next, |key| {
            let qp = self.qps.get(key as usize).and_then(Option::as_ref);
            qp.is_some_and(|qp| match queue {
                Queue::Completion(cq) => qp.send_cq.id() == cq || qp.recv_cq.id() == cq,
                Queue::SharedReceive(srq) => qp.rq.shared().is_some_and(|of| of.id() == srq),
            })
        });
        self.shard.schedule.charge(seat, LOOKS as i64 * STEP_COST);
        for key in found {
            self.with_key(key, |qp, shard| match queue {
                Queue::Completion(cq) => {
                    qp.fail_locally(shard, CQ_IS_DEAD, Reason::Cq(cq, CqFault::Dead));
                }
                Queue::SharedReceive(srq) => {
                    qp.fail_locally(shard, SRQ_IS_DEAD, Reason::Srq(srq, SrqFault::Dead));
                }
            });
        }
        if let Some(next) = next {
            self.shard.dying.push_back(Dying { queue, session, next });
        }
        true
    }

    /// Ends a session: its STags are off, nothing of it is looked at any more, and its QPs have no
    /// turns. They go by [`Engine::end_some`].
    pub fn close_session(&mut self, session: SessionId, now: Time) {
        self.shard.now = now;
        self.shard.stags.revoke_session(session);
        let seat = self.shard.sessions.seat(session);
        self.shard.schedule.close(seat);
        self.shard.sessions.close(seat);
        self.shard.ending.push_back(Ending { session, seat, next: 0 });
    }

    /// Whether sessions were closed whose QPs have not all gone.
    pub fn is_ending(&self) -> bool {
        !self.shard.ending.is_empty()
    }

    /// Destroys some QPs of a session that was closed: the session, when nothing is left of it.
    pub fn end_some(&mut self, now: Time) -> Option<SessionId> {
        self.shard.now = now;
        let Ending { session, seat, next } = self.shard.ending.pop_front()?;
        let (found, next) = self.shard.next_qps(seat, next, |_| true);
        for key in found {
            if let Some(id) = self.qps.get(key as usize).and_then(|qp| Some(qp.as_ref()?.id)) {
                self.destroy(id, now);
                self.shard.round -= END_COST;
            }
        }
        if let Some(next) = next {
            self.shard.ending.push_back(Ending { session, seat, next });
            return None;
        }
        // Nothing that was made for a session has no doorbell, but nothing may be left of it either.
        let qps = self.qps.iter().flatten();
        let left: Vec<_> = qps.filter(|qp| qp.session == session).map(|qp| qp.id).collect();
        for qp in left {
            self.destroy(qp, now);
        }
        self.shard.sessions.detach(seat);
        self.shard.schedule.leave(seat);
        Some(session)
    }

    /// Ends a session at once: its STags are off, its connections are aborted, nothing completes any
    /// more.
    pub fn detach_session(&mut self, session: SessionId, now: Time) {
        self.close_session(session, now);
        while self.is_ending() {
            self.end_some(now);
        }
    }
}
