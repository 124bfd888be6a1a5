//! The differences between the transports of a QP.
//!
//! The rest of the engine asks here instead of comparing transports. State that only some
//! transports have is elsewhere: the layer of RC and UC above an iWARP stream in [`rc`](super::rc),
//! and datagrams in [`datagram`](super::datagram).

use std::time::Duration;

use super::reason::{PlacementError, Reason};
use crate::rdmap::{Terminate, codes};
use crate::stream::Fault;
use rnic_abi::abi::queue::SendOpcode;
use rnic_abi::types::{CompletionStatus, TerminateCode};

/// Transport of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    /// Reliable connection over a single iWARP stream. The QP ends with the stream.
    Iwarp,
    /// Reliable connection as on a RoCE adapter: the peer acknowledges requests.
    Rc,
    /// Unreliable connection: requests are done when sent, and the receiver may drop messages.
    Uc,
    /// Unreliable datagrams, without a stream.
    Ud,
}

/// Handling of a Send that finds no receive.
#[derive(Clone, Copy, Debug)]
pub(super) enum MissingReceive {
    /// The stream ends.
    Ends,
    /// The Send waits for a receive for at most `time`. If `passes`, ULPDUs that concern the other
    /// direction pass it.
    Waits { time: Duration, passes: bool },
    /// The Send is dropped, and the stream continues.
    Drops,
}

impl Transport {
    /// Returns true for an imitation of a RoCE adapter over an iWARP stream.
    fn is_rc_or_uc(self) -> bool {
        match self {
            Transport::Rc | Transport::Uc => true,
            Transport::Iwarp | Transport::Ud => false,
        }
    }

    // --- Streams -----------------------------------------------------------------------------

    /// Returns true if the QP outlives its stream and may get another one. The end of the stream is
    /// then no fault of the QP, unless a Terminate blames a request.
    #[inline]
    pub(super) fn outlives_stream(self) -> bool {
        self.is_rc_or_uc()
    }

    /// Returns true if the program is notified of the end of the connection.
    pub(super) fn emits_disconnected(self) -> bool {
        match self {
            Transport::Iwarp => true,
            Transport::Rc | Transport::Uc | Transport::Ud => false,
        }
    }

    /// Returns true if the two ends exchange [notices](super::rnr_notice::Notice).
    #[inline]
    pub(super) fn has_notices(self) -> bool {
        self.is_rc_or_uc()
    }

    // --- Requests ----------------------------------------------------------------------------

    /// Returns true if a request is done only when the peer has acknowledged it.
    #[inline]
    pub(super) fn acknowledges(self) -> bool {
        match self {
            Transport::Rc => true,
            Transport::Iwarp | Transport::Uc | Transport::Ud => false,
        }
    }

    /// Returns true if a request with this opcode can be sent over the stream.
    #[inline]
    pub(super) fn carries(self, opcode: SendOpcode) -> bool {
        match self {
            Transport::Iwarp | Transport::Rc => true,
            Transport::Uc | Transport::Ud => !opcode.needs_reliability(),
        }
    }

    /// Returns true if requests follow the rules of a RoCE adapter where those differ from RFC 5040
    /// and RFC 7306: a Send may have immediate data, a Read several SGEs.
    #[inline]
    pub(super) fn has_roce_requests(self) -> bool {
        self.is_rc_or_uc()
    }

    /// Returns true if programs may invalidate only fast-registered regions and windows of type 2,
    /// and may not bind windows to zero-based regions. The kernel's `rxe_invalidate_mr` and
    /// `rxe_check_bind_mw` are as strict. On iWARP no RFC forbids either.
    pub(super) fn restricts_stags(self) -> bool {
        self.is_rc_or_uc()
    }

    /// Returns the length of the longest message in bytes.
    #[inline]
    pub(super) fn max_message(self) -> u32 {
        if self.is_rc_or_uc() { MAX_MESSAGE } else { u32::MAX }
    }

    /// Returns the status of a request whose response is invalid.
    pub(super) fn invalid_response(self, reason: Reason) -> CompletionStatus {
        match reason {
            // A RoCE adapter reports an invalid local key.
            Reason::SinkGone { .. } if self.is_rc_or_uc() => CompletionStatus::LocalProtection,
            _ => reason.status(),
        }
    }

