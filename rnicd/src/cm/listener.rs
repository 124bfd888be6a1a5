//! Bound and listening addresses, and limits on incoming connections.
//!
//! Connections without a request and undecided requests must not exhaust the descriptors. They are
//! counted per user. At the limit, or without descriptors, a connection of the user with the most
//! is evicted. If none can be evicted, one connection is accepted with a spare descriptor and
//! reset. If that is not possible either, the listener is tried again after a pause, so the thread
//! does not spin.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use mio::Interest;
use mio::unix::SourceFd;
use rnic_abi::abi::control::{ListenerRow, Refusal};
use rnic_abi::types::{AddressPair, ListenerId, SessionId, Time};
use rustix::io::Errno;
use socket2::Socket;

use super::passive::Passive;
use super::sidr::server::RecentReplies;
use super::startups::WaitsFor;
use super::{ConnectionManager, DAEMON, Slot, net};
use crate::config::PortMap;
use crate::{socket, system};

/// A bound address of either port space, or the connection of a `ServeOver` request.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) session: SessionId,
    source: Source,
    pub(super) address: SocketAddr,
    v6_only: bool,
    key: usize,
    /// Maximum undecided requests; 0 while only bound.
    pub(super) backlog: u32,
    pub(super) pending: u32,
    pub(super) accepted: u64,
    pub(super) rejected: u64,
    /// Accepts requests while the daemon drains.
    pub(super) ignores_draining: bool,
}

/// Source of a listener's requests.
#[derive(Debug)]
enum Source {
    /// Connections to a TCP socket that the daemon has bound.
    Tcp(Socket),
    /// One connection that a client passed.
    Passed,
    /// SIDR requests for UD QPs. The field holds recent replies.
    Datagrams(RecentReplies),
}

/// An address to bind.
#[derive(Clone, Copy, Debug)]
pub struct BindTo {
    /// The address; port 0 lets the kernel choose.
    pub address: SocketAddr,
    /// If false, an IPv6 wildcard takes IPv4 connections too.
    pub v6_only: bool,
}

impl BindTo {
    /// Returns true for a wildcard of both address families.
    fn covers_all(self) -> bool {
        self.address.is_ipv6() && self.address.ip().is_unspecified() && !self.v6_only
    }
}

impl From<SocketAddr> for BindTo {
    fn from(address: SocketAddr) -> Self {
        BindTo { address, v6_only: false }
    }
}

impl Listener {
    /// Creates the listener of a connection that a client passed, in slot `key`.
    pub(super) fn new_passed(session: SessionId, address: SocketAddr, key: usize) -> Self {
        Listener { backlog: 1, ..Self::bound(session, Source::Passed, address.into(), key) }
    }

    /// Creates a listener for UD QPs, in slot `key`.
    pub(super) fn new_ud(session: SessionId, to: BindTo, key: usize) -> Self {
        Self::bound(session, Source::Datagrams(RecentReplies::default()), to, key)
    }

    fn bound(session: SessionId, source: Source, to: BindTo, key: usize) -> Self {
        let BindTo { address, v6_only } = to;
        Listener {
            session,
            source,
            address,
            v6_only,
            key,
            backlog: 0,
            pending: 0,
            accepted: 0,
            rejected: 0,
            ignores_draining: false,
        }
    }

    /// Returns the TCP socket that the daemon has bound, if any.
    fn socket(&self) -> Option<&Socket> {
        match &self.source {
            Source::Tcp(socket) => Some(socket),
            Source::Passed | Source::Datagrams(_) => None,
        }
    }

    /// Returns true if the daemon has bound a TCP socket for it.
    pub(super) fn is_bound(&self) -> bool {
        self.socket().is_some()
    }

    /// Returns the recent replies of a listener for UD QPs.
    pub(super) fn answers(&self) -> Option<&RecentReplies> {
        match &self.source {
            Source::Datagrams(answers) => Some(answers),
            Source::Tcp(_) | Source::Passed => None,
        }
    }

    pub(super) fn answers_mut(&mut self) -> Option<&mut RecentReplies> {
        match &mut self.source {
            Source::Datagrams(answers) => Some(answers),
            Source::Tcp(_) | Source::Passed => None,
        }
    }

    /// Returns true if requests to this address and port belong to this listener.
    pub(super) fn serves_address(&self, to: SocketAddr) -> bool {
        let its_own = self.address.ip() == to.ip() || self.is_wildcard_for(to);
        self.address.port() == to.port() && its_own
    }

    /// Returns true if it and a listener of the same kind at `other` cannot both listen.
    pub(super) fn overlaps(&self, other: BindTo) -> bool {
        overlaps(self.bound_to(), other)
    }

    fn bound_to(&self) -> BindTo {
        BindTo { address: self.address, v6_only: self.v6_only }
    }

    /// Returns true if it is a wildcard that takes connections to `peer`.
    pub(super) fn is_wildcard_for(&self, peer: SocketAddr) -> bool {
        let of_family = self.address.is_ipv4() == peer.is_ipv4();
        self.address.ip().is_unspecified() && (of_family || self.bound_to().covers_all())
    }

    pub(super) fn row(&self, listener: ListenerId, ports: &PortMap) -> ListenerRow {
        // Passed sockets keep the program's own port, and ports for UD QPs are not mapped.
        let address = if self.is_bound() { ports.named(self.address) } else { self.address };
        ListenerRow {
            listener,
            session: self.session,
            address,
            backlog: self.backlog,
            pending: self.pending,
            accepted: self.accepted,
            rejected: self.rejected,
        }
    }

