//! Requests that are done when the peer has acknowledged them, as those of queue pairs that are
//! wired by hand are.
//!
//! Over TCP a Read of no bytes behind them is the question, and its response the answer: the peer
//! has carried out all that was before it. Two at a time are enough ([`QUESTIONS`]), and each
//! counts as one of the peer's inbound reads. The response to any other request answers as well.
//! About requests of whose success the program does not want to hear, the question comes a little
//! later, or with that about others. By the direct path both ends are seen, and nobody has to ask.
//!
//! [`QUESTIONS`]: super::question::QUESTIONS

use super::in_flight::{OutboundRequest, ResponseKind};
use super::message::{HeaderMessage, HeaderTemplate, Message, MessageSource, take};
use super::question::Acknowledgements;
use super::staging::StagingBuffer;
use super::{RequestError, Requester};
use crate::ddp::{self, qn};
use crate::engine::notice::Notice;
use crate::engine::numbers::count;
use crate::engine::qp_core::QpCore;
use crate::engine::state::EngineState;
use crate::rdmap::{Opcode, READ_REQUEST_LEN, ReadRequest, Terminate};
use crate::shm::queue::QueueFault;
use crate::types::{Msn, Stag, TaggedOffset};

impl Requester {
    /// A stream begins: numbers begin anew. `acknowledged` says whether the peer has to be asked
    /// for acknowledgements, if there are any.
    pub(in crate::engine) fn begin_stream(&mut self, ird: u16, acknowledged: Option<bool>) {
        self.ird = ird;
        self.extensions = true;
        self.by_hand = true;
        let depth = self.sq.queue().shape().capacity;
        self.acks = acknowledged.map(|asks| Acknowledgements::new(asks, depth));
        self.in_flight.begin_stream();
        (self.peer_waits, self.peer_refuses) = (false, false);
        (self.send_msn, self.request_msn, self.response_msn) = (Msn::FIRST, Msn::FIRST, Msn::FIRST);
    }

    /// The stream is gone. What was taken from the queue stays under way, or is done if nobody
    /// would acknowledge it.
    pub(in crate::engine) fn end_stream(&mut self, unreliable: bool) {
        self.drop_message();
        if unreliable {
            self.in_flight.lose();
        }
        self.expect_nothing();
        self.inbound.clear();
        self.executing = None;
    }

    /// Nothing that was asked of the peer will be answered.
    pub(super) fn expect_nothing(&mut self) {
        self.outbound.clear();
        if let Some(acks) = &mut self.acks {
            acks.asked.clear();
        }
    }

    /// Whether requests that are posted are begun, and how many may await a response.
    pub(in crate::engine) fn set_pace(&mut self, begins: bool, ord: u16) {
        (self.held_back, self.ord) = (!begins, ord);
    }

    /// Whether the peer, which is behind TCP, has something to answer.
    pub(in crate::engine) fn awaits_peer(&self) -> bool {
        self.acks.as_ref().is_some_and(|acks| acks.asks) && !self.outbound.is_empty()
    }

    /// A Send of the peer's waits for a receive, or none does; whether the peer is to be told.
    pub(in crate::engine) fn set_waits(&mut self, msn: Option<Msn>) -> bool {
        let Some(acks) = &mut self.acks else { return false };
        acks.waits = msn;
        acks.asks && acks.told != acks.waits
    }

    /// A Send of this side waits for a receive of the peer's, or none does: then no request goes to
    /// it, as none is carried out there. One that waits by the direct path is put aside, because
    /// responses pass it.
    pub(in crate::engine) fn set_peer_waits(&mut self, waits: bool) {
        self.peer_waits = waits;
    }

    /// Notes whether the other end of the direct path is refusing a request of this side, and drops
    /// the request that is being sent to it. The Terminate will blame the refused one.
    pub(in crate::engine) fn set_peer_refuses(&mut self, refuses: bool) {
        self.peer_refuses = refuses;
        if refuses && self.message.as_ref().is_some_and(|message| !message.is_response()) {
            self.take_message();
        }
    }

