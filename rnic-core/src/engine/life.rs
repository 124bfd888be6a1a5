//! The life of a queue pair's stream: its phase, why it ends, and what its owner is told of both.
//!
//! The first fault of a stream is also the reason of every flush that follows, so the number of its
//! record is kept here. What this side brings about itself is put aside in the log, where it
//! displaces no fault.

use std::sync::atomic::Ordering::Relaxed;

use super::deadlines::Due;
use super::explanation::{DATAGRAMS, Explanation, FLUSHED, LOST, SILENCE, about, rule_of};
use super::interface::Notification;
use super::phase::{StreamEvent, StreamPhase};
use super::qp_core::QpCore;
use super::reason::Reason;
use super::state::EngineState;
use crate::abi::control::{Diagnosis, DiagnosisKind, DisconnectReason, Event};
use crate::rdmap::{Layout, Terminate, codes};
use crate::types::{AddressPair, CompletionStatus, TerminateCode, TerminateOrigin, Time};

/// What the system calls a connection that the peer lets go of (`errno(3)`).
const CONNECTION_RESET: u16 = 104;

/// Where a queue pair's stream is, and how it came there.
pub(super) struct LifeCycle {
    phase: StreamPhase,
    /// When the phase has lasted as long as it may.
    deadline: Option<Time>,
    addresses: Option<AddressPair>,
    /// MPA revision of start-up.
    revision: u8,
    /// The peer's FIN has been seen.
    peer_fin: bool,
    /// The application was told that the peer's FIN is behind messages that wait for receives.
    told_of_closing: bool,
    /// Whoever disconnected has set a limit, past which the peer's FIN is not waited for.
    leaves: bool,
    /// The application was told that the connection stands, and must be told how it ends.
    announced: bool,
    /// Reason for the end, once known: the first one counts.
    end: Option<DisconnectReason>,
    /// The record that says why the stream ends by a fault; 0 while it does not.
    diagnosis: u64,
    /// The record of the request that stopped the send queue (SQE); 0 while it works.
    send_error: u64,
    /// The record for requests that are flushed otherwise, once there is one.
    flush_diagnosis: u64,
    /// Entries remain in the queues that could not be flushed for lack of CQ slots, or because of a
    /// copier that is writing.
    flush_pending: bool,
}

impl LifeCycle {
    pub(super) fn new() -> Self {
        LifeCycle {
            phase: StreamPhase::Ended,
            deadline: None,
            addresses: None,
            revision: 0,
            peer_fin: false,
            told_of_closing: false,
            leaves: false,
            announced: false,
            end: None,
            diagnosis: 0,
            send_error: 0,
            flush_diagnosis: 0,
            flush_pending: false,
        }
    }

    // --- Phases ------------------------------------------------------------------------------

    /// A connection has been through start-up.
    pub(super) fn connected(&mut self, addresses: AddressPair, revision: u8) {
        (self.addresses, self.revision) = (Some(addresses), revision);
    }

    /// Past the deadline of its disconnect the peer's FIN is not waited for.
    pub(super) fn leave_at_deadline(&mut self) {
        self.leaves = true;
    }

    /// Whether the peer's FIN is not waited for past the deadline.
    pub(super) fn leaves_at_deadline(&self) -> bool {
        self.leaves
    }

    pub(super) fn phase(&self) -> StreamPhase {
        self.phase
    }

    /// The phase that an event leads to; `None` where it changes nothing.
    pub(super) fn after(&self, event: StreamEvent) -> Option<StreamPhase> {
        self.phase.after(event)
    }

    /// Takes a phase.
    pub(super) fn enter(&mut self, phase: StreamPhase) {
        self.phase = phase;
    }

    pub(super) fn set_deadline(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        deadline: Option<Time>,
    ) {
        let due = Due::Phase(core.key);
        if let Some(old) = self.deadline {
            engine.deadlines.clear(old, due);
        }
        self.deadline = deadline;
        if let Some(new) = deadline {
            engine.deadlines.set(new, due);
        }
    }

    /// When the phase will have lasted as long as it may.
    pub(super) fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// The deadline was taken out of the set, because it has passed.
    pub(super) fn deadline_passed(&mut self) {
        self.deadline = None;
    }

    /// Notes the peer's FIN; whether it is the first.
    pub(super) fn see_peer_fin(&mut self) -> bool {
        !std::mem::replace(&mut self.peer_fin, true)
    }

    /// Notes that the peer's FIN is behind messages that wait; whether for the first time.
    pub(super) fn see_peer_closing(&mut self) -> bool {
        !std::mem::replace(&mut self.told_of_closing, true)
    }

    pub(super) fn peer_fin(&self) -> bool {
        self.peer_fin
    }

    pub(super) fn addresses(&self) -> Option<AddressPair> {
        self.addresses
    }

