//! Indices of send and receive queues, where the client produces and the daemon consumes.
//!
//! Counts are free-running and wrap at 2^32. A ring has at most 2^24 entries, so differences are
//! exact. `publish` and `take` pair as release and acquire on the producer index, `retire` and
//! `slot` on the consumer index.

use super::{QueueFault, QueueMemory};
use crate::abi::queue::queue_header;
use crate::shm::sync::Ordering;

/// The client's end.
#[derive(Debug)]
pub(super) struct ProducerRing {
    pub(super) queue: QueueMemory,
    /// Entries written, free-running.
    tail: u32,
    /// Entries published, free-running.
    published: u32,
    /// Entries given back by the daemon, as last loaded.
    retired: u32,
}

impl ProducerRing {
    pub(super) fn new(queue: QueueMemory) -> Self {
        Self::starting_at(queue, 0)
    }

    pub(super) fn starting_at(queue: QueueMemory, index: u32) -> Self {
        ProducerRing { queue, tail: index, published: index, retired: index }
    }

    /// Loads the consumer index and returns the number of entries that can be written.
    #[inline]
    pub(super) fn free(&mut self) -> u32 {
        // Acquire: pairs with the release in `ConsumerRing::retire`, so the daemon has finished
        // reading the slots that it gives back.
        self.retired = self.queue.view.u32(queue_header::CONSUMER).load(Ordering::Acquire);
        self.room()
    }

    /// Returns the next slot to write, or `None` if the ring is full. The entry counts as written
    /// after [`advance`](Self::advance).
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

    /// Prefetches the next slot for an entry of `len` bytes, a multiple of 8, if the slot is known
    /// to be free. The daemon has read the lines of the slot's previous entry, so this CPU must
    /// take them from the caches of the daemon's CPU before it can write them, and the atomic
    /// operations after an entry (locks, doorbells) wait for these stores. The prefetch overlaps
    /// the transfer with the program's work between two requests.
    #[inline]
    pub(super) fn fetch_next(&self, len: usize) {
        if self.room() > 0 {
            self.queue.view.fetch_to_write(self.queue.slot(self.tail), len / 8);
        }
    }

    /// Publishes all written entries to the daemon.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.published != self.tail {
            self.published = self.tail;
            // Release: pairs with the acquire in `ConsumerRing::refresh`.
            self.queue.view.u32(queue_header::PRODUCER).store(self.tail, Ordering::Release);
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
    /// Entries taken, free-running.
    head: u32,
    /// Entries given back to the client, free-running.
    retired: u32,
    /// Entries published, as last loaded.
    seen: u32,
}

impl ConsumerRing {
    pub(super) fn new(queue: QueueMemory) -> Self {
        Self::starting_at(queue, 0)
    }

    pub(super) fn starting_at(queue: QueueMemory, index: u32) -> Self {
        ConsumerRing { queue, head: index, retired: index, seen: index }
    }

    /// Returns the number of entries published and not taken. Loads the client's index only if the
    /// last loaded value leaves none.
    #[inline]
    pub(super) fn pending(&mut self) -> Result<u32, QueueFault> {
        if self.seen == self.head {
            self.refresh()?;
        }
        Ok(self.seen.wrapping_sub(self.head))
    }

    /// Like `pending`, but always loads the client's index.
    pub(super) fn peek(&mut self) -> Result<u32, QueueFault> {
        self.refresh()?;
        Ok(self.seen.wrapping_sub(self.head))
    }

    /// Like `peek`, for display. An invalid index is ignored here and reported by the other
    /// methods.
    pub(super) fn posted(&self) -> u32 {
        let found = self.queue.view.u32(queue_header::PRODUCER).load(Ordering::Relaxed);
        let posted = found.wrapping_sub(self.head);
        let sensible = posted <= self.queue.shape.capacity - self.outstanding();
        if sensible { posted } else { self.seen.wrapping_sub(self.head) }
    }

    /// Takes the next entry and returns its slot and index.
    #[inline]
    pub(super) fn take(&mut self) -> Result<Option<(usize, u32)>, QueueFault> {
        if self.pending()? == 0 {
            return Ok(None);
        }
        let index = self.head;
        self.head = index.wrapping_add(1);
        Ok(Some((self.queue.slot(index), index)))
    }

