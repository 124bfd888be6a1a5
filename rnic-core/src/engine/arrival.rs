//! Handles an incoming segment from either path: [`Qp::segment_arrived`] finds its buffer, places
//! the payload and completes the message or request that it finishes.
//!
//! It makes the checks of RFC 5040 and RFC 5041 that need memory and buffers, all of them before
//! the first byte is placed.

use super::incoming::{Incoming, Origin};
use super::order::{Arrival, Barrier, Kind};
use super::qp::Qp;
use super::qp_core::QpCore;
use super::rc::Refusal;
use super::reason::{PlacementError, Reason};
use super::requester::Requester;
use super::requester::in_flight::OutboundRequest;
use super::requester::inbound_request::InboundRequest;
use super::requester::message::{Gather, GatherFault};
use super::responder::placement::{Placed, ScatterFault, place, scatter};
use super::state::EngineState;
use crate::device::cq::CqFault;
use crate::device::memory::{MemoryFault, Payload, Target, Unreachable};
use crate::device::qp::terminate_detail;
use crate::device::srq::SrqFault;
use crate::device::stag::StagTable;
use crate::rdmap::codes;
use crate::stream::inbound::SendKind;
use crate::stream::{Fault, InboundAtomic, InboundRead};
use rnic_abi::abi::queue::CompletionFlags;
use rnic_abi::shm::attached::CopyEnd;
use rnic_abi::types::{ATOMIC_LEN, Access, CompletionStatus, Stag, TerminateCode, Time};

/// Payload of an incoming segment.
#[derive(Clone, Copy)]
pub(super) enum PayloadSource<'a> {
    /// In a buffer of the engine.
    Bytes(&'a [u8]),
    /// The next `len` bytes of the message in progress of another QP, still in its memory.
    Sender { requester: &'a Requester, core: &'a QpCore, len: u32 },
}

impl PayloadSource<'_> {
    fn len(&self) -> usize {
        match *self {
            PayloadSource::Bytes(bytes) => bytes.len(),
            PayloadSource::Sender { len, .. } => len as usize,
        }
    }
}

/// Outcome of an incoming segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SegmentFate {
    /// It was processed, dropped, or kept for later.
    Consumed,
    /// The sender on the direct path keeps it, because at first no receive was posted.
    LeftWithSender,
}

/// Error of an incoming segment.
#[derive(Clone, Copy, Debug)]
pub(super) enum ArrivalError {
    /// The memory of the sender on the direct path is not accessible.
    Sender(GatherFault),
    /// The receiver refuses the segment, or its own memory is not accessible.
    Placement(PlacementError),
}

impl From<PlacementError> for ArrivalError {
    fn from(error: PlacementError) -> Self {
        ArrivalError::Placement(error)
    }
}

impl From<Reason> for ArrivalError {
    fn from(reason: Reason) -> Self {
        ArrivalError::Placement(reason.into())
    }
}

impl Qp {
    /// Handles a segment that is well formed and in order. Segments of both paths, other than
    /// notices, RTR Sends and runs of short Writes (`link/short_writes.rs`), pass through here, and
    /// again after a wait for a receive.
    #[inline]
    pub(super) fn segment_arrived(
        &mut self,
        engine: &mut EngineState,
        segment: Incoming,
        source: PayloadSource<'_>,
        origin: Origin<'_>,
    ) -> Result<SegmentFate, ArrivalError> {
        if self.responder.is_dropping(&segment) {
            return Ok(self.drop_segment(segment, source.len())?);
        }
        // `ArrivalError` is large. The early return avoids moving it on success.
        let error = match self.carry_out(engine, segment, source, origin) {
            Ok(fate) => return Ok(fate),
            Err(error) => error,
        };
        match error {
            ArrivalError::Placement(error) if self.core.transport.drops(&error) => {
                Ok(self.drop_segment(segment, source.len())?)
            }
            error => Err(error),
        }
    }

