//! What an arriving segment does to memory and queues, whichever path it came by.
//!
//! These are the checks of RFC 5040 and RFC 5041 that need memory and buffers. Each function passes
//! all of them before the first byte is placed.

use super::complete::Side;
use super::ledger::Progress;
use super::message::Gather;
use super::moving::{After, Placed, Writing};
use super::qp::{Link, Qp};
use super::reason::{Reason, Trouble};
use super::receives::SRQ_IS_DEAD;
use super::{Output, Shard};
use crate::abi::queue::CompletionFlags;
use crate::device::cq::CqFault;
use crate::device::memory::{MemoryFault, Payload, Target, Unreachable};
use crate::device::qp::terminate_detail;
use crate::device::srq::SrqFault;
use crate::device::stag::StagTable;
use crate::rdmap::codes;
use crate::shm::attached::CopyEnd;
use crate::stream::inbound::{SendKind, send_fits};
use crate::stream::{Fault, ReadArrival};
use crate::types::{Access, CompletionStatus, Stag};

impl Qp {
    /// An RDMA Write segment with payload (step 9). `last` is the last segment of its message;
    /// `stag_changed` says that an earlier one named another STag.
    pub(super) fn place_write(
        &self,
        stags: &StagTable,
        stag: Stag,
        to: u64,
        payload: Payload<'_>,
        last: bool,
        stag_changed: bool,
    ) -> Result<Placed, Trouble> {
        let len = payload.len();
        if len == 0 {
            return Ok(Placed::Done);
        }
        let target = stags
            .remote(self.principal(), stag, to, len as u64, Access::REMOTE_WRITE)
            .map_err(|fault| Reason::Write { fault, stag, to, len: len as u64 })?;
        if stag_changed {
            return Err(Reason::StagChanged { stag, to, len: len as u64 }.into());
        }
        place(&payload, target, last).map_err(Trouble::Memory)
    }

    /// Places a Send segment into the receive in use (step 12).
    pub(super) fn place_send(
        &mut self,
        stags: &StagTable,
        mo: u32,
        payload: Payload<'_>,
    ) -> Result<Placed, Trouble> {
        let Some(receiving) = &self.receiving else { return Ok(Placed::Done) };
        let len = payload.len();
        let capacity = receiving.capacity;
        send_fits(mo, len, capacity).map_err(|fault| match fault.code {
            codes::UNTAGGED_TOO_LONG => Reason::TooLong { mo, len, capacity }.into(),
            _ => Trouble::from(fault),
        })?;
        let who = self.principal();
        let mut targets = Gather::new();
        let (mut skip, mut from) = (mo, 0);
        for sge in receiving.entry.sges.as_slice() {
            if from == len {
                break;
            }
            if skip >= sge.length {
                skip -= sge.length;
                continue;
            }
            // At most sge.length, hence a u32.
            let n = ((sge.length - skip) as usize).min(len - from);
            let addr = sge.addr.wrapping_add(u64::from(skip));
            let (lkey, len) = (sge.lkey, n as u32);
            let target = stags.local(who, lkey, addr, len, true).map_err(|fault| {
                let reason = Reason::LocalKey { fault, lkey, addr, len, write: true };
                Trouble::BadReceive(None, reason)
            })?;
            targets.push(target);
            from += n;
            skip = 0;
        }
        let (mut from, mut moving) = (0, None);
        for target in targets {
            let placed = match target.mover() {
                None => payload.place(from, target, false).map(|()| moving),
                Some(by) => Writing::add(moving, by, &payload, from, target.len(), false).map(Some),
            };
            moving = placed.map_err(|fault| match (fault.cause, fault.end) {
                (Unreachable::Truncated, _) | (_, CopyEnd::Source) => Trouble::Memory(fault),
                (_, CopyEnd::Sink) => Trouble::BadReceive(Some(fault), Reason::Memory(fault)),
            })?;
            from += target.len();
        }
        Ok(moving.map_or(Placed::Done, Placed::Moving))
    }

    /// What follows when all bytes of a segment are in place, by either path.
    pub(super) fn placed(
        &mut self,
        shard: &mut Shard,
        after: After,
        len: usize,
    ) -> Result<(), Trouble> {
        self.shared.bytes_received.add(len as u64);
        match after {
            After::Write => Ok(()),
            After::Response { last } => {
                self.response_placed(len, last)?;
                if last {
                    self.finish_read(shard);
                }
                Ok(())
            }
            After::Send { kind, mo, last, total } => {
                let total = match &mut self.link {
                    Link::Tcp(tcp) => tcp.inbound.sent_placed(mo, len, last)?,
                    Link::Direct(_) | Link::None => total.filter(|_| last),
                };
                match total {
                    Some(total) => self.deliver_send(shard, kind, total),
                    None => Ok(()),
                }
            }
        }
    }

