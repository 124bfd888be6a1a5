//! Binds and listens, and limits incoming connections.
//!
//! Connections without a request and undecided requests must not exhaust the descriptors, so they
//! are counted per user. At the limit, or if no descriptor is free, a connection of the user with
//! the most is evicted. If none can be evicted, the new connection is accepted with a spare
//! descriptor and reset. If that fails too, the listener pauses, so that the thread does not spin.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use mio::Interest;
use mio::unix::SourceFd;
use rnic_abi::abi::control::Refusal;
use rnic_abi::types::{AddressPair, ListenerId, SessionId, Time};
use rustix::io::Errno;
use socket2::Socket;

use super::passive::Passive;
use crate::cm::listener::{BindTo, Listener, Source, no_listener, overlapping};
use crate::cm::startups::WaitsFor;
use crate::cm::{ConnectionManager, DAEMON, Slot, net};
use crate::{socket, system};

impl ConnectionManager {
    /// Binds an address without listening. Returns it with the port that the kernel chose.
    pub fn bind(
        &mut self,
        session: SessionId,
        id: ListenerId,
        to: BindTo,
    ) -> Result<SocketAddr, Refusal> {
        let named = to.address;
        let to = BindTo { address: self.options.ports.tcp_address(named), ..to };
        let address = to.address;
        // The kernel would allow both binds until one of them listens.
        if address.port() != 0
            && let Some(other) = self.listeners.values().find(|l| l.is_bound() && l.overlaps(to))
        {
            return Err(overlapping(named, self.options.ports.named(other.address)));
        }
        // The error shows the TCP port, because the port's owner is not a client of this daemon.
        let what = || format!("bind {address}");
        let socket =
            net::bound(to).map_err(|e| tcp_refusal(session, "bind", named, address, &e))?;
        self.options.buffers.bound(&socket).map_err(|e| system::refusal(&what(), &e))?;
        let bound = socket.local_addr().map_err(|e| system::refusal(&what(), &e))?;
        let bound = bound.as_socket().unwrap_or(address);
        let key = self.insert(Slot::Listener { id, session });
        let to = BindTo { address: bound, ..to };
        self.listeners.insert(id, Listener::bound(session, Source::Tcp(socket), to, key));
        Ok(self.options.ports.named(bound))
    }

    /// Adopts a socket that a service manager has bound.
    pub fn adopt(
        &mut self,
        session: SessionId,
        id: ListenerId,
        socket: Socket,
    ) -> Result<(), Refusal> {
        let address = net::local_address(&socket);
        let address = address.map_err(|e| system::refusal("adopt a socket", &e))?;
        self.options
            .buffers
            .bound(&socket)
            .map_err(|e| system::refusal(&format!("adopt {address}"), &e))?;
        let v6_only = address.is_ipv6() && socket.only_v6().unwrap_or(false);
        let key = self.insert(Slot::Listener { id, session });
        let to = BindTo { address, v6_only };
        self.listeners.insert(id, Listener::bound(session, Source::Tcp(socket), to, key));
        Ok(())
    }

    /// Listens on a bound address, or changes the backlog of a listener.
    pub fn listen(&mut self, id: ListenerId, backlog: u32) -> Result<(), Refusal> {
        let listener = self.listeners.get_mut(&id).ok_or_else(|| no_listener(id))?;
        if backlog == 0 {
            return Err(Refusal::Invalid {
                field: "backlog".into(),
                why: "0 would reject every request".into(),
            });
        }
        if let Source::Passed = listener.source {
            return Err(Refusal::WrongState {
                kind: "listener".into(),
                handle: id.0,
                state: "serving a passed connection".into(),
                needs: "bound".into(),
            });
        }
        if let (Source::Tcp(socket), 0) = (&listener.source, listener.backlog) {
            let token = mio::Token(self.first_token + listener.key);
            let fd = net::raw(&socket.as_fd());
            socket
                .listen(KERNEL_BACKLOG)
                .and_then(|()| {
                    self.registry.register(&mut SourceFd(&fd), token, Interest::READABLE)
                })
                .map_err(|e| {
                    let named = self.options.ports.named(listener.address);
                    tcp_refusal(listener.session, "listen on", named, listener.address, &e)
                })?;
        }
        listener.backlog = backlog;
        Ok(())
    }

    /// Returns true if connections to the listener's port at this address reach the listener.
    pub fn listens_at(&self, id: ListenerId, ip: IpAddr) -> bool {
        let listener = self.listeners.get(&id);
        listener.is_some_and(|l| l.serves_address(SocketAddr::new(ip, l.address.port())))
    }

    /// Lets a listener accept requests while the daemon drains.
    pub fn ignore_draining(&mut self, id: ListenerId) {
        if let Some(listener) = self.listeners.get_mut(&id) {
            listener.ignores_draining = true;
        }
    }

