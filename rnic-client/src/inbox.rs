//! A socket that several threads wait on.
//!
//! Events of all connections arrive on one socket, and completion events of several CQs on one
//! channel, while each waiting thread needs only some of them. There is no background thread. The
//! first waiting thread becomes the reader: it sleeps on the socket, sorts each packet into the
//! shared state and wakes the others. When the reader has found the packet it waits for, another
//! thread becomes the reader. Tasks of an executor must not sleep here, so they read only if no
//! thread is reading. `sort` interprets the packets; [`crate::events`] and [`crate::channel`] use
//! this module.

#[cfg(feature = "tokio")]
use std::future::poll_fn;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(feature = "tokio")]
use std::task::Poll;
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
#[cfg(feature = "tokio")]
use tokio::io::Interest;
#[cfg(feature = "tokio")]
use tokio::io::unix::AsyncFd;

use crate::error::Error;

/// A socket and the state into which its packets are sorted.
pub(crate) struct Inbox<S> {
    socket: OwnedFd,
    /// Sorts one packet into the state. An error closes the inbox.
    sort: fn(&mut S, &[u8]) -> Result<(), Error>,
    sleep: Sleep,
    shared: Mutex<InboxState<S>>,
    /// Signals that a packet was sorted, the reader left or the socket closed. See
    /// [`Inbox::wake_all`].
    changed: Condvar,
}

/// System call in which a reader without a deadline sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sleep {
    /// In `poll`. Packets are read under the lock, so each is either in the socket or sorted, and
    /// [`Inbox::drain`] misses no packet.
    Poll,
    /// In `recv`, which saves a system call per packet. [`Inbox::drain`] may miss a packet that the
    /// reader has received but not sorted yet.
    Recv,
}

struct InboxState<S> {
    sorted: S,
    /// Space for the largest packet. Empty while a thread that sleeps in `recv` uses it.
    space: Box<[u8]>,
    /// A thread is the reader.
    reading: bool,
    /// Tasks to wake after a change.
    tasks: Vec<Waker>,
    /// The other end has closed the socket or sent an invalid packet.
    closed: bool,
}

impl<S> Inbox<S> {
    pub(crate) fn new(
        socket: OwnedFd,
        packet: usize,
        sorted: S,
        sort: fn(&mut S, &[u8]) -> Result<(), Error>,
        sleep: Sleep,
    ) -> Self {
        let space = vec![0; packet].into();
        let shared = Mutex::new(InboxState {
            sorted,
            space,
            reading: false,
            tasks: Vec::new(),
            closed: false,
        });
        Inbox { socket, sort, sleep, shared, changed: Condvar::new() }
    }

