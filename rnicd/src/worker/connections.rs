//! The descriptors that a worker polls, including the sockets of its QPs.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rnic_abi::types::{QpId, SessionId, Time};
use rnic_core::engine::Engine;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SendFlags};
use slab::Slab;
use socket2::SockRef;

use crate::events::{ChannelSender, EventSender, Sent};
use crate::socket::Socket;

/// Token of the worker's waker.
pub(super) const WAKER: Token = Token(usize::MAX);

/// A polled object.
#[derive(Debug)]
pub(super) enum Polled {
    /// A QP's connection.
    Connection(Connection),
    /// A client's eventfd. It is never read: a read may block, because the client shares the
    /// descriptor's flags, and edges are enough.
    Bell { session: SessionId, eventfd: OwnedFd },
    /// A datagram socket, by its number in `DatagramSockets`, which owns it.
    Datagrams { number: usize, fd: RawFd },
    /// A client's socket that was full.
    Sender { session: SessionId, sender: FullSender },
}

/// A sender that waits for the client to read.
#[derive(Clone, Debug)]
pub(super) enum FullSender {
    Events(Arc<EventSender>),
    Channel(Arc<ChannelSender>),
}

impl FullSender {
    fn fd(&self) -> RawFd {
        match self {
            FullSender::Events(s) => s.as_fd().as_raw_fd(),
            FullSender::Channel(s) => s.as_fd().as_raw_fd(),
        }
    }

    fn flush(&self) -> Sent {
        match self {
            FullSender::Events(s) => s.flush(),
            FullSender::Channel(s) => s.flush(),
        }
    }
}

/// The TCP connection of a QP.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) qp: QpId,
    pub(super) stream: Socket,
    /// The engine needs nothing more from the connection.
    pub(super) ended: bool,
    /// The last send returned `EWOULDBLOCK`.
    pub(super) blocked: bool,
    /// The engine reads nothing from the connection until [`Connections::read_again`].
    pub(super) paused: bool,
    /// The socket has a FIN or an error. epoll reports no further edge, so the worker reads the
    /// socket to its end.
    pub(super) closing: bool,
    /// Effective maximum segment size, and the time it was read.
    emss: Option<(usize, Time)>,
}

impl Connection {
    /// Stops reading. Bytes and a FIN stay queued in their order, but the engine is notified of an
    /// error or a FIN at once. Returns true if there was an error.
    pub(super) fn pause(&mut self, engine: &mut Engine, now: Time) -> bool {
        self.paused = true;
        // An edge that was already reported is not reported again.
        let mut ready = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !rustix::event::poll(&mut ready, Some(&at_once)).is_ok_and(|n| n > 0) {
            return false;
        }
        self.closing = true;
        let error = SockRef::from(&self.stream).take_error().ok().flatten();
        match &error {
            Some(error) => engine.handle_socket_error(self.qp, error, now),
            None => engine.handle_peer_closing(self.qp, now),
        }
        error.is_some()
    }

    /// Discards up to [`DISCARDED`] received bytes. If unread bytes remain, closing resets the
    /// connection (RFC 1122 section 4.2.2.13), and sent bytes that have not reached the peer are
    /// lost.
    fn discard_received(&self) {
        let mut bytes = [0; 16 << 10];
        for _ in 0..DISCARDED / bytes.len() {
            let read = rustix::net::recv(&self.stream, &mut bytes, RecvFlags::DONTWAIT);
            if !read.is_ok_and(|(n, _)| n > 0) {
                return;
            }
        }
    }

    /// Returns the effective maximum segment size. The kernel changes it as it learns about the
    /// path, so it is read again from time to time (RFC 5044 section 4.5).
    //= MPA-4.5-6
    pub(super) fn emss(&mut self, now: Time) -> usize {
        match self.emss {
            Some((emss, at)) if now.since(at) < EMSS_VALID_FOR => emss,
            earlier => {
                let known = earlier.map_or(EMSS_DEFAULT, |(emss, _)| emss);
                let emss = SockRef::from(&self.stream).tcp_mss().map_or(known, |mss| mss as usize);
                self.emss = Some((emss, now));
                emss
            }
        }
    }
}

/// Everything that a worker polls, except its waker.
#[derive(Debug)]
pub(super) struct Connections {
    registry: Registry,
    polled: Slab<Polled>,
    by_qp: HashMap<QpId, usize>,
    /// Full senders by descriptor.
    full: HashMap<RawFd, usize>,
    /// Keys of recently active connections, newest last. They are tried before the worker sleeps.
    hot: Vec<usize>,
}

impl Connections {
    pub(super) fn new(registry: Registry) -> Self {
        Connections {
            registry,
            polled: Slab::new(),
            by_qp: HashMap::new(),
            full: HashMap::new(),
            hot: Vec::new(),
        }
    }

