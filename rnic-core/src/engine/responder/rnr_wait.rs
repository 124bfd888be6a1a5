//! A Send that waits for a receive; see [`waiting`](super::waiting).

use crate::ddp::Header;
use crate::device::srq::WaiterPlace;
use crate::engine::incoming::Incoming;
use crate::stream::{Fault, terminate};
use rnic_abi::types::{Msn, Time};

/// A Send that has found no receive.
pub(in crate::engine) struct WaitingSend {
    pub segment: WaitingSegment,
    /// Its place among the waiters of the SRQ.
    pub place: Option<WaiterPlace>,
    pub until: Time,
    /// A fault rule delays the Send until its deadline, even if a receive is posted.
    pub by_rule: bool,
}

/// The first segment of a waiting Send.
pub(in crate::engine) enum WaitingSegment {
    /// Received over TCP. The payload begins at offset `payload` of `ulpdu`.
    Received { ulpdu: Box<[u8]>, payload: usize, segment: Incoming },
    /// Kept by the other QP of the direct path, with this header and ULPDU length.
    AtPeer { header: Header, len: u16 },
}

impl WaitingSend {
    /// Builds the Terminate for a fault of the Send.
    pub(in crate::engine) fn terminate(&self, fault: Fault) -> Vec<u8> {
        match &self.segment {
            WaitingSegment::Received { ulpdu, .. } => terminate::build(fault, ulpdu, None),
            WaitingSegment::AtPeer { header, len } => {
                terminate::build_from_header(fault, *len, header, None)
            }
        }
    }

    /// Returns the MSN of the Send if it arrived over TCP, so that the peer can be notified.
    pub(in crate::engine) fn msn(&self) -> Option<Msn> {
        let WaitingSegment::Received { ulpdu, .. } = &self.segment else { return None };
        match Header::parse(ulpdu) {
            Ok((Header::Untagged(header), _)) => Some(header.msn),
            Ok((Header::Tagged(_), _)) | Err(_) => None,
        }
    }
}
