//! Acknowledgement of requests. On an RC QP a request completes when the peer has acknowledged it.
//!
//! Over TCP the requester sends a zero-length Read after the requests. Its response shows that the
//! peer has executed everything before it. At most two are in flight ([`MAX_ACK_REQUESTS`]), and
//! each counts against the peer's IRD. The response to any other request also acknowledges all
//! requests before it. For unsignaled requests the acknowledgement request is briefly delayed, so
//! that several requests can share it. On the direct path the engine sees both ends, so no
//! acknowledgement request is needed.
//!
//! [`MAX_ACK_REQUESTS`]: super::ack_request::MAX_ACK_REQUESTS

use super::ack_request::Acknowledgements;
use super::in_flight::{OutboundRequest, ResponseKind};
use super::message::{HeaderMessage, HeaderTemplate, Message, MessageSource, take};
use super::staging::StagingBuffer;
use super::{RequestError, Requester};
use crate::ddp::{self, qn};
use crate::engine::numbers::count;
use crate::engine::qp_core::QpCore;
use crate::engine::rnr_notice::Notice;
use crate::engine::state::EngineState;
use crate::rdmap::{Opcode, READ_REQUEST_LEN, ReadRequest, Terminate};
use rnic_abi::shm::queue::QueueFault;
use rnic_abi::types::{Msn, Stag};

impl Requester {
    /// Begins a stream and resets the MSNs. `acknowledged` is `Some(true)` on RC over TCP, where
    /// acknowledgement requests are sent, `Some(false)` on RC over the direct path, and `None` on
    /// UC.
    pub(in crate::engine) fn begin_stream(&mut self, ird: u16, acknowledged: Option<bool>) {
        self.ird = ird;
        self.extensions = true;
        let depth = self.sq.queue().shape().capacity;
        self.acks = acknowledged.map(|over_tcp| Acknowledgements::new(over_tcp, depth));
        self.in_flight.begin_stream();
        self.peer_waits = false;
        self.peer_refuses = false;
        self.send_msn = Msn::FIRST;
        self.request_msn = Msn::FIRST;
        self.response_msn = Msn::FIRST;
    }

    /// Ends the stream. Requests taken from the queue stay in flight, or are done if they would not
    /// be `acknowledged`.
    pub(in crate::engine) fn end_stream(&mut self, acknowledged: bool) {
        self.drop_message();
        if !acknowledged {
            self.in_flight.complete_sending();
        }
        self.expect_nothing();
        self.inbound.clear();
        self.executing = None;
    }

    /// Drops the requests that await a response of the peer.
    pub(super) fn expect_nothing(&mut self) {
        self.outbound.clear();
        if let Some(acks) = &mut self.acks {
            acks.covered.clear();
        }
    }

    /// Sets whether posted requests are begun, and how many may await a response.
    pub(in crate::engine) fn set_pace(&mut self, begins: bool, ord: u16) {
        self.held_back = !begins;
        self.ord = ord;
    }

    /// Returns true if a response over TCP is outstanding.
    pub(in crate::engine) fn awaits_peer(&self) -> bool {
        self.acks.as_ref().is_some_and(|acks| acks.over_tcp) && !self.outbound.is_empty()
    }

    /// Sets the MSN of the peer's Send that waits for a receive, or `None`. Returns true if the
    /// peer must be notified.
    pub(in crate::engine) fn set_waits(&mut self, msn: Option<Msn>) -> bool {
        let Some(acks) = &mut self.acks else { return false };
        acks.waits = msn;
        acks.over_tcp && acks.notified != acks.waits
    }

    /// Sets whether a Send of this side waits for a receive of the peer. While it waits, no request
    /// is sent, because the peer would execute none. On the direct path the waiting Send is set
    /// aside, so that responses can pass it.
    pub(in crate::engine) fn set_peer_waits(&mut self, waits: bool) {
        self.peer_waits = waits;
    }

    /// Sets whether the other end of the direct path is refusing a request of this side. Drops the
    /// request in progress, because the peer would drop it. The Terminate will blame the refused
    /// request.
    pub(in crate::engine) fn set_peer_refuses(&mut self, refuses: bool) {
        self.peer_refuses = refuses;
        if refuses && self.message.as_ref().is_some_and(|message| !message.is_response()) {
            self.take_message();
        }
    }

    /// Sets the message aside: the other end of the direct path has no receive for it.
    pub(in crate::engine) fn put_aside(&mut self) {
        if self.acks.is_some() {
            self.aside = self.message.take();
        }
    }

    /// Resumes the message that was set aside.
    pub(in crate::engine) fn bring_back(&mut self) {
        if let Some(message) = self.aside.take() {
            // The staging buffer may have been reused and no longer holds bytes of this message.
            self.staging = StagingBuffer::default();
            self.message = Some(message);
        }
    }

