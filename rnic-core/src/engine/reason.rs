//! Errors: the cause, and from it the completion status and the Terminate for the peer.
//!
//! Checks return a [`Reason`], which is small and `Copy`. Only a failure turns it into text
//! ([`explanation`](super::explanation)) and keeps a record ([`life`](super::life)). TCP and the
//! direct path use the same code, so both leave the same records.

use std::net::IpAddr;

use crate::device::cq::CqFault;
use crate::device::memory::MemoryFault;
use crate::device::srq::SrqFault;
use crate::device::stag::{InvalidateFault, LocalFault, RemoteFault};
use crate::device::window::BindFault;
use crate::rdmap::codes;
use crate::stream::{Fault, InboundRead};
use rnic_abi::faults::{FaultName, Opcode, RefusedAs};
use rnic_abi::shm::queue::{Malformed, QueueFault};
use rnic_abi::types::{CompletionStatus, CqId, SrqId, Stag, TerminateCode};

/// Cause of a failure.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reason {
    // A request or a receive of this side cannot be carried out.
    /// An entry of a queue is malformed.
    Entry(Malformed),
    /// No operation has this number.
    Opcode(u8),
    /// A flag or parameter that the operation does not support is set.
    UnsupportedFlags(u32),
    /// A Read has inline data, or several SGEs on iWARP or with invalidation.
    ReadSink { elements: usize },
    /// An atomic operation does not have exactly one SGE of eight bytes.
    AtomicSink { elements: usize, bytes: u64 },
    /// An atomic operation or Immediate Data for a peer with the RDMAC version of RDMAP.
    NoExtensions,
    /// A request that needs a reliable connection, on a UC QP.
    Unreliable,
    /// A request other than a Send or a Send with Immediate Data, on a UD QP.
    NoDatagram,
    /// A datagram longer than the MTU.
    DatagramLength { len: u32, mtu: u32 },
    /// A datagram from a GID index that the device does not have.
    DatagramSource { index: u64 },
    /// A datagram to an address that the administrator does not allow.
    DatagramForbidden { to: IpAddr },
    /// A Send with Immediate Data on an iWARP QP.
    NoImmediateSends,
    /// A Read or atomic operation on a QP with an ORD of 0.
    NoOrd,
    /// The SGEs exceed the maximum length of a message.
    MessageLength,
    /// The message exceeds `max_msg_sz` of the RoCE device.
    MessageTooLong { len: u32, most: u32 },
    /// A local SGE cannot be resolved.
    LocalKey { fault: LocalFault, lkey: u32, addr: u64, len: u32, write: bool },
    /// The QP may not invalidate this STag.
    NotOwned { fault: LocalFault, stag: Stag },
    /// A request to bind a window has SGEs, inline data or a remote address.
    BindSges,
    /// Binding a window failed.
    Bind { fault: BindFault, window: Stag, address: u64, length: u64 },
    /// A Read or atomic operation that cannot be answered, because the peer has sent its FIN.
    PeerFinished,

    /// The peer has not acknowledged the request in time.
    NoAcknowledgement,
    /// The peer has posted no receive in time.
    ReceiverNotReady,

    // The peer sent an invalid request or response.
    /// `len` bytes of an RDMA Write that may not be placed at `to`.
    Write { fault: RemoteFault, stag: Stag, to: u64, len: u64 },
    /// An RDMA Write segment whose STag differs from that of an earlier segment of the message.
    StagChanged { stag: Stag, to: u64, len: u64 },
    /// An RDMA Read Request for `len` bytes at `to`, which the peer may not read.
    Read { fault: RemoteFault, stag: Stag, to: u64, len: u64 },
    /// An atomic operation on a word that the peer may not change.
    Atomic { fault: RemoteFault, stag: Stag, to: u64 },
    /// An atomic operation at an address that is not a multiple of eight.
    Misaligned { stag: Stag, to: u64 },
    /// The region of a Read was revoked while it was being answered.
    Revoked { stag: Stag, to: u64, len: u64 },
    /// More outstanding Reads and atomic operations than the IRD.
    RequestsFull { ird: u16 },
    /// A Send with Invalidate for an STag that the peer may not invalidate.
    Invalidate { fault: InvalidateFault, stag: Stag },
    /// A Send that found no receive, or none in time.
    NoReceive { waited: bool },
    /// An entry of a receive queue is malformed.
    MalformedReceive,
    /// A Send that does not fit in the receive.
    TooLong { mo: u32, len: usize, capacity: u64 },
    /// A Read Response (or, if `atomic`, an Atomic Response) without an outstanding request.
    NoRequest { atomic: bool },
    /// A Read Response for a buffer other than that of the Read.
    OtherSink { found: Stag, sink: Stag },
    /// A Read Response outside the buffer of the Read.
    OutsideSink { stag: Stag, to: u64, len: u64, size: u32 },
    /// A Read Response of a length other than requested.
    ResponseLength { received: u64, size: u32 },
    /// The buffer of a Read or atomic operation is no longer accessible.
    SinkGone { stag: Stag, to: u64, size: u32 },
    /// An invalid segment. Its Terminate code identifies the cause.
    Segment,

    // The reasons below are not caused by a request of either side.
    /// Memory is inaccessible.
    Memory(MemoryFault),
    /// A shared receive queue died.
    Srq(SrqId, SrqFault),
    /// An administrator ended the connection.
    AdminDisconnect,
    /// A completion queue died.
    Cq(CqId, CqFault),
    /// A client wrote an impossible queue index.
    Queue(&'static str, QueueFault),
    /// TCP ended inside an FPDU.
    CutShort,
    /// A fault rule.
    Injected { fault: FaultName, effect: Effect },
}

