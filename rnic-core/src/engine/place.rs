//! What an arriving segment does to memory and queues, whichever path it came by.
//!
//! These are the checks of wire.md section 9 that need memory and buffers: steps 9 to 13 and 15. Each
//! function passes all of them before the first octet is placed.

use super::complete::Side;
use super::ledger::Progress;
use super::message::Gather;
use super::moving::{After, Placed, Writing};
use super::qp::{Link, Qp, Receiving};
use super::{Output, Shard};
use crate::abi::queue::{CompletionFlags, Cqe};
use crate::device::cq::CqFault;
use crate::device::memory::{MemoryFault, Payload, Target, Unreachable};
use crate::device::qp::terminate_detail;
use crate::device::stag::{InvalidateFault, RemoteFault, StagTable};
use crate::rdmap::codes;
use crate::shm::attached::CopyEnd;
use crate::shm::queue::{QueueFault, TakeError};
use crate::stream::inbound::{SendKind, send_fits};
use crate::stream::{Enclose, Fault, ReadArrival};
use crate::types::{Access, CompletionOpcode, CompletionStatus, Stag, TerminateCode};

/// Why a segment was not carried out.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    /// The peer is to blame, or must at least be told.
    Fault(Fault),
    /// The memory could not be reached: its owner is to blame.
    Memory(MemoryFault),
    /// A receive of ours cannot take the message: the owner of the QP is to blame. Its memory, if
    /// that could not be written.
    BadReceive(Option<MemoryFault>),
    /// The next receive of ours, with this name, is none.
    MalformedReceive(u64),
    /// The receive queue itself is nonsense.
    BadQueue(QueueFault),
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Trouble::Fault(fault)
    }
}

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
            .map_err(|fault| Fault::segment(write_code(fault)))?;
        if stag_changed {
            return Err(Fault::segment(codes::TAGGED_INVALID_STAG).into());
        }
        place(&payload, target, last).map_err(Trouble::Memory)
    }

    /// The buffer for a Send: the one in use, or for a new message the next one posted (step 12).
    pub(super) fn take_receive(&mut self) -> Result<(), Trouble> {
        if self.receiving.is_some() {
            return Ok(());
        }
        match self.rq.take() {
            Ok(Some(entry)) => {
                let capacity = entry.sges.as_slice().iter().map(|s| u64::from(s.length)).sum();
                self.receiving = Some(Receiving { entry, capacity });
                Ok(())
            }
            Ok(None) => Err(Fault::segment(codes::UNTAGGED_NO_BUFFER).into()),
            Err(TakeError::Entry(error)) => Err(Trouble::MalformedReceive(error.wr_id)),
            Err(TakeError::Queue(fault)) => Err(Trouble::BadQueue(fault)),
        }
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
        send_fits(mo, len, receiving.capacity)?;
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
            let target = stags
                .local(who, sge.lkey, addr, n as u32, true)
                .map_err(|_| Trouble::BadReceive(None))?;
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
                (_, CopyEnd::Sink) => Trouble::BadReceive(Some(fault)),
            })?;
            from += target.len();
        }
        Ok(moving.map_or(Placed::Done, Placed::Moving))
    }

    /// What follows when all octets of a segment are in place, by either path.
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
    /// (step 15; decision D49: the STag is dead before the completion is visible).
    pub(super) fn deliver_send(
        &mut self,
        shard: &mut Shard,
        kind: SendKind,
        total: u32,
    ) -> Result<(), Trouble> {
        let Some(receiving) = self.receiving.take() else { return Ok(()) };
        let mut status = CompletionStatus::Success;
        let mut result = Ok(());
        let mut flags = CompletionFlags::empty();
        flags.set(CompletionFlags::SOLICITED, kind.solicited);
        if let Some(stag) = kind.invalidate {
            flags |= CompletionFlags::WITH_INV;
            match shard.stags.may_invalidate(self.principal(), stag) {
                Ok(()) => {
                    shard.stags.revoke(stag);
                }
                Err(fault) => {
                    status = CompletionStatus::RemoteInvalidRequest;
                    flags -= CompletionFlags::WITH_INV;
                    result = Err(Trouble::Fault(Fault::segment(match fault {
                        InvalidateFault::NotAssociated => codes::PROTECTION_INVALIDATE,
                        InvalidateFault::Shared => codes::OPERATION_INVALIDATE,
                    })));
                }
            }
        }
        let mut cqe = Cqe::new(self.id.0, receiving.entry.wr_id, CompletionOpcode::Receive, status);
        cqe.byte_len = total;
        cqe.flags = flags.bits();
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
            shard
                .stags
                .remote(who, request.src_stag, request.src_to.0, size, Access::REMOTE_READ)
                .map_err(|fault| Fault::read(read_code(fault)))?;
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
            return Err(Fault::segment(codes::OPERATION_OPCODE).into());
        };
        let len = payload.len();
        if len == 0 {
            return Ok(Placed::Done);
        }
        let (bad, gone) = (CompletionStatus::BadResponse, CompletionStatus::LocalAccess);
        let seq = read.seq;
        let refused = if stag != read.sink {
            (bad, codes::TAGGED_INVALID_STAG)
        // The sink must still be enabled before its bounds are of interest.
        } else if let Ok(sink) = stags.local(who, stag.0, read.to, read.size, true) {
            match to.checked_sub(read.to).and_then(|from| sink.part(from, len)) {
                Some(target) => {
                    return place(&payload, target, last)
                        .map_err(|fault| self.not_placed(After::Response { last }, fault));
                }
                None => (bad, codes::TAGGED_BOUNDS),
            }
        } else {
            (gone, codes::TAGGED_INVALID_STAG)
        };
        Err(self.response_refused(seq, refused.0, refused.1))
    }

    /// A segment of a Read Response has been placed.
    fn response_placed(&mut self, len: usize, last: bool) -> Result<(), Trouble> {
        let Some(read) = self.reads.front_mut() else { return Ok(()) };
        // A peer that repeats octets overshoots and is caught at the end. A segment is at most
        // 64 KiB.
        read.received = read.received.saturating_add(len as u32);
        if last && read.received != read.size {
            let (seq, bad) = (read.seq, CompletionStatus::BadResponse);
            return Err(self.response_refused(seq, bad, codes::TAGGED_BOUNDS));
        }
        Ok(())
    }

    fn response_refused(
        &mut self,
        seq: Option<u64>,
        status: CompletionStatus,
        code: TerminateCode,
    ) -> Trouble {
        if let Some(seq) = seq {
            self.ledger.fail(seq, status, Some(code));
        }
        Fault::segment(code).into()
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
            && let Err(status) = self.invalidate_locally(read.sink, seq, shard)
        {
            self.request_failed(seq, status, shard);
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
            Trouble::Fault(fault) => {
                if fault.code == codes::UNTAGGED_TOO_LONG
                    && let Some(receiving) = self.receiving.take()
                {
                    let (wr_id, status) = (receiving.entry.wr_id, CompletionStatus::LocalLength);
                    self.receive_failed(shard, wr_id, status, terminate_detail(fault.code));
                }
                let payload = build(fault);
                self.terminate(shard, fault.code, Some(payload));
            }
            Trouble::Memory(fault) => {
                shard.unreachable(fault);
                let fault = Fault { code: codes::DDP_LOCAL_CATASTROPHIC, enclose: Enclose::None };
                self.terminate(shard, fault.code, Some(build(fault)));
            }
            Trouble::BadReceive(fault) => {
                if let Some(fault) = fault {
                    shard.unreachable(fault);
                }
                if let Some(receiving) = self.receiving.take() {
                    let (wr_id, status) =
                        (receiving.entry.wr_id, CompletionStatus::LocalProtection);
                    self.receive_failed(shard, wr_id, status, 0);
                }
                self.terminate(shard, codes::RDMA_LOCAL_CATASTROPHIC, None);
            }
            Trouble::MalformedReceive(wr_id) => {
                self.receive_failed(shard, wr_id, CompletionStatus::LocalQpOperation, 0);
                self.terminate(shard, codes::RDMA_LOCAL_CATASTROPHIC, None);
            }
            Trouble::BadQueue(fault) => self.queue_fault(shard, "receive queue", &fault),
        }
    }

    fn receive_failed(
        &mut self,
        shard: &mut Shard,
        wr_id: u64,
        status: CompletionStatus,
        detail: u32,
    ) {
        let mut cqe = Cqe::new(self.id.0, wr_id, CompletionOpcode::Receive, status);
        cqe.detail = detail;
        self.publish_receive(&cqe, shard);
    }

    /// Whether receives can still be completed; a QP whose CQ died must not take messages.
    pub(super) fn can_receive(&mut self, shard: &mut Shard) -> bool {
        if self.recv_cq.is_dead() {
            self.cq_failed(shard, Side::Receive, CqFault::Dead);
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

/// DDP's words for a Write that may not be placed (RFC 5041 section 7.1; decision D15: it has no code
/// for a missing right).
fn write_code(fault: RemoteFault) -> crate::types::TerminateCode {
    match fault {
        RemoteFault::InvalidStag | RemoteFault::NoRight => codes::TAGGED_INVALID_STAG,
        RemoteFault::NotAssociated => codes::TAGGED_STREAM,
        RemoteFault::Wrap => codes::TAGGED_TO_WRAP,
        RemoteFault::Bounds => codes::TAGGED_BOUNDS,
    }
}

/// RDMAP's words for a Read that may not be answered (RFC 5040 section 7.2).
fn read_code(fault: RemoteFault) -> crate::types::TerminateCode {
    match fault {
        RemoteFault::InvalidStag => codes::PROTECTION_INVALID_STAG,
        RemoteFault::NotAssociated => codes::PROTECTION_STREAM,
        RemoteFault::NoRight => codes::PROTECTION_ACCESS,
        RemoteFault::Wrap => codes::PROTECTION_TO_WRAP,
        RemoteFault::Bounds => codes::PROTECTION_BOUNDS,
    }
}
