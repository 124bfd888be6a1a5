//! The direct path: both ends are QPs of this engine, and a segment goes from memory to memory in
//! one copy.
//!
//! The sender cuts the same DDP segments that it would send over TCP. It passes each segment to
//! [`Qp::segment_arrived`] in the form that the TCP path produces ([`incoming_of`]). Versions,
//! queue numbers and MSNs of a sender in this engine are always correct and need no check. IRD,
//! which it can exceed, is checked here. Code for memory, buffers, completions, errors and
//! Terminates is shared with the TCP path. Only MPA, TCP and two copies are omitted.

use crate::ddp::{Header, TaggedHeader, UntaggedHeader};
use crate::engine::arrival::{ArrivalError, PayloadSource, SegmentFate};
use crate::engine::incoming::{Incoming, Origin};
use crate::engine::link::Link;
use crate::engine::numbers::ulpdu_len;
use crate::engine::qp::{IncomingFpdu, OutgoingFpdu, Qp};
use crate::engine::reason::{PlacementError, Reason};
use crate::engine::requester::message::{
    GatherFault, HeaderMessage, HeaderTemplate, Message, Segment,
};
use crate::engine::schedule::REQUEST_COST;
use crate::engine::state::{EngineState, PeerSignal};
use crate::rdmap::{Opcode, Terminate};
use crate::stream::inbound::{InboundAtomic, InboundRead, SendKind};
use rnic_abi::shm::attached::CopyEnd;
use rnic_abi::types::Stag;

impl Qp {
    /// Delivers messages of `self` to `peer` until the turn or the work ends.
    pub(in crate::engine) fn run_direct(&mut self, peer: &mut Qp, engine: &mut EngineState) {
        let emulated = self.emulation.is_some() || peer.emulation.is_some();
        if emulated && self.run_emulated(Some(peer), engine) {
            return;
        }
        let mut unretired = 0;
        self.requester.set_peer_refuses(peer.is_refusing());
        if !peer.responder.is_blocked() {
            // All copies to the peer's memory are done.
            self.requester.acknowledge_all();
        }
        self.set_peer_waits(engine, peer.responder.awaits_receive());
        while !self.core.turn.is_over()
            && self.life.phase().responds()
            && peer.life.phase().receives()
            && peer.responder.takes_responses()
        {
            if self.life.phase().sends() && self.hand_over_short_writes(peer, engine) {
                continue;
            }
            if !self.next_message(engine) {
                break;
            }
            let Some(taken) = self.hand_over_next(peer, engine) else { break };
            self.core.turn.charge(i64::from(taken).max(REQUEST_COST));
            unretired += 1;
            if unretired == RETIRE_EVERY {
                self.retire(engine);
                unretired = 0;
            }
        }
        self.retire(engine);
        self.requester.return_slots(&self.core, engine);
        self.finish_if_drained(engine);
    }

    /// Hands the next segment, or a run of segments, to the peer. Returns its payload length in
    /// bytes, or `None` if the payload must be staged first.
    #[inline]
    fn hand_over_next(&mut self, peer: &mut Qp, engine: &mut EngineState) -> Option<u32> {
        if let Some(run) = self.next_run(engine)
            && self.hand_over_run(peer, engine, run)
        {
            return Some(run.len);
        }
        //= DDP-5.3-2
        // DDP version and segment size are as on a TCP connection inside this machine.
        let segment = self.requester.next_segment(SEGMENT, VERSION)?;
        self.hand_over(peer, engine, segment).then_some(segment.len)
    }

    /// Cuts several segments of a long message as one, because one long copy is faster. This
    /// requires shared memory at both ends and a long turn (no other user has turns or waits for
    /// this CPU), and is limited to the segments that the rest of this turn pays for.
    #[inline]
    fn next_run(&self, engine: &EngineState) -> Option<Segment> {
        let message = self.requester.message()?;
        let HeaderTemplate::Tagged { stag, .. } = message.head else { return None };
        let paid_for = self.core.turn.left() / u64::from(PAYLOAD);
        let segments = paid_for.min(RUN) as usize;
        let is_short = message.total - message.sent <= PAYLOAD || segments < 2;
        if is_short || engine.schedule.quantum() < i64::from(PAYLOAD) * RUN.cast_signed() {
            return None;
        }
        let shared = engine.stags.all_shared(std::iter::once(stag))
            && self.requester.is_in_shared_memory(&engine.stags);
        shared.then(|| {
            let len = segments * PAYLOAD as usize + TaggedHeader::LEN;
            message.next_segment(len, VERSION)
        })
    }

