//! Reasons: what was found wrong, and what follows from it: the status of a request, and the fault
//! that the peer is told of.
//!
//! Checks return a [`Reason`], which is small and plain. Only when something fails is it put into
//! words ([`explanation`](super::explanation)) and kept ([`life`](super::life)). Both paths come
//! by here, so both ends of a connection leave the same records whether TCP is between them or not.

use std::net::IpAddr;

use crate::device::cq::CqFault;
use crate::device::memory::MemoryFault;
use crate::device::srq::SrqFault;
use crate::device::stag::{InvalidateFault, LocalFault, RemoteFault};
use crate::device::window::BindFault;
use crate::rdmap::codes;
use crate::shm::queue::{Malformed, QueueFault};
use crate::stream::{Fault, InboundRead};
use crate::types::{CompletionStatus, CqId, SrqId, Stag, TerminateCode};

/// What was found wrong.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reason {
    // A request or a receive of this side cannot be carried out.
    /// An entry of a queue makes no sense.
    Entry(Malformed),
    /// No operation has this number.
    Opcode(u8),
    /// Bits are set, or parameters given, that the operation does not have.
    SpareFlags(u32),
    /// A read has more than one element, or inline data.
    ReadSink { elements: usize },
    /// An atomic operation has not one element of eight bytes.
    AtomicSink { elements: usize, bytes: u64 },
    /// An atomic operation, or Immediate Data, to a peer of RDMAC's version.
    NoExtensions,
    /// A request for which a peer has to answer, on a QP whose peer acknowledges nothing.
    Unreliable,
    /// A request that is no Send, on a QP of datagrams.
    NoDatagram,
    /// A datagram that is longer than a packet.
    DatagramLength { len: u32, mtu: u32 },
    /// A datagram from a port that the device does not have.
    DatagramSource { index: u64 },
    /// A datagram to where the administrator does not let its sender go.
    DatagramForbidden { to: IpAddr },
    /// A Send with immediate data, to a peer that has not agreed on them.
    NoImmediateSends,
    /// A read, or an atomic operation, on a QP that may have none outstanding.
    NoOrd,
    /// The elements are longer in sum than any message.
    MessageLength,
    /// The message is longer than those of the RoCE device may be.
    MessageTooLong { len: u32, most: u32 },
    /// A local element does not resolve.
    LocalKey { fault: LocalFault, lkey: u32, addr: u64, len: u32, write: bool },
    /// The STag is not this QP's to invalidate.
    NotOwned { fault: LocalFault, stag: Stag },
    /// A request to bind a window has elements, inline data or a remote address.
    BindElements,
    /// A window was not bound.
    Bind { fault: BindFault, window: Stag, address: u64, length: u64 },
    /// A read, or an atomic operation, that cannot be answered any more, because the peer has sent
    /// its FIN.
    PeerFinished,

    /// Nobody has acknowledged the request, for as long as that may take.
    NoAcknowledgement,
    /// The peer has had no receive, for as long as that may take.
    ReceiverNotReady,

    // The peer asked for what it may not have.
    /// A segment of an RDMA Write, `len` payload bytes at `to`, that may not be placed there.
    Write { fault: RemoteFault, stag: Stag, to: u64, len: u64 },
    /// An RDMA Write that names another STag than its message began with.
    StagChanged { stag: Stag, to: u64, len: u64 },
    /// An RDMA Read Request for `len` bytes from `to` on, which may not be read.
    Read { fault: RemoteFault, stag: Stag, to: u64, len: u64 },
    /// An atomic operation on a word that may not be changed.
    Atomic { fault: RemoteFault, stag: Stag, to: u64 },
    /// An atomic operation on something that is no word: its address is no multiple of eight.
    Misaligned { stag: Stag, to: u64 },
    /// The region of a read was revoked while it was being answered.
    Revoked { stag: Stag, to: u64, len: u64 },
    /// More reads and atomic operations at once than were agreed.
    RequestsFull { ird: u16 },
    /// A Send with Invalidate.
    Invalidate { fault: InvalidateFault, stag: Stag },
    /// A Send that finds no receive, or none in time.
    NoReceive { waited: bool },
    /// An entry of a receive queue makes no sense.
    MalformedReceive,
    /// A Send that does not fit the receive.
    TooLong { mo: u32, len: usize, capacity: u64 },
    /// A Read Response, or else an Atomic Response, that answers nothing.
    NoRequest { atomic: bool },
    /// A Read Response to another buffer than the read's.
    OtherSink { found: Stag, sink: Stag },
    /// A Read Response outside of the read's buffer.
    OutsideSink { stag: Stag, to: u64, len: u64, size: u32 },
    /// A Read Response of another length than was asked for.
    ResponseLength { received: u64, size: u32 },
    /// The buffer of a read, or of an atomic operation, is not to be had any more.
    SinkGone { stag: Stag, to: u64, size: u32 },
    /// A segment that is wrong in itself, as its code says.
    Segment,

    // Something that neither asked for.
    /// Memory could not be reached.
    Memory(MemoryFault),
    /// A shared receive queue died.
    Srq(SrqId, SrqFault),
    /// An administrator ended the connection.
    AdminDisconnect,
    /// A completion queue died.
    Cq(CqId, CqFault),
    /// A client's queue index is impossible.
    Queue(&'static str, QueueFault),
    /// TCP ended inside of an FPDU.
    CutShort,
}

