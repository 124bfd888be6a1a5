//! What every part of a queue pair may ask: who it is, its counters, its completion queues, and how
//! much of its turn is left.

use std::sync::Arc;

use super::schedule::{Key, SessionSlot};
use crate::device::memory::Target;
use crate::device::stag::{Principal, RemoteFault, StagTable};
use crate::device::{Cq, QpShared};
use crate::types::{Access, PdId, QpId, SessionId, Stag};

/// Who a queue pair is, and its turn.
pub(super) struct QpCore {
    pub key: Key,
    pub id: QpId,
    pub session: SessionId,
    /// Where its session stands in the schedule.
    pub seat: SessionSlot,
    pub pd: PdId,
    /// What its peer may do to memory, where a region allows it.
    pub rights: Access,
    /// Its index in the owner's doorbell pages.
    pub doorbell: u32,
    /// State and counters, which the control thread reads.
    pub shared: Arc<QpShared>,
    pub send_cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,
    pub turn: SchedulingState,
}

/// A QP's place among those that are ready.
#[derive(Default)]
pub(super) struct SchedulingState {
    /// It stands in the schedule: for a turn, to be read, or both.
    pub scheduled: bool,
    /// It has something to do in its turn besides reading its socket.
    pub wanted: bool,
    /// Its socket may have something.
    pub readable: bool,
    /// What is left of its turn; what it owes, if negative.
    pub deficit: i64,
}

impl SchedulingState {
    /// Takes the cost of something out of the turn.
    pub(super) fn charge(&mut self, cost: i64) {
        self.deficit -= cost;
    }

    /// What is left of it.
    pub(super) fn left(&self) -> u64 {
        self.deficit.max(0).cast_unsigned()
    }

    /// Nothing is left of it.
    pub(super) fn is_over(&self) -> bool {
        self.deficit <= 0
    }
}

impl QpCore {
    /// The identity under which it uses memory.
    pub(super) fn principal(&self) -> Principal {
        Principal { session: self.session, pd: self.pd, qp: self.id }
    }

    /// Memory that its peer names, for what it and the queue pair allow.
    #[inline]
    pub(super) fn remote<'t>(
        &self,
        stags: &'t StagTable,
        stag: Stag,
        (to, len): (u64, u64),
        right: Access,
    ) -> Result<Target<'t>, RemoteFault> {
        // Comes first: the operation is invalid whatever it names (IBTA specification, volume 1,
        // section 9.7.4.1.2).
        if !self.rights.contains(right) {
            return Err(RemoteFault::NotEnabled);
        }
        stags.remote(self.principal(), stag, to, len, right)
    }

    /// Whether a completion queue of it is dead.
    pub(super) fn has_dead_cq(&self) -> bool {
        self.send_cq.is_dead() || self.recv_cq.is_dead()
    }
}
