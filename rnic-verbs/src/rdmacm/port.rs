//! Reserves the source port of an id from `rdma_resolve_addr(3)` until the id has a connection.
//!
//! A socket of the program holds the port. It does not listen and has `SO_REUSEADDR`, so the daemon
//! can connect from the port.
//!
//! On the RoCE device the daemon manages the ports. There, a UDP socket merely makes the port
//! unique among the programs of the host that reserve a port.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rnic_client::DeviceKind;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};

/// A reserved port, which the kernel assigns to no other program.
pub(super) struct ReservedPort {
    number: u16,
    _socket: OwnedFd,
}

impl ReservedPort {
    /// Reserves a free port for an id of this device, in the address family of `peer`.
    pub(super) fn reserve(peer: SocketAddr, device: DeviceKind) -> std::io::Result<ReservedPort> {
        let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let kind = match device {
            DeviceKind::Iwarp => SocketType::STREAM,
            DeviceKind::Roce => SocketType::DGRAM,
        };
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &any(peer, 0))?;
        // Set after bind, otherwise the kernel may choose a port of another socket with the option.
        set_socket_reuseaddr(&socket, true)?;
        let bound = SocketAddr::try_from(getsockname(&socket)?)?;
        Ok(ReservedPort { number: bound.port(), _socket: socket })
    }

    pub(super) fn number(&self) -> u16 {
        self.number
    }

    /// Returns the local address for a connection to `peer` from this port. The kernel chooses the
    /// host address.
    pub(super) fn local(&self, peer: SocketAddr) -> SocketAddr {
        any(peer, self.number)
    }
}

/// Returns the unspecified address of the family of `peer`.
fn any(peer: SocketAddr, port: u16) -> SocketAddr {
    match peer {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, port).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, port).into(),
    }
}