    /// Hands a run of segments to the peer. Returns false if the peer does not accept the run as a
    /// whole. The segments are then sent one by one, so that the segments before a fault arrive and
    /// the Terminate encloses the segment at fault.
    fn hand_over_run(&mut self, peer: &mut Qp, engine: &mut EngineState, run: Segment) -> bool {
        if peer.core.order.is_some() || peer.core.faults.is_some() {
            return false;
        }
        let Some(message) = self.requester.message() else { return false };
        let incoming = incoming_of(message, &run);
        // The length is never used, since a fault is found again when the segment is sent alone.
        let origin = Origin::Direct { header: run.header, len: 0 };
        let source =
            PayloadSource::Sender { requester: &self.requester, core: &self.core, len: run.len };
        peer.note_communication(engine);
        let arrived = peer.segment_arrived(engine, incoming, source, origin);
        let consumed = matches!(arrived, Ok(SegmentFate::Consumed));
        if consumed {
            let segments = run.len.div_ceil(PAYLOAD);
            peer.fpdu_received(IncomingFpdu::Run { segments });
            self.fpdu_sent(&OutgoingFpdu::Run { run, segments }, None);
            if !peer.responder.is_blocked() {
                self.requester.acknowledge_all();
            }
        }
        consumed
    }

    /// Hands a segment to the peer. Returns false if its payload must be staged first.
    #[inline]
    fn hand_over(&mut self, peer: &mut Qp, engine: &mut EngineState, segment: Segment) -> bool {
        let Some(message) = self.requester.message() else { return true };
        let Segment { header, len, .. } = segment;
        // A segment is shorter than 64 KiB.
        let origin = Origin::Direct { header, len: ulpdu_len(header.len() + len as usize) };
        let incoming = incoming_of(message, &segment);
        let arrived = if incoming.awaits_response() && !peer.requester.ird_available() {
            Err(Reason::RequestsFull { ird: peer.requester.depths().0 }.into())
        } else {
            let source =
                PayloadSource::Sender { requester: &self.requester, core: &self.core, len };
            peer.note_communication(engine);
            peer.segment_arrived(engine, incoming, source, origin)
        };
        match arrived {
            Ok(SegmentFate::Consumed) => {
                peer.fpdu_received(IncomingFpdu::Segment);
                self.fpdu_sent(&OutgoingFpdu::Segment(segment), None);
                if !peer.responder.is_blocked() {
                    self.requester.acknowledge_all();
                }
            }
            // The message stays in progress, and no later request overtakes it.
            Ok(SegmentFate::LeftWithSender) => {
                self.requester.put_aside();
                self.set_peer_waits(engine, peer.responder.awaits_receive());
            }
            Err(ArrivalError::Sender(GatherFault::Unstaged)) => {
                self.stage(engine);
                return false;
            }
            Err(ArrivalError::Sender(fault)) => self.gather_failed(engine, fault),
            // As over TCP, where no byte of the segment would have been sent.
            Err(ArrivalError::Placement(PlacementError::Memory(fault)))
                if fault.end == CopyEnd::Source =>
            {
                self.memory_failed(engine, fault);
            }
            Err(error) => {
                peer.fpdu_received(IncomingFpdu::Segment);
                // Over TCP the message, and the Immediate Data after it, would have been sent
                // before the peer's Terminate arrived.
                self.fpdu_sent(&OutgoingFpdu::Segment(segment), None);
                if segment.last {
                    self.segment_taken(engine);
                }
                self.retire(engine);
                let read = incoming.read_request();
                peer.segment_failed(engine, error, |fault| origin.terminate(fault, read));
                self.requester.set_peer_refuses(peer.is_refusing());
            }
        }
        true
    }

    /// Completes the waiting segment, which the peer refuses. Over TCP the segment would already
    /// have been sent.
    fn segment_taken(&mut self, engine: &mut EngineState) {
        self.requester.bring_back();
        if self.requester.message().is_some_and(Message::is_untagged)
            && let Some(segment) = self.requester.next_segment(SEGMENT, VERSION)
        {
            self.fpdu_sent(&OutgoingFpdu::Segment(segment), None);
            self.retire(engine);
        }
    }

    /// Handles a peer that has closed gracefully. If this side still has something to send, its
    /// stream is lost, as by a reset over TCP.
    pub(in crate::engine) fn peer_gone(&mut self, engine: &mut EngineState) {
        if self.life.phase().sends() && self.next_message(engine) {
            return self.lost(engine, "the peer has closed the connection");
        }
        self.requester.return_slots(&self.core, engine);
        self.finish_if_drained(engine);
    }

