//! Connections of RC and UC QPs, and undecided requests for them.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use rnic_abi::abi::control::RcOffer;
use rnic_abi::roce::PortSpace;
use rnic_abi::roce::connection::{Ids, Request, Service};
use rnic_abi::roce::mad::{Bytes, Exchange};
use rnic_abi::types::{AddressPair, ListenerId, QpId, RequestId, SessionId};

use crate::cm::Sender;

/// Parameters of a connection request.
#[derive(Clone, Debug)]
pub struct RcConnectParams {
    /// Owner of the QP.
    pub session: SessionId,
    /// The QP to connect.
    pub qp: QpId,
    /// Type of the QP.
    pub kind: Service,
    /// Port space of the peer's port.
    pub space: PortSpace,
    /// Address and port of the peer.
    pub peer: SocketAddr,
    /// Local address, if the application chose one.
    pub local: Option<SocketAddr>,
    /// This end's parameters.
    pub offer: RcOffer,
    /// GUID of the device.
    pub guid: u64,
    /// Private data for the peer's application.
    pub private_data: Vec<u8>,
}

/// Parameters of an accept.
#[derive(Clone, Debug)]
pub struct RcAcceptParams {
    /// The undecided request, from its event.
    pub request: RequestId,
    /// The QP to connect.
    pub qp: QpId,
    /// Type of the QP, which must be the requested type. `None` skips this check, for a QP that
    /// only stands for a QP of the program.
    pub kind: Option<Service>,
    /// This end's parameters.
    pub offer: RcOffer,
    /// GUID of the device.
    pub guid: u64,
    /// Private data for the peer's application.
    pub private_data: Vec<u8>,
}

/// The slots of all connections and requests.
#[derive(Debug, Default)]
pub(in crate::cm) struct Connections {
    /// By this end's ID.
    pub(super) by_id: HashMap<u32, usize>,
    /// By QP.
    pub(super) by_qp: HashMap<QpId, usize>,
    /// At the passive end, by the requester and the IDs of its request.
    pub(super) by_request: HashMap<(IpAddr, Exchange), usize>,
    /// By the peer's address and QP, once the connection is accepted.
    pub(super) by_peer: HashMap<(IpAddr, QpId), usize>,
    settled: usize,
}

impl Connections {
    /// Returns the number of connections that are established or in timewait.
    pub(in crate::cm) fn settled(&self) -> usize {
        self.settled
    }

    /// Changes the phase of a connection.
    pub(super) fn set_phase(&mut self, connection: &mut RcConnection, phase: Phase) {
        self.settled -= usize::from(connection.phase.is_settled());
        self.settled += usize::from(phase.is_settled());
        connection.phase = phase;
    }

    pub(in crate::cm) fn forget_request(&mut self, asked: &RcRequest) {
        self.by_id.remove(&asked.id);
        self.by_request.remove(&(asked.from(), asked.asked.exchange));
    }

    pub(in crate::cm) fn forget(&mut self, key: usize, connection: &RcConnection) {
        self.settled -= usize::from(connection.phase.is_settled());
        self.by_id.remove(&connection.ids.exchange.id);
        if let Some(asked) = connection.asked {
            self.by_request.remove(&asked);
        }
        self.leave(key, connection);
    }

    /// Frees the QPs of both ends for another connection.
    pub(super) fn leave(&mut self, key: usize, connection: &RcConnection) {
        if self.by_qp.get(&connection.qp) == Some(&key) {
            self.by_qp.remove(&connection.qp);
        }
        let peer = (connection.addresses.peer.ip(), connection.remote_qp);
        if self.by_peer.get(&peer) == Some(&key) {
            self.by_peer.remove(&peer);
        }
    }
}

/// A request that the program has not decided.
#[derive(Debug)]
pub struct RcRequest {
    pub(in crate::cm) session: SessionId,
    pub(in crate::cm) listener: ListenerId,
    pub(in crate::cm) request: RequestId,
    /// This end's ID.
    pub(super) id: u32,
    pub(super) asked: Box<Request>,
}

impl RcRequest {
    /// Returns the sender of messages about the request, which concern no QP yet.
    pub(super) fn sender(&self) -> Sender {
        Sender { session: self.session, qp: None }
    }

    /// Returns the requester's address.
    pub(super) fn from(&self) -> IpAddr {
        self.asked.from.ip()
    }

    /// Returns the local and the requester's address.
    pub(in crate::cm) fn ends(&self) -> (IpAddr, IpAddr) {
        (self.asked.to, self.from())
    }

    /// Returns the IDs of this end's messages.
    pub(super) fn ids(&self) -> Ids {
        let Exchange { transaction, id } = self.asked.exchange;
        Ids { exchange: Exchange { transaction, id: self.id }, receiver: id }
    }
}

/// A connection in any phase.
#[derive(Debug)]
pub struct RcConnection {
    pub(in crate::cm) session: SessionId,
    pub(in crate::cm) qp: QpId,
    pub(super) phase: Phase,
    /// IDs of this end's messages. The receiver's is 0 until its first message.
    pub(super) ids: Ids,
    /// At the passive end, the key in [`Connections::by_request`].
    pub(super) asked: Option<(IpAddr, Exchange)>,
    pub(super) addresses: AddressPair,
    pub(super) offer: RcOffer,
    pub(super) remote_qp: QpId,
    /// The last message sent, to repeat it.
    pub(super) message: Box<Bytes>,
    /// Number of times that the message may still be repeated.
    pub(super) repeats: u8,
    /// The peer has asked for more time since the message was last sent.
    pub(super) delayed: bool,
}

impl RcConnection {
    /// Returns the sender of this end's messages.
    pub(super) fn sender(&self) -> Sender {
        Sender { session: self.session, qp: Some(self.qp) }
    }

    /// Returns the local and the peer's address.
    pub(in crate::cm) fn ends(&self) -> (IpAddr, IpAddr) {
        (self.addresses.local.ip(), self.addresses.peer.ip())
    }
}

/// Phase of a connection (IBTA specification, volume 1, section 12.9.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Has sent REQ.
    Requesting,
    /// Has received REP, which the program has not confirmed.
    Replied,
    /// Has sent REP.
    Accepting,
    /// Has sent or received RTU.
    Established,
    /// Has sent DREQ.
    Disconnecting,
    /// Has ended. Delayed messages may still arrive.
    Timewait,
}

impl Phase {
    /// Returns true unless the connection is in start-up or closing.
    fn is_settled(self) -> bool {
        matches!(self, Phase::Established | Phase::Timewait)
    }
}
