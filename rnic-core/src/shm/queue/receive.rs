//! Both ends of a receive queue, shared or not.

use super::ring::{ConsumerRing, ProducerRing};
use super::{
    EntryError, MAX_SGE, Malformed, PushError, QueueFault, QueueMemory, SgeList, TakeError,
    worker_bit,
};
use crate::abi::queue::{
    QueueKind, RECEIVE_HEADER_LEN, RECEIVE_HEADER_WORDS, ReceiveHeader, SGE_LEN, Sge, queue_header,
};
use crate::shm::sync::{AtomicU64, Ordering, fence};

/// The client's end of a receive queue.
#[derive(Debug)]
pub struct ReceiveProducer {
    ring: ProducerRing,
}

impl ReceiveProducer {
    /// Of a queue that the daemon just made.
    pub fn new(queue: QueueMemory) -> Self {
        debug_assert!(matches!(queue.kind, QueueKind::Receive | QueueKind::SharedReceive));
        ReceiveProducer { ring: ProducerRing::new(queue) }
    }

    /// Requests that can be pushed now.
    pub fn free(&mut self) -> u32 {
        self.ring.free()
    }

    /// The queue's memory, with its header and shape.
    pub fn queue(&self) -> &QueueMemory {
        &self.ring.queue
    }

    /// Writes a request into the ring; the daemon sees it after [`publish`](Self::publish).
    #[inline]
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PushError> {
        let room = self.ring.queue.shape.stride as usize - RECEIVE_HEADER_LEN;
        if sges.len() > MAX_SGE || sges.len() * SGE_LEN > room {
            return Err(PushError::TooLong);
        }
        let slot = self.ring.slot().ok_or(PushError::Full)?;
        let view = &self.ring.queue.view;
        #[expect(clippy::cast_possible_truncation, reason = "at most MAX_SGE, as checked")]
        let header = ReceiveHeader { num_sge: sges.len() as u8, wr_id, spare_is_zero: true };
        view.store_words(slot, &header.to_words());
        for (n, sge) in sges.iter().enumerate() {
            view.store_words(slot + RECEIVE_HEADER_LEN + n * SGE_LEN, &sge.to_words());
        }
        self.ring.advance();
        Ok(())
    }

    /// Shows the daemon everything pushed since the last call. Ring the doorbell afterwards if
    /// [`waits`](Self::waits) says so.
    #[inline]
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// After [`publish`](Self::publish): the set of workers (bit `n` for worker `n`) whose doorbell
    /// is to be rung for this queue, because a message that they hold waits for a receive.
    ///
    /// Pairs with [`ReceiveConsumer::set_waits`]. Here: publish the entries, fence, load
    /// `ENGINE_WAITS`. There: set it, fence, look at the ring again. One fence is
    /// first: if ours, the engine finds the entries; if theirs, we see who waits. With a shared
    /// queue the argument holds for each worker on its own: each sets its bit by one atomic
    /// operation, and clears none but its own.
    #[inline]
    #[must_use = "the workers in this set wait for their doorbell"]
    pub fn waits(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.ring.queue.view.u64(queue_header::ENGINE_WAITS).load(Ordering::Relaxed)
    }
}

/// A request as it was taken from a receive queue: a private copy, checked only for its form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceiveEntry {
    /// The application's name for the request.
    pub wr_id: u64,
    /// Scatter elements, in the order in which they are filled.
    pub sges: SgeList,
}

/// The daemon's end of a receive queue. An entry goes back to the client when it is taken.
#[derive(Debug)]
pub struct ReceiveConsumer {
    ring: ConsumerRing,
}

impl ReceiveConsumer {
    /// Of a queue that was just made.
    pub fn new(queue: QueueMemory) -> Self {
        debug_assert!(matches!(queue.kind, QueueKind::Receive | QueueKind::SharedReceive));
        ReceiveConsumer { ring: ConsumerRing::new(queue) }
    }

    /// Requests published and not yet taken.
    #[inline]
    pub fn pending(&mut self) -> Result<u32, QueueFault> {
        self.ring.pending()
    }

    /// Takes the next request; `None` if there is none. An [`EntryError`] counts as taken.
    #[inline]
    pub fn take(&mut self) -> Result<Option<ReceiveEntry>, TakeError> {
        let mut entry = ReceiveEntry::default();
        Ok(self.take_into(&mut entry)?.then_some(entry))
    }

    /// Like [`take`](Self::take), into a place the caller has: `false` if there is no request.
    #[inline]
    pub fn take_into(&mut self, entry: &mut ReceiveEntry) -> Result<bool, TakeError> {
        let Some((slot, index)) = self.ring.take()? else { return Ok(false) };
        self.ring.fetch_ahead();
        let copied = self.copy_out(slot, index, entry);
        self.ring.retire(1);
        copied?;
        Ok(true)
    }

    /// The queue's memory, with its header and shape.
    pub fn queue(&self) -> &QueueMemory {
        &self.ring.queue
    }

    /// Requests published and not taken, by a fresh look at the client's index.
    pub fn peek(&mut self) -> Result<u32, QueueFault> {
        self.ring.peek()
    }

    /// The same for display: nonsense is shown as the last that made sense.
    pub fn posted(&self) -> u32 {
        self.ring.posted()
    }

