//! The daemon's end of shared receive queues.
//!
//! An SRQ serves QPs of several workers, so a lock, held briefly, protects its consumer. Receives
//! are taken in the order in which they were posted, by the QP with the next message. A receive
//! that was taken belongs to that QP until it is completed or flushed. Receives that are posted and
//! not taken belong to no QP, so no QP flushes them.
//!
//! This module has three more tasks, because all receives are taken here. *Limit*: it requests one
//! event when a receive is taken and fewer remain than the limit. *Shares*: it reports a QP that
//! takes more than its fair share ([`Unfair`]). *Waiting QPs*: it serves QPs that wait for a
//! receive in the order in which they began to wait, across all workers.

mod shares;
mod waiters;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use rnic_abi::shm::queue::{QueueFault, QueueMemory, ReceiveConsumer, ReceiveEntry, TakeError};
use rnic_abi::types::{QpId, SessionId, SrqId, Time};
use shares::Shares;
pub use shares::Unfair;
use waiters::Waiters;
pub use waiters::{Waiter, WaiterPlace};

/// A shared receive queue, used by the workers of its QPs.
pub struct Srq {
    id: SrqId,
    session: SessionId,
    doorbell: u32,
    capacity: u32,
    /// The application's context, returned in events. Written by the control thread.
    pub context: AtomicU64,
    /// QPs that use it, counted by the control thread.
    pub qps: AtomicU32,
    dead: AtomicBool,
    inner: Mutex<Inner>,
}

struct Inner {
    consumer: ReceiveConsumer,
    /// Receives taken since creation.
    taken: u64,
    /// Number of posted receives below which an event is due. 0 if not armed.
    limit: u32,
    shares: Shares,
    waiters: Waiters,
}

/// Events for the owner after a receive was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "the owner waits for these events"]
pub struct Notices {
    /// Fewer receives remain than the limit, which is now disarmed.
    pub limit: bool,
    /// The QP that took this receive has more than its fair share.
    pub unfair: Option<Unfair>,
}

/// Reason why no receive can be taken any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SrqFault {
    /// The SRQ died earlier, because its client corrupted the ring.
    Dead,
    /// The client's producer index is invalid.
    BadIndex(QueueFault),
}

/// Outcome of taking a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeOutcome {
    /// No receive is posted, or earlier waiters need all posted receives.
    Nothing,
    /// A receive, which was copied to the caller's entry.
    Receive,
    /// A malformed entry with this `wr_id`. It counts as taken by this QP.
    Malformed(u64),
}

/// Priority with which a QP takes a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeMode {
    /// Takes any receive: the QP does not wait, so it need not queue.
    AtOnce,
    /// Takes a receive unless earlier waiters need all posted receives.
    InTurn,
    /// Takes a receive for the QP that waits in this place, if [`Srq::ready`] has called it.
    Waited(WaiterPlace),
}

/// Snapshot of an SRQ's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Receives posted and not taken.
    pub posted: u32,
    /// Receives taken since creation.
    pub taken: u64,
    /// Armed limit, or 0.
    pub limit: u32,
    /// QPs that hold a message until a receive is posted.
    pub waiting: u32,
    /// Number of reports of a QP that took more than its fair share.
    pub unfair: u64,
}

impl Srq {
    /// Wraps a formatted queue. Arms `limit`: the first receive that is taken and leaves fewer than
    /// `limit` causes the event. The empty queue at creation does not.
    pub fn new(
        id: SrqId,
        session: SessionId,
        context: u64,
        limit: u32,
        queue: QueueMemory,
    ) -> Self {
        let capacity = queue.shape().capacity;
        Srq {
            id,
            session,
            doorbell: queue.doorbell(),
            capacity,
            context: AtomicU64::new(context),
            qps: AtomicU32::new(0),
            dead: AtomicBool::new(false),
            inner: Mutex::new(Inner {
                consumer: ReceiveConsumer::new(queue),
                taken: 0,
                limit,
                shares: Shares::new(capacity),
                waiters: Waiters::default(),
            }),
        }
    }

    /// Returns the handle, unique among the SRQs of all sessions.
    pub fn id(&self) -> SrqId {
        self.id
    }

    /// Returns the session that created the SRQ.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Returns the doorbell index that the client rings when it has posted receives for a waiting
    /// QP.
    pub fn doorbell(&self) -> u32 {
        self.doorbell
    }

    /// Returns the number of entries, a power of two, fixed at creation.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns true if the client has corrupted the ring.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    /// Marks the SRQ dead. Returns true if it was alive.
    pub fn kill(&self) -> bool {
        !self.dead.swap(true, Relaxed)
    }

    /// Returns the current state, read under one lock.
    pub fn usage(&self) -> Usage {
        let inner = self.inner.lock();
        Usage {
            posted: inner.consumer.posted(),
            taken: inner.taken,
            limit: inner.limit,
            waiting: inner.waiters.len(),
            unfair: inner.shares.reports(),
        }
    }