    /// The last segment of a Send has been placed and the message is whole: invalidate, then deliver
    /// (the STag is dead before the completion is visible).
    pub(super) fn deliver_send(
        &mut self,
        shard: &mut Shard,
        kind: SendKind,
        total: u32,
    ) -> Result<(), Trouble> {
        let Some(receiving) = self.receiving.take() else { return Ok(()) };
        let mut status = CompletionStatus::Success;
        let mut result = Ok(());
        let mut why = 0;
        let mut flags = CompletionFlags::empty();
        flags.set(CompletionFlags::SOLICITED, kind.solicited);
        if let Some(stag) = kind.invalidate {
            flags |= CompletionFlags::WITH_INV;
            if shard.stags.mover_of(stag).is_some() {
                self.unstage();
            }
            match shard.stags.invalidate_by_peer(self.principal(), stag) {
                Ok(()) => {}
                Err(fault) => {
                    let reason = Reason::Invalidate { fault, stag };
                    status = reason.status();
                    flags -= CompletionFlags::WITH_INV;
                    why = self.failed(shard, receiving.entry.wr_id, reason);
                    result = Err(reason.into());
                }
            }
        }
        let mut cqe = self.receive_cqe(receiving.entry.wr_id, status);
        cqe.byte_len = total;
        cqe.flags = flags.bits();
        cqe.why_id = why;
        if flags.contains(CompletionFlags::WITH_INV) {
            cqe.imm_or_inv = kind.invalidate.map_or(0, |s| u64::from(s.0));
        }
        self.publish_receive(&cqe, shard);
        result
    }

    /// A complete Read Request (step 13): checked now, answered in its turn.
    pub(super) fn read_requested(
        &mut self,
        shard: &mut Shard,
        arrival: ReadArrival,
    ) -> Result<(), Trouble> {
        let request = &arrival.request;
        if request.size > 0 {
            let size = u64::from(request.size);
            let who = self.principal();
            let (stag, to) = (request.src_stag, request.src_to.0);
            shard
                .stags
                .remote(who, stag, to, size, Access::REMOTE_READ)
                .map_err(|fault| Reason::Read { fault, stag, to, len: size })?;
        }
        self.owed.push_back(arrival);
        shard.wake(self);
        Ok(())
    }

    /// Whether another read of the peer's may be taken on.
    pub(super) fn read_slot_free(&self) -> bool {
        let answering = self.message.as_ref().is_some_and(super::message::Message::is_response);
        self.owed.len() + usize::from(answering) < usize::from(self.ird)
    }

    /// A Read Response segment (step 10).
    pub(super) fn place_response(
        &mut self,
        stags: &StagTable,
        stag: Stag,
        to: u64,
        payload: Payload<'_>,
        last: bool,
    ) -> Result<Placed, Trouble> {
        let who = self.principal();
        let Some(read) = self.reads.front() else {
            return Err(Reason::NoRead.into());
        };
        let len = payload.len();
        if len == 0 {
            return Ok(Placed::Done);
        }
        let (seq, size) = (read.seq, read.size);
        let reason = if stag != read.sink {
            Reason::OtherSink { found: stag, sink: read.sink }
        // The sink must still be enabled before its bounds are of interest.
        } else if let Ok(sink) = stags.local(who, stag.0, read.to, size, true) {
            match to.checked_sub(read.to).and_then(|from| sink.part(from, len)) {
                Some(target) => {
                    return place(&payload, target, last)
                        .map_err(|fault| self.not_placed(After::Response { last }, fault));
                }
                None => Reason::OutsideSink { stag, to, len: len as u64, size },
            }
        } else {
            Reason::SinkGone { stag, to: read.to, size }
        };
        Err(self.response_refused(seq, reason))
    }

    /// A segment of a Read Response has been placed.
    fn response_placed(&mut self, len: usize, last: bool) -> Result<(), Trouble> {
        let Some(read) = self.reads.front_mut() else { return Ok(()) };
        // A peer that repeats bytes overshoots, also beyond what a size can say, and is caught at
        // the end.
        read.received = read.received.saturating_add(len as u64);
        if last && read.received != u64::from(read.size) {
            let reason = Reason::ResponseLength { received: read.received, size: read.size };
            let seq = read.seq;
            return Err(self.response_refused(seq, reason));
        }
        Ok(())
    }

