//! How streams end: faults, Terminates, disconnects, FIN, loss.
//!
//! The first fault wins: once a QP has left the phases in which it works, later faults are dropped.
//! [`Qp::terminate`] is the one place where a fault of ours becomes a Terminate, completions and a
//! state; [`Qp::finish`] the one place where a stream is gone. Which event leads where stands in
//! [`phase`](super::phase).

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::interface::Notification;
use super::link::Fin;
use super::phase::{StreamEvent, StreamPhase};
use super::qp::{OutgoingFpdu, Qp};
use super::reason::Reason;
use super::requester::message::Message;
use super::schedule::END_COST;
use super::state::EngineState;
use crate::abi::control::{DisconnectMode, DisconnectReason, Event};
use crate::rdmap::{Terminate, codes};
use crate::stream::{Fault, terminate};
use crate::types::{CompletionStatus, TerminateCode, TerminateOrigin};

impl Qp {
    /// Something of this side, not the peer's doing, makes the QP useless.
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

    /// Ends the stream with a Terminate of ours. `payload` is its RDMAP header; none for a
    /// Terminate that encloses nothing. `reason` is put on record unless the fault is already.
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

    /// As [`Qp::terminate`], for a fault of which [`Qp::report_guess`] has been called.
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
        self.life.ends_by(DisconnectReason::Terminate { origin, code, headers });
        let within = next == StreamPhase::Terminating;
        self.blame_own(&payload);
        self.number_refused_write(&payload);
        //= RDMAP-3.2-4
        if self.link.terminate(payload, within, engine) {
            self.fpdu_sent(&OutgoingFpdu::Terminate, None);
        }
        if !within {
            self.finish(engine, mute);
            return;
        }
        // A tagged message is cut here; an untagged one is finished first, since some peers do not
        // expect a Terminate inside one.
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

    /// A peer that tries STags is counted, if it is one behind TCP.
    pub(super) fn report_guess(&self, engine: &mut EngineState, reason: Reason) {
        let wired = self.wired.as_ref().map(|wired| wired.remote);
        if reason.is_guess()
            && self.link.tcp().is_some()
            && let Some(peer) = wired.or(self.life.addresses().map(|a| a.peer.ip()))
        {
            let (session, at) = (self.core.session, engine.now);
            engine.report(Notification::StagGuessed { session, peer, at });
        }
    }