    /// Takes the next receive for a QP, if the QP may have it. A waiting QP that gets a receive
    /// leaves the queue.
    ///
    /// The cost does not depend on the number of QPs that use the queue, unless some wait.
    pub fn take(
        &self,
        qp: QpId,
        turn: TakeMode,
        now: Time,
        entry: &mut ReceiveEntry,
    ) -> Result<(TakeOutcome, Notices), SrqFault> {
        if self.is_dead() {
            return Err(SrqFault::Dead);
        }
        let mut inner = self.inner.lock();
        let may = match turn {
            TakeMode::AtOnce => true,
            // The oldest receives are reserved for the waiting QPs.
            TakeMode::InTurn if inner.waiters.is_empty() => true,
            TakeMode::InTurn => {
                inner.consumer.peek().map_err(SrqFault::BadIndex)? > inner.waiters.len()
            }
            TakeMode::Waited(place) => inner.waiters.answers(place),
        };
        if !may {
            return Ok((TakeOutcome::Nothing, Notices::default()));
        }
        inner.take(qp, turn, self.qps.load(Relaxed), now, entry)
    }

    /// Takes a receive if one is posted now. Otherwise queues the QP and returns its place (`Err`).
    ///
    /// Requests the doorbell for the QP's worker *before* the last check of the ring, so the client
    /// rings for a receive that this check misses ([`ReceiveProducer::waits`] has the fence
    /// argument). Because of the lock, the workers act as one consumer and see the same receives.
    ///
    /// [`ReceiveProducer::waits`]: rnic_abi::shm::queue::ReceiveProducer::waits
    pub fn take_or_wait(
        &self,
        waiter: Waiter,
        now: Time,
        entry: &mut ReceiveEntry,
    ) -> Result<(Result<TakeOutcome, WaiterPlace>, Notices), SrqFault> {
        if self.is_dead() {
            return Err(SrqFault::Dead);
        }
        let mut inner = self.inner.lock();
        let before = inner.waiters.len();
        let place = inner.waiters.join(waiter);
        inner.consumer.set_waits(waiter.worker);
        match inner.consumer.peek() {
            Ok(posted) if posted <= before => return Ok((Err(place), Notices::default())),
            looked => {
                inner.leave(place);
                looked.map_err(SrqFault::BadIndex)?;
            }
        }
        let qps = self.qps.load(Relaxed);
        let (got, notices) = inner.take(waiter.qp, TakeMode::AtOnce, qps, now, entry)?;
        Ok((Ok(got), notices))
    }

    /// Removes a QP from the queue. Returns the set of workers (bit `n` for worker `n`) with a QP
    /// that may take a receive instead: the client has rung already and will not ring again.
    #[must_use = "the workers in this set must be notified"]
    pub fn leave(&self, place: WaiterPlace) -> u64 {
        let mut inner = self.inner.lock();
        // A QP that left by taking has used its receive, so no other QP moves up.
        if !inner.leave(place) {
            return 0;
        }
        match inner.consumer.peek() {
            Ok(0) => 0,
            // Wake all waiters: the next QP that takes a receive detects the corrupted ring.
            Ok(_) | Err(_) => inner.waiters.workers(),
        }
    }

    /// Passes the QPs of `worker` that may take a receive now, and were not called before, to
    /// `ready`, in the order in which they began to wait. Called after receives were posted or an
    /// earlier place became free. Returns the number of QPs visited, for accounting.
    pub fn ready(&self, worker: u32, ready: impl FnMut(u32)) -> i64 {
        let mut inner = self.inner.lock();
        // If the ring is broken, all QPs must notice it.
        let posted = inner.consumer.peek().unwrap_or(u32::MAX);
        inner.waiters.call(posted, worker, ready).into()
    }

    /// Arms the limit. Returns true if its event is due at once, which disarms it again.
    ///
    /// This call checks the ring. Afterwards only `take` reduces the number of posted receives, and
    /// it checks the limit under the same lock. So posting needs no notification.
    pub fn arm(&self, limit: u32) -> Result<bool, SrqFault> {
        if self.is_dead() {
            return Err(SrqFault::Dead);
        }
        let mut inner = self.inner.lock();
        let posted = inner.consumer.peek().map_err(SrqFault::BadIndex)?;
        let due = posted < limit;
        inner.limit = if due { 0 } else { limit };
        Ok(due)
    }
}

impl std::fmt::Debug for Srq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Srq").field("id", &self.id).field("dead", &self.is_dead()).finish()
    }
}

impl Inner {
    fn take(
        &mut self,
        qp: QpId,
        turn: TakeMode,
        qps: u32,
        now: Time,
        entry: &mut ReceiveEntry,
    ) -> Result<(TakeOutcome, Notices), SrqFault> {
        let got = match self.consumer.take_into(entry) {
            Ok(false) => return Ok((TakeOutcome::Nothing, Notices::default())),
            Ok(true) => TakeOutcome::Receive,
            Err(TakeError::Queue(fault)) => return Err(SrqFault::BadIndex(fault)),
            Err(TakeError::Entry(error)) => TakeOutcome::Malformed(error.wr_id),
        };
        if let TakeMode::Waited(place) = turn {
            self.leave(place);
        }
        self.taken += 1;
        let unfair = if qps > 1 { self.shares.record(qp, qps, now) } else { None };
        // `pending` is never above the true number, so the client's index is loaded only when the
        // limit may be due. The next `take` reports an invalid index.
        let below = self.limit > 0
            && !self.consumer.pending().is_ok_and(|n| n >= self.limit)
            && !self.consumer.peek().is_ok_and(|n| n >= self.limit);
        if below {
            self.limit = 0;
        }
        Ok((got, Notices { limit: below, unfair }))
    }

    /// Returns true if the place was still in the queue.
    fn leave(&mut self, place: WaiterPlace) -> bool {
        let Some((worker, last)) = self.waiters.leave(place) else { return false };
        if last {
            self.consumer.clear_waits(worker);
        }
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
