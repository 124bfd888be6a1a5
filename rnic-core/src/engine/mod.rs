//! The engine: the one place where wire and device meet.
//!
//! An [`Engine`] owns the queue pairs of one worker for life, a copy of the STag table, and nothing
//! that waits. It never reads a clock, opens a socket or blocks, so two engines run back to back in
//! a test under virtual time.
//!
//! A queue pair (`qp`) has four parts: what it requests (`requester`), what it responds
//! (`responder`), the life of its stream (`life`, `phase`) and its `link`: TCP, or another queue
//! pair of this engine; or it has no stream and sends datagrams (`datagram`). What arrives by
//! either passes `arrival`; what goes wrong is a `reason`, which `diagnosis` puts into words;
//! `teardown` ends streams. What all queue pairs share is the `state`: the `schedule`, `doorbells`,
//! `deadlines`, `copies` and what is charged for bytes held (`charge`).

mod arrival;
mod change_requests;
mod charge;
mod commands;
mod copies;
mod datagram;
mod deadlines;
mod doorbells;
mod dying;
mod explanation;
mod flush;
mod incoming;
mod interface;
mod life;
mod link;
mod mass_ends;
mod notice;
mod numbers;
mod phase;
mod qp;
mod qp_core;
mod reason;
mod requester;
mod responder;
mod responder_error;
mod resume;
mod schedule;
mod send_error;
mod send_queue;
mod state;
mod teardown;
#[cfg(test)]
mod tests;
mod turns;
mod wired;

use std::collections::HashMap;
use std::io::{self, IoSliceMut};

pub use charge::ChargeLimits;
pub use datagram::{DatagramConfig, DatagramPort, DatagramRules};
pub use interface::{EngineOptions, MulpduPolicy, Notification, Output, Receive, Transmit, Work};
pub use link::tcp::TxBatch;
pub use link::tcp::partial::PartialLimits;
pub use qp::QpConfig;
pub use requester::question::QUESTIONS;
pub use responder::receives::Receives;
pub use wired::PeerLimits;

use crate::device::copier::CopyResult;
use crate::device::memory::Unreachable;
use crate::device::{Copier, Cq, Srq};
use crate::types::{QpId, SessionId, Time};
use charge::Charges;
use deadlines::Due;
use link::tcp::TX_SLAB;
use link::tcp::failure::in_words;
use link::tcp::slabs::RX_SLAB;
use link::tcp::transmit::UNSENT;
use qp::Qp;
use schedule::Key;
use state::{EngineState, Peer};

/// The engine of one worker.
///
/// It speaks as quinn-proto does: [`handle_*`](Self::handle_readable) tells it what happened,
/// [`poll_*`](Self::poll_output) asks what to carry out, and plain verbs
/// ([`attach_tcp`](Self::attach_tcp), [`disconnect`](Self::disconnect), [`destroy`](Self::destroy))
/// are commands of the resource manager, authorised already. A worker calls it in rounds:
///
/// 1. the commands that have come;
/// 2. [`poll_doorbells`](Self::poll_doorbells), which begins the round;
/// 3. [`poll_work`](Self::poll_work) until it says `None`: after each, [`transmit`](Self::transmit)
///    or [`receive`](Self::receive) as it asks, then [`turn_over`](Self::turn_over);
/// 4. [`handle_timeout`](Self::handle_timeout), if [`poll_timeout`](Self::poll_timeout) is due;
/// 5. [`poll_session_end`](Self::poll_session_end) while [`is_ending`](Self::is_ending);
/// 6. [`poll_output`](Self::poll_output) until it says `None`.
///
/// After a round without work: [`prepare_sleep`](Self::prepare_sleep), a sleep until something
/// happens, and the `handle_*` for what did.
pub struct Engine {
    qps: Vec<Option<Box<Qp>>>,
    free: Vec<Key>,
    by_id: HashMap<QpId, Key>,
    state: EngineState,
    tx_slab: Box<[u8]>,
    rx_slab: Vec<u8>,
    rung: Vec<Key>,
}

impl Engine {
    /// An engine without sessions.
    pub fn new(options: EngineOptions) -> Self {
        let unsent = Charges::new(options.unsent, UNSENT);
        Engine {
            qps: Vec::new(),
            free: Vec::new(),
            by_id: HashMap::new(),
            state: EngineState::new(options, unsent),
            tx_slab: vec![0; TX_SLAB].into_boxed_slice(),
            rx_slab: vec![0; RX_SLAB],
            rung: Vec::new(),
        }
    }

    // -----------------------------------------------------------------------------------------
    // What happened

