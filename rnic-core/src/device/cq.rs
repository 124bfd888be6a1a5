//! The daemon's end of completion queues.
//!
//! A CQ may serve QPs of several workers, so a lock, held briefly, protects its producer. Overflows
//! are confined as in RFC 5042 section 6.4.3.2: every request taken from a send queue holds a slot
//! until it is retired, so send completions and flushes always fit. Receives reserve nothing, and a
//! receive completion without a free slot is an overflow, which kills this CQ and its QPs and no
//! others. A profile may let sends overflow in the same way (`cq_overrun`): their requests hold no
//! slot either.

use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use parking_lot::Mutex;

use rnic_abi::abi::queue::{CompletionFlags, Cqe};
use rnic_abi::shm::queue::{CompletionProducer, MoveError, PublishError, QueueFault, QueueMemory};
use rnic_abi::types::{CompletionStatus, CqId, SessionId};

/// A completion queue, shared by the workers of its QPs.
pub struct Cq {
    id: CqId,
    session: SessionId,
    doorbell: u32,
    /// The application's context, returned in events. Written by the control thread.
    pub context: AtomicU64,
    /// QPs that use it, counted by the control thread.
    pub qps: AtomicU32,
    /// Send completions without a free slot are an overflow.
    sends_overrun: bool,
    dead: AtomicBool,
    /// Set while an event of this CQ is on its way to the channel.
    event_pending: AtomicBool,
    inner: Mutex<Inner>,
}

struct Inner {
    producer: CompletionProducer,
    /// Set of workers that wait for free slots (bit `n` for worker `n`). The client sees a copy.
    waiting: u64,
    completions: u64,
}

/// Action required from the caller after publishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an armed client sleeps until it gets an event"]
pub enum Published {
    /// Send nothing: the CQ was not armed for these completions.
    Quiet,
    /// Send one record on the CQ's channel: the CQ was armed.
    Notify,
}

/// Reason why a CQ was not resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResizeFault {
    /// The entries in use do not fit.
    TooSmall {
        /// Entries published and not given back.
        unread: u32,
        /// Entries reserved for requests in progress.
        reserved: u32,
    },
    /// The CQ is dead or must be killed.
    Cq(CqFault),
}

/// Reason why a completion was not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqFault {
    /// No slot is free, and none was reserved for the completion.
    Full,
    /// The CQ died earlier, from an overflow or because its client corrupted the ring.
    Dead,
    /// The client's consumer index is invalid.
    BadIndex(QueueFault),
}

impl Cq {
    /// Wraps a formatted queue.
    pub fn new(id: CqId, session: SessionId, context: u64, queue: QueueMemory) -> Self {
        Cq {
            id,
            session,
            doorbell: queue.doorbell(),
            context: AtomicU64::new(context),
            qps: AtomicU32::new(0),
            sends_overrun: false,
            dead: AtomicBool::new(false),
            event_pending: AtomicBool::new(false),
            inner: Mutex::new(Inner {
                producer: CompletionProducer::new(queue),
                waiting: 0,
                completions: 0,
            }),
        }
    }

    /// Sets whether a send completion without a free slot is an overflow, as on an adapter.
    /// Otherwise the send queue waits for a slot.
    #[must_use]
    pub fn with_overrun_by_sends(mut self, overruns: bool) -> Self {
        self.sends_overrun = overruns;
        self
    }

    /// Returns true if a send completion without a free slot is an overflow.
    #[inline]
    pub fn sends_overrun(&self) -> bool {
        self.sends_overrun
    }

    /// Returns true if a send completion now overflows the CQ: unread completions fill it. Slots
    /// that are only reserved may become free again, so a completion waits for them.
    pub fn is_overrun_by_send(&self) -> bool {
        let full =
            |inner: &Inner| inner.producer.unread() >= inner.producer.queue().shape().capacity;
        self.sends_overrun && full(&self.inner.lock())
    }

    /// Returns the handle, unique among the CQs of all sessions.
    pub fn id(&self) -> CqId {
        self.id
    }

    /// Returns the session that created the CQ.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Returns the doorbell index that the client rings when it has freed slots for a waiting
    /// worker.
    pub fn doorbell(&self) -> u32 {
        self.doorbell
    }

    /// Returns the number of entries, a power of two. A resize changes it.
    pub fn capacity(&self) -> u32 {
        self.inner.lock().producer.queue().shape().capacity
    }

