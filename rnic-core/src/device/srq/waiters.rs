//! Who waits for a receive of a shared queue, in order.

use std::collections::BTreeMap;

use crate::types::QpId;

/// A QP that holds a message for want of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// The QP that waits.
    pub qp: QpId,
    /// Its worker, below 64.
    pub worker: u32,
    /// What its worker knows it by.
    pub key: u32,
}

/// A QP in the queue.
#[derive(Debug)]
struct Waiting {
    waiter: Waiter,
    /// It was told to take a receive: there were enough for all before it and for itself.
    called: bool,
}

/// A place in the queue of those who wait; later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaiterPlace(u64);

/// The queue. It is as long as there are QPs that hold messages.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    queue: BTreeMap<WaiterPlace, Waiting>,
    next: u64,
    /// Of each worker, how many wait.
    of_worker: Vec<u32>,
}

impl Waiters {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn len(&self) -> u32 {
        // There are fewer QPs than 2^24.
        u32::try_from(self.queue.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn join(&mut self, waiter: Waiter) -> WaiterPlace {
        let place = WaiterPlace(self.next);
        self.next += 1;
        self.queue.insert(place, Waiting { waiter, called: false });
        let worker = waiter.worker as usize;
        if self.of_worker.len() <= worker {
            self.of_worker.resize(worker + 1, 0);
        }
        self.of_worker[worker] += 1;
        place
    }

    /// Leaves the queue, if that has not happened yet: the worker, and whether nobody of it waits
    /// any more.
    pub(super) fn leave(&mut self, place: WaiterPlace) -> Option<(u32, bool)> {
        let Waiting { waiter, .. } = self.queue.remove(&place)?;
        let left = self.of_worker.get_mut(waiter.worker as usize)?;
        *left -= 1;
        Some((waiter.worker, *left == 0))
    }

    /// Workers with a QP that waits, by bit.
    pub(super) fn workers(&self) -> u64 {
        let waiting = self.of_worker.iter().enumerate().filter(|(_, n)| **n > 0);
        waiting.fold(0, |set, (worker, _)| set | 1 << (worker as u64 % 64))
    }

    /// Calls the first `count`, and passes on those of this worker that were not called before:
    /// whoever was is on the way. How many were looked at.
    pub(super) fn call(&mut self, count: u32, worker: u32, mut each: impl FnMut(u32)) -> u32 {
        let mut looked = 0;
        for waiting in self.queue.values_mut().take(count as usize) {
            looked += 1;
            if waiting.waiter.worker == worker && !std::mem::replace(&mut waiting.called, true) {
                each(waiting.waiter.key);
            }
        }
        looked
    }

    /// Whether the QP in this place was called, once.
    pub(super) fn answers(&mut self, place: WaiterPlace) -> bool {
        self.queue.get_mut(&place).is_some_and(|w| std::mem::take(&mut w.called))
    }
}
