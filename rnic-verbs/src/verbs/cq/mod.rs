//! Completion queues (`ibv_create_cq(3)`).

pub(crate) mod entry;
pub(crate) mod extended;

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{Arm, Completion, CompletionStatus, Cq, CqOptions, QpId};

use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::{Body, Foreign, Kind, Live, OfContext, live};
use crate::log;
use crate::verbs::adapter::Adapter;
use crate::verbs::async_events::{ObjectEvents, Unacknowledged};
use crate::verbs::channel::ChannelBody;
use crate::verbs::context::ContextBody;
use crate::verbs::device::{Device, VECTORS};
use crate::verbs::registry::{AnyCq, AnyQp};
use crate::verbs::section::Section;

/// A completion queue.
pub(crate) struct CqBody {
    device: Arc<Device>,
    adapter: Arc<Adapter>,
    cq: Cq,
    channel: Option<Arc<ChannelBody>>,
    /// Completion events (`ibv_get_cq_event(3)`).
    pub(crate) completion_events: Unacknowledged,
    pub(crate) events: ObjectEvents<c::ibv_cq>,
    poll: Mutex<PollState>,
    /// Held from `ibv_start_poll(3)` to `ibv_end_poll(3)`: only one thread reads completions.
    pub(crate) polling: Section,
    /// The completion that the program is reading (`ibv_start_poll(3)`).
    current: Mutex<c::ibv_wc>,
}

struct PollState {
    /// Buffer for polled completions.
    batch: [Completion; BATCH],
    /// Completions of other QPs that were in the queue when a queue pair was reset.
    kept: VecDeque<Completion>,
    /// QP of the last completion, which is usually also the QP of the next.
    last: Option<(QpId, Arc<dyn AnyQp>)>,
    /// Number of successive polls without a completion.
    empty_polls: u32,
}

/// Number of empty polls after which the thread yields its CPU or sleeps briefly: the daemon or
/// the peer, which produce the awaited completion, may need this CPU.
const EMPTY_POLLS: u32 = 64;

/// Maximum number of completions polled at once.
const BATCH: usize = 16;

/// Minimum number of entries where a send in flight holds an entry: some programs request 1 and
/// keep both a send and a receive outstanding.
const MIN_ENTRIES: u32 = 16;

impl Body for Arc<CqBody> {
    type Head = c::ibv_cq_ex;
    const KIND: Kind = Kind::Cq;
}

// SAFETY: the head begins with its context.
unsafe impl OfContext for Arc<CqBody> {}

/// Returns the queue of a C pointer.
pub(crate) fn cq(of: *mut c::ibv_cq) -> Result<Live<Arc<CqBody>>, Errno> {
    // Each queue is an `ibv_cq_ex`.
    live(of.cast())
}

impl CqBody {
    /// Creates a queue (`ibv_create_cq(3)`).
    pub(crate) fn create(
        context: &ContextBody,
        entries: u32,
        channel: Option<&Arc<ChannelBody>>,
        vector: u32,
    ) -> Result<Arc<CqBody>, Errno> {
        let device = context.device();
        check_entries(entries)?;
        if vector >= VECTORS {
            return Err(invalid!("comp_vector {vector}: num_comp_vectors is {VECTORS}"));
        }
        let silent;
        let events_to = match channel {
            Some(channel) => channel.client(),
            None => {
                silent = device.silent_channel()?;
                &silent
            }
        };
        let options =
            CqOptions { entries: at_least(device, entries), channel: Some(events_to), context: 0 };
        let cq = device.context.create_cq_with(&options)?;
        let body = Arc::new(CqBody {
            device: device.clone(),
            adapter: context.adapter().clone(),
            cq,
            channel: channel.cloned(),
            completion_events: Unacknowledged::default(),
            events: ObjectEvents::new(context.async_events().clone()),
            polling: Section::new(),
            current: Mutex::default(),
            poll: Mutex::new(PollState {
                batch: [Completion::default(); BATCH],
                kept: VecDeque::new(),
                last: None,
                empty_polls: 0,
            }),
        });
        device.cqs.write().insert(body.cq.id(), body.clone());
        if let Some(channel) = channel {
            channel.count(1);
        }
        Ok(body)
    }

    pub(crate) fn client(&self) -> &Cq {
        &self.cq
    }