    /// Begins the notice about missing receives if it is due. Returns true if it has begun.
    pub(super) fn begin_notice(&mut self) -> bool {
        let notice = self.acks.as_mut().and_then(Acknowledgements::notice);
        self.begin_notice_of(notice)
    }

    /// Records that a Send of the peer is done.
    #[inline]
    pub(in crate::engine) fn send_received(&mut self, msn: Msn) {
        if let Some(acks) = &mut self.acks {
            acks.send_received(msn);
        }
    }

    /// Begins the notice that the peer's Sends are done, before a request that is posted. The
    /// program may have posted the request in answer to a Send, which must complete before the
    /// answer arrives. A response that has been sent since shows the same. Returns true if the
    /// notice has begun.
    pub(super) fn begin_done_notice(&mut self) -> bool {
        let owes = self.owes_response();
        let done = self.acks.as_ref().and_then(|acks| acks.unreported(owes));
        if done.is_none() || !self.has_posted() {
            return false;
        }
        if let Some(acks) = &mut self.acks {
            acks.reported();
        }
        self.begin_notice_of(done.map(Notice::Done))
    }

    /// Sets the number of the peer's Write that the Terminate of this side reports.
    pub(in crate::engine) fn set_refused_write(&mut self, number: u32) {
        if let Some(acks) = self.acks.as_mut().filter(|acks| acks.over_tcp) {
            acks.refused_write = Some(number);
        }
    }

    /// Begins the notice that precedes a Terminate, if there is one. Returns true if it has begun.
    pub(in crate::engine) fn begin_last_notice(&mut self) -> bool {
        let refused = self.acks.as_mut().and_then(|acks| acks.refused_write.take());
        self.begin_notice_of(refused.map(Notice::RefusesWrite))
    }

    /// Records the number of the Write that the peer's next Terminate refuses.
    pub(in crate::engine) fn write_refused(&mut self, number: u32) {
        self.in_flight.refuse_write(number);
    }

    fn begin_notice_of(&mut self, notice: Option<Notice>) -> bool {
        let Some(notice) = notice else { return false };
        let (stag, to) = notice.target();
        let head = HeaderTemplate::Tagged { opcode: Opcode::Write, stag, to: to.0 };
        self.message =
            Some(Message { head, source: MessageSource::Empty, total: 0, sent: 0, seq: None });
        true
    }

