//! Completion queues: polling, arming and waiting.
//!
//! [`Cq::wait`] spins, yields, then sleeps, so that a short wait costs no system call.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rnic_abi::abi::control::{LibraryCall, ObjectRef, ReplyBody, RequestBody};
use rnic_abi::abi::queue::{ARM_NEXT, ARM_NONE, ARM_SOLICITED, QueueKind};
use rnic_abi::shm::lease::Done;
use rnic_abi::shm::queue::{CompletionCheck, CompletionConsumer};
use rnic_abi::shm::wait::{Step, WaitPolicy, Waiter};
use rnic_abi::types::{CqId, QpId, Time};

use crate::channel::{ChannelInner, CompletionChannel};
use crate::completion::Completion;
use crate::error::Error;
use crate::events::Subject;
use crate::inbox::deadline;
use crate::lease::PendingLease;
use crate::session::{Session, unexpected};

/// Options for creating a completion queue.
#[derive(Clone, Copy, Debug)]
pub struct CqOptions<'a> {
    /// Minimum number of entries, rounded up to a power of two; default 128. A CQ needs room for
    /// every request that may be outstanding on its QPs. A send request reserves its entry when the
    /// daemon takes it from the send queue. A receive that completes while the CQ is full puts the
    /// CQ and its QPs into error.
    pub entries: u32,
    /// Channel for its completion events; by default a new channel, for [`Cq::wait`].
    pub channel: Option<&'a CompletionChannel>,
    /// Returned in the CQ's asynchronous events.
    pub context: u64,
}

impl Default for CqOptions<'_> {
    fn default() -> Self {
        CqOptions { entries: 128, channel: None, context: 0 }
    }
}

/// Completion that triggers the event of an armed CQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// The next completion.
    Next,
    /// The next completion that is solicited or unsuccessful.
    Solicited,
}

/// A completion queue (`ibv_create_cq(3)`).
///
/// Any number of threads may poll and wait; each completion goes to one of them. Clones refer to
/// the same queue. The daemon destroys it when the last clone and the last QP that uses it have
/// been dropped.
#[derive(Clone)]
pub struct Cq {
    pub(crate) inner: Arc<CqInner>,
}

pub(crate) struct CqInner {
    pub(crate) session: Arc<Session>,
    pub(crate) id: CqId,
    /// Changes when the queue moves, under the lock of `state`.
    capacity: AtomicU32,
    /// Doorbell index for workers that wait for room.
    doorbell: u32,
    pub(crate) channel: Arc<ChannelInner>,
    /// Lock-free check for an empty ring.
    look: CompletionCheck,
    /// Empty polls since the last completion or the last check of the daemon. Concurrent increments
    /// may be lost, because the count need not be exact.
    empty_polls: AtomicU32,
    /// Set if a poll must do more than read the ring: completions are kept, or leases of destroyed
    /// QPs are pending. Changes under the lock of `state`.
    unsettled: AtomicBool,
    state: Mutex<CqState>,
}

struct CqState {
    consumer: CompletionConsumer,
    /// Number of threads in `wait`.
    waiters: u32,
    /// The program arms this CQ itself, so other threads may sleep on its events.
    armed_by_program: bool,
    /// Pending requests with a lease, by the `wr_id` that the daemon sees.
    pending_leases: HashMap<u64, PendingLease>,
    /// Completions that a task took from the ring while it waited for a different one.
    kept: VecDeque<Completion>,
    /// A `wait` armed the CQ and returned without the event, which may arrive with no thread
    /// waiting for it.
    stray_event: bool,
}

impl Cq {
    pub(crate) fn create(session: &Arc<Session>, options: &CqOptions<'_>) -> Result<Cq, Error> {
        let channel = match options.channel {
            Some(channel) if Arc::ptr_eq(&channel.inner.session, session) => channel.inner.clone(),
            Some(_) => return Err(Error::ForeignObject { what: "the completion channel" }),
            None => CompletionChannel::create(session)?.inner,
        };
        let reply = session.request(RequestBody::CreateCq {
            entries: options.entries,
            channel: Some(channel.id),
            context: options.context,
        })?;
        let ReplyBody::Cq { cq: id, queue, .. } = reply else { return Err(unexpected(&reply)) };
        let memory = session.queue(queue, QueueKind::Completion)?;
        session.events.with(|events| events.open(Subject::Cq(id)));
        channel.attach(id);
        let state = CqState {
            waiters: 0,
            armed_by_program: false,
            stray_event: false,
            pending_leases: HashMap::new(),
            kept: VecDeque::new(),
            consumer: CompletionConsumer::new(memory.clone()),
        };
        let inner = CqInner {
            session: session.clone(),
            id,
            capacity: AtomicU32::new(queue.shape.capacity),
            doorbell: memory.doorbell(),
            channel,
            look: state.consumer.look(),
            empty_polls: AtomicU32::new(0),
            unsettled: AtomicBool::new(false),
            state: Mutex::new(state),
        };
        Ok(Cq { inner: Arc::new(inner) })
    }

