//! Completion queues, and completions in the words of C.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rnic_client::{Arm, Completion, CompletionOpcode, CompletionStatus, Cq, CqOptions, Grh, QpId};

use crate::async_events::{AsyncEvent, AsyncEvents, Unacknowledged};
use crate::c;
use crate::channel::ChannelBody;
use crate::context::ContextBody;
use crate::device::Device;
use crate::errno::Errno;
use crate::log;
use crate::object::{Body, Foreign, Kind};
use crate::qp::QpBody;
use crate::section::Section;

/// A completion queue.
pub(crate) struct CqBody {
    device: Arc<Device>,
    cq: Cq,
    /// What the program knows it by.
    head: OnceLock<Foreign<c::ibv_cq>>,
    channel: Option<Arc<ChannelBody>>,
    context_events: Arc<AsyncEvents>,
    /// Of the channel.
    pub(crate) completion_events: Unacknowledged,
    pub(crate) async_events: Unacknowledged,
    poll: Mutex<PollState>,
    /// From `ibv_start_poll(3)` to `ibv_end_poll(3)`, completions are one thread's.
    pub(crate) polling: Section,
    /// The completion that is being looked at.
    looked_at: Mutex<c::ibv_wc>,
}

struct PollState {
    /// Completions on their way to the program.
    batch: [Completion; BATCH],
    /// Completions that were there when a queue pair was reset, and are not of it.
    kept: VecDeque<Completion>,
    /// The QP of the last completion: the next one is its as a rule.
    last: Option<Arc<QpBody>>,
    /// How often in a row nothing was there.
    in_vain: u32,
}

/// After so many looks in vain others may have the processor: the daemon and the peer, who make
/// the completion that is waited for, may have none of their own.
const PATIENCE: u32 = 64;

/// Completions that are taken from the queue at once.
const BATCH: usize = 16;

/// Entries of the smallest queue. Programs ask for one and have a send and a receive outstanding.
const FEWEST_ENTRIES: u32 = 16;

impl Body for Arc<CqBody> {
    type Head = c::ibv_cq_ex;
    const KIND: Kind = Kind::Cq;
}

impl CqBody {
    /// Makes a queue (`ibv_create_cq(3)`).
    pub(crate) fn create(
        context: &ContextBody,
        entries: u32,
        channel: Option<&Arc<ChannelBody>>,
        vector: u32,
    ) -> Result<Arc<CqBody>, Errno> {
        let device = context.device();
        check_entries(entries, device)?;
        if vector >= VECTORS {
            let reason = format_args!("comp_vector {vector}: num_comp_vectors is {VECTORS}");
            return Err(Errno::invalid(reason));
        }
        let silent;
        let events_to = match channel {
            Some(channel) => channel.client(),
            None => {
                silent = device.silent_channel()?;
                &silent
            }
        };
        let options = CqOptions {
            entries: entries.max(FEWEST_ENTRIES),
            channel: Some(events_to),
            context: 0,
        };
        let cq = device.context.create_cq_with(&options)?;
        let body = Arc::new(CqBody {
            device: device.clone(),
            cq,
            head: OnceLock::new(),
            channel: channel.cloned(),
            context_events: context.async_events().clone(),
            completion_events: Unacknowledged::default(),
            async_events: Unacknowledged::default(),
            polling: Section::new(),
            looked_at: Mutex::default(),
            poll: Mutex::new(PollState {
                batch: [Completion::default(); BATCH],
                kept: VecDeque::new(),
                last: None,
                in_vain: 0,
            }),
        });
        device.cqs.write().insert(body.cq.id(), body.clone());
        if let Some(channel) = channel {
            channel.count(1);
        }
        Ok(body)
    }

    /// Says where the program finds it.
    pub(crate) fn published(&self, head: Foreign<c::ibv_cq>) {
        let _ = self.head.set(head);
    }

    /// What the program knows it by.
    pub(crate) fn head(&self) -> Foreign<c::ibv_cq> {
        self.head.get().copied().unwrap_or(Foreign::NULL)
    }

    pub(crate) fn client(&self) -> &Cq {
        &self.cq
    }

    pub(crate) fn context_events(&self) -> &Arc<AsyncEvents> {
        &self.context_events
    }

    /// Its number, and how many entries it has.
    pub(crate) fn size(&self) -> (u32, i32) {
        (self.cq.id().0, i32::try_from(self.cq.capacity()).unwrap_or(i32::MAX))
    }

