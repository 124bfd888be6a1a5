//! Completion queues, the daemon's end.
//!
//! A CQ may serve QPs of several workers, so its producer sits behind a short lock. The rule that
//! keeps it honest (mechanism of RFC 5042 section 6.4.3.2): every request taken from a send queue
//! holds a slot until it is retired, so send completions and flushes always fit; receives reserve
//! nothing, and a receive completion without a slot is an overflow that kills this CQ and its QPs and
//! nobody else.

use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use parking_lot::Mutex;

use crate::abi::queue::{CompletionFlags, Cqe};
use crate::shm::queue::{CompletionProducer, PublishError, QueueFault, QueueMemory};
use crate::types::{CompletionStatus, CqId, SessionId};

/// A completion queue, shared by the workers whose QPs complete to it.
pub struct Cq {
    id: CqId,
    session: SessionId,
    doorbell: u32,
    capacity: u32,
    /// The application's context, returned in events; written by the control thread.
    pub context: AtomicU64,
    /// QPs that use it, counted by the control thread.
    pub users: AtomicU32,
    dead: AtomicBool,
    /// Its event is on the way to its channel.
    notice: AtomicBool,
    inner: Mutex<Inner>,
}

struct Inner {
    producer: CompletionProducer,
    /// Workers that asked to be told of free slots, by bit; what the client sees is a copy.
    waiting: u64,
    completions: u64,
}

/// What the caller must do after publishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an armed client sleeps until its record comes"]
pub enum Published {
    /// Nothing.
    Quiet,
    /// The CQ was armed for this: send one record on its channel.
    Notify,
}

/// Why a completion was not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqFault {
    /// No slot, and the completion held no reservation.
    Full,
    /// The CQ died before, of an overflow or of what its client wrote.
    Dead,
    /// The client's consumer index is impossible.
    Scribbled(QueueFault),
}

impl Cq {
    /// Wraps a formatted queue.
    pub fn new(id: CqId, session: SessionId, context: u64, queue: QueueMemory) -> Self {
        Cq {
            id,
            session,
            doorbell: queue.doorbell(),
            capacity: queue.shape().capacity,
            context: AtomicU64::new(context),
            users: AtomicU32::new(0),
            dead: AtomicBool::new(false),
            notice: AtomicBool::new(false),
            inner: Mutex::new(Inner {
                producer: CompletionProducer::new(queue),
                waiting: 0,
                completions: 0,
            }),
        }
    }

    /// Its handle.
    pub fn id(&self) -> CqId {
        self.id
    }

    /// Its owner.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// The doorbell index its client rings when it has freed slots somebody waits for.
    pub fn doorbell(&self) -> u32 {
        self.doorbell
    }

    /// Entries.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Whether it has overflowed or was scribbled over.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    /// Marks it dead; whether this call was the first to.
    pub fn kill(&self) -> bool {
        !self.dead.swap(true, Relaxed)
    }

    /// Before an event is put on its way: whether none is. A client that arms faster than its events
    /// are sent gets one for several, and cannot have them pile up.
    ///
    /// Pairs with [`Cq::send_notice`]. Here: write the completion, take the arm, swap. There: swap,
    /// send. If we find an event on its way, its sender's swap comes after ours and so sees the
    /// completion written; the event that it sends then is one for this arm as well.
    pub fn begin_notice(&self) -> bool {
        !self.notice.swap(true, AcqRel)
    }

    /// Its event is about to be sent: another may follow.
    pub fn send_notice(&self) {
        self.notice.swap(false, AcqRel);
    }

    /// Entries unread, entries reserved, entries ever written.
    pub fn usage(&self) -> (u32, u32, u64) {
        let inner = self.inner.lock();
        (inner.producer.unread(), inner.producer.reserved(), inner.completions)
    }

    /// Reserves up to `wanted` slots; how many were.
    pub fn reserve(&self, wanted: u32) -> Result<u32, CqFault> {
        if self.is_dead() {
            return Err(CqFault::Dead);
        }
        let mut inner = self.inner.lock();
        let mut got = 0;
        while got < wanted {
            match inner.producer.reserve() {
                Ok(true) => got += 1,
                Ok(false) => break,
                Err(fault) => {
                    inner.producer.unreserve(got);
                    return Err(CqFault::Scribbled(fault));
                }
            }
        }
        Ok(got)
    }