    /// Returns the CQ's handle in the daemon, which [`CompletionChannel::recv`] returns.
    pub fn id(&self) -> CqId {
        self.inner.id
    }

    /// Returns the number of entries, a power of two; at least the requested number.
    pub fn capacity(&self) -> u32 {
        self.inner.capacity.load(Ordering::Relaxed)
    }

    /// Changes the number of entries (`ibv_resize_cq(3)`), rounded up to a power of two, while its
    /// QPs continue. No completion is lost or duplicated, and an armed CQ stays armed. Threads that
    /// poll or arm it wait until the daemon has replied. If the ring moves, every later empty poll
    /// takes the CQ's lock (about 5 ns).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if `entries` is less than the number of entries that are unread or
    /// reserved for outstanding requests (field `entries`), or more than the limits allow
    /// (`limits.cq_entries`, `cq_entries_total` and, for the memory, `arena_bytes`). The CQ is then
    /// unchanged. Any other error except [`Error::AfterFork`] ends the session.
    pub fn resize(&self, entries: u32) -> Result<(), Error> {
        self.inner.session.check_owner()?;
        let mut state = self.inner.state.lock();
        let stalled = state.consumer.prepare_move();
        let resized = self.inner.move_to_size(&mut state, entries);
        drop(state);
        if stalled != 0 {
            self.inner.wake(stalled)?;
        }
        resized
    }

    /// Returns the number of completions that [`poll`](Self::poll) would find.
    pub fn unpolled(&self) -> usize {
        let state = self.inner.state.lock();
        state.consumer.unread() as usize + state.kept.len()
    }

    /// Returns the channel for the CQ's completion events.
    pub fn channel(&self) -> CompletionChannel {
        CompletionChannel { inner: self.inner.channel.clone() }
    }

    /// Takes up to `completions.len()` completions, oldest first, and returns their number
    /// (`ibv_poll_cq(3)`). Usually makes no system call. There are two exceptions: it wakes a
    /// worker that sleeps because the CQ was full, and every 65,536th consecutive empty poll checks
    /// that the daemon still exists, so that a program that only polls detects the daemon's exit.
    /// Every empty poll fails after the exit has been detected. If the library copies this
    /// process's memory for the daemon
    /// ([`Pd::reg_program_memory`](crate::Pd::reg_program_memory)), an empty poll may copy at most
    /// 64 KiB per worker, and may wait for a page fault.
    ///
    /// # Errors
    ///
    /// [`Error::DaemonGone`] if the session has ended: no more requests complete.
    /// [`Error::AfterFork`] in a forked child, in which the queue is not mapped. A failed request
    /// is not an error of this call but a completion, see [`Completion::ok`].
    /// [`Error::Refused`] if a fault rule fails the call. It takes no completions then.
    #[inline]
    pub fn poll(&self, completions: &mut [Completion]) -> Result<usize, Error> {
        self.admit_poll()?;
        self.poll_admitted(completions)
    }

    /// Evaluates the fault rules of [`poll`](Self::poll), for a call that polls several times by
    /// [`poll_admitted`](Self::poll_admitted).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a rule fails the call.
    #[inline]
    pub fn admit_poll(&self) -> Result<(), Error> {
        let call = LibraryCall::PollCq { cq: self.inner.id };
        self.inner.session.admit_of_owner(call).map(drop)
    }

    /// Same as [`poll`](Self::poll) without fault rules.
    #[inline]
    pub fn poll_admitted(&self, completions: &mut [Completion]) -> Result<usize, Error> {
        self.inner.session.check_owner_in_passing()?;
        if self.inner.is_certainly_empty() {
            self.inner.session.try_copy();
            self.inner.on_empty_poll()
        } else {
            self.inner.poll(completions)
        }
    }

