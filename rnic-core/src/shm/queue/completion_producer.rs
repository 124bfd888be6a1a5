//! The daemon's end of a completion queue.

use super::{QueueFault, QueueMemory};
use crate::abi::queue::{ARM_NEXT, ARM_NONE, ARM_SOLICITED, Cqe, QueueKind, queue_header};
use crate::shm::sync::{AtomicU64, Ordering, fence};

/// Writes completions. Slots can be reserved, so that a request taken from a send queue always has
/// a place for its completion.
///
/// Invariant: published - consumed + reserved <= capacity.
#[derive(Debug)]
pub struct CompletionProducer {
    queue: QueueMemory,
    /// Completions written.
    published: u32,
    /// Completions the client has read, when we last looked.
    consumed: u32,
    /// Slots promised and not yet used.
    reserved: u32,
}

impl CompletionProducer {
    /// Of a queue that was just made.
    pub fn new(queue: QueueMemory) -> Self {
        Self::starting_at(queue, 0)
    }

    pub(super) fn starting_at(queue: QueueMemory, index: u32) -> Self {
        debug_assert_eq!(queue.kind, QueueKind::Completion);
        CompletionProducer { queue, published: index, consumed: index, reserved: 0 }
    }

    /// Promises a slot to one request; `false` if there is none: see
    /// [`set_waits`](Self::set_waits).
    #[inline]
    pub fn reserve(&mut self) -> Result<bool, QueueFault> {
        let room = self.room()?;
        self.reserved += u32::from(room);
        Ok(room)
    }

    /// Gives `count` promised slots back unused.
    #[inline]
    pub fn unreserve(&mut self, count: u32) {
        debug_assert!(count <= self.reserved, "only what was reserved can be given back");
        self.reserved = self.reserved.saturating_sub(count);
    }

    /// Writes a completion into a promised slot. It cannot fail: the slot is there.
    #[inline]
    pub fn publish_reserved(&mut self, cqe: &Cqe) {
        assert!(self.reserved > 0, "a promised slot is used once");
        self.reserved -= 1;
        self.write(cqe);
    }

    /// Writes a completion for which nothing was reserved.
    #[inline]
    pub fn publish(&mut self, cqe: &Cqe) -> Result<(), PublishError> {
        if !self.room()? {
            return Err(PublishError::Full);
        }
        self.write(cqe);
        Ok(())
    }

    /// Slots promised and not yet used.
    pub fn reserved(&self) -> u32 {
        self.reserved
    }

    /// Completions written and, as far as the client says, not yet read.
    pub fn unread(&self) -> u32 {
        let consumed = self.queue.window.u32(queue_header::CONSUMER).load(Ordering::Relaxed);
        let unread = self.published.wrapping_sub(consumed);
        // A nonsensical index is reported where it matters, by `reserve` and `publish`.
        unread.min(self.published.wrapping_sub(self.consumed))
    }

    /// The queue.
    pub fn queue(&self) -> &QueueMemory {
        &self.queue
    }

    /// After completions were written: whether the client is to be sent an event. It is disarmed
    /// thereby. `solicited_or_error` says whether one of the completions was.
    ///
    /// Pairs with [`CompletionConsumer::arm`](super::CompletionConsumer::arm) and
    /// [`set_spinning`](super::CompletionConsumer::set_spinning). Here: write the completion, fence,
    /// load the arm and spin words. There: arm or stop spinning, fence, look for a completion. One
    /// fence is first: if ours, the client finds the completion; if theirs, we see the arm (or see
    /// that it no longer spins). While the client spins the arm stays as it is: it will look by itself.
    #[inline]
    #[must_use = "the client sleeps until its event is sent"]
    pub fn take_arm(&mut self, solicited_or_error: bool) -> bool {
        fence(Ordering::SeqCst);
        let arm = self.queue.window.u32(queue_header::ARM);
        let fires = match arm.load(Ordering::Relaxed) {
            ARM_NONE => false,
            ARM_SOLICITED => solicited_or_error,
            // ARM_NEXT, and nonsense: an event too many harms only the client that wrote it.
            _ => true,
        };
        // The client may have disarmed or armed anew since: then there is no event, or one that
        // also answers the new arm, whose own look for completions comes after it.
        fires && !self.client_spins() && arm.swap(ARM_NONE, Ordering::AcqRel) != ARM_NONE
    }

    /// Whether the client says that it polls without sleeping.
    #[inline]
    pub fn client_spins(&self) -> bool {
        self.queue.window.u32(queue_header::CLIENT_SPINS).load(Ordering::Relaxed) != 0
    }

    /// Says that a QP of `worker` (below 64) waits for a slot. Try [`reserve`](Self::reserve) once
    /// more before waiting, and [`clear_waits`](Self::clear_waits) when no QP waits any more.
    ///
    /// The fence argument stands at [`CompletionConsumer::release`](super::CompletionConsumer::release).
    #[inline]
    pub fn set_waits(&mut self, worker: u32) {
        self.waits().fetch_or(worker_bit(worker), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says that no QP of `worker` waits for a slot any more.
    #[inline]
    pub fn clear_waits(&mut self, worker: u32) {
        self.waits().fetch_and(!worker_bit(worker), Ordering::Relaxed);
    }

    fn waits(&self) -> &AtomicU64 {
        self.queue.window.u64(queue_header::ENGINE_WAITS)
    }

    /// Whether a slot is neither in use nor promised; looks at the client's index only if, by what
    /// we know, none is.
    #[inline]
    fn room(&mut self) -> Result<bool, QueueFault> {
        Ok(self.claimed() < self.queue.shape.capacity || {
            self.refresh()?;
            self.claimed() < self.queue.shape.capacity
        })
    }

    /// Slots in use or promised. No overflow: at most the capacity, by the invariant.
    #[inline]
    fn claimed(&self) -> u32 {
        self.published.wrapping_sub(self.consumed) + self.reserved
    }

    /// Loads the client's index, which must lie between what it was and what was published.
    fn refresh(&mut self) -> Result<(), QueueFault> {
        // Acquire: the client is done reading the slots it gives back.
        let found = self.queue.window.u32(queue_header::CONSUMER).load(Ordering::Acquire);
        if found.wrapping_sub(self.consumed) > self.published.wrapping_sub(self.consumed) {
            let (last, published) = (self.consumed, self.published);
            return Err(QueueFault::Consumer { found, last, published });
        }
        self.consumed = found;
        Ok(())
    }

    #[inline]
    fn write(&mut self, cqe: &Cqe) {
        let slot = self.queue.slot(self.published);
        self.published = self.published.wrapping_add(1);
        // The sequence of entry n is n + 1, that is, the count once it is published.
        let words = cqe.to_words(self.published);
        let [body @ .., last] = &words;
        self.queue.window.store_words(slot, body);
        // Release: pairs with the acquire in `CompletionConsumer::poll`.
        self.queue.window.u64(slot + body.len() * 8).store(*last, Ordering::Release);
        self.queue.window.u32(queue_header::PRODUCER).store(self.published, Ordering::Relaxed);
    }
}

/// Why a completion was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    /// Every slot is in use or promised.
    #[error("the completion queue is full")]
    Full,
    /// The client's index is nonsense.
    #[error(transparent)]
    Queue(#[from] QueueFault),
}

fn worker_bit(worker: u32) -> u64 {
    debug_assert!(worker < u64::BITS, "at most 64 workers");
    1 << (worker % u64::BITS)
}

const _: () = assert!(ARM_NONE < ARM_SOLICITED && ARM_SOLICITED < ARM_NEXT);
