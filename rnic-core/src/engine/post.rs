//! From the send queue to an outgoing message: taking requests, checking them, holding them back.
//!
//! A request is taken only when a CQ slot is reserved for it. It is validated on the private copy and
//! refused by status, which ends the QP as verbs demand. Fence, ORD and changes of STags hold the queue;
//! nothing overtakes (RFC 5040 section 5.5).

use super::Shard;
use super::complete::Side;
use super::ledger::{Entry, Progress};
use super::message::{Head, Message, Source, element, total_length};
use super::moving::Stage;
use super::qp::{OutstandingRead, Qp};
use super::reason::Reason;
use super::schedule::REQUEST_COST;
use crate::abi::queue::{SendFlags, SendOpcode};
use crate::ddp::{UntaggedHeader, qn};
use crate::device::stag::LocalFault;
use crate::mpa::MIN_MULPDU;
use crate::rdmap::{Opcode, READ_REQUEST_LEN, ReadRequest};
use crate::shm::queue::{SendEntry, TakeError};
use crate::stream::ReadArrival;
use crate::types::{Msn, Stag, TaggedOffset};

/// Slots reserved at a time, to spare the CQ's lock.
const RESERVE_BATCH: u32 = 32;
/// Bytes of payload that fit the smallest segment.
const SURELY_ONE_SEGMENT: u32 = MIN_MULPDU as u32 - UntaggedHeader::LEN as u32;

impl Qp {
    /// Makes sure that a message is ready to be segmented; false if there is none to send now.
    ///
    /// Read Responses alternate with requests, by message: neither keeps the other waiting for long.
    pub(super) fn pick_message(&mut self, shard: &mut Shard) -> bool {
        if self.message.is_some() {
            return true;
        }
        self.stage = Stage::default();
        for _ in 0..2 {
            let response = self.response_next;
            self.response_next = !response;
            if response {
                if let Some(owed) = self.owed.pop_front() {
                    self.message = Some(response_to(owed));
                    return true;
                }
            } else if self.next_request(shard) {
                return true;
            }
        }
        false
    }

    /// Takes requests until one becomes a message, which pays for itself; false if none does, or if
    /// the turn has ended before.
    fn next_request(&mut self, shard: &mut Shard) -> bool {
        while self.phase.sends() && self.changing.is_empty() && self.deficit > 0 {
            let Some(entry) = self.take_request(shard) else { return false };
            let flags = SendFlags::from_bits_truncate(entry.header.flags);
            let reads = matches!(
                SendOpcode::from_u8(entry.header.opcode),
                Some(SendOpcode::Read | SendOpcode::ReadInvalidate)
            );
            let fenced = flags.contains(SendFlags::FENCE) && !self.reads.is_empty();
            // A QP without a read slot fails its reads (in `begin`) instead of waiting for ever.
            if fenced || (reads && self.ord > 0 && self.reads.len() >= usize::from(self.ord)) {
                self.held = Some(entry);
                return false;
            }
            if self.begin(&entry, shard) {
                return true;
            }
            self.deficit -= REQUEST_COST;
        }
        false
    }

    /// The next request, with a CQ slot reserved for it.
    fn take_request(&mut self, shard: &mut Shard) -> Option<SendEntry> {
        if let Some(held) = self.held.take() {
            return Some(held);
        }
        if self.take_limit == Some(0) {
            return None;
        }
        let pending = match self.sq.pending() {
            Ok(n) => self.take_limit.map_or(n, |limit| n.min(limit)),
            Err(fault) => {
                self.queue_fault(shard, "send queue", fault);
                return None;
            }
        };
        if pending == 0 || !self.have_slot(shard, pending) {
            return None;
        }
        if let Some(limit) = &mut self.take_limit {
            *limit -= 1;
        }
        match self.sq.take(&mut self.elements) {
            Ok(entry) => entry,
            Err(TakeError::Entry(error)) => {
                self.slots -= 1;
                let kind = SendOpcode::from_u8(error.opcode).unwrap_or(SendOpcode::Send);
                let seq = self.ledger.push(Entry::new(error.wr_id, kind, true));
                self.request_failed(seq, Reason::Entry(error.malformed), shard);
                None
            }
            Err(TakeError::Queue(fault)) => {
                self.queue_fault(shard, "send queue", fault);
                None
            }
        }
    }

