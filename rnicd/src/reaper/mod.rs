//! Threads that close descriptors and drop large objects for threads that must not wait.
//!
//! Unmapping gigabytes takes time, and `close` of a client's descriptor may never return (a FUSE
//! server must answer the flush). There are three kinds of work. Each kind has its own threads, and
//! a lane for each user (`lanes`):
//!
//! * the daemon's own objects that are slow to drop: mappings, buffers, and the rest of a session;
//! * descriptors of clients that close in bounded time, or once the thread is interrupted: TCP
//!   sockets, which may linger, memfds, and control sockets with unread packets;
//! * descriptors of clients of unknown kind, which may never close. One user can block at most two
//!   threads with them.
//!
//! A descriptor that waits to be closed still occupies an entry of the daemon's descriptor table.
//! It counts for its user, and this count limits how many descriptors the user may pass. The daemon
//! exits without waiting for these threads.

mod lanes;
mod passed;

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Sender, unbounded};
use mio::Waker;

use crate::config::Seccomp;
use crate::packet;
use crate::privilege::{Interrupter, ThreadKind, return_free_memory, spawn_confined};
use lanes::Lanes;
pub use passed::{Passed, PassedKind};

/// Closes descriptors and drops objects on its own threads.
#[derive(Clone, Debug)]
pub struct Reaper {
    work: Arc<Work>,
    gone: Receiver<Receipt>,
}

/// The waiting work. Its threads end after the last `Reaper` is dropped.
#[derive(Debug)]
struct Work {
    ours: Arc<Lanes<OwnObject>>,
    clients: Arc<Lanes<ClientDescriptor>>,
    unknown: Arc<Lanes<OwnedFd>>,
    last: AtomicU64,
}

/// An object of the daemon.
struct OwnObject {
    item: Box<dyn Any + Send>,
    receipt: Option<Receipt>,
}

/// A client's descriptor that closes in bounded time.
#[derive(Debug)]
enum ClientDescriptor {
    /// A TCP socket. Its close may linger.
    Socket(OwnedFd),
    /// A client's memfd. Its close may have to free pages.
    Memfd(OwnedFd),
    /// The daemon's end of a control socket with unread packets from the client. The close also
    /// closes the descriptors in them.
    Client(OwnedFd),
}

/// Returns the allocator's free memory to the kernel when dropped.
struct FreeMemory;

impl Drop for FreeMemory {
    fn drop(&mut self) {
        return_free_memory();
    }
}

/// Identifies an object whose drop is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Receipt(u64);

impl Reaper {
    /// Starts the threads. They wake `control` when an object with a receipt has been dropped.
    pub fn start(control: Arc<Waker>, seccomp: Seccomp) -> io::Result<Self> {
        let (gone_out, gone) = unbounded();
        let work = Work::default();
        for _ in 0..OWN_THREADS {
            let lanes = work.ours.clone();
            let gone = gone_out.clone();
            let control = control.clone();
            start("reaper", seccomp, lanes, move || {
                let gone = gone.clone();
                let control = control.clone();
                move |ours| drop_own(ours, &gone, &control)
            })?;
        }
        for _ in 0..CLIENT_THREADS {
            start("reaper-clients", seccomp, work.clients.clone(), || {
                let interrupter = Interrupter::of_this_thread()
                    .inspect_err(|error| tracing::warn!(%error, "closing client sockets may block"))
                    .ok();
                move |foreign| match &interrupter {
                    Some(interrupter) => interrupter.during(|| close(foreign)),
                    None => close(foreign),
                }
            })?;
        }
        for _ in 0..UNKNOWN_THREADS {
            start("reaper-unknown", seccomp, work.unknown.clone(), || drop::<OwnedFd>)?;
        }
        Ok(Reaper { work: Arc::new(work), gone })
    }

    /// Drops an object of the daemon on a user's behalf: mappings, buffers, sockets.
    pub fn drop_later(&self, user: u32, item: impl Any + Send) {
        self.work.ours.add(user, OwnObject { item: Box::new(item), receipt: None });
    }

