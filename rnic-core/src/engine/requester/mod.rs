//! What a queue pair asks of its peer, and what it answers: its send queue and all that comes of
//! it.
//!
//! A request goes from the queue ([`post`]) to a message ([`message`]) that the link sends segment
//! by segment. It stays [in flight](in_flight) until the bytes are accepted, the response has come
//! ([`outbound`]) or every worker has changed its STag table ([`stag_changes`]); then it completes
//! in posting order ([`complete`]). The peer's Read and Atomic Requests wait here as well
//! ([`inbound`]), because their responses take turns with the requests of this side. What only a
//! copier reaches is brought here first ([`fetch`], [`staging`]).
//!
//! This part knows no link and ends no stream: what goes wrong is returned as a [`RequestError`].

pub(super) mod acknowledge;
pub(super) mod complete;
mod datagram;
mod fetch;
pub(super) mod in_flight;
mod inbound;
pub(super) mod inbound_request;
pub(super) mod message;
mod outbound;
mod post;
pub(in crate::engine) mod question;
pub(super) mod short_writes;
pub(super) mod stag_changes;
pub(super) mod staging;

use std::collections::VecDeque;

use in_flight::{InFlight, OutboundRequest, Progress};
use inbound_request::{AtomicError, Executing, InboundRequest};
use message::{
    Addressed, Gather, GatherFault, HeaderMessage, HeaderTemplate, Message, MessageSource, Segment,
    take,
};
use question::Acknowledgements;
use staging::StagingBuffer;

use super::qp_core::QpCore;
use super::reason::Reason;
use crate::ddp::qn;
use crate::device::cq::CqFault;
use crate::device::{StagChange, StagTable};
use crate::engine::numbers::count;
use crate::rdmap::{IMMEDIATE_LEN, Opcode};
use crate::shm::queue::{QueueFault, SendConsumer, SendEntry, SgeList};
use crate::stream::InboundAtomic;
use crate::types::{CompletionStatus, Msn, Stag, TerminateCode};

/// What a queue pair requests and answers.
pub(super) struct Requester {
    sq: SendConsumer,
    /// Every request completes with a CQE, also on success (`sq_sig_all`).
    signal_all: bool,
    /// A request taken from the queue that waits for a fence, or for room within ORD.
    fenced: Option<SendEntry>,
    in_flight: InFlight,
    /// CQ slots reserved and not yet held by a request in flight.
    slots: u32,
    message: Option<Message>,
    /// The Send that waits for a receive at the other end of the direct path, while responses pass.
    aside: Option<Message>,
    /// Immediate Data that follows the message in progress.
    immediate: Option<Immediate>,
    /// Where the message in progress goes, if it is a datagram.
    addressed: Option<Addressed>,
    /// Elements of the request taken last: of the one that is fenced, or of the message if it has
    /// several.
    elements: SgeList,
    /// What a copier brings, or has brought, of the message in progress.
    staging: StagingBuffer,
    /// Requests of the peer's that are to be answered.
    inbound: VecDeque<InboundRequest>,
    /// The one before them, which a copier carries out.
    executing: Option<Executing>,
    /// Requests that the peer is to answer, oldest first.
    outbound: VecDeque<OutboundRequest>,
    /// Whether a response goes before the next request: they alternate.
    response_next: bool,
    ird: u16,
    ord: u16,
    /// The peer may be sent what RFC 7306 has added.
    extensions: bool,
    /// It is wired by hand.
    by_hand: bool,
    /// How requests are acknowledged; none if they are done when the lower layer has them.
    acks: Option<Acknowledgements>,
    /// No request is begun.
    held_back: bool,
    /// A Send waits for a receive of the peer's: no request is begun, either.
    peer_waits: bool,
    /// By the direct path: the peer has refused a request and still sends responses. No request is
    /// begun, and none acknowledged.
    peer_refuses: bool,
    /// While disconnecting: requests still to be taken.
    left_to_send: Option<u32>,
    /// Requests that hold all later ones up until every worker has changed its STag table. The
    /// first has been asked for.
    changing: VecDeque<(u64, StagChange)>,
    /// The request taken last, which cannot be carried out: it fails once all before it are done.
    refused: Option<(u64, Reason)>,
    /// Number of the next Send, of the next Read or Atomic Request, and of the next Atomic
    /// Response, on their untagged queues.
    send_msn: Msn,
    request_msn: Msn,
    response_msn: Msn,
}

/// Immediate Data behind an RDMA Write of the same request.
#[derive(Clone, Copy)]
struct Immediate {
    seq: u64,
    data: u64,
    solicited: bool,
}