    /// Whether a CQ slot is at hand; if not, arranges to be woken when there is one.
    pub(super) fn have_slot(&mut self, shard: &mut Shard, wanted: u32) -> bool {
        if self.slots > 0 {
            return true;
        }
        let wanted = wanted.clamp(1, RESERVE_BATCH);
        // Ask to be woken, then look once more: the pair of the client's `release`.
        for wait in [false, true] {
            if wait {
                self.send_cq.wait_for_space(shard.worker);
            }
            match self.send_cq.reserve(wanted) {
                Ok(0) => {}
                Ok(n) => {
                    self.slots = n;
                    return true;
                }
                Err(fault) => {
                    self.cq_failed(shard, Side::Send, fault);
                    return false;
                }
            }
        }
        shard.sessions.stall(self.seat, &self.send_cq, self.key);
        false
    }

    /// Returns slots that no request holds, at the end of a turn.
    pub(super) fn return_slots(&mut self, shard: &mut Shard) {
        // A held request keeps the slot it was taken with.
        let keep = u32::from(self.held.is_some());
        let spare = self.slots.saturating_sub(keep);
        self.slots -= spare;
        shard.unreserve(&self.send_cq, spare);
    }

    /// Starts a request; whether it became a message. Consumes one reserved slot.
    fn begin(&mut self, entry: &SendEntry, shard: &mut Shard) -> bool {
        let h = &entry.header;
        let flags = SendFlags::from_bits_truncate(h.flags);
        let signaled = self.signal_all || flags.contains(SendFlags::SIGNALED);
        let opcode = SendOpcode::from_u8(h.opcode);
        let kind = opcode.unwrap_or(SendOpcode::Send);
        self.slots -= 1;
        let seq = self.ledger.push(Entry::new(h.wr_id, kind, signaled));
        let has_parameters = kind == SendOpcode::BindWindow;
        let plain = SendFlags::from_bits(h.flags).is_some();
        let message = match opcode {
            None => Err(Reason::Opcode(h.opcode)),
            Some(_) if !plain || !(has_parameters || h.params == [0; 3]) => {
                Err(Reason::SpareFlags(h.flags.into()))
            }
            Some(opcode) => self.message_for(opcode, entry, seq, shard),
        };
        match message {
            Ok(Some(message)) => {
                self.message = Some(message);
                true
            }
            Ok(None) => false,
            Err(reason) => {
                self.request_failed(seq, reason, shard);
                false
            }
        }
    }

    /// The message of a request; none if it needs no message.
    fn message_for(
        &mut self,
        opcode: SendOpcode,
        entry: &SendEntry,
        seq: u64,
        shard: &mut Shard,
    ) -> Result<Option<Message>, Reason> {
        let h = &entry.header;
        let remote = |opcode| Head::Tagged { opcode, stag: Stag(h.rkey), to: h.remote_addr };
        match opcode {
            SendOpcode::Write => {
                let (source, total) = self.payload(entry, shard)?;
                let head = remote(Opcode::Write);
                Ok(Some(Message { head, source, total, sent: 0, seq: Some(seq) }))
            }
            SendOpcode::Send | SendOpcode::SendInvalidate => {
                let (source, total) = self.payload(entry, shard)?;
                let solicited = h.flags & SendFlags::SOLICITED.bits() != 0;
                let invalidates = opcode == SendOpcode::SendInvalidate;
                let opcode = Opcode::send(solicited, invalidates);
                let invalidate = Stag(if invalidates { h.inv_rkey } else { 0 });
                let msn = take(&mut self.send_msn);
                let head = Head::Untagged { opcode, invalidate, qn: qn::SEND, msn };
                Ok(Some(Message { head, source, total, sent: 0, seq: Some(seq) }))
            }
            SendOpcode::Read | SendOpcode::ReadInvalidate => {
                self.read_message(opcode == SendOpcode::ReadInvalidate, entry, seq, shard)
            }
            SendOpcode::LocalInvalidate => {
                self.invalidate_locally(Stag(h.inv_rkey), seq, shard)?;
                Ok(None)
            }
            SendOpcode::BindWindow => {
                self.bind_window(entry, seq, shard)?;
                Ok(None)
            }
        }
    }

