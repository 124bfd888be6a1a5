//! State that every part of a QP uses: identity, counters, CQs, and the remainder of its turn.

use std::sync::Arc;

use super::fault_rules::Faults;
use super::order::PendingSet;
use super::schedule::{Key, SessionSlot};
use super::transport::Transport;
use crate::device::memory::Target;
use crate::device::stag::{Principal, RemoteFault, StagTable};
use crate::device::{Cq, QpShared};
use rnic_abi::faults::FaultName;
use rnic_abi::types::{Access, PdId, QpId, SessionId, Stag, Time};

/// Identity, queues and turn of a QP.
pub(super) struct QpCore {
    pub key: Key,
    pub id: QpId,
    pub session: SessionId,
    /// Slot of its session in the schedule.
    pub slot: SessionSlot,
    pub pd: PdId,
    pub transport: Transport,
    /// Rights of its peer, further limited by each region.
    pub rights: Access,
    /// Doorbell index in the session's doorbell pages.
    pub doorbell: u32,
    /// State and counters, which the control thread reads.
    pub shared: Arc<QpShared>,
    pub send_cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,
    pub turn: SchedulingState,
    /// Fault rules of the QP, if any.
    pub faults: Option<Box<Faults>>,
    /// The fault rule that has stopped the QP: it has no turns.
    pub stopped: Option<FaultName>,
    /// The fault rule that has stopped the other end of a direct connection.
    pub peer_stopped: Option<FaultName>,
    /// Its program moves it to Error: the latest time at which it enters that state. It enters it
    /// earlier if it has sent all posted requests.
    pub moves_to_error: Option<Time>,
    /// Incoming data that is not placed yet. `None` places it in strict order.
    pub order: Option<Box<PendingSet>>,
}

/// Scheduling state of a QP.
#[derive(Default)]
pub(super) struct SchedulingState {
    /// The QP is in the schedule, for a turn, a read of its socket, or both.
    pub scheduled: bool,
    /// The QP has work for its turn other than reading its socket.
    pub wanted: bool,
    /// Its socket may be readable.
    pub readable: bool,
    /// Remainder of its turn, or its debt if negative.
    pub deficit: i64,
}

impl SchedulingState {
    /// Charges `cost` to the turn.
    pub(super) fn charge(&mut self, cost: i64) {
        self.deficit -= cost;
    }

    /// Returns the remainder of the turn.
    pub(super) fn left(&self) -> u64 {
        self.deficit.max(0).cast_unsigned()
    }

    /// Returns true if nothing of the turn is left.
    pub(super) fn is_over(&self) -> bool {
        self.deficit <= 0
    }
}

impl QpCore {
    /// Returns the identity that STag checks use.
    pub(super) fn principal(&self) -> Principal {
        Principal { session: self.session, pd: self.pd, qp: self.id }
    }

    /// Resolves memory that its peer addresses, for an operation that needs `right`.
    #[inline]
    pub(super) fn remote<'t>(
        &self,
        stags: &'t StagTable,
        stag: Stag,
        to: u64,
        len: u64,
        right: Access,
    ) -> Result<Target<'t>, RemoteFault> {
        // This check comes first, because the operation is invalid regardless of its address (IBTA
        // specification, volume 1, section 9.7.4.1.2).
        if !self.rights.contains(right) {
            return Err(RemoteFault::NotEnabled);
        }
        stags.remote(self.principal(), stag, to, len, right)
    }

    /// Returns true if one of its CQs is dead.
    pub(super) fn has_dead_cq(&self) -> bool {
        self.send_cq.is_dead() || self.recv_cq.is_dead()
    }
}