    /// Returns the CQ number.
    pub(crate) fn number(&self) -> u32 {
        self.cq.id().0
    }

    /// Polls up to `out.len()` completions (`ibv_poll_cq(3)`). Returns the number of completions
    /// written.
    pub(crate) fn poll(&self, out: &mut [MaybeUninit<c::ibv_wc>]) -> Result<usize, Errno> {
        self.cq.admit_poll()?;
        let mut poll = self.poll.lock();
        let n = self.take(&mut poll, out)?;
        if n > 0 {
            poll.empty_polls = 0;
            return Ok(n);
        }
        poll.empty_polls += 1;
        if poll.empty_polls < EMPTY_POLLS {
            return Ok(0);
        }
        poll.empty_polls = 0;
        drop(poll);
        rnic_client::yield_now();
        // Polls again: a connection may have ended in between, and a program that fetches that
        // event expects to have polled all earlier completions.
        self.take(&mut self.poll.lock(), out)
    }

    fn take(
        &self,
        poll: &mut PollState,
        out: &mut [MaybeUninit<c::ibv_wc>],
    ) -> Result<usize, Errno> {
        let mut n = 0;
        let PollState { batch, kept, last, .. } = poll;
        while n < out.len() {
            let most = BATCH.min(out.len() - n);
            let from_queue = kept.is_empty();
            let taken = match kept.len() {
                0 => match self.cq.poll_admitted(&mut batch[..most]) {
                    Ok(taken) => taken,
                    // Earlier completions go to the program; the next call fails.
                    Err(_) if n > 0 => break,
                    Err(error) => return Err(error.into()),
                },
                left => {
                    let taken = most.min(left);
                    batch.iter_mut().zip(kept.drain(..taken)).for_each(|(to, c)| *to = c);
                    taken
                }
            };
            for completion in &batch[..taken] {
                match self.qp(last, completion.qp) {
                    Some(qp) => {
                        let wc = out[n].write(qp.complete(completion));
                        self.explain(completion, wc);
                        n += 1;
                    }
                    None => self.drop_completion(completion),
                }
            }
            if from_queue && taken < most {
                break;
            }
        }
        Ok(n)
    }

    /// Resets a queue pair with `reset`, and drops its unpolled completions, as adapters do:
    /// requests posted before the reset must no longer complete.
    pub(crate) fn drop_with_reset(
        cqs: [&Arc<CqBody>; 2],
        of: QpId,
        reset: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut cqs = cqs.to_vec();
        cqs.sort_unstable_by_key(|cq| cq.cq.id());
        cqs.dedup_by_key(|cq| cq.cq.id());
        // No thread may poll in between, or it would mistake a completion from before the reset for
        // the completion of a new request.
        let polls: Vec<_> = cqs.iter().map(|cq| (cq, cq.poll.lock())).collect();
        reset()?;
        for (cq, mut poll) in polls {
            let PollState { batch, kept, .. } = &mut *poll;
            while let taken @ 1.. = cq.cq.poll_admitted(batch)? {
                kept.extend(&batch[..taken]);
            }
            let (own, others): (VecDeque<_>, VecDeque<_>) =
                kept.drain(..).partition(|c| c.qp == of);
            own.iter().for_each(|completion| cq.drop_completion(completion));
            *kept = others;
        }
        Ok(())
    }

    /// Logs why a request failed, with the program's `wr_id`.
    fn explain(&self, completion: &Completion, wc: &c::ibv_wc) {
        let named = Completion { wr_id: wc.wr_id, ..*completion };
        let Err(error) = named.ok() else { return };
        if completion.status == CompletionStatus::WrFlush {
            return;
        }
        log::debug(|| match self.device.context.diagnosis(completion.diagnosis_id) {
            Ok(diagnosis) => format!("{error}: {}", diagnosis.text),
            Err(_) => error.to_string(),
        });
    }

    /// Drops a completion. The slot of its SRQ receive must still be freed.
    fn drop_completion(&self, completion: &Completion) {
        if let Some(srq) = completion.srq
            && let Some(srq) = self.device.srqs.read().get(&srq)
        {
            srq.receive_done(completion);
        }
    }