    /// Waits until `take` returns a value or `deadline` passes (`None`: no deadline). Returns
    /// `Ok(None)` after the deadline. After the socket has closed, `take` still sees the packets
    /// sorted before.
    pub(crate) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut take: impl FnMut(&mut S) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let mut shared = self.shared.lock();
        loop {
            if let Some(found) = take(&mut shared.sorted) {
                return Ok(Some(found));
            }
            if shared.closed {
                return Err(Error::DaemonGone);
            }
            if shared.reading {
                let timed_out = match deadline {
                    Some(d) => self.changed.wait_until(&mut shared, d).timed_out(),
                    None => {
                        self.changed.wait(&mut shared);
                        false
                    }
                };
                if timed_out {
                    return Ok(take(&mut shared.sorted));
                }
                continue;
            }
            shared.reading = true;
            let outcome = if deadline.is_none() && self.sleep == Sleep::Recv {
                // No other thread reads while `reading` is set.
                let mut space = std::mem::take(&mut shared.space);
                drop(shared);
                let received = self.sleep_in_recv(&mut space);
                shared = self.shared.lock();
                shared.space = space;
                self.sort_one(&mut shared, received).map(|_| true)
            } else {
                drop(shared);
                let readable = wait_readable(self.socket.as_fd(), deadline);
                shared = self.shared.lock();
                match readable {
                    Ok(true) => self.read_one(&mut shared).map(|_| true),
                    other => other,
                }
            };
            shared.reading = false;
            self.wake_all(&mut shared);
            match outcome {
                Ok(true) => {}
                Ok(false) => return Ok(take(&mut shared.sorted)),
                Err(e) => return Err(e),
            }
        }
    }

    /// Sorts all packets that have arrived, without waiting for more.
    ///
    /// If another thread is the reader, waits until it has sorted them. If this thread sorted them
    /// instead, the reader could continue to sleep although its packet has arrived.
    pub(crate) fn drain(&self) -> Result<(), Error> {
        let mut shared = self.shared.lock();
        while !shared.closed {
            if !shared.reading {
                if !self.read_one(&mut shared)? {
                    break;
                }
                self.wake_all(&mut shared);
            } else if wait_readable(self.socket.as_fd(), Some(Instant::now()))? {
                // The same packet has woken the reader, which signals `changed` once it is sorted.
                self.changed.wait(&mut shared);
            } else {
                break;
            }
        }
        Ok(())
    }

    /// Closes the socket from this side, which wakes the reader.
    pub(crate) fn end(&self) {
        // An error means that the socket is not connected any more.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Calls `f` with the sorted state.
    pub(crate) fn peek<T>(&self, f: impl FnOnce(&S) -> T) -> T {
        f(&self.shared.lock().sorted)
    }

    /// Changes the sorted state and wakes all waiters.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut S) -> T) -> T {
        let mut shared = self.shared.lock();
        let result = f(&mut shared.sorted);
        self.wake_all(&mut shared);
        result
    }

    /// Waits in a task until `take` returns a value.
    ///
    /// The socket is registered with the runtime only for this wait, through a duplicate
    /// descriptor, because a queue or context belongs to no runtime and several tasks may wait for
    /// it.
    #[cfg(feature = "tokio")]
    pub(crate) async fn wait_in_task<T>(
        &self,
        mut take: impl FnMut(&mut S) -> Option<T>,
    ) -> Result<T, Error> {
        let socket = self.as_fd().try_clone_to_owned();
        // Deprecated in favour of an `unsafe` function, because a descriptor might be closed while
        // it is registered. Here the `AsyncFd` owns the descriptor.
        #[allow(deprecated)]
        let socket = socket.and_then(|socket| AsyncFd::with_interest(socket, Interest::READABLE));
        let socket = socket.map_err(|e| Error::io("registering with the runtime", e))?;
        poll_fn(|task| {
            loop {
                if let Poll::Ready(found) = self.poll_take(task.waker(), &mut take) {
                    return Poll::Ready(found);
                }
                match socket.poll_read_ready(task) {
                    // The socket has been readable since the last check. The next `poll_take` reads
                    // it.
                    Poll::Ready(Ok(mut ready)) => ready.clear_ready(),
                    Poll::Ready(Err(e)) => {
                        return Poll::Ready(Err(Error::io("waiting for the daemon", e)));
                    }
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await
    }

    /// Sorts all packets that have arrived and returns the value that `take` returns. If there is
    /// none, the task is woken when another task or thread has sorted a packet or has stopped
    /// reading. The caller must also wait for the socket itself to become readable.
    #[cfg(feature = "tokio")]
    fn poll_take<T>(
        &self,
        task: &Waker,
        take: &mut impl FnMut(&mut S) -> Option<T>,
    ) -> Poll<Result<T, Error>> {
        let mut shared = self.shared.lock();
        loop {
            if let Some(found) = take(&mut shared.sorted) {
                return Poll::Ready(Ok(found));
            }
            if shared.closed {
                return Poll::Ready(Err(Error::DaemonGone));
            }
            if shared.reading {
                break;
            }
            match self.read_one(&mut shared) {
                Ok(false) => break,
                Ok(true) => self.wake_all(&mut shared),
                Err(e) => {
                    self.wake_all(&mut shared);
                    return Poll::Ready(Err(e));
                }
            }
        }
        if !shared.tasks.iter().any(|known| known.will_wake(task)) {
            shared.tasks.push(task.clone());
        }
        Poll::Pending
    }

    /// Wakes all waiters. Releases the lock while it wakes tasks, because a task may run at once.
    fn wake_all(&self, shared: &mut MutexGuard<'_, InboxState<S>>) {
        self.changed.notify_all();
        let tasks = std::mem::take(&mut shared.tasks);
        if !tasks.is_empty() {
            MutexGuard::unlocked(shared, || tasks.into_iter().for_each(Waker::wake));
        }
    }

    /// Returns true if the other end is known to have closed the socket. Polls it without waiting.
    pub(crate) fn is_closed(&self) -> bool {
        if self.shared.lock().closed {
            return true;
        }
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1..))
            && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// Reads and sorts one packet. Returns false if there is none.
    fn read_one(&self, shared: &mut InboxState<S>) -> Result<bool, Error> {
        let received = self.receive(&mut shared.space, RecvFlags::DONTWAIT);
        self.sort_one(shared, received)
    }

    /// Sleeps until there is a packet, even if the descriptor has been made non-blocking.
    fn sleep_in_recv(&self, space: &mut [u8]) -> Result<usize, Errno> {
        loop {
            match self.receive(space, RecvFlags::empty()) {
                // Ignores an error, because the loop tries again.
                Err(Errno::AGAIN) => drop(wait_readable(self.socket.as_fd(), None)),
                received => return received,
            }
        }
    }

    /// Returns the length of the next packet, which may exceed that of `space`; 0 if the other end
    /// has closed the socket.
    fn receive(&self, space: &mut [u8], flags: RecvFlags) -> Result<usize, Errno> {
        loop {
            match recv(&self.socket, &mut *space, flags | RecvFlags::TRUNC) {
                Err(Errno::INTR) => {}
                received => return received.map(|(_, n)| n),
            }
        }
    }

    /// Sorts the received packet. Returns false if there was none.
    fn sort_one(
        &self,
        shared: &mut InboxState<S>,
        received: Result<usize, Errno>,
    ) -> Result<bool, Error> {
        let InboxState { sorted, space, closed, .. } = shared;
        match received {
            Err(Errno::AGAIN) => Ok(false),
            Err(Errno::CONNRESET) | Ok(0) => {
                *closed = true;
                Ok(true)
            }
            Err(e) => {
                *closed = true;
                Err(Error::io("receiving events", e))
            }
            Ok(n) => {
                let outcome = match space.get(..n) {
                    Some(packet) => (self.sort)(sorted, packet),
                    None => Err(Error::protocol(format!("an event of {n} bytes"))),
                };
                *closed |= outcome.is_err();
                outcome.map(|()| true)
            }
        }
    }
}

impl<S> AsFd for Inbox<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sleeps until `fd` is readable or closed. Returns false if `deadline` passes first.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> Result<bool, Error> {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let timeout = left.map(timespec);
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) if left.is_some_and(|d| d <= MAX_SLEEP) => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(Error::io("waiting for the daemon", e)),
        }
    }
}

