//! Results of the connection manager.

use std::net::IpAddr;

use rnic_abi::abi::control::{RcOffer, RcPeer};
use rnic_abi::roce::mad::Bytes as Mad;
use rnic_abi::types::{AddressPair, ListenerId, QpId, RequestId, SessionId};
use rnic_core::stream::startup::Negotiated;

use super::connect_failure::ConnectFailure;
use crate::socket::Socket;

/// Results of binding, listening, connecting and accepting.
#[derive(Debug)]
pub enum CmEvent {
    /// A peer asks to connect.
    Request {
        /// The listener that received it.
        listener: ListenerId,
        /// The request to accept or reject.
        request: RequestId,
        /// The listener's end and the peer.
        addresses: AddressPair,
        /// IRD that the peer offers, if negotiated.
        peer_ird: Option<u16>,
        /// ORD that the peer requests, if negotiated.
        peer_ord: Option<u16>,
        /// MPA revision of the request.
        revision: u8,
        /// The peer asked for the peer-to-peer model.
        peer_to_peer: bool,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// An undecided request has ended.
    Withdrawn {
        /// The listener that received it.
        listener: ListenerId,
        /// The request, no longer valid.
        request: RequestId,
        /// Why it ended: the peer, a deadline, or a socket error.
        reason: String,
    },
    /// No request will arrive on a connection that a client passed.
    NoRequest {
        /// The listener that serves it.
        listener: ListenerId,
        /// Reason why the request was withdrawn.
        reason: String,
    },
    /// The kernel has taken the rest of a rejection that was [`Rejection::Sending`], or its
    /// connection has ended.
    Returned {
        /// The session that rejected.
        session: SessionId,
    },
    /// The result of [`ConnectionManager::ask_back`](super::ConnectionManager::ask_back).
    Answered {
        /// The request, still undecided.
        request: RequestId,
        /// Private data of the answer, or why there is no answer.
        answer: Result<Vec<u8>, String>,
    },
    /// TCP is connected, and the MPA request is being sent.
    Reached {
        /// The QP that connects.
        qp: QpId,
    },
    /// Start-up has finished on a TCP connection, as initiator or as responder.
    ConnectedTcp {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The connection, deregistered from the manager's poll.
        stream: Socket,
        /// Parameters that both ends agreed on.
        negotiated: Box<Negotiated>,
        /// Our end and the peer.
        addresses: AddressPair,
    },
    /// Start-up has finished between two QPs of this daemon.
    ConnectedDirect {
        /// The end that connected.
        active: Box<DirectEnd>,
        /// The end that accepted.
        passive: Box<DirectEnd>,
    },
    /// The peer's application rejected the connection.
    Rejected {
        /// The QP that connected.
        qp: QpId,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// Connecting failed.
    Unreachable {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The failure: TCP, MPA or a deadline.
        why: ConnectFailure,
    },
    /// A UD QP serves the requested port.
    Resolved {
        /// The QP that resolves the port.
        qp: QpId,
        /// Our end and the peer.
        addresses: AddressPair,
        /// Index of the device's GID that the peer uses for us.
        source: u16,
        /// The UD QP that serves the port.
        remote_qp: QpId,
        /// Q_Key of that QP.
        q_key: u32,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// A peer asks to connect its RC or UC QP.
    RcRequest {
        /// The listener that received it.
        listener: ListenerId,
        /// The request to accept or reject.
        request: RequestId,
        /// The listener's end and the peer.
        addresses: AddressPair,
        /// The peer's QP and its parameters.
        peer: RcPeer,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// The peer accepts the connection of an RC or UC QP.
    RcReply {
        /// The QP that connects.
        qp: QpId,
        /// Our end and the peer.
        addresses: AddressPair,
        /// The peer's QP and its parameters.
        peer: RcPeer,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// The peer has confirmed the connection that an RC or UC QP accepted.
    RcEstablished {
        /// The QP that accepted.
        qp: QpId,
        /// Our end and the peer.
        addresses: AddressPair,
        /// This end's parameters.
        offer: RcOffer,
    },
    /// The peer rejected the connection of an RC or UC QP.
    RcRejected {
        /// The QP that connected or accepted.
        qp: QpId,
        /// PSN that this end offered. It identifies the program's request.
        psn: u32,
        /// Reason code.
        reason: u16,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// Connecting an RC or UC QP failed.
    RcUnreachable {
        /// The QP that connected or accepted.
        qp: QpId,
        /// The failure.
        why: ConnectFailure,
    },
    /// The peer of an established connection has requested another one with the same QP.
    RcStale {
        /// The QP that is connected.
        qp: QpId,
        /// The peer's QP.
        remote_qp: QpId,
        /// The peer's address.
        peer: IpAddr,
    },
    /// The connection of an RC or UC QP has ended.
    RcDisconnected {
        /// The QP that was connected.
        qp: QpId,
    },
    /// A message of a session, before it is sent. Only while messages are reported.
    Message(Box<CmMessage>),
    /// A management datagram (MAD) to send between QP1 of two ports.
    Management {
        /// The device's own address.
        from: IpAddr,
        /// Address of the destination port.
        to: IpAddr,
        /// The datagram.
        mad: Box<Mad>,
    },
}

/// A message of a session.
#[derive(Debug)]
pub struct CmMessage {
    /// The session, and the QP if the message concerns one.
    pub sender: Sender,
    /// The device's own address.
    pub from: IpAddr,
    /// Address of the destination port.
    pub to: IpAddr,
    /// The message.
    pub mad: Mad,
}

/// Session that sends a message, and the QP if the message concerns one.
#[derive(Clone, Copy, Debug)]
pub struct Sender {
    /// The session.
    pub session: SessionId,
    /// The QP that connects, is connected, or has accepted.
    pub qp: Option<QpId>,
}

/// Progress of a rejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// The caller has nothing to wait for.
    Done,
    /// The kernel has not taken all of the reply on a socket that a client passed. The client may
    /// use the socket again after [`CmEvent::Returned`].
    Sending,
}

/// One end of a connection inside this daemon.
#[derive(Debug)]
pub struct DirectEnd {
    /// The QP at this end.
    pub qp: QpId,
    /// Parameters that both ends agreed on, as this end sees them.
    pub negotiated: Negotiated,
    /// Addresses as this end sees them.
    pub addresses: AddressPair,
}