    /// Says that a message held by `worker` (below 64) waits for a receive.
    /// [`peek`](Self::peek) once more before waiting, and [`clear_waits`](Self::clear_waits) when
    /// no message of that worker waits any more.
    ///
    /// The fence argument stands at [`ReceiveProducer::waits`].
    #[inline]
    pub fn set_waits(&mut self, worker: u32) {
        self.waits().fetch_or(worker_bit(worker), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says that no message of `worker` waits for a receive any more.
    #[inline]
    pub fn clear_waits(&mut self, worker: u32) {
        self.waits().fetch_and(!worker_bit(worker), Ordering::Relaxed);
    }

    fn waits(&self) -> &AtomicU64 {
        self.ring.queue.view.u64(queue_header::ENGINE_WAITS)
    }

    #[inline]
    fn copy_out(&self, slot: usize, index: u32, to: &mut ReceiveEntry) -> Result<(), EntryError> {
        let queue = &self.ring.queue;
        let words = queue.view.load_words::<RECEIVE_HEADER_WORDS>(slot);
        let ReceiveHeader { num_sge, wr_id, spare_is_zero } = ReceiveHeader::from_words(words);
        let count = usize::from(num_sge);
        let room = queue.shape.stride as usize - RECEIVE_HEADER_LEN;
        let refuse = |malformed| Err(EntryError { index, wr_id, opcode: 0, malformed });
        if !spare_is_zero {
            return refuse(Malformed::SpareBits);
        }
        if count > MAX_SGE || count * SGE_LEN > room {
            return refuse(Malformed::TooManyElements);
        }
        to.wr_id = wr_id;
        to.sges.clear();
        for n in 0..count {
            let at = slot + RECEIVE_HEADER_LEN + n * SGE_LEN;
            to.sges.push(Sge::from_words(queue.view.load_words(at)));
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::abi::queue::{QUEUE_HEADER_LEN, QueueShape};
    use crate::shm::Mapping;

    const SHAPE: QueueShape = QueueShape { capacity: 2, stride: 64 };

    fn ends(kind: QueueKind) -> (ReceiveProducer, ReceiveConsumer, Arc<Mapping>) {
        let (arena, _fd) = Mapping::create_arena("test", SHAPE.bytes()).expect("a little memory");
        let queue = QueueMemory::format(arena.clone(), 0, kind, SHAPE, 1, 2).expect("fits");
        (ReceiveProducer::new(queue.clone()), ReceiveConsumer::new(queue), arena)
    }

    fn sge(n: u32) -> Sge {
        Sge { addr: u64::MAX - u64::from(n), length: n, lkey: !n }
    }

    #[test]
    fn requests_arrive_in_order_and_make_room_when_taken() {
        for kind in [QueueKind::Receive, QueueKind::SharedReceive] {
            let (mut producer, mut consumer, _arena) = ends(kind);
            for n in 0..20 {
                let sges = [sge(n), sge(n + 1), sge(n + 2)];
                producer.push(u64::from(n), &sges[..n as usize % 4]).expect("room");
                assert_eq!(consumer.take(), Ok(None), "not published");
                producer.publish();
                let entry = consumer.take().expect("well-formed").expect("published");
                assert_eq!(entry.wr_id, u64::from(n));
                assert_eq!(entry.sges[..], sges[..n as usize % 4]);
                assert_eq!(producer.free(), 2);
            }
        }
    }

    #[test]
    fn a_full_queue_and_a_request_too_long_are_refused() {
        let (mut producer, mut consumer, _arena) = ends(QueueKind::Receive);
        assert_eq!(producer.push(1, &[sge(0); 4]), Err(PushError::TooLong));
        assert_eq!(producer.push(1, &[sge(0); 17]), Err(PushError::TooLong));
        assert_eq!(producer.push(1, &[sge(0); 3]), Ok(()));
        assert_eq!(producer.push(2, &[]), Ok(()));
        assert_eq!(producer.push(3, &[]), Err(PushError::Full));
        producer.publish();
        assert_eq!(consumer.pending(), Ok(2));
    }

    #[test]
    fn malformed_entries_are_named_and_count_as_taken() {
        for (word, malformed) in [
            (1 << 8, Malformed::SpareBits),
            (1 << 63, Malformed::SpareBits),
            (4, Malformed::TooManyElements),
            (255, Malformed::TooManyElements),
        ] {
            let (mut producer, mut consumer, arena) = ends(QueueKind::Receive);
            producer.push(77, &[]).expect("room");
            producer.publish();
            arena.store_u64(QUEUE_HEADER_LEN, word).expect("in range");
            let error = EntryError { index: 0, wr_id: 77, opcode: 0, malformed };
            assert_eq!(consumer.take(), Err(error.into()));
            assert_eq!(consumer.take(), Ok(None));
            assert_eq!(producer.free(), 2);
        }
    }

    #[test]
    fn the_workers_that_wait_are_seen_and_each_clears_its_own() {
        let (producer, mut consumer, _arena) = ends(QueueKind::SharedReceive);
        assert_eq!(producer.waits(), 0);
        consumer.set_waits(0);
        consumer.set_waits(63);
        assert_eq!(producer.waits(), 1 | 1 << 63);
        consumer.clear_waits(0);
        assert_eq!(producer.waits(), 1 << 63);
        consumer.clear_waits(63);
        assert_eq!(producer.waits(), 0);
    }

    #[test]
    fn a_fresh_look_sees_what_was_posted_since() {
        let (mut producer, mut consumer, arena) = ends(QueueKind::SharedReceive);
        producer.push(1, &[]).expect("room");
        producer.publish();
        assert_eq!((consumer.pending(), consumer.posted()), (Ok(1), 1));
        producer.push(2, &[]).expect("room");
        producer.publish();
        assert_eq!(consumer.pending(), Ok(1), "there is still one that is known");
        assert_eq!((consumer.posted(), consumer.peek()), (2, Ok(2)));
        arena.store_u64(queue_header::PRODUCER, 77).expect("in range");
        assert!(consumer.peek().is_err());
        assert_eq!(consumer.posted(), 2, "shown as it was");
    }
}