    /// A session's eventfd fired: its doorbells are polled again.
    pub fn handle_doorbell(&mut self, session: SessionId, now: Time) {
        self.state.doorbells.rang(session, now, &self.state.schedule);
    }

    /// A QP's socket may have something: it is read when it is the QP's turn ([`Work::Receive`]).
    pub fn handle_readable(&mut self, qp: QpId) {
        self.with(qp, |qp, engine| {
            qp.core.turn.readable = true;
            engine.line_up(&mut qp.core);
        });
    }

    /// A QP's socket takes bytes again.
    pub fn handle_writable(&mut self, qp: QpId) {
        self.with(qp, |qp, engine| {
            if qp.link.tcp_mut().is_some_and(|tcp| tcp.handle_writable()) {
                engine.wake(&mut qp.core);
            }
        });
    }

    /// The socket of a QP that [is blocked](Receive::Blocked) has failed.
    pub fn handle_socket_error(&mut self, qp: QpId, error: &io::Error, now: Time) {
        self.state.now = now;
        self.with(qp, |qp, engine| qp.lost(engine, &in_words("receiving", error)));
    }

    /// The peer's FIN is in the socket of a QP that [is blocked](Receive::Blocked), behind bytes
    /// that have not been read.
    pub fn handle_peer_closing(&mut self, qp: QpId, now: Time) {
        self.state.now = now;
        self.with(qp, |qp, engine| qp.peer_closing(engine));
    }

    /// A copier has answered a copy of this engine, or is gone. Copies of one copier are answered
    /// in the order in which they came.
    pub fn handle_copied(&mut self, copier: &Copier, job: u64, result: CopyResult, now: Time) {
        self.state.now = now;
        copier.over(self.state.worker);
        // It may have been given up meanwhile.
        if let Some(of) = self.state.copies.close(job, &mut self.state.deadlines) {
            self.with(of.qp, |qp, engine| qp.copied(engine, job, result));
        }
    }

    /// Every worker has carried out the change that this QP asked for
    /// ([`Notification::ChangeStags`]); it asks for one at a time.
    pub fn handle_stags_changed(&mut self, qp: QpId, now: Time) {
        self.state.now = now;
        let user = self.state.changes.answered(qp);
        self.with(qp, |qp, engine| qp.stags_changed(engine));
        // Others may have waited for this one. Who waits no longer has had his turn.
        while let Some(next) = user.and_then(|user| self.state.changes.next(user)) {
            self.with(next, |qp, engine| qp.requester.ask_at_last(&qp.core, engine));
        }
    }

    /// Another worker has freed slots of a CQ ([`Notification::CqSpaceFreed`]).
    pub fn handle_cq_space(&mut self, cq: &Cq, now: Time) {
        self.state.now = now;
        self.state.space_freed(cq);
        self.deliver_pending();
    }

    /// Receives of a shared queue may be taken by QPs of this worker
    /// ([`Notification::ReceivesFreed`]).
    pub fn handle_receives_posted(&mut self, srq: &Srq, now: Time) {
        self.state.now = now;
        self.state.receives_posted(srq);
        self.deliver_pending();
    }

    /// Deadlines up to `now` have passed. Those of many QPs are handled some at a time, the others
    /// when this is called again.
    pub fn handle_timeout(&mut self, now: Time) {
        self.state.now = now;
        for _ in 0..DEADLINES {
            match self.state.deadlines.pop_due(now) {
                None => break,
                Some(Due::Phase(key)) => {
                    self.with_key(key, |qp, engine| qp.deadline_passed(engine));
                }
                Some(Due::Rnr(key)) => {
                    self.with_key(key, |qp, engine| qp.rnr_timeout_passed(engine));
                }
                Some(Due::Stall(key)) => {
                    self.with_key(key, |qp, engine| qp.look_for_stall(engine));
                }
                Some(Due::Wired(key)) => {
                    self.with_key(key, |qp, engine| qp.clock_ran_out(engine));
                }
                Some(Due::Copy(job)) => self.copy_timeout(job),
            }
        }
    }

    /// A copy is given up, and with it the session whose memory it is of.
    fn copy_timeout(&mut self, id: u64) {
        let Some(job) = self.state.copies.close(id, &mut self.state.deadlines) else { return };
        let span = self.state.options.copy_deadline.as_secs_f32();
        let why = format!("a copy of attached memory did not return in {span} s");
        let session = job.copier.session();
        self.state.report(Notification::Misbehaved { session, why });
        let gone = Err(Unreachable::Detached);
        self.with(job.qp, |qp, engine| {
            // The session's own QPs end with it, without completions. A completion would return the
            // buffer to the program while the library may still write to it.
            if qp.core.session != session {
                qp.copied(engine, id, gone);
            }
        });
    }

