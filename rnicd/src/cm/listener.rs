//! Bound and listening addresses.

use std::net::SocketAddr;

use rnic_abi::abi::control::{ListenerRow, Refusal};
use rnic_abi::roce::PortSpace;
use rnic_abi::types::{ListenerId, SessionId};
use socket2::Socket;

use super::recent_replies::RecentReplies;
use super::startups::HostSlots;
use crate::config::PortMap;

/// A bound address of any port space, or the connection of a `ServeOver` request.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) session: SessionId,
    pub(super) source: Source,
    pub(super) address: SocketAddr,
    v6_only: bool,
    pub(super) key: usize,
    /// Maximum undecided requests; 0 while only bound.
    pub(super) backlog: u32,
    pub(super) pending: u32,
    /// Charged requests that came as messages, by host.
    pub(super) waiting: HostSlots,
    pub(super) accepted: u64,
    pub(super) rejected: u64,
    /// Accepts requests while the daemon drains.
    pub(super) ignores_draining: bool,
}

/// Source of a listener's requests.
#[derive(Debug)]
pub(super) enum Source {
    /// Connections to a TCP socket that the daemon has bound.
    Tcp(Socket),
    /// One connection that a client passed.
    Passed,
    /// Requests to a port of the RoCE device. The field holds recent replies.
    Service(PortSpace, RecentReplies),
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

    /// Creates a listener on a port of the RoCE device, in slot `key`.
    pub(super) fn new_service(
        session: SessionId,
        space: PortSpace,
        to: BindTo,
        key: usize,
    ) -> Self {
        Self::bound(session, Source::Service(space, RecentReplies::default()), to, key)
    }

    pub(super) fn bound(session: SessionId, source: Source, to: BindTo, key: usize) -> Self {
        let BindTo { address, v6_only } = to;
        Listener {
            session,
            source,
            address,
            v6_only,
            key,
            backlog: 0,
            pending: 0,
            waiting: HostSlots::default(),
            accepted: 0,
            rejected: 0,
            ignores_draining: false,
        }
    }

    /// Returns the TCP socket that the daemon has bound, if any.
    pub(super) fn socket(&self) -> Option<&Socket> {
        match &self.source {
            Source::Tcp(socket) => Some(socket),
            Source::Passed | Source::Service(..) => None,
        }
    }

    /// Returns true if the daemon has bound a TCP socket for it.
    pub(super) fn is_bound(&self) -> bool {
        self.socket().is_some()
    }

    /// Returns the port space of a listener on the RoCE device.
    pub(super) fn space(&self) -> Option<PortSpace> {
        match &self.source {
            Source::Service(space, _) => Some(*space),
            Source::Tcp(_) | Source::Passed => None,
        }
    }

    /// Returns the recent replies of a listener on the RoCE device.
    pub(super) fn answers(&self) -> Option<&RecentReplies> {
        match &self.source {
            Source::Service(_, answers) => Some(answers),
            Source::Tcp(_) | Source::Passed => None,
        }
    }

    pub(super) fn answers_mut(&mut self) -> Option<&mut RecentReplies> {
        match &mut self.source {
            Source::Service(_, answers) => Some(answers),
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
        // Passed sockets keep the program's own port, and ports of the RoCE device are not mapped.
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

/// Returns true if two addresses cannot both listen.
fn overlaps(a: BindTo, b: BindTo) -> bool {
    let a_ip = a.address.ip();
    let b_ip = b.address.ip();
    let either_any = a_ip.is_unspecified() || b_ip.is_unspecified();
    let of_family = a_ip.is_ipv4() == b_ip.is_ipv4();
    a.address.port() == b.address.port()
        && (a_ip == b_ip || either_any && (of_family || a.covers_all() || b.covers_all()))
}

/// Refuses to bind an address that overlaps with that of another listener.
pub(super) fn overlapping(address: SocketAddr, other: SocketAddr) -> Refusal {
    let any = address.ip().is_unspecified() || other.ip().is_unspecified();
    in_use(if any { "wildcard address" } else { "address" }, address, other)
}

/// `kind` determines the errno(3) that programs get.
pub(super) fn in_use(kind: &str, address: SocketAddr, other: SocketAddr) -> Refusal {
    Refusal::InUse {
        kind: kind.into(),
        handle: address.port().into(),
        by: format!("a listener on {other}"),
    }
}

pub(super) fn no_listener(id: ListenerId) -> Refusal {
    Refusal::NoSuchObject { kind: "listener".into(), handle: id.0 }
}
