//! Connection and asynchronous events.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::*;

/// A connection or asynchronous event. `context` is the one last set for the object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A peer asks to connect.
    ConnectionRequest {
        /// The listener it came to.
        listener: ListenerId,
        /// The listener's context.
        context: u64,
        /// To be accepted or rejected.
        request: RequestId,
        /// Our end, that of the listener, and the peer.
        addresses: AddressPair,
        /// Inbound reads the peer offers: the most our ORD may be; `None` if not negotiated.
        peer_ird: Option<u16>,
        /// Outbound reads the peer wants: what our IRD should be; `None` if not negotiated.
        peer_ord: Option<u16>,
        /// MPA revision of the request; 0 of one for a queue pair of datagrams, too.
        revision: u8,
        /// Whether the peer asked for the peer-to-peer model.
        peer_to_peer: bool,
        /// The peer's private data; with datagrams filled up with zeros.
        private_data: Vec<u8>,
    },
    /// A connection request is gone: the peer gave up before it was decided.
    RequestWithdrawn {
        /// The listener it came to.
        listener: ListenerId,
        /// The listener's context.
        context: u64,
        /// The request, no longer valid; 0 if none will ever come, on a connection that was passed
        /// with `ServeOver`.
        request: RequestId,
        /// Why the peer's request is gone, as a sentence for people.
        reason: String,
    },
    /// The connection stands; precedes its first completion.
    Established {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Our end and the peer, ports chosen by the kernel included.
        addresses: AddressPair,
        /// Inbound reads in force.
        ird: u16,
        /// Outbound reads in force.
        ord: u16,
        /// Private data of the peer's reply; empty on the accepting side.
        private_data: Vec<u8>,
        /// MPA revision of the exchange: 0 with an RDMAC peer (RFC 5044 appendix C).
        revision: u8,
    },
    /// The peer rejected the connection. The QP is Idle again; one of datagrams is as it was.
    Rejected {
        /// The QP that connected.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Private data of the rejection.
        private_data: Vec<u8>,
    },
    /// No connection came about. The QP is Idle again if it connected, in Error if it accepted; one
    /// of datagrams is as it was.
    Unreachable {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// The system's number for it (`errno(3)`): `ECONNREFUSED` where nobody listens,
        /// `ETIMEDOUT` where nobody answers, `EPROTO` where the peer does not speak MPA.
        errno: u16,
        /// Why there is no connection, as a sentence for people.
        reason: String,
    },
    /// The connection has ended; follows its flush completions.
    Disconnected {
        /// The QP that was connected.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// In order, by a Terminate, lost, or torn down at this end.
        reason: DisconnectReason,
    },
    /// A completion queue is dead: it overflowed, or its memory was scribbled over.
    CqError {
        /// The completion queue; its QPs go to Error.
        cq: CqId,
        /// The CQ's context.
        context: u64,
    },
    /// A QP went to Error for a reason other than its connection.
    QpFatal {
        /// The QP, now in Error.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// What was wrong, as a sentence for people.
        reason: String,
    },
    /// Events were dropped because nobody read them.
    EventsLost {
        /// Events dropped since the last `EventsLost`.
        count: u64,
    },
    /// The peer has finished sending (FIN between two messages). Receives are flushed; sends go on
    /// until this side disconnects, and `Disconnected` follows then.
    PeerClosed {
        /// The QP, which still sends.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// Fewer receives are posted to a shared receive queue than its limit says; the limit is
    /// disarmed.
    SrqLimit {
        /// The queue, to be filled up and armed again.
        srq: SrqId,
        /// The SRQ's context.
        context: u64,
    },
    /// A shared receive queue is dead: its memory was scribbled over. Its QPs go to Error.
    SrqError {
        /// The queue; it takes no more receives.
        srq: SrqId,
        /// The SRQ's context.
        context: u64,
    },
    /// One QP has used up more than its fair share of a shared receive queue's receives (RFC 5040
    /// section 8.1.2, RFC 5042 section 6.4.2): of the last `of_last` that were taken, `taken` by
    /// it.
    SrqUnfair {
        /// The queue whose receives were taken.
        srq: SrqId,
        /// The SRQ's context.
        context: u64,
        /// The QP whose peer takes so many.
        qp: QpId,
        /// Receives it took, of the last `of_last`.
        taken: u32,
        /// Receives that all QPs took in the same time.
        of_last: u32,
    },
    /// A QP in Error has taken its last receive from its shared receive queue, and what it had
    /// taken has been flushed.
    LastWqeReached {
        /// The QP, in Error; it may be destroyed without losing a receive.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// The attached address space is gone (by `exec`, or because copies did not return); its
    /// regions are revoked.
    Detached {
        /// Why the address space is gone, as a sentence for people.
        reason: String,
    },
    /// The peer has finished sending, but messages that wait for receives are in front of its FIN
    /// ([`RnrPolicy::Wait`](crate::types::RnrPolicy)); once per connection, and only over TCP.
    /// `PeerClosed` follows once all of them have been received.
    PeerClosing {
        /// The QP that lacks receives.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// The first message has come to a QP in Rtr (`IBV_EVENT_COMM_EST`).
    CommunicationEstablished {
        /// The QP, wired by hand.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// What a QP in Sqd had begun is done (`IBV_EVENT_SQ_DRAINED`).
    SendQueueDrained {
        /// The QP, wired by hand.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// A queue pair of datagrams serves the port that a QP was to be told of.
    Resolved {
        /// The QP that `Connect` named.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Our end and the peer, whose address is its GID.
        addresses: AddressPair,
        /// Index of the device's GID to send from.
        source: u16,
        /// The queue pair that serves.
        remote_qp: QpId,
        /// Its Q_Key.
        q_key: u32,
        /// Private data of the peer's reply, filled up with zeros.
        private_data: Vec<u8>,
    },
    /// The peer named memory that it may not use so (`IBV_EVENT_QP_ACCESS_ERR`).
    AccessError {
        /// The RC QP that refused the request, now in Error.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// A request of the peer is invalid or too long (`IBV_EVENT_QP_REQ_ERR`).
    RequestError {
        /// The RC QP that refused the request, now in Error.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// The GID table of the RoCE device has changed; `QueryGids` returns the new one.
    GidsChanged,
}

/// How a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DisconnectReason {
    /// In order, after a FIN each way.
    Orderly,
    /// By a Terminate, ours or the peer's.
    Terminate {
        /// The end that sent the Terminate.
        origin: TerminateOrigin,
        /// Layer, error type and error code of the Terminate (RFC 5040 section 4.8).
        code: TerminateCode,
        /// The headers it enclosed, as on the wire (at most 48 bytes).
        headers: Vec<u8>,
    },
    /// The TCP connection was lost.
    Lost {
        /// What the kernel or the peer did, as a sentence for people.
        why: String,
    },
    /// This side aborted it.
    Aborted,
}

/// How it ended, as the rest of a sentence about a connection.
impl fmt::Display for DisconnectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DisconnectReason::Orderly => f.write_str("it was closed in order"),
            DisconnectReason::Terminate { origin: TerminateOrigin::Local, code, .. } => {
                write!(f, "this side found a fault and sent Terminate {code}")
            }
            DisconnectReason::Terminate { origin: TerminateOrigin::Peer, code, .. } => {
                write!(f, "the peer sent Terminate {code}")
            }
            DisconnectReason::Lost { why } => write!(f, "it was lost: {why}"),
            DisconnectReason::Aborted => f.write_str("this side aborted it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_has_words() {
        let code = TerminateCode { layer: 0, etype: 0, code: 0 };
        let terminate =
            |origin| DisconnectReason::Terminate { origin, code, headers: Vec::new() }.to_string();
        assert_eq!(
            terminate(TerminateOrigin::Peer),
            "the peer sent Terminate 0/0/00 (RDMA local catastrophic error, its program or device \
             failed)"
        );
        assert!(terminate(TerminateOrigin::Local).starts_with("this side found a fault"));
        let lost = DisconnectReason::Lost { why: "reset".into() };
        assert_eq!(lost.to_string(), "it was lost: reset");
        assert_eq!(DisconnectReason::Orderly.to_string(), "it was closed in order");
        assert_eq!(DisconnectReason::Aborted.to_string(), "this side aborted it");
    }
}
