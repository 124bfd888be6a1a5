//! The port at which daemons of other hosts reach this one (`wired.port`): TCP for RC and UC QPs,
//! UDP for UD QPs.
//!
//! Any user of the host may bind this port, and the process that is bound to it answers for the
//! host's GIDs. So a daemon that serves the host binds it, or gets it from a service manager,
//! before it accepts clients. A private daemon binds it for its first QP of the RoCE device. While
//! another process uses the port, QPs of this device connect only within the host, and the daemon
//! retries.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::*;
use socket2::{Domain, Protocol, Type};

use super::datagrams::DATAGRAM_WORKER;
use super::port::PassedPort;
use super::rendezvous::{BACKLOG, DAEMON};
use crate::clock;
use crate::cm::BindTo;
use crate::config::Loopback;
use crate::resource::{Manager, refuse};
use crate::system;
use crate::worker::Command;

impl Manager {
    /// Takes over the passed sockets and opens the missing sockets. Must precede the first client.
    pub fn take_wired_port(&mut self, passed: Vec<PassedPort>) {
        self.cm.set_quota(DAEMON, self.rendezvous_quota());
        for socket in passed {
            match socket {
                PassedPort::Listener(socket) => {
                    let socket = socket2::Socket::from(socket);
                    let adopted =
                        self.listen_for_daemons(|cm, listener| cm.adopt(DAEMON, listener, socket));
                    if let Err(refusal) = adopted {
                        tracing::warn!("cannot use a passed socket (wired.port): {refusal}");
                    }
                }
                PassedPort::Datagrams(socket) => self.add_datagram_socket(socket),
            }
        }
        self.open_wired_port();
    }

    /// Opens the missing sockets of the port. Must precede the first QP of the RoCE device.
    pub(in crate::resource) fn open_wired_port(&mut self) {
        let opened = self.open_listeners().and(self.open_datagram_sockets());
        let port = &mut self.wired_port;
        let was_missing = port.problem.is_some();
        let problem = opened.err();
        if problem.is_some() {
            let backoff = if port.retry_at.is_none() { FIRST_PAUSE } else { port.backoff * 2 };
            port.backoff = backoff.min(LONGEST_PAUSE);
            port.retry_at = Some(clock::now().after(port.backoff));
        } else {
            port.retry_at = None;
        }
        port.problem.clone_from(&problem);
        match problem {
            Some(why) if !was_missing => {
                let own = match self.config.engine.loopback {
                    Loopback::Direct => "",
                    Loopback::Tcp => ", and its own QPs use the direct path",
                };
                let why = format!("{why} (wired.port); other hosts cannot reach this daemon{own}");
                tracing::warn!("{why}; retrying");
                self.note("wired_port", None, why);
            }
            None if was_missing => {
                let text = format!("port {} is bound (wired.port)", self.config.wired.port);
                tracing::info!("{text}");
                self.note("wired_port", None, text);
            }
            _ => {}
        }
        self.refresh_datagram_port();
    }

    /// Returns the GIDs that no packet of another daemon can reach. Before the first attempt to
    /// bind the port, these are only the GIDs that are no addresses of the host.
    pub(in crate::resource) fn gids_without_socket(&self) -> impl Iterator<Item = Gid> {
        let was_attempted = self.wired_port.was_attempted();
        let gids = self.gids.iter().map(|row| row.gid).filter(|gid| !gid.is_zero());
        gids.filter(move |gid| {
            let lacks_socket = was_attempted && !self.wired_port.datagrams.contains(gid);
            self.is_internal(*gid) || lacks_socket
        })
    }

    /// Returns the time of the next attempt to bind the port.
    pub fn next_port_retry(&self) -> Option<Time> {
        self.wired_port.retry_at
    }

    /// Opens the missing sockets if a retry is due.
    pub fn retry_wired_port(&mut self, now: Time) {
        if self.wired_port.retry_at.is_some_and(|at| at <= now) {
            self.open_wired_port();
        }
    }

