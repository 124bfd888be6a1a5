//! The indices of send and receive queues: the client produces, the daemon consumes.
//!
//! Counts run freely and wrap at 2^32; a ring has at most 2^24 entries, so differences are exact.
//! Publish and take pair as release and acquire on the producer index; retire and reuse pair as
//! release and acquire on the consumer index.

use super::{QueueFault, QueueMemory};
use crate::abi::queue::queue_header;
use crate::shm::sync::Ordering;

/// The client's end.
#[derive(Debug)]
pub(super) struct ProducerRing {
    pub(super) queue: QueueMemory,
    /// Entries written.
    tail: u32,
    /// Entries the daemon knows of.
    published: u32,
    /// Entries the daemon has given back, when we last looked.
    retired: u32,
}

impl ProducerRing {
    pub(super) fn new(queue: QueueMemory) -> Self {
        Self::starting_at(queue, 0)
    }

    pub(super) fn starting_at(queue: QueueMemory, index: u32) -> Self {
        ProducerRing { queue, tail: index, published: index, retired: index }
    }

    /// Entries that can be written, by a fresh look.
    #[inline]
    pub(super) fn free(&mut self) -> u32 {
        // Acquire: the daemon is done reading the slots it gives back.
        self.retired = self.queue.window.u32(queue_header::CONSUMER).load(Ordering::Acquire);
        self.room()
    }

    /// The slot to write next, if there is one; it counts once [`advance`](Self::advance) is called.
    #[inline]
    pub(super) fn slot(&mut self) -> Option<usize> {
        if self.room() == 0 && self.free() == 0 {
            return None;
        }
        Some(self.queue.slot(self.tail))
    }

    #[inline]
    pub(super) fn advance(&mut self) {
        self.tail = self.tail.wrapping_add(1);
    }

    /// Shows the daemon everything written.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.published != self.tail {
            self.published = self.tail;
            // Release: pairs with the acquire in `ConsumerRing::refresh`.
            self.queue.window.u32(queue_header::PRODUCER).store(self.tail, Ordering::Release);
        }
    }

    #[inline]
    fn room(&self) -> u32 {
        self.queue.shape.capacity.saturating_sub(self.tail.wrapping_sub(self.retired))
    }
}

/// The daemon's end.
#[derive(Debug)]
pub(super) struct ConsumerRing {
    pub(super) queue: QueueMemory,
    /// Entries taken.
    head: u32,
    /// Entries given back.
    retired: u32,
    /// Entries published, when we last looked.
    seen: u32,
}

impl ConsumerRing {
    pub(super) fn new(queue: QueueMemory) -> Self {
        Self::starting_at(queue, 0)
    }

    pub(super) fn starting_at(queue: QueueMemory, index: u32) -> Self {
        ConsumerRing { queue, head: index, retired: index, seen: index }
    }

    /// Entries published and not taken; looks at the client's index only when none are left.
    #[inline]
    pub(super) fn pending(&mut self) -> Result<u32, QueueFault> {
        if self.seen == self.head {
            self.refresh()?;
        }
        Ok(self.seen.wrapping_sub(self.head))
    }

    /// The same by a fresh look.
    pub(super) fn look(&mut self) -> Result<u32, QueueFault> {
        self.refresh()?;
        Ok(self.seen.wrapping_sub(self.head))
    }

    /// Slot and index of the next entry, which is taken thereby.
    #[inline]
    pub(super) fn take(&mut self) -> Result<Option<(usize, u32)>, QueueFault> {
        if self.pending()? == 0 {
            return Ok(None);
        }
        let index = self.head;
        self.head = index.wrapping_add(1);
        Ok(Some((self.queue.slot(index), index)))
    }

    /// Gives the oldest `count` taken entries back to the client.
    #[inline]
    pub(super) fn retire(&mut self, count: u32) {
        debug_assert!(count <= self.outstanding(), "only what was taken can be given back");
        self.retired = self.retired.wrapping_add(count.min(self.outstanding()));
        // Release: our reads of the slots are done before the client may reuse them.
        self.queue.window.u32(queue_header::CONSUMER).store(self.retired, Ordering::Release);
    }

    /// Entries taken and not given back.
    #[inline]
    pub(super) fn outstanding(&self) -> u32 {
        self.head.wrapping_sub(self.retired)
    }

    /// Loads the client's index, which must lie between what was taken and one ring after what was
    /// given back: neither backwards nor more than a ring ahead.
    fn refresh(&mut self) -> Result<(), QueueFault> {
        let capacity = self.queue.shape.capacity;
        // Acquire: pairs with the release in `ProducerRing::publish`, so the entries are there.
        let found = self.queue.window.u32(queue_header::PRODUCER).load(Ordering::Acquire);
        if found.wrapping_sub(self.head) > capacity - self.outstanding() {
            return Err(QueueFault::Producer { found, retired: self.retired, capacity });
        }
        self.seen = found;
        Ok(())
    }
}
