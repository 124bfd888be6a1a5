//! The start-up machines (RFC 5044 section 7.1, RFC 6581): from the first bytes of a TCP
//! connection to what both ends agreed on.
//!
//! ```text
//!   Initiator                                Responder
//!   AwaitReply --Reply R=0--> Done           AwaitRequest --Request--> Deciding
//!       |      --Reply R=1--> Done                |                     | accept -> Done
//!       +---- bad frame, FIN -> Done              +- bad frame -> Done  | reject -> Done
//!                                                                       + bytes -> Done
//! ```
//!
//! Deadlines, sockets and the new connection of a fallback are the connection manager's.

mod initiator;
#[cfg(test)]
mod negotiation;
mod responder;
#[cfg(test)]
mod tables;
#[cfg(test)]
mod tests;

pub use crate::mpa::startup::{FrameError, RtrKinds};
pub use initiator::{EofVerdict, Initiator, InitiatorStep, StartupError};
pub use responder::{ConnectRequest, Responder, ResponderError, ResponderStep};

use crate::mpa::startup::{
    ENHANCED_LEN, Frame, FrameKind, MAX_PRIVATE_DATA, NOT_NEGOTIATED, Progress,
};

/// What this end wants and grants; from the configuration, and IRD and ORD per connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Revision an Initiator asks for, 1 or 2, and the highest a Responder serves.
    pub revision: u8,
    /// C: we want CRCs.
    pub crc: bool,
    /// M: we want Markers in what we receive.
    pub markers: bool,
    /// Permissive RDMAC mode (RFC 5044 appendix C): revision 0 is served, with version 0 of DDP
    /// and RDMAP. An Initiator then asks for revision 1 whatever `revision` says (C.2.5).
    pub rdmac: bool,
    /// An Initiator asks for the peer-to-peer model; a Responder always agrees to it.
    pub peer_to_peer: bool,
    /// Inbound Reads we can hold.
    pub ird: u16,
    /// Outbound Reads we want to have under way.
    pub ord: u16,
    /// RTRs we support, as sender and as receiver. Empty counts as all.
    pub rtr: RtrKinds,
}

impl Options {
    fn rtr(&self) -> RtrKinds {
        if self.rtr.is_empty() { RtrKinds::all() } else { self.rtr }
    }
}

/// A ready-to-receive message: the Initiator's first, so that the Responder may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rtr {
    /// A zero-length RDMA Write; disturbs nothing.
    Write,
    /// A zero-length RDMA Read; takes MSN 1 of queue 1.
    Read,
    /// A zero-length Send; takes MSN 1 of queue 0 but no posted buffer.
    Send,
}

/// Which end of the start-up this is, and what it owes or awaits first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// May send at once.
    Initiator {
        /// Sends this before anything else.
        rtr: Option<Rtr>,
    },
    /// Sends nothing before a valid FPDU has come (RFC 5044 section 7.1.2 rule 4).
    Responder {
        /// The first message may be one of these, which is then absorbed.
        await_rtr: Option<RtrKinds>,
    },
}

/// What the two ends agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Which end this is.
    pub role: Role,
    /// MPA revision of the exchange.
    pub revision: u8,
    /// Version of DDP and RDMAP: 1, or 0 with an RDMAC peer.
    pub version: u8,
    /// CRCs are generated and checked in both directions.
    pub crc: bool,
    /// Markers are sent: the peer set M in its frame.
    pub tx_markers: bool,
    /// Markers are received: this side set M in its frame, or the peer is an RDMAC one.
    pub rx_markers: bool,
    /// Inbound Reads we hold.
    pub ird: u16,
    /// Outbound Reads we may have under way.
    pub ord: u16,
    /// IRD the peer stated, if it negotiates.
    pub peer_ird: Option<u16>,
    /// ORD the peer stated, if it negotiates.
    pub peer_ord: Option<u16>,
    /// Both ends agreed to the peer-to-peer model.
    pub peer_to_peer: bool,
    /// The peer's Private Data.
    pub private_data: Vec<u8>,
    /// Bytes that followed the peer's frame: the first of its FPDUs.
    pub leftover: Vec<u8>,
}

/// More Private Data than the frame can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes of private data, at most {limit} can be sent")]
pub struct PrivateDataTooLong {
    /// Bytes of Private Data that were given.
    pub len: usize,
    /// Bytes of Private Data that the frame has room for.
    pub limit: usize,
}

impl PrivateDataTooLong {
    /// Refuses what does not fit beside the enhanced data, if there is any.
    fn check(private_data: &[u8], enhanced: bool) -> Result<(), PrivateDataTooLong> {
        //= MPA-7.1.1-21
        let limit = MAX_PRIVATE_DATA - if enhanced { ENHANCED_LEN } else { 0 };
        match private_data.len() {
            len if len > limit => Err(PrivateDataTooLong { len, limit }),
            _ => Ok(()),
        }
    }
}

/// A local IRD or ORD as it can stand in a frame, where 0x3FFF means something else.
fn stated(reads: u16) -> u16 {
    reads.min(NOT_NEGOTIATED - 1)
}

/// A peer's IRD or ORD, if it states one.
fn negotiated(reads: u16) -> Option<u16> {
    (reads != NOT_NEGOTIATED).then_some(reads)
}

/// Bytes a frame of which these have come still lacks at least; 0 if it is complete or none.
fn frame_missing(kind: FrameKind, max_revision: u8, input: &[u8]) -> usize {
    match Frame::check(kind, max_revision, input) {
        Ok(Progress::NeedMore(len)) => len - input.len(),
        Ok(Progress::Complete(..)) | Err(_) => 0,
    }
}