    /// Takes up to `out.len()` completions (`ibv_poll_cq(3)`).
    pub(crate) fn poll(&self, out: &mut [c::ibv_wc]) -> Result<usize, Errno> {
        let mut poll = self.poll.lock();
        let n = self.take(&mut poll, out)?;
        if n > 0 {
            poll.in_vain = 0;
            return Ok(n);
        }
        poll.in_vain += 1;
        if poll.in_vain < PATIENCE {
            return Ok(0);
        }
        poll.in_vain = 0;
        drop(poll);
        std::thread::yield_now();
        // Much may have happened meanwhile, the end of a connection too: whoever hears of that
        // next expects to have seen what came before it.
        self.take(&mut self.poll.lock(), out)
    }

    fn take(&self, poll: &mut PollState, out: &mut [c::ibv_wc]) -> Result<usize, Errno> {
        let mut n = 0;
        let PollState { batch, kept, last, .. } = poll;
        while n < out.len() {
            let most = BATCH.min(out.len() - n);
            let from_queue = kept.is_empty();
            let taken = match kept.len() {
                0 => match self.cq.poll(&mut batch[..most]) {
                    Ok(taken) => taken,
                    // Those before it are the program's; the next call fails.
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
                        qp.await_established(completion);
                        out[n] = in_c(completion, qp);
                        self.explain(completion, &out[n]);
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

    /// Resets a queue pair by `reset`, and with it drops its completions that nobody has polled, as
    /// adapters do: of what was posted before, nothing is heard any more.
    pub(crate) fn drop_with_reset(
        cqs: [&Arc<CqBody>; 2],
        of: QpId,
        reset: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut cqs = cqs.to_vec();
        cqs.sort_unstable_by_key(|cq| cq.cq.id());
        cqs.dedup_by_key(|cq| cq.cq.id());
        // Nobody polls meanwhile, so that nobody gets one of before and takes it for a new one's.
        let polls: Vec<_> = cqs.iter().map(|cq| (cq, cq.poll.lock())).collect();
        reset()?;
        for (cq, mut poll) in polls {
            let PollState { batch, kept, .. } = &mut *poll;
            while let taken @ 1.. = cq.cq.poll(batch)? {
                kept.extend(&batch[..taken]);
            }
            let (own, others): (VecDeque<_>, VecDeque<_>) =
                kept.drain(..).partition(|c| c.qp == of);
            own.iter().for_each(|completion| cq.drop_completion(completion));
            *kept = others;
        }
        Ok(())
    }

    /// Says why a request failed, if somebody wants to read that, with the number that the program
    /// gave it.
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

    /// Nobody gets to see a completion; the receive that it is of is free again all the same.
    fn drop_completion(&self, completion: &Completion) {
        if let Some(srq) = completion.srq
            && let Some(srq) = self.device.srqs.read().get(&srq)
        {
            srq.receive_done(completion);
        }
    }

    /// The next completion, which is looked at from now on.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is none.
    pub(crate) fn look_at_next(&self) -> Result<c::ibv_wc, Errno> {
        let mut next = [c::ibv_wc::default()];
        match self.poll(&mut next)? {
            0 => Err(Errno::nothing_yet(libc::ENOENT)),
            _ => {
                *self.looked_at.lock() = next[0];
                Ok(next[0])
            }
        }
    }

    /// The completion that is being looked at.
    pub(crate) fn looked_at(&self) -> c::ibv_wc {
        *self.looked_at.lock()
    }

    /// Asks for an event (`ibv_req_notify_cq(3)`). Without a channel there is nowhere for it to go.
    pub(crate) fn arm(&self, solicited_only: bool) -> Result<(), Errno> {
        if self.channel.is_none() {
            return Ok(());
        }
        Ok(self.cq.arm(if solicited_only { Arm::Solicited } else { Arm::Next })?)
    }

    /// Changes its size (`ibv_resize_cq(3)`).
    pub(crate) fn resize(&self, entries: u32) -> Result<i32, Errno> {
        check_entries(entries, &self.device)?;
        let before = self.cq.capacity();
        self.cq.resize(entries.max(FEWEST_ENTRIES))?;
        // Counted after the daemon has answered: rdma-core's own test, which has just posted, gives
        // its requests no more time than that.
        let unpolled = self.poll.lock().kept.len() + self.cq.unpolled();
        if unpolled > entries as usize {
            self.cq.resize(before)?;
            let reason = format_args!("cqe {entries}: {unpolled} completions are not polled");
            return Err(Errno::invalid(reason));
        }
        Ok(self.size().1)
    }

    /// Queues an asynchronous event about it.
    pub(crate) fn tell(&self, kind: c::ibv_event_type) {
        self.context_events.push(AsyncEvent::of(self.head(), kind));
    }

    /// Forgets a QP that is being destroyed.
    pub(crate) fn forget(&self, qp: &QpBody) {
        let mut poll = self.poll.lock();
        if poll.last.as_ref().is_some_and(|last| last.id() == qp.id()) {
            poll.last = None;
        }
    }

    /// Ends it (`ibv_destroy_cq(3)`), if no QP uses it.
    pub(crate) fn destroy(&self) -> Result<(), Errno> {
        let uses = |qp: &Arc<QpBody>| qp.uses_cq(self.cq.id());
        if self.device.qps.read().values().any(uses) {
            return Err(Errno::busy(format_args!("a queue pair uses the completion queue")));
        }
        self.detach();
        self.completion_events.wait();
        self.async_events.wait();
        self.leave_channel();
        Ok(())
    }

    /// Uses its channel no longer.
    pub(crate) fn leave_channel(&self) {
        if let Some(channel) = &self.channel {
            channel.count(-1);
        }
    }

    /// Takes it from the device; it ends when the last who looks at it is done.
    pub(crate) fn detach(&self) {
        self.device.cqs.write().remove(&self.cq.id());
        let head = self.head();
        drop(self.context_events.take_back(|e| e.element.0 == head.0.cast()));
    }

    fn qp<'a>(&self, last: &'a mut Option<Arc<QpBody>>, id: QpId) -> Option<&'a QpBody> {
        if last.as_ref().is_none_or(|qp| qp.id() != id) {
            *last = self.device.qp(id);
        }
        last.as_deref()
    }
}

fn check_entries(entries: u32, device: &Device) -> Result<(), Errno> {
    let most = device.attributes.max_cq_entries;
    match (1..=most).contains(&entries) {
        true => Ok(()),
        false => Err(Errno::invalid(format_args!("cqe {entries} is not in 1 to {most} (max_cqe)"))),
    }
}

/// Interrupt vectors of the device.
pub(crate) const VECTORS: u32 = 1;

/// A completion as C has it; `qp` gives it the number that the program chose.
fn in_c(completion: &Completion, qp: &QpBody) -> c::ibv_wc {
    let succeeded = completion.status == CompletionStatus::Success;
    let (wr_id, byte_len) = match completion.opcode {
        CompletionOpcode::Receive => (qp.receive_done(completion), completion.byte_len),
        _ => {
            let posted = qp.send_done(completion);
            // As rxe and siw: the length of the request, Sends and Writes included.
            (posted.wr_id, if succeeded { posted.length } else { completion.byte_len })
        }
    };
    let mut wc = c::ibv_wc {
        wr_id,
        status: u32::from(completion.status as u8),
        opcode: u32::from(completion.opcode as u8),
        byte_len,
        qp_num: qp.id().0,
        src_qp: completion.src_qp.0,
        ..c::ibv_wc::default()
    };
    if let Some(stag) = completion.invalidated {
        wc.imm_data = stag.0;
        wc.wc_flags |= c::IBV_WC_WITH_INV;
    }
    if let Some([a, b, c, d, ..]) = completion.immediate {
        // In network byte order, as it came.
        wc.imm_data = u32::from_ne_bytes([a, b, c, d]);
        wc.wc_flags |= c::IBV_WC_WITH_IMM;
        if !completion.beside {
            wc.opcode = c::IBV_WC_RECV_RDMA_WITH_IMM;
        }
    }
    if completion.opcode == CompletionOpcode::Receive && qp.is_wired() {
        // Over Ethernet each packet has a route header. Programs compare the flags as a whole.
        wc.wc_flags |= c::IBV_WC_GRH;
    }
    if let Some(grh) = completion.grh {
        // As cards of Mellanox's say which header it is, and UCX takes it from there: a packet of
        // UDP (8), of IPv6 (1) or IPv4 (2).
        wc.sl = match grh {
            Grh::Ipv6 => 8 | 1,
            Grh::Ipv4 => 8 | 2,
        };
    }
    if !succeeded {
        // The number for `rnicctl why`; they count from 1 for as long as the daemon lives.
        wc.vendor_err = completion.diagnosis_id as u32;
    }
    wc
}
