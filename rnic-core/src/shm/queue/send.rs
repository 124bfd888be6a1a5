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
    /// Of a queue that the daemon just made.
    pub fn new(queue: QueueMemory) -> Self {
        debug_assert_eq!(queue.kind, QueueKind::Send);
        SendProducer { ring: ProducerRing::new(queue) }
    }

    /// Requests that can be pushed now.
    pub fn free(&mut self) -> u32 {
        self.ring.free()
    }

    /// The queue.
    pub fn queue(&self) -> &QueueMemory {
        &self.ring.queue
    }

    /// Writes a request into the ring; the daemon sees it after [`publish`](Self::publish).
    /// `num_sge` and `inline_len` of the header are set to what the two slices say; inline octets
    /// need [`SendFlags::INLINE`] and exclude elements.
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
        let window = &self.ring.queue.window;
        // At most MAX_SGE elements, so the count fits.
        let header = SendHeader { num_sge: sges.len() as u8, inline_len, ..*header };
        window.store_words(slot, &header.to_words());
        let body = slot + SEND_HEADER_LEN;
        for (n, sge) in sges.iter().enumerate() {
            window.store_words(body + n * SGE_LEN, &sge.to_words());
        }
        for (n, octets) in inline.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..octets.len()].copy_from_slice(octets);
            window.store_words(body + n * 8, &[u64::from_le_bytes(word)]);
        }
        self.ring.advance();
        Ok(())
    }

    /// Shows the daemon everything pushed since the last call. Ring the doorbell afterwards.
    #[inline]
    pub fn publish(&mut self) {
        self.ring.publish();
    }
}

/// A request as it was taken from a send queue: a private copy, checked only for its form.
#[derive(Clone, Debug)]
pub struct SendEntry {
    /// The header.
    pub header: SendHeader,
    /// The elements, `header.num_sge` of them.
    pub sges: SgeList,
    /// Offset in the queue's mapping of the `header.inline_len` inline octets. They stay in the
    /// ring, where the client may still write them, until the entry is retired: copy them once.
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
    /// Of a queue that was just made.
    pub fn new(queue: QueueMemory) -> Self {
        debug_assert_eq!(queue.kind, QueueKind::Send);
        SendConsumer { ring: ConsumerRing::new(queue) }
    }

    /// Requests published and not yet taken.
    #[inline]
    pub fn pending(&mut self) -> Result<u32, QueueFault> {
        self.ring.pending()
    }

    /// The same by a fresh look: everything published up to now is counted.
    pub fn look(&mut self) -> Result<u32, QueueFault> {
        self.ring.look()
    }

    /// Takes the next request; `None` if there is none. An [`EntryError`] counts as taken.
    #[inline]
    pub fn take(&mut self) -> Result<Option<SendEntry>, TakeError> {
        let Some((slot, index)) = self.ring.take()? else { return Ok(None) };
        let queue = &self.ring.queue;
        let words = queue.window.load_words::<SEND_HEADER_WORDS>(slot);
        let header = SendHeader::from_words(words);
        if let Some(malformed) = malformed(&header, queue.shape.stride as usize) {
            let SendHeader { wr_id, opcode, .. } = header;
            return Err(EntryError { index, wr_id, opcode, malformed }.into());
        }
        let body = slot + SEND_HEADER_LEN;
        let mut sges = SgeList::new();
        for n in 0..usize::from(header.num_sge) {
            sges.push(Sge::from_words(queue.window.load_words(body + n * SGE_LEN)));
        }
        Ok(Some(SendEntry { header, sges, inline_at: queue.offset + body, index }))
    }

    /// Gives the oldest `count` taken entries back to the client.
    #[inline]
    pub fn retire(&mut self, count: u32) {
        self.ring.retire(count);
    }

    /// Entries taken and not given back.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.ring.outstanding()
    }

    /// The queue.
    pub fn queue(&self) -> &QueueMemory {
        &self.ring.queue
    }

    /// The arena, for [`SendEntry::inline_at`].
    #[inline]
    pub fn mapping(&self) -> &Arc<Mapping> {
        self.ring.queue.mapping()
    }
}

/// What is wrong with the form of a request, if anything.
#[inline]
fn malformed(header: &SendHeader, stride: usize) -> Option<Malformed> {
    let room = stride - SEND_HEADER_LEN;
    let sges = usize::from(header.num_sge);
    let is_inline = header.flags & SendFlags::INLINE.bits() != 0;
    if !header.spare_is_zero {
        Some(Malformed::SpareBits)
    } else if sges > MAX_SGE || sges * SGE_LEN > room {
        Some(Malformed::TooManyElements)
    } else if usize::from(header.inline_len) > room {
        Some(Malformed::InlineTooLong)
    } else if is_inline && sges != 0 || !is_inline && header.inline_len != 0 {
        Some(Malformed::Mixed)
    } else {
        None
    }
}
