//! Completion queues: polling, arming, and waiting with as little cost as the wait is long.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rnic_core::abi::control::{ObjectRef, ReplyBody, RequestBody};
use rnic_core::abi::queue::{ARM_NEXT, ARM_NONE, ARM_SOLICITED, QueueKind};
use rnic_core::shm::lease::Done;
use rnic_core::shm::queue::{CompletionConsumer, CompletionLook};
use rnic_core::shm::wait::{Step, WaitPolicy, Waiter};
use rnic_core::types::{CqId, QpId, Time};

use crate::channel::{ChannelInner, CompletionChannel};
use crate::completion::Completion;
use crate::error::Error;
use crate::events::Subject;
use crate::inbox::deadline;
use crate::lease::PendingLease;
use crate::session::{Session, unexpected};

/// How to make a completion queue.
#[derive(Clone, Copy, Debug)]
pub struct CqOptions<'a> {
    /// Entries wanted, rounded up to a power of two; default 128. A CQ needs room for every request
    /// that can be outstanding on its QPs: send requests hold an entry from the time the daemon
    /// takes them, a receive that completes without room kills the CQ and its QPs.
    pub entries: u32,
    /// Where its completion events go; by default to a channel of its own, for [`Cq::wait`].
    pub channel: Option<&'a CompletionChannel>,
    /// Returned in the CQ's asynchronous events.
    pub context: u64,
}

impl Default for CqOptions<'_> {
    fn default() -> Self {
        CqOptions { entries: 128, channel: None, context: 0 }
    }
}

/// Which completions trigger an event once a CQ is armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// The next one of any kind.
    Next,
    /// The next one that is solicited or not successful.
    Solicited,
}

/// A completion queue (`ibv_create_cq(3)`).
///
/// Any number of threads may poll and wait; each completion goes to one of them. Clones are the
/// same queue; the daemon destroys it when the last clone and the last QP that uses it have been
/// dropped.
#[derive(Clone)]
pub struct Cq {
    pub(crate) inner: Arc<CqInner>,
}

pub(crate) struct CqInner {
    pub(crate) session: Arc<Session>,
    pub(crate) id: CqId,
    /// Changes with the queue's place, under the lock of the state.
    capacity: AtomicU32,
    /// Index to ring when a worker waits for room.
    doorbell: u32,
    pub(crate) channel: Arc<ChannelInner>,
    /// Finds out that there is nothing to lock the state for.
    look: CompletionLook,
    /// Polls since the last completion, to ask now and then whether the daemon is alive. Threads
    /// that count at the same time may count as one: how often is of no account.
    empty_polls: AtomicU32,
    /// An empty ring is not all there is: completions are kept, or leases are awaited of QPs that
    /// are gone. Changes under the lock of the state.
    unsettled: AtomicBool,
    state: Mutex<CqState>,
}

struct CqState {
    consumer: CompletionConsumer,
    /// Threads in `wait`.
    waiters: u32,
    /// The program arms this CQ itself, so somebody else may sleep on its events.
    armed_by_program: bool,
    /// Requests with a lease whose completions are awaited, by the number the daemon knows.
    pending_leases: HashMap<u64, PendingLease>,
    /// Completions that a task found while it waited for another one.
    kept: VecDeque<Completion>,
    /// A `wait` armed the CQ and left without the event: it may come when nobody awaits it.
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

    /// Its handle in the daemon; what [`CompletionChannel::recv`] returns.
    pub fn id(&self) -> CqId {
        self.inner.id
    }

    /// Entries that it has room for, a power of two; at least as many as were asked for.
    pub fn capacity(&self) -> u32 {
        self.inner.capacity.load(Ordering::Relaxed)
    }

