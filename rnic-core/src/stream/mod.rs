//! The sans-IO iWARP stream: start-up machines and receive validation.
//!
//! Between the wire formats ([`crate::mpa`], [`crate::ddp`], [`crate::rdmap`]) and whoever has
//! memory and sockets. [`startup`] turns the bytes of a new connection into [`Negotiated`], for
//! the daemon's connection manager; [`inbound`] turns ULPDUs into checked [`Arrival`]s and
//! [`terminate`] a [`Fault`] into the message that tells the peer, for the engine. [`introduction`]
//! is what daemons say to each other about queue pairs that are wired by hand. No clocks, no
//! buffers, no STags: a deadline or a bad STag is its owner's to notice.

pub mod inbound;
pub mod introduction;
pub mod startup;
pub mod terminate;
#[cfg(test)]
mod vectors;

pub use inbound::{Arrival, Inbound, InboundAtomic, InboundRead, SendKind};
pub use startup::{Negotiated, Role, Rtr};

use std::fmt;

use crate::mpa::MpaFault;
use crate::rdmap::codes;
use crate::types::TerminateCode;

/// How much of the failing segment a Terminate gives back (RFC 5040 section 4.8, figure 10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enclose {
    /// Nothing: the error has no segment, or its header is not to be trusted.
    None,
    /// Its length (M): too short for a header.
    Length,
    /// Length and DDP header (M, D).
    Segment,
    /// Length, DDP header and Read Request header (M, D, R).
    SegmentAndRead,
}

/// The first thing wrong with a stream: what a Terminate will say of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Layer, type and code.
    pub code: TerminateCode,
    /// What goes with it.
    pub enclose: Enclose,
}

impl Fault {
    /// A fault that no incoming message is to blame for.
    #[inline]
    #[must_use]
    //= RDMAP-4.8-10, RDMAP-7.1-2, 7306-8.1-1
    pub const fn local(code: TerminateCode) -> Fault {
        Fault { code, enclose: Enclose::None }
    }

    /// A fault of a segment: DDP errors, and RDMAP errors of Writes, Read Responses and Sends.
    #[inline]
    #[must_use]
    //= RDMAP-3.1-8, RDMAP-7.1-3, 7306-8.1-2
    pub const fn segment(code: TerminateCode) -> Fault {
        Fault { code, enclose: Enclose::Segment }
    }

    /// A fault of a complete Read Request.
    #[inline]
    #[must_use]
    //= RDMAP-7.1-4
    pub const fn read(code: TerminateCode) -> Fault {
        Fault { code, enclose: Enclose::SegmentAndRead }
    }

    /// A segment too short for its header.
    pub const TOO_SHORT: Fault =
        Fault { code: codes::OPERATION_UNSPECIFIED, enclose: Enclose::Length };
}

impl From<MpaFault> for Fault {
    fn from(fault: MpaFault) -> Fault {
        //= MPA-8-1, RDMAP-4.8-14
        Fault::local(match fault {
            MpaFault::Crc => codes::LLP_CRC,
            MpaFault::Marker => codes::LLP_MARKER,
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.code.fmt(f)
    }
}