    /// Adds a QP's connection. Closes it on error.
    pub(super) fn add(&mut self, qp: QpId, stream: Socket) -> io::Result<()> {
        SockRef::from(&stream).set_tcp_nodelay(true)?;
        // Writable edges occur only after a send found no room, so one registration covers both.
        let interest = Interest::READABLE | Interest::WRITABLE;
        let fd = stream.as_fd().as_raw_fd();
        let connection = Connection {
            qp,
            stream,
            ended: false,
            blocked: false,
            paused: false,
            closing: false,
            emss: None,
        };
        let key = self.register(fd, interest, Polled::Connection(connection))?;
        self.by_qp.insert(qp, key);
        Ok(())
    }

    /// Watches a client's eventfd.
    pub(super) fn add_bell(&mut self, session: SessionId, eventfd: OwnedFd) -> io::Result<()> {
        let fd = eventfd.as_raw_fd();
        self.register(fd, Interest::READABLE, Polled::Bell { session, eventfd }).map(drop)
    }

    /// Watches a datagram socket.
    pub(super) fn add_datagrams(&mut self, number: usize, fd: RawFd) -> io::Result<()> {
        self.register(fd, Interest::READABLE, Polled::Datagrams { number, fd }).map(drop)
    }

    /// Stops watching a datagram socket, which is about to be closed.
    pub(super) fn remove_datagrams(&mut self, number: usize) {
        let found = self.polled.iter().find_map(|(key, polled)| match polled {
            Polled::Datagrams { number: of, fd } if *of == number => Some((key, *fd)),
            _ => None,
        });
        if let Some((key, fd)) = found {
            self.polled.remove(key);
            // If this fails, closing the socket has the same effect.
            let _ = self.registry.deregister(&mut SourceFd(&fd));
        }
    }

    /// Watches a full sender until it has room.
    pub(super) fn watch(&mut self, session: SessionId, sender: FullSender) {
        let fd = sender.fd();
        if self.full.contains_key(&fd) {
            return;
        }
        // If this fails for lack of memory, the next event tries again.
        let interest = Interest::WRITABLE;
        if let Ok(key) = self.register(fd, interest, Polled::Sender { session, sender }) {
            self.full.insert(fd, key);
        }
    }

    fn register(&mut self, fd: RawFd, interest: Interest, polled: Polled) -> io::Result<usize> {
        let slot = self.polled.vacant_entry();
        let key = slot.key();
        self.registry.register(&mut SourceFd(&fd), Token(key), interest)?;
        slot.insert(polled);
        Ok(key)
    }

    pub(super) fn polled(&mut self, token: Token) -> Option<&mut Polled> {
        self.polled.get_mut(token.0)
    }

    pub(super) fn of_qp(&mut self, qp: QpId) -> Option<&mut Connection> {
        let key = self.by_qp.get(&qp)?;
        match self.polled.get_mut(*key) {
            Some(Polled::Connection(connection)) => Some(connection),
            _ => None,
        }
    }

    /// Returns the QP of a connection if the engine may read it.
    pub(super) fn wanted(&self, token: Token) -> Option<QpId> {
        match self.polled.get(token.0) {
            Some(Polled::Connection(c)) if !c.ended && !c.paused => Some(c.qp),
            _ => None,
        }
    }

    /// Resumes reading. Returns true if the connection was paused, because edges may have been
    /// lost.
    pub(super) fn read_again(&mut self, qp: QpId) -> bool {
        self.of_qp(qp).is_some_and(|c| std::mem::take(&mut c.paused) && !c.ended)
    }

    /// Returns a QP's connection if the engine may read it.
    pub(super) fn readable(&mut self, qp: QpId) -> Option<(Token, &mut Connection)> {
        let key = *self.by_qp.get(&qp)?;
        match self.polled.get_mut(key) {
            Some(Polled::Connection(c)) if !c.ended && !c.paused => Some((Token(key), c)),
            _ => None,
        }
    }

    /// Marks a connection as recently active.
    pub(super) fn keep_hot(&mut self, token: Token) {
        if self.hot.last() == Some(&token.0) {
            return;
        }
        self.hot.retain(|key| *key != token.0);
        if self.hot.len() == HOT {
            self.hot.remove(0);
        }
        self.hot.push(token.0);
    }

    /// Returns the QPs of recently active connections, to try them once more.
    pub(super) fn hot(&self) -> impl Iterator<Item = QpId> {
        self.hot.iter().filter_map(|key| self.wanted(Token(*key)))
    }

    /// Returns true if more than one connection is recently active.
    pub(super) fn several_hot(&self) -> bool {
        self.hot.len() > 1
    }

    /// Forgets which connections were recently active.
    pub(super) fn cool(&mut self) {
        self.hot.clear();
    }

    /// Flushes a sender, and stops watching it if nothing is left to send.
    pub(super) fn flush_sender(&mut self, token: Token) {
        let Some(Polled::Sender { sender, .. }) = self.polled.get(token.0) else { return };
        if sender.flush() != Sent::Waiting {
            self.remove(token.0);
        }
    }

    /// Sends a FIN to a QP's peer.
    pub(super) fn shutdown(&mut self, qp: QpId) {
        if let Some(connection) = self.of_qp(qp) {
            // If this fails, the connection has ended and the next receive fails too.
            //= MPA-7.2-1
            let _ = connection.stream.shutdown(Shutdown::Write);
        }
    }

