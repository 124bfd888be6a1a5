//! MPA start-up on TCP connections passed in by a client.
//!
//! Such a connection may have carried other traffic before ("delayed" start-up, RFC 5044 section
//! 7.1.2) and may continue with it after a rejection. So start-up reads no byte beyond the peer's
//! frame, and after a rejection the daemon leaves the socket connected. Start-up does not fall back
//! to revision 1, which would need a second connection, and never uses the direct path.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::{AddressPair, ListenerId, SessionId, Time};
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketType, ipproto};
use socket2::SockRef;

use super::active::{Active, new_initiator};
use super::rejected::Returning;
use crate::cm::listener::Listener;
use crate::cm::net::{self, OutgoingBytes};
use crate::cm::startups::WaitsFor;
use crate::cm::{CmEvent, ConnectParams, ConnectionManager, Rejection, Slot};
use crate::socket::Socket;
use crate::system;

/// Returns the addresses of a socket that a client passed, which must be a connected TCP socket.
pub fn examine(socket: impl AsFd) -> Result<AddressPair, Refusal> {
    let refuse = |why: &str| Refusal::Invalid { field: "socket".into(), why: why.into() };
    let failed = |e: std::io::Error| system::refusal("examine the socket", &e);
    let kind = sockopt::socket_type(&socket).map_err(|e| failed(e.into()))?;
    if kind != SocketType::STREAM {
        return Err(refuse("it is not a stream socket"));
    }
    let family = sockopt::socket_domain(&socket).map_err(|e| failed(e.into()))?;
    if family != AddressFamily::INET && family != AddressFamily::INET6 {
        return Err(refuse("it is not an IPv4 or IPv6 socket"));
    }
    let protocol = sockopt::socket_protocol(&socket).map_err(|e| failed(e.into()))?;
    if protocol != Some(ipproto::TCP) {
        return Err(refuse("its protocol is not TCP"));
    }
    if sockopt::socket_acceptconn(&socket).map_err(|e| failed(e.into()))? {
        return Err(refuse("it is a listening socket"));
    }
    let peer = SockRef::from(&socket).peer_addr().ok().and_then(|a| a.as_socket());
    let peer = peer.ok_or_else(|| refuse("it is not connected"))?;
    let local = net::local_address(&socket).map_err(failed)?;
    Ok(AddressPair { local, peer: net::canonical(peer) })
}

impl ConnectionManager {
    /// Connects a QP over a connection that a client passed. The peer must expect an MPA Request.
    /// The result is an event; errors are failures of the local end.
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
            return Err(system::refusal("set timeouts of the socket", &e));
        }
        active.end_on_drop();
        self.insert(Slot::Active(Box::new(active)));
        self.qps.insert(qp, key);
        self.set_deadline(key, Some(until));
        Ok(())
    }

    /// Waits for a request on a connection that a client passed. The request arrives at listener
    /// `id`, which serves only this connection.
    pub fn serve_over(
        &mut self,
        session: SessionId,
        id: ListenerId,
        addresses: AddressPair,
        socket: Socket,
        now: Time,
    ) -> Result<(), Refusal> {
        self.room_for_start_up(session, addresses.peer.ip(), now)?;
        let key = self.insert(Slot::Listener { id, session });
        self.listeners.insert(id, Listener::new_passed(session, addresses.local, key));
        self.begin(session, id, socket, addresses, now).map_err(|e| {
            self.remove(key);
            self.listeners.remove(&id);
            system::refusal("poll the socket", &e)
        })
    }

    /// Sends a rejection on a connection that a client passed, then releases the socket.
    pub(in crate::cm) fn give_back(
        &mut self,
        session: SessionId,
        peer: IpAddr,
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
            // The connection is lost. The client will notice.
            Err(_) => {}
        }
        Rejection::Done
    }

    pub(in crate::cm) fn drive_returning(&mut self, key: usize) {
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

    /// Gives up sending a rejection. Ends the connection, because the client cannot complete a
    /// partial reply.
    pub(in crate::cm) fn end_returning(&mut self, key: usize) {
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

/// Maximum time for the kernel to accept a rejection. The client's other requests wait for this.
const RETURN_DEADLINE: Duration = Duration::from_secs(10);