    /// Returns true if the CQ has overflowed or its client has corrupted the ring.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    /// Marks the CQ dead. Returns true if it was alive.
    pub fn kill(&self) -> bool {
        !self.dead.swap(true, Relaxed)
    }

    /// Returns true if no event is on its way, so the caller must send one. A client that arms
    /// faster than its events are sent gets one event for several arms, so events cannot
    /// accumulate.
    ///
    /// Pairs with [`Cq::event_sent`]. This function writes the completion, takes the arm, and
    /// swaps; the sender swaps, then sends. If this function finds an event on its way, the
    /// sender's swap comes later, so the sender sees the completion, and its event serves this arm
    /// as well.
    pub fn begin_event(&self) -> bool {
        !self.event_pending.swap(true, AcqRel)
    }

    /// Allows the next event. Must be called just before an event is sent.
    pub fn event_sent(&self) {
        self.event_pending.swap(false, AcqRel);
    }

    /// Returns the numbers of unread entries, of reserved slots, and of all entries ever written.
    pub fn usage(&self) -> (u32, u32, u64) {
        let inner = self.inner.lock();
        (inner.producer.unread(), inner.producer.reserved(), inner.completions)
    }

    /// Reserves up to `wanted` slots. Returns the number of reserved slots, which is at most half
    /// of the free slots unless only one is free.
    pub fn reserve(&self, wanted: u32) -> Result<u32, CqFault> {
        if self.is_dead() {
            return Err(CqFault::Dead);
        }
        self.inner.lock().producer.reserve_batch(wanted).map_err(CqFault::BadIndex)
    }

    /// Gives back reserved slots that will not be used. Returns the set of workers (bit `n` for
    /// worker `n`) with a QP that waits for a slot: the client does not see these slots and will
    /// not ring.
    #[must_use = "the workers in this set must be notified"]
    pub fn unreserve(&self, n: u32) -> u64 {
        if n == 0 {
            return 0;
        }
        let mut inner = self.inner.lock();
        inner.producer.unreserve(n);
        inner.waiting
    }

    /// Publishes completions into reserved slots. An armed client gets one event for all of them.
    pub fn publish_reserved(&self, cqes: &[Cqe]) -> Published {
        let mut inner = self.inner.lock();
        for cqe in cqes {
            inner.producer.publish_reserved(cqe);
        }
        inner.published(cqes)
    }

    /// Publishes a completion without a reservation.
    pub fn publish(&self, cqe: &Cqe) -> Result<Published, CqFault> {
        if self.is_dead() {
            return Err(CqFault::Dead);
        }
        let mut inner = self.inner.lock();
        //= RDMAP-8.1.1-10
        inner.producer.publish(cqe).map_err(CqFault::from)?;
        Ok(inner.published(std::slice::from_ref(cqe)))
    }

    /// Requests that the client and other workers notify `worker` when they free slots. The caller
    /// must then try once more, because slots may have become free before the request was visible.
    pub fn wait_for_space(&self, worker: u32) {
        let mut inner = self.inner.lock();
        inner.waiting |= 1 << (worker % u64::BITS);
        inner.producer.set_waits(worker);
    }

    /// Checks that the unread and reserved entries fit into `capacity` entries.
    pub fn fits(&self, capacity: u32) -> Result<(), ResizeFault> {
        if self.is_dead() {
            return Err(ResizeFault::Cq(CqFault::Dead));
        }
        self.inner.lock().producer.fits(capacity).map_err(ResizeFault::from)
    }

    /// Moves the CQ with its unread entries and reservations to `place`, which must be new. Returns
    /// the set of workers (bit `n` for worker `n`) with a QP that waits for a slot, because slots
    /// may be free now. The workers keep using this CQ and do not see its location.
    ///
    /// Holds the lock only to copy entries added since the last check, not for all of them, because
    /// workers also serve other clients. Copying is faster than completing, so fewer entries remain
    /// at each check. After `MAX_CHECKS` checks all remaining entries are copied under the lock.
    ///
    /// Called by the control thread only, for one request of the client at a time.
    #[must_use = "the workers in this set must be notified"]
    pub fn resize(&self, place: QueueMemory) -> Result<u64, ResizeFault> {
        if self.is_dead() {
            return Err(ResizeFault::Cq(CqFault::Dead));
        }
        debug_assert_eq!(place.doorbell(), self.doorbell);
        let begun = self.inner.lock().producer.begin_move(place);
        let mut moving = begun?;
        moving.prepare();
        for _ in 0..MAX_CHECKS {
            moving.copy();
            self.inner.lock().producer.catch_up(&mut moving)?;
            if moving.rest() <= MAX_LAST_COPY {
                break;
            }
        }
        let mut inner = self.inner.lock();
        let waiting = inner.waiting;
        inner.producer.finish_move(moving, waiting)?;
        Ok(waiting)
    }

