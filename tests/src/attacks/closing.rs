//! Descriptors whose close takes its time: TCP sockets that linger on a closed window, passed
//! before there is a session, and clients that end with a packet unread behind them.

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

/// Sockets that linger: more than there are pauses, because a signal to the daemon ends such a
/// wait.
const LINGERING: usize = 48;

/// Passes the sockets, then comes and goes with unread packets, for ever.
pub fn run(socket: &Path) -> Result<Infallible, Failure> {
    let mut far = Vec::new();
    for _ in 0..LINGERING {
        let (near, kept) = closed_window()?;
        let raw = Raw::try_connect(socket).ok_or("the daemon is not there")?;
        raw.send(b"no Hello", &[near.as_fd()]);
        far.push(kept);
    }
    let progress = Progress::begin();
    loop {
        if let Some(raw) = Raw::try_connect(socket) {
            // The first ends it, and the others are unread then.
            for _ in 0..3 {
                raw.send(b"no Hello", &[]);
            }
        }
        progress.add(1);
    }
}

/// A connection whose one end has more to send than the other takes, and waits for that when it is
/// closed; and that other end.
pub(super) fn closed_window() -> Result<(TcpStream, TcpStream), Failure> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    // Neither end takes much.
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
