//! Turns entries of the send queue into outgoing messages: takes requests, checks them and holds
//! them back.
//!
//! A request is taken only when a CQ slot is reserved for it, unless sends may overrun the CQ. It
//! is copied to private memory and validated there. An invalid request completes in error and moves
//! the QP to Error, or to SQE on UC and UD. Fences, ORD and STag changes hold back the queue, and
//! no request overtakes another (RFC 5040 section 5.5).

use super::in_flight::{OutboundRequest, Progress, Request, ResponseKind};
use super::message::{
    HeaderMessage, HeaderTemplate, Message, MessageSource, resolve_sge, take, total_length,
};
use super::staging::StagingBuffer;
use super::{Immediate, RequestError, Requester};
use crate::ddp::{UntaggedHeader, qn};
use crate::device::cq::CqFault;
use crate::device::stag::LocalFault;
use crate::engine::fault_rules::RequestFault;
use crate::engine::life::LifeCycle;
use crate::engine::numbers::{count, high_half, low_half};
use crate::engine::qp_core::QpCore;
use crate::engine::reason::Reason;
use crate::engine::schedule::REQUEST_COST;
use crate::engine::state::EngineState;
use crate::mpa::MIN_MULPDU;
use crate::rdmap::{ATOMIC_REQUEST_LEN, AtomicRequest, Opcode, READ_REQUEST_LEN, ReadRequest};
use rnic_abi::abi::queue::{SendFlags, SendOpcode, Sge};
use rnic_abi::shm::queue::{SendEntry, TakeError};
use rnic_abi::types::{ATOMIC_LEN, AtomicOperation, Stag, TaggedOffset};

/// CQ slots reserved at a time, to take the CQ's lock less often.
const RESERVE_BATCH: u32 = 32;
/// Payload bytes that fit in the smallest segment.
const MIN_SEGMENT_PAYLOAD: u32 = MIN_MULPDU as u32 - count(UntaggedHeader::LEN);

/// A request that the peer answers: a Read or an atomic operation.
struct PeerRequest {
    opcode: Opcode,
    wire: HeaderMessage,
    /// Kind of the response.
    kind: ResponseKind,
    /// Buffer for the response.
    sink: Sge,
}

impl Requester {
    /// Makes a message ready to be segmented. Returns false if no message can be sent now.
    ///
    /// Responses and requests alternate, one message each, so that neither waits long for the
    /// other.
    pub(in crate::engine) fn next_message(
        &mut self,
        core: &mut QpCore,
        life: &LifeCycle,
        engine: &mut EngineState,
    ) -> Result<bool, RequestError> {
        //= DDP-5.3-1, DDP-5.3-2
        if self.message.is_some() {
            return Ok(true);
        }
        self.staging = StagingBuffer::default();
        // Needed even on a QP that refuses a request: its peer may be timing an RNR wait.
        if self.begin_notice() {
            return Ok(true);
        }
        if self.peer_refuses || !life.phase().sends() {
            return self.begin_response(core, engine);
        }
        if self.peer_waits {
            return self.begin_response(core, engine);
        }
        self.bring_back();
        if self.message.is_some() {
            return Ok(true);
        }
        if self.needs_ack_request(false) {
            self.begin_ack_request();
            return Ok(true);
        }
        for _ in 0..2 {
            let response = self.response_next;
            self.response_next = !response;
            let found = if response {
                self.begin_response(core, engine)?
            } else if self.begin_done_notice() {
                true
            } else {
                match self.next_request(core, life, engine) {
                    Err(RequestError::Failed { seq, reason }) => {
                        self.refuse(seq, reason)?;
                        false
                    }
                    found => found?,
                }
            };
            if found {
                return Ok(true);
            }
        }
        if self.needs_ack_request(true) {
            self.begin_ack_request();
            return Ok(true);
        }
        Ok(false)
    }