    /// Returns true if the backlog has room for another request.
    pub(super) fn has_room(&self) -> bool {
        self.pending < self.backlog
    }
}

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
            return Err(in_use(named, self.options.ports.named(other.address)));
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
            self.sidr.listeners.remove(&(listener.address.port(), id));
        }
        Ok(())
    }

    /// Accepts a bounded number of a listener's connections from the kernel.
    pub(super) fn accept_ready(&mut self, id: ListenerId, now: Time) {
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
        // More connections may wait, but the edge-triggered poll does not report them again. Other
        // listeners run first.
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
        // Without a poll registration the connection is closed.
        let _ = self.begin(session, id, stream, addresses, now);
    }

    /// Makes room for one more start-up of this session's user from this peer, by evicting another
    /// one if necessary. Returns false if there is still no room.
    pub(super) fn make_room(&mut self, session: SessionId, peer: IpAddr, now: Time) -> bool {
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
    pub(super) fn room_for_start_up(
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
    pub(super) fn begin(
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

    /// Frees a descriptor or sheds one connection. Returns false if neither is possible now. The
    /// peer's address is unknown before the accept.
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
    fn evict(&mut self, key: usize, why: &str) {
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
            Some(Slot::RequestCheck(_)) => self.end_request_check(key, Err(why.to_owned())),
            // These hold no charge.
            Some(
                Slot::Listener { .. } | Slot::Active(_) | Slot::Direct(_) | Slot::SidrResolution(_),
            )
            | None => {}
        }
    }
}

/// Sheds connections when there are no descriptors, and limits the log of rejected connections.
#[derive(Debug)]
pub(super) struct Shedding {
    /// Open descriptor that is closed for an accept when all others are in use.
    spare: Option<File>,
    /// By limit: connections rejected since the last report, and the time of that report.
    limits: HashMap<String, (u64, Option<Time>)>,
}

impl Shedding {
    pub(super) fn new() -> Self {
        Shedding { spare: open_spare(), limits: HashMap::new() }
    }

    /// Accepts one connection with the spare descriptor and resets it.
    fn shed(&mut self, listener: &Listener) -> bool {
        let Some(listener) = listener.socket() else { return false };
        if self.spare.take().is_none() {
            // Another thread's open took the spare descriptor. Try to get one again.
            self.spare = open_spare();
            return false;
        }
        let shed = net::accept(listener).map(|s| socket::Socket::own(s).reset()).is_ok();
        self.spare = open_spare();
        shed
    }

    fn note(&mut self, limit: &str, value: usize, now: Time) {
        let over = |at: &Option<Time>| at.is_none_or(|at| now.since(at) >= REPORT_PAUSE);
        if !self.limits.contains_key(limit) {
            // Remove limits with nothing left to report.
            self.limits.retain(|_, (unreported, at)| *unreported > 0 || !over(at));
            self.limits.insert(limit.to_owned(), (0, None));
        }
        let Some((unreported, reported)) = self.limits.get_mut(limit) else { return };
        *unreported += 1;
        if over(reported) {
            let connections = std::mem::take(unreported);
            tracing::warn!(connections, "{limit} = {value} reached: connections rejected");
            *reported = Some(now);
        }
    }
}

fn open_spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Returns true if two addresses cannot both listen.
fn overlaps(a: BindTo, b: BindTo) -> bool {
    let a_ip = a.address.ip();
    let b_ip = b.address.ip();
    let either_any = a_ip.is_unspecified() || b_ip.is_unspecified();
    let of_family = a_ip.is_ipv4() == b_ip.is_ipv4();
    a.address.port() == b.address.port()
        && (a_ip == b_ip || either_any && (of_family || a.covers_all() || b.covers_all()))
}

/// Returns the refusal for a TCP address that the kernel does not grant. For a TCP port in use, the
/// text suggests an entry in `ports.map`. The daemon's own port has a key of its own.
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

pub(super) fn in_use(address: SocketAddr, other: SocketAddr) -> Refusal {
    // The kind determines the errno(3) that programs get.
    let any = address.ip().is_unspecified() || other.ip().is_unspecified();
    let kind = if any { "wildcard address" } else { "address" };
    Refusal::InUse {
        kind: kind.into(),
        handle: address.port().into(),
        by: format!("a listener on {other}"),
    }
}

pub(super) fn no_listener(id: ListenerId) -> Refusal {
    Refusal::NoSuchObject { kind: "listener".into(), handle: id.0 }
}

/// Maximum connections that wait in the kernel until the daemon accepts them, which is soon.
/// Requests wait in the daemon.
const KERNEL_BACKLOG: i32 = 1024;
/// Maximum connections to accept from one listener before other listeners run.
const ACCEPT_BUDGET: usize = 64;
/// Delay before a listener without descriptors or memory is tried again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Delay before a listener is tried again after its user has reached the accept rate.
const RATE_PAUSE: Duration = Duration::from_millis(10);
/// Minimum time between two reports of the same limit.
const REPORT_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_reported_once_a_second() {
        let mut shedding = Shedding::new();
        let start = Time(7_000_000_000);
        for _ in 0..3 {
            shedding.note("limits.startups", 1, start);
        }
        shedding.note("descriptors (RLIMIT_NOFILE)", 1, start);
        let of = |s: &Shedding, limit: &str| s.limits.get(limit).copied();
        assert_eq!(of(&shedding, "limits.startups"), Some((2, Some(start))));
        assert_eq!(of(&shedding, "descriptors (RLIMIT_NOFILE)"), Some((0, Some(start))));
        let later = start.after(REPORT_PAUSE);
        shedding.note("limits.startups", 1, later);
        assert_eq!(of(&shedding, "limits.startups"), Some((0, Some(later))));
        // Entries without unreported connections are removed.
        shedding.note("another", 1, later);
        assert_eq!(of(&shedding, "descriptors (RLIMIT_NOFILE)"), None);
    }
}
