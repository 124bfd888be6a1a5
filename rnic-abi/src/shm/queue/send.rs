//! Both ends of a send queue.

use std::sync::Arc;

use super::ring::{ConsumerRing, ProducerRing};
use super::{
    EntryError, MAX_SGE, Malformed, PushError, QueueFault, QueueMemory, SgeList, TakeError,
};
use crate::abi::queue::{
    QueueKind, SEND_HEADER_LEN, SEND_HEADER_WORDS, SGE_LEN, SendFlags, SendHeader, Sge,
};
use crate::shm::Mapping;

/// The client's end of a send queue.
#[derive(Debug)]
pub struct SendProducer {
    ring: ProducerRing,
}

impl SendProducer {
    /// Creates the producer end of a new queue.
    pub fn new(queue: QueueMemory) -> Self {
        debug_assert_eq!(queue.kind, QueueKind::Send);
        SendProducer { ring: ProducerRing::new(queue) }
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
    /// `num_sge` and `inline_len` of the header are replaced by the lengths of the two slices.
    /// Inline data needs [`SendFlags::INLINE`] and excludes SGEs.
    #[inline]
    pub fn push(
        &mut self,
        header: &SendHeader,
        sges: &[Sge],
        inline: &[u8],
    ) -> Result<(), PushError> {
        let room = self.ring.queue.shape.stride as usize - SEND_HEADER_LEN;
        if sges.len() > MAX_SGE || sges.len() * SGE_LEN > room || inline.len() > room {
            return Err(PushError::TooLong);
        }
        let is_inline = header.flags & SendFlags::INLINE.bits() != 0;
        if is_inline && !sges.is_empty() || !is_inline && !inline.is_empty() {
            return Err(PushError::Mixed);
        }
        let inline_len = u16::try_from(inline.len()).map_err(|_| PushError::TooLong)?;
        let slot = self.ring.slot().ok_or(PushError::Full)?;
        let view = &self.ring.queue.view;
        #[expect(clippy::cast_possible_truncation, reason = "at most MAX_SGE, as checked")]
        let header = SendHeader { num_sge: sges.len() as u8, inline_len, ..*header };
        view.store_words(slot, &header.to_words());
        let body = slot + SEND_HEADER_LEN;
        for (n, sge) in sges.iter().enumerate() {
            view.store_words(body + n * SGE_LEN, &sge.to_words());
        }
        for (n, bytes) in inline.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            view.store_words(body + n * 8, &[u64::from_le_bytes(word)]);
        }
        self.ring.advance();
        // The next entry probably has the same size.
        let body = (sges.len() * SGE_LEN).max(inline.len().next_multiple_of(8));
        self.ring.fetch_next(SEND_HEADER_LEN + body);
        Ok(())
    }

    /// Publishes all pushed requests to the daemon. The caller must then ring the doorbell.
    #[inline]
    pub fn publish(&mut self) {
        self.ring.publish();
    }
}

/// A private copy of a request taken from a send queue. Only its form has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendEntry {
    /// Decoded header of the entry.
    pub header: SendHeader,
    /// Offset, in the queue's mapping, of the `header.inline_len` bytes of inline data. They stay
    /// in the ring, where the client may still write them, until the entry is retired, so they must
    /// be copied only once.
    pub inline_at: usize,
    /// Free-running index of the entry.
    pub index: u32,
}

/// The daemon's end of a send queue.
#[derive(Debug)]
pub struct SendConsumer {
    ring: ConsumerRing,
}

impl SendConsumer {
    /// Creates the consumer end of a new queue.
    pub fn new(queue: QueueMemory) -> Self {
        debug_assert_eq!(queue.kind, QueueKind::Send);
        SendConsumer { ring: ConsumerRing::new(queue) }
    }

    /// Returns the number of requests published and not yet taken.
    #[inline]
    pub fn pending(&mut self) -> Result<u32, QueueFault> {
        self.ring.pending()
    }

    /// Like [`pending`](Self::pending), but always loads the client's index.
    pub fn peek(&mut self) -> Result<u32, QueueFault> {
        self.ring.peek()
    }

    /// Takes the next request, or returns `None` if there is none. An entry that causes an
    /// [`EntryError`] counts as taken. Replaces the contents of `sges` with the request's SGEs:
    /// moving a returned list would take longer than reading one from the ring.
    #[inline(always)]
    pub fn take(&mut self, sges: &mut SgeList) -> Result<Option<SendEntry>, TakeError> {
        let Some((slot, index)) = self.ring.take()? else { return Ok(None) };
        self.ring.fetch_ahead();
        let queue = &self.ring.queue;
        let words = queue.view.load_words::<SEND_HEADER_WORDS>(slot);
        let header = SendHeader::from_words(words);
        if let Some(malformed) = malformed(&header, queue.shape.stride as usize) {
            let SendHeader { wr_id, opcode, .. } = header;
            return Err(EntryError { index, wr_id, opcode, malformed }.into());
        }
        let body = slot + SEND_HEADER_LEN;
        sges.clear();
        for n in 0..usize::from(header.num_sge) {
            sges.push(Sge::from_words(queue.view.load_words(body + n * SGE_LEN)));
        }
        Ok(Some(SendEntry { header, inline_at: queue.offset + body, index }))
    }