    /// Closes a listener: rejects undecided requests, and drops connections that have sent none.
    pub fn close_listener(&mut self, id: ListenerId, now: Time) -> Result<(), Refusal> {
        let key = self.listeners.get(&id).ok_or_else(|| no_listener(id))?.key;
        for key in self.of_listener.of(&id) {
            let Some(slot) = self.slots.get(key).map(|entry| &entry.slot) else { continue };
            match slot {
                // Already accepted.
                Slot::Passive(p) if p.qp().is_some() => {}
                slot if slot.request().is_some() => {
                    // An empty rejection always fits.
                    let _ = self.reject_slot(key, &[], false, now);
                }
                _ => drop(self.remove(key)),
            }
        }
        self.remove(key);
        if let Some(listener) = self.listeners.remove(&id) {
            self.service.forget_listener(id, &listener);
        }
        Ok(())
    }

    /// Accepts a bounded number of a listener's connections from the kernel.
    pub(in crate::cm) fn accept_ready(&mut self, id: ListenerId, now: Time) {
        let Some(key) = self.listeners.get(&id).map(|l| l.key) else { return };
        self.set_deadline(key, None);
        for _ in 0..ACCEPT_BUDGET {
            let Some((session, socket)) =
                self.listeners.get(&id).and_then(|l| Some((l.session, l.socket()?)))
            else {
                return;
            };
            if !self.quotas.may_accept(session, now) {
                return self.set_deadline(key, Some(now.after(RATE_PAUSE)));
            }
            match net::accept(socket) {
                Ok(stream) => {
                    self.quotas.count_accept(session, now);
                    self.admit(id, stream, now);
                }
                Err(e) => match Errno::from_io_error(&e) {
                    Some(Errno::AGAIN) => return,
                    Some(Errno::MFILE | Errno::NFILE) if !net::has_pending(socket) => return,
                    Some(Errno::MFILE | Errno::NFILE) if self.free_descriptor(id, now) => {}
                    Some(
                        Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::PERM,
                    ) => {
                        let later = now.after(ACCEPT_PAUSE);
                        return self.set_deadline(key, Some(later));
                    }
                    // accept(2) also reports errors of the connection that it would have returned.
                    _ => {}
                },
            }
        }
        // More connections may be waiting, but edge-triggered epoll does not report them again.
        // Other listeners run first.
        self.set_deadline(key, Some(Time(now.0.saturating_add(1))));
    }