/// Effect of a fault rule on a request, a message or a QP.
#[derive(Clone, Copy, Debug)]
pub(super) enum Effect {
    /// The request completes with this status.
    Completes(CompletionStatus),
    /// The message of the peer is refused.
    Refuses { error: RefusedAs, opcode: Opcode },
    /// The stream ends with this Terminate.
    Terminates(TerminateCode),
    /// The QP fails.
    Fails,
}

impl Reason {
    /// Returns the completion status of a request or receive that fails for this reason.
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
            Reason::Injected { effect: Effect::Completes(status), .. } => status,
            _ => CompletionStatus::LocalQpOperation,
        }
    }

    /// Returns the fault that is reported to the peer.
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
            Reason::Injected { effect, .. } => effect.fault(),
            _ => Fault::local(codes::RDMA_LOCAL_CATASTROPHIC),
        }
    }

    /// Returns the asynchronous error that an iWARP or RC responder raises when it refuses a
    /// request of the peer, or `None` if the peer made no invalid request.
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
            Reason::Injected { effect: Effect::Refuses { error, .. }, .. } => match error {
                RefusedAs::AccessError => Some(ResponderError::Access),
                RefusedAs::InvalidRequest => Some(ResponderError::Request),
                RefusedAs::OperationError => None,
            },
            _ => None,
        }
    }

    /// Returns the text of the event for the owner of a QP that fails through no fault of the peer.
    pub(super) fn qp_fatal(self) -> &'static str {
        match self {
            Reason::Cq(..) => "its completion queue is dead",
            Reason::Srq(..) => "its shared receive queue is dead",
            Reason::Queue(..) => "a queue index is invalid",
            Reason::Memory(_) => "its memory is no longer accessible",
            Reason::Injected { .. } => "a fault rule failed it",
            _ => "it cannot continue",
        }
    }

    /// Returns true if the peer addressed memory that it has no access to. A peer that guesses
    /// STags, or offsets of a valid STag, causes only these reasons, and learns from each whether
    /// the guess was right.
    pub(super) fn is_guess(self) -> bool {
        match self {
            Reason::Write { .. }
            | Reason::StagChanged { .. }
            | Reason::Read { .. }
            | Reason::Atomic { .. }
            | Reason::Invalidate { .. }
            | Reason::OtherSink { .. }
            | Reason::OutsideSink { .. } => true,
            // The peer had access to the memory earlier, or addressed no memory.
            _ => false,
        }
    }
}

impl Effect {
    /// Returns the fault that is reported to the peer.
    fn fault(self) -> Fault {
        match self {
            Effect::Refuses { error, opcode } => {
                let code = match (error, opcode) {
                    (RefusedAs::AccessError, Opcode::Read | Opcode::Atomic) => {
                        codes::PROTECTION_ACCESS
                    }
                    (RefusedAs::AccessError, _) => codes::TAGGED_INVALID_STAG,
                    (RefusedAs::InvalidRequest, _) => codes::OPERATION_OPCODE,
                    (RefusedAs::OperationError, _) => codes::DDP_LOCAL_CATASTROPHIC,
                };
                if opcode == Opcode::Read { Fault::read(code) } else { Fault::segment(code) }
            }
            Effect::Terminates(code) => Fault::segment(code),
            Effect::Completes(_) | Effect::Fails => Fault::local(codes::RDMA_LOCAL_CATASTROPHIC),
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

/// Error of an incoming segment.
#[derive(Clone, Copy, Debug)]
pub(super) enum PlacementError {
    /// The peer is at fault, or must at least be informed.
    Fault(Fault, Reason),
    /// The memory could not be reached. Its owner is at fault.
    Memory(MemoryFault),
    /// A receive of this QP cannot take the message, with the fault if its memory could not be
    /// written. The owner of the QP is at fault.
    Receive(Option<MemoryFault>, Reason),
    /// The next receive of this QP, with this `wr_id`, is malformed.
    MalformedReceive(u64, Reason),
    /// The receive queue is corrupt.
    Queue(QueueFault),
    /// The SRQ is corrupt or dead.
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

/// Returns the reason for the part of a Read that was revoked before it was sent. `sent` is the
/// number of bytes already sent.
pub(super) fn revoked(owed: &InboundRead, sent: u32) -> Reason {
    let rest = owed.request.advanced(sent);
    Reason::Revoked { stag: rest.src_stag, to: rest.src_to.0, len: rest.size.into() }
}

/// Returns the DDP code for a Write that may not be placed (RFC 5041 section 7.1, which has no code
/// for a missing right).
fn write_code(fault: RemoteFault) -> TerminateCode {
    match fault {
        RemoteFault::InvalidStag | RemoteFault::NoRight => codes::TAGGED_INVALID_STAG,
        RemoteFault::NotEnabled => codes::OPERATION_OPCODE,
        RemoteFault::NotAssociated => codes::TAGGED_STREAM,
        RemoteFault::Wrap => codes::TAGGED_TO_WRAP,
        RemoteFault::Bounds => codes::TAGGED_BOUNDS,
    }
}

/// Returns the RDMAP code for a Read (RFC 5040 section 7.2) or an atomic operation (RFC 7306 has no
/// code of its own) that may not be carried out.
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