    /// Returns the opcode of the next entry, if it was published at the last load of the client's
    /// index. The opcode is not checked before the entry is read.
    #[inline]
    pub fn next_opcode(&self) -> Option<u8> {
        let (slot, _) = self.ring.next()?;
        let [first] = self.ring.queue.view.load_words(slot);
        Some(SendHeader::from_words([first, 0, 0, 0, 0, 0, 0, 0]).opcode)
    }

    /// Returns the next entry and its first SGE, if the entry was published at the last load of
    /// the client's index and is well formed. The SGE is meaningless if the entry has none. Does
    /// not take the entry: call [`skip`](Self::skip), or [`take`](Self::take), which reads the
    /// entry again.
    #[inline]
    pub fn look(&self) -> Option<(SendEntry, Sge)> {
        let (slot, index) = self.ring.next()?;
        let queue = &self.ring.queue;
        let stride = queue.shape.stride as usize;
        let body = slot + SEND_HEADER_LEN;
        let header = SendHeader::from_words(queue.view.load_words(slot));
        if stride < SEND_HEADER_LEN + SGE_LEN || malformed(&header, stride).is_some() {
            return None;
        }
        self.ring.fetch_ahead();
        let first = Sge::from_words(queue.view.load_words(body));
        Some((SendEntry { header, inline_at: queue.offset + body, index }, first))
    }

    /// Takes the entry that [`look`](Self::look) returned.
    #[inline]
    pub fn skip(&mut self) {
        self.ring.skip();
    }

    /// Gives the oldest `count` taken entries back to the client.
    #[inline]
    pub fn retire(&mut self, count: u32) {
        self.ring.retire(count);
    }

    /// Returns the number of entries taken and not given back.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.ring.outstanding()
    }

    /// Returns the queue's memory, with its header and shape.
    pub fn queue(&self) -> &QueueMemory {
        &self.ring.queue
    }

    /// Returns the arena's mapping, for [`SendEntry::inline_at`].
    #[inline]
    pub fn mapping(&self) -> &Arc<Mapping> {
        self.ring.queue.mapping()
    }
}