    /// The stream ends for this reason, unless there was one before.
    pub(super) fn ends_by(&mut self, reason: DisconnectReason) {
        self.end.get_or_insert(reason);
    }

    /// Something is left to be flushed.
    pub(super) fn flush_later(&mut self) {
        self.flush_pending = true;
    }

    /// Whether something was left to be flushed; from now on nothing is.
    pub(super) fn take_flush_pending(&mut self) -> bool {
        std::mem::take(&mut self.flush_pending)
    }

    pub(super) fn is_flush_pending(&self) -> bool {
        self.flush_pending
    }

    // --- Events for the owner ----------------------------------------------------------------

    /// Tells the application that the connection stands, before any completion can.
    pub(super) fn emit_established(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        (ird, ord): (u16, u16),
        private_data: Vec<u8>,
    ) {
        let Some(addresses) = self.addresses else { return };
        self.announced = true;
        let event = Event::Established {
            qp: core.id,
            context: core.shared.context.load(Relaxed),
            addresses,
            ird,
            ord,
            private_data,
            revision: self.revision,
        };
        engine.emit(core.session, event);
    }

    /// Tells the owner of a QP in Error how its stream ended, once.
    pub(super) fn emit_disconnected(&mut self, core: &QpCore, engine: &mut EngineState) {
        self.set_deadline(core, engine, None);
        let context = core.shared.context.load(Relaxed);
        if std::mem::take(&mut self.announced) {
            let reason = self.end.clone().unwrap_or(DisconnectReason::Orderly);
            //= RDMAP-7.1-1
            engine.emit(core.session, Event::Disconnected { qp: core.id, context, reason });
        } else if let Some(end) = &self.end
            && self.addresses.is_some()
        {
            // Accepted, but the first FPDU never came.
            let reason = match end {
                DisconnectReason::Lost { why } => why.clone(),
                DisconnectReason::Terminate { code, .. } => format!("terminated: {code}"),
                DisconnectReason::Aborted => "ended by this side".to_owned(),
                DisconnectReason::Orderly => "closed".to_owned(),
            };
            let errno = CONNECTION_RESET;
            let event = Event::Unreachable { qp: core.id, context, errno, reason };
            engine.emit(core.session, event);
        }
        self.addresses = None;
    }

    // --- Records -----------------------------------------------------------------------------

    /// The stream has ended before, by what this record says.
    pub(super) fn ended_before(&mut self, diagnosis: u64) {
        self.diagnosis = diagnosis;
    }

    /// A request or receive fails, and with it the stream: the number for its completion.
    pub(super) fn record_failure(
        &mut self,
        core: &QpCore,
        engine: &EngineState,
        wr_id: u64,
        reason: Reason,
    ) -> u64 {
        let id = self.record_lone_failure(core, engine, wr_id, reason);
        self.first(id)
    }

    /// A request fails, and the stream goes on: the number for its completion.
    pub(super) fn record_lone_failure(
        &self,
        core: &QpCore,
        engine: &EngineState,
        wr_id: u64,
        reason: Reason,
    ) -> u64 {
        let what = DiagnosisKind::Completion { wr_id, status: reason.status() };
        let words = reason.explain(&core.principal(), &engine.stags);
        self.record(core, engine, what, words)
    }

    /// A request fails and stops the send queue: the number for its completion, and for those of
    /// the requests that are flushed for it.
    pub(super) fn record_send_error(
        &mut self,
        core: &QpCore,
        engine: &EngineState,
        wr_id: u64,
        reason: Reason,
    ) -> u64 {
        self.send_error = self.record_lone_failure(core, engine, wr_id, reason);
        self.send_error
    }

    /// The send queue works again.
    pub(super) fn end_send_error(&mut self) {
        self.send_error = 0;
    }

    /// The stream ends by a Terminate of this side with this header.
    pub(super) fn record_terminate(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        code: TerminateCode,
        payload: &[u8],
        reason: Reason,
    ) {
        if self.diagnosis == 0 {
            let what = DiagnosisKind::Terminate { origin: TerminateOrigin::Local, code };
            let mut words = reason.explain(&core.principal(), &engine.stags);
            if matches!(reason, Reason::Segment) {
                words.rule = rule_of(code);
            }
            if words.stag.is_none()
                && words.length.is_none()
                && let Ok(t) = Terminate::parse(payload)
            {
                words = about(&t, words);
            }
            self.diagnosis = self.record(core, engine, what, words);
        }
        self.note(core, engine, "qp_terminated", &format!("sent Terminate {code}"));
    }