    /// Drops an object that counts against a limit until [`Reaper::poll_gone`] reports it, because
    /// a client must not be able to allocate faster than its freed memory is unmapped.
    pub fn drop_counted(&self, user: u32, item: impl Any + Send) -> Receipt {
        let receipt = Receipt(self.work.last.fetch_add(1, Ordering::Relaxed));
        self.work.ours.add(user, OwnObject { item: Box::new(item), receipt: Some(receipt) });
        receipt
    }

    /// Returns free memory to the kernel, after the user's earlier objects are dropped.
    pub fn return_memory_later(&self, user: u32) {
        self.drop_later(user, FreeMemory);
    }

    /// Takes the receipt of a dropped object.
    pub fn poll_gone(&self) -> Option<Receipt> {
        self.gone.try_recv().ok()
    }

    /// Returns the number of descriptors of a user's clients that are not closed yet.
    pub fn closing(&self, user: u32) -> usize {
        self.work.clients.of(user) + self.work.unknown.of(user)
    }

    /// Returns the number of descriptors of all clients that are not closed yet.
    pub fn closing_of_all(&self) -> usize {
        self.closing_soon() + self.work.unknown.total()
    }

    /// Returns the number of descriptors of all clients that close in bounded time.
    pub fn closing_soon(&self) -> usize {
        self.work.clients.total()
    }

    /// Closes a client's descriptor of unknown kind.
    pub fn close_unknown(&self, user: u32, descriptor: OwnedFd) {
        self.work.unknown.add(user, descriptor);
    }

    /// Closes the daemon's end of a control socket.
    pub fn close_client(&self, user: u32, socket: OwnedFd) {
        packet::shut(socket.as_fd());
        if packet::is_waiting(socket.as_fd()) {
            self.work.clients.add(user, ClientDescriptor::Client(socket));
        } else {
            self.drop_later(user, socket);
        }
    }

    /// Closes a client's TCP socket.
    pub fn close_socket(&self, user: u32, socket: OwnedFd) {
        self.work.clients.add(user, ClientDescriptor::Socket(socket));
    }

    /// Closes a client's memfd, which may free gigabytes.
    pub fn close_memfd(&self, user: u32, memfd: OwnedFd) {
        self.work.clients.add(user, ClientDescriptor::Memfd(memfd));
    }
}

#[cfg(test)]
impl Reaper {
    /// Returns a reaper that closes nothing.
    pub(super) fn without_threads() -> Self {
        Reaper { work: Arc::default(), gone: unbounded().1 }
    }
}

impl Default for Work {
    fn default() -> Self {
        Work {
            ours: Arc::new(Lanes::new(1)),
            clients: Arc::new(Lanes::new(1)),
            unknown: Arc::new(Lanes::new(UNKNOWN_THREADS_PER_USER)),
            last: AtomicU64::new(0),
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.ours.close();
        self.clients.close();
        self.unknown.close();
    }
}

impl fmt::Debug for OwnObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ours").field("receipt", &self.receipt).finish_non_exhaustive()
    }
}

/// Starts a thread that runs the work in `lanes`, with a function that `prepare` returns there.
fn start<T, F>(
    name: &str,
    seccomp: Seccomp,
    lanes: Arc<Lanes<T>>,
    prepare: impl FnOnce() -> F + Send + 'static,
) -> io::Result<()>
where
    T: Send + 'static,
    F: FnMut(T),
{
    let body = move || {
        let mut work = prepare();
        while let Some((user, item)) = lanes.take() {
            work(item);
            lanes.done(user);
        }
    };
    spawn_confined(name, ThreadKind::Reaper, seccomp, body).map(drop)
}

fn drop_own(OwnObject { item, receipt }: OwnObject, gone: &Sender<Receipt>, control: &Waker) {
    drop(item);
    if let Some(receipt) = receipt {
        // Fails only if the daemon is exiting.
        let _ = gone.send(receipt);
        let _ = control.wake();
    }
}

