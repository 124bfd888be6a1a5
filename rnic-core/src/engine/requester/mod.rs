//! The send queue of a QP, its requests, and its responses to requests of the peer.
//!
//! A request from the queue ([`post`]) becomes a message ([`message`]) that the link sends segment
//! by segment. It stays [in flight](in_flight) until the bytes are accepted, the response has
//! arrived ([`outbound`]), the peer has acknowledged it ([`acknowledge`]), or every worker has
//! changed its STag table ([`stag_changes`]). Requests complete in posting order ([`complete`]).
//! The peer's Read and Atomic Requests wait here as well ([`inbound`]), because their responses
//! alternate with requests of this side. Payload that only a copier can read is copied to private
//! memory first ([`fetch`], [`staging`]).
//!
//! This module does not use the link and ends no stream. It returns errors as a [`RequestError`].

pub(in crate::engine) mod ack_request;
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
pub(super) mod short_writes;
pub(super) mod stag_changes;
pub(super) mod staging;

use std::collections::VecDeque;

use ack_request::Acknowledgements;
use in_flight::{InFlight, OutboundRequest, Progress};
use inbound_request::{AtomicError, Executing, InboundRequest};
use message::{
    Addressed, Gather, GatherFault, HeaderMessage, HeaderTemplate, Message, MessageSource, Segment,
    take,
};
use staging::StagingBuffer;

use super::order::EarlyBytes;
use super::qp_core::QpCore;
use super::reason::Reason;
use crate::ddp::qn;
use crate::device::cq::CqFault;
use crate::device::{StagChange, StagTable};
use crate::engine::numbers::count;
use crate::rdmap::{IMMEDIATE_LEN, Opcode};
use crate::stream::InboundAtomic;
use rnic_abi::shm::queue::{QueueFault, SendConsumer, SendEntry, SgeList};
use rnic_abi::types::{CompletionStatus, Msn, Stag, TerminateCode};

/// Requests and responses of a QP.
pub(super) struct Requester {
    sq: SendConsumer,
    /// Every request completes with a CQE, even an unsignaled one that succeeds (`sq_sig_all`).
    signal_all: bool,
    /// A request taken from the queue that waits for a fence, for room within ORD or for a CQ slot.
    fenced: Option<SendEntry>,
    in_flight: InFlight,
    /// CQ slots reserved and not yet held by a request in flight.
    slots: u32,
    message: Option<Message>,
    /// The Send that waits for a receive at the other end of the direct path while responses pass.
    aside: Option<Message>,
    /// Immediate Data that follows the message in progress.
    immediate: Option<Immediate>,
    /// Destination of the message in progress, if it is a datagram.
    addressed: Option<Addressed>,
    /// SGEs of the request taken last: the fenced request, or the message in progress if it has
    /// several SGEs.
    elements: SgeList,
    /// Payload of the message in progress that a copier reads or has read.
    staging: StagingBuffer,
    /// Requests of the peer that await a response.
    inbound: VecDeque<InboundRequest>,
    /// No response begins for now.
    responses_held: bool,
    /// Bytes of the source of a Read that were read before its response is due.
    early: Option<Box<EarlyBytes>>,
    /// The request before those in `inbound`: an atomic operation in progress.
    executing: Option<Executing>,
    /// Requests that await a response of the peer, oldest first.
    outbound: VecDeque<OutboundRequest>,
    /// The next message is a response, if there is one. Responses and requests alternate.
    response_next: bool,
    ird: u16,
    ord: u16,
    /// The peer supports the extensions of RFC 7306.
    extensions: bool,
    /// State of acknowledgements on RC. Without it, requests are done when the lower layer has
    /// accepted them.
    acks: Option<Acknowledgements>,
    /// Posted requests must not be begun.
    held_back: bool,
    /// A Send waits for a receive of the peer, so no request is begun.
    peer_waits: bool,
    /// On the direct path: the peer has refused a request and still sends responses. No request is
    /// begun or acknowledged.
    peer_refuses: bool,
    /// While disconnecting: number of requests still to be taken.
    left_to_send: Option<u32>,
    /// Requests that block all later requests until every worker has changed its STag table. The
    /// change of the first request is in progress.
    changing: VecDeque<(u64, StagChange)>,
    /// The request taken last, if it is invalid. It fails once all requests before it are done.
    refused: Option<(u64, Reason)>,
    /// MSN of the next Send, of the next Read or Atomic Request, and of the next Atomic Response,
    /// on their untagged queues.
    send_msn: Msn,
    request_msn: Msn,
    response_msn: Msn,
}

