//! The engine, which joins the wire protocols with device memory and queues.
//!
//! An [`Engine`] owns the QPs of one worker until they are destroyed, and a copy of the STag table.
//! It never blocks, reads a clock or opens a socket, so two engines run back to back in a test
//! under virtual time.
//!
//! A QP (`qp`) has four parts: `requester` for its own requests, `responder` for incoming messages,
//! the life of its stream (`life`, `phase`), and its `link`: TCP or another QP of this engine. A UD
//! QP has no stream and sends datagrams (`datagram`). The differences between iWARP, RC, UC and UD
//! are in `transport`. Segments of either link pass through `arrival`; `order` may delay their
//! placement. An error is a `reason`, for
//! which `explanation` has the text. `teardown` ends streams. All QPs share the `state`:
//! `schedule`, `doorbells`, `deadlines`, `copies`, and the memory charged to sessions (`charge`).

mod arrival;
mod batch_teardown;
mod change_requests;
mod charge;
mod commands;
mod copies;
mod datagram;
mod deadlines;
mod doorbells;
mod event_faults;
mod explanation;
mod fault_rules;
mod faults;
mod flush;
mod fpdu_faults;
mod incoming;
mod interface;
mod life;
mod link;
mod numbers;
mod order;
mod phase;
mod qp;
mod qp_core;
mod qp_faults;
mod rc;
mod reason;
mod requester;
mod responder;
mod responder_error;
mod resume;
mod rnr_notice;
mod schedule;
mod send_error;
mod send_queue;
mod state;
mod teardown;
mod teardown_queue;
#[cfg(test)]
mod tests;
mod to_error;
mod transport;
mod turns;

use std::collections::HashMap;
use std::io::{self, IoSliceMut};

pub use charge::ChargeLimits;
pub use commands::{ConnectedEnd, EngineCommand};
pub use datagram::{DatagramConfig, DatagramPort, DatagramRules, PortChanges};
pub use fault_rules::{QpFault, rule_of_fault};
pub use interface::{
    Broadcast, EngineOptions, Freed, MulpduPolicy, Notification, Output, Receive, Transmit, Work,
};
pub use link::emulation::shared::EmulatedLink;
pub use link::tcp::TxBatch;
pub use link::tcp::partial::PartialLimits;
pub use qp::QpConfig;
pub use rc::PeerLimits;
pub use requester::ack_request::MAX_ACK_REQUESTS;
pub use responder::receives::Receives;

use crate::device::Copier;
use crate::device::copier::CopyResult;
use crate::device::memory::Unreachable;
use charge::Charges;
use datagram::in_flight::DelayedDatagram;
use deadlines::Due;
use link::tcp::TX_SLAB;
use link::tcp::failure::socket_error_text;
use link::tcp::slabs::RX_SLAB;
use link::tcp::transmit::UNSENT;
use qp::Qp;
use rnic_abi::types::{QpId, SessionId, Time};
use schedule::Key;
use state::{EngineState, Peer};