    /// A Read Request. The sink is one region, as iWARP has it (RFC 5040 section 4.4).
    fn read_message(
        &mut self,
        invalidate: bool,
        entry: &SendEntry,
        seq: u64,
        shard: &Shard,
    ) -> Result<Option<Message>, Reason> {
        let h = &entry.header;
        let sges = self.elements.as_slice();
        if sges.len() > 1 || h.inline_len != 0 {
            return Err(Reason::ReadSink { elements: sges.len() });
        }
        if self.ord == 0 {
            return Err(Reason::NoOrd);
        }
        let sink = sges.first().copied().unwrap_or_default();
        if invalidate && shard.stags.is_window(Stag(sink.lkey)) {
            let (fault, stag) = (LocalFault::InvalidKey, Stag(sink.lkey));
            return Err(Reason::NotOwned { fault, stag });
        }
        if sink.length > 0 {
            let (lkey, addr, len) = (sink.lkey, sink.addr, sink.length);
            shard
                .stags
                .local(self.principal(), lkey, addr, len, true)
                .map_err(|fault| Reason::LocalKey { fault, lkey, addr, len, write: true })?;
        }
        if self.peer_fin {
            // No response can come any more; the stream goes on without it.
            self.read_unanswered(seq, shard);
            return Ok(None);
        }
        let read = OutstandingRead {
            seq: Some(seq),
            sink: Stag(sink.lkey),
            to: sink.addr,
            size: sink.length,
            received: 0,
            invalidate,
        };
        let request = ReadRequest {
            sink_stag: read.sink,
            sink_to: TaggedOffset(read.to),
            size: read.size,
            src_stag: Stag(h.rkey),
            src_to: TaggedOffset(h.remote_addr),
        };
        self.reads.push_back(read);
        if let Some(e) = self.ledger.get_mut(seq) {
            e.progress = Progress::Waiting;
        }
        let msn = take(&mut self.read_msn);
        let head = Head::Untagged {
            opcode: Opcode::ReadRequest,
            invalidate: Stag(0),
            qn: qn::READ_REQUEST,
            msn,
        };
        let total = READ_REQUEST_LEN as u32;
        // The ledger entry is done by the response, not by the bytes of the request.
        let source = Source::ReadRequest(request);
        Ok(Some(Message { head, source, total, sent: 0, seq: None }))
    }

    /// Payload and length of a Send or Write.
    fn payload(&self, entry: &SendEntry, shard: &Shard) -> Result<(Source, u32), Reason> {
        if entry.header.flags & SendFlags::INLINE.bits() != 0 {
            let len = u32::from(entry.header.inline_len);
            let source =
                if len == 0 { Source::Empty } else { Source::Inline { at: entry.inline_at } };
            return Ok((source, len));
        }
        let list = self.elements.as_slice();
        let total = total_length(list).ok_or(Reason::MessageLength)?;
        if total > SURELY_ONE_SEGMENT {
            // All of it is checked before any of it leaves; one segment is when it is gathered.
            for sge in list.iter().filter(|sge| sge.length > 0) {
                element(&shard.stags, self.principal(), sge.lkey, sge.addr, sge.length)?;
            }
        }
        let source = match list {
            _ if total == 0 => Source::Empty,
            [one] => Source::Element(*one),
            _ => Source::Elements { index: 0, offset: 0 },
        };
        Ok((source, total))
    }
}

/// The response to a read we owe.
fn response_to(owed: ReadArrival) -> Message {
    let r = owed.request;
    let head = Head::Tagged { opcode: Opcode::ReadResponse, stag: r.sink_stag, to: r.sink_to.0 };
    let source = match r.size {
        0 => Source::Empty,
        _ => Source::Region(owed),
    };
    Message { head, source, total: r.size, sent: 0, seq: None }
}

fn take(msn: &mut Msn) -> Msn {
    let this = *msn;
    *msn = this.next();
    this
}
