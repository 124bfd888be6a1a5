//! Streams of an RC or UC QP, which begin and end while the QP exists.

use std::sync::atomic::Ordering::Relaxed;

use super::PeerLimits;
use crate::engine::interface::Notification;
use crate::engine::link::Link;
use crate::engine::phase::StreamPhase;
use crate::engine::qp::Qp;
use crate::engine::requester::ack_request::MAX_ACK_REQUESTS;
use crate::engine::send_queue::SendQueue;
use crate::engine::state::EngineState;
use rnic_abi::abi::control::{DisconnectMode, Event, QpChange};

impl Qp {
    /// Applies a state change or another change that the program requests.
    pub(in crate::engine) fn change(&mut self, engine: &mut EngineState, change: &QpChange) {
        if self.life.phase().flushes() {
            return;
        }
        // The change may revoke rights that held data need.
        self.core.place_pending(engine);
        let Some(rc) = &mut self.rc else { return };
        match *change {
            QpChange::ReadyToSend(sending) => {
                rc.sending = Some(sending);
                rc.drains = false;
            }
            QpChange::DrainSendQueue => {
                rc.drains = true;
                rc.drain_reported = false;
                self.requester.request_ack_now();
            }
            QpChange::MinRnrTimer(code) => rc.min_rnr_timer = code,
            QpChange::Rights(rights) => self.core.rights = rights,
            // The resource manager creates a new QP for these.
            QpChange::ReadyToReceive(_) | QpChange::Reset => {}
            // For UD QPs only.
            QpChange::ReceiveDatagrams { .. } | QpChange::QKey(_) => {}
        }
        if let QpChange::ReadyToSend(_) = change {
            self.leave_send_error();
        }
        self.set_pace();
        // The change may have set a new time limit.
        self.stop_clock(engine);
        // Publishes the new QP state.
        self.enter(self.life.phase());
        engine.wake(&mut self.core);
    }

    /// Takes over a stream to the peer. RC over TCP needs acknowledgement requests.
    pub(in crate::engine) fn linked(
        &mut self,
        engine: &mut EngineState,
        link: Link,
        phase: StreamPhase,
        peer: PeerLimits,
    ) {
        let Some(rc) = &mut self.rc else { return };
        rc.peer = Some(peer);
        rc.peer_waits = false;
        rc.waited = None;
        let over_tcp = link.tcp().is_some();
        self.link = link;
        if let Some(tcp) = self.link.tcp_mut() {
            tcp.allow_immediate_sends();
            if self.responder.passes() {
                tcp.allow_passing_responses();
            }
        }
        let acknowledged = self.core.transport.acknowledges().then_some(over_tcp);
        let ird = match acknowledged {
            None => 0,
            Some(false) => rc.ird,
            Some(true) => rc.ird + MAX_ACK_REQUESTS,
        };
        self.requester.begin_stream(ird, acknowledged);
        self.responder.begin_stream();
        self.set_pace();
        self.enter(phase);
        if self.requester.is_under_way() && acknowledged.is_some() {
            // The peer lost the state of requests sent over an earlier stream.
            self.fail_oldest(engine, "the peer has restarted since the request was sent");
        }
        engine.wake(&mut self.core);
    }

    /// Ends the stream and keeps the QP. On RC, requests in flight fail when another stream begins
    /// or the time limit passes. Posted requests wait for another stream until the time limit.
    pub(in crate::engine) fn unlink(&mut self, engine: &mut EngineState, reset: bool, why: &str) {
        if self.core.moves_to_error.is_some() {
            return self.disconnect(engine, DisconnectMode::Abort);
        }
        self.end_order(engine);
        self.end_stream_faults();
        let Some(rc) = &mut self.rc else { return };
        why.clone_into(&mut rc.why);
        let acknowledged = self.core.transport.acknowledges();
        // Segments that a copier writes have been received.
        self.release(engine);
        self.requester.end_stream(acknowledged);
        self.life.set_deadline(&self.core, engine, None);
        self.enter(StreamPhase::Unlinked);
        self.link.close(reset, &self.core, engine);
        self.drop_arrivals(engine);
        if !acknowledged {
            // The requests count as sent.
            self.retire(engine);
            self.flush_sends(engine);
        }
        // While a copier still writes for this stream, no other stream may begin.
        if !self.responder.is_copying() {
            engine.report(Notification::Unlinked { qp: self.core.id });
        }
        self.restart_clock(engine);
    }

    /// Reports that the QP may get another stream, once the last segment of the old one is in
    /// place.
    pub(in crate::engine) fn report_unlinked(&mut self, engine: &mut EngineState) {
        if self.life.phase() == StreamPhase::Unlinked {
            engine.report(Notification::Unlinked { qp: self.core.id });
        }
    }

    /// Sets the reason, determined by the resource manager, why there is no stream.
    pub(in crate::engine) fn set_unlinked_reason(&mut self, why: String) {
        if let Some(rc) = &mut self.rc {
            rc.why = why;
        }
    }

    /// Reports the first message of the peer: to the resource manager, and in RTR to the program.
    #[inline]
    pub(in crate::engine) fn note_communication(&mut self, engine: &mut EngineState) {
        let Some(rc) = &mut self.rc else { return };
        if std::mem::replace(&mut rc.has_received, true) {
            return;
        }
        let is_rtr = rc.sending.is_none();
        engine.report(Notification::CommunicationEstablished { qp: self.core.id });
        if is_rtr {
            let context = self.core.shared.context.load(Relaxed);
            let event = Event::CommunicationEstablished { qp: self.core.id, context };
            engine.emit(self.core.session, event);
        }
    }

    /// Reports, once, that the requests begun before SQD are done.
    pub(in crate::engine) fn emit_drained(&mut self, engine: &mut EngineState) {
        let Some(rc) = &mut self.rc else { return };
        if rc.drains
            && !rc.drain_reported
            && self.send_queue == SendQueue::Works
            && !self.requester.is_under_way()
            && !self.life.phase().flushes()
        {
            rc.drain_reported = true;
            let context = self.core.shared.context.load(Relaxed);
            let event = Event::SendQueueDrained { qp: self.core.id, context };
            engine.emit(self.core.session, event);
        }
    }
}
