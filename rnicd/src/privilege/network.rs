//! The network namespace of a socket.
//!
//! The kernel gives every network namespace a number (`SO_NETNS_COOKIE`) that is unique until the
//! next boot, and reports it for every socket without any privilege. An accepted Unix connection
//! belongs to the namespace in which the *connecting* end's socket was created. So a client cannot
//! choose the number. To use another namespace, it needs a socket that was created there.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Cookie of a network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network(u64);

impl Network {
    /// Returns the namespace of a socket. For an accepted Unix socket, it is the client's.
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let mut cookie = 0u64;
        let mut len = size_of::<u64>() as libc::socklen_t;
        // SAFETY: getsockopt writes at most `len` bytes to `cookie`, a live local of exactly that
        // size and alignment, for which every bit pattern is valid. `len` is initialised to its
        // size, and both outlive the call. The socket is borrowed, so its descriptor is open.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_NETNS_COOKIE,
                (&raw mut cookie).cast(),
                &raw mut len,
            )
        };
        match result {
            0 if len as usize == size_of::<u64>() => Ok(Network(cookie)),
            0 => Err(io::ErrorKind::InvalidData.into()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the namespace in which this thread creates sockets.
    pub fn own() -> io::Result<Self> {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        Network::of(socket.as_fd())
    }
}

/// Available since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn own_sockets_are_in_the_own_namespace() {
        let own = Network::own().unwrap_or_else(|e| panic!("{e}"));
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap_or_else(|e| panic!("{e}"));
        let _client = UnixStream::connect(&path).unwrap_or_else(|e| panic!("{e}"));
        let (accepted, _) = listener.accept().unwrap_or_else(|e| panic!("{e}"));
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap_or_else(|e| panic!("{e}"));
        for socket in [listener.as_fd(), accepted.as_fd(), udp.as_fd()] {
            assert_eq!(Network::of(socket).ok(), Some(own));
        }
        let file = tempfile::tempfile().unwrap_or_else(|e| panic!("{e}"));
        assert!(Network::of(file.as_fd()).is_err());
    }
}