    /// Cancels [`Cq::wait_for_space`].
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

impl From<MoveError> for ResizeFault {
    fn from(e: MoveError) -> Self {
        match e {
            MoveError::TooSmall { unread, reserved } => ResizeFault::TooSmall { unread, reserved },
            MoveError::Queue(fault) => ResizeFault::Cq(CqFault::BadIndex(fault)),
        }
    }
}

impl From<PublishError> for CqFault {
    fn from(e: PublishError) -> Self {
        match e {
            PublishError::Full => CqFault::Full,
            PublishError::Queue(fault) => CqFault::BadIndex(fault),
        }
    }
}

/// Maximum number of checks before the last one, which copies the rest.
const MAX_CHECKS: usize = 4;
/// Number of entries that may be copied while workers wait: a few microseconds.
const MAX_LAST_COPY: u32 = 64;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering::{Acquire, Release};

    use super::*;
    use rnic_abi::abi::queue::{ARM_NEXT, QueueKind, QueueShape};
    use rnic_abi::shm::Mapping;
    use rnic_abi::shm::queue::CompletionConsumer;
    use rnic_abi::types::CompletionOpcode;

    fn place(entries: u32) -> QueueMemory {
        let shape = QueueShape::completion(entries);
        let (arena, _fd) =
            Mapping::create_arena("test", shape.bytes()).expect("memory for the arena");
        QueueMemory::format(arena, 0, QueueKind::Completion, shape, 3, 9).expect("it fits")
    }

    fn cq() -> Cq {
        Cq::new(CqId(3), SessionId(1), 7, place(16))
    }

    fn cqe(wr_id: u64) -> Cqe {
        Cqe::new(1, wr_id, CompletionOpcode::Send, CompletionStatus::Success)
    }

    #[test]
    fn accessors_return_construction_values() {
        let cq = cq();
        assert_eq!((cq.id(), cq.session()), (CqId(3), SessionId(1)));
        assert_eq!((cq.doorbell(), cq.capacity(), cq.is_dead()), (9, 16, false));
        assert_eq!(cq.context.load(Relaxed), 7);
        assert_eq!(format!("{cq:?}"), "Cq { id: CqId(3), dead: false }");
    }

    /// Reserves all free slots and returns their number.
    fn reserve_all(cq: &Cq) -> u32 {
        std::iter::from_fn(|| cq.reserve(20).ok().filter(|&got| got > 0)).sum()
    }

    #[test]
    fn a_batch_leaves_as_many_slots_free() {
        let cq = cq();
        assert_eq!([5, 20, 20].map(|wanted| cq.reserve(wanted)), [Ok(5), Ok(5), Ok(3)]);
        assert_eq!([20, 20, 20, 20].map(|n| cq.reserve(n)), [Ok(1), Ok(1), Ok(1), Ok(0)]);
    }

    #[test]
    fn unreserve_returns_the_waiting_workers() {
        let cq = cq();
        assert_eq!(reserve_all(&cq), 16);
        assert_eq!(cq.unreserve(1), 0);
        [1, 3, 40].into_iter().for_each(|worker| cq.wait_for_space(worker));
        assert_eq!(cq.unreserve(1), 1 << 40 | 0b1010);
        cq.stop_waiting(40);
        assert_eq!(cq.unreserve(1), 0b1010);
        cq.stop_waiting(1);
        // Giving back no slot notifies no worker.
        assert_eq!((cq.unreserve(0), cq.unreserve(1)), (0, 0b1000));
        cq.stop_waiting(3);
        assert_eq!(cq.unreserve(1), 0);
        assert_eq!(cq.usage(), (0, 11, 0));
    }