    /// Puts the message aside that the other end of the direct path has no receive for.
    pub(in crate::engine) fn put_aside(&mut self) {
        if self.acks.is_some() {
            self.aside = self.message.take();
        }
    }

    /// Takes the message up again that was put aside.
    pub(in crate::engine) fn bring_back(&mut self) {
        if let Some(message) = self.aside.take() {
            // What a copier has brought of it has made room.
            self.staging = StagingBuffer::default();
            self.message = Some(message);
        }
    }

    /// Begins what the peer is to be told of receives, if it has to be; whether it has begun.
    pub(super) fn begin_notice(&mut self) -> bool {
        let notice = self.acks.as_mut().and_then(Acknowledgements::notice);
        self.begin_notice_of(notice)
    }

    /// Sets the number of the peer's Write that the Terminate of this side refuses.
    pub(in crate::engine) fn set_refused_write(&mut self, number: u32) {
        if let Some(acks) = self.acks.as_mut().filter(|acks| acks.asks) {
            acks.refused_write = Some(number);
        }
    }

    /// Begins the notice that precedes a Terminate, if there is one; returns true if it has begun.
    pub(in crate::engine) fn begin_last_notice(&mut self) -> bool {
        let refused = self.acks.as_mut().and_then(|acks| acks.refused_write.take());
        self.begin_notice_of(refused.map(Notice::RefusesWrite))
    }

    /// The peer is going to refuse the Write with this number.
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