    /// Changes how many entries it holds (`ibv_resize_cq(3)`), rounded up to a power of two, while
    /// its QPs go on. No completion is lost or comes twice, and an armed CQ stays armed. Threads
    /// that poll or arm it meanwhile wait for the daemon's answer. If its entries had to move to a
    /// larger place, an empty poll takes the CQ's lock from then on (some 5 ns more).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] for fewer entries than are unread or reserved for requests under way
    /// (field `entries`), and for more than the limits allow (`limits.cq_entries`,
    /// `cq_entries_total` and, for the memory, `arena_bytes`): then the CQ is as it was. After any
    /// other error the session is over.
    pub fn resize(&self, entries: u32) -> Result<(), Error> {
        self.inner.session.check_owner()?;
        let mut state = self.inner.state.lock();
        let stalled = state.consumer.keep_still();
        let resized = self.inner.move_to_size(&mut state, entries);
        drop(state);
        if stalled != 0 {
            self.inner.wake(stalled)?;
        }
        resized
    }

    /// Number of completions that [`poll`](Self::poll) would find.
    pub fn unpolled(&self) -> usize {
        let state = self.inner.state.lock();
        state.consumer.unread() as usize + state.kept.len()
    }

    /// Where its completion events go: the channel it was made with, or one of its own.
    pub fn channel(&self) -> CompletionChannel {
        CompletionChannel { inner: self.inner.channel.clone() }
    }

    /// Takes up to `completions.len()` completions, oldest first, and returns how many
    /// (`ibv_poll_cq(3)`). Costs no system call as a rule: a worker that sleeps for want of room is
    /// woken, and every 65,536th empty poll in a row asks whether the daemon is still there, so
    /// that a program that only polls learns of its end. Once it is known, every empty poll says
    /// so. If the library copies this process's memory for the daemon
    /// ([`Context::attach_memory`](crate::Context::attach_memory)), an empty poll may make one copy
    /// of at most 64 KiB for each worker, and may wait for a page fault in it.
    ///
    /// # Errors
    ///
    /// [`Error::DaemonGone`]: nothing more will complete. [`Error::AfterFork`]: this is a forked
    /// child, which does not have the queue. Requests that failed are no error of this call but
    /// completions, see [`Completion::ok`].
    #[inline]
    pub fn poll(&self, completions: &mut [Completion]) -> Result<usize, Error> {
        self.inner.session.check_owner_in_passing()?;
        match self.inner.is_certainly_empty() {
            true => {
                self.inner.session.help();
                self.inner.found_nothing()
            }
            false => self.inner.poll(completions),
        }
    }

    /// Waits for completions and takes up to `completions.len()` of them; returns 0 only when
    /// `timeout` is over (`None` waits as long as it takes) or there is no place to put any.
    ///
    /// Looks a hundred times in a row, then yields between looks for up to 50 us, then arms the CQ,
    /// looks once more and sleeps. The event is written by the daemon only while nobody looks. On
    /// fewer than four CPUs nobody spins: they would keep the daemon from running.
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

    /// Returns completions one by one, oldest first, waiting for each as [`Cq::wait`] does: an
    /// iterator that ends only after an error.
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

    /// Asks for one event on the CQ's channel when the next completion comes
    /// (`ibv_req_notify_cq(3)`). Completions that are already there trigger nothing: poll after
    /// arming. An armed CQ stays armed until its event has been sent.
    pub fn arm(&self, what: Arm) -> Result<(), Error> {
        self.inner.session.check()?;
        let mut state = self.inner.state.lock();
        state.armed_by_program = true;
        state.consumer.set_spinning(false);
        state.consumer.arm(match what {
            Arm::Next => ARM_NEXT,
            Arm::Solicited => ARM_SOLICITED,
        });
        Ok(())
    }

    /// Changes the context that the CQ's asynchronous events carry.
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
                return self.poll(completions);
            }
            match waiter.step(time(start, now)) {
                Step::Spin => std::hint::spin_loop(),
                Step::Yield => std::thread::yield_now(),
                Step::Sleep => {
                    let seen = watch.prepare_sleep()?;
                    let n = self.poll(completions)?;
                    if n > 0 {
                        watch.left_armed();
                        return Ok(n);
                    }
                    if !self.inner.channel.wait_beyond(self.inner.id, seen, deadline)? {
                        watch.left_armed();
                    }
                    watch.look_again();
                    waiter.progress(time(start, Instant::now()));
                }
            }
            let n = self.poll(completions)?;
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

