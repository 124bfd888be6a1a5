//! The client's end of a completion queue.

use std::sync::Arc;

use super::completion_check::{ReleasedCount, holds, index};
use super::{CompletionCheck, QueueMemory};
use crate::abi::queue::{ARM_NONE, COMPLETION_WORDS, Cqe, QueueKind, queue_header};
use crate::shm::lease::Done;
use crate::shm::sync::{Ordering, fence};

/// The client's end of a completion queue. Reads completions.
#[derive(Debug)]
pub struct CompletionConsumer {
    queue: QueueMemory,
    /// Completions read. The low 32 bits are the free-running index.
    head: u64,
    /// Completions given back to the daemon.
    released: u64,
    /// Copy of `released` for [`CompletionCheck`]s.
    released_count: Arc<ReleasedCount>,
    checks: Checks,
}

/// Permission of the [`CompletionCheck`]s to report an empty queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checks {
    Allowed,
    /// Suspended until the consumer knows whether the queue moves.
    Suspended,
    /// Revoked, because the queue has left the location of the checks.
    Over,
}

impl CompletionConsumer {
    /// Creates the consumer end of a new queue.
    pub fn new(queue: QueueMemory) -> Self {
        Self::starting_at(queue, 0)
    }

    pub(super) fn starting_at(queue: QueueMemory, index: u32) -> Self {
        debug_assert_eq!(queue.kind, QueueKind::Completion);
        let head = u64::from(index);
        let released_count = ReleasedCount::new(head);
        CompletionConsumer { queue, head, released: head, released_count, checks: Checks::Allowed }
    }

    /// Returns a check for threads that look for completions before they wait for this consumer.
    /// After the queue has moved, the check never reports an empty queue.
    pub fn look(&self) -> CompletionCheck {
        CompletionCheck::new(self.queue.clone(), self.released_count.clone())
    }

    /// Gives back the slots of all completions read, and disables all checks. Must be called before
    /// a request to move the queue. No thread may use this consumer again before
    /// [`follow`](Self::follow) or [`stay`](Self::stay). The result is that of
    /// [`release`](Self::release).
    #[must_use = "the workers in this set wait for their doorbell"]
    pub fn prepare_move(&mut self) -> u64 {
        if self.checks == Checks::Allowed {
            self.checks = Checks::Suspended;
            self.released_count.hide();
        }
        self.release()
    }

    /// Resumes after the daemon refused to move the queue.
    pub fn stay(&mut self) {
        if self.checks == Checks::Suspended {
            self.checks = Checks::Allowed;
            self.released_count.show(self.released);
        }
    }

    /// Continues at the location in the daemon's reply: the old location, or a new one to which the
    /// daemon has moved the unread completions. The index stays valid, because entries keep their
    /// numbers and therefore their sequence words.
    ///
    /// Writes nothing to the queue. No thread writes to the queue between the request and the reply
    /// ([`prepare_move`](Self::prepare_move)), so the arm and spin words are the same in both
    /// locations ([`CompletionMove`]).
    ///
    /// [`CompletionMove`]: super::CompletionMove
    pub fn follow(&mut self, queue: QueueMemory) {
        debug_assert_eq!(queue.kind, QueueKind::Completion);
        if queue.is_at(&self.queue) {
            return self.stay();
        }
        self.checks = Checks::Over;
        self.released_count.hide();
        self.queue = queue;
    }

    /// Reads the next completion. Its slot stays in use until [`release`](Self::release).
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

    /// Like [`poll`](Self::poll). Also returns a proof that the request is complete, if it had
    /// memory on loan.
    #[inline]
    pub fn poll_loan(&mut self) -> Option<(Cqe, Option<Done>)> {
        self.poll().map(|cqe| (cqe, Done::read(cqe.wr_id)))
    }

    /// Returns true if there is no completion to read.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !holds(&self.queue, self.head)
    }

    /// Returns the number of unread completions.
    pub fn unread(&self) -> u32 {
        let next = (0..self.queue.shape.capacity).map(u64::from);
        next.take_while(|n| holds(&self.queue, self.head + n)).fold(0, |unread, _| unread + 1)
    }

    /// Gives back to the daemon the slots of all completions read. Returns the set of workers (bit
    /// `n` for worker `n`) whose doorbell the caller must ring for this queue, because one of their
    /// QPs waits for a slot.
    ///
    /// Pairs with [`CompletionProducer::set_waits`](super::CompletionProducer::set_waits). Here:
    /// store the consumer index, fence, load `ENGINE_WAITS`. There: set it, fence, load the
    /// consumer index again. If this fence is first, the engine finds the free slots. Otherwise
    /// this call sees the waiting workers. If nothing was read since the last call, there are no
    /// new free slots, and no worker needs a doorbell.
    #[inline]
    #[must_use = "the workers in this set wait for their doorbell"]
    pub fn release(&mut self) -> u64 {
        if self.released == self.head {
            return 0;
        }
        self.released = self.head;
        if self.checks == Checks::Allowed {
            self.released_count.show(self.head);
        }
        // Release: pairs with the acquire in `CompletionProducer::refresh`. The reads of the slots
        // are complete before the daemon may reuse them, and a check that finds a reused slot sees
        // the count stored above.
        self.queue.view.u32(queue_header::CONSUMER).store(index(self.head), Ordering::Release);
        fence(Ordering::SeqCst);
        self.queue.view.u64(queue_header::ENGINE_WAITS).load(Ordering::Relaxed)
    }

    /// Requests one event, for the next completion of any kind (`ARM_NEXT`) or for the next that is
    /// solicited or failed (`ARM_SOLICITED`), or cancels the request (`ARM_NONE`). The stronger of
    /// two requests applies. Existing completions cause no event: check for them with
    /// [`is_empty`](Self::is_empty) or [`poll`](Self::poll) *after* this call and before sleeping.
    ///
    /// For the fence argument see
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

    /// Sets or clears spinning. While it is set, no event is sent, even if the queue is armed.
    /// Clear it before the last check that precedes a sleep. The fence argument of
    /// [`arm`](Self::arm) covers this.
    #[inline]
    pub fn set_spinning(&mut self, spins: bool) {
        let word = self.queue.view.u32(queue_header::CLIENT_SPINS);
        word.store(u32::from(spins), Ordering::Relaxed);
        if !spins {
            fence(Ordering::SeqCst);
        }
    }

    /// Returns the queue's memory, with its header and shape.
    pub fn queue(&self) -> &QueueMemory {
        &self.queue
    }
}
