//! Ends of streams: faults, Terminates, disconnects, FIN, loss.
//!
//! The first fault wins: once a QP has left the phases in which it works, later faults are dropped.
//! Only [`Qp::end_by_terminate`] turns a fault of this side into a Terminate, completions and a
//! state. A stream ends in [`Qp::finish`], [`Qp::unlink`] or [`Qp::destroy`]. The transitions are
//! in [`phase`](super::phase).

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::interface::{Notification, Output};
use super::link::Fin;
use super::phase::{StreamEvent, StreamPhase};
use super::qp::{OutgoingFpdu, Qp};
use super::reason::Reason;
use super::requester::message::Message;
use super::schedule::END_COST;
use super::state::EngineState;
use crate::rdmap::{Terminate, codes};
use crate::stream::{Fault, terminate};
use rnic_abi::abi::control::{DisconnectMode, DisconnectReason, Event};
use rnic_abi::types::{TerminateCode, TerminateOrigin};

impl Qp {
    /// Ends a QP that fails through no fault of the peer.
    pub(super) fn fail_locally(&mut self, engine: &mut EngineState, reason: Reason) {
        if self.life.phase().flushes() {
            return;
        }
        let context = self.core.shared.context.load(Relaxed);
        let text = reason.qp_fatal().to_owned();
        let event = Event::QpFatal { qp: self.core.id, context, reason: text };
        engine.emit(self.core.session, event);
        self.terminate(engine, codes::RDMA_LOCAL_CATASTROPHIC, None, reason);
    }

    /// Ends the stream with a Terminate of this side. `payload` is its RDMAP header, or `None` for
    /// a Terminate that encloses nothing. `reason` is recorded unless a fault has been recorded.
    pub(super) fn terminate(
        &mut self,
        engine: &mut EngineState,
        code: TerminateCode,
        payload: Option<Vec<u8>>,
        reason: Reason,
    ) {
        let can_send_terminate = self.link.can_send_terminate();
        if self.life.after(StreamEvent::Fault { can_send_terminate }).is_some() {
            self.report_guess(engine, reason);
        }
        self.end_by_terminate(engine, code, payload, reason);
    }

    /// Like [`Qp::terminate`], for a fault for which [`Qp::report_guess`] has been called.
    pub(super) fn end_by_terminate(
        &mut self,
        engine: &mut EngineState,
        code: TerminateCode,
        payload: Option<Vec<u8>>,
        reason: Reason,
    ) {
        let mute = self.life.phase() == StreamPhase::AwaitFirstFpdu;
        let can_send_terminate = self.link.can_send_terminate();
        //= RDMAP-7-1
        let Some(next) = self.life.after(StreamEvent::Fault { can_send_terminate }) else { return };
        self.emit_responder_error(engine, reason);
        self.core.turn.charge(END_COST);
        let payload = payload.unwrap_or_else(|| terminate::build(Fault::local(code), &[], None));
        self.life.record_terminate(&self.core, engine, code, &payload, reason);
        let headers = payload.get(4..).unwrap_or_default().to_vec();
        self.core.shared.set_terminate(TerminateOrigin::Local, code);
        let origin = TerminateOrigin::Local;
        //= DDP-6.2.2-1, RDMAP-3.2-4
        self.life.set_end_reason(DisconnectReason::Terminate { origin, code, headers });
        let within = next == StreamPhase::Terminating;
        self.blame_loopback(&payload);
        self.number_refused_write(&payload);
        //= RDMAP-3.2-4
        if self.link.terminate(payload, within, engine) {
            self.fpdu_sent(&OutgoingFpdu::Terminate, None);
        }
        if !within {
            self.finish(engine, mute);
            return;
        }
        // A tagged message is cut short. An untagged message is finished first, because some peers
        // do not expect a Terminate inside it.
        if !self.requester.message().is_some_and(Message::is_untagged) {
            self.requester.drop_message();
        }
        //= DDP-3-8
        self.enter(next);
        let deadline = engine.now.after(engine.options.terminate_deadline);
        self.life.set_deadline(&self.core, engine, Some(deadline));
        self.flush(engine);
        engine.wake(&mut self.core);
    }