    /// Drops a segment of a UC QP.
    fn drop_segment(
        &mut self,
        segment: Incoming,
        len: usize,
    ) -> Result<SegmentFate, PlacementError> {
        self.responder.drop_segment(&segment);
        // The stream still counts the segment.
        if let Incoming::Send { kind: SendKind { immediate: None, .. }, mo, last, total } = segment
        {
            self.link.send_placed(mo, len, last, total)?;
        }
        Ok(SegmentFate::Consumed)
    }

    #[inline]
    fn carry_out(
        &mut self,
        engine: &mut EngineState,
        segment: Incoming,
        source: PayloadSource<'_>,
        origin: Origin<'_>,
    ) -> Result<SegmentFate, ArrivalError> {
        // A request of the peer is checked now and answered in its turn.
        let request = match segment {
            //= RDMAP-5.2.1-3
            Incoming::ReadRequest(read) => Some(self.read_requested(engine, read)?),
            //= 7306-5.2.1-15
            Incoming::AtomicRequest(atomic) => Some(self.atomic_requested(engine, atomic)?),
            _ => None,
        };
        if let Some(request) = request {
            self.message_fault(&segment, engine.now)?;
            if self.core.order.is_some() {
                self.request_arrived(engine, &request)?;
            }
            //= RDMAP-5.2.1-4, 7306-5.2.1-16
            self.requester.take_on(request);
            engine.wake(&mut self.core);
            return Ok(SegmentFate::Consumed);
        }
        let is_send = matches!(segment, Incoming::Send { .. });
        if is_send && !self.can_receive(engine) {
            return Ok(SegmentFate::Consumed);
        }

        // Gather the payload. A segment that cannot be gathered never arrives.
        let mut memory = Gather::new();
        let original;
        let payload = if let Incoming::AtomicResponse(response) = &segment {
            // The original value is big-endian on the wire and native in memory.
            original = response.original.to_ne_bytes();
            Payload::Bytes(&original)
        } else {
            match source {
                PayloadSource::Bytes(bytes) => Payload::Bytes(bytes),
                PayloadSource::Sender { requester, core, len } => {
                    let gathered = requester.gather(len, core, &engine.stags, &mut memory);
                    gathered.map_err(ArrivalError::Sender)?;
                    Payload::Gather(&memory)
                }
            }
        };
        let len = payload.len();

        if let Some(time) = self.rnr_fault(&segment, engine) {
            drop(memory);
            self.responder.hold(&self.core, engine, segment, origin, len, time).by_rule = true;
            let msn = self.responder.waiting_msn();
            self.send_rnr_notice(engine, msn);
            return Ok(match source {
                PayloadSource::Bytes(_) => SegmentFate::Consumed,
                PayloadSource::Sender { .. } => SegmentFate::LeftWithSender,
            });
        }

        // Find the buffer: for a Send, the receive in use or the next receive.
        //= RDMAP-5.3-11
        if is_send && !self.responder.take_receive(&self.core, engine.now, &mut engine.outputs)? {
            drop(memory);
            let awaits_response = self.requester.awaits_response();
            let found = self.responder.await_receive(
                &self.core,
                engine,
                segment,
                origin,
                len,
                awaits_response,
            )?;
            if !found {
                let msn = self.responder.waiting_msn();
                self.send_rnr_notice(engine, msn);
            }
            return match (found, source) {
                (false, PayloadSource::Bytes(_)) => Ok(SegmentFate::Consumed),
                (_, PayloadSource::Sender { .. }) => Ok(SegmentFate::LeftWithSender),
                (true, PayloadSource::Bytes(_)) => {
                    self.segment_arrived(engine, segment, source, origin)
                }
            };
        }

        // After this point the sender does not hand over the same segment again, so each is counted
        // once.
        self.message_fault(&segment, engine.now)?;

        // Place the payload, directly or by a copier.
        let stags = &engine.stags;
        let now = engine.now;
        //= DDP-5.2-5
        let placed = match segment {
            Incoming::Write { stag, to, last, stag_changed, total } => {
                self.check_whole_write(stags, stag, to, total, len)?;
                self.place_write(stags, now, stag, to, payload, last, stag_changed)?
            }
            Incoming::ReadResponse { stag, to, last } => {
                self.place_response(stags, now, stag, to, payload, last)?
            }
            Incoming::Send { mo, .. } => {
                self.core.keep_order(stags);
                self.responder.place_send(&self.core, stags, mo, payload)?
            }
            Incoming::AtomicResponse(_) => {
                self.core.keep_order(stags);
                self.place_original(stags, &payload)?
            }
            Incoming::ReadRequest(_) | Incoming::AtomicRequest(_) => Placed::Done,
        };
        drop(memory);

        // Complete the segment, now or when the copier is done.
        match placed {
            //= DDP-4.1-7, DDP-5.3-1, DDP-5.3-7
            Placed::Done => self.segment_placed(engine, segment, len)?,
            Placed::InOrder => {
                self.settle_order(engine)?;
                self.segment_placed(engine, segment, len)?;
            }
            Placed::Pending(write) => {
                let enclosure = origin.enclosure();
                let pending = write.begin(&self.core, engine, segment, len, enclosure);
                //= DDP-4.1-7, DDP-5.3-1, DDP-5.3-7
                self.responder.await_copy(pending);
            }
        }
        Ok(SegmentFate::Consumed)
    }

