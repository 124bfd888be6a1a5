//! Start-up on TCP connections that a client made and passed.
//!
//! Such a connection may have carried other traffic before ("delayed" start-up, RFC 5044 section
//! 7.1.2) and goes on with it after a rejection. So start-up reads to the end of the peer's frame
//! and not a byte further, and after a rejection the daemon lets go of the socket as it is. There
//! is no second attempt as revision 1, which would need a second connection, and no direct path.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rnic_core::abi::control::Refusal;
use rnic_core::types::{AddressPair, ListenerId, SessionId, Time};
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketType, ipproto};
use socket2::SockRef;

use super::active::{Active, new_initiator};
use super::listener::Listener;
use super::net::{self, OutgoingBytes};
use super::startups::WaitsFor;
use super::{CmEvent, ConnectParams, ConnectionManager, Rejection, Slot};
use crate::socket::Socket;
use crate::system;

/// The addresses of a socket that a client passed, which must be a connected TCP socket.
pub fn examine(socket: impl AsFd) -> Result<AddressPair, Refusal> {
    let refuse = |why: &str| Refusal::Invalid { field: "socket".into(), why: why.into() };
    let failed = |e: std::io::Error| system::refusal("examine the socket", &e);
    let kind = sockopt::socket_type(&socket).map_err(|e| failed(e.into()))?;
    if kind != SocketType::STREAM {
        return Err(refuse("it is no stream socket"));
    }
    let family = sockopt::socket_domain(&socket).map_err(|e| failed(e.into()))?;
    if family != AddressFamily::INET && family != AddressFamily::INET6 {
        return Err(refuse("it is of no Internet family"));
    }
    let protocol = sockopt::socket_protocol(&socket).map_err(|e| failed(e.into()))?;
    if protocol != Some(ipproto::TCP) {
        return Err(refuse("its protocol is not TCP"));
    }
    if sockopt::socket_acceptconn(&socket).map_err(|e| failed(e.into()))? {
        return Err(refuse("it listens"));
    }
    let peer = SockRef::from(&socket).peer_addr().ok().and_then(|a| a.as_socket());
    let peer = peer.ok_or_else(|| refuse("it is not connected"))?;
    let local = net::local_address(&socket).map_err(failed)?;
    Ok(AddressPair { local, peer: net::canonical(peer) })
}

impl ConnectionManager {
    /// Connects a QP over a connection that a client passed, whose peer expects an MPA Request.
    /// The outcome is an event, unless our own end already makes it impossible.
    pub fn connect_over(
        &mut self,
        params: ConnectParams,
        socket: Socket,
        now: Time,
    ) -> Result<(), Refusal> {
        self.check_idle(params.qp)?;
        let options = self.initiator_options(&params);
        let initiator = new_initiator(&options, &params.private_data)?;
        let qp = params.qp;
        let until = now.after(self.options.reply_deadline);
        let mut active = Active::over(params, options, initiator, socket, until);
        let key = self.slots.vacant_key();
        self.register(key, active.stream()).map_err(|e| system::refusal("poll the socket", &e))?;
        if let Err(e) = active.watch(&self.options.tcp) {
            self.deregister(active.stream());
            return Err(system::refusal("watch the socket", &e));
        }
        active.engage();
        self.insert(Slot::Active(Box::new(active)));
        self.qps.insert(qp, key);
        self.set_deadline(key, Some(until));
        Ok(())
    }

    /// WaitsFor a request on a connection that a client passed. It comes to listener `id`, which is
    /// good for this one connection.
    pub fn serve_over(
        &mut self,
        session: SessionId,
        id: ListenerId,
        addresses: AddressPair,
        socket: Socket,
        now: Time,
    ) -> Result<(), Refusal> {
        if !self.make_room(session, addresses.peer.ip(), now) {
            return Err(self.no_room(session));
        }
        let key = self.insert(Slot::Listener { id, session });
        self.listeners.insert(id, Listener::of_passed(session, addresses.local, key));
        self.begin(session, id, socket, addresses, now).map_err(|e| {
            self.remove(key);
            self.listeners.remove(&id);
            system::refusal("poll the socket", &e)
        })
    }

    /// Whose start-ups leave no room for another one.
    fn no_room(&self, session: SessionId) -> Refusal {
        let (key, limit, used) = match self.quotas.of(session) {
            Some(q) if self.startups.of(q.user) >= q.startups as usize => {
                (&q.startups_key, q.startups as usize, self.startups.of(q.user))
            }
            _ => (&self.options.startups_key, self.options.startups, self.startups.total()),
        };
        Refusal::Limit { key: key.clone(), limit: limit as u64, used: used as u64, wanted: 1 }
    }

    /// Sends a rejection on a connection that a client passed, then lets go of it.
    pub(super) fn give_back(
        &mut self,
        (session, peer): (SessionId, IpAddr),
        stream: Socket,
        reply: Vec<u8>,
        awaited: bool,
        now: Time,
    ) -> Rejection {
        let mut reply = OutgoingBytes::new(reply);
        match reply.send(&stream) {
            Ok(true) => stream.let_go(),
            Ok(false) => {
                let key =
                    self.insert(Slot::Returning(Returning { session, awaited, stream, reply }));
                self.charge(key, session, peer, WaitsFor::Peer);
                self.set_deadline(key, Some(now.after(RETURN_DEADLINE)));
                if let Slot::Returning(returning) = &self.slots[key].slot
                    && self.register(key, &returning.stream).is_ok()
                {
                    return if awaited { Rejection::Sending } else { Rejection::Done };
                }
                self.remove(key);
            }
            // The connection is lost, which the client finds out.
            Err(_) => {}
        }
        Rejection::Done
    }

    pub(super) fn drive_returning(&mut self, key: usize) {
        let Slot::Returning(returning) = &mut self.slots[key].slot else { return };
        match returning.reply.send(&returning.stream) {
            Ok(false) => {}
            Ok(true) => {
                if let Some(Slot::Returning(returning)) = self.remove(key) {
                    self.returned(&returning);
                    returning.stream.let_go();
                }
            }
            Err(_) => self.end_returning(key),
        }
    }

    /// Gives up sending a rejection; half a reply is no stream to go on with, so it ends.
    pub(super) fn end_returning(&mut self, key: usize) {
        if let Some(Slot::Returning(returning)) = self.remove(key) {
            self.returned(&returning);
        }
    }

    fn returned(&mut self, returning: &Returning) {
        if returning.awaited {
            self.events.push_back(CmEvent::Returned { session: returning.session });
        }
    }
}

/// A rejected connection whose reply the kernel has not taken in full, because the streaming-mode
/// traffic before it has not been read.
#[derive(Debug)]
pub(super) struct Returning {
    session: SessionId,
    /// The client waits for it.
    awaited: bool,
    stream: Socket,
    reply: OutgoingBytes,
}

impl Returning {
    pub(super) fn session(&self) -> SessionId {
        self.session
    }

    pub(super) fn stream(&self) -> &Socket {
        &self.stream
    }
}

/// How long a peer may take to make room for a rejection. The client waits for it and asks nothing
/// else meanwhile.
const RETURN_DEADLINE: Duration = Duration::from_secs(10);
