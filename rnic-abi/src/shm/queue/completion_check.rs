//! Checks whether a completion queue is empty, without its consumer.
//!
//! Only one thread at a time may use a consumer, so threads share it under a lock, and taking a
//! lock only to find nothing is most of the cost of a check. A [`CompletionCheck`] needs no lock.
//! It may report a completion although there is none, so the caller must then take the lock. It
//! never reports an empty queue if a completion was unread throughout the check.
//!
//! The consumer keeps a 64-bit count of the entries that were read and given back, so that no value
//! occurs twice. It stores the count *before* it gives the slots back. A check loads the count `n`,
//! which is the number of the next entry, then the sequence in that entry's slot (acquire), then
//! the count again. It reports an empty queue only if the sequence is not that of entry `n` and the
//! count is unchanged:
//!
//! * If the slot still holds its contents from before entry `n`, neither entry `n` nor a later one
//!   has been written, and all earlier ones have been read: the queue is empty. A stale count makes
//!   no difference, because an entry that was read has been written. The value of the slot is not
//!   too stale either: like [`CompletionConsumer::is_empty`], the check sees all writes that happen
//!   before it, and all that precede a SeqCst fence ordered before a fence of its own thread. So
//!   the argument for arming holds here too.
//! * If the slot holds an entry after `n`, the daemon had found that the slot was given back. It
//!   had loaded the consumer index (acquire), whose store (release) comes after the store of the
//!   count. The check has seen the daemon's write of the entry (release, acquire). So the second
//!   load returns a count other than `n`.
//! * If the queue has moved, the slot may hold anything. The consumer set the count to [`HIDDEN`]
//!   before it requested the move, and the count stays so: a [`CompletionCheck`] always uses the
//!   location that it was created with. The daemon writes there only after it received the request
//!   through the kernel, and the second load of the count, which comes after that of the slot,
//!   returns `HIDDEN`. This is why the count is loaded again even if no thread reads completions.
//!
//! [`CompletionConsumer::is_empty`]: super::CompletionConsumer::is_empty

use std::sync::Arc;

use super::QueueMemory;
use crate::abi::queue::{COMPLETION_LEN, Cqe};
use crate::shm::sync::{AtomicU64, Ordering, fence};

/// Lock-free check (see the module). Any number of threads may use it, even while others read.
#[derive(Debug)]
pub struct CompletionCheck {
    queue: QueueMemory,
    released_count: Arc<ReleasedCount>,
}

impl CompletionCheck {
    pub(super) fn new(queue: QueueMemory, released_count: Arc<ReleasedCount>) -> Self {
        CompletionCheck { queue, released_count }
    }

    /// Returns true if there is certainly no completion to read.
    #[inline]
    pub fn is_empty(&self) -> bool {
        let count = self.released_count.count();
        count != HIDDEN && !holds(&self.queue, count) && self.released_count.count() == count
    }
}

/// Number of entries that a consumer has given back, or [`HIDDEN`].
#[derive(Debug)]
pub(super) struct ReleasedCount(AtomicU64);

impl ReleasedCount {
    pub(super) fn new(count: u64) -> Arc<Self> {
        Arc::new(ReleasedCount(AtomicU64::new(count)))
    }

    /// Stores the count. Must be called before the slots are given back, by a store with release.
    #[inline]
    pub(super) fn show(&self, count: u64) {
        self.0.store(count, Ordering::Relaxed);
    }