    /// Reports an access by a TCP peer to memory that it has no right to, which may be a guess.
    pub(super) fn report_guess(&self, engine: &mut EngineState, reason: Reason) {
        let rc = self.rc.as_ref().map(|rc| rc.remote);
        if reason.is_guess()
            && self.link.tcp().is_some()
            && let Some(peer) = rc.or(self.life.addresses().map(|a| a.peer.ip()))
        {
            let session = self.core.session;
            let at = engine.now;
            engine.report(Notification::StagGuessed { session, peer, at });
        }
    }

    /// Handles a Terminate of the peer, which is reported and never answered (RFC 5040 section
    /// 7.1).
    pub(super) fn terminate_received(&mut self, engine: &mut EngineState, t: &Terminate<'_>) {
        if self.blames_no_request(t) && self.life.phase().is_linked() {
            let why = format!("the peer has ended the stream by Terminate {}", t.code);
            return self.unlink(engine, false, &why);
        }
        if self.blames_no_request(t) {
            self.complete_refusal(engine);
        }
        let over_tcp = self.link.tcp().is_some();
        let Some(next) = self.life.after(StreamEvent::PeerTerminate { over_tcp }) else { return };
        let origin = TerminateOrigin::Peer;
        self.core.shared.set_terminate(origin, t.code);
        let headers = t.to_vec().split_off(4);
        //= RDMAP-3.2-4, RDMAP-5.4-6, 7306-6.1-6
        self.life.set_end_reason(DisconnectReason::Terminate { origin, code: t.code, headers });
        // If it blames a request of this side, that request fails and the rest is flushed.
        let blamed = self.blame(t);
        let request = blamed.and_then(|seq| self.requester.wr_id(seq));
        self.life.record_peer_terminate(&self.core, engine, t, request);
        self.requester.drop_message();
        if next == StreamPhase::Ended {
            self.finish(engine, false);
            return;
        }
        self.link.stop_sending(&self.core, engine);
        self.enter(next);
        let deadline = engine.now.after(engine.options.terminate_deadline);
        self.life.set_deadline(&self.core, engine, Some(deadline));
        self.flush(engine);
    }

    /// Ends the connection for a reason that is no error: with a Terminate if one can be sent.
    pub(super) fn end_connection(&mut self, engine: &mut EngineState, reason: Reason) {
        // After the FIN nothing can be sent, not even a Terminate.
        match self.life.phase() {
            StreamPhase::FinSent => self.disconnect(engine, DisconnectMode::Abort),
            _ => {
                let code = codes::RDMA_LOCAL_CATASTROPHIC;
                self.terminate(engine, code, None, reason);
            }
        }
    }

    /// Ends the connection at the application's request, gracefully or immediately.
    pub(super) fn disconnect(&mut self, engine: &mut EngineState, mode: DisconnectMode) {
        let abort = mode == DisconnectMode::Abort;
        let event = if abort { StreamEvent::Abort } else { StreamEvent::Disconnect };
        let Some(next) = self.life.after(event) else {
            return self.shorten_disconnect(engine, mode);
        };
        if !abort {
            // Requests now in the queue are sent; later requests are flushed.
            self.requester.begin_closing();
        }
        let mut within = engine.options.close_deadline;
        if let DisconnectMode::OrderlyWithin { ms } = mode {
            within = within.min(Duration::from_millis(ms.into()));
            self.life.leave_at_deadline();
        }
        if next == StreamPhase::Ended {
            self.life.set_end_reason(DisconnectReason::Aborted);
            let notified = self.send_last_ack(engine);
            // A reset would discard the messages that were just sent.
            let in_order = self.core.moves_to_error.is_some() && !self.is_inside_message();
            self.finish(engine, !notified && !in_order);
            return;
        }
        self.enter(next);
        self.life.set_deadline(&self.core, engine, Some(engine.now.after(within)));
        engine.wake(&mut self.core);
    }

    /// Sends the peer of an RC QP over TCP a last acknowledgement, because its next acknowledgement
    /// request will find no QP. An adapter acknowledges a Send before its receive completes.
    /// Returns false if nothing can be sent.
    fn send_last_ack(&mut self, engine: &mut EngineState) -> bool {
        let inside = self.is_inside_message();
        let acknowledges = self.core.transport.acknowledges() && self.life.phase().sends();
        // A Send that a copier places is not done.
        if inside || !acknowledges || self.responder.is_copying() {
            return false;
        }
        let Some(bytes) = self.link.tcp_mut().and_then(|tcp| tcp.final_notice()) else {
            return false;
        };
        engine.outputs.push_back(Output::FinalFpdu { qp: self.core.id, bytes });
        true
    }