/// Why the next request did not become a message.
#[derive(Clone, Copy, Debug)]
pub(super) enum RequestError {
    /// It cannot be carried out.
    Failed { seq: u64, reason: Reason },
    /// The queue itself is nonsense.
    Queue(QueueFault),
    /// The completion queue is dead.
    Cq(CqFault),
    /// It is the peer's, and cannot be answered.
    Atomic(InboundAtomic, AtomicError),
}

impl Requester {
    pub(super) fn new(sq: SendConsumer, signal_all: bool) -> Self {
        Requester {
            sq,
            signal_all,
            fenced: None,
            in_flight: InFlight::default(),
            slots: 0,
            message: None,
            aside: None,
            immediate: None,
            addressed: None,
            elements: SgeList::new(),
            staging: StagingBuffer::default(),
            inbound: VecDeque::new(),
            executing: None,
            outbound: VecDeque::new(),
            response_next: false,
            ird: 0,
            ord: 0,
            extensions: false,
            by_hand: false,
            acks: None,
            held_back: false,
            peer_waits: false,
            peer_refuses: false,
            left_to_send: None,
            changing: VecDeque::new(),
            refused: None,
            send_msn: Msn::FIRST,
            request_msn: Msn::FIRST,
            response_msn: Msn::FIRST,
        }
    }

    /// Takes over what start-up agreed on: how many requests of the peer's, and of this side's, may
    /// await a response, and the version of RDMAP.
    pub(super) fn connected(&mut self, ird: u16, ord: u16, version: u8) {
        (self.ird, self.ord) = (ird, ord);
        self.extensions = version > 0;
    }

    /// The IRD and ORD in force, in this order; 0 before the QP is connected.
    pub(super) fn depths(&self) -> (u16, u16) {
        (self.ird, self.ord)
    }

    /// From now on posting rings this worker's doorbell.
    pub(super) fn set_worker(&self, worker: u32) {
        self.sq.queue().set_worker(worker);
    }

    // --- The message in progress -------------------------------------------------------------

    pub(super) fn message(&self) -> Option<&Message> {
        self.message.as_ref()
    }

    /// Drops the message in progress, and what was put aside for it: the stream ends.
    pub(super) fn drop_message(&mut self) {
        self.aside = None;
        self.take_message();
    }

    /// Takes the message in progress, which cannot be sent; nor is what was to follow it.
    pub(super) fn take_message(&mut self) -> Option<Message> {
        self.immediate = None;
        self.message.take()
    }

    /// Gives the number of a Send of which nothing has left to the next one: the stream of a UC QP
    /// goes on after a request that failed, and its peer expects no gap.
    pub(super) fn unsend(&mut self, message: &Message) {
        if let HeaderTemplate::Untagged { qn: qn::SEND, msn, .. } = message.head {
            self.send_msn = msn;
        }
    }

    /// Cuts the next segment of the message in progress.
    pub(super) fn next_segment(&self, mulpdu: usize, dv: u8) -> Option<Segment> {
        self.message.as_ref().map(|message| message.next_segment(mulpdu, dv))
    }

