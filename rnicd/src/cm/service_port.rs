//! The device's ports and their services: port spaces of rdma_cm on the RoCE device.
//!
//! The daemon manages these port spaces itself: their addresses are those of the device's ports,
//! and no kernel socket is bound to them. Management datagrams between two ends in this daemon are
//! passed in memory. Others leave as [`CmEvent::Management`] and arrive in
//! [`handle_management`](ConnectionManager::handle_management).

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use rnic_abi::abi::control::Refusal;
use rnic_abi::roce::mad::{Bytes, Exchange};
use rnic_abi::roce::{PortSpace, ServiceId, connection, sidr};
use rnic_abi::types::{Gid, ListenerId, SessionId, Time};
use rnic_core::engine::DatagramPort;
use rustix::io::Errno;

use super::listener::{BindTo, Listener, in_use};
use super::{CmEvent, ConnectionManager, Slot, net};
use crate::rate::Buckets;
use crate::system;

/// State shared by all services.
#[derive(Debug)]
pub(super) struct ServicePort {
    /// The device's ports.
    port: Arc<DatagramPort>,
    /// Addresses of 127.0.0.0/8 without a port of their own are aliases of 127.0.0.1.
    has_loopback: bool,
    /// Key of the transaction IDs. They are unpredictable, so only a host that sees a request can
    /// answer it.
    secret: RandomState,
    transactions: u64,
    /// The port chosen last for a bind or a request without a port.
    last_port: u16,
    /// Slots of undecided SIDR requests by source address and exchange.
    pub(super) undecided: HashMap<(IpAddr, Exchange), usize>,
    /// Listeners by port space and port.
    listeners: BTreeSet<(PortSpace, u16, ListenerId)>,
    /// Rate of messages to other daemons without a program's decision.
    answers: Buckets<()>,
}

impl Default for ServicePort {
    fn default() -> Self {
        let port = DatagramPort { gids: Vec::new(), mtu: 0, udp: 0, direct: false };
        ServicePort {
            port: Arc::new(port),
            has_loopback: false,
            secret: RandomState::new(),
            transactions: 0,
            last_port: LAST_PORT,
            undecided: HashMap::new(),
            listeners: BTreeSet::new(),
            answers: Buckets::new(1, Duration::from_secs(1)),
        }
    }
}

impl ServicePort {
    /// Returns true if messages between these addresses stay in this daemon. Aliases never appear
    /// in packets.
    pub(super) fn stays_local(&self, from: IpAddr, to: IpAddr) -> bool {
        self.is_local(to) || self.is_alias(from)
    }

    /// Returns true if only this daemon sends messages from this address.
    pub(super) fn is_local(&self, ip: IpAddr) -> bool {
        self.is_alias(ip) || self.port.direct && self.index_of(ip).is_some()
    }

    /// Returns the index of the device's GID for an address.
    pub(super) fn index_of(&self, ip: IpAddr) -> Option<u16> {
        self.exact_index(self.port_of(ip))
    }

    /// Returns the address of the port that `ip` belongs to: 127.0.0.1 for an alias.
    pub(super) fn port_of(&self, ip: IpAddr) -> IpAddr {
        if self.is_alias(ip) { LOOPBACK } else { ip }
    }

    fn is_alias(&self, ip: IpAddr) -> bool {
        let loopback = self.has_loopback && ip.is_ipv4() && ip.is_loopback();
        loopback && self.exact_index(ip).is_none() && self.exact_index(LOOPBACK).is_some()
    }

    fn exact_index(&self, ip: IpAddr) -> Option<u16> {
        let wanted = Some(Gid::from(ip)).filter(|gid| !gid.is_zero())?;
        let at = self.port.gids.iter().position(|gid| *gid == wanted)?;
        u16::try_from(at).ok()
    }

    /// Returns the device's first address of the same family.
    pub(super) fn first_of_family(&self, ip: IpAddr) -> Option<IpAddr> {
        let taken = self.port.gids.iter().filter(|gid| !gid.is_zero());
        let mut all = taken.map(|gid| gid.address());
        all.find(|own| own.is_ipv4() == ip.is_ipv4())
    }

