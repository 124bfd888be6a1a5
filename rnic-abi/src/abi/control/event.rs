//! Connection and asynchronous events.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::cm::RcPeer;
use crate::types::*;

/// A connection or asynchronous event. `context` is the object's context when the event is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A peer asks to connect.
    ConnectionRequest {
        /// The listener that received it.
        listener: ListenerId,
        /// The listener's context.
        context: u64,
        /// The request, to accept or reject.
        request: RequestId,
        /// The listener's address and the peer's.
        addresses: AddressPair,
        /// Inbound reads offered by the peer, an upper bound for our ORD; `None` if not negotiated.
        peer_ird: Option<u16>,
        /// Outbound reads requested by the peer, which our IRD should cover; `None` if not
        /// negotiated.
        peer_ord: Option<u16>,
        /// MPA revision of the request; 0 for UD or an RDMAC peer.
        revision: u8,
        /// True if the peer requests the peer-to-peer model.
        peer_to_peer: bool,
        /// The peer's private data, padded with zeros in a request for a UD QP.
        private_data: Vec<u8>,
    },
    /// The peer gave up before its connection request was accepted or rejected.
    RequestWithdrawn {
        /// The listener that received it.
        listener: ListenerId,
        /// The listener's context.
        context: u64,
        /// The request, no longer valid. 0 if a connection passed with `ServeOver` ended before its
        /// request arrived.
        request: RequestId,
        /// Human-readable explanation.
        reason: String,
    },
    /// The connection is established. Precedes the first completion of the connection.
    Established {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Both ends, with the ports that the kernel chose.
        addresses: AddressPair,
        /// Maximum inbound reads, as negotiated.
        ird: u16,
        /// Maximum outbound reads, as negotiated.
        ord: u16,
        /// Private data of the peer's reply; empty on the accepting side.
        private_data: Vec<u8>,
        /// MPA revision of the exchange: 0 with an RDMAC peer (RFC 5044 appendix C).
        revision: u8,
    },
    /// The peer rejected the connection. The QP is Idle again; a UD QP is unchanged.
    Rejected {
        /// The QP that connected.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Private data of the rejection.
        private_data: Vec<u8>,
    },
    /// The connection attempt failed. The QP is Idle again if it connected, in Error if it
    /// accepted; a UD QP is unchanged.
    Unreachable {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Error number (`errno(3)`): `ECONNREFUSED` if no listener has this address, `ETIMEDOUT`
        /// if the peer does not answer, `EPROTO` if it does not use MPA.
        errno: u16,
        /// Human-readable explanation.
        reason: String,
    },
    /// The connection has ended. Follows its flushed completions.
    Disconnected {
        /// The QP that was connected.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Reason why the connection ended.
        reason: DisconnectReason,
    },
    /// A completion queue has overflowed, or the client corrupted it.
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
        /// Human-readable explanation.
        reason: String,
    },
    /// Events were dropped because the client did not read them.
    EventsLost {
        /// Events dropped since the last `EventsLost`.
        count: u64,
    },
    /// The peer has finished sending: its FIN follows a complete message. Receives are flushed.
    /// Sends continue until this side disconnects, then `Disconnected` follows.
    PeerClosed {
        /// The QP, which can still send.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// A shared receive queue has fewer posted receives than its limit, which is now disarmed.
    SrqLimit {
        /// The queue, to refill and arm again.
        srq: SrqId,
        /// The SRQ's context.
        context: u64,
    },
    /// The client corrupted the memory of a shared receive queue. Its QPs go to Error.
    SrqError {
        /// The queue, which can no longer be used.
        srq: SrqId,
        /// The SRQ's context.
        context: u64,
    },
    /// A QP has taken more than its fair share of a shared receive queue (RFC 5040 section 8.1.2,
    /// RFC 5042 section 6.4.3.1): `taken` of the last `of_last` receives.
    SrqUnfair {
        /// The shared receive queue.
        srq: SrqId,
        /// The SRQ's context.
        context: u64,
        /// The QP that takes too many receives.
        qp: QpId,
        /// Receives taken by this QP.
        taken: u32,
        /// Receives taken by all QPs in the same period.
        of_last: u32,
    },
    /// A QP in Error takes no more receives from its shared receive queue. The receives that it
    /// had taken are flushed.
    LastWqeReached {
        /// The QP, in Error; it may be destroyed without losing a receive.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// The attached address space is gone (after `exec`), or copies to or from it did not return
    /// in time. Its regions are revoked.
    Detached {
        /// Human-readable explanation.
        reason: String,
    },
    /// The peer has finished sending, but messages before its FIN still wait for receives
    /// ([`RnrPolicy::Wait`](crate::types::RnrPolicy)). Sent at most once per connection, over TCP
    /// only. `PeerClosed` follows after the last of these messages.
    PeerClosing {
        /// The QP, which needs more receives.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// A QP in Rtr has received its first message (`IBV_EVENT_COMM_EST`).
    CommunicationEstablished {
        /// The RC or UC QP.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// A QP in Sqd has completed the requests that it had started (`IBV_EVENT_SQ_DRAINED`).
    SendQueueDrained {
        /// The QP of the RoCE device.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// The peer has reported the UD QP that serves a port.
    Resolved {
        /// The QP passed to `Connect`.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Both ends; the peer's address is its GID.
        addresses: AddressPair,
        /// Index of the device's GID to use as the source.
        source: u16,
        /// The UD QP that serves the port.
        remote_qp: QpId,
        /// Its Q_Key.
        q_key: u32,
        /// Private data of the peer's reply, padded with zeros.
        private_data: Vec<u8>,
    },
    /// The peer lacks the right to access memory that its request used
    /// (`IBV_EVENT_QP_ACCESS_ERR`).
    AccessError {
        /// The RC QP that refused the request, now in Error.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// A peer's request is invalid or too long (`IBV_EVENT_QP_REQ_ERR`).
    RequestError {
        /// The RC QP that refused the request, now in Error.
        qp: QpId,
        /// The QP's context.
        context: u64,
    },
    /// The GID table has changed; `QueryGids` and `QueryDevice` return the new one.
    GidsChanged,
    /// A peer asks to connect its RC or UC QP (REQ).
    RcRequest {
        /// The listener that received it.
        listener: ListenerId,
        /// The listener's context.
        context: u64,
        /// The request, to accept with `AcceptRc` or to reject.
        request: RequestId,
        /// The listener's address and the peer's.
        addresses: AddressPair,
        /// The peer's QP and its parameters.
        peer: RcPeer,
        /// The peer's private data, padded with zeros to 56 bytes.
        private_data: Vec<u8>,
    },
    /// The peer accepts the connection of an RC or UC QP (REP). `EstablishRc` confirms it.
    RcReply {
        /// The QP passed to `ConnectRc`.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Both ends.
        addresses: AddressPair,
        /// The peer's QP and its parameters.
        peer: RcPeer,
        /// The peer's private data, padded with zeros to 196 bytes.
        private_data: Vec<u8>,
    },
    /// The peer rejected the connection of an RC or UC QP (REJ). The QP keeps its state.
    RcRejected {
        /// The QP passed to `ConnectRc` or `AcceptRc`.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Reason code (IBTA specification, volume 1, section 12.6.7.2): 28 if the program
        /// rejected the request, 8 if no program listens.
        reason: u16,
        /// Private data of the rejection, padded with zeros to 148 bytes.
        private_data: Vec<u8>,
    },
    /// A device was added or removed; `QueryDevice` returns the new list.
    DevicesChanged,
    /// An asynchronous event that a fault rule raises.
    Async {
        /// Number of the event (`ibv_event_type`).
        event: u32,
        /// The object concerned.
        object: AsyncObject,
    },
    /// A fault rule failed the resolution of an address or a route.
    ResolutionFailed {
        /// The number that the library chose ([`LibraryCall`](super::LibraryCall)).
        context: u64,
        /// Error number (`errno(3)`).
        errno: u16,
    },
    /// A fault rule has removed a device, as if it were unplugged. Its QPs move to Error. On the
    /// contexts of this device the library fails all later verbs, even if a device with this name
    /// is added again.
    DeviceRemoved {
        /// Name of the device.
        device: String,
    },
    /// A datagram was lost: the QP dropped it, or the daemon has no QP for it. Sent once per reason
    /// until the QP is reset; the counter `dropped` of the receiver counts all.
    DatagramLost {
        /// The UD QP that dropped or sent it.
        qp: QpId,
        /// The QP's context.
        context: u64,
        /// Human-readable explanation.
        reason: String,
    },
}

/// Object of an asynchronous event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AsyncObject {
    /// A device or its port, by the name of the device.
    Device(String),
    /// A queue pair.
    Qp(QpId),
    /// A completion queue.
    Cq(CqId),
    /// A shared receive queue.
    Srq(SrqId),
}

/// Reason why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DisconnectReason {
    /// Graceful close: each side sent a FIN.
    Orderly,
    /// This side or the peer sent a Terminate.
    Terminate {
        /// The end that sent the Terminate.
        origin: TerminateOrigin,
        /// Layer, error type and error code of the Terminate (RFC 5040 section 4.8).
        code: TerminateCode,
        /// The headers that it enclosed, as received or sent (at most 48 bytes).
        headers: Vec<u8>,
    },
    /// The TCP connection was lost.
    Lost {
        /// Human-readable explanation.
        why: String,
    },
    /// This side aborted it.
    Aborted,
}

/// Describes how the connection ended, as a clause without a leading capital.
impl fmt::Display for DisconnectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DisconnectReason::Orderly => f.write_str("it was closed normally"),
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
    fn display_of_every_reason() {
        let code = TerminateCode { layer: 0, etype: 0, code: 0 };
        let terminate =
            |origin| DisconnectReason::Terminate { origin, code, headers: Vec::new() }.to_string();
        assert_eq!(
            terminate(TerminateOrigin::Peer),
            "the peer sent Terminate 0/0/00 (RDMA local catastrophic error: the sender's program \
             or device failed)"
        );
        assert!(terminate(TerminateOrigin::Local).starts_with("this side found a fault"));
        let lost = DisconnectReason::Lost { why: "reset".into() };
        assert_eq!(lost.to_string(), "it was lost: reset");
        assert_eq!(DisconnectReason::Orderly.to_string(), "it was closed normally");
        assert_eq!(DisconnectReason::Aborted.to_string(), "this side aborted it");
    }
}