    /// The memory of the next `len` bytes of the message in progress, those that a copier reaches
    /// by way of the staging buffer.
    #[inline]
    pub(super) fn gather<'t>(
        &'t self,
        len: u32,
        core: &QpCore,
        stags: &'t StagTable,
        out: &mut Gather<'t>,
    ) -> Result<(), GatherFault> {
        self.gather_unstaged(len, core, stags, out)?;
        match &self.message {
            Some(message) => self.staging.fill_in(message, len, out),
            None => Ok(()),
        }
    }

    #[inline]
    fn gather_unstaged<'t>(
        &'t self,
        len: u32,
        core: &QpCore,
        stags: &'t StagTable,
        out: &mut Gather<'t>,
    ) -> Result<(), GatherFault> {
        let Some(message) = &self.message else { return Ok(()) };
        let (arena, list) = (self.sq.mapping(), self.elements.as_slice());
        message.gather(len, core.principal(), stags, arena, list, out)
    }

    /// Whether the payload of the message in progress lies in shared memory, all of it.
    pub(super) fn is_in_shared_memory(&self, stags: &StagTable) -> bool {
        self.message
            .as_ref()
            .is_some_and(|message| stags.all_shared(message.stags(self.elements.as_slice())))
    }

    /// Gathers for a message that is cut off ahead of the one in progress. Returns whether that
    /// ends with these bytes.
    pub(super) fn gather_ahead<'t>(
        &'t self,
        ahead: &mut Message,
        len: u32,
        core: &QpCore,
        stags: &'t StagTable,
        out: &mut Gather<'t>,
    ) -> Result<bool, GatherFault> {
        // Messages with inline data are not sent ahead.
        let (arena, list) = (self.sq.mapping(), self.elements.as_slice());
        ahead.gather(len, core.principal(), stags, arena, list, out)?;
        Ok(ahead.advance(len, list))
    }

    /// A segment with `len` bytes of payload has left, by either path. With the last one of a
    /// message, its request is done, or will be when TCP has accepted the bytes up to `queued`.
    // Not a `Progress`: passed through memory, it would be written in parts and read back at once
    // in one piece, and that waits for all stores before it, those of the payload included.
    #[inline]
    pub(super) fn segment_sent(&mut self, core: &QpCore, len: u32, queued: Option<u64>) {
        let Some(message) = &mut self.message else { return };
        if !message.advance(len, self.elements.as_slice()) {
            return;
        }
        if message.is_response() {
            core.shared.reads_answered.add(1);
        }
        //= 7306-6-2, 7306-6.3-6
        if let Some(immediate) = self.immediate.take() {
            self.message = Some(self.immediate_message(immediate));
            return;
        }
        if let Some(request) = message.seq.and_then(|seq| self.in_flight.get_mut(seq))
            && request.progress == Progress::Sending
        {
            request.progress = match queued {
                _ if self.acks.is_some() => Progress::Unacknowledged,
                Some(end) => Progress::Queued(end),
                None => Progress::Done(CompletionStatus::Success),
            };
            let signaled = request.signaled;
            self.sent_unacknowledged(signaled);
        }
        self.message = None;
    }

    /// The second message of a request that is done with it.
    fn immediate_message(&mut self, immediate: Immediate) -> Message {
        let Immediate { seq, data, solicited } = immediate;
        let opcode = if solicited { Opcode::ImmediateSolicited } else { Opcode::Immediate };
        let msn = take(&mut self.send_msn);
        self.mark_send(seq, msn);
        //= 7306-4.1-3, 7306-6.3-1, 7306-6.3-4
        let head = HeaderTemplate::Untagged { opcode, invalidate: Stag(0), qn: qn::SEND, msn };
        //= 7306-6.1-1
        let source = MessageSource::Header(HeaderMessage::Immediate(data));
        //= 7306-6.1-2, 7306-6.3-5
        Message { head, source, total: count(IMMEDIATE_LEN), sent: 0, seq: Some(seq) }
    }

    // --- Requests that fail ------------------------------------------------------------------

    /// The name that the application gave to a request.
    pub(super) fn wr_id(&mut self, seq: u64) -> Option<u64> {
        self.in_flight.get_mut(seq).map(|request| request.wr_id)
    }

    /// A request of which nothing has left cannot be carried out. With acknowledgements, it fails
    /// once all before it are done (IBTA specification, volume 1, section 10.10.2.2): the first
    /// failure that an application sees is the cause of all others.
    ///
    /// # Errors
    ///
    /// The failure, if it is due.
    pub(super) fn refuse(&mut self, seq: u64, reason: Reason) -> Result<(), RequestError> {
        if self.acks.is_none() || self.in_flight.first() == Some(seq) {
            self.refused = None;
            return Err(RequestError::Failed { seq, reason });
        }
        self.refused = Some((seq, reason));
        self.ask_now();
        Ok(())
    }

    /// A request is done and has failed, for what this record says.
    pub(super) fn failed(&mut self, seq: u64, status: CompletionStatus, diagnosis: u64) {
        if let Some(request) = self.in_flight.get_mut(seq) {
            request.progress = Progress::Done(status);
            request.diagnosis = diagnosis;
        }
        self.drop_message();
    }

    /// Ends a request in error because of the peer; what is done already stays as it is.
    pub(super) fn blame(&mut self, seq: u64, status: CompletionStatus, code: TerminateCode) {
        self.in_flight.fail(seq, status, Some(code));
    }

    // --- Disconnecting -----------------------------------------------------------------------

    /// What is in the queue now is still sent; what is posted later is flushed.
    pub(super) fn begin_closing(&mut self) {
        //= DDP-6.2.1-3
        self.left_to_send = Some(self.sq.peek().unwrap_or(0));
    }

    /// Whether nothing that was posted before the disconnect is left to be sent or answered.
    pub(super) fn is_drained(&self) -> bool {
        self.left_to_send == Some(0)
            && self.fenced.is_none()
            && self.message.is_none()
            && self.aside.is_none()
            && self.in_flight.is_empty()
            && self.outbound.is_empty()
            && self.inbound.is_empty()
            && self.executing.is_none()
    }

    /// Lets the next Send and the next request have these numbers, as after so many.
    #[cfg(test)]
    pub(super) fn number_from(&mut self, send: Msn, request: Msn) {
        (self.send_msn, self.request_msn) = (send, request);
    }

    /// Lets the oldest Read have so many bytes already.
    #[cfg(test)]
    pub(super) fn set_received(&mut self, bytes: u64) {
        self.outbound[0].received = bytes;
    }

    /// Slots of requests that will never complete.
    pub(super) fn held_slots(&self) -> u32 {
        self.slots + count(self.in_flight.len())
    }
}