    /// Waits for completions and takes up to `completions.len()` of them. Returns 0 only after
    /// `timeout` (`None`: no timeout) or if `completions` is empty.
    ///
    /// Polls a hundred times in a row, then yields between polls for up to 50 us, then arms the CQ,
    /// polls once more and sleeps. The daemon skips the event while this thread polls. With fewer
    /// than four CPUs it does not spin, because spinning would keep the daemon from running.
    pub fn wait(
        &self,
        completions: &mut [Completion],
        timeout: Option<Duration>,
    ) -> Result<usize, Error> {
        if completions.is_empty() {
            return Ok(0);
        }
        let n = self.poll(completions)?;
        if n > 0 || timeout == Some(Duration::ZERO) {
            return Ok(n);
        }
        let watch = Watch::begin(&self.inner);
        self.wait_watching(&watch, completions, deadline(timeout))
    }

    /// Returns an iterator over completions, oldest first, that waits for each one as [`Cq::wait`]
    /// does. It ends only after an error.
    ///
    /// ```no_run
    /// # use rnic_client::*;
    /// # fn serve(cq: &Cq) -> Result<(), Error> {
    /// for completion in cq.completions_iter() {
    ///     println!("{:?}", completion?.ok()?);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn completions_iter(&self) -> impl Iterator<Item = Result<Completion, Error>> + '_ {
        let mut has_failed = false;
        std::iter::from_fn(move || {
            if has_failed {
                return None;
            }
            let mut one = [Completion::default()];
            let next = self.wait(&mut one, None).map(|_| one[0]);
            has_failed = next.is_err();
            Some(next)
        })
    }

    /// Requests one event on the CQ's channel for the next completion (`ibv_req_notify_cq(3)`).
    /// Completions already in the queue cause no event, so poll after arming. An armed CQ stays
    /// armed until its event is sent.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a fault rule fails the call.
    pub fn arm(&self, what: Arm) -> Result<(), Error> {
        self.inner.session.check()?;
        self.admit_arm()?;
        let mut state = self.inner.state.lock();
        state.armed_by_program = true;
        state.consumer.set_spinning(false);
        state.consumer.arm(match what {
            Arm::Next => ARM_NEXT,
            Arm::Solicited => ARM_SOLICITED,
        });
        Ok(())
    }

    /// Evaluates the fault rules of [`arm`](Self::arm) without arming the CQ.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a rule fails the call.
    pub fn admit_arm(&self) -> Result<(), Error> {
        let call = LibraryCall::ReqNotifyCq { cq: self.inner.id };
        self.inner.session.admit_of_owner(call).map(drop)
    }

    /// Sets the context that the CQ's asynchronous events carry.
    pub fn set_context(&self, context: u64) -> Result<(), Error> {
        let object = ObjectRef::Cq(self.inner.id);
        self.inner.session.command(RequestBody::SetContext { object, context })
    }

    fn wait_watching(
        &self,
        watch: &Watch<'_>,
        completions: &mut [Completion],
        deadline: Option<Instant>,
    ) -> Result<usize, Error> {
        let start = Instant::now();
        let mut waiter = Waiter::new(watch.cpus, WaitPolicy::default());
        loop {
            let now = Instant::now();
            if deadline.is_some_and(|d| now >= d) {
                return self.poll_admitted(completions);
            }
            match waiter.step(time(start, now)) {
                Step::Spin => std::hint::spin_loop(),
                Step::Yield => std::thread::yield_now(),
                Step::Sleep => {
                    let seen = watch.prepare_sleep()?;
                    let n = self.poll_admitted(completions)?;
                    if n > 0 {
                        watch.disarm();
                        return Ok(n);
                    }
                    if !self.inner.channel.wait_beyond(self.inner.id, seen, deadline)? {
                        watch.disarm();
                    }
                    watch.resume_spinning();
                    waiter.progress(time(start, Instant::now()));
                }
            }
            let n = self.poll_admitted(completions)?;
            if n > 0 {
                return Ok(n);
            }
        }
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq")
            .field("id", &self.id())
            .field("capacity", &self.capacity())
            .field("channel", &self.inner.channel.id)
            .finish_non_exhaustive()
    }
}

/// Same as the descriptor of its channel ([`Cq::channel`]).
impl AsFd for Cq {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.channel.as_fd()
    }
}