    /// Hides the count. No later check finds the queue empty, nor does a check in progress that has
    /// seen an effect of the caller's next operations.
    pub(super) fn hide(&self) {
        self.0.store(HIDDEN, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Returns true if entry `number` is in its slot, which may also hold an earlier or later entry.
#[inline]
pub(super) fn holds(queue: &QueueMemory, number: u64) -> bool {
    let index = index(number);
    let last = queue.slot(index) + COMPLETION_LEN - 8;
    // Acquire: pairs with the release in `CompletionProducer::write`, so the other words are
    // visible.
    let word = queue.view.u64(last).load(Ordering::Acquire);
    Cqe::sequence(word) == index.wrapping_add(1)
}

/// Returns the index of an entry as used in the shared memory: its number modulo 2^32.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "indices run freely and wrap at 2^32")]
pub(super) fn index(number: u64) -> u32 {
    number as u32
}

/// Value that no count reaches: 2^64 completions never occur.
const HIDDEN: u64 = u64::MAX;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::{CompletionConsumer, CompletionProducer};
    use super::*;
    use crate::abi::queue::{QueueKind, QueueShape, queue_header};
    use crate::shm::Mapping;
    use crate::types::{CompletionOpcode, CompletionStatus};

    fn place(capacity: u32) -> QueueMemory {
        let shape = QueueShape::completion(capacity);
        let (arena, _fd) =
            Mapping::create_arena("test", shape.bytes()).expect("memory for the arena");
        QueueMemory::format(arena, 0, QueueKind::Completion, shape, 0, 0).expect("fits")
    }

    fn ends(queue: &QueueMemory, index: u32) -> (CompletionProducer, CompletionConsumer) {
        let producer = CompletionProducer::starting_at(queue.clone(), index);
        (producer, CompletionConsumer::starting_at(queue.clone(), index))
    }

    fn cqe() -> Cqe {
        Cqe::new(3, 5, CompletionOpcode::Receive, CompletionStatus::Success)
    }

    fn publish(producer: &mut CompletionProducer) {
        producer.publish(&cqe()).expect("room");
    }

    #[test]
    fn a_check_agrees_with_the_consumer() {
        for start in [1, u32::MAX - 3, u32::MAX] {
            let queue = place(2);
            let consumer_index = queue.view.u32(queue_header::CONSUMER);
            consumer_index.store(start, Ordering::Relaxed);
            for slot in 0..2 {
                // Initialise the slots as if used before: zeros would be entry 2^32 - 1.
                let last = queue.slot(slot) + COMPLETION_LEN - 8;
                queue.view.u64(last).store(u64::from(start) << 32, Ordering::Relaxed);
            }
            let (mut producer, mut consumer) = ends(&queue, start);
            let check = consumer.look();
            for _ in 0..9 {
                assert!(check.is_empty() && consumer.is_empty());
                publish(&mut producer);
                assert!(!check.is_empty());
                publish(&mut producer);
                assert!(consumer.poll().is_some());
                assert!(!check.is_empty(), "one remains");
                assert!(consumer.poll().is_some());
                assert!(!check.is_empty(), "not given back, so not certain");
                assert_eq!(consumer.release(), 0);
            }
        }
    }

    #[test]
    fn checks_are_disabled_by_a_move() {
        let here = place(2);
        let (mut producer, mut consumer) = ends(&here, 0);
        let check = consumer.look();
        assert!(check.is_empty());
        publish(&mut producer);
        assert!(consumer.poll().is_some());
        assert_eq!(consumer.prepare_move(), 0);
        assert_eq!(producer.unread(), 0, "it was given back");
        assert!(!check.is_empty());
        consumer.stay();
        assert!(check.is_empty());
        assert_eq!(consumer.prepare_move(), 0);
        consumer.follow(here.clone());
        assert!(check.is_empty(), "the location is the same");
        for there in [place(2), place(4), here] {
            assert_eq!(consumer.prepare_move(), 0);
            consumer.follow(there.clone());
            assert!(!check.is_empty());
            assert_eq!(consumer.prepare_move(), 0);
            consumer.follow(there);
            assert!(!check.is_empty(), "the queue was at another location");
            let moving = producer.begin_move(consumer.queue().clone()).expect("it fits");
            moving.prepare();
            producer.finish_move(moving, 0).expect("it fits");
            publish(&mut producer);
            assert!(consumer.poll().is_some());
            assert_eq!(consumer.release(), 0);
            assert!(!check.is_empty());
        }
    }
}
