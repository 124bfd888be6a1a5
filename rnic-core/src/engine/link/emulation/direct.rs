//! The direct path over an emulated link.
//!
//! The sender copies each segment into the line of the receiver, and the receiver handles it in its
//! own turn, as if it came over TCP: the payload is in a buffer, and a Send without a receive waits
//! at the receiver. Signals of the sender stay ordered after its segments. A QP that is its own
//! peer uses the same code.
//!
//! On RC, each delivered segment is acknowledged over the receiver's own link.

use super::arrival::{Arrival, DelayedSegment};
use crate::ddp::MAX_HEADER_LEN;
use crate::engine::arrival::PayloadSource;
use crate::engine::incoming::Origin;
use crate::engine::link::Link;
use crate::engine::link::direct::{RETIRE_EVERY, SEGMENT, VERSION, incoming_of};
use crate::engine::numbers::cost;
use crate::engine::qp::{IncomingFpdu, OutgoingFpdu, Qp};
use crate::engine::reason::Reason;
use crate::engine::requester::message::Segment;
use crate::engine::schedule::REQUEST_COST;
use crate::engine::state::{EngineState, PeerSignal};
use rnic_abi::types::Time;

impl Qp {
    /// Sends over the emulated link until the turn or the work ends. `peer` is the other QP, or
    /// `None` if the QP is its own peer. Returns false if neither link is emulated any more and
    /// nothing is in flight to the peer.
    pub(in crate::engine) fn run_emulated(
        &mut self,
        mut peer: Option<&mut Qp>,
        engine: &mut EngineState,
    ) -> bool {
        self.acknowledge_arrivals(peer.as_deref_mut(), engine);
        let other = peer.as_deref().unwrap_or(self);
        let of_other = other.emulation.as_deref();
        let is_idle = of_other.is_none_or(|of| of.link.is_none() && of.arrivals.is_empty());
        let peer_stalled = of_other.and_then(|of| of.stalled());
        let refuses = other.is_refusing();
        let waits = other.responder.awaits_receive();
        let receives = other.life.phase().receives();
        if let Some(emulation) = &mut self.emulation {
            emulation.peer_stalled = peer_stalled;
        } else if peer_stalled.is_some() {
            self.emulation.get_or_insert_default().peer_stalled = peer_stalled;
        }
        let own = self.emulation.as_deref();
        if is_idle && own.is_none_or(|own| own.link.is_none()) {
            return false;
        }
        // Acknowledgements in flight precede the report of a missing receive.
        if own.is_none_or(|own| own.arrivals.is_empty()) {
            self.set_peer_waits(engine, waits);
        }
        self.requester.set_peer_refuses(refuses);
        let mut units = 0;
        while !self.core.turn.is_over()
            && self.life.phase().responds()
            && receives
            && self.may_send_unit(peer.as_deref_mut(), engine)
        {
            if !self.next_message(engine) {
                self.end_backlog();
                break;
            }
            let Some((segment, unit)) = self.next_unit(engine) else { break };
            self.fpdu_sent(&OutgoingFpdu::Segment(segment), None);
            let sent_before = self.requester.sent_before();
            self.send_unit(peer.as_deref_mut(), engine, DelayedSegment { sent_before, ..unit });
            self.core.turn.charge(i64::from(segment.len).max(REQUEST_COST));
            units += 1;
            if units % RETIRE_EVERY == 0 {
                self.retire(engine);
            }
        }
        self.retire(engine);
        self.requester.return_slots(&self.core, engine);
        self.finish_if_drained(engine);
        if units > 0 {
            peer.unwrap_or(self).expect_arrivals(engine);
        }
        true
    }

    /// Returns true if the link is free and the peer's line has room.
    fn may_send_unit(&mut self, peer: Option<&mut Qp>, engine: &EngineState) -> bool {
        let now = engine.now;
        if !self.emulation.as_mut().is_none_or(|emulation| emulation.is_open(now)) {
            return false;
        }
        let to = peer.unwrap_or(self);
        let session = to.core.session;
        let emulation = to.emulation.get_or_insert_default();
        let may_send = emulation.has_room(&emulation.arrivals, session, &engine.held);
        emulation.sender_waits = !may_send;
        may_send
    }

    /// Cuts the next segment and copies its payload. Returns `None` if the payload must be staged
    /// first, or cannot be read.
    fn next_unit(&mut self, engine: &mut EngineState) -> Option<(Segment, DelayedSegment)> {
        let segment = self.requester.next_segment(SEGMENT, VERSION)?;
        let mut header = [0; MAX_HEADER_LEN];
        let header_len = segment.header.emit(&mut header);
        let mut ulpdu = Vec::with_capacity(header_len + segment.len as usize);
        ulpdu.extend_from_slice(&header[..header_len]);
        if !self.read_segment(engine, segment, &mut ulpdu) {
            return None;
        }
        let message = self.requester.message()?;
        let mut payload_at = header_len;
        // A message that is only a header has one segment.
        if let Some(header) = message.header() {
            ulpdu.extend(header.emit());
            payload_at = ulpdu.len();
        }
        let incoming = incoming_of(message, &segment);
        Some((segment, DelayedSegment { incoming, ulpdu, payload_at, sent_before: None }))
    }

    fn send_unit(&mut self, peer: Option<&mut Qp>, engine: &EngineState, unit: DelayedSegment) {
        let len = unit.ulpdu.len();
        let at = self.leaves(engine.now, len);
        let to = peer.unwrap_or(self).emulation.get_or_insert_default();
        to.arrivals.push(at, len, Arrival::Segment(Box::new(unit)));
    }

