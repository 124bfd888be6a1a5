//! The daemon's end of a completion queue.

use super::{QueueFault, QueueMemory, worker_bit};
use crate::abi::queue::{ARM_NEXT, ARM_NONE, ARM_SOLICITED, Cqe, QueueKind, queue_header};
use crate::shm::sync::{AtomicU64, Ordering, fence};

/// Writes completions. Slots can be reserved, so that every request taken from a send queue has a
/// slot for its completion.
///
/// Invariant: published - consumed + reserved <= capacity.
#[derive(Debug)]
pub struct CompletionProducer {
    pub(super) queue: QueueMemory,
    /// Completions written, free-running.
    pub(super) published: u32,
    /// Completions read by the client, as last loaded.
    pub(super) consumed: u32,
    /// Slots reserved and not yet used.
    pub(super) reserved: u32,
}

impl CompletionProducer {
    /// Creates the producer end of a new queue.
    pub fn new(queue: QueueMemory) -> Self {
        Self::starting_at(queue, 0)
    }

    pub(super) fn starting_at(queue: QueueMemory, index: u32) -> Self {
        debug_assert_eq!(queue.kind, QueueKind::Completion);
        CompletionProducer { queue, published: index, consumed: index, reserved: 0 }
    }

    /// Reserves a slot for one request. Returns false if there is none (see
    /// [`set_waits`](Self::set_waits)).
    #[inline]
    pub fn reserve(&mut self) -> Result<bool, QueueFault> {
        let room = self.room()?;
        self.reserved += u32::from(room);
        Ok(room)
    }

    /// Reserves up to `wanted` slots and returns their number. Reserves more than one only if at
    /// least as many stay free: receives complete without a reservation, and the caller may not use
    /// all of its slots.
    #[inline]
    pub fn reserve_batch(&mut self, wanted: u32) -> Result<u32, QueueFault> {
        if self.free() / 2 < wanted {
            self.refresh()?;
        }
        let free = self.free();
        let got = wanted.min((free / 2).max(1)).min(free);
        self.reserved += got;
        Ok(got)
    }

    /// Gives back `count` reserved slots that were not used.
    #[inline]
    pub fn unreserve(&mut self, count: u32) {
        debug_assert!(count <= self.reserved, "only reserved slots can be given back");
        self.reserved = self.reserved.saturating_sub(count);
    }

    /// Writes a completion into a reserved slot. Cannot fail.
    #[inline]
    pub fn publish_reserved(&mut self, cqe: &Cqe) {
        assert!(self.reserved > 0, "no slot is reserved");
        self.reserved -= 1;
        self.write(cqe);
    }

    /// Writes a completion without a reserved slot.
    #[inline]
    pub fn publish(&mut self, cqe: &Cqe) -> Result<(), PublishError> {
        if !self.room()? {
            return Err(PublishError::Full);
        }
        self.write(cqe);
        Ok(())
    }

    /// Returns the number of slots reserved and not yet used.
    pub fn reserved(&self) -> u32 {
        self.reserved
    }

    /// Returns the number of completions that the client has not given back, by its own index.
    pub fn unread(&self) -> u32 {
        let consumed = self.queue.view.u32(queue_header::CONSUMER).load(Ordering::Relaxed);
        let unread = self.published.wrapping_sub(consumed);
        // `reserve` and `publish` report an invalid index.
        unread.min(self.published.wrapping_sub(self.consumed))
    }

    /// Returns the queue's memory, with its header and shape.
    pub fn queue(&self) -> &QueueMemory {
        &self.queue
    }

    /// Returns true if an event must be sent to the client, and disarms the queue in that case.
    /// Called after completions were written. `solicited_or_error` must be true if one of them is
    /// solicited or failed. Pairs with [`CompletionConsumer::arm`](super::CompletionConsumer::arm)
    /// and [`set_spinning`](super::CompletionConsumer::set_spinning). Here: write the completion,
    /// fence, load the arm and spin words. There: arm or stop spinning, fence, check for a
    /// completion. If this fence is first, the client finds the completion. Otherwise this call
    /// sees the arm (or sees that the client no longer spins). While the client spins, the arm word
    /// stays unchanged, because the client polls without an event.
    #[inline]
    #[must_use = "the client sleeps until its event is sent"]
    pub fn take_arm(&mut self, solicited_or_error: bool) -> bool {
        fence(Ordering::SeqCst);
        let arm = self.queue.view.u32(queue_header::ARM);
        let fires = match arm.load(Ordering::Relaxed) {
            ARM_NONE => false,
            ARM_SOLICITED => solicited_or_error,
            // ARM_NEXT, or an invalid value: an extra event harms only the client that wrote it.
            _ => true,
        };
        // The client may have disarmed or armed again since. Then no event is sent, or the event
        // also serves the new arm, after which the client checks for completions anyway.
        fires && !self.client_spins() && arm.swap(ARM_NONE, Ordering::AcqRel) != ARM_NONE
    }

