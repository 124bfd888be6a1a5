//! Descriptors that close slowly. TCP sockets, passed before a session exists, linger because the
//! peer's window is closed. Clients disconnect with unread packets in their socket.

use std::convert::Infallible;
use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{
    set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size,
};

use super::progress::Progress;
use crate::raw::Raw;
use crate::traffic::Failure;

/// Number of lingering sockets. Must exceed the number of times that the test stops the daemon,
/// because a signal ends a linger wait.
const LINGERING: usize = 48;

/// Passes the sockets, then connects and disconnects forever, leaving unread packets.
pub fn run(socket: &Path) -> Result<Infallible, Failure> {
    let mut far = Vec::new();
    for _ in 0..LINGERING {
        let (near, kept) = closed_window()?;
        let raw = Raw::try_connect(socket).ok_or("cannot connect to the daemon")?;
        raw.send(b"no Hello", &[near.as_fd()]);
        far.push(kept);
    }
    let progress = Progress::begin();
    loop {
        if let Some(raw) = Raw::try_connect(socket) {
            // The first packet ends the connection, so the others stay unread.
            for _ in 0..3 {
                raw.send(b"no Hello", &[]);
            }
        }
        progress.add(1);
    }
}

/// Returns both ends of a connection. The first has more unsent data than the second accepts, and
/// lingers on close.
pub(super) fn closed_window() -> Result<(TcpStream, TcpStream), Failure> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    // Small buffers on both ends.
    set_socket_recv_buffer_size(&listener, 4096)?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    set_socket_send_buffer_size(&near, 4096)?;
    let (far, _) = listener.accept()?;
    near.set_nonblocking(true)?;
    loop {
        match near.write(&[0; 65536]) {
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => return Err(e.into()),
        }
    }
    near.set_nonblocking(false)?;
    set_socket_linger(&near, Some(Duration::from_secs(600)))?;
    Ok((near, far))
}
