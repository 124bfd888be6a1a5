//! The streams of a queue pair that is wired by hand: one comes, goes, and another may come.

use std::sync::atomic::Ordering::Relaxed;

use super::PeerLimits;
use crate::abi::control::{Event, QpChange};
use crate::engine::interface::Notification;
use crate::engine::link::Link;
use crate::engine::phase::StreamPhase;
use crate::engine::qp::Qp;
use crate::engine::requester::question::QUESTIONS;
use crate::engine::send_queue::SendQueue;
use crate::engine::state::EngineState;

impl Qp {
    /// Carries out a change that the program wants.
    pub(in crate::engine) fn change(&mut self, engine: &mut EngineState, change: &QpChange) {
        if self.life.phase().flushes() {
            return;
        }
        let Some(wired) = &mut self.wired else { return };
        match *change {
            QpChange::ReadyToSend(sending) => {
                wired.sending = Some(sending);
                (wired.drains, wired.communicates) = (false, true);
            }
            QpChange::DrainSendQueue => {
                (wired.drains, wired.told_of_drain) = (true, false);
                self.requester.ask_now();
            }
            QpChange::MinRnrTimer(code) => wired.min_rnr_timer = code,
            QpChange::Rights(rights) => self.core.rights = rights,
            // The resource manager makes another queue pair of it, or a first one.
            QpChange::ReadyToReceive(_) | QpChange::Reset => {}
            // Of datagrams.
            QpChange::ReceiveDatagrams { .. } | QpChange::QKey(_) => {}
        }
        if let QpChange::ReadyToSend(_) = change {
            self.leave_send_error();
        }
        self.set_pace();
        // A clock that runs may have got another time.
        self.stop_clock(engine);
        // What applications see of the phase is the state.
        self.enter(self.life.phase());
        engine.wake(&mut self.core);
    }

    /// A stream stands between this queue pair and the peer that it is wired to; `by_tcp` if the
    /// peer has to be asked for acknowledgements.
    pub(in crate::engine) fn linked(
        &mut self,
        engine: &mut EngineState,
        link: Link,
        phase: StreamPhase,
        peer: PeerLimits,
    ) {
        let Some(wired) = &mut self.wired else { return };
        (wired.peer, wired.peer_waits, wired.waited) = (Some(peer), false, None);
        let asks = link.tcp().is_some();
        self.link = link;
        if let Some(tcp) = self.link.tcp_mut() {
            tcp.allow_immediate_sends();
        }
        let (ird, acknowledged) = match wired.unreliable {
            true => (0, None),
            false => (wired.ird + if asks { QUESTIONS } else { 0 }, Some(asks)),
        };
        self.requester.begin_stream(ird, acknowledged);
        self.responder.begin_stream();
        self.set_pace();
        self.enter(phase);
        if self.requester.is_under_way() && acknowledged.is_some() {
            // The peer knows nothing of what was sent to it by an earlier stream.
            self.fail_oldest(engine, "the peer has begun anew since it was sent");
        }
        engine.wake(&mut self.core);
    }

    /// The stream is gone, and the queue pair stays: what had begun is lost, what is posted waits
    /// for another stream, both only for so long.
    pub(in crate::engine) fn unlink(&mut self, engine: &mut EngineState, reset: bool, why: &str) {
        let Some(wired) = &mut self.wired else { return };
        why.clone_into(&mut wired.why);
        let unreliable = wired.unreliable;
        // What a copier writes has arrived before.
        self.release(engine);
        self.requester.end_stream(unreliable);
        self.life.set_deadline(&self.core, engine, None);
        self.enter(StreamPhase::Unlinked);
        self.link.close(reset, &self.core, engine);
        if unreliable {
            // It has been sent, as far as anybody knows.
            self.retire(engine);
            self.flush_sends(engine);
        }
        // What a copier is writing came by this stream: another one may come when that is over.
        if !self.responder.is_copying() {
            engine.report(Notification::Unlinked { qp: self.core.id });
        }
        self.watch_anew(engine);
    }

    /// The last of an earlier stream is in place.
    pub(in crate::engine) fn unlinked_at_last(&mut self, engine: &mut EngineState) {
        if self.life.phase() == StreamPhase::Unlinked {
            engine.report(Notification::Unlinked { qp: self.core.id });
        }
    }

    /// Whether it works, with a stream or without.
    pub(in crate::engine) fn is_wired(&self) -> bool {
        self.wired.is_some()
    }

    /// Why there is no stream, as the resource manager knows better.
    pub(in crate::engine) fn set_unlinked_because(&mut self, why: String) {
        if let Some(wired) = &mut self.wired {
            wired.why = why;
        }
    }

    /// Something has come from the peer.
    #[inline]
    pub(in crate::engine) fn note_communication(&mut self, engine: &mut EngineState) {
        let Some(wired) = &mut self.wired else { return };
        if !std::mem::replace(&mut wired.communicates, true) {
            let context = self.core.shared.context.load(Relaxed);
            let event = Event::CommunicationEstablished { qp: self.core.id, context };
            engine.emit(self.core.session, event);
        }
    }

    /// Says, once, that what had begun before Sqd is done.
    pub(in crate::engine) fn tell_of_drain(&mut self, engine: &mut EngineState) {
        let Some(wired) = &mut self.wired else { return };
        if wired.drains
            && !wired.told_of_drain
            && self.send_queue == SendQueue::Works
            && !self.requester.is_under_way()
            && !self.life.phase().flushes()
        {
            wired.told_of_drain = true;
            let context = self.core.shared.context.load(Relaxed);
            let event = Event::SendQueueDrained { qp: self.core.id, context };
            engine.emit(self.core.session, event);
        }
    }
}