    /// Starts MPA start-up on an accepted connection.
    fn admit(&mut self, id: ListenerId, stream: TcpStream, now: Time) {
        let (Ok(local), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else {
            return; // Closed already.
        };
        let stream = socket::Socket::own(stream);
        let Some(session) = self.listeners.get(&id).map(|l| l.session) else { return };
        let user = self.quotas.user(session);
        let rate = self.options.peer_connections_per_second;
        if !self.quotas.take_rate(user, peer.ip(), rate, now) {
            self.shedding.note("limits.peer.connections_per_second", rate as usize, now);
            return stream.reset();
        }
        if self.guesses.rejects(user, peer.ip(), now) || !self.make_room(session, peer.ip(), now) {
            return stream.reset();
        }
        let local = self.options.ports.named(net::canonical(local));
        let addresses = AddressPair { local, peer: net::canonical(peer) };
        // If registration fails, the connection is closed.
        let _ = self.begin(session, id, stream, addresses, now);
    }

    /// Makes room for a start-up of this session's user from this peer, and evicts another start-up
    /// if necessary. Returns false if there is still no room.
    pub(in crate::cm) fn make_room(&mut self, session: SessionId, peer: IpAddr, now: Time) -> bool {
        let user = self.quotas.user(session);
        let (victim, key, limit) = match self.quotas.of(session) {
            Some(quota) if self.startups.of(user) >= quota.startups as usize => {
                let victim = self.startups.own_victim(user, peer);
                (victim, &quota.startups_key, quota.startups as usize)
            }
            _ if self.startups.total() >= self.options.startups => {
                let victim = self.startups.victim(user, peer);
                (victim, &self.options.startups_key, self.options.startups)
            }
            _ => return true,
        };
        self.shedding.note(key, limit, now);
        let why = victim.map(|slot| (slot, format!("evicted for a newer connection ({key})")));
        if let Some((slot, why)) = &why {
            self.evict(*slot, why);
        }
        why.is_some()
    }

    /// Like [`make_room`](Self::make_room), but returns a refusal with the limit that was reached.
    pub(in crate::cm) fn room_for_start_up(
        &mut self,
        session: SessionId,
        peer: IpAddr,
        now: Time,
    ) -> Result<(), Refusal> {
        if self.make_room(session, peer, now) {
            return Ok(());
        }
        let of_user = self.startups.of(self.quotas.user(session));
        let (key, limit, used) = match self.quotas.of(session) {
            Some(quota) if of_user >= quota.startups as usize => {
                (&quota.startups_key, quota.startups as usize, of_user)
            }
            _ => (&self.options.startups_key, self.options.startups, self.startups.total()),
        };
        Err(Refusal::Limit { key: key.clone(), limit: limit as u64, used: used as u64, wanted: 1 })
    }

    /// Waits for a request on a connection.
    pub(in crate::cm) fn begin(
        &mut self,
        session: SessionId,
        id: ListenerId,
        stream: socket::Socket,
        addresses: AddressPair,
        now: Time,
    ) -> std::io::Result<()> {
        let peer = addresses.peer.ip();
        let passive = Passive::new(session, id, stream, addresses, &self.options.startup);
        let key = self.insert(Slot::Passive(Box::new(passive)));
        self.charge(key, session, peer, WaitsFor::Peer);
        self.set_deadline(key, Some(now.after(self.options.request_deadline)));
        let Slot::Passive(passive) = &mut self.slots[key].slot else { return Ok(()) };
        passive.stream.end_on_drop();
        let watched = passive.stream.watch(&self.options.tcp);
        let Slot::Passive(passive) = &self.slots[key].slot else { return Ok(()) };
        let registered = watched.and_then(|()| self.register(key, &passive.stream));
        if registered.is_err() {
            self.remove(key);
        }
        registered
    }

    /// Frees a descriptor or resets one new connection. Returns false if neither is possible now.
    /// The peer's address is unknown until accept(2) succeeds.
    fn free_descriptor(&mut self, id: ListenerId, now: Time) -> bool {
        let Some(listener) = self.listeners.get(&id) else { return false };
        let user = self.quotas.user(listener.session);
        let made = match self.startups.victim(user, IpAddr::from([0; 4])) {
            Some(slot) => {
                self.evict(slot, "evicted for a newer connection (RLIMIT_NOFILE)");
                true
            }
            None if self.shedding.shed(listener) => {
                self.quotas.count_accept(listener.session, now);
                true
            }
            None => false,
        };
        if made {
            self.shedding.note("descriptors (RLIMIT_NOFILE)", self.slots.len(), now);
        }
        made
    }

    /// Ends a connection in start-up at once, so its descriptor is free on return.
    pub(in crate::cm) fn evict(&mut self, key: usize, why: &str) {
        match self.slots.get(key).map(|entry| &entry.slot) {
            Some(Slot::Passive(_)) => {
                if let Some(stream) = self.end_passive(key, why) {
                    stream.reset();
                }
            }
            Some(Slot::Returning(_)) => self.end_returning(key),
            Some(Slot::Closing(_)) => {
                if let Some(Slot::Closing(closing)) = self.remove(key) {
                    closing.stream.reset();
                }
            }
            Some(Slot::SidrRequest(_)) => self.withdraw_sidr_request(key, why),
            Some(Slot::RcRequest(_)) => drop(self.withdraw_rc_request(key, why)),
            Some(Slot::RequestCheck(_)) => self.end_request_check(key, Err(why.to_owned())),
            // These slots are not charged.
            Some(
                Slot::Listener { .. }
                | Slot::Active(_)
                | Slot::Direct(_)
                | Slot::SidrResolution(_)
                | Slot::Rc(_),
            )
            | None => {}
        }
    }
}

/// Returns the refusal for a TCP address that the kernel does not grant. For a TCP port in use, the
/// text suggests an entry in `ports.map`. Another key sets the daemon's own port.
fn tcp_refusal(
    session: SessionId,
    what: &str,
    named: SocketAddr,
    tcp_address: SocketAddr,
    error: &io::Error,
) -> Refusal {
    let mut refusal = system::refusal(&format!("{what} {tcp_address}"), error);
    if Errno::from_io_error(error) == Some(Errno::ADDRINUSE)
        && session != DAEMON
        && let Refusal::System { error, .. } = &mut refusal
    {
        let rdma = named.port();
        // Suggest a lower port if port + 10000 does not fit.
        let other = tcp_address.port().checked_add(10_000).unwrap_or(tcp_address.port() / 2);
        error.push_str(&format!(
            "; RDMA port {rdma} needs a TCP port, but another program uses TCP port {}: map it \
             to a free one with [ports] map in the configuration of each daemon that uses it, \
             `ports.map = {{ {rdma} = {other} }}`",
            tcp_address.port()
        ));
    }
    refusal
}

/// Maximum connections that wait in the kernel until the daemon accepts them, which is soon.
/// Requests wait in the daemon.
const KERNEL_BACKLOG: i32 = 1024;
/// Maximum connections to accept from one listener before other listeners run.
const ACCEPT_BUDGET: usize = 64;
/// Delay after accept(2) fails for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Delay before a listener is tried again after its user has reached the accept rate.
const RATE_PAUSE: Duration = Duration::from_millis(10);