    /// Handles a signal of the other end.
    pub(in crate::engine) fn handle_signal(
        &mut self,
        engine: &mut EngineState,
        signal: &PeerSignal,
    ) {
        match signal {
            PeerSignal::Terminate(payload) => {
                self.fpdu_received(IncomingFpdu::Terminate);
                match Terminate::parse(payload) {
                    //= RDMAP-5.4-5
                    Ok(t) => self.terminate_received(engine, &t),
                    Err(_) => self.lost(engine, "the peer sent a malformed Terminate"),
                }
            }
            PeerSignal::SegmentTaken => self.segment_taken(engine),
            PeerSignal::Placed => {
                self.requester.acknowledge_all();
                self.retire(engine);
            }
            //= DDP-3-9
            PeerSignal::Fin => self.fin_received(engine),
            PeerSignal::Closed if self.can_unlink() => {
                self.unlink(engine, false, "the peer has closed the stream");
            }
            PeerSignal::Closed if self.is_refusing() => {
                self.link = Link::PeerClosed;
                self.complete_refusal(engine);
            }
            PeerSignal::Closed => {
                if let Link::Direct(_) = self.link {
                    self.link = Link::PeerClosed;
                    engine.wake(&mut self.core);
                }
            }
            PeerSignal::Reset => self.lost(engine, "the peer reset the connection"),
        }
    }
}

/// Returns a segment of a message in the form that the TCP path produces.
#[inline]
pub(super) fn incoming_of(message: &Message, segment: &Segment) -> Incoming {
    let Segment { header, len, last } = *segment;
    if let Some(whole) = message.header() {
        return header_message_of(whole, message.head, &header, len);
    }
    let from = message.sent;
    match message.head {
        HeaderTemplate::Tagged { opcode: Opcode::Write, stag, to } => {
            let to = to.wrapping_add(u64::from(from));
            let total = (from == 0).then_some(message.total);
            Incoming::Write { stag, to, last, stag_changed: false, total }
        }
        HeaderTemplate::Tagged { stag, to, .. } => {
            let to = to.wrapping_add(u64::from(from));
            Incoming::ReadResponse { stag, to, last }
        }
        HeaderTemplate::Untagged { opcode, invalidate, .. } => {
            debug_assert_eq!(opcode.queue(), Opcode::Send.queue(), "{opcode} is not a Send");
            let kind = SendKind::of(opcode, invalidate);
            Incoming::Send { kind, mo: from, last, total: Some(message.total) }
        }
    }
}

/// Returns a message that is only a header, which always fits in one segment.
fn header_message_of(
    message: &HeaderMessage,
    head: HeaderTemplate,
    header: &Header,
    len: u32,
) -> Incoming {
    let mut bytes = [0; UntaggedHeader::LEN];
    header.emit(&mut bytes);
    let segment_len = ulpdu_len(bytes.len() + len as usize);
    match *message {
        HeaderMessage::ReadRequest(request) => {
            Incoming::ReadRequest(InboundRead { request, header: bytes, segment_len })
        }
        HeaderMessage::AtomicRequest(request) => {
            Incoming::AtomicRequest(InboundAtomic { request, header: bytes, segment_len })
        }
        HeaderMessage::AtomicResponse(response) => Incoming::AtomicResponse(response),
        HeaderMessage::Immediate(data) => {
            let (HeaderTemplate::Tagged { opcode, .. } | HeaderTemplate::Untagged { opcode, .. }) =
                head;
            let kind = SendKind { immediate: Some(data), ..SendKind::of(opcode, Stag(0)) };
            Incoming::Send { kind, mo: 0, last: true, total: Some(0) }
        }
    }
}

/// Bytes of a segment, header included. A tagged segment carries whole pages, which copy fastest,
/// and is so short that a revocation hardly waits for it.
pub(super) const SEGMENT: usize = PAYLOAD as usize + TaggedHeader::LEN;
/// Payload bytes of a tagged segment.
pub(super) const PAYLOAD: u32 = 15 * 4096;
/// Maximum number of segments in a run.
const RUN: u64 = 8;
/// DDP and RDMAP version.
//= DDP-4.1-10
pub(super) const VERSION: u8 = 1;
/// Number of segments after which finished requests complete. A turn has several times as many
/// small requests, so a program on another CPU can post more requests before the turn ends.
pub(super) const RETIRE_EVERY: u32 = 64;