    /// A Terminate arrived. It is reported, never answered (RFC 5040 section 7.1).
    pub(super) fn terminate_received(&mut self, engine: &mut EngineState, t: &Terminate<'_>) {
        if self.is_blameless(t) && self.life.phase().is_linked() {
            let why = format!("the peer has ended the stream, by Terminate {}", t.code);
            return self.unlink(engine, false, &why);
        }
        if self.is_blameless(t) {
            self.put_refusal_into_effect(engine);
        }
        let over_tcp = self.link.tcp().is_some();
        let Some(next) = self.life.after(StreamEvent::PeerTerminate { over_tcp }) else { return };
        let origin = TerminateOrigin::Peer;
        self.core.shared.set_terminate(origin, t.code);
        let headers = t.to_vec().split_off(4);
        //= RDMAP-3.2-4, RDMAP-5.4-6, 7306-6.1-6
        self.life.ends_by(DisconnectReason::Terminate { origin, code: t.code, headers });
        // If it blames a Read or an atomic operation of ours, that request carries the blame; the
        // rest is flushed.
        let blamed = match self.is_wired() {
            true => self.blame_acknowledged(t),
            false => self.requester.blamed(t).and_then(|request| request.seq),
        };
        let request = blamed.and_then(|seq| self.requester.wr_id(seq));
        self.life.record_peer_terminate(&self.core, engine, t, request);
        if let Some(seq) = blamed
            && !self.is_wired()
        {
            let status = match (t.code.layer, t.code.etype) {
                (0, 1) => CompletionStatus::RemoteAccess,
                _ => CompletionStatus::RemoteOperation,
            };
            self.requester.blame(seq, status, t.code);
        }
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

    /// An administrator ends the connection.
    pub(super) fn admin_disconnect(&mut self, engine: &mut EngineState) {
        // Behind our FIN nothing can be sent, so no Terminate either.
        match self.life.phase() {
            StreamPhase::FinSent => self.disconnect(engine, DisconnectMode::Abort),
            _ => {
                let code = codes::RDMA_LOCAL_CATASTROPHIC;
                self.terminate(engine, code, None, Reason::AdminDisconnect);
            }
        }
    }

    /// The application ends the connection, in order or at once.
    pub(super) fn disconnect(&mut self, engine: &mut EngineState, mode: DisconnectMode) {
        let abort = mode == DisconnectMode::Abort;
        let event = if abort { StreamEvent::Abort } else { StreamEvent::Disconnect };
        let Some(next) = self.life.after(event) else {
            return self.shorten_disconnect(engine, mode);
        };
        if !abort {
            // What is in the queue now is sent; what is posted later is flushed.
            self.requester.begin_closing();
        }
        let mut within = engine.options.close_deadline;
        if let DisconnectMode::OrderlyWithin { ms } = mode {
            within = within.min(Duration::from_millis(ms.into()));
            self.life.leave_at_deadline();
        }
        if next == StreamPhase::Ended {
            self.life.ends_by(DisconnectReason::Aborted);
            self.finish(engine, true);
            return;
        }
        self.enter(next);
        self.life.set_deadline(&self.core, engine, Some(engine.now.after(within)));
        engine.wake(&mut self.core);
    }

    /// A disconnect that is under way gets a limit.
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

    /// While disconnecting: sends the FIN once everything is done and sent. While refusing a
    /// request: ends the stream once all responses are sent. Called after each turn.
    pub(super) fn finish_if_drained(&mut self, engine: &mut EngineState) {
        if self.life.phase() == StreamPhase::Refusing && !self.requester.owes_response() {
            return self.put_refusal_into_effect(engine);
        }
        if self.life.phase() != StreamPhase::Closing || !self.requester.is_drained() {
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
                        self.life.ends_by(DisconnectReason::Orderly);
                        self.finish(engine, false);
                    }
                    Some(next) => self.enter(next),
                    None => {}
                }
            }
        }
    }

    /// The peer's FIN arrived between two FPDUs.
    pub(super) fn fin_received(&mut self, engine: &mut EngineState) {
        if self.is_wired() && self.life.phase().is_linked() {
            return self.unlink(engine, false, "the peer has closed the stream");
        }
        self.put_refusal_into_effect(engine);
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
                // Requests that waited for a Read may go on.
                engine.wake(&mut self.core);
            }
            StreamPhase::FinSent => {
                //= DDP-3-9a
                self.life.ends_by(DisconnectReason::Orderly);
                self.finish(engine, false);
            }
            // With our Terminate still unsent the outgoing half goes on until it is.
            StreamPhase::Refusing | StreamPhase::Terminating => {}
            StreamPhase::Draining => self.finish(engine, false),
        }
    }

    /// The peer's FIN has come, behind messages for which the application has posted no receive.
    pub(super) fn peer_closing(&mut self, engine: &mut EngineState) {
        if self.responder.awaits_receive() && self.life.see_peer_closing() {
            let context = self.core.shared.context.load(Relaxed);
            engine.emit(self.core.session, Event::PeerClosing { qp: self.core.id, context });
        }
    }

    /// The connection is gone: RST, timeout, or a peer that closed inside a message.
    pub(super) fn lost(&mut self, engine: &mut EngineState, why: &str) {
        if self.is_wired() && self.life.phase().is_linked() {
            return self.unlink(engine, true, why);
        }
        self.put_refusal_into_effect(engine);
        if self.life.after(StreamEvent::Lost).is_some() {
            self.life.record_loss(&self.core, engine, why);
            //= DDP-6.2.2-1
            self.life.ends_by(DisconnectReason::Lost { why: why.to_owned() });
            self.finish(engine, true);
        }
    }

    /// The deadline of the phase has passed.
    pub(super) fn deadline_passed(&mut self, engine: &mut EngineState) {
        self.life.deadline_passed();
        let phase = self.life.phase();
        if phase == StreamPhase::Refusing {
            return self.put_refusal_into_effect(engine);
        }
        if self.life.after(StreamEvent::Deadline).is_none() {
            if phase == StreamPhase::Ended {
                // The last completions have found no room; their owner is told all the same.
                self.life.emit_disconnected(&self.core, engine);
            }
            return;
        }
        match phase {
            StreamPhase::AwaitFirstFpdu => {
                self.lost(engine, "the peer sent no FPDU before the deadline");
            }
            StreamPhase::FinSent if self.life.leaves_at_deadline() => {
                self.life.ends_by(DisconnectReason::Orderly);
                // A reset would take back what the peer has not yet read of ours.
                self.finish(engine, self.responder.is_blocked());
            }
            StreamPhase::Closing | StreamPhase::FinSent => {
                self.lost(engine, "the peer did not close before the deadline");
            }
            _ => self.finish(engine, true),
        }
    }

    /// The stream is gone: flush, close the socket, and say how it ended when all is flushed.
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
        if self.life.is_flush_pending() {
            let deadline = engine.now.after(engine.options.close_deadline);
            self.life.set_deadline(&self.core, engine, Some(deadline));
        }
    }

    /// Destroys the QP. Its peer learns of it by a Terminate where the stream allows one, by the
    /// FIN that was sent already, else by a reset. The peer of a RoCE QP sees the stream close in
    /// order: such a QP outlives its stream, so this is no fault.
    pub(super) fn destroy(&mut self, engine: &mut EngineState) {
        self.release(engine);
        self.stop_clock(engine);
        // Not inside a message, and only where something may be sent.
        let inside = self.requester.message().is_some_and(|m| m.sent > 0);
        let in_order = self.is_wired() && !inside;
        let terminate = (!in_order && self.life.phase().sends() && !inside)
            .then(|| terminate::build(Fault::local(codes::RDMA_LOCAL_CATASTROPHIC), &[], None))
            .and_then(|payload| self.link.final_terminate(payload));
        if terminate.is_some() {
            self.life.record_destruction(&self.core, engine);
            self.fpdu_sent(&OutgoingFpdu::Terminate, None);
        }
        //= RDMAP-6.2.1-4
        let said_all = self.life.phase().has_said_all() && self.link.tcp().is_some();
        self.link.destroy(terminate, in_order || said_all, &self.core, engine);
        engine.stags.unbind_all_of(self.core.id);
        self.life.set_deadline(&self.core, engine, None);
        engine.doorbells.unroute(&self.core, engine.worker);
        // Slots of requests that will never complete must not shrink a CQ that lives on.
        let slots = self.requester.held_slots();
        engine.unreserve(&self.core.send_cq, slots);
    }
}