/// Returns the instant `timeout` from now; `None` for no timeout or if the clock cannot represent
/// it.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|t| Instant::now().checked_add(t))
}

/// Longest single sleep, so that the timeout always fits a `timespec`.
const MAX_SLEEP: Duration = Duration::from_secs(1 << 30);

fn timespec(d: Duration) -> Timespec {
    let d = d.min(MAX_SLEEP);
    // At most 2^30 seconds and below 10^9 nanoseconds, so both fit.
    Timespec { tv_sec: d.as_secs() as i64, tv_nsec: i64::from(d.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

    #[test]
    fn drain_leaves_no_thread_asleep() {
        drain_beside_a_sleeper(Sleep::Poll);
        drain_beside_a_sleeper(Sleep::Recv);
    }

    fn inbox(sleep: Sleep) -> (Arc<Inbox<Vec<u8>>>, OwnedFd) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let sort = |sorted: &mut Vec<u8>, packet: &[u8]| {
            sorted.extend(packet);
            Ok(())
        };
        (Arc::new(Inbox::new(ours, 1, Vec::new(), sort, sleep)), theirs)
    }

    #[test]
    fn recv_sleeper_sees_packets_end_and_errors() {
        for nonblocking in [false, true] {
            let (inbox, theirs) = inbox(Sleep::Recv);
            if nonblocking {
                rustix::io::ioctl_fionbio(&inbox.socket, true).unwrap();
            }
            let of_waiter = inbox.clone();
            let waiter = std::thread::spawn(move || {
                let two = [(); 2].map(|()| of_waiter.wait(None, |sorted| sorted.pop()).unwrap());
                (two, of_waiter.wait(None, |sorted| sorted.pop()))
            });
            for packet in [7, 8] {
                send(&theirs, &[packet], SendFlags::empty()).unwrap();
            }
            drop(theirs);
            let (mut two, end) = waiter.join().unwrap();
            two.sort_unstable();
            assert_eq!(two, [Some(7), Some(8)], "{nonblocking}");
            assert!(matches!(end, Err(Error::DaemonGone)), "{end:?}");
            assert!(inbox.is_closed());
        }
        let (inbox, theirs) = inbox(Sleep::Recv);
        send(&theirs, &[1, 2], SendFlags::empty()).unwrap();
        let end = inbox.wait(None, |sorted| sorted.pop());
        assert!(matches!(&end, Err(Error::Protocol(why)) if why.contains("2 bytes")), "{end:?}");
    }

    fn drain_beside_a_sleeper(sleep: Sleep) {
        let (inbox, theirs) = inbox(sleep);
        let (done, finished) = channel();
        for round in 0..2000_u32 {
            let inbox_of_waiter = inbox.clone();
            let done = done.clone();
            let waiter = std::thread::spawn(move || {
                let found = inbox_of_waiter.wait(None, |sorted| sorted.pop());
                done.send(found.unwrap().is_some()).unwrap();
            });
            while !inbox.shared.lock().reading {
                std::thread::yield_now();
            }
            send(&theirs, &[7], SendFlags::empty()).unwrap();
            inbox.drain().unwrap();
            let woken = finished.recv_timeout(Duration::from_secs(20));
            assert_eq!(woken, Ok(true), "round {round}");
            waiter.join().unwrap();
        }
    }
}