    /// Prepares for units that have entered the line.
    fn expect_arrivals(&mut self, engine: &mut EngineState) {
        let next = self.emulation.as_ref().and_then(|emulation| emulation.arrivals.next());
        if next.is_some_and(|at| at <= engine.now) {
            engine.wake(&mut self.core);
        }
        self.settle_emulation(engine);
    }

    /// Acknowledges the requests of the peer that are carried out.
    fn acknowledge_arrivals(&mut self, peer: Option<&mut Qp>, engine: &mut EngineState) {
        let Some(emulation) = &mut self.emulation else { return };
        if !self.responder.is_blocked() {
            emulation.acknowledgement.unblock();
        }
        if emulation.stalled().is_some() {
            return;
        }
        let Some(before) = emulation.acknowledgement.due.take() else { return };
        let at = self.leaves(engine.now, 0);
        let to = peer.unwrap_or(self);
        let in_order = to.emulation.as_ref().is_none_or(|of| of.arrivals.is_empty());
        if in_order && at <= engine.now {
            return to.requests_acknowledged(engine, before);
        }
        let line = &mut to.emulation.get_or_insert_default().arrivals;
        line.push(at, 0, Arrival::Acknowledged(before));
        to.expect_arrivals(engine);
    }

    fn requests_acknowledged(&mut self, engine: &mut EngineState, before: u64) {
        self.requester.acknowledge_before(before);
        self.retire(engine);
        self.restart_clock(engine);
        engine.wake(&mut self.core);
    }

    // --- Arrivals ----------------------------------------------------------------------------

    /// Queues a signal of the other QP after its segments in flight. Returns the signal if there
    /// are none, or if it need not follow them.
    pub(in crate::engine) fn delay_signal(&mut self, signal: PeerSignal) -> Result<(), PeerSignal> {
        let ends = match &signal {
            PeerSignal::Terminate(_) | PeerSignal::Reset | PeerSignal::Closed => true,
            PeerSignal::Fin => false,
            PeerSignal::SegmentTaken | PeerSignal::Placed => return Err(signal),
        };
        let line = self.emulation.as_mut().map(|emulation| &mut emulation.arrivals);
        let Some(line) = line.filter(|line| !line.is_empty()) else { return Err(signal) };
        line.push(Time(0), 0, Arrival::Signal(signal));
        if ends {
            // The other QP may be linked to another one, or its key may be reused.
            self.link = Link::None;
        }
        Ok(())
    }

    /// Handles units that have arrived, until the turn ends or the QP is blocked.
    pub(in crate::engine) fn deliver_arrivals(&mut self, engine: &mut EngineState) {
        let mut any = false;
        while let Some(arrival) = self.next_arrival(engine.now) {
            any = true;
            match arrival {
                Arrival::Segment(segment) => self.delayed_segment_arrived(engine, &segment),
                Arrival::Acknowledged(before) => self.requests_acknowledged(engine, before),
                Arrival::Signal(signal) => {
                    if let PeerSignal::Closed = signal {
                        self.link = Link::PeerClosed;
                        engine.wake(&mut self.core);
                    }
                    self.handle_signal(engine, &signal);
                }
            }
            if self.core.turn.is_over() {
                engine.wake(&mut self.core);
                break;
            }
        }
        // The sender may wait for room, or must learn of a wait for a receive.
        if let Some(emulation) = &mut self.emulation
            && any
            && (std::mem::take(&mut emulation.sender_waits) || self.responder.awaits_receive())
        {
            self.link.wake_peer(engine);
        }
    }

    fn next_arrival(&mut self, now: Time) -> Option<Arrival> {
        let line = &mut self.emulation.as_mut()?.arrivals;
        if self.responder.is_copying() {
            return None;
        }
        let waits = self.responder.awaits_receive();
        let rc = self.core.transport.acknowledges();
        line.take_due(now, |arrival| !waits || arrival.passes(rc))
    }

    fn delayed_segment_arrived(&mut self, engine: &mut EngineState, segment: &DelayedSegment) {
        let DelayedSegment { incoming, ulpdu, payload_at, sent_before } = segment;
        // A QP that refuses a request still handles responses.
        let drops = self.is_refusing() && !incoming.is_response();
        if !self.life.phase().receives() || drops {
            return;
        }
        self.core.turn.charge(cost(ulpdu.len()).max(REQUEST_COST));
        self.note_communication(engine);
        self.fpdu_received(IncomingFpdu::Segment);
        // A response that passes a Send without a receive acknowledges no later request.
        let sent_before = sent_before.filter(|_| !self.responder.awaits_receive());
        let origin = Origin::Wire(ulpdu);
        let arrived = if incoming.awaits_response() && !self.requester.ird_available() {
            Err(Reason::RequestsFull { ird: self.requester.depths().0 }.into())
        } else {
            let payload = PayloadSource::Bytes(&ulpdu[*payload_at..]);
            self.segment_arrived(engine, *incoming, payload, origin)
        };
        match arrived {
            Ok(_) => {
                if let Some(emulation) = &mut self.emulation
                    && sent_before.is_some()
                {
                    // Earlier segments do not block the QP any more.
                    emulation.acknowledgement.unblock();
                    emulation.acknowledgement.blocked = sent_before;
                }
            }
            Err(error) => {
                let read = incoming.read_request();
                self.segment_failed(engine, error, |fault| origin.terminate(fault, read));
                self.link.wake_peer(engine);
            }
        }
    }
}