    fn response_refused(&mut self, seq: Option<u64>, reason: Reason) -> Trouble {
        if let Some(seq) = seq {
            self.ledger.fail(seq, reason.status(), Some(reason.fault().code));
        }
        reason.into()
    }

    /// The last segment of a Read Response has been placed: the read is done.
    pub(super) fn finish_read(&mut self, shard: &mut Shard) {
        let Some(read) = self.reads.pop_front() else { return };
        let Some(seq) = read.seq else { return };
        if let Some(entry) = self.ledger.get_mut(seq) {
            entry.byte_len = read.size;
            entry.progress = Progress::Done(CompletionStatus::Success);
        }
        if read.invalidate
            && let Err(reason) = self.invalidate_locally(read.sink, seq, shard)
        {
            self.request_failed(seq, reason, shard);
        }
        self.retire(shard);
        // A fence or a full ORD may have held the queue.
        shard.wake(self);
    }

    /// Ends the stream for a segment that was not carried out. `build` encloses the segment's
    /// headers as the fault asks.
    pub(super) fn segment_failed(
        &mut self,
        shard: &mut Shard,
        trouble: Trouble,
        build: impl FnOnce(Fault) -> Vec<u8>,
    ) {
        match trouble {
            Trouble::Fault(fault, reason) => {
                if fault.code == codes::UNTAGGED_TOO_LONG
                    && let Some(receiving) = self.receiving.take()
                {
                    let detail = terminate_detail(fault.code);
                    self.receive_failed(shard, receiving.entry.wr_id, reason, detail);
                }
                let payload = build(fault);
                self.terminate(shard, fault.code, Some(payload), reason);
            }
            Trouble::Memory(fault) => {
                shard.unreachable(fault);
                let reason = Reason::Memory(fault);
                let fault = reason.fault();
                self.terminate(shard, fault.code, Some(build(fault)), reason);
            }
            Trouble::BadReceive(fault, reason) => {
                if let Some(fault) = fault {
                    shard.unreachable(fault);
                }
                if let Some(receiving) = self.receiving.take() {
                    self.receive_failed(shard, receiving.entry.wr_id, reason, 0);
                }
                self.terminate(shard, codes::RDMA_LOCAL_CATASTROPHIC, None, reason);
            }
            Trouble::MalformedReceive(wr_id, reason) => {
                self.receive_failed(shard, wr_id, reason, 0);
                self.terminate(shard, codes::RDMA_LOCAL_CATASTROPHIC, None, reason);
            }
            Trouble::BadQueue(fault) => self.queue_fault(shard, "receive queue", fault),
            Trouble::BadSrq(fault) => self.srq_failed(shard, fault),
        }
    }

    fn receive_failed(&mut self, shard: &mut Shard, wr_id: u64, reason: Reason, detail: u32) {
        let status = reason.status();
        let mut cqe = self.receive_cqe(wr_id, status);
        cqe.detail = detail;
        cqe.why_id = self.failed(shard, wr_id, reason);
        self.publish_receive(&cqe, shard);
    }

    /// Whether receives can still be taken and completed; a QP whose CQ or shared receive queue died
    /// must not take messages.
    pub(super) fn can_receive(&mut self, shard: &mut Shard) -> bool {
        if self.recv_cq.is_dead() {
            self.cq_failed(shard, Side::Receive, CqFault::Dead);
        }
        if let Some(srq) = self.rq.shared()
            && srq.is_dead()
        {
            let reason = Reason::Srq(srq.id(), SrqFault::Dead);
            self.fail_locally(shard, SRQ_IS_DEAD, reason);
        }
        self.phase.receives()
    }
}

/// Places a payload in one piece of memory, or has it placed.
fn place(payload: &Payload<'_>, target: Target<'_>, last: bool) -> Result<Placed, MemoryFault> {
    match target.mover() {
        None => payload.place(0, target, last).map(|()| Placed::Done),
        Some(by) => Writing::add(None, by, payload, 0, target.len(), last).map(Placed::Moving),
    }
}

impl Shard {
    /// A session's memory could not be reached; what that costs the session.
    pub(super) fn unreachable(&mut self, fault: MemoryFault) {
        let MemoryFault { owner: session, cause, .. } = fault;
        match cause {
            // It costs the request or the stream that named it.
            Unreachable::Unmapped => {}
            Unreachable::Detached => self.outputs.push_back(Output::Detached { session }),
            Unreachable::Truncated => {
                self.outputs.push_back(Output::Misbehaved { session, why: cause.to_string() });
            }
        }
    }
}