    /// Returns an error if the daemon does not have the port at the QP's own address, because
    /// another process may answer for that GID.
    pub(super) fn check_wired_port(&mut self, own: IpAddr, peer: IpAddr) -> Result<(), Refusal> {
        if !self.has_port_at(own.into()) {
            self.open_wired_port();
        }
        match &self.wired_port.problem {
            Some(why) if !self.has_port_at(own.into()) => {
                let errno = match why {
                    Refusal::System { errno, .. } => *errno,
                    _ => system::number(&rustix::io::Errno::ADDRINUSE.into()),
                };
                let port = self.config.wired.port;
                let peer = SocketAddr::new(peer, port);
                Err(Refusal::System {
                    what: format!("cannot reach {peer} through port {port} (wired.port)"),
                    error: format!("this daemon is not bound to the port at {own}: {why}"),
                    errno,
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns true if connections to the port at this GID reach this daemon.
    pub(super) fn has_port_at(&self, gid: Gid) -> bool {
        let ip = gid.address();
        self.wired_port.listeners.iter().any(|(listener, _)| self.cm.listens_at(*listener, ip))
    }

    /// Returns the reason why other hosts cannot reach QPs of the RoCE device. Empty if they can,
    /// or before the first attempt to bind the port.
    pub(in crate::resource) fn wired_port_problem(&self) -> String {
        self.wired_port.problem.as_ref().map_or(String::new(), ToString::to_string)
    }

    /// Listens at each GID and each configured address that no listener covers yet. A service
    /// manager may have passed sockets for some of them, and a reload may add others.
    fn open_listeners(&mut self) -> Result<(), Refusal> {
        self.cm.set_quota(DAEMON, self.rendezvous_quota());
        let named = self.config.device.addresses.clone();
        if named.is_empty() && self.wired_port.listeners.is_empty() {
            // The IPv6 wildcard covers both families. On a host without IPv6, only IPv4 is bound.
            return match self.listen_at(Ipv6Addr::UNSPECIFIED.into()) {
                Err(refusal) if is_in_use(&refusal) => Err(refusal),
                Err(_) => self.listen_at(Ipv4Addr::UNSPECIFIED.into()),
                Ok(()) => Ok(()),
            };
        }
        let gids = self.host_gids();
        let wanted: Vec<IpAddr> = named.into_iter().chain(gids.map(Gid::address)).collect();
        let mut opened = Ok(());
        for ip in wanted {
            if !self.has_port_at(ip.into()) {
                let result = self.listen_at(ip);
                opened = opened.and(result);
            }
        }
        opened
    }

    fn listen_at(&mut self, ip: IpAddr) -> Result<(), Refusal> {
        let gid = Gid::from(ip);
        let address = self.socket_address(gid, self.config.wired.port, gid);
        if self.wired_port.listeners.len() >= MOST_LISTENERS {
            let why = format!("limit of {MOST_LISTENERS} listeners reached");
            return Err(refuse::invalid("listener", format!("{address}: {why}")));
        }
        self.listen_for_daemons(|cm, listener| {
            cm.bind(DAEMON, listener, BindTo { address, v6_only: false }).map(drop)
        })
    }

    fn listen_for_daemons(
        &mut self,
        bind: impl FnOnce(&mut crate::cm::ConnectionManager, ListenerId) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let handle = self.handles.listeners.allocate(DAEMON);
        let listener = ListenerId(handle.number());
        bind(&mut self.cm, listener)?;
        if let Err(refusal) = self.cm.listen(listener, BACKLOG) {
            // The listener exists, so this cannot fail.
            let _ = self.cm.close_listener(listener, clock::now());
            return Err(refusal);
        }
        // While the daemon drains, other daemons still verify the attempts of existing sessions.
        self.cm.ignore_draining(listener);
        self.wired_port.listeners.push((listener, handle));
        Ok(())
    }

    fn open_datagram_sockets(&mut self) -> Result<(), Refusal> {
        let port = self.config.wired.port;
        let gids = self.host_gids();
        let missing: Vec<Gid> =
            gids.filter(|gid| !self.wired_port.datagrams.contains(gid)).collect();
        let mut opened = Ok(());
        for gid in missing {
            if self.wired_port.datagrams.len() >= MOST_SOCKETS {
                tracing::debug!("limit of {MOST_SOCKETS} UDP sockets reached, none for {gid}");
                break;
            }
            let at = self.socket_address(gid, port, gid);
            match datagram_socket(at) {
                Ok(socket) => self.add_datagram_socket(socket),
                Err(e) => {
                    let refusal = system::refusal(&format!("cannot bind UDP {at}"), &e);
                    opened = opened.and(Err(refusal));
                }
            }
        }
        opened
    }

    fn add_datagram_socket(&mut self, socket: UdpSocket) {
        // Cannot fail: the socket is bound.
        let Ok(at) = socket.local_addr() else { return };
        let at = SocketAddr::new(at.ip(), at.port());
        self.wired_port.datagrams.insert(Gid::from(at.ip()));
        self.workers.one(DATAGRAM_WORKER, Command::AddDatagramSocket { socket, at });
    }

    /// Closes the sockets of removed addresses of the host, and opens sockets for new ones.
    pub(in crate::resource) fn follow_gids(&mut self) {
        let port = self.config.wired.port;
        let has = |gid: &Gid| self.has_gid(*gid) && !self.is_internal(*gid);
        let gone: Vec<Gid> =
            self.wired_port.datagrams.iter().filter(|gid| !has(gid)).copied().collect();
        for gid in gone {
            self.wired_port.datagrams.remove(&gid);
            let at = SocketAddr::new(gid.address(), port);
            self.workers.one(DATAGRAM_WORKER, Command::RemoveDatagramSocket(at));
        }
        // A private daemon without QPs of this device leaves the port to other processes.
        if self.wired_port.was_attempted() {
            self.open_wired_port();
        }
    }
}

fn is_in_use(refusal: &Refusal) -> bool {
    let in_use = system::number(&rustix::io::Errno::ADDRINUSE.into());
    match refusal {
        Refusal::System { errno, .. } => *errno == in_use,
        Refusal::InUse { .. } => true,
        _ => false,
    }
}

/// Returns a non-blocking UDP socket bound to `at`. Requests buffers for about 200 packets of the
/// maximum length. The kernel grants at most `rmem_max` and `wmem_max`.
fn datagram_socket(at: SocketAddr) -> io::Result<UdpSocket> {
    let socket = socket2::Socket::new(Domain::for_address(at), Type::DGRAM, Some(Protocol::UDP))?;
    if at.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_recv_buffer_size(BUFFER)?;
    socket.set_send_buffer_size(BUFFER)?;
    socket.set_nonblocking(true)?;
    socket.bind(&at.into())?;
    Ok(socket.into())
}

const BUFFER: usize = 1 << 20;

/// Maximum number of listeners. A listener stays open when the host loses its address.
const MOST_LISTENERS: usize = 256;

/// Maximum number of datagram sockets, which use descriptors reserved for the daemon.
const MOST_SOCKETS: usize = 16;

/// Pause before the second attempt to bind the port. It doubles after each further failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
