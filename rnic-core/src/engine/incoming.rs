//! An incoming segment in the form common to both paths, and the Terminate for a fault in it.

use arrayvec::ArrayVec;

use crate::ddp::{Header, MAX_HEADER_LEN};
use crate::engine::numbers::ulpdu_len;
use crate::rdmap::AtomicResponse;
use crate::stream::inbound::{InboundAtomic, InboundRead, SendKind};
use crate::stream::{Fault, terminate};
use rnic_abi::types::Stag;

/// A segment that is well formed and in order, without its payload.
#[derive(Clone, Copy, Debug)]
pub(super) enum Incoming {
    /// RDMA Write. STag and offset are ignored if the payload is empty.
    Write {
        stag: Stag,
        to: u64,
        /// The message ends here.
        last: bool,
        /// An earlier segment of the message had another STag.
        stag_changed: bool,
        /// Length of the message, set on its first segment on the direct path.
        total: Option<u32>,
    },
    /// RDMA Read Response. STag and offset are ignored if the payload is empty.
    ReadResponse {
        stag: Stag,
        to: u64,
        /// The message ends here.
        last: bool,
    },
    /// A Send of any kind.
    Send {
        kind: SendKind,
        /// Offset of the payload in the message.
        mo: u32,
        /// The message ends here.
        last: bool,
        /// Length of the message, set on the direct path only. Over TCP the stream tracks it.
        total: Option<u32>,
    },
    /// A complete Read Request.
    ReadRequest(InboundRead),
    /// A complete Atomic Request.
    AtomicRequest(InboundAtomic),
    /// A complete Atomic Response.
    AtomicResponse(AtomicResponse),
}

impl Incoming {
    /// Returns true if it is a request to be answered, which takes a slot within IRD.
    pub(super) fn awaits_response(&self) -> bool {
        matches!(self, Incoming::ReadRequest(_) | Incoming::AtomicRequest(_))
    }

    /// Returns true if it answers a request of the receiver.
    pub(super) fn is_response(&self) -> bool {
        matches!(self, Incoming::ReadResponse { .. } | Incoming::AtomicResponse(_))
    }

    /// Returns the Read Request if this is one.
    pub(super) fn read_request(&self) -> Option<&InboundRead> {
        match self {
            Incoming::ReadRequest(read) => Some(read),
            _ => None,
        }
    }
}

/// Origin of a segment.
#[derive(Clone, Copy)]
pub(super) enum Origin<'a> {
    /// TCP, with the ULPDU.
    Wire(&'a [u8]),
    /// The other QP of the direct path.
    Direct {
        header: Header,
        /// Bytes of header and payload.
        len: u16,
    },
}

impl Origin<'_> {
    /// Builds the Terminate for a fault of the segment. `read` is the Read Request that the segment
    /// completed, if any.
    pub(super) fn terminate(&self, fault: Fault, read: Option<&InboundRead>) -> Vec<u8> {
        if let Some(InboundRead { request, header, segment_len }) = read {
            // Encloses the request as a whole, even if it arrived in several segments.
            return terminate::build_from_bytes(fault, *segment_len, header, Some(request));
        }
        match self {
            Origin::Wire(ulpdu) => terminate::build(fault, ulpdu, None),
            Origin::Direct { header, len } => {
                terminate::build_from_header(fault, *len, header, None)
            }
        }
    }

    /// Returns the headers to be kept while a copier writes the segment's bytes.
    pub(super) fn enclosure(&self) -> Enclosure {
        match self {
            Origin::Wire(ulpdu) => Enclosure {
                header: ulpdu.iter().copied().take(MAX_HEADER_LEN).collect(),
                // An FPDU's length is a u16.
                segment_len: ulpdu_len(ulpdu.len()),
            },
            Origin::Direct { header, len } => {
                let mut bytes = [0; MAX_HEADER_LEN];
                let header_len = header.emit(&mut bytes);
                let header = bytes[..header_len].iter().copied().collect();
                Enclosure { header, segment_len: *len }
            }
        }
    }
}

/// Header and length of a segment, kept for a Terminate that may enclose them.
pub(super) struct Enclosure {
    header: ArrayVec<u8, MAX_HEADER_LEN>,
    segment_len: u16,
}

impl Enclosure {
    /// Builds the Terminate for a fault of the segment.
    pub(super) fn terminate(&self, fault: Fault) -> Vec<u8> {
        terminate::build_from_bytes(fault, self.segment_len, &self.header, None)
    }
}
