//! The client's end of a completion queue.

use std::sync::Arc;

use super::completion_look::{GivenBack, holds, index};
use super::{CompletionLook, QueueMemory};
use crate::abi::queue::{ARM_NONE, COMPLETION_WORDS, Cqe, QueueKind, queue_header};
use crate::shm::lease::Done;
use crate::shm::sync::{Ordering, fence};

/// The client's end of a completion queue, which reads completions.
#[derive(Debug)]
pub struct CompletionConsumer {
    queue: QueueMemory,
    /// Completions read; its low 32 bits are the index, which runs freely.
    head: u64,
    /// Completions the daemon knows we have read.
    released: u64,
    /// The same for those who look without having this.
    given_back: Arc<GivenBack>,
    looks: Looks,
}

/// Whether [`CompletionLook`]s may find the queue empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Looks {
    Allowed,
    /// Not until it is known whether the queue moves.
    Suspended,
    /// Never again: they look where it is no more.
    Over,
}

impl CompletionConsumer {
    /// Of a queue that the daemon just made.
    pub fn new(queue: QueueMemory) -> Self {
        Self::starting_at(queue, 0)
    }

    pub(super) fn starting_at(queue: QueueMemory, index: u32) -> Self {
        debug_assert_eq!(queue.kind, QueueKind::Completion);
        let head = u64::from(index);
        let given_back = GivenBack::new(head);
        CompletionConsumer { queue, head, released: head, given_back, looks: Looks::Allowed }
    }

    /// For threads that want to know whether it is worth their while to wait for this. They find
    /// out nothing any more once the queue has moved.
    pub fn look(&self) -> CompletionLook {
        CompletionLook::new(self.queue.clone(), self.given_back.clone())
    }

    /// Before a request to move the queue: nobody touches it any more, not even to look, until
    /// [`follow`](Self::follow) or [`stay`](Self::stay). Gives back what was read, so that it does
    /// not count; the result is that of [`release`](Self::release).
    #[must_use = "the workers in this set wait for their doorbell"]
    pub fn keep_still(&mut self) -> u64 {
        if self.looks == Looks::Allowed {
            self.looks = Looks::Suspended;
            self.given_back.hide();
        }
        self.release()
    }

    /// The queue has not been moved.
    pub fn stay(&mut self) {
        if self.looks == Looks::Suspended {
            self.looks = Looks::Allowed;
            self.given_back.show(self.released);
        }
    }

    /// Goes on in the place that the daemon's answer names: another one, to which it has moved the
    /// queue with all that is unread, or the same. What was read stays read: entries keep their
    /// numbers, and with them their sequence words.
    ///
    /// Nothing is written here. From the request to move until its answer nobody may touch the
    /// queue ([`keep_still`](Self::keep_still)), so the arm and spin words are the same in both
    /// places ([`CompletionMove`]).
    ///
    /// [`CompletionMove`]: super::CompletionMove
    pub fn follow(&mut self, queue: QueueMemory) {
        debug_assert_eq!(queue.kind, QueueKind::Completion);
        if queue.is_at(&self.queue) {
            return self.stay();
        }
        self.looks = Looks::Over;
        self.given_back.hide();
        self.queue = queue;
    }

    /// Reads the next completion, if there is one. Its slot stays in use until
    /// [`release`](Self::release).
    #[inline]
    pub fn poll(&mut self) -> Option<Cqe> {
        if self.is_empty() {
            return None;
        }
        let words =
            self.queue.view.load_words::<COMPLETION_WORDS>(self.queue.slot(index(self.head)));
        self.head += 1;
        Some(Cqe::from_words(words))
    }

    /// As [`poll`](Self::poll), and whether what it completes had memory on loan.
    #[inline]
    pub fn poll_loan(&mut self) -> Option<(Cqe, Option<Done>)> {
        self.poll().map(|cqe| (cqe, Done::read(cqe.wr_id)))
    }

    /// Whether there is no completion to read.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !holds(&self.queue, self.head)
    }

    /// Number of completions to read.
    pub fn unread(&self) -> u32 {
        let next = (0..self.queue.shape.capacity).map(u64::from);
        next.take_while(|n| holds(&self.queue, self.head + n)).fold(0, |unread, _| unread + 1)
    }

    /// Gives the slots of everything read back to the daemon. The result is the set of workers (bit
    /// `n` for worker `n`) whose doorbell is to be rung for this queue: a QP of theirs waits for a
    /// slot.
    ///
    /// Pairs with [`CompletionProducer::set_waits`](super::CompletionProducer::set_waits). Here:
    /// store the consumer index, fence, load `ENGINE_WAITS`. There: set it, fence, load
    /// the consumer index again. One fence is first: if ours, the engine finds the space; if
    /// theirs, we see who waits. With nothing read since the last call there is no new space to
    /// tell of.
    #[inline]
    #[must_use = "the workers in this set wait for their doorbell"]
    pub fn release(&mut self) -> u64 {
        if self.released == self.head {
            return 0;
        }
        self.released = self.head;
        if self.looks == Looks::Allowed {
            self.given_back.show(self.head);
        }
        // Release: our reads of the slots are done before the daemon may reuse them, and whoever
        // looks there finds that we have read them.
        self.queue.view.u32(queue_header::CONSUMER).store(index(self.head), Ordering::Release);
        fence(Ordering::SeqCst);
        self.queue.view.u64(queue_header::ENGINE_WAITS).load(Ordering::Relaxed)
    }

    /// Asks for one event, for the next completion of any kind (`ARM_NEXT`) or for the next that is
    /// solicited or failed (`ARM_SOLICITED`), or takes the request back (`ARM_NONE`). The stronger
    /// of two requests stays. Completions that are there already raise no event: look for them with
    /// [`is_empty`](Self::is_empty) or [`poll`](Self::poll) *after* this call and before sleeping.
    ///
    /// The fence argument stands at
    /// [`CompletionProducer::take_arm`](super::CompletionProducer::take_arm).
    #[inline]
    pub fn arm(&mut self, arm: u32) {
        let word = self.queue.view.u32(queue_header::ARM);
        if arm == ARM_NONE {
            word.store(ARM_NONE, Ordering::Relaxed);
        } else {
            word.fetch_max(arm, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
    }

    /// While this is set no event is sent, armed or not. Clear it before the last look that
    /// precedes a sleep, as with [`arm`](Self::arm), whose fence argument covers it.
    #[inline]
    pub fn set_spinning(&mut self, spins: bool) {
        let word = self.queue.view.u32(queue_header::CLIENT_SPINS);
        word.store(u32::from(spins), Ordering::Relaxed);
        if !spins {
            fence(Ordering::SeqCst);
        }
    }

    /// The queue's memory, with its header and shape.
    pub fn queue(&self) -> &QueueMemory {
        &self.queue
    }
}