    /// Returns true if a request that fails on this side stops only the send queue (SQE), instead
    /// of ending the QP.
    pub(super) fn stops_send_queue(self) -> bool {
        match self {
            Transport::Uc | Transport::Ud => true,
            Transport::Iwarp | Transport::Rc => false,
        }
    }

    /// Returns the status of the request that a Terminate blames, or `None` if it blames none. On
    /// RC it is the status on a RoCE adapter (IBTA specification, volume 1, section 11.6.2).
    pub(super) fn blamed_status(self, t: &Terminate<'_>) -> Option<CompletionStatus> {
        let TerminateCode { layer, etype, .. } = t.code;
        match (self, layer, etype) {
            (Transport::Iwarp, 0, 1) => Some(CompletionStatus::RemoteAccess),
            (Transport::Iwarp, ..) => Some(CompletionStatus::RemoteOperation),
            (Transport::Rc, ..) if t.ddp_header.is_none() => None,
            // Remote protection errors, and DDP errors of a tagged buffer.
            (Transport::Rc, 0 | 1, 1) => Some(CompletionStatus::RemoteAccess),
            // The message is too long, or the operation is invalid.
            (Transport::Rc, 0 | 1, 2) => Some(CompletionStatus::RemoteInvalidRequest),
            // An error of the peer's own memory.
            (Transport::Rc, 1, 0) => Some(CompletionStatus::RemoteOperation),
            (Transport::Rc | Transport::Uc | Transport::Ud, ..) => None,
        }
    }

    // --- Messages of the peer ----------------------------------------------------------------

    /// Returns the handling of a Send that finds no receive. `timeout` applies to iWARP.
    pub(super) fn missing_receive(self, timeout: Option<Duration>) -> MissingReceive {
        match (self, timeout) {
            (Transport::Iwarp, None) => MissingReceive::Ends,
            (Transport::Iwarp, Some(time)) => MissingReceive::Waits { time, passes: false },
            // The peer decides how long it waits for a receive.
            (Transport::Rc, _) => MissingReceive::Waits { time: Duration::MAX, passes: true },
            (Transport::Uc | Transport::Ud, _) => MissingReceive::Drops,
        }
    }

    /// Returns true if this error of a segment only drops its message. Neither end is notified, and
    /// later messages are carried out (IBTA specification, volume 1, section 9.9.3, faults of class
    /// D).
    pub(super) fn drops(self, error: &PlacementError) -> bool {
        let PlacementError::Fault(_, reason) = error else { return false };
        match self {
            Transport::Iwarp | Transport::Rc => false,
            Transport::Uc | Transport::Ud => matches!(
                reason,
                Reason::NoReceive { .. }
                    | Reason::TooLong { .. }
                    | Reason::Write { .. }
                    | Reason::StagChanged { .. }
            ),
        }
    }

    /// Returns true if a Write that exceeds its region is refused at its first segment. A RoCE
    /// adapter takes the length from the first packet.
    pub(super) fn checks_whole_write(self) -> bool {
        self.is_rc_or_uc()
    }

    /// Returns true if the responses to earlier requests precede the refusal of a request.
    pub(super) fn responds_before_refusal(self) -> bool {
        match self {
            Transport::Rc => true,
            Transport::Iwarp | Transport::Uc | Transport::Ud => false,
        }
    }

    /// Returns true if the program is notified of a request that this side refuses. A refused
    /// Write, Read or atomic operation completes nothing here.
    pub(super) fn reports_refusal(self, reason: Reason) -> bool {
        match self {
            // An invalid segment need not belong to a request.
            Transport::Iwarp => !matches!(reason, Reason::Segment),
            Transport::Rc => true,
            Transport::Uc | Transport::Ud => false,
        }
    }

    /// Returns the fault of a Terminate for an error of this side's own memory. An RC or UC peer
    /// learns which of its requests failed.
    pub(super) fn own_memory_fault(self, code: TerminateCode) -> Fault {
        if self.is_rc_or_uc() {
            Fault::segment(codes::DDP_LOCAL_CATASTROPHIC)
        } else {
            Fault::local(code)
        }
    }
}

/// Bytes of the longest message of an RC or UC QP. `ibv_query_port` reports it (`max_msg_sz`).
const MAX_MESSAGE: u32 = 1 << 30;
