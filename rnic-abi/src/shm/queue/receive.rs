//! Both ends of a receive queue (RQ or SRQ).

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
    /// Creates the producer end of a new queue.
    pub fn new(queue: QueueMemory) -> Self {
        debug_assert!(matches!(queue.kind, QueueKind::Receive | QueueKind::SharedReceive));
        ReceiveProducer { ring: ProducerRing::new(queue) }
    }

    /// Returns the number of requests that can be pushed now.
    pub fn free(&mut self) -> u32 {
        self.ring.free()
    }

    /// Returns the queue's memory, with its header and shape.
    pub fn queue(&self) -> &QueueMemory {
        &self.ring.queue
    }

    /// Writes a request into the ring. The daemon sees it after [`publish`](Self::publish).
    #[inline]
    pub fn push(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PushError> {
        let room = self.ring.queue.shape.stride as usize - RECEIVE_HEADER_LEN;
        if sges.len() > MAX_SGE || sges.len() * SGE_LEN > room {
            return Err(PushError::TooLong);
        }
        let slot = self.ring.slot().ok_or(PushError::Full)?;
        let view = &self.ring.queue.view;
        #[expect(clippy::cast_possible_truncation, reason = "at most MAX_SGE, as checked")]
        let header = ReceiveHeader { num_sge: sges.len() as u8, wr_id, reserved_is_zero: true };
        view.store_words(slot, &header.to_words());
        for (n, sge) in sges.iter().enumerate() {
            view.store_words(slot + RECEIVE_HEADER_LEN + n * SGE_LEN, &sge.to_words());
        }
        self.ring.advance();
        Ok(())
    }

    /// Publishes all pushed requests to the daemon. The caller must then ring the doorbells of the
    /// workers returned by [`waits`](Self::waits).
    #[inline]
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// Returns the set of workers (bit `n` for worker `n`) whose doorbell the caller must ring for
    /// this queue, because they hold a message that waits for a receive. Must be called after
    /// [`publish`](Self::publish).
    ///
    /// Pairs with [`ReceiveConsumer::set_waits`]. Here: publish the entries, fence, load
    /// `ENGINE_WAITS`. There: set it, fence, check the ring again. If this fence is first, the
    /// engine finds the entries. Otherwise this call sees the waiting workers. For an SRQ the
    /// argument holds for each worker separately: each worker sets its bit by one atomic operation,
    /// and clears only its own.
    #[inline]
    #[must_use = "the workers in this set wait for their doorbell"]
    pub fn waits(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.ring.queue.view.u64(queue_header::ENGINE_WAITS).load(Ordering::Relaxed)
    }
}

/// A private copy of a request taken from a receive queue. Only its form has been checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceiveEntry {
    /// `wr_id` of the request.
    pub wr_id: u64,
    /// SGEs, in the order in which they are filled.
    pub sges: SgeList,
}

/// The daemon's end of a receive queue. Taking an entry frees its slot.
#[derive(Debug)]
pub struct ReceiveConsumer {
    ring: ConsumerRing,
}

impl ReceiveConsumer {
    /// Creates the consumer end of a new queue.
    pub fn new(queue: QueueMemory) -> Self {
        debug_assert!(matches!(queue.kind, QueueKind::Receive | QueueKind::SharedReceive));
        ReceiveConsumer { ring: ConsumerRing::new(queue) }
    }

    /// Returns the number of requests published and not yet taken.
    #[inline]
    pub fn pending(&mut self) -> Result<u32, QueueFault> {
        self.ring.pending()
    }

    /// Takes the next request, or returns `None` if there is none. An entry that causes an
    /// [`EntryError`] counts as taken.
    #[inline]
    pub fn take(&mut self) -> Result<Option<ReceiveEntry>, TakeError> {
        let mut entry = ReceiveEntry::default();
        Ok(self.take_into(&mut entry)?.then_some(entry))
    }

    /// Like [`take`](Self::take), into `entry`. Returns false if there is no request.
    #[inline]
    pub fn take_into(&mut self, entry: &mut ReceiveEntry) -> Result<bool, TakeError> {
        let Some((slot, index)) = self.ring.take()? else { return Ok(false) };
        self.ring.fetch_ahead();
        let copied = self.copy_out(slot, index, entry);
        self.ring.retire(1);
        copied?;
        Ok(true)
    }

    /// Returns the queue's memory, with its header and shape.
    pub fn queue(&self) -> &QueueMemory {
        &self.ring.queue
    }

    /// Like [`pending`](Self::pending), but always loads the client's index.
    pub fn peek(&mut self) -> Result<u32, QueueFault> {
        self.ring.peek()
    }

    /// Like [`peek`](Self::peek), for display. If the client's index is invalid, the last valid one
    /// is used.
    pub fn posted(&self) -> u32 {
        self.ring.posted()
    }

    /// Declares that `worker` (below 64) holds a message until a receive is posted. Before it
    /// waits, the caller must [`peek`](Self::peek) once more. It must call
    /// [`clear_waits`](Self::clear_waits) when no message of the worker waits any more.
    ///
    /// For the fence argument see [`ReceiveProducer::waits`].
    #[inline]
    pub fn set_waits(&mut self, worker: u32) {
        self.waits().fetch_or(worker_bit(worker), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Declares that no message of `worker` waits for a receive any more.
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
        let ReceiveHeader { num_sge, wr_id, reserved_is_zero } = ReceiveHeader::from_words(words);
        let count = usize::from(num_sge);
        let room = queue.shape.stride as usize - RECEIVE_HEADER_LEN;
        let refuse = |malformed| Err(EntryError { index, wr_id, opcode: 0, malformed });
        if !reserved_is_zero {
            return refuse(Malformed::ReservedBits);
        }
        if count > MAX_SGE || count * SGE_LEN > room {
            return refuse(Malformed::TooManySges);
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
        let (arena, _fd) =
            Mapping::create_arena("test", SHAPE.bytes()).expect("memory for the arena");
        let queue = QueueMemory::format(arena.clone(), 0, kind, SHAPE, 1, 2).expect("fits");
        (ReceiveProducer::new(queue.clone()), ReceiveConsumer::new(queue), arena)
    }

    fn sge(n: u32) -> Sge {
        Sge { addr: u64::MAX - u64::from(n), length: n, lkey: !n }
    }

    #[test]
    fn requests_arrive_in_order() {
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
    fn full_queue_and_too_long_request() {
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
    fn malformed_entries_count_as_taken() {
        for (word, malformed) in [
            (1 << 8, Malformed::ReservedBits),
            (1 << 63, Malformed::ReservedBits),
            (4, Malformed::TooManySges),
            (255, Malformed::TooManySges),
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
    fn waiting_workers_are_visible() {
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
    fn peek_sees_later_requests() {
        let (mut producer, mut consumer, arena) = ends(QueueKind::SharedReceive);
        producer.push(1, &[]).expect("room");
        producer.publish();
        assert_eq!((consumer.pending(), consumer.posted()), (Ok(1), 1));
        producer.push(2, &[]).expect("room");
        producer.publish();
        assert_eq!(consumer.pending(), Ok(1), "one known request remains");
        assert_eq!((consumer.posted(), consumer.peek()), (2, Ok(2)));
        arena.store_u64(queue_header::PRODUCER, 77).expect("in range");
        assert!(consumer.peek().is_err());
        assert_eq!(consumer.posted(), 2, "the last valid index is used");
    }
}