    /// Returns true if the QP can take and complete receives. Ends the QP if its receive CQ or SRQ
    /// is dead.
    #[inline]
    fn can_receive(&mut self, engine: &mut EngineState) -> bool {
        if self.core.recv_cq.is_dead() {
            let cq = self.core.recv_cq.clone();
            self.cq_failed(engine, &cq, CqFault::Dead);
        }
        if let Some(srq) = self.responder.srq()
            && srq.is_dead()
        {
            let reason = Reason::Srq(srq.id(), SrqFault::Dead);
            self.fail_locally(engine, reason);
        }
        self.life.phase().receives()
    }

    // --- Requests ----------------------------------------------------------------------------

    /// Checks a complete Read Request (RFC 5040 section 5.2.1).
    fn read_requested(
        &self,
        engine: &EngineState,
        read: InboundRead,
    ) -> Result<InboundRequest, Reason> {
        let request = &read.request;
        //= RDMAP-5.2.1-13, RDMAP-5.2.1-14
        if request.size > 0 {
            self.check_ird()?;
            let len = u64::from(request.size);
            let stag = request.src_stag;
            let to = request.src_to.0;
            self.core
                .remote(&engine.stags, stag, to, len, Access::REMOTE_READ)
                .map_err(|fault| Reason::Read { fault, stag, to, len })?;
        }
        Ok(InboundRequest::Read(read))
    }

    /// Refuses a request to an RC QP with a `max_dest_rd_atomic` of 0. The stream of such a QP has
    /// room only for acknowledgement requests, which are zero-length Reads.
    fn check_ird(&self) -> Result<(), Reason> {
        match &self.rc {
            Some(rc) if rc.takes_no_requests() => Err(Reason::RequestsFull { ird: 0 }),
            _ => Ok(()),
        }
    }

    /// Checks a complete Atomic Request (RFC 7306 section 5.2.1).
    fn atomic_requested(
        &self,
        engine: &EngineState,
        atomic: InboundAtomic,
    ) -> Result<InboundRequest, Reason> {
        self.check_ird()?;
        let stag = atomic.request.stag;
        let to = atomic.request.to.0;
        let len = u64::from(ATOMIC_LEN);
        let right = Access::REMOTE_ATOMIC;
        //= 7306-5-7, 7306-5.2.1-6, 7306-9-2
        let target = self
            .core
            .remote(&engine.stags, stag, to, len, right)
            .map_err(|fault| Reason::Atomic { fault, stag, to })?;
        // The address must be aligned, not the offset, which is relative to the region's base.
        //= 7306-5.1.1-5, 7306-5.1.1-6, 7306-5.1.2-7, 7306-5.1.2-8, 7306-5.1.2-9, 7306-8.2-4
        if !target.is_aligned() {
            return Err(Reason::Misaligned { stag, to });
        }
        Ok(InboundRequest::Atomic(atomic))
    }