fn close(foreign: ClientDescriptor) {
    match foreign {
        // Close without waiting for unsent bytes. If the client sets `SO_LINGER` again in between,
        // the close waits until it is interrupted.
        ClientDescriptor::Socket(socket) => drop(socket2::SockRef::from(&socket).set_linger(None)),
        ClientDescriptor::Memfd(memfd) => drop(memfd),
        // Read the packets first: a close with unread packets would discard the daemon's last
        // messages to the client. The loop ends, because the socket is shut and no more packets
        // arrive. Descriptors in the packets are never installed in this process, so their close
        // reaches no file system. TCP sockets among them may linger until this is interrupted.
        ClientDescriptor::Client(socket) => {
            while packet::is_waiting(socket.as_fd()) && packet::take(socket.as_fd()).is_ok() {}
        }
    }
}

/// Threads for the daemon's objects. A user occupies at most one.
const OWN_THREADS: usize = 3;
/// Threads for clients' descriptors that close in bounded time. A user occupies at most one.
const CLIENT_THREADS: usize = 2;
/// Threads for descriptors that may never close.
const UNKNOWN_THREADS: usize = 8;
/// Maximum number of these threads that one user occupies.
const UNKNOWN_THREADS_PER_USER: usize = 2;

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::packet::{Outbox, OutgoingPacket};

    fn reaper() -> Reaper {
        let poll = mio::Poll::new().unwrap_or_else(|e| panic!("{e}"));
        let waker = Waker::new(poll.registry(), mio::Token(0)).unwrap_or_else(|e| panic!("{e}"));
        Reaper::start(Arc::new(waker), Seccomp::Off).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Returns a connection with unread bytes in flight and a linger time of an hour, and its
    /// other end.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap_or_else(|e| panic!("{e}"));
        let address = listener.local_addr().unwrap_or_else(|e| panic!("{e}"));
        let mut stream = TcpStream::connect(address).unwrap_or_else(|e| panic!("{e}"));
        let (other, _) = listener.accept().unwrap_or_else(|e| panic!("{e}"));
        stream.set_nonblocking(true).unwrap_or_else(|e| panic!("{e}"));
        while stream.write_all(&[0; 65536]).is_ok() {}
        let hour = Duration::from_secs(3600);
        socket2::SockRef::from(&stream).set_linger(Some(hour)).unwrap_or_else(|e| panic!("{e}"));
        (stream, other)
    }

    fn until(what: &str, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(180), "never: {what}");
            std::thread::yield_now();
        }
    }

    fn control_socket() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap_or_else(|e| panic!("{e}"))
    }

    /// Otherwise a client that keeps sending would occupy the thread that reads its packets.
    #[test]
    fn closing_socket_receives_nothing_more() {
        let reaper = Reaper::without_threads();
        let (ours, theirs) = control_socket();
        let say = || {
            let packet = OutgoingPacket { bytes: vec![0], descriptors: Vec::new() };
            Outbox::default().send(theirs.as_fd(), packet)
        };
        assert!(say().is_ok());
        reaper.close_client(1000, ours);
        assert_eq!(reaper.closing(1000), 1, "with an unread packet");
        assert!(say().is_err_and(|e| e.kind() == io::ErrorKind::BrokenPipe));
    }

    #[test]
    fn user_blocks_a_bounded_number_of_threads() {
        let file =
            || OwnedFd::from(std::fs::File::open("/dev/null").unwrap_or_else(|e| panic!("{e}")));
        let work = Work::default();
        (0..2 * UNKNOWN_THREADS).for_each(|_| work.unknown.add(1000, file()));
        work.unknown.add(1001, file());
        work.unknown.close();
        // None of the taken work is ever done.
        let taken = std::iter::from_fn(|| work.unknown.take()).map(|(user, _)| user);
        assert_eq!(taken.collect::<Vec<_>>(), [1000, 1001, 1000]);
    }

    /// `SO_LINGER` of a socket in a packet cannot be cleared before the close.
    #[test]
    fn sockets_in_unread_packets_do_not_linger() {
        let reaper = reaper();
        let mut others = Vec::new();
        for _ in 0..20 {
            let (ours, theirs) = control_socket();
            let (stream, other) = lingering();
            others.push(other);
            let packet = OutgoingPacket { bytes: vec![0], descriptors: vec![stream.into()] };
            assert!(Outbox::default().send(theirs.as_fd(), packet).is_ok());
            reaper.close_client(1000, ours);
        }
        until("all are closed", || reaper.closing(1000) == 0);
        drop(others);
    }
}
