//! Sockets of the RoCE device's port (`wired.port`), including those passed by a service manager.

use std::collections::BTreeSet;
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::*;
use socket2::Type;

use crate::resource::numbers::Handle;

/// The daemon's sockets on `wired.port`.
#[derive(Debug, Default)]
pub struct WiredPort {
    pub(super) listeners: Vec<(ListenerId, Handle)>,
    /// GIDs whose UDP socket is registered with the worker.
    pub(super) datagrams: BTreeSet<Gid>,
    /// Error of the last attempt, if a socket could not be bound.
    pub(super) problem: Option<Refusal>,
    /// Time of the next attempt. `None` before the first one and if no socket is missing.
    pub(super) retry_at: Option<Time>,
    pub(super) backoff: Duration,
}

/// A socket that a service manager has bound to the port.
#[derive(Debug)]
pub enum PassedPort {
    /// Accepts connections for RC and UC QPs.
    Listener(TcpListener),
    /// Carries UD packets of one GID.
    Datagrams(UdpSocket),
}

impl PassedPort {
    /// Returns true if `fd` is an IPv4 or IPv6 socket.
    pub fn is_inet(fd: impl AsFd) -> bool {
        use rustix::net::AddressFamily;
        let domain = rustix::net::sockopt::socket_domain(fd);
        domain.is_ok_and(|domain| [AddressFamily::INET, AddressFamily::INET6].contains(&domain))
    }

    /// Checks a passed descriptor that is not the control socket.
    ///
    /// # Errors
    ///
    /// Returns a message if the socket is bound to a port other than `port`, is a TCP socket that
    /// does not listen, is a UDP socket bound to the wildcard address, or is of another type.
    pub fn new(fd: OwnedFd, port: u16) -> Result<Self, String> {
        let socket = socket2::Socket::from(fd);
        let address = socket.local_addr().ok().and_then(|address| address.as_socket());
        let address = address.ok_or("a socket has no IP address")?;
        if address.port() != port {
            return Err(format!("a socket is bound to {address}, but wired.port = {port}"));
        }
        let failed = |e: io::Error| format!("a socket bound to {address}: {e}");
        socket.set_nonblocking(true).map_err(failed)?;
        match socket.r#type().map_err(failed)? {
            Type::STREAM if socket.is_listener().map_err(failed)? => {
                Ok(PassedPort::Listener(socket.into()))
            }
            Type::STREAM => Err(format!("a socket bound to {address} does not listen")),
            Type::DGRAM if address.ip().is_unspecified() => Err(format!(
                "a UDP socket is bound to {address}; bind a socket to each address of the device"
            )),
            Type::DGRAM => Ok(PassedPort::Datagrams(socket.into())),
            _ => Err(format!("a socket bound to {address} is neither a TCP nor a UDP socket")),
        }
    }
}

impl WiredPort {
    /// Returns true after the first attempt to bind the port.
    pub fn was_attempted(&self) -> bool {
        !self.listeners.is_empty() || self.problem.is_some()
    }
}