    #[test]
    fn a_larger_queue_has_room_for_waiters() {
        let cq = cq();
        assert_eq!(reserve_all(&cq), 16);
        cq.wait_for_space(5);
        let larger = place(32);
        let mut client = CompletionConsumer::new(larger.clone());
        assert_eq!(cq.resize(larger), Ok(1 << 5));
        assert_eq!((cq.capacity(), cq.usage()), (32, (0, 16, 0)));
        assert_eq!(reserve_all(&cq), 16);
        let _quiet = cq.publish_reserved(&[cqe(1), cqe(2)]);
        assert_eq!(
            [client.poll(), client.poll(), client.poll()],
            [Some(cqe(1)), Some(cqe(2)), None]
        );
        assert_eq!(client.release(), 1 << 5, "the client is asked to ring");
        cq.stop_waiting(5);
        assert_eq!(cq.resize(place(64)), Ok(0));
    }

    #[test]
    fn a_too_small_resize_is_refused() {
        let cq = cq();
        assert_eq!(cq.reserve(2), Ok(2));
        for n in 0..3 {
            assert_eq!(cq.publish(&cqe(n)), Ok(Published::Quiet));
        }
        let refused = Err(ResizeFault::TooSmall { unread: 3, reserved: 2 });
        assert_eq!(cq.fits(4), refused);
        assert_eq!(cq.resize(place(4)).map(drop), refused);
        assert_eq!((cq.capacity(), cq.fits(8)), (16, Ok(())));
        assert_eq!(cq.resize(place(8)), Ok(0));
        assert_eq!((cq.capacity(), cq.usage()), (8, (3, 2, 3)));
        assert!(cq.kill());
        assert_eq!(cq.resize(place(8)), Err(ResizeFault::Cq(CqFault::Dead)));
        assert_eq!(cq.fits(8), Err(ResizeFault::Cq(CqFault::Dead)));
    }

    /// Two workers complete requests while the queue moves, one worker with reservations and one
    /// without. The completions of each arrive once and in order, and each arm causes an event.
    #[test]
    fn a_moving_queue_with_two_workers() {
        const EACH: u64 = 5_000;
        let queue = place(16);
        let cq = Arc::new(Cq::new(CqId(3), SessionId(1), 7, queue.clone()));
        let events = Arc::new(AtomicU64::new(0));
        let workers = [0, 1].map(|worker| {
            let cq = cq.clone();
            let events = events.clone();
            std::thread::spawn(move || {
                let mut n = 0;
                while n < EACH {
                    let cqe = cqe(worker << 32 | n);
                    let published = match worker {
                        0 if cq.reserve(1) == Ok(1) => Ok(cq.publish_reserved(&[cqe])),
                        0 => Err(CqFault::Full),
                        _ => cq.publish(&cqe),
                    };
                    match published {
                        Ok(published) => {
                            n += 1;
                            events.fetch_add((published == Published::Notify).into(), Release);
                        }
                        Err(CqFault::Full) => std::thread::yield_now(),
                        Err(fault) => panic!("{fault:?}"),
                    }
                }
            })
        });
        let mut client = CompletionConsumer::new(queue);
        let mut next = [0; 2];
        let mut moves = 0;
        let mut arms = 0;
        let mut armed = false;
        while next != [EACH; 2] {
            for _ in 0..7 {
                let Some(cqe) = client.poll() else { break };
                let worker = (cqe.wr_id >> 32) as usize;
                assert_eq!(cqe.wr_id & 0xFFFF_FFFF, next[worker]);
                next[worker] += 1;
            }
            let _nobody_waits = client.release();
            // Arm only while enough completions will follow, so that one of them takes the arm.
            if !armed && next[0] + next[1] < EACH {
                armed = true;
                arms += 1;
                client.arm(ARM_NEXT);
            }
            let to = place([4, 64, 16, 8][moves % 4]);
            match cq.resize(to.clone()) {
                Ok(_) => {
                    client.follow(to);
                    moves += 1;
                }
                Err(ResizeFault::TooSmall { .. }) => {}
                Err(fault) => panic!("{fault:?}"),
            }
            armed &= events.load(Acquire) < arms;
        }
        for worker in workers {
            worker.join().expect("it has not panicked");
        }
        assert_eq!(events.load(Acquire), arms, "one event for each arm");
        assert!(arms > 0 && moves > 0);
        assert_eq!((client.poll(), cq.usage()), (None, (0, 0, 2 * EACH)));
    }
}
