//! A Send that waits for a receive. Why and how stands in [`waiting`](super::waiting).

use crate::ddp::Header;
use crate::device::srq::WaiterPlace;
use crate::engine::incoming::Incoming;
use crate::stream::{Fault, terminate};
use crate::types::{Msn, Time};

/// A Send that has found no receive.
pub(in crate::engine) struct Held {
    pub segment: HeldSegment,
    /// In the queue of those who wait for a shared receive queue.
    pub place: Option<WaiterPlace>,
    pub until: Time,
}

/// Its first segment.
pub(in crate::engine) enum HeldSegment {
    /// It has come over TCP, with its payload from here on.
    Received { ulpdu: Box<[u8]>, payload: usize, segment: Incoming },
    /// The other QP of the direct path has it: its header, and its bytes.
    AtPeer { header: Header, len: u16 },
}

impl Held {
    /// The Terminate for a fault of it.
    pub(in crate::engine) fn terminate(&self, fault: Fault) -> Vec<u8> {
        match &self.segment {
            HeldSegment::Received { ulpdu, .. } => terminate::build(fault, ulpdu, None),
            HeldSegment::AtPeer { header, len } => {
                terminate::build_from_header(fault, *len, header, None)
            }
        }
    }

    /// Its number, if the peer has to be told.
    pub(in crate::engine) fn msn(&self) -> Option<Msn> {
        let HeldSegment::Received { ulpdu, .. } = &self.segment else { return None };
        match Header::parse(ulpdu) {
            Ok((Header::Untagged(header), _)) => Some(header.msn),
            Ok((Header::Tagged(_), _)) | Err(_) => None,
        }
    }
}