/// The engine of one worker.
///
/// The interface follows quinn-proto: [`handle_*`](Self::handle_readable) takes events,
/// [`poll_*`](Self::poll_output) returns actions for the worker. Commands of the resource manager
/// are already authorised. [`handle_command`](Self::handle_command) executes commands that need
/// only the engine; other methods ([`attach_tcp`](Self::attach_tcp), [`destroy`](Self::destroy))
/// are the engine's part of the other commands. A worker calls the engine in rounds:
///
/// 1. the pending commands;
/// 2. [`poll_doorbells`](Self::poll_doorbells), which begins the round;
/// 3. [`poll_work`](Self::poll_work) until it returns `None`, each time followed by
///    [`transmit`](Self::transmit) or [`receive`](Self::receive) as requested, then
///    [`turn_over`](Self::turn_over);
/// 4. [`handle_timeout`](Self::handle_timeout), if [`poll_timeout`](Self::poll_timeout) is due;
/// 5. [`poll_session_end`](Self::poll_session_end) while [`is_ending`](Self::is_ending);
/// 6. [`poll_output`](Self::poll_output) until it returns `None`.
///
/// After a round without work: [`prepare_sleep`](Self::prepare_sleep), a sleep until an event, and
/// the `handle_*` of that event.
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
    /// Returns an engine without sessions.
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
    // Events

    /// Resumes polling the doorbells of a session after its eventfd fired.
    pub fn handle_doorbell(&mut self, session: SessionId, now: Time) {
        self.state.doorbells.rang(session, now, &self.state.schedule);
    }

    /// Schedules a QP to read its socket, which is readable, in its turn ([`Work::Receive`]).
    pub fn handle_readable(&mut self, qp: QpId) {
        self.with(qp, |qp, engine| {
            qp.core.turn.readable = true;
            engine.enqueue(&mut qp.core);
        });
    }

    /// Resumes sending on a QP after its socket has become writable.
    pub fn handle_writable(&mut self, qp: QpId) {
        self.with(qp, |qp, engine| {
            if qp.link.tcp_mut().is_some_and(|tcp| tcp.handle_writable()) {
                engine.wake(&mut qp.core);
            }
        });
    }

    /// Handles a socket error of a QP that [is blocked](Receive::Blocked).
    pub fn handle_socket_error(&mut self, qp: QpId, error: &io::Error, now: Time) {
        self.state.now = now;
        self.with(qp, |qp, engine| qp.lost(engine, &socket_error_text("receiving", error)));
    }

    /// Handles a FIN that follows unread bytes in the socket of a [blocked](Receive::Blocked) QP.
    pub fn handle_peer_closing(&mut self, qp: QpId, now: Time) {
        self.state.now = now;
        self.with(qp, |qp, engine| qp.peer_closing(engine));
    }

    /// Handles the result of a copy that this engine started, or an error if its copier no longer
    /// exists. A copier returns its results in the order of the jobs.
    pub fn handle_copied(&mut self, copier: &Copier, job: u64, result: CopyResult, now: Time) {
        self.state.now = now;
        copier.over(self.state.worker);
        // The copy may already have timed out.
        if let Some(of) = self.state.copies.close(job, &mut self.state.deadlines) {
            self.with(of.qp, |qp, engine| qp.copied(engine, job, result));
        }
    }

    /// Handles deadlines up to `now`, a limited number in one call; the next calls handle the rest.
    pub fn handle_timeout(&mut self, now: Time) {
        self.state.now = now;
        for _ in 0..MAX_DEADLINES {
            match self.state.deadlines.pop_due(now) {
                None => break,
                Some(Due::Phase(key)) => {
                    self.with_key(key, |qp, engine| qp.deadline_passed(engine));
                }
                Some(Due::Rnr(key)) => {
                    self.with_key(key, |qp, engine| qp.rnr_timeout_passed(engine));
                }
                Some(Due::Stall(key)) => {
                    self.with_key(key, |qp, engine| qp.check_stall(engine));
                }
                Some(Due::RcClock(key)) => {
                    self.with_key(key, |qp, engine| qp.clock_expired(engine));
                }
                Some(Due::Completion(key)) => {
                    self.with_key(key, |qp, engine| qp.publish_held(engine));
                }
                Some(Due::Request(key)) => {
                    self.with_key(key, |qp, engine| qp.core.end_request_wait(engine));
                }
                Some(Due::CompletionEvent(key)) => {
                    self.with_key(key, |qp, engine| qp.core.send_held_events(false, engine));
                }
                Some(Due::Order(key)) => {
                    self.with_key(key, |qp, engine| qp.order_due(engine));
                }
                Some(Due::Link(key)) => {
                    self.with_key(key, |qp, engine| qp.link_deadline_passed(engine));
                }
                Some(Due::Copy(job)) => self.copy_timeout(job),
            }
        }
    }

    /// Abandons a copy, and ends the session that owns its memory.
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
    // Actions

    /// Sends the pending bytes of a QP with one call of `send`. `emss` is the connection's
    /// effective MSS.
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
            if qp.core.moves_to_error.is_some() {
                qp.end_if_sent(engine);
            }
            outcome
        });
        self.tx_slab = slab;
        outcome.unwrap_or(Transmit::Idle)
    }

    /// Returns true if a fault rule has stopped a QP, which then neither sends nor receives.
    pub fn is_stopped(&self, qp: QpId) -> bool {
        let key = self.by_id.get(&qp);
        let qp = key.and_then(|key| self.qps[*key as usize].as_ref());
        qp.is_some_and(|qp| qp.is_stopped())
    }

    /// Reads from a QP's socket with one call of `recv` (end of stream is `Ok(0)`) and handles the
    /// bytes.
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

    /// Returns the next action for the worker.
    pub fn poll_output(&mut self) -> Option<Output> {
        let output = self.state.outputs.pop_front();
        if let Some(Output::NotifyCq(cq)) = &output {
            cq.event_sent();
        }
        output
    }

    /// Returns the time at which [`Engine::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.state.deadlines.next()
    }

    /// Returns the time of [`poll_timeout`](Self::poll_timeout) if an emulated link is then due,
    /// which should not be handled later than that.
    pub fn poll_precise_timeout(&self) -> Option<Time> {
        self.state.deadlines.next_of_link()
    }

    /// Prepares the worker's sleep: from now on clients write their eventfd. Returns false if a
    /// doorbell has rung or work remains: the worker must then poll the doorbells again.
    pub fn prepare_sleep(&mut self) -> bool {
        self.state.dying.is_empty()
            && self.state.ending.is_empty()
            && self.state.doorbells.prepare_sleep()
    }

    /// Returns true if QPs may hold data that must be placed before an STag is revoked. A command
    /// then takes effect only when the engine has handled it.
    pub fn may_hold_data(&self) -> bool {
        !self.state.ordered.is_empty()
    }

    /// Returns the number of QPs that this engine owns.
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

    /// Carries out the effects of QPs on each other: signals, evictions and wake-ups.
    fn deliver_pending(&mut self) {
        let Engine { qps, by_id, state, .. } = self;
        loop {
            if let Some((to, signal)) = state.signals.pop_front() {
                if let Some(qp) = find(qps, to)
                    && let Err(signal) = qp.defer(signal)
                {
                    let before = qp.core.turn.deficit;
                    qp.handle_signal(state, &signal);
                    state.settle(&mut qp.core, before);
                }
            } else if let Some((key, why)) = state.evicted.pop() {
                if let Some(qp) = qps.get_mut(key as usize).and_then(Option::as_mut) {
                    let before = qp.core.turn.deficit;
                    qp.lost(state, &why);
                    state.settle(&mut qp.core, before);
                }
            } else if let Some(peer) = state.awakened.pop() {
                if let Some(qp) = find(qps, peer) {
                    state.wake(&mut qp.core);
                }
            } else if let Some(DelayedDatagram { datagram, bytes }) = state.datagrams.pop_front() {
                let key = by_id.get(&datagram.qp);
                if let Some(qp) = key.and_then(|key| qps.get_mut(*key as usize)?.as_mut()) {
                    let before = qp.core.turn.deficit;
                    qp.datagram_arrived(state, &datagram, &bytes);
                    state.settle(&mut qp.core, before);
                }
            } else {
                return;
            }
        }
    }
}

/// Returns the QP with this key, unless the key has been reused.
fn find(qps: &mut [Option<Box<Qp>>], peer: Peer) -> Option<&mut Qp> {
    let qp = qps.get_mut(peer.key as usize)?.as_deref_mut()?;
    (qp.core.id == peer.id).then_some(qp)
}

#[cfg(test)]
impl Engine {
    /// Returns the bytes kept for streams with a blocked incoming direction.
    fn kept_bytes(&self) -> usize {
        self.qps.iter().flatten().map(|qp| qp.responder.kept_bytes()).sum()
    }
}

/// Maximum number of deadlines handled in one call.
const MAX_DEADLINES: usize = 16;
