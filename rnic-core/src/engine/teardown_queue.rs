//! Dead queues and closed sessions with QPs still to be ended.

use super::schedule::SessionSlot;
use crate::device::{Cq, Srq};
use rnic_abi::types::{CqId, SessionId, SrqId};

/// A queue that died.
#[derive(Clone, Copy)]
pub(super) enum Queue {
    Completion(CqId),
    SharedReceive(SrqId),
}

/// A queue that died, with QPs of this engine still to be ended.
pub(super) struct DeadQueue {
    pub queue: Queue,
    /// Session that owns the queue and the QPs that use it.
    pub session: SessionId,
    /// Doorbell index of the session to continue at.
    pub next: usize,
}

impl DeadQueue {
    pub(super) fn of_cq(cq: &Cq) -> Self {
        DeadQueue { queue: Queue::Completion(cq.id()), session: cq.session(), next: 0 }
    }

    pub(super) fn of_srq(srq: &Srq) -> Self {
        DeadQueue { queue: Queue::SharedReceive(srq.id()), session: srq.session(), next: 0 }
    }
}

/// A closed session with QPs still to be ended.
pub(super) struct EndingSession {
    pub session: SessionId,
    pub slot: SessionSlot,
    pub next: usize,
}
