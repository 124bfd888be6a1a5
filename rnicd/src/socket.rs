//! The TCP socket of a connection: one of the daemon's own, or one that a client made and passed.
//!
//! A passed socket shares its file description with the client, who may keep its own descriptor.
//! So `O_NONBLOCK` means nothing on it and every call is given flags; closing our descriptor tells
//! the peer nothing, so an end is said aloud (`shutdown`, or disconnecting, which resets);
//! and `SO_LINGER` is the client's, so the close itself is the reaper's. It knows no protocol;
//! [`cm`](crate::cm) and [`worker`](crate::worker) use it.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use crate::config::Tcp;
use crate::reaper::Reaper;

/// A connection's socket. Dropping it ends the connection in order, except that a passed socket
/// which has been [`let_go`](Socket::let_go) stays as it is.
#[derive(Debug)]
pub struct Socket {
    /// Always there until it is dropped.
    stream: Option<TcpStream>,
    passed: Option<Passed>,
}

/// What a client's socket needs besides.
#[derive(Debug)]
struct Passed {
    reaper: Reaper,
    /// Whose client passed it.
    user: u32,
    /// The connection is the daemon's to end.
    engaged: bool,
    /// How the client had it noticed that the peer is gone, if that was changed.
    before: Option<Vigilance>,
}

impl Socket {
    /// One of the daemon's own.
    pub fn own(stream: TcpStream) -> Self {
        Socket { stream: Some(stream), passed: None }
    }

    /// One that a client of this user passed. Nothing has been done with it: dropped now it stays
    /// as it is.
    pub fn passed(stream: TcpStream, user: u32, reaper: Reaper) -> Self {
        Socket {
            stream: Some(stream),
            passed: Some(Passed { reaper, user, engaged: false, before: None }),
        }
    }

    /// Whether a client may hold it as well.
    pub fn is_passed(&self) -> bool {
        self.passed.is_some()
    }

    /// Has the kernel notice it if the peer is gone: asked whether it is there after some silence,
    /// and not waited for without end when it acknowledges nothing. The connection fails then.
    pub fn watch(&mut self, tcp: &Tcp) -> io::Result<()> {
        if let Some(passed) = &mut self.passed
            && let Some(stream) = &self.stream
        {
            passed.before = Some(Vigilance::of(SockRef::from(stream))?);
        }
        let socket = SockRef::from(&*self);
        if let Some(silence) = tcp.keepalive {
            let times = TcpKeepalive::new()
                .with_time(whole_seconds(silence))
                .with_interval(whole_seconds(tcp.keepalive_interval));
            socket.set_tcp_keepalive(&times)?;
        }
        match tcp.user_timeout {
            Some(most) => socket.set_tcp_user_timeout(Some(most)),
            None => Ok(()),
        }
    }

    /// From now on dropping it ends the connection.
    pub fn engage(&mut self) {
        if let Some(passed) = &mut self.passed {
            passed.engaged = true;
        }
    }

    /// Leaves the connection to the client that passed it, as it is.
    pub fn let_go(mut self) {
        if let Some(passed) = &mut self.passed {
            passed.engaged = false;
            if let (Some(before), Some(stream)) = (passed.before.take(), &self.stream) {
                // Fails only where nothing is left to be watched.
                let _ = before.restore(SockRef::from(stream));
            }
        }
    }

    /// Ends the connection with a reset, so that nothing of it lingers in the kernel.
    pub fn reset(self) {
        match &self.passed {
            // A close resets only if it is the last, so the connection is taken off the socket.
            // That may fail (a thread of the client waits on it): then it ends with a FIN.
            Some(_) => drop(rustix::net::connect_unspec(&self)),
            // As above, if it fails.
            None => drop(SockRef::from(&self).set_linger(Some(Duration::ZERO))),
        }
    }

    /// Shuts down a direction, or both (`shutdown(2)`); the sending one ends with a FIN.
    pub fn shutdown(&self, how: Shutdown) -> std::io::Result<()> {
        SockRef::from(self).shutdown(how)
    }
}

/// What makes a socket notice that its peer is gone.
#[derive(Clone, Copy, Debug)]
struct Vigilance {
    keepalive: bool,
    silence: Duration,
    interval: Duration,
    user_timeout: Option<Duration>,
}

impl Vigilance {
    fn of(socket: SockRef<'_>) -> io::Result<Self> {
        Ok(Vigilance {
            keepalive: socket.keepalive()?,
            silence: socket.tcp_keepalive_time()?,
            interval: socket.tcp_keepalive_interval()?,
            user_timeout: socket.tcp_user_timeout()?,
        })
    }

    fn restore(self, socket: SockRef<'_>) -> io::Result<()> {
        // Sets the times, and switches it on.
        let times = TcpKeepalive::new().with_time(self.silence).with_interval(self.interval);
        socket.set_tcp_keepalive(&times)?;
        socket.set_keepalive(self.keepalive)?;
        socket.set_tcp_user_timeout(self.user_timeout)
    }
}

/// The kernel counts in seconds here.
fn whole_seconds(time: Duration) -> Duration {
    Duration::from_secs(time.as_secs() + u64::from(time.subsec_nanos() > 0))
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Some(stream) => stream.as_fd(),
            // Taken out only by `drop`.
            None => unreachable!("a socket is there until it is dropped"),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let (Some(stream), Some(Passed { reaper, user, engaged, .. })) =
            (self.stream.take(), self.passed.take())
        else {
            return;
        };
        if engaged {
            // If it fails the connection has ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        reaper.close_socket(user, OwnedFd::from(stream));
    }
}