    /// Whether something has begun that is not done.
    pub(in crate::engine) fn is_under_way(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Whether something is posted that has not begun.
    pub(in crate::engine) fn has_posted(&mut self) -> bool {
        self.fenced.is_some() || self.sq.peek().is_ok_and(|posted| posted > 0)
    }

    /// Requests that are posted and not taken, by a fresh look at the queue.
    pub(in crate::engine) fn posted(&mut self) -> Result<u32, QueueFault> {
        self.sq.peek()
    }

    /// All that has been sent is done, by the direct path. Of the message in progress the peer may
    /// yet refuse the rest.
    #[inline]
    pub(in crate::engine) fn acknowledge_all(&mut self) {
        if self.acks.is_some() && !self.peer_refuses {
            let message = self.aside.as_ref().or(self.message.as_ref());
            let in_progress = message.and_then(|message| message.seq);
            let all = self.in_flight.end();
            self.in_flight.acknowledge(in_progress.unwrap_or(all));
        }
    }

    /// All before this request is done.
    pub(in crate::engine) fn acknowledge_before(&mut self, seq: u64) {
        if self.acks.is_some() {
            self.in_flight.acknowledge(seq);
        }
    }

    /// Whether the next message is a question, as [`Acknowledgements::are_due`] says.
    pub(super) fn has_to_ask(&self, idle: bool) -> bool {
        self.acks.as_ref().is_some_and(|acks| acks.are_due(idle))
    }

    /// Whether a question can wait for a while.
    pub(in crate::engine) fn can_ask_later(&self) -> bool {
        self.acks.as_ref().is_some_and(Acknowledgements::can_wait)
    }

    /// The question does not wait any longer.
    pub(in crate::engine) fn ask_now(&mut self) {
        if let Some(acks) = &mut self.acks {
            acks.awaited = true;
        }
    }

    /// Begins the question.
    pub(super) fn ask(&mut self) {
        let end = self.in_flight.end();
        let Some(acks) = &mut self.acks else { return };
        acks.asked.push(end);
        (acks.unasked, acks.awaited) = (0, false);
        self.outbound.push_back(OutboundRequest {
            seq: None,
            sink: Stag(0),
            to: 0,
            size: 0,
            elements: None,
            received: 0,
            kind: ResponseKind::Acknowledgement,
        });
        let nothing = TaggedOffset(0);
        let wire = ReadRequest {
            sink_stag: Stag(0),
            sink_to: nothing,
            size: 0,
            src_stag: Stag(0),
            src_to: nothing,
        };
        let head = HeaderTemplate::Untagged {
            opcode: Opcode::ReadRequest,
            invalidate: Stag(0),
            qn: qn::READ_REQUEST,
            msn: take(&mut self.request_msn),
        };
        let source = MessageSource::Header(HeaderMessage::ReadRequest(wire));
        let total = count(READ_REQUEST_LEN);
        self.message = Some(Message { head, source, total, sent: 0, seq: None });
    }

    /// A request has been sent that awaits its acknowledgement, and so does the program if it is
    /// signaled.
    #[inline]
    pub(super) fn sent_unacknowledged(&mut self, signaled: bool) {
        if let Some(acks) = &mut self.acks {
            acks.unasked += 1;
            acks.awaited |= signaled;
        }
    }

    /// Requests of the application's that await a response.
    pub(super) fn outbound_requests(&self) -> usize {
        let asked = self.acks.as_ref().map_or(0, |acks| acks.asked.len());
        self.outbound.len() - asked
    }

    /// The oldest question has been answered.
    pub(super) fn question_answered(&mut self) {
        if let Some(asked) = self.acks.as_mut().and_then(|acks| acks.asked.pop_at(0)) {
            self.in_flight.acknowledge(asked);
        }
    }

    /// The request under way that is the Send, or Immediate Data, of this number.
    pub(in crate::engine) fn send_of(&self, msn: Msn) -> Option<u64> {
        self.in_flight.send_of(msn)
    }

    /// The oldest request that needs a receive of the peer's.
    pub(in crate::engine) fn oldest_send(&self) -> Option<u64> {
        self.in_flight.oldest_send()
    }

    /// The oldest request, be it under way or only posted; none if there is none, or no room for
    /// its completion.
    pub(in crate::engine) fn take_oldest(
        &mut self,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<Option<u64>, RequestError> {
        if let Some(seq) = self.in_flight.first() {
            return Ok(Some(seq));
        }
        let Some(entry) = self.take_request(core, engine)? else { return Ok(None) };
        Ok(Some(self.take_in(&entry)))
    }

    /// Takes the oldest request that is only posted, and does not send it; false if there is none,
    /// or no room for its completion.
    pub(in crate::engine) fn take_oldest_posted(
        &mut self,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<bool, RequestError> {
        let Some(entry) = self.take_request(core, engine)? else { return Ok(false) };
        self.take_in(&entry);
        self.in_flight.lose();
        Ok(true)
    }

    /// The request that a Terminate is about, by the header of a segment that it encloses: a Send
    /// by its number, a Write by where it goes, a Read or atomic operation by its number.
    pub(in crate::engine) fn blamed_by_header(&self, t: &Terminate<'_>) -> Option<u64> {
        let header = t.ddp_header?;
        match ddp::Header::parse(header).ok()?.0 {
            ddp::Header::Tagged(h) => self.in_flight.write_to(h.stag, h.to.0),
            ddp::Header::Untagged(h) if h.qn == qn::SEND => self.in_flight.send_of(h.msn),
            ddp::Header::Untagged(_) => self.blamed(t)?.seq,
        }
    }

    /// Notes by which number the peer may blame the request in progress.
    #[inline]
    pub(super) fn mark_send(&mut self, seq: u64, msn: Msn) {
        if self.acks.is_some()
            && let Some(request) = self.in_flight.get_mut(seq)
        {
            request.msn = Some(msn);
        }
    }

    /// Notes where the request in progress writes to.
    #[inline]
    pub(super) fn mark_write(&mut self, seq: u64, stag: Stag, to: u64, len: u32) {
        if self.acks.is_some() {
            self.in_flight.begin_write(seq, stag, to, len);
        }
    }
}
