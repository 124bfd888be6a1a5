//! Whether a completion queue is empty, for threads that do not hold its consumer.
//!
//! A consumer belongs to one thread at a time, so threads that share one put a lock around it, and
//! taking a lock only to find nothing is most of what a look costs. A [`CompletionLook`] needs
//! none. It may say that there is something although there is not, and then the lock is to be
//! taken. It never says that there is nothing when a completion was there to be read all the while.
//!
//! The consumer keeps a word that says how many entries have been read and given back, by 64 bits,
//! so that no value comes twice. It stores it *before* it gives their slots back. A look loads the
//! word, which makes some `n` the entry to come next, then the sequence in that entry's slot
//! (acquire), then the word once more. It says "nothing" only if the sequence is not that of entry
//! `n` and the word is the same:
//!
//! * If the slot holds what was there before entry `n`, that has not been written, so nothing
//!   behind it has either, and everything before it has been read: nothing is there. An older value
//!   of the word makes no difference, for an entry that was read has been written. Nor is a value
//!   of the slot too old: what is known to have been written, or was written before a fence that
//!   precedes one of ours, is seen, as it would be by [`CompletionConsumer::is_empty`]. So the
//!   argument of arming holds here too.
//! * If the slot holds an entry that came after entry `n`, the daemon had found the slot given
//!   back. It had seen the consumer index (acquire), whose store (release) comes after that of the
//!   word; the look has seen what the daemon wrote then (release, acquire). So the second load
//!   finds another value than `n`.
//! * If the queue is elsewhere, the slot may hold anything. Before its move was asked for, the word
//!   was made [`HIDDEN`], and so it stays for good: a look goes by the place that it was made with.
//!   Whoever writes there has been told by the kernel that the client asked to move, and the second
//!   load, which comes after that of what was written, finds the word hidden. This is why it is
//!   loaded again even if nobody reads anything.
//!
//! [`CompletionConsumer::is_empty`]: super::CompletionConsumer::is_empty

use std::sync::Arc;

use super::QueueMemory;
use crate::abi::queue::{COMPLETION_LEN, Cqe};
use crate::shm::sync::{AtomicU64, Ordering, fence};

/// See the module. Any number of threads may look at the same time, and while others read.
#[derive(Debug)]
pub struct CompletionLook {
    queue: QueueMemory,
    given_back: Arc<GivenBack>,
}

impl CompletionLook {
    pub(super) fn new(queue: QueueMemory, given_back: Arc<GivenBack>) -> Self {
        CompletionLook { queue, given_back }
    }

    /// Whether there is certainly no completion to read.
    #[inline]
    pub fn is_empty(&self) -> bool {
        let count = self.given_back.count();
        count != HIDDEN && !holds(&self.queue, count) && self.given_back.count() == count
    }
}

/// How many entries a consumer has given back, or [`HIDDEN`].
#[derive(Debug)]
pub(super) struct GivenBack(AtomicU64);

impl GivenBack {
    pub(super) fn new(count: u64) -> Arc<Self> {
        Arc::new(GivenBack(AtomicU64::new(count)))
    }

    /// To be called before their slots are given back, by a store with release.
    #[inline]
    pub(super) fn show(&self, count: u64) {
        self.0.store(count, Ordering::Relaxed);
    }

    /// No look finds the queue empty from now on, and none that began before will, once it has seen
    /// anything that came of what the caller does next.
    pub(super) fn hide(&self) {
        self.0.store(HIDDEN, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whether entry `number` stands in its slot, which may hold an earlier one or a later one.
#[inline]
pub(super) fn holds(queue: &QueueMemory, number: u64) -> bool {
    let index = index(number);
    let last = queue.slot(index) + COMPLETION_LEN - 8;
    // Acquire: pairs with the release in `CompletionProducer`, so the other words are there.
    let word = queue.view.u64(last).load(Ordering::Acquire);
    Cqe::sequence(word) == index.wrapping_add(1)
}

/// The number of an entry as the two sides tell it to each other.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "indices run freely and wrap at 2^32")]
pub(super) fn index(number: u64) -> u32 {
    number as u32
}

/// No count: 2^64 completions do not happen.
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
        let (arena, _fd) = Mapping::create_arena("test", shape.bytes()).expect("a little memory");
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
    fn a_look_finds_what_the_consumer_finds_on_every_lap_and_across_the_wrap() {
        for start in [1, u32::MAX - 3, u32::MAX] {
            let queue = place(2);
            let consumer_index = queue.view.u32(queue_header::CONSUMER);
            consumer_index.store(start, Ordering::Relaxed);
            for slot in 0..2 {
                // As if it had been used before: zeros would be entry 2^32 - 1.
                let last = queue.slot(slot) + COMPLETION_LEN - 8;
                queue.view.u64(last).store(u64::from(start) << 32, Ordering::Relaxed);
            }
            let (mut producer, mut consumer) = ends(&queue, start);
            let look = consumer.look();
            for _ in 0..9 {
                assert!(look.is_empty() && consumer.is_empty());
                publish(&mut producer);
                assert!(!look.is_empty());
                publish(&mut producer);
                assert!(consumer.poll().is_some());
                assert!(!look.is_empty(), "one is left");
                assert!(consumer.poll().is_some());
                assert!(!look.is_empty(), "not given back, so not certain");
                assert_eq!(consumer.release(), 0);
            }
        }
    }

    #[test]
    fn nothing_is_certain_while_a_queue_may_move_and_once_it_has() {
        let here = place(2);
        let (mut producer, mut consumer) = ends(&here, 0);
        let look = consumer.look();
        assert!(look.is_empty());
        publish(&mut producer);
        assert!(consumer.poll().is_some());
        assert_eq!(consumer.keep_still(), 0);
        assert_eq!(producer.unread(), 0, "it was given back");
        assert!(!look.is_empty());
        consumer.stay();
        assert!(look.is_empty());
        assert_eq!(consumer.keep_still(), 0);
        consumer.follow(here.clone());
        assert!(look.is_empty(), "the place is the same");
        for there in [place(2), place(4), here] {
            assert_eq!(consumer.keep_still(), 0);
            consumer.follow(there.clone());
            assert!(!look.is_empty());
            assert_eq!(consumer.keep_still(), 0);
            consumer.follow(there);
            assert!(!look.is_empty(), "where it looks, the queue was not all the while");
            let moving = producer.begin_move(consumer.queue().clone()).expect("it fits");
            moving.prepare();
            producer.finish_move(moving, 0).expect("it fits");
            publish(&mut producer);
            assert!(consumer.poll().is_some());
            assert_eq!(consumer.release(), 0);
            assert!(!look.is_empty());
        }
    }
}
