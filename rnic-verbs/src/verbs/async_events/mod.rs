//! Asynchronous events (`ibv_get_async_event(3)`), and the count of unacknowledged events.

pub(crate) mod entry;

use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex};

use crate::c;
use crate::event_queue::EventQueue;
use crate::ffi::handles::Foreign;

/// Asynchronous events of one context.
pub(crate) type AsyncEvents = EventQueue<AsyncEvent>;

/// An asynchronous event.
pub(crate) struct AsyncEvent {
    /// The CQ, QP or SRQ of the event; the number of the port for a port event; null for a device
    /// event.
    pub(crate) element: Foreign<libc::c_void>,
    pub(crate) kind: c::ibv_event_type,
}

impl AsyncEvent {
    /// Creates an event of a port.
    pub(crate) fn of_port(port: u8, kind: c::ibv_event_type) -> Self {
        let element = std::ptr::without_provenance_mut(port.into());
        AsyncEvent { element: Foreign(element), kind }
    }

    pub(crate) fn of_device(kind: c::ibv_event_type) -> Self {
        AsyncEvent { element: Foreign::NULL, kind }
    }
}

/// The asynchronous events of one object.
pub(crate) struct ObjectEvents<T> {
    /// The program's pointer to the object.
    head: OnceLock<Foreign<T>>,
    /// The queue of its context.
    queue: Arc<AsyncEvents>,
    pub(crate) unacknowledged: Unacknowledged,
}

impl<T> ObjectEvents<T> {
    pub(crate) fn new(queue: Arc<AsyncEvents>) -> Self {
        ObjectEvents { head: OnceLock::new(), queue, unacknowledged: Unacknowledged::default() }
    }

    pub(crate) fn set_head(&self, head: *mut T) {
        let _ = self.head.set(Foreign(head));
    }

    pub(crate) fn head(&self) -> Foreign<T> {
        self.head.get().copied().unwrap_or(Foreign::NULL)
    }

    pub(crate) fn queue(&self) -> &Arc<AsyncEvents> {
        &self.queue
    }

    /// Queues an event.
    pub(crate) fn push(&self, kind: c::ibv_event_type) {
        self.queue.push(AsyncEvent { element: Foreign(self.head().0.cast()), kind });
    }

    /// Removes the events that wait in the queue.
    pub(crate) fn take_back(&self) {
        let head = self.head();
        drop(self.queue.take_back(|event| event.element.0 == head.0.cast()));
    }
}

/// Counts events of one object that the program has fetched and not acknowledged. Destroying the
/// object waits for them, because the program may still use the object.
#[derive(Default)]
pub(crate) struct Unacknowledged {
    /// Fetched events minus acknowledged ones. Negative if a program acknowledges too many.
    count: Mutex<i64>,
    changed: Condvar,
}

impl Unacknowledged {
    /// Counts an event that the program has fetched.
    pub(crate) fn handed_out(&self) {
        *self.count.lock() += 1;
    }

    /// Counts acknowledged events.
    pub(crate) fn acknowledge(&self, events: u32) {
        let mut count = self.count.lock();
        *count -= i64::from(events);
        // Must be called under the lock: once `wait` gets the lock, the object may be destroyed.
        self.changed.notify_all();
    }

    /// Waits until all fetched events have been acknowledged.
    pub(crate) fn wait(&self) {
        let mut count = self.count.lock();
        while *count > 0 {
            self.changed.wait(&mut count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excess_acknowledgements_do_not_block() {
        let unacknowledged = Unacknowledged::default();
        unacknowledged.handed_out();
        unacknowledged.acknowledge(3);
        unacknowledged.wait();
    }

    #[test]
    fn wait_ends_after_the_last_acknowledgement() {
        let unacknowledged = Unacknowledged::default();
        unacknowledged.handed_out();
        unacknowledged.handed_out();
        let acknowledged = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 1..=2 {
                    acknowledged.store(n, std::sync::atomic::Ordering::SeqCst);
                    unacknowledged.acknowledge(1);
                }
            });
            unacknowledged.wait();
            assert_eq!(acknowledged.load(std::sync::atomic::Ordering::SeqCst), 2);
        });
    }
}
