//! What many queue pairs end for: a queue that died, and a session that is over.

use super::schedule::SessionSlot;
use crate::device::{Cq, Srq};
use crate::types::{CqId, SessionId, SrqId};

/// A queue that died.
#[derive(Clone, Copy)]
pub(super) enum Queue {
    Completion(CqId),
    SharedReceive(SrqId),
}

/// A queue that died, with QPs of this engine still to be ended.
pub(super) struct DyingQueue {
    pub queue: Queue,
    /// Its owner, whose are also the QPs that use it.
    pub session: SessionId,
    /// Where among his doorbell indices to go on.
    pub next: usize,
}

impl DyingQueue {
    pub(super) fn of_cq(cq: &Cq) -> Self {
        DyingQueue { queue: Queue::Completion(cq.id()), session: cq.session(), next: 0 }
    }

    pub(super) fn of_srq(srq: &Srq) -> Self {
        DyingQueue { queue: Queue::SharedReceive(srq.id()), session: srq.session(), next: 0 }
    }
}

/// A session whose QPs end.
pub(super) struct EndingSession {
    pub session: SessionId,
    pub seat: SessionSlot,
    pub next: usize,
}
