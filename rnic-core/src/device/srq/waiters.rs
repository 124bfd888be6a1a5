//! The QPs that wait for a receive of an SRQ, in order.

use std::collections::BTreeMap;

use rnic_abi::types::QpId;

/// A QP that holds a message until a receive is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// QP that waits for a receive.
    pub qp: QpId,
    /// Its worker, below 64.
    pub worker: u32,
    /// Key by which its worker finds the QP.
    pub key: u32,
}

/// A QP in the queue.
#[derive(Debug)]
struct Waiting {
    waiter: Waiter,
    /// The QP was called and has not taken a receive since: there were enough receives for it and
    /// for all earlier waiters.
    called: bool,
}

/// A place in the queue. Later places are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaiterPlace(u64);

/// The queue. Its length is at most the number of QPs.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    queue: BTreeMap<WaiterPlace, Waiting>,
    next: u64,
    /// Number of waiting QPs by worker.
    of_worker: Vec<u32>,
}

impl Waiters {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn len(&self) -> u32 {
        // There are fewer than 2^24 QPs.
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

    /// Removes the waiter in this place, if it still exists. Returns its worker, and true if no
    /// other QP of that worker waits.
    pub(super) fn leave(&mut self, place: WaiterPlace) -> Option<(u32, bool)> {
        let Waiting { waiter, .. } = self.queue.remove(&place)?;
        let left = self.of_worker.get_mut(waiter.worker as usize)?;
        *left -= 1;
        Some((waiter.worker, *left == 0))
    }

    /// Returns the set of workers with a waiting QP (bit `n` for worker `n`).
    pub(super) fn workers(&self) -> u64 {
        let waiting = self.of_worker.iter().enumerate().filter(|(_, n)| **n > 0);
        waiting.fold(0, |set, (worker, _)| set | 1 << (worker as u64 % 64))
    }

    /// Calls the QPs of `worker` among the first `count` QPs: passes the key of each to `each`,
    /// unless it was already called. Returns the number of QPs visited.
    pub(super) fn call(&mut self, count: u32, worker: u32, mut each: impl FnMut(u32)) -> u32 {
        let mut visited = 0;
        for waiting in self.queue.values_mut().take(count as usize) {
            visited += 1;
            if waiting.waiter.worker == worker && !std::mem::replace(&mut waiting.called, true) {
                each(waiting.waiter.key);
            }
        }
        visited
    }

    /// Returns true if the QP in this place was called since the last time this returned true.
    pub(super) fn answers(&mut self, place: WaiterPlace) -> bool {
        self.queue.get_mut(&place).is_some_and(|w| std::mem::take(&mut w.called))
    }
}