    /// Gives back reserved slots that will not be used. The result is the set of workers (by bit)
    /// with a QP that waits for one: the client knows nothing of these slots and will not ring.
    #[must_use = "the workers in this set wait to be told"]
    pub fn unreserve(&self, n: u32) -> u64 {
        if n == 0 {
            return 0;
        }
        let mut inner = self.inner.lock();
        inner.producer.unreserve(n);
        inner.waiting
    }

    /// Publishes completions into reserved slots; an armed client gets one event for all of them.
    pub fn publish_reserved(&self, cqes: &[Cqe]) -> Published {
        let mut inner = self.inner.lock();
        for cqe in cqes {
            inner.producer.publish_reserved(cqe);
        }
        inner.published(cqes)
    }

    /// Publishes a completion that holds no reservation.
    pub fn publish(&self, cqe: &Cqe) -> Result<Published, CqFault> {
        if self.is_dead() {
            return Err(CqFault::Dead);
        }
        let mut inner = self.inner.lock();
        inner.producer.publish(cqe).map_err(CqFault::from)?;
        Ok(inner.published(std::slice::from_ref(cqe)))
    }

    /// Asks the client to ring `worker` when it has freed slots, and other workers to tell it when
    /// they have. The caller must then try again once: the slots may have become free before the
    /// request was visible.
    pub fn wait_for_space(&self, worker: u32) {
        let mut inner = self.inner.lock();
        inner.waiting |= 1 << (worker % u64::BITS);
        inner.producer.set_waits(worker);
    }

    /// Withdraws [`Cq::wait_for_space`].
    pub fn stop_waiting(&self, worker: u32) {
        let mut inner = self.inner.lock();
        inner.waiting &= !(1 << (worker % u64::BITS));
        inner.producer.clear_waits(worker);
    }
}

impl std::fmt::Debug for Cq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cq").field("id", &self.id).field("dead", &self.is_dead()).finish()
    }
}

impl Inner {
    fn published(&mut self, cqes: &[Cqe]) -> Published {
        self.completions += cqes.len() as u64;
        let solicited = cqes.iter().any(|cqe| {
            cqe.flags & CompletionFlags::SOLICITED.bits() != 0
                || cqe.status != CompletionStatus::Success as u8
        });
        if self.producer.take_arm(solicited) { Published::Notify } else { Published::Quiet }
    }
}

impl From<PublishError> for CqFault {
    fn from(e: PublishError) -> Self {
        match e {
            PublishError::Full => CqFault::Full,
            PublishError::Queue(fault) => CqFault::Scribbled(fault),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::queue::{QueueKind, QueueShape};
    use crate::shm::Mapping;

    fn cq() -> Cq {
        let shape = QueueShape::completion(16);
        let (arena, _fd) = Mapping::create_arena("test", shape.octets()).expect("a little memory");
        let queue =
            QueueMemory::format(arena, 0, QueueKind::Completion, shape, 3, 9).expect("it fits");
        Cq::new(CqId(3), SessionId(1), 7, queue)
    }

    #[test]
    fn it_tells_what_it_was_made_with() {
        let cq = cq();
        assert_eq!((cq.id(), cq.session()), (CqId(3), SessionId(1)));
        assert_eq!((cq.doorbell(), cq.capacity(), cq.is_dead()), (9, 16, false));
        assert_eq!(cq.context.load(Relaxed), 7);
        assert_eq!(format!("{cq:?}"), "Cq { id: CqId(3), dead: false }");
    }

    #[test]
    fn slots_given_back_are_told_to_who_still_waits_for_them() {
        let cq = cq();
        assert_eq!(cq.reserve(20), Ok(16));
        assert_eq!(cq.unreserve(1), 0);
        [1, 3, 40].into_iter().for_each(|worker| cq.wait_for_space(worker));
        assert_eq!(cq.unreserve(1), 1 << 40 | 0b1010);
        cq.stop_waiting(40);
        assert_eq!(cq.unreserve(1), 0b1010);
        cq.stop_waiting(1);
        // Nothing given back is nothing to be told of.
        assert_eq!((cq.unreserve(0), cq.unreserve(1)), (0, 0b1000));
        cq.stop_waiting(3);
        assert_eq!(cq.unreserve(1), 0);
        assert_eq!(cq.usage(), (0, 11, 0));
    }
}