/// Same as the descriptor of its channel ([`Cq::channel`]).
impl AsRawFd for Cq {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl CqInner {
    /// Returns true if a poll has nothing to take and nothing else to do. False does not imply that
    /// there is a completion.
    #[inline]
    fn is_certainly_empty(&self) -> bool {
        !self.unsettled.load(Ordering::Relaxed) && self.look.is_empty()
    }

    fn poll(&self, completions: &mut [Completion]) -> Result<usize, Error> {
        let mut state = self.state.lock();
        let n = state.take(completions)?;
        if n < completions.len() && self.unsettled.load(Ordering::Relaxed) {
            self.forget_orphans(&mut state);
        }
        // Includes the entries of completions that went to tasks.
        let stalled = state.consumer.release();
        drop(state);
        if stalled != 0 {
            self.wake(stalled)?;
        }
        if n == 0 {
            return self.on_empty_poll();
        }
        self.empty_polls.store(0, Ordering::Relaxed);
        Ok(n)
    }

    /// Takes all completions from the ring. Completions of awaited requests go to their tasks; the
    /// others are kept for the next poll.
    #[cfg(feature = "tokio")]
    pub(crate) fn deliver(&self) -> Result<(), Error> {
        self.session.check_owner()?;
        let mut state = self.state.lock();
        while let Some(completion) = state.next()? {
            state.kept.push_back(completion);
        }
        if self.unsettled.load(Ordering::Relaxed) {
            self.forget_orphans(&mut state);
        }
        if !state.kept.is_empty() {
            self.unsettled.store(true, Ordering::Relaxed);
        }
        let stalled = state.consumer.release();
        drop(state);
        if stalled != 0 {
            self.wake(stalled)?;
        }
        Ok(())
    }

    /// Returns 0, or an error if the daemon is known to be gone. After [`EMPTY_POLLS_PER_CHECK`]
    /// empty polls, asks the kernel whether the daemon has closed its socket.
    #[inline]
    fn on_empty_poll(&self) -> Result<usize, Error> {
        self.session.check()?;
        let polls = self.empty_polls.load(Ordering::Relaxed) + 1;
        if polls < EMPTY_POLLS_PER_CHECK {
            self.empty_polls.store(polls, Ordering::Relaxed);
            return Ok(0);
        }
        self.check_daemon()
    }

    #[cold]
    fn check_daemon(&self) -> Result<usize, Error> {
        self.empty_polls.store(0, Ordering::Relaxed);
        self.session.check_thoroughly().map(|()| 0)
    }

    /// Drops the pending leases of destroyed QPs. The caller must have emptied the ring, which may
    /// hold their completions.
    #[cold]
    fn forget_orphans(&self, state: &mut CqState) {
        self.unsettled.store(false, Ordering::Relaxed);
        state.pending_leases.retain(|_, lease| !lease.is_orphan());
    }

    /// Registers a pending request with a lease.
    pub(crate) fn await_lease(&self, number: u64, lease: PendingLease) {
        self.state.lock().pending_leases.insert(number, lease);
    }

    /// Marks the leases of a QP that is destroyed or reset and writes no more completions.
    pub(crate) fn orphan(&self, qp: QpId) {
        let mut state = self.state.lock();
        let any =
            state.pending_leases.values_mut().fold(false, |any, lease| lease.orphan(qp) | any);
        if any {
            self.unsettled.store(true, Ordering::Relaxed);
        }
    }

    /// Requests another size and attaches to the queue's new memory. The state must stay locked
    /// until then: the daemon copies the unread entries and the arm and spin words, and would miss
    /// later writes to the old memory.
    fn move_to_size(&self, state: &mut CqState, entries: u32) -> Result<(), Error> {
        let session = &self.session;
        let place = session.request(RequestBody::ResizeCq { cq: self.id, entries });
        let place = place.and_then(|reply| match reply {
            ReplyBody::Cq { queue, .. } => session.queue(queue, QueueKind::Completion),
            other => Err(unexpected(&other)),
        });
        match place {
            Ok(memory) => {
                self.capacity.store(memory.shape().capacity, Ordering::Relaxed);
                state.consumer.follow(memory);
                Ok(())
            }
            Err(error) => {
                // Unless it refused the request, the daemon may have moved the queue to memory that
                // this process has not mapped, and waiting threads would never see a completion.
                if matches!(error, Error::Refused { .. }) {
                    state.consumer.stay();
                } else {
                    session.give_up();
                }
                Err(error)
            }
        }
    }