    /// Returns true if a part of the message in progress has been sent.
    fn is_inside_message(&self) -> bool {
        self.requester.message().is_some_and(|message| message.sent > 0)
    }

    /// Sets a time limit on a disconnect that is under way.
    fn shorten_disconnect(&mut self, engine: &mut EngineState, mode: DisconnectMode) {
        let DisconnectMode::OrderlyWithin { ms } = mode else { return };
        if !matches!(self.life.phase(), StreamPhase::Closing | StreamPhase::FinSent) {
            return;
        }
        let limit = engine.now.after(Duration::from_millis(ms.into()));
        let deadline = self.life.deadline().map_or(limit, |deadline| deadline.min(limit));
        self.life.leave_at_deadline();
        self.life.set_deadline(&self.core, engine, Some(deadline));
    }

    /// While disconnecting, sends the FIN once everything is done and sent. While refusing a
    /// request, ends the stream once all responses are sent. Called after each turn.
    pub(super) fn finish_if_drained(&mut self, engine: &mut EngineState) {
        if self.life.phase() == StreamPhase::Refusing && !self.requester.owes_response() {
            return self.complete_refusal(engine);
        }
        if self.life.phase() != StreamPhase::Closing
            || !self.requester.is_drained()
            || self.delays_fin()
        {
            return;
        }
        //= DDP-6.2.1-6
        match self.link.finish_sending(&self.core, engine) {
            Fin::Later => {}
            Fin::NoLink => self.finish(engine, false),
            Fin::Sent => {
                let peer_fin = self.life.peer_fin();
                match self.life.after(StreamEvent::Drained { peer_fin }) {
                    Some(StreamPhase::Ended) => {
                        //= DDP-3-9a
                        self.life.set_end_reason(DisconnectReason::Orderly);
                        self.finish(engine, false);
                    }
                    Some(next) => self.enter(next),
                    None => {}
                }
            }
        }
    }

    /// Handles a FIN of the peer that arrived between two FPDUs.
    pub(super) fn fin_received(&mut self, engine: &mut EngineState) {
        self.core.place_pending(engine);
        if self.can_unlink() {
            return self.unlink(engine, false, "the peer has closed the stream");
        }
        self.complete_refusal(engine);
        if !self.life.see_peer_fin() {
            return;
        }
        let phase = self.life.phase();
        let next = self.life.after(StreamEvent::PeerFin);
        match phase {
            StreamPhase::Ended | StreamPhase::Unlinked | StreamPhase::HalfClosed => {}
            StreamPhase::AwaitFirstFpdu => {
                self.lost(engine, "the peer closed before its first FPDU");
            }
            StreamPhase::Open | StreamPhase::Closing => {
                self.requester.fail_awaiting(&self.core, &self.life, engine);
                self.retire(engine);
                self.flush_receives(engine);
                if let Some(next) = next.filter(|_| self.life.phase() == phase) {
                    self.enter(next);
                    let context = self.core.shared.context.load(Relaxed);
                    let event = Event::PeerClosed { qp: self.core.id, context };
                    engine.emit(self.core.session, event);
                }
                // Requests that waited for a Read may continue.
                engine.wake(&mut self.core);
            }
            StreamPhase::FinSent => {
                //= DDP-3-9a
                self.life.set_end_reason(DisconnectReason::Orderly);
                self.finish(engine, false);
            }
            // The outgoing direction continues until the Terminate is sent.
            StreamPhase::Refusing | StreamPhase::Terminating => {}
            StreamPhase::Draining => self.finish(engine, false),
        }
    }

    /// Notifies the owner of a FIN of the peer that follows messages without a receive.
    pub(super) fn peer_closing(&mut self, engine: &mut EngineState) {
        if self.responder.awaits_receive() && self.life.see_peer_closing() {
            let context = self.core.shared.context.load(Relaxed);
            engine.emit(self.core.session, Event::PeerClosing { qp: self.core.id, context });
        }
    }

    /// Handles the loss of the connection, for example by RST, timeout or an exceeded limit.
    pub(super) fn lost(&mut self, engine: &mut EngineState, why: &str) {
        self.lose(engine, true, why);
    }