    /// Returns true if the client has declared that it polls without sleeping.
    #[inline]
    pub fn client_spins(&self) -> bool {
        self.queue.view.u32(queue_header::CLIENT_SPINS).load(Ordering::Relaxed) != 0
    }

    /// Declares that a QP of `worker` (below 64) waits for a slot. Before it waits, the caller must
    /// try [`reserve`](Self::reserve) once more. It must call [`clear_waits`](Self::clear_waits)
    /// when no QP of the worker waits any more.
    ///
    /// For the fence argument see
    /// [`CompletionConsumer::release`](super::CompletionConsumer::release).
    #[inline]
    pub fn set_waits(&mut self, worker: u32) {
        self.waits().fetch_or(worker_bit(worker), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Declares that no QP of `worker` waits for a slot any more.
    #[inline]
    pub fn clear_waits(&mut self, worker: u32) {
        self.waits().fetch_and(!worker_bit(worker), Ordering::Relaxed);
    }

    fn waits(&self) -> &AtomicU64 {
        self.queue.view.u64(queue_header::ENGINE_WAITS)
    }

    /// Returns true if a slot is neither in use nor reserved. Loads the client's index only if
    /// the last loaded value leaves none.
    #[inline]
    fn room(&mut self) -> Result<bool, QueueFault> {
        Ok(self.claimed() < self.queue.shape.capacity || {
            self.refresh()?;
            self.claimed() < self.queue.shape.capacity
        })
    }

    /// Returns the number of slots that are neither in use nor reserved.
    #[inline]
    fn free(&self) -> u32 {
        self.queue.shape.capacity - self.claimed()
    }

    /// Returns the number of slots in use or reserved. The sum cannot overflow: by the invariant,
    /// it is at most the capacity.
    #[inline]
    pub(super) fn claimed(&self) -> u32 {
        self.published.wrapping_sub(self.consumed) + self.reserved
    }

    /// Loads the client's index, which must be between its last value and the published count.
    pub(super) fn refresh(&mut self) -> Result<(), QueueFault> {
        // Acquire: pairs with the release in `CompletionConsumer::release`, so the client has
        // finished reading the slots that it gives back.
        let found = self.queue.view.u32(queue_header::CONSUMER).load(Ordering::Acquire);
        if found.wrapping_sub(self.consumed) > self.published.wrapping_sub(self.consumed) {
            let last = self.consumed;
            let published = self.published;
            return Err(QueueFault::Consumer { found, last, published });
        }
        self.consumed = found;
        Ok(())
    }

    #[inline]
    fn write(&mut self, cqe: &Cqe) {
        let slot = self.queue.slot(self.published);
        self.published = self.published.wrapping_add(1);
        // The sequence of entry n is n + 1, which is the count after its publication.
        let words = cqe.to_words(self.published);
        let [body @ .., last] = &words;
        self.queue.view.store_words(slot, body);
        // Release: pairs with the acquire in `completion_check::holds`, which the client calls
        // before it reads the entry.
        //= RDMAP-5.5-10
        self.queue.view.u64(slot + body.len() * 8).store(*last, Ordering::Release);
        self.queue.view.u32(queue_header::PRODUCER).store(self.published, Ordering::Relaxed);
    }
}

/// Reason why a completion was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    /// All slots are in use or reserved.
    #[error("the completion queue is full")]
    Full,
    /// The client's index is invalid.
    #[error(transparent)]
    Queue(#[from] QueueFault),
}

const _: () = assert!(ARM_NONE < ARM_SOLICITED && ARM_SOLICITED < ARM_NEXT);

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::CompletionConsumer;
    use super::*;
    use crate::abi::queue::{COMPLETION_LEN, QueueShape};
    use crate::shm::Mapping;
    use crate::types::{CompletionOpcode, CompletionStatus};

    /// Returns both ends of a queue in the state after `index` completions.
    fn ends(capacity: u32, index: u32) -> (CompletionProducer, CompletionConsumer, Arc<Mapping>) {
        let shape = QueueShape { capacity, stride: COMPLETION_LEN as u32 };
        let (arena, _fd) =
            Mapping::create_arena("test", shape.bytes()).expect("memory for the arena");
        let queue = QueueMemory::format(arena.clone(), 0, QueueKind::Completion, shape, 0, 0)
            .expect("fits");
        queue.view.u32(queue_header::CONSUMER).store(index, Ordering::Relaxed);
        for slot in 0..capacity {
            let last = queue.slot(slot) + COMPLETION_LEN - 8;
            queue.view.u64(last).store(u64::from(index) << 32, Ordering::Relaxed);
        }
        let producer = CompletionProducer::starting_at(queue.clone(), index);
        (producer, CompletionConsumer::starting_at(queue, index), arena)
    }

    fn cqe(n: u64) -> Cqe {
        let cqe = Cqe::new(3, n, CompletionOpcode::Receive, CompletionStatus::Success);
        Cqe { byte_len: n as u32, flags: 5, imm_or_inv: !n, diagnosis_id: n << 32, ..cqe }
    }

    #[test]
    fn completions_are_read_once_in_order() {
        for start in [0, u32::MAX - 3, u32::MAX] {
            let (mut producer, mut consumer, _arena) = ends(2, start);
            for n in 0..10 {
                assert!(consumer.is_empty());
                producer.publish(&cqe(n)).expect("room");
                assert!(!consumer.is_empty());
                assert_eq!(consumer.poll(), Some(cqe(n)));
                assert_eq!(consumer.poll(), None);
                assert_eq!(consumer.release(), 0);
                assert_eq!(producer.unread(), 0);
            }
        }
    }

    #[test]
    fn a_reserved_slot_is_kept_from_others() {
        let (mut producer, mut consumer, _arena) = ends(2, 0);
        assert_eq!(producer.reserve(), Ok(true));
        producer.publish(&cqe(1)).expect("one slot is free");
        assert_eq!(producer.publish(&cqe(2)), Err(PublishError::Full));
        assert_eq!(producer.reserve(), Ok(false));
        assert_eq!((producer.reserved(), producer.unread()), (1, 1));
        producer.publish_reserved(&cqe(3));
        assert_eq!((producer.reserved(), producer.unread()), (0, 2));
        assert_eq!([consumer.poll(), consumer.poll()], [Some(cqe(1)), Some(cqe(3))]);
        assert_eq!(producer.reserve(), Ok(false), "read and not released");
        assert_eq!(consumer.release(), 0);
        assert_eq!(producer.reserve(), Ok(true));
        producer.unreserve(1);
        assert_eq!(producer.reserved(), 0);
    }

    #[test]
    fn an_invalid_consumer_index_is_refused() {
        for start in [0, 9, u32::MAX - 1] {
            let (mut producer, mut consumer, arena) = ends(2, start);
            let set = |index: u32| {
                arena.store_u64(queue_header::CONSUMER, u64::from(index)).expect("in range");
            };
            producer.publish(&cqe(0)).expect("room");
            producer.publish(&cqe(1)).expect("room");
            let fault = |found, last, published| QueueFault::Consumer { found, last, published };
            let after = |n: u32| start.wrapping_add(n);
            set(after(3));
            assert_eq!(producer.reserve(), Err(fault(after(3), start, after(2))));
            assert_eq!(producer.unread(), 2, "the last valid index is used");
            assert!(consumer.poll().is_some());
            set(after(1));
            assert_eq!(producer.reserve(), Ok(true));
            set(start);
            let went_back = fault(start, after(1), after(2));
            assert_eq!(producer.reserve(), Err(went_back));
            assert_eq!(producer.publish(&cqe(2)), Err(went_back.into()));
            producer.publish_reserved(&cqe(2));
        }
    }

    #[test]
    fn a_consumer_index_in_reserved_slots_is_refused() {
        for start in [0, u32::MAX] {
            let (mut producer, _consumer, arena) = ends(2, start);
            producer.publish(&cqe(0)).expect("room");
            assert_eq!(producer.reserve(), Ok(true));
            // Index of the slot that is reserved and not written.
            let [published, found] = [1, 2].map(|n| start.wrapping_add(n));
            arena.store_u64(queue_header::CONSUMER, u64::from(found)).expect("in range");
            let beyond = QueueFault::Consumer { found, last: start, published };
            assert_eq!(producer.reserve(), Err(beyond));
        }
    }

    #[test]
    fn one_event_per_arm() {
        let (mut producer, mut consumer, _arena) = ends(2, 0);
        assert!(!producer.take_arm(true));
        consumer.arm(ARM_SOLICITED);
        assert!(!producer.take_arm(false));
        assert!(producer.take_arm(true));
        assert!(!producer.take_arm(true));
        consumer.arm(ARM_NEXT);
        consumer.arm(ARM_SOLICITED);
        assert!(producer.take_arm(false), "the stronger request stays");
        consumer.arm(ARM_NEXT);
        consumer.arm(ARM_NONE);
        assert!(!producer.take_arm(true));
    }

    #[test]
    fn a_spinning_client_stays_armed() {
        let (mut producer, mut consumer, _arena) = ends(2, 0);
        consumer.set_spinning(true);
        consumer.arm(ARM_NEXT);
        assert!(producer.client_spins());
        assert!(!producer.take_arm(true));
        consumer.set_spinning(false);
        assert!(producer.take_arm(true));
    }

    #[test]
    fn an_invalid_arm_word_fires_once() {
        let (mut producer, _consumer, arena) = ends(2, 0);
        arena.store_u64(queue_header::ARM, 0xDEAD_BEEF).expect("in range");
        assert!(producer.take_arm(false));
        assert!(!producer.take_arm(true));
    }

    #[test]
    fn release_returns_the_waiting_workers() {
        let (mut producer, mut consumer, _arena) = ends(2, 0);
        producer.set_waits(0);
        producer.set_waits(63);
        assert_eq!(consumer.release(), 0, "nothing was read");
        producer.publish(&cqe(0)).expect("room");
        producer.publish(&cqe(1)).expect("room");
        assert!(consumer.poll().is_some());
        assert_eq!(consumer.release(), 1 | 1 << 63);
        producer.clear_waits(0);
        assert!(consumer.poll().is_some());
        assert_eq!(consumer.release(), 1 << 63);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Reserve,
        Unreserve,
        PublishReserved,
        Publish,
        Poll,
        Release,
    }

    fn op() -> impl Strategy<Value = Op> {
        use Op::*;
        let plain = [Reserve, Unreserve, PublishReserved, Publish, Poll, Release];
        prop::sample::select(plain.to_vec())
    }

    proptest! {
        /// published - consumed + reserved <= capacity, and a slot is refused only if the two are
        /// equal.
        #[test]
        fn completion_queue_agrees_with_an_oracle(
            log in 0..4u32,
            start in prop_oneof![Just(0), any::<u32>(), u32::MAX - 20..=u32::MAX],
            ops in prop::collection::vec(op(), 0..300),
        ) {
            let capacity = 1u32 << log;
            let (mut producer, mut consumer, _arena) = ends(capacity, start);
            let mut unread = VecDeque::new();
            let mut read = 0;
            let mut reserved = 0;
            let mut next = 0;
            for op in ops {
                let room = (unread.len() as u32) + read + reserved < capacity;
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
                    Op::Unreserve | Op::PublishReserved => {}
                    Op::Publish => {
                        let expected = if room { Ok(()) } else { Err(PublishError::Full) };
                        prop_assert_eq!(producer.publish(&cqe(next)), expected);
                        if room {
                            unread.push_back(next);
                            next += 1;
                        }
                    }
                    Op::Poll => {
                        let expected = unread.pop_front();
                        read += u32::from(expected.is_some());
                        prop_assert_eq!(consumer.poll(), expected.map(cqe));
                    }
                    Op::Release => {
                        prop_assert_eq!(consumer.release(), 0);
                        read = 0;
                    }
                }
                prop_assert!(unread.len() as u32 + read + reserved <= capacity);
                prop_assert_eq!(producer.reserved(), reserved);
                prop_assert_eq!(producer.unread(), unread.len() as u32 + read);
                prop_assert_eq!(consumer.is_empty(), unread.is_empty());
            }
        }

        /// No index written by the client causes a panic, or a write to a slot in use.
        #[test]
        fn a_hostile_consumer_index_keeps_the_invariant(
            start in any::<u32>(),
            steps in prop::collection::vec((any::<u32>(), any::<bool>()), 0..60),
        ) {
            let (mut producer, _consumer, arena) = ends(4, start);
            for (index, reserve) in steps {
                let hostile = start.wrapping_add(index % 16).wrapping_sub(4);
                arena.store_u64(queue_header::CONSUMER, u64::from(hostile)).expect("in range");
                if reserve {
                    if producer.reserve() == Ok(true) {
                        producer.publish_reserved(&cqe(0));
                    }
                } else {
                    let _full_or_fault = producer.publish(&cqe(0));
                }
                prop_assert!(producer.claimed() <= 4);
                prop_assert!(producer.unread() <= 4);
            }
        }
    }
}