/// Immediate Data after an RDMA Write of the same request.
#[derive(Clone, Copy)]
struct Immediate {
    seq: u64,
    data: u64,
    solicited: bool,
}

/// Error of a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum RequestError {
    /// It cannot be carried out.
    Failed { seq: u64, reason: Reason },
    /// The queue is corrupt.
    Queue(QueueFault),
    /// The completion queue is dead.
    Cq(CqFault),
    /// An atomic operation of the peer cannot be carried out.
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
            responses_held: false,
            early: None,
            executing: None,
            outbound: VecDeque::new(),
            response_next: false,
            ird: 0,
            ord: 0,
            extensions: false,
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

    /// Applies the values negotiated at start-up: IRD, ORD and the RDMAP version.
    pub(super) fn connected(&mut self, ird: u16, ord: u16, version: u8) {
        self.ird = ird;
        self.ord = ord;
        self.extensions = version > 0;
    }

    /// Returns IRD and ORD in this order, or zeros before the QP is connected.
    pub(super) fn depths(&self) -> (u16, u16) {
        (self.ird, self.ord)
    }

    /// Makes the client ring this worker's doorbell when it posts.
    pub(super) fn set_worker(&self, worker: u32) {
        self.sq.queue().set_worker(worker);
    }

    // --- The message in progress -------------------------------------------------------------

    pub(super) fn message(&self) -> Option<&Message> {
        self.message.as_ref()
    }

    /// Drops the message in progress and the message put aside.
    pub(super) fn drop_message(&mut self) {
        self.aside = None;
        self.take_message();
    }

    /// Takes the message in progress, which cannot be sent, and drops the Immediate Data after it.
    pub(super) fn take_message(&mut self) -> Option<Message> {
        self.immediate = None;
        self.message.take()
    }

    /// Reuses the MSN of a Send of which nothing was sent. The stream of a UC QP continues after
    /// a failed request, and its peer expects no gap.
    pub(super) fn unsend(&mut self, message: &Message) {
        if let HeaderTemplate::Untagged { qn: qn::SEND, msn, .. } = message.head {
            self.send_msn = msn;
        }
    }

    /// Drops the message in progress, which an emulated link loses. Its request counts as sent.
    pub(super) fn lose_message(&mut self) {
        let Some(message) = self.take_message() else { return };
        self.unsend(&message);
        if let Some(request) = message.seq.and_then(|seq| self.in_flight.get_mut(seq)) {
            request.progress = Progress::Done(CompletionStatus::Success);
        }
    }

    /// Cuts the next segment of the message in progress.
    pub(super) fn next_segment(&self, mulpdu: usize, dv: u8) -> Option<Segment> {
        self.message.as_ref().map(|message| message.next_segment(mulpdu, dv))
    }

    /// Resolves the memory of the next `len` bytes of the message in progress. Memory that only a
    /// copier can read resolves to the staging buffer.
    #[inline(always)]
    pub(super) fn gather<'t>(
        &'t self,
        len: u32,
        core: &QpCore,
        stags: &'t StagTable,
        out: &mut Gather<'t>,
    ) -> Result<(), GatherFault> {
        self.gather_unstaged(len, core, stags, out)?;
        if let (Some(early), Some(message)) = (&self.early, &self.message) {
            early.fill_in(message, len, out);
        }
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
        let arena = self.sq.mapping();
        let list = self.elements.as_slice();
        message.gather(len, core.principal(), stags, arena, list, out)
    }

    /// Returns true if the whole payload of the message in progress is in shared memory.
    pub(super) fn is_in_shared_memory(&self, stags: &StagTable) -> bool {
        if self.early.is_some() {
            return false;
        }
        self.message
            .as_ref()
            .is_some_and(|message| stags.all_shared(message.stags(self.elements.as_slice())))
    }

    /// Resolves the memory of the next `len` bytes of `ahead`, a copy of the message in progress,
    /// and advances it. Returns true if the message ends with these bytes.
    pub(super) fn gather_ahead<'t>(
        &'t self,
        ahead: &mut Message,
        len: u32,
        core: &QpCore,
        stags: &'t StagTable,
        out: &mut Gather<'t>,
    ) -> Result<bool, GatherFault> {
        // Messages with inline data are not cut ahead.
        let arena = self.sq.mapping();
        let list = self.elements.as_slice();
        ahead.gather(len, core.principal(), stags, arena, list, out)?;
        Ok(ahead.advance(len, list))
    }

    /// Accounts for a sent segment with `len` bytes of payload, on either path. With the last
    /// segment, its request is done, or waits until TCP has accepted `queued` bytes or the peer
    /// acknowledges it.
    // `queued` is not a `Progress`, because that would be written to memory in parts and read back
    // at once in one piece, which waits for all earlier stores, including the payload.
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

    /// Returns the second and last message of a request.
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

    /// Returns the `wr_id` of a request.
    pub(super) fn wr_id(&mut self, seq: u64) -> Option<u64> {
        self.in_flight.get_mut(seq).map(|request| request.wr_id)
    }

    /// Fails a request that has not been sent, even in part. With acknowledgements, it fails once
    /// all requests before it are done (IBTA specification, volume 1, section 10.10.2.2), so that
    /// the first failure that an application sees is the cause of all others.
    ///
    /// # Errors
    ///
    /// Returns the failure if it is due.
    pub(super) fn refuse(&mut self, seq: u64, reason: Reason) -> Result<(), RequestError> {
        if self.acks.is_none() || self.in_flight.first() == Some(seq) {
            self.refused = None;
            return Err(RequestError::Failed { seq, reason });
        }
        self.refused = Some((seq, reason));
        self.request_ack_now();
        Ok(())
    }

    /// Completes a request in error, with this status and record.
    pub(super) fn failed(&mut self, seq: u64, status: CompletionStatus, diagnosis: u64) {
        if let Some(request) = self.in_flight.get_mut(seq) {
            request.progress = Progress::Done(status);
            request.diagnosis = diagnosis;
        }
        self.drop_message();
    }

    /// Fails a request because of the peer, unless it is done.
    pub(super) fn blame(&mut self, seq: u64, status: CompletionStatus, code: TerminateCode) {
        self.in_flight.fail(seq, status, Some(code));
    }

    // --- Disconnecting -----------------------------------------------------------------------

    /// Limits the requests to be sent to those now in the queue. Later requests are flushed.
    pub(super) fn begin_closing(&mut self) {
        //= DDP-6.2.1-3
        self.left_to_send = Some(self.sq.peek().unwrap_or(0));
    }

    /// Returns true if every request posted before the disconnect has been sent and answered.
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

    /// Sets the numbers of the next Send and the next Read or Atomic Request.
    #[cfg(test)]
    pub(super) fn set_next_msn(&mut self, send: Msn, request: Msn) {
        self.send_msn = send;
        self.request_msn = request;
    }

    /// Sets the number of bytes that the oldest Read has received.
    #[cfg(test)]
    pub(super) fn set_received(&mut self, bytes: u64) {
        self.outbound[0].received = bytes;
    }

    /// Returns the number of CQ slots reserved or held by requests in flight.
    pub(super) fn held_slots(&self) -> u32 {
        self.slots + self.in_flight.slots()
    }
}
