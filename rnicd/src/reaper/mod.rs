//! Threads that do the closing, so that nobody who must stay quick ever does.
//!
//! Unmapping gigabytes takes time, and `close` of a descriptor that a client made may take for
//! ever (a FUSE server answers the flush). There are three kinds of work, each with threads of its
//! own, and in each kind a user has a lane of his own (`lanes`):
//!
//! * what is ours and takes its time: mappings, buffers, what a session had;
//! * what a client made and what ends, at the latest when the thread is interrupted: TCP sockets,
//!   which may linger, memfds, and control sockets with packets that nobody has taken;
//! * what a client made and nobody knows, which may never end. Two threads at most are lost to one
//!   user like this.
//!
//! What is not closed yet holds one of the daemon's descriptors. It is counted for its user, and
//! whoever decides who may pass more asks for the count. No thread is waited for when the daemon
//! ends.

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

/// Where things go to be dropped.
#[derive(Clone, Debug)]
pub struct Reaper {
    work: Arc<Work>,
    gone: Receiver<Receipt>,
}

/// What waits, until the last who may bring something is gone.
#[derive(Debug)]
struct Work {
    ours: Arc<Lanes<Ours>>,
    clients: Arc<Lanes<Foreign>>,
    unknown: Arc<Lanes<OwnedFd>>,
    last: AtomicU64,
}

/// Something of the daemon's own.
struct Ours {
    thing: Box<dyn Any + Send>,
    receipt: Option<Receipt>,
}

/// What a client made and what ends.
#[derive(Debug)]
enum Foreign {
    /// A TCP socket, which a close may leave to linger.
    Socket(OwnedFd),
    /// A memfd of a client's, whose pages a close may have to free.
    Memfd(OwnedFd),
    /// The daemon's end of a control socket, with packets from the client that nobody has taken:
    /// the descriptors in them are closed with it.
    Client(OwnedFd),
}

/// The memory that the allocator keeps, which goes when this is dropped.
struct FreeMemory;

impl Drop for FreeMemory {
    fn drop(&mut self) {
        return_free_memory();
    }
}

/// StagKind a thing whose end is of interest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Receipt(u64);

impl Reaper {
    /// Starts the threads. `control` is woken when something with a receipt is gone.
    pub fn start(control: Arc<Waker>, seccomp: Seccomp) -> io::Result<Self> {
        let (gone_out, gone) = unbounded();
        let work = Work::default();
        for _ in 0..OURS {
            let (lanes, gone, control) = (work.ours.clone(), gone_out.clone(), control.clone());
            start("reaper", seccomp, lanes, move || {
                let (gone, control) = (gone.clone(), control.clone());
                move |ours| drop_ours(ours, &gone, &control)
            })?;
        }
        for _ in 0..CLIENTS {
            start("reaper-clients", seccomp, work.clients.clone(), || {
                let interrupter = Interrupter::of_this_thread()
                    .inspect_err(|error| tracing::warn!(%error, "sockets of clients may linger"))
                    .ok();
                move |foreign| match &interrupter {
                    Some(interrupter) => interrupter.during(|| close(foreign)),
                    None => close(foreign),
                }
            })?;
        }
        for _ in 0..UNKNOWN {
            start("reaper-unknown", seccomp, work.unknown.clone(), || drop::<OwnedFd>)?;
        }
        Ok(Reaper { work: Arc::new(work), gone })
    }

    /// Drops something of ours, on a user's behalf: mappings, buffers, sockets.
    pub fn drop_later(&self, user: u32, thing: impl Any + Send) {
        self.work.ours.add(user, Ours { thing: Box::new(thing), receipt: None });
    }

    /// Drops something of ours that counts against a limit until it is gone, which
    /// [`Reaper::poll_gone`] tells: a client must not be able to outrun the unmapping of what it
    /// gave back.
    pub fn drop_counted(&self, user: u32, thing: impl Any + Send) -> Receipt {
        let receipt = Receipt(self.work.last.fetch_add(1, Ordering::Relaxed));
        self.work.ours.add(user, Ours { thing: Box::new(thing), receipt: Some(receipt) });
        receipt
    }

    /// Gives memory back to the kernel, after what this user has brought before is dropped.
    pub fn return_memory_later(&self, user: u32) {
        self.drop_later(user, FreeMemory);
    }

    /// Something that is gone.
    pub fn poll_gone(&self) -> Option<Receipt> {
        self.gone.try_recv().ok()
    }

    /// Descriptors of a user's clients that are not closed yet.
    pub fn closing(&self, user: u32) -> usize {
        self.work.clients.of(user) + self.work.unknown.of(user)
    }

    /// Descriptors of all clients that are not closed yet.
    pub fn closing_of_all(&self) -> usize {
        self.closing_soon() + self.work.unknown.total()
    }

