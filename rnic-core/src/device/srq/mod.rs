//! Shared receive queues, the daemon's end.
//!
//! An SRQ serves QPs of several workers, so its consumer sits behind a short lock. Receives are
//! taken in the order in which they were posted, by whichever QP's message begins; a receive that
//! was taken belongs to that QP until it is completed or flushed. What was posted and not taken
//! belongs to nobody: no QP flushes it.
//!
//! Three things are watched here because only this place sees all takings. The *limit*: its event
//! is due once when a taking leaves fewer receives than the limit says. The *shares*: a QP whose
//! peer uses up more than its fair share is named ([`Unfair`]). The *queue of held messages*: QPs
//! that wait for a receive are served in the order in which they began to wait, whichever worker
//! they are on.

mod shares;
mod waiters;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::shm::queue::{QueueFault, QueueMemory, ReceiveConsumer, ReceiveEntry, TakeError};
use crate::types::{QpId, SessionId, SrqId, Time};
use shares::Shares;
pub use shares::Unfair;
use waiters::Waiters;
pub use waiters::{Waiter, WaiterPlace};

/// A shared receive queue, used by the workers whose QPs take receives from it.
pub struct Srq {
    id: SrqId,
    session: SessionId,
    doorbell: u32,
    capacity: u32,
    /// The application's context, returned in events; written by the control thread.
    pub context: AtomicU64,
    /// QPs that use it, counted by the control thread.
    pub qps: AtomicU32,
    dead: AtomicBool,
    inner: Mutex<Inner>,
}

struct Inner {
    consumer: ReceiveConsumer,
    /// Receives taken since it was made.
    taken: u64,
    /// An event is due when fewer are posted; 0 for none.
    limit: u32,
    shares: Shares,
    waiters: Waiters,
}

/// What the owner is to be told after a taking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "the owner waits for these events"]
pub struct Notices {
    /// Fewer receives are posted than the limit says; it is disarmed.
    pub limit: bool,
    /// The QP that took this receive has taken too many.
    pub unfair: Option<Unfair>,
}

/// Why nothing can be taken any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SrqFault {
    /// The SRQ died before of what its client wrote.
    Dead,
    /// The client's producer index is impossible.
    BadIndex(QueueFault),
}

/// What a QP gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeOutcome {
    /// There is no receive, or none for this QP: others that began to wait earlier need what is
    /// there.
    Nothing,
    /// A receive, copied to the caller's entry.
    Receive,
    /// An entry with this name that is no receive. It counts as taken by the QP that meets it.
    Malformed(u64),
}

/// What a QP asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeMode {
    /// A receive at once: the QP does not wait, so it need not queue behind those that do.
    AtOnce,
    /// A receive unless others that began to wait earlier need all there are.
    InTurn,
    /// A receive for which it waits in this place, if [`Srq::ready`] called it.
    Waited(WaiterPlace),
}

/// Figures of an SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Receives posted and not taken.
    pub posted: u32,
    /// Receives taken since it was made.
    pub taken: u64,
    /// Armed limit; 0 if none.
    pub limit: u32,
    /// QPs that hold a message for want of a receive.
    pub waiting: u32,
    /// How often a QP was found to take more than its fair share.
    pub unfair: u64,
}

impl Srq {
    /// Wraps a formatted queue. `limit` is armed for the first taking that leaves fewer receives:
    /// that nothing is posted yet is no news to who makes it.
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

    /// Handle of the SRQ, which no other SRQ of any session has.
    pub fn id(&self) -> SrqId {
        self.id
    }

    /// Session that made the SRQ.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// The doorbell index its client rings when it has posted receives somebody waits for.
    pub fn doorbell(&self) -> u32 {
        self.doorbell
    }

    /// Entries that the ring has, a power of two, fixed when the SRQ is made.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Whether it was scribbled over.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    /// Marks it dead; whether this call was the first to.
    pub fn kill(&self) -> bool {
        !self.dead.swap(true, Relaxed)
    }

    /// Figures of this moment, read together.
    pub fn usage(&self) -> Usage {
        let inner = self.inner.lock();
        Usage {
            posted: inner.consumer.posted(),
            taken: inner.taken,
            limit: inner.limit,
            waiting: inner.waiters.len(),
            unfair: inner.shares.named(),
        }
    }

    /// Takes the next receive for a QP, if there is one for it. A QP that waited and gets
    /// one has left its place.
    ///
    /// Costs the same however many QPs use the queue, unless some wait.
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
            // Those who wait were promised the oldest receives.
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

    /// Takes a receive that has come by now, or else lets the QP wait for one, in a place (`Err`).
    ///
    /// The client is asked to ring the QP's worker *before* the last look at the ring, so a receive
    /// that this look misses will be rung for (the fence argument stands at
    /// [`ReceiveProducer::waits`](crate::shm::queue::ReceiveProducer::waits)). Behind the lock the
    /// workers are one consumer: what one of them finds or misses the others do too.
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

    /// A QP waits no longer. The result is the set of workers (by bit) with a QP that may take a
    /// receive in its place: the client has rung already and will not ring for this.
    #[must_use = "the workers in this set wait to be told"]
    pub fn leave(&self, place: WaiterPlace) -> u64 {
        let mut inner = self.inner.lock();
        // Who left by taking a receive has taken what was meant for it: nobody moves up.
        if !inner.leave(place) {
            return 0;
        }
        match inner.consumer.peek() {
            Ok(0) => 0,
            // A broken ring is met by whoever takes next.
            Ok(_) | Err(_) => inner.waiters.workers(),
        }
    }

    /// Receives were posted, or a place in front has become free: passes on the QPs of `worker`
    /// that may take one now and do not know yet, in the order in which they began to wait. The
    /// result is the number of QPs looked at, for whoever is to pay for that.
    pub fn ready(&self, worker: u32, ready: impl FnMut(u32)) -> i64 {
        let mut inner = self.inner.lock();
        // With a broken ring all of them are to find out.
        let posted = inner.consumer.peek().unwrap_or(u32::MAX);
        inner.waiters.call(posted, worker, ready).into()
    }

    /// Arms the limit; whether its event is due at once, which disarms it again.
    ///
    /// This looks at the ring itself, and from then on only takings make the number of receives
    /// smaller, which see the limit under the same lock. So nobody has to be told of postings.
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
        // The known number is never above the true one, so the client's index is loaded only when
        // the limit may be due; a broken one is met by the next taking.
        let below = self.limit > 0
            && !self.consumer.pending().is_ok_and(|n| n >= self.limit)
            && !self.consumer.peek().is_ok_and(|n| n >= self.limit);
        if below {
            self.limit = 0;
        }
        Ok((got, Notices { limit: below, unfair }))
    }

    /// Whether somebody stood in this place.
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
