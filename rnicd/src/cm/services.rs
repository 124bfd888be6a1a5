//! Messages and listeners of the RoCE device's services, for SIDR and for connections.
//!
//! Management datagrams between two ends in this daemon are passed in memory. Other datagrams are
//! sent as [`CmEvent::Management`] and received by
//! [`handle_management`](ConnectionManager::handle_management).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use rnic_abi::abi::control::Refusal;
use rnic_abi::roce::mad::{self, Bytes};
use rnic_abi::roce::{PortSpace, ServiceId, connection, is_unicast, sidr};
use rnic_abi::types::{AddressPair, ListenerId, SessionId, Time};
use rnic_core::engine::DatagramPort;
use rustix::io::Errno;

use super::event::{CmMessage, Sender};
use super::listener::{BindTo, Listener, in_use, overlapping};
use super::{CmEvent, ConnectionManager, Slot, net};
use crate::system;

impl ConnectionManager {
    /// Sets the ports of the device. With `has_loopback` the port of 127.0.0.1 serves all of
    /// 127.0.0.0/8; otherwise other daemons on this host may use the rest.
    /// Ends the connections within this daemon that lose the address of an end, because their
    /// messages no longer arrive.
    pub fn set_datagram_port(&mut self, port: &Arc<DatagramPort>, has_loopback: bool, now: Time) {
        let local = self.local_connections();
        self.service.port = port.clone();
        self.service.has_loopback = has_loopback;
        self.end_lost_connections(&local, now);
    }

    /// Handles a management datagram from another daemon. Ignores datagrams that claim to come from
    /// this daemon. Datagrams of other classes are answered as unsupported, or ignored.
    pub fn handle_management(&mut self, from: IpAddr, to: IpAddr, mad: &Bytes, now: Time) {
        if !self.service.is_local(from) {
            self.message_arrived(from, to, mad, now);
        }
    }

    /// Reports messages of sessions before they are sent, or no longer.
    pub fn report_messages(&mut self, on: bool) {
        self.reports_messages = on;
    }

    /// Sends a message of a session, or reports it to be sent with
    /// [`pass_message`](Self::pass_message).
    pub(super) fn send_message(
        &mut self,
        sender: Option<Sender>,
        from: IpAddr,
        to: IpAddr,
        message: Bytes,
        now: Time,
    ) {
        match sender.filter(|_| self.reports_messages) {
            Some(sender) => {
                let message = Box::new(CmMessage { sender, from, to, mad: message });
                self.events.push_back(CmEvent::Message(message));
            }
            None => self.pass_message(from, to, message, now),
        }
    }

    /// Sends a message, in memory or as an event.
    pub fn pass_message(&mut self, from: IpAddr, to: IpAddr, message: Bytes, now: Time) {
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
            Err(fault) => match mad::unsupported(message) {
                Some(answer) => self.send_unasked(None, to, from, answer, now),
                None => tracing::debug!(%from, "a management datagram was dropped: {fault}"),
            },
        }
    }

    /// Answers a message without effect on a connection or request. Answers to other daemons are
    /// rate-limited.
    pub(super) fn send_unasked(
        &mut self,
        sender: Option<Sender>,
        from: IpAddr,
        to: IpAddr,
        message: Bytes,
        now: Time,
    ) {
        if self.service.may_answer(from, to, now) {
            self.send_message(sender, from, to, message, now);
        }
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
            let port = self.service.free_port(space).ok_or_else(|| none(Errno::ADDRINUSE))?;
            to.address.set_port(port);
        }
        for other in self.service.listeners_at(space, to.address.port()) {
            if let Some(other) = self.listeners.get(&other).filter(|l| l.overlaps(to)) {
                return Err(overlapping(to.address, other.address));
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

    /// Returns the addresses of a request and the index of its source GID. Chooses the source port
    /// if the caller did not. `verb` begins the error message.
    pub(super) fn ends_of_request(
        &mut self,
        session: SessionId,
        space: PortSpace,
        local: Option<SocketAddr>,
        peer: SocketAddr,
        verb: &str,
    ) -> Result<(AddressPair, u16), Refusal> {
        let peer = net::canonical(peer);
        let what = |e: &io::Error| system::refusal(&format!("{verb} {peer}"), e);
        if !is_unicast(peer.ip()) {
            return Err(what(&Errno::NETUNREACH.into()));
        }
        let mut local = self.source_of(local, peer).map_err(|e| what(&e))?;
        let none = || what(&Errno::ADDRNOTAVAIL.into());
        let source = self.service.index_of(local.ip()).ok_or_else(none)?;
        // Otherwise the peer would take the requester for the program that serves this port.
        if let Some(other) = self.other_listener(session, space, local) {
            return Err(in_use("address", local, other));
        }
        if local.port() == 0 {
            local.set_port(self.service.free_port(space).ok_or_else(none)?);
        }
        Ok((AddressPair { local, peer }, source))
    }

    /// Returns the address of another session's listener at a source address.
    fn other_listener(
        &self,
        session: SessionId,
        space: PortSpace,
        local: SocketAddr,
    ) -> Option<SocketAddr> {
        let ids = self.service.listeners_at(space, local.port());
        let mut listeners = ids.filter_map(|id| self.listeners.get(&id));
        let other = listeners.find(|l| l.session != session && l.serves_address(local))?;
        Some(other.address)
    }

    /// Returns the source address of a request, with the port if the caller chose one.
    fn source_of(&self, named: Option<SocketAddr>, peer: SocketAddr) -> io::Result<SocketAddr> {
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