    // --- Placing -----------------------------------------------------------------------------

    /// Checks the whole length of an RDMA Write at its first segment, of `len` bytes, if the
    /// transport requires it. Over TCP no segment carries the length.
    #[inline]
    fn check_whole_write(
        &self,
        stags: &StagTable,
        stag: Stag,
        to: u64,
        total: Option<u32>,
        len: usize,
    ) -> Result<(), PlacementError> {
        let Some(total) = total.map(u64::from).filter(|total| *total > len as u64) else {
            return Ok(());
        };
        if self.core.transport.checks_whole_write() {
            self.core
                .remote(stags, stag, to, total, Access::REMOTE_WRITE)
                .map_err(|fault| Reason::Write { fault, stag, to, len: total })?;
        }
        Ok(())
    }

    /// Places an RDMA Write segment. `last` marks the last segment of the message. `stag_changed`
    /// is true if an earlier segment of the message has another STag.
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "the fields of a segment")]
    fn place_write(
        &mut self,
        stags: &StagTable,
        now: Time,
        stag: Stag,
        to: u64,
        payload: Payload<'_>,
        last: bool,
        stag_changed: bool,
    ) -> Result<Placed, PlacementError> {
        let len = payload.len();
        //= DDP-5.2-10, DDP-5.2-11
        if len == 0 {
            self.core.end_message(Kind::Write);
            return Ok(Placed::Done);
        }
        let target = self
            .core
            .remote(stags, stag, to, len as u64, Access::REMOTE_WRITE)
            //= DDP-7.1-16, DDP-8.3-5
            .map_err(|fault| Reason::Write { fault, stag, to, len: len as u64 })?;
        if stag_changed {
            return Err(Reason::StagChanged { stag, to, len: len as u64 }.into());
        }
        if self.core.order.is_some() {
            let arrival = Arrival { kind: Kind::Write, stag, to, last };
            let placed = self.place_in_order(stags, now, arrival, &payload, target);
            return placed.map_err(PlacementError::Memory);
        }
        let target = self.responder.long_writes.sink(stag, to, target);
        place(&payload, target, last).map_err(PlacementError::Memory)
    }

    /// Places a Read Response segment in the buffer of the oldest Read.
    #[inline]
    fn place_response(
        &mut self,
        stags: &StagTable,
        now: Time,
        stag: Stag,
        to: u64,
        payload: Payload<'_>,
        last: bool,
    ) -> Result<Placed, PlacementError> {
        let Some(read) = self.requester.awaited(false) else {
            return Err(Reason::NoRequest { atomic: false }.into());
        };
        let len = payload.len();
        //= DDP-5.2-10, DDP-5.2-11
        if len == 0 {
            return Ok(Placed::Done);
        }
        let size = read.size;
        if read.elements.is_some() {
            self.core.keep_order(stags);
        }
        let reason = if stag != read.sink {
            Reason::OtherSink { found: stag, sink: read.sink }
        } else if let Some(elements) = &read.elements {
            let end = to.wrapping_sub(read.to).saturating_add(len as u64);
            match u32::try_from(to.wrapping_sub(read.to)) {
                Ok(from) if end <= u64::from(size) => {
                    match scatter(&payload, elements, from, &self.core, stags) {
                        Ok(placed) => return Ok(placed),
                        Err(ScatterFault::Memory(fault)) => {
                            let segment = Incoming::ReadResponse { stag, to, last };
                            return Err(self.placement_failed(&segment, fault));
                        }
                        Err(ScatterFault::Element(_)) => {
                            Reason::SinkGone { stag, to: read.to, size }
                        }
                    }
                }
                _ => Reason::OutsideSink { stag, to, len: len as u64, size },
            }
        // The sink must still be enabled before its bounds are checked.
        } else if let Ok(sink) = stags.local(self.core.principal(), stag.0, read.to, size, true) {
            match to.checked_sub(read.to).and_then(|from| sink.part(from, len)) {
                Some(target) => {
                    let placed = if self.core.order.is_some() {
                        let arrival = Arrival { kind: Kind::Response, stag, to, last };
                        self.place_in_order(stags, now, arrival, &payload, target)
                    } else {
                        let target = self.responder.long_reads.sink(stag, to, target);
                        place(&payload, target, last)
                    };
                    return placed.map_err(|fault| {
                        self.placement_failed(&Incoming::ReadResponse { stag, to, last }, fault)
                    });
                }
                None => Reason::OutsideSink { stag, to, len: len as u64, size },
            }
        } else {
            Reason::SinkGone { stag, to: read.to, size }
        };
        self.requester.refuse_response(&self.core, reason);
        Err(reason.into())
    }

    /// Places a segment on a QP with an order rule, now or later. A copier writes at once.
    fn place_in_order(
        &mut self,
        stags: &StagTable,
        now: Time,
        arrival: Arrival,
        payload: &Payload<'_>,
        target: Target<'_>,
    ) -> Result<Placed, MemoryFault> {
        if target.copier().is_some() {
            self.core.keep_order(stags);
            return place(payload, target, arrival.last);
        }
        self.core.arrive(stags, now, arrival, payload).map(|()| Placed::InOrder)
    }

    /// Places the original value of an Atomic Response in the buffer of the oldest request.
    fn place_original(
        &mut self,
        stags: &StagTable,
        original: &Payload<'_>,
    ) -> Result<Placed, PlacementError> {
        let Some(request) = self.requester.awaited(true) else {
            //= 7306-5.2.2-11
            return Err(Reason::NoRequest { atomic: true }.into());
        };
        let &OutboundRequest { sink: stag, to, size, .. } = request;
        let Ok(sink) = stags.local(self.core.principal(), stag.0, to, size, true) else {
            let reason = Reason::SinkGone { stag, to, size };
            self.requester.refuse_response(&self.core, reason);
            return Err(reason.into());
        };
        place(original, sink, true).map_err(|fault| {
            self.requester.response_placement_failed();
            PlacementError::Memory(fault)
        })
    }

    /// Maps a failed copy of a segment's bytes to its error.
    pub(super) fn placement_failed(
        &mut self,
        segment: &Incoming,
        fault: MemoryFault,
    ) -> PlacementError {
        match (segment, fault.cause, fault.end) {
            (
                Incoming::Send { .. },
                Unreachable::Unmapped | Unreachable::Detached,
                CopyEnd::Sink,
            ) => return PlacementError::Receive(Some(fault), Reason::Memory(fault)),
            (Incoming::ReadResponse { .. } | Incoming::AtomicResponse(_), _, CopyEnd::Sink) => {
                self.requester.response_placement_failed()
            }
            _ => {}
        }
        PlacementError::Memory(fault)
    }

    // --- Completing --------------------------------------------------------------------------

    /// Completes a segment of either path after all its bytes have been placed.
    #[inline]
    pub(super) fn segment_placed(
        &mut self,
        engine: &mut EngineState,
        segment: Incoming,
        len: usize,
    ) -> Result<(), PlacementError> {
        self.core.shared.bytes_received.add(len as u64);
        match segment {
            //= RDMAP-3.2-6, RDMAP-5.1-2
            Incoming::Write { last, .. } => {
                self.responder.write_placed(len, last);
                Ok(())
            }
            Incoming::ReadRequest(_) | Incoming::AtomicRequest(_) => Ok(()),
            Incoming::AtomicResponse(_) => {
                self.order_barrier(engine, Barrier::Delivery)?;
                //= 7306-5.4-1, 7306-5.4-8
                self.finish_request(engine);
                Ok(())
            }
            Incoming::ReadResponse { last, .. } => {
                self.requester.response_placed(len, last, &self.core)?;
                //= RDMAP-5.5-11, RDMAP-5.5-19
                if last {
                    self.order_barrier(engine, Barrier::Delivery)?;
                    self.finish_request(engine);
                }
                Ok(())
            }
            // Immediate Data is a whole message and has no payload to place.
            Incoming::Send { kind: kind @ SendKind { immediate: Some(_), .. }, .. } => {
                //= 7306-6.3-3, 7306-6.4-1, 7306-7-1, 7306-7-4
                self.deliver_send(engine, kind, 0)
            }
            Incoming::Send { kind, mo, last, total } => {
                match self.link.send_placed(mo, len, last, total)? {
                    //= RDMAP-5.3-5, RDMAP-5.5-16
                    Some(total) => self.deliver_send(engine, kind, total),
                    None => Ok(()),
                }
            }
        }
    }

    /// Completes the oldest request after the last segment of its response has been placed.
    fn finish_request(&mut self, engine: &mut EngineState) {
        if let Err(error) = self.requester.finish_request(&mut self.core, engine) {
            self.request_error(engine, error);
        }
        self.retire(engine);
        self.restart_clock(engine);
        // The queue may be waiting for a fence or for room within ORD.
        engine.wake(&mut self.core);
    }

    /// Delivers a Send after its last segment has been placed. A Send with Invalidate first
    /// invalidates its STag, so that the STag is invalid before the completion is visible.
    fn deliver_send(
        &mut self,
        engine: &mut EngineState,
        kind: SendKind,
        total: u32,
    ) -> Result<(), PlacementError> {
        self.order_barrier(engine, Barrier::Delivery)?;
        //= RDMAP-5.3-2, 7306-6.3-2
        let Some(wr_id) = self.responder.take_receiving() else { return Ok(()) };
        let mut status = CompletionStatus::Success;
        let mut result = Ok(());
        let mut why = 0;
        let mut flags = CompletionFlags::empty();
        //= 7306-6.1-4
        flags.set(CompletionFlags::SOLICITED, kind.solicited);
        if let Some(stag) = kind.invalidate {
            flags |= CompletionFlags::WITH_INV;
            if engine.stags.copier_of(stag).is_some() {
                self.requester.unstage();
            }
            //= RDMAP-5.3-14
            let invalidated = engine.stags.invalidate_by_peer(self.core.principal(), stag);
            if let Err(fault) = invalidated {
                let reason = Reason::Invalidate { fault, stag };
                status = reason.status();
                flags -= CompletionFlags::WITH_INV;
                why = self.life.record_failure(&self.core, engine, wr_id, reason);
                result = Err(reason.into());
            }
        }
        let mut cqe = self.responder.cqe(&self.core, wr_id, status);
        cqe.byte_len = total;
        //= 7306-6-1, 7306-6.1-3
        if let Some(data) = kind.immediate {
            flags |= CompletionFlags::WITH_IMM;
            cqe.imm_or_inv = data;
            cqe.byte_len = self.responder.take_written();
        }
        if let Some(data) = kind.send_immediate {
            flags |= CompletionFlags::WITH_IMM | CompletionFlags::IMM_WITH_SEND;
            cqe.imm_or_inv = u64::from(data) << 32;
        }
        cqe.flags = flags.bits();
        cqe.diagnosis_id = why;
        if flags.contains(CompletionFlags::WITH_INV) {
            cqe.imm_or_inv = kind.invalidate.map_or(0, |s| u64::from(s.0));
        }
        self.publish_receive(engine, &cqe);
        if let Some(msn) = self.link.last_send() {
            self.requester.send_received(msn);
        }
        result
    }

    // --- Failing -----------------------------------------------------------------------------

    /// Ends the stream because a segment has failed. `build` builds the Terminate payload that
    /// encloses the segment's headers as the fault requires.
    pub(super) fn segment_failed(
        &mut self,
        engine: &mut EngineState,
        error: impl Into<ArrivalError>,
        build: impl FnOnce(Fault) -> Vec<u8>,
    ) {
        let error = match error.into() {
            ArrivalError::Placement(error) => error,
            // The sender on the direct path handles errors of its own memory.
            ArrivalError::Sender(_) => return,
        };
        match error {
            PlacementError::Fault(fault, reason) => {
                let code = fault.code;
                let too_long = code == codes::UNTAGGED_TOO_LONG;
                let receive = too_long.then(|| terminate_detail(code));
                let payload = build(fault);
                //= DDP-7.1-16, RDMAP-5.1-3, RDMAP-5.2.1-5, RDMAP-5.2.2-4, RDMAP-5.3-7, 7306-6.1-5
                self.refuse(engine, Refusal { code, payload, reason, receive });
            }
            PlacementError::Memory(fault) => {
                engine.memory_unreachable(fault);
                if self.end_if_detached(engine, fault) {
                    return;
                }
                let reason = Reason::Memory(fault);
                self.end_for_own_memory(engine, reason, reason.fault().code, None, build);
            }
            PlacementError::Receive(fault, reason) => {
                if let Some(fault) = fault {
                    engine.memory_unreachable(fault);
                    if self.end_if_detached(engine, fault) {
                        return;
                    }
                }
                let code = codes::RDMA_LOCAL_CATASTROPHIC;
                self.end_for_own_memory(engine, reason, code, Some(0), build);
            }
            PlacementError::MalformedReceive(wr_id, reason) => {
                self.receive_failed(engine, wr_id, reason, 0);
                let code = codes::RDMA_LOCAL_CATASTROPHIC;
                self.end_for_own_memory(engine, reason, code, None, build);
            }
            PlacementError::Queue(fault) => self.queue_fault(engine, "receive queue", fault),
            PlacementError::Srq(fault) => self.srq_failed(engine, fault),
        }
    }

    /// Ends the stream after an error in this side's own memory. `receive` is as in [`Refusal`].
    fn end_for_own_memory(
        &mut self,
        engine: &mut EngineState,
        reason: Reason,
        code: TerminateCode,
        receive: Option<u32>,
        build: impl FnOnce(Fault) -> Vec<u8>,
    ) {
        let fault = self.core.transport.own_memory_fault(code);
        let payload = build(fault);
        self.refuse(engine, Refusal { code: fault.code, payload, reason, receive });
    }

    /// Fails the receive into which a datagram could not be written, and then the QP.
    pub(super) fn datagram_write_failed(
        &mut self,
        engine: &mut EngineState,
        fault: MemoryFault,
        wr_id: u64,
    ) {
        engine.memory_unreachable(fault);
        let reason = Reason::Memory(fault);
        self.receive_failed(engine, wr_id, reason, 0);
        self.end_for_own_memory(engine, reason, reason.fault().code, None, |_| Vec::new());
    }

    /// Fails the receive in use, with `detail` in its CQE.
    pub(super) fn current_receive_failed(
        &mut self,
        engine: &mut EngineState,
        reason: Reason,
        detail: u32,
    ) {
        if let Some(wr_id) = self.responder.take_receiving() {
            self.receive_failed(engine, wr_id, reason, detail);
        }
    }

    fn receive_failed(
        &mut self,
        engine: &mut EngineState,
        wr_id: u64,
        reason: Reason,
        detail: u32,
    ) {
        let mut cqe = self.responder.cqe(&self.core, wr_id, reason.status());
        cqe.detail = detail;
        cqe.diagnosis_id = self.life.record_failure(&self.core, engine, wr_id, reason);
        self.publish_receive(engine, &cqe);
    }
}

impl From<Fault> for ArrivalError {
    fn from(fault: Fault) -> Self {
        ArrivalError::Placement(fault.into())
    }
}