    /// Returns the slot and index of the next entry, if it is known to be published.
    #[inline]
    pub(super) fn next(&self) -> Option<(usize, u32)> {
        (self.seen != self.head).then(|| (self.queue.slot(self.head), self.head))
    }

    /// Prefetches the slot `PREFETCH_DISTANCE` entries ahead, if it is known to be published. The
    /// client wrote it on another CPU, and fetching its lines takes longer than a short request.
    #[inline]
    pub(super) fn fetch_ahead(&self) {
        if self.seen.wrapping_sub(self.head) > PREFETCH_DISTANCE {
            let slot = self.queue.slot(self.head.wrapping_add(PREFETCH_DISTANCE));
            self.queue.view.fetch_to_read(slot, self.queue.shape.stride as usize / 8);
        }
    }

    /// Takes the entry that [`next`](Self::next) returned.
    #[inline]
    pub(super) fn skip(&mut self) {
        debug_assert_ne!(self.seen, self.head, "only a published entry can be taken");
        self.head = self.head.wrapping_add(u32::from(self.seen != self.head));
    }

    /// Gives the oldest `count` taken entries back to the client.
    #[inline]
    pub(super) fn retire(&mut self, count: u32) {
        debug_assert!(count <= self.outstanding(), "only taken entries can be given back");
        self.retired = self.retired.wrapping_add(count.min(self.outstanding()));
        // Release: pairs with the acquire in `ProducerRing::free`. The reads of the slots are
        // complete before the client may reuse them.
        self.queue.view.u32(queue_header::CONSUMER).store(self.retired, Ordering::Release);
    }

    /// Returns the number of entries taken and not given back.
    #[inline]
    pub(super) fn outstanding(&self) -> u32 {
        self.head.wrapping_sub(self.retired)
    }

    /// Loads the client's index. It must not be below the number of taken entries, nor more than
    /// one ring beyond the entries given back.
    fn refresh(&mut self) -> Result<(), QueueFault> {
        let capacity = self.queue.shape.capacity;
        // Acquire: pairs with the release in `ProducerRing::publish`, so the entries are visible.
        let found = self.queue.view.u32(queue_header::PRODUCER).load(Ordering::Acquire);
        if found.wrapping_sub(self.head) > capacity - self.outstanding() {
            return Err(QueueFault::Producer { found, retired: self.retired, capacity });
        }
        self.seen = found;
        Ok(())
    }
}