    /// Those of them that will be, in a moment.
    pub fn closing_soon(&self) -> usize {
        self.work.clients.total()
    }

    /// Closes a descriptor that a client of this user made and that is not of a known kind.
    pub fn close_unknown(&self, user: u32, descriptor: OwnedFd) {
        self.work.unknown.add(user, descriptor);
    }

    /// Closes the daemon's end of a control socket.
    pub fn close_client(&self, user: u32, socket: OwnedFd) {
        packet::shut(socket.as_fd());
        match packet::is_waiting(socket.as_fd()) {
            true => self.work.clients.add(user, Foreign::Client(socket)),
            false => self.drop_later(user, socket),
        }
    }

    /// Closes a TCP socket that a client made.
    pub fn close_socket(&self, user: u32, socket: OwnedFd) {
        self.work.clients.add(user, Foreign::Socket(socket));
    }

    /// Closes a memfd that a client made, which may free gigabytes.
    pub fn close_memfd(&self, user: u32, memfd: OwnedFd) {
        self.work.clients.add(user, Foreign::Memfd(memfd));
    }
}

#[cfg(test)]
impl Reaper {
    /// One that closes nothing.
    pub(super) fn without_threads() -> Self {
        Reaper { work: Arc::default(), gone: unbounded().1 }
    }
}

impl Default for Work {
    fn default() -> Self {
        Work {
            ours: Arc::new(Lanes::new(1)),
            clients: Arc::new(Lanes::new(1)),
            unknown: Arc::new(Lanes::new(UNKNOWN_OF_ONE)),
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

impl fmt::Debug for Ours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ours").field("receipt", &self.receipt).finish_non_exhaustive()
    }
}

/// Starts a thread that does what there is in lanes, as `prepare` says once it is on that thread.
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
        while let Some((user, thing)) = lanes.take() {
            work(thing);
            lanes.done(user);
        }
    };
    spawn_confined(name, ThreadKind::Reaper, seccomp, body).map(drop)
}

fn drop_ours(Ours { thing, receipt }: Ours, gone: &Sender<Receipt>, control: &Waker) {
    drop(thing);
    if let Some(receipt) = receipt {
        // Nobody who asked is left when the daemon ends.
        let _ = gone.send(receipt);
        let _ = control.wake();
    }
}

fn close(foreign: Foreign) {
    match foreign {
        // Without waiting for what it has still to send. The client may set `SO_LINGER` again in
        // between: then this waits until it is interrupted.
        Foreign::Socket(socket) => drop(socket2::SockRef::from(&socket).set_linger(None)),
        Foreign::Memfd(memfd) => drop(memfd),
        // Closing it with unread packets would take back from the client what it was told last. It
        // ends, as nothing comes any more. What the packets carry is never this process's, and so
        // no file system is asked about its end; TCP sockets in them may linger until this is
        // interrupted.
        Foreign::Client(socket) => {
            while packet::is_waiting(socket.as_fd()) && packet::take(socket.as_fd()).is_ok() {}
        }
    }
}

/// Threads for what is ours; a user may have one of them.
const OURS: usize = 3;
/// Threads for what ends; a user may have one of them.
const CLIENTS: usize = 2;
/// Threads for what may never end.
const UNKNOWN: usize = 8;
/// How many of them a user may have.
const UNKNOWN_OF_ONE: usize = 2;

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

    /// A connection with bytes on their way that nobody reads, whose close waits for an hour; and
    /// its other end.
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

    /// A client that goes on sending would keep the thread at it that takes its packets away.
    #[test]
    fn what_is_to_be_closed_takes_nothing_more() {
        let reaper = Reaper::without_threads();
        let (ours, theirs) = control_socket();
        let say = || {
            let packet = OutgoingPacket { bytes: vec![0], descriptors: Vec::new() };
            Outbox::default().send(theirs.as_fd(), packet)
        };
        assert!(say().is_ok());
        reaper.close_client(1000, ours);
        assert_eq!(reaper.closing(1000), 1, "with what it has sent");
        assert!(say().is_err_and(|e| e.kind() == io::ErrorKind::BrokenPipe));
    }

    #[test]
    fn of_the_threads_that_may_never_come_back_a_user_has_a_part() {
        let file =
            || OwnedFd::from(std::fs::File::open("/dev/null").unwrap_or_else(|e| panic!("{e}")));
        let work = Work::default();
        (0..2 * UNKNOWN).for_each(|_| work.unknown.add(1000, file()));
        work.unknown.add(1001, file());
        work.unknown.close();
        // Nothing of it is ever done.
        let taken = std::iter::from_fn(|| work.unknown.take()).map(|(user, _)| user);
        assert_eq!(taken.collect::<Vec<_>>(), [1000, 1001, 1000]);
    }

    /// What is in a packet cannot be told not to linger before it is closed with it.
    #[test]
    fn sockets_in_packets_that_nobody_took_do_not_linger() {
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