/// The descriptor of its channel ([`Cq::channel`]), with what is said there.
impl AsFd for Cq {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.channel.as_fd()
    }
}

/// The descriptor of its channel ([`Cq::channel`]), with what is said there.
impl AsRawFd for Cq {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl CqInner {
    /// Returns true if there is nothing to take and nothing else to do for a poll. If false, there
    /// may be nothing all the same.
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
        // Also of those that went to tasks.
        let stalled = state.consumer.release();
        drop(state);
        if stalled != 0 {
            self.wake(stalled)?;
        }
        if n == 0 {
            return self.found_nothing();
        }
        self.empty_polls.store(0, Ordering::Relaxed);
        Ok(n)
    }

    /// Takes all completions that there are. Those of awaited requests go to their tasks; the
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

    /// What an empty poll returns: the end of the daemon if it is known, or if it is time to ask.
    #[inline]
    fn found_nothing(&self) -> Result<usize, Error> {
        self.session.check()?;
        let polls = self.empty_polls.load(Ordering::Relaxed) + 1;
        if polls < EMPTY_POLLS_PER_CHECK {
            self.empty_polls.store(polls, Ordering::Relaxed);
            return Ok(0);
        }
        self.take_pulse()
    }

    #[cold]
    fn take_pulse(&self) -> Result<usize, Error> {
        self.empty_polls.store(0, Ordering::Relaxed);
        self.session.check_thoroughly().map(|()| 0)
    }

    /// Everything that was written has been read: what QPs that are gone have not completed until
    /// now, they never will.
    #[cold]
    fn forget_orphans(&self, state: &mut CqState) {
        self.unsettled.store(false, Ordering::Relaxed);
        state.pending_leases.retain(|_, lease| !lease.is_orphan());
    }

    /// Awaits the completion of a request that has a lease.
    pub(crate) fn await_lease(&self, number: u64, lease: PendingLease) {
        self.state.lock().pending_leases.insert(number, lease);
    }

    /// A QP is gone, and writes no completion any more.
    pub(crate) fn orphan(&self, qp: QpId) {
        let mut state = self.state.lock();
        let any =
            state.pending_leases.values_mut().fold(false, |any, lease| lease.orphan(qp) | any);
        if any {
            self.unsettled.store(true, Ordering::Relaxed);
        }
    }

    /// Asks for another size and follows to the place that the queue has then. The state is locked
    /// all the while: the daemon copies what is unread and the words of arming and spinning as they
    /// stand, and what is written to the old place after the request was sent would be lost.
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
                // Unless it was refused, the queue may be where we cannot reach it, and nobody
                // would say so to who waits for its completions.
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
        // A session that has ended has destroyed it already.
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

    /// Gives a lease back. Returns the completion, with the program's name for the request, unless
    /// a task awaits it.
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

    /// Tells the daemon whether it may skip the event because somebody looks. Only if that is the
    /// one thread that cares: with others asleep on this CQ's events, it may leave with its share
    /// and let them sleep on.
    fn publish_spinning(&mut self) {
        let alone = self.alone();
        self.consumer.set_spinning(alone);
    }

    /// Whether the calling thread, which is in `wait`, is the only one to care for events.
    fn alone(&self) -> bool {
        self.waiters == 1 && !self.armed_by_program
    }
}

/// One thread in `wait`, from the first look to the last.
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

    /// Arms the CQ; the caller looks once more, then sleeps until there were more events than the
    /// number returned. The number is read before arming, so that the event of this arming is
    /// beyond it whoever reads it from the channel; and one that a former wait left behind is read
    /// first, so that unread events do not pile up.
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

    /// The sleep is over without the event it armed for. Takes the arm back unless somebody else
    /// may rely on it; the event may be on its way all the same.
    pub(crate) fn left_armed(&self) {
        let mut state = self.cq.state.lock();
        if state.alone() {
            state.consumer.arm(ARM_NONE);
        }
        state.stray_event = true;
    }

    fn look_again(&self) {
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

/// Empty polls in a row before the daemon's pulse is taken: some milliseconds of polling.
pub(crate) const EMPTY_POLLS_PER_CHECK: u32 = 1 << 16;
