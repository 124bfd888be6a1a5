//! The TCP socket of a connection: the daemon's own, or one that a client made and passed.
//!
//! A passed socket shares its file description with the client, which may keep its own descriptor.
//! So every call passes flags instead of relying on `O_NONBLOCK`. Closing our descriptor does not
//! end the connection: `shutdown` ends it with a FIN, `connect` to `AF_UNSPEC` with a RST. The
//! client controls `SO_LINGER`, so `close` may block; the reaper calls it.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use crate::config::Tcp;
use crate::reaper::Reaper;

/// The socket of a connection. Dropping it ends the connection gracefully. A passed socket is left
/// connected before [`Socket::end_on_drop`] and after [`Socket::let_go`].
#[derive(Debug)]
pub struct Socket {
    /// `None` only in `drop`.
    stream: Option<TcpStream>,
    passed: Option<Passed>,
}

/// State of a passed socket.
#[derive(Debug)]
struct Passed {
    reaper: Reaper,
    /// User of the client that passed it.
    user: u32,
    /// Dropping the socket ends the connection.
    ends_on_drop: bool,
    /// Keepalive and timeout as set by the client, if they were changed.
    before: Option<KeepaliveSettings>,
}

impl Socket {
    /// Wraps one of the daemon's own sockets.
    pub fn own(stream: TcpStream) -> Self {
        Socket { stream: Some(stream), passed: None }
    }

    /// Wraps a socket that a client of `user` passed. Dropping it now leaves the connection as it
    /// is.
    pub fn passed(stream: TcpStream, user: u32, reaper: Reaper) -> Self {
        Socket {
            stream: Some(stream),
            passed: Some(Passed { reaper, user, ends_on_drop: false, before: None }),
        }
    }

    /// Returns true if a client passed the socket and may still hold a descriptor of it.
    pub fn is_passed(&self) -> bool {
        self.passed.is_some()
    }

    /// Sets keepalive and user timeout, so that the connection fails if the peer is gone.
    pub fn watch(&mut self, tcp: &Tcp) -> io::Result<()> {
        if let Some(passed) = &mut self.passed
            && let Some(stream) = &self.stream
        {
            passed.before = Some(KeepaliveSettings::of(SockRef::from(stream))?);
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

    /// Makes a later drop end the connection.
    pub fn end_on_drop(&mut self) {
        if let Some(passed) = &mut self.passed {
            passed.ends_on_drop = true;
        }
    }

    /// Leaves the connection to the client that passed it, and restores its keepalive settings.
    pub fn let_go(mut self) {
        if let Some(passed) = &mut self.passed {
            passed.ends_on_drop = false;
            if let (Some(before), Some(stream)) = (passed.before.take(), &self.stream) {
                // Fails only if the connection has ended.
                let _ = before.restore(SockRef::from(stream));
            }
        }
    }

    /// Ends the connection with a reset, so that none of its state stays in the kernel.
    pub fn reset(self) {
        match &self.passed {
            // Closing resets only if no other descriptor is open, so the socket is disconnected
            // instead. If this fails, for example because a thread of the client waits on the
            // socket, the connection ends with a FIN.
            Some(_) => drop(rustix::net::connect_unspec(&self)),
            // If this fails, the connection ends with a FIN.
            None => drop(SockRef::from(&self).set_linger(Some(Duration::ZERO))),
        }
    }

    /// Shuts down one or both directions (`shutdown(2)`). `Shutdown::Write` sends a FIN.
    pub fn shutdown(&self, how: Shutdown) -> std::io::Result<()> {
        SockRef::from(self).shutdown(how)
    }
}

/// Keepalive and user timeout of a socket.
#[derive(Clone, Copy, Debug)]
struct KeepaliveSettings {
    keepalive: bool,
    silence: Duration,
    interval: Duration,
    user_timeout: Option<Duration>,
}

impl KeepaliveSettings {
    fn of(socket: SockRef<'_>) -> io::Result<Self> {
        Ok(KeepaliveSettings {
            keepalive: socket.keepalive()?,
            silence: socket.tcp_keepalive_time()?,
            interval: socket.tcp_keepalive_interval()?,
            user_timeout: socket.tcp_user_timeout()?,
        })
    }

    fn restore(self, socket: SockRef<'_>) -> io::Result<()> {
        // Sets the times and turns keepalive on.
        let times = TcpKeepalive::new().with_time(self.silence).with_interval(self.interval);
        socket.set_tcp_keepalive(&times)?;
        socket.set_keepalive(self.keepalive)?;
        socket.set_tcp_user_timeout(self.user_timeout)
    }
}

/// Rounds up to whole seconds, the kernel's unit here.
fn whole_seconds(time: Duration) -> Duration {
    Duration::from_secs(time.as_secs() + u64::from(time.subsec_nanos() > 0))
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Some(stream) => stream.as_fd(),
            // Taken only by `drop`.
            None => unreachable!("the stream is taken only by drop"),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let (Some(stream), Some(Passed { reaper, user, ends_on_drop, .. })) =
            (self.stream.take(), self.passed.take())
        else {
            return;
        };
        if ends_on_drop {
            // Fails only if the connection has ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        reaper.close_socket(user, OwnedFd::from(stream));
    }
}