    pub(super) fn forget_listener(&mut self, id: ListenerId, listener: &Listener) {
        if let Some(space) = listener.space() {
            self.listeners.remove(&(space, listener.address.port(), id));
        }
    }

    pub(super) fn listeners_at(
        &self,
        space: PortSpace,
        port: u16,
    ) -> impl Iterator<Item = ListenerId> {
        let all = (space, port, ListenerId(0))..=(space, port, ListenerId(u32::MAX));
        self.listeners.range(all).map(|(_, _, id)| *id)
    }

    pub(super) fn new_transaction(&mut self) -> u64 {
        self.transactions += 1;
        self.secret.hash_one(self.transactions)
    }

    /// Returns true if a message without a program's decision may be sent. Those to other daemons
    /// are rate-limited.
    pub(super) fn may_answer(&mut self, from: IpAddr, to: IpAddr, now: Time) -> bool {
        self.stays_local(from, to) || self.answers.take((), ANSWERS_PER_SECOND, now)
    }

    /// Forgets a request that is decided or withdrawn.
    pub(super) fn forget(&mut self, from: IpAddr, exchange: Exchange) {
        self.undecided.remove(&(from, exchange));
    }
}

/// Recent replies of a listener, for requesters whose reply was lost.
#[derive(Debug, Default)]
pub struct RecentReplies(VecDeque<Answer>);

#[derive(Debug)]
struct Answer {
    to: IpAddr,
    exchange: Exchange,
    reply: Box<Bytes>,
}

impl RecentReplies {
    pub(super) fn keep(&mut self, to: IpAddr, exchange: Exchange, reply: &Bytes) {
        if self.0.len() >= MAX_REPLIES {
            self.0.pop_front();
        }
        self.0.push_back(Answer { to, exchange, reply: Box::new(*reply) });
    }

    pub(super) fn find(&self, to: IpAddr, exchange: Exchange) -> Option<Bytes> {
        let answer = self.0.iter().find(|a| (a.to, a.exchange) == (to, exchange));
        answer.map(|answer| *answer.reply)
    }
}

impl ConnectionManager {
    /// Sets the ports of the device. With `has_loopback` the port of 127.0.0.1 serves all of
    /// 127.0.0.0/8; otherwise other daemons on this host may use the rest.
    pub fn set_datagram_port(&mut self, port: &Arc<DatagramPort>, has_loopback: bool) {
        self.service.port = port.clone();
        self.service.has_loopback = has_loopback;
    }

    /// Handles a management datagram from another daemon. Ignores datagrams that are neither SIDR
    /// nor connection messages, or that claim to come from this daemon.
    pub fn handle_management(&mut self, from: IpAddr, to: IpAddr, mad: &Bytes, now: Time) {
        if !self.service.is_local(from) {
            self.message_arrived(from, to, mad, now);
        }
    }

    /// Sends a message, in memory or as an event.
    pub(super) fn send_message(&mut self, from: IpAddr, to: IpAddr, message: Bytes, now: Time) {
        if self.service.stays_local(from, to) {
            self.message_arrived(from, to, &message, now);
        } else {
            let mad = Box::new(message);
            self.events.push_back(CmEvent::Management { from, to, mad });
        }
    }

    fn message_arrived(&mut self, from: IpAddr, to: IpAddr, message: &Bytes, now: Time) {
        if let Ok(message) = sidr::parse(message) {
            return self.handle_sidr(from, to, message, now);
        }
        match connection::parse(message) {
            Ok(message) => self.handle_connection(from, to, message, now),
            Err(fault) => tracing::debug!(%from, "a management datagram was dropped: {fault}"),
        }
    }

    /// Returns a port without a listener.
    pub(super) fn free_port(&mut self, space: PortSpace) -> Option<u16> {
        for _ in FIRST_PORT..=LAST_PORT {
            let last = self.service.last_port;
            let next = if last == LAST_PORT { FIRST_PORT } else { last + 1 };
            self.service.last_port = next;
            if self.service.listeners_at(space, next).next().is_none() {
                return Some(next);
            }
        }
        None
    }