/// Returns the defect of a request's form; `None` if it is well formed.
#[inline]
fn malformed(header: &SendHeader, stride: usize) -> Option<Malformed> {
    let room = stride - SEND_HEADER_LEN;
    let sges = usize::from(header.num_sge);
    let is_inline = header.flags & SendFlags::INLINE.bits() != 0;
    if !header.reserved_is_zero {
        Some(Malformed::ReservedBits)
    } else if sges > MAX_SGE || sges * SGE_LEN > room {
        Some(Malformed::TooManySges)
    } else if usize::from(header.inline_len) > room {
        Some(Malformed::InlineTooLong)
    } else if is_inline && sges != 0 || !is_inline && header.inline_len != 0 {
        Some(Malformed::Mixed)
    } else {
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::abi::queue::{QUEUE_HEADER_LEN, QueueShape, SendOpcode};

    const AT: usize = 4096;
    const SHAPE: QueueShape = QueueShape { capacity: 4, stride: 128 };

    fn ends(shape: QueueShape) -> (SendProducer, SendConsumer, Arc<Mapping>) {
        let (arena, _fd) =
            Mapping::create_arena("test", AT + shape.bytes()).expect("memory for the arena");
        let queue = QueueMemory::format(arena.clone(), AT, QueueKind::Send, shape, 1, 2);
        let queue = queue.expect("fits");
        (SendProducer::new(queue.clone()), SendConsumer::new(queue), arena)
    }

    fn header(flags: SendFlags) -> SendHeader {
        SendHeader {
            opcode: SendOpcode::Write as u8,
            num_sge: 0,
            flags: flags.bits(),
            inline_len: 0,
            wr_id: 0x1234,
            remote_addr: 5,
            rkey: 6,
            inv_rkey: 7,
            params: [8, 9, 10, 11],
            reserved_is_zero: true,
        }
    }

    fn sge(n: u32) -> Sge {
        Sge { addr: u64::MAX - u64::from(n), length: n, lkey: !n }
    }

    #[test]
    fn a_request_arrives_unchanged() {
        let (mut producer, mut consumer, _arena) = ends(SHAPE);
        let sges = [sge(1), sge(2), sge(3), sge(4)];
        producer.push(&header(SendFlags::SIGNALED), &sges, &[]).expect("room");
        assert_eq!(consumer.pending(), Ok(0), "not published");
        let mut list = SgeList::new();
        assert_eq!(consumer.take(&mut list), Ok(None));
        producer.publish();
        assert_eq!(consumer.pending(), Ok(1));
        let entry = consumer.take(&mut list).expect("well-formed").expect("published");
        assert_eq!(entry.header, SendHeader { num_sge: 4, ..header(SendFlags::SIGNALED) });
        assert_eq!(list[..], sges);
        assert_eq!(entry.index, 0);
        assert_eq!((consumer.outstanding(), producer.free()), (1, 3));
        consumer.retire(1);
        assert_eq!((consumer.outstanding(), producer.free()), (0, 4));
    }

    #[test]
    fn inline_bytes_are_at_inline_at() {
        let (mut producer, mut consumer, _arena) = ends(SHAPE);
        for len in [0, 1, 7, 8, 9, 63, 64] {
            let bytes: Vec<u8> = (1..=len).collect();
            producer.push(&header(SendFlags::INLINE), &[], &bytes).expect("room");
            producer.publish();
            let entry =
                consumer.take(&mut SgeList::new()).expect("well-formed").expect("published");
            assert_eq!(usize::from(entry.header.inline_len), bytes.len());
            let mut copy = vec![0; bytes.len()];
            consumer.mapping().read(entry.inline_at, &mut copy).expect("in range");
            assert_eq!(copy, bytes);
            consumer.retire(1);
        }
    }

    #[test]
    fn refused_requests_write_nothing() {
        let (mut producer, mut consumer, _arena) = ends(SHAPE);
        let plain = header(SendFlags::empty());
        assert_eq!(producer.push(&plain, &[sge(0); 5], &[]), Err(PushError::TooLong));
        assert_eq!(producer.push(&plain, &[], &[1]), Err(PushError::Mixed));
        let inline = header(SendFlags::INLINE);
        assert_eq!(producer.push(&inline, &[], &[0; 65]), Err(PushError::TooLong));
        assert_eq!(producer.push(&inline, &[sge(0)], &[1]), Err(PushError::Mixed));
        for _ in 0..4 {
            producer.push(&plain, &[], &[]).expect("room");
        }
        assert_eq!(producer.push(&plain, &[], &[]), Err(PushError::Full));
        producer.publish();
        assert_eq!(consumer.pending(), Ok(4));
        let wide = QueueShape { capacity: 1, stride: 64 + 17 * 16 };
        let (mut producer, _consumer, _arena) = ends(wide);
        assert_eq!(producer.push(&plain, &[sge(0); 17], &[]), Err(PushError::TooLong));
        assert_eq!(producer.push(&plain, &[sge(0); 16], &[]), Ok(()));
    }

    #[test]
    fn malformed_entries_count_as_taken() {
        let wide = QueueShape { capacity: 4, stride: 64 + 32 * 16 };
        let fence = header(SendFlags::FENCE).to_words();
        let inline = header(SendFlags::INLINE).to_words();
        let set = |mut words: [u64; 8], word: usize, bits: u64| {
            words[word] |= bits;
            words
        };
        for (shape, words, malformed) in [
            (SHAPE, set(fence, 0, 1 << 48), Malformed::ReservedBits),
            (SHAPE, set(fence, 0, 1 << 63), Malformed::ReservedBits),
            (SHAPE, set(fence, 0, 5 << 8), Malformed::TooManySges),
            (SHAPE, set(fence, 0, 255 << 8), Malformed::TooManySges),
            (wide, set(fence, 0, 17 << 8), Malformed::TooManySges),
            (SHAPE, set(inline, 0, 65 << 32), Malformed::InlineTooLong),
            (SHAPE, set(inline, 0, 0xFFFF << 32), Malformed::InlineTooLong),
            (SHAPE, set(inline, 0, 1 << 8), Malformed::Mixed),
            (SHAPE, set(fence, 0, 1 << 32), Malformed::Mixed),
        ] {
            let (mut producer, mut consumer, arena) = ends(shape);
            producer.push(&header(SendFlags::empty()), &[], &[]).expect("room");
            producer.push(&header(SendFlags::empty()), &[], &[]).expect("room");
            producer.publish();
            for (n, word) in words.iter().enumerate() {
                arena.store_u64(AT + QUEUE_HEADER_LEN + n * 8, *word).expect("in range");
            }
            let error = consumer.take(&mut SgeList::new()).expect_err("malformed");
            let wr_id = 0x1234;
            let opcode = SendOpcode::Write as u8;
            assert_eq!(error, EntryError { index: 0, wr_id, opcode, malformed }.into());
            assert_eq!(consumer.outstanding(), 1);
            let next = consumer.take(&mut SgeList::new()).expect("well-formed").expect("published");
            assert_eq!(next.index, 1);
        }
    }

    #[test]
    fn the_ring_accepts_unknown_opcodes() {
        let (mut producer, mut consumer, _arena) = ends(SHAPE);
        let odd = SendHeader { opcode: 99, flags: 0xFFF0, ..header(SendFlags::empty()) };
        producer.push(&odd, &[], &[]).expect("room");
        producer.publish();
        assert_eq!(
            consumer.take(&mut SgeList::new()).expect("well-formed").expect("published").header,
            odd
        );
    }
}
