//! Options of the connection manager, and parameters of its calls.

use std::net::SocketAddr;
use std::time::Duration;

use rnic_abi::types::{QpId, RequestId, SessionId};
use rnic_core::stream::startup::Options;

use super::net::SocketBuffers;
use crate::config::{PortMap, Tcp};

/// Limits and deadlines of the connection manager.
#[derive(Clone, Debug)]
pub struct CmOptions {
    /// Offers and requests in MPA start-up. IRD and ORD are the device's defaults.
    pub startup: Options,
    /// Maximum IRD of an accepted connection.
    pub max_ird: u16,
    /// Maximum ORD of an accepted connection.
    pub max_ord: u16,
    /// Keepalive and timeouts of connections that begin from now on.
    pub tcp: Tcp,
    /// Maps between RDMA ports, which programs use, and TCP ports. Addresses in the API of this
    /// module have RDMA ports.
    pub ports: PortMap,
    /// Connects to this daemon's own listeners use no TCP connection.
    pub direct: bool,
    /// Maximum connections of all users in start-up that hold a descriptor and no QP. At the limit,
    /// a new connection evicts a connection of the user with the most.
    pub startups: usize,
    /// Configuration key of `startups`.
    pub startups_key: String,
    /// Kernel buffer sizes of the daemon's own connections.
    pub buffers: SocketBuffers,
    /// Connections per second that one remote host may open to the listeners of one user. Further
    /// connections are reset.
    pub peer_connections_per_second: u32,
    /// Invalid STags of one user that a peer's address may use within a minute before that user's
    /// listeners reset its connections.
    pub stag_guesses_per_minute: u32,
    /// Time limit for the TCP handshake.
    pub connect_deadline: Duration,
    /// Time limit for the peer's reply, from the time our request is sent.
    pub reply_deadline: Duration,
    /// Time limit for the peer's request, from the time its connection is accepted.
    pub request_deadline: Duration,
    /// Time limit for the application to accept or reject a request.
    pub decision_deadline: Duration,
    /// Time limit for the peer to close after a rejection.
    pub close_deadline: Duration,
}

/// Parameters of a connect.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// Owner of the QP.
    pub session: SessionId,
    /// The QP to connect, in state Idle.
    pub qp: QpId,
    /// Address and port of the peer.
    pub peer: SocketAddr,
    /// Local address, if the application chose one.
    pub local: Option<SocketAddr>,
    /// IRD to offer; `None` for the device's default.
    pub ird: Option<u16>,
    /// ORD to request; `None` for the device's default.
    pub ord: Option<u16>,
    /// Private data for the peer's application.
    pub private_data: Vec<u8>,
    /// Asks for the peer-to-peer model (RFC 6581 section 8).
    pub peer_to_peer: bool,
}

/// Parameters of an accept.
#[derive(Clone, Debug)]
pub struct AcceptParams {
    /// The undecided request, from its event.
    pub request: RequestId,
    /// The QP to connect.
    pub qp: QpId,
    /// IRD to offer; `None` for the ORD that the peer requests, within the maximum.
    pub ird: Option<u16>,
    /// ORD to request; `None` for the IRD that the peer offers, within the maximum.
    pub ord: Option<u16>,
    /// Private data for the peer's application.
    pub private_data: Vec<u8>,
}