    /// Advances to the next completion and returns it.
    ///
    /// # Errors
    ///
    /// `ENOENT` if the queue is empty.
    pub(crate) fn next_completion(&self) -> Result<c::ibv_wc, Errno> {
        let mut next = [MaybeUninit::new(c::ibv_wc::default())];
        if self.poll(&mut next)? == 0 {
            return Err(Errno::nothing_yet(libc::ENOENT));
        }
        // SAFETY: it has been initialised above.
        let next = unsafe { next[0].assume_init() };
        *self.current.lock() = next;
        Ok(next)
    }

    /// Returns the completion that the program is reading.
    pub(crate) fn current(&self) -> c::ibv_wc {
        *self.current.lock()
    }

    /// Requests an event (`ibv_req_notify_cq(3)`). Without a channel, there are no events.
    pub(crate) fn arm(&self, solicited_only: bool) -> Result<(), Errno> {
        self.adapter.check()?;
        if self.channel.is_none() {
            return Ok(self.cq.admit_arm()?);
        }
        Ok(self.cq.arm(if solicited_only { Arm::Solicited } else { Arm::Next })?)
    }

    /// Resizes the queue (`ibv_resize_cq(3)`).
    pub(crate) fn resize(&self, entries: u32) -> Result<(), Errno> {
        self.adapter.check()?;
        check_entries(entries)?;
        let before = self.cq.capacity();
        self.cq.resize(at_least(&self.device, entries))?;
        // Must follow the daemon's reply: a test of rdma-core posts requests right before the call,
        // and they must complete in the meantime.
        let unpolled = self.poll.lock().kept.len() + self.cq.unpolled();
        if unpolled > entries as usize {
            self.cq.resize(before)?;
            return Err(invalid!("cqe {entries}: {unpolled} completions are not polled"));
        }
        Ok(())
    }

    /// Drops the reference to a QP that is being destroyed.
    pub(crate) fn forget(&self, qp: QpId) {
        let mut poll = self.poll.lock();
        if poll.last.as_ref().is_some_and(|(last, _)| *last == qp) {
            poll.last = None;
        }
    }

    /// Destroys the queue (`ibv_destroy_cq(3)`). Fails with `EBUSY` if a QP uses it.
    pub(crate) fn destroy(&self) -> Result<(), Errno> {
        let uses = |qp: &Arc<dyn AnyQp>| qp.uses_cq(self.cq.id());
        if self.device.qps.read().values().any(uses) {
            return Err(busy!("a queue pair uses the completion queue"));
        }
        self.detach();
        if let Some(channel) = &self.channel {
            channel.drop_events();
        }
        self.completion_events.wait();
        self.events.unacknowledged.wait();
        self.leave_channel();
        Ok(())
    }

    /// Removes the CQ from the count of its channel.
    pub(crate) fn leave_channel(&self) {
        if let Some(channel) = &self.channel {
            channel.count(-1);
        }
    }

    /// Removes the CQ from the device. It is freed when the last thread has released its reference.
    pub(crate) fn detach(&self) {
        self.device.cqs.write().remove(&self.cq.id());
        self.events.take_back();
    }

    fn qp<'a>(
        &self,
        last: &'a mut Option<(QpId, Arc<dyn AnyQp>)>,
        id: QpId,
    ) -> Option<&'a dyn AnyQp> {
        if last.as_ref().is_none_or(|(last, _)| *last != id) {
            *last = self.device.qps.read().get(&id).map(|qp| (id, qp.clone()));
        }
        last.as_ref().map(|(_, qp)| &**qp)
    }
}

impl AnyCq for CqBody {
    fn push_event(&self, kind: c::ibv_event_type) {
        self.events.push(kind);
    }

    fn hand_out_event(&self) -> Foreign<c::ibv_cq> {
        self.completion_events.handed_out();
        self.events.head()
    }
}

/// Returns the number of entries to request.
fn at_least(device: &Device, entries: u32) -> u32 {
    if device.attributes.profile.sends_overrun_cqs {
        return entries;
    }
    entries.max(MIN_ENTRIES.min(device.attributes.max_cq_entries))
}

/// Returns an error for an empty queue. The daemon checks the maximum.
fn check_entries(entries: u32) -> Result<(), Errno> {
    if entries == 0 { Err(invalid!("cqe 0: must be at least 1")) } else { Ok(()) }
}