impl Reason {
    /// The outcome of a request or receive that this befell.
    pub(super) fn status(self) -> CompletionStatus {
        match self {
            Reason::MessageLength
            | Reason::MessageTooLong { .. }
            | Reason::TooLong { .. }
            | Reason::AtomicSink { .. }
            | Reason::DatagramLength { .. } => CompletionStatus::LocalLength,
            Reason::LocalKey { .. } | Reason::NotOwned { .. } => CompletionStatus::LocalProtection,
            Reason::Memory(_) => CompletionStatus::LocalProtection,
            Reason::Bind { .. } => CompletionStatus::MwBind,
            Reason::PeerFinished => CompletionStatus::RemoteAborted,
            Reason::Invalidate { .. } => CompletionStatus::RemoteInvalidRequest,
            Reason::OtherSink { .. }
            | Reason::OutsideSink { .. }
            | Reason::ResponseLength { .. } => CompletionStatus::BadResponse,
            Reason::SinkGone { .. } => CompletionStatus::LocalAccess,
            Reason::NoAcknowledgement => CompletionStatus::TransportRetryExceeded,
            Reason::ReceiverNotReady => CompletionStatus::ReceiverNotReady,
            _ => CompletionStatus::LocalQpOperation,
        }
    }

    /// What the peer is told of it.
    pub(super) fn fault(self) -> Fault {
        match self {
            Reason::Write { fault, .. } => Fault::segment(write_code(fault)),
            Reason::StagChanged { .. } | Reason::OtherSink { .. } | Reason::SinkGone { .. } => {
                Fault::segment(codes::TAGGED_INVALID_STAG)
            }
            Reason::Read { fault, .. } => Fault::read(read_code(fault)),
            Reason::Atomic { fault, .. } => Fault::segment(read_code(fault)),
            //= 7306-5.1.1-7, 7306-5.1.2-10, 7306-8.2-5
            Reason::Misaligned { .. } => Fault::segment(codes::OPERATION_CATASTROPHIC_STREAM),
            Reason::Revoked { .. } => Fault::read(codes::PROTECTION_INVALID_STAG),
            Reason::NoReceive { .. } | Reason::RequestsFull { .. } => {
                Fault::segment(codes::UNTAGGED_NO_BUFFER)
            }
            Reason::TooLong { .. } => Fault::segment(codes::UNTAGGED_TOO_LONG),
            Reason::Invalidate { fault, .. } => Fault::segment(match fault {
                //= RDMAP-5.3-14
                InvalidateFault::NotAssociated => codes::PROTECTION_INVALIDATE,
                InvalidateFault::Shared => codes::OPERATION_INVALIDATE,
            }),
            Reason::NoRequest { .. } => Fault::segment(codes::OPERATION_OPCODE),
            Reason::OutsideSink { .. } | Reason::ResponseLength { .. } => {
                Fault::segment(codes::TAGGED_BOUNDS)
            }
            Reason::Memory(_) => Fault::local(codes::DDP_LOCAL_CATASTROPHIC),
            Reason::CutShort => Fault::local(codes::LLP_CLOSED),
            _ => Fault::local(codes::RDMA_LOCAL_CATASTROPHIC),
        }
    }

