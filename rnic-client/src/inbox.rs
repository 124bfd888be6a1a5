//! One socket whose packets several threads await.
//!
//! Events of all connections arrive on one socket, and completion events of several CQs on one
//! channel, while each waiting thread cares for only one of them. Whoever waits first reads for
//! everybody (there is no background thread): it sleeps on the socket, sorts each packet into the
//! shared state and wakes the others to look. When it has what it came for, another one takes its
//! place. Tasks of an executor, which cannot sleep here, read only while no thread does. What the
//! packets mean is the business of `sort`; [`crate::events`] and [`crate::channel`] use this.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(feature = "tokio")]
use std::task::Poll;
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use crate::error::Error;

/// A socket and the state its packets are sorted into.
pub(crate) struct Inbox<S> {
    socket: OwnedFd,
    /// Puts one packet in its place; an error closes the inbox.
    sort: fn(&mut S, &[u8]) -> Result<(), Error>,
    sleep: Sleep,
    shared: Mutex<InboxState<S>>,
    /// Something was sorted, the reader left, or the socket closed. Told by [`Inbox::tell`].
    changed: Condvar,
}

/// How a thread without a deadline sleeps on the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sleep {
    /// In `poll`. What has arrived is read under the lock, so that it is either in the socket or
    /// sorted, and [`Inbox::drain`] misses nothing.
    Poll,
    /// In `recv`: one system call less for each packet. Between `recv` and the lock a packet is
    /// nowhere to be seen.
    Recv,
}

struct InboxState<S> {
    sorted: S,
    /// Room for the largest packet; with the thread that sleeps in `recv`, if one does.
    space: Box<[u8]>,
    /// A thread sleeps on the socket for all.
    reading: bool,
    /// Tasks that look again when something has changed.
    tasks: Vec<Waker>,
    /// The other end is gone, or sent nonsense.
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

    /// Waits until `take` finds something, at most until `deadline` (`None`: as long as it takes).
    /// `Ok(None)` means that the time is over. What was sorted before the other end went away is
    /// still found.
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
                // Nobody else reads meanwhile.
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
            self.tell(&mut shared);
            match outcome {
                Ok(true) => {}
                Ok(false) => return Ok(take(&mut shared.sorted)),
                Err(e) => return Err(e),
            }
        }
    }

    /// Sorts what has already arrived, without waiting for more.
    ///
    /// While another thread sleeps on the socket, what has arrived is left for that one to read:
    /// taken from under it, a packet that it waits for would not wake it any more.
    pub(crate) fn drain(&self) -> Result<(), Error> {
        let mut shared = self.shared.lock();
        while !shared.closed {
            if !shared.reading {
                if !self.read_one(&mut shared)? {
                    break;
                }
                self.tell(&mut shared);
            } else if wait_readable(self.socket.as_fd(), Some(Instant::now()))? {
                // The reader has been woken by the same packet, and says when it has sorted it.
                self.changed.wait(&mut shared);
            } else {
                break;
            }
        }
        Ok(())
    }

    /// Ends it from this side: who sleeps on the socket finds it closed.
    pub(crate) fn end(&self) {
        // One that is not connected any more is at its end already.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Looks at the sorted state.
    pub(crate) fn peek<T>(&self, f: impl FnOnce(&S) -> T) -> T {
        f(&self.shared.lock().sorted)
    }

    /// Changes the sorted state and lets all waiters look again.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut S) -> T) -> T {
        let mut shared = self.shared.lock();
        let result = f(&mut shared.sorted);
        self.tell(&mut shared);
        result
    }

    /// Looks for what `take` finds, after sorting what has arrived; if there is nothing, the task
    /// is woken when another one, or a thread, has sorted something or has left the socket alone.
    /// That something arrives on the socket is the caller's to notice.
    #[cfg(feature = "tokio")]
    pub(crate) fn poll_take<T>(
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
                Ok(true) => self.tell(&mut shared),
                Err(e) => {
                    self.tell(&mut shared);
                    return Poll::Ready(Err(e));
                }
            }
        }
        if !shared.tasks.iter().any(|known| known.will_wake(task)) {
            shared.tasks.push(task.clone());
        }
        Poll::Pending
    }

    /// Has everybody look again. The lock is let go of meanwhile: who is woken may run at once.
    fn tell(&self, shared: &mut MutexGuard<'_, InboxState<S>>) {
        self.changed.notify_all();
        let tasks = std::mem::take(&mut shared.tasks);
        if !tasks.is_empty() {
            MutexGuard::unlocked(shared, || tasks.into_iter().for_each(Waker::wake));
        }
    }

    /// Whether the other end is known to be gone; asks the socket.
    pub(crate) fn is_closed(&self) -> bool {
        if self.shared.lock().closed {
            return true;
        }
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1..))
            && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// Reads and sorts one packet; `false` if there is none.
    fn read_one(&self, shared: &mut InboxState<S>) -> Result<bool, Error> {
        let received = self.receive(&mut shared.space, RecvFlags::DONTWAIT);
        self.sort_one(shared, received)
    }

    /// Sleeps until there is a packet, also where somebody has made the descriptor non-blocking.
    fn sleep_in_recv(&self, space: &mut [u8]) -> Result<usize, Errno> {
        loop {
            match self.receive(space, RecvFlags::empty()) {
                // What is wrong, if something is, the next `recv` says as well.
                Err(Errno::AGAIN) => drop(wait_readable(self.socket.as_fd(), None)),
                received => return received,
            }
        }
    }

    /// Bytes of the next packet, which may be more than there is space for; 0 at the end.
    fn receive(&self, space: &mut [u8], flags: RecvFlags) -> Result<usize, Errno> {
        loop {
            match recv(&self.socket, &mut *space, flags | RecvFlags::TRUNC) {
                Err(Errno::INTR) => {}
                received => return received.map(|(_, n)| n),
            }
        }
    }

    /// Sorts what was received into the space; `false` if that was nothing.
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

/// Sleeps until `fd` is readable or closed; `false` if `deadline` came first.
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

/// The instant `timeout` from now; `None` for ever, also if the clock cannot count that far.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|t| Instant::now().checked_add(t))
}

/// Longest single sleep, so that a timeout always fits a `timespec`.
const MAX_SLEEP: Duration = Duration::from_secs(1 << 30);

fn timespec(d: Duration) -> Timespec {
    let d = d.min(MAX_SLEEP);
    // At most 2^30 seconds and below 10^9 nanoseconds: both fit.
    Timespec { tv_sec: d.as_secs() as i64, tv_nsec: i64::from(d.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

    #[test]
    fn draining_leaves_nobody_asleep() {
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
    fn who_sleeps_in_recv_is_told_of_packets_the_end_and_nonsense_like_others() {
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
            let (inbox_of_waiter, done) = (inbox.clone(), done.clone());
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