    /// The stream ends by a Terminate of the peer's, which may blame a request of this side.
    pub(super) fn record_peer_terminate(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        t: &Terminate<'_>,
        request: Option<u64>,
    ) {
        let code = t.code;
        let mut text = format!("the peer ended the stream with Terminate {code}");
        if let Some(wr_id) = request {
            text += &format!(", for this side's request {wr_id}");
        }
        if t.layout == Layout::Siw {
            text += ", written as Linux siw does";
        }
        let what = DiagnosisKind::Terminate { origin: TerminateOrigin::Peer, code };
        let words = about(t, Explanation::new(rule_of(code), text));
        let id = self.record(core, engine, what, words);
        self.first(id);
        self.note(core, engine, "qp_terminated", &format!("received Terminate {code}"));
    }

    /// Nobody has acknowledged a request: the number for its completion.
    pub(super) fn record_silence(
        &mut self,
        core: &QpCore,
        engine: &EngineState,
        wr_id: u64,
        why: &str,
    ) -> u64 {
        let status = CompletionStatus::TransportRetryExceeded;
        let what = DiagnosisKind::Completion { wr_id, status };
        let words = Explanation::new(SILENCE, format!("nobody acknowledged the request: {why}"));
        let id = self.record(core, engine, what, words);
        self.first(id)
    }

    /// The connection is lost.
    pub(super) fn record_loss(&mut self, core: &QpCore, engine: &mut EngineState, why: &str) {
        if self.diagnosis == 0 {
            self.diagnosis =
                self.record(core, engine, DiagnosisKind::Lost, Explanation::new(LOST, why));
            self.note(core, engine, "connection_lost", why);
        }
    }

    /// The number for a flushed request: the reason of the end, or a record of how else the stream
    /// came to it.
    pub(super) fn flush_record(&mut self, core: &QpCore, engine: &EngineState, wr_id: u64) -> u64 {
        if self.diagnosis != 0 {
            return self.diagnosis;
        }
        if self.send_error != 0 && !self.phase.flushes() {
            return self.send_error;
        }
        if self.flush_diagnosis == 0 {
            let text = match (&self.end, self.phase) {
                _ if core.has_dead_cq() => "a completion queue of the queue pair is dead",
                (Some(DisconnectReason::Aborted), _) => {
                    "this side ended the connection at once, or moved the queue pair to Error"
                }
                (Some(_), StreamPhase::Ended) => "the connection was closed in order",
                (None, StreamPhase::Ended) => "the queue pair is in Error and not connected",
                _ if self.peer_fin => "the peer has finished sending (FIN): no more Sends come",
                _ => "the connection is being closed",
            };
            let status = CompletionStatus::WrFlush;
            let what = DiagnosisKind::Completion { wr_id, status };
            self.flush_diagnosis = self.put_aside(core, engine, what, FLUSHED, text);
        }
        self.flush_diagnosis
    }

    /// The QP is destroyed while connected; its peer is told by a Terminate.
    pub(super) fn record_destruction(&self, core: &QpCore, engine: &EngineState) {
        let code = codes::RDMA_LOCAL_CATASTROPHIC;
        let what = DiagnosisKind::Terminate { origin: TerminateOrigin::Local, code };
        let text = "the queue pair was destroyed, or its session ended, while it was connected";
        self.put_aside(core, engine, what, &rule_of(code), text);
    }

    /// A datagram was dropped, the first one of its kind.
    pub(super) fn record_drop(&self, core: &QpCore, engine: &EngineState, text: &str) {
        self.put_aside(core, engine, DiagnosisKind::Dropped, DATAGRAMS, text);
    }

    /// The first record of a QP is the reason of its end.
    fn first(&mut self, id: u64) -> u64 {
        if self.diagnosis == 0 {
            self.diagnosis = id;
        }
        id
    }

    /// Keeps a record and returns its number.
    fn record(
        &self,
        core: &QpCore,
        engine: &EngineState,
        what: DiagnosisKind,
        explanation: Explanation,
    ) -> u64 {
        let Explanation { rule, text, stag, offset, length } = explanation;
        let why = Diagnosis {
            qp: Some(core.id),
            pd: Some(core.pd),
            stag,
            offset,
            length,
            addresses: self.addresses,
            ..Diagnosis::new(core.session, what, rule, text)
        };
        engine.options.diagnoses.record(engine.now, why)
    }

    /// Keeps a record of what this side brought about itself, where it displaces no fault.
    fn put_aside(
        &self,
        core: &QpCore,
        engine: &EngineState,
        what: DiagnosisKind,
        rule: &str,
        text: &str,
    ) -> u64 {
        let why = Diagnosis {
            qp: Some(core.id),
            pd: Some(core.pd),
            addresses: self.addresses,
            ..Diagnosis::new(core.session, what, rule, text)
        };
        engine.options.diagnoses.record_routine(engine.now, why)
    }

    /// Tells whoever watches the daemon.
    fn note(&self, core: &QpCore, engine: &mut EngineState, kind: &'static str, text: &str) {
        let text = format!("QP {}: {text} (why {})", core.id, self.diagnosis);
        engine.report(Notification::Note { session: core.session, kind, text });
    }
}