/// Distance between the entry that is read and the entry that is prefetched.
const PREFETCH_DISTANCE: u32 = 4;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::abi::queue::{QueueKind, QueueShape};
    use crate::shm::Mapping;
    use crate::shm::sync::AtomicU32;

    fn rings(capacity: u32, index: u32) -> (ProducerRing, ConsumerRing) {
        let shape = QueueShape { capacity, stride: 16 };
        let (arena, _fd) =
            Mapping::create_arena("test", shape.bytes()).expect("memory for the arena");
        let queue = QueueMemory::format(arena, 0, QueueKind::Receive, shape, 0, 0).expect("fits");
        for word in [queue_header::PRODUCER, queue_header::CONSUMER] {
            queue.view.u32(word).store(index, Ordering::Relaxed);
        }
        let producer = ProducerRing::starting_at(queue.clone(), index);
        (producer, ConsumerRing::starting_at(queue, index))
    }

    fn producer_index(ring: &ConsumerRing) -> &AtomicU32 {
        ring.queue.view.u32(queue_header::PRODUCER)
    }

    #[test]
    fn an_index_more_than_a_ring_ahead_is_refused() {
        for start in [0, 100, u32::MAX - 1, u32::MAX] {
            let (_, mut consumer) = rings(4, start);
            producer_index(&consumer).store(start.wrapping_add(5), Ordering::Relaxed);
            let found = start.wrapping_add(5);
            let fault = QueueFault::Producer { found, retired: start, capacity: 4 };
            assert_eq!(consumer.pending(), Err(fault));
            assert_eq!(consumer.take(), Err(fault));
            producer_index(&consumer).store(start.wrapping_add(4), Ordering::Relaxed);
            assert_eq!(consumer.pending(), Ok(4));
        }
    }

    #[test]
    fn taken_entries_count_against_the_ring() {
        let (_, mut consumer) = rings(4, 7);
        producer_index(&consumer).store(11, Ordering::Relaxed);
        for _ in 0..4 {
            assert!(consumer.take().expect("honest so far").is_some());
        }
        consumer.retire(1);
        producer_index(&consumer).store(13, Ordering::Relaxed);
        let fault = QueueFault::Producer { found: 13, retired: 8, capacity: 4 };
        assert_eq!(consumer.pending(), Err(fault));
        producer_index(&consumer).store(12, Ordering::Relaxed);
        assert_eq!(consumer.pending(), Ok(1));
    }

    #[test]
    fn an_index_that_goes_back_is_refused() {
        for start in [0, 100, u32::MAX] {
            let (_, mut consumer) = rings(4, start);
            producer_index(&consumer).store(start.wrapping_add(2), Ordering::Relaxed);
            assert!(consumer.take().expect("honest so far").is_some());
            assert!(consumer.take().expect("honest so far").is_some());
            consumer.retire(2);
            producer_index(&consumer).store(start.wrapping_add(1), Ordering::Relaxed);
            assert!(matches!(consumer.pending(), Err(QueueFault::Producer { .. })));
        }
    }

    #[test]
    fn an_invalid_consumer_index_makes_no_room() {
        let (mut producer, consumer) = rings(4, 0);
        let index = consumer.queue.view.u32(queue_header::CONSUMER);
        for nonsense in [1, 5, u32::MAX - 3, 1 << 31] {
            index.store(nonsense, Ordering::Relaxed);
            assert!(producer.free() <= 4);
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Push,
        Publish,
        Take,
        Retire(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => Just(Op::Push),
            2 => Just(Op::Publish),
            4 => Just(Op::Take),
            2 => (0..4u32).prop_map(Op::Retire),
        ]
    }

    proptest! {
        /// Compares the rings with an oracle: queues of numbers, written and published, and a count
        /// of taken entries.
        #[test]
        fn rings_agree_with_an_oracle(
            log in 0..4u32,
            start in prop_oneof![Just(0), any::<u32>(), u32::MAX - 20..=u32::MAX],
            ops in prop::collection::vec(op(), 0..300),
        ) {
            let capacity = 1u32 << log;
            let (mut producer, mut consumer) = rings(capacity, start);
            let mut written = VecDeque::new();
            let mut published = VecDeque::new();
            let mut next = 0u64;
            let mut taken = 0u32;
            for op in ops {
                let used = (written.len() + published.len()) as u32 + taken;
                match op {
                    Op::Push => {
                        let slot = producer.slot();
                        prop_assert_eq!(slot.is_some(), used < capacity);
                        if let Some(slot) = slot {
                            producer.queue.view.store_words(slot, &[next, !next]);
                            producer.advance();
                            written.push_back(next);
                            next += 1;
                        }
                    }
                    Op::Publish => {
                        producer.publish();
                        published.append(&mut written);
                    }
                    Op::Take => {
                        let got = consumer.take().expect("an honest client");
                        let words = got.map(|(slot, _)| consumer.queue.view.load_words(slot));
                        let expected = published.pop_front();
                        taken += u32::from(expected.is_some());
                        prop_assert_eq!(words, expected.map(|n| [n, !n]));
                    }
                    Op::Retire(count) => {
                        let count = count.min(taken);
                        consumer.retire(count);
                        taken -= count;
                    }
                }
                let used = (written.len() + published.len()) as u32 + taken;
                prop_assert_eq!(producer.free(), capacity - used);
                prop_assert_eq!(consumer.outstanding(), taken);
                let pending = consumer.pending().expect("an honest client");
                prop_assert_eq!(pending == 0, published.is_empty());
                prop_assert!(pending as usize <= published.len());
            }
        }

        /// No index written by the client causes a panic, or more pending entries than the ring
        /// has.
        #[test]
        fn a_hostile_producer_index_is_bounded(
            start in any::<u32>(),
            indices in prop::collection::vec(any::<u32>().prop_map(|n| n % 12), 0..40),
        ) {
            let (_, mut consumer) = rings(8, start);
            for index in indices {
                let hostile = start.wrapping_add(index).wrapping_sub(2);
                producer_index(&consumer).store(hostile, Ordering::Relaxed);
                if let Ok(pending) = consumer.pending() {
                    prop_assert!(pending + consumer.outstanding() <= 8);
                }
                let _taken = consumer.take();
                if index % 3 == 0 {
                    consumer.retire(consumer.outstanding());
                }
            }
        }
    }
}
