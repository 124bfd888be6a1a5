//! Start-up state machines for MPA (RFC 5044 section 7.1, RFC 6581): from the first bytes of a TCP
//! connection to the negotiated parameters.
//!
//! ```text
//!   Initiator                                Responder
//!   AwaitReply --Reply R=0--> Done           AwaitRequest --Request--> Deciding
//!       |      --Reply R=1--> Done                |                     | accept -> Done
//!       +---- bad frame, FIN -> Done              +- bad frame -> Done  | reject -> Done
//!                                                                       + bytes -> Done
//! ```
//!
//! The connection manager handles deadlines, sockets and the second connection of a retry with
//! revision 1.

mod initiator;
#[cfg(test)]
mod negotiation;
mod responder;
#[cfg(test)]
mod tables;
#[cfg(test)]
mod tests;

pub use crate::mpa::startup::{FrameError, RtrKinds};
pub use initiator::{EofAction, Initiator, InitiatorStep, StartupError};
pub use responder::{ConnectRequest, Responder, ResponderError, ResponderStep};

use crate::mpa::startup::{
    ENHANCED_LEN, Frame, FrameKind, MAX_PRIVATE_DATA, NOT_NEGOTIATED, Progress,
};

/// Parameters of this end, from the configuration; IRD and ORD may differ per connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Revision of an Initiator's Request, 1 or 2, and maximum revision for a Responder.
    pub revision: u8,
    /// C: requires CRCs.
    pub crc: bool,
    /// M: requires Markers in received data.
    pub markers: bool,
    /// Permissive IETF RNIC (RFC 5044 appendix C): accepts revision 0, with version 0 of DDP and
    /// RDMAP. An Initiator then always requests revision 1 (section C.2.5).
    pub rdmac: bool,
    /// An Initiator requests the peer-to-peer model. A Responder always agrees to it.
    pub peer_to_peer: bool,
    /// Maximum inbound Reads.
    pub ird: u16,
    /// Desired outbound Reads.
    pub ord: u16,
    /// Supported RTRs, sent and received. Empty means all.
    pub rtr: RtrKinds,
}

impl Options {
    fn rtr(&self) -> RtrKinds {
        if self.rtr.is_empty() { RtrKinds::all() } else { self.rtr }
    }
}

/// Ready-to-receive (RTR) message: the first message of the Initiator, after which the Responder
/// may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rtr {
    /// A zero-length RDMA Write, without side effects.
    Write,
    /// A zero-length RDMA Read; uses MSN 1 of queue 1.
    Read,
    /// A zero-length Send; uses MSN 1 of queue 0 but no posted buffer.
    Send,
}

/// Role in the start-up, with the first message to send or receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// May send at once.
    Initiator {
        /// Message to send first.
        rtr: Option<Rtr>,
    },
    /// Sends nothing before it has received a valid FPDU (RFC 5044 section 7.1.2 rule 4).
    Responder {
        /// RTRs to expect: if the first message is of one of these kinds, the Responder consumes it
        /// as the RTR.
        await_rtr: Option<RtrKinds>,
    },
}

/// Negotiated parameters of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Role of this end.
    pub role: Role,
    /// MPA revision of the exchange.
    pub revision: u8,
    /// Version of DDP and RDMAP: 1, or 0 with an RDMAC peer.
    pub version: u8,
    /// CRCs are generated and checked in both directions.
    pub crc: bool,
    /// Markers are sent: the peer set M in its frame.
    pub tx_markers: bool,
    /// Markers are received: this end set M in its frame, or the peer is an RDMAC peer.
    pub rx_markers: bool,
    /// Maximum inbound Reads.
    pub ird: u16,
    /// Maximum outbound Reads.
    pub ord: u16,
    /// IRD of the peer; `None` if it does not negotiate.
    pub peer_ird: Option<u16>,
    /// ORD of the peer; `None` if it does not negotiate.
    pub peer_ord: Option<u16>,
    /// Both ends agreed to the peer-to-peer model.
    pub peer_to_peer: bool,
    /// The peer's Private Data.
    pub private_data: Vec<u8>,
    /// Bytes after the peer's frame: the start of its FPDUs.
    pub leftover: Vec<u8>,
}

/// The Private Data do not fit into the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes of private data exceed the limit of {limit}")]
pub struct PrivateDataTooLong {
    /// Length of the Private Data.
    pub len: usize,
    /// Maximum length for this frame.
    pub limit: usize,
}

impl PrivateDataTooLong {
    /// Checks the length of the Private Data. Enhanced data reduce the limit.
    fn check(private_data: &[u8], enhanced: bool) -> Result<(), PrivateDataTooLong> {
        //= MPA-7.1.1-21
        let limit = MAX_PRIVATE_DATA - if enhanced { ENHANCED_LEN } else { 0 };
        match private_data.len() {
            len if len > limit => Err(PrivateDataTooLong { len, limit }),
            _ => Ok(()),
        }
    }
}

/// Limits a local IRD or ORD to the values that a frame can express; 0x3FFF has another meaning.
fn frame_value(reads: u16) -> u16 {
    reads.min(NOT_NEGOTIATED - 1)
}

/// Returns a peer's IRD or ORD; `None` if the peer does not negotiate it.
fn negotiated(reads: u16) -> Option<u16> {
    (reads != NOT_NEGOTIATED).then_some(reads)
}

/// Returns the minimum number of missing bytes; 0 if the frame is complete or invalid.
fn frame_missing(kind: FrameKind, max_revision: u8, input: &[u8]) -> usize {
    match Frame::check(kind, max_revision, input) {
        Ok(Progress::NeedMore(len)) => len - input.len(),
        Ok(Progress::Complete(..)) | Err(_) => 0,
    }
}