    /// Ends the stream like the loss of the connection, with RST or FIN.
    pub(super) fn lose(&mut self, engine: &mut EngineState, reset: bool, why: &str) {
        if self.can_unlink() {
            return self.unlink(engine, reset, why);
        }
        self.complete_refusal(engine);
        if self.life.after(StreamEvent::Lost).is_some() {
            self.life.record_loss(&self.core, engine, why);
            //= DDP-6.2.2-1
            self.life.set_end_reason(DisconnectReason::Lost { why: why.to_owned() });
            self.finish(engine, reset);
        }
    }

    /// Handles the deadline of the phase.
    pub(super) fn deadline_passed(&mut self, engine: &mut EngineState) {
        self.life.deadline_passed();
        let phase = self.life.phase();
        if phase == StreamPhase::Refusing {
            return self.complete_refusal(engine);
        }
        if self.life.after(StreamEvent::Deadline).is_none() {
            if phase == StreamPhase::Ended {
                // The last completions found no CQ slots. The owner is notified anyway.
                self.life.emit_disconnected(&self.core, engine);
            }
            return;
        }
        match phase {
            StreamPhase::AwaitFirstFpdu => {
                self.lost(engine, "the peer sent no FPDU before the deadline");
            }
            StreamPhase::FinSent if self.life.leaves_at_deadline() => {
                self.life.set_end_reason(DisconnectReason::Orderly);
                // A reset would discard bytes of this side that the peer has not read yet.
                self.finish(engine, self.responder.is_blocked());
            }
            StreamPhase::Closing | StreamPhase::FinSent => {
                self.lost(engine, "the peer did not close before the deadline");
            }
            _ => self.finish(engine, true),
        }
    }

    /// Ends the stream: flushes, closes the socket, and notifies the owner when all is flushed.
    pub(super) fn finish(&mut self, engine: &mut EngineState, reset: bool) {
        if self.life.phase() == StreamPhase::Ended {
            return;
        }
        self.requester.drop_message();
        self.drop_refusal();
        self.core.turn.charge(END_COST);
        self.stop_clock(engine);
        self.enter(StreamPhase::Ended);
        self.life.set_deadline(&self.core, engine, None);
        self.flush(engine);
        //= DDP-3-10, RDMAP-7-4
        self.link.close(reset, &self.core, engine);
        self.drop_arrivals(engine);
        if self.life.is_flush_pending() {
            let deadline = engine.now.after(engine.options.close_deadline);
            self.life.set_deadline(&self.core, engine, Some(deadline));
        }
    }

    /// Destroys the QP. Its peer gets a Terminate if the stream allows it, or the FIN that was
    /// already sent, or else a reset. The stream of an RC or UC QP closes gracefully unless a
    /// message is partly sent.
    pub(super) fn destroy(&mut self, engine: &mut EngineState) {
        self.report_error_state(engine);
        self.set_order(engine, None);
        self.release(engine);
        self.core.drop_held(engine);
        self.stop_clock(engine);
        // Not inside a message, and only if something may be sent.
        let inside = self.is_inside_message();
        let in_order = self.core.transport.outlives_stream() && !inside;
        let terminate = (!in_order && self.life.phase().sends() && !inside)
            .then(|| terminate::build(Fault::local(codes::RDMA_LOCAL_CATASTROPHIC), &[], None))
            .and_then(|payload| self.link.final_terminate(payload));
        if terminate.is_some() {
            self.life.record_destruction(&self.core, engine);
            self.fpdu_sent(&OutgoingFpdu::Terminate, None);
        }
        if in_order {
            self.send_last_ack(engine);
        }
        //= RDMAP-6.2.1-4
        let sent_all = self.life.phase().has_sent_all() && self.link.tcp().is_some();
        self.link.destroy(terminate, in_order || sent_all, &self.core, engine);
        self.end_emulation(engine);
        engine.stags.unbind_all_of(self.core.id);
        self.life.set_deadline(&self.core, engine, None);
        engine.doorbells.unroute(&self.core, engine.worker);
        // Slots of requests that will never complete must not shrink a CQ that outlives the QP.
        let slots = self.requester.held_slots();
        engine.unreserve(&self.core.send_cq, slots);
    }
}
