//! Event queues, each with a descriptor on which programs wait.
//!
//! The descriptor is an eventfd in semaphore mode. It is readable while events wait, for `poll(2)`
//! and similar calls, and returns `EAGAIN` if the program sets `O_NONBLOCK`. Readers read the
//! descriptor first, without a lock, so that signals and `pthread_cancel(3)` reach a thread that
//! sleeps there.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{ReadWriteFlags, preadv2};

use crate::system;

/// An event queue with a descriptor.
pub(crate) struct EventQueue<T> {
    fd: OwnedFd,
    waiting: Mutex<VecDeque<T>>,
    /// There will be no more events.
    closed: AtomicBool,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?;
        Ok(EventQueue { fd, waiting: Mutex::new(VecDeque::new()), closed: AtomicBool::new(false) })
    }

    /// The descriptor, for C.
    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Adds an event.
    pub(crate) fn push(&self, event: T) {
        self.push_unless(event, |_| false);
    }

    /// Adds an event, unless a waiting event matches `same`.
    pub(crate) fn push_unless(&self, event: T, same: impl Fn(&T) -> bool) {
        let mut waiting = self.waiting.lock();
        if waiting.iter().any(same) {
            return;
        }
        waiting.push_back(event);
        drop(waiting);
        self.signal();
    }

    /// Ends the queue: the descriptor stays readable, and readers fail once no events wait.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.signal();
    }

    fn signal(&self) {
        // Cannot overflow: the limit is 2^64 - 2 events.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Returns the next event. Waits for it unless the descriptor is non-blocking. Calls `count`
    /// under the lock, so that `take_back` finds an event either queued or counted.
    ///
    /// # Errors
    ///
    /// The errors of `read(2)`, including `EAGAIN` and `EINTR`. `EIO` after
    /// [`close`](Self::close), once there are no more events.
    pub(crate) fn next(&self, count: impl Fn(&T)) -> io::Result<T> {
        loop {
            system::read_count(self.fd())?;
            let mut waiting = self.waiting.lock();
            if let Some(event) = waiting.pop_front() {
                count(&event);
                return Ok(event);
            }
            if self.closed.load(Ordering::Acquire) {
                // Wakes the next reader.
                self.signal();
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            // `take_back` has removed the event after the descriptor was read.
        }
    }

    /// Returns the number of waiting events that match `which`.
    pub(crate) fn count(&self, which: impl Fn(&T) -> bool) -> usize {
        self.waiting.lock().iter().filter(|event| which(event)).count()
    }

    /// Removes and returns the waiting events that match `which`.
    pub(crate) fn take_back(&self, which: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        let (gone, kept): (Vec<T>, Vec<T>) = waiting.drain(..).partition(which);
        *waiting = kept.into();
        drop(waiting);
        for _ in &gone {
            // The descriptor may be in blocking mode, and another thread may already have read the
            // count of a removed event: this read must not wait for a new event.
            let mut count = [0; 8];
            let mut into = [io::IoSliceMut::new(&mut count)];
            let _ = preadv2(&self.fd, &mut into, u64::MAX, ReadWriteFlags::NOWAIT);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(queue: &EventQueue<u32>) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&queue.fd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).expect("poll") == 1
    }

    #[test]
    fn descriptor_is_readable_while_events_wait() {
        let queue = EventQueue::new().expect("an eventfd");
        assert!(!readable(&queue));
        queue.push(1);
        queue.push(2);
        assert_eq!(queue.next(|_| ()).expect("an event"), 1);
        assert!(readable(&queue));
        assert_eq!(queue.next(|_| ()).expect("an event"), 2);
        assert!(!readable(&queue));
    }

    #[test]
    fn removed_events_are_not_counted() {
        let queue = EventQueue::new().expect("an eventfd");
        (0..4).for_each(|n| queue.push(n));
        assert_eq!(queue.take_back(|n| n % 2 == 0), [0, 2]);
        assert_eq!(queue.next(|_| ()).expect("an event"), 1);
        assert_eq!(queue.next(|_| ()).expect("an event"), 3);
        assert!(!readable(&queue));
    }

    #[test]
    fn a_duplicate_event_is_not_added() {
        let queue = EventQueue::new().expect("an eventfd");
        queue.push(1);
        queue.push_unless(2, |waiting| *waiting == 1);
        assert_eq!(queue.next(|_| ()).expect("an event"), 1);
        assert!(!readable(&queue));
        queue.push_unless(2, |waiting| *waiting == 1);
        assert_eq!(queue.next(|_| ()).expect("an event"), 2);
    }

    #[test]
    fn an_event_is_counted_under_the_lock() {
        let queue = EventQueue::new().expect("an eventfd");
        queue.push(1);
        let counted = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let event = queue.next(|_| {
                let (told, seen) = std::sync::mpsc::channel();
                let queue = &queue;
                let counted = &counted;
                scope.spawn(move || {
                    told.send(()).expect("the receiver exists");
                    assert!(queue.take_back(|_| true).is_empty());
                    assert!(counted.load(std::sync::atomic::Ordering::SeqCst));
                });
                seen.recv().expect("the thread has started");
                counted.store(true, std::sync::atomic::Ordering::SeqCst);
            });
            assert_eq!(event.expect("an event"), 1);
        });
    }

    #[test]
    fn a_closed_queue_fails_after_its_events() {
        let queue = EventQueue::new().expect("an eventfd");
        queue.push(1);
        queue.close();
        assert_eq!(queue.next(|_| ()).expect("an event"), 1);
        for _ in 0..2 {
            let error = queue.next(|_| ()).expect_err("no more events");
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
            assert!(readable(&queue));
        }
    }

    #[test]
    fn a_nonblocking_descriptor_returns_eagain() {
        let queue = EventQueue::<u32>::new().expect("an eventfd");
        rustix::io::ioctl_fionbio(&queue.fd, true).expect("a descriptor");
        let error = queue.next(|_| ()).expect_err("no event waits");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
