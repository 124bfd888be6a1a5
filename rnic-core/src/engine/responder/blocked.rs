//! An incoming direction that stands still, and what it waits for. Why and how stands in
//! [`waiting`](super::waiting).

use super::placement::PendingPlacement;
use crate::ddp::Header;
use crate::device::srq::WaiterPlace;
use crate::engine::incoming::Incoming;
use crate::stream::{Fault, terminate};
use crate::types::Time;

/// An incoming direction that stands still.
pub(in crate::engine) struct RxBlocked {
    pub on: BlockedOn,
    /// Over TCP: the ULPDU that lacks a receive, then what was read and not looked at.
    pub bytes: Vec<u8>,
}

/// What an incoming direction waits for.
pub(in crate::engine) enum BlockedOn {
    /// A copier, which writes a segment.
    Copy(PendingPlacement),
    /// A receive for this segment.
    Receive {
        segment: WaitingSegment,
        /// In the queue of those who wait for a shared receive queue.
        place: Option<WaiterPlace>,
        until: Time,
    },
}

/// The segment that found no receive.
pub(in crate::engine) enum WaitingSegment {
    /// It stands in front of the bytes that are kept: so many, with the payload from here on.
    Received { ulpdu: usize, payload: usize, segment: Incoming },
    /// The other QP of the direct path has it: its header, and its bytes.
    AtPeer { header: Header, len: u16 },
}

impl RxBlocked {
    /// The Terminate for a fault of the segment in progress.
    pub(in crate::engine) fn terminate(&self, fault: Fault) -> Vec<u8> {
        match &self.on {
            BlockedOn::Copy(pending) => pending.enclosure.terminate(fault),
            BlockedOn::Receive { segment: WaitingSegment::Received { ulpdu, .. }, .. } => {
                terminate::build(fault, &self.bytes[..*ulpdu], None)
            }
            BlockedOn::Receive { segment: WaitingSegment::AtPeer { header, len }, .. } => {
                terminate::build_from_header(fault, *len, header, None)
            }
        }
    }
}
