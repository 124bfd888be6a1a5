//! The socket calls of connection management, all non-blocking.
//!
//! Reads and writes pass `MSG_DONTWAIT` instead of relying on `O_NONBLOCK`, because a socket that a
//! client passed shares its file description with the client.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};

use super::BindTo;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// Kernel memory for one connection, in bytes. Without a limit a connection takes megabytes if its
/// peer does not read. Half a megabyte for sends and one megabyte for receives reach full speed
/// (measured on loopback: faster than with the kernel's own sizes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketBuffers {
    /// Limit for bytes that the peer has not acknowledged.
    pub send: u32,
    /// Limit for bytes that the daemon has not read.
    pub receive: u32,
}

impl SocketBuffers {
    /// Sets the limits on an unconnected socket. Accepted sockets inherit them.
    pub(super) fn bound(self, socket: &Socket) -> io::Result<()> {
        // The kernel doubles these values for its bookkeeping.
        socket.set_send_buffer_size(self.send as usize / 2)?;
        socket.set_recv_buffer_size(self.receive as usize / 2)
    }
}

/// Returns a bound TCP socket that does not listen yet.
pub(super) fn bound(to: BindTo) -> io::Result<Socket> {
    let BindTo { address, v6_only } = to;
    let socket = tcp_socket(address)?;
    if address.is_ipv6() {
        // Overrides the net.ipv6.bindv6only sysctl.
        socket.set_only_v6(v6_only)?;
    }
    // A restarted server must not wait for TIME_WAIT. Live listeners still exclude each other.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Starts a connection. The socket becomes writable when the result is known. The outer error is a
/// failure of the local end; the inner error means that the peer is unreachable.
pub(super) fn start_connect(
    local: Option<SocketAddr>,
    peer: SocketAddr,
    buffers: SocketBuffers,
) -> io::Result<io::Result<TcpStream>> {
    let socket = outgoing(local, peer, buffers)?;
    Ok(begin(&socket, peer).map(|()| TcpStream::from(OwnedFd::from(socket))))
}

/// Returns a TCP socket for a connection from `local` to `peer`.
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

/// Starts to connect a socket, as [`start_connect`] does.
pub(super) fn begin(socket: impl AsFd, peer: SocketAddr) -> io::Result<()> {
    match SockRef::from(&socket).connect(&peer.into()) {
        Err(e) if e.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => Ok(()),
        done => done,
    }
}

/// Returns true if a connection is established, or false while it is in progress.
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

/// Accepts one connection from a listening socket.
pub(super) fn accept(listener: &Socket) -> io::Result<TcpStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(TcpStream::from(rustix::net::accept_with(listener, flags)?))
}

/// Returns true if a connection waits to be accepted. Without a free descriptor accept(2) fails
/// with `EMFILE` before it checks the queue, even if that is empty.
pub(super) fn has_pending(listener: &Socket) -> bool {
    let mut listeners = [PollFd::new(listener, PollFlags::IN)];
    poll(&mut listeners, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Reads available bytes; `Ok(0)` is the peer's FIN.
pub(super) fn receive(stream: impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    receive_with(stream, buffer, RecvFlags::empty())
}

/// Reads available bytes and leaves them in the socket; `Ok(0)` is the peer's FIN.
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

/// Returns the local address of a socket.
pub(super) fn local_address(stream: impl AsFd) -> io::Result<SocketAddr> {
    let address = SockRef::from(&stream).local_addr()?.as_socket();
    address.map(canonical).ok_or_else(|| Errno::AFNOSUPPORT.into())
}

/// Bytes that are being sent to the peer.
#[derive(Debug, Default)]
pub(super) struct OutgoingBytes {
    bytes: Vec<u8>,
    sent: usize,
}

impl OutgoingBytes {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        OutgoingBytes { bytes, sent: 0 }
    }

    /// Sends as many bytes as the kernel accepts. Returns true when it has all of them.
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

/// Converts an IPv4-mapped IPv6 address to IPv4, as an application would write it.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::new(IpAddr::V4(v4), address.port()),
        IpAddr::V6(_) => address,
    }
}

/// Returns the source address of a connect to `peer` if `peer` is an address of this host.
///
/// The kernel's route decides, as for a real connection: a route to a local address has that
/// address as its source. The returned port is free at this moment; no socket reserves it.
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

/// Returns the raw descriptor that `mio` needs, without ownership.
pub(super) fn raw(fd: &impl AsFd) -> std::os::fd::RawFd {
    std::os::fd::AsRawFd::as_raw_fd(&fd.as_fd())
}
