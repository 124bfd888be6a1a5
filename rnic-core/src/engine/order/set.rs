//! State of a QP with an order rule.

use std::collections::VecDeque;

use super::pending::{DelayedRead, Pending};
use crate::device::memory::MemoryFault;
use crate::engine::charge::{ChargeNames, StreamCharge};
use crate::stream::InboundAtomic;
use rnic_abi::faults::order::OrderRule;
use rnic_abi::types::{QpId, Stag, Time};

/// Incoming data that a QP with a rule has not placed yet.
pub(in crate::engine) struct PendingSet {
    pub(super) pending: Pending,
    /// The Read whose response is delayed, and the atomic operation whose result is written late.
    pub(super) read: Option<HeldRead>,
    pub(super) atomic: Option<HeldAtomic>,
    /// Choices for the Atomic Requests that have not been carried out.
    pub(super) atomics: VecDeque<AtomicChoice>,
    /// Earliest deadline of all that is held.
    pub(super) due: Option<Time>,
    pub(super) charge: StreamCharge,
    /// Failure of a late write that has not been handled.
    pub(super) fault: Option<MemoryFault>,
    /// Number of inversions that may still be recorded.
    pub(super) reports: u32,
}

/// A Read whose response is delayed, and with it all later responses.
pub(super) struct HeldRead {
    /// Time at which the response is generated.
    pub until: Time,
    pub read: DelayedRead,
}

/// Choice for an Atomic Request.
pub(super) struct AtomicChoice {
    /// Number of the request on the QP.
    pub message: u64,
    pub delays: bool,
}

/// An atomic operation whose result is written late.
pub(super) struct HeldAtomic {
    /// Time of the write and of the response.
    pub until: Time,
    pub request: InboundAtomic,
    pub message: u64,
    pub original: u64,
}

impl PendingSet {
    pub(super) fn new(rule: OrderRule, qp: QpId) -> Self {
        PendingSet {
            pending: Pending::new(rule, qp.0.into()),
            read: None,
            atomic: None,
            atomics: VecDeque::new(),
            due: None,
            charge: StreamCharge::default(),
            fault: None,
            reports: MAX_REPORTS,
        }
    }

    /// Returns true if anything is held for this STag.
    pub(super) fn holds(&self, stag: Stag) -> bool {
        let atomic = self.atomic.as_ref().map(|atomic| atomic.request.request.stag);
        self.pending.holds(stag) || atomic == Some(stag)
    }
}

/// Names of the charge for held data, for error texts.
pub(in crate::engine) const HELD: ChargeNames = ChargeNames {
    device: "limits.unsent_bytes",
    session: "limits.session_unsent_bytes",
    thing: "held data was",
};
/// Maximum number of inversions of a QP that are recorded, so that they displace no other records.
const MAX_REPORTS: u32 = 16;
