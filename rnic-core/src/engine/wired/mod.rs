//! Queue pairs that are wired by hand: the layer above RDMAP that makes of an iWARP stream what
//! programs of a RoCE adapter expect.
//!
//! Such a queue pair lives without a stream, before its peer is there and after it has gone
//! ([`StreamPhase::Unlinked`]). Its requests are done when the peer has acknowledged them
//! ([`acknowledge`](super::requester::acknowledge)); what a Terminate says about one of them is
//! its status ([`verdict`]); and two clocks ([`clock`]) end the wait for a peer that is not there or
//! has no receive. Everything else of the engine knows nothing of it.

mod clock;
mod verdict;

use std::sync::atomic::Ordering::Relaxed;

use super::link::Link;
use super::phase::StreamPhase;
use super::qp::Qp;
use super::state::EngineState;
use crate::abi::control::{Event, QpChange, Sending, Wiring};
use crate::types::{Access, QpState, Time};

/// What a queue pair that is wired by hand has been told, and where it stands.
pub(super) struct Wired {
    /// Requests of the peer's that may await a response.
    ird: u16,
    min_rnr_timer: u8,
    /// Known from Rts on.
    sending: Option<Sending>,
    /// In Sqd.
    drains: bool,
    /// The program was told that the send queue has drained.
    told_of_drain: bool,
    /// The program was told that the first message has come, or knows because it sends.
    communicates: bool,
    /// What the peer said when the stream came about; none before the first.
    peer: Option<PeerLimits>,
    /// The other end of the direct path has no receive for what is being sent.
    peer_waits: bool,
    /// When a clock runs out.
    deadline: Option<Time>,
    /// Why there is no stream, as a sentence for people.
    why: String,
}

/// What the peer of a queue pair that is wired by hand has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerLimits {
    /// Requests that it may be sent without an answer.
    pub ird: u16,
    /// Code of the time to wait for a receive of its before one more try.
    pub min_rnr_timer: u8,
}

impl Wired {
    pub(super) fn new(wiring: &Wiring) -> Self {
        Wired {
            ird: wiring.ird,
            min_rnr_timer: wiring.min_rnr_timer,
            sending: None,
            drains: false,
            told_of_drain: false,
            communicates: false,
            peer: None,
            peer_waits: false,
            deadline: None,
            why: "its peer has not been wired to it".to_owned(),
        }
    }

    /// The state that applications see while it works.
    pub(super) fn state(&self) -> QpState {
        match (self.sending, self.drains) {
            (None, _) => QpState::Rtr,
            (Some(_), true) => QpState::Sqd,
            (Some(_), false) => QpState::Rts,
        }
    }

    /// Whether requests that are posted are begun.
    fn begins(&self) -> bool {
        self.state() == QpState::Rts
    }

    /// Requests that may await a response: as many as the program wants and the peer takes.
    fn ord(&self) -> u16 {
        let wanted = self.sending.map_or(0, |sending| sending.ord);
        self.peer.map_or(wanted, |peer| wanted.min(peer.ird))
    }
}

impl Qp {
    /// Carries out a change that the program wants.
    pub(super) fn change(&mut self, engine: &mut EngineState, change: &QpChange) {
        if self.life.phase().flushes() {
            return;
        }
        let Some(wired) = &mut self.wired else { return };
        match *change {
            QpChange::ReadyToSend(sending) => {
                wired.sending = Some(sending);
                (wired.drains, wired.communicates) = (false, true);
            }
            QpChange::DrainSendQueue => (wired.drains, wired.told_of_drain) = (true, false),
            QpChange::MinRnrTimer(code) => wired.min_rnr_timer = code,
            QpChange::Rights(rights) => self.core.rights = rights,
            // The resource manager makes another queue pair of it, or a first one.
            QpChange::ReadyToReceive(_) | QpChange::Reset => {}
        }
        self.requester.set_pace(wired.begins(), wired.ord());
        // What applications see of the phase is the state.
        self.enter(self.life.phase());
        engine.wake(&mut self.core);
    }

    /// A stream stands between this queue pair and the peer that it is wired to; `by_tcp` if the
    /// peer has to be asked for acknowledgements.
    pub(super) fn linked(
        &mut self,
        engine: &mut EngineState,
        link: Link,
        phase: StreamPhase,
        peer: PeerLimits,
    ) {
        let Some(wired) = &mut self.wired else { return };
        (wired.peer, wired.peer_waits) = (Some(peer), false);
        let asks = link.tcp().is_some();
        self.link = link;
        if let Some(tcp) = self.link.tcp_mut() {
            tcp.allow_immediate_sends();
        }
        let ird = wired.ird + u16::from(asks);
        self.requester.begin_stream(ird, asks);
        self.requester.set_pace(wired.begins(), wired.ord());
        self.enter(phase);
        if self.requester.is_under_way() {
            // The peer knows nothing of what was sent to it by an earlier stream.
            self.fail_oldest(engine, "the peer has begun anew since it was sent");
        }
        engine.wake(&mut self.core);
    }

    /// The stream is gone, and the queue pair stays: what had begun is lost, what is posted waits
    /// for another stream, both only for so long.
    pub(super) fn unlink(&mut self, engine: &mut EngineState, reset: bool, why: &str) {
        let Some(wired) = &mut self.wired else { return };
        why.clone_into(&mut wired.why);
        // What a copier writes has arrived before.
        if self.responder.awaits_receive() {
            self.unblock(engine);
        }
        self.requester.end_stream();
        self.life.set_deadline(&self.core, engine, None);
        self.enter(StreamPhase::Unlinked);
        self.link.close(reset, &self.core, engine);
        engine.report(super::interface::Notification::Unlinked { qp: self.core.id });
        self.watch(engine);
    }

    /// Whether it works, with a stream or without.
    pub(super) fn is_wired(&self) -> bool {
        self.wired.is_some()
    }

    /// Why there is no stream, as the resource manager knows better.
    pub(super) fn set_unlinked_because(&mut self, why: String) {
        if let Some(wired) = &mut self.wired {
            wired.why = why;
        }
    }

    /// Something has come from the peer.
    #[inline]
    pub(super) fn note_communication(&mut self, engine: &mut EngineState) {
        let Some(wired) = &mut self.wired else { return };
        if !std::mem::replace(&mut wired.communicates, true) {
            let context = self.core.shared.context.load(Relaxed);
            let event = Event::CommunicationEstablished { qp: self.core.id, context };
            engine.emit(self.core.session, event);
        }
    }

    /// Says, once, that what had begun before Sqd is done.
    pub(super) fn tell_of_drain(&mut self, engine: &mut EngineState) {
        let Some(wired) = &mut self.wired else { return };
        if wired.drains
            && !wired.told_of_drain
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

/// Rights of a peer that is not limited by its queue pair.
pub(super) const ALL_RIGHTS: Access =
    Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);
