//! The few socket calls connection management needs, all non-blocking.
//!
//! Flags are given with every call instead of relying on `O_NONBLOCK`: a socket that a client made
//! shares its file description with the client.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};

use super::BindTo;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// Memory of the kernel for one connection, in bytes. Without bounds the kernel lets a connection
/// whose peer does not read have megabytes; whole speed takes less (measured on loopback: with half
/// a megabyte to send and one to receive, more than with what the kernel chooses).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketBuffers {
    /// For what is still to be sent.
    pub send: u32,
    /// For what has been received.
    pub receive: u32,
}

impl SocketBuffers {
    /// Bounds a socket that is not yet connected, and those that it accepts.
    pub(super) fn bound(self, socket: &Socket) -> io::Result<()> {
        // The kernel doubles what it is told, for its bookkeeping.
        socket.set_send_buffer_size(self.send as usize / 2)?;
        socket.set_recv_buffer_size(self.receive as usize / 2)
    }
}

/// A TCP socket that is bound, not listening.
pub(super) fn bound(to: BindTo) -> io::Result<Socket> {
    let BindTo { address, v6_only } = to;
    let socket = tcp_socket(address)?;
    if address.is_ipv6() {
        // Whatever net.ipv6.bindv6only makes of those that say nothing.
        socket.set_only_v6(v6_only)?;
    }
    // A restarted server need not wait for its old connections; live listeners still exclude.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Starts a connection; the result shows when the socket becomes writable. The outer error is about
/// our end, the inner one says that the peer cannot be reached.
pub(super) fn start_connect(
    local: Option<SocketAddr>,
    peer: SocketAddr,
    buffers: SocketBuffers,
) -> io::Result<io::Result<TcpStream>> {
    let socket = outgoing(local, peer, buffers)?;
    Ok(begin(&socket, peer).map(|()| TcpStream::from(OwnedFd::from(socket))))
}

/// A TCP socket for a connection from this address to `peer`.
pub(super) fn outgoing(
    local: Option<SocketAddr>,
    peer: SocketAddr,
    buffers: SocketBuffers,
) -> io::Result<Socket> {
    let socket = tcp_socket(peer)?;
    buffers.bound(&socket)?;
    if let Some(local) = local {
        if local.port() != 0 {
            socket.set_reuse_address(true)?;
        }
        socket.bind(&local.into())?;
    }
    Ok(socket)
}

/// Starts the connection of a socket, as [`start_connect`] does.
pub(super) fn begin(socket: impl AsFd, peer: SocketAddr) -> io::Result<()> {
    match SockRef::from(&socket).connect(&peer.into()) {
        Err(e) if e.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => Ok(()),
        done => done,
    }
}

/// Whether a connection that was started stands; `Ok(false)` if it is still on its way.
pub(super) fn connected(stream: impl AsFd) -> io::Result<bool> {
    let stream = SockRef::from(&stream);
    if let Some(e) = stream.take_error()? {
        return Err(e);
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(e) => Err(e),
    }
}

/// Takes one connection from a listening socket.
pub(super) fn accept(listener: &Socket) -> io::Result<TcpStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(TcpStream::from(rustix::net::accept_with(listener, flags)?))
}

/// Whether a connection waits to be accepted. accept(2) does not tell when descriptors are short:
/// it takes the descriptor first and fails with `EMFILE` even if nobody waits.
pub(super) fn someone_waits(listener: &Socket) -> bool {
    let mut listeners = [PollFd::new(listener, PollFlags::IN)];
    poll(&mut listeners, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Reads what is there; `Ok(0)` is the peer's FIN.
pub(super) fn receive(stream: impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    receive_with(stream, buffer, RecvFlags::empty())
}

/// Reads what is there and leaves it there; `Ok(0)` is the peer's FIN.
pub(super) fn peek(stream: impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    receive_with(stream, buffer, RecvFlags::PEEK)
}

fn receive_with(stream: impl AsFd, buffer: &mut [u8], how: RecvFlags) -> io::Result<usize> {
    loop {
        match rustix::net::recv(&stream, &mut *buffer, RecvFlags::DONTWAIT | how) {
            Ok((n, _)) => return Ok(n),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// The address of our end.
pub(super) fn local_address(stream: impl AsFd) -> io::Result<SocketAddr> {
    let address = SockRef::from(&stream).local_addr()?.as_socket();
    address.map(canonical).ok_or_else(|| Errno::AFNOSUPPORT.into())
}

/// Bytes on their way to the peer.
#[derive(Debug, Default)]
pub(super) struct OutgoingBytes {
    bytes: Vec<u8>,
    sent: usize,
}

impl OutgoingBytes {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        OutgoingBytes { bytes, sent: 0 }
    }

    /// Sends on; true when everything is with the kernel.
    pub(super) fn send(&mut self, stream: impl AsFd) -> io::Result<bool> {
        while let Some(rest @ [_, ..]) = self.bytes.get(self.sent..) {
            match rustix::net::send(&stream, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) => self.sent += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(true)
    }
}

/// The address an application would write: IPv4 seen through an IPv6 socket becomes IPv4 again.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::new(IpAddr::V4(v4), address.port()),
        IpAddr::V6(_) => address,
    }
}

/// The address this host would connect to `peer` from, if `peer` is an address of this host.
///
/// The kernel is asked, as it would be for a real connection: the route to an own address has that
/// very address as source. The port is one that was free just now; no connection will hold it.
pub(super) fn source_if_local(
    local: Option<SocketAddr>,
    peer: SocketAddr,
) -> io::Result<Option<SocketAddr>> {
    let any = if peer.is_ipv4() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED)
    } else {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    };
    let probe = UdpSocket::bind((any, 0))?;
    if probe.connect(peer).is_err() {
        return Ok(None);
    }
    let mut source = probe.local_addr()?;
    if !peer.ip().is_loopback() && source.ip() != peer.ip() {
        return Ok(None);
    }
    if let Some(wanted) = local.map(canonical) {
        if wanted.is_ipv4() != peer.is_ipv4() {
            return Err(io::Error::from(Errno::AFNOSUPPORT));
        }
        if !wanted.ip().is_unspecified() {
            source.set_ip(wanted.ip());
        }
        source.set_port(wanted.port());
    } else {
        source.set_port(0);
    }
    let address = bound(source.into())?.local_addr()?.as_socket();
    Ok(address)
}

fn tcp_socket(address: SocketAddr) -> io::Result<Socket> {
    let kind = Type::STREAM.nonblocking().cloexec();
    Socket::new(Domain::for_address(address), kind, Some(Protocol::TCP))
}

/// The descriptor is borrowed for `mio`, which wants a raw one.
pub(super) fn raw(fd: &impl AsFd) -> std::os::fd::RawFd {
    std::os::fd::AsRawFd::as_raw_fd(&fd.as_fd())
}
