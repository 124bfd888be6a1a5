//! Events that a program waits for with a descriptor of its own.
//!
//! The descriptor is an eventfd in semaphore mode: it is readable while events wait, for `poll(2)`
//! and its kin, and a program that sets `O_NONBLOCK` on it gets `EAGAIN`. Whoever wants an event
//! reads the descriptor first, without a lock, and so sleeps where the program's signals and
//! `pthread_cancel(3)` find it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{ReadWriteFlags, preadv2};

use crate::system;

/// A queue with a descriptor.
pub(crate) struct EventQueue<T> {
    fd: OwnedFd,
    waiting: Mutex<VecDeque<T>>,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?;
        Ok(EventQueue { fd, waiting: Mutex::new(VecDeque::new()) })
    }

    /// The descriptor, for C.
    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Adds an event.
    pub(crate) fn push(&self, event: T) {
        self.push_unless(event, |_| false);
    }

    /// Adds an event, unless one waits for which `same` holds.
    pub(crate) fn push_unless(&self, event: T, same: impl Fn(&T) -> bool) {
        let mut waiting = self.waiting.lock();
        if waiting.iter().any(same) {
            return;
        }
        waiting.push_back(event);
        drop(waiting);
        // The count ends at 2^64 - 2 events.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// The next event, in the descriptor's own mode. It passes by `count` before anybody can look
    /// whether it is to be taken back, and so whether it has been counted.
    ///
    /// # Errors
    ///
    /// Those of `read(2)`, `EAGAIN` and `EINTR` among them.
    pub(crate) fn next(&self, count: impl Fn(&T)) -> io::Result<T> {
        loop {
            system::read_count(self.fd())?;
            let mut waiting = self.waiting.lock();
            if let Some(event) = waiting.pop_front() {
                count(&event);
                return Ok(event);
            }
            // It was taken back after it had been counted.
        }
    }

    /// Number of waiting events for which `which` holds.
    pub(crate) fn count(&self, which: impl Fn(&T) -> bool) -> usize {
        self.waiting.lock().iter().filter(|event| which(event)).count()
    }

    /// Takes back the events for which `which` holds.
    pub(crate) fn take_back(&self, which: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        let (gone, kept): (Vec<T>, Vec<T>) = waiting.drain(..).partition(which);
        *waiting = kept.into();
        drop(waiting);
        for _ in &gone {
            // The program may have made the descriptor blocking, and a thread of it may have taken
            // the count already: this must not wait for another.
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
    fn the_descriptor_is_readable_as_long_as_events_wait() {
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
    fn events_taken_back_are_not_counted_any_more() {
        let queue = EventQueue::new().expect("an eventfd");
        (0..4).for_each(|n| queue.push(n));
        assert_eq!(queue.take_back(|n| n % 2 == 0), [0, 2]);
        assert_eq!(queue.next(|_| ()).expect("an event"), 1);
        assert_eq!(queue.next(|_| ()).expect("an event"), 3);
        assert!(!readable(&queue));
    }

    #[test]
    fn an_event_like_one_that_waits_is_not_added() {
        let queue = EventQueue::new().expect("an eventfd");
        queue.push(1);
        queue.push_unless(2, |waiting| *waiting == 1);
        assert_eq!(queue.next(|_| ()).expect("an event"), 1);
        assert!(!readable(&queue));
        queue.push_unless(2, |waiting| *waiting == 1);
        assert_eq!(queue.next(|_| ()).expect("an event"), 2);
    }

    #[test]
    fn an_event_is_counted_before_others_find_it_gone() {
        let queue = EventQueue::new().expect("an eventfd");
        queue.push(1);
        let counted = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let event = queue.next(|_| {
                let (told, seen) = std::sync::mpsc::channel();
                let (queue, counted) = (&queue, &counted);
                scope.spawn(move || {
                    told.send(()).expect("somebody waits");
                    assert!(queue.take_back(|_| true).is_empty());
                    assert!(counted.load(std::sync::atomic::Ordering::SeqCst));
                });
                seen.recv().expect("it has begun");
                counted.store(true, std::sync::atomic::Ordering::SeqCst);
            });
            assert_eq!(event.expect("an event"), 1);
        });
    }

    #[test]
    fn a_program_that_made_it_nonblocking_is_told_so() {
        let queue = EventQueue::<u32>::new().expect("an eventfd");
        rustix::io::ioctl_fionbio(&queue.fd, true).expect("a descriptor");
        let error = queue.next(|_| ()).expect_err("there is none");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