    // -----------------------------------------------------------------------------------------
    // What to carry out

    /// Sends what a QP has to send by `send`, one call. `emss` is the connection's effective MSS.
    pub fn transmit(
        &mut self,
        qp: QpId,
        now: Time,
        emss: usize,
        send: impl FnOnce(&TxBatch<'_>) -> io::Result<usize>,
    ) -> Transmit {
        self.state.now = now;
        let mut slab = std::mem::take(&mut self.tx_slab);
        let outcome = self.with(qp, |qp, engine| {
            let outcome = qp.transmit_tcp(engine, &mut slab, emss, send);
            if outcome == Transmit::More {
                engine.wake(&mut qp.core);
            }
            outcome
        });
        self.tx_slab = slab;
        outcome.unwrap_or(Transmit::Idle)
    }

    /// Reads from a QP's socket by `recv` (an end of stream is `Ok(0)`) and handles what came.
    pub fn receive(
        &mut self,
        qp: QpId,
        now: Time,
        recv: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> Receive {
        self.state.now = now;
        let mut slab = std::mem::take(&mut self.rx_slab);
        let outcome = self.with(qp, |qp, engine| qp.receive_tcp(engine, &mut slab, recv));
        self.rx_slab = slab;
        outcome.unwrap_or(Receive::Closed)
    }

    /// The next thing to carry out for the engine.
    pub fn poll_output(&mut self) -> Option<Output> {
        let output = self.state.outputs.pop_front();
        if let Some(Output::NotifyCq(cq)) = &output {
            cq.event_sent();
        }
        output
    }

    /// When [`Engine::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.state.deadlines.next()
    }

    /// Before the worker sleeps: from now on clients write their eventfd. False if one rang in the
    /// meantime: poll the doorbells again.
    pub fn prepare_sleep(&mut self) -> bool {
        self.state.dying.is_empty()
            && self.state.ending.is_empty()
            && self.state.doorbells.prepare_sleep()
    }

    /// QPs this engine owns.
    pub fn qp_count(&self) -> usize {
        self.by_id.len()
    }

    // -----------------------------------------------------------------------------------------

    fn with<R>(&mut self, id: QpId, f: impl FnOnce(&mut Qp, &mut EngineState) -> R) -> Option<R> {
        let key = *self.by_id.get(&id)?;
        self.with_key(key, f)
    }

    fn with_key<R>(
        &mut self,
        key: Key,
        f: impl FnOnce(&mut Qp, &mut EngineState) -> R,
    ) -> Option<R> {
        let qp = self.qps.get_mut(key as usize)?.as_mut()?;
        let before = qp.core.turn.deficit;
        let result = f(qp, &mut self.state);
        self.state.settle(&mut qp.core, before);
        self.deliver_pending();
        Some(result)
    }

    /// Carries out what QPs did to each other: by the direct path, or by way of a CQ they share.
    fn deliver_pending(&mut self) {
        let Engine { qps, state, .. } = self;
        loop {
            if let Some((to, signal)) = state.signals.pop_front() {
                if let Some(qp) = find(qps, to)
                    && let Err(signal) = qp.defer(signal)
                {
                    let before = qp.core.turn.deficit;
                    qp.handle_signal(state, &signal);
                    state.settle(&mut qp.core, before);
                }
            } else if let Some((key, why)) = state.crowded_out.pop() {
                if let Some(qp) = qps.get_mut(key as usize).and_then(Option::as_mut) {
                    let before = qp.core.turn.deficit;
                    qp.lost(state, &why);
                    state.settle(&mut qp.core, before);
                }
            } else if let Some(peer) = state.awakened.pop() {
                if let Some(qp) = find(qps, peer) {
                    state.wake(&mut qp.core);
                }
            } else {
                return;
            }
        }
    }
}

/// The QP that is meant, if it is there still.
fn find(qps: &mut [Option<Box<Qp>>], peer: Peer) -> Option<&mut Qp> {
    let qp = qps.get_mut(peer.key as usize)?.as_deref_mut()?;
    (qp.core.id == peer.id).then_some(qp)
}

#[cfg(test)]
impl Engine {
    /// Bytes kept of streams that stand still.
    fn kept_bytes(&self) -> usize {
        self.qps.iter().flatten().map(|qp| qp.responder.kept_bytes()).sum()
    }
}

/// Deadlines that are handled in one call.
const DEADLINES: usize = 16;