    /// Sends a QP's last bytes if the socket has room for them now.
    pub(super) fn send_last(&mut self, qp: QpId, bytes: &[u8]) {
        if let Some(connection) = self.of_qp(qp) {
            // Do not wait for a peer that does not read.
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let _ = rustix::net::send(&connection.stream, bytes, flags);
        }
    }

    /// Closes a QP's connection, gracefully or with a reset.
    pub(super) fn close(&mut self, qp: QpId, reset: bool) {
        let Some(key) = self.by_qp.get(&qp).copied() else { return };
        let Some(Polled::Connection(c)) = self.remove(key) else { return };
        if reset {
            c.stream.reset();
        } else {
            c.discard_received();
        }
    }

    /// Removes the descriptors of a session. Its QPs' connections have been closed.
    pub(super) fn remove_session(&mut self, session: SessionId) {
        let of_session = |polled: &Polled| match polled {
            Polled::Bell { session: s, .. } | Polled::Sender { session: s, .. } => *s == session,
            Polled::Connection(_) | Polled::Datagrams { .. } => false,
        };
        let keys: Vec<_> =
            self.polled.iter().filter(|(_, p)| of_session(p)).map(|(key, _)| key).collect();
        for key in keys {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: usize) -> Option<Polled> {
        let polled = self.polled.try_remove(key)?;
        let fd = match &polled {
            Polled::Connection(c) => {
                self.by_qp.remove(&c.qp);
                self.hot.retain(|k| *k != key);
                c.stream.as_fd().as_raw_fd()
            }
            Polled::Bell { eventfd, .. } => eventfd.as_raw_fd(),
            Polled::Datagrams { fd, .. } => *fd,
            Polled::Sender { sender, .. } => {
                self.full.remove(&sender.fd());
                sender.fd()
            }
        };
        // A client or another thread may hold the same file open, so closing is not enough.
        let _ = self.registry.deregister(&mut SourceFd(&fd));
        Some(polled)
    }
}

/// Maximum number of bytes read before a connection is closed.
const DISCARDED: usize = 256 << 10;
/// Maximum number of connections that count as recently active.
const HOT: usize = 8;
/// Time after which the segment size is read again.
const EMSS_VALID_FOR: Duration = Duration::from_millis(20);
/// Segment size if the socket reports none: every IPv4 host accepts it (RFC 9293 section 3.7.1).
const EMSS_DEFAULT: usize = 536;

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::*;

    /// Returns the descriptors of a worker, and both ends of a connection, of which QP 7 has the
    /// first.
    fn connected() -> (Connections, TcpStream, TcpStream) {
        let poll = mio::Poll::new().expect("epoll");
        let mut connections = Connections::new(poll.registry().try_clone().expect("epoll"));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connect");
        let peer = listener.accept().expect("accept").0;
        let own = stream.try_clone().expect("a descriptor");
        connections.add(QpId(7), Socket::own(stream)).expect("watched");
        (connections, own, peer)
    }

    #[test]
    fn unread_bytes_do_not_reset_a_closed_connection() {
        let (mut connections, mut own, mut peer) = connected();
        own.set_nonblocking(true).expect("a socket");
        // More than the peer's kernel accepts.
        let mut sent = 0;
        while let Ok(n) = own.write(&[7; 64 << 10]) {
            sent += n;
        }
        peer.write_all(&[1; 10_000]).expect("room");
        drop(own);
        connections.close(QpId(7), false);
        let mut received = Vec::new();
        peer.read_to_end(&mut received).expect("no reset");
        assert_eq!(received.len(), sent);
    }

    //= MPA-3-2
    //= MPA-5.1-2
    //= MPA-5.1-4
    #[test]
    fn emss_follows_the_mss_of_tcp() {
        let poll = mio::Poll::new().expect("epoll");
        let registry = poll.registry().try_clone().expect("epoll");
        let mut connections = Connections::new(registry);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        // The path and the peer allow much larger segments.
        SockRef::from(&listener).set_tcp_mss(700).expect("an MSS to announce");
        let address = listener.local_addr().expect("bound");
        let stream = TcpStream::connect(address).expect("connect");
        let socket = stream.try_clone().expect("a descriptor");
        connections.add(QpId(7), Socket::own(stream)).expect("watched");
        // Without TCP_NODELAY, TCP would join the bytes with the next FPDU's.
        assert!(SockRef::from(&socket).tcp_nodelay().expect("an option"));
        let connection = connections.of_qp(QpId(7)).expect("just added");
        let now = Time(1_000_000_000);
        let emss = connection.emss(now);
        assert!(emss <= 700 && emss != EMSS_DEFAULT, "{emss}");
        // The value is reused until EMSS_VALID_FOR has passed.
        connection.emss = Some((1, now));
        let later = now.after(EMSS_VALID_FOR);
        assert_eq!(connection.emss(Time(later.0 - 1)), 1);
        assert_eq!(connection.emss(later), emss);
    }
}
