//! The state of the wired port, and the sockets of it that a service manager passes.

use std::collections::BTreeSet;
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rnic_core::abi::control::Refusal;
use rnic_core::types::*;
use socket2::Type;

use crate::resource::numbers::Handle;

/// What this daemon has of the port.
#[derive(Debug, Default)]
pub struct WiredPort {
    pub(super) listeners: Vec<(ListenerId, Handle)>,
    /// GIDs whose UDP socket the worker has.
    pub(super) datagrams: BTreeSet<Gid>,
    /// Why something of it is missing, after an attempt.
    pub(super) problem: Option<Refusal>,
    /// When it is tried again; `None` before the first attempt and once all of it is had.
    pub(super) retry_at: Option<Time>,
    pub(super) pause: Duration,
}

/// A socket that a service manager has bound to the port.
#[derive(Debug)]
pub enum PassedPort {
    /// It listens for connections.
    Listener(TcpListener),
    /// It exchanges datagrams.
    Datagrams(UdpSocket),
}

impl PassedPort {
    /// Returns true for a socket of IPv4 or IPv6.
    pub fn is_of_internet(fd: impl AsFd) -> bool {
        use rustix::net::AddressFamily;
        let domain = rustix::net::sockopt::socket_domain(fd);
        domain.is_ok_and(|domain| [AddressFamily::INET, AddressFamily::INET6].contains(&domain))
    }

    /// Checks a descriptor that is not the control socket.
    ///
    /// # Errors
    ///
    /// A description of what is wrong with the socket.
    pub fn new(fd: OwnedFd, port: u16) -> Result<Self, String> {
        let socket = socket2::Socket::from(fd);
        let address = socket.local_addr().ok().and_then(|address| address.as_socket());
        let address = address.ok_or("a socket has no address")?;
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
                "a UDP socket is bound to {address}; each takes one address of the device"
            )),
            Type::DGRAM => Ok(PassedPort::Datagrams(socket.into())),
            _ => Err(format!("a socket bound to {address} is neither of TCP nor of UDP")),
        }
    }
}

impl WiredPort {
    /// Returns true after the first attempt to take the port.
    pub fn is_tried(&self) -> bool {
        !self.listeners.is_empty() || self.problem.is_some()
    }
}