    /// Binds an address of a port space without listening. Returns it with the chosen port.
    pub fn bind_service(
        &mut self,
        session: SessionId,
        id: ListenerId,
        space: PortSpace,
        to: BindTo,
    ) -> Result<SocketAddr, Refusal> {
        let mut to = to;
        let ip = to.address.ip();
        let none = |errno: Errno| {
            system::refusal(&format!("bind {} on the RoCE device", to.address), &errno.into())
        };
        if !ip.is_unspecified() && self.service.index_of(ip).is_none() {
            return Err(none(Errno::ADDRNOTAVAIL));
        }
        if to.address.port() == 0 {
            let port = self.free_port(space).ok_or_else(|| none(Errno::ADDRINUSE))?;
            to.address.set_port(port);
        }
        for other in self.service.listeners_at(space, to.address.port()) {
            if let Some(other) = self.listeners.get(&other).filter(|l| l.overlaps(to)) {
                return Err(in_use(to.address, other.address));
            }
        }
        let key = self.insert(Slot::Listener { id, session });
        self.service.listeners.insert((space, to.address.port(), id));
        self.listeners.insert(id, Listener::new_service(session, space, to, key));
        Ok(to.address)
    }

    /// Returns the listener for a service at an address.
    pub(super) fn serves(&self, to: IpAddr, service: ServiceId) -> Option<ListenerId> {
        let (space, port) = service.port()?;
        let serves = |l: &Listener| l.backlog > 0 && l.serves_address((to, port).into());
        let mut at_port = self.service.listeners_at(space, port);
        at_port.find(|id| self.listeners.get(id).is_some_and(serves))
    }

    /// Returns the source address of a request, with the port if the caller chose one.
    pub(super) fn source_of(
        &self,
        named: Option<SocketAddr>,
        peer: SocketAddr,
    ) -> io::Result<SocketAddr> {
        let named = named.map(net::canonical);
        let port = named.map_or(0, |named| named.port());
        let ip = match named.map(|named| named.ip()) {
            Some(ip) if ip.is_ipv4() != peer.is_ipv4() => return Err(Errno::AFNOSUPPORT.into()),
            Some(ip) if !ip.is_unspecified() => ip,
            _ if self.service.index_of(peer.ip()).is_some() => peer.ip(),
            _ => {
                let route_source = route_source(peer.ip())?;
                // If the route's source is not an address of the device, use the device's first.
                match self.service.index_of(route_source) {
                    Some(_) => route_source,
                    None => self.service.first_of_family(route_source).unwrap_or(route_source),
                }
            }
        };
        Ok(SocketAddr::new(ip, port))
    }

    /// Checks and counts the request against the rate of the remote host and of the session's user.
    /// Returns true if it is within both.
    pub(super) fn is_within_rates(&mut self, session: SessionId, from: IpAddr, now: Time) -> bool {
        let user = self.quotas.user(session);
        let rate = self.options.peer_connections_per_second;
        let may =
            self.quotas.take_rate(user, from, rate, now) && self.quotas.may_accept(session, now);
        if may {
            self.quotas.count_accept(session, now);
        }
        may
    }

    /// Returns true if the session's user may have one more start-up without an eviction.
    pub(super) fn has_room_for(&self, session: SessionId) -> bool {
        let user = self.quotas.user(session);
        let of_user = self.startups.of(user);
        let may = self.quotas.of(session).is_none_or(|q| of_user < q.startups as usize);
        may && self.startups.total() < self.options.startups
    }
}

/// Returns the kernel's source address for packets to `peer`, without sending any.
fn route_source(peer: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let probe = UdpSocket::bind((any, 0))?;
    // Port 9 is arbitrary: connect(2) only looks up the route and sends no packet.
    probe.connect((peer, 9))?;
    Ok(probe.local_addr()?.ip())
}

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Range of ports that the daemon chooses from: IANA's dynamic ports.
const FIRST_PORT: u16 = 49_152;
const LAST_PORT: u16 = u16::MAX;
/// Maximum replies that a listener keeps.
const MAX_REPLIES: usize = 64;
/// Maximum messages per second to other daemons without a program's decision.
const ANSWERS_PER_SECOND: u32 = 1000;
