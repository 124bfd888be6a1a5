//! Moves a completion queue to another location, with its unread entries, while the daemon
//! continues to write completions.
//!
//! Entries keep their free-running numbers, so sequence words and reservations stay valid, and the
//! client continues with the same index. From its request until the reply, the client neither reads
//! completions nor writes to the queue. A client that violates this rule harms only its own
//! completions, because nothing here trusts the contents of the ring: entries are copied as words,
//! and the consumer's index is checked as always.
//!
//! The mover locks the producer only to check it ([`CompletionProducer::catch_up`]) and to switch
//! ([`CompletionProducer::finish_move`]), so that workers do not wait for a long copy:
//!
//! * A published, unread entry does not change: its slot is written again only after the consumer's
//!   index has passed it. So entries that were found unread under the lock can be copied after the
//!   lock is released. They are complete, because their writers held the lock earlier.
//! * If the index passes them during the copy (the client violates the rule), the copies of those
//!   slots may be torn. The next check finds the new index, and entries before it are never read.
//! * The last check, the last copies and the switch happen in one critical section. Entries
//!   published earlier are copied. Later entries go to the new location.
//! * The reply is a message through the kernel. When the client receives it, it sees all of this.
//!
//! The arm is not lost. The client stores it before the request, or after the reply in the new
//! location. In the first case the switch, which comes after the request, copies the arm word:
//! either an earlier completion has taken the arm, and its event is on its way, or the next
//! completion takes it in the new location. After arming, the client checks for completions. It
//! finds all earlier completions in either location, because the unread entries of the old location
//! have been copied to the new one.

use super::{CompletionProducer, QueueFault, QueueMemory};
use crate::abi::queue::{COMPLETION_LEN, COMPLETION_WORDS, QueueKind, queue_header};
use crate::shm::sync::Ordering;

/// A move in progress.
#[derive(Debug)]
pub struct CompletionMove {
    from: QueueMemory,
    to: QueueMemory,
    /// Number of the first entry that still has to be copied, free-running.
    copied: u32,
    /// Number of entries published at the last check, free-running.
    published: u32,
}

impl CompletionMove {
    /// Returns the number of entries found by the last check and not copied yet.
    pub fn rest(&self) -> u32 {
        self.published.wrapping_sub(self.copied)
    }

    /// Initialises the new location, which [`QueueMemory::format`] has zeroed, as if every slot had
    /// been used before. Otherwise a reader at entry 2^32 - 1 would take zeros for that entry.
    pub fn prepare(&self) {
        // The first entries in these slots will have later sequence numbers.
        let before = u64::from(self.copied) << 32;
        for slot in 0..self.to.shape.capacity {
            let last = self.to.slot(slot) + COMPLETION_LEN - 8;
            self.to.view.u64(last).store(before, Ordering::Relaxed);
        }
    }

    /// Copies the entries found by the last check.
    pub fn copy(&mut self) {
        while self.copied != self.published {
            let from = self.from.slot(self.copied);
            let to = self.to.slot(self.copied);
            let words = self.from.view.load_words::<COMPLETION_WORDS>(from);
            self.to.view.store_words(to, &words);
            self.copied = self.copied.wrapping_add(1);
        }
    }
}

impl CompletionProducer {
    /// Checks that the unread entries and the reserved slots fit into `capacity` slots.
    pub fn fits(&mut self, capacity: u32) -> Result<(), MoveError> {
        self.refresh()?;
        if self.claimed() <= capacity {
            return Ok(());
        }
        let unread = self.published.wrapping_sub(self.consumed);
        Err(MoveError::TooSmall { unread, reserved: self.reserved })
    }

    /// Starts a move to `to`, which must be new. Nothing changes before
    /// [`finish_move`](Self::finish_move). Dropping the move cancels it.
    pub fn begin_move(&mut self, to: QueueMemory) -> Result<CompletionMove, MoveError> {
        debug_assert_eq!(to.kind, QueueKind::Completion);
        self.fits(to.shape.capacity)?;
        let from = self.queue.clone();
        let copied = self.consumed;
        let published = self.published;
        Ok(CompletionMove { from, to, copied, published })
    }

    /// Checks for more entries to copy.
    pub fn catch_up(&mut self, moving: &mut CompletionMove) -> Result<(), MoveError> {
        self.fits(moving.to.shape.capacity)?;
        let unread = self.published.wrapping_sub(self.consumed);
        if self.published.wrapping_sub(moving.copied) > unread {
            moving.copied = self.consumed;
        }
        moving.published = self.published;
        Ok(())
    }