    /// The asynchronous error of an iWARP or RC responder that refuses a request of the peer.
    /// Returns `None` if the peer asked for nothing that is wrong.
    pub(super) fn responder_error(self) -> Option<ResponderError> {
        match self {
            Reason::Write { fault: RemoteFault::NotEnabled, .. }
            | Reason::Read { fault: RemoteFault::NotEnabled, .. }
            | Reason::Atomic { fault: RemoteFault::NotEnabled, .. } => {
                Some(ResponderError::Request)
            }
            Reason::Write { .. }
            | Reason::StagChanged { .. }
            | Reason::Read { .. }
            | Reason::Atomic { .. }
            | Reason::Revoked { .. }
            | Reason::Invalidate { .. } => Some(ResponderError::Access),
            Reason::Misaligned { .. }
            | Reason::RequestsFull { .. }
            | Reason::TooLong { .. }
            | Reason::Segment => Some(ResponderError::Request),
            _ => None,
        }
    }

    /// What the owner of a QP is told that is useless because of it, and no peer's doing.
    pub(super) fn qp_fatal(self) -> &'static str {
        match self {
            Reason::Cq(..) => "its completion queue is dead",
            Reason::Srq(..) => "its shared receive queue is dead",
            Reason::Queue(..) => "a queue index is impossible",
            Reason::Memory(_) => "shared memory vanished",
            _ => "it cannot go on",
        }
    }

    /// Whether the peer named memory that it does not have. Whoever tries STags, or offsets behind
    /// an STag that is one, leaves nothing but these, and learns from each which of them it was.
    pub(super) fn is_guess(self) -> bool {
        match self {
            Reason::Write { .. }
            | Reason::StagChanged { .. }
            | Reason::Read { .. }
            | Reason::Atomic { .. }
            | Reason::Invalidate { .. }
            | Reason::OtherSink { .. }
            | Reason::OutsideSink { .. } => true,
            // What was the peer's and is no more, or names no memory.
            _ => false,
        }
    }
}

/// Affiliated asynchronous errors of a responder (IBTA specification, volume 1, section 11.6.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponderError {
    /// Local access violation work queue error.
    Access,
    /// Invalid request local work queue error.
    Request,
}

/// Why a segment was not carried out.
#[derive(Clone, Copy, Debug)]
pub(super) enum PlacementError {
    /// The peer is to blame, or must at least be told.
    Fault(Fault, Reason),
    /// The memory could not be reached: its owner is to blame.
    Memory(MemoryFault),
    /// A receive of ours cannot take the message: the owner of the QP is to blame. Its memory, if
    /// that could not be written.
    Receive(Option<MemoryFault>, Reason),
    /// The next receive of ours, with this name, is none.
    MalformedReceive(u64, Reason),
    /// The receive queue itself is nonsense.
    Queue(QueueFault),
    /// The shared receive queue is.
    Srq(SrqFault),
}

impl From<Fault> for PlacementError {
    fn from(fault: Fault) -> Self {
        PlacementError::Fault(fault, Reason::Segment)
    }
}

impl From<Reason> for PlacementError {
    fn from(reason: Reason) -> Self {
        PlacementError::Fault(reason.fault(), reason)
    }
}

/// The part of a read that has not been answered yet.
pub(super) fn revoked(owed: &InboundRead, sent: u32) -> Reason {
    let rest = owed.request.advanced(sent);
    Reason::Revoked { stag: rest.src_stag, to: rest.src_to.0, len: rest.size.into() }
}

/// DDP's words for a Write that may not be placed (RFC 5041 section 7.1, which has no code for
/// a missing right).
fn write_code(fault: RemoteFault) -> TerminateCode {
    match fault {
        RemoteFault::InvalidStag | RemoteFault::NoRight => codes::TAGGED_INVALID_STAG,
        RemoteFault::NotEnabled => codes::OPERATION_OPCODE,
        RemoteFault::NotAssociated => codes::TAGGED_STREAM,
        RemoteFault::Wrap => codes::TAGGED_TO_WRAP,
        RemoteFault::Bounds => codes::TAGGED_BOUNDS,
    }
}

/// RDMAP's words for a Read that may not be answered (RFC 5040 section 7.2), and for an atomic
/// operation (RFC 7306 has none of its own).
fn read_code(fault: RemoteFault) -> TerminateCode {
    match fault {
        RemoteFault::InvalidStag => codes::PROTECTION_INVALID_STAG,
        RemoteFault::NotAssociated => codes::PROTECTION_STREAM,
        RemoteFault::NoRight => codes::PROTECTION_ACCESS,
        RemoteFault::NotEnabled => codes::OPERATION_OPCODE,
        RemoteFault::Wrap => codes::PROTECTION_TO_WRAP,
        RemoteFault::Bounds => codes::PROTECTION_BOUNDS,
    }
}
