//! An arriving segment, as both paths hand it over, and what a Terminate about it gives back.

use arrayvec::ArrayVec;

use crate::ddp::{Header, MAX_HEADER_LEN};
use crate::engine::numbers::ulpdu_len;
use crate::rdmap::AtomicResponse;
use crate::stream::inbound::{InboundAtomic, InboundRead, SendKind};
use crate::stream::{Fault, terminate};
use crate::types::Stag;

/// A segment that is well formed and in order; its payload is apart.
#[derive(Clone, Copy, Debug)]
pub(super) enum Incoming {
    /// RDMA Write. With no payload, STag and offset are not looked at.
    Write {
        stag: Stag,
        to: u64,
        /// The message ends here.
        last: bool,
        /// An earlier segment of the message had another STag.
        stag_changed: bool,
        /// Length of the message, if this is its first segment and has come by the direct path.
        total: Option<u32>,
    },
    /// RDMA Read Response. With no payload, STag and offset are not looked at.
    ReadResponse {
        stag: Stag,
        to: u64,
        /// The message ends here.
        last: bool,
    },
    /// A Send of any kind.
    Send {
        kind: SendKind,
        /// Where in the message the payload goes.
        mo: u32,
        /// The message ends here.
        last: bool,
        /// How long the message is, where the stream is not asked: on the direct path.
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
    /// Whether it is to be answered, and takes a slot within IRD.
    pub(super) fn awaits_response(&self) -> bool {
        matches!(self, Incoming::ReadRequest(_) | Incoming::AtomicRequest(_))
    }

    /// The Read Request that it is, if it is one.
    pub(super) fn read_request(&self) -> Option<&InboundRead> {
        match self {
            Incoming::ReadRequest(read) => Some(read),
            _ => None,
        }
    }
}

/// Where a segment came from.
#[derive(Clone, Copy)]
pub(super) enum Origin<'a> {
    /// From the wire: the ULPDU.
    Wire(&'a [u8]),
    /// From the other QP of the direct path.
    Direct {
        header: Header,
        /// Bytes of header and payload.
        len: u16,
    },
}

impl Origin<'_> {
    /// The Terminate for a fault of the segment; `read` is the Read Request that it completed.
    pub(super) fn terminate(&self, fault: Fault, read: Option<&InboundRead>) -> Vec<u8> {
        if let Some(InboundRead { request, header, segment_len }) = read {
            // The request as a whole, even if it came in several segments.
            return terminate::build_from_bytes(fault, *segment_len, header, Some(request));
        }
        match self {
            Origin::Wire(ulpdu) => terminate::build(fault, ulpdu, None),
            Origin::Direct { header, len } => {
                terminate::build_from_header(fault, *len, header, None)
            }
        }
    }

    /// What is kept of it while its bytes are on their way to memory.
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

/// A segment's header and length, should it have to go back.
pub(super) struct Enclosure {
    header: ArrayVec<u8, MAX_HEADER_LEN>,
    segment_len: u16,
}

impl Enclosure {
    /// The Terminate for a fault of the segment.
    pub(super) fn terminate(&self, fault: Fault) -> Vec<u8> {
        terminate::build_from_bytes(fault, self.segment_len, &self.header, None)
    }
}