    /// Copies the remaining entries and switches to the new location. `waiting` is the set of
    /// workers that wait for a slot. The set in the queue's header
    /// ([`set_waits`](Self::set_waits)) is not used, because the client may have overwritten it.
    pub fn finish_move(
        &mut self,
        mut moving: CompletionMove,
        waiting: u64,
    ) -> Result<(), MoveError> {
        self.catch_up(&mut moving)?;
        moving.copy();
        let CompletionMove { from, to, .. } = moving;
        for word in [queue_header::ARM, queue_header::CLIENT_SPINS] {
            let value = from.view.u32(word).load(Ordering::Relaxed);
            to.view.u32(word).store(value, Ordering::Relaxed);
        }
        to.view.u64(queue_header::ENGINE_WAITS).store(waiting, Ordering::Relaxed);
        to.view.u32(queue_header::PRODUCER).store(self.published, Ordering::Relaxed);
        to.view.u32(queue_header::CONSUMER).store(self.consumed, Ordering::Relaxed);
        self.queue = to;
        Ok(())
    }
}

/// Reason why a completion queue was not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// The new location has fewer slots than are in use.
    #[error("{unread} completions are unread and {reserved} slots are reserved")]
    TooSmall {
        /// Entries published and not given back.
        unread: u32,
        /// Slots reserved for requests in progress.
        reserved: u32,
    },
    /// The client's index is invalid.
    #[error(transparent)]
    Queue(#[from] QueueFault),
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::CompletionConsumer;
    use super::*;
    use crate::abi::queue::{ARM_NEXT, ARM_NONE, Cqe, QueueShape};
    use crate::shm::Mapping;
    use crate::types::{CompletionOpcode, CompletionStatus};

    fn place(capacity: u32) -> (QueueMemory, Arc<Mapping>) {
        let shape = QueueShape::completion(capacity);
        let (arena, _fd) =
            Mapping::create_arena("test", shape.bytes()).expect("memory for the arena");
        let queue = QueueMemory::format(arena.clone(), 0, QueueKind::Completion, shape, 0, 0);
        (queue.expect("fits"), arena)
    }

    /// Returns both ends of a queue in the state after `index` completions.
    fn ends(capacity: u32, index: u32) -> (CompletionProducer, CompletionConsumer, Arc<Mapping>) {
        let (queue, arena) = place(capacity);
        queue.view.u32(queue_header::CONSUMER).store(index, Ordering::Relaxed);
        let producer = CompletionProducer::starting_at(queue.clone(), index);
        let moving = CompletionMove {
            from: queue.clone(),
            to: queue.clone(),
            copied: index,
            published: index,
        };
        moving.prepare();
        (producer, CompletionConsumer::starting_at(queue, index), arena)
    }

    fn cqe(n: u64) -> Cqe {
        let cqe = Cqe::new(3, n, CompletionOpcode::Receive, CompletionStatus::Success);
        Cqe { byte_len: n as u32, flags: 5, imm_or_inv: !n, diagnosis_id: n << 32, ..cqe }
    }

    fn begin(producer: &mut CompletionProducer, capacity: u32) -> CompletionMove {
        let moving = producer.begin_move(place(capacity).0).expect("it fits");
        moving.prepare();
        moving
    }

    fn finish(
        producer: &mut CompletionProducer,
        consumer: &mut CompletionConsumer,
        moving: CompletionMove,
    ) {
        producer.finish_move(moving, 0).expect("it fits");
        consumer.follow(producer.queue().clone());
    }

    #[test]
    fn unread_entries_move_in_order() {
        for start in [0, u32::MAX - 5, u32::MAX - 1, u32::MAX] {
            for capacity in [4, 8, 64] {
                let (mut producer, mut consumer, _arena) = ends(8, start);
                for n in 0..6 {
                    producer.publish(&cqe(n)).expect("room");
                }
                assert_eq!([consumer.poll(), consumer.poll()], [Some(cqe(0)), Some(cqe(1))]);
                assert_eq!(consumer.release(), 0);
                assert_eq!(consumer.poll(), Some(cqe(2)), "read, but not given back");
                let moving = begin(&mut producer, capacity);
                finish(&mut producer, &mut consumer, moving);
                assert_eq!((producer.unread(), producer.queue().shape().capacity), (4, capacity));
                for n in 3..6 {
                    assert_eq!(consumer.poll(), Some(cqe(n)));
                }
                assert_eq!(consumer.poll(), None);
                for n in 6..100 {
                    assert_eq!(consumer.release(), 0);
                    producer.publish(&cqe(n)).expect("room");
                    assert_eq!([consumer.poll(), consumer.poll()], [Some(cqe(n)), None]);
                }
            }
        }
    }

    #[test]
    fn entries_published_during_a_move_move_too() {
        let (mut producer, mut consumer, _arena) = ends(8, 0);
        producer.publish(&cqe(0)).expect("room");
        let mut moving = begin(&mut producer, 8);
        assert_eq!(moving.rest(), 1);
        moving.copy();
        producer.publish(&cqe(1)).expect("room");
        assert_eq!(producer.catch_up(&mut moving), Ok(()));
        assert_eq!(moving.rest(), 1);
        producer.publish(&cqe(2)).expect("room");
        finish(&mut producer, &mut consumer, moving);
        producer.publish(&cqe(3)).expect("room");
        let read: Vec<_> = std::iter::from_fn(|| consumer.poll()).collect();
        assert_eq!(read, (0..4).map(cqe).collect::<Vec<_>>());
    }

    #[test]
    fn reservations_survive_a_move() {
        let (mut producer, mut consumer, _arena) = ends(8, 0);
        assert_eq!([producer.reserve(), producer.reserve()], [Ok(true); 2]);
        producer.publish(&cqe(0)).expect("room");
        let refused = Err(MoveError::TooSmall { unread: 1, reserved: 2 });
        assert_eq!(producer.fits(2), refused);
        assert_eq!(producer.begin_move(place(2).0).map(drop), refused);
        let moving = begin(&mut producer, 4);
        // During the move, more slots are in use than the new location has.
        assert_eq!([producer.reserve(), producer.reserve()], [Ok(true); 2]);
        let refused = Err(MoveError::TooSmall { unread: 1, reserved: 4 });
        assert_eq!(producer.finish_move(moving, 0), refused);
        assert_eq!(producer.queue().shape().capacity, 8, "nothing has happened");
        producer.unreserve(1);
        let moving = begin(&mut producer, 4);
        finish(&mut producer, &mut consumer, moving);
        assert_eq!((producer.unread(), producer.reserved()), (1, 3));
        assert_eq!(producer.reserve(), Ok(false));
        for n in 1..4 {
            producer.publish_reserved(&cqe(n));
        }
        let read: Vec<_> = std::iter::from_fn(|| consumer.poll()).collect();
        assert_eq!(read, (0..4).map(cqe).collect::<Vec<_>>());
    }

    #[test]
    fn arm_spin_and_waits_survive_a_move() {
        let (mut producer, mut consumer, _arena) = ends(4, 0);
        consumer.arm(ARM_NEXT);
        consumer.set_spinning(true);
        let moving = begin(&mut producer, 8);
        producer.finish_move(moving, 0b101).expect("it fits");
        consumer.follow(producer.queue().clone());
        assert!(producer.client_spins());
        producer.publish(&cqe(0)).expect("room");
        assert!(!producer.take_arm(false), "the client spins");
        consumer.set_spinning(false);
        assert!(producer.take_arm(false));
        assert!(!producer.take_arm(false));
        assert!(consumer.poll().is_some());
        assert_eq!(consumer.release(), 0b101);
        // An arm that was taken before the move is not set after it.
        consumer.arm(ARM_NEXT);
        assert!(producer.take_arm(false));
        let moving = begin(&mut producer, 4);
        finish(&mut producer, &mut consumer, moving);
        assert!(!producer.take_arm(true));
        consumer.arm(ARM_NONE);
    }

    #[test]
    fn an_invalid_index_is_a_fault_during_a_move() {
        let fault =
            |found| Err(MoveError::Queue(QueueFault::Consumer { found, last: 0, published: 1 }));
        let (mut producer, _consumer, arena) = ends(4, 0);
        producer.publish(&cqe(0)).expect("room");
        let mut moving = begin(&mut producer, 4);
        arena.store_u64(queue_header::CONSUMER, 2).expect("in range");
        assert_eq!(producer.fits(4), fault(2));
        assert_eq!(producer.begin_move(place(4).0).map(drop), fault(2));
        assert_eq!(producer.catch_up(&mut moving), fault(2));
        assert_eq!(producer.finish_move(moving, 0), fault(2));
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Reserve,
        Unreserve,
        PublishReserved,
        Publish,
        Poll,
        Release,
        /// Begins a move to 2^n slots.
        Begin(u32),
        CatchUp,
        Finish,
    }

    fn op() -> impl Strategy<Value = Op> {
        use Op::*;
        prop_oneof![
            prop::sample::select(vec![Reserve, Unreserve, PublishReserved, Publish]),
            prop::sample::select(vec![Poll, Release, CatchUp, Finish]),
            (0..5u32).prop_map(Begin),
        ]
    }

    proptest! {
        /// Every completion is read once and in order, and the room matches the current capacity,
        /// whatever operations occur during a move, if the client does not access the queue from
        /// its request until the reply.
        #[test]
        fn a_moving_queue_agrees_with_an_oracle(
            start in prop_oneof![Just(0), any::<u32>(), u32::MAX - 20..=u32::MAX],
            ops in prop::collection::vec(op(), 0..300),
        ) {
            let (mut producer, mut consumer, _arena) = ends(8, start);
            let mut moving: Option<(u32, CompletionMove)> = None;
            let mut unread = VecDeque::new();
            let mut capacity = 8;
            let mut read = 0;
            let mut reserved = 0;
            let mut next = 0;
            for op in ops {
                let in_use = unread.len() as u32 + read + reserved;
                let room = in_use < capacity;
                match op {
                    Op::Reserve => {
                        prop_assert_eq!(producer.reserve(), Ok(room));
                        reserved += u32::from(room);
                    }
                    Op::Unreserve if reserved > 0 => {
                        producer.unreserve(1);
                        reserved -= 1;
                    }
                    Op::PublishReserved if reserved > 0 => {
                        producer.publish_reserved(&cqe(next));
                        reserved -= 1;
                        unread.push_back(next);
                        next += 1;
                    }
                    Op::Publish => {
                        prop_assert_eq!(producer.publish(&cqe(next)).is_ok(), room);
                        if room {
                            unread.push_back(next);
                            next += 1;
                        }
                    }
                    Op::Poll if moving.is_none() => {
                        let expected = unread.pop_front();
                        read += u32::from(expected.is_some());
                        prop_assert_eq!(consumer.poll(), expected.map(cqe));
                    }
                    Op::Release if moving.is_none() => {
                        prop_assert_eq!(consumer.release(), 0);
                        read = 0;
                    }
                    Op::Begin(log) if moving.is_none() => {
                        let begun = producer.begin_move(place(1 << log).0);
                        prop_assert_eq!(begun.is_ok(), in_use <= 1 << log);
                        moving = begun.ok().map(|moving| (1 << log, moving));
                        if let Some((_, moving)) = &mut moving {
                            moving.prepare();
                            moving.copy();
                        }
                    }
                    Op::CatchUp => {
                        if let Some((wanted, moving)) = &mut moving {
                            let looked = producer.catch_up(moving);
                            prop_assert_eq!(looked.is_ok(), in_use <= *wanted);
                            moving.copy();
                        }
                    }
                    Op::Finish => {
                        if let Some((wanted, moving)) = moving.take() {
                            let finished = producer.finish_move(moving, 0);
                            prop_assert_eq!(finished.is_ok(), in_use <= wanted);
                            if finished.is_ok() {
                                consumer.follow(producer.queue().clone());
                                capacity = wanted;
                            }
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(producer.reserved(), reserved);
                prop_assert_eq!(producer.unread(), unread.len() as u32 + read);
                prop_assert!(producer.claimed() <= capacity);
            }
        }

        /// A client that writes its index during a move causes neither a panic nor more slots in
        /// use than the queue has.
        #[test]
        fn a_client_that_writes_during_a_move(
            start in any::<u32>(),
            steps in prop::collection::vec((any::<u32>(), 0..4u8), 0..60),
        ) {
            let (mut producer, _consumer, mut arena) = ends(4, start);
            let mut moving = None;
            for (index, step) in steps {
                let hostile = start.wrapping_add(index % 16).wrapping_sub(4);
                arena.store_u64(queue_header::CONSUMER, u64::from(hostile)).expect("in range");
                let _full_or_fault = producer.publish(&cqe(0));
                match (step, &mut moving) {
                    (0, moving) => {
                        let (queue, arena) = place(1 << (index % 5));
                        *moving = producer.begin_move(queue).ok().map(|m| (m, arena));
                    }
                    (1, Some((moving, _))) => {
                        let _small_or_fault = producer.catch_up(moving);
                        moving.copy();
                    }
                    (2, moving) => {
                        if let Some((moving, to)) = moving.take()
                            && producer.finish_move(moving, 0).is_ok()
                        {
                            arena = to;
                        }
                    }
                    _ => {}
                }
                prop_assert!(producer.claimed() <= producer.queue().shape().capacity);
            }
        }
    }
}