    /// Takes requests until one produces a message. Returns false if no request does, or if the
    /// turn ends first. A message is charged when it is sent.
    fn next_request(
        &mut self,
        core: &mut QpCore,
        life: &LifeCycle,
        engine: &mut EngineState,
    ) -> Result<bool, RequestError> {
        if let Some((seq, reason)) = self.refused {
            return Err(RequestError::Failed { seq, reason });
        }
        while life.phase().sends()
            && !self.held_back
            && self.changing.is_empty()
            && !core.turn.is_over()
        {
            let Some(entry) = self.take_request(core, engine)? else { return Ok(false) };
            let flags = SendFlags::from_bits_truncate(entry.header.flags);
            let awaits =
                SendOpcode::from_u8(entry.header.opcode).is_some_and(SendOpcode::awaits_response);
            let fenced = flags.contains(SendFlags::FENCE) && self.awaits_response();
            // With an ORD of 0, Reads and atomics fail in `begin` instead of waiting forever.
            //= RDMAP-6.1-6, 7306-5.2-2
            let full = self.ord > 0 && self.outbound_requests() >= usize::from(self.ord);
            if fenced || (awaits && full) {
                self.fenced = Some(entry);
                return Ok(false);
            }
            let fault = match core.request_fault(&entry, engine) {
                RequestFault::None => None,
                RequestFault::Fails(reason) => Some(reason),
                RequestFault::Waits => {
                    self.fenced = Some(entry);
                    return Ok(false);
                }
            };
            let begun = self.begin(&entry, fault, core, life, engine);
            if !matches!(begun, Ok(true)) {
                core.turn.charge(REQUEST_COST);
            }
            if begun? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Takes the next request, with a CQ slot reserved for it if it is signaled and sends cannot
    /// overrun the CQ.
    #[inline(always)]
    pub(super) fn take_request(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> Result<Option<SendEntry>, RequestError> {
        //= RDMAP-5.5-13
        let fenced = self.fenced.take();
        let pending = if fenced.is_some() { 1 } else { self.left_to_take()? };
        if pending == 0 {
            return Ok(None);
        }
        let entry = match fenced {
            Some(fenced) => fenced,
            None => match self.take_posted()? {
                Some(entry) => entry,
                None => return Ok(None),
            },
        };
        if self.reserves_slot(&entry, core)
            && !self.have_slot(pending, core, engine).map_err(RequestError::Cq)?
        {
            self.fenced = Some(entry);
            return Ok(None);
        }
        Ok(Some(entry))
    }

    /// Returns the number of posted requests that may be taken.
    #[inline(always)]
    fn left_to_take(&mut self) -> Result<u32, RequestError> {
        if self.left_to_send == Some(0) {
            return Ok(0);
        }
        let pending = self.sq.pending().map_err(RequestError::Queue)?;
        Ok(self.left_to_send.map_or(pending, |left| pending.min(left)))
    }

    /// Takes the next request from the queue.
    #[inline(always)]
    fn take_posted(&mut self) -> Result<Option<SendEntry>, RequestError> {
        if let Some(left) = &mut self.left_to_send {
            *left -= 1;
        }
        //= DDP-5.3-2, RDMAP-5.1-6, RDMAP-5.2.1-7, RDMAP-5.3-9, RDMAP-5.5-13
        //= 7306-5.2.1-19, 7306-6.3-6
        match self.sq.take(&mut self.elements) {
            Ok(entry) => Ok(entry),
            Err(TakeError::Entry(error)) => {
                let kind = SendOpcode::from_u8(error.opcode).unwrap_or(SendOpcode::Send);
                let seq = self.in_flight.push(Request::new(error.wr_id, kind, true));
                Err(RequestError::Failed { seq, reason: Reason::Entry(error.malformed) })
            }
            Err(TakeError::Queue(fault)) => Err(RequestError::Queue(fault)),
        }
    }

    /// Returns true if a CQ slot is reserved. Otherwise the QP is woken when one is free.
    ///
    /// # Errors
    ///
    /// The CQ is dead or corrupt, or a send completion overruns it.
    pub(super) fn have_slot(
        &mut self,
        wanted: u32,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> Result<bool, CqFault> {
        if self.slots > 0 {
            return Ok(true);
        }
        let wanted = wanted.clamp(1, RESERVE_BATCH);
        // Request a wake-up, then check once more; pairs with the client's `release`.
        for wait in [false, true] {
            if wait {
                core.send_cq.wait_for_space(engine.worker);
            }
            match core.send_cq.reserve(wanted)? {
                0 if core.send_cq.is_overrun_by_send() => return Err(CqFault::Full),
                0 => {}
                n => {
                    self.slots = n;
                    return Ok(true);
                }
            }
        }
        engine.doorbells.await_space(core.slot, &core.send_cq, core.key);
        Ok(false)
    }

    /// Returns unused slots at the end of a turn.
    pub(in crate::engine) fn return_slots(&mut self, core: &QpCore, engine: &mut EngineState) {
        let spare = std::mem::take(&mut self.slots);
        engine.unreserve(&core.send_cq, spare);
    }

    /// Puts a request in flight, with the slot reserved for it if any. Returns its sequence number.
    #[inline(always)]
    pub(super) fn push_in_flight(&mut self, entry: &SendEntry, core: &QpCore) -> u64 {
        let h = &entry.header;
        let signaled = self.signals(entry);
        let has_slot = self.reserves_slot(entry, core);
        let kind = SendOpcode::from_u8(h.opcode).unwrap_or(SendOpcode::Send);
        self.slots -= u32::from(has_slot);
        let request = Request::new(h.wr_id, kind, signaled);
        self.in_flight.push(Request { has_slot, ..request })
    }

    /// Returns true if the request completes with a CQE even if it succeeds.
    #[inline]
    fn signals(&self, entry: &SendEntry) -> bool {
        let flags = SendFlags::from_bits_truncate(entry.header.flags);
        self.signal_all || flags.contains(SendFlags::SIGNALED)
    }

    /// Returns true if the request holds a CQ slot from its start.
    #[inline]
    fn reserves_slot(&self, entry: &SendEntry, core: &QpCore) -> bool {
        self.signals(entry) && !core.send_cq.sends_overrun()
    }

    /// Starts a request and consumes the slot reserved for it. Returns true if a message is in
    /// progress. `fault` is the reason why a rule fails the request.
    fn begin(
        &mut self,
        entry: &SendEntry,
        fault: Option<Reason>,
        core: &mut QpCore,
        life: &LifeCycle,
        engine: &mut EngineState,
    ) -> Result<bool, RequestError> {
        let h = &entry.header;
        let opcode = SendOpcode::from_u8(h.opcode);
        let seq = self.push_in_flight(entry, core);
        let spare = &h.params[opcode.map_or(0, SendOpcode::parameters)..];
        let plain = SendFlags::from_bits(h.flags).is_some() && spare.iter().all(|word| *word == 0);
        let begun = match opcode {
            _ if let Some(reason) = fault => Err(reason),
            None => Err(Reason::Opcode(h.opcode)),
            Some(_) if !plain => Err(Reason::UnsupportedFlags(h.flags.into())),
            Some(opcode) if !core.transport.carries(opcode) => Err(Reason::Unreliable),
            //= 7306-4.1-1
            Some(opcode) if opcode.is_extension() && !self.extensions => Err(Reason::NoExtensions),
            Some(opcode) => self.begin_message(opcode, entry, seq, core, life, engine),
        };
        match begun {
            Ok(()) => Ok(self.message.is_some()),
            //= RDMAP-3.1-3
            Err(reason) => Err(RequestError::Failed { seq, reason }),
        }
    }

    /// Begins the message of a request, if it needs one. The message is built in place, because
    /// moving it took a tenth of the time of a small Write.
    fn begin_message(
        &mut self,
        opcode: SendOpcode,
        entry: &SendEntry,
        seq: u64,
        core: &mut QpCore,
        life: &LifeCycle,
        engine: &mut EngineState,
    ) -> Result<(), Reason> {
        let h = &entry.header;
        let remote =
            |opcode| HeaderTemplate::Tagged { opcode, stag: Stag(h.rkey), to: h.remote_addr };
        match opcode {
            SendOpcode::Write | SendOpcode::WriteImmediate => {
                let (source, total) = self.payload(entry, core, engine)?;
                //= RDMAP-4.1-3, RDMAP-4.1-5, RDMAP-5.1-1
                let head = remote(Opcode::Write);
                self.mark_write(seq, Stag(h.rkey), h.remote_addr, total);
                if opcode == SendOpcode::WriteImmediate {
                    let solicited = h.flags & SendFlags::SOLICITED.bits() != 0;
                    self.immediate = Some(Immediate { seq, data: h.params[0], solicited });
                }
                self.message = Some(Message { head, source, total, sent: 0, seq: Some(seq) });
            }
            SendOpcode::Send | SendOpcode::SendInvalidate | SendOpcode::SendImmediate => {
                let (source, total) = self.payload(entry, core, engine)?;
                let solicited = h.flags & SendFlags::SOLICITED.bits() != 0;
                let invalidates = opcode == SendOpcode::SendInvalidate;
                //= RDMAP-5.3-12
                let (opcode, invalidate) = match opcode {
                    SendOpcode::SendImmediate if !core.transport.has_roce_requests() => {
                        return Err(Reason::NoImmediateSends);
                    }
                    SendOpcode::SendImmediate if solicited => {
                        (Opcode::SendSolicitedWithImmediate, high_half(h.params[0]))
                    }
                    SendOpcode::SendImmediate => {
                        (Opcode::SendWithImmediate, high_half(h.params[0]))
                    }
                    //= RDMAP-4.1-9, RDMAP-5.3-12
                    _ if invalidates => (Opcode::send(solicited, true), h.inv_rkey),
                    _ => (Opcode::send(solicited, false), 0),
                };
                let invalidate = Stag(invalidate);
                //= DDP-4.3-7
                let msn = take(&mut self.send_msn);
                self.mark_send(seq, msn);
                //= RDMAP-4.1-3, RDMAP-4.1-5, RDMAP-5.3-1
                let head = HeaderTemplate::Untagged { opcode, invalidate, qn: qn::SEND, msn };
                self.message = Some(Message { head, source, total, sent: 0, seq: Some(seq) });
            }
            SendOpcode::Read | SendOpcode::ReadInvalidate => {
                let invalidate = opcode == SendOpcode::ReadInvalidate;
                self.message = self.read_message(invalidate, entry, seq, core, life, engine)?;
            }
            SendOpcode::FetchAdd | SendOpcode::CompareSwap => {
                let operation = opcode.operation(h.params).ok_or(Reason::Opcode(h.opcode))?;
                self.message = self.atomic_message(operation, entry, seq, core, life, engine)?;
            }
            SendOpcode::LocalInvalidate => {
                let stag = Stag(h.inv_rkey);
                if core.transport.restricts_stags()
                    && engine.stags.is_ordinary_region(core.principal(), stag)
                {
                    return Err(Reason::NotOwned { fault: LocalFault::OrdinaryRegion, stag });
                }
                self.invalidate_locally(stag, seq, core, engine)?;
            }
            SendOpcode::BindWindow => self.bind_window(entry, seq, core, engine)?,
        }
        Ok(())
    }

    /// Makes a Read Request. On iWARP the sink is one region (RFC 5040 section 4.4). On an RC QP it
    /// may be scattered, as on a RoCE adapter; the peer then sees the STag of the first SGE and a
    /// tagged offset of 0, which it only echoes.
    fn read_message(
        &mut self,
        invalidate: bool,
        entry: &SendEntry,
        seq: u64,
        core: &QpCore,
        life: &LifeCycle,
        engine: &EngineState,
    ) -> Result<Option<Message>, Reason> {
        let h = &entry.header;
        let sges = self.elements.as_slice();
        let scatters = sges.len() > 1;
        let may_scatter = core.transport.has_roce_requests() && !invalidate;
        if scatters && !may_scatter || h.inline_len != 0 {
            return Err(Reason::ReadSink { elements: sges.len() });
        }
        let length = message_length(core, sges)?;
        let mut sink = sges.first().copied().unwrap_or_default();
        if scatters {
            sink = Sge { addr: 0, length, ..sink };
        }
        if invalidate && engine.stags.is_window(Stag(sink.lkey)) {
            let fault = LocalFault::InvalidKey;
            let stag = Stag(sink.lkey);
            return Err(Reason::NotOwned { fault, stag });
        }
        let kind = if invalidate { ResponseKind::ReadInvalidate } else { ResponseKind::Read };
        let wire = ReadRequest {
            sink_stag: Stag(sink.lkey),
            sink_to: TaggedOffset(sink.addr),
            size: sink.length,
            src_stag: Stag(h.rkey),
            src_to: TaggedOffset(h.remote_addr),
        };
        //= RDMAP-4.2-1
        let wire = HeaderMessage::ReadRequest(wire);
        let request = PeerRequest { opcode: Opcode::ReadRequest, wire, kind, sink };
        self.request_message(request, seq, core, life, engine)
    }

    /// Makes an Atomic Request (RFC 7306 section 5). The sink is one SGE of eight bytes. The
    /// peer checks the address of the word.
    fn atomic_message(
        &mut self,
        operation: AtomicOperation,
        entry: &SendEntry,
        seq: u64,
        core: &QpCore,
        life: &LifeCycle,
        engine: &EngineState,
    ) -> Result<Option<Message>, Reason> {
        let h = &entry.header;
        let sges = self.elements.as_slice();
        let &[sink @ Sge { length: ATOMIC_LEN, .. }] = sges else {
            let bytes = sges.iter().map(|sge| u64::from(sge.length)).sum();
            return Err(Reason::AtomicSink { elements: sges.len(), bytes });
        };
        //= 7306-5.1.1-10, 7306-5.1.2-11
        let wire = HeaderMessage::AtomicRequest(AtomicRequest {
            operation,
            // Used only by readers of packet traces.
            //= 7306-5.2.1-5
            id: low_half(seq),
            stag: Stag(h.rkey),
            to: TaggedOffset(h.remote_addr),
        });
        let kind = ResponseKind::Atomic;
        let request = PeerRequest { opcode: Opcode::AtomicRequest, wire, kind, sink };
        self.request_message(request, seq, core, life, engine)
    }

    /// Makes a request that the peer answers.
    fn request_message(
        &mut self,
        request: PeerRequest,
        seq: u64,
        core: &QpCore,
        life: &LifeCycle,
        engine: &EngineState,
    ) -> Result<Option<Message>, Reason> {
        let PeerRequest { opcode, wire, kind, sink } = request;
        if self.ord == 0 {
            return Err(Reason::NoOrd);
        }
        let lkey = sink.lkey;
        let to = sink.addr;
        let size = sink.length;
        let elements = match self.elements.as_slice() {
            several @ [_, _, ..] => several,
            _ => &[sink],
        };
        for &Sge { addr, length: len, lkey } in elements.iter().filter(|sge| sge.length > 0) {
            engine
                .stags
                .local(core.principal(), lkey, addr, len, true)
                .map_err(|fault| Reason::LocalKey { fault, lkey, addr, len, write: true })?;
        }
        let elements = (elements.len() > 1).then(|| elements.into());
        if life.peer_fin() {
            // No response can arrive. The stream continues without the request.
            self.request_unanswered(seq, core, life, engine);
            return Ok(None);
        }
        let sink = Stag(lkey);
        //= 7306-5.2.2-9
        self.outbound.push_back(OutboundRequest {
            seq: Some(seq),
            sink,
            to,
            size,
            elements,
            received: 0,
            kind,
        });
        if let Some(request) = self.in_flight.get_mut(seq) {
            //= RDMAP-5.5-19, 7306-5.4-8
            request.progress = Progress::Waiting;
        }
        //= DDP-4.3-7
        let msn = take(&mut self.request_msn);
        //= RDMAP-4.1-3, RDMAP-4.1-5, RDMAP-5.2.1-1, 7306-5.2.1-13
        let head = HeaderTemplate::Untagged {
            opcode,
            //= RDMAP-4.1-9, 7306-4.1-3
            invalidate: Stag(0),
            //= 7306-5.2-1, 7306-5.2.1-17
            qn: qn::READ_REQUEST,
            msn,
        };
        let total = count(match opcode {
            Opcode::AtomicRequest => ATOMIC_REQUEST_LEN,
            _ => READ_REQUEST_LEN,
        });
        // The response, not the bytes of the request, completes the request in flight.
        let source = MessageSource::Header(wire);
        //= RDMAP-5.2-1
        Ok(Some(Message { head, source, total, sent: 0, seq: None }))
    }

    /// Returns the payload and length of a Send or Write.
    #[inline(always)]
    pub(super) fn payload(
        &self,
        entry: &SendEntry,
        core: &QpCore,
        engine: &EngineState,
    ) -> Result<(MessageSource, u32), Reason> {
        if entry.header.flags & SendFlags::INLINE.bits() != 0 {
            let len = u32::from(entry.header.inline_len);
            let source = if len == 0 {
                MessageSource::Empty
            } else {
                MessageSource::Inline { at: entry.inline_at }
            };
            return Ok((source, len));
        }
        let list = self.elements.as_slice();
        let total = message_length(core, list)?;
        if total > MIN_SEGMENT_PAYLOAD {
            // The whole payload is checked before any of it is sent. A message of one segment is
            // checked when it is gathered.
            for sge in list.iter().filter(|sge| sge.length > 0) {
                resolve_sge(&engine.stags, core.principal(), sge.lkey, sge.addr, sge.length)?;
            }
        }
        let source = match list {
            _ if total == 0 => MessageSource::Empty,
            [one] => MessageSource::Element(*one),
            _ => MessageSource::Elements { index: 0, offset: 0 },
        };
        Ok((source, total))
    }
}

/// Returns the length of a message with these SGEs.
#[inline(always)]
fn message_length(core: &QpCore, list: &[Sge]) -> Result<u32, Reason> {
    let len = total_length(list).ok_or(Reason::MessageLength)?;
    let most = core.transport.max_message();
    if len > most { Err(Reason::MessageTooLong { len, most }) } else { Ok(len) }
}
