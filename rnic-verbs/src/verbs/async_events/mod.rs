//! Asynchronous events (`ibv_get_async_event(3)`), and the count of unacknowledged events.

pub(crate) mod entry;

use parking_lot::{Condvar, Mutex};

use crate::c;
use crate::event_queue::EventQueue;
use crate::ffi::handles::Foreign;

/// Asynchronous events of one context.
pub(crate) type AsyncEvents = EventQueue<AsyncEvent>;

/// An asynchronous event.
pub(crate) struct AsyncEvent {
    /// The CQ, QP or SRQ of the event; null if the event is about the device.
    pub(crate) element: Foreign<libc::c_void>,
    pub(crate) kind: c::ibv_event_type,
}

impl AsyncEvent {
    pub(crate) fn of<T>(element: Foreign<T>, kind: c::ibv_event_type) -> Self {
        AsyncEvent { element: Foreign(element.0.cast()), kind }
    }

    /// An event of a port.
    pub(crate) fn of_port(port: u8, kind: c::ibv_event_type) -> Self {
        // C reads it as the `port_num` of the union.
        let element = std::ptr::without_provenance_mut(port.into());
        AsyncEvent { element: Foreign(element), kind }
    }

    pub(crate) fn of_device(kind: c::ibv_event_type) -> Self {
        AsyncEvent { element: Foreign::NULL, kind }
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
        *self.count.lock() -= i64::from(events);
        self.changed.notify_all();
    }

    /// Waits until all have been acknowledged.
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