    /// Returns true if a request is in flight.
    pub(in crate::engine) fn is_under_way(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Returns true if a request is posted and has not begun.
    pub(in crate::engine) fn has_posted(&mut self) -> bool {
        self.fenced.is_some() || self.sq.peek().is_ok_and(|posted| posted > 0)
    }

    /// Reads from the queue the number of posted requests that have not been taken.
    pub(in crate::engine) fn posted(&mut self) -> Result<u32, QueueFault> {
        self.sq.peek()
    }

    /// Acknowledges all requests sent on the direct path, except the message in progress, the rest
    /// of which the peer may still refuse.
    #[inline]
    pub(in crate::engine) fn acknowledge_all(&mut self) {
        if !self.peer_refuses
            && let Some(before) = self.sent_before()
        {
            self.in_flight.acknowledge(before);
        }
    }

    /// Returns the request in progress, or the next one, on RC. All requests before it have been
    /// sent in full.
    #[inline]
    pub(in crate::engine) fn sent_before(&self) -> Option<u64> {
        self.acks.as_ref()?;
        let message = self.aside.as_ref().or(self.message.as_ref());
        let in_progress = message.and_then(|message| message.seq);
        Some(in_progress.unwrap_or_else(|| self.in_flight.end()))
    }

    /// Acknowledges all requests before this one.
    pub(in crate::engine) fn acknowledge_before(&mut self, seq: u64) {
        if self.acks.is_some() {
            self.in_flight.acknowledge(seq);
        }
    }

    /// Acknowledges all requests up to this one, unless it is still being sent.
    pub(in crate::engine) fn acknowledge_through(&mut self, seq: u64) {
        if self.message.as_ref().is_some_and(|message| message.seq == Some(seq)) {
            return;
        }
        self.acknowledge_before(seq + 1);
        if seq + 1 == self.in_flight.end()
            && let Some(acks) = &mut self.acks
        {
            acks.uncovered = 0;
            acks.awaited = false;
        }
    }

    /// Returns true if the next message is an acknowledgement request; see
    /// [`Acknowledgements::are_due`].
    pub(super) fn needs_ack_request(&self, idle: bool) -> bool {
        self.acks.as_ref().is_some_and(|acks| acks.are_due(idle))
    }

    /// Returns true if an acknowledgement request can be delayed.
    pub(in crate::engine) fn can_delay_ack_request(&self) -> bool {
        self.acks.as_ref().is_some_and(Acknowledgements::can_wait)
    }

    /// Ends the delay of the acknowledgement request.
    pub(in crate::engine) fn request_ack_now(&mut self) {
        if let Some(acks) = &mut self.acks {
            acks.awaited = true;
        }
    }

    /// Begins an acknowledgement request.
    pub(super) fn begin_ack_request(&mut self) {
        let end = self.in_flight.end();
        let Some(acks) = &mut self.acks else { return };
        acks.covered.push(end);
        acks.uncovered = 0;
        acks.awaited = false;
        self.outbound.push_back(OutboundRequest {
            seq: None,
            sink: Stag(0),
            to: 0,
            size: 0,
            elements: None,
            received: 0,
            kind: ResponseKind::Acknowledgement,
        });
        let head = HeaderTemplate::Untagged {
            opcode: Opcode::ReadRequest,
            invalidate: Stag(0),
            qn: qn::READ_REQUEST,
            msn: take(&mut self.request_msn),
        };
        let wire = ReadRequest::ACKNOWLEDGEMENT;
        let source = MessageSource::Header(HeaderMessage::ReadRequest(wire));
        let total = count(READ_REQUEST_LEN);
        self.message = Some(Message { head, source, total, sent: 0, seq: None });
    }

    /// Counts a request that was sent and awaits its acknowledgement. If it is signaled, the
    /// program waits for the acknowledgement too.
    #[inline]
    pub(super) fn sent_unacknowledged(&mut self, signaled: bool) {
        if let Some(acks) = &mut self.acks {
            acks.uncovered += 1;
            acks.awaited |= signaled;
        }
    }

    /// Returns the number of requests of the application that await a response.
    pub(super) fn outbound_requests(&self) -> usize {
        let covered = self.acks.as_ref().map_or(0, |acks| acks.covered.len());
        self.outbound.len() - covered
    }

    /// Handles the response to the oldest acknowledgement request.
    pub(super) fn ack_response_received(&mut self) {
        if let Some(covered) = self.acks.as_mut().and_then(|acks| acks.covered.pop_at(0)) {
            self.in_flight.acknowledge(covered);
        }
    }

    /// Returns the Send, or Immediate Data, in flight with this MSN.
    pub(in crate::engine) fn send_of(&self, msn: Msn) -> Option<u64> {
        self.in_flight.send_of(msn)
    }

    /// Returns the oldest request in flight that consumes a receive of the peer.
    pub(in crate::engine) fn oldest_send(&self) -> Option<u64> {
        self.in_flight.oldest_send()
    }

    /// Returns the oldest request in flight, or else takes the oldest posted request. Returns
    /// `None` without a request, or without a CQ slot for its completion.
    pub(in crate::engine) fn take_oldest(
        &mut self,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<Option<u64>, RequestError> {
        if let Some(seq) = self.in_flight.first() {
            return Ok(Some(seq));
        }
        let Some(entry) = self.take_request(core, engine)? else { return Ok(None) };
        Ok(Some(self.push_in_flight(&entry, core)))
    }

    /// Takes the oldest posted request without sending it. Returns false without a request, or
    /// without a CQ slot for its completion.
    pub(in crate::engine) fn take_oldest_posted(
        &mut self,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<bool, RequestError> {
        let Some(entry) = self.take_request(core, engine)? else { return Ok(false) };
        self.push_in_flight(&entry, core);
        self.in_flight.complete_sending();
        Ok(true)
    }

    /// Returns the request that a Terminate blames by the header that it encloses: a Write by its
    /// target, any other request by its MSN.
    pub(in crate::engine) fn blamed_by_header(&self, t: &Terminate<'_>) -> Option<u64> {
        let header = t.ddp_header?;
        match ddp::Header::parse(header).ok()?.0 {
            ddp::Header::Tagged(h) => self.in_flight.write_to(h.stag, h.to.0),
            ddp::Header::Untagged(h) if h.qn == qn::SEND => self.in_flight.send_of(h.msn),
            ddp::Header::Untagged(_) => self.blamed(t)?.seq,
        }
    }

    /// Records the MSN of the request in progress, which identifies it in a Terminate of the peer.
    #[inline]
    pub(super) fn mark_send(&mut self, seq: u64, msn: Msn) {
        if self.acks.is_some()
            && let Some(request) = self.in_flight.get_mut(seq)
        {
            request.msn = Some(msn);
        }
    }

    /// Records the target of the Write in progress, which identifies it in a Terminate of the peer.
    #[inline]
    pub(super) fn mark_write(&mut self, seq: u64, stag: Stag, to: u64, len: u32) {
        if self.acks.is_some() {
            self.in_flight.begin_write(seq, stag, to, len);
        }
    }
}