    /// Rings the workers that wait for room in this CQ.
    #[cold]
    fn wake(&self, workers: u64) -> Result<(), Error> {
        (0..u64::BITS)
            .filter(|worker| workers & 1 << worker != 0)
            .try_for_each(|worker| self.session.ring(worker, self.doorbell))
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        // If the session has ended, the CQ is destroyed already.
        let _ = self.session.command(RequestBody::DestroyCq { cq: self.id });
        self.session.events.with(|events| events.close(Subject::Cq(self.id)));
        self.channel.detach(self.id);
    }
}

impl CqState {
    fn take(&mut self, completions: &mut [Completion]) -> Result<usize, Error> {
        let mut n = 0;
        while n < completions.len() {
            let kept = self.kept.pop_front();
            let Some(completion) = kept.map_or_else(|| self.next(), |kept| Ok(Some(kept)))? else {
                break;
            };
            completions[n] = completion;
            n += 1;
        }
        Ok(n)
    }

    /// Returns the next completion of the ring that no task awaits.
    #[inline]
    fn next(&mut self) -> Result<Option<Completion>, Error> {
        while let Some((entry, done)) = self.consumer.poll_loan() {
            let completion = Completion::from_entry(&entry)?;
            let Some(done) = done else { return Ok(Some(completion)) };
            if let Some(completion) = self.give_back(done, completion) {
                return Ok(Some(completion));
            }
        }
        Ok(None)
    }

    /// Returns a lease to its [`Posted`](crate::Posted). Returns the completion, with the program's
    /// `wr_id`, unless a task awaits it.
    #[cold]
    fn give_back(&mut self, done: Done, mut completion: Completion) -> Option<Completion> {
        let Some(lease) = self.pending_leases.remove(&done.wr_id()) else {
            return Some(completion);
        };
        completion.wr_id = lease.wr_id;
        let is_awaited = lease.is_awaited;
        lease.complete(done, completion);
        (!is_awaited).then_some(completion)
    }

    /// Permits the daemon to skip the event while this thread polls, unless another thread needs
    /// the event: this thread may take some completions and return while the others still sleep.
    fn publish_spinning(&mut self) {
        let alone = self.alone();
        self.consumer.set_spinning(alone);
    }

    /// Returns true if the calling thread, which is in `wait`, is the only user of events.
    fn alone(&self) -> bool {
        self.waiters == 1 && !self.armed_by_program
    }
}

/// A thread in `wait`, from its first poll to its last.
pub(crate) struct Watch<'a> {
    cq: &'a CqInner,
    cpus: usize,
}

impl<'a> Watch<'a> {
    pub(crate) fn begin(cq: &'a CqInner) -> Self {
        let mut state = cq.state.lock();
        state.waiters += 1;
        state.publish_spinning();
        Watch { cq, cpus: cq.session.cpus() }
    }

    /// Arms the CQ. The caller then polls once more and sleeps until the event count exceeds the
    /// returned number. The count is read before arming, so it excludes the event of this arming,
    /// whichever thread reads that event. First reads an event that an earlier `wait` left unread,
    /// so that events do not accumulate.
    pub(crate) fn prepare_sleep(&self) -> Result<u64, Error> {
        self.cq.session.check_owner()?;
        let stray = std::mem::take(&mut self.cq.state.lock().stray_event);
        if stray {
            self.cq.channel.drain()?;
        }
        let seen = self.cq.channel.count(self.cq.id);
        let mut state = self.cq.state.lock();
        // The daemon skips events while this is set: clear it before arming, not after.
        state.consumer.set_spinning(false);
        state.consumer.arm(ARM_NEXT);
        Ok(seen)
    }

    /// Disarms the CQ after a sleep that ended without its event, unless another thread may need
    /// the event. The event may still arrive.
    pub(crate) fn disarm(&self) {
        let mut state = self.cq.state.lock();
        if state.alone() {
            state.consumer.arm(ARM_NONE);
        }
        state.stray_event = true;
    }

    fn resume_spinning(&self) {
        self.cq.state.lock().publish_spinning();
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let mut state = self.cq.state.lock();
        state.waiters -= 1;
        state.consumer.set_spinning(false);
    }
}

fn time(origin: Instant, now: Instant) -> Time {
    Time(0).after(now.duration_since(origin))
}

/// Consecutive empty polls before the next check of the daemon: a few milliseconds of polling.
pub(crate) const EMPTY_POLLS_PER_CHECK: u32 = 1 << 16;
