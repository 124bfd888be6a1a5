//! Sans-IO iWARP streams: start-up state machines and receive validation.
//!
//! This module connects the wire formats ([`crate::mpa`], [`crate::ddp`], [`crate::rdmap`]) with
//! the owners of memory and sockets. For the daemon's connection manager, [`startup`] turns the
//! first bytes of a connection into [`Negotiated`]. For the engine, [`inbound`] turns ULPDUs into
//! checked [`Arrival`]s, and [`terminate`] turns a [`Fault`] into a Terminate. [`introduction`]
//! contains the messages between daemons about RC and UC QPs. There are no clocks, buffers or STags
//! here: callers enforce deadlines and check STags.

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
use rnic_abi::types::TerminateCode;

/// Part of the failing segment that a Terminate encloses (RFC 5040 section 4.8, figure 10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enclose {
    /// Nothing: the fault has no segment, or the segment's header cannot be trusted.
    None,
    /// The DDP segment length (M): the segment is too short for a header.
    Length,
    /// Length and DDP header (M, D).
    Segment,
    /// Length, DDP header and Read Request header (M, D, R).
    SegmentAndRead,
}

/// First fault of a stream, which a Terminate reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Layer, type and code.
    pub code: TerminateCode,
    /// Part of the failing segment that the Terminate encloses.
    pub enclose: Enclose,
}

impl Fault {
    /// Creates a fault that encloses no segment.
    #[inline]
    #[must_use]
    //= RDMAP-4.8-10, RDMAP-7.1-2, 7306-8.1-1
    pub const fn local(code: TerminateCode) -> Fault {
        Fault { code, enclose: Enclose::None }
    }

    /// Creates a fault of a segment: DDP errors, and RDMAP errors of Writes, Read Responses and
    /// Sends.
    #[inline]
    #[must_use]
    //= RDMAP-3.1-8, RDMAP-7.1-3, 7306-8.1-2
    pub const fn segment(code: TerminateCode) -> Fault {
        Fault { code, enclose: Enclose::Segment }
    }

    /// Creates a fault of a complete Read Request.
    #[inline]
    #[must_use]
    //= RDMAP-7.1-4
    pub const fn read(code: TerminateCode) -> Fault {
        Fault { code, enclose: Enclose::SegmentAndRead }
    }

    /// Fault of a segment too short for its header.
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
