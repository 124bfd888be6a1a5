//! Units in flight on the direct path, and the acknowledgement that the receiver owes.

use crate::engine::incoming::Incoming;
use crate::engine::state::PeerSignal;

/// A unit from the other QP.
pub(in crate::engine) enum Arrival {
    Segment(Box<DelayedSegment>),
    /// The other QP has executed all requests before this one.
    Acknowledged(u64),
    Signal(PeerSignal),
}

/// A segment in flight.
pub(in crate::engine) struct DelayedSegment {
    pub(super) incoming: Incoming,
    pub(super) ulpdu: Vec<u8>,
    /// Offset of the payload that is placed in memory. It is empty if the message is only a header.
    pub(super) payload_at: usize,
    /// On RC, the sender has sent all requests before this one in full.
    pub(super) sent_before: Option<u64>,
}

/// Acknowledgement that a receiver owes.
#[derive(Default)]
pub(in crate::engine) struct Acknowledgement {
    /// All requests before this one have been executed.
    pub(super) due: Option<u64>,
    /// Requests before this one will have been executed once the segment that blocks the QP is in
    /// place.
    pub(super) blocked: Option<u64>,
}

impl Acknowledgement {
    pub(super) fn is_pending(&self) -> bool {
        self.due.or(self.blocked).is_some()
    }

    /// Makes the blocked acknowledgement due: no segment blocks the QP any more.
    pub(super) fn unblock(&mut self) {
        self.due = self.blocked.take().or(self.due);
    }
}

impl Arrival {
    /// Returns true if it may pass a Send that waits for a receive. `rc` is true on RC, where
    /// responses pass.
    pub(super) fn passes(&self, rc: bool) -> bool {
        match self {
            Arrival::Segment(segment) => rc && segment.incoming.is_response(),
            Arrival::Acknowledged(_) => true,
            Arrival::Signal(signal) => !matches!(signal, PeerSignal::Fin),
        }
    }
}
